"""What generation on servers and generation in the trainer's process share: everything that reads the trained model.

Reads and scores the adapter during training, however a launcher has wrapped or sharded the model. Knows no engine.
"""

import logging
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor, nn
from trl.generation.vllm_generation import VLLMGeneration

from trl_lora_sync._trl import zero3_hooks_removed
from trl_lora_sync.adapter.base_drift import BaseDrift, change_from_checkpoint
from trl_lora_sync.adapter.canonical import CanonicalAdapter, Form
from trl_lora_sync.adapter.export import (
    AdapterReader,
    active_dropout,
    base_dtype,
    remember_initial_adapter,
)
from trl_lora_sync.adapter.extras import neutral_extras, trial_extras
from trl_lora_sync.adapter.fingerprint import fingerprint
from trl_lora_sync.adapter.groups import experts_note, sees_images, without_numbers
from trl_lora_sync.adapter.modalities import vision_exclusion
from trl_lora_sync.adapter.module_tree import weight_of
from trl_lora_sync.adapter.names import trained_path, unwrapped_path
from trl_lora_sync.adapter.support import WEIGHTS_WAY_OUT, check_other_parameters
from trl_lora_sync.checks.verify import PROBE_PROMPT, ReadAdapter, Scores, TrainedBase, Trial
from trl_lora_sync.collective.distributed import (
    check_launcher,
    check_same_start,
    gather_weights,
    models_prepared,
    outermost,
    results_of_all,
    run_on_all,
    run_on_main,
)
from trl_lora_sync.collective.shards import check_quantised, is_partitioned, is_sharded, shards_of, whole_in_forward
from trl_lora_sync.errors import LoRASyncError, UnsupportedAdapterError, UnsupportedSettingError
from trl_lora_sync.generation.image_probe import make_image_probe
from trl_lora_sync.generation.scoring import (
    Prompt,
    adapter_logprobs,
    base_logprobs,
    neutral_weights,
    strong_trial,
    trial_logprobs,
    trial_weights,
)
from trl_lora_sync.metrics import PhaseTimer, SyncReport
from trl_lora_sync.settings import PolicySettings

logger = logging.getLogger(__name__)

Score = Callable[[dict[Any, Tensor], Prompt], list[float]]
MakeTrials = Callable[[], tuple[Trial, ...]]
# Of the bits of the matrices and extras, not waited for, and the scalings, which PEFT keeps beside them as numbers.
Fingerprint = tuple[Tensor, tuple[float, ...]]


