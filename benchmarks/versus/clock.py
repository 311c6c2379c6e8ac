"""How long a run may take."""

import contextlib
import faulthandler
import math
import sys
import time
from collections.abc import Iterator


class OutOfTimeError(Exception):
    """The time given with `--budget-s` is spent; what was measured is kept."""


class Clock:
    """Counts down from the start of the run."""

    def __init__(self, budget_s: float) -> None:
        self._started = time.monotonic()
        self._budget_s = budget_s
        self._ends_at = math.inf

    @contextlib.contextmanager
    def at_most(self, seconds: float) -> Iterator[None]:
        """End the process, with the stacks of its threads, if the block takes longer.

        No exception ends a collective that hangs.
        """
        before = self._ends_at
        self._end_process_at(min(before, time.monotonic() + seconds))
        try:
            yield
        finally:
            self._end_process_at(before)

    def _end_process_at(self, moment: float) -> None:
        self._ends_at = moment
        if moment == math.inf:
            faulthandler.cancel_dump_traceback_later()
        else:
            faulthandler.dump_traceback_later(max(moment - time.monotonic(), 0.01), exit=True)

    def left_s(self) -> float:
        return self._budget_s - (time.monotonic() - self._started)

    def check(self) -> None:
        """Raises `OutOfTimeError` if no time is left."""
        if self.left_s() <= 0:
            raise OutOfTimeError(f"the {self._budget_s:g} s of this run are over")

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._started:6.1f} s] {text}", file=sys.stderr, flush=True)
