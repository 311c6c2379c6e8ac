"""Trainers with vLLM in this process, and what their engine samples."""

import gc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from support.models import lora
from support.policies import Row, distance, sample, token_ids
from support.trainers import mean_byte, prompts
from trl_lora_sync import GRPOConfig, GRPOTrainer
from trl_lora_sync.colocate.engine import adapter_manager, served_model

# Between served and trained log-probabilities in float32; measured 1.5e-6.
EXACT = 1e-4
# Mean distance to the base model or to another version, of the adapters of `randomize_adapter`; measured 0.1 and more.
OTHER_POLICY = 0.03


def colocate_trainer(
    model: Any,
    folder: Path,
    *,
    trainer_class: type[Any] = GRPOTrainer,
    config_class: type[Any] = GRPOConfig,
    reward_funcs: Callable[..., list[float]] = mean_byte,
    trainer_kwargs: dict[str, Any] | None = None,
    **config: Any,
) -> Any:
    """A trainer through the public interface, in float32, with fields of its configuration changed by `config`."""
    fields = {
        "output_dir": str(folder / "out"),
        "use_vllm": True,
        "vllm_sync_strategy": "lora_adapter",
        "lora_sync_dtype": "float32",
        "model_init_kwargs": {"dtype": "float32"},
        "per_device_train_batch_size": 4,
        "num_generations": 4,
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
    return trainer_class(
        model=str(model) if isinstance(model, Path) else model,
        args=config_class(**{**fields, **config}),
        reward_funcs=reward_funcs,
        **{
            "train_dataset": prompts(),
            "eval_dataset": prompts(["to be evaluated"] * 4),
            "peft_config": lora(),
            **(trainer_kwargs or {}),
        },
    )


def parts_left_of_a_dropped_trainer(model: Path, folder: Path, patch: pytest.MonkeyPatch, **config: Any) -> list[Any]:
    """What one garbage collection leaves of a trainer that has trained: of it, its engine, both models, and slots."""
    from vllm.utils.gc_utils import freeze_gc_heap

    patch.setattr("vllm.v1.engine.core.freeze_gc_heap", freeze_gc_heap)
    gc.freeze()  # as Python 3.12 has hidden some objects when it starts
    trainer = colocate_trainer(model, folder, max_steps=1, **config)
    trainer.train()
    llm = trainer.vllm_generation.llm
    weights = [*trainer.model.parameters(), *served_model(llm).parameters()]
    if llm.llm_engine.vllm_config.lora_config is not None:
        note_slots(llm)
        weights += [slots for layer in linear_layers(llm) for slots in layer.lora_b_stacked]
    parts = [weakref.ref(part) for part in (trainer, trainer.model, llm, *weights)]
    del trainer, llm, weights
    gc.collect()
    return [part() for part in parts if part() is not None]


def note_slots(llm: Any) -> None:
    """Have vLLM note where the slots of an engine are, as its kernels do on a GPU."""
    from vllm.lora.ops.triton_ops.utils import _get_lora_a_ptr, _get_lora_b_ptr

    for layer in linear_layers(llm):
        _get_lora_a_ptr(layer.lora_a_stacked, torch.device("cpu"))
        _get_lora_b_ptr(layer.lora_b_stacked, 0, torch.device("cpu"))


def linear_layers(llm: Any) -> list[Any]:
    """Layers with slots for each of their parts; embeddings and the output head have one tensor."""
    return [layer for layer in adapter_manager(llm).modules.values() if isinstance(layer.lora_b_stacked, tuple)]


def noted_slots() -> set[tuple[int, ...]]:
    """The addresses of slots that vLLM's kernels have noted."""
    from vllm.lora.ops.triton_ops.utils import _LORA_A_PTR_DICT, _LORA_B_PTR_DICT

    return {*_LORA_A_PTR_DICT, *_LORA_B_PTR_DICT}


def answered(llm: Any, asked: Sequence[list[int]], *, method: str = "generate", **changes: Any) -> list[Row]:
    """What the engine samples for prompts of token ids, without the package, with the engine's log-probabilities."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=12, temperature=1.0, logprobs=0, ignore_eos=True)
    texts = [{"prompt_token_ids": ids} for ids in asked]
    return rows_of(getattr(llm, method)(texts, sampling_params=params, use_tqdm=False, **changes))


def rows_of(outputs: Sequence[Any]) -> list[Row]:
    """The first completion of each of vLLM's outputs."""
    return [
        (
            list(output.prompt_token_ids),
            list(output.outputs[0].token_ids),
            torch.tensor([next(iter(place.values())).logprob for place in output.outputs[0].logprobs]),
        )
        for output in outputs
    ]


def is_exact(model: torch.nn.Module, rows: list[Row]) -> bool:
    """Whether `rows` were sampled from the current model, to `EXACT`."""
    return bool(distance(model, rows).max() < EXACT)


def samples_policy(trainer: Any) -> bool:
    """Whether both kinds of request sample from the current adapter, and it differs from the base model."""
    asked = [token_ids(seed) for seed in (1, 2)]
    rows = sample(trainer.vllm_generation, asked) + answered(trainer.vllm_generation.llm, asked)
    return is_exact(trainer.model, rows) and base_distance(trainer.model, rows) > OTHER_POLICY


def check_versions_after_inference_mode(
    trainer: Any, asked: Sequence[list[int]], change: Callable[[Any], None]
) -> None:
    """The first version is loaded in inference mode; it is sampled from, and so is each that comes after a `change`."""
    trainer.vllm_generation.close()
    with torch.inference_mode():
        rows = answered(trainer.vllm_generation.llm, asked)
    assert is_exact(trainer.model, rows)
    for _ in range(3):
        change(trainer)
        assert samples_policy(trainer)


def base_distance(model: Any, rows: list[Row]) -> float:
    """Mean distance of rows to the model without its adapter."""
    with model.disable_adapter():
        return float(distance(model, rows).mean())
