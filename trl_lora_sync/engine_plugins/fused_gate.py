"""Who may sample, and when the weights may change: any number of requests, or one change, never both.

All requests run on one event loop, so there are no locks. A request that wants another version than the one in the
weights changes them itself, once those before it are done; whoever waits for the same version goes in with it.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from trl_lora_sync.engine_plugins.routes import Refused


@dataclass(eq=False)
class _Waiting:
    """Somebody who is not let in yet.

    Attributes:
        wanted: the version to sample from; None for whichever is there.
        changes: whether it comes to change the weights, whatever is there.
    """

    wanted: str | None = None
    changes: bool = False
    goes_next: bool = False


class Gate:
    """See the module. `current` is what the weights hold, and is set by whoever changes them."""

    def __init__(self, current: str) -> None:
        self.current = current
        self._running = 0
        self._is_changing = False
        self._changes = 0
        self._waiting: list[_Waiting] = []
        self._moved = asyncio.Condition()

    @property
    def at_rest(self) -> int | None:
        """How many changes there were, or None while there is one."""
        return None if self._is_changing else self._changes

    @property
    def running(self) -> int:
        """How many requests are sampling."""
        return self._running

    @asynccontextmanager
    async def sampling(
        self, wanted: str | None, change: Callable[[str], Awaitable[None]], timeout_s: float
    ) -> AsyncIterator[str]:
        """Inside, the weights stay as they are, and hold what is wanted.

        Args:
            change: puts a version into the weights; called at most once, with nobody inside.
            timeout_s: how long to wait for those that sample from something else.

        Raises:
            Refused: they were not done by then; or what `change` raises.
        """
        me = _Waiting(wanted)
        changes = await self._wait(me, lambda: self._may_run(me), timeout_s)
        if changes:
            assert wanted is not None
            async with self._changed():
                await change(wanted)
                self._running += 1
        try:
            yield self.current
        finally:
            self._running -= 1
            await self._notify()

    @asynccontextmanager
    async def changing(self, timeout_s: float) -> AsyncIterator[None]:
        """Inside, nobody samples; errors as for `sampling`."""
        me = _Waiting(changes=True)
        await self._wait(me, lambda: False, timeout_s)
        async with self._changed():
            yield

    async def _wait(self, me: _Waiting, may_run: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until it may sample (False, and counted), or may change the weights (True)."""
        self._waiting.append(me)
        try:
            async with self._moved:
                try:
                    async with asyncio.timeout(timeout_s):
                        await self._moved.wait_for(lambda: may_run() or self._may_change(me))
                except TimeoutError as error:
                    raise Refused(
                        409,
                        f"{self._running} other requests were still being answered after {timeout_s:.0f} s, and the "
                        "weights cannot change under them. Wait for them, or end them.",
                    ) from error
                if may_run():
                    self._running += 1
                    return False
                self._is_changing = True
                return True
        finally:
            self._waiting.remove(me)
            await self._notify()

    @asynccontextmanager
    async def _changed(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            self._is_changing = False
            self._changes += 1
            for one in self._waiting:
                one.goes_next = self._fits(one)
            await self._notify()

    def _fits(self, one: _Waiting) -> bool:
        return not one.changes and one.wanted in (None, self.current)

    def _may_run(self, me: _Waiting) -> bool:
        if self._is_changing or not self._fits(me):
            return False
        older = self._waiting[: self._waiting.index(me)]
        return me.goes_next or all(self._fits(one) for one in older)

    def _may_change(self, me: _Waiting) -> bool:
        if self._is_changing or self._running or self._fits(me):
            return False
        first = next(one for one in self._waiting if not self._fits(one))
        return first is me and not any(one.goes_next and self._fits(one) for one in self._waiting)

    async def _notify(self) -> None:
        async with self._moved:
            self._moved.notify_all()
