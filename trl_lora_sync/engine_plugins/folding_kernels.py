"""Folding an adapter into many weights in one launch, for GPUs; needs Triton, which vLLM brings along there.

A launch for each weight, and waiting for how much of it has to be kept, took 0.1 s for 252 weights of an 8B model
(H100), of which the memory needs 0.01 s.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

# A thread has 32 elements of a tile. With 64, and with places of 64 bits, its values do not fit into registers.
_ROWS, _COLUMNS, _WARPS = 64, 64, 4
_LEAST_RANK, _MOST_RANK = 16, 64  # of one product of tiles
_BLOCK, _BLOCKS = 1024, 32  # of kept values: of one step of a program, and how many programs a weight has
_FIELDS = tl.constexpr(7)  # of an entry of the table
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class Table:
    """Weights and the adapter for them, as the kernels find them.

    Attributes:
        entries: int64 of shape `(weights, 7)`: address, rows, columns, its first tile, its tiles in a row, and the
            addresses of lora_A and lora_B.
        weight_of: int32 of shape `(tiles,)`, the number of the weight that a tile is of.
        rank: of the adapter.
        is_aligned: whether all rows begin at multiples of 16 bytes.
        held: the tensors at these addresses.
    """

    entries: Tensor
    weight_of: Tensor
    rank: int
    dtype: torch.dtype
    is_aligned: bool
    held: Sequence[Tensor]


def make_table(weights: Sequence[Tensor], matrices: Sequence[tuple[Tensor, Tensor]] | None = None) -> Table:
    """Describe weights that are contiguous, on one GPU, of one 16-bit dtype, and of less than 2 to the 31 elements.

    Args:
        weights: `(out_features, in_features)` each.
        matrices: `(r, in_features)` and `(out_features, r)` for each, of the same dtype and of one rank.
    """
    device = weights[0].device
    pairs = [(a.contiguous(), b.contiguous()) for a, b in matrices] if matrices else [(one, one) for one in weights]
    rows_of, first, tiles_of = [], 0, []
    for weight, (lora_A, lora_B) in zip(weights, pairs, strict=True):
        rows, columns = weight.shape
        in_row = triton.cdiv(columns, _COLUMNS)
        rows_of.append([weight.data_ptr(), rows, columns, first, in_row, lora_A.data_ptr(), lora_B.data_ptr()])
        tiles_of.append(triton.cdiv(rows, _ROWS) * in_row)
        first += tiles_of[-1]
    numbers = torch.arange(len(weights), dtype=torch.int32, device=device)
    return Table(
        entries=torch.tensor(rows_of, dtype=torch.int64).to(device),
        weight_of=numbers.repeat_interleave(torch.tensor(tiles_of).to(device), output_size=first),
        rank=pairs[0][0].shape[0] if matrices else 0,
        dtype=weights[0].dtype,
        is_aligned=all(
            not (address % 16 or columns % 16 or a % 16 or b % 16) for address, _, columns, _, _, a, b in rows_of
        ),
        held=[*weights, *(one for pair in pairs for one in pair)],
    )


def count_lost(table: Table) -> list[int]:
    """Of each weight, how many elements are others after `fold` and `take_out`; changes nothing."""
    counts = torch.zeros(len(table.entries), dtype=torch.int64, device=table.entries.device)
    _visit(table, counts, counts, counts, counts, mode="count")
    found: list[int] = counts.tolist()
    return found


def fold(table: Table, counts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Add lora_B @ lora_A to each weight, accumulated in float32 and rounded once.

    Args:
        counts: what `count_lost` returned.

    Returns:
        What `restore` needs of the elements that `take_out` will not bring back, weight by weight and in any order
        within a weight: int64, where each weight's begin; int32, their places in the flattened weight; int16, the bits
        that they held.
    """
    device = table.entries.device
    starts = torch.tensor(list(accumulate(counts, initial=0)), dtype=torch.int64).to(device)
    places = torch.empty(sum(counts), dtype=torch.int32, device=device)
    values = torch.empty(sum(counts), dtype=torch.int16, device=device)
    _visit(table, starts, starts[:-1].clone(), places, values, mode="fold")
    return starts, places, values


def take_out(table: Table) -> None:
    """Subtract from each weight what `fold` has added."""
    _visit(table, table.entries, table.entries, table.entries, table.entries, mode="take out")


def restore(table: Table, starts: Tensor, places: Tensor, values: Tensor) -> None:
    """Write back the elements that `take_out` has not brought back; arguments as `fold` has left them."""
    _restore[(len(table.entries), _BLOCKS)](table.entries, starts, places, values, BLOCK=_BLOCK, BLOCKS=_BLOCKS)


