"""Reading the adapter of a live PEFT model: the written form gives plain PEFT the logits of the trainer."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoHaConfig, LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from peft.tuners.lora import Linear as LoraLinear
from safetensors.torch import load_file

from trl_lora_sync import ExportedAdapter, export_adapter
from trl_lora_sync.adapter.export import active_dropout, base_dtype, collect_modules, read_adapter
from trl_lora_sync.errors import AdapterExportError, UnsupportedAdapterError
from unit.tiny import R, base_model, everything_under, logits, lora_model, randomize_adapters

ATTENTION = {"qwen3": ["q_proj", "v_proj"], "llama": ["q_proj", "v_proj"], "gpt2": ["c_attn", "c_proj"]}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "rank_pattern": {"rank_pattern": {"FIRST": 5}},
    "alpha_pattern": {"alpha_pattern": {"FIRST": 17}},
    "both patterns": {"rank_pattern": {"FIRST": 5}, "alpha_pattern": {"FIRST": 17, "SECOND": 1}},
    "both patterns and rslora": {"rank_pattern": {"FIRST": 5}, "alpha_pattern": {"FIRST": 17}, "use_rslora": True},
    "patterns per layer": {"rank_pattern": {r".*\.1\..*FIRST": 1}, "alpha_pattern": {r".*\.0\..*FIRST": 9}},
    "ranks as eva leaves them": {"r": 4, "rank_pattern": {r".*\.0\..*FIRST": 1, r".*\.1\..*FIRST": 7}},
    "regex targets": {"target_modules": r".*\.1\..*(FIRST|SECOND)"},
    "all-linear": {"target_modules": "all-linear"},
    "layers_to_transform": {"layers_to_transform": [1]},
    "exclude_modules": {"exclude_modules": r".*\.0\..*FIRST"},
}


def with_names(value: Any, names: list[str]) -> Any:
    """Fill the architecture's module names into a feature."""
    if isinstance(value, dict):
        return {with_names(key, names): with_names(item, names) for key, item in value.items()}
    if isinstance(value, str):
        return value.replace("FIRST", names[0]).replace("SECOND", names[1])
    return value


def model_with(architecture: str, feature: str) -> PeftModel:
    names = ATTENTION[architecture]
    fields = {"target_modules": names, "fan_in_fan_out": architecture == "gpt2"}
    return lora_model(architecture, **fields | with_names(FEATURES[feature], names))


def loaded_by_peft(directory: Path, architecture: str = "qwen3") -> PeftModel:
    return PeftModel.from_pretrained(base_model(architecture), directory).eval()


def config_in(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "adapter_config.json").read_text())


