"""The file of an export is byte for byte what safetensors makes of the tensors, whatever was exported before."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor

from trl_lora_sync.adapter import flat as flat_module
from trl_lora_sync.adapter.canonical import CanonicalAdapter, LoRAModule, pad_packed_modules, widened
from trl_lora_sync.adapter.export import collect_modules
from trl_lora_sync.adapter.flat import FlatBuffer
from trl_lora_sync.adapter.store import write_tensors
from trl_lora_sync.errors import AdapterNotFiniteError
from unit.tiny import IN, OUT, lora_model, lora_module, randomize_adapters, reference_tensors

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# One of each thing that an adapter may be made of; see `modules_of`.
MODELS = {
    "plain": {},
    "all linear layers": {"target_modules": "all-linear"},
    "ranks and alphas by pattern": {
        "target_modules": "all-linear",
        "rank_pattern": {"v_proj": 5, "down_proj": 1},
        "alpha_pattern": {"q_proj": 7, "o_proj": 1},
    },
    "rsLoRA": {"r": 6, "use_rslora": True},
    "one layer of two": {"layers_to_transform": [1]},
}


def library_file(tensors: dict[str, Tensor]) -> bytes:
    """What safetensors writes."""
    return save(tensors, metadata={"format": "pt"})


def file_of(adapter: CanonicalAdapter) -> bytes:
    """What is written here."""
    with tempfile.TemporaryDirectory() as folder:
        write_tensors(Path(folder) / "file", adapter)
        return (Path(folder) / "file").read_bytes()


def assert_same(exported: CanonicalAdapter, modules: list[LoRAModule], dtype: torch.dtype) -> None:
    expected = reference_tensors(modules, dtype)
    assert file_of(exported) == library_file(expected)
    assert exported.tensors.keys() == expected.keys()
    assert all(torch.equal(exported.tensors[key], tensor) for key, tensor in expected.items())
    assert exported.payload_bytes == sum(tensor.nbytes for tensor in expected.values())


def trained(modules: list[LoRAModule], dtype: torch.dtype) -> list[LoRAModule]:
    """The same, as a trainer holds them that computes in `dtype`."""
    return [
        LoRAModule(
            name=module.name,
            lora_A=torch.nn.Parameter(module.lora_A.detach().to(dtype)),
            lora_B=torch.nn.Parameter(module.lora_B.detach().to(dtype)),
            scaling=module.scaling,
        )
        for module in modules
    ]


@pytest.mark.parametrize("trained_in", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("lora", MODELS.values(), ids=MODELS)
def test_the_file_is_byte_for_byte_that_of_the_library(
    lora: dict[str, object], dtype: torch.dtype, trained_in: torch.dtype
) -> None:
    modules = trained(collect_modules(lora_model(**lora), "default"), trained_in)
    assert_same(FlatBuffer().export(modules, dtype=dtype), modules, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_that_are_stored_transposed_are_exported_alike(dtype: torch.dtype) -> None:
    modules = collect_modules(lora_model("gpt2", target_modules=["c_attn"], fan_in_fan_out=True), "default")
    exported = FlatBuffer().export(modules, dtype=dtype, base_model="gpt2", fan_in_fan_out=True)
    assert_same(exported, modules, dtype)
    assert exported.config()["base_model_name_or_path"] == "gpt2"
    assert exported.config()["fan_in_fan_out"] is True


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_siblings_that_are_filled_with_zeros_are_exported_alike(dtype: torch.dtype) -> None:
    modules = [lora_module(f"model.layers.{layer}.self_attn.q_proj", rank=3, seed=layer) for layer in range(3)]
    shapes = {
        f"model.layers.{layer}.self_attn.{leaf}": (OUT, IN) for layer in range(3) for leaf in ("k_proj", "v_proj")
    }
    completed = pad_packed_modules(modules, shapes)
    assert len(completed) == 9
    assert_same(FlatBuffer().export(completed, dtype=dtype), completed, dtype)


NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=12)


@given(
    names=st.lists(NAMES, min_size=1, max_size=6, unique=True),
    dtype=st.sampled_from(DTYPES),
    trained_in=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_any_names_shapes_and_scalings_are_exported_alike(
    names: list[str], dtype: torch.dtype, trained_in: torch.dtype, data: st.DataObject
) -> None:
    buffer, size = FlatBuffer(), st.integers(1, 9)
    shapes = [(data.draw(size), data.draw(size), data.draw(size)) for _ in names]
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        modules = [
            LoRAModule(
                name=name,
                lora_A=torch.randn(rank, width, generator=generator).to(trained_in),
                lora_B=torch.randn(height, rank, generator=generator).to(trained_in),
                scaling=data.draw(st.floats(-4, 4)),
            )
            for name, (rank, width, height) in zip(names, shapes, strict=True)
        ]
        assert_same(buffer.export(modules, dtype=dtype), modules, dtype)


def test_buffer_serves_every_step_and_every_other_adapter() -> None:
    """Values, then ranks, names and dtype change; nothing of what was there before shows in the padding."""
    buffer = FlatBuffer()
    model = lora_model(rank_pattern={"v_proj": 5})
    for seed in range(3):
        randomize_adapters(model, seed=seed)
        assert_same(
            buffer.export(collect_modules(model, "default"), dtype=torch.bfloat16),
            collect_modules(model, "default"),
            torch.bfloat16,
        )
    for modules in (
        [lora_module("a", rank=2), lora_module("b", rank=5)],
        [lora_module("a", rank=5), lora_module("b", rank=2)],
        [lora_module("a", rank=5), lora_module("c", rank=2)],
        [lora_module("a", rank=4)],
    ):
        for dtype in DTYPES:
            assert_same(buffer.export(modules, dtype=dtype), modules, dtype)


def test_memory_is_kept_between_exports_and_given_back_at_the_end() -> None:
    buffer = FlatBuffer()
    first, second = (buffer.export([lora_module(seed=seed)], dtype=torch.float16) for seed in (1, 2))
    assert first.flat.data_ptr() == second.flat.data_ptr()
    assert first.flat.numel() * 2 == first.payload_bytes  # one adapter, and no more
    buffer.release()
    assert buffer.plan is None
    assert_same(buffer.export([lora_module()], dtype=torch.float16), [lora_module()], torch.float16)


def test_copy_on_the_host_outlives_the_next_export() -> None:
    buffer, modules = FlatBuffer(), [lora_module(seed=1)]
    kept = buffer.export(modules, dtype=torch.float32).on_host()
    buffer.export([lora_module(seed=2)], dtype=torch.float32)
    assert_same(kept, modules, torch.float32)


def test_large_adapters_are_folded_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = [lora_module(f"layer.{number}", rank=1 + number % 3, seed=number) for number in range(9)]
    for elements in (1, 70, 100, 10**6):
        monkeypatch.setattr(flat_module, "SCRATCH_ELEMENTS", elements)
        assert_same(FlatBuffer().export(modules, dtype=torch.bfloat16), modules, torch.bfloat16)


@pytest.mark.parametrize(
    ("broken", "dtype", "words"),
    [
        (lora_module("model.layers.1.v_proj", scaling=float("nan")), torch.float32, "scaled by nan, do not fit into"),
        (lora_module("model.layers.1.v_proj", scaling=1e30), torch.float16, r"scaled by 1e\+30, do not fit into"),
        (
            LoRAModule(name="layers.7", lora_A=torch.full((2, IN), torch.inf), lora_B=torch.ones(OUT, 2), scaling=1.0),
            torch.bfloat16,
            "hold NaN or infinity",
        ),
    ],
    ids=["NaN", "too large for float16", "infinity"],
)
def test_values_that_are_not_finite_are_refused_and_leave_nothing(
    broken: LoRAModule, dtype: torch.dtype, words: str
) -> None:
    modules, buffer = [lora_module("model.layers.0.q_proj"), broken, lora_module("model.layers.2.q_proj")], FlatBuffer()
    with pytest.raises(AdapterNotFiniteError, match=f"The LoRA matrices of '{broken.name}',? {words}"):
        buffer.export(modules, dtype=dtype)
    assert_same(buffer.export([lora_module()], dtype=dtype), [lora_module()], dtype)


def test_probe_that_is_one_wider_has_memory_of_its_own() -> None:
    """It took the buffer of the adapter that it was made of along, and would have been written as that."""
    probe = widened(FlatBuffer().export([lora_module()], dtype=torch.float32))
    assert file_of(probe) == library_file(probe.tensors)
    assert [list(tensor.shape) for tensor in probe.tensors.values()] == [[2, IN + 1], [OUT, 2]]


def test_adapter_without_tensors_has_the_file_of_the_library() -> None:
    """A server that is probed for its largest rank refuses an adapter before it reads a tensor."""
    empty = CanonicalAdapter(flat=torch.zeros(0), shapes={}, rank=1, target_modules=("q_proj",))
    assert file_of(empty) == library_file({})


def test_names_are_escaped_as_by_the_installed_safetensors() -> None:
    modules = [lora_module('a"b\\c\n\x01ü')]
    exported = FlatBuffer().export(modules, dtype=torch.bfloat16)
    assert_same(exported, modules, torch.bfloat16)
    assert json.loads(exported.header[8:])["__metadata__"] == {"format": "pt"}
