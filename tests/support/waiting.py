"""Wait for what another thread or process does."""

import time
from collections.abc import Callable
from typing import Any


def happens(is_so: Callable[[], Any], patience_s: float = 20.0) -> bool:
    """Whether something becomes true before a test would count as hanging."""
    given_up_at = time.monotonic() + patience_s
    while not is_so() and time.monotonic() < given_up_at:
        time.sleep(0.01)
    return bool(is_so())


def until(is_so: Callable[[], Any], patience_s: float = 60.0) -> None:
    """For what takes servers and trainers longer."""
    assert happens(is_so, patience_s), "it did not happen"
