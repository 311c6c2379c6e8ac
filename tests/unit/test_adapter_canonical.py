"""The canonical form, against the float32 reference product `scaling * lora_B @ lora_A`."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_lora_sync.adapter.canonical import LoRAModule, fold_scaling, widened
from trl_lora_sync.adapter.flat import FlatBuffer
from trl_lora_sync.errors import AdapterNotFiniteError
from unit.tiny import IN, OUT, canonical, lora_module

ranks = st.integers(min_value=1, max_value=9)
scalings = st.floats(min_value=-64.0, max_value=64.0, allow_nan=False).filter(lambda s: s == 0.0 or abs(s) > 1e-3)


def keys_of(name: str) -> tuple[str, str]:
    return f"base_model.model.{name}.lora_A.weight", f"base_model.model.{name}.lora_B.weight"


@given(layers=st.lists(st.tuples(ranks, scalings), min_size=1, max_size=4), seed=st.integers(0, 2**16))
def test_canonical_product_at_scaling_one_is_the_scaled_product_of_the_trainer(
    layers: list[tuple[int, float]], seed: int
) -> None:
    modules = [
        lora_module(f"model.layers.{i}.q_proj", rank=rank, scaling=scaling, seed=seed + i)
        for i, (rank, scaling) in enumerate(layers)
    ]
    adapter = FlatBuffer().export(modules, dtype=torch.float32)
    assert adapter.rank == max(rank for rank, _ in layers)
    assert len(adapter.tensors) == 2 * len(modules)
    for module in modules:
        lora_A, lora_B = (adapter.tensors[key] for key in keys_of(module.name))
        assert lora_A.shape == (adapter.rank, IN)
        assert lora_B.shape == (OUT, adapter.rank)
        expected = module.scaling * (module.lora_B @ module.lora_A)
        # What float32 may lose: one rounding per product, per sum and for the scaling.
        magnitude = abs(module.scaling) * (module.lora_B.abs() @ module.lora_A.abs())
        allowed = (adapter.rank + 2) * torch.finfo(torch.float32).eps * magnitude
        assert (lora_B @ lora_A - expected).abs().le(allowed).all()


def test_product_is_right_for_a_scaling_that_bfloat16_cannot_hold() -> None:
    """Scaling in bfloat16 would round twice: once the factor, once the product."""
    module = LoRAModule(
        name="layer", lora_A=torch.ones(1, 1), lora_B=torch.full((1, 1), 1.0078125, dtype=torch.bfloat16), scaling=1.3
    )
    adapter = FlatBuffer().export([module], dtype=torch.bfloat16)
    expected = torch.tensor(1.0078125 * 1.3).to(torch.bfloat16)
    assert adapter.tensors[keys_of("layer")[1]].item() == expected.item()
    twice_rounded = torch.tensor(1.0078125, dtype=torch.bfloat16) * torch.tensor(1.3, dtype=torch.bfloat16)
    assert twice_rounded.item() != expected.item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_fold_scaling_returns_float32_and_leaves_its_input(dtype: torch.dtype) -> None:
    lora_B = torch.full((OUT, 2), 0.5, dtype=dtype)
    folded = fold_scaling(lora_B, 3.0)
    assert folded.dtype == torch.float32
    assert folded.eq(1.5).all()
    assert lora_B.eq(0.5).all()
    assert folded.data_ptr() != lora_B.data_ptr()


def test_padding_adds_zero_rows_to_the_first_matrix_and_zero_columns_to_the_second() -> None:
    module = lora_module("narrow", rank=2)
    adapter = canonical([module, lora_module("wide", rank=5)])
    lora_A, lora_B = (adapter.tensors[key] for key in keys_of("narrow"))
    assert lora_A.shape == (5, IN)
    assert lora_B.shape == (OUT, 5)
    assert torch.equal(lora_A[:2], module.lora_A)
    assert torch.equal(lora_B[:, :2], module.lora_B * module.scaling)
    assert not lora_A[2:].any()
    assert not lora_B[:, 2:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_aliases_training_storage(dtype: torch.dtype) -> None:
    """An aliased tensor would follow the optimizer after it was published, or scale the weights in training."""
    source = lora_module()
    module = LoRAModule(
        name=source.name,
        lora_A=torch.nn.Parameter(source.lora_A.to(dtype)),
        lora_B=torch.nn.Parameter(source.lora_B.to(dtype)),
        scaling=1.0,
    )
    adapter = FlatBuffer().export([module], dtype=dtype)
    before = {key: tensor.clone() for key, tensor in adapter.tensors.items()}
    with torch.no_grad():
        module.lora_A.zero_()
        module.lora_B.zero_()
    assert all(torch.equal(tensor, before[key]) for key, tensor in adapter.tensors.items())
    assert not any(tensor.requires_grad for tensor in adapter.tensors.values())


def test_tensors_are_contiguous_on_the_cpu_in_the_dtype_asked_for() -> None:
    module = LoRAModule(name="layer", lora_A=torch.randn(IN, 2).T, lora_B=torch.randn(2, OUT).T, scaling=2.0)
    adapter = FlatBuffer().export([module], dtype=torch.bfloat16)
    assert adapter.dtype == torch.bfloat16
    for tensor in adapter.tensors.values():
        assert tensor.is_contiguous()
        assert tensor.device.type == "cpu"
        assert tensor.dtype == torch.bfloat16


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("matrix", ["lora_A", "lora_B"])
def test_matrix_that_is_not_finite_is_refused_with_the_name_of_its_module(matrix: str, value: float) -> None:
    broken = lora_module("model.layers.1.v_proj")
    getattr(broken, matrix)[1, 1] = value
    with pytest.raises(AdapterNotFiniteError, match=r"'model\.layers\.1\.v_proj' hold NaN or infinity") as caught:
        FlatBuffer().export([lora_module("model.layers.0.v_proj"), broken], dtype=torch.float32)
    assert "Lower the learning rate" in str(caught.value)


def test_value_that_overflows_the_served_dtype_is_refused() -> None:
    """A lora_B of 40000 is fine in float32, and so is a scaling of 2, but their product is infinite in float16."""
    module = LoRAModule(name="layer", lora_A=torch.ones(1, IN), lora_B=torch.full((OUT, 1), 4e4), scaling=2.0)
    assert FlatBuffer().export([module], dtype=torch.float32).rank == 1
    with pytest.raises(AdapterNotFiniteError, match=r"'layer'.*float16"):
        FlatBuffer().export([module], dtype=torch.float16)


def test_target_modules_are_the_last_components_sorted_and_without_repeats() -> None:
    names = ("model.layers.1.self_attn.v_proj", "model.layers.0.self_attn.v_proj", "model.layers.0.mlp.down_proj")
    assert canonical([lora_module(name) for name in names]).target_modules == ("down_proj", "v_proj")


def test_config_describes_plain_lora_with_scaling_one() -> None:
    adapter = canonical([lora_module(rank=3), lora_module("model.layers.1.v_proj", rank=5)])
    config = adapter.config()
    assert config["peft_type"] == "LORA"
    assert config["r"] == config["lora_alpha"] == 5
    assert config["target_modules"] == ["q_proj", "v_proj"]
    assert config["rank_pattern"] == config["alpha_pattern"] == {}
    assert config["use_rslora"] is config["use_dora"] is False
    assert config["bias"] == "none"
    assert config["modules_to_save"] is None
    assert config["init_lora_weights"] is True
    assert config["base_model_name_or_path"] == "org/base"


def test_sizes_count_every_tensor() -> None:
    adapter = canonical([lora_module(rank=2)], dtype=torch.bfloat16)
    assert adapter.parameters == 2 * IN + 2 * OUT
    assert adapter.payload_bytes == 2 * adapter.parameters


@pytest.mark.parametrize(
    ("kind", "wider", "taller"),
    [("q_proj", 1, 0), ("up_proj", 1, 0), ("o_proj", 0, 1), ("down_proj", 0, 1), ("c_attn", 1, 1)],
)
def test_widened_is_one_zero_module_that_fits_no_base_the_adapter_fits(kind: str, wider: int, taller: int) -> None:
    """Only the side that meets the hidden state grows; both do where the name does not determine that side."""
    adapter = canonical([lora_module(f"model.layers.{number}.{kind}") for number in range(2)])
    probe = widened(adapter)
    key_A, key_B = keys_of(f"model.layers.0.{kind}")
    assert list(probe.tensors) == [key_A, key_B]
    assert probe.tensors[key_A].shape == (adapter.rank, IN + wider)
    assert probe.tensors[key_B].shape == (OUT + taller, adapter.rank)
    assert not any(tensor.any() for tensor in probe.tensors.values())
    assert probe.config() == adapter.config()
    assert len(adapter.tensors) == 4


def test_widened_prefers_a_module_whose_sides_are_known() -> None:
    adapter = canonical([lora_module("model.layers.0.strange"), lora_module("model.layers.0.k_proj")])
    assert list(widened(adapter).tensors) == list(keys_of("model.layers.0.k_proj"))
