"""A file that others may find while it is being written: its writer holds a lock on what is still to come.

Readers wait for the part that they need. The kernel releases the lock with the writer's last descriptor, so readers do
not wait for a process that is gone.

Locks of open files (fcntl(2), `F_OFD_SETLK`) have ranges, unlike locks of flock(2), and do not end when the process
closes any descriptor of the file, unlike the other locks of fcntl(2).
"""

import errno
import fcntl
import struct
import time

PART_BYTES = 32 << 20
"""A file is written and read in parts of so much: large against the start of a copy, which takes some 10 us."""
# Copying a large adapter from a GPU takes some tens of milliseconds.
PATIENCE_S = 20.0
# A wait for such a lock has no timeout, so it is looked at again; short against the copy that is waited for.
_PAUSE_S = 0.0002
# Linux has them, and Python names them there only.
_SET, _GET = (getattr(fcntl, name, None) for name in ("F_OFD_SETLK", "F_OFD_GETLK"))
# `struct flock` of 64 bit: type, whence, start, length (0 to the end, however far that is), process (always 0 here).
_FLOCK = struct.Struct("hhqqi4x")
# Such as a network file system, on which the trainer writes plain files and never locks them.
_UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}


def begin(file: int) -> bool:
    """Have readers wait, from here on until `end`; False where there are no such locks, as in some sandboxes."""
    # Never contended: a reader finds the file only after `AdapterStore.write` has moved it, which comes later.
    return _call(file, _SET, _lock(fcntl.F_WRLCK)) is not None


def end(file: int, size: int = 0) -> None:
    """The first `size` bytes are complete; 0 for all of the file."""
    _call(file, _SET, _lock(fcntl.F_UNLCK, 0, size))


def wait(file: int, start: int = 0, size: int = 0, *, patience_s: float = PATIENCE_S) -> None:
    """Return once a part of the file is complete; at once for a file without such a writer.

    Args:
        file: opened by its path, because a lock belongs to an open file.
        start, size: of the part, in bytes; by default all of the file.

    Raises:
        TimeoutError: its writer hangs.
    """
    given_up_at = time.monotonic() + patience_s
    while _is_locked(file, start, size):
        if time.monotonic() > given_up_at:
            raise TimeoutError(f"Its trainer has not finished the file in {patience_s:g} s.")
        time.sleep(_PAUSE_S)


def _is_locked(file: int, start: int, size: int) -> bool:
    found = _call(file, _GET, _lock(fcntl.F_RDLCK, start, size))
    return found is not None and _FLOCK.unpack(found)[0] != fcntl.F_UNLCK


def _lock(kind: int, start: int = 0, size: int = 0) -> bytes:
    return _FLOCK.pack(kind, 0, start, size, 0)


def _call(file: int, command: int | None, lock: bytes) -> bytes | None:
    """The answer of fcntl(2); None if the kernel or the file system has no such locks."""
    try:
        return None if command is None else fcntl.fcntl(file, command, lock)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return None
        raise
