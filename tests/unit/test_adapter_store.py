"""Versions on disk: whole or absent, never overwritten, private, and swept when their run is dead."""

import contextlib
import errno
import fcntl
import json
import multiprocessing
import os
import resource
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.folders import becomes_read_only

from trl_lora_sync.adapter import store as store_module
from trl_lora_sync.adapter.store import AdapterStore, new_run_id, run_states, sweep_leftovers, write_adapter
from trl_lora_sync.engine_plugins.checksum import checksum
from trl_lora_sync.engine_plugins.forks import keep_from_children
from trl_lora_sync.engine_plugins.safetensors_file import head_of
from trl_lora_sync.engine_plugins.version_note import NOTE_FORM, NOTE_KEY, VersionNote, digest_of
from trl_lora_sync.errors import AdapterExportError, VerificationError
from unit.tiny import big_adapter, canonical, everything_under, lora_module

FILES = ["adapter_config.json", "adapter_model.safetensors"]
RUN = "lora-sync-test"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AdapterStore]:
    store = AdapterStore(tmp_path / "root")
    yield store
    store.close()


def assert_whole(directory: Path) -> None:
    """Of a version, which has a note as well, or of an adapter that was written by itself."""
    assert everything_under(directory) in (FILES, [*FILES, "lora_sync.json"])
    load_file(directory / FILES[1])
    json.loads((directory / FILES[0]).read_text())


# Whole or absent


def test_written_version_holds_the_tensors_and_the_config(tmp_path: Path) -> None:
    adapter = canonical()
    write_adapter(tmp_path / "v1", adapter)
    assert_whole(tmp_path / "v1")
    stored = load_file(tmp_path / "v1" / FILES[1])
    assert {key: tensor.tolist() for key, tensor in stored.items()} == {
        key: tensor.tolist() for key, tensor in adapter.tensors.items()
    }
    assert json.loads((tmp_path / "v1" / FILES[0]).read_text()) == json.loads(json.dumps(adapter.config()))
    assert everything_under(tmp_path) == ["v1", *(f"v1/{name}" for name in FILES)]


def test_missing_parents_are_created(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a" / "b" / "v1", canonical())
    assert_whole(tmp_path / "a" / "b" / "v1")


@contextlib.contextmanager
def forked(act: Callable[[], object]) -> Iterator[Any]:
    """A child process that runs `act`; killed at the end of the block if it still runs."""
    child = multiprocessing.get_context("fork").Process(target=act)
    child.start()
    try:
        yield child
    finally:
        child.kill()
        child.join()


def said_by_child(act: Callable[[], object]) -> str:
    """Run `act` in a child process and return the text of the `AdapterExportError` it must raise."""
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)

    def send() -> None:
        try:
            act()
        except AdapterExportError as error:
            sender.send(str(error))
        except BaseException as error:
            sender.send(f"NOT OURS: {error!r}")
        else:
            sender.send("NO ERROR")

    with forked(send) as child:
        assert receiver.poll(30), "the child sent nothing"
        words: str = receiver.recv()
        child.join(30)
    return words


