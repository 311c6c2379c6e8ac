"""A checksum of an adapter's bytes, computed where they are: on the trainer's device and on the worker's.

It has 64 bits and finds damage. It does not protect against bytes that were made up on purpose.
"""

import torch
from torch import Tensor

_WORD_BYTES = 8
_COLUMNS = 1 << 16
# Bounds the products that exist at a time, to 64 MB.
_ROWS_AT_ONCE = 128
# Of the finalizer of MurmurHash3, as signed numbers.
_MIX = (0xFF51AFD7ED558CCD - (1 << 64), 0xC4CEB9FE1A85EC53 - (1 << 64))
_SHIFT = 33


def checksum(flat: Tensor) -> str:
    """The sum of all words, each times an odd number that depends on its place, modulo 2**64; in hexadecimal.

    An odd factor makes every change of a single word visible; different ones, words that have changed places. Integers
    wrap around in the same way on every device, in whatever order they are added.

    Args:
        flat: contiguous, of one dimension, any dtype; its memory begins at a multiple of eight bytes.
    """
    data = flat.view(torch.uint8)
    size = data.numel() // _WORD_BYTES * _WORD_BYTES
    words = data[:size].view(torch.int64)
    if size < data.numel():
        rest = torch.zeros(_WORD_BYTES, dtype=torch.uint8, device=data.device)
        rest[: data.numel() - size] = data[size:]
        words_of_rest = rest.view(torch.int64)
    else:
        words_of_rest = words[:0]
    whole = words.numel() // _COLUMNS * _COLUMNS
    last = torch.cat([words[whole:], words_of_rest])
    factors = _factors(max(_COLUMNS if whole else 0, last.numel()), data.device)
    rows = torch.split(words[:whole].view(-1, _COLUMNS), _ROWS_AT_ONCE) if whole else ()
    sums = [(part * factors[:_COLUMNS]).sum(1) for part in rows]
    sums.append((last * factors[: last.numel()]).sum().view(1))
    by_row = torch.cat(sums)
    total = int((by_row * _factors(by_row.numel(), data.device)).sum())
    return f"{total % (1 << 64):016x}"


def _factors(count: int, device: torch.device) -> Tensor:
    mixed = torch.arange(1, count + 1, device=device)
    for factor in _MIX:
        mixed *= factor
        mixed ^= mixed >> _SHIFT
    return mixed.bitwise_or_(1)