@pytest.mark.parametrize("architecture", ATTENTION)
@pytest.mark.parametrize("feature", FEATURES)
def test_plain_peft_computes_the_training_models_logits_from_the_export(
    architecture: str, feature: str, tmp_path: Path
) -> None:
    model = model_with(architecture, feature)
    expected = logits(model)
    with model.disable_adapter():
        assert (logits(model) - expected).abs().max() > 1e-2, "the adapter changes nothing, so nothing is tested"
    exported = export_adapter(model, tmp_path / "adapter", dtype=torch.float32)
    torch.testing.assert_close(logits(loaded_by_peft(exported.path, architecture)), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("feature", FEATURES)
def test_config_file_needs_no_knowledge_of_the_feature(feature: str, tmp_path: Path) -> None:
    exported = export_adapter(model_with("qwen3", feature), tmp_path / "adapter")
    config = config_in(exported.path)
    assert config["r"] == config["lora_alpha"] == exported.rank
    assert config["rank_pattern"] == config["alpha_pattern"] == {}
    assert config["use_rslora"] is False
    assert isinstance(config["target_modules"], list)
    assert config["target_modules"] == list(exported.target_modules)
    stored = load_file(exported.path / "adapter_model.safetensors")
    assert {key.split(".")[-3] for key in stored} == set(exported.target_modules)
    assert {tensor.shape[0 if ".lora_A." in key else 1] for key, tensor in stored.items()} == {exported.rank}
    assert all(key.endswith((".lora_A.weight", ".lora_B.weight")) for key in stored)


def test_report_says_what_was_written(tmp_path: Path) -> None:
    exported = export_adapter(lora_model(r=3), tmp_path / "adapter", dtype=torch.bfloat16)
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert exported == ExportedAdapter(
        path=tmp_path / "adapter",
        rank=3,
        dtype=torch.bfloat16,
        target_modules=("q_proj", "v_proj"),
        payload_bytes=sum(tensor.numel() * 2 for tensor in stored.values()),
    )
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert everything_under(tmp_path) == ["adapter", "adapter/adapter_config.json", "adapter/adapter_model.safetensors"]


def test_directory_may_be_a_string_and_may_exist_if_it_is_empty(tmp_path: Path) -> None:
    assert export_adapter(lora_model(), str(tmp_path)).path == tmp_path
    assert len(everything_under(tmp_path)) == 2


def test_second_export_into_the_same_directory_is_refused(tmp_path: Path) -> None:
    model = lora_model()
    export_adapter(model, tmp_path / "adapter")
    before = (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes()
    randomize_adapters(model, seed=9)
    with pytest.raises(AdapterExportError, match="never written over one another"):
        export_adapter(model, tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes() == before


def test_export_leaves_every_bit_of_the_model_as_it_was(tmp_path: Path) -> None:
    model = lora_model(use_rslora=True, rank_pattern={"q_proj": 5}, alpha_pattern={"v_proj": 9}).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    storages = {name: value.data_ptr() for name, value in model.state_dict().items()}
    for number in range(3):
        export_adapter(model, tmp_path / str(number), dtype=torch.bfloat16)
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert {name: value.data_ptr() for name, value in after.items()} == storages
    assert model.training
    assert all(parameter.requires_grad == ("lora_" in name) for name, parameter in model.named_parameters())


def test_bfloat16_export_differs_from_float32_by_rounding_only(tmp_path: Path) -> None:
    model = lora_model()
    export_adapter(model, tmp_path / "exact", dtype=torch.float32)
    export_adapter(model, tmp_path / "half", dtype=torch.bfloat16)
    exact, half = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("exact", "half"))
    assert all(torch.equal(tensor.to(torch.bfloat16), half[key]) for key, tensor in exact.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_default_dtype_is_that_of_the_base_weights_not_of_the_adapter(dtype: torch.dtype, tmp_path: Path) -> None:
    model = get_peft_model(base_model().to(dtype), LoraConfig(r=2, target_modules=["q_proj"]))
    assert next(p for n, p in model.named_parameters() if "lora_" in n).dtype == torch.float32
    assert base_dtype(model) == dtype
    assert export_adapter(model, tmp_path / "adapter").dtype == dtype


def test_default_dtype_of_a_quantised_base_is_that_of_its_other_weights() -> None:
    """The packed weights are integers, so the adapter's own matrices are the first that float."""
    model = get_peft_model(Zoo(), LoraConfig(r=2, target_modules=["linear"]))
    base = model.get_base_model()
    del base.conv, base.table, base.attention
    base.lm_head.to(torch.bfloat16)
    base.linear.base_layer = torch.nn.Module()
    base.linear.base_layer.weight = torch.nn.Parameter(torch.zeros(8, dtype=torch.uint8), requires_grad=False)
    floating = [name for name, parameter in model.named_parameters() if parameter.is_floating_point()]
    assert "lora_" in floating[0]
    assert base_dtype(model) == torch.bfloat16


def test_dtype_is_cast_after_the_scaling_is_folded() -> None:
    model = lora_model(lora_alpha=3, r=2, use_rslora=True)
    for module in collect_modules(model, "default"):
        expected = (module.lora_B.detach() * module.scaling).to(torch.bfloat16)
        written = read_adapter(model, dtype=torch.bfloat16).tensors[f"base_model.model.{module.name}.lora_B.weight"]
        assert torch.equal(written, expected)


def test_only_the_active_adapter_is_exported_when_grpo_added_a_reference(tmp_path: Path) -> None:
    model = lora_model()
    expected = logits(model)
    model.add_adapter("ref", LoraConfig(r=4, target_modules=["q_proj", "v_proj", "k_proj"]))
    exported = export_adapter(model, tmp_path / "adapter", dtype=torch.float32)
    assert exported.rank == 2
    assert exported.target_modules == ("q_proj", "v_proj")
    assert not any("ref" in key for key in load_file(exported.path / "adapter_model.safetensors"))
    torch.testing.assert_close(logits(loaded_by_peft(exported.path)), expected, atol=2e-5, rtol=1e-5)


def test_adapter_name_chooses_another_adapter_than_the_active_one(tmp_path: Path) -> None:
    model = lora_model()
    model.add_adapter("other", LoraConfig(r=4, lora_alpha=2, target_modules=["k_proj"]))
    randomize_adapters(model, seed=5)
    model.set_adapter("other")
    expected = logits(model)
    model.set_adapter("default")
    exported = export_adapter(model, tmp_path / "adapter", dtype=torch.float32, adapter_name="other")
    assert (exported.rank, exported.target_modules) == (4, ("k_proj",))
    assert model.active_adapters == ["default"]
    torch.testing.assert_close(logits(loaded_by_peft(exported.path)), expected, atol=2e-5, rtol=1e-5)


def test_adapter_of_another_name_than_default_is_written_without_its_name(tmp_path: Path) -> None:
    model = get_peft_model(base_model(), LoraConfig(r=2, target_modules=["q_proj"]), adapter_name="policy").eval()
    randomize_adapters(model)
    exported = export_adapter(model, tmp_path / "adapter", dtype=torch.float32)
    assert not any("policy" in key for key in load_file(exported.path / "adapter_model.safetensors"))
    torch.testing.assert_close(logits(loaded_by_peft(exported.path)), logits(model), atol=2e-5, rtol=1e-5)


def test_unknown_adapter_name_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedAdapterError, match=r"no adapter 'missing'. Choose one of 'default'"):
        export_adapter(lora_model(), tmp_path / "adapter", adapter_name="missing")
    assert everything_under(tmp_path) == []


def test_model_without_peft_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedAdapterError, match="needs a LoRA adapter"):
        export_adapter(base_model(), tmp_path / "adapter")


def test_two_active_adapters_are_refused(tmp_path: Path) -> None:
    model = lora_model()
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(UnsupportedAdapterError, match="2 active adapters"):
        export_adapter(model, tmp_path / "adapter")


def test_merged_layer_is_refused_and_accepted_again_once_unmerged(tmp_path: Path) -> None:
    model = lora_model()
    model.merge_adapter()
    with pytest.raises(UnsupportedAdapterError, match=r"'model\.layers\.0\.self_attn\.q_proj' \(Linear\) is merged"):
        export_adapter(model, tmp_path / "adapter")
    model.unmerge_adapter()
    export_adapter(model, tmp_path / "adapter")


def layer_of(model: PeftModel) -> LoraLinear:
    return model.get_base_model().model.layers[0].self_attn.q_proj


@pytest.mark.parametrize("matrix", ["lora_A", "lora_B"])
def test_lora_matrix_with_a_bias_is_refused(matrix: str, tmp_path: Path) -> None:
    model = lora_model()
    matrices = getattr(layer_of(model), matrix)
    old = matrices["default"]
    matrices["default"] = torch.nn.Linear(old.in_features, old.out_features, bias=True)
    with pytest.raises(UnsupportedAdapterError, match=r"q_proj' .* has a bias on a LoRA matrix"):
        export_adapter(model, tmp_path / "adapter")


def test_layer_with_a_variant_is_refused_even_if_the_config_does_not_show_it(tmp_path: Path) -> None:
    model = lora_model(use_dora=True)
    model.peft_config["default"].use_dora = False
    with pytest.raises(UnsupportedAdapterError, match=r"q_proj' .* uses the variant Dora"):
        export_adapter(model, tmp_path / "adapter")


class Zoo(torch.nn.Module):
    """One of each kind of layer that PEFT can adapt beside linear ones."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv1d(4, 4, 3)
        self.table = torch.nn.Embedding(8, 4)
        self.attention = torch.nn.MultiheadAttention(4, 2)
        self.linear = torch.nn.Linear(4, 4)
        self.lm_head = torch.nn.Linear(4, 8)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("conv", "'conv' .* adapts with Conv1d instead of Linear matrices"),
        ("attention", "'attention' .* does not adapt one linear layer"),
        ("table", "A LoRA adapter on 'table' cannot be used.*embedding"),
        (".*(lm|my)_head", "A LoRA adapter on 'lm_head' cannot be used.*output head"),
    ],
)
def test_adapted_layer_that_is_not_linear_is_refused(target: str, words: str, tmp_path: Path) -> None:
    targets = target if "*" in target else ["linear", target]
    model = get_peft_model(Zoo(), LoraConfig(r=2, target_modules=targets))
    with pytest.raises(UnsupportedAdapterError, match=words):
        export_adapter(model, tmp_path / "adapter")
    assert everything_under(tmp_path) == []


def test_fused_expert_parameter_is_refused_even_if_the_config_does_not_show_it(tmp_path: Path) -> None:
    model = get_peft_model(Zoo(), LoraConfig(r=2, target_modules=[], target_parameters=["linear.weight"]))
    model.peft_config["default"].target_parameters = None
    with pytest.raises(UnsupportedAdapterError, match=r"ParamWrapper. does not adapt one linear layer"):
        export_adapter(model, tmp_path / "adapter")


def test_model_with_an_adapter_of_another_kind_below_is_refused(tmp_path: Path) -> None:
    """The trainer computed with both, and both are called "default"."""
    base = base_model()
    inject_adapter_in_model(LoHaConfig(r=2, target_modules=["up_proj"], init_weights=False), base)
    model = get_peft_model(base, LoraConfig(r=R, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with pytest.raises(UnsupportedAdapterError, match=r"up_proj' \(Linear\) has 'default' active"):
        export_adapter(model, tmp_path / "adapter")


def test_adapter_without_any_layer_is_refused() -> None:
    with pytest.raises(UnsupportedAdapterError, match="has no LoRA layer in this model"):
        collect_modules(lora_model(), "missing")


@pytest.mark.parametrize("act", ["merge_and_unload", "unload"])
def test_model_that_its_layers_were_taken_out_of_is_refused_with_the_calls_that_do_that(act: str) -> None:
    """A callback that merges to save was sent to the LoraConfig, which had trained until then."""
    model = lora_model()
    getattr(model, act)()
    with pytest.raises(UnsupportedAdapterError, match=rf"PEFT's .*\b{act}\(\).* call them on a copy"):
        collect_modules(model, "default")


def test_compiled_model_exports_the_same_adapter() -> None:
    model = lora_model()
    plain = read_adapter(model, dtype=torch.float32).tensors
    compiled = read_adapter(torch.compile(model), dtype=torch.float32).tensors
    assert compiled.keys() == plain.keys()
    assert all(torch.equal(tensor, plain[key]) for key, tensor in compiled.items())


def test_wrappers_around_single_layers_leave_no_trace_in_the_names() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = lora_model()
    plain = read_adapter(model, dtype=torch.float32).tensors
    layers = model.get_base_model().model.layers
    layers[0] = checkpoint_wrapper(layers[0])
    layers[1] = torch.compile(layers[1])
    assert any("_checkpoint_wrapped_module" in name for name, _ in model.named_modules())
    assert any("_orig_mod" in name for name, _ in model.named_modules())
    assert read_adapter(model, dtype=torch.float32).tensors.keys() == plain.keys()


def test_dropout_is_that_of_the_active_adapters_layers_as_they_are_now() -> None:
    from trl.trainer.utils import disable_dropout_in_model

    assert active_dropout(lora_model()) == 0
    model = lora_model(lora_dropout=0.05)
    model.add_adapter("other", LoraConfig(r=R, target_modules=["q_proj"], lora_dropout=0.3))
    assert active_dropout(model) == 0.05

    disable_dropout_in_model(model)
    assert active_dropout(model) == 0
