"""Slots in shared memory: versions keep their promises, although their memory is used again."""

import contextlib
import fcntl
import hashlib
import json
import logging
import multiprocessing
import os
import resource
import shutil
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from support.folders import tmpfs
from support.settings import plain_settings
from support.shared_memory import reader_of, shared_folder
from torch import Tensor

from trl_lora_sync.adapter import pinned_files
from trl_lora_sync.adapter.canonical import CanonicalAdapter, LoRAModule
from trl_lora_sync.adapter.flat import FlatBuffer
from trl_lora_sync.adapter.pinned_files import PinnedFilePool, is_in_memory
from trl_lora_sync.adapter.store import AdapterStore, StoredAdapter, sweep_leftovers, write_adapter
from trl_lora_sync.engine_plugins.pinned_memory import PinError
from trl_lora_sync.engine_plugins.version_note import NOTE_FORM, NOTE_KEY
from trl_lora_sync.errors import AdapterExportError, VerificationError
from trl_lora_sync.servers.transports import DiskTransport, transport_for
from unit.tiny import everything_under, lora_module

TENSORS, CONFIG, NOTE = "adapter_model.safetensors", "adapter_config.json", "lora_sync.json"
SOCKETS = ["files", "reservations"]  # of workers of engines
KEEP = 2
PROGRESS = 1  # the page with the number of parts that are complete is locked too


class Locks:
    """Stands for the GPU's driver: which memory is page-locked, and how often locking was requested."""

    def __init__(self) -> None:
        self.asked = 0
        self.held: set[int] = set()

    def __call__(self, memory: Tensor, device: torch.device) -> Callable[[], None]:
        self.asked += 1
        address = memory.data_ptr()
        assert address % os.sysconf("SC_PAGESIZE") == 0
        self.held.add(address)
        return lambda: self.held.remove(address)


@pytest.fixture
def folder() -> Iterator[Path]:
    with shared_folder() as folder:
        yield folder


@pytest.fixture
def locks() -> Locks:
    return Locks()


@pytest.fixture
def pool(locks: Locks) -> PinnedFilePool:
    return PinnedFilePool(locks)


@pytest.fixture
def store(folder: Path, pool: PinnedFilePool) -> Iterator[AdapterStore]:
    store = AdapterStore(folder / "root", pinned=pool)
    yield store
    store.close()


BUFFER = FlatBuffer()


def modules_of(seed: int, *, rank: int = 2, layers: int = 3) -> list[LoRAModule]:
    return [lora_module(f"model.layers.{layer}.q_proj", rank=rank, seed=100 * seed + layer) for layer in range(layers)]


def flat(seed: int = 1, *, rank: int = 2, layers: int = 3) -> CanonicalAdapter:
    """As the trainer exports it from a GPU; overwritten by the next."""
    return BUFFER.export(modules_of(seed, rank=rank, layers=layers), dtype=torch.bfloat16, base_model="org/base")


def big_flat(payload_bytes: int) -> CanonicalAdapter:
    width = payload_bytes // (2 * 4 * 2)
    module = LoRAModule(name="layer", lora_A=torch.ones(2, width), lora_B=torch.ones(width, 2), scaling=1.0)
    return FlatBuffer().export([module], dtype=torch.float32)


def portable(folder: Path, seed: int, **shape: int) -> Path:
    directory = folder / f"portable-{seed}"
    adapter = FlatBuffer().export(modules_of(seed, **shape), dtype=torch.bfloat16, base_model="org/base")
    write_adapter(directory, adapter, private=True)
    return directory


def tensors_of(stored: StoredAdapter) -> Path:
    assert stored.path is not None
    return stored.path / TENSORS


def inode(stored: StoredAdapter) -> int:
    return tensors_of(stored).stat().st_ino


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def sync(store: AdapterStore, live: list[StoredAdapter], seed: int, **shape: int) -> StoredAdapter:
    """One sync as `AdapterSync` does it: write, delete what was retired one version ago, get ready for the next."""
    stored = store.write(seed, flat(seed, **shape))
    live.append(stored)
    while len(live) > KEEP + 1:
        store.delete(live.pop(0))
    store.prepare()
    return stored


