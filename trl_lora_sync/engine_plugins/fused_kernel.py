"""W0 + scaling * lora_B @ lora_A in one pass over the weights, for GPUs; needs Triton, which vLLM brings along there.

cuBLAS copies W0 to where the sum goes, and reads it once more from there; what it then writes differs from the sum that
is rounded once in one of ten elements (bfloat16, rank 32, torch 2.11 on an H200).
"""

import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLUMNS, _WARPS = 64, 128, 4
# Triton's `dot` takes no inner dimension below 16 on NVIDIA GPUs.
_LEAST_RANK, _MOST_RANK = 16, 64  # of one product of tiles


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _fuse(  # type: ignore[no-untyped-def]  # Triton reads annotations as Triton types
    weight, base, lora_A, lora_B, scaling, rows, columns, rank, weight_stride, base_stride, a_stride, b_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_rows, in_columns = (row < rows)[:, None], (column < columns)[None, :]
    product = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, rank, RANK):
        k = start + tl.arange(0, RANK)
        b = tl.load(lora_B + row[:, None] * b_stride + k[None, :], mask=in_rows & (k < rank)[None, :], other=0.0)
        a = tl.load(lora_A + k[:, None] * a_stride + column[None, :], mask=(k < rank)[:, None] & in_columns, other=0.0)
        product = tl.dot(b, a, product)
    inside = in_rows & in_columns
    row = row.to(tl.int64)[:, None]  # embeddings have more elements than 32 bits count
    kept = tl.load(base + row * base_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    fused = (kept + scaling * product).to(weight.dtype.element_ty)
    tl.store(weight + row * weight_stride + column[None, :], fused, mask=inside)


def fuse_tiles(weight: Tensor, base: Tensor, lora_A: Tensor, lora_B: Tensor, scaling: float) -> None:
    """Write base + scaling * lora_B @ lora_A to `weight`, which may be `base`. Accumulates in float32, rounds once.

    Args:
        weight, base: `(out_features, in_features)`.
        lora_A, lora_B: `(r, in_features)` and `(out_features, r)`. All four have one 16-bit dtype, are on one GPU, and
            have the elements of a row side by side.
    """
    rows, columns = weight.shape
    rank = lora_A.shape[0]
    grid = (triton.cdiv(rows, _ROWS), triton.cdiv(columns, _COLUMNS))
    _fuse[grid](
        weight, base, lora_A, lora_B, scaling, rows, columns, rank,
        weight.stride(0), base.stride(0), lora_A.stride(0), lora_B.stride(0),
        ROWS=_ROWS, COLUMNS=_COLUMNS, RANK=min(_MOST_RANK, max(_LEAST_RANK, triton.next_power_of_2(rank))),
        num_warps=_WARPS,
    )  # fmt: skip
