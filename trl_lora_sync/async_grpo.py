"""TRL's asynchronous GRPO with adapter sync to several servers, in the place of TRL's.

TRL's trainer (experimental, 1.14 to 1.16) samples while it trains. Its sync writes the adapter with PEFT, pauses the
one server, and loads it there. Here the servers go on, and each group of samples comes from exactly one version.
"""

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from trl_lora_sync import _trl
from trl_lora_sync.collective.distributed import run_on_all, run_on_main
from trl_lora_sync.config import AsyncLoRASyncConfig, check_async_arguments
from trl_lora_sync.errors import UnsupportedSettingError
from trl_lora_sync.generation.server import LoRASyncGeneration
from trl_lora_sync.trainers import LoRASyncTrainer
from trl_lora_sync.trl_checks import check_async, check_async_built, check_async_exports

# Before the classes below, which derive from what this finds.
trls: Any = check_async_exports()

if TYPE_CHECKING:
    from trl_lora_sync.generation.rollouts import RolloutWorker
    from trl_lora_sync.metrics import SyncReport


class AsyncGeneration(LoRASyncGeneration):
    """Syncs the adapter of an asynchronous trainer; its rollout worker samples."""

    def _init_vllm(self) -> None:
        with _trl.plain_forward(self.model):
            super()._init_vllm()

    def sync_weights(self) -> None:
        """**Collective.** As for other trainers; the servers go on sampling meanwhile."""
        # For other trainers before each generation, which here goes on beside the training.
        run_on_all(self.accelerator, self._check_base_weights)
        with _trl.plain_forward(self.model):
            super().sync_weights()


# TRL calls these two in any training, and the rest of a transfer only in the `_sync_weight` that is overridden (1.16).
class _NoTransfer:
    """In the place of TRL's transfer of weights, which is not needed."""

    def init_weight_transfer(self) -> None:
        """Nothing is set up."""

    def destroy(self) -> None:
        """Nothing is left."""


class AsyncLoRASyncTrainer(LoRASyncTrainer):
    """Mixin that adds adapter sync to TRL's `AsyncGRPOTrainer`, or to a trainer that derives from it.

    With `vllm_sync_strategy="lora_adapter"` the adapter goes to all servers of `vllm_server_base_url` at each sync, and
    they sample on meanwhile. TRL's `model_version` is the number of the adapter version, `lora_sync/version`.
    With `"weights"`, or a configuration of TRL's own, the trainer *is* TRL's.

        class MyAsyncTrainer(AsyncLoRASyncTrainer, TheirAsyncTrainer): ...

    Raises:
        UnsupportedSettingError: at construction, see `LoRASyncTrainer`.
        UnsupportedTRLError: the trainer of the installed TRL differs from the tested ones.
    """

    processing_class: Any
    model_version: int
    rollout_worker: "RolloutWorker | None"

    def _check_trainer(self, config: Any) -> None:
        check_async(type(self))
        if not isinstance(config, AsyncLoRASyncConfig):
            raise UnsupportedSettingError(
                f"{type(config).__name__} cannot be used with {type(self).__name__}: it lacks the settings of an "
                "asynchronous trainer. Use AsyncGRPOConfig of trl_lora_sync.async_grpo, or mix in AsyncLoRASyncConfig."
            )

    def _check_arguments(self, config: Any, given: dict[str, Any]) -> None:
        check_async_arguments(given)

    def _build(self, sync: dict[str, Any], given: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        from trl_lora_sync.generation.rollouts import RolloutWorker

        config = given["args"]
        worker = partial(RolloutWorker, sync=lambda: self.vllm_generation.sync, settings=sync["settings"])
        with _trl.rollout_worker_class(type(self), worker):
            # Without a transfer TRL would look for its own way of syncing on the server.
            # Given on every process, as a collective decides about that way (1.16).
            # Past the `__init__` of `LoRASyncTrainer`, which has called this method.
            super(LoRASyncTrainer, self).__init__(*args, **{**kwargs, "weight_transfer": _NoTransfer()})
        check_async_built(self, RolloutWorker)
        # TRL's `__init__` builds none. The worker looks it up when it starts to sample.
        # It reads the adapter, which TRL's `__init__` puts on the model.
        self.vllm_generation = AsyncGeneration(
            model=self.model,
            accelerator=self.accelerator,
            processing_class=self.processing_class,
            mode="server",
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            repetition_penalty=config.repetition_penalty,
            max_completion_length=config.max_completion_length,
            logprobs=0,
            **sync,
        )

    def get_train_dataloader(self) -> Any:
        """TRL's, with the token budget that all servers allow."""
        # TRL would take the limit of the one server that its client knows (1.16).
        # On every process, as `run_on_main` is collective. TRL itself sets it on process 0 alone.
        if self._syncs_adapters and self.args.token_budget is None:
            self.args.token_budget = run_on_main(self.accelerator, self._longest)
        return super().get_train_dataloader()  # type: ignore[misc]

    def _longest(self) -> int:
        longest = self.vllm_generation.fleet.capabilities.max_model_len
        if longest is None:
            raise UnsupportedSettingError(
                "token_budget=None takes the longest prompt and completion that the servers allow, and their answers "
                "do not contain it. Set token_budget to a number of tokens: at least the longest prompt and completion."
            )
        return int(longest)

    def _sync_weight(self) -> None:
        """**Collective.** TRL's sync: before the first step, then every `weight_sync_steps` steps."""
        if not self._syncs_adapters:
            super()._sync_weight()  # type: ignore[misc]
            return
        started = time.perf_counter()
        self.vllm_generation.sync_weights()
        # The metric that TRL's own sync logs (async_grpo_trainer.py, 1.16).
        _trl.record_metrics(self, {"perf/weight_sync_s": time.perf_counter() - started}, latest=frozenset())

    def _record_sync(self, report: "SyncReport") -> None:
        super()._record_sync(report)
        # Not counted up, as TRL does: a sync that fails or is repeated uses up a number.
        self.model_version = report.version
        if self.rollout_worker is not None:
            self.rollout_worker.update_model_version(report.version)

    def _release_adapters(self) -> None:
        # First the rollouts: their requests name versions that `super()` unloads.
        if self._syncs_adapters and self.rollout_worker is not None:
            self.rollout_worker.stop()
        super()._release_adapters()


@dataclass
class AsyncGRPOConfig(AsyncLoRASyncConfig, trls.AsyncGRPOConfig):  # type: ignore[misc]
    """TRL's `AsyncGRPOConfig` with the fields of `LoRASyncConfig`."""


class AsyncGRPOTrainer(AsyncLoRASyncTrainer, trls.AsyncGRPOTrainer):  # type: ignore[misc]
    """TRL's `AsyncGRPOTrainer` with the adapter sync of `AsyncLoRASyncTrainer`."""


__all__ = ["AsyncGRPOConfig", "AsyncGRPOTrainer", "AsyncLoRASyncConfig", "AsyncLoRASyncTrainer"]
