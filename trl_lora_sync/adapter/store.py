"""Versions of an adapter on disk: written once, never overwritten, deleted when nothing may read them any more.

Layout: `<root>/<run_id>/<run_id>-v<N>/{adapter_model.safetensors, adapter_config.json, lora_sync.json}`. A live run
holds a lock on `<root>/<run_id>/owner.json`, which the kernel releases however the process ends; this separates
leftovers from the files of a run that is still going. `<root>/<run_id>/.pinned` has files in shared memory between two
versions. An empty version folder stands for a name that a server may still have: the next run unloads it there. Knows
nothing of models, and of servers only their URLs.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from trl_lora_sync.adapter.canonical import CanonicalAdapter
from trl_lora_sync.adapter.pinned_files import PinnedFile, PinnedFilePool
from trl_lora_sync.addresses import absolute_dir
from trl_lora_sync.engine_plugins.forks import forget, keep_from_children
from trl_lora_sync.engine_plugins.reservations import ReservationClient
from trl_lora_sync.engine_plugins.safetensors_file import (
    CONFIG_FILE,
    DTYPES,
    HEADER_PREFIX_BYTES,
    TENSORS_FILE,
    bytes_of,
)
from trl_lora_sync.engine_plugins.shared_files import SOCKET
from trl_lora_sync.engine_plugins.version_note import NOTE_FILE, NOTE_FORM, NOTE_KEY, VersionNote, digest_of
from trl_lora_sync.errors import AdapterExportError, VerificationError

logger = logging.getLogger(__name__)

RUN_PREFIX = "lora-sync-"
_OWNER_FILE = "owner.json"
_STARTING = ".starting"
_PINNED = ".pinned"
_MAX_OWNER_BYTES = 1 << 20  # it names the servers of the run
_PRIVATE_DIRECTORY, _PRIVATE_FILE = 0o700, 0o600
_ROOT = 0
# Of `flock`, such as on Lustre that was mounted without it, and on NFS whose lock service is down (flock(2)).
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass(frozen=True, kw_only=True)
class StoredAdapter:
    """One version, on disk or in memory.

    Attributes:
        name: what servers know it by, `<run_id>-v<version>`; never used twice.
        version: counts the syncs of this run; 0 for what is only tried out.
        rank: LoRA rank.
        target_modules: last components of the adapted module paths.
        payload_bytes: size of the tensors.
        path: the directory as this process sees it, if it is on disk.
        server_path: the same directory as the servers see it.
        content: the tensors, if they are to be sent instead.
        note: beside its files, if a worker can compare its tensors with those on the trainer's device.
        reservations: with servers, if their workers have been notified of it.
        is_unfinished: whether its file of tensors may still be on its way from the trainer's GPU, see
            `engine_plugins.unfinished`.
        is_awaited: whether a load has to wait for that, as workers cannot read the GPU.
        has_stacked_experts: as for `CanonicalAdapter`.
    """

    name: str
    version: int
    rank: int
    target_modules: tuple[str, ...]
    payload_bytes: int
    path: Path | None = None
    server_path: str | None = None
    content: CanonicalAdapter | None = None
    note: VersionNote | None = None
    reservations: ReservationClient | None = None
    is_unfinished: bool = False
    is_awaited: bool = False
    has_stacked_experts: bool = False


@dataclass(frozen=True, kw_only=True)
class NextVersion:
    """What is known of a version before it is written.

    Attributes:
        name, server_path, has_stacked_experts: of the `StoredAdapter`.
        head: of its note.
        folder: with the trainer's sockets, as the servers see it.
        reservations: the trainer's end of them.
    """

    name: str
    server_path: str
    head: str
    folder: str
    has_stacked_experts: bool
    reservations: ReservationClient


def new_run_id() -> str:
    """A name no other run has, in any run folder or on any server: date for people, randomness for uniqueness."""
    return f"{RUN_PREFIX}{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


def write_tensors(file: Path, adapter: CanonicalAdapter) -> None:
    """Write the tensors of `adapter` to a new file, wherever they are."""
    with file.open("xb") as opened:
        opened.write(adapter.header)
        opened.write(bytes_of(adapter.flat.cpu()))


def write_adapter(
    directory: Path,
    adapter: CanonicalAdapter,
    *,
    private: bool = False,
    write_tensors: Callable[[Path, CanonicalAdapter], None] = write_tensors,
) -> None:
    """Write `adapter` so that `directory` either holds all of it, durably, or does not exist.

    Args:
        directory: must not exist yet, or be empty.
        private: give files mode 0600 and directories 0700 instead of the process's default.
        write_tensors: writes the file of the tensors to a path.

    Raises:
        AdapterExportError: the directory is taken, or cannot be written (permissions, full disk).
    """
    # Beside it, as a rename cannot cross file systems. The dot keeps it out of the pattern of a sweep.
    partial = directory.parent / f".{directory.name}.{secrets.token_hex(4)}.partial"
    renamed = False
    tensors, config, note = partial / TENSORS_FILE, partial / CONFIG_FILE, partial / NOTE_FILE
    try:
        if directory.is_dir() and any(directory.iterdir()):
            raise AdapterExportError(
                f"{directory} exists and is not empty. Adapters are never written over one another, because a server "
                "may still read the old one. Choose a new directory."
            )
        partial.mkdir(parents=True)
        write_tensors(tensors, adapter)
        config.write_text(_config_text(adapter, has_note=note.exists()))
        for file in (tensors, config, note) if note.exists() else (tensors, config):
            # A pinned file is 0600 whatever the umask, so the other one shows the process's default.
            file.chmod(_PRIVATE_FILE if private else config.stat().st_mode)
            fsync(file)
        if private:
            partial.chmod(_PRIVATE_DIRECTORY)
        fsync(partial)
        partial.rename(directory)
        renamed = True
        # A rename is durable only once the folder that holds the name is on disk.
        fsync(directory.parent)
    except BaseException as error:
        shutil.rmtree(directory if renamed else partial, ignore_errors=True)
        if isinstance(error, OSError) and not isinstance(error, AdapterExportError):
            raise _export_error(directory, adapter, error) from error
        raise


def _config_text(adapter: CanonicalAdapter, *, has_note: bool) -> str:
    return json.dumps(adapter.config() | ({NOTE_KEY: NOTE_FORM} if has_note else {}), indent=2, sort_keys=True)


def _changed(stored: StoredAdapter) -> str:
    return (
        f"The files of {stored.name!r} in {stored.path} are not what the trainer wrote there, so the server may have "
        "loaded damaged weights. The version is not used. Expected was that only the trainer writes to this folder; "
        "look for another process that does, and check the file system and the memory of this host."
    )


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _export_error(directory: Path, adapter: CanonicalAdapter, error: Exception) -> AdapterExportError:
    need = f"{adapter.payload_bytes / 1e6:.1f} MB"
    code = getattr(error, "errno", None)
    message = str(error)
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or "No space left" in message or "File too large" in message:
        reason, fix = f"there is no room for the {need} of the adapter", "Free some space, or set lora_sync_dir"
    elif code in (errno.EACCES, errno.EPERM, errno.EROFS):
        reason, fix = "this process may not write there", "Make it writable, or set lora_sync_dir"
    else:
        reason, fix = f"writing the {need} of the adapter failed", "Check the path, or set lora_sync_dir"
    return AdapterExportError(
        f"The adapter could not be written to {directory}: {reason}. Nothing half-written was left. "
        f"{fix} to a folder that both the trainer and the servers can use ({message})."
    )


class _Filled(NamedTuple):
    """What a version's tensors were put into before its folder was made.

    Attributes:
        pinned: None for a plain file.
        memory: as in `VersionNote`.
        checksum: waits for it; None if the version gets no note.
    """

    pinned: PinnedFile | None
    memory: str
    checksum: Callable[[], str] | None = None


class AdapterStore:
    """The versions of one run. Not thread-safe; used by process 0 only.

    Args:
        root: folder shared by all runs; created if missing.
        server_root: the same folder as the servers see it; `None` if they see it under the same path.
        run_id: unique to the run, see `new_run_id`.
        servers: URLs of the servers that may get to know the names of this run.
        pinned: for adapters of a GPU in shared memory; `None` if every version is to be a plain file, because a
            process outside this kernel may read it.
        has_checksums: whether each version has a checksum beside it, by which a worker can compare it.

    Attributes:
        lock: descriptor of the locked file by which other runs see that this one lives; None while nothing is open.
    """

    def __init__(
        self,
        root: Path,
        *,
        server_root: str | None = None,
        run_id: str | None = None,
        servers: Sequence[str] = (),
        pinned: PinnedFilePool | None = None,
        has_checksums: bool = True,
    ) -> None:
        self.run_id = run_id or new_run_id()
        self.root = absolute_dir(root)
        self.server_root = (server_root or str(self.root)).rstrip("/")
        self._servers = list(servers)
        self.pinned = pinned
        self._has_checksums = has_checksums
        self.lock: int | None = None
        # Run ids under which `close` has left names, for the sweep of another run or for a later `close`.
        self._records: set[str] = set()
        self._pid = os.getpid()
        self._note: VersionNote | None = None  # of the version that was written last

    @property
    def directory(self) -> Path:
        return self.root / self.run_id

    @property
    def is_seen_alike(self) -> bool:
        """Whether the servers see the folder under the same path."""
        return self.server_root == str(self.root)

    def open(self) -> None:
        """Create the run folder and mark it as live; does nothing if it is open already and still marked.

        Raises:
            AdapterExportError: `root` cannot be created or written.
        """
        is_lost = self.lock is not None
        if is_lost:
            if self._is_marked():
                return
            # By `RemoveIPC` of systemd, for one, when the last session of a user ends (logind.conf(5)), or in /tmp by
            # systemd-tmpfiles, which deletes what is old. Unmarked, it would never be swept.
            logger.warning("Files of this run in %s were deleted by something else. The run goes on.", self.directory)
            self._unlock()
        if self.run_id in self._records:  # which the sweep of another run may be reading
            self.run_id = new_run_id()
        # Locked under another name first, so that a sweep never meets a run folder without its lock.
        starting = self.root / f".{self.run_id}{_STARTING}"
        try:
            self._make_in_root(starting)
            self.lock = os.open(starting / _OWNER_FILE, os.O_CREAT | os.O_RDWR, _PRIVATE_FILE)
            keep_from_children(self.lock)
            # Before it is written: a sweep leaves an empty file alone, and takes any other one without a lock for that
            # of a dead run. A sweep that looks at it holds the lock for that moment, which this waits for.
            fcntl.flock(self.lock, fcntl.LOCK_EX)
            owner = {"pid": os.getpid(), "host": _host(), "boot": _boot_id(), "servers": self._servers}
            os.write(self.lock, json.dumps(owner).encode())
            if is_lost and self.directory.is_dir():  # with versions that servers may read
                (starting / _OWNER_FILE).rename(self.directory / _OWNER_FILE)
                starting.rmdir()
            else:
                # What `close` could not delete, on a file system that was read-only then, would be in the way.
                shutil.rmtree(self.directory, ignore_errors=True)
                starting.rename(self.directory)
        except OSError as error:
            shutil.rmtree(starting, ignore_errors=True)
            if self.lock is not None:  # else the root may be another user's
                self._release()
            needed = "a folder on a file system with locks (flock)" if error.errno in _NO_LOCKS else "a folder"
            raise AdapterExportError(
                f"The adapter folder {self.directory} cannot be created ({error}). Adapter versions are written there "
                f"for the servers to load. Set lora_sync_dir to {needed} that this process can write and the servers "
                "can read."
            ) from error

    def _is_marked(self) -> bool:
        # By the path, as a file system in user space may count no links.
        try:
            (self.directory / _OWNER_FILE).stat()
        except FileNotFoundError:
            return False
        except OSError:  # `write` will raise it
            pass
        return True

    def _make_in_root(self, folder: Path) -> None:
        for is_last in (False, False, True):
            try:
                self.root.mkdir(mode=_PRIVATE_DIRECTORY, parents=True, exist_ok=True)
                # After `mkdir`, which accepts a folder that another user has made in advance.
                _check_owner(self.root)
                folder.mkdir(mode=_PRIVATE_DIRECTORY)
                return
            # Another run that ends at this moment deletes the root if it is empty (`_release`). If it does so within
            # the `mkdir` of the root, the error is that the root exists (Python 3.10 to 3.13).
            except (FileNotFoundError, FileExistsError):
                if is_last:
                    raise

    def write(self, version: int | str, adapter: CanonicalAdapter) -> StoredAdapter:
        """Write a version, or a probe with a word for a version, under a unique name; see `write_adapter`."""
        if self.pinned is not None and self.pinned.shared is not None:
            self.pinned.shared.reservations.begin(self._name(version))
        _check_utf8(self.server_root)
        self.open()
        stored = self._named(version, adapter)
        assert stored.path is not None
        try:
            # Before the folder is made, so that workers can begin.
            filled = self._fill(stored.name, adapter)
            write_adapter(
                stored.path,
                adapter,
                private=True,
                write_tensors=lambda file, adapter: self._write_tensors(file, adapter, filled),
            )
        except BaseException as error:
            if self.pinned is not None:
                # Not returned to the pool: its content is undefined, and its path was in the folder that is deleted.
                self.pinned.discard(stored.name)
            if isinstance(error, OSError) and not isinstance(error, AdapterExportError):
                raise _export_error(stored.path, adapter, error) from error
            raise
        pinned, shared = filled.pinned, None if self.pinned is None else self.pinned.shared
        return replace(
            stored,
            server_path=self._server_path(stored.name),
            note=self._note,
            reservations=None if shared is None or pinned is None else shared.reservations,
            is_unfinished=pinned is not None and pinned.is_unfinished,
            is_awaited=pinned is not None and pinned.is_awaited,
        )

    def _fill(self, name: str, adapter: CanonicalAdapter) -> "_Filled":
        """Fill a pinned file, if there is one, in one copy from wherever the adapter is."""
        pinned, memory = None, ""
        is_served = adapter.dtype in DTYPES.values()  # any other one is read from a plain file, if at all
        checksum: list[Callable[[], str]] = []

        def begin_checksum() -> None:
            # Of what is on the trainer's device, not of what has come to be in the file. Begun before anything is
            # copied from there: its result would wait for a large copy that is under way.
            checksum[:] = [adapter.checksum.begin()] if self._has_checksums and is_served else []

        if self.pinned is not None and is_served:
            size = len(adapter.header) + adapter.payload_bytes
            pinned = self.pinned.acquire(self.directory / _PINNED, size, adapter.flat.device)
        if self.pinned is None or pinned is None:
            begin_checksum()
        else:
            self.pinned.assign(name, pinned)
            noted_as = name if self._has_checksums else ""
            memory = self.pinned.fill(pinned, adapter.header, adapter.flat, begin_checksum, noted_as=noted_as)
        return _Filled(pinned, memory, *checksum)

    def _write_tensors(self, file: Path, adapter: CanonicalAdapter, filled: "_Filled") -> None:
        """Byte for byte the same file, whether it is a pinned one or not."""
        self._note, pinned = None, filled.pinned
        if pinned is None:
            write_tensors(file, adapter)
        else:
            # Only now that it is filled, so that no reader finds it without its content, or without the lock that makes
            # it wait.
            pinned.move(file)
        if filled.checksum is not None:
            head = digest_of(adapter.header[HEADER_PREFIX_BYTES:], _config_text(adapter, has_note=True).encode())
            shared = f"../{_PINNED}/{SOCKET}" if pinned is not None and pinned.is_shared else ""
            self._note = VersionNote(head=head, checksum=filled.checksum(), files=shared, memory=filled.memory)
            self._note.write(file.parent)

    def finish(self) -> None:
        """Wait until the versions that were written are complete, as they may not be when `write` returns; never fails.

        A process that reads one before that must wait for it, see `engine_plugins.unfinished`.
        """
        if self.pinned is not None:
            self.pinned.finish()

    def check(self, stored: StoredAdapter, adapter: CanonicalAdapter) -> None:
        """Compare the files of a version with `adapter`, from which they were written.

        Raises:
            VerificationError: they hold something else now, or cannot be read.
        """
        assert stored.path is not None
        try:
            config = _config_text(adapter, has_note=stored.note is not None)
            is_config_same = (stored.path / CONFIG_FILE).read_text() == config
            is_same = is_config_same and self._holds(stored.name, stored.path / TENSORS_FILE, adapter)
        except (OSError, ValueError) as error:
            raise VerificationError(f"{_changed(stored)} They cannot be read any more: {error}") from error
        if not is_same:
            raise VerificationError(_changed(stored))

    def _holds(self, name: str, file: Path, adapter: CanonicalAdapter) -> bool:
        self.finish()
        pinned = None if self.pinned is None else self.pinned.assigned(name)
        if pinned is not None:
            # Servers open the path, so another file there counts even though the pinned one is intact.
            return pinned.is_at(file) and pinned.holds(adapter.header, adapter.flat)
        with file.open("rb") as opened:
            # A bytearray, as Python compares bytes with a memoryview one by one, in 25 times the time (3.11).
            header, tensors = opened.read(len(adapter.header)), bytearray(opened.read())
        return header == adapter.header and tensors == bytes_of(adapter.flat.cpu())

    def prepare(self) -> None:
        """Prepare the memory of the next version between syncs; never fails."""
        if self.pinned is not None and self.lock is not None:
            with contextlib.suppress(OSError):  # `write` will raise it
                self.pinned.prepare(self.directory / _PINNED)

    def note(self, version: int | str, adapter: CanonicalAdapter) -> StoredAdapter:
        """Note the name of a version that is not to be written, so that a sweep finds it.

        Raises:
            AdapterExportError: that is not possible.
        """
        self.open()
        stored = self._named(version, adapter)
        assert stored.path is not None
        try:
            stored.path.mkdir(mode=_PRIVATE_DIRECTORY)
        except OSError as error:
            raise _export_error(stored.path, adapter, error) from error
        return stored

    def after(self, stored: StoredAdapter, version: int) -> NextVersion | None:
        """What a later version will be if only its weights differ from a stored one; None if no worker looks for it."""
        if stored.note is None or stored.reservations is None:
            return None
        name = self._name(version)
        return NextVersion(
            name=name,
            server_path=self._server_path(name),
            head=stored.note.head,
            folder=self._server_path(_PINNED),
            has_stacked_experts=stored.has_stacked_experts,
            reservations=stored.reservations,
        )

    def _name(self, version: int | str) -> str:
        return f"{self.run_id}-v{version}"

    def _server_path(self, name: str) -> str:
        return f"{self.server_root}/{self.run_id}/{name}"

    def _named(self, version: int | str, adapter: CanonicalAdapter) -> StoredAdapter:
        name = self._name(version)
        return StoredAdapter(
            name=name,
            version=version if isinstance(version, int) else 0,
            rank=adapter.rank,
            target_modules=adapter.target_modules,
            payload_bytes=adapter.payload_bytes,
            path=self.directory / name,
            has_stacked_experts=adapter.has_stacked_experts,
        )

    def delete(self, stored: StoredAdapter, *, keep_name: bool = False) -> None:
        """Delete a version's files; never fails.

        Args:
            keep_name: leave an empty folder, because a server may still have the name.
        """
        if stored.path is not None:
            if self.pinned is not None:
                # First, as it moves the pinned file out of the folder that is deleted next.
                self.pinned.release(stored.name, self.directory / _PINNED, stored.path / TENSORS_FILE)
            if keep_name:
                _make_record(stored.path)
            else:
                shutil.rmtree(stored.path, ignore_errors=True)

    def close(self, names: Collection[str] = ()) -> None:
        """Delete everything this run wrote; never fails, and may be called again.

        Args:
            names: names that a server may still have. Their folders stay, empty, for the sweep of the next run.
        """
        is_over = self.lock is None and not self._records
        if is_over or self._pid != os.getpid():  # a forked child must not delete its parent's files
            return
        # Deleted before the lock is released, so that no sweep can meet it half-deleted.
        if self.pinned is not None:
            self.pinned.close()
        run_ids = set(self._records)
        if self.lock is not None:
            run_ids.add(self.run_id)
        for run_id in run_ids:
            left = [name for name in names if name.startswith(f"{run_id}-v")]
            if left:
                _delete_all_but(self.root / run_id, left)
                # Kept for a later `close`, which may learn that the servers have dropped the names.
                self._records.add(run_id)
            else:
                _delete_run(self.root / run_id)
                self._records.discard(run_id)
        self._release()

    def _unlock(self) -> None:
        if self.lock is not None:
            forget(self.lock)
            os.close(self.lock)
            self.lock = None

    def _release(self) -> None:
        self._unlock()
        with contextlib.suppress(OSError):  # other runs may still use the root
            self.root.rmdir()


def _check_utf8(path: str) -> None:
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise AdapterExportError(
            f"The path {path!r} is not UTF-8, so no request to a server can carry it. Set lora_sync_dir to a folder "
            "whose path is, such as /data/lora-sync."
        ) from error


def _make_record(version: Path) -> None:
    """Leave only the folder of a version, which is never missing: a run may be killed at any time."""
    with contextlib.suppress(OSError):  # without room even for that, the name stays on the server
        version.mkdir(mode=_PRIVATE_DIRECTORY, exist_ok=True)
        # What a link leads to is not ours.
        for entry in [] if version.is_symlink() else version.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    entry.unlink()


def _delete_all_but(directory: Path, names: Collection[str]) -> None:
    """Leave nothing in a run's folder but its owner and an empty folder for each name."""
    with contextlib.suppress(OSError):
        for entry in [entry for entry in directory.iterdir() if entry.is_dir() and entry.name not in names]:
            shutil.rmtree(entry, ignore_errors=True)
    for name in names:
        _make_record(directory / name)


