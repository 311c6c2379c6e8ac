"""TRL's RLOO configuration and trainer with adapter sync."""

from dataclasses import dataclass

import trl

from trl_lora_sync.trainers import LoRASyncConfig, LoRASyncTrainer
from trl_lora_sync.trl_checks import check_exports

# Before the classes, whose bases would otherwise fail with a bare AttributeError.
check_exports("RLOOConfig", "RLOOTrainer")


@dataclass
class RLOOConfig(LoRASyncConfig, trl.RLOOConfig):  # type: ignore[misc]
    """TRL's `RLOOConfig` with the fields of `LoRASyncConfig`."""


class RLOOTrainer(LoRASyncTrainer, trl.RLOOTrainer):  # type: ignore[misc]
    """TRL's `RLOOTrainer` with the adapter sync of `LoRASyncTrainer`."""
