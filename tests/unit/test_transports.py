"""The transports on a file system that hangs, and where a version cannot be kept."""

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from trl_lora_sync.adapter.canonical import CanonicalAdapter, LoRAModule
from trl_lora_sync.adapter.flat import FlatBuffer
from trl_lora_sync.adapter.store import AdapterStore
from trl_lora_sync.engines.base import Deadline, Timeouts
from trl_lora_sync.errors import AdapterExportError, DeadlineExceededError
from trl_lora_sync.runtime import Blocking, offload, run
from trl_lora_sync.servers.transports import DiskAndHTTPTransport, DiskTransport, HTTPTransport


def adapter() -> CanonicalAdapter:
    module = LoRAModule(name="model.layers.0.q_proj", lora_A=torch.ones(2, 8), lora_B=torch.ones(8, 2), scaling=1.0)
    return FlatBuffer().export([module], dtype=torch.float32)


def soon(seconds: float = 20.0) -> Deadline:
    return Deadline.after(seconds, "The adapter sync (lora_sync_timeout)")


class Hang:
    """Makes `AdapterStore.write` hang until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.let_go = threading.Event(), threading.Event()
        real = AdapterStore.write

        def write(store: AdapterStore, *args: object) -> object:
            self.reached.set()
            assert self.let_go.wait(60)
            return real(store, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(AdapterStore, "write", write)


@pytest.fixture
def transport(tmp_path: Path) -> Iterator[Blocking]:
    made = Blocking(DiskTransport(AdapterStore(tmp_path / "sync")))
    yield made
    made.close()


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch, transport: Blocking) -> Iterator[Hang]:
    hang = Hang(monkeypatch)
    yield hang
    hang.let_go.set()


def test_a_file_system_that_hangs_ends_the_sync_at_its_deadline(transport: Blocking, hang: Hang) -> None:
    """A write to a network file system whose server was gone held up the sync for as long as it was gone."""
    started = time.monotonic()

    with pytest.raises(DeadlineExceededError, match=r"lora_sync_timeout.*file system of .* hangs.*Set lora_sync_dir"):
        transport.write(1, adapter(), soon(0.3))

    assert 0.3 <= time.monotonic() - started < 10
    assert hang.reached.is_set()


def test_a_sweep_that_takes_too_long_is_no_matter_of_the_file_system(tmp_path: Path) -> None:
    """The error blamed the file system, while a server was slow to unload what dead runs had left."""
    dead = AdapterStore(tmp_path / "sync")
    dead.write(1, adapter())
    assert dead.lock is not None
    os.close(dead.lock)  # as the kernel does for a process that is killed
    transport, may_end = Blocking(DiskTransport(AdapterStore(tmp_path / "sync"))), threading.Event()
    try:
        with pytest.raises(DeadlineExceededError, match=r"adapters of earlier runs.*trl-lora-sync sweep URL --dir /"):
            transport.sweep(lambda name: may_end.wait(30), lambda url: True, soon(0.3))
    finally:
        may_end.set()
        transport.close()


def test_what_is_written_too_late_is_deleted_again(transport: Blocking, hang: Hang) -> None:
    with pytest.raises(DeadlineExceededError):
        transport.write(1, adapter(), soon(0.2))
    with pytest.raises(DeadlineExceededError):  # waits behind the first and is never begun
        transport.write(2, adapter(), soon(0.2))

    hang.let_go.set()
    third = transport.write(3, adapter(), soon())

    assert third.path is not None
    assert sorted(path.name for path in transport.store.directory.iterdir()) == [third.path.name, "owner.json"]


def test_a_write_that_is_cancelled_as_it_ends_is_deleted_in_the_file_thread(
    transport: Blocking, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was deleted on the event loop, beside what the file thread did, and a file system that hung held up both."""
    deleting: list[str] = []
    delete = AdapterStore.delete

    def note(store: AdapterStore, *args: Any, **kwargs: Any) -> None:
        deleting.append(threading.current_thread().name)
        delete(store, *args, **kwargs)

    monkeypatch.setattr(AdapterStore, "delete", note)

    async def cancel_as_it_ends() -> None:
        writing = asyncio.ensure_future(transport.wrapped.write(1, adapter(), soon()))
        await offload(hang.reached.wait)
        hang.let_go.set()
        # The loop sees the end of the write and the cancellation in one turn.
        time.sleep(0.5)
        writing.cancel()
        await asyncio.wait({writing})
        assert writing.cancelled()
        await transport.wrapped.finish(soon())

    run(cancel_as_it_ends())
    assert deleting == ["lora-sync-files"]
    assert [path.name for path in transport.store.directory.iterdir()] == ["owner.json"]


def test_deleting_and_closing_do_not_wait_for_a_file_system_that_hangs(tmp_path: Path, hang: Hang) -> None:
    transport = Blocking(DiskTransport(AdapterStore(tmp_path / "sync"), timeouts=Timeouts(close_s=0.1)))
    with pytest.raises(DeadlineExceededError):
        transport.write(1, adapter(), soon(0.2))
    started = time.monotonic()

    transport.close()

    assert time.monotonic() - started < 10
    hang.let_go.set()
    transport.open(soon())  # comes after the close, which has been made good
    assert [path.name for path in transport.store.directory.iterdir()] == ["owner.json"]


def test_errors_of_a_write_are_those_of_the_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(AdapterExportError, match="cannot be created"):
        run(DiskTransport(AdapterStore(tmp_path / "file" / "sync")).open(soon()))


@pytest.mark.parametrize("kind", [DiskAndHTTPTransport, HTTPTransport])
def test_a_version_that_cannot_be_copied_to_the_host_leaves_no_folder(
    kind: type[DiskTransport], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder was made before the copy, and nothing deleted it when the copy failed."""

    def fail(adapter: CanonicalAdapter) -> None:
        raise MemoryError("no room for the copy")

    monkeypatch.setattr(CanonicalAdapter, "on_host", fail)
    transport = Blocking(kind(AdapterStore(tmp_path / "sync")))
    transport.open(soon())
    with pytest.raises(MemoryError):
        transport.write(1, adapter(), soon())
    assert [path.name for path in transport.store.directory.iterdir()] == ["owner.json"]
    transport.close()
