"""A fingerprint of tensors, which tells whether any bit has changed. On a GPU it takes part of a millisecond."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# The bits are summed along rows and along columns, so that a value that moves changes a sum as well.
_COLUMNS = 1024
_MULTIPLIER = 0x9E3779B1
# Bounds the copy that is made of them, to 64 MB of float32.
_CHUNK_ELEMENTS = 1 << 24


@torch.no_grad()
def fingerprint(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Summarise the bits of `tensors` and their order.

    Args:
        tensors: on any devices, of any dtypes, not modified; those on one device are waited for together.

    Returns:
        A few numbers that are the same for the same bits on the same kind of device, and else almost surely differ.
    """
    sums = [_sum_of(chunk) for chunk in _chunks(tensors)]
    return tuple(int(one) for one in sums)


def _sum_of(chunk: list[Tensor]) -> Tensor:
    flat = torch.cat([one.reshape(-1) for one in chunk])
    bits = flat.view(_WORDS[flat.element_size()])
    whole = bits.numel() // _COLUMNS * _COLUMNS
    grid = bits[:whole].view(-1, _COLUMNS)
    sums = torch.cat([grid.sum(0, dtype=torch.int64), grid.sum(1, dtype=torch.int64), bits[whole:].to(torch.int64)])
    # Overflow wraps around, which loses nothing here.
    return (sums * (torch.arange(1, sums.numel() + 1, device=sums.device) * _MULTIPLIER)).sum()


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    chunk: list[Tensor] = []
    for one in (one.detach() for one in tensors):
        kind = (one.dtype, one.device)
        if chunk and (kind != (chunk[0].dtype, chunk[0].device) or sum(c.numel() for c in chunk) > _CHUNK_ELEMENTS):
            yield chunk
            chunk = []
        chunk.append(one)
    if chunk:
        yield chunk
