"""Where the elements of an adapter's file lie in a slot of an engine, found by watching the engine load numbers.

An engine takes a file apart in its own ways: it packs some modules together, slices for tensor parallelism, transposes,
reorders experts. None of that is known here. The engine loads adapters whose elements are digits of their places in
the file, so each element of the slot then names the element of the file that went there. The result is a list of
boxes: copies between two regular parts of memory.

A digit is one of the many values that a number of 16 bits can have, so two adapters are enough; each takes an engine
seconds to load if it has hundreds of millions of elements.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

# The normal numbers of float16: two signs, 30 exponents, 1024 fractions. bfloat16 has 65,024 of them.
# Zero stands for an element that was not written.
_BASE = 61_440
# Neighbours are far apart in size, so that the first few are values of every kind. Has no factor in common with it.
_STEP = 23_741
# How many adapters must be loaded. Both also if one would do, as an engine may load one value and leave out another.
DIGITS = 2
MOST_BOXES = 4096


class LayoutError(Exception):
    """The engine does more with an adapter than to copy it, or copies it in too many pieces."""


@dataclass(frozen=True)
class Box:
    """A copy of some elements of the file to a part of a slot.

    Attributes:
        part: which tensor of the slot.
        shape: of both sides.
        target, target_steps: offset and strides in that tensor, in elements.
        source, source_steps: the same in the file.
    """

    part: int
    shape: tuple[int, ...]
    target: int
    target_steps: tuple[int, ...]
    source: int
    source_steps: tuple[int, ...]

    def in_slot(self, parts: Sequence[Tensor]) -> Tensor:
        """The elements in a slot, as a view."""
        part = parts[self.part]
        return part.as_strided(self.shape, self.target_steps, part.storage_offset() + self.target)

    def in_file(self, flat: Tensor) -> Tensor:
        """The elements in the tensors of a file that follow each other in `flat`, as a view."""
        return flat.as_strided(self.shape, self.source_steps, flat.storage_offset() + self.source)


def digit_values(count: int, digit: int, dtype: torch.dtype) -> Tensor:
    """An adapter of `count` elements, each a digit of its place: the low one is number 0.

    Raises:
        LayoutError: there are more elements than pairs of digits.
    """
    if count > _BASE**DIGITS:
        raise LayoutError(f"{count} elements are too many to find out where each of them goes")
    values = _values(dtype, torch.device("cpu"))[torch.arange(_BASE) * _STEP % _BASE].to(dtype)
    # Element i * _BASE + j has the low digit j and the high digit i.
    rows = -(-count // _BASE)
    one_of_each = values if digit == 0 else values[:rows, None]
    return one_of_each.expand(rows, _BASE).contiguous().flatten()[:count]


@lru_cache(maxsize=4)
def _values(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The values of digits in ascending order, in float32, which has all values of the shorter ones.

    No zero, and no number so small that a device may take it for zero.
    """
    short = torch.float16 if dtype == torch.float16 else torch.bfloat16
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(short)
    normal = every[every.isfinite() & (every.abs() >= torch.finfo(short).tiny)]
    return normal.float().sort().values[:_BASE].to(device)


def read_digits(part: Tensor) -> Tensor:
    """The digits in a tensor of a slot, each greater by one, as 16 bits on the host: no more memory than the tensor's.

    Raises:
        LayoutError: it holds something else.
    """
    values, found = _values(part.dtype, part.device), part.float()
    # A value that is not a digit gets the rank of a neighbour, so that the comparison fails.
    ranks = torch.searchsorted(values, found).clamp_(max=_BASE - 1)
    is_written = found != 0
    if not torch.equal(values[ranks].mul_(is_written), found):
        raise LayoutError("the engine changes the values that it loads")
    # The inverse of the order in `digit_values`, where digit i has the value of rank i * _STEP.
    return (ranks * pow(_STEP, -1, _BASE) % _BASE + 1).mul_(is_written).to(torch.int16).cpu()


