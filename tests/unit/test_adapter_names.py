"""Unit tier: the names of trained modules on a server."""

from typing import Any

import pytest
import torch
from peft import get_peft_model

from trl_lora_sync.adapter.export import AdapterReader, read_adapter
from trl_lora_sync.adapter.names import ServedNames
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