# The file


def test_version_in_a_pinned_file_is_byte_for_byte_the_portable_one(
    store: AdapterStore, pool: PinnedFilePool, folder: Path
) -> None:
    stored, expected = store.write(1, flat(1)), portable(folder, 1)
    assert stored.path is not None
    assert pool.held_bytes == tensors_of(stored).stat().st_size > 0
    assert everything_under(stored.path) == [CONFIG, TENSORS, NOTE]
    assert (stored.path / TENSORS).read_bytes() == (expected / TENSORS).read_bytes()
    config = json.loads((expected / CONFIG).read_text())
    assert json.loads((stored.path / CONFIG).read_text()) == config | {NOTE_KEY: NOTE_FORM}
    for name in (CONFIG, TENSORS):
        assert (stored.path / name).stat().st_mode == (expected / name).stat().st_mode
    assert stored.path.stat().st_mode == expected.stat().st_mode
    assert {stat.S_IMODE(path.stat().st_mode) for path in store.directory.rglob("*") if path.is_dir()} == {0o700}


def test_every_version_written_into_used_files_is_byte_for_byte_the_portable_one(
    store: AdapterStore, folder: Path
) -> None:
    live: list[StoredAdapter] = []
    for seed in range(1, 13):
        stored = sync(store, live, seed)
        assert tensors_of(stored).read_bytes() == (portable(folder, seed) / TENSORS).read_bytes()


def test_file_that_is_written_through_memory_looks_changed(store: AdapterStore) -> None:
    """A cache between trainer and server, such as that of a virtual machine, goes by this time."""
    live: list[StoredAdapter] = []
    times: dict[int, list[int]] = {}
    for seed in range(1, 10):
        stored = sync(store, live, seed)
        times.setdefault(inode(stored), []).append(tensors_of(stored).stat().st_mtime_ns)
    assert any(len(seen) > 1 for seen in times.values())
    for seen in times.values():
        assert sorted(set(seen)) == seen


# The pool


def test_pool_has_two_files_more_than_versions_stay_and_locks_each_once(
    store: AdapterStore, pool: PinnedFilePool, locks: Locks
) -> None:
    live: list[StoredAdapter] = []
    seen: list[int] = []
    for seed in range(1, 21):
        stored = sync(store, live, seed)
        assert inode(stored) not in [inode(other) for other in live[:-1]]
        seen.append(inode(stored))
        assert pool.held_bytes <= (KEEP + 2) * tensors_of(stored).stat().st_size
    assert len(set(seen)) == KEEP + 2
    assert locks.asked == KEEP + 2 + PROGRESS
    assert len(locks.held) == KEEP + 2 + PROGRESS


def test_no_version_after_the_first_waits_for_memory_to_be_locked(store: AdapterStore, locks: Locks) -> None:
    live: list[StoredAdapter] = []
    sync(store, live, 1)
    for seed in range(2, 21):
        asked = locks.asked
        live.append(store.write(seed, flat(seed)))
        assert locks.asked == asked
        if len(live) > KEEP + 1:
            store.delete(live.pop(0))
        store.prepare()


def test_nothing_is_prepared_before_the_first_version_or_after_the_end(
    store: AdapterStore, pool: PinnedFilePool, locks: Locks, folder: Path
) -> None:
    store.prepare()
    store.open()
    store.prepare()
    assert locks.asked == 0
    sync(store, [], 1)
    assert locks.asked == 2 + PROGRESS
    store.close()
    store.prepare()
    assert locks.asked == 2 + PROGRESS
    assert pool.held_bytes == 0
    assert everything_under(folder) == []


def test_versions_that_are_not_retired_keep_their_content(store: AdapterStore) -> None:
    live: list[StoredAdapter] = []
    content: dict[str, str] = {}
    for seed in range(1, 21):
        stored = sync(store, live, seed)
        content[stored.name] = sha256(tensors_of(stored))
        assert [sha256(tensors_of(other)) for other in live] == [content[other.name] for other in live]
    assert len(set(content.values())) == 20


