"""TRL's Distillation configuration and trainer with adapter sync."""

from dataclasses import dataclass

import trl

from trl_lora_sync.trainers import LoRASyncConfig, LoRASyncTrainer
from trl_lora_sync.trl_checks import check_exports

# Before the classes, whose bases would otherwise fail with a bare AttributeError.
check_exports("DistillationConfig", "DistillationTrainer")


@dataclass
class DistillationConfig(LoRASyncConfig, trl.DistillationConfig):  # type: ignore[misc]
    """TRL's `DistillationConfig` with the fields of `LoRASyncConfig`."""


class DistillationTrainer(LoRASyncTrainer, trl.DistillationTrainer):  # type: ignore[misc]
    """TRL's `DistillationTrainer` with the adapter sync of `LoRASyncTrainer`."""