def _delete_run(directory: Path) -> None:
    """Delete a run's folder, its owner last: no sweep touches a folder without one, and this may be killed anywhere."""
    _delete_all_but(directory, ())
    shutil.rmtree(directory, ignore_errors=True)


def sweep_leftovers(
    root: Path,
    unload: Callable[[str], bool | None],
    knows: Callable[[str], bool] = lambda base_url: True,
    *,
    dry_run: bool = False,
) -> list[str]:
    """Delete the folders of runs that ended without cleaning up, never of a live one.

    A run is dead only if its lock is free *and* it was started under this very kernel, because a lock taken on
    another host need not be visible here. Anything else is left alone and named in the log.

    Args:
        root: the folder shared by all runs.
        unload: called with every adapter name of a dead run before its files go, to unload it from the servers. False
            means that a server may still have it; the name is then kept for a later sweep.
        knows: whether `unload` covers the server at this URL. The names of a run that used another server as well
            are kept for a sweep that knows it.
        dry_run: whether to delete and unload nothing. The result is then as if every unload were confirmed.

    Returns:
        The run ids that were swept, and of which nothing is left.
    """
    swept = []
    for directory in _run_folders(root):
        lock = _lock_if_dead(directory)
        if lock is None:
            continue
        try:
            names = [version.name for version in sorted(directory.glob(f"{directory.name}-v*"))]
            # Before any file goes: vLLM ends if it reads an evicted adapter again and its files are gone.
            left = [name for name in names if not dry_run and unload(name) is False]
            if not all(knows(base_url) for base_url in _servers_of(lock)):
                # The server that is not covered here may have each of them.
                left = names
            if not left:
                swept.append(directory.name)
            if dry_run:
                continue
            if left:
                _delete_all_but(directory, left)
            else:
                _delete_run(directory)
        finally:
            os.close(lock)
    return swept


