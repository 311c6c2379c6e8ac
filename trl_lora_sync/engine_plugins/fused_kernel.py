"""W0 + scaling * lora_B @ lora_A for many weights in one launch, for GPUs; needs Triton, which vLLM brings along there.

cuBLAS copies W0 to where the sum goes, and reads it once more from there; what it then writes differs from the sum that
is rounded once in one of ten elements (bfloat16, rank 32, torch 2.11 on an H200).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _WARPS = 64, 4
# Triton's `dot` takes no inner dimension below 16 on NVIDIA GPUs.
_LEAST_RANK, _MOST_RANK = 16, 64  # of one product of tiles
_FIELDS = tl.constexpr(13)  # of an entry of the table
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# Up to this rank a program holds its rows of lora_B in registers, and writes one tile after the other while the next
# one's base is on its way. For 8B on an H200 this takes 7.5 ms instead of 8.2, and a copy of the base 7.3. At rank 64
# there are too few registers, and it takes 9.5 instead of 9.2.
_HELD_RANK = 32
# Columns of a tile, and tiles of a program.
_HELD, _READ_AGAIN = (64, 4), (128, 1)
# Elements that a thread reads at once, if they begin at multiples of 16 bytes.
_ELEMENTS = tl.constexpr(8)
_BYTES = tl.constexpr(16)
# Weight, base, lora_A and lora_B of one rectangle.
Job = tuple[Tensor, Tensor, Tensor, Tensor]


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _fuse(  # type: ignore[no-untyped-def]  # Triton reads annotations as Triton types
    entries, entry_of, scaling,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr, RANK: tl.constexpr, DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr, B_ALIGNED: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    entry = entries + tl.load(entry_of + number).to(tl.int64) * _FIELDS
    rows, columns = tl.load(entry).to(tl.int32), tl.load(entry + 1).to(tl.int32)
    rank = tl.load(entry + 2).to(tl.int32)
    place = number - tl.load(entry + 3).to(tl.int32)
    in_row = tl.load(entry + 4).to(tl.int32)
    weight = tl.load(entry + 5).to(tl.pointer_type(DTYPE))
    base = tl.load(entry + 6).to(tl.pointer_type(DTYPE))
    lora_A = tl.load(entry + 7).to(tl.pointer_type(DTYPE))
    lora_B = tl.load(entry + 8).to(tl.pointer_type(DTYPE))
    weight_stride, base_stride = tl.load(entry + 9), tl.load(entry + 10)
    a_stride, b_stride = tl.load(entry + 11), tl.load(entry + 12)
    if ALIGNED:  # without this, Triton reads 2 bytes at a time
        weight, base = tl.multiple_of(weight, _BYTES), tl.multiple_of(base, _BYTES)
        lora_A = tl.multiple_of(lora_A, _BYTES)
        columns = tl.multiple_of(columns, _ELEMENTS)
        weight_stride, base_stride = tl.multiple_of(weight_stride, _ELEMENTS), tl.multiple_of(base_stride, _ELEMENTS)
        a_stride = tl.multiple_of(a_stride, _ELEMENTS)
    if B_ALIGNED:
        lora_B, b_stride = tl.multiple_of(lora_B, _BYTES), tl.multiple_of(b_stride, _ELEMENTS)
        rank = tl.multiple_of(rank, _ELEMENTS)
    row = (place // in_row) * ROWS + tl.arange(0, ROWS)
    column = (place % in_row) * (COLUMNS * TILES) + tl.arange(0, COLUMNS)
    in_rows = (row < rows)[:, None]
    row = row.to(tl.int64)[:, None]  # embeddings have more elements than 32 bits count
    # Before the product, so that it is on its way meanwhile; it took 9.3 instead of 8.2 ms after it.
    kept = tl.load(base + row * base_stride + column[None, :], mask=in_rows & (column < columns)[None, :], other=0.0)
    if TILES > 1:
        k = tl.arange(0, RANK)
        b = tl.load(lora_B + row * b_stride + k[None, :], mask=in_rows & (k < rank)[None, :], other=0.0)
    for tile in tl.static_range(TILES):
        in_columns = (column < columns)[None, :]
        if tile + 1 < TILES:
            after = column + COLUMNS
            following = tl.load(
                base + row * base_stride + after[None, :], mask=in_rows & (after < columns)[None, :], other=0.0
            )
        product = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        if TILES > 1:
            a = tl.load(
                lora_A + k[:, None] * a_stride + column[None, :], mask=(k < rank)[:, None] & in_columns, other=0.0
            )
            product = tl.dot(b, a, product)
        else:
            # Up to the rank of this weight at run time, as the weights of one launch may have different ranks.
            for start in range(0, rank, RANK):
                k = start + tl.arange(0, RANK)
                b = tl.load(lora_B + row * b_stride + k[None, :], mask=in_rows & (k < rank)[None, :], other=0.0)
                a = tl.load(
                    lora_A + k[:, None] * a_stride + column[None, :], mask=(k < rank)[:, None] & in_columns, other=0.0
                )
                product = tl.dot(b, a, product)
        result = kept.to(tl.float32) + scaling * product
        tl.store(weight + row * weight_stride + column[None, :], result.to(DTYPE), mask=in_rows & in_columns)
        if tile + 1 < TILES:
            kept, column = following, after


class Launch(NamedTuple):
    """Rectangles that are written at once, as the kernel takes them.

    Attributes:
        table: int64 of shape `(rectangles, 13)`.
        owners: see `owners_of_tiles`.
    """

    table: Tensor
    owners: Tensor
    options: dict[str, Any]

    def run(self, scaling: float) -> None:
        """Write base + scaling * lora_B @ lora_A to each weight. Accumulates in float32, rounds once."""
        _fuse[(len(self.owners),)](self.table, self.owners, scaling, **self.options)


def launches_of(jobs: Sequence[Job]) -> list[Launch]:
    """What writes these tensors, with whatever they hold at that time; valid as long as they have their memory.

    Args:
        jobs: tensors of the shapes `(out_features, in_features)` twice, `(r, in_features)` and `(out_features, r)`. The
            base may be the weight; no two weights overlap. All have one 16-bit dtype, are on one GPU, and have the
            elements of a row side by side.
    """
    # Alignment is compiled in, so one weight that is not aligned would slow down all others of its launch.
    groups: dict[tuple[bool, bool], list[Job]] = {}
    for job in jobs:
        groups.setdefault(_alignment(job), []).append(job)
    return [
        _launch(group, is_aligned=is_aligned, is_b_aligned=is_b_aligned)
        for (is_aligned, is_b_aligned), group in groups.items()
    ]


def _alignment(job: Job) -> tuple[bool, bool]:
    """Whether all rows of the weight, its base and lora_A begin at multiples of 16 bytes; and all rows of lora_B."""
    *begins, b_begins = [not (one.data_ptr() % _BYTES.value or one.stride(0) % _ELEMENTS.value) for one in job]
    columns, rank = job[0].shape[1], job[2].shape[0]
    return all(begins) and not columns % _ELEMENTS.value, b_begins and not rank % _ELEMENTS.value


def _launch(jobs: Sequence[Job], *, is_aligned: bool, is_b_aligned: bool) -> Launch:
    device, dtype = jobs[0][0].device, jobs[0][0].dtype
    largest = max(job[2].shape[0] for job in jobs)
    width, tiles = _HELD if largest <= _HELD_RANK else _READ_AGAIN
    entries, first_places = [], [0]
    for job in jobs:
        (rows, columns), rank = job[0].shape, job[2].shape[0]
        in_row = triton.cdiv(columns, width * tiles)
        addresses, strides = [one.data_ptr() for one in job], [one.stride(0) for one in job]
        entries.append([rows, columns, rank, first_places[-1], in_row, *addresses, *strides])
        first_places.append(first_places[-1] + triton.cdiv(rows, _ROWS) * in_row)
    return Launch(
        torch.tensor(entries, dtype=torch.int64).to(device),
        owners_of_tiles(first_places, device),
        {
            "ROWS": _ROWS,
            "COLUMNS": width,
            "TILES": tiles,
            # `k < rank` masks what smaller ranks lack.
            "RANK": rank_of_tiles(largest),
            "DTYPE": DTYPES[dtype],
            "ALIGNED": is_aligned,
            "B_ALIGNED": is_b_aligned,
            "num_warps": _WARPS,
        },
    )


def owners_of_tiles(first_tiles: Sequence[int], device: torch.device) -> Tensor:
    """int32 of shape `(tiles,)`, the number of the weight that each tile is of.

    Args:
        first_tiles: of each weight, and the number of all tiles.
    """
    numbers = torch.arange(len(first_tiles) - 1, dtype=torch.int32, device=device)
    # Without `output_size`, torch would wait for the device to find it out.
    return numbers.repeat_interleave(torch.tensor(first_tiles).diff().to(device), output_size=first_tiles[-1])


def rank_of_tiles(rank: int) -> int:
    """The inner dimension of one product of tiles."""
    return int(min(_MOST_RANK, max(_LEAST_RANK, triton.next_power_of_2(rank))))
