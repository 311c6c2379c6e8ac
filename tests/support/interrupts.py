"""An interrupt at a chosen point of the code that runs."""

import sys
from collections.abc import Callable, Collection
from typing import Any


def _raise() -> None:
    raise KeyboardInterrupt


def interrupt_at(place: int, modules: Collection[str], interrupt: Callable[[], object] = _raise) -> None:
    """Interrupt this thread at one of the points where a function of `modules` begins or ends.

    Python handles a signal at such points (3.11). `sys.settrace(None)` ends this.

    Args:
        place: the number of the point, from 0.
        interrupt: raises KeyboardInterrupt, if nothing else is given.
    """
    left = [None] * place

    def trace(frame: Any, event: str, _: object) -> Any:
        if frame.f_globals.get("__name__") in modules and event in {"call", "return"}:
            if not left:
                sys.settrace(None)
                interrupt()
                return None
            left.pop()
        return trace

    sys.settrace(trace)
