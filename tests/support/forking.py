"""A process that has imported much and forks for each connection to a socket. Runs under any Python, so imports little.

The other ends of its two sockets are held by a `ForkServer` of `fork_server.py`.
"""

import ctypes
import gc
import os
import select
import signal
import socket
from collections.abc import Callable


def fork_for_each_connection(listener: str, owner: str, act: Callable[[socket.socket], None]) -> None:
    """Let a fork of this process `act` on each connection until the other end of `owner` is closed.

    Garbage is collected from then on. Among imports there is none, and looking for it takes a fifth of their time.

    Args:
        listener: descriptor of a listening socket.
        owner: descriptor of one end of a pair of sockets.
        act: returns in a fork only, where what follows is to be its end.
    """
    # Else each garbage collection of a fork looks through all the objects of the imports.
    gc.collect()
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that the kernel takes away the forks that ended
    listening, owned = socket.socket(fileno=int(listener)), socket.socket(fileno=int(owner))
    while True:
        ready, _, _ = select.select([listening, owned], [], [])
        if owned in ready:
            return
        connection, _ = listening.accept()
        if os.fork() == 0:
            end_with_parent()
            listening.close()
            owned.close()
            act(connection)
            return
        connection.close()


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG, as in vllm_server.py
