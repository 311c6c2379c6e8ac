"""`asyncio.timeout`, also on Python 3.10, where nothing but the standard library need be installed.

Both raise `asyncio.TimeoutError`, which is the built-in one from 3.11 on.
"""

import asyncio
import sys

if sys.version_info >= (3, 11):
    timeout = asyncio.timeout
else:
    from collections.abc import AsyncIterator
    from contextlib import asynccontextmanager

    @asynccontextmanager
    async def timeout(seconds: float) -> AsyncIterator[None]:
        """Cancel the block after so many seconds, and raise `asyncio.TimeoutError` instead of `CancelledError`."""
        task, is_over = asyncio.current_task(), asyncio.Event()
        assert task is not None

        # Python 3.10 has no `Task.uncancel`, so a cancellation from elsewhere at the same moment counts as the timeout.
        def end() -> None:
            is_over.set()
            task.cancel()

        timer = asyncio.get_running_loop().call_later(seconds, end)
        try:
            yield
        except asyncio.CancelledError:
            # Otherwise the task was cancelled from elsewhere, and stays cancelled.
            if is_over.is_set():
                raise asyncio.TimeoutError from None
            raise
        finally:
            timer.cancel()


__all__ = ["timeout"]
