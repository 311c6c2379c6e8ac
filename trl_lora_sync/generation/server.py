"""What TRL calls each step: `sync_weights()` and `generate()`.

Takes the place of TRL's own generation object and keeps its contract, on every process: both methods are collective,
prompts go in and completions come out in the order of the rows.
"""

import copy
import json
import logging
import shlex
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from accelerate.utils import gather_object

from trl_lora_sync.adapter.checkpoint import config_changes
from trl_lora_sync.checks.verify import ReadAdapter, TrainedBase
from trl_lora_sync.collective.distributed import (
    DIFFERENT_ADAPTERS,
    models_prepared,
    results_of_all,
    run_on_all,
    run_on_main,
)
from trl_lora_sync.engines.base import Completion, PromptGroup, Sampling
from trl_lora_sync.errors import LoRASyncError, VerificationError
from trl_lora_sync.generation.base import AdapterGeneration, Fingerprint, MakeTrials
from trl_lora_sync.generation.client import RolloutClient
from trl_lora_sync.generation.finalizer import Finalizer
from trl_lora_sync.generation.overlap import BatchFigures, Overlap
from trl_lora_sync.metrics import PhaseTimer, SyncReport
from trl_lora_sync.servers.fleet import Fleet
from trl_lora_sync.settings import SyncSettings
from trl_lora_sync.sync import AdapterSync, ScoreAdapter

logger = logging.getLogger(__name__)


class _ChangedModelError(Exception):
    """What was read again is not what the model computes with."""


@dataclass
class TrainingBatch:
    """A batch that is being sampled with overlap.

    Attributes:
        following: the prompts of this process in the batch after it, see `LoRASyncGeneration.training_batch`.
        figures: how it was sampled, once it was.
    """

    following: list[list[int]] | None
    figures: BatchFigures | None = None