@pytest.mark.outside
def test_pinned_file_that_another_process_has_mapped_is_never_written_again(
    store: AdapterStore, pool: PinnedFilePool
) -> None:
    """An engine without page-locked memory keeps an adapter as views of its file, long after the unload request."""
    live: list[StoredAdapter] = []
    first = sync(store, live, 1)
    content, number, size = sha256(tensors_of(first)), inode(first), tensors_of(first).stat().st_size
    with reader_of(tensors_of(first)) as reader:
        later = [inode(sync(store, live, seed)) for seed in range(2, 15)]
        assert reader.sha256() == content
        assert number not in later
        assert pool.held_bytes <= (KEEP + 2) * size
    assert len(set(later)) == KEEP + 2  # the file that was given up is replaced once


def test_pinned_file_that_this_process_has_open_is_never_written_again(store: AdapterStore) -> None:
    live: list[StoredAdapter] = []
    first = sync(store, live, 1)
    tensors = load_file(tensors_of(first))
    kept = {key: tensor.clone() for key, tensor in tensors.items()}
    for seed in range(2, 15):
        sync(store, live, seed)
    assert all(torch.equal(tensor, kept[key]) for key, tensor in tensors.items())


def test_pinned_file_with_a_second_path_is_never_written_again(store: AdapterStore, folder: Path) -> None:
    """A user keeps a version by a hard link, as `cp --link` and some backups do."""
    live: list[StoredAdapter] = []
    first = sync(store, live, 1)
    kept, content = folder / "kept", sha256(tensors_of(first))
    kept.hardlink_to(tensors_of(first))
    for seed in range(2, 15):
        sync(store, live, seed)
    assert sha256(kept) == content


@pytest.mark.outside
def test_pinned_file_is_used_again_once_its_reader_has_gone(store: AdapterStore) -> None:
    first = store.write(1, flat(1))
    number = inode(first)
    with reader_of(tensors_of(first)):
        store.delete(first)
    assert inode(store.write(2, flat(2))) == number


def test_no_path_leads_to_a_retired_version(store: AdapterStore) -> None:
    first = store.write(1, flat(1))
    store.delete(first)
    assert first.path is not None
    assert not first.path.exists()
    assert list(store.directory.glob("*-v*")) == []