@pytest.mark.outside
def test_reader_never_sees_a_half_written_version_even_if_the_writer_is_killed(tmp_path: Path) -> None:
    """A reader looks all the time while a writer writes, and once more after kill -9 in the middle of it."""
    adapter = big_adapter(2_000_000)

    def write_for_ever() -> None:
        for number in range(10**9):
            write_adapter(tmp_path / f"v{number}", adapter)

    seen: set[Path] = set()
    with forked(write_for_ever):
        until = time.monotonic() + 1.5
        while time.monotonic() < until or not seen:
            for version in tmp_path.glob("v*"):
                assert_whole(version)
                seen.add(version)
                shutil.rmtree(version)
    for version in tmp_path.glob("v*"):
        assert_whole(version)


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.outside
@pytest.mark.parametrize(
    ("place", "name"),
    [(store_module, "bytes_of"), (Path, "write_text"), (os, "fsync"), (Path, "rename")],
    ids=["tensors", "config", "fsync", "rename"],
)
def test_writer_killed_at_any_step_leaves_no_version(
    place: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = canonical()
    monkeypatch.setattr(place, name, die)
    with forked(lambda: write_adapter(tmp_path / "v1", adapter)) as child:
        child.join(30)
        assert child.exitcode == -signal.SIGKILL
    # What is left is hidden, so no server and no sweep takes it for a version.
    assert [path.name[0] for path in tmp_path.iterdir()] == ["."]


def failing_at(number: int, error: BaseException) -> Callable[[int], None]:
    """An `os.fsync` that fails at its `number`-th call."""
    calls = iter(range(1, 1000))
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if next(calls) == number:
            raise error
        real(descriptor)

    return fsync


# Both files, their directory, and the parent after the rename.
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_failed_fsync_leaves_nothing(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", failing_at(number, OSError(5, "Input/output error")))
    with pytest.raises(AdapterExportError, match=r"Nothing half-written was left.*Input/output error"):
        write_adapter(tmp_path / "v1", canonical())
    assert everything_under(tmp_path) == []


def test_every_file_and_directory_is_fsynced_before_the_version_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(descriptor: int) -> None:
        events.append(f"fsync {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
        real_fsync(descriptor)

    def rename(self: Path, target: Path) -> Path:
        events.append(f"rename to {target.name}")
        return real_rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    write_adapter(tmp_path / "v1", canonical())
    assert set(events[:2]) == {f"fsync {name}" for name in FILES}
    assert events[2].startswith("fsync .v1.")
    assert events[3:] == ["rename to v1", f"fsync {tmp_path.name}"]


def test_interrupt_while_writing_leaves_nothing_and_stays_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", failing_at(2, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        write_adapter(tmp_path / "v1", canonical())
    assert everything_under(tmp_path) == []


# Where it cannot be written


def mount_tmpfs(folder: Path, options: str) -> None:
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(
            f"mounting needs root with CAP_SYS_ADMIN (covered by RLIMIT_FSIZE otherwise): {done.stderr.strip()}"
        )


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a new file system; unmounts it afterwards."""
    folder = tmp_path / "mounted"

    def mount(options: str) -> Path:
        if os.geteuid() != 0:
            pytest.skip("mounting needs root; the RLIMIT_FSIZE and permission tests cover the same code without it")
        mount_tmpfs(folder, options)
        return folder

    yield mount
    if folder.is_mount():
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.outside
def test_full_disk_is_an_error_that_names_the_size_and_leaves_nothing(mounted: Callable[[str], Path]) -> None:
    folder = mounted("size=256k")
    with pytest.raises(AdapterExportError, match=r"no room for the 1\.0 MB of the adapter.*set lora_sync_dir"):
        write_adapter(folder / "run" / "v1", big_adapter(1_000_000))
    assert [path for path in everything_under(folder) if path != "run"] == []
    write_adapter(folder / "v2", canonical())
    assert_whole(folder / "v2")


@pytest.mark.outside
def test_disk_that_fills_up_between_versions_keeps_the_earlier_one(mounted: Callable[[str], Path]) -> None:
    store = AdapterStore(mounted("size=256k"))
    try:
        first = store.write(1, big_adapter(150_000))
        with pytest.raises(AdapterExportError, match="no room"):
            store.write(2, big_adapter(150_000))
        assert_whole(first.path)
        assert [path.name for path in store.directory.glob("*-v*")] == [first.name]
        assert not list(store.directory.glob(".*"))
    finally:
        store.close()


@pytest.mark.outside
def test_read_only_file_system_is_an_error_that_says_so(mounted: Callable[[str], Path]) -> None:
    folder = mounted("size=64k")
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    with pytest.raises(AdapterExportError, match=r"this process may not write there.*Read-only file system"):
        write_adapter(folder / "v1", canonical())
    with pytest.raises(AdapterExportError, match=r"cannot be created .*Read-only file system.*Set lora_sync_dir"):
        AdapterStore(folder).open()


@pytest.mark.outside
def test_file_size_limit_is_an_error_that_names_the_size_and_leaves_nothing(tmp_path: Path) -> None:
    adapter = big_adapter(1_000_000)

    def write_over_the_limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        write_adapter(tmp_path / "v1", adapter)

    assert "no room for the 1.0 MB of the adapter" in said_by_child(write_over_the_limit)
    assert everything_under(tmp_path) == []


def test_parent_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here first")
    with pytest.raises(AdapterExportError, match=r"could not be written to .*file/v1"):
        write_adapter(tmp_path / "file" / "v1", canonical())
    with pytest.raises(AdapterExportError, match=r"cannot be created.*Set lora_sync_dir to a folder"):
        AdapterStore(tmp_path / "file").open()
    assert everything_under(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "here first"


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """A folder that an unprivileged child can reach, to be closed by the test."""
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == os.geteuid() and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o111)
    folder = tmp_path / "closed"
    folder.mkdir()
    yield folder
    folder.chmod(0o700)


def unprivileged(act: Callable[[], object]) -> str:
    def run() -> None:
        if os.geteuid() == 0:  # root may write anywhere
            os.setegid(65534)
            os.seteuid(65534)
        act()

    return said_by_child(run)


@pytest.mark.outside
@pytest.mark.parametrize("mode", [0o555, 0o000], ids=oct)
def test_folder_without_permission_is_an_error_that_says_so(mode: int, closed: Path) -> None:
    adapter = canonical()
    closed.chmod(mode)
    written = unprivileged(lambda: write_adapter(closed / "v1", adapter))
    assert "this process may not write there. Nothing half-written was left. Make it writable" in written
    assert "Permission denied" in written
    opened = unprivileged(lambda: AdapterStore(closed).open())
    assert f"The adapter folder {closed}" in opened
    assert "cannot be created" in opened
    assert "Permission denied" in opened
    closed.chmod(0o700)
    assert everything_under(closed) == []


# Never overwritten


def test_version_is_never_written_over_another(tmp_path: Path) -> None:
    write_adapter(tmp_path / "v1", canonical())
    before = (tmp_path / "v1" / FILES[1]).read_bytes()
    with pytest.raises(AdapterExportError, match=r"exists and is not empty.*Choose a new directory"):
        write_adapter(tmp_path / "v1", canonical([lora_module(seed=7)]))
    assert (tmp_path / "v1" / FILES[1]).read_bytes() == before
    assert len(everything_under(tmp_path)) == 3


def test_version_that_appears_while_another_is_written_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check at the start is not what protects a version; the rename is."""
    real = store_module.bytes_of

    def let_another_be_first(tensors: Any) -> memoryview:
        monkeypatch.setattr(store_module, "bytes_of", real)
        write_adapter(tmp_path / "v1", canonical([lora_module(seed=7)]))
        return real(tensors)

    monkeypatch.setattr(store_module, "bytes_of", let_another_be_first)
    with pytest.raises(AdapterExportError, match="v1"):
        write_adapter(tmp_path / "v1", canonical())
    assert_whole(tmp_path / "v1")
    stored = load_file(tmp_path / "v1" / FILES[1])
    assert all(value.equal(stored[key]) for key, value in canonical([lora_module(seed=7)]).tensors.items())
    assert len(everything_under(tmp_path)) == 3


def test_file_in_the_place_of_a_version_stays(tmp_path: Path) -> None:
    (tmp_path / "v1").write_text("here first")
    with pytest.raises(AdapterExportError):
        write_adapter(tmp_path / "v1", canonical())
    assert (tmp_path / "v1").read_text() == "here first"
    assert everything_under(tmp_path) == ["v1"]


# The versions of a run


def test_run_ids_and_adapter_names_are_unique(tmp_path: Path) -> None:
    assert len({new_run_id() for _ in range(1000)}) == 1000
    first, second = AdapterStore(tmp_path), AdapterStore(tmp_path)
    try:
        stored = [store.write(version, canonical()) for store in (first, second) for version in (1, 2, "width")]
    finally:
        first.close()
        second.close()
    assert len({version.name for version in stored}) == len({version.path for version in stored}) == 6


def test_stored_version_says_where_it_is_for_both_sides(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path / "trainer", server_root="/mnt/adapters/", run_id=RUN)
    adapter = canonical()
    try:
        stored = store.write(7, adapter)
        assert stored.name == f"{RUN}-v7"
        assert stored.version == 7
        assert stored.path == tmp_path / "trainer" / RUN / f"{RUN}-v7"
        assert stored.server_path == f"/mnt/adapters/{RUN}/{RUN}-v7"
        assert (stored.rank, stored.payload_bytes) == (adapter.rank, adapter.payload_bytes)
        assert_whole(stored.path)
    finally:
        store.close()


def test_server_path_is_the_trainers_own_absolute_path_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for root, expected in ((Path("out/lora_sync"), tmp_path / "out/lora_sync"), (Path("~/x"), tmp_path / "home/x")):
        store = AdapterStore(root)
        try:
            stored = store.write(1, canonical())
            assert stored.server_path == str(stored.path)
            assert stored.path.parent.parent == expected
        finally:
            store.close()


def test_folder_without_an_absolute_path_is_an_error_that_says_so() -> None:
    """A shell leaves the ~ of an unknown user as it was typed."""
    with pytest.raises(AdapterExportError, match="'~nosuchuser/sync' stands for no absolute path"):
        AdapterStore(Path("~nosuchuser/sync"))


def test_folder_whose_path_no_request_can_carry_is_an_error_that_says_so(tmp_path: Path) -> None:
    """The request to load the trial adapter failed with UnicodeEncodeError."""
    store = AdapterStore(tmp_path / os.fsdecode(b"caf\xe9"))
    with pytest.raises(AdapterExportError, match=r"caf\\udce9' is not UTF-8"):
        store.write(1, canonical())
    assert everything_under(tmp_path) == []


def test_only_the_owner_may_read_a_version(store: AdapterStore) -> None:
    old = os.umask(0o000)  # the most open a user can have it
    try:
        stored = store.write(1, canonical())
    finally:
        os.umask(old)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (store.directory, *store.directory.rglob("*"))}
    assert len(modes) == 6
    assert all(mode == (0o700 if path.is_dir() else 0o600) for path, mode in modes.items()), modes
    assert stored.path in modes


def test_exported_adapter_gets_the_modes_of_any_other_file(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        write_adapter(tmp_path / "v1", canonical())
    finally:
        os.umask(old)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "v1").iterdir()} == {0o640}
    assert stat.S_IMODE((tmp_path / "v1").stat().st_mode) == 0o750


def test_nothing_is_created_before_the_first_write(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path / "root")
    store.close()
    assert everything_under(tmp_path) == []


def test_delete_removes_one_version_and_is_repeatable(store: AdapterStore) -> None:
    first, second = store.write(1, canonical()), store.write(2, canonical())
    store.delete(first)
    store.delete(first)
    assert not first.path.exists()
    assert_whole(second.path)


def test_close_deletes_everything_and_may_be_repeated(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path / "root")
    for version in (1, 2):
        store.write(version, canonical())
    store.close()
    store.close()
    assert everything_under(tmp_path) == []


def test_close_leaves_what_others_keep_in_the_root(tmp_path: Path) -> None:
    mine, other = AdapterStore(tmp_path), AdapterStore(tmp_path)
    mine.write(1, canonical())
    stored = other.write(1, canonical())
    (tmp_path / "notes.txt").write_text("keep me")
    mine.close()
    assert_whole(stored.path)
    other.close()
    assert everything_under(tmp_path) == ["notes.txt"]


def test_a_run_starts_although_another_one_deletes_the_empty_root_at_that_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two runs with one folder, the end of the first within the start of the second made that start fail."""
    root, make, ended = tmp_path / "sync", Path.mkdir, []

    def end_of_the_other(path: Path, *args: Any, **kwargs: Any) -> None:
        make(path, *args, **kwargs)
        if path == root and not ended:
            ended.append(root)
            root.rmdir()

    store = AdapterStore(root)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", end_of_the_other)
        store.open()
    assert ended
    assert_whole(store.write(1, canonical()).path)
    store.close()
    assert everything_under(tmp_path) == []


def test_store_may_be_written_again_after_close(store: AdapterStore) -> None:
    store.write(1, canonical())
    store.close()
    assert_whole(store.write(2, canonical()).path)


@pytest.mark.outside
def test_store_may_be_written_again_although_close_could_delete_nothing(tmp_path: Path) -> None:
    """The folder of the run was in the way of the next one for good, once the disk had been read-only at the end."""
    store = AdapterStore(tmp_path / "sync")
    left = store.write(1, big_adapter(1000))
    with becomes_read_only(tmp_path / "sync") as is_read_only:
        if not is_read_only:
            pytest.skip("only a privileged user can mount a file system here")
        store.close()
    assert left.path is not None
    assert left.path.exists()

    written = store.write(2, big_adapter(1000))

    assert written.path is not None
    assert_whole(written.path)
    assert not left.path.exists()
    store.close()
    assert everything_under(tmp_path) == []


@pytest.mark.parametrize("all_of_it", [True, False])
def test_run_whose_files_something_else_deletes_goes_on_and_is_still_swept_once_it_is_dead(
    all_of_it: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing marked the folder that it made again, so after a kill that stayed, with its names on the servers."""
    root = tmp_path / "root"
    store = AdapterStore(root)
    store.write(1, canonical())
    if all_of_it:
        shutil.rmtree(root)
    else:
        (store.directory / "owner.json").unlink()
    second = store.write(2, canonical())
    assert_whole(second.path)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert run_states(root) == {store.run_id: "live"}
    assert "were deleted by something else" in caplog.text
    assert (second.path.parent / f"{store.run_id}-v1").exists() is not all_of_it
    store.write(3, canonical())
    assert len(caplog.messages) == 1
    store.close()
    assert everything_under(tmp_path) == []


def test_failed_open_leaves_nothing_and_may_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = AdapterStore(tmp_path / "root")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(AdapterExportError, match="No space left"):
            store.open()
    assert everything_under(tmp_path / "root") == []
    store.open()
    store.close()
    assert everything_under(tmp_path) == []


def test_file_system_without_locks_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a folder that cannot be written, another one was advised, which most often is on the same file system."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(AdapterExportError, match=r"Set lora_sync_dir to a folder on a file system with locks"):
        AdapterStore(tmp_path / "root").open()
    assert everything_under(tmp_path) == []


@pytest.mark.outside
def test_forked_child_does_not_delete_its_parents_files(store: AdapterStore) -> None:
    """Data loader workers are forked, and run the exit handlers of what they inherited."""
    stored = store.write(1, canonical())
    child = multiprocessing.get_context("fork").Process(target=store.close)
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert_whole(stored.path)
    assert sweep_leftovers(store.root, lambda _: None) == [], "the child released its parent's lock"


# Sweeping


@contextlib.contextmanager
def live_run(root: Path) -> Iterator[tuple[str, Any]]:
    """Another process with a run of two versions; ends with kill -9."""
    adapter = canonical()
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)

    def run() -> None:
        store = AdapterStore(root)
        for version in (1, 2):
            store.write(version, adapter)
        sender.send(store.run_id)
        signal.pause()

    with forked(run) as child:
        assert receiver.poll(30), "the run did not start"
        yield receiver.recv(), child


