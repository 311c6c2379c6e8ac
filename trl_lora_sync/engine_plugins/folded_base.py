"""An adapter in weights of which there is no second copy: folded in for a while, and taken out bit for bit.

W = round(W0 + B A) is computed in float32 and rounded once. The way back, round(W - B A), gives W0 for most elements.
Those for which it does not are known before W is written, and their values are kept: 0.4 to 4 % of an 8B model in
bfloat16. Knows torch, and neither vLLM nor PEFT.
"""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trl_lora_sync.engine_plugins import logger

if TYPE_CHECKING:
    from trl_lora_sync.engine_plugins.folding_kernels import Kept, Table

# Of the weights' own memory, what is kept on their device while they are folded; the rest is kept on the host.
SHARE_ON_DEVICE = 1 / 32
# Bounds what is computed in float32 at a time; a linear layer of an 8B model has up to 50 million elements.
ELEMENTS_OF_FLOATS = 1 << 24
# What kernels keep of an element that subtraction does not bring back: its place in a tile and its 16 bits.
_KEPT_BYTES = 4
# There is room for so many more elements than are expected.
SPARE_ELEMENTS = 1 << 20
_INTEGERS = {2: torch.int16, 4: torch.int32}
_KERNEL_DTYPES = (torch.bfloat16, torch.float16)


class BaseChangedError(Exception):
    """Weights are not what they were before an adapter was folded into them."""


@dataclass
class FoldedRows:
    """Rows of one weight with an adapter in them.

    Attributes:
        weight: `(rows, in_features)`, a view of the weight.
        lora_A, lora_B: `(r, in_features)` and `(rows, r)`, with the scaling in lora_B.
        places: of the elements that subtraction does not bring back, in the flattened rows; None if all are kept.
        values: what these elements held. Both are on the device or, for want of room, on the host.
    """

    weight: Tensor
    lora_A: Tensor
    lora_B: Tensor
    places: Tensor | None
    values: Tensor

    @property
    def nbytes(self) -> int:
        """Of what is kept."""
        return self.values.nbytes + (0 if self.places is None else self.places.nbytes)

    def move_to_host(self) -> None:
        """Have what is kept in the host's memory."""
        self.values = self.values.cpu()
        self.places = None if self.places is None else self.places.cpu()

    def take_out(self) -> None:
        """Write back what the rows held before, bit for bit; after an error they hold the adapter still."""
        if self.places is None:
            self.weight.copy_(self.values)
            return
        # Before anything is written, as there may be no memory for them.
        places, values = self.places.to(self.weight.device).long(), self.values.to(self.weight.device)
        add_to(self.weight, self.lora_A, self.lora_B, -1.0)
        # After the subtraction, which writes to these elements too.
        self.weight.view(-1).index_copy_(0, places, values)


@dataclass
class FoldedGroup:
    """Whole weights with an adapter in them, which kernels put there.

    Attributes:
        table: of all weights, and of the adapter.
        weights, kept: see `folding_kernels.fold`; the words are on the device or on the host.
    """

    table: "Table"
    weights: range
    kept: "Kept"

    def move_to_host(self) -> None:
        """Have what is kept in the host's memory."""
        self.kept = self.kept.to("cpu")

    def take_out(self, sums: Tensor) -> None:
        """As for `FoldedRows`; adds the sums of the weights' bits afterwards to `sums`."""
        from trl_lora_sync.engine_plugins.folding_kernels import take_out

        take_out(self.table, self.weights, self.kept.to(self.table.entries.device), sums)