def test_pinned_files_are_not_used_again_where_the_kernel_cannot_tell_who_reads(
    store: AdapterStore, pool: PinnedFilePool, locks: Locks, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.fcntl

    def without_leases(file: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETLEASE:
            raise OSError(22, "Invalid argument")
        return real(file, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", without_leases)
    live: list[StoredAdapter] = []
    for seed in range(1, 8):
        size = tensors_of(sync(store, live, seed)).stat().st_size
    assert locks.asked == 7 + 1 + PROGRESS  # and the one for the next version
    assert pool.held_bytes <= (KEEP + 2) * size


def test_adapter_of_another_size_gets_pinned_files_of_its_own(
    store: AdapterStore, pool: PinnedFilePool, folder: Path
) -> None:
    live: list[StoredAdapter] = []
    for seed in range(1, 6):
        sync(store, live, seed)
    for seed in range(6, 16):
        stored = sync(store, live, seed, rank=5)
        assert tensors_of(stored).read_bytes() == (portable(folder, seed, rank=5) / TENSORS).read_bytes()
    assert pool.held_bytes == (KEEP + 2) * tensors_of(stored).stat().st_size


def test_version_whose_files_somebody_replaced_takes_no_foreign_file_into_the_pool(
    store: AdapterStore, pool: PinnedFilePool
) -> None:
    first = store.write(1, flat(1))
    file = tensors_of(first)
    file.rename(file.with_suffix(".aside"))
    file.write_bytes(b"not ours")
    store.delete(first)
    assert pool.held_bytes == 0
    assert first.path is not None
    assert not first.path.exists()


def test_version_whose_folder_somebody_deleted_is_no_error(store: AdapterStore, pool: PinnedFilePool) -> None:
    first = store.write(1, flat(1))
    tensors_of(first).unlink()
    store.delete(first)
    store.delete(first)
    assert pool.held_bytes == 0
    store.write(2, flat(2))


def test_close_gives_everything_back_and_may_be_followed_by_a_write(
    store: AdapterStore, pool: PinnedFilePool, locks: Locks, folder: Path
) -> None:
    live: list[StoredAdapter] = []
    for seed in range(1, 8):
        sync(store, live, seed)
    store.close()
    store.close()
    assert locks.held == set()
    assert pool.held_bytes == 0
    assert everything_under(folder) == []
    assert not [file.path for file in psutil.Process().open_files() if str(folder) in file.path]
    assert str(folder) not in Path("/proc/self/maps").read_text()
    assert tensors_of(store.write(8, flat(8))).exists()
    assert len(locks.held) == 1 + PROGRESS


def test_run_goes_on_after_something_else_has_deleted_its_folder(store: AdapterStore, locks: Locks) -> None:
    """The file that was made ahead of its use could not be moved into the next version, and the run ended."""
    live: list[StoredAdapter] = []
    sync(store, live, 1)
    shutil.rmtree(store.root)
    for seed in range(2, 9):
        assert tensors_of(sync(store, live, seed)).exists()
    assert len(locks.held) == KEEP + 2 + PROGRESS


# When a write fails


def failing(*_: object, **__: object) -> None:
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize(
    ("place", "name"), [(Path, "write_text"), (os, "fsync"), (os, "utime")], ids=["config", "fsync", "pinned"]
)
def test_write_that_fails_leaves_nothing_and_the_other_versions_whole(
    place: object, name: str, store: AdapterStore, pool: PinnedFilePool, locks: Locks, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = store.write(1, flat(1))
    content, size = sha256(tensors_of(first)), pool.held_bytes
    with monkeypatch.context() as patch:
        patch.setattr(place, name, failing)
        with pytest.raises(AdapterExportError, match="Input/output error"):
            store.write(2, flat(2))
    assert [path.name for path in store.directory.glob("*-v*")] == [first.name]
    assert list(store.directory.glob(".*.partial")) == []
    assert everything_under(store.directory / ".pinned") == SOCKETS
    assert sha256(tensors_of(first)) == content
    assert pool.held_bytes == size
    assert len(locks.held) == 1 + PROGRESS
    store.write(3, flat(3))


def test_rename_that_fails_leaves_nothing(
    store: AdapterStore, pool: PinnedFilePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.open()
    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if target.name.endswith("-v1"):
            raise OSError(5, "Input/output error")
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(AdapterExportError, match="Input/output error"):
        store.write(1, flat(1))
    assert everything_under(store.directory) == [".pinned", *[f".pinned/{name}" for name in SOCKETS], "owner.json"]
    assert pool.held_bytes == 0


@pytest.mark.outside
def test_full_shared_memory_is_an_error_and_kills_nobody(tmp_path: Path, locks: Locks) -> None:
    """Writing to a mapped file for which there is no room ends the process with SIGBUS."""
    with tmpfs(tmp_path / "small", "size=1m") as small:
        pool = PinnedFilePool(locks)
        store = AdapterStore(small / "root", pinned=pool)
        try:
            first = store.write(1, big_flat(400_000))
            second = store.write(2, big_flat(400_000))
            content = sha256(tensors_of(first))
            store.prepare()
            with pytest.raises(AdapterExportError, match=r"no room for the 0\.4 MB of the adapter.*set lora_sync_dir"):
                store.write(3, big_flat(400_000))
            assert sorted(path.name for path in store.directory.glob("*-v*")) == sorted([first.name, second.name])
            assert everything_under(store.directory / ".pinned") == SOCKETS
            assert sha256(tensors_of(first)) == content
            store.delete(first)
            third = store.write(4, big_flat(400_000))
            assert load_file(tensors_of(third))
            store.delete(second)
            store.write(5, big_flat(300_000))  # the files of the other size make way
        finally:
            store.close()
        assert everything_under(small) == []


@pytest.mark.outside
def test_memory_that_is_full_but_for_the_file_kills_nobody(tmp_path: Path, locks: Locks) -> None:
    """The page of the progress was not reserved, and its first use ended the process with SIGBUS."""
    size = 10 * os.sysconf("SC_PAGESIZE")

    def write() -> None:
        with tmpfs(tmp_path / "small", "size=1m") as small:
            store = AdapterStore(small / "root", pinned=PinnedFilePool(locks))
            store.open()
            with (small / "other").open("wb") as other:
                free = os.statvfs(small).f_bavail * os.statvfs(small).f_frsize
                os.posix_fallocate(other.fileno(), 0, free - size)
                with contextlib.suppress(AdapterExportError):
                    store.write(1, big_flat(size - 1000))
            store.close()

    child = multiprocessing.get_context("fork").Process(target=write)
    child.start()
    child.join(30)
    assert child.exitcode == 0


@pytest.mark.outside
def test_workers_map_files_again_once_there_is_room_for_the_progress(
    tmp_path: Path, locks: Locks, caplog: pytest.LogCaptureFixture
) -> None:
    """The socket of the first attempt was in the way of each later one, which warned of an address in use."""
    with tmpfs(tmp_path / "small", "size=1m") as small:
        store = AdapterStore(small / "root", pinned=PinnedFilePool(locks))
        store.open()
        with (small / "other").open("wb") as other:
            free = os.statvfs(small).f_bavail * os.statvfs(small).f_frsize
            os.posix_fallocate(other.fileno(), 0, free)
            for _ in range(2):
                with pytest.raises(AdapterExportError, match="no room"):
                    store.write(1, flat(1))
        assert caplog.text.count("No space left on device") == 2
        (small / "other").unlink()
        note = tensors_of(store.write(2, flat(2))).parent / NOTE
        assert f".pinned/{SOCKETS[0]}" in note.read_text()
        store.close()


def test_file_size_limit_is_an_error_and_kills_nobody(store: AdapterStore) -> None:
    store.open()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(AdapterExportError, match=r"no room for the 1\.0 MB of the adapter"):
            store.write(1, big_flat(1_000_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert everything_under(store.directory) == [".pinned", *[f".pinned/{name}" for name in SOCKETS], "owner.json"]


# Where nothing can be pinned


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def refuse(memory: Tensor, device: torch.device) -> Callable[[], None]:
    raise PinError("cudaHostRegister: out of memory")


def test_memory_that_cannot_be_locked_is_warned_of_once_and_versions_are_plain_files(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool = PinnedFilePool(refuse)
    store = AdapterStore(folder / "root", pinned=pool)
    try:
        live: list[StoredAdapter] = []
        for seed in range(1, 6):
            stored = sync(store, live, seed)
            assert tensors_of(stored).read_bytes() == (portable(folder, seed) / TENSORS).read_bytes()
        assert everything_under(store.directory / ".pinned") == []
    finally:
        store.close()
    assert pool.held_bytes == 0
    (words,) = warnings_in(caplog)
    assert "cannot be page-locked" in words
    assert "ulimit -l" in words
    assert "out of memory" in words


def test_folder_that_is_not_in_memory_is_warned_of_once_and_versions_are_plain_files(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture, locks: Locks
) -> None:
    if is_in_memory(tmp_path):
        pytest.skip("the folder for temporary files is in memory here")
    store = AdapterStore(tmp_path / "root", pinned=PinnedFilePool(locks))
    try:
        live: list[StoredAdapter] = []
        for seed in range(1, 6):
            stored = sync(store, live, seed)
            assert tensors_of(stored).read_bytes() == (portable(folder, seed) / TENSORS).read_bytes()
    finally:
        store.close()
    assert locks.asked == 0
    (words,) = warnings_in(caplog)
    assert str(tmp_path / "root") in words
    assert "/dev/shm" in words


@pytest.mark.parametrize("is_on_gpu", [False, True])
def test_only_versions_of_a_gpu_are_pinned(tmp_path: Path, is_on_gpu: bool) -> None:
    settings = plain_settings(["http://127.0.0.1:1"], tmp_path, timeout_s=1.0, are_local=[True])
    transport = transport_for(settings, [False], is_on_gpu=is_on_gpu)
    assert isinstance(transport, DiskTransport)
    assert (transport.store.pinned is not None) == is_on_gpu


def test_without_a_pool_a_version_is_a_plain_file(tmp_path: Path, folder: Path) -> None:
    store = AdapterStore(tmp_path / "root")
    try:
        assert tensors_of(store.write(1, flat(1))).read_bytes() == (portable(folder, 1) / TENSORS).read_bytes()
    finally:
        store.close()


# Other processes


@contextlib.contextmanager
def run_with_pinned_files(root: Path) -> Iterator[tuple[str, Any]]:
    """A trainer in another process, with a version in use and a pinned file free; killed at the end of the block."""
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)

    def run() -> None:
        store = AdapterStore(root, pinned=PinnedFilePool())
        first, _ = store.write(1, flat(1)), store.write(2, flat(2))
        store.delete(first)
        sender.send(store.run_id)
        signal.pause()

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    try:
        assert receiver.poll(30)
        yield receiver.recv(), child
    finally:
        child.kill()
        child.join(30)


@pytest.mark.outside
def test_killed_run_leaves_files_that_a_sweep_removes_and_names_of_versions_only(folder: Path) -> None:
    with run_with_pinned_files(folder) as (run_id, _):
        assert (folder / run_id / ".pinned" / "2").exists()
        assert sweep_leftovers(folder, lambda _: None) == []
    forgotten: list[str] = []
    assert sweep_leftovers(folder, forgotten.append) == [run_id]
    assert forgotten == [f"{run_id}-v2"]
    assert everything_under(folder) == []


@pytest.mark.outside
def test_reader_of_a_killed_run_keeps_what_it_read(folder: Path) -> None:
    with run_with_pinned_files(folder) as (run_id, process):
        file = folder / run_id / f"{run_id}-v2" / TENSORS
        content = sha256(file)
        with reader_of(file) as reader:
            process.kill()
            process.join(30)
            assert sweep_leftovers(folder, lambda _: None) == [run_id]
            assert reader.sha256() == content


@pytest.mark.outside
def test_forked_child_neither_holds_pinned_files_back_nor_gives_them_up(store: AdapterStore, locks: Locks) -> None:
    """Data loader workers are forked, inherit files and mappings, and run exit handlers."""
    live: list[StoredAdapter] = []
    sync(store, live, 1)
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)

    def inherit() -> None:
        store.close()
        sender.send("ready")
        signal.pause()

    child = multiprocessing.get_context("fork").Process(target=inherit)
    child.start()
    try:
        assert receiver.poll(30)
        for seed in range(2, 15):
            sync(store, live, seed)
        assert locks.asked == KEEP + 2 + PROGRESS
    finally:
        child.kill()
        child.join(30)


# What the servers have read


def flip_a_bit(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(-3, os.SEEK_END)
        byte = opened.read(1)[0]
        opened.seek(-3, os.SEEK_END)
        opened.write(bytes([byte ^ 0x80]))


def change_the_header(file: Path) -> None:
    with file.open("r+b") as opened:
        content = opened.read(200)
        opened.seek(content.index(b"layers"))
        opened.write(b"blocks")


def put_another_in_its_place(file: Path) -> None:
    copy = file.with_suffix(".copy")
    copy.write_bytes(file.read_bytes())
    copy.rename(file)


def test_a_pinned_file_holds_what_was_written(store: AdapterStore) -> None:
    adapter = flat()
    store.check(store.write(1, adapter), adapter)


@pytest.mark.parametrize("damage", [flip_a_bit, change_the_header, put_another_in_its_place, Path.unlink])
def test_a_pinned_file_that_was_damaged_after_it_was_written_is_found_out(
    damage: Callable[[Path], object], store: AdapterStore
) -> None:
    adapter = flat()
    stored = store.write(1, adapter)
    damage(tensors_of(stored))
    with pytest.raises(VerificationError, match="are not what the trainer wrote there"):
        store.check(stored, adapter)


def test_large_files_are_compared_in_parts(store: AdapterStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_files, "CHUNK_BYTES", 1000)
    adapter = big_flat(100_001 // 8 * 8)
    stored = store.write(1, adapter)
    store.check(stored, adapter)
    flip_a_bit(tensors_of(stored))
    with pytest.raises(VerificationError):
        store.check(stored, adapter)
