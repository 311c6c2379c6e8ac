"""Asynchronous trainers on the tiny model, and what their samples were taken from."""

import os
import threading
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoTokenizer
from trl.chat_template_utils import qwen3_template

from support.models import lora
from support.trainers import prompts, sync_fields

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

from trl_lora_sync.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer


def lowercase(completions: list[Any], **kwargs: Any) -> list[float]:
    """The share of lower-case letters."""
    texts = [completion[-1]["content"] for completion in completions]
    return [sum("a" <= character <= "z" for character in text) / max(len(text), 1) for text in texts]


class Recorder(AsyncGRPOTrainer):  # type: ignore[misc]
    """Remembers each version's adapter, and every sample that was queued.

    Attributes:
        adapters: by version, the values of the matrices by their names.
        samples: in order, as TRL's trainer gets them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.adapters: dict[int, dict[str, Tensor]] = {}
        self.samples: list[Any] = []
        super().__init__(*args, **kwargs)
        put = self.rollout_worker.rollout_buffer.put_nowait

        def put_and_remember(sample: Any) -> None:
            put(sample)
            self.samples.append(sample)

        self.rollout_worker.rollout_buffer.put_nowait = put_and_remember

    def _record_sync(self, report: Any) -> None:
        self.adapters[report.version] = {
            name: value.detach().clone() for name, value in self.model.named_parameters() if "lora_" in name
        }
        super()._record_sync(report)


def async_config(base_url: str, folder: Path, **changes: Any) -> AsyncGRPOConfig:
    """Of a run of some seconds, with groups of four."""
    fields = sync_fields(base_url, folder)
    for name in ("use_vllm", "vllm_mode"):
        del fields[name]
    fields |= {"num_generations": 4, "max_staleness": 2, "token_budget": 256, "gradient_checkpointing": False}
    return AsyncGRPOConfig(**{**fields, **changes})


def async_trainer(
    base_url: str,
    model: Path,
    folder: Path,
    *,
    reward_funcs: Any = lowercase,
    train_dataset: Dataset | None = None,
    trainer_class: type[Any] = Recorder,
    trainer_kwargs: dict[str, Any] | None = None,
    **config: Any,
) -> Any:
    """A trainer through the public interface."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_template = qwen3_template  # by which TRL parses answers
    return trainer_class(
        model=str(model),
        args=async_config(base_url, folder, **config),
        reward_funcs=reward_funcs,
        train_dataset=train_dataset or prompts(conversational=True),
        processing_class=tokenizer,
        peft_config=lora(),
        **(trainer_kwargs or {}),
    )


def load_adapter(model: torch.nn.Module, values: dict[str, Tensor]) -> None:
    """Give the model the adapter of a version."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in values:
                parameter.copy_(values[name])


def rollout_threads() -> list[str]:
    """Threads of rollout loops."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lora-sync-rollouts")]
