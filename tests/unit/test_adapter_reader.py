"""What a reader remembers of a model is never what the model was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.hotswap import prepare_model_for_compiled_hotswap
from torch import nn
from torch.nn.utils import parametrizations, prune

from trl_lora_sync.adapter import export
from trl_lora_sync.adapter.canonical import CanonicalAdapter
from trl_lora_sync.adapter.export import AdapterReader, read_adapter
from trl_lora_sync.errors import UnsupportedAdapterError
from unit.tiny import lora_model, randomize_adapters


def read(reader: AdapterReader, model: PeftModel) -> CanonicalAdapter:
    """As a sync does."""
    assert reader.linears(model) == AdapterReader().linears(model)
    return reader.read(model, dtype=torch.float32)


def assert_reads_what_is_there(reader: AdapterReader, model: PeftModel) -> None:
    found, expected = read(reader, model), read_adapter(model, dtype=torch.float32)
    assert found.config() == expected.config()
    assert list(found.tensors) == list(expected.tensors)
    assert all(torch.equal(tensor, expected.tensors[key]) for key, tensor in found.tensors.items())


def ways_to_read(reader: AdapterReader, model: PeftModel) -> tuple[Callable[[], object], ...]:
    """By a reader that has read the model before, and by new ones."""
    return (
        reader.is_as_read,
        lambda: read_adapter(model, dtype=torch.float32),
        lambda: AdapterReader().linears(model),
    )


def test_new_values_and_new_parameters_are_read() -> None:
    reader, model = AdapterReader(), lora_model()
    assert_reads_what_is_there(reader, model)
    randomize_adapters(model, seed=2)
    assert_reads_what_is_there(reader, model)
    for linear in AdapterReader().linears(model):
        linear.weight = nn.Parameter(torch.full_like(linear.weight, 0.5))
    assert_reads_what_is_there(reader, model)
    assert float(next(iter(read(reader, model).tensors.values())).max()) == 0.5


def test_smaller_rank_in_the_same_parameters_is_read() -> None:
    """The one row of the new matrix was copied to all rows of the old one."""
    reader, model = AdapterReader(), lora_model()
    assert_reads_what_is_there(reader, model)
    linears = AdapterReader().linears(model)
    for lora_A, lora_B in zip(linears[::2], linears[1::2], strict=True):
        lora_A.weight.data, lora_B.weight.data = lora_A.weight.data[:1].clone(), lora_B.weight.data[:, :1].clone()
    assert_reads_what_is_there(reader, model)
    assert read(reader, model).rank == 1


def test_new_scaling_is_read() -> None:
    reader, model = AdapterReader(), lora_model()
    before = read(reader, model).on_host()
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 4.0)
    assert_reads_what_is_there(reader, model)
    after = read(reader, model)
    assert any(not torch.equal(after.tensors[key], tensor) for key, tensor in before.tensors.items())


@pytest.mark.parametrize("module", ["v_proj", "embed_tokens"])
def test_scaling_of_every_kind_of_layer_is_among_those_that_are_compared(module: str) -> None:
    """A scaling that changes alone is a change of the adapter, and no matrix shows it."""
    model, reader = lora_model(target_modules=["q_proj", "v_proj", "embed_tokens"]), AdapterReader("fused")
    reader.linears(model)
    layer = next(one for name, one in model.named_modules() if name.endswith(module))
    before = reader.scalings()
    layer.set_scale("default", 0.25)
    assert sorted(set(before) ^ set(reader.scalings())) == [0.375]
    layer.set_scale("default", 1)
    assert reader.scalings() == before


def test_adapter_that_was_replaced_under_the_same_name_is_read() -> None:
    reader, model = AdapterReader(), lora_model(target_modules=["q_proj"])
    read(reader, model)
    model.add_adapter("other", LoraConfig(r=3, target_modules=["o_proj"], task_type="CAUSAL_LM"))
    model.set_adapter("other")
    assert read(reader, model).target_modules == ("o_proj",)
    model.delete_adapter("default")
    model.add_adapter("default", LoraConfig(r=5, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))
    model.set_adapter("default")
    randomize_adapters(model)
    assert_reads_what_is_there(reader, model)
    assert read(reader, model).target_modules == ("down_proj", "q_proj")
    assert read(reader, model).rank == 5


def test_layer_that_was_replaced_is_read() -> None:
    reader, model, other = AdapterReader(), lora_model(), lora_model()
    read(reader, model)
    randomize_adapters(other, seed=3)
    layer = model.base_model.model.model.layers[1]
    layer.self_attn.q_proj = other.base_model.model.model.layers[1].self_attn.q_proj
    assert_reads_what_is_there(reader, model)


def test_another_model_is_read() -> None:
    reader = AdapterReader()
    read(reader, lora_model(target_modules=["q_proj"]))
    assert_reads_what_is_there(reader, lora_model(target_modules=["o_proj"]))


def test_layer_that_is_merged_meanwhile_is_refused() -> None:
    reader, model = AdapterReader(), lora_model()
    read(reader, model)
    model.merge_adapter()
    with pytest.raises(UnsupportedAdapterError, match=r"is merged .*unmerge_adapter"):
        reader.read(model, dtype=torch.float32)
    model.unmerge_adapter()
    assert_reads_what_is_there(reader, model)


def test_modules_are_named_once_as_long_as_they_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, model = AdapterReader(), lora_model()
    reader.linears(model)

    def fail(*_: object) -> None:
        raise AssertionError("the modules were named again")

    monkeypatch.setattr(export, "find_layers", fail)
    for seed in range(3):
        randomize_adapters(model, seed=seed)
        reader.linears(model)
        reader.read(model, dtype=torch.float32)


# Reading again, and looking at the model afterwards


def read_again(reader: AdapterReader, model: PeftModel) -> CanonicalAdapter:
    adapter = reader.read_again(model, dtype=torch.float32)
    assert adapter is not None
    return adapter


def is_as_read(reader: AdapterReader, model: PeftModel) -> bool:
    reader.linears(model)
    return reader.is_as_read()


def test_new_values_are_read_again_without_a_look_at_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, model = AdapterReader(), lora_model()
    assert reader.read_again(model, dtype=torch.float32) is None  # nothing was read yet
    read(reader, model)
    randomize_adapters(model, seed=2)
    with monkeypatch.context() as patched:
        for name in ("linears", "check"):
            patched.delattr(AdapterReader, name)
        found = read_again(reader, model)
    expected = read_adapter(model, dtype=torch.float32)
    assert all(torch.equal(tensor, expected.tensors[key]) for key, tensor in found.tensors.items())
    assert is_as_read(reader, model)


def test_scaling_that_is_a_tensor_is_read_at_each_sync() -> None:
    """A layer that was prepared for hot-swapping is scaled in place, and the old scaling was published ever after."""
    reader, model = AdapterReader(), lora_model()
    read(reader, model)
    prepare_model_for_compiled_hotswap(model)
    assert_reads_what_is_there(reader, model)
    model.base_model.model.model.layers[1].self_attn.q_proj.scale_layer(4.0)
    assert not is_as_read(reader, model)
    assert_reads_what_is_there(reader, model)


def test_layer_that_computes_with_another_adapter_as_well_is_refused() -> None:
    """The model named one active adapter, and the layers added two, of which the server got one."""
    reader, model = AdapterReader(), lora_model()
    model.add_adapter("other", LoraConfig(r=3, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    read(reader, model)
    layer = model.base_model.model.model.layers[1].self_attn.q_proj
    for active in (["default", "other"], "other"):
        layer.set_adapter(active)
        for refused in ways_to_read(reader, model):
            with pytest.raises(UnsupportedAdapterError, match=r"q_proj' .* has other active adapters .*set_adapter"):
                refused()
    model.set_adapter("default")
    assert_reads_what_is_there(reader, model)
    # Of an adapter that is not the active one, nothing is expected of the layers.
    assert read_adapter(model, dtype=torch.float32, adapter_name="other").rank == 3


@pytest.mark.parametrize(
    "way", [parametrizations.weight_norm, lambda one: prune.l1_unstructured(one, "weight", 0.5)], ids=["norm", "prune"]
)
def test_matrix_that_is_computed_from_other_parameters_is_refused(way: Any) -> None:
    """The matrix of the first read was published ever after."""
    reader, model = AdapterReader(), lora_model()
    read(reader, model)
    way(model.base_model.model.model.layers[1].self_attn.q_proj.lora_A["default"])
    for refused in ways_to_read(reader, model):
        with pytest.raises(UnsupportedAdapterError, match=r"q_proj' .* computes a LoRA matrix from other parameters"):
            refused()


@pytest.mark.parametrize("beside", [{"target_modules": ["up_proj"]}, {"trainable_token_indices": [3]}], ids=str)
@pytest.mark.parametrize("change", ["merged", "active"])
def test_layer_without_the_adapter_that_computes_with_another_one_is_refused(beside: Any, change: str) -> None:
    """With an adapter of the MLP merged beside one of the attention, the server's MLP was the checkpoint's."""
    reader, model = AdapterReader(), lora_model()
    fields = {"r": 3, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | beside
    model.add_adapter("other", LoraConfig(**fields))
    read(reader, model)
    layers = [one for one in model.modules() if isinstance(one, BaseTunerLayer)]
    # Of the model, `merge_adapter` would change the layers with the adapter as well.
    layer = next(one for one in layers if "default" not in getattr(one, "lora_A", ()))
    if change == "merged":
        layer.merge(adapter_names=["other"])
    else:
        layer.enable_adapters(True)
        layer.set_adapter("other")
    for refused in ways_to_read(reader, model):
        with pytest.raises(UnsupportedAdapterError, match=r"\(.*\) has 'other' (merged|active).* first\)"):
            refused()
    if change == "merged":
        layer.unmerge()
    model.set_adapter("default")
    assert_reads_what_is_there(reader, model)


def test_another_adapter_that_was_active_for_a_while_is_no_change() -> None:
    """The teacher of SDPO made each sync publish two versions, of which the first was withdrawn."""
    reader, model = AdapterReader(), lora_model()
    model.add_adapter("other", LoraConfig(r=3, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    read(reader, model)
    model.set_adapter("other")
    model.set_adapter("default")
    assert reader.is_as_read()


@pytest.mark.parametrize("change", ["layer", "matrix", "scaling", "adapter"])
def test_look_shows_that_what_was_read_again_is_not_what_the_model_computes_with(change: str) -> None:
    reader, model, other = AdapterReader(), lora_model(), lora_model()
    read(reader, model)
    attention = model.base_model.model.model.layers[1].self_attn
    if change == "layer":
        attention.q_proj = other.base_model.model.model.layers[1].self_attn.q_proj
    elif change == "matrix":
        linear = attention.q_proj.lora_B["default"]
        linear.weight = nn.Parameter(torch.full_like(linear.weight, 0.5))
    elif change == "scaling":
        attention.q_proj.set_scale("default", 4.0)
    else:
        model.add_adapter("other", LoraConfig(r=3, target_modules=["o_proj"], task_type="CAUSAL_LM"))
        model.set_adapter("other")
    read_again(reader, model)
    assert not is_as_read(reader, model)
    assert reader.read_again(model, dtype=torch.float32) is None
    assert_reads_what_is_there(reader, model)


def test_look_after_reading_again_refuses_a_layer_that_is_merged_meanwhile() -> None:
    reader, model = AdapterReader(), lora_model()
    read(reader, model)
    model.merge_adapter()
    read_again(reader, model)
    with pytest.raises(UnsupportedAdapterError, match=r"is merged .*unmerge_adapter"):
        is_as_read(reader, model)
