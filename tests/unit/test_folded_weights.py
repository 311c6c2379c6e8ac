"""Unit tier: fused serving without a copy of the base, on a server and in colocate mode."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from trl_lora_sync.colocate import in_weights
from trl_lora_sync.engine_plugins import folded_base, folded_weights
from trl_lora_sync.engine_plugins.folded_weights import FoldedWeights
from trl_lora_sync.engine_plugins.fused_file import AdapterFileError, Content, TensorSpan
from trl_lora_sync.engine_plugins.fused_placement import PlacementError, WeightSlice
from trl_lora_sync.engine_plugins.fused_weights import FusedAdapter, InPlace, copies_of, fuse

from .tiny import IN, OUT, canonical, lora_module

R = 4
# As vLLM has them: q and v are rows of one parameter. Of `down` this worker has some columns.
PIECES = {
    "q": [WeightSlice("qkv", (0, 32), (0, 48), 0, 0)],
    "v": [WeightSlice("qkv", (0, 16), (0, 48), 48, 0)],
    "down": [WeightSlice("down", (0, 48), (64, 96), 0, 0)],
}
SHAPES = {"q": (32, 48), "v": (16, 48), "down": (48, 96)}


DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.outside,  # Triton runs a compiler
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
        ],
    ),
]


def parameters(device: str = "cpu") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: (torch.randn(shape, generator=generator) * 0.05).to(device, torch.bfloat16)
        for name, shape in {"qkv": (64, 48), "down": (48, 32)}.items()
    }


def adapter(seed: int, *modules: str, scaling: float = 1.0, device: str = "cpu") -> FusedAdapter:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * 0.05).to(device, torch.bfloat16)

    matrices = {name: (random(R, SHAPES[name][1]), random(SHAPES[name][0], R)) for name in modules or SHAPES}
    return FusedAdapter(f"v{seed}", scaling, matrices)


def folded(weights: dict[str, Tensor]) -> FoldedWeights:
    made = FoldedWeights()
    made.check_pieces(PIECES, weights)
    made.add(weights)
    return made


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(left[name].view(torch.int16), right[name].view(torch.int16)) for name in left)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scaling", [1.0, 0.7])
def test_fifty_versions_are_what_a_copy_of_the_base_gives_and_the_base_comes_back(scaling: float, device: str) -> None:
    weights, with_copy, before = parameters(device), parameters(device), parameters(device)
    served = folded(weights)
    targets = {
        name: InPlace(weight, base)
        for (name, weight), base in zip(with_copy.items(), copies_of(with_copy.values(), "auto")[0], strict=True)
    }
    sets = [("q", "v", "down"), ("v",), ("q", "down"), ("down",)]
    for seed in range(50):
        version = adapter(seed, *sets[seed % len(sets)], scaling=scaling, device=device)
        served.write(version, PIECES)
        fuse(version, dict(targets), PIECES)
        for name, weight in weights.items():
            # Products in float32, which differ by their last bits where a copy's are added by `addmm`.
            torch.testing.assert_close(weight, with_copy[name], rtol=0.01, atol=1e-6)
        assert not same(weights, before)
    assert served.compared()["different"] > 0
    served.write(None, PIECES)
    assert same(weights, before)
    assert served.compared() == {"compared": 2, "different": 0}
    assert served.kept_bytes == 0


def test_what_is_kept_is_a_small_part_of_the_weights_for_a_small_update() -> None:
    weights = parameters()
    served, total = folded(weights), sum(weight.nbytes for weight in weights.values())
    version = adapter(1)
    version.matrices = {name: (a, b * 0.01) for name, (a, b) in version.matrices.items()}
    served.write(version, PIECES)
    assert 0 < served.kept_bytes < 0.05 * total


@pytest.mark.parametrize(("change", "share"), [(1e-4, 0.0007), (1e-3, 0.006), (1e-2, 0.039), (3e-2, 0.093)])
def test_what_is_kept_grows_with_the_update_as_documented(change: float, share: float) -> None:
    """docs/fused.md has these shares."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(1024, 1024, generator=generator) * 0.02).bfloat16()
    lora_A = torch.randn(32, 1024, generator=generator).bfloat16()
    lora_B = (torch.randn(1024, 32, generator=generator) * 0.02 * change / 32**0.5).bfloat16()
    served = FoldedWeights()
    served.add({"q": weight})
    served.write(
        FusedAdapter("v1", 1.0, {"q": (lora_A, lora_B)}), {"q": [WeightSlice("q", (0, 1024), (0, 1024), 0, 0)]}
    )
    assert served.kept_bytes / weight.nbytes == pytest.approx(share, rel=0.1)


def test_a_parameter_that_is_changed_for_the_first_time_while_another_one_holds_an_adapter() -> None:
    weights, before = parameters(), parameters()
    served = FoldedWeights()
    served.add({"qkv": weights["qkv"]})
    served.write(adapter(1, "q"), PIECES)
    assert "down" not in served
    served.add({"down": weights["down"]})
    served.write(adapter(2, "q", "down"), PIECES)
    served.write(None, PIECES)
    assert same(weights, before)


