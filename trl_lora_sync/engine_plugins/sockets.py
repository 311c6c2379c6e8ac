"""What the sockets in a trainer's folder have in common."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# As `runtime.watch`, which a worker has no use for: calls the function when the socket can be read, until its result is
# called.
Watch = Callable[[socket.socket, Callable[[], None]], Callable[[], None]]


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Another path to the same socket; the kernel takes no more than 107 characters."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
