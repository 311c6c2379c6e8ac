"""Trainers other than GRPO's with vLLM in the trainer's process."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from make_model import make_model
from support.colocate import samples_policy
from support.kinds import KINDS
from support.models import base_weights, randomize_adapter, same_tensors
from support.trainers import METRICS


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of other random weights than the trained model."""
    return make_model(tmp_path_factory.mktemp("models") / "teacher", seed=7)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "grpo"])
def test_each_trainer_syncs_at_each_step_and_samples_from_its_adapter(
    kind: str, base_model: Path, teacher: Path, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {
        "vllm_mode": "colocate",
        "vllm_server_base_url": None,
        "lora_sync_dtype": "float32",
        "model_init_kwargs": {"dtype": "float32"},
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
    }
    torch.manual_seed(1)
    trainer = KINDS[kind].make("", base_model, tmp_path, teacher, **changes)
    before = base_weights(trainer.model)

    trainer.train()

    steps = [entry for entry in trainer.state.log_history if "lora_sync/version" in entry]
    assert [step["lora_sync/version"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step.keys() >= METRICS
        assert math.isfinite(step["loss"])
    assert any(bool(value.any()) for name, value in trainer.model.named_parameters() if "lora_B" in name)
    assert same_tensors(base_weights(trainer.model), before)
    randomize_adapter(trainer.model, seed=1)
    trainer.vllm_generation.sync_weights()
    assert samples_policy(trainer)
    trainer.vllm_generation.close()