def find_boxes(part: int, digits: Sequence[Tensor], strides: Sequence[int], count: int) -> list[Box]:
    """What has been copied to a tensor of a slot.

    Args:
        digits: what `read_digits` found in it, for each digit; on any device.
        strides: of the tensor.
        count: of the elements in the file.

    Raises:
        LayoutError: the digits are not places in the file, or too irregular.
    """
    numbers = [(one.long() & 0xFFFF) - 1 for one in digits]  # a large one has the sign of a negative number
    written = numbers[0] >= 0
    if any(not torch.equal(one >= 0, written) for one in numbers[1:]):
        raise LayoutError("the engine does not load every adapter of this kind to the same places")
    places = torch.full(written.shape, -1, dtype=torch.int64, device=written.device)
    sums = sum(one * _BASE**digit for digit, one in enumerate(numbers))
    places[written] = sums[written]
    if int(places.max()) >= count:
        raise LayoutError("the engine changes the values that it loads")
    return [_box(part, tuple(strides), found) for found in _regular(places, (0,) * places.dim())]


def _box(part: int, strides: tuple[int, ...], found: "Found") -> Box:
    """Without dimensions of one element, whose strides mean nothing and would keep torch from copying in one launch."""
    corner, shape, source, steps = found
    longer = [dim for dim, size in enumerate(shape) if size > 1]
    return Box(
        part=part,
        shape=tuple(shape[dim] for dim in longer),
        target=sum(first * stride for first, stride in zip(corner, strides, strict=True)),
        target_steps=tuple(strides[dim] for dim in longer),
        source=source,
        source_steps=tuple(steps[dim] for dim in longer),
    )


Found = tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]


def _regular(places: Tensor, corner: tuple[int, ...]) -> Iterator[Found]:
    """Boxes in which the place in the file is an affine function of the indices: corner, shape, first place, steps."""
    for dim in range(places.dim()):  # without the border that was not written
        is_written = (places >= 0).movedim(dim, 0).flatten(1).any(1).nonzero()
        if not len(is_written):
            return
        first, last = int(is_written[0]), int(is_written[-1])
        places = places.narrow(dim, first, last - first + 1)
        corner = (*corner[:dim], corner[dim] + first, *corner[dim + 1 :])
    steps = _steps(places)
    if steps is not None:
        yield corner, tuple(places.shape), int(places.flatten()[0]), steps
        return
    cuts = [(dim, found) for dim in range(places.dim()) if (found := _cuts(places, dim))]
    if not cuts:
        raise LayoutError("the engine scatters what it loads")
    # Of two matrices side by side, cuts along the other dimension would make a piece of every row.
    dim, chosen = min(cuts, key=lambda one: len(one[1]))
    if len(chosen) > MOST_BOXES:
        raise LayoutError(f"the engine takes what it loads apart into more than {MOST_BOXES} pieces")
    for start, end in zip([0, *chosen], [*chosen, places.shape[dim]], strict=True):
        moved = (*corner[:dim], corner[dim] + start, *corner[dim + 1 :])
        yield from _regular(places.narrow(dim, start, end - start), moved)


def _steps(places: Tensor) -> tuple[int, ...] | None:
    """By how much the place grows along each dimension, if that is the same everywhere."""
    first = places[(0,) * places.dim()]
    expected, steps = first, []
    for dim, size in enumerate(places.shape):
        step = int(places.movedim(dim, 0).flatten(1)[1, 0] - first) if size > 1 else 0
        shape = [size if one == dim else 1 for one in range(places.dim())]
        expected = expected + (torch.arange(size, device=places.device) * step).view(shape)
        steps.append(step)
    # An element that went to several places is in as many boxes, since a box is also copied back.
    has_once = all(step > 0 for step, size in zip(steps, places.shape, strict=True) if size > 1)
    is_regular = int(first) >= 0 and has_once and torch.equal(expected, places)
    return tuple(steps) if is_regular else None


def _cuts(places: Tensor, dim: int) -> list[int]:
    """Where along `dim` another regularity begins."""
    rows = places.movedim(dim, 0).flatten(1)
    difference = rows[1:] - rows[:-1]
    # A row that is written in part is apart, and so is a row whose neighbour is written in other places.
    is_alike = (difference == difference[:, :1]).all(1) & ((rows[1:] >= 0) == (rows[:-1] >= 0)).all(1)
    is_alike &= (difference[:, 0] > 0) | (rows[1:] < 0).all(1)
    cuts: list[int] = []
    step: int | None = None
    for row, (alike, grows) in enumerate(zip(is_alike.tolist(), difference[:, 0].tolist(), strict=True)):
        if not alike or (step is not None and grows != step):
            # The step of the part that begins here shows between its first two rows.
            cuts.append(row + 1)
            step = None
        else:
            step = grows
    return cuts
