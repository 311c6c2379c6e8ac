"""LoRA in TRL's online trainers: update the vLLM policy by loading the adapter, instead of sending every weight.

    from trl_lora_sync import GRPOConfig, GRPOTrainer      # instead of: from trl import ...
    args = GRPOConfig(use_vllm=True, vllm_mode="server", vllm_sync_strategy="lora_adapter", ...)

The names are imported on first use, so that `engine_plugins` can be used where neither TRL nor torch is installed.
"""

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl_lora_sync.adapter.export import ExportedAdapter, export_adapter
    from trl_lora_sync.config import GRPOConfig, LoRASyncConfig
    from trl_lora_sync.distillation import DistillationConfig, DistillationTrainer
    from trl_lora_sync.errors import LoRASyncError
    from trl_lora_sync.rloo import RLOOConfig, RLOOTrainer
    from trl_lora_sync.trainers import GRPOTrainer, LoRASyncTrainer

    __version__: str

__all__ = [
    "DistillationConfig",
    "DistillationTrainer",
    "ExportedAdapter",
    "GRPOConfig",
    "GRPOTrainer",
    "LoRASyncConfig",
    "LoRASyncError",
    "LoRASyncTrainer",
    "RLOOConfig",
    "RLOOTrainer",
    "export_adapter",
]

_HOMES = {
    "DistillationConfig": "distillation",
    "DistillationTrainer": "distillation",
    "ExportedAdapter": "adapter.export",
    "GRPOConfig": "trainers",  # with the check of the installed TRL
    "GRPOTrainer": "trainers",
    "LoRASyncConfig": "trainers",
    "LoRASyncError": "errors",
    "LoRASyncTrainer": "trainers",
    "RLOOConfig": "rloo",
    "RLOOTrainer": "rloo",
    "export_adapter": "adapter.export",
}

# How the names of TRL's public classes end.
_KINDS = ("Config", "Trainer")


def __getattr__(name: str) -> Any:
    if name == "__version__":
        # Read when it is needed, as a copy on PYTHONPATH has no metadata.
        return metadata.version("trl-lora-sync")
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    if name.endswith(_KINDS):  # not an AttributeError, whose words `from ... import` would replace
        raise ImportError(
            f"cannot import name {name!r} from {__name__!r}: it has {', '.join(__all__)}. For another trainer of TRL "
            "that samples with vLLM, mix in LoRASyncConfig and LoRASyncTrainer. AsyncGRPO's classes are in "
            f"{__name__}.async_grpo. Else import {name} from trl."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
