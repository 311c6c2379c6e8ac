"""Adapters on what sees images are refused before the training, on tiny models of four architectures."""

import copy
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from support.models import change_base
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from trl_lora_sync import export_adapter
from trl_lora_sync.adapter.base_drift import change_from_checkpoint
from trl_lora_sync.adapter.checkpoint import config_changes
from trl_lora_sync.adapter.export import AdapterReader
from trl_lora_sync.adapter.groups import sees_images
from trl_lora_sync.adapter.modalities import vision_exclusion
from trl_lora_sync.adapter.support import check_model
from trl_lora_sync.errors import UnsupportedAdapterError, UnsupportedSettingError
from trl_lora_sync.generation.base import AdapterGeneration

TEXT: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32}
TOWER = {**VISION, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
QWEN = {**VISION, "depth": 2, "num_heads": 2, "out_hidden_size": 32}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}

MODELS: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "qwen2.5-vl": (
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLConfig(text_config={**TEXT, "rope_parameters": MROPE}, vision_config=QWEN),
    ),
    "qwen3-vl": (
        Qwen3VLForConditionalGeneration,
        Qwen3VLConfig(
            text_config={**TEXT, "head_dim": 16}, vision_config={**QWEN, "deepstack_visual_indexes": [0]}
        ),
    ),
    "gemma3": (Gemma3ForConditionalGeneration, Gemma3Config(text_config={**TEXT, "head_dim": 16}, vision_config=TOWER)),
    "llava": (
        LlavaForConditionalGeneration,
        LlavaConfig(
            text_config=LlamaConfig(**TEXT), vision_config=CLIPVisionConfig(**TOWER, projection_dim=16)
        ),
    ),
}  # fmt: skip
# What names the parts outside of the language model, in each of them.
OUTSIDE = {
    "qwen2.5-vl": {"visual"},
    "qwen3-vl": {"visual"},
    "gemma3": {"vision_tower"},
    "llava": {"vision_tower", "multi_modal_projector"},
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
# Lists of names that the vision part has as well.
SHARED_NAMES = {"qwen2.5-vl": MLP, "gemma3": ATTENTION, "llava": ATTENTION}


def build(name: str) -> Any:
    kind, config = MODELS[name]
    return kind(copy.deepcopy(config))


def lora(**fields: Any) -> LoraConfig:
    return LoraConfig(r=2, **fields)


def suggestion(error: BaseException) -> str:
    """The `exclude_modules` in a message, as a user would copy it."""
    found = re.search(r"LoraConfig\(exclude_modules=('[^']*')\)", str(error))
    assert found, error
    return str(eval(found[1]))  # what is to be typed


@pytest.fixture(params=["model", "name"])
def given(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Gives a model as the trainer may get it: itself, or by the name of a folder, without any weights in it."""

    def give(model: Any) -> Any:
        if request.param == "model":
            return model
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(tmp_path)
        return str(tmp_path)

    return give


@pytest.mark.parametrize("name", MODELS)
def test_all_linear_layers_of_a_vision_model_are_refused_with_what_to_exclude(name: str, given: Any) -> None:
    """vLLM ignores what is trained in the vision tower, and a prompt of text does not show it."""
    with pytest.raises(UnsupportedAdapterError, match="modules outside the language model") as caught:
        check_model(given(build(name)), lora(target_modules="all-linear"))
    for part in OUTSIDE[name]:
        assert re.search(rf"model\.{part}\.[\w.*]+", str(caught.value))
    assert "layers.0" not in str(caught.value), "one line for all layers is enough"
    pattern = suggestion(caught.value)
    assert all(part in pattern for part in OUTSIDE[name])


@pytest.mark.parametrize("name", SHARED_NAMES)
def test_a_plain_list_of_names_that_the_vision_part_has_too_is_refused(name: str, given: Any) -> None:
    with pytest.raises(UnsupportedAdapterError, match="modules outside the language model"):
        check_model(given(build(name)), lora(target_modules=SHARED_NAMES[name]))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("targets", ["all-linear", ATTENTION, [*ATTENTION, *MLP]], ids=str)
@pytest.mark.parametrize("excluded", [None, ["lm_head"], "nothing", r".*layers\.1\..*"], ids=str)
def test_what_the_message_suggests_leaves_the_language_model_alone(name: str, targets: Any, excluded: Any) -> None:
    """It is used as printed; then only the language model is adapted, and all of it that was before."""
    model = build(name)
    config = lora(target_modules=targets, exclude_modules=excluded)
    adapted_before = adapted(get_peft_model(build(name), copy.deepcopy(config)))
    try:
        check_model(model, config)
    except UnsupportedAdapterError as error:
        config.exclude_modules = suggestion(error)
    assert config.target_modules == (targets if isinstance(targets, str) else set(targets)), "the check changed it"
    check_model(model, config)
    peft_model = get_peft_model(model, config)
    assert adapted(peft_model) == {path for path in adapted_before if ".language_model." in path}
    AdapterReader().linears(peft_model)


def adapted(model: Any) -> set[str]:
    return {name.partition(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A" in name}


@pytest.mark.parametrize("name", MODELS)
def test_a_peft_model_on_a_vision_tower_is_refused_when_it_is_read(name: str, tmp_path: Path) -> None:
    """The same as before the first step, for a model that the user wrapped."""
    peft_model = get_peft_model(build(name), lora(target_modules="all-linear"))
    check_model(peft_model, None)
    with pytest.raises(UnsupportedAdapterError, match="modules outside the language model"):
        AdapterReader().linears(peft_model)
    with pytest.raises(UnsupportedAdapterError, match="modules outside the language model"):
        export_adapter(peft_model, tmp_path / "adapter")


@pytest.mark.parametrize("name", MODELS)
def test_the_language_model_of_a_vision_model_is_exported(name: str, tmp_path: Path) -> None:
    targets = rf".*language_model.*\.({'|'.join(ATTENTION)})"
    check_model(build(name), lora(target_modules=targets))
    exported = export_adapter(get_peft_model(build(name), lora(target_modules=targets)), tmp_path / "adapter")
    assert set(exported.target_modules) == set(ATTENTION)


@pytest.mark.parametrize("name", MODELS)
def test_a_base_that_an_adapter_was_merged_into_is_noticed_although_the_checkpoint_has_other_names(
    name: str, tmp_path: Path
) -> None:
    build(name).save_pretrained(tmp_path)
    model = get_peft_model(MODELS[name][0].from_pretrained(tmp_path), lora(target_modules=ATTENTION))
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    assert change_from_checkpoint(model) == ""
    change_base(layers[-1], 0.02)
    assert "base weights differ from the checkpoint" in change_from_checkpoint(model)
    assert config_changes(model) == {}
    model.config.text_config.rms_norm_eps = 0.5
    assert config_changes(model) == {"text_config": {"rms_norm_eps": 0.5}}


def test_a_model_of_text_alone_is_not_looked_at(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = given(Qwen3ForCausalLM(Qwen3Config(**TEXT, head_dim=16)))
    monkeypatch.setattr("peft.inject_adapter_in_model", None)
    check_model(model, lora(target_modules="all-linear"))


@pytest.mark.parametrize("name", ["/no/such/model", "no-such/model"])
def test_a_name_that_cannot_be_looked_up_is_left_to_the_trainer(name: str) -> None:
    check_model(name, lora(target_modules="all-linear"))


def test_nothing_but_the_config_of_a_named_model_is_loaded(tmp_path: Path) -> None:
    """A weights file that cannot be read does not matter."""
    model = build("qwen3-vl")
    model.save_pretrained(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.write_bytes(b"no weights")
    with pytest.raises(UnsupportedAdapterError, match="outside the language model"):
        check_model(str(tmp_path), lora(target_modules="all-linear"))


def test_a_target_that_the_model_does_not_have_is_left_to_peft() -> None:
    check_model(build("llava"), lora(target_modules=["no_such_layer"]))


def test_the_check_draws_no_random_numbers() -> None:
    """A seed gives the same run as without it."""
    model = build("qwen3-vl")
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    with pytest.raises(UnsupportedAdapterError):
        check_model(model, lora(target_modules="all-linear"))
    assert torch.equal(torch.rand(3), expected)


# Where a trial adapter with an image proves what sees images

PATCHES = {
    "qwen2.5-vl": r".*visual\.patch_embed\.proj",
    "qwen3-vl": r".*visual\.(patch_embed\.proj|pos_embed)",
    "gemma3": r".*embeddings\.patch_embedding",
}


@pytest.mark.parametrize("name", MODELS)
def test_modules_that_see_images_are_let_through_where_their_names_are_known(name: str, given: Any) -> None:
    config = lora(target_modules="all-linear")
    if name == "llava":
        with pytest.raises(UnsupportedAdapterError, match="modules outside the language model"):
            check_model(given(build(name)), config, proves_groups=True)
        return
    check_model(given(build(name)), config, proves_groups=True)
    model = get_peft_model(build(name), config)
    reader = AdapterReader(proves_groups=True)
    reader.linears(model)
    assert set(reader.groups()) >= {"vision tower", "attention", "MLP"}
    assert re.search(vision_exclusion(model, config), "model.visual.x" if "qwen" in name else "model.vision_tower.x")


@pytest.mark.parametrize("name", PATCHES)
def test_the_embedding_of_patches_is_refused_in_any_case(name: str, given: Any) -> None:
    """vLLM ignores it, with and without its flag; what the message suggests leaves the rest as it was."""
    config = lora(target_modules=rf"{PATCHES[name]}|.*\.(q_proj|qkv)")
    with pytest.raises(UnsupportedAdapterError, match=r"vLLM ignores an adapter on the embedding of patches") as caught:
        check_model(given(build(name)), config, proves_groups=True)
    adapted_before = adapted(get_peft_model(build(name), copy.deepcopy(config)))
    config.exclude_modules = suggestion(caught.value)
    check_model(given(build(name)), config, proves_groups=True)
    left = adapted(get_peft_model(build(name), config))
    assert left == {path for path in adapted_before if "embed" not in path}
    assert any(".language_model." not in path for path in left)


def test_the_tower_of_gemma3_is_named_as_vllm_has_it() -> None:
    model = get_peft_model(build("gemma3"), lora(target_modules="all-linear"))
    reader = AdapterReader(proves_groups=True)
    reader.linears(model)
    paths = [path for group, modules in reader.groups().items() if sees_images(group) for path in modules]
    assert all(path.startswith("model.vision_tower.vision_model.") for path in paths)
    assert "model.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj" in paths


def test_a_sharded_model_with_an_adapter_on_what_sees_images_is_refused() -> None:
    model, reader = (
        get_peft_model(build("qwen3-vl"), lora(target_modules="all-linear")),
        AdapterReader(proves_groups=True),
    )
    generation: Any = SimpleNamespace(
        settings=SimpleNamespace(verify="first"),
        reader=reader,
        dtype_in=lambda form: torch.float32,
        _initial={},
        _is_sharded=lambda: True,
        model=model,
        accelerator=SimpleNamespace(device=torch.device("cpu")),
    )
    with pytest.raises(UnsupportedSettingError, match=r"ZeRO-3 shards.*exclude_modules='\.\*\(visual\)"):
        AdapterGeneration.trials(generation, None)  # type: ignore[arg-type]


# Mixtures of experts


def moe(**fields: Any) -> Any:
    config = Qwen3MoeConfig(**TEXT, head_dim=16, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
    return get_peft_model(Qwen3MoeForCausalLM(config), lora(**fields))


@pytest.mark.parametrize(
    ("targets", "suggested"),
    [
        ("all-linear", ["k_proj", "o_proj", "q_proj", "v_proj"]),
        (["q_proj", *MLP], ["q_proj"]),
        (MLP, ATTENTION),
    ],
    ids=str,
)
def test_experts_are_refused_in_words_that_a_user_who_set_target_modules_understands(
    targets: Any, suggested: list[str]
) -> None:
    """The message named `target_parameters` alone, which PEFT sets by itself, and advised to leave it unset."""
    model = moe(target_modules=targets)
    with pytest.raises(UnsupportedAdapterError, match=r"fused parameters of experts \(.*down_proj") as caught:
        AdapterReader().linears(model)
    message = str(caught.value)
    assert "target_parameters" not in message
    assert 'target_modules="all-linear" includes them' in message
    assert f"Set target_modules={suggested!r}" in message
    AdapterReader().linears(moe(target_modules=suggested))


def test_target_parameters_beside_a_regular_expression_are_to_be_left_out() -> None:
    """The advice was a list of the expression's characters."""
    config = GptOssConfig(**TEXT, head_dim=16, num_local_experts=4, num_experts_per_tok=2)
    targets = {"target_modules": r".*self_attn\.(q|v)_proj", "target_parameters": ["mlp.experts.gate_up_proj"]}
    model = get_peft_model(GptOssForCausalLM(config), lora(**targets))
    with pytest.raises(UnsupportedAdapterError, match=r"experts .*gate_up_proj\).*\. Leave target_parameters out, or"):
        AdapterReader().linears(model)


def test_target_parameters_that_a_user_has_set_are_named() -> None:
    config = lora(target_modules=["q_proj"], target_parameters=["gate_up_proj"])
    with pytest.raises(UnsupportedAdapterError, match=r"LoraConfig\(target_parameters=.*Leave it unset"):
        check_model("a/model", config)
