"""A fingerprint of tensors, which changes with any bit. On a GPU it takes part of a millisecond."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors  # joins hundreds of tensors in one call

from trl_lora_sync.adapter.canonical import one_cpu_thread

# The bits are summed along rows and along columns, so that a value that moves changes a sum as well.
_COLUMNS = 512
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
    with one_cpu_thread():
        sums = [_sum_of(chunk) for chunk in _chunks(tensors)]
        return tuple(int(one) for one in sums)


def _sum_of(chunk: list[Tensor]) -> Tensor:
    flat = _flatten_dense_tensors(chunk).view(torch.uint8)  # type: ignore[no-untyped-call]
    # Sums of 64-bit words need no wider numbers, which makes them four times as fast as sums of 32-bit words.
    whole = flat.numel() // (8 * _COLUMNS) * 8 * _COLUMNS
    grid = flat[:whole].view(torch.int64).view(-1, _COLUMNS)
    sums = torch.cat([grid.sum(0), grid.sum(1), flat[whole:].to(torch.int64)])
    # Overflow wraps around, which loses nothing here.
    return (sums * (torch.arange(1, sums.numel() + 1, device=sums.device) * _MULTIPLIER)).sum()


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    chunk: list[Tensor] = []
    kind, elements = None, 0
    for one in tensors:
        if chunk and (kind != (one.dtype, one.device) or elements > _CHUNK_ELEMENTS):
            yield chunk
            chunk, elements = [], 0
        chunk.append(one)
        kind, elements = (one.dtype, one.device), elements + one.numel()
    if chunk:
        yield chunk