def _servers_of(lock: int) -> list[str]:
    """The servers that a dead run noted with its lock."""
    servers = json.loads(os.pread(lock, _MAX_OWNER_BYTES, 0)).get("servers", [])
    return [str(server) for server in servers] if isinstance(servers, list) else []


def run_states(root: Path) -> dict[str, str]:
    """The runs with a folder under `root`: `"live"`, `"dead"`, or `"elsewhere"` if that cannot be seen from here."""
    states = {}
    for directory in _run_folders(root):
        lock = _lock_if_dead(directory)
        if lock is not None:
            os.close(lock)
            states[directory.name] = "dead"
        else:
            states[directory.name] = "live" if _is_locked(directory) else "elsewhere"
    return states


def _run_folders(root: Path) -> list[Path]:
    """The folders of runs, also of a run that was killed while it made its folder."""
    found = [*root.glob(f"{RUN_PREFIX}*"), *root.glob(f".{RUN_PREFIX}*{_STARTING}")]
    return sorted(one for one in found if one.is_dir())  # not such as the page that `report` writes


def _is_locked(directory: Path) -> bool:
    try:
        lock = os.open(directory / _OWNER_FILE, os.O_RDWR)
    except OSError:
        return False
    try:
        # A shared lock, so that two such tests at the same time do not take each other for the live run.
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def _lock_if_dead(directory: Path) -> int | None:
    """Take the lock of a dead run, so that no second sweep starts; None for a live or foreign one."""
    try:
        lock = os.open(directory / _OWNER_FILE, os.O_RDWR)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        owner = json.loads(os.pread(lock, _MAX_OWNER_BYTES, 0) or b"{}")
        if not isinstance(owner, dict):
            raise ValueError(owner)
        if owner.get("boot") == _boot_id():
            return lock
        logger.info(
            "Left %s alone: it belongs to a run on host %s, which cannot be seen to have ended from here. "
            "Delete it by hand if that run is over.",
            directory,
            owner.get("host"),
        )
    except (OSError, ValueError):
        pass  # locked by its live run, or not ours to judge
    os.close(lock)
    return None


def _check_owner(root: Path) -> None:
    """Refuse another user's folder where every user may create one: that user could swap the adapters in it."""
    is_world_writable = root.parent.stat().st_mode & 0o002
    user, owner = os.getuid(), root.lstat().st_uid
    # Of a link as well, whose owner may point it elsewhere at any time (`fs.protected_symlinks` may be 0, see proc(5)).
    # One of root, as in /scratch of a cluster, is the administrator's.
    if is_world_writable and (root.stat().st_uid != user or owner not in (user, _ROOT)):
        raise PermissionError(errno.EPERM, "it belongs to another user", str(root))


def _boot_id() -> str:
    """Names this kernel since it booted; containers of one host share it, other hosts never do."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{_host()}-unknown"


def _host() -> str:
    return os.uname().nodename
