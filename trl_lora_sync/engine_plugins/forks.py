"""Files and sockets whose end at the other side means that this process has ended.

A forked child has them open as well, and may live on: a worker of a data loader for seconds, and one of a process pool
for ever. So each fork gives up what was registered here.
"""

import os
import socket
from weakref import WeakKeyDictionary

# With the file each is of: code that closes all it finds, as a daemon does, lets another file have the number.
_descriptors: dict[int, os.stat_result] = {}
# These close by themselves when they are collected, and their numbers may be another file's then.
_sockets: WeakKeyDictionary[socket.socket, os.stat_result] = WeakKeyDictionary()


def keep_from_children(one: int | socket.socket) -> None:
    """Let no process that is forked from now on hold it open; of a descriptor, `forget` comes before it is closed."""
    if isinstance(one, int):
        _descriptors[one] = os.fstat(one)
    else:
        _sockets[one] = os.fstat(one.fileno())


def forget(descriptor: int) -> None:
    """It is about to be closed, and its number may be another file's then."""
    _descriptors.pop(descriptor, None)


def _give_up() -> None:
    held = [*_descriptors.items(), *((one.fileno(), file) for one, file in _sockets.items())]
    inherited = {descriptor for descriptor, file in held if _is_of(descriptor, file)}
    if not inherited:
        return
    # Replaced and not closed: an object in the child would close the number once more, and with it another file.
    os.close(min(inherited))  # for room at the limit of open files; the next line often gets this number
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in inherited - {nothing}:
        os.dup2(nothing, descriptor, inheritable=False)
    if nothing not in inherited:
        os.close(nothing)
    _descriptors.clear()
    _sockets.clear()


def _is_of(descriptor: int, file: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), file)
    except OSError:
        return False


os.register_at_fork(after_in_child=_give_up)
