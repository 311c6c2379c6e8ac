"""The layout of an adapter's safetensors file: written on the trainer's side, read on the server's.

The library would copy each tensor by itself. With the layout known, a file is one header and one flat tensor: written
in one copy, sent without being joined, and read by several threads into memory that is there already.

Source: https://github.com/huggingface/safetensors#format; safetensors/src/tensor.rs, 0.5 to 0.8.
"""

import json
import os
import struct
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

TENSORS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
METADATA = {"format": "pt"}
HEADER_PREFIX_BYTES = 8
"""What precedes the JSON object: its length."""
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""The dtypes of adapters, by their names in the file."""
MALFORMED = (struct.error, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)
"""What reading the head of a file that is damaged, or of another format, raises."""
CUT_OFF = "not written completely"
"""In the message with which a worker refuses a file that may be whole a moment later."""

# Float64 can be exported, but no worker reads it by itself.
DTYPE_NAMES: dict[Any, str] = {dtype: name for name, dtype in DTYPES.items()} | {torch.float64: "F64"}
# A header that names 36,864 tensors of experts (30B-A3B) has 5.3 MB.
_MAX_HEADER_BYTES = 64 << 20
# As in the library. So the tensors of a mapped file begin at whole elements, which `Tensor.view` needs.
_HEADER_ALIGNMENT = 8
# Reading is copying out of the page cache, which one thread does at a fraction of the memory's speed.
_READERS = 8
# The first parts go to the device while later ones are read (`fetching.Fetcher.read`).
CHUNK_BYTES = 4 << 20


class ShortFileError(ValueError):
    """The file ends before its tensors do."""


class TensorSpan(NamedTuple):
    """Where one tensor is among the bytes of all tensors.

    Attributes:
        dtype: its name in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @classmethod
    def of(cls, entry: Any) -> "TensorSpan":
        """From the entry of the tensor in the head of the file."""
        return cls(entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])

    def fits(self, size: int) -> bool:
        """Whether it lies within `size` bytes and is as long as its shape requires; a KeyError for an unknown dtype."""
        item = DTYPES[self.dtype].itemsize
        # `Tensor.view` needs an offset of whole elements.
        is_inside = 0 <= self.start <= self.end <= size and self.start % item == 0
        return is_inside and self.end - self.start == prod(self.shape) * item

    def view_in(self, data: Tensor) -> Tensor:
        """The tensor, as a view of the bytes of all of them."""
        return data[self.start : self.end].view(DTYPES[self.dtype]).view(self.shape)


class Head(NamedTuple):
    """The beginning of a file.

    Attributes:
        start, size: the region that holds the tensors, in bytes.
        header: names, dtypes, shapes and places of the tensors, as JSON.
    """

    start: int
    size: int
    header: bytes

    def content(self) -> tuple[dict[str, str], dict[str, Any]]:
        """The metadata, and the entry of each tensor; raises one of `MALFORMED`."""
        entries = json.loads(self.header)
        return entries.pop("__metadata__", {}), entries

    def spans(self) -> dict[str, TensorSpan]:
        """Where each tensor is, by its key; errors as of `content`."""
        return {name: TensorSpan.of(entry) for name, entry in self.content()[1].items()}


def header_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """What a file of such tensors begins with: the length of a JSON object, the object, and padding.

    Args:
        tensors: in the order of the file. The library's is that of the keys' bytes where all have one dtype.
    """
    entries: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for key, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        entries[key] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    # The library's own form, so that a version has the same bytes with and without a slot.
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def head_of(file: int) -> Head:
    """The beginning of an open file, by its descriptor.

    Raises:
        OSError, struct.error, ValueError: it has none.
    """
    size = os.fstat(file).st_size
    (length,) = struct.unpack("<Q", os.pread(file, HEADER_PREFIX_BYTES, 0))
    start = HEADER_PREFIX_BYTES + length
    # The length comes from the file, so it is checked before that much is read.
    if length > _MAX_HEADER_BYTES or start > size:
        raise ValueError(f"a header of {length} bytes")
    return Head(start, size - start, os.pread(file, length, HEADER_PREFIX_BYTES))


def joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """Tensors as one of shape `(elements,)`, if they lie one after the other in memory, as in a file."""
    first = tensors[0]
    place = first.data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != place or tensor.dtype != first.dtype or not tensor.is_contiguous():
            return None
        place += tensor.numel() * tensor.element_size()
    size = (place - first.data_ptr()) // first.element_size()
    if first.untyped_storage().nbytes() < (first.storage_offset() + size) * first.element_size():
        return None  # neighbours by chance
    return first.as_strided((size,), (1,))


def bytes_of(memory: Tensor) -> memoryview:
    """The bytes of a tensor of one dimension in host memory, to be read or written."""
    array: Any = memory.view(torch.uint8).numpy()
    return memoryview(array)


class ParallelReader:
    """Fills memory from files, with several threads."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_READERS, thread_name_prefix="lora-sync-read")

    def read(self, file: int, into: memoryview, start: int) -> Generator[slice]:
        """Yield parts of `into`, first to last, once each of them holds what the file has from `start` on.

        No thread uses `into` or `file` any more once this has ended or was closed.

        Args:
            file: its descriptor.

        Raises:
            ShortFileError: the file has less.
        """
        parts = [slice(place, min(place + CHUNK_BYTES, len(into))) for place in range(0, len(into), CHUNK_BYTES)]
        reads = [self._pool.submit(read_into, file, into[part], start + part.start) for part in parts]
        try:
            for part, read in zip(parts, reads, strict=True):
                read.result()
                yield part
        finally:
            for read in reads:
                # All of them first, so that the wait below is for the reads under way only.
                read.cancel()
            for read in reads:
                if not read.cancelled():
                    # Waits without raising, since the first error is on its way already.
                    read.exception()


def read_into(file: int, view: memoryview, offset: int) -> None:
    while view:
        # May fill a part only. Its offset is an argument, so all threads can share one descriptor.
        count = os.preadv(file, [view], offset)
        if not count:
            raise ShortFileError(f"The file is shorter than its header promises; it was {CUT_OFF}.")
        view, offset = view[count:], offset + count