@pytest.mark.outside
def test_killed_run_is_swept_and_its_names_are_forgotten_while_a_live_one_stays(tmp_path: Path) -> None:
    with live_run(tmp_path) as (live, _):
        with live_run(tmp_path) as (dead, process):
            assert sweep_leftovers(tmp_path, lambda _: None) == []
            process.kill()
            process.join()
        forgotten: list[str] = []

        def forget(name: str) -> None:
            assert_whole(tmp_path / dead / name)  # the server may still read it during the unload
            forgotten.append(name)

        assert sweep_leftovers(tmp_path, forget) == [dead]
        assert forgotten == [f"{dead}-v1", f"{dead}-v2"]
        assert [path.name for path in tmp_path.iterdir()] == [live]
        assert_whole(tmp_path / live / f"{live}-v2")


def dead_run(root: Path, run_id: str = RUN, **owner: str) -> Path:
    """The folder of a run whose process is gone; `owner` replaces what it noted about itself."""
    store = AdapterStore(root, run_id=run_id)
    store.write(1, canonical())
    assert store.lock is not None
    os.close(store.lock)
    note = store.directory / "owner.json"
    note.write_text(json.dumps(json.loads(note.read_text()) | owner))
    return store.directory


@pytest.mark.outside
def test_killed_run_is_swept_although_a_process_that_it_forked_lives_on(tmp_path: Path) -> None:
    """Workers of a pool or of a data loader outlive a trainer that is killed, and held its lock."""
    adapter = canonical()
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)

    def run() -> None:
        store = AdapterStore(tmp_path)
        store.write(1, adapter)
        if os.fork() == 0:
            # By the child, as it gives up the lock once it runs.
            sender.send((store.run_id, os.getpid()))
        signal.pause()

    with forked(run):
        assert receiver.poll(30), "the run did not start"
        run_id, worker = receiver.recv()
        assert sweep_leftovers(tmp_path, lambda _: None) == [], "the worker released the lock of its live parent"
    try:
        assert sweep_leftovers(tmp_path, lambda _: None) == [run_id]
    finally:
        os.kill(worker, signal.SIGKILL)


