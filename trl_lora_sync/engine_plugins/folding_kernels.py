"""Folding an adapter into many weights in one launch, for GPUs; needs Triton, which vLLM brings along there.

A launch for each weight, and waiting for how much of it has to be kept, took 0.1 s for 252 weights of an 8B model
(H100), of which the memory needs 0.01 s.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from trl_lora_sync.engine_plugins.fused_kernel import DTYPES, owners_of_tiles, rank_of_tiles

# A thread has 32 elements of a tile. With 64, its values do not fit into registers.
_ROWS, _COLUMNS, _WARPS = 64, 64, 4
# A tile waits for memory most of the time. With fewer registers for each, more of them run at a time: 14 ms instead of
# 15.5 for 252 weights of an 8B model (H100).
_REGISTERS = {"fold": 88}
_FIELDS = tl.constexpr(7)  # of an entry of the table
_BLOCK = tl.constexpr(256)  # of kept elements, of one step


@dataclass(frozen=True)
class Table:
    """Weights and the adapter for them, as the kernels find them.

    Attributes:
        entries: int64 of shape `(weights, 7)`: address, rows, columns, its first tile, its tiles in a row, and the
            addresses of lora_A and lora_B.
        weight_of: int32 of shape `(tiles,)`, the number of the weight that a tile is of.
        first_tiles: of each weight, and the number of all tiles.
        rank: of the adapter.
        is_aligned: whether all rows begin at multiples of 16 bytes.
        held: the tensors at these addresses.
    """

    entries: Tensor
    weight_of: Tensor
    first_tiles: Sequence[int]
    rank: int
    dtype: torch.dtype
    is_aligned: bool
    held: Sequence[Tensor]


@dataclass(frozen=True)
class Kept:
    """What `take_out` needs of the elements that subtraction does not bring back, tile by tile in any order.

    Attributes:
        words: int32, the place in the tile in the upper half, and the bits that were there in the lower half.
        spans: int32 of shape `(tiles, 2)`, where the words of a tile begin and end; -1 for a tile that was not folded,
            as there was no room for its words.
        count: int64 of shape `(1,)`, how many words there would be with room for all.
    """

    words: Tensor
    spans: Tensor
    count: Tensor

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.spans.nbytes

    def is_whole(self) -> bool:
        """Whether all tiles were folded; waits for them."""
        return int(self.count) <= len(self.words)

    def to(self, device: torch.device | str) -> "Kept":
        return Kept(self.words.to(device), self.spans.to(device), self.count)


def make_table(weights: Sequence[Tensor], matrices: Sequence[tuple[Tensor, Tensor]] | None = None) -> Table:
    """Describe weights that are contiguous, on one GPU, of one 16-bit dtype, and of less than 2 to the 31 elements.

    Args:
        weights: `(out_features, in_features)` each.
        matrices: `(r, in_features)` and `(out_features, r)` for each, of the same dtype and of one rank.
    """
    device = weights[0].device
    # Without an adapter, the kernel reads weights only; their addresses then stand in the columns of the matrices.
    pairs = [(a.contiguous(), b.contiguous()) for a, b in matrices] if matrices else [(one, one) for one in weights]
    rows_of, first_tiles = [], [0]
    for weight, (lora_A, lora_B) in zip(weights, pairs, strict=True):
        rows, columns = weight.shape
        first, in_row = first_tiles[-1], triton.cdiv(columns, _COLUMNS)
        rows_of.append([weight.data_ptr(), rows, columns, first, in_row, lora_A.data_ptr(), lora_B.data_ptr()])
        first_tiles.append(first + triton.cdiv(rows, _ROWS) * in_row)
    return Table(
        entries=torch.tensor(rows_of, dtype=torch.int64).to(device),
        weight_of=owners_of_tiles(first_tiles, device),
        first_tiles=first_tiles,
        rank=pairs[0][0].shape[0] if matrices else 0,
        dtype=weights[0].dtype,
        is_aligned=all(
            not (address % 16 or columns % 16 or a % 16 or b % 16) for address, _, columns, _, _, a, b in rows_of
        ),
        # Addresses keep no tensor alive, and `contiguous` may have made copies that nothing else holds.
        held=[*weights, *(one for pair in pairs for one in pair)],
    )


def count_lost(table: Table) -> list[int]:
    """How many elements of each weight `fold` would have to keep; changes nothing."""
    counts = torch.zeros(len(table.entries), dtype=torch.int64, device=table.entries.device)
    _visit(table, _all_of(table), counts, mode="count")
    return list(counts.tolist())


def fold(table: Table, weights: range, room: int) -> Kept:
    """Add lora_B @ lora_A to some of the weights, accumulated in float32 and rounded once.

    Args:
        weights: their numbers, one after the other.
        room: for so many words. A tile for which there is none is left as it was, see `Kept.is_whole`.
    """
    device = table.entries.device
    tiles = table.first_tiles[weights.stop] - table.first_tiles[weights.start]
    kept = Kept(
        words=torch.empty(room, dtype=torch.int32, device=device),
        spans=torch.empty((tiles, 2), dtype=torch.int32, device=device),
        count=torch.zeros(1, dtype=torch.int64, device=device),
    )
    _visit(table, weights, kept.count, kept, mode="fold")
    return kept


def take_out(table: Table, weights: range, kept: Kept, sums: Tensor) -> None:
    """Write back what the weights held before `fold`, which was given the same weights and returned `kept`.

    Args:
        sums: as `bit_sums` returns them; what the weights hold afterwards is added to them.
    """
    _visit(table, weights, sums, kept, mode="take out")


def bit_sums(table: Table) -> Tensor:
    """For each weight, the sum of its elements' bits, each times an odd number of its place, modulo 2 to the 64."""
    sums = torch.zeros(len(table.entries), dtype=torch.int64, device=table.entries.device)
    _visit(table, _all_of(table), sums, mode="sum")
    return sums


