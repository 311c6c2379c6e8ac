"""Real GRPO trainers on a tiny model, and readers of their log."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from datasets import Dataset

from support.models import lora
from trl_lora_sync import GRPOConfig, GRPOTrainer
from trl_lora_sync.engines.base import Deadline
from trl_lora_sync.runtime import run
from trl_lora_sync.sync import AdapterSync

PROMPTS = ["hello", "world", "the sea", "a small town", "winter", "bread", "an old clock", "rain"]
METRICS = {
    f"lora_sync/{name}"
    for name in ("version", "total_s", "gather_s", "write_s", "load_s", "bytes", "servers", "retries")
}


def mean_byte(completions: list[Any], **kwargs: Any) -> list[float]:
    """A reward that differs between any two completions of other bytes, so that every step has a gradient."""
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    return [sum(text.encode()) / (1 + len(text.encode())) for text in texts]


def share_of_ascii(completions: list[Any], **kwargs: Any) -> list[float]:
    """A reward that a random model of bytes learns in twenty steps of `LEARNABLE`."""
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    return [sum(map(str.isascii, text)) / max(1, len(text)) for text in texts]


LEARNABLE: dict[str, Any] = {
    "reward_funcs": share_of_ascii,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "per_device_train_batch_size": 32,
    "num_generations": 16,
    "max_completion_length": 8,
}
"""For `grpo_trainer`: a run whose reward rises."""


def prompts(texts: list[str] | None = None, *, conversational: bool = False) -> Dataset:
    texts = texts or PROMPTS
    return Dataset.from_dict(
        {"prompt": [[{"role": "user", "content": text}] for text in texts] if conversational else texts}
    )


def sync_fields(base_url: str, folder: Path, **changes: Any) -> dict[str, Any]:
    """Fields of a run of a second, which the configuration of any trainer has.

    Args:
        folder: gets the output and, under `sync`, the adapter versions.
        changes: fields that replace the ones chosen here.
    """
    fields = {
        "output_dir": str(folder / "out"),
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": base_url,
        "vllm_server_timeout": 30.0,
        "vllm_sync_strategy": "lora_adapter",
        "lora_sync_dir": str(folder / "sync"),
        "lora_sync_timeout": 30.0,
        "lora_sync_generation_timeout": 60.0,
        "per_device_train_batch_size": 4,
        "max_completion_length": 8,
        "max_steps": 3,
        "learning_rate": 5e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
    }
    return {**fields, **changes}


def grpo_config(base_url: str, folder: Path, *, config_class: type[Any] = GRPOConfig, **changes: Any) -> Any:
    """As `sync_fields`, with groups of four."""
    return config_class(**sync_fields(base_url, folder, **{"num_generations": 4, **changes}))


def grpo_trainer(
    base_url: str,
    model: Any,
    folder: Path,
    *,
    trainer_class: type[Any] = GRPOTrainer,
    peft_config: Any = "plain",
    reward_funcs: Any = mean_byte,
    train_dataset: Dataset | None = None,
    eval_dataset: Dataset | None = None,
    trainer_kwargs: dict[str, Any] | None = None,
    **config: Any,
) -> Any:
    """A trainer through the public interface, with a `grpo_config` that is changed by `config`.

    By default of GRPO; RLOO's takes the same.
    """
    return trainer_class(
        model=model if not isinstance(model, Path) else str(model),
        args=grpo_config(base_url, folder, **config),
        reward_funcs=reward_funcs,
        train_dataset=train_dataset or prompts(),
        eval_dataset=eval_dataset,
        peft_config=lora() if peft_config == "plain" else peft_config,
        **(trainer_kwargs or {}),
    )


def shorten(trainer: GRPOTrainer, **timeouts: float) -> None:
    """Change `SyncSettings` of a trainer that is there, so that they do not bound the checks at its start as well."""
    change_settings(trainer.vllm_generation.sync, **timeouts)


def change_settings(sync: AdapterSync, **changes: Any) -> None:
    """Change `SyncSettings` of a sync that has started."""
    sync.settings = sync.fleet.settings = replace(sync.settings, **changes)
    for server in sync.fleet.servers:
        server.settings = sync.settings


def wait_for_unloads(trainer: GRPOTrainer) -> None:
    """Wait for the unload requests of retired versions, which are sent beside the training."""
    run(trainer.vllm_generation.sync.wait_for_unloads(Deadline.after(60, "the test")))


def steps_of(trainer: GRPOTrainer) -> list[dict[str, Any]]:
    """What was logged at each training step, without the summary at the end and without evaluations."""
    return [entry for entry in trainer.state.log_history if "lora_sync/version" in entry or "reward" in entry]
