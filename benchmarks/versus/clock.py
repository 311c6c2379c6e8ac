"""How long a run may take."""

import contextlib
import faulthandler
import math
import sys
import time
from collections.abc import Iterator

# After the run's time, for what cannot be stopped between two turns.
_GRACE_S = 30.0


class OutOfTimeError(Exception):
    """The time given with `--budget-s` is spent; what was measured is kept."""


class Clock:
    """Counts down from the start of the run."""

    def __init__(self, budget_s: float) -> None:
        self._started = time.monotonic()
        self._budget_s = budget_s
        self._patience_s = math.inf

    def left_s(self) -> float:
        return self._budget_s - (time.monotonic() - self._started)

    def check(self) -> None:
        """Raises `OutOfTimeError` if no time is left; within `at_most`, restarts its countdown."""
        if self.left_s() <= 0:
            raise OutOfTimeError(f"the {self._budget_s:g} s of this run are over")
        self._watch()

    @contextlib.contextmanager
    def at_most(self, seconds: float) -> Iterator[None]:
        """End the process, with the stacks of its threads, if the block takes so long without a `check`.

        It ends soon after the run's time as well. No exception ends a collective that hangs.
        """
        before, self._patience_s = self._patience_s, seconds
        self._watch()
        try:
            yield
        finally:
            self._patience_s = before
            self._watch()

    def _watch(self) -> None:
        if self._patience_s == math.inf:
            faulthandler.cancel_dump_traceback_later()
        else:
            seconds = min(self._patience_s, self.left_s() + _GRACE_S)
            faulthandler.dump_traceback_later(max(seconds, 0.01), exit=True)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._started:6.1f} s] {text}", file=sys.stderr, flush=True)
