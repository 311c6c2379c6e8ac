"""What TRL calls each step: `sync_weights()` and `generate()`.

Takes the place of TRL's own generation object and keeps its contract, on every process: both methods are collective,
prompts go in and completions come out in the order of the rows.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from trl.generation.vllm_generation import VLLMGeneration

from trl_lora_sync._trl import zero3_hooks_removed
from trl_lora_sync.adapter.canonical import CanonicalAdapter
from trl_lora_sync.adapter.export import (
    AdapterReader,
    active_dropout,
    base_dtype,
    remember_initial_adapter,
    unwrapped_path,
)
from trl_lora_sync.adapter.fingerprint import fingerprint
from trl_lora_sync.client import RolloutClient
from trl_lora_sync.distributed import (
    check_launcher,
    check_same_start,
    gather_weights,
    models_prepared,
    outermost,
    run_on_all,
    run_on_main,
)
from trl_lora_sync.ending import Ending
from trl_lora_sync.engines.base import Capabilities, Completion, Deadline, PromptGroup, Sampling
from trl_lora_sync.errors import LoRASyncError
from trl_lora_sync.fleet import Fleet
from trl_lora_sync.metrics import PhaseTimer, SyncReport
from trl_lora_sync.overlap import BatchFigures, Overlap
from trl_lora_sync.scoring import (
    adapter_logprobs,
    base_logprobs,
    computing_with,
    strong_trial,
    trial_logprobs,
    trial_weights,
)
from trl_lora_sync.settings import SyncSettings
from trl_lora_sync.shards import check_quantised, is_partitioned, is_sharded, shards_of, whole_in_forward
from trl_lora_sync.sync import AdapterSync, ReadAdapter, ScoreAdapter
from trl_lora_sync.verify import PROBE_PROMPT, Scores, TrainedBase, Trial


@dataclass
class TrainingBatch:
    """A batch that is being sampled with overlap.

    Attributes:
        following: the prompts of this process in the batch after it, see `LoRASyncGeneration.training_batch`.
        figures: how it was sampled, once it was.
    """

    following: list[list[int]] | None
    figures: BatchFigures | None = None


class LoRASyncGeneration(VLLMGeneration):  # type: ignore[misc]
    """Generates on servers that are kept on the newest adapter version.

    Args:
        settings: what to sync with.
        on_sync: called on every process with the report of each accepted sync.
        is_new: whether TRL has just made the adapter; else the model came with one, which may have been trained.
        *args, **kwargs: those of TRL's class, unchanged.
    """

    def __init__(
        self,
        *args: Any,
        settings: SyncSettings,
        on_sync: Callable[[SyncReport], None],
        is_new: bool = False,
        **kwargs: Any,
    ) -> None:
        self._settings = settings
        self._on_sync = on_sync
        self._is_new = is_new
        self._initial: dict[nn.Module, Tensor] = {}  # the initial matrices, if the base weights lack them
        self._active_name: str | None = None
        self._sync: AdapterSync | None = None
        self._overlap: Overlap | None = None
        self._batch: TrainingBatch | None = None  # the one that is being sampled with overlap
        self._reader = AdapterReader()
        self._generate_s: float | None = None  # since it was last taken; None before the first generation
        self._sharded = False
        self._published: tuple[int, ...] | None = None  # fingerprint of this process's part of the active version
        self._looked_at: int | None = None  # how many models accelerate had wrapped then
        self._base_logprobs: list[float] | None = None  # of `PROBE_PROMPT`, by the model as it is wrapped
        super().__init__(*args, **kwargs)

    def _init_vllm(self) -> None:
        """**Collective.** Connect instead of starting vLLM or joining an NCCL group."""
        check_launcher(self.accelerator)
        self._dtype = self._settings.dtype or base_dtype(self.model)
        self._initial = run_on_all(self.accelerator, lambda: remember_initial_adapter(self.model, is_new=self._is_new))
        check_same_start(self.accelerator, fingerprint(list(self._initial.values())))
        if self.accelerator.is_main_process:
            self._sync = sync = AdapterSync(self._settings)
            self._overlap = overlap = Overlap(sync.fleet, lambda: _generation_deadline(sync.settings))

            def end() -> None:
                overlap.cancel()
                sync.end()

            Ending(self, end)
            self.vllm_client = RolloutClient(self._sync, self._generation_deadline, self._sync_if_changed)
        read, base = self._gather_adapter(PhaseTimer()), self._trained_base()
        make_trial = self._trial(base)
        summary = run_on_main(self.accelerator, lambda: self._start(read, base, make_trial))
        if self.accelerator.is_main_process:
            print(summary, flush=True)
            if dropout := active_dropout(self.model):
                print(dropout_note(dropout), flush=True)
            if self._initial:
                print(initial_note(sum(one.nbytes for one in self._initial.values())), flush=True)

    def _start(self, read: ReadAdapter, base: TrainedBase, make_trial: Callable[[TrainedBase], Trial | None]) -> str:
        assert self._sync is not None
        try:
            base = base.remembered()
            return self._sync.start(read, base, make_trial(base))
        except BaseException:
            self._sync.close()
            raise

    def sync_weights(self) -> None:
        """**Collective.** Publish the adapter as it is now; on an error the previous version stays active.

        Raises:
            LoRASyncError: on every process alike.
        """
        if self._settings.overlap and self._settings.loads_wait:
            # A wait of its own, as a load that waits for a whole batch would take the time of the sync.
            run_on_main(self.accelerator, self._settle)
        timer = PhaseTimer()
        read, score = self._gather_adapter(timer), self._score_adapter(timer)
        with timer.phase("gather"):
            current = run_on_all(self.accelerator, lambda: self._fingerprint(self._reader.last_linears))
        report = run_on_main(self.accelerator, lambda: self._publish(read, timer, score))
        self._active_name, self._published = report.adapter_name, current
        self._on_sync(report)

    def _fingerprint(self, linears: Sequence[nn.Linear]) -> tuple[int, ...]:
        """Of this process's part of the adapter as it is now."""
        shards = shards_of(linears, outermost(self.accelerator, self.model))
        pairs = zip(linears, shards, strict=True)
        return fingerprint([linear.weight if shard is None else shard.values for linear, shard in pairs])

    def _has_changed(self) -> bool:
        """**Collective.** Whether the adapter is another one than was published, on any process.

        TRL asks for a sync only when `global_step` has changed; weights may change without, between two evaluations or
        two calls of `train()`.
        """
        return any(gather_object([run_on_all(self.accelerator, self._has_changed_here)]))

    def _has_changed_here(self) -> bool:
        """Whether this process's part of the adapter is another one than was published, if that is not asked for.

        Raises:
            UnsupportedAdapterError: the model does not compute with the adapter, or with more than the adapter.
        """
        linears = self._linears()
        self._reader.check()
        return not self._settings.samples_older and self._fingerprint(linears) != self._published

    def _sync_if_changed(self) -> None:
        """For what samples on process 0 alone, such as a rollout function.

        Raises:
            LoRASyncError: the adapter has changed since the last sync, and the other processes do not take part in one.
        """
        if self._active_name is None or not self._has_changed_here():
            return
        if self.accelerator.num_processes > 1:
            raise LoRASyncError(
                "The adapter has changed since the last sync, so the servers have another policy than the trainer. "
                "Call trainer.vllm_generation.sync_weights() on every process before sampling on process 0 alone."
            )
        self.sync_weights()

    def _publish(self, read: ReadAdapter, timer: PhaseTimer, score: ScoreAdapter) -> SyncReport:
        assert self._sync is not None
        return self._sync.publish(read, timer, score)

    def _settle(self) -> None:
        assert self._overlap is not None
        self._overlap.settle()

    def _wants_proof(self) -> bool:
        assert self._sync is not None
        return self._sync.wants_proof

    def _score_adapter(self, timer: PhaseTimer) -> ScoreAdapter:
        """**Collective** if the model is sharded, as its forward pass is then, and a server is to be verified."""
        if self._settings.verify == "off" or not self._is_sharded():
            return self._scores
        if not run_on_main(self.accelerator, self._wants_proof):
            return lambda: None
        with timer.phase("verify"), self._computing() as forward:
            computed = run_on_all(self.accelerator, lambda: self._scores(forward, self.accelerator.device))
        return lambda: computed

    def _scores(self, forward: Any = None, device: torch.device | None = None) -> Scores:
        """The policy's log-probabilities of `PROBE_PROMPT`, with the adapter as it is now and without.

        The base is computed again when accelerate has wrapped the model: its autocast rounds both, and the base alone
        at the start was computed without.
        """
        model = self.model
        adapted = adapter_logprobs(model, PROBE_PROMPT, forward=forward, device=device)
        if self._base_logprobs is None:
            without = self._initial or dict.fromkeys(self._reader.last_linears[1::2])
            with computing_with(without):
                self._base_logprobs = adapter_logprobs(model, PROBE_PROMPT, forward=forward, device=device)
        return Scores(base=self._base_logprobs, adapted=adapted)

    def _is_sharded(self) -> bool:
        """Whether a forward pass of the model needs every process."""
        self._look_at_layout()
        return self._sharded

    def _look_at_layout(self) -> None:
        """Find out how a launcher has wrapped the model, once each time that it has.

        Raises:
            UnsupportedSettingError: what was sharded cannot be put together again as it was.
        """
        prepared = models_prepared(self.accelerator)
        if self._looked_at != prepared:
            check_quantised(self.model, self.accelerator.device)
            self._sharded = is_sharded(self.model)
            self._base_logprobs = None
            self._looked_at = prepared

    @contextmanager
    def _computing(self) -> Iterator[Any]:
        """**Collective.** What to call for a forward pass of the sharded model, wrapped by its launcher or not yet."""
        wrapper = outermost(self.accelerator, self.model)
        with ExitStack() as stack:
            if is_partitioned(self.model) and wrapper is not self.model:
                stack.enter_context(zero3_hooks_removed(wrapper))
                wrapper = self.model
            stack.enter_context(whole_in_forward(self.model, self.accelerator.device))
            yield wrapper

    def _gather_adapter(self, timer: PhaseTimer) -> ReadAdapter:
        """**Collective.** Gather what is sharded of the adapter, and return what reads all of it on process 0."""
        with timer.phase("gather"):
            _, gathered = self._gather_matrices()

        def read(served: Capabilities) -> CanonicalAdapter:
            siblings = served.needs_fused_siblings
            return self._reader.read(self.model, dtype=self._dtype, fused_siblings=siblings, gathered=gathered)

        return read

    def _gather_matrices(self) -> tuple[Sequence[nn.Linear], dict[nn.Module, Tensor]]:
        """**Collective.** The linear modules of the adapter and, on process 0, the whole weights of sharded ones."""
        linears = run_on_all(self.accelerator, self._linears)
        return linears, gather_weights(self.accelerator, linears, outermost(self.accelerator, self.model))

    def _linears(self) -> Sequence[nn.Linear]:
        self._look_at_layout()
        return self._reader.linears(self.model)

    def adapter_state_dict(self) -> dict[str, Tensor]:
        """**Collective.** Copies of the adapter's matrices as they are trained, by their names in PEFT's files.

        Only process 0 gets them.
        """
        linears, gathered = self._gather_matrices()
        if not self.accelerator.is_main_process:
            return {}
        wanted = set(linears)
        return {
            _saved_name(path, self.model.active_adapter): gathered.get(module, module.weight).detach().clone()
            for path, module in self.model.named_modules()
            if module in wanted
        }

    def _trial(self, base: TrainedBase) -> Callable[[TrainedBase], Trial | None]:
        """**Collective** if the model is sharded. What makes the trial adapter on process 0, given its base."""
        if self._settings.verify == "off":
            return lambda base: None
        reader, model, dtype, device = self._reader, self.model, self._dtype, self.accelerator.device

        def weights(strength: float) -> dict[nn.Module, Tensor]:
            return trial_weights(reader.linears(model), strength, device)

        def make(base: TrainedBase, score: Callable[[float], list[float]]) -> Trial:
            strength, logprobs = strong_trial(score, *base.logprobs(PROBE_PROMPT))

            # Kept as long as the servers are, so it may not refer to this object, whose end is theirs.
            def read(served: Capabilities) -> CanonicalAdapter:
                siblings = served.needs_fused_siblings
                return reader.read_trial(model, weights(strength), dtype=dtype, fused_siblings=siblings)

            return Trial(read=read, logprobs=logprobs)

        def score_together(strength: float) -> list[float]:
            with self._computing() as forward:
                found = run_on_all(
                    self.accelerator,
                    lambda: trial_logprobs(model, weights(strength), PROBE_PROMPT, forward=forward, device=device),
                )
            return run_on_main(self.accelerator, lambda: found)  # so that all go on in the same way

        if self._is_sharded():
            trial = make(base, score_together)
            return lambda base: trial
        return lambda base: make(base, lambda strength: trial_logprobs(model, weights(strength), PROBE_PROMPT))

    def _trained_base(self) -> TrainedBase:
        """**Collective** if the model is sharded, as its forward pass is then."""
        model, initial = self.model, self._initial
        is_collective = run_on_all(self.accelerator, self._is_sharded)
        computed = self._base_logprobs_on_all() if is_collective else None
        return TrainedBase(
            name=model.active_peft_config.base_model_name_or_path,
            vocab_size=getattr(model.config.get_text_config(), "vocab_size", None),
            logprobs=lambda prompt_ids: computed or base_logprobs(model, prompt_ids, initial=initial),
        )

    def _base_logprobs_on_all(self) -> tuple[list[float], float]:
        device, initial = self.accelerator.device, self._initial
        with self._computing():
            computed = run_on_all(
                self.accelerator,
                lambda: base_logprobs(self.model, PROBE_PROMPT, initial=initial, device=device),
            )
        return run_on_main(self.accelerator, lambda: computed)

    def generate(
        self,
        prompts: list[list[int]],
        images: list[list[Any] | None] | None,
        num_generations: int,
        profiler: Any = None,
    ) -> tuple[list[list[int]], list[list[int]], list[Any] | None, list[Any] | None]:
        """**Collective.** Sample one completion per row of `prompts` from the active version.

        In a block of `training_batch` the completions may be of the version before, as that says.

        Args:
            prompts: token ids, one list per row of this process.
            images: PIL images per row, or None; None for no images at all.
            num_generations: how often TRL repeats each prompt; not needed, as repeated rows are found by themselves.
            profiler: context manager that times the request on process 0.

        Returns:
            `(prompt_ids, completion_ids, logprobs, logprob_token_ids)`, one entry per row; the log-probabilities have
            shape `(rows, completion_length, 1 to N+1)` or are None.
        """
        if not self._can_sample() or self._has_changed():
            self.sync_weights()
        # Images go along even if None, because other processes may have some. Shares may differ in length.
        timer = PhaseTimer()
        following = self._batch.following if self._batch else None
        shares = gather_object([(prompts, images or [None] * len(prompts), following)])
        completions, figures = run_on_main(self.accelerator, lambda: self._sample(shares, profiler))
        self._generate_s = (self._generate_s or 0.0) + timer.total_s()
        if self._batch:
            self._batch.figures = figures
        start = sum(len(rows) for rows, *_ in shares[: self.accelerator.process_index])
        mine = completions[start : start + len(prompts)]
        with_logprobs = self.logprobs is not None
        return (
            [row.prompt_ids for row in mine],
            [row.token_ids for row in mine],
            [row.logprobs for row in mine] if with_logprobs else None,
            [row.logprob_token_ids for row in mine] if with_logprobs else None,
        )

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
            self._batch = None
            if self._overlap is not None:
                self._overlap.end_batch()

    def take_generate_s(self) -> float | None:
        """Seconds spent in `generate`, syncs not counted, since this was last called; None if it never generated."""
        seconds = self._generate_s
        self._generate_s = seconds and 0.0
        return seconds

    @property
    def fleet(self) -> Fleet:
        """The servers, which only process 0 knows."""
        assert self._sync is not None
        return self._sync.fleet

    def _can_sample(self) -> bool:
        """**Collective** if the server sleeps between steps. Whether the active version is there to sample from."""
        if self._active_name is None:  # evaluation after training has ended and cleaned up
            return False
        return not self._settings.frees_kv_cache or run_on_main(self.accelerator, self._wake)

    def _wake(self) -> bool:
        assert self._sync is not None
        return self._sync.wake()

    def sleep(self) -> None:
        """Let the server give back its KV cache while the trainer works. Not collective, never fails."""
        if self._sync is not None:
            self._sync.sleep()

    def _sample(
        self, shares: list[tuple[list[list[int]], list[Any], list[list[int]] | None]], profiler: Any
    ) -> tuple[list[Completion], BatchFigures | None]:
        assert self._sync is not None
        assert self._overlap is not None
        assert self._active_name is not None
        groups = group_rows(
            [row for rows, *_ in shares for row in rows], [image for _, images, _ in shares for image in images]
        )
        with profiler or nullcontext():
            if self._batch is not None:
                answers = self._overlap.sample(groups, self._sampling(), _following_groups([one[2] for one in shares]))
            else:
                answers = self._sync.fleet.generate(
                    self._active_name, groups, self._sampling(), self._generation_deadline()
                )
        return [completion for answer in answers for completion in answer], self._overlap.figures

    def _generation_deadline(self) -> Deadline:
        return _generation_deadline(self._settings)

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
            image_token_id=getattr(self.processing_class, "image_token_id", None),
            extra=self.generation_kwargs,
        )

    def close(self) -> None:
        """Unload and delete all versions; the next `generate` publishes anew. Not collective, never fails."""
        self._active_name = None
        if self._overlap is not None:
            self._overlap.cancel()
        if self._sync is not None:
            self._sync.close()
        self._reader.release()


