"""An adapter's export and its fingerprint in one launch each, for GPUs; needs Triton, which torch brings along there.

For an export, torch scales lora_B in float32 memory in between, and reads the result again to see whether it is finite:
1.5 ms at 32B instead of 0.5 (H200). A fingerprint is some 500 launches of torch's there.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trl_lora_sync.adapter.fingerprint import COLUMNS, MULTIPLIER
from trl_lora_sync.engine_plugins.fused_kernel import owners_of_tiles

_TILE, _WARPS = 4096, 8
_WORDS = 2048  # of a tile of a fingerprint
# Alignment is compiled in. Other tensors would be read 2 or 8 bytes at a time.
_BYTES, _ELEMENTS = tl.constexpr(16), tl.constexpr(8)
_INFINITE = tl.constexpr(0x7F800000)  # the exponent of infinity and NaN in float32
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Copy(NamedTuple):
    """A matrix, where it goes, and what it is multiplied by in float32."""

    target: Tensor
    source: Tensor
    scaling: float


class _Table:
    """What a kernel finds on the device.

    Args:
        tensors: of each entry, one or more.
        numbers: of each entry.
        tiles: into how many each entry is split.

    Attributes:
        entries: int64; the addresses, the numbers and the first tile of each.
        owners: int32 of shape `(tiles,)`, the entry that each tile is of.
    """

    def __init__(
        self, tensors: Sequence[Sequence[Tensor]], numbers: Sequence[Sequence[int]], tiles: Sequence[int]
    ) -> None:
        self._tensors, self._numbers = tensors, numbers
        self._first_tiles = [0, *accumulate(tiles)]
        self._made_for: object = None

    def is_aligned(self) -> bool:
        """Whether all tensors are dense memory of a GPU, of whole units of 16 bytes."""
        return all(
            one.is_cuda and one.is_contiguous() and not (one.data_ptr() % _BYTES.value or one.nbytes % _BYTES.value)
            for some in self._tensors
            for one in some
        )

    def look_up(self) -> torch.device:
        """Make it if tensors have moved since the last time; they do not while a launch is recorded."""
        device = self._tensors[0][0].device
        places = [[one.data_ptr() for one in some] for some in self._tensors]
        if (device, places) != self._made_for:
            rows = zip(places, self._numbers, self._first_tiles[:-1], strict=True)
            entries = [[*addresses, *numbers, first] for addresses, numbers, first in rows]
            self.entries = torch.tensor(entries, dtype=torch.int64).to(device)
            self.owners = owners_of_tiles(self._first_tiles, device)
            self._made_for = device, places
        return device


class Export:
    """Makes copies, and finds out whether all that was written is finite; see `launches.Launch`."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._copies = copies
        sizes = [one.source.numel() for one in copies]
        tiles = [triton.cdiv(size, _TILE) for size in sizes]
        self._table = _Table([(one.source, one.target) for one in copies], [(size,) for size in sizes], tiles)
        self._scalings: Tensor | None = None

    def suits(self) -> bool:
        dtypes = [{one.source.dtype for one in self._copies}, {one.target.dtype for one in self._copies}]
        return (
            all(len(one) == 1 and one <= _DTYPES.keys() for one in dtypes)
            and self._table.is_aligned()
            and not any(one.source.numel() % _ELEMENTS.value for one in self._copies)
        )

    def run(self) -> Tensor:
        device, first = self._table.look_up(), self._copies[0]
        if self._scalings is None or self._scalings.device != device:
            self._scalings = torch.tensor([one.scaling for one in self._copies], dtype=torch.float32).to(device)
        strange = torch.zeros((), dtype=torch.int32, device=device)
        # Triton launches on the current device, which may be another one.
        with torch.cuda.device(device):
            _copy_tile[(len(self._table.owners),)](
                self._table.entries, self._scalings, self._table.owners, strange,
                SOURCE=_DTYPES[first.source.dtype], TARGET=_DTYPES[first.target.dtype], TILE=_TILE, num_warps=_WARPS,
            )  # fmt: skip
        return strange == 0


class Fingerprint:
    """Makes the fingerprint of tensors, given by its `chunks_of`; see `launches.Launch`."""

    def __init__(self, chunks: Sequence[Sequence[Tensor]]) -> None:
        tensors = [one for chunk in chunks for one in chunk]
        words = [[one.nbytes // 8 for one in chunk] for chunk in chunks]
        numbers = [
            (count, end - count, chunk)
            for chunk, counts in enumerate(words)
            for count, end in zip(counts, accumulate(counts), strict=True)
        ]
        tiles = [triton.cdiv(count, _WORDS) for count, *_ in numbers]
        self._table = _Table([(one,) for one in tensors], numbers, tiles)
        self._chunks = len(chunks)

    def suits(self) -> bool:
        return self._table.is_aligned()

    def run(self) -> Tensor:
        device = self._table.look_up()
        sums = torch.zeros(self._chunks, dtype=torch.int64, device=device)
        with torch.cuda.device(device):
            _add_tile[(len(self._table.owners),)](
                self._table.entries, self._table.owners, sums,
                COLUMNS=COLUMNS, MULTIPLIER=MULTIPLIER, WORDS=_WORDS, num_warps=_WARPS,
            )  # fmt: skip
        return sums


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _copy_tile(  # type: ignore[no-untyped-def]  # Triton reads annotations as Triton types
    entries, scalings, owner_of, strange, SOURCE: tl.constexpr, TARGET: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    number = tl.program_id(0)
    owner = tl.load(owner_of + number)
    entry = entries + owner.to(tl.int64) * 4
    source = tl.multiple_of(tl.load(entry).to(tl.pointer_type(SOURCE)), _BYTES)
    target = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(TARGET)), _BYTES)
    count = tl.multiple_of(tl.load(entry + 2), _ELEMENTS)
    place = (number - tl.load(entry + 3)) * TILE + tl.arange(0, TILE)
    is_inside = place < count
    value = tl.load(source + place, mask=is_inside, other=0.0).to(tl.float32) * tl.load(scalings + owner)
    written = value.to(TARGET)
    tl.store(target + place, written, mask=is_inside)
    # As it was written, because what float32 holds may be infinite in float16. By its bits, because the compiler would
    # fuse a sum with the product above.
    bits = written.to(tl.float32).to(tl.int32, bitcast=True)
    are_strange = tl.sum(((bits & _INFINITE) == _INFINITE).to(tl.int32), 0)
    if are_strange > 0:
        tl.atomic_add(strange, are_strange, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _add_tile(  # type: ignore[no-untyped-def]
    entries, owner_of, sums, COLUMNS: tl.constexpr, MULTIPLIER: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    number = tl.program_id(0)
    entry = entries + tl.load(owner_of + number).to(tl.int64) * 5
    words = tl.multiple_of(tl.load(entry).to(tl.pointer_type(tl.int64)), _BYTES)
    count = tl.multiple_of(tl.load(entry + 1), 2)
    place = (number - tl.load(entry + 4)) * WORDS + tl.arange(0, WORDS)
    word = tl.load(words + place, mask=place < count, other=0)
    in_chunk = tl.load(entry + 2) + place
    # Numbered as in `fingerprint._sum_of`, where rows come after the columns.
    row = COLUMNS + 1 + in_chunk // COLUMNS
    factors = 2 * (in_chunk % COLUMNS) + 1 + 2 * row * row
    total = tl.sum((word + (word >> 32)) * factors, 0) * tl.full((), MULTIPLIER, tl.int64)
    tl.atomic_add(sums + tl.load(entry + 3), total, sem="relaxed")
