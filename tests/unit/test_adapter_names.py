"""Unit tier: the names of trained modules on a server."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from support.models import randomize_adapter

from trl_lora_sync.adapter.export import AdapterReader, read_adapter
from trl_lora_sync.adapter.names import ServedNames
from trl_lora_sync.adapter.saved import read_saved_adapter
from unit.test_adapter_modalities import MODELS, build, lora
from unit.tiny import lora_model

FAMILIES = ("qwen2.5-vl", "qwen3-vl", "gemma3")
LANGUAGE_MODEL = r".*language_model.*\.(q_proj|up_proj)"


@pytest.mark.parametrize("name", FAMILIES)
def test_the_language_model_is_served_under_the_name_that_all_versions_know(name: str) -> None:
    """Under `model.layers`, vLLM silently answers as the base model for two of these."""
    model = get_peft_model(build(name), lora(target_modules=LANGUAGE_MODEL))
    keys = list(read_adapter(model, dtype=torch.float32).tensors)
    assert keys
    assert all(key.startswith("base_model.model.model.language_model.layers.") for key in keys)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_language_model_in_another_place_is_served_under_the_same_name(name: str) -> None:
    """As in a class of the user, or in an older Transformers."""
    model: Any = build(name)
    model.model.text = model.model.language_model
    del model.model.language_model
    model.get_decoder = lambda: model.model.text
    model.model.get_input_embeddings = lambda: model.model.text.embed_tokens
    peft_model = get_peft_model(model, lora(target_modules=r".*\.text\..*q_proj"))
    reader = AdapterReader()
    reader.linears(peft_model)
    assert list(reader.groups()["attention"]) == [
        f"model.language_model.layers.{layer}.self_attn.q_proj" for layer in range(2)
    ]


@pytest.mark.parametrize("wrapper", ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"])
def test_wrappers_do_not_show_in_the_names(wrapper: str) -> None:
    names = ServedNames.of(build("gemma3"))
    path = f"base_model.model.model.{wrapper}.language_model.layers.0.{wrapper}.mlp.up_proj"
    assert names.served(path) == "model.language_model.layers.0.mlp.up_proj"


@pytest.mark.parametrize("model", [lora_model(), build("llava")], ids=["text", "another family"])
def test_a_model_that_is_not_in_the_table_keeps_its_names(model: Any) -> None:
    assert ServedNames.of(model).served("model.any.layers.0.mlp.up_proj") == "model.any.layers.0.mlp.up_proj"


def test_all_families_in_the_table_are_tested() -> None:
    from trl_lora_sync.adapter.names import LANGUAGE_MODELS

    elsewhere = {"qwen3_vl_moe"}  # in test_adapter_experts
    assert {build(name).config.model_type for name in FAMILIES} | elsewhere == set(LANGUAGE_MODELS)
    assert set(FAMILIES) < set(MODELS)


# Layers that are others on the server

_SMALL = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


def gemma4() -> Any:
    """Of six layers, of which the last uses its keys as values."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    own = {"global_head_dim": 8, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}
    return Gemma4ForCausalLM(Gemma4TextConfig(**_SMALL, **own, num_hidden_layers=6, attention_k_eq_v=True))


def glm4() -> Any:
    from transformers import Glm4Config, Glm4ForCausalLM

    return Glm4ForCausalLM(Glm4Config(**_SMALL, num_hidden_layers=2))


def adapted(model: Any) -> Any:
    model = get_peft_model(model, lora(target_modules="all-linear", exclude_modules=["lm_head"]))
    randomize_adapter(model, 3)
    return model


def test_keys_that_are_values_as_well_are_served_as_both() -> None:
    """vLLM loads the weight for both, and took an adapter for the keys only: a small part of it was missing."""
    tensors = read_adapter(adapted(gemma4()), dtype=torch.float32).tensors
    attention = "base_model.model.model.layers.{}.self_attn.{}.{}.weight"
    for kind in ("lora_A", "lora_B"):
        keys, values = (tensors[attention.format(5, name, kind)] for name in ("k_proj", "v_proj"))
        assert torch.equal(keys, values)
        keys, values = (tensors[attention.format(0, name, kind)] for name in ("k_proj", "v_proj"))
        assert not torch.equal(keys, values)


def test_a_layer_that_is_two_on_the_server_is_written_as_two() -> None:
    """vLLM refused it under the trainer's name, and the error blamed the base model."""
    model = adapted(glm4())
    adapter = read_adapter(model, dtype=torch.float32)
    assert {"gate_proj", "up_proj"} < set(adapter.target_modules)
    assert "gate_up_proj" not in adapter.target_modules
    layer = model.get_base_model().model.layers[1].mlp.gate_up_proj
    products = [
        adapter.tensors[f"base_model.model.model.layers.1.mlp.{name}.lora_B.weight"]
        @ adapter.tensors[f"base_model.model.model.layers.1.mlp.{name}.lora_A.weight"]
        for name in ("gate_proj", "up_proj")
    ]
    torch.testing.assert_close(torch.cat(products), layer.get_delta_weight("default"))


def test_data_that_is_replaced_shows_in_each_part_of_a_layer() -> None:
    model, reader = adapted(glm4()), AdapterReader()
    for seed in (1, 2):
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        reader.linears(model)
        read = reader.read(model, dtype=torch.float32).tensors
        expected = read_adapter(model, dtype=torch.float32).tensors
        assert read.keys() == expected.keys()
        assert all(torch.equal(one, expected[key]) for key, one in read.items())


@pytest.mark.parametrize("build_model", [gemma4, glm4])
def test_saved_adapter_is_tried_under_the_names_of_a_run(build_model: Any, tmp_path: Path) -> None:
    """`doctor --adapter` reported a problem where a training has none."""
    model = adapted(build_model())
    model.save_pretrained(tmp_path)
    saved = read_saved_adapter(tmp_path).as_served(model.get_base_model().config.to_dict())
    assert set(saved.canonical().shapes) == set(read_adapter(model, dtype=torch.float32).shapes)


@pytest.mark.parametrize("build_model", [gemma4, glm4])
def test_fused_serving_has_the_names_of_the_checkpoint(build_model: Any) -> None:
    model = adapted(build_model())
    reader = AdapterReader("fused")
    reader.linears(model)
    served = {module.name for module in reader.modules()}
    assert served == {path for paths in reader.groups().values() for path in paths}