class LoRASyncGeneration(AdapterGeneration):
    """Generates on servers that are kept on the newest adapter version.

    Args:
        settings: what to sync with.
        on_sync: called on every process with the report of each accepted sync.
        is_new: whether TRL has just made the adapter; else the model came with one, which may have been trained.
        *args, **kwargs: the arguments of TRL's class, unchanged.

    Attributes:
        overlap: samples ahead; None on processes other than 0.
    """

    settings: SyncSettings

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._sync: AdapterSync | None = None
        self.overlap: Overlap | None = None
        self._batch: TrainingBatch | None = None  # with overlap, what is being sampled
        self._preparing = threading.RLock()  # for samples, as a rollout function may sample in threads
        self._in_turns = False  # whether other processes may call `generate` less often
        super().__init__(*args, **kwargs)

    def _init_vllm(self) -> None:
        """**Collective.** Connect instead of starting vLLM or joining an NCCL group."""
        self._look_at_model()
        if self.accelerator.is_main_process:
            self._sync = sync = AdapterSync(self.settings)
            self.overlap = overlap = Overlap(sync)

            # `end` refers to the locals only: a Finalizer whose `end` refers to its owner would keep that alive.
            def end() -> None:
                overlap.cancel()
                sync.shutdown()

            # Before the start: an error there closes the run, but leaves the connections to this.
            Finalizer(self, end)
            self.vllm_client = RolloutClient(sync, self.sync_if_changed)
        read, base = self._gather_adapter(PhaseTimer()), self._trained_base()
        make_trials = self.trials(base)
        summary = run_on_main(self.accelerator, lambda: self._start(read, base, make_trials))
        self._print_start(summary)
        if self.accelerator.is_main_process and (changes := config_changes(self.model)):
            logger.warning(
                "The trainer's model computes with other settings than its checkpoint has. Servers use the "
                "checkpoint's, unless they are started with: --hf-overrides %s (vLLM) or --json-model-override-args "
                "%s (SGLang). The checks have a short prompt, which need not show the difference.",
                *[shlex.quote(json.dumps(changes, default=str))] * 2,
            )

    def _start(self, read: ReadAdapter, base: TrainedBase, make_trials: MakeTrials) -> str:
        try:
            return self.sync.start(read, base, make_trials())
        # Also after an interrupt: trial adapters may be loaded, and the run's folder is there.
        except BaseException:
            self.sync.close()
            raise

    def sync_weights(self) -> None:
        """**Collective.** Publish the current adapter; on an error the previous version stays active.

        Raises:
            LoRASyncError: on every process alike.
        """
        if self.settings.overlap and self.settings.loads_wait:
            # A separate wait, as a load that waits for a whole batch would take the time of the sync.
            run_on_main(self.accelerator, self._settle)
        timer = PhaseTimer()
        report, published = self._publish_again(timer) or self._look_and_publish(timer)
        self._has_looked = False
        # After the publish: an error leaves the version before active, on every process.
        self.active_name, self._published = report.adapter_name, published
        self.on_sync(report)

    def _publish_again(self, timer: PhaseTimer) -> tuple[SyncReport, Fingerprint] | None:
        """Publish what was read for the version before, and look at the model only while the servers load, or later.

        To look at an 8B model takes as long as the rest of the trainer's part of a sync. `generate` does it before it
        samples, and publishes once more if the model does not compute with what was read here. So between two looks of
        `generate`, one sync needs none.

        Returns:
            The report and the fingerprint; None if the model has to be looked at first.
        """
        is_known = self._looked_at == models_prepared(self.accelerator) and not self._sharded
        # With scores to compute, the model is used before the servers load.
        # With several processes all would have to know the outcome before they enter the collectives of
        # `_look_and_publish`.
        if self.accelerator.num_processes > 1 or not is_known or self.sync.needs_verification:
            return None
        with timer.phase("gather"):
            form = self.sync.form
            adapter = self.reader.read_again(self.model, dtype=self.dtype_in(form), form=form)
        if adapter is None:
            return None
        noted: list[Fingerprint] = []

        def look() -> None:
            # Where older versions are sampled from, `generate` publishes nothing.
            if not self._has_looked or self.settings.samples_older:
                self.linears()
                if not self.reader.is_as_read():
                    raise _ChangedModelError
            weights, scalings = self.reader.as_read
            noted[:] = [(self.reader.fingerprints.of(weights), scalings)]

        try:
            # Python evaluates from left to right, so `look` has filled `noted` by the time it is read.
            return self.sync.publish(adapter, self.scores, timer, look), noted[0]
        # The version is withdrawn by now, and the caller reads the model again and publishes that.
        except _ChangedModelError:
            return None

    def _look_and_publish(self, timer: PhaseTimer) -> tuple[SyncReport, Fingerprint]:
        """**Collective.** The report, and the fingerprint of this process's part of the version."""
        read, score = self._gather_adapter(timer), self._score_adapter(timer)
        # Before anything is published: it is process 0 that publishes, for all.
        current = self._fingerprint_of_all()
        return run_on_main(self.accelerator, lambda: self._publish(read, timer, score)), current

    def _fingerprint_of_all(self) -> Fingerprint:
        """**Collective.** Of this process's part of the adapter that was read last.

        Raises:
            VerificationError: the processes train different adapters, although each has a whole one.
        """
        found: list[Fingerprint] = []

        def look() -> Any:
            found.append(self._fingerprint(self.reader.last_linears))
            bits, scalings = found[0]
            # A single one is not waited for, and shards differ.
            is_replica = self.accelerator.num_processes > 1 and not self._sharded
            return (bits.tolist(), scalings) if is_replica else None

        first, *others = results_of_all(self.accelerator, look)
        if any(other != first for other in others):
            raise VerificationError(DIFFERENT_ADAPTERS)
        return found[0]

    def _publish(self, read: ReadAdapter, timer: PhaseTimer, score: ScoreAdapter) -> SyncReport:
        with timer.phase("gather"):
            adapter = read(self.sync.form)
        return self.sync.publish(adapter, score, timer)

    def _settle(self) -> None:
        assert self.overlap is not None
        self.overlap.settle()

    def _score_adapter(self, timer: PhaseTimer) -> ScoreAdapter:
        """**Collective** if the model is sharded, as its forward pass is then, and a server is to be verified."""
        if self.settings.verify == "off" or not self._is_sharded():
            return self.scores
        # Process 0 knows the servers, and all must take the same way, because the forward pass is collective.
        if not run_on_main(self.accelerator, lambda: self.sync.needs_verification):
            # On a server that comes back during this sync the version is unverified: scores need all processes.
            return lambda: None
        with timer.phase("verify"), self._computing() as forward:
            computed = run_on_all(self.accelerator, lambda: self.scores(forward, self.accelerator.device))
        return lambda: computed

    def generate(
        self,
        prompts: list[list[int]],
        images: list[list[Any] | None] | None,
        num_generations: int,
        profiler: Any = None,
    ) -> tuple[list[list[int]], list[list[int]], list[Any] | None, list[Any] | None]:
        """**Collective.** Sample one completion per row of `prompts` from the active version.

        In a block of `training_batch` the completions may be of the version before, see there.

        Args:
            prompts: token ids, one list per row of this process.
            images: PIL images per row, or None; None for no images at all.
            num_generations: how often TRL repeats each prompt; no more rows than that are sampled together.
            profiler: context manager that times the request on process 0.

        Returns:
            `(prompt_ids, completion_ids, logprobs, logprob_token_ids)`, one entry per row; the log-probabilities have
            shape `(rows, completion_length, 1 to N+1)` or are None.
        """
        with self._turn():
            # Both are the same on all processes, so that all enter the sync, which is collective, or none.
            if not self._can_sample() or self._has_changed():
                self.sync_weights()
            timer = PhaseTimer()
            # Images go along even if None, because other processes may have some. Shares may differ in length.
            following = self._batch.following if self._batch else None
            batches = gather_object([(prompts, images or [None] * len(prompts), following)])
            completions, figures = run_on_main(
                self.accelerator, lambda: self._sample(batches, num_generations, profiler)
            )
        self._generate_s = (self._generate_s or 0.0) + timer.total_s()
        if self._batch:
            self._batch.figures = figures
        start = sum(len(rows) for rows, *_ in batches[: self.accelerator.process_index])
        mine = completions[start : start + len(prompts)]
        # None in RLOO, which does not use them (trainer/rloo_trainer.py, TRL 1.16).
        with_logprobs = self.logprobs is not None
        return (
            [row.prompt_ids for row in mine],
            [row.token_ids for row in mine],
            [row.logprobs for row in mine] if with_logprobs else None,
            [row.logprob_token_ids for row in mine] if with_logprobs else None,
        )

    @contextmanager
    def tool_turns(self) -> Iterator[None]:
        """**Collective.** A block in which processes may call `generate` a different number of times.

        What is sampled there are turns after tool calls. A process that has taken all of its turns joins the others in
        theirs, without rows, until no process has any left. An error on one process is raised on all.
        """
        self._in_turns = self.accelerator.num_processes > 1
        if not self._in_turns:
            yield
            return
        failures: list[BaseException] = []
        try:
            yield
        except BaseException as error:
            # It comes from a turn, so all processes have it.
            if not self._in_turns:
                raise
            failures.append(error)
        self._in_turns = False

        def is_on() -> bool:
            if failures:
                raise failures[0]
            return False

        while any(results_of_all(self.accelerator, is_on)):
            self.generate([], None, 1)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """**Collective.** One call of `generate`; in `tool_turns`, the processes that have left take part."""
        is_one, self._in_turns = self._in_turns, False
        if is_one:
            results_of_all(self.accelerator, lambda: True)
        yield
        # Not after an error, see `tool_turns`.
        self._in_turns = is_one

    @contextmanager
    def training_batch(self, following: list[list[int]] | None) -> Iterator["TrainingBatch"]:
        """What is sampled in the block are the turns of one batch that is trained on; only with overlap.

        The first turn is what was sampled ahead, if that is for the same prompts, and all turns are of one version.
        The batch after it is sampled ahead from the newest one.

        Args:
            following: the prompts of this process in the batch after this one; None if there is none, or they are not
                known. If so on any process, nothing is sampled ahead.
        """
        self._batch = TrainingBatch(following)
        try:
            yield self._batch
        finally:
            # Also after an error, because the lease of the batch ends here.
            self._batch = None
            if self.overlap is not None:
                self.overlap.end_batch()

    @property
    def engine_summary(self) -> dict[str, Any]:
        """What the log of a run has about the servers; on process 0."""
        served = self.fleet.capabilities
        return {
            "engine": served.engine,
            "engine_version": served.version,
            "servers": len(self.fleet.servers),
        }

    @property
    def sync(self) -> AdapterSync:
        """Has the servers and the versions, which only process 0 knows."""
        assert self._sync is not None
        return self._sync

    @property
    def fleet(self) -> Fleet:
        """The servers, which only process 0 knows."""
        return self.sync.fleet

    def _can_sample(self) -> bool:
        """**Collective** if the server sleeps between steps. Whether the active version is there to sample from."""
        if self.active_name is None:  # evaluation after training has ended and cleaned up
            return False
        return not self.settings.frees_kv_cache or run_on_main(self.accelerator, self._wake)

    def _wake(self) -> bool:
        with self._preparing:
            return self.sync.wake()

    def sync_if_changed(self) -> None:
        """See `AdapterGeneration`; servers that sleep are woken. One thread at a time, so that the first one syncs."""
        with self._preparing:
            super().sync_if_changed()
            if self.active_name is None or not self.settings.frees_kv_cache or self._wake():
                return
            if self.accelerator.num_processes > 1:
                raise LoRASyncError(
                    "A server has lost the active version with its KV cache, which it released between two steps. Call "
                    "trainer.vllm_generation.sync_weights() on every process before sampling on one."
                )
            self.sync_weights()

    def sleep(self) -> None:
        """Let the server give back its KV cache while the trainer works. Not collective, never fails."""
        if self._sync is not None:
            self._sync.sleep()

    def _sample(
        self, batches: list[tuple[list[list[int]], list[Any], list[list[int]] | None]], most: int, profiler: Any
    ) -> tuple[list[Completion], BatchFigures | None]:
        assert self.overlap is not None
        assert self.active_name is not None
        groups = group_rows(
            [row for rows, *_ in batches for row in rows],
            [image for _, images, _ in batches for image in images],
            most,
        )
        with profiler or nullcontext():
            if self._batch is not None:
                following = _following_groups([one[2] for one in batches], most)
                answers = self.overlap.sample(groups, self._sampling(), following)
            else:
                deadline = self.sync.generation_deadline()
                answers = self.sync.generate(self.active_name, groups, self._sampling(), deadline)
        return [completion for answer in answers for completion in answer], self.overlap.figures

    def _sampling(self) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k or 0,
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty,
            max_tokens=self.max_completion_length,
            logprobs=self.logprobs,
            regex=self.structured_outputs_regex,
            image_token_id=self._image_token_id(),
            # A copy, as a callback may change it in place while a batch is sampled ahead with it.
            extra=copy.deepcopy(self.generation_kwargs),
        )

    def close(self) -> None:
        """Unload and delete all versions; the next `generate` publishes again. Not collective, never fails."""
        self.active_name = None
        # An interrupt may have come between the end of its block and of the batch, which a traceback then keeps.
        self._batch = None
        # First what is sampled ahead, whose requests name versions that are unloaded next.
        if self.overlap is not None:
            self.overlap.cancel()
        if self._sync is not None:
            self._sync.close()
        self.reader.release()


def _following_groups(batches: list[list[list[int]] | None], most: int) -> list[PromptGroup] | None:
    """The batch to sample ahead, of the prompts of all processes; None if one of them does not know its own."""
    rows: list[list[int]] = []
    for following in batches:
        if following is None:
            return None
        rows += following
    return group_rows(rows, [None] * len(rows), most)


def group_rows(rows: list[list[int]], images: list[Any], most: int) -> list[PromptGroup]:
    """Join runs of equal consecutive rows, so that a prompt is sent once and sampled several times.

    Only runs are joined, so the completions of all groups, in order, belong to all rows, in order. Sampling a prompt
    n times in one request also keeps a fixed `seed` from giving n equal completions.

    Args:
        most: how many rows are joined at most, which is TRL's `num_generations`. A dataset may have one prompt in all
            of its rows, and a single group of them would leave all servers but one without work. And vLLM samples a
            prompt at temperature 0 once only.
    """
    groups = []
    for (prompt, pictures), same in groupby(zip(rows, images, strict=True)):
        left = sum(1 for _ in same)
        while left:
            groups.append(PromptGroup(prompt=prompt, images=pictures, count=min(most, left)))
            left -= groups[-1].count
    return groups
