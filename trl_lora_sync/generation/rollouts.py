"""Sampling beside the training: TRL's rollout loop on a thread; on process 0 only.

Its requests run on the loop of `runtime`, and a running request takes no thread.

Each group of samples comes from exactly one version, the newest when the group began, and carries its number. A lease
keeps that version on the servers until the last sample of the group. Once its samples would be too old to train on,
what is left of the group is cancelled and the lease ends.
"""

import asyncio
import contextlib
import copy
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, _AsyncRolloutLoop

from trl_lora_sync.adapter.store import StoredAdapter
from trl_lora_sync.engines.base import Completion, Deadline, PromptGroup, Sampling
from trl_lora_sync.errors import LoRASyncError
from trl_lora_sync.runtime import GRACE_S, BlockingThread, Event, from_another_loop
from trl_lora_sync.settings import SyncSettings
from trl_lora_sync.sync import AdapterSync

# TRL's names for what its trainer counts when it takes a sample that is too old.
_DROPPED = "sample/dropped_stale_total"
# What `_generate_one` returns of a cancelled sample: its messages, token ids and training rows, two counts of tool
# calls, and its reward.
_NOTHING: tuple[Any, ...] = ([], [], [], 0, 0, None)
_METRICS_AT_MOST = 4096  # as in TRL's worker
# As in TRL's requests (1.16). vLLM takes a signed integer of 64 bits (0.31, completion/protocol.py).
_SEED_BITS = 63


class _ExpiredError(Exception):
    """The version of a group is too old to train on."""


@dataclass(eq=False, kw_only=True)
class _Group:
    """The samples of one prompt that are under way.

    Attributes:
        stored: the version that all of them come from.
        lease: that version, until the lease is over.
        left: samples that have not ended.
        requests: the requests that are under way.
        is_expired: whether the version is too old to train on.
    """

    stored: StoredAdapter
    lease: list[StoredAdapter]
    left: int
    requests: "set[asyncio.Future[list[Completion]]]" = field(default_factory=set)
    is_expired: bool = False


