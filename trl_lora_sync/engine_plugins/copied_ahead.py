"""The newest version of a trainer, copied to a worker's device while the request to load it is still on its way.

That request passes through the trainer's HTTP client, the server and its engine, which takes longer than the copy.
"""

import json
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# It is memory that the engine has not reserved, so a large adapter is copied when it is requested.
MOST_BYTES = 1 << 30


class FileKey(NamedTuple):
    """What a file is, whatever its path."""

    device: int
    inode: int


class Source(NamedTuple):
    """Where a trainer has its newest version.

    Attributes:
        memory: the number of its GPU's memory (`engine_plugins.cuda_ipc`); 0 if the version is in a file.
        file: that file.
    """

    memory: int = 0
    file: FileKey = FileKey(0, 0)


class Progress(NamedTuple):
    """How much of the tensors of a version can be copied.

    Attributes:
        start: where in the file the tensors begin, in bytes.
        done: bytes that are there.
        size: bytes of all tensors.
    """

    source: Source
    start: int
    done: int
    size: int

    def encode(self) -> bytes:
        return json.dumps([self.source.memory, *self.source.file, self.start, self.done, self.size]).encode()

    @classmethod
    def decode(cls, message: bytes) -> "Progress":
        """Raises ValueError, TypeError: it is none."""
        memory, device, inode, start, done, size = map(int, json.loads(message))
        if not 0 < done <= size:
            raise ValueError("it is of no part")
        return cls(Source(memory, FileKey(device, inode)), start, done, size)


class CopiedAhead:
    """Memory for one version. A reader compares its checksum, as it may be another one than is wanted.

    Not thread-safe.

    Attributes:
        source: of what is there, or on its way.
        done: bytes of it that are there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Memory that torch allocates for another stream may still be in use there, and this thread waits for none.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._data = torch.empty(0, dtype=torch.uint8)
        self.source = Source()
        self.done = 0

    def is_new(self, found: Progress) -> bool:
        """Whether it is the first that is heard of a version."""
        return (found.source, found.size) != (self.source, self._data.numel()) or found.done <= self.done

    def begin(self, found: Progress) -> None:
        """Give up the version that is there for another one.

        Raises:
            RuntimeError: the device has no memory left.
        """
        self.source, self.done = found.source, 0
        if self._data.numel() != found.size:
            # Freed before its successor is allocated, so that there need not be room for both.
            self._data = torch.empty(0, dtype=torch.uint8)
            with torch.cuda.stream(self._stream):
                self._data = torch.empty(found.size, dtype=torch.uint8, device=self._device)

    def add(self, found: Progress, copy: Callable[[Tensor, int], None]) -> None:
        """Copy what has come since.

        Args:
            copy: fills a tensor from the given byte of the tensors on, and returns when that is done.
        """
        with torch.cuda.stream(self._stream):
            copy(self._data[self.done : found.done], self.done)

    def is_coming(self, source: Source) -> bool:
        """Whether more of what is at `source` is on its way."""
        return self.source == source and self.done < self._data.numel()

    def of(self, source: Source, size: int) -> Tensor | None:
        """All bytes, if they came from there."""
        is_it = self.source == source and self.done == size == self._data.numel()
        return self._data if is_it else None