def _generation_deadline(settings: SyncSettings) -> Deadline:
    return Deadline.after(settings.generation_timeout_s, "Generation (lora_sync_generation_timeout)")


def dropout_note(dropout: float) -> str:
    """What a run with `lora_dropout` above 0 prints at its start, on process 0."""
    return (
        f"LoRA adapter sync: lora_dropout is {dropout:g}, where 0 is advised. Dropout changes the trainer's "
        "log-probabilities and never the server's, so the logprob gap grows and the importance ratios spread. Set "
        "lora_dropout=0 (--lora_dropout 0), or disable_dropout=True."
    )


def initial_note(size: int) -> str:
    """What a run prints at its start, on process 0, whose adapter was taken out of the base weights.

    Args:
        size: of the copies of the initial adapter, in bytes.
    """
    return (
        "LoRA adapter sync: the initialisation took the initial adapter out of the trainer's base weights. The servers "
        "keep the checkpoint's base and get the difference to the initial adapter, which has twice the rank; the copy "
        f"of the initial adapter takes {size / 1e6:.1f} MB here."
    )


def _saved_name(path: str, adapter_name: str) -> str:
    """The name in PEFT's files of the matrix that a module of the model holds."""
    return f"{unwrapped_path(path).removesuffix(f'.{adapter_name}')}.weight"


def _following_groups(shares: list[list[list[int]] | None]) -> list[PromptGroup] | None:
    """The batch to sample ahead, of the prompts of all processes; None if one of them does not know its own."""
    rows: list[list[int]] = []
    for share in shares:
        if share is None:
            return None
        rows += share
    return group_rows(rows, [None] * len(rows))


def group_rows(rows: list[list[int]], images: list[Any]) -> list[PromptGroup]:
    """Join runs of equal consecutive rows, so that a prompt is sent once and sampled several times.

    Only runs are joined, so the completions of all groups in order are those of all rows in order. Sampling a prompt
    n times in one request also keeps a fixed `seed` from giving n equal completions.
    """
    runs = groupby(zip(rows, images, strict=True))
    return [
        PromptGroup(prompt=prompt, images=pictures, count=sum(1 for _ in same)) for (prompt, pictures), same in runs
    ]
