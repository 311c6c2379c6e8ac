"""Unit tier: an adapter in weights that are shared, and the way back bit for bit."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.interrupts import Interrupts
from torch import Tensor

from trl_lora_sync.engine_plugins import folded_base
from trl_lora_sync.engine_plugins.folded_base import BaseChangedError, FoldedBase

SHAPES = [(48, 32), (16, 64), (130, 24)]
R = 4
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.outside,  # Triton starts a compiler, and without it the kernels are not used
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def weights_of(dtype: torch.dtype, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(shape, generator=generator) * 0.05).to(device, dtype) for shape in SHAPES]


def matrices_of(dtype: torch.dtype, device: str, size: float = 0.05) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * size).to(device, dtype)

    return [(random(R, columns), random(rows, R)) for rows, columns in SHAPES]


def bits(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.clone().view(torch.int16 if tensor.element_size() == 2 else torch.int32) for tensor in tensors]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(map(torch.equal, left, right))


@pytest.fixture(autouse=True)
def _grad_mode() -> Iterator[None]:
    with torch.enable_grad():  # as in a trainer
        yield


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [0.0, 1e-3, 0.05, 1.0])
def test_folded_weights_hold_the_sum_rounded_once_and_come_back_bit_for_bit(
    size: float, dtype: torch.dtype, device: str
) -> None:
    weights, matrices = weights_of(dtype, device), matrices_of(dtype, device, size)
    before = bits(weights)
    base = FoldedBase(weights)
    assert base.has_kernels is (device == "cuda" and dtype != torch.float32)
    expected = [
        (weight.double() + lora_B.double() @ lora_A.double()).to(dtype)
        for weight, (lora_A, lora_B) in zip(weights, matrices, strict=True)
    ]
    for _ in range(50):
        base.fold(matrices)
        for weight, wanted in zip(weights, expected, strict=True):
            # The product in float32 may be off by its last bits, which shows where it is just between two values.
            torch.testing.assert_close(weight.float(), wanted.float(), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
        base.unfold()
        assert same(bits(weights), before)
    if size:
        base.fold(matrices)
        assert not same(bits(weights), before)
        base.unfold()


@pytest.mark.parametrize("device", DEVICES)
def test_zeros_of_both_signs_and_the_largest_values_come_back(device: str) -> None:
    weights = weights_of(torch.bfloat16, device)
    weights[0].view(-1)[:4] = torch.tensor([0.0, -0.0, torch.finfo(torch.bfloat16).max, 1e-38], dtype=torch.bfloat16)
    before = bits(weights)
    base = FoldedBase(weights)
    base.fold(matrices_of(torch.bfloat16, device, 1.0))
    base.unfold()
    assert same(bits(weights), before)


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("share_on_device", [1.0, 1e-3], ids=["all on the device", "one weight at a time, on the host"])
@pytest.mark.parametrize("columns", [192, 100], ids=["aligned", "not aligned"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rank", [1, 8, 32, 70])
def test_kernels_bring_weights_of_many_tiles_back(
    rank: int,
    dtype: torch.dtype,
    columns: int,
    share_on_device: float,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(folded_base, "SHARE_ON_DEVICE", share_on_device)
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) * 0.05).to(dtype)

    weights = [random(rows, columns) for rows in (64, 200, 130, 70)]
    matrices = [(random(rank, columns), random(weight.shape[0], rank)) for weight in weights]
    matrices[1] = (matrices[1][0] * 1000, matrices[1][1])  # of this one, a copy is kept
    before, base = bits(weights), FoldedBase(weights)
    assert base.has_kernels
    base.fold(matrices)
    for weight, old, (lora_A, lora_B) in zip(weights, before, matrices, strict=True):
        wanted = old.view(dtype).float() + lora_B.float() @ lora_A.float()
        torch.testing.assert_close(weight.float(), wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)
    base.unfold()
    assert same(bits(weights), before)


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("columns", [192, 100], ids=["aligned", "not aligned"])
def test_kernels_have_room_for_what_the_adapter_before_kept_or_fold_again(
    columns: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folded_base, "SHARE_ON_DEVICE", 1.0)
    monkeypatch.setattr(folded_base, "SPARE_ELEMENTS", 8)
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device) * 0.05

    weights = [random(rows, columns).bfloat16() for rows in (640, 200, 130)]
    lora = [(random(R, columns), random(weight.shape[0], R)) for weight in weights]
    before, base, kept = bits(weights), FoldedBase(weights), []
    for size in (0.0, 0.1, 1.0, 1.0, 1.1, 0.5, 20.0, 20.0):
        matrices = [((size * a).bfloat16(), b.bfloat16()) for a, b in lora]
        base.fold(matrices)
        kept.append(base.kept_bytes)
        for weight, old, (lora_A, lora_B) in zip(weights, before, matrices, strict=True):
            wanted = old.view(torch.bfloat16).float() + lora_B.float() @ lora_A.float()
            torch.testing.assert_close(weight.float(), wanted, rtol=2 * torch.finfo(torch.bfloat16).eps, atol=1e-5)
        base.unfold()
        assert same(bits(weights), before)
    assert kept[0] < kept[1] < kept[2] < kept[3]  # with room to spare the second time
    assert not base.has_changed()
    weights[1].view(torch.int16)[3, 5] ^= 1
    assert base.has_changed()
    with pytest.raises(BaseChangedError, match="1 of 3 weights"):
        base.unfold()


def test_views_of_one_tensor_fold_each_for_itself() -> None:
    """As q, k and v are rows of one parameter of vLLM."""
    whole = torch.randn(96, 32, generator=torch.Generator().manual_seed(3)).bfloat16()
    before = whole.clone()
    base = FoldedBase([whole[:48], whole[48:64]])
    ones = torch.ones(R, 32).bfloat16(), torch.ones(16, R).bfloat16()
    base.fold([*matrices_of(torch.bfloat16, "cpu")[:1], ones])
    assert torch.equal(whole[64:], before[64:])
    assert not torch.equal(whole[48:64], before[48:64])
    base.unfold()
    assert torch.equal(whole, before)


def test_what_is_kept_is_small_for_a_small_update_and_never_more_than_the_weights() -> None:
    weights = weights_of(torch.bfloat16, "cpu")
    total = sum(weight.nbytes for weight in weights)
    kept = []
    for size in (1e-3, 0.05, 10.0):
        base = FoldedBase(weights)
        base.fold(matrices_of(torch.bfloat16, "cpu", size))
        kept.append(base.kept_bytes)
        base.unfold()
    assert kept[0] < 0.02 * total < kept[1] <= kept[2] <= total


def test_rows_are_folded_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, matrices = weights_of(torch.bfloat16, "cpu"), matrices_of(torch.bfloat16, "cpu")
    before, base = bits(weights), FoldedBase(weights)
    base.fold(matrices)
    at_once = bits(weights)
    base.unfold()
    monkeypatch.setattr(folded_base, "ELEMENTS_OF_FLOATS", 64)
    base.fold(matrices)
    assert same(bits(weights), at_once)
    base.unfold()
    assert same(bits(weights), before)


def test_autocast_of_the_trainer_changes_nothing() -> None:
    weights, matrices = weights_of(torch.float32, "cpu"), matrices_of(torch.float32, "cpu")
    base = FoldedBase(weights)
    base.fold(matrices)
    plain = bits(weights)
    base.unfold()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        base.fold(matrices)
    assert same(bits(weights), plain)
    base.unfold()


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        (torch.backends, "fp32_precision", "tf32"),
        (torch.backends.cuda.matmul, "allow_tf32", True),
        (torch.backends.cuda.matmul, "allow_tf32", False),
    ],
    ids=["new setting", "old setting", "old setting off"],
)
@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch before 2.9")
def test_tf32_of_the_trainer_is_off_while_an_adapter_is_folded_and_kept_afterwards(
    flags: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `tf32=True`, torch refused to read `allow_tf32`, and no adapter could be folded."""
    matmul, product, seen = torch.backends.cuda.matmul, folded_base.product_of, []

    def noted(*matrices: Tensor) -> Tensor:
        seen.append(matmul.fp32_precision)
        return product(*matrices)

    monkeypatch.setattr(folded_base, "product_of", noted)
    untouched = getattr(flags, name), matmul.fp32_precision
    try:
        setattr(flags, name, value)
        setting, base = matmul.fp32_precision, FoldedBase(weights_of(torch.bfloat16, "cpu"))
        base.fold(matrices_of(torch.bfloat16, "cpu"))
        base.unfold()
        assert set(seen) == {"ieee"}
        assert (getattr(flags, name), matmul.fp32_precision) == (value, setting)
    finally:
        setattr(flags, name, untouched[0])
        matmul.fp32_precision = untouched[1]  # last, as the old setting sets it too


