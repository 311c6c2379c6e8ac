"""Sampling the next batch while the trainer works on this one; on process 0 only.

Each batch comes from exactly one version: the newest one when the batch before it was taken. A lease keeps
that version on the servers until the last answer. Knows prompts as token ids, and nothing of TRL.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from trl_lora_sync.adapter.store import StoredAdapter
from trl_lora_sync.engines.base import Completion, PromptGroup, Sampling
from trl_lora_sync.metrics import OVERLAP_HIDDEN, OVERLAP_WAIT, VERSION_LAG
from trl_lora_sync.runtime import Task, run
from trl_lora_sync.sync import AdapterSync

logger = logging.getLogger(__name__)

Answers = list[list[Completion]]


@dataclass(frozen=True, kw_only=True)
class BatchFigures:
    """How one batch of the training was sampled.

    Attributes:
        version_lag: generation batches between its request and its use: 1, or 0 for a batch that was not sampled ahead.
        wait_s: seconds that the training waited for it.
        generation_s: seconds that the servers took.
    """

    version_lag: int
    wait_s: float
    generation_s: float

    @property
    def hidden(self) -> float:
        """The share of the generation that the training did not wait for."""
        return max(0.0, 1.0 - self.wait_s / self.generation_s) if self.generation_s > 0 and self.version_lag else 0.0

    def metrics(self) -> dict[str, float]:
        """What the trainer logs."""
        return {VERSION_LAG: float(self.version_lag), OVERLAP_WAIT: self.wait_s, OVERLAP_HIDDEN: self.hidden}


@dataclass(kw_only=True)
class _Ahead:
    """A batch that is being sampled, or has been.

    Attributes:
        stored: the version that it is sampled from.
        task: gives the answers, and the seconds that they took.
        waited_s: for how long the training has waited so far.
    """

    groups: Sequence[PromptGroup]
    sampling: Sampling
    stored: StoredAdapter
    task: Task[tuple[Answers, float]]
    waited_s: float = 0.0

    def wait(self) -> None:
        """Until it has been sampled, or has failed."""
        started = time.monotonic()
        try:
            self.task.wait()
        finally:
            # Added up, because `settle` may have waited before the batch is taken.
            self.waited_s += time.monotonic() - started


class Overlap:
    """Samples batches one after the other, the next one ahead.

    Args:
        sync: has the servers and the versions, and leases these.

    Attributes:
        ahead: the batch that is being sampled ahead, if one is.
        figures: of the batch that was taken last.
    """

    def __init__(self, sync: AdapterSync) -> None:
        self._sync = sync
        self.ahead: _Ahead | None = None
        self._turns_of: StoredAdapter | None = None  # the version of the batch whose turns are being sampled
        self.figures: BatchFigures | None = None

    def sample(
        self, groups: Sequence[PromptGroup], sampling: Sampling, following: Sequence[PromptGroup] | None
    ) -> Answers:
        """One turn of a batch; all turns until `end_batch` come from the version of the first.

        Args:
            following: the next batch, requested once this one is there; None if there is none or it cannot be known.

        Raises:
            LoRASyncError: the sampling failed, now or while the trainer worked.
        """
        if self._turns_of is not None:
            return self._sync.generate(self._turns_of.name, groups, sampling, self._sync.generation_deadline())
        answers = self._take(groups, sampling)
        if answers is None:
            answers = self._sample_now(groups, sampling)
        # Only now: a batch is of the version that is newest when the batch before it was taken.
        if following:
            self.request(following, sampling)
        return answers

    def end_batch(self) -> None:
        """All turns of the batch have been sampled."""
        if self._turns_of is not None:
            self._sync.ledger.release(self._turns_of)
            self._turns_of = None

    def settle(self) -> None:
        """Wait for what is sampled ahead; how it went shows when it is taken."""
        if self.ahead is not None:
            self.ahead.wait()

    def cancel(self) -> None:
        """Cancel what is sampled ahead, and release all leases; never fails, and may be called again."""
        # Cleared first, so that a second call finds nothing to release.
        ahead, self.ahead = self.ahead, None
        if ahead is not None:
            # Before the lease ends, after which a sync may unload the version that these requests name.
            ahead.task.cancel()
            self._sync.ledger.release(ahead.stored)
        self.end_batch()

    def _take(self, groups: Sequence[PromptGroup], sampling: Sampling) -> Answers | None:
        ahead = self.ahead
        if ahead is None:
            return None
        # By value: the trainer tokenizes the prompts again when it takes the batch (`_trl.tokenized`).
        if (list(ahead.groups), ahead.sampling) != (list(groups), sampling):
            logger.warning(
                "Other prompts or sampling settings are due than were sampled ahead, so this batch is sampled now. "
                "Nothing may change the order of the data, or these settings, while a batch is sampled ahead."
            )
            self.cancel()
            return None
        ahead.wait()  # interrupted, it stays here for `cancel`
        # Before `result`, which may raise: `end_batch` then ends the lease.
        self.ahead, self._turns_of = None, ahead.stored
        answers, seconds = ahead.task.result()
        self.figures = BatchFigures(version_lag=1, wait_s=ahead.waited_s, generation_s=seconds)
        return answers

    def _sample_now(self, groups: Sequence[PromptGroup], sampling: Sampling) -> Answers:
        # Before the request, so that `end_batch` ends the lease even if it fails.
        self._turns_of = self._sync.ledger.lease()
        answers, seconds = run(self._timed(self._turns_of, groups, sampling))
        self.figures = BatchFigures(version_lag=0, wait_s=seconds, generation_s=seconds)
        return answers

    def request(self, groups: Sequence[PromptGroup], sampling: Sampling) -> None:
        """Begin to sample a batch ahead from the newest version."""
        # Leased here and not in the task, which may begin after the next sync.
        stored = self._sync.ledger.lease()
        task = Task(self._timed(stored, groups, sampling))
        self.ahead = _Ahead(groups=groups, sampling=sampling, stored=stored, task=task)
        # Last, so that `cancel` finds it after an interrupt.
        task.begin()

    async def _timed(
        self, stored: StoredAdapter, groups: Sequence[PromptGroup], sampling: Sampling
    ) -> tuple[Answers, float]:
        started = time.monotonic()
        # The deadline begins with the sampling, and not when the training begins to wait for it.
        answers = await self._sync.fleet.generate(stored.name, groups, sampling, self._sync.generation_deadline())
        return answers, time.monotonic() - started


def start_sentence(mode: str) -> str:
    """What a run with overlap prints at its start, on process 0.

    Args:
        mode: the value of TRL's `vllm_importance_sampling_mode`.
    """
    return (
        "LoRA adapter sync: the servers sample the next batch while the trainer works on this one, so batches come "
        f'from the policy of one generation batch earlier. vllm_importance_sampling_mode="{mode}" corrects for that. '
        '"sequence_mask", TRL\'s default, leaves out whole completions of such a batch, more of the long ones; '
        '"token_truncate" keeps every completion and bounds the weight of each token.'
    )
