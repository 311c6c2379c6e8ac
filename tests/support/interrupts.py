"""Interrupts at each point of the code that runs, one after the other."""

import sys
from collections.abc import Callable, Collection
from typing import Any


def _raise() -> None:
    raise KeyboardInterrupt


class Interrupts:
    """Interrupts this thread where a function of some modules begins or ends, as Python handles a signal there (3.11).

    Args:
        modules: their names.
        interrupt: raises KeyboardInterrupt, if nothing else is given.

    Attributes:
        place: the number of the next point, from 0.
        is_over: whether the last call had no such point.
        kept: what was raised, as a notebook keeps the last one, and with it the frames.
    """

    def __init__(self, modules: Collection[str], interrupt: Callable[[], object] = _raise) -> None:
        self.place = 0
        self.is_over = False
        self.kept: list[KeyboardInterrupt] = []
        self._modules = modules
        self._interrupt = interrupt

    def call(self, act: Callable[[], object]) -> None:
        """Call `act`, and interrupt it at the next point."""
        left = [None] * self.place

        def trace(frame: Any, event: str, _: object) -> Any:
            if frame.f_globals.get("__name__") in self._modules and event in {"call", "return"}:
                if not left:
                    sys.settrace(None)
                    self._interrupt()
                    return None
                left.pop()
            return trace

        sys.settrace(trace)
        try:
            act()
        except KeyboardInterrupt as error:
            self.kept.append(error)
        finally:
            self.is_over = sys.gettrace() is not None
            sys.settrace(None)
        self.place += 1