class FoldedBase:
    """Weights that have an adapter in them for a while.

    Whether they came back bit for bit is checked each time by sums over their bits.

    Args:
        weights: contiguous matrices on one device, with nothing added to them.
        rank: of the adapters, for which the kernels are compiled now; other ranks work as well.
    """

    def __init__(self, weights: Sequence[Tensor], rank: int = 16) -> None:
        self._weights = list(weights)
        self._table = _table_of(self._weights, rank)
        # Made once, before any adapter: sums that followed the weights would hide what a fold has lost.
        self._sums = self._bit_sums()
        self._kept_bytes = 0
        self._device_bytes = int(SHARE_ON_DEVICE * sum(weight.nbytes for weight in self._weights))
        self._folded: list[FoldedRows | FoldedGroup] = []
        self._expected: int | None = None  # how many elements were kept of the last adapter, if by one launch

    @property
    def has_kernels(self) -> bool:
        """Whether adapters are folded by `folding_kernels`."""
        return self._table is not None

    @property
    def is_folded(self) -> bool:
        """Whether an adapter is in the weights, whole or in part."""
        return bool(self._folded)

    @property
    def kept_bytes(self) -> int:
        """Memory for the elements that subtraction does not bring back, while an adapter is in the weights."""
        return self._kept_bytes

    def fold(self, matrices: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Put an adapter into the weights, which must have none; after an error they have none.

        Args:
            matrices: lora_A and lora_B of each weight in turn, with the scaling in lora_B.
        """
        assert not self._folded
        pairs = list(zip(self._weights, matrices, strict=True))
        try:
            with _signals_deferred(), _plain_arithmetic(self._weights):
                if self.has_kernels and _is_uniform(pairs):
                    pairs = self._fold_groups(pairs)
                for weight, (lora_A, lora_B) in pairs:
                    step = max(1, ELEMENTS_OF_FLOATS // weight.shape[1])
                    for start in range(0, weight.shape[0], step):
                        rows = slice(start, start + step)
                        self._fold_rows(weight[rows], lora_A, lora_B[rows])
        # A deferred KeyboardInterrupt arrives here, when the whole adapter is in the weights already.
        except BaseException:
            self.unfold()
            raise

    def _fold_groups(self, pairs: Sequence["_Pair"]) -> list["_Pair"]:
        """Fold with kernels, and return the weights of which a copy is smaller than what would have to be kept."""
        from trl_lora_sync.engine_plugins import folding_kernels

        table = folding_kernels.make_table([weight for weight, _ in pairs], [matrices for _, matrices in pairs])
        if self._fold_at_once(table):
            return []
        groups: list[range] = []
        counts: list[int] = []  # of each group
        rest: list[_Pair] = []
        most = self._device_bytes // _KEPT_BYTES  # bounds what is on the device before it goes to the host
        for index, (pair, count) in enumerate(zip(pairs, folding_kernels.count_lost(table), strict=True)):
            if _KEPT_BYTES * count > pair[0].nbytes:
                rest.append(pair)
            # A group is one launch over tiles side by side, so a weight that is left out ends it.
            elif groups and groups[-1].stop == index and counts[-1] + count <= most:
                groups[-1], counts[-1] = range(groups[-1].start, index + 1), counts[-1] + count
            else:
                groups.append(range(index, index + 1))
                counts.append(count)
        for group, count in zip(groups, counts, strict=True):
            folded = FoldedGroup(table, group, folding_kernels.fold(table, group, count))
            self._folded.append(folded)
            # A tile without room is not folded. Counting and folding are two programs, which have to find the same.
            if not folded.kept.is_whole():
                raise ArithmeticError("More elements were lost by folding an adapter than were counted before")
            self._kept_bytes += folded.kept.nbytes
            if self._kept_bytes > self._device_bytes:
                # The group is in the list already: if the host has no memory either, `unfold` still takes it out.
                folded.move_to_host()
        # Otherwise `_fold_at_once` could not do the same, with one launch for all weights and its words on the device.
        if len(groups) == 1 and not rest and self._kept_bytes <= self._device_bytes:
            self._expected = counts[0]
        torch.cuda.synchronize(pairs[0][0].device)  # vLLM may compute in another stream
        return rest

    def _fold_at_once(self, table: "Table") -> bool:
        """Fold all weights without counting first what is to be kept, which reads all of them.

        Returns:
            Whether there was room for it, a little more than for the adapter before; if not, nothing is folded.
        """
        from trl_lora_sync.engine_plugins import folding_kernels

        if self._expected is None:
            return False
        # Bounded by the share of the device, as these words are not moved to the host.
        room = min(self._expected * 5 // 4 + SPARE_ELEMENTS, self._device_bytes // _KEPT_BYTES)
        weights = range(len(self._weights))
        group = FoldedGroup(table, weights, folding_kernels.fold(table, weights, room))
        self._folded.append(group)
        # Waits for the launch and may raise its error, when the group is in the list already for `unfold`.
        if group.kept.is_whole():
            self._expected, self._kept_bytes = int(group.kept.count), group.kept.nbytes
            return True
        self._expected = None
        # Tiles that had room are folded. The others are marked in `spans`, and are left alone here.
        self._take_out()
        return False

    def _fold_rows(self, weight: Tensor, lora_A: Tensor, lora_B: Tensor) -> None:
        places = _not_restored(weight, lora_A, lora_B).view(-1).nonzero().view(-1)
        values = weight.view(-1)[places]
        # Enough, as the rows of one step have 2 to the 24 elements, or are one row. `index_copy_` needs 64 bits, but
        # only while it runs.
        places = places.to(torch.int32)
        # A place takes 4 bytes beside its value; a copy of all rows takes less if they are many.
        if places.nbytes + values.nbytes < weight.nbytes:
            kept = FoldedRows(weight, lora_A, lora_B, places, values)
        else:
            kept = FoldedRows(weight, lora_A, lora_B, None, weight.clone())
        # What may fail for want of memory comes before the write, so that an error leaves the rows unchanged.
        kept_bytes = self._kept_bytes + kept.nbytes
        if kept_bytes > self._device_bytes:
            kept.move_to_host()
        add_to(weight, lora_A, lora_B, 1.0)  # all of the rows, or none if it fails
        self._folded.append(kept)
        self._kept_bytes = kept_bytes

    def unfold(self) -> None:
        """Take the adapter out again.

        Raises:
            BaseChangedError: the weights are not what they were.
        """
        with _signals_deferred(), _plain_arithmetic(self._weights):
            found = self._take_out()
            self._kept_bytes = 0
        if not torch.equal(found, self._sums):
            different = int((found != self._sums).sum())
            raise BaseChangedError(f"{different} of {len(self._weights)} weights have changed")

    def _take_out(self) -> Tensor:
        """Returns the sums of the bits of each weight afterwards."""
        sums, summed = torch.zeros_like(self._sums), 0
        while self._folded:
            one = self._folded[-1]
            if isinstance(one, FoldedGroup):
                one.take_out(sums)
                summed += len(one.weights)
            else:
                one.take_out()
            # Taken off the list afterwards: after an error before, the next call takes it out.
            self._folded.pop()
        # Kernels sum up what they write. Rows that were taken out in another way are summed by reading all weights.
        return sums if summed == len(self._weights) else self._bit_sums()

    def has_changed(self) -> bool:
        """Whether the weights are something else than at first."""
        return not torch.equal(self._bit_sums(), self._sums)

    def _bit_sums(self) -> Tensor:
        """For each weight, a sum over its bits as integers, modulo 2 to the 64; shape `(weights,)`."""
        if self._table is not None:
            from trl_lora_sync.engine_plugins import folding_kernels

            return folding_kernels.bit_sums(self._table)
        # Blind to elements that change places, which neither `fold` nor `unfold` can cause.
        sums = [_words(weight).sum() for weight in self._weights]
        return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64)


_Pair = tuple[Tensor, tuple[Tensor, Tensor]]


def _is_uniform(pairs: Sequence[_Pair]) -> bool:
    """Whether all matrices have the dtype of the weights and one rank."""
    dtype, rank = pairs[0][0].dtype, pairs[0][1][0].shape[0]
    return all(a.dtype == b.dtype == dtype and a.shape[0] == rank for _, (a, b) in pairs)


@contextmanager
def _plain_arithmetic(weights: Sequence[Tensor]) -> Iterator[None]:
    """The same products each time, whatever the trainer computes with at the moment: no autocast, no TF32."""
    device = weights[0].device.type if weights else "cpu"
    matmul = torch.backends.cuda.matmul
    # Where torch has the new flag (2.9), it refuses to read the old one after `torch.backends.fp32_precision = "tf32"`,
    # as Transformers sets it for `tf32=True`.
    flag, plain = ("fp32_precision", "ieee") if hasattr(matmul, "fp32_precision") else ("allow_tf32", False)
    before = getattr(matmul, flag)
    setattr(matmul, flag, plain)
    try:
        with torch.no_grad(), torch.autocast(device, enabled=False):
            yield
    finally:
        setattr(matmul, flag, before)


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Let an interrupt wait until the block has ended, so that no weight is left between two states."""
    caught: list[tuple[int, Any]] = []
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # handlers run there and nowhere else
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        # `SIG_DFL` ends the process, and the weights with it; `SIG_IGN` does nothing. Neither needs to wait.
        handlers = {number: handler for number, handler in handlers.items() if callable(handler)}

    def put_back() -> None:
        # All of them before the first one is called below, which may raise, as for `KeyboardInterrupt`.
        for number, handler in handlers.items():
            signal.signal(number, handler)

    try:
        # Here and in `put_back`, a signal whose own handler is in place may break off the loop.
        for number in handlers:
            signal.signal(number, lambda *given: caught.append(given))
        yield
    finally:
        try:
            put_back()
        finally:
            put_back()
        for number, frame in caught:
            handlers[number](number, frame)


def _words(weight: Tensor) -> Tensor:
    """The bits of a contiguous tensor as integers, which are read fastest if they are long."""
    flat = weight.view(-1)
    # torch requires the offset in the storage to be a multiple of 8 bytes, and a GPU the address.
    is_aligned = flat.nbytes % 8 == 0 and flat.data_ptr() % 8 == 0 and flat.storage_offset() * flat.itemsize % 8 == 0
    return flat.view(torch.int64) if is_aligned else flat.view(_INTEGERS[flat.itemsize]).long()


def product_of(lora_A: Tensor, lora_B: Tensor) -> Tensor:
    return lora_B.float() @ lora_A.float()


def _not_restored(weight: Tensor, lora_A: Tensor, lora_B: Tensor) -> Tensor:
    """Which elements do not come back by subtraction; changes nothing."""
    product = product_of(lora_A, lora_B)
    # The same operations as in `add_to`: with another rounding, other elements would not come back.
    there = (weight.float() + product).to(weight.dtype)
    back = (there.float() - product).to(weight.dtype)
    # As numbers, NaN would differ from itself, and -0.0 would equal 0.0.
    bits = _INTEGERS[weight.element_size()]
    return back.view(bits) != weight.view(bits)


def add_to(weight: Tensor, lora_A: Tensor, lora_B: Tensor, sign: float) -> None:
    """Add `sign` times the product to the weight, rounded once, in one write per element."""
    product = product_of(lora_A, lora_B)
    weight.copy_(weight.float() + product if sign > 0 else weight.float() - product)


def _table_of(weights: Sequence[Tensor], rank: int) -> "Table | None":
    """The weights as kernels find them; None if none is to be used."""
    if not weights:
        return None
    device, dtype = weights[0].device, weights[0].dtype
    fits = all(
        one.is_cuda
        and one.dtype == dtype in _KERNEL_DTYPES
        and one.device == device
        and one.is_contiguous()
        # Kernels number the elements of a weight in 32 bits.
        and one.numel() < 1 << 31
        for one in weights
    )
    if not fits or not _kernels_work(device, dtype, rank):
        return None
    from trl_lora_sync.engine_plugins.folding_kernels import make_table

    return make_table(weights)


@cache
def _kernels_work(device: torch.device, dtype: torch.dtype, rank: int) -> bool:
    """Whether Triton is there, and its kernels bring random weights back bit for bit, after writing the sum there."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    try:
        from trl_lora_sync.engine_plugins import folding_kernels

        # Tiles of 64 x 64 divide neither weight, so the kernels' masks are tried as well.
        weights = [random(192, 160), random(70, 48)]
        matrices = [(random(rank, 160), random(192, rank)), (random(rank, 48), random(70, rank))]
        before = [weight.clone() for weight in weights]
        table = folding_kernels.make_table(weights, matrices)
        sums, count = folding_kernels.bit_sums(table), sum(folding_kernels.count_lost(table))
        kept = folding_kernels.fold(table, range(2), count)
        for weight, old, (lora_A, lora_B) in zip(weights, before, matrices, strict=True):
            # Loose, as it finds elements in wrong places only. What comes back is compared bit for bit below.
            wanted = old.double() + lora_B.double() @ lora_A.double()
            torch.testing.assert_close(weight.double(), wanted, rtol=0.02, atol=0.05)
        found = torch.zeros_like(sums)
        folding_kernels.take_out(table, range(2), kept, found)
        if not all(map(torch.equal, weights, before)) or not torch.equal(found, sums):
            raise ArithmeticError("the weights did not come back")
    except Exception as error:  # such as a missing compiler
        logger.warning("Adapters are folded without Triton, which takes longer: %s: %s", type(error).__name__, error)
        return False
    return True