def _all_of(table: Table) -> range:
    return range(len(table.entries))


def _visit(table: Table, weights: range, sums: Tensor, kept: Kept | None = None, *, mode: str) -> None:
    words, spans = (None, None) if kept is None else (kept.words, kept.spans)
    first, end = table.first_tiles[weights.start], table.first_tiles[weights.stop]
    rank = 0 if mode == "sum" else table.rank  # compiled once for all ranks
    step = rank_of_tiles(rank)
    _visit_tile[(end - first,)](
        table.entries, table.weight_of, first, rank, sums, words, 0 if words is None else len(words), spans,
        ROWS=_ROWS, COLUMNS=_COLUMNS, RANK=step, RANKS=triton.cdiv(rank, step) * step,
        DTYPE=DTYPES[table.dtype], ALIGNED=table.is_aligned, MODE=mode, num_warps=_WARPS, maxnreg=_REGISTERS.get(mode),
    )  # fmt: skip


# Triton compiles variants for arguments that are 1 or a multiple of 16, which these are at some times only.
@triton.jit(do_not_specialize=["first", "room"])  # type: ignore[untyped-decorator, unused-ignore]
def _visit_tile(  # type: ignore[no-untyped-def]  # Triton reads annotations as Triton types
    entries, weight_of, first, rank, sums, kept, room, spans,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    number = first + tl.program_id(0)
    index = tl.load(weight_of + number)
    entry = entries + index.to(tl.int64) * _FIELDS
    address = tl.load(entry)
    rows, columns = tl.load(entry + 1).to(tl.int32), tl.load(entry + 2).to(tl.int32)
    if ALIGNED:  # without this, Triton reads 2 bytes at a time
        columns = tl.multiple_of(columns, 16)
    tile = number - tl.load(entry + 3).to(tl.int32)
    in_row = tl.load(entry + 4).to(tl.int32)
    row = (tile // in_row) * ROWS + tl.arange(0, ROWS)
    column = (tile % in_row) * COLUMNS + tl.arange(0, COLUMNS)
    in_rows, in_columns = (row < rows)[:, None], (column < columns)[None, :]
    inside = in_rows & in_columns
    # In 32 bits, as no larger weight is in a table. Places beyond the weight may wrap around, and are masked.
    place = row[:, None] * columns + column[None, :]
    corner = (tile // in_row) * ROWS * columns + (tile % in_row) * COLUMNS
    words = address.to(tl.pointer_type(tl.int16))
    if ALIGNED:  # of a pointer, in bytes
        words = tl.multiple_of(words, 16)
    if MODE != "sum":
        lora_A = tl.load(entry + 5).to(tl.pointer_type(DTYPE))
        lora_B = tl.load(entry + 6).to(tl.pointer_type(DTYPE))
        weight = address.to(tl.pointer_type(DTYPE))
        if ALIGNED:
            lora_A, lora_B, weight = tl.multiple_of(lora_A, 16), tl.multiple_of(lora_B, 16), tl.multiple_of(weight, 16)
        before = tl.load(weight + place, mask=inside, other=0.0)
        product = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in tl.static_range(0, RANKS, RANK):
            k = start + tl.arange(0, RANK)
            b = tl.load(lora_B + row[:, None] * rank + k[None, :], mask=in_rows & (k < rank)[None, :], other=0.0)
            a = tl.load(
                lora_A + k[:, None] * columns + column[None, :], mask=(k < rank)[:, None] & in_columns, other=0.0
            )
            product = tl.dot(b, a, product)
        if MODE == "take out":
            span = spans + 2 * tl.program_id(0)
            begin, end = tl.load(span), tl.load(span + 1)
            # Otherwise the tile does not hold the adapter, and a subtraction would change the base.
            if begin >= 0:
                tl.store(weight + place, (before.to(tl.float32) - product).to(DTYPE), mask=inside)
            tl.debug_barrier()  # what follows writes over it
            for start in tl.range(begin, end, _BLOCK, num_stages=1):
                at = start + tl.arange(0, _BLOCK)
                is_kept = at < end
                word = tl.load(kept + at, mask=is_kept)
                at = word >> 16
                tl.store(words + corner + at // COLUMNS * columns + at % COLUMNS, word.to(tl.int16), mask=is_kept)
            tl.debug_barrier()  # what follows reads it
        else:
            folded = (before.to(tl.float32) + product).to(DTYPE)
            back = (folded.to(tl.float32) - product).to(DTYPE)
            is_lost = (back.to(tl.int16, bitcast=True) != before.to(tl.int16, bitcast=True)) & inside
            if MODE == "count":
                count = tl.sum(tl.sum(is_lost.to(tl.int32), 1), 0)
                tl.atomic_add(sums + index, count.to(tl.int64), sem="relaxed")
            else:
                lost = _in_threads(is_lost.to(tl.uint32), ROWS, COLUMNS)
                counts = tl.sum(lost.to(tl.int32), 0)
                count = tl.sum(counts, 0)
                # Reserves room for the words of this tile. Tiles run in any order, so `spans` records where they are.
                begin = tl.atomic_add(sums, count.to(tl.int64), sem="relaxed")
                end = begin + count
                has_room = end <= room
                span = spans + 2 * tl.program_id(0)
                tl.store(span, tl.where(has_room, begin, -1).to(tl.int32))
                tl.store(span + 1, tl.where(has_room, end, -1).to(tl.int32))
                # A tile is written only if its words are kept, so weights can be restored whatever the room was.
                if has_room:
                    _keep(lost, counts, words + corner, columns, kept + begin, ROWS, COLUMNS)
                    tl.debug_barrier()  # what follows writes over what it reads
                    tl.store(weight + place, folded, mask=inside)
    if MODE == "sum" or MODE == "take out":
        bits = tl.load(words + place, mask=inside, other=0).to(tl.uint16, bitcast=True).to(tl.uint64)
        # Of numbers of 32 bits, whose product is one instruction.
        factors = (2 * place.to(tl.uint32) + 1).to(tl.uint64)
        # Integers that wrap around add up to the same in any order, so atomic additions keep the sum exact.
        tl.atomic_add(sums + index, tl.sum(tl.sum(bits * factors, 1), 0).to(tl.int64), sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _in_threads(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The elements of a tile, in columns that are each what one thread of a Hopper GPU has of a product of matrices.

    Row 16 a + 8 b + c and column 8 d + 2 e + f of the tile come to row 4 d + 2 b + f and column 32 a + 4 c + e.
    """
    # Where a GPU has products in another layout, Triton moves values between threads, which costs time only.
    tile = tl.reshape(tile, (ROWS // 16, 2, 8, COLUMNS // 8, 4, 2))
    return tl.reshape(tl.permute(tile, (3, 1, 5, 0, 2, 4)), (COLUMNS // 2, ROWS * 2))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _keep(lost, counts, words, columns, kept, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the word of each lost element of a tile to `kept`.

    They are few. So each thread notes its 32 elements as the bits of one number, and takes the bits one by one.

    Args:
        lost: 0 or 1, as `_in_threads` returns them.
        counts: the sums of its columns.
        words: the tile's corner.
    """
    left = tl.sum(lost << tl.arange(0, COLUMNS // 2)[:, None].to(tl.uint32), 0)
    to = tl.cumsum(counts, 0) - counts
    number = tl.arange(0, ROWS * 2)
    for _ in tl.range(0, tl.max(counts, 0), loop_unroll_factor=2):
        is_left = left != 0
        lowest = left & (~left + 1)
        # A power of two is exact as a float, and its exponent is the number of the bit.
        bit = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
        row = (number // 32) * 16 + (bit // 2 % 2) * 8 + number // 4 % 8
        column = bit // 4 * 8 + number % 4 * 2 + bit % 2
        value = tl.load(words + row * columns + column, mask=is_left).to(tl.int32)
        # The place is below 64 x 64, so `word >> 16` brings it back without a sign.
        tl.store(kept + to, (row * COLUMNS + column) << 16 | value & 0xFFFF, mask=is_left)
        to += is_left.to(tl.int32)
        left ^= lowest