def bit_sums(table: Table) -> Tensor:
    """For each weight, the sum of its elements' bits, each times an odd number of its place, modulo 2 to the 64."""
    sums = torch.zeros(len(table.entries), dtype=torch.int64, device=table.entries.device)
    _visit(table, sums, sums, sums, sums, mode="sum")
    return sums


def _visit(table: Table, found: Tensor, ends: Tensor, places: Tensor, values: Tensor, *, mode: str) -> None:
    _visit_tile[(len(table.weight_of),)](
        table.entries, table.weight_of, found, ends, places, values, table.rank,
        ROWS=_ROWS, COLUMNS=_COLUMNS, RANK=min(_MOST_RANK, max(_LEAST_RANK, triton.next_power_of_2(table.rank))),
        DTYPE=_DTYPES[table.dtype], ALIGNED=table.is_aligned, MODE=mode, num_warps=_WARPS,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _visit_tile(  # type: ignore[no-untyped-def]  # Triton reads annotations as Triton types
    entries, weight_of, found, ends, places, values, rank,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
    MODE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    index = tl.load(weight_of + tile)
    entry = entries + index.to(tl.int64) * _FIELDS
    address = tl.load(entry)
    rows, columns = tl.load(entry + 1).to(tl.int32), tl.load(entry + 2).to(tl.int32)
    if ALIGNED:  # without this, Triton reads 2 bytes at a time
        columns = tl.multiple_of(columns, 16)
    tile = tile - tl.load(entry + 3).to(tl.int32)
    in_row = tl.load(entry + 4).to(tl.int32)
    row = (tile // in_row) * ROWS + tl.arange(0, ROWS)
    column = (tile % in_row) * COLUMNS + tl.arange(0, COLUMNS)
    in_rows, in_columns = (row < rows)[:, None], (column < columns)[None, :]
    inside = in_rows & in_columns
    place = row[:, None] * columns + column[None, :]
    if MODE == "sum":
        words = address.to(tl.pointer_type(tl.int16))
        if ALIGNED:
            words = tl.multiple_of(words, 16)
        bits = tl.load(words + place, mask=inside, other=0).to(tl.int64)
        tl.atomic_add(found + index, tl.sum(tl.sum(bits * (2 * place.to(tl.int64) + 1), 1), 0))
    else:
        lora_A = tl.load(entry + 5).to(tl.pointer_type(DTYPE))
        lora_B = tl.load(entry + 6).to(tl.pointer_type(DTYPE))
        weight = address.to(tl.pointer_type(DTYPE))
        if ALIGNED:  # of a pointer, in bytes
            lora_A, lora_B, weight = tl.multiple_of(lora_A, 16), tl.multiple_of(lora_B, 16), tl.multiple_of(weight, 16)
        product = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in range(0, rank, RANK):
            k = start + tl.arange(0, RANK)
            b = tl.load(lora_B + row[:, None] * rank + k[None, :], mask=in_rows & (k < rank)[None, :], other=0.0)
            a = tl.load(
                lora_A + k[:, None] * columns + column[None, :], mask=(k < rank)[:, None] & in_columns, other=0.0
            )
            product = tl.dot(b, a, product)
        before = tl.load(weight + place, mask=inside, other=0.0)
        if MODE == "take out":
            tl.store(weight + place, (before.to(tl.float32) - product).to(DTYPE), mask=inside)
        else:
            folded = (before.to(tl.float32) + product).to(DTYPE)
            back = (folded.to(tl.float32) - product).to(DTYPE)
            is_lost = (back.to(tl.int16, bitcast=True) != before.to(tl.int16, bitcast=True)) & inside
            lost = tl.reshape(is_lost.to(tl.int32), (ROWS * COLUMNS,))
            count = tl.sum(lost, 0)
            if MODE == "count":
                tl.atomic_add(found + index, count.to(tl.int64))
            else:
                if count > 0:
                    first = tl.atomic_add(ends + index, count.to(tl.int64))
                    to = tl.cumsum(lost, 0) - lost
                    tl.store(places + first + to, tl.reshape(place, (ROWS * COLUMNS,)), mask=lost > 0)
                    bits = tl.reshape(before.to(tl.int16, bitcast=True), (ROWS * COLUMNS,))
                    tl.store(values + first + to, bits, mask=lost > 0)
                tl.store(weight + place, folded, mask=inside)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _restore(entries, starts, places, values, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0)
    weight = tl.load(entries + index.to(tl.int64) * _FIELDS).to(tl.pointer_type(tl.int16))
    end = tl.load(starts + index + 1)
    for start in range(tl.load(starts + index) + tl.program_id(1) * BLOCK, end, BLOCK * BLOCKS):
        at = start + tl.arange(0, BLOCK)
        is_kept = at < end
        place = tl.load(places + at, mask=is_kept, other=0)
        tl.store(weight + place, tl.load(values + at, mask=is_kept, other=0), mask=is_kept)
