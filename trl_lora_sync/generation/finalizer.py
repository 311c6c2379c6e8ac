"""Ends what an object has on servers and disks, when it is collected or the interpreter exits."""

import _thread
import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable


class Finalizer:
    """Calls `end` once: when `owner` is collected, or at the latest when the interpreter exits.

    The garbage collector interrupts any code, whatever lock that holds, and `end` would wait for that forever. So it is
    left to a thread then, which not even `threading` starts, and for which the interpreter's exit waits. A forked child
    ends nothing, as it all belongs to its parent.

    Args:
        owner: not referred to from here.
        end: must not refer to `owner`; never fails.
    """

    def __init__(self, owner: object, end: Callable[[], None]) -> None:
        self._end: Callable[[], None] | None = end
        self._pid = os.getpid()
        self._turn = threading.Lock()
        # At exit, `atexit` calls `run` itself and waits for it; the finalizer would only start a thread.
        weakref.finalize(owner, _leave_to_thread, self.run).atexit = False
        # Keeps this object and `end` alive, and not the owner.
        atexit.register(self.run)

    def run(self) -> None:
        if os.getpid() != self._pid:
            return
        # The exit of the interpreter waits here for a thread that has begun to end it.
        with self._turn:
            if self._end is not None:
                end, self._end = self._end, None
                end()
                # What only `end` refers to is freed while the exit waits. A thread that frees a tensor during the exit
                # itself ends the process with SIGABRT: CPython 3.11 unwinds that thread, and torch cannot be unwound.
                del end
        # Last, because the exit does not wait for a call that is no longer registered.
        atexit.unregister(self.run)


def _leave_to_thread(act: Callable[[], None]) -> None:
    # Not by `threading`: `Thread.start` takes a lock of that module, which the interrupted code may hold, and waits for
    # the new thread.
    with contextlib.suppress(RuntimeError):  # the interpreter is ending, which has called it already
        _thread.start_new_thread(act, ())
