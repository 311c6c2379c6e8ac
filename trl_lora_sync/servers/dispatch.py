"""Dispatch work to servers by what each has completed, and give what one could not do to the others.

Knows neither prompts nor HTTP: work is a number of samples at an index, and comes back as whatever the worker made.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from trl_lora_sync.engines.base import CONCURRENT_REQUESTS
from trl_lora_sync.runtime import cancelled

T = TypeVar("T")

# A server decodes so many samples at once about as fast as one, so quotas up to this are handed out whole. Of a larger
# quota, half is under way at a time and the rest goes to the first worker that is done.
FULL_BATCH = 64
# In how many parts a worker holds what is under way, so that it gets more as soon as some of it is done.
_PARTS = 8


# Compared by identity: `in` and `remove` must not take one idle worker for another with equal fields.
@dataclass(eq=False, kw_only=True)
class Worker(Generic[T]):
    """A worker that can do any part of the work.

    Attributes:
        do: does the work at some indices, with at most so many requests at once.
        is_loss: whether an error of `do` means that the worker is away and others may do the same work.
        recover: waits until the worker is back. False if it is gone for good; its error otherwise. Cancelled once the
            work is done.
        speed: samples per second in earlier calls, if known; `dispatch` measures it again.
        is_lost: whether it has to recover first.
        under_way: samples that it works on.
        completed: samples that are there, the last of them since `last_completed_at`.
    """

    do: Callable[[list[int], int], Awaitable[list[T]]]
    is_loss: Callable[[BaseException], bool]
    recover: Callable[[], Awaitable[bool]]
    speed: float | None = None
    is_lost: bool = False
    under_way: int = 0
    completed: int = 0
    last_completed_at: float = 0.0


async def dispatch(samples: Sequence[int], workers: Sequence[Worker[T]]) -> list[T]:
    """Have the work at every index done once; the results are in the order of the indices.

    A worker starts with a quota of the size that its speed suggests. Work of a worker that is lost goes to the others,
    and back to it once it has recovered. Nothing is done twice to have it sooner: keeping the first of two answers
    would prefer short completions.

    Args:
        samples: how many samples the work at each index is.

    Raises:
        BaseException: an error of a worker that is not a loss, or the last loss once no worker is left.
    """
    return await _Dispatch(samples, workers).run()


class _Dispatch(Generic[T]):
    def __init__(self, samples: Sequence[int], workers: Sequence[Worker[T]]) -> None:
        self._samples = samples
        self._workers = list(workers)
        self._waiting = deque(range(len(samples)))
        self._results: dict[int, T] = {}
        self._parts: dict[asyncio.Future[list[T]], tuple[Worker[T], list[int]]] = {}
        self._recoveries: dict[asyncio.Future[bool], Worker[T]] = {}
        self._last_loss: BaseException | None = None

    async def run(self) -> list[T]:
        started = time.monotonic()
        try:
            for worker in self._workers:
                if worker.is_lost:
                    self._recover(worker)
            while len(self._results) < len(self._samples):
                self._hand_out()
                if not self._parts and not self._recoveries:
                    # Recoveries alone do not lead here: that of the last server raises (`Fleet._exclude`).
                    assert self._last_loss is not None
                    raise self._last_loss
                running: list[asyncio.Future[Any]] = [*self._parts, *self._recoveries]
                for ended in (await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED))[0]:
                    self._collect(ended)
        finally:
            # Also after the last result: a server that is still away may not hold up a batch that is complete.
            await cancelled([*self._parts, *self._recoveries])
        for worker in self._workers:
            if worker.completed:
                # Until its last part and not until the end: a worker for which nothing was left is not slow.
                speed = worker.completed / max(worker.last_completed_at - started, 1e-6)
                worker.speed = speed if worker.speed is None else (worker.speed + speed) / 2
        return [self._results[index] for index in range(len(self._samples))]

    def _recover(self, worker: Worker[T]) -> None:
        worker.is_lost = True
        self._recoveries[asyncio.ensure_future(worker.recover())] = worker

    def _hand_out(self) -> None:
        able = [worker for worker in self._workers if not worker.is_lost]
        # From all samples and not from what is left: a limit is how much a worker may have under way at any moment.
        limits = quotas(sum(self._samples), [worker.speed for worker in able])
        while self._waiting:
            taking = [(worker, limit) for worker, limit in zip(able, limits, strict=True) if worker.under_way < limit]
            if not taking:
                return
            # One part for each in turn, so that little work is still under way on all workers at once.
            for worker, limit in taking:
                self._hand_part_to(worker, limit, is_alone=len(able) == 1)

    def _hand_part_to(self, worker: Worker[T], limit: float, *, is_alone: bool) -> None:
        size = limit if is_alone else limit / _PARTS
        indices: list[int] = []
        # At least one index: a group of samples stays whole, even if it is larger than a part.
        while self._waiting and (not indices or self._samples_at(indices) < size):
            indices.append(self._waiting.popleft())
        if indices:
            # So that all parts of a worker together have `CONCURRENT_REQUESTS` under way.
            at_once = CONCURRENT_REQUESTS if is_alone else CONCURRENT_REQUESTS // _PARTS
            worker.under_way += self._samples_at(indices)
            self._parts[asyncio.ensure_future(worker.do(indices, at_once))] = (worker, indices)

    def _collect(self, ended: "asyncio.Future[Any]") -> None:
        if ended in self._recoveries:
            worker = self._recoveries.pop(ended)
            # Raises the error of a recovery, which ends all work: without this worker the caller may not go on.
            if ended.result():
                worker.is_lost = False
            else:
                self._workers.remove(worker)
            return
        worker, indices = self._parts.pop(ended)
        worker.under_way -= self._samples_at(indices)
        error = ended.exception()
        if error is None:
            worker.completed += self._samples_at(indices)
            worker.last_completed_at = time.monotonic()
            self._results.update(zip(indices, ended.result(), strict=True))
        elif worker.is_loss(error):
            self._last_loss = error
            # To the front, in their order, as they have waited longest.
            self._waiting.extendleft(reversed(indices))
            # All parts of a worker fail with it, and it recovers once.
            if not worker.is_lost and worker in self._workers:
                self._recover(worker)
        else:
            raise error

    def _samples_at(self, indices: list[int]) -> int:
        return sum(self._samples[index] for index in indices)


def quotas(samples: int, speeds: Sequence[float | None]) -> list[float]:
    """How many samples each worker may have under way; a worker of unknown speed counts as an average one."""
    known = [speed for speed in speeds if speed is not None]
    average = sum(known) / len(known) if known else 1.0
    weights = [average if speed is None else speed for speed in speeds]
    even = [samples * weight / sum(weights) for weight in weights]
    if len(even) == 1:
        return even
    return [quota if quota <= FULL_BATCH else max(FULL_BATCH, quota / 2) for quota in even]
