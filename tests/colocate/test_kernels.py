"""Colocate tier, because Triton comes with vLLM: the kernel of fused serving, computed by Triton's interpreter."""

import os
import subprocess
import sys

# In a process of its own, as Triton reads the variable when it is imported.
PROGRAM = """
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
for jobs in (
    [job(view, 8) for view in views],  # all at multiples of 16 bytes
    [*(job(view, 8) for view in views), job(odd, 8)],
    [job(odd, 1), job(views[0], 70)],
):
    for launch in launches_of(jobs):
        launch.run(0.3)
    for weight, base, lora_A, lora_B in jobs:
        exact = base.double() + 0.3 * lora_B.double() @ lora_A.double()
        assert (weight.double() - exact).abs().max() <= exact.abs().max() * torch.finfo(dtype).eps * 0.501
assert torch.equal(whole[untouched], before[untouched])
print("right")
"""


def test_one_launch_writes_each_rectangle_rounded_once_and_nothing_else() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.stdout.split() == ["right"], ended.stderr[-2000:]
