"""What TRL calls each step in colocate mode: `sync_weights()` and `generate()`, with vLLM in the trainer's process."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate.utils import gather_object

from trl_lora_sync import _trl
from trl_lora_sync.adapter.canonical import PLAIN, CanonicalAdapter
from trl_lora_sync.adapter.checkpoint import config_changes
from trl_lora_sync.adapter.fingerprint import fingerprint
from trl_lora_sync.checks.verify import (
    PROBE_PROMPT,
    ReadAdapter,
    Scores,
    TrainedBase,
    Trial,
    VerificationResult,
    compare,
)
from trl_lora_sync.collective.distributed import DIFFERENT_ADAPTERS, run_on_all, run_on_main
from trl_lora_sync.colocate import engine, placing, shared_base
from trl_lora_sync.colocate.engine import Policy
from trl_lora_sync.colocate.in_weights import FoldedIntoSharedWeights, MergedIntoOwnWeights
from trl_lora_sync.colocate.shared_base import SharedBase
from trl_lora_sync.colocate.slots import AdapterSlots
from trl_lora_sync.engines.images import as_trained, one_token_per_image
from trl_lora_sync.errors import GenerationError, UnsupportedSettingError, VerificationError
from trl_lora_sync.generation.base import AdapterGeneration, MakeTrials
from trl_lora_sync.metrics import PhaseTimer, SyncReport
from trl_lora_sync.settings import ColocateSettings

logger = logging.getLogger(__name__)
T = TypeVar("T")


class ColocateGeneration(AdapterGeneration):
    """Generates with vLLM in this process, which is kept on the newest adapter version.

    TRL builds the engine and samples from it, as in its own colocate mode. Everything that samples through
    `llm`, such as a rollout function, samples from the active version.

    Args:
        waits_on_host: whether the model is on the host, so that there are never two copies of the base on the GPU.

    Attributes:
        gate: what every request to `llm` passes.
        holder: has the adapters, in vLLM's slots or in its weights.
        active: the version that is sampled from.
        layout: names and shapes of the tensors that the engine was proved with.
        is_verified: whether the engine was seen to sample from what it was given.
    """

    settings: ColocateSettings
    generation_kwargs: dict[str, Any]

    def __init__(self, *args: Any, waits_on_host: bool = False, **kwargs: Any) -> None:
        self._waits_on_host = waits_on_host
        self._next_version = 1
        self.active: Policy | None = None
        self.layout: Any = None
        self.is_verified = False
        self._served_base: Sequence[float] = ()  # of `PROBE_PROMPT`, by vLLM's base before anything was written to it
        self._shared: SharedBase | None = None
        self._received: torch.Tensor | None = None  # memory for the adapter that process 0 sends
        self._is_alone = False  # whether the other processes may not take part in what is sampled
        super().__init__(*args, **kwargs)

    # If the weights were discarded, TRL pushes them again before it generates. Here they never are.
    _llm_weights_sleeping = property(lambda self: False, lambda self, value: None)

    @property
    def _samples_trained_base(self) -> bool:
        # With fused serving the weights are computed from the trainer's base.
        return self._shared is not None or self.settings.serving == "fused"

    @property
    def engine_summary(self) -> dict[str, Any]:
        """The engine's part of a run's log."""
        return {
            "engine": "vllm (colocate)",
            "engine_version": engine.installed_version(),
            "servers": self.accelerator.num_processes // self.tensor_parallel_size,
        }

    def _init_vllm(self) -> None:
        """**Collective.** Start vLLM in this process, and prove that it samples from what it is given."""
        self._look_at_model()
        # The holder is built after the engine, which needs the gate; it is looked up when something samples.
        self.gate = engine.SamplingGate(self._before_sampling, lambda policy: self.holder.serving(policy))
        linears = run_on_all(self.accelerator, self.linears)
        run_on_all(self.accelerator, self._check_serving)
        reason = self._reason_against_sharing()
        if reason is None and not self._waits_on_host:
            # vLLM requires its share of the GPU to be free when it starts (0.31, v1/worker/utils.py `request_memory`),
            # and torch keeps what a model has left until its cache is emptied.
            self.model.to("cpu")
            torch.cuda.empty_cache()
            self._waits_on_host = True
        # Of each lora_A. The difference to an initial adapter has twice the rank.
        rank = max(linear.out_features for linear in linears[::2]) * (2 if self._initial else 1)
        options = engine.lora_options(rank) if self.settings.serving == "runtime" else {}
        options |= {"dtype": self.settings.dtype} if self.settings.dtype else {}
        # Of the Hub. TRL gives vLLM the name alone (1.16), which stands for the newest commit of the main branch.
        if (commit := getattr(self.model.config, "_commit_hash", None)) and not Path(self.model.name_or_path).is_dir():
            options["revision"] = commit
        # TRL does not pass these on either, and the weights alone do not show them.
        if changes := config_changes(self.model):
            options["hf_overrides"] = changes
        with _trl.engine_class(lambda **given: engine.build(options, self.gate, **given)):
            super()._init_vllm()
        base_note = self._share_base(reason)
        # The export rounds to the dtype that vLLM keeps, so a version can be compared with its slot bit by bit.
        dtype = engine.lora_dtype(self.llm) if options.get("enable_lora") else engine.model_dtype(self.llm)
        self.dtype_in = lambda form: dtype
        self.holder = run_on_all(self.accelerator, self._make_holder)
        if self.settings.verify != "off":
            base = self._trained_base()
            self._prove(base, self.trials(base, is_whole=True))
        name = self.model.active_peft_config.base_model_name_or_path
        self._print_start(run_on_all(self.accelerator, lambda: self._summary(name, base_note)))

    def _check_serving(self) -> None:
        if self.settings.serving == "runtime":
            return
        if self._is_sharded():
            raise _no_fused("the launcher shards the trainer's base model, from which the served weights are computed")
        if shared_base.is_quantised(self.model):
            raise _no_fused("the base model is quantised, and an adapter cannot be added to quantised weights")
        if self._initial:
            # The difference to the initial adapter belongs on the checkpoint's weights.
            raise _no_fused(
                "the initialisation has taken the initial adapter out of the trainer's base, from which the served "
                "weights are computed"
            )

    def _reason_against_sharing(self) -> str | None:
        """**Collective.** Why vLLM needs a second copy of the base, as far as it shows before vLLM starts.

        Raises:
            UnsupportedSettingError: a shared base was requested.
        """
        reason = shared_base.reason_against(
            self.model, self.settings.base, self.settings.dtype, self.accelerator, self.tensor_parallel_size
        )
        # The initialisation subtracted the first adapter from it, and vLLM has the checkpoint's base.
        if reason is None and self._initial:
            reason = "the initialisation of the adapter has changed the trainer's base"
        return self._agree_on_sharing(reason)

    def _agree_on_sharing(self, reason: str | None) -> str | None:
        """**Collective.** The first reason of any process against sharing."""
        # One decision for all, as only with a shared base do they enter the collectives that follow.
        reason = next((one for one in gather_object([reason]) if one is not None), None)
        if reason is not None and self.settings.base == "shared":
            raise shared_base.refusal(reason)
        return reason

    def _share_base(self, reason: str | None) -> str:
        """**Collective.** Let trainer and vLLM share the base unless there is a reason, and describe the outcome."""
        if reason is None:
            weights = placing.base_weights(self.model)
            views = run_on_all(
                self.accelerator, lambda: shared_base.find_views(self.llm, weights, engine.model_dtype(self.llm))
            )
            reason = self._agree_on_sharing(views if isinstance(views, str) else None)
            if not isinstance(views, str) and reason is None:
                self._shared = SharedBase(weights, views)
                self._shared.connect(self.model, self.accelerator.device)
                return f"the trainer's base ({self._shared.nbytes / 2**30:.2f} GiB, compared bit by bit)"
        if self._waits_on_host:
            self.model.to(self.accelerator.device)
        return f"a second copy of the base ({reason})"

    def _make_holder(self) -> AdapterSlots | MergedIntoOwnWeights | FoldedIntoSharedWeights:
        if self.settings.serving == "runtime":
            return AdapterSlots(self.llm)
        if self._shared is not None:
            return FoldedIntoSharedWeights(self.llm, self._shared.views)
        return MergedIntoOwnWeights(self.llm, placing.base_weights(self.model))

    def _summary(self, base_name: str | None, base_note: str) -> str:
        runner_dtype = str(engine.model_dtype(self.llm)).removeprefix("torch.")
        how = "are written into its slots"
        if self.settings.serving == "fused":
            how = "are folded into the weights while it samples" if self._shared else "are merged into its weights"
        return (
            f"LoRA adapter sync: vLLM {engine.installed_version()} in the trainer's process, serving {base_name} in "
            f"{runner_dtype} with {base_note}; adapters {how}; checked: adapter features, base model, rank"
            + ("." if self.settings.verify == "off" else ", a trial adapter.")
        )

    def _prove(self, base: TrainedBase, make_trials: MakeTrials) -> None:
        """**Collective.** Check the base model, and that vLLM samples from an adapter of the trained one's shapes.

        All processes have one outcome after each part. The next part may use an engine that runs in several processes,
        and would wait without end for a process that has failed.
        """
        run_on_all(self.accelerator, lambda: self._check_base(base))
        trial, policy = run_on_all(self.accelerator, lambda: self._load_trial(make_trials))
        trained = trial.scores  # of the same base, as a trial without an image has its scores
        assert trained is not None
        found = run_on_all(self.accelerator, lambda: self._compared(policy, trained))
        self.is_verified = self._prove_all(found)
        if not self.is_verified:
            logger.warning(
                "A trial adapter does not prove that vLLM samples from what it loads, because its effect is too small "
                "beside the difference of the base models: %s. The first versions are verified instead, and "
                "lora_sync/verified stays 0 until one of them is a proof.",
                found,
            )

    def _prove_all(self, found: VerificationResult) -> bool:
        """**Collective.** Whether every process has a proof, as all must agree on what is verified next."""
        return all(gather_object([found.confirms]))

    def _check_base(self, base: TrainedBase) -> None:
        if base.change:
            raise VerificationError(
                f"{base.change} vLLM has loaded the checkpoint. If they are meant to differ, set "
                'lora_sync_verify="off".'
            )
        served_size = engine.vocab_size(self.llm)
        if base.vocab_size is not None and base.vocab_size > served_size:
            raise VerificationError(
                f"The trainer's model has {base.vocab_size} tokens, and vLLM's {served_size}, as the checkpoint "
                f"{self.model.name_or_path!r} has. Save the model after resize_token_embeddings(), with "
                "model.save_pretrained(FOLDER) and tokenizer.save_pretrained(FOLDER), and train the model that is "
                "loaded from there."
            )
        self._served_base = engine.prompt_logprobs(self.llm, self.gate, None, PROBE_PROMPT)
        gap = base.gap(self._served_base)
        if gap is None or gap.is_suspicious:
            raise VerificationError(
                f"vLLM has loaded {self.model.name_or_path!r}, and computes other log-probabilities with it than the "
                f"trainer: {gap}. The adapter would be applied to the wrong weights. Build the trainer with the path "
                'of the checkpoint whose weights it trains. If they are meant to differ, set lora_sync_verify="off".'
            )

    def _load_trial(self, make_trials: MakeTrials) -> tuple[Trial, Policy]:
        (trial,) = make_trials()  # none only for lora_sync_verify="off"
        return trial, self.holder.load("trial", self.idle_id(), trial.read(PLAIN))

    def _compared(self, policy: Policy, trained: Scores) -> VerificationResult:
        """Compare what vLLM computes with what the trainer does.

        Raises:
            VerificationError: it is something else.
        """
        served = Scores(
            # Of the start: a base that was overwritten with other weights would be as far off as the adapter on it.
            base=self._served_base,
            adapted=engine.prompt_logprobs(self.llm, self.gate, policy, PROBE_PROMPT),
        )
        found = compare(served, trained, tolerance=self.settings.verify_tolerance)
        if found.is_mismatch:
            raise VerificationError(
                f"vLLM in this process computes something else with {policy.name} than the trainer: {found}. "
                "The last version stays active. Compare the checkpoints of vLLM and of the trainer. "
                'If the difference is meant, set lora_sync_verify="off".'
            )
        return found

    # A sync keeps memory for the next ones, and torch refuses to write to what was made in inference mode, as of a
    # rollout function, once that is off. Leaving the mode turns gradients on.
    @torch.inference_mode(False)
    @torch.no_grad()
    def sync_weights(self) -> None:
        """**Collective.** Make the current adapter the active version; on an error the previous one stays active.

        Raises:
            LoRASyncError: on every process alike.
        """
        timer = PhaseTimer()
        if self._shared is not None:
            run_on_all(self.accelerator, self._shared.reconnect)
        read = self._gather_adapter(timer)
        with timer.phase("gather"):
            # Before what is waited for, so that the device computes it while the layers are checked.
            current = run_on_all(self.accelerator, lambda: self._fingerprint(self.reader.last_linears))
            adapter = self._on_every_process(read)
        trained = self._scores_to_compare(timer, adapter)
        version = self._next_version
        self._next_version += 1  # a name is never used again, not even after a failure
        policy = run_on_all(self.accelerator, lambda: self._load(f"version-{version}", adapter, timer))
        # Not before every process has loaded it, see `_prove`.
        evidence = None if trained is None else self._verify(policy, trained, timer)
        # Only now, on all of them: until here, a failure on any process leaves the last version active on each.
        # An interrupt on the way leaves nothing published, and the next call syncs again.
        self._published = None
        self.gate.activate(policy)
        self.holder.activate(policy)
        self.active, self.active_name, self.layout = policy, policy.name, adapter.layout
        self._published = current
        # `is_verified`, and whether there is evidence, agree on all processes: all enter the collective, or none.
        self.is_verified = self.is_verified or (evidence is not None and self._prove_all(evidence))
        self.on_sync(self._report(version, adapter, timer, evidence))

    def _on_every_process(self, read: ReadAdapter) -> CanonicalAdapter:
        """**Collective.** The adapter, with the same bits on each process.

        Raises:
            VerificationError: the processes train different adapters.
        """
        if self._is_sharded():
            return self._adapter_of_main(read)
        adapter = run_on_all(self.accelerator, lambda: read(PLAIN))
        if self.accelerator.num_processes == 1:
            return adapter
        # DDP keeps the adapters equal, so a digest of each is enough and no tensor is sent.
        digest = run_on_all(self.accelerator, lambda: fingerprint(list(adapter.tensors.values())))
        if len(set(gather_object([digest]))) > 1:
            raise VerificationError(DIFFERENT_ADAPTERS)
        return adapter

    def _adapter_of_main(self, read: ReadAdapter) -> CanonicalAdapter:
        """**Collective.** The adapter that process 0 can read, sent as one tensor; valid until the next sync."""
        mine: list[CanonicalAdapter] = []

        def describe() -> CanonicalAdapter:
            mine.append(read(PLAIN))
            return replace(mine[0], flat=torch.empty(0, dtype=mine[0].dtype))

        described = run_on_main(self.accelerator, describe)
        flat = run_on_all(self.accelerator, lambda: self._flat_memory(mine, described))
        if self.accelerator.num_processes > 1:
            torch.distributed.broadcast(flat.view(torch.uint8), src=0)  # of bytes, so that no bit changes
        return replace(described, flat=flat)

    def _flat_memory(self, mine: Sequence[CanonicalAdapter], described: CanonicalAdapter) -> torch.Tensor:
        """With the adapter if it is `mine`; else to receive it in, the same memory at each sync."""
        device, flat = self.accelerator.device, self._received
        if mine and mine[0].flat.device == device:
            return mine[0].flat
        size, dtype = sum(map(torch.Size.numel, described.shapes.values())), described.dtype
        # Kept from one sync to the next, as the recorded copies of `AdapterSlots` read from this address.
        if flat is None or (flat.numel(), flat.dtype, flat.device) != (size, dtype, device):
            flat = self._received = torch.empty(size, dtype=dtype, device=device)
        if mine:
            flat.copy_(mine[0].flat)
        return flat

    def _scores_to_compare(self, timer: PhaseTimer, adapter: CanonicalAdapter) -> Scores | None:
        """**Collective** if the model is sharded. The trainer's log-probabilities, if they are to be compared."""
        verify = self.settings.verify
        is_new = not self.is_verified or self.active is None or adapter.layout != self.layout
        if verify == "off" or not (verify == "every" or is_new):
            return None
        with timer.phase("verify"):
            if not self._is_sharded():
                return run_on_all(self.accelerator, self.scores)
            with self._computing() as forward:
                return run_on_all(self.accelerator, lambda: self.scores(forward, self.accelerator.device))

    def _load(self, name: str, adapter: CanonicalAdapter, timer: PhaseTimer) -> Policy:
        with timer.phase("load"):
            return self.holder.load(name, self.idle_id(), adapter)

    def _verify(self, policy: Policy, trained: Scores, timer: PhaseTimer) -> VerificationResult:
        """**Collective.** Compare what vLLM computes with a version, before it is active."""
        with timer.phase("verify"):
            return run_on_all(self.accelerator, lambda: self._compared(policy, trained))

    def idle_id(self) -> int:
        """The number of an adapter that nothing samples from."""
        return 1 if self.active is None else self.active.adapter_id % engine.SLOTS + 1

    def _report(
        self, version: int, adapter: CanonicalAdapter, timer: PhaseTimer, evidence: VerificationResult | None
    ) -> SyncReport:
        return SyncReport(
            adapter_name=f"version-{version}",
            version=version,
            payload_bytes=adapter.payload_bytes,
            gather_s=timer.phases["gather"],
            write_s=0.0,
            load_s=timer.phases["load"],
            verify_s=timer.phases.get("verify", 0.0),
            total_s=timer.total_s(),
            servers=self.accelerator.num_processes // self.tensor_parallel_size,
            verify_gap=evidence.gap_mean if evidence else None,
            verify_gap_max=evidence.gap_max if evidence else None,
            is_verified=None if self.settings.verify == "off" else self.is_verified,
        )

    def generate(
        self, prompts: list[list[int]], images: list[Any] | None, num_generations: int, profiler: Any = None
    ) -> Any:
        """**Collective**, but for `tool_turns`. TRL's `generate`, from the active version, with TRL's arguments."""
        if not self._is_alone and (self.active_name is None or self._has_changed()):
            self.sync_weights()

        def prepared() -> tuple[list[list[int]], list[Any] | None]:
            if not self._is_alone:
                self._check_active()
            return self._as_vllm_takes_them(prompts, images)

        # On all, as TRL's `generate` is collective under tensor parallelism, and would wait for a process that failed
        # here.
        sent = self._on_all_or_alone(prepared)
        timer = PhaseTimer()
        generate = partial(super().generate, *sent, num_generations, profiler)

        def sample() -> Any:
            answer = generate()
            _check_prompts(answer[0], prompts)
            return answer

        with self._without_text():
            # Alone, the gate refuses it if the adapter has changed, or if vLLM no longer holds the active version.
            answer = self._on_all_or_alone(sample)
        self._generate_s = (self._generate_s or 0.0) + timer.total_s()
        return answer

    def _on_all_or_alone(self, act: Callable[[], T]) -> T:
        """**Collective**, but for `tool_turns`."""
        return act() if self._is_alone else run_on_all(self.accelerator, act)

    def _as_vllm_takes_them(
        self, prompts: list[list[int]], images: list[Any] | None
    ) -> tuple[list[list[int]], list[Any] | None]:
        if images is None:
            return prompts, None
        token = self._image_token_id()
        rows = zip(prompts, images, strict=True)
        sent = [one_token_per_image(prompt, len(pictures or []), token) for prompt, pictures in rows]
        return sent, [pictures and list(map(as_trained, pictures)) for pictures in images]

    @contextmanager
    def tool_turns(self) -> Iterator[None]:
        """What is sampled in the block are turns after tool calls, which a process takes while the others may not."""
        # TRL's `generate` has a collective only if an engine runs in several processes (1.11 to 1.16).
        self._is_alone = self.accelerator.num_processes > 1 and self.tensor_parallel_size == 1
        try:
            yield
        finally:
            self._is_alone = False

    @contextmanager
    def _without_text(self) -> Iterator[None]:
        """Have vLLM return the tokens of TRL's completions only, as TRL does not read their text."""
        given = self.generation_kwargs
        # In this process vLLM decodes each token twice between two steps of the GPU, for the text and for the token's
        # log-probability (0.26, v1/engine/logprobs.py). Stop strings are looked for in the text.
        if not given.get("stop"):
            self.generation_kwargs = {"detokenize": False, **given}
        try:
            yield
        finally:
            self.generation_kwargs = given

    def _before_sampling(self) -> None:
        """Before each call of `llm` that samples; of rollout functions and tools, too."""
        # With several processes a sync is collective, and the others may not be sampling: then the gate refuses the
        # request.
        if self.active_name is None and self.accelerator.num_processes == 1:
            self.sync_weights()
        else:
            self.sync_if_changed()
        self._check_active()

    def _check_active(self) -> None:
        """Make sure that vLLM still holds the active version, if there is one."""
        if self.active is not None:
            self.holder.check(self.active)

    def sleep(self) -> None:
        """Nothing: TRL's `generate` gives the KV cache back by itself, if `vllm_enable_sleep_mode` is set."""

    def close(self) -> None:
        """Withdraw the active version; the next `generate` loads the adapter again. Not collective, never fails."""
        self.active_name, self.active = None, None
        self.gate.close()
        self._is_alone = False  # an interrupt may have come between the end of `tool_turns` and of its block
        self.holder.release()
        self._received = None
        self.reader.release()
        # The recorded work of the reader had memory that torch keeps apart, for nothing else, until this call.
        with suppress(RuntimeError):  # as after an error of CUDA, which the training has raised
            torch.cuda.empty_cache()


def _check_prompts(served: list[list[int]], prompts: list[list[int]]) -> None:
    """Compare what vLLM sampled after with what the trainer computes with."""
    if served != prompts:
        raise GenerationError(
            "vLLM in this process sampled after other tokens than the prompts of the trainer have. For some models, "
            "such as Gemma3, it adds more to a prompt than the tokens of an image. Use a server for them, which takes "
            'prompts as the trainer has them (vllm_mode="server"), or train without images.'
        )


def _no_fused(why: str) -> UnsupportedSettingError:
    return UnsupportedSettingError(
        f'lora_sync_serving="fused" cannot be used in colocate mode here: {why}. Set lora_sync_serving="runtime".'
    )
