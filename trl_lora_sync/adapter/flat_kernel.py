"""An export in one launch, for GPUs; needs Triton, which torch brings along there.

torch scales lora_B in float32 memory in between, and reads the result again to see whether it is finite. At 32B that
takes 1.5 ms instead of 0.5 (H200).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trl_lora_sync.engine_plugins.fused_kernel import owners_of_tiles

_TILE, _WARPS = 4096, 8
_FIELDS = tl.constexpr(4)  # of an entry of the table
_BYTES, _ELEMENTS = tl.constexpr(16), tl.constexpr(8)
_INFINITE = tl.constexpr(0x7F800000)  # the exponent of infinity and NaN in float32
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Copy(NamedTuple):
    """A matrix, where it goes, and what it is multiplied by in float32."""

    target: Tensor
    source: Tensor
    scaling: float


class Launch:
    """Makes the same copies each time, of what the matrices hold then."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._copies = copies
        self._places: list[list[int]] = []

    def suits(self) -> bool:
        """Whether one launch can make them; the matrices may have moved since the last time."""
        both = [one for copy in self._copies for one in (copy.target, copy.source)]
        dtypes = [{copy.target.dtype for copy in self._copies}, {copy.source.dtype for copy in self._copies}]
        return (
            all(len(one) == 1 and one <= _DTYPES.keys() for one in dtypes)
            and all(one.is_cuda and one.is_contiguous() and one.device == both[0].device for one in both)
            # Alignment is compiled in, and other sizes would be copied 2 bytes at a time.
            and not any(one.data_ptr() % _BYTES.value or one.numel() % _ELEMENTS.value for one in both)
        )

    def run(self) -> Tensor:
        """Returns whether all that was written is finite; a boolean on the device."""
        self._look_up()
        strange = torch.zeros((), dtype=torch.int32, device=self._device)
        # Triton launches on the current device, which may be another one.
        with torch.cuda.device(self._device):
            _copy_tile[(len(self._owners),)](
                self._entries, self._scalings, self._owners, strange, TILE=_TILE, num_warps=_WARPS, **self._dtypes
            )
        return strange == 0

    def _look_up(self) -> None:
        """Make the table of the launch, if matrices have moved since the last run; not while it is recorded."""
        places = [[copy.source.data_ptr(), copy.target.data_ptr()] for copy in self._copies]
        if places == self._places:
            return
        self._device, first_tiles = self._copies[0].source.device, [0]
        entries = []
        for (target, source, _), addresses in zip(self._copies, places, strict=True):
            entries.append([*addresses, source.numel(), first_tiles[-1]])
            first_tiles.append(first_tiles[-1] + triton.cdiv(source.numel(), _TILE))
            self._dtypes = {"SOURCE": _DTYPES[source.dtype], "TARGET": _DTYPES[target.dtype]}
        self._entries = torch.tensor(entries, dtype=torch.int64).to(self._device)
        self._scalings = torch.tensor([one.scaling for one in self._copies], dtype=torch.float32).to(self._device)
        self._owners = owners_of_tiles(first_tiles, self._device)
        self._places = places


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _copy_tile(  # type: ignore[no-untyped-def]  # Triton reads annotations as Triton types
    entries, scalings, owner_of, strange, TILE: tl.constexpr, SOURCE: tl.constexpr, TARGET: tl.constexpr
):  # fmt: skip
    number = tl.program_id(0)
    owner = tl.load(owner_of + number)
    entry = entries + owner.to(tl.int64) * _FIELDS
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
