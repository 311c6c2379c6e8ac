"""Python's garbage collector, kept still where it would be in the way."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Look for no garbage while the block lasts, which should not wait for anything.

    For where millions of small lists are made of which none is garbage, as looking through them again and again takes
    longer than making them; and for where garbage may not be freed.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
