"""A checksum of an adapter's bytes, computed where they are: on the trainer's device and on the worker's.

It has 64 bits and finds damage. It does not protect against bytes that were made up on purpose.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor

from trl_lora_sync.engine_plugins import logger
from trl_lora_sync.engine_plugins.repeated import Repeated

# Word and row define the checksum: with other sizes, trainer and server would get different sums of the same bytes.
_WORD_BYTES = 8
_COLUMNS = 1 << 16
ROW_BYTES = _WORD_BYTES * _COLUMNS
# Bounds the products that exist at a time, to 16 MB.
_ROWS_AT_ONCE = 32
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
    return hexadecimal(word_sum(flat))


def hexadecimal(total: Tensor | int) -> str:
    """What `word_sum` has found, as `checksum` writes it; waits for the device."""
    return f"{int(total) % (1 << 64):016x}"


def word_sum(flat: Tensor) -> Tensor:
    """The sum of `checksum`, as an int64 on the device of `flat`; not waited for."""
    data = flat.view(torch.uint8)
    if flat.is_cuda and data.numel() % _WORD_BYTES == 0:
        return _sum_on(flat.device)(data.view(torch.int64))
    return _sum_of(data)


@cache
def _sum_on(device: torch.device) -> Callable[[Tensor], Tensor]:
    """What adds up the words of tensors on a GPU: in one pass, if Triton is there and it works."""
    try:
        from trl_lora_sync.engine_plugins.checksum_kernel import word_sum

        in_one_pass = partial(word_sum, columns=_COLUMNS, mix=_MIX, shift=_SHIFT)
        # More rows than one program takes, and a part of one.
        sample = _factors(10 * _COLUMNS + 5, device)
        if not torch.equal(in_one_pass(sample), _sum_of(sample)):
            raise ArithmeticError("its sum is wrong")
    except Exception as error:  # such as a missing compiler
        logger.info("Checksums are computed without Triton, which takes longer: %s: %s", type(error).__name__, error)
        return _sum_of
    return in_one_pass


def _sum_of(flat: Tensor) -> Tensor:
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
    # A factor depends on its place alone, so the beginning of the longer list serves the shorter rows.
    factors = _factors(max(_COLUMNS if whole else 0, last.numel()), data.device)
    rows = torch.split(words[:whole].view(-1, _COLUMNS), _ROWS_AT_ONCE) if whole else ()
    sums = [(part * factors[:_COLUMNS]).sum(1) for part in rows]
    sums.append((last * factors[: last.numel()]).sum().view(1))
    return _sum_of_rows(torch.cat(sums))


class RepeatedChecksum:
    """`checksum` of the same memory at each call, of what it holds then."""

    def __init__(self, flat: Tensor) -> None:
        self._sum = Repeated([flat], partial(word_sum, flat))
        self._total = torch.empty((), dtype=torch.int64, pin_memory=flat.is_cuda)

    def __call__(self) -> str:
        return self.begin()()

    def begin(self) -> Callable[[], str]:
        """Compute it of what the memory holds now; the result waits for it, and is to be called before the next one."""
        total = self._sum.run()
        if not total.is_cuda:
            return partial(hexadecimal, total)
        self._total.copy_(total, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(total.device))

        def finish() -> str:
            done.synchronize()
            return hexadecimal(self._total)

        return finish


def parts_of(size: int, count: int) -> list[tuple[int, int]]:
    """Where each of `count` parts begins and ends, in bytes: whole rows, except for the last."""
    # `Checksum.joined` numbers the rows of all parts one after the other, so a part may not begin within a row.
    rows = -(-size // ROW_BYTES)
    ends = [min(size, rows * (number + 1) // count * ROW_BYTES) for number in range(count)]
    return list(zip([0, *ends], ends, strict=False))


class Checksum:
    """The checksum of bytes in host memory that come in parts, of which whole rows are not copied if writable."""

    def __init__(self) -> None:
        self._factors = _factors(_COLUMNS, torch.device("cpu"))
        self._sums: list[Tensor] = []
        self._begun = bytearray()

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Go on with `data`, which is not used any more afterwards."""
        view = memoryview(data)
        if self._begun or len(view) < ROW_BYTES:
            missing = ROW_BYTES - len(self._begun)
            self._begun += view[:missing]
            view = view[missing:]
            if len(self._begun) == ROW_BYTES:
                self._sums.append(self._row_sum(self._begun))
                self._begun = bytearray()
        whole = len(view) // ROW_BYTES * ROW_BYTES
        for start in range(0, whole, ROW_BYTES):
            self._sums.append(self._row_sum(view[start : start + ROW_BYTES]))
        self._begun += view[whole:]

    def _row_sum(self, row: bytearray | memoryview) -> Tensor:
        # torch warns of memory that it may not write to.
        words = torch.frombuffer(bytearray(row) if memoryview(row).readonly else row, dtype=torch.int64)
        # 10 GB/s, as it keeps no products and uses one thread (torch 2.13); SHA-256 has 1.8 there.
        return torch.dot(words, self._factors[: words.numel()])

    def hexdigest(self) -> str:
        """What `checksum` makes of all bytes so far."""
        return self.joined([self])

    @staticmethod
    def joined(parts: Sequence["Checksum"]) -> str:
        """What `checksum` makes of the bytes of all parts, one after the other; all but the last have whole rows."""
        last = parts[-1]
        zeros = bytes(_WORD_BYTES - len(last._begun) % _WORD_BYTES)  # which add nothing
        sums = [one for part in parts for one in part._sums]
        return hexadecimal(_sum_of_rows(torch.stack([*sums, last._row_sum(last._begun + zeros)])))


def _sum_of_rows(sums: Tensor) -> Tensor:
    return (sums * _factors(sums.numel(), sums.device)).sum()


# Making them takes ten launches, and a run needs the same few each time. Never dropped, as recorded work reads them.
@cache
def _factors(count: int, device: torch.device) -> Tensor:
    # The finalizer begins with a shift, which leaves numbers below 2**33 unchanged, so it is left out.
    mixed = torch.arange(1, count + 1, device=device)
    # On signed numbers, `>>` copies the sign, unlike in MurmurHash3. All devices do the same.
    for factor in _MIX:
        mixed *= factor
        mixed ^= mixed >> _SHIFT
    return mixed.bitwise_or_(1)