class RolloutLoop(_AsyncRolloutLoop):  # type: ignore[misc]
    """TRL's loop, which prompts, calls tools, scores and queues; only the sampling is ours.

    Args:
        sync: has the servers and the versions, and leases these.
        deadline: makes the deadline of one request.
        oldest: the oldest version whose samples can still be trained on.
        **kwargs: arguments of TRL's class.
    """

    def __init__(self, *, sync: AdapterSync, deadline: Callable[[], Deadline], oldest: int, **kwargs: Any) -> None:
        # The version of the group that was begun last; TRL's loop reads it once for each group, right after.
        # One task takes all rows, so no other group begins in between.
        self._newest_group = SimpleNamespace(value=0)
        super().__init__(model_version_value=self._newest_group, **kwargs)
        self._sync = sync
        self._deadline = deadline
        self._oldest = oldest
        self._groups: dict[int, _Group] = {}
        # TRL calls `_generate_one_turn` without the number of the group. Each sample is a task, which has a context.
        self._group_of_task: ContextVar[_Group] = ContextVar("group")
        self._main: asyncio.Task[Any] | None = None

    # From the trainer's thread

    def stop(self) -> None:
        """End the loop: what is under way is cancelled."""
        self._call(self._stop)

    def expire(self, oldest: int) -> None:
        """Samples of versions before `oldest` cannot be trained on any more."""
        self._call(partial(self._expire, oldest))

    def release_all(self) -> None:
        """Give all leases back, once the loop has ended."""
        for group_id in list(self._groups):
            self._release(group_id)

    def _call(self, act: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(act)

    # In the loop's thread

    def _stop(self) -> None:
        # Set before the cancellation, which `_run_loops` takes for the end only if it is set.
        self._stop_event.set()
        if self._main is not None:
            self._main.cancel()

    def _expire(self, oldest: int) -> None:
        # In the loop's thread, as no other thread may cancel a future of asyncio.
        self._oldest = oldest
        for group in self._groups.values():
            if group.stored.version < oldest and not group.is_expired:
                group.is_expired = True
                for request in group.requests:
                    request.cancel()
                self._end_lease_if_expired(group)

    async def _run_loops(self, stop_event: asyncio.Event) -> None:
        # TRL's own opens connections to its one server here (1.16), and the requests of this class go to the fleet.
        self._main = asyncio.current_task()
        loops = [asyncio.ensure_future(loop(stop_event=stop_event)) for loop in (self._generate_loop, self._score_loop)]
        try:
            # `gather` raises the first error and lets the other loop run on, so both are cancelled below.
            await asyncio.gather(*loops)
        except asyncio.CancelledError:
            if not stop_event.is_set():
                raise
        finally:
            for one in loops:
                one.cancel()
            # Their `finally` blocks cancel the samples that are under way (TRL 1.16).
            await asyncio.gather(*loops, return_exceptions=True)

    def _repeat_iterator(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for group_id, row in super()._repeat_iterator():
            # Leased with the first row, as a sync may activate another version before the last sample begins.
            if group_id not in self._groups:
                stored = self._sync.ledger.lease()
                group = _Group(stored=stored, lease=[stored], left=self.num_generations)
                self._groups[group_id] = group
                self._newest_group.value = group.stored.version
            yield group_id, row

    async def _generate_one(self, prompt: Any, tool_dict: Any, tools: Any, group_id: int = 0) -> tuple[Any, ...]:
        group = self._groups[group_id]
        self._group_of_task.set(group)
        try:
            answer: tuple[Any, ...] = await super()._generate_one(
                prompt, tool_dict=tool_dict, tools=tools, group_id=group_id
            )
            return answer
        # TRL's loop ends with any error of a sample, and with a cancelled one (`_generate_loop`, 1.16).
        except _ExpiredError:
            return _NOTHING
        finally:
            # However the sample has ended; the last one of the group ends the lease.
            group.left -= 1
            if not group.left:
                self._release(group_id)

    def _release(self, group_id: int) -> None:
        # The trainer's thread may have released it in `release_all`.
        group = self._groups.pop(group_id, None)
        if group is not None:
            self._end_lease(group)

    def _end_lease_if_expired(self, group: _Group) -> None:
        # Without waiting for the last sample: it may be in a slow tool or environment, and makes no request after that.
        if group.is_expired and not group.requests:
            self._end_lease(group)

    def _end_lease(self, group: _Group) -> None:
        with contextlib.suppress(IndexError):  # it is over
            self._sync.ledger.release(group.lease.pop())

    async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
        group = self._group_of_task.get()
        # Nothing is awaited up to `requests.add`, so `_expire` either shows here or finds the request to cancel.
        if group.is_expired:
            raise _ExpiredError
        prompt = PromptGroup(prompt=prompt_ids, count=1)
        sample = self._sync.fleet.sample(group.stored, prompt, self._sampling(), self._deadline())
        # The connections to the servers belong to the loop of `runtime`, and this runs on TRL's.
        request = from_another_loop(sample)
        group.requests.add(request)
        try:
            (completion,) = await request
        except asyncio.CancelledError:
            # At the end the sample itself is cancelled, and that must not be swallowed.
            if group.is_expired and not self._stop_event.is_set():
                raise _ExpiredError from None
            raise
        finally:
            group.requests.discard(request)
            self._end_lease_if_expired(group)
        # With `logprobs=0` each token has a list of one, the log-probability of the sampled token.
        assert completion.logprobs is not None
        logprobs = [token[0] for token in completion.logprobs]
        return completion.token_ids, logprobs  # type: ignore[return-value]

    def _sampling(self) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k or 0,
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty,
            max_tokens=self.max_tokens,
            logprobs=0,
            # Servers that were started alike would answer the same prompt with the same text.
            extra={"seed": secrets.randbits(_SEED_BITS)},
        )

    async def _score_group(self, group: Any) -> list[Any]:
        # Before the reward functions, which would get the empty completions of cancelled samples.
        if group.model_version >= self._oldest:
            samples: list[Any] = await super()._score_group(group)
            return samples
        self._counters[_DROPPED] += self.num_generations
        return []


class _Queue(queue.SimpleQueue[Any]):
    """What TRL's loop and trainer use of `queue.Queue`; an interrupt of the trainer leaves no lock taken, see `Event`.

    Args:
        at_most: how many items it may hold; 0 for any number. Only one thread may put.
    """

    def __init__(self, at_most: int) -> None:
        self._at_most = at_most

    def put_nowait(self, item: Any) -> None:
        if 0 < self._at_most <= self.qsize():
            raise queue.Full
        self.put(item)


# Without the worker, through which the thread would keep the trainer.
def _run(rollouts: RolloutLoop, errors: list[BaseException], ended: Event) -> None:
    try:
        rollouts.run()
    except BaseException as error:
        errors.append(error)
    finally:
        ended.set()


class RolloutWorker(AsyncRolloutWorker):  # type: ignore[misc]
    """Takes the place of TRL's worker, whose loop runs in a child process and talks to one server by itself.

    Args:
        sync: gives the sync, once its servers are connected.
        settings: what to sync with.
        queue_maxsize: how many scored samples may wait for the trainer.
        **loop_kwargs: arguments of TRL's loop.
    """

    def __init__(
        self, *, sync: Callable[[], AdapterSync], settings: SyncSettings, queue_maxsize: int = 0, **loop_kwargs: Any
    ) -> None:
        # TRL's own `__init__` needs vLLM and makes the queues of a child process.
        self.rollout_buffer = _Queue(queue_maxsize)
        self.metrics_queue = _Queue(_METRICS_AT_MOST)
        # TRL's trainer sets the start index in here when it resumes.
        self._loop_kwargs = {**loop_kwargs, "queue_maxsize": queue_maxsize, "dataset_start_index": 0}
        self._sync = sync
        self._settings = settings
        self._version = 0
        # TRL shares it between processes. Here the loop's thread writes it and the trainer's thread reads it.
        self._heartbeat = SimpleNamespace(value=0.0)
        self._rollouts: RolloutLoop | None = None
        self._ended: Event | None = None
        self._errors: list[BaseException] = []  # by which the rollouts have ended

    @property
    def model_version(self) -> int:
        """The newest version."""
        return self._version

    def update_model_version(self, model_version: int) -> None:
        """Groups begin from this version now, and groups of versions beyond the staleness window are cancelled."""
        self._version = model_version
        # TRL calls this before the start as well, when it resumes (1.16).
        if self._rollouts is not None:
            self._rollouts.expire(self._oldest)

    @property
    def _oldest(self) -> int:
        assert self._settings.staleness is not None
        return self._version - self._settings.staleness

    def start(self) -> None:
        """Begin to sample; the first version has been published."""
        given = self._loop_kwargs
        # The trainer's own tokenizer may be used meanwhile, and one written in Rust refuses two threads at once.
        given = {**given, "processing_class": copy.deepcopy(given["processing_class"])}
        self._heartbeat.value = time.time()
        self._rollouts = RolloutLoop(
            sync=self._sync(),
            deadline=self.deadline,
            oldest=self._oldest,
            rollout_buffer=self.rollout_buffer,
            metrics_queue=self.metrics_queue,
            heartbeat_value=self._heartbeat,
            # TRL's loop reports a failure to another process by these two. Here `_run` has the error itself.
            failed_event=threading.Event(),
            exception_info_queue=queue.Queue(maxsize=1),
            **given,
        )
        self._ended = Event()
        # Nothing keeps the thread, so it ends with this call.
        BlockingThread("lora-sync-rollouts").submit(partial(_run, self._rollouts, self._errors, self._ended))

    def deadline(self) -> Deadline:
        seconds, setting = min(
            (float(self._loop_kwargs["request_timeout"]), "request_timeout"),
            (self._settings.generation_timeout_s, "lora_sync_generation_timeout"),
        )
        return Deadline.after(seconds, f"Sampling one completion ({setting})")

    def check_health(self, stale_after_s: float) -> None:
        """Called by the trainer while it waits for samples.

        Raises:
            Exception: what has ended the rollouts: an error of a server, a reward function or a tool.
            LoRASyncError: they have been stopped, or do nothing.
        """
        if self._ended is None or self._ended.is_set():
            if self._errors:
                raise self._errors[0]
            raise LoRASyncError(
                "The rollouts have ended, so no samples come any more. TRL's AsyncGRPOTrainer trains once; build "
                "another one to train again, with train(resume_from_checkpoint=...) to go on."
            )
        # Wall-clock time, because TRL's loop writes that (1.16).
        age = time.time() - self._heartbeat.value
        if age > stale_after_s:
            raise LoRASyncError(
                f"The rollouts have done nothing for {age:.0f} s, and heartbeat_stale_after_s={stale_after_s:g} were "
                "allowed. Does a reward function, a tool or an environment hang? If it needs that long, raise "
                "heartbeat_stale_after_s."
            )

    def stop(self) -> None:
        """Cancel what is being sampled, and give the leases back; may be called again, never fails."""
        if self._rollouts is not None:
            self._rollouts.stop()
            if self._ended is not None:
                # TRL's loop waits for tools in threads (`_tool_pool.shutdown`, 1.16), which cannot be cancelled.
                self._ended.wait(GRACE_S)
            # A task that is cancelled before its first step never enters `_generate_one`, so its group is left to this.
            self._rollouts.release_all()