def assert_kept_by_a_fork(number: int, other: Path) -> None:
    """Let another file have the number of a descriptor, behind the back of its owner."""
    other.write_text("one")
    with other.open() as opened:
        os.dup2(opened.fileno(), number)

    def read() -> None:
        assert os.pread(number, 3, 0) == b"one"

    with forked(read) as child:
        child.join(30)
        assert child.exitcode == 0


@pytest.mark.outside
def test_a_forked_process_keeps_a_file_whose_number_was_that_of_the_lock(store: AdapterStore, tmp_path: Path) -> None:
    """Such as a pipe to its parent, which waited for what was written there, if other code had closed the lock."""
    store.write(1, canonical())
    assert store.lock is not None
    assert_kept_by_a_fork(store.lock, tmp_path / "other")


@pytest.mark.outside
def test_a_forked_process_keeps_a_file_whose_number_was_that_of_a_connection(tmp_path: Path) -> None:
    """As of the lock: the socket does not know that other code has closed its number."""
    ours, theirs = socket.socketpair()
    keep_from_children(ours)
    with ours, theirs:
        assert_kept_by_a_fork(ours.fileno(), tmp_path / "other")


@pytest.mark.outside
def test_a_process_that_is_forked_at_the_limit_of_open_files_gives_up_the_lock(store: AdapterStore) -> None:
    """What takes its place could not be opened, and the lock stayed taken for as long as the process lived."""
    store.write(1, canonical())
    assert store.lock is not None
    locked = os.fstat(store.lock)

    def look() -> None:
        assert store.lock is not None
        assert not os.path.samestat(os.fstat(store.lock), locked)

    with contextlib.ExitStack() as undo:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        undo.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (store.lock + 32, hard))
        spare = [*os.pipe(), *os.pipe()]  # as many as `multiprocessing` opens before the fork
        with contextlib.suppress(OSError):
            while True:
                undo.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        for one in spare:
            os.close(one)
        with forked(look) as child:
            child.join(30)
            assert child.exitcode == 0


