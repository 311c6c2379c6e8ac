"""A readers-writer lock for the weights: any number of requests, or one change, never both.

All requests run on one event loop, and every decision is made between two awaits, so there are no locks and a request
that is cancelled leaves nothing behind. A request that wants another version than the one in the weights changes them
itself, once the requests before it are done; requests that wait for the same version are let in with it.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from trl_lora_sync.engine_plugins.refusals import Refused


# Compared by identity: two requests may have the same fields, and `list.remove` must find the right one.
@dataclass(eq=False)
class _Waiting:
    """A request or a change that waits.

    Attributes:
        wanted: the version to sample from; None for any.
        changes: whether it comes to change the weights, whatever is there.
        goes_next: whether it waited for the version that was put into the weights just now.
        admitted: becomes true for one who may sample, false for one who may change the weights.
    """

    wanted: str | None = None
    changes: bool = False
    goes_next: bool = False
    admitted: "asyncio.Future[bool]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class WeightsLock:
    """See the module.

    Attributes:
        current: what the weights hold.
        running: how many requests sample.
        waiting: the requests that do not sample yet, in the order of their turns.
    """

    def __init__(self, current: str) -> None:
        self.current = current
        self.running = 0
        self._is_changing = False
        self._changes = 0
        self.waiting: list[_Waiting] = []

    def note(self, current: str) -> None:
        """The weights hold this now; called by the code that changes them, while nothing samples."""
        self.current = current

    @property
    def finished_changes(self) -> int | None:
        """How many changes there were, or None while there is one."""
        return None if self._is_changing else self._changes

    @asynccontextmanager
    async def sampling(
        self, wanted: str | None, change: Callable[[str], Awaitable[None]], timeout_s: float
    ) -> AsyncIterator[str]:
        """Inside, the weights stay as they are, and hold what is wanted.

        Args:
            change: puts a version into the weights; called at most once, while nothing samples.
            timeout_s: how long to wait for requests that sample from another version.

        Raises:
            Refused: they were not done by then; or what `change` raises.
        """
        if not await self._wait(_Waiting(wanted), timeout_s):
            assert wanted is not None
            with self._changed():
                await change(wanted)
                # Counted before others are let in, or a waiting change could replace the version at once.
                self.running += 1
        try:
            yield self.current
        finally:
            self.running -= 1
            self._admit_next()

    @asynccontextmanager
    async def changing(self, timeout_s: float) -> AsyncIterator[None]:
        """Inside, no request samples; errors as for `sampling`."""
        await self._wait(_Waiting(changes=True), timeout_s)
        with self._changed():
            yield

    async def _wait(self, me: _Waiting, timeout_s: float) -> bool:
        """Wait until it may sample (True), or may change the weights (False); counted in either case."""
        self.waiting.append(me)
        self._admit_next()
        try:
            # Leaves the future alone at the timeout and when it is cancelled, as `_leave` reads it.
            await asyncio.wait([me.admitted], timeout=timeout_s)
            if not me.admitted.done():
                raise Refused(
                    409,
                    f"{self.running} other requests were still being answered after {timeout_s:.0f} s, and the weights "
                    "cannot change under them. Wait for them, or end them.",
                )
            return me.admitted.result()
        # CancelledError as well: a request whose client has left must neither stay in the line nor stay counted.
        except BaseException:
            self._leave(me)
            raise

    def _leave(self, me: _Waiting) -> None:
        """Remove a request that does not wait any longer, even if it was let in at that moment."""
        if me in self.waiting:
            self.waiting.remove(me)
        # Admitted at the moment of the cancellation, so what `_admit` has counted is given back.
        elif me.admitted.result():
            self.running -= 1
        else:
            # It has not begun to change anything, so this does not count as a change.
            self._is_changing = False
        self._admit_next()

    @contextmanager
    def _changed(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._is_changing = False
            # After an error too, since the weights may have held something else meanwhile.
            self._changes += 1
            for one in self.waiting:
                # Only for requests that wait at this moment. Later ones queue behind a change, which so gets its turn.
                one.goes_next = self._fits(one)
            self._admit_next()

    def _fits(self, one: _Waiting) -> bool:
        return not one.changes and one.wanted in (None, self.current)

    def _admit_next(self) -> None:
        """Let requests in: those with `goes_next`, then the others in order up to the first for another version."""
        if self._is_changing:
            return
        # Ahead of their turn: each of them would need another change if the weights changed before.
        for one in [one for one in self.waiting if one.goes_next]:
            self._admit(one, samples=True)
        # From the front only, or a stream of requests for this version would keep a change waiting for ever.
        while self.waiting and self._fits(self.waiting[0]):
            self._admit(self.waiting[0], samples=True)
        if self.waiting and not self.running:
            self._admit(self.waiting[0], samples=False)

    def _admit(self, one: _Waiting, *, samples: bool) -> None:
        self.waiting.remove(one)
        if samples:
            self.running += 1
        else:
            self._is_changing = True
        one.admitted.set_result(samples)
