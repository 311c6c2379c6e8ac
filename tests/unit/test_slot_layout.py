"""Where an engine puts the elements of an adapter is found out from what its slots hold, for every way of loading."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trl_lora_sync.engine_plugins.checksum import ROW_BYTES, Checksum, RepeatedChecksum, checksum, parts_of
from trl_lora_sync.engine_plugins.slot_layout import (
    DIGITS,
    Box,
    LayoutError,
    digit_values,
    find_boxes,
    read_digits,
)

Load = Callable[[Tensor, Tensor], None]


def boxes_of(load: Load, shape: tuple[int, ...], count: int, dtype: torch.dtype = torch.bfloat16) -> list[Box]:
    digits = []
    for digit in range(DIGITS):
        part = torch.zeros(shape, dtype=dtype)
        load(part, digit_values(count, digit, dtype))
        digits.append(read_digits(part))
    return find_boxes(0, digits, part.stride(), count)


def packed(part: Tensor, file: Tensor) -> None:
    """Two modules in one matrix, of which the slot has more rows and columns."""
    part[0, :10, :4] = file[100:140].view(10, 4)
    part[0, 10:16, :4] = file[:24].view(6, 4)


def embedding(part: Tensor, file: Tensor) -> None:
    part[0, :30, :4] = file[5:125].view(4, 30).T


def sliced(part: Tensor, file: Tensor) -> None:
    """What the second of two workers holds of a matrix that is divided by columns."""
    part[0, :8, :8] = file[64:192].view(8, 16)[:, 8:]


def experts(part: Tensor, file: Tensor) -> None:
    """Of a matrix that is rank-major, every other row of each expert, as GPT-OSS has them."""
    part[:, :, :8] = file[: 4 * 8 * 12].view(12, 8, 4).permute(2, 0, 1)[:, ::2]


def shared(part: Tensor, file: Tensor) -> None:
    """One matrix for all experts."""
    part[:, :4, :8] = file[7:39].view(4, 8)


def one_element(part: Tensor, file: Tensor) -> None:
    part[0, 0, 0] = file[3]


def apart(part: Tensor, file: Tensor) -> None:
    part[0, 2:5, 3:6] = file[:9].view(3, 3)
    part[0, 7:9, 3:6] = file[20:26].view(2, 3)


def far(part: Tensor, file: Tensor) -> None:
    """Over the place where the second digit changes."""
    part[0, :32, :8] = file[61_300:61_556].view(32, 8)


def nothing(part: Tensor, file: Tensor) -> None:
    pass


@pytest.mark.parametrize(
    ("load", "count", "expected"),
    [
        (packed, 1_000, 2),
        (embedding, 70_000, 1),
        (sliced, 256, 1),
        (experts, 384, 1),
        (shared, 300, 4),
        (one_element, 200, 1),
        (apart, 300_000, 2),
        (far, 70_000, 1),
        (nothing, 100, 0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_boxes_copy_what_the_engine_copies(load: Load, count: int, expected: int, dtype: torch.dtype) -> None:
    shape = (4, 6, 12) if load in (experts, shared) else (1, 40, 16)
    boxes = boxes_of(load, shape, count, dtype)
    assert len(boxes) == expected
    file = torch.randn(count, generator=torch.Generator().manual_seed(1)).to(dtype)
    theirs, ours = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    load(theirs, file)
    for box in boxes:
        box.in_slot([ours]).copy_(box.in_file(file))
    assert torch.equal(theirs, ours)


def scaled(part: Tensor, file: Tensor) -> None:
    part[0, :8, :8] = file[:64].view(8, 8) * 1.5


def scattered(part: Tensor, file: Tensor) -> None:
    order = torch.randperm(part.numel(), generator=torch.Generator().manual_seed(0))
    part.view(-1)[order] = file[: part.numel()]


def by_value(part: Tensor, file: Tensor) -> None:
    part[0, :8, :8] = torch.where(file[:64] > 20, file[:64], 0).view(8, 8)


@pytest.mark.parametrize("load", [scaled, by_value])
def test_an_engine_that_does_more_than_to_copy_is_noticed(load: Load) -> None:
    with pytest.raises(LayoutError):
        boxes_of(load, (1, 40, 16), 1_000)


def test_an_engine_that_scatters_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl_lora_sync.engine_plugins.slot_layout.MOST_BOXES", 8)
    with pytest.raises(LayoutError, match="pieces"):
        boxes_of(scattered, (1, 40, 16), 1_000)


@pytest.mark.parametrize("count", [1, 4, 7, 65_536 * 4, 65_536 * 4 * 3 + 5])
def test_a_checksum_sees_every_changed_element_and_every_swap(count: int) -> None:
    flat = torch.randn(count, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    sums = {checksum(flat)}
    assert sums == {checksum(flat.clone())}
    for place in {0, count // 2, count - 1}:
        changed = flat.clone()
        changed.view(torch.int16)[place] ^= 1
        sums.add(checksum(changed))
    sums.add(checksum(torch.cat([flat[-1:], flat[:-1]])) if count > 1 else "another")
    sums.add(checksum(torch.zeros_like(flat)))
    assert len(sums) == 3 + len({0, count // 2, count - 1})


def test_a_checksum_is_a_fixed_number() -> None:
    """Trainer and server compute it apart, perhaps with other versions of torch."""
    assert checksum(torch.arange(1000, dtype=torch.float32)) == "0110abaf129f0000"


@pytest.mark.gpu
@pytest.mark.outside  # Triton runs a compiler
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
@pytest.mark.parametrize("size", [0, 8, 1003, ROW_BYTES, 3 * ROW_BYTES + 16, 17 * ROW_BYTES, 17 * ROW_BYTES + 8])
def test_a_checksum_on_a_gpu_is_the_same_number(size: int, caplog: pytest.LogCaptureFixture) -> None:
    flat = torch.randint(256, (size + 8,), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    with caplog.at_level("INFO"):
        assert checksum(flat.cuda()[8:]) == checksum(flat[8:].clone())
        repeated = RepeatedChecksum(on_gpu := flat.cuda()[8:])
        for _ in range(4):  # the last ones by a recorded launch
            on_gpu.bitwise_not_()
            assert repeated() == checksum(on_gpu.cpu())
    assert "without Triton" not in caplog.text


@pytest.mark.parametrize("size", [0, 1, 8, 1003, ROW_BYTES - 1, ROW_BYTES, ROW_BYTES + 9, 3 * ROW_BYTES + 5])
@pytest.mark.parametrize("step", [999, ROW_BYTES - 8, ROW_BYTES, ROW_BYTES + 3, 4 * ROW_BYTES])
def test_a_checksum_of_parts_is_that_of_the_whole(size: int, step: int) -> None:
    flat = torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    whole, parts = flat.numpy().tobytes(), Checksum()
    for start in range(0, size, step):
        memory = bytearray(whole[start : start + step])
        parts.update(memory)
        memory[:] = bytes(len(memory))  # as memory that is used again
    assert parts.hexdigest() == checksum(flat)


@pytest.mark.parametrize("size", [1003, ROW_BYTES, 3 * ROW_BYTES + 5, 9 * ROW_BYTES])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_parts_that_are_added_up_side_by_side_have_the_checksum_of_the_whole(size: int, count: int) -> None:
    flat = torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    places = parts_of(size, count)
    assert [start for start, _ in places] == [0, *(end for _, end in places[:-1])]
    assert places[-1][1] == size
    parts = [Checksum() for _ in places]
    for part, (start, end) in zip(parts, places, strict=True):
        part.update(bytearray(flat[start:end].numpy().tobytes()))
    assert Checksum.joined(parts) == checksum(flat)