def test_own_run_is_not_swept_by_itself(store: AdapterStore) -> None:
    stored = store.write(1, canonical())
    assert sweep_leftovers(store.root, lambda _: None) == []
    assert_whole(stored.path)


def test_run_of_another_host_is_left_alone_and_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = dead_run(tmp_path, boot="another-kernel", host="node-17")
    with caplog.at_level("INFO"):
        assert sweep_leftovers(tmp_path, lambda _: None) == []
    assert_whole(directory / f"{RUN}-v1")
    assert "host node-17" in caplog.text
    assert "Delete it by hand" in caplog.text


def test_dead_run_of_this_kernel_is_swept(tmp_path: Path) -> None:
    """Shows that the run above was spared for its boot id and nothing else."""
    directory = dead_run(tmp_path)
    assert sweep_leftovers(tmp_path, lambda _: None) == [RUN]
    assert not directory.exists()


@pytest.mark.parametrize("note", ["", "{", "[]", '"text"', None], ids=repr)
def test_run_folder_that_cannot_be_judged_is_left_alone(note: str | None, tmp_path: Path) -> None:
    directory = dead_run(tmp_path)
    owner = directory / "owner.json"
    owner.unlink() if note is None else owner.write_text(note)
    assert sweep_leftovers(tmp_path, lambda _: None) == []
    assert_whole(directory / f"{RUN}-v1")


