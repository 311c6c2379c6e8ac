"""Unit tier: which trained modules a server is proved to serve together."""

import pytest
import torch

from trl_lora_sync.adapter.export import AdapterReader
from trl_lora_sync.adapter.groups import group_of, without_numbers
from trl_lora_sync.scoring import base_logprobs, neutral_weights, trial_logprobs
from unit.tiny import lora_model

IDS = [1, 5, 9, 2, 30, 7]


@pytest.mark.parametrize(
    ("path", "group"),
    [
        ("model.layers.0.self_attn.q_proj", "attention"),
        ("model.language_model.layers.1.self_attn.o_proj", "attention"),
        ("model.layers.3.linear_attn.in_proj_qkvz", "attention"),
        ("transformer.h.0.attn.c_attn", "attention"),
        ("transformer.h.0.self_attention.query_key_value", "attention"),
        ("model.layers.0.mlp.gate_proj", "MLP"),
        ("model.layers.0.mlp.down_proj", "MLP"),
        ("model.layers.0.mlp.experts.7.gate_proj", "experts"),
        ("model.layers.0.block_sparse_moe.experts.7.w1", "experts"),
        ("model.layers.0.mlp.shared_expert.up_proj", "experts"),
        ("model.layers.0.mlp.shared_experts.up_proj", "experts"),
        ("model.layers.0.mlp.gate", "router"),
        ("model.layers.0.block_sparse_moe.gate", "router"),
        ("model.layers.0.mlp.shared_expert_gate", "router"),
        ("backbone.layers.0.mixer.in_proj", "other"),
    ],
)
def test_a_module_belongs_to_the_group_that_servers_apply_or_ignore_together(path: str, group: str) -> None:
    assert group_of(path) == group


def test_layers_that_differ_by_their_number_are_named_once() -> None:
    paths = [f"model.layers.{layer}.mlp.{name}" for layer in range(3) for name in ("up_proj", "down_proj")]
    assert without_numbers(paths) == ["model.layers.*.mlp.up_proj", "model.layers.*.mlp.down_proj"]


def test_the_groups_of_a_model_hold_each_matrix_once() -> None:
    model, reader = lora_model(target_modules="all-linear"), AdapterReader()
    linears = reader.linears(model)
    groups = reader.groups()
    assert list(groups) == ["attention", "MLP"]
    found = [matrix for group in groups.values() for pair in group.values() for matrix in pair]
    assert len(found) == len(linears)
    assert set(found) == set(linears)


def test_neutral_matrices_change_nothing_in_a_model_with_a_trained_adapter() -> None:
    model, reader = lora_model(target_modules="all-linear"), AdapterReader()
    weights = neutral_weights(reader.linears(model), {}, torch.device("cpu"))
    assert trial_logprobs(model, weights, IDS) == pytest.approx(base_logprobs(model, IDS)[0], abs=1e-6)
