"""A fingerprint of tensors, which changes with any bit. On a GPU it takes part of a millisecond."""

from collections.abc import Callable, Iterator, Sequence
from operator import is_

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors  # joins hundreds of tensors in one call

from trl_lora_sync.adapter.canonical import one_cpu_thread
from trl_lora_sync.adapter.launches import Launch, in_one_launch
from trl_lora_sync.engine_plugins.repeated import Repeated

# The bits are summed along rows and along columns, so that a value that moves changes a sum as well.
COLUMNS = 512
# Of Knuth's multiplicative hashing: a prime near 2**32 divided by the golden ratio.
MULTIPLIER = 0x9E3779B1
# Bounds the copy that is made of them, to 32 MB of float32.
_CHUNK_ELEMENTS = 1 << 23


def fingerprint(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Summarise the bits of `tensors` and their order.

    Args:
        tensors: on any devices, of any dtypes, not modified; those on one device are waited for together.

    Returns:
        A few numbers that are the same for the same bits on the same kind of device, and else almost surely differ.
    """
    return tuple(map(int, _sums_of(tensors)))


class Fingerprints:
    """Makes fingerprints of the same tensors at each sync, in less time than `fingerprint` takes."""

    def __init__(self) -> None:
        self._last: Sequence[Tensor] = ()
        self._repeated: Repeated | None = None

    def prepare(self, device: torch.device) -> None:
        """Compile what makes them there, so that no sync takes the time for it."""
        _summing([torch.ones(8, device=device)])()

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """The numbers of `fingerprint`, which are not waited for; on the device of `tensors` if they are on one."""
        # Shards are other tensors each time, for which nothing is recorded.
        if not tensors or len(tensors) != len(self._last) or not all(map(is_, tensors, self._last)):
            if len({one.device for one in tensors}) != 1:
                return torch.tensor(fingerprint(tensors))
            self._last, self._repeated = tensors, None
            return torch.stack(_sums_of(tensors))
        if self._repeated is None:
            self._repeated = Repeated(tensors, _summing(tensors))
        # The next run writes to the same memory, and the caller keeps this for a comparison at a later sync.
        return self._repeated.run().clone()

    def forget(self) -> None:
        """Release the tensors, and the memory for this."""
        self._last, self._repeated = (), None


def _summing(tensors: Sequence[Tensor]) -> Callable[[], Tensor]:
    """What makes the numbers of `fingerprint`."""

    def make() -> Launch:
        from trl_lora_sync.adapter.kernels import Fingerprint

        return Fingerprint([*chunks_of(tensors)])

    return in_one_launch(lambda: torch.stack(_sums_of(tensors)), tensors[0].device, make)


@torch.no_grad()
def _sums_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    with one_cpu_thread():
        return [_sum_of(chunk) for chunk in chunks_of(tensors)]


def _sum_of(chunk: list[Tensor]) -> Tensor:
    # Whole rows, of which zeros add nothing.
    if missing := -sum(one.nbytes for one in chunk) % (8 * COLUMNS):
        chunk = [*chunk, chunk[0].new_zeros(missing // chunk[0].element_size())]
    flat = _flatten_dense_tensors(chunk).view(torch.uint8)  # type: ignore[no-untyped-call]
    # One tensor comes back as a view of itself, and a shard may begin where no 64-bit word can.
    if flat.storage_offset() % 8:
        flat = flat.clone()
    # Sums of 64-bit words need no wider numbers, which makes them four times as fast as sums of 32-bit words.
    grid = _mixed(flat.view(torch.int64)).view(-1, COLUMNS)
    sums = torch.cat([grid.sum(0), grid.sum(1)])
    place = torch.arange(1, sums.numel() + 1, device=sums.device)
    # A word counts with the factors of its column and its row together. That sum is odd, or its highest bits would be
    # lost in half of the words as numbers wrap around, and another one for each word, thanks to the squares.
    factors = torch.where(place <= COLUMNS, 2 * place - 1, 2 * place * place)
    return (sums * (factors * MULTIPLIER)).sum()


def _mixed(words: Tensor) -> Tensor:
    """Each word plus its upper half, so that a change of its highest bit changes a lower one as well.

    Two changes of the highest bit cancel in a sum that wraps around, and it is the sign of every second float32.
    """
    upper = words >> 32
    return upper.add_(words)


def chunks_of(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors of each number of a fingerprint."""
    chunk: list[Tensor] = []
    kind, elements = None, 0
    for one in tensors:
        # Joined tensors of different dtypes would be converted to one, which changes their bits.
        if chunk and (kind != (one.dtype, one.device) or elements > _CHUNK_ELEMENTS):
            yield chunk
            chunk, elements = [], 0
        chunk.append(one)
        kind, elements = (one.dtype, one.device), elements + one.numel()
    if chunk:
        yield chunk
