"""The sum of `checksum` in one pass over the bytes, for GPUs; needs Triton, which torch brings along there.

torch writes the products to memory, and reads them again to add them up.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Of one program: so many words side by side, of so many rows, for which it computes the factors of columns once.
_WORDS, _ROWS = 1024, 8


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _factor(number, MIX_0: tl.constexpr, MIX_1: tl.constexpr, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    number = (number + 1) * MIX_0
    number ^= number >> SHIFT
    number *= MIX_1
    number ^= number >> SHIFT
    return number | 1


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator, unused-ignore]
def _add_words(  # type: ignore[no-untyped-def]  # Triton reads annotations as Triton types
    words, count, total,
    COLUMNS: tl.constexpr, MIX_0: tl.constexpr, MIX_1: tl.constexpr, SHIFT: tl.constexpr,
    WORDS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    in_row = COLUMNS // WORDS
    column = ((number % in_row) * WORDS + tl.arange(0, WORDS)).to(tl.int64)
    first = (number // in_row * ROWS).to(tl.int64)
    found = tl.zeros((WORDS,), dtype=tl.int64)
    for row in tl.static_range(ROWS):
        place = (first + row) * COLUMNS + column
        word = tl.load(words + place, mask=place < count, other=0)
        found += word * _factor(first + row, MIX_0, MIX_1, SHIFT)
    # Integers that wrap around add up to the same in any order.
    tl.atomic_add(total, tl.sum(found * _factor(column, MIX_0, MIX_1, SHIFT), 0), sem="relaxed")


def word_sum(words: Tensor, columns: int, mix: tuple[int, int], shift: int) -> Tensor:
    """See `checksum.word_sum`.

    Args:
        words: int64, on a GPU.
        columns: words of a row, a multiple of 1024.
        mix, shift: of the factors.
    """
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    programs = triton.cdiv(words.numel(), columns * _ROWS) * (columns // _WORDS)
    if programs:
        # Triton launches on the current device, which may be another one.
        with torch.cuda.device(words.device):
            _add_words[(programs,)](
                words, words.numel(), total,
                COLUMNS=columns, MIX_0=mix[0], MIX_1=mix[1], SHIFT=shift, WORDS=_WORDS, ROWS=_ROWS,
            )  # fmt: skip
    return total