def test_a_version_for_which_there_is_no_memory_leaves_the_base(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, before = parameters(), parameters()
    served, add, calls = folded(weights), folded_base.add_to, []
    served.write(adapter(1), PIECES)

    def fails(*given: object) -> None:
        calls.append(given)
        if len(calls) == 5:  # three to take the one before out, then the second of the new one
            raise torch.OutOfMemoryError("no memory left")
        add(*given)

    with monkeypatch.context() as patch:
        patch.setattr(folded_base, "add_to", fails)
        with pytest.raises(torch.OutOfMemoryError):
            served.write(adapter(2), PIECES)
    assert same(weights, before)
    served.write(adapter(2), PIECES)
    served.write(None, PIECES)
    assert same(weights, before)


def no_memory(*given: object) -> None:
    raise torch.OutOfMemoryError("no memory left")


def test_adapter_of_other_modules_goes_into_these_after_a_write_for_which_there_was_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When it was written again, it went into the modules of the adapter before."""
    pieces = {"q": PIECES["q"], "k": [WeightSlice("qkv", (0, 32), (0, 48), 32, 0)]}
    weights, before = parameters(), parameters()
    served, second = folded(weights), FusedAdapter("v2", 1.0, {"k": adapter(2, "q").matrices["q"]})
    served.write(adapter(1, "q"), pieces)
    with monkeypatch.context() as patch:
        patch.setattr(folded_weights, "FoldedBase", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            served.write(second, pieces)
    served.write(second, pieces)
    assert torch.equal(weights["qkv"][:32], before["qkv"][:32])
    assert not torch.equal(weights["qkv"][32:], before["qkv"][32:])


def test_in_colocate_mode_too_it_goes_into_its_own_modules_after_such_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it was loaded again, vLLM sampled with it in the modules of the adapter before."""
    base = {name: torch.randn(OUT, IN, generator=torch.Generator().manual_seed(0)) for name in "qk"}
    before = {name: weight.clone() for name, weight in base.items()}
    monkeypatch.setattr(in_weights.placing, "served_parameters", lambda llm: base)
    llm = SimpleNamespace(llm_engine=SimpleNamespace(reset_prefix_cache=lambda: True))
    holder, second = in_weights.FoldedIntoSharedWeights(llm, base), canonical([lora_module("k")])
    holder.load("v1", 1, canonical([lora_module("q")]))
    with monkeypatch.context() as patch:
        patch.setattr(in_weights, "FoldedBase", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            holder.load("v2", 2, second)
    with holder.serving(holder.load("v2", 2, second)):
        assert torch.equal(base["q"], before["q"])
        assert not torch.equal(base["k"], before["k"])


def shared_holder(base: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> in_weights.FoldedIntoSharedWeights:
    """Of a vLLM that serves these weights."""
    monkeypatch.setattr(in_weights.placing, "served_parameters", lambda llm: base)
    llm = SimpleNamespace(llm_engine=SimpleNamespace(reset_prefix_cache=lambda: True))
    return in_weights.FoldedIntoSharedWeights(llm, base)


@pytest.mark.parametrize(("first", "second"), [("qk", "q"), ("q", "qk"), ("q", "k")])
def test_version_stays_in_its_modules_after_one_of_other_modules_was_loaded_and_failed(
    first: str, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was folded by the modules of the version that had failed: a part of it without an error, or a KeyError."""
    base = {name: torch.randn(OUT, IN, generator=torch.Generator().manual_seed(0)) for name in "qkv"}
    before = {name: weight.clone() for name, weight in base.items()}
    holder = shared_holder(base, monkeypatch)
    active = holder.load("v1", 1, canonical([lora_module(name) for name in first]))
    holder.load("v2", 2, canonical([lora_module(name) for name in second]))
    for _ in range(2):
        with holder.serving(active):
            assert {name for name in base if not torch.equal(base[name], before[name])} == set(first)
        assert all(torch.equal(base[name], before[name]) for name in base)


def test_version_that_could_not_be_taken_out_is_taken_out_before_one_of_other_modules_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stayed in the weights, which were then taken for the base."""
    base = {name: torch.randn(OUT, IN, generator=torch.Generator().manual_seed(0)) for name in "qk"}
    before = {name: weight.clone() for name, weight in base.items()}
    holder = shared_holder(base, monkeypatch)
    active = holder.load("v1", 1, canonical([lora_module("q")]))
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError), holder.serving(active):
        patch.setattr(folded_base, "add_to", no_memory)
    holder.load("v2", 2, canonical([lora_module("k")]))
    assert torch.equal(base["q"], before["q"])


def test_a_write_from_elsewhere_is_noticed_and_nothing_more_is_served() -> None:
    weights = parameters()
    served = folded(weights)
    served.write(adapter(1), PIECES)
    weights["down"].view(torch.int16)[3, 5] ^= 1
    for version in (adapter(2), None):
        with pytest.raises(RuntimeError, match=r"base weights are not what they were.*Restart the server"):
            served.write(version, PIECES)


def test_what_is_not_whole_rows_is_refused() -> None:
    part = {"down": [WeightSlice("down", (0, 48), (0, 16), 0, 16)]}
    with pytest.raises(PlacementError, match="'down' is not whole rows of 'down'"):
        FoldedWeights().check_pieces(part, parameters())


def test_an_adapter_that_does_more_than_lora_is_refused() -> None:
    span = TensorSpan("BF16", (4,), 0, 8)
    with pytest.raises(AdapterFileError, match=r"'norm\.weight' by more than.*FUSED_BASE=none"):
        FoldedWeights().check_content(Content({}, {}, {"norm.weight": ("value", span)}))
    FoldedWeights().check_content(Content({"q": (span, span)}, {}, {}))
