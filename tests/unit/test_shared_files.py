"""Files that a trainer hands to the workers of engines on its host, which map them."""

import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.waiting import happens
from torch import Tensor

from trl_lora_sync.engine_plugins import shared_files
from trl_lora_sync.engine_plugins.pinned_memory import PinError
from trl_lora_sync.engine_plugins.shared_files import SOCKET, MappedFiles, SharedFiles
from trl_lora_sync.runtime import watch

CPU = torch.device("cpu")


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[SharedFiles]:
    shared = SharedFiles(tmp_path, watch, unlocked)
    yield shared
    shared.close()


def unlocked(memory: Tensor) -> Callable[[], None]:
    return lambda: None


def file_of(folder: Path, name: str, content: bytes) -> int:
    (folder / name).write_bytes(content)
    return os.open(folder / name, os.O_RDWR)


def seen(files: MappedFiles, file: int, folder: Path) -> bytes | None:
    with files.mapped(file, folder / SOCKET) as found:
        return None if found is None else bytes(found.tolist())


def test_a_worker_sees_what_the_trainer_writes_later(shared: SharedFiles, tmp_path: Path) -> None:
    first, second = file_of(tmp_path, "1", b"one"), file_of(tmp_path, "2", b"two")
    shared.offer(first)
    files = MappedFiles(CPU)
    assert seen(files, first, tmp_path) == b"one"
    os.pwrite(first, b"ONE", 0)
    assert seen(files, first, tmp_path) == b"ONE"
    shared.offer(second)  # to a worker that is connected
    assert happens(lambda: seen(files, second, tmp_path) == b"two")


def test_only_files_that_are_offered_are_mapped(shared: SharedFiles, tmp_path: Path) -> None:
    file = file_of(tmp_path, "1", b"one")
    files = MappedFiles(CPU)
    assert seen(files, file, tmp_path) is None
    shared.offer(file)
    assert happens(lambda: seen(files, file, tmp_path) == b"one")
    shared.withdraw(file)
    assert happens(lambda: seen(files, file, tmp_path) is None)
    shared.withdraw(file)


def test_nothing_is_held_once_the_trainer_is_gone(shared: SharedFiles, tmp_path: Path) -> None:
    file = file_of(tmp_path, "1", b"one" * 1000)
    shared.offer(file)
    files = MappedFiles(CPU)
    assert seen(files, file, tmp_path)
    assert str(tmp_path / "1") in Path("/proc/self/maps").read_text()
    shared.close()
    assert happens(lambda: str(tmp_path / "1") not in Path("/proc/self/maps").read_text())
    assert seen(files, file, tmp_path) is None


@pytest.mark.outside
def test_nothing_is_held_once_the_trainer_is_killed_although_a_process_that_it_forked_lives_on(tmp_path: Path) -> None:
    """Workers of a pool or of a data loader outlive a trainer that is killed, and held its connections."""
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)
    go_on = multiprocessing.get_context("fork").Event()

    def run() -> None:
        shared = SharedFiles(tmp_path, watch, unlocked)
        shared.offer(file_of(tmp_path, "1", b"one" * 1000))
        sender.send(None)
        go_on.wait(30)
        worker = os.fork()
        if worker == 0:
            signal.pause()
        sender.send(worker)
        signal.pause()

    trainer = multiprocessing.get_context("fork").Process(target=run)
    trainer.start()
    try:
        assert receiver.poll(30)
        receiver.recv()
        files = MappedFiles(CPU)
        file = os.open(tmp_path / "1", os.O_RDWR)
        assert seen(files, file, tmp_path)
        go_on.set()
        assert receiver.poll(30)
        worker = receiver.recv()
        assert seen(files, file, tmp_path), "the worker closed the connection of its live parent"
    finally:
        trainer.kill()
        # Without a limit of time: the worker holds what such a wait looks at, and would be outlived (Python 3.11).
        trainer.join()
    try:
        assert happens(lambda: str(tmp_path / "1") not in Path("/proc/self/maps").read_text())
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as late, pytest.raises(ConnectionRefusedError):
            late.connect(str(tmp_path / SOCKET))
    finally:
        os.kill(worker, signal.SIGKILL)


@pytest.mark.outside
def test_a_forked_process_keeps_a_file_whose_number_was_that_of_a_connection(tmp_path: Path) -> None:
    shared = SharedFiles(tmp_path, watch, unlocked)
    shared.offer(file_of(tmp_path, "1", b"one"))
    assert seen(MappedFiles(CPU), os.open(tmp_path / "1", os.O_RDWR), tmp_path)
    [worker] = shared.workers
    number = worker.fileno()
    shared.workers.clear()
    del worker  # which closes it
    file = os.open(tmp_path / "1", os.O_RDONLY)
    os.dup2(file, number)

    def read() -> None:
        assert os.pread(number, 3, 0) == b"one"

    child = multiprocessing.get_context("fork").Process(target=read)
    child.start()
    child.join(30)
    os.close(number)
    shared.close()
    assert child.exitcode == 0


def test_a_later_trainer_in_the_same_place_is_another_one(tmp_path: Path) -> None:
    files = MappedFiles(CPU)
    for content in (b"one", b"two"):
        shared = SharedFiles(tmp_path, watch, unlocked)
        file = file_of(tmp_path, "file", content)
        shared.offer(file)
        assert happens(lambda file=file, content=content: seen(files, file, tmp_path) == content)  # type: ignore[misc]
        shared.close()
        (tmp_path / SOCKET).unlink()


def test_a_path_longer_than_the_kernel_takes_is_no_hindrance(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    shared = SharedFiles(folder, watch, unlocked)
    file = file_of(folder, "1", b"one")
    shared.offer(file)
    assert seen(MappedFiles(CPU), file, folder) == b"one"
    shared.close()


def test_where_nobody_listens_files_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = file_of(tmp_path, "1", b"one")
    files = MappedFiles(CPU)
    assert seen(files, file, tmp_path) is None
    assert not caplog.messages
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    dead.bind(str(tmp_path / SOCKET))
    dead.close()
    assert seen(files, file, tmp_path) is None
    assert "are read instead of mapped" in caplog.text


def test_another_user_gets_and_gives_nothing(
    shared: SharedFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = file_of(tmp_path, "1", b"one")
    shared.offer(file)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert seen(MappedFiles(CPU), file, tmp_path) is None
    assert "it belongs to another user" in caplog.text
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.settimeout(20)
        stranger.connect(str(tmp_path / SOCKET))
        assert socket.recv_fds(stranger, 64, 1)[:2] == (b"", [])


def test_memory_that_cannot_be_locked_is_read_instead(
    shared: SharedFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(memory: Tensor, device: torch.device) -> Callable[[], None]:
        raise PinError("cudaHostRegister: out of memory")

    monkeypatch.setattr(shared_files, "pin", refuse)
    file = file_of(tmp_path, "1", b"one")
    shared.offer(file)
    assert seen(MappedFiles(CPU), file, tmp_path) is None
    assert "cudaHostRegister: out of memory" in caplog.text
