"""TRL's trainers, building our generation object instead of theirs when adapter sync is chosen."""

import inspect
from typing import TYPE_CHECKING, Any

import trl

from trl_lora_sync import _trl
from trl_lora_sync.config import GRPOConfig, LoRASyncConfig
from trl_lora_sync.trl_checks import check_arguments, check_built, check_trainer, trl_classes

if TYPE_CHECKING:
    from trl_lora_sync.generation import LoRASyncGeneration
    from trl_lora_sync.metrics import SyncReport, SyncTotals


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
    add_callback: Any
    args: Any
    vllm_generation: "LoRASyncGeneration"
    _totals: "SyncTotals | None" = None  # of the training that runs

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = _given(type(self), args, kwargs)
        config: Any = given.get("args")
        self._syncs_adapters = getattr(config, "vllm_sync_strategy", "weights") == "lora_adapter"
        if not self._syncs_adapters:
            super().__init__(*args, **kwargs)
            return
        from trl_lora_sync.adapter.support import check_model
        from trl_lora_sync.config import check_reference, check_sync_fields, sync_settings
        from trl_lora_sync.generation import LoRASyncGeneration
        from trl_lora_sync.run_log import RunLog

        check_trainer(type(self))
        check_sync_fields(config)  # fields may have been set after the config was made
        check_model(given["model"], given.get("peft_config"))
        check_reference(config, given.get("peft_config"))
        settings = sync_settings(config)
        is_new = not hasattr(given["model"], "peft_config")

        def build(*arguments: Any, **named: Any) -> LoRASyncGeneration:
            check_arguments(LoRASyncGeneration, *arguments, **named)
            return LoRASyncGeneration(*arguments, **named, settings=settings, on_sync=self._record_sync, is_new=is_new)

        with _trl.generation_class(type(self), build):
            super().__init__(*args, **kwargs)
        check_built(self, LoRASyncGeneration)
        self.add_callback(RunLog(self))

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's `train`. At its end, also on an error, versions are unloaded and deleted, and the syncs summed up."""
        self._totals = None
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._release_adapters()
            self._sum_up()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """**Collective.** TRL's `save_model`. Under FSDP with sharded state dicts it saves the adapter as well.

        There, Transformers (5.23) silently saves nothing. Only its checkpoints hold the adapter, as shards.
        """
        if self._syncs_adapters and not _internal_call and _trl.saves_shards_only(self):
            self._save_adapter(output_dir)
        super().save_model(output_dir, _internal_call)  # type: ignore[misc]

    def _save_adapter(self, output_dir: str | None) -> None:
        from trl_lora_sync.distributed import run_on_main

        matrices = self.vllm_generation.adapter_state_dict()
        run_on_main(self.accelerator, lambda: _trl.save_adapter(self, output_dir, matrices))

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's `compute_loss`. With `vllm_server_sleep` the server first releases its KV cache."""
        if self._syncs_adapters and self.model.training:
            self.vllm_generation.sleep()
        return super().compute_loss(*args, **kwargs)  # type: ignore[misc]

    def _release_adapters(self) -> None:
        if self._syncs_adapters:
            self.vllm_generation.close()
            _trl.forget_last_sync(self)

    def _sum_up(self) -> None:
        if self._totals is not None and self.accelerator.is_main_process:
            print(self._totals.summary(), flush=True)

    def _record_sync(self, report: "SyncReport") -> None:
        from trl_lora_sync.metrics import PREFIX, SyncTotals

        self._totals = self._totals or SyncTotals()
        self._totals.add(report)
        _trl.record_metrics(
            self, report.metrics(), latest=frozenset({f"{PREFIX}{name}" for name in ("version", "servers", "verified")})
        )


def _given(trainer_class: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a trainer is given, by the names of TRL's parameters.

    Raises:
        TypeError: as TRL's own `__init__` does.
    """
    init = next(one.__init__ for one in trl_classes(trainer_class) if "__init__" in vars(one))  # type: ignore[misc]
    signature = inspect.signature(init)
    given = dict(signature.bind(None, *args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
        elif parameter.kind is parameter.VAR_POSITIONAL:
            given.pop(name, None)
    return given


class GRPOTrainer(LoRASyncTrainer, trl.GRPOTrainer):  # type: ignore[misc]
    """TRL's `GRPOTrainer` with the adapter sync of `LoRASyncTrainer`."""


__all__ = ["GRPOConfig", "GRPOTrainer", "LoRASyncConfig", "LoRASyncTrainer"]
