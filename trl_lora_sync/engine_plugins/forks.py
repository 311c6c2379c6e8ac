"""Files and sockets whose end at the other side means that this process has ended.

A forked child has them open as well, and may live on: a worker of a data loader for seconds, and one of a process pool
for ever. So each fork gives up what was registered here.
"""

import os

_of_this_process: set[int] = set()


def keep_from_children(descriptor: int) -> None:
    """Let no process that is forked from now on hold this file or socket open; `forget` comes before it is closed."""
    _of_this_process.add(descriptor)


def forget(descriptor: int) -> None:
    """It is about to be closed, and its number may be another file's then."""
    _of_this_process.discard(descriptor)


def _give_up() -> None:
    if not _of_this_process:
        return
    # Replaced and not closed: an object in the child would close the number once more, and with it another file.
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in _of_this_process:
        os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)
    _of_this_process.clear()


os.register_at_fork(after_in_child=_give_up)
