"""The adapters that were pushed to one server process: taken in whole or not at all, gone when the process is.

Layout: `<root>/trl-lora-sync-push-<pid>-<random>/<name>/{adapter_model.safetensors, adapter_config.json}`. The process
holds a lock on its folder, which the kernel releases however the process ends; so the next server
recognises leftovers: their lock is free. Nothing is fsynced, because nothing outlives the process. Knows nothing of
HTTP beyond the status that goes with a refusal.
"""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trl_lora_sync.engine_plugins.checksum import ROW_BYTES, Checksum
from trl_lora_sync.engine_plugins.refusals import Refused, check_name
from trl_lora_sync.engine_plugins.safetensors_file import CONFIG_FILE, MALFORMED, TENSORS_FILE, head_of
from trl_lora_sync.engine_plugins.vllm_push import CONFIG_KEY

FOLDER_PREFIX = "trl-lora-sync-push-"

_PRIVATE_DIRECTORY, _PRIVATE_FILE = 0o700, 0o600
# Of the file system, left for others: vLLM's own queues are in /dev/shm, and touching one there is no room for kills.
_SHARE_LEFT_FREE = 0.05


class PushStore:
    """The pushed adapters of this process. Thread-safe.

    Args:
        root: where the folder of this process goes, with the first adapter.
        max_bytes: the largest adapter that is taken.
    """

    def __init__(self, root: Path, *, max_bytes: int) -> None:
        self.root = root
        self.max_bytes = max_bytes
        self._folder: Path | None = None
        self._descriptor: int | None = None
        self._pid = os.getpid()
        self._kept: dict[str, tuple[str, int]] = {}  # checksum and size, by name
        self.arriving = 0  # bytes that were promised and are not in the file system yet
        # Guards the fields. An upload takes it inside its own lock, never the other way round.
        self._lock = threading.Lock()

    def sizes(self) -> dict[str, int]:
        """Bytes of each adapter that is there, by name."""
        with self._lock:
            return {name: size for name, (_, size) in self._kept.items()}

    def path_of(self, name: str, checksum: str) -> Path | None:
        """The folder of an adapter that is there already, or None.

        Raises:
            Refused: the name is not allowed, or holds other bytes.
        """
        check_name(name)
        with self._lock:
            if name not in self._kept:
                return None
            if self._kept[name][0] != checksum:
                raise Refused(409, f"{name} is there already, with other bytes. A name is used once.")
            return self.open_folder() / name

    def begin(self, name: str, size: int) -> "Upload":
        """Make room for an adapter of `size` bytes.

        Raises:
            Refused: the name is not allowed, the adapter is too large, or there is no room.
        """
        check_name(name)
        if size > self.max_bytes:
            raise Refused(413, f"{size} bytes are more than the {self.max_bytes} that this server takes.")
        with self._lock:
            try:
                folder = self.open_folder()
                self._check_room(folder, size)
                # `Upload` reserves its room under this lock, so no two uploads can count on the same bytes.
                return Upload(self, folder, name, size)
            except OSError as error:
                raise _refusal(error, self.root) from error

    def delete(self, name: str) -> bool:
        """Delete an adapter's files; returns whether there were any."""
        check_name(name)
        with self._lock:
            # Under one lock with the files: a push of this name meanwhile finds all of it or nothing.
            if self._kept.pop(name, None) is None:
                return False
            shutil.rmtree(self.open_folder() / name, ignore_errors=True)
            return True

    def close(self) -> None:
        """Delete everything; never fails, and may be called again."""
        with self._lock:
            if self._folder is None or self._descriptor is None or self._pid != os.getpid():
                return  # a forked child must not delete its parent's files
            # Deleted before the lock is released, so that no sweep meets it half-deleted.
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._descriptor)
            self._folder = self._descriptor = None
            self._kept.clear()

    def open_folder(self) -> Path:
        if self._folder is None:
            name = f"{FOLDER_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
            # Locked under another name first, so that no sweep meets it without its lock.
            starting = self.root / f".{name}"
            starting.mkdir(mode=_PRIVATE_DIRECTORY)
            self._descriptor = os.open(starting, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The lock belongs to the inode, and stays through the new name.
            self._folder = starting.rename(self.root / name)
        return self._folder

    def _check_room(self, folder: Path, size: int) -> None:
        system = os.statvfs(folder)
        free = system.f_frsize * (system.f_bavail - system.f_blocks * _SHARE_LEFT_FREE) - self.arriving
        if size > free:
            raise OSError(errno.ENOSPC, f"{size} bytes were announced, {max(0, int(free))} are free")

    # Called by uploads

    def reserve(self, size: int) -> None:
        # The caller holds the lock, see `begin`.
        self.arriving += size

    def release(self, size: int) -> None:
        with self._lock:
            self.arriving -= size

    def admit(self, upload: "Upload", checksum: str) -> Path:
        with self._lock:
            path = upload.folder.parent / upload.name
            if self._folder != upload.folder.parent:
                raise Refused(410, "The server is shutting down.")
            upload.folder.rename(path)  # refuses a name that another upload took meanwhile
            self._kept[upload.name] = (checksum, upload.size)
            return path


class Upload:
    """One adapter on its way in, by `write` in order or by `receive` in parts. `abort` may run in another thread.

    Raises:
        OSError: there is no room, or the folder is gone.
    """

    def __init__(self, store: PushStore, folder: Path, name: str, size: int) -> None:
        self.name = name
        self.size = size
        # No adapter's name begins with a dot (`check_name`), so no upload can be renamed onto this folder.
        self.folder = folder / f".{secrets.token_hex(8)}.partial"
        self._store = store
        self._checksums = {0: Checksum()}  # by where the part begins
        self._left = size
        self._over = False
        self._lock = threading.Lock()
        self.folder.mkdir(mode=_PRIVATE_DIRECTORY)
        try:
            self._file = os.open(self._tensors, os.O_CREAT | os.O_EXCL | os.O_RDWR, _PRIVATE_FILE)
        except OSError:
            self.folder.rmdir()
            raise
        # Last, so that an error above leaves nothing to release.
        store.reserve(size)

    @property
    def _tensors(self) -> Path:
        return self.folder / TENSORS_FILE

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes.

        Raises:
            Refused: there are more than announced, or the file system is full.
        """
        with self._lock:
            # The upload was broken off while this batch waited for a thread.
            if self._over:
                return
            if len(data) > self._left:
                raise Refused(400, f"More than the announced {self.size} bytes arrived.")
            self._checksums[0].update(data)
            # Under the lock, as `abort` closes this descriptor, whose number may then be another file's.
            self._write_at(self._file, memoryview(data), self.size - self._left)
            self._left -= len(data)
        self._store.release(len(data))

    def receive(self, receive_into: Callable[[memoryview], int], start: int, end: int) -> None:
        """Take the bytes from `start` to `end`, which is a whole number of rows of the checksum or the end of the file.

        Args:
            receive_into: receives some bytes into the memory it is given, and returns how many; 0 at the end.

        Raises:
            ConnectionError: the bytes ended before that.
            Refused: the file system is full.
        """
        if start == end:  # of few bytes, some parts are empty
            return
        checksum, row = Checksum(), memoryview(bytearray(ROW_BYTES))
        with self._lock:
            if self._over:
                return
            # A second descriptor, as `abort` may close the first one at any moment.
            file = os.dup(self._file)
            self._checksums[start] = checksum
        try:
            while start < end:
                wanted = row[: min(len(row), end - start)]
                filled = 0
                while filled < len(wanted):
                    count = receive_into(wanted[filled:])
                    if not count:
                        raise ConnectionError("A connection ended before all of its part had arrived.")
                    filled += count
                checksum.update(wanted)
                # Without the lock, so that parts are written at the same time; each has a separate region of the file.
                self._write_at(file, wanted, start)
                start += filled
                with self._lock:
                    # `abort` has released these bytes together with all that were left.
                    if self._over:
                        return
                    self._left -= filled
                self._store.release(filled)
        finally:
            os.close(file)

    def _write_at(self, file: int, data: memoryview, start: int) -> None:
        try:
            while data:
                count = os.pwrite(file, data, start)
                data, start = data[count:], start + count
        except OSError as error:
            raise _refusal(error, self._store.root) from error

    def finish(self, checksum: str) -> Path:
        """Check what arrived and give it its name.

        Raises:
            Refused: bytes are missing, do not match the checksum, or are not an adapter.
        """
        with self._lock:
            if self._over:
                raise Refused(409, "This upload is over.")
            if self._left:
                raise Refused(400, f"The body ended {self._left} bytes before the announced {self.size}.")
            # In the order of the file, which is not the order in which connections began.
            if Checksum.joined([part for _, part in sorted(self._checksums.items())]) != checksum:
                raise Refused(422, "The bytes that arrived do not match the checksum.")
            config = _config_in(self._file)
            try:
                descriptor = os.open(self.folder / CONFIG_FILE, os.O_CREAT | os.O_WRONLY, _PRIVATE_FILE)
                with os.fdopen(descriptor, "w") as file:
                    json.dump(config, file)
                path = self._store.admit(self, checksum)
            except OSError as error:
                raise _refusal(error, self._store.root) from error
            # Only now: after an error above, `abort` still deletes the folder and releases the room.
            self._over = True
            os.close(self._file)
            return path

    def abort(self) -> None:
        """Delete what has arrived; does nothing after `finish`."""
        with self._lock:
            if self._over:
                return
            self._over = True
            os.close(self._file)
            shutil.rmtree(self.folder, ignore_errors=True)
        self._store.release(self._left)


def sweep_dead_servers(root: Path) -> list[str]:
    """Delete the folders of servers that were killed, never the folder of a running server or of another user."""
    swept = []
    for folder in sorted(root.glob(f"{FOLDER_PREFIX}*")):
        with contextlib.suppress(OSError):
            # Every user may write to /dev/shm, and a link there could lead to any folder.
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Root can lock the folders of all users, so a free lock alone does not show whose folder it is.
                owner = os.fstat(descriptor)
                if owner.st_uid == os.getuid() and stat.S_IMODE(owner.st_mode) == _PRIVATE_DIRECTORY:
                    shutil.rmtree(folder, ignore_errors=True)
                    swept.append(folder.name)
            finally:
                os.close(descriptor)
    return swept


def _config_in(file: int) -> dict[str, Any]:
    """The adapter's configuration from the head of its safetensors file, whose layout is checked against its size."""
    try:
        head = head_of(file)
        metadata, entries = head.content()
        config = json.loads(metadata[CONFIG_KEY])
        end = max(entry["data_offsets"][1] for entry in entries.values())
        if end != head.size or not isinstance(config, dict):
            raise ValueError(f"tensors that end at {end}")
    except MALFORMED as error:
        raise Refused(
            422,
            f"The body is not a safetensors file with {CONFIG_KEY!r} in its metadata "
            f"({type(error).__name__}: {error}).",
        ) from error
    return config


def _refusal(error: OSError, root: Path) -> Refused:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Refused(507, f"There is no room in {root} ({error.strerror}).")
    # Of renaming a folder to the name of another with files in it (rename(2)).
    if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
        return Refused(409, "Another upload took the name meanwhile.")
    return Refused(500, f"The adapter cannot be kept in {root} ({error.strerror}).")