@pytest.mark.parametrize("failing_call", [1, 2, 3])
def test_failure_while_folding_leaves_the_weights_as_they_were(
    failing_call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = weights_of(torch.bfloat16, "cpu")
    before, base = bits(weights), FoldedBase(weights)
    product, calls = folded_base.product_of, []

    def fails(*matrices: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 2 * failing_call:  # the product of the sum; the one before looks at what would be lost
            raise torch.OutOfMemoryError("no memory left")
        return product(*matrices)

    monkeypatch.setattr(folded_base, "product_of", fails)
    with pytest.raises(torch.OutOfMemoryError):
        base.fold(matrices_of(torch.bfloat16, "cpu"))
    assert not base.is_folded
    assert same(bits(weights), before)


def test_failure_while_unfolding_can_be_made_good(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = weights_of(torch.bfloat16, "cpu")
    before, base = bits(weights), FoldedBase(weights)
    base.fold(matrices_of(torch.bfloat16, "cpu"))
    with monkeypatch.context() as patch:
        patch.setattr(
            folded_base, "product_of", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("no memory left"))
        )
        with pytest.raises(torch.OutOfMemoryError):
            base.unfold()
    assert base.is_folded
    base.unfold()
    assert same(bits(weights), before)


def test_interrupt_waits_until_the_weights_are_in_one_state(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = weights_of(torch.bfloat16, "cpu")
    before, base = bits(weights), FoldedBase(weights)
    product: Any = folded_base.product_of

    def interrupted(*matrices: Tensor) -> Tensor:
        os.kill(os.getpid(), signal.SIGINT)
        return product(*matrices)

    with monkeypatch.context() as patch:
        patch.setattr(folded_base, "product_of", interrupted)
        with pytest.raises(KeyboardInterrupt):
            base.fold(matrices_of(torch.bfloat16, "cpu"))
    assert not base.is_folded
    assert same(bits(weights), before)
    base.fold(matrices_of(torch.bfloat16, "cpu"))
    with monkeypatch.context() as patch:
        patch.setattr(folded_base, "product_of", interrupted)
        with pytest.raises(KeyboardInterrupt):
            base.unfold()
    assert not base.is_folded
    assert same(bits(weights), before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_any_point_leaves_the_handlers_and_the_weights_in_one_state(number: signal.Signals) -> None:
    """With an unlucky one, each later signal of the other kind was noted and never handled."""

    def end(*given: object) -> None:
        raise KeyboardInterrupt

    weights = weights_of(torch.bfloat16, "cpu")
    before, base = bits(weights), FoldedBase(weights)

    def fold_and_unfold() -> None:
        base.fold(matrices_of(torch.bfloat16, "cpu"))
        base.unfold()

    own = {one: signal.signal(one, end) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        modules = {"signal", "trl_lora_sync.engine_plugins.folded_base"}
        interrupts = Interrupts(modules, lambda: os.kill(os.getpid(), number))
        while not interrupts.is_over:
            interrupts.call(fold_and_unfold)
            assert {signal.getsignal(one) for one in own} == {end}
            if base.is_folded:
                base.unfold()
            assert same(bits(weights), before)
        assert interrupts.place > 11
    finally:
        for one, handler in own.items():
            signal.signal(one, handler)


def test_write_to_a_folded_weight_from_elsewhere_is_noticed() -> None:
    weights = weights_of(torch.bfloat16, "cpu")
    base = FoldedBase(weights)
    base.fold(matrices_of(torch.bfloat16, "cpu"))
    weights[1].view(torch.int16)[3, 5] ^= 1
    with pytest.raises(BaseChangedError, match="1 of 3 weights"):
        base.unfold()
