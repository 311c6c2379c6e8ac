"""A file that others may find while it is being written: its writer holds a lock, and every reader waits for that.

The kernel releases the lock with the writer's last descriptor, so readers do not wait for a process that is gone.
"""

import fcntl
import time

# Copying a large adapter from a GPU takes some tens of milliseconds.
_PATIENCE_S = 20.0
# flock(2) has no timeout, so the lock is tried again; short against the copy that is waited for.
_PAUSE_S = 0.0002


def begin(file: int) -> None:
    """Have readers wait, from here on until `end`."""
    # Never contended: a reader finds the file only after `AdapterStore.write` has moved it, which comes later. Not the
    # locks of fcntl(2), which end when the process closes any descriptor of the file.
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def end(file: int) -> None:
    """The file is complete."""
    fcntl.flock(file, fcntl.LOCK_UN)


def wait(file: int, patience_s: float = _PATIENCE_S) -> None:
    """Return once the file is complete; at once for a file without such a writer.

    Args:
        file: opened by its path, because a lock belongs to an open file.

    Raises:
        TimeoutError: its writer hangs.
    """
    given_up_at = time.monotonic() + patience_s
    while True:
        try:
            # Shared, so that several workers do not wait for each other.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > given_up_at:
                raise TimeoutError(f"Its trainer has not finished the file in {patience_s:g} s.") from None
            time.sleep(_PAUSE_S)
        else:
            # At once, as `begin` does not wait for readers when the file is written again.
            fcntl.flock(file, fcntl.LOCK_UN)
            return
