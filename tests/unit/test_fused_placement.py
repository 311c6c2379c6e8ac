"""Unit tier: where weights of a checkpoint land, by loading rules like vLLM's; `live/test_fused.py` uses vLLM's own."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from trl_lora_sync.engine_plugins.fused_placement import PlacementError, WeightSlice, copying_only, trace_weight_slices
from trl_lora_sync.engine_plugins.fused_weights import part_of

OUT, IN = 12, 8
LoadWeights = Callable[[Iterable[tuple[str, Tensor]]], Any]


def pieces_of(
    rule: Callable[[Tensor, Tensor], Any], shape: tuple[int, int] = (OUT, IN), of: tuple[int, int] = (OUT, IN)
) -> list[WeightSlice]:
    """The pieces of a weight that `rule` loads into a parameter, which must stay as it was."""
    weight = torch.arange(of[0] * of[1], dtype=torch.bfloat16).reshape(of)
    before = weight.clone()

    def load_weights(weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, source in weights:
            assert name == "q_proj.weight"
            rule(weight, source)

    try:
        return trace_weight_slices(load_weights, {"qkv": weight}, {"q_proj": shape}, torch.bfloat16)["q_proj"]
    finally:
        assert torch.equal(weight, before)


def test_a_plain_weight_is_one_piece() -> None:
    assert pieces_of(lambda weight, source: weight.copy_(source)) == [WeightSlice("qkv", (0, OUT), (0, IN), 0, 0)]


def test_a_stacked_weight_is_where_its_rows_go() -> None:
    found = pieces_of(lambda weight, source: weight.narrow(0, 20, OUT).copy_(source), of=(40, IN))
    assert found == [WeightSlice("qkv", (0, OUT), (0, IN), 20, 0)]


def test_rows_below_a_weight_that_are_filled_are_passed_over() -> None:
    def rule(weight: Tensor, source: Tensor) -> None:
        weight[:OUT].copy_(source)
        weight[OUT:].fill_(0)

    assert pieces_of(rule, of=(OUT + 4, IN)) == [WeightSlice("qkv", (0, OUT), (0, IN), 0, 0)]


def test_a_row_shard_of_a_stacked_weight_is_found() -> None:
    def rule(weight: Tensor, source: Tensor) -> None:
        weight.narrow(0, 10, 4).copy_(source.narrow(0, 8, 4))

    assert pieces_of(rule, of=(20, IN)) == [WeightSlice("qkv", (8, 12), (0, IN), 10, 0)]


def test_a_column_shard_is_found() -> None:
    found = pieces_of(lambda weight, source: weight.copy_(source[:, 4:8]), of=(OUT, 4))
    assert found == [WeightSlice("qkv", (0, OUT), (4, 8), 0, 0)]


def test_a_weight_that_is_loaded_in_parts_is_several_pieces() -> None:
    def rule(weight: Tensor, source: Tensor) -> None:
        for part in range(3):
            weight[8 * part : 8 * part + 4] = source[4 * part : 4 * part + 4]

    assert [(piece.rows, piece.top) for piece in pieces_of(rule, of=(24, IN))] == [
        ((0, 4), 0), ((4, 8), 8), ((8, 12), 16),
    ]  # fmt: skip


def test_a_weight_that_is_elsewhere_has_no_pieces() -> None:
    assert pieces_of(lambda weight, source: None) == []


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (lambda weight, source: weight.copy_(source.flip(0)), "computes something"),
        (lambda weight, source: weight.copy_(source * 2), "computes something"),
        (lambda weight, source: weight.copy_(source.reshape(IN, OUT).t()), "reorders"),
        (lambda weight, source: weight[::2].copy_(source[: OUT // 2]), "reorders"),
        (lambda weight, source: weight.add_(source), "not a plain copy"),
        (lambda weight, source: weight.copy_(source.narrow(0, 1, OUT)), "nothing that the served model can load"),
        (lambda weight, source: {}["q_proj"], "KeyError"),
    ],
)
def test_rules_that_do_more_than_copying_rectangles_are_refused(rule: Callable[..., Any], words: str) -> None:
    with pytest.raises(PlacementError, match=words):
        pieces_of(rule)


def test_the_projections_of_an_expert_are_parts_of_its_matrix() -> None:
    experts = torch.zeros(4, 2 * OUT, IN)

    def load_weights(weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, source in weights:
            rows = slice(0, OUT) if "gate" in name else slice(OUT, None)
            experts[2][rows].copy_(source)

    shapes = {"experts.2.gate_proj": (OUT, IN), "experts.2.up_proj": (OUT, IN)}
    found = trace_weight_slices(load_weights, {"w13": experts}, shapes, torch.bfloat16)
    [gate], [up] = found.values()
    assert gate == WeightSlice("w13", (0, OUT), (0, IN), 0, 0, 2)
    assert up == WeightSlice("w13", (0, OUT), (0, IN), OUT, 0, 2)
    assert not gate.overlaps(up)
    assert not gate.overlaps(replace(gate, expert=1))
    weight = torch.arange(experts.numel()).view_as(experts)
    assert torch.equal(part_of(weight, up), weight[2, OUT:])


def test_all_experts_in_one_tensor_are_refused() -> None:
    experts = torch.zeros(4, OUT, IN)

    def load_weights(weights: Iterable[tuple[str, Tensor]]) -> None:
        for _, source in weights:
            experts.copy_(source)

    with pytest.raises(PlacementError, match=r"of shape \(4, 12, 8\).*or of one expert"):
        trace_weight_slices(load_weights, {"w13": experts}, {"experts": (4, OUT, IN)}, torch.bfloat16)


def test_pieces_that_write_to_one_place_overlap() -> None:
    left, right = WeightSlice("w", (0, 4), (0, 4), 0, 0), WeightSlice("w", (0, 4), (0, 4), 3, 3)
    assert left.overlaps(right)
    assert not left.overlaps(WeightSlice("w", (0, 4), (0, 4), 4, 0))
    assert not left.overlaps(WeightSlice("other", (0, 4), (0, 4), 0, 0))


def test_copies_go_to_the_chosen_parameters_only() -> None:
    wanted, other = torch.zeros(OUT, IN), torch.zeros(OUT, IN)
    with copying_only([wanted]):
        wanted[2:4].copy_(torch.ones(2, IN))
        other.copy_(torch.ones(OUT, IN))
    assert wanted.sum() == 2 * IN
    assert other.sum() == 0


def test_of_several_weights_the_one_that_the_model_cannot_load_is_named() -> None:
    weight = torch.zeros(2 * OUT, IN)

    def load_weights(weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, source in weights:
            weight[{"q.weight": slice(0, OUT), "k.weight": slice(OUT, None)}[name]].copy_(source)

    shapes: dict[str, tuple[int, ...]] = {"q": (OUT, IN), "k": (OUT, IN)}
    assert set(trace_weight_slices(load_weights, {"qk": weight}, shapes, torch.bfloat16)) == {"q", "k"}
    with pytest.raises(PlacementError, match=r"^'v' with a weight of shape .*KeyError"):
        trace_weight_slices(load_weights, {"qk": weight}, {**shapes, "v": (OUT, IN)}, torch.bfloat16)
