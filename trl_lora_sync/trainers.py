"""TRL's trainers, building our generation object instead of theirs when adapter sync is chosen."""

import inspect
import logging
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import trl

from trl_lora_sync import _trl
from trl_lora_sync.config import GRPOConfig, LoRASyncConfig, syncs_adapters, without_effect
from trl_lora_sync.errors import UnsupportedSettingError
from trl_lora_sync.trl_checks import (
    check_arguments,
    check_built,
    check_colocate,
    check_overlap,
    check_trainer,
    refuse_mixin_last,
    trl_classes,
)
from trl_lora_sync.versions import VLLM_COLOCATE, warn

if TYPE_CHECKING:
    from trl_lora_sync.generation.lookahead import LookAhead
    from trl_lora_sync.metrics import SyncReport, SyncTotals


logger = logging.getLogger(__name__)

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class LoRASyncTrainer:
    """Mixin that adds adapter sync to a trainer of TRL that samples with vLLM.

    With `vllm_sync_strategy="lora_adapter"` in its configuration the server loads the adapter at each sync. With
    `"weights"`, or a configuration of TRL's own, the trainer *is* TRL's. It takes TRL's arguments, unchanged. This
    package has no class for some trainers. Make one:

        class MyGMPOTrainer(LoRASyncTrainer, GMPOTrainer): ...

    Raises:
        UnsupportedSettingError: at construction, before the model is loaded, for settings or PEFT features that a
            server could not serve exactly, and for trainers without adapter sync.
        UnsupportedTRLError: the trainer of the installed TRL differs from the tested ones.
    """

    accelerator: Any
    model: Any
    model_wrapped: Any
    optimizer: Any
    add_callback: Any
    args: Any
    vllm_generation: Any
    state: Any
    _step: int
    # Set here and not in `__init__`: Transformers' `__init__` already calls `_move_model_to_device`.
    _syncs_adapters = False
    _totals: "SyncTotals | None" = None  # of the training that runs
    _look_ahead: "LookAhead | None" = None  # with overlap only
    _first_step = 0  # `_step` at the first batch of the update that runs
    _has_optimized = False  # whether parameters of an adapter have been seen in the optimizer
    _has_warned_of_images = False
    _waits_on_host = False  # the model, for the weights that it is to share with vLLM

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_mixin_last(cls, LoRASyncTrainer)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = _given(type(self), args, kwargs)
        config: Any = given.get("args")
        self._syncs_adapters = syncs_adapters(config)
        # Before the imports below: with "weights" the trainer is TRL's bit for bit, and loads nothing more.
        if not self._syncs_adapters:
            # Not an error: to go back to TRL's own sync, a script changes one setting and keeps the others.
            warn(logger, without_effect(config))
            super().__init__(*args, **kwargs)
            # A class behind this one may have made the configuration, and TRL has then set up its sync.
            if syncs_adapters(self.args):
                raise _unseen(type(self), "args")
            return
        from trl_lora_sync.adapter.support import check_model
        from trl_lora_sync.config import check_reference, check_sync_fields, sync_settings
        from trl_lora_sync.run_log import RunLog

        # All checks come before TRL's `__init__`, which loads the model: a wrong run fails in seconds.
        self._check_trainer(config)
        if "model" not in given:
            raise _unseen(type(self), "model")
        check_sync_fields(config)  # fields may have been set after the config was made
        self._check_arguments(config, given)
        settings = sync_settings(config)
        check_model(given["model"], given.get("peft_config"), settings.reads, proves_groups=settings.proves_groups)
        check_reference(config, given.get("peft_config"), given["model"])
        sync = {
            "settings": settings,
            "on_sync": self._record_sync,
            # TRL adds an adapter to a model without one; an adapter that the model came with may have been trained.
            "is_new": not hasattr(given["model"], "peft_config"),
        }
        self._build(sync, given, *args, **kwargs)
        # After `_build`, as Transformers makes the list of callbacks in its `__init__`.
        self.add_callback(RunLog(self))
        if config.lora_sync_overlap:
            from trl_lora_sync.generation.lookahead import LookAhead
            from trl_lora_sync.generation.overlap import start_sentence

            self._look_ahead = LookAhead(lambda: self.accelerator.gradient_state.end_of_dataloader)
            if self.accelerator.is_main_process:
                print(start_sentence(self.args.vllm_importance_sampling_mode), flush=True)

    def _check_trainer(self, config: Any) -> None:
        """Refuse a trainer that adapter sync is not for."""
        check_trainer(type(self))

    def _check_arguments(self, config: Any, given: dict[str, Any]) -> None:
        """Refuse arguments of the trainer that adapter sync is not for."""
        from trl_lora_sync.config import check_overlap_arguments

        if config.lora_sync_overlap:
            check_overlap(type(self))
            check_overlap_arguments(config, given)

    def _build(self, sync: dict[str, Any], given: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Call TRL's `__init__`, which gets our generation object.

        Args:
            sync: what that object takes besides TRL's arguments.
            given: the trainer's arguments by name, which are the others.
        """
        config = given["args"]
        # Imported before TRL's name is replaced below, as our classes derive from what it names.
        generation_class = _generation_class(config)
        if config.vllm_mode == "colocate":
            from trl_lora_sync.colocate.shared_base import may_share, refuse_sharded

            refuse_sharded(config)
            # Until vLLM has loaded the weights that both will share.
            self._waits_on_host = given.get("quantization_config") is None and may_share(config, given["model"])

        def build(*arguments: Any, **named: Any) -> Any:
            # TRL's arguments alone, as TRL's signature does not have ours.
            check_arguments(generation_class, *arguments, **named)
            if self._waits_on_host:
                named["waits_on_host"] = True
            return generation_class(*arguments, **named, **sync)

        with ExitStack() as stack:
            stack.enter_context(_trl.generation_class(type(self), build))
            if self._waits_on_host:
                stack.enter_context(_trl.models_on_host(type(self)))
            super().__init__(*args, **kwargs)
        # From here on the model may be moved, as `train` does with bf16_full_eval, for example (Transformers 5.24).
        self._waits_on_host = False
        check_built(self, generation_class)

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Transformers' `_move_model_to_device`, unless the model waits for weights that it is to share with vLLM."""
        if not self._waits_on_host:
            super()._move_model_to_device(model, device)  # type: ignore[misc]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's `train`. At its end, also on an error, versions are unloaded and deleted, and the syncs summed up."""
        # A trainer may train several times, and each training has a summary.
        self._totals = None
        if self._syncs_adapters:
            # Else TRL (1.16) goes on with the batch that an interrupt or an early end has left, whose samples are of
            # that training's policy, and from then on it samples in the middle of updates.
            _trl.forget_batch(self)
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._release_adapters()
            if self._totals is not None and self.accelerator.is_main_process:
                print(self._totals.summary(), flush=True)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        """Transformers' `get_batch_samples`; with overlap it remembers what it takes, and what is read beyond it."""
        if self._look_ahead is not None:
            # `_step` counts micro-batches over the whole training, and `LookAhead` from the first one of an update.
            self._first_step = self._step
            epoch_iterator = self._look_ahead.over(epoch_iterator)
        return super().get_batch_samples(epoch_iterator, *args, **kwargs)  # type: ignore[misc]

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """TRL's `_prepare_inputs`; with overlap a batch to train on comes from what was sampled ahead."""
        if self._syncs_adapters:
            self._check_model()
            self._check_gradients()
        if self._look_ahead is None or not _trl.generation_is_due(self):
            return super()._prepare_inputs(generation_batch)  # type: ignore[misc]
        with self.vllm_generation.training_batch(self._following_prompts()) as batch:
            inputs = super()._prepare_inputs(generation_batch)  # type: ignore[misc]
        # After the block, when TRL has computed the importance ratios. `figures` comes from a broadcast, so either all
        # processes enter the collective or none does.
        if batch.figures is not None:
            from trl_lora_sync.metrics import OVERLAP_MASKED

            masked = {OVERLAP_MASKED: _trl.masked_share(self)}
            _trl.record_metrics(self, batch.figures.metrics() | masked, latest=frozenset())
        return inputs

    def _check_model(self) -> None:
        """Refuse a model that was put into the built trainer: completions come from the adapter of the first model."""
        unwrap, sampled = self.accelerator.unwrap_model, self.vllm_generation.model
        if self.model is not sampled and unwrap(self.model, keep_torch_compile=False) is not unwrap(
            sampled, keep_torch_compile=False
        ):
            raise UnsupportedSettingError(
                "trainer.model was replaced by another model after the trainer was built, and completions still come "
                "from the adapter of the first model. Build another trainer with the new model. Or put the first one "
                "back, with trainer.model = trainer.model_wrapped = trainer.vllm_generation.model, and load weights "
                "into it, with trainer.model.load_adapter(folder, trainer.model.active_adapter, is_trainable=True)."
            )

    def _check_gradients(self) -> None:
        """Refuse to train under DDP without its wrapper, which averages gradients; each process would train apart."""
        is_ddp = self.accelerator.distributed_type.value.startswith("MULTI_")
        # accelerate marks a model as prepared when it prepares it for an evaluation, and wraps it no more
        # (`prepare_model`, 1.15; `evaluation_loop` in transformers/trainer.py, 5.24).
        if is_ddp and self.model.training and self.model_wrapped is self.model:
            raise UnsupportedSettingError(
                "The model is not wrapped in DistributedDataParallel, so no gradients are averaged, and each process "
                "would train another adapter. That is so in a train() after an evaluate(). Set eval_on_start=True, and "
                "leave out that evaluate()."
            )

    def _check_optimizer(self) -> None:
        """Refuse to train an adapter whose parameters the optimizer does not have."""
        # These may give the optimizer other parameters than the model's. There is none if a user wrote the loop.
        if self.optimizer is None or self.accelerator.distributed_type.value in ("FSDP", "DEEPSPEED"):
            return
        weights = [linear.weight for linear in self.vllm_generation.reader.last_linears]
        optimized = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        if any(id(weight) in optimized for weight in weights):
            self._has_optimized = True
        # Only then: optimizers that work layer by layer never show the parameters (Transformers 5.24).
        elif self._has_optimized and any(weight.requires_grad for weight in weights):
            raise UnsupportedSettingError(
                f"The optimizer does not have the parameters of the adapter {self.model.active_adapter!r}, so it would "
                "be sampled and never trained. The optimizer has the parameters that were trained before, and a second "
                "train() keeps it. Activate their adapter again with model.set_adapter(name), and load weights into it "
                "with model.load_adapter(folder, name, is_trainable=True). Or set trainer.optimizer = "
                "trainer.lr_scheduler = None, so that the next train() makes another optimizer."
            )

    def _tool_call_loop(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's `_tool_call_loop`, which samples only on the processes that still have a tool call."""
        with self.vllm_generation.tool_turns() if self._syncs_adapters else nullcontext():
            return super()._tool_call_loop(*args, **kwargs)  # type: ignore[misc]

    def _following_prompts(self) -> list[list[int]] | None:
        """The token ids of this process's prompts in the next batch that is sampled; None if there is none."""
        assert self._look_ahead is not None
        look, per_update = self._look_ahead, self.args.gradient_accumulation_steps
        # In micro-batches, from the first one of the update that runs.
        place = self._step - self._first_step + _trl.batches_until_generation(self)
        # `updates` end before that batch is sampled: none if it belongs to the update that runs.
        batch, updates = look.peek(place), max(0, 1 + (place - look.taken) // per_update)
        # The epoch ends first. `peek` has read the rest of it, so `known` counts to its end.
        if batch is None and look.taken:
            in_next_epoch = place - look.known
            # The last update of an epoch may have fewer batches.
            updates = -(-(look.known - look.taken) // per_update) + 1 + in_next_epoch // per_update
            batch = _trl.batch_of_next_epoch(self, in_next_epoch)
        # The training ends before that batch, so sampling it would be for nothing.
        if self.state.global_step + updates >= self.state.max_steps:
            return None
        prompts = None if batch is None else _trl.tokenized(self, batch)
        if batch is not None and prompts is None and not self._has_warned_of_images:
            self._has_warned_of_images = True
            logger.warning("A batch with images is not sampled ahead: lora_sync_overlap=1 is for text prompts.")
        return prompts

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """**Collective.** TRL's `save_model`. Under FSDP with sharded state dicts it saves the adapter as well.

        There, Transformers (5.23) silently saves nothing. Only its checkpoints hold the adapter, as shards.
        """
        # With `_internal_call` it is a checkpoint, which holds the adapter as shards.
        # Before TRL's own, which ends with the push to the Hub.
        if self._syncs_adapters and not _internal_call and _trl.saves_shards_only(self):
            from trl_lora_sync.collective.distributed import run_on_main

            # Not inside `run_on_main`: gathering is collective, and there the other processes only wait.
            matrices = self.vllm_generation.adapter_state_dict()
            run_on_main(self.accelerator, lambda: _trl.save_adapter(self, output_dir, matrices))
        super().save_model(output_dir, _internal_call)  # type: ignore[misc]

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's `compute_loss`. With `vllm_server_sleep` the server first releases its KV cache."""
        # An evaluation computes losses between generations, so the servers keep their memory then.
        if self._syncs_adapters and self.model.training:
            # After `_prepare_inputs`, which reads the adapter that is active now.
            self._check_optimizer()
            # Called at each micro-batch; a server that sleeps already gets no request.
            self.vllm_generation.sleep()
        return super().compute_loss(*args, **kwargs)  # type: ignore[misc]

    def _release_adapters(self) -> None:
        if self._syncs_adapters:
            self.vllm_generation.close()
            if self._look_ahead is not None:
                # What was read ahead belongs to a dataloader that ends with this training.
                self._look_ahead.forget()
            # The versions are unloaded, so the next training or evaluation must sync, though the step may be the same.
            _trl.forget_last_sync(self)

    def _record_sync(self, report: "SyncReport") -> None:
        from trl_lora_sync.metrics import PREFIX, SyncTotals

        self._totals = self._totals or SyncTotals()
        self._totals.add(report)
        # The mean of several versions between two logs would be none of them.
        _trl.record_metrics(
            self, report.metrics(), latest=frozenset({f"{PREFIX}{name}" for name in ("version", "servers", "verified")})
        )


def _generation_class(config: Any) -> Any:
    """What samples for a trainer: on servers, or in this process.

    Raises:
        UnsupportedSettingError: vLLM is not installed in this environment, where colocate mode needs it.
        UnsupportedTRLError: the installed TRL has something that colocate mode needs in another form.
    """
    if config.vllm_mode == "server":
        from trl_lora_sync.generation.server import LoRASyncGeneration

        return LoRASyncGeneration
    from trl_lora_sync.colocate.engine import installed_version
    from trl_lora_sync.colocate.generation import ColocateGeneration

    # Before `check_colocate`: without vLLM, TRL's module has no `LLM` either, and TRL would be named as the cause.
    warn(logger, VLLM_COLOCATE.caution(installed_version()))
    check_colocate()
    return ColocateGeneration


def _given(trainer_class: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a trainer is given, by the names of TRL's parameters, or of a class before it.

    Raises:
        TypeError: as `__init__` of the trainer does.
        UnsupportedSettingError: the class is not made of a trainer of TRL.
    """
    # The signatures behind the mixin, as `__init__` of the mixins takes anything.
    behind = trainer_class.__mro__[trainer_class.__mro__.index(LoRASyncTrainer) + 1 :]
    inits = [(one, vars(one)["__init__"]) for one in behind if "__init__" in vars(one)]
    trls = next((place for place, (one, _) in enumerate(inits) if one in trl_classes(trainer_class)), None)
    if trls is None:
        raise UnsupportedSettingError(
            f"{trainer_class.__name__} derives from no trainer of TRL, to which LoRASyncTrainer adds adapter sync. "
            f"Name one behind it, such as: class {trainer_class.__name__}(LoRASyncTrainer, trl.GRPOTrainer)."
        )
    # None takes the place of `self`.
    inspect.signature(inits[0][1]).bind(None, *args, **kwargs)
    given = dict(kwargs)
    # A class of the user may have parameters beside TRL's. It passes what it takes as `*args` to the next class.
    for _, init in inits[: trls + 1]:
        parameters = list(inspect.signature(init).parameters.values())[1:]
        names = [one.name for one in parameters if one.kind in _BY_POSITION and one.name not in given]
        given |= zip(names, args)  # noqa: B905 - what is left over is for the next class
        args = args[len(names) :]
    return given


def _unseen(trainer_class: type, argument: str) -> UnsupportedSettingError:
    name, trls = trainer_class.__name__, trl_classes(trainer_class)[0].__name__
    return UnsupportedSettingError(
        f"{name} is not given the argument {argument!r} of {trls}, so adapter sync could not check it before the model "
        f"is loaded. A class of yours that makes it comes before the mixin, and {trls} is its base: "
        f"class {name}(YourTrainer, LoRASyncTrainer, {trls})."
    )


class GRPOTrainer(LoRASyncTrainer, trl.GRPOTrainer):  # type: ignore[misc]
    """TRL's `GRPOTrainer` with the adapter sync of `LoRASyncTrainer`."""


__all__ = ["GRPOConfig", "GRPOTrainer", "LoRASyncConfig", "LoRASyncTrainer"]