def test_folders_that_are_no_runs_are_left_alone(tmp_path: Path) -> None:
    for name in ("checkpoint-10", "my-lora-sync-x"):
        dead_run(tmp_path, run_id=name)
    before = everything_under(tmp_path)
    assert sweep_leftovers(tmp_path, lambda _: None) == []
    assert everything_under(tmp_path) == before


def test_missing_root_is_nothing_to_sweep(tmp_path: Path) -> None:
    assert sweep_leftovers(tmp_path / "missing", lambda _: None) == []


def test_failing_forget_releases_the_lock_so_that_a_later_sweep_finishes(tmp_path: Path) -> None:
    dead_run(tmp_path)

    def fail(name: str) -> None:
        raise RuntimeError(name)

    with pytest.raises(RuntimeError, match=f"{RUN}-v1"):
        sweep_leftovers(tmp_path, fail)
    assert sweep_leftovers(tmp_path, lambda _: None) == [RUN]


def sweep_in_child(root: Path, barrier: Any, results: Any) -> None:
    forgotten: list[str] = []
    barrier.wait()
    sweep_leftovers(root, forgotten.append)
    results.put(forgotten)


@pytest.mark.outside
def test_two_sweeps_at_once_forget_each_version_once_and_leave_nothing(tmp_path: Path) -> None:
    names = [f"{RUN}{number}" for number in range(30)]
    for name in names:
        dead_run(tmp_path, run_id=name)
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    children = [context.Process(target=sweep_in_child, args=(tmp_path, barrier, results)) for _ in range(2)]
    for child in children:
        child.start()
    forgotten = [name for _ in children for name in results.get(timeout=30)]
    for child in children:
        child.join(30)
    assert sorted(forgotten) == sorted(f"{name}-v1" for name in names)
    assert everything_under(tmp_path) == []


