"""Wait for what another thread or process does."""

import time
from collections.abc import Callable

_PATIENCE_S = 20.0


def happens(is_so: Callable[[], bool]) -> bool:
    """Whether something becomes true before a test would count as hanging."""
    given_up_at = time.monotonic() + _PATIENCE_S
    while not is_so() and time.monotonic() < given_up_at:
        time.sleep(0.01)
    return is_so()
