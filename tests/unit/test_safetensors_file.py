"""Unit tier: the layout of an adapter's file, against the library's own reading and writing."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from trl_lora_sync.engine_plugins.safetensors_file import (
    DTYPES,
    MALFORMED,
    METADATA,
    TensorSpan,
    bytes_of,
    head_of,
    header_of,
    joined,
)


def tensors_of(dtype: torch.dtype) -> dict[str, Tensor]:
    flat = torch.arange(30, dtype=torch.float32).to(dtype)
    return {"a.lora_A.weight": flat[:6].view(2, 3), "b\u00fc.lora_B.weight": flat[6:].view(8, 3)}


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_what_is_written_here_is_what_the_library_writes_and_reads(dtype: torch.dtype) -> None:
    tensors = tensors_of(dtype)
    written = header_of(tensors, METADATA) + b"".join(map(bytes_of, map(torch.flatten, tensors.values())))

    assert written == save(tensors, METADATA)
    found = load(written)
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        name: tensor.tolist() for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_what_the_library_writes_is_read_here(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors, file = tensors_of(dtype), tmp_path / "file"
    file.write_bytes(save(tensors, {"key": "value"}))

    with file.open("rb") as opened:
        head = head_of(opened.fileno())
    metadata, entries = head.content()

    assert metadata == {"key": "value"}
    data = torch.frombuffer(bytearray(file.read_bytes()[head.start :]), dtype=torch.uint8)
    assert data.numel() == head.size
    for name, tensor in tensors.items():
        span = TensorSpan.of(entries[name])
        assert span.fits(head.size)
        assert torch.equal(span.view_in(data), tensor)


@pytest.mark.parametrize(
    "span",
    [
        TensorSpan("F32", (2, 3), 0, 23),
        TensorSpan("F32", (2, 3), 80, 104),
        TensorSpan("F32", (2, 3), -8, 16),
        TensorSpan("F32", (2, 3), 2, 26),
        TensorSpan("BF16", (2, 3), 0, 24),
    ],
)
def test_a_span_that_is_outside_or_of_another_length_does_not_fit(span: TensorSpan) -> None:
    assert TensorSpan("F32", (2, 3), 76, 100).fits(100)
    assert not span.fits(100)


@pytest.mark.parametrize(
    "content", [b"", b"short", b"\xff" * 20, *(b"\x02" + bytes(7) + text for text in (b"[]", b"{{"))]
)
def test_a_file_of_another_format_is_malformed(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with (tmp_path / "file").open("rb") as opened, pytest.raises(MALFORMED):
        head_of(opened.fileno()).content()


def test_neighbours_in_memory_are_joined_without_a_copy_and_others_are_not() -> None:
    first, second = tensors_of(torch.float32).values()
    flat = joined([first, second])
    assert flat is not None
    assert (flat.data_ptr(), flat.tolist()) == (first.data_ptr(), list(range(30)))
    assert joined([second, first]) is None