@pytest.mark.outside
@pytest.mark.parametrize("end", ["its end", "its sweep"])
def test_what_was_killed_while_it_deleted_a_run_is_finished_by_the_next_sweep(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher ends the other processes of a run when one has failed, and the owner was deleted before the rest."""
    adapter = canonical()
    real = os.scandir

    @contextlib.contextmanager
    def owner_first(path: Any) -> Iterator[Iterator[os.DirEntry[str]]]:
        """The order depends on the file system."""
        with real(path) as found:
            yield iter(sorted(found, key=lambda entry: entry.name != "owner.json"))

    monkeypatch.setattr(os, "scandir", owner_first)

    def delete() -> None:
        if end == "its end":
            store = AdapterStore(tmp_path)
            store.write(1, adapter)
            monkeypatch.setattr(os, "rmdir", die)
            store.close()
        else:
            dead_run(tmp_path)
            monkeypatch.setattr(os, "rmdir", die)
            sweep_leftovers(tmp_path, lambda name: None)

    with forked(delete) as child:
        child.join(30)
        assert child.exitcode == -signal.SIGKILL
    assert everything_under(tmp_path)
    sweep_leftovers(tmp_path, lambda name: None)
    assert everything_under(tmp_path) == []


def test_sweep_removes_a_run_folder_that_was_killed_while_it_was_made(tmp_path: Path) -> None:
    half = tmp_path / ".lora-sync-20260101-000000-abcdef12.starting"
    half.mkdir()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    (half / "owner.json").write_text(json.dumps({"pid": 1, "host": "here", "boot": boot}))
    sweep_leftovers(tmp_path, lambda name: None)
    assert not half.exists()


@pytest.mark.parametrize(("module", "name"), [(os, "write"), (fcntl, "flock")])
def test_sweep_during_a_start_leaves_the_run_alone(
    module: ModuleType, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the writing of its owner and the lock of that file the run was taken for dead, and its start failed."""
    act, swept = getattr(module, name), []

    def sweep_and_act(*args: Any) -> Any:
        monkeypatch.setattr(module, name, act)  # which the sweep calls as well
        swept.append(sweep_leftovers(tmp_path, lambda _: None))
        return act(*args)

    monkeypatch.setattr(module, name, sweep_and_act)
    store = AdapterStore(tmp_path)
    store.open()
    assert (swept, store.directory.is_dir()) == ([[]], True)
    store.close()


def test_folder_of_another_user_in_a_place_open_to_all_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder's owner could put other adapters into it."""
    tmp_path.chmod(0o1777)
    root = tmp_path / "trl-lora-sync"
    root.mkdir()
    owner = root.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(AdapterExportError, match="belongs to another user"):
        AdapterStore(root).open()
    assert list(root.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder for another user")
def test_link_of_root_in_a_place_open_to_all_leads_to_the_folder_of_a_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As administrators make one for each user in /scratch; it was refused as another user's."""
    tmp_path.chmod(0o1777)
    root, behind = tmp_path / "trl-lora-sync", tmp_path / "behind"
    behind.mkdir()
    root.symlink_to(behind)
    user = os.getuid() + 1
    os.chown(behind, user, -1)
    monkeypatch.setattr(os, "getuid", lambda: user)
    store = AdapterStore(root)
    store.open()
    store.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a link for another user")
def test_link_of_another_user_in_a_place_open_to_all_is_refused(tmp_path: Path) -> None:
    """The folder behind it was looked at only, and the owner of the link could point it to other adapters."""
    tmp_path.chmod(0o1777)
    root, behind = tmp_path / "trl-lora-sync", tmp_path / "behind"
    behind.mkdir()
    root.symlink_to(behind)
    store = AdapterStore(root)
    store.open()
    store.close()
    os.lchown(root, os.getuid() + 1, -1)
    # Where the kernel protects links, it refuses this one itself.
    with pytest.raises(AdapterExportError, match=r"belongs to another user|Permission denied"):
        AdapterStore(root).open()


def test_default_folder_is_made_for_this_user_alone(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path / "a" / "b")
    store.open()
    assert stat.S_IMODE(store.root.stat().st_mode) == 0o700
    store.close()


# What the servers have read


def flip_signs(file: Path) -> None:
    """Half of the sign bits of a file of float32, as memory or a network may."""
    tensors = load_file(file)
    for tensor in tensors.values():
        tensor.view(-1)[::2].neg_()
    save_file(tensors, file, metadata={"format": "pt"})


def double_alpha(file: Path) -> None:
    config = json.loads((file.parent / FILES[0]).read_text())
    (file.parent / FILES[0]).write_text(json.dumps(config | {"lora_alpha": 2 * config["lora_alpha"]}))


def cut_short(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 8)


def rename_tensors(file: Path) -> None:
    tensors = {name.replace("layers", "blocks"): value for name, value in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def test_the_files_of_a_version_hold_what_was_written(store: AdapterStore) -> None:
    adapter = canonical()
    store.check(store.write(1, adapter), adapter)


@pytest.mark.parametrize("damage", [flip_signs, double_alpha, cut_short, rename_tensors, Path.unlink])
def test_files_that_were_damaged_after_they_were_written_are_found_out(
    damage: Callable[[Path], object], store: AdapterStore
) -> None:
    adapter = canonical()
    stored = store.write(1, adapter)
    assert stored.path is not None
    damage(stored.path / FILES[1])
    with pytest.raises(VerificationError, match=r"are not what the trainer wrote there.*look for another process"):
        store.check(stored, adapter)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_version_has_a_note_with_which_a_worker_can_compare_it(tmp_path: Path, dtype: torch.dtype) -> None:
    store = AdapterStore(tmp_path / "root")
    stored = store.write(1, canonical(dtype=dtype))
    assert stored.note is not None
    assert stored.path is not None
    note, file = VersionNote.read(stored.path), stored.path / "adapter_model.safetensors"
    assert note is not None
    with file.open("rb") as opened:
        head = head_of(opened.fileno())
    config = (stored.path / "adapter_config.json").read_bytes()
    assert note.head == digest_of(head.header, config)
    assert json.loads(config)[NOTE_KEY] == NOTE_FORM
    tensors = bytearray(file.read_bytes()[head.start :])
    assert note.checksum == checksum(torch.frombuffer(tensors, dtype=torch.uint8))
    store.close()


def test_a_version_that_no_worker_compares_announces_no_note(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path / "root", has_checksums=False)
    stored = store.write(1, canonical())
    assert stored.path is not None
    assert everything_under(stored.path) == FILES
    assert NOTE_KEY not in json.loads((stored.path / FILES[0]).read_text())
    store.check(stored, canonical())
    store.close()
