"""Colocate tier, because Triton comes with vLLM: the kernels of fused serving, computed by Triton's interpreter."""

import os
import subprocess
import sys

import pytest

FUSING = """
import torch
from trl_lora_sync.engine_plugins.fused_kernel import launches_of

torch.manual_seed(0)
dtype = torch.float16  # NumPy, with which the interpreter computes, has no bfloat16


def normal(rows, columns, std):
    return (std * torch.randn(rows, columns)).to(dtype)


def job(weight, rank):
    rows, columns = weight.shape
    return weight, normal(rows, columns, 0.02), normal(rank, columns, 0.05), normal(rows, rank, 0.05)


whole = normal(200, 336, 0.02)
parts = [((70, 200), (0, 168)), ((0, 64), (168, 296))]
untouched = torch.ones_like(whole, dtype=torch.bool)
for rows, columns in parts:
    untouched[slice(*rows), slice(*columns)] = False
before = whole.clone()
views = [whole[slice(*rows), slice(*columns)] for rows, columns in parts]
odd = torch.zeros(65, 33, dtype=dtype)
wide = torch.zeros(65, 600, dtype=dtype)  # of several programs in a row
for jobs in (
    [job(view, 8) for view in views],  # all at multiples of 16 bytes
    [*(job(view, 8) for view in views), job(odd, 8)],
    [job(odd, 1), job(views[0], 70)],
    [job(wide, 32)],
    [job(wide, 33)],
):
    for launch in launches_of(jobs):
        launch.run(0.3)
    for weight, base, lora_A, lora_B in jobs:
        exact = base.double() + 0.3 * lora_B.double() @ lora_A.double()
        assert (weight.double() - exact).abs().max() <= exact.abs().max() * torch.finfo(dtype).eps * 0.501
assert torch.equal(whole[untouched], before[untouched])
print("right")
"""


FOLDING = """
import torch
from trl_lora_sync.engine_plugins import folding_kernels as kernels

torch.manual_seed(0)
dtype = torch.float16


def normal(rows, columns, std):
    return (std * torch.randn(rows, columns)).to(dtype)


for columns, rank in ((96, 8), (40, 3)):  # all at multiples of 16 bytes, and not
    weights = [normal(rows, columns, 0.02) for rows in (64, 130, 40)]
    matrices = [(normal(rank, columns, 0.05), normal(len(weight), rank, 0.05)) for weight in weights]
    before = [weight.clone() for weight in weights]
    table = kernels.make_table(weights, matrices)
    sums, counts = kernels.bit_sums(table), kernels.count_lost(table)
    products = [lora_B.float() @ lora_A.float() for lora_A, lora_B in matrices]
    there = [(old.float() + product).half() for old, product in zip(before, products)]
    lost = [int(((new.float() - p).half() != old).sum()) for new, p, old in zip(there, products, before)]
    assert all(abs(count - exact) <= 3 for count, exact in zip(counts, lost)), (counts, lost)
    total = sum(counts)
    assert total > 100
    for first, room in ((0, total), (0, total + 9), (0, total - 1), (0, total // 2), (0, 0), (1, sum(counts[1:]))):
        kept = kernels.fold(table, range(first, 3), room)
        assert int(kept.count) == sum(counts[first:])
        assert kept.is_whole() is (room >= int(kept.count))
        is_there = [
            torch.allclose(weight.double(), old.double() + product.double(), rtol=1e-3, atol=1e-7)
            for weight, old, product in zip(weights, before, products)
        ]
        if kept.is_whole():
            assert is_there == [False] * first + [True] * (3 - first)
        else:
            assert not all(is_there)
        found = torch.zeros_like(sums)
        kernels.take_out(table, range(first, 3), kept, found)
        assert all(map(torch.equal, weights, before))
        assert found[:first].tolist() == [0] * first
        assert torch.equal(found[first:], sums[first:])
    weights[1].view(torch.int16)[3, 5] ^= 1
    assert (kernels.bit_sums(table) != sums).tolist() == [False, True, False]
print("right")
"""


@pytest.mark.parametrize("program", [FUSING, FOLDING], ids=["each rectangle rounded once", "folded and taken out"])
def test_kernels_write_what_they_are_to_write_and_nothing_else(program: str) -> None:
    # In another process, as Triton reads the variable when it is imported.
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.stdout.split() == ["right"], ended.stderr[-2000:]
