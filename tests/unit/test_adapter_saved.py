"""Unit tier: an adapter as PEFT saved it, read without PEFT."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from trl_lora_sync.adapter.export import read_adapter
from trl_lora_sync.adapter.saved import base_shapes, read_saved_adapter
from trl_lora_sync.adapter.support import check_peft_config, check_saved_config, saved_rank
from trl_lora_sync.errors import UnsupportedAdapterError

SHAPE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def saved(folder: Path, **changes: Any) -> Any:
    """A model whose adapter, with random values, has been saved to `folder`."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(**SHAPE, vocab_size=32))
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], **changes})
    model = get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 3}},
        {"rank_pattern": {r"layers\.1\..*q_proj": 6}, "alpha_pattern": {r"model.layers.0.self_attn.q_proj": 5}},
        {"use_rslora": True, "alpha_pattern": {"proj": 7, "q_proj": 9}},
        {"target_modules": "all-linear"},
    ],
    ids=str,
)
def test_canonical_form_is_that_of_the_live_model(changes: dict[str, Any], tmp_path: Path) -> None:
    model = saved(tmp_path, **changes)
    live, read = read_adapter(model, dtype=torch.float32), read_saved_adapter(tmp_path).canonical()
    assert read.rank == live.rank
    assert read.target_modules == live.target_modules
    assert read.tensors.keys() == live.tensors.keys()
    for name, tensor in live.tensors.items():
        torch.testing.assert_close(read.tensors[name], tensor, rtol=1e-6, atol=0)


def test_siblings_are_completed_with_the_shapes_of_the_base(tmp_path: Path) -> None:
    model = saved(tmp_path / "adapter")
    model.unload().save_pretrained(tmp_path / "base")
    live = read_adapter(saved(tmp_path / "again"), dtype=torch.float32, packed_modules=True)
    read = read_saved_adapter(tmp_path / "adapter").canonical(shapes=base_shapes(tmp_path / "base"))
    assert read.tensors.keys() == live.tensors.keys()
    assert {name: tensor.shape for name, tensor in read.tensors.items()} == {
        name: tensor.shape for name, tensor in live.tensors.items()
    }


def test_siblings_that_cannot_be_completed_are_noticed(tmp_path: Path) -> None:
    """An adapter stayed incomplete where the base's layers were unknown or had other names, and ended a server."""
    saved(tmp_path, target_modules=["up_proj"])
    read, up, gate = read_saved_adapter(tmp_path), "model.layers.{}.mlp.up_proj", "model.layers.{}.mlp.gate_proj"

    def lacks_siblings(*names: str) -> bool:
        return read.lacks_siblings({name.format(layer): (24, 16) for name in names for layer in (0, 1)})

    assert lacks_siblings()
    assert lacks_siblings(f"language_{up}", f"language_{gate}")
    assert not lacks_siblings(up, gate)
    assert not lacks_siblings(up)  # an MLP without a gate


def test_untrained_adapter_is_read_as_zero(tmp_path: Path) -> None:
    def is_zero(folder: Path) -> bool:
        return not any(bool(module.lora_B.any()) for module in read_saved_adapter(folder).modules)

    model = saved(tmp_path / "trained")
    assert not is_zero(tmp_path / "trained")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.zero_()
    model.save_pretrained(tmp_path / "zero")
    assert is_zero(tmp_path / "zero")


def test_folder_without_an_adapter_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedAdapterError, match="There is no adapter in"):
        read_saved_adapter(tmp_path)


def test_broken_tensor_file_is_named(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"broken")
    with pytest.raises(UnsupportedAdapterError, match="could be read"):
        read_saved_adapter(tmp_path)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("base_model.model.model.layers.0.mlp.gate.lora_magnitude_vector", "belongs to no plain LoRA adapter"),
        ("base_model.model.lm_head.lora_A.weight", "adapter on 'lm_head'"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "embed_tokens"),
        ("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight", "incomplete"),
    ],
)
def test_tensor_that_could_not_be_served_is_refused(key: str, words: str, tmp_path: Path) -> None:
    saved(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    save_file({**load_file(file), key: torch.ones(1, 1)}, file)
    with pytest.raises(UnsupportedAdapterError, match=words):
        read_saved_adapter(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_dora": True},
        {"bias": "all"},
        {"lora_bias": True},
        {"modules_to_save": ["lm_head"]},
        {"use_rslora": True},
    ],
    ids=str,
)
def test_saved_configuration_is_judged_like_the_live_one(changes: dict[str, Any], tmp_path: Path) -> None:
    config = LoraConfig(target_modules=["q_proj"], **changes)
    config.save_pretrained(tmp_path)
    found = json.loads((tmp_path / "adapter_config.json").read_text())
    said = []
    for check, value in ((check_peft_config, config), (check_saved_config, found)):
        try:
            check(value)
            said.append("")
        except UnsupportedAdapterError as error:
            said.append(str(error))
    assert said[0] == said[1]


def test_other_peft_type_is_refused() -> None:
    with pytest.raises(UnsupportedAdapterError, match="PEFT type IA3"):
        check_saved_config({"peft_type": "IA3"})


def test_largest_rank_counts_the_patterns() -> None:
    assert saved_rank({"r": 8, "rank_pattern": {"q_proj": 24, "v_proj": 2}}) == 24
    assert saved_rank({"r": 8, "rank_pattern": None}) == 8