class AdapterGeneration(VLLMGeneration):  # type: ignore[misc]
    """Takes the place of TRL's generation object; what samples is up to its subclasses.

    Args:
        settings: what to sync with.
        on_sync: called on every process with the report of each accepted sync.
        is_new: whether TRL has just made the adapter; else the model came with one, which may have been trained.
        *args, **kwargs: arguments of TRL's class, unchanged.

    Attributes:
        settings, on_sync: the arguments.
        active_name: the adapter that new samples come from; None before the first sync and after `close`.
        dtype_in: in which dtype an adapter of a form is written.
        reader: reads the adapter of the model.
    """

    _looked_at: list[ReferenceType[nn.Module]] | None = None  # what accelerate had wrapped then

    def __init__(
        self,
        *args: Any,
        settings: PolicySettings,
        on_sync: Callable[[SyncReport], None],
        is_new: bool = False,
        **kwargs: Any,
    ) -> None:
        self.settings: Any = settings
        self.on_sync = on_sync
        self._is_new = is_new
        self._initial: dict[nn.Module, Tensor] = {}  # the initial matrices, if the base weights lack them
        self.active_name: str | None = None
        self.reader = AdapterReader(settings.reads, proves_groups=settings.proves_groups)
        self._generate_s: float | None = None  # since it was last taken; None before the first generation
        self._sharded = False
        self._published: Fingerprint | None = None  # of this process's part of the active version
        self._has_looked = False  # whether the model was looked at, for a sample, since the last sync
        self._base_drift = BaseDrift()
        self._frozen: list[nn.Parameter] = []  # when the layout was looked at
        self._base_logprobs: list[float] | None = None  # of `PROBE_PROMPT`, by the model with its present wrapper
        # Last, as TRL's `__init__` ends with `_init_vllm` (1.11 to 1.16), which uses all of these.
        super().__init__(*args, **kwargs)

    def _look_at_model(self) -> None:
        """**Collective.** What must be known of the model before anything samples from it.

        Raises:
            UnsupportedSettingError, UnsupportedAdapterError: the adapter cannot be read from it.
        """
        check_launcher(self.accelerator)
        settings = self.settings
        chosen, of_base = settings.dtype, base_dtype(self.model)
        # By default as the servers keep it, as they cast any other one. No method, as trials outlive this object.
        self.dtype_in: Callable[[Form], torch.dtype] = lambda form: chosen or form.dtype or of_base
        self._initial = run_on_all(
            self.accelerator,
            lambda: remember_initial_adapter(
                self.model, is_new=self._is_new, serving=settings.reads, proves_groups=settings.proves_groups
            ),
        )
        # Before FSDP shards the model, while each process still holds its whole initial adapter.
        check_same_start(self.accelerator, fingerprint(list(self._initial.values())))
        self.reader.fingerprints.prepare(self.accelerator.device)

    def _print_start(self, summary: str) -> None:
        """Print on process 0 what was set up."""
        self._check_base_weights()
        if self.accelerator.is_main_process:
            print(summary, flush=True)
            if dropout := active_dropout(self.model):
                print(dropout_note(dropout), flush=True)
            if note := experts_note((path for path, _ in self.model.named_modules()), self.reader.groups()):
                print(note, flush=True)
            if self._initial:
                print(initial_note(sum(one.nbytes for one in self._initial.values())), flush=True)

    def _fingerprint(self, linears: Sequence[nn.Linear]) -> Fingerprint:
        """Of this process's part of the adapter, at this moment."""
        tensors = [*map(weight_of, linears)]
        if self._sharded:
            shards = shards_of(linears, outermost(self.accelerator, self.model))
            tensors = [weight if shard is None else shard.values for weight, shard in zip(tensors, shards, strict=True)]
        # Extras are whole, because `linears` refuses a sharded model that has any.
        bits = self.reader.fingerprints.of([*tensors, *(one.parameter for one in self.reader.extras)])
        return bits, self.reader.scalings()

    def _has_changed(self) -> bool:
        """**Collective.** Whether the adapter differs from the published one, on any process.

        TRL syncs only when `global_step` has changed; weights may change without, between two evaluations or
        two calls of `train()`.
        """
        # On any: a change may be in the shard of one process alone, and all must enter the sync.
        return any(results_of_all(self.accelerator, self._has_changed_here))

    def _has_changed_here(self) -> bool:
        """Whether this process's part of the adapter differs from the published one, unless that is requested.

        Raises:
            UnsupportedAdapterError: the model does not compute with the adapter, or with more than the adapter.
        """
        # An optimizer that was given to the trainer may have all parameters, and train them once they are unfrozen.
        if any(parameter.requires_grad for parameter in self._frozen):
            self._looked_at = None
        linears = self.linears()
        # Also where an older version is requested: a merged or disabled adapter must not be sampled from unnoticed.
        self.reader.check()
        self._check_base_weights()
        self._has_looked = True
        if self.settings.samples_older:
            return False
        if self._published is None:
            return True
        (bits, scalings), (published_bits, published_scalings) = self._fingerprint(linears), self._published
        # The bits as numbers, since the model may have been moved to another device.
        return scalings != published_scalings or bits.tolist() != published_bits.tolist()

    @property
    def _samples_trained_base(self) -> bool:
        """Whether samples come from the base weights of the trainer itself."""
        return False

    def _check_base_weights(self) -> None:
        """Refuse base weights that have been changed since the start, and warn of what an undone merge leaves."""
        # A sharded model has no whole rows to compare.
        if self._sharded or self._samples_trained_base:
            return
        drift = self._base_drift
        # An error at each look, as the training may be started again after it, and a warning at each change.
        if not drift.has_moved(self.reader.base_layers) and drift.is_rounding:
            return
        what = (
            f"The base weights below the adapter have changed since the start of the run, by {drift.share:.2g} of "
            "their size, as merge_adapter() changes them. The served base is the checkpoint's"
        )
        if not drift.is_rounding:
            raise UnsupportedAdapterError(
                f"{what}, so completions would come from another policy. Merge a copy of the model "
                "(copy.deepcopy(model)), or save the merged model, serve it and start another run on it, "
                f"{WEIGHTS_WAY_OUT}."
            )
        logger.warning(
            "%s. The rounding of merges that were undone leaves as much. To avoid it, merge a copy of the model "
            "(copy.deepcopy(model)).",
            what,
        )

    def sync_if_changed(self) -> None:
        """For what samples on process 0 alone, such as a rollout function.

        Raises:
            LoRASyncError: the adapter has changed since the last sync, and the other processes do not take part in one.
        """
        if self.active_name is None or not self._has_changed_here():
            return
        if self.accelerator.num_processes > 1:
            raise LoRASyncError(
                "The adapter has changed since the last sync, so samples would come from another policy than the "
                "trainer's. Call trainer.vllm_generation.sync_weights() on every process before sampling on one."
            )
        self.sync_weights()

    def scores(self, forward: Any = None, device: torch.device | None = None) -> Scores:
        """The policy's log-probabilities of `PROBE_PROMPT`, with the current adapter and without one.

        The base is computed again when accelerate has wrapped the model: its autocast rounds both, and the base alone
        at the start was computed without.
        """
        # First, as the server would be named for a difference that the trainer's base explains.
        self._check_base_weights()
        model = self.model
        adapted = adapter_logprobs(model, PROBE_PROMPT, forward=forward, device=device)
        # The frozen base does not change, so one forward pass is enough until the model is wrapped again.
        if self._base_logprobs is None:
            self._base_logprobs = trial_logprobs(
                model, self._base_weights(), PROBE_PROMPT, forward=forward, device=device
            )
        return Scores(base=self._base_logprobs, adapted=adapted)

    def _base_weights(self) -> dict[Any, Tensor | None]:
        """What to compute with instead of the adapter for the checkpoint's base."""
        # Every lora_B: with zeros there, the product is zero whatever lora_A is.
        zeros = dict.fromkeys(self.reader.last_linears[1::2])
        return {**(self._initial or zeros), **neutral_extras(self.reader.extras)}

    def _is_sharded(self) -> bool:
        """Whether a forward pass of the model needs every process."""
        self._look_at_layout()
        return self._sharded

    def _look_at_layout(self) -> None:
        """Find out how a launcher has wrapped the model, once each time that it has.

        Raises:
            UnsupportedSettingError: what was sharded cannot be put together again as it was.
            UnsupportedAdapterError: more than the adapter is trained.
        """
        prepared = models_prepared(self.accelerator)
        # Looked up at each sync, as accelerate wraps the model in `train`, after the start has read it.
        if self._looked_at != prepared:
            # In `train` as well, whose optimizer takes all that is to be trained by then.
            named = list(self.model.named_parameters())
            check_other_parameters(trained_path(name) for name, parameter in named if parameter.requires_grad)
            self._frozen = [parameter for _, parameter in named if not parameter.requires_grad]
            self._sharded = is_sharded(self.model)
            if self._sharded:
                check_quantised(self.model, self.accelerator.device)
            self._base_logprobs = None
            self._looked_at = prepared

    @contextmanager
    def _computing(self) -> Iterator[Any]:
        """**Collective.** What to call for a forward pass of the sharded model, wrapped by its launcher or not yet."""
        wrapper = outermost(self.accelerator, self.model)
        with ExitStack() as stack:
            if is_partitioned(self.model) and wrapper is not self.model:
                # Then nothing gathers the parameters for a forward pass but `whole_in_forward`, as before `prepare`.
                stack.enter_context(zero3_hooks_removed(wrapper))
                wrapper = self.model
            stack.enter_context(whole_in_forward(self.model, self.accelerator.device))
            yield wrapper

    def _gather_adapter(self, timer: PhaseTimer) -> ReadAdapter:
        """**Collective.** Gather what is sharded of the adapter, and return what reads all of it.

        Of a sharded adapter only process 0 gets all, so it may be read there alone.
        """
        with timer.phase("gather"):
            _, gathered = self._gather_matrices()

        def read(form: Form) -> CanonicalAdapter:
            return self.reader.read(self.model, dtype=self.dtype_in(form), form=form, gathered=gathered)

        return read

    def _gather_matrices(self) -> tuple[Sequence[nn.Linear], dict[nn.Module, Tensor]]:
        """**Collective.** The linear modules of the adapter and, on process 0, the whole weights of sharded ones."""
        linears = run_on_all(self.accelerator, self.linears)
        if not self._sharded:
            return linears, {}
        return linears, gather_weights(self.accelerator, linears, outermost(self.accelerator, self.model))

    def linears(self) -> Sequence[nn.Linear]:
        self._look_at_layout()
        linears = self.reader.linears(self.model)
        if self._sharded and self.reader.reads_parameters:
            raise UnsupportedSettingError(
                "Experts, or parameters beside the matrices of linear layers, are trained, and FSDP or DeepSpeed "
                "ZeRO-3 shards the model. Of a sharded model only the matrices of linear layers can be read. Use DDP "
                "or ZeRO-2, or train plain LoRA on linear layers."
            )
        return linears

    def adapter_state_dict(self) -> dict[str, Tensor]:
        """**Collective.** Copies of the adapter's matrices as they are trained, by their names in PEFT's files.

        Only process 0 gets them.
        """
        linears, gathered = self._gather_matrices()
        if not self.accelerator.is_main_process:
            return {}
        wanted, suffix = set(linears), f".{self.model.active_adapter}"
        return {
            f"{unwrapped_path(path).removesuffix(suffix)}.weight": gathered.get(module, module.weight).detach().clone()
            for path, module in self.model.named_modules()
            if module in wanted
        }

    def trials(self, base: TrainedBase, *, is_whole: bool = False) -> MakeTrials:
        """**Collective** if the model is sharded. What makes the trial adapters on process 0.

        Args:
            is_whole: whether one adapter is to change all modules, instead of one adapter for each group of them.
        """
        if self.settings.verify == "off":
            return lambda: ()
        reader, model, dtype_in, device = self.reader, self.model, self.dtype_in, self.accelerator.device
        initial = self._initial
        noted: list[Any] = []  # what the scores of the trials were computed with

        def traits() -> list[Any]:
            # By paths and shapes, as a launcher may wrap the modules themselves.
            shapes = {
                group: {path: [(one.in_features, one.out_features) for one in pair] for path, pair in modules.items()}
                for group, modules in groups().items()
            }
            return [shapes, reader.scalings(), model.active_adapter]

        def groups() -> dict[str, dict[str, tuple[nn.Linear, ...]]]:
            reader.linears(model)
            found = reader.groups()
            return {"trained": dict(ChainMap(*found.values()))} if is_whole else found

        def weights(strength: float, group: str) -> dict[Any, Tensor]:
            modules = groups()[group]
            changed = [matrix for pair in modules.values() for matrix in pair]
            extras = [one for one in reader.extras if one.path in modules]
            unchanged = neutral_weights(reader.last_linears, initial, device) | neutral_extras(reader.extras)
            # The last of equal keys counts, so the modules of the group change and all others stay neutral.
            return unchanged | trial_weights(changed, strength, device) | trial_extras(extras, strength, device)

        def made(group: str, modules: Iterable[str], score: Score) -> Trial:
            probe = make_image_probe(self.processing_class, self._image_token_id()) if sees_images(group) else None
            found = base.scores if probe is None else base_logprobs(model, probe, self._base_weights())
            assert found is not None
            strength, logprobs = strong_trial(
                lambda strength: score(weights(strength, group), probe or PROBE_PROMPT), *found
            )

            # Kept as long as the servers are, so it may not refer to this object, whose end is theirs.
            def read(form: Form) -> CanonicalAdapter:
                return reader.read_trial(model, weights(strength, group), dtype=dtype_in(form), form=form)

            names = without_numbers(modules)
            return Trial(
                group=group,
                modules=names,
                read=read,
                scores=Scores(base=found[0], adapted=logprobs),
                image=probe,
                advice=_advice(model, group, names),
                is_current=lambda: traits() == noted,
            )

        def make(score: Score) -> tuple[Trial, ...]:
            noted[:] = traits()
            return tuple(made(group, modules, score) for group, modules in groups().items())

        def score_together(trial: dict[Any, Tensor], prompt: Prompt) -> list[float]:
            with self._computing() as forward:
                found = run_on_all(
                    self.accelerator,
                    lambda: trial_logprobs(model, trial, prompt, forward=forward, device=device),
                )
            return run_on_main(self.accelerator, lambda: found)  # so that all go on in the same way

        if self._is_sharded():
            if any(map(sees_images, groups())):
                raise UnsupportedSettingError(
                    "The adapter changes modules that see images, and FSDP or DeepSpeed ZeRO-3 shards the model. There "
                    "it is not proved that a server applies them. Use DDP or ZeRO-2, or set "
                    f"LoraConfig(exclude_modules={vision_exclusion(model, model.active_peft_config)!r})."
                )
            # Now, while all processes take part: process 0 uses them later, and alone.
            trials = make(score_together)
            return lambda: trials
        return lambda: make(lambda trial, prompt: trial_logprobs(model, trial, prompt))

    def _image_token_id(self) -> int | None:
        """What stands for an image in a tokenized prompt.

        The model knows it. The processor of Gemma3 calls the token before the image by that name (Transformers 5.23).
        """
        found: int | None = getattr(self.model.config, "image_token_id", None)
        return getattr(self.processing_class, "image_token_id", None) if found is None else found

    def _trained_base(self) -> TrainedBase:
        """**Collective.** What is known of the base model; as a server may restart at any time, all of it now."""
        model = self.model
        # On all processes: `check_quantised` depends on the GPU, and may refuse the one of a single process.
        run_on_all(self.accelerator, self.linears)
        device = self.accelerator.device if self._sharded else None
        with self._computing():
            scores = run_on_all(
                self.accelerator, lambda: base_logprobs(model, PROBE_PROMPT, self._base_weights(), device=device)
            )
        if self._sharded:
            # The numbers of process 0 everywhere, so that all processes judge alike.
            mine = scores
            scores = run_on_main(self.accelerator, lambda: mine)
        # Then samples come from the trainer's own weights of these layers, whatever the checkpoint holds.
        changed = self.reader.scaled_layers if self._samples_trained_base else ()
        return TrainedBase(
            change=change_from_checkpoint(model, changed, self.reader.initial()),
            name=model.active_peft_config.base_model_name_or_path,
            vocab_size=getattr(model.config.get_text_config(), "vocab_size", None),
            scores=scores,
        )

    def take_generate_s(self) -> float | None:
        """Seconds spent in `generate`, syncs not counted, since this was last called; None if it never generated."""
        seconds = self._generate_s
        # None stays None.
        self._generate_s = seconds and 0.0
        return seconds


def _advice(model: Any, group: str, modules: Sequence[str]) -> str:
    """What to do if a server ignores these modules of a group."""
    if group in ("experts", "router"):
        return (
            "If the server cannot apply adapters to these, train the other layers only: give target_modules as a list "
            "of their names, and no target_parameters."
        )
    if any(name.endswith("kv_b_proj") for name in modules):
        return "vLLM applies no adapter to kv_b_proj (vllm#48974): leave it out of target_modules."
    if not sees_images(group):
        return ""
    return (
        "vLLM applies adapters to modules that see images only with --enable-tower-connector-lora: restart the server "
        "with that flag (`trl-lora-sync serve vllm MODEL -- --enable-tower-connector-lora`), or train the language "
        f"model only, with LoraConfig(exclude_modules={vision_exclusion(model, model.active_peft_config)!r})."
    )


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
