"""How long a run may take."""

import sys
import time


class OutOfTimeError(Exception):
    """The time given with `--budget-s` is spent; what was measured is kept."""


class Clock:
    """Counts down from the start of the run."""

    def __init__(self, budget_s: float) -> None:
        self._started = time.monotonic()
        self._budget_s = budget_s

    def left_s(self) -> float:
        return self._budget_s - (time.monotonic() - self._started)

    def check(self) -> None:
        """Raises `OutOfTimeError` if no time is left."""
        if self.left_s() <= 0:
            raise OutOfTimeError(f"the {self._budget_s:g} s of this run are over")

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._started:6.1f} s] {text}", file=sys.stderr, flush=True)
