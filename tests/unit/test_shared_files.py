"""Files that a trainer hands to the workers of engines on its host, which map them."""

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.waiting import happens
from torch import Tensor

from trl_lora_sync.engine_plugins import shared_files
from trl_lora_sync.engine_plugins.copied_ahead import Progress, Source
from trl_lora_sync.engine_plugins.pinned_memory import PinError
from trl_lora_sync.engine_plugins.shared_files import SOCKET, MappedFiles, SharedFiles, key_of
from trl_lora_sync.runtime import watch

CPU = torch.device("cpu")


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[SharedFiles]:
    shared = SharedFiles(tmp_path, watch)
    yield shared
    shared.close()


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


def test_a_later_trainer_in_the_same_place_is_another_one(tmp_path: Path) -> None:
    files = MappedFiles(CPU)
    for content in (b"one", b"two"):
        shared = SharedFiles(tmp_path, watch)
        file = file_of(tmp_path, "file", content)
        shared.offer(file)
        assert happens(lambda file=file, content=content: seen(files, file, tmp_path) == content)  # type: ignore[misc]
        shared.close()
        (tmp_path / SOCKET).unlink()


def test_a_path_longer_than_the_kernel_takes_is_no_hindrance(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    shared = SharedFiles(folder, watch)
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


# Copied before it is requested


def copied(files: MappedFiles, file: int, folder: Path, size: int = 6) -> bytes | None:
    with files.copied_ahead(Source(file=key_of(file)), size, folder / SOCKET) as found:
        return None if found is None else bytes(found.tolist())


@pytest.fixture
def ahead(shared: SharedFiles, tmp_path: Path) -> tuple[MappedFiles, int]:
    """A worker that copies ahead, and a file that it has mapped; its tensors are the six bytes after the first two."""
    file = file_of(tmp_path, "1", b"..abcdef")
    shared.offer(file)
    files = MappedFiles(CPU, copies_ahead=True)
    assert seen(files, file, tmp_path) == b"..abcdef"
    return files, file


def test_what_is_written_is_copied_in_parts(
    shared: SharedFiles, ahead: tuple[MappedFiles, int], tmp_path: Path
) -> None:
    files, file = ahead
    assert copied(files, file, tmp_path) is None
    for version in (b"abcdef", b"ghijkl"):
        os.pwrite(file, version[:4], 2)
        shared.report(Progress(Source(file=key_of(file)), 2, 4, 6))
        os.pwrite(file, version[4:], 6)
        shared.report(Progress(Source(file=key_of(file)), 2, 6, 6))
        assert happens(lambda version=version: copied(files, file, tmp_path) == version)
    os.pwrite(file, b"later", 2)
    assert copied(files, file, tmp_path) == b"ghijkl"
    assert copied(files, file, tmp_path, size=5) is None


def test_a_version_of_which_parts_are_missing_is_waited_for_and_not_used(
    shared: SharedFiles, ahead: tuple[MappedFiles, int], tmp_path: Path
) -> None:
    files, file = ahead
    shared.report(Progress(Source(file=key_of(file)), 2, 6, 6))
    assert happens(lambda: copied(files, file, tmp_path) == b"abcdef")
    shared.report(Progress(Source(file=key_of(file)), 2, 3, 6))
    assert happens(lambda: copied(files, file, tmp_path) is None)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(copied, files, file, tmp_path)
        shared.report(Progress(Source(file=key_of(file)), 2, 6, 6))
        assert waiting.result() == b"abcdef"


def test_another_source_is_not_taken_for_the_one_that_was_copied(
    shared: SharedFiles, ahead: tuple[MappedFiles, int], tmp_path: Path
) -> None:
    files, file = ahead
    shared.report(Progress(Source(file=key_of(file)), 2, 6, 6))
    assert happens(lambda: copied(files, file, tmp_path) == b"abcdef")
    other = file_of(tmp_path, "2", b"..ABCDEF")
    assert copied(files, other, tmp_path) is None
    shared.report(Progress(Source(memory=7), 0, 6, 6))  # which was not offered
    shared.report(Progress(Source(file=key_of(other)), 2, 6, 6))  # neither
    assert copied(files, file, tmp_path) == b"abcdef"
    shared.offer(other)
    shared.report(Progress(Source(file=key_of(other)), 2, 6, 6))
    assert happens(lambda: copied(files, other, tmp_path) == b"ABCDEF")
    assert copied(files, file, tmp_path) is None


@pytest.mark.parametrize("message", [b"", b"[1]", b"[0, 1, 2, 0, 9, 6]", b"[0, 1, 2, 0, 0, 6]", b'"?"'])
def test_progress_of_another_form_is_ignored(message: bytes) -> None:
    with pytest.raises((ValueError, TypeError)):
        Progress.decode(message)


def test_without_memory_for_it_a_version_is_copied_when_it_is_requested(
    shared: SharedFiles,
    ahead: tuple[MappedFiles, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    files, file = ahead

    def out_of_memory(target: Tensor, source: Tensor) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(shared_files, "copy_to_device", out_of_memory)
    caplog.set_level("INFO")
    shared.report(Progress(Source(file=key_of(file)), 2, 6, 6))
    assert happens(lambda: "CUDA out of memory" in caplog.text)
    shared.report(Progress(Source(file=key_of(file)), 2, 6, 6))
    assert copied(files, file, tmp_path) is None
    assert seen(files, file, tmp_path) == b"..abcdef"
    assert caplog.text.count("CUDA out of memory") == 1


def test_nothing_is_copied_ahead_on_a_cpu_by_default(shared: SharedFiles, tmp_path: Path) -> None:
    file = file_of(tmp_path, "1", b"..abcdef")
    shared.offer(file)
    files = MappedFiles(CPU)
    assert seen(files, file, tmp_path)
    shared.report(Progress(Source(file=key_of(file)), 2, 6, 6))
    shared.offer(other := file_of(tmp_path, "2", b"two"))  # heard after it
    assert happens(lambda: seen(files, other, tmp_path) == b"two")
    assert copied(files, file, tmp_path) is None
