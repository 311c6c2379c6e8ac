"""A trainer of each kind that syncs adapters, on the tiny model.

The trainers for TRL's experimental ones are made with the two mixins, as a user would make them.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.models import lora
from support.trainers import PROMPTS, prompts, sync_fields
from trl_lora_sync import (
    DistillationConfig,
    DistillationTrainer,
    GRPOConfig,
    GRPOTrainer,
    LoRASyncConfig,
    LoRASyncTrainer,
    RLOOConfig,
    RLOOTrainer,
)

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from trl.experimental.gold import GOLDConfig, GOLDTrainer
from trl.experimental.iw_opd import IWOPDConfig, IWOPDTrainer
from trl.experimental.sdft import SDFTConfig, SDFTTrainer
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer


@dataclass
class GMPOSyncConfig(LoRASyncConfig, GMPOConfig):  # type: ignore[misc]
    """GMPO."""


class GMPOSyncTrainer(LoRASyncTrainer, GMPOTrainer):  # type: ignore[misc]
    """GMPO."""


@dataclass
class GOLDSyncConfig(LoRASyncConfig, GOLDConfig):  # type: ignore[misc]
    """GOLD."""


class GOLDSyncTrainer(LoRASyncTrainer, GOLDTrainer):  # type: ignore[misc]
    """GOLD."""


@dataclass
class SDPOSyncConfig(LoRASyncConfig, SDPOConfig):  # type: ignore[misc]
    """SDPO."""


class SDPOSyncTrainer(LoRASyncTrainer, SDPOTrainer):  # type: ignore[misc]
    """SDPO."""


@dataclass
class SDFTSyncConfig(LoRASyncConfig, SDFTConfig):  # type: ignore[misc]
    """SDFT."""


class SDFTSyncTrainer(LoRASyncTrainer, SDFTTrainer):  # type: ignore[misc]
    """SDFT."""


@dataclass
class IWOPDSyncConfig(LoRASyncConfig, IWOPDConfig):  # type: ignore[misc]
    """IW-OPD."""


class IWOPDSyncTrainer(LoRASyncTrainer, IWOPDTrainer):  # type: ignore[misc]
    """IW-OPD."""


def lowercase(completions: list[Any], **kwargs: Any) -> list[float]:
    """The share of lower-case letters, which is a fifth to begin with."""
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    return [sum("a" <= character <= "z" for character in text) / max(len(text), 1) for text in texts]


def with_context() -> Dataset:
    return Dataset.from_dict({"prompt": PROMPTS, "privileged_context": ["Use lower-case letters."] * len(PROMPTS)})


def answered() -> Dataset:
    """Conversations with an answer, which an on-policy trainer replaces by a sampled one."""
    rows = [[{"role": "user", "content": text}, {"role": "assistant", "content": "no"}] for text in PROMPTS]
    return Dataset.from_dict({"messages": rows})


@dataclass(frozen=True)
class Kind:
    """How a trainer is made.

    Attributes:
        fields: of its configuration, beyond `sync_fields`.
        has_teacher: whether a model is given that is to be imitated.
        has_reward: whether it learns from rewards.
        data: what it is trained on.
    """

    config: Callable[..., Any]
    trainer: type[Any]
    fields: dict[str, Any]
    has_teacher: bool = False
    has_reward: bool = False
    data: Callable[[], Dataset] = prompts

    def make(self, base_url: str, model: Path, folder: Path, teacher: Path, **changes: Any) -> Any:
        """A trainer through the public interface, with fields that are changed."""
        given: dict[str, Any] = {"teacher_model": str(teacher)} if self.has_teacher else {}
        if self.has_reward:
            given["reward_funcs"] = lowercase
        if self.trainer in (GOLDSyncTrainer, IWOPDSyncTrainer):  # which load a model otherwise than the others
            given["processing_class"] = AutoTokenizer.from_pretrained(model)
            given["teacher_model"] = AutoModelForCausalLM.from_pretrained(teacher)
        return self.trainer(
            model=str(model),
            args=self.config(**sync_fields(base_url, folder, **{**self.fields, **changes})),
            train_dataset=self.data(),
            peft_config=lora(),
            **given,
        )


GROUPS = {"num_generations": 4}
KINDS = {
    "grpo": Kind(GRPOConfig, GRPOTrainer, GROUPS, has_reward=True),
    "rloo": Kind(RLOOConfig, RLOOTrainer, GROUPS, has_reward=True),
    "distillation": Kind(DistillationConfig, DistillationTrainer, {}, has_teacher=True),
    "gmpo": Kind(GMPOSyncConfig, GMPOSyncTrainer, GROUPS, has_reward=True),
    "gold": Kind(GOLDSyncConfig, GOLDSyncTrainer, {"lmbda": 1.0, "max_length": 64}, has_teacher=True, data=answered),
    "sdpo": Kind(
        SDPOSyncConfig,
        SDPOSyncTrainer,
        {**GROUPS, "include_environment_feedback": True},
        has_reward=True,
        data=with_context,
    ),
    "sdft": Kind(SDFTSyncConfig, SDFTSyncTrainer, {"num_generations": 1}, data=with_context),
    "iw_opd": Kind(IWOPDSyncConfig, IWOPDSyncTrainer, {"max_length": 64}, has_teacher=True, data=answered),
}
