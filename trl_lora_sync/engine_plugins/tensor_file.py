"""A safetensors file without its library: where its tensors are, and their bytes, read by several threads.

Source: https://github.com/huggingface/safetensors#format
"""

import os
import struct
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

_MAX_HEADER_BYTES = 64 << 20
# Reading is copying out of the page cache, which one thread does at a fraction of the memory's speed.
_READERS = 8
_CHUNK_BYTES = 4 << 20


class ShortFileError(ValueError):
    """The file ends before its tensors do."""


class Head(NamedTuple):
    """The beginning of a file.

    Attributes:
        start, size: the region that holds the tensors, in bytes.
        header: names, dtypes, shapes and places of the tensors, as JSON.
    """

    start: int
    size: int
    header: bytes


def head_of(file: int) -> Head:
    """The beginning of an open file, by its descriptor.

    Raises:
        OSError, struct.error, ValueError: it has none.
    """
    size = os.fstat(file).st_size
    (length,) = struct.unpack("<Q", os.pread(file, 8, 0))
    if length > min(_MAX_HEADER_BYTES, size - 8):
        raise ValueError(f"a header of {length} bytes")
    return Head(8 + length, size - 8 - length, os.pread(file, length, 8))


class ParallelReader:
    """Fills memory from files, with threads of its own."""

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
        parts = [slice(place, min(place + _CHUNK_BYTES, len(into))) for place in range(0, len(into), _CHUNK_BYTES)]
        reads = [self._pool.submit(_read_into, file, into[part], start + part.start) for part in parts]
        try:
            for part, read in zip(parts, reads, strict=True):
                read.result()
                yield part
        finally:
            for read in reads:
                read.cancel()
            for read in reads:
                if not read.cancelled():
                    read.exception()


def _read_into(file: int, view: memoryview, offset: int) -> None:
    while view:
        count = os.preadv(file, [view], offset)
        if not count:
            raise ShortFileError("The file is shorter than its head says; it was not written completely.")
        view, offset = view[count:], offset + count
