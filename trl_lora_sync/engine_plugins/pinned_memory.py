"""What CUDA adds to memory that a GPU copies into: page-locking, and one asynchronous copy.

Without a GPU both do the plain thing, so that everything built on them runs anywhere.
"""

import contextlib
import mmap
import os
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

# Valid in every CUDA context: the trainer computes in one thread and files are written in another.
_PORTABLE = 1


class PinError(Exception):
    """The memory cannot be page-locked, in the driver's words."""


def pin(memory: Tensor, device: torch.device) -> Callable[[], None]:
    """Page-lock `memory` for copies from `device`.

    Args:
        memory: on the CPU, on pages that are not pinned yet.

    Returns:
        What undoes it; to be called before the memory goes.

    Raises:
        PinError: that is not possible here.
    """
    if device.type != "cuda":
        return _nothing
    address = memory.data_ptr()
    # A new thread has the first GPU as its current device, and a call there would make a context on it.
    with torch.cuda.device(device):
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        result = cudart.cudaHostRegister(address, memory.numel() * memory.element_size(), _PORTABLE)
        if result != cudart.cudaError.success:
            _clear_last_error(device)
            raise PinError(f"cudaHostRegister: {cudart.cudaGetErrorString(result)}")

    def unlock() -> None:
        # At the end of the interpreter the driver may have gone first, and taken the lock with it.
        with contextlib.suppress(RuntimeError), torch.cuda.device(device):
            if cudart.cudaHostUnregister(address) != cudart.cudaError.success:
                _clear_last_error(device)

    return unlock


class PinnedMapping:
    """An open file in memory, page-locked.

    Args:
        file: its descriptor, which may be closed afterwards.
        lock: page-locks memory, as `pin` for a device.

    Attributes:
        data: its bytes.

    Raises:
        OSError, ValueError: it cannot be mapped.
        PinError: it cannot be page-locked.
    """

    def __init__(self, file: int, lock: Callable[[Tensor], Callable[[], None]]) -> None:
        self._map = mmap.mmap(file, os.fstat(file).st_size)
        self.data = torch.frombuffer(self._map, dtype=torch.uint8)
        self._unlock = lock(self.data)

    def close(self) -> None:
        """To be called once."""
        # Before the mapping goes, of which the driver still has the pages.
        self._unlock()
        del self.data
        # A view that is still there keeps the mapping, and the mapping goes with it.
        with contextlib.suppress(BufferError):
            self._map.close()


def copy_now(target: Tensor, source: Tensor) -> None:
    """Copy between the host and a device, by its current stream; done when it returns.

    If the host's memory is page-locked, it is one transfer.
    """
    copy_each_now([(target, source)])


def copy_each_now(parts: Iterable[tuple[Tensor, Tensor]]) -> None:
    """`copy_now` of each pair of a target and its source, begun as it comes; also after an error, none goes on."""
    device = torch.device("cpu")
    try:
        for target, source in parts:
            target.copy_(source, non_blocking=True)
            device = source.device if source.is_cuda else target.device
    finally:
        if device.type == "cuda":
            # With `non_blocking`, a copy from or to page-locked memory goes on after `copy_` has returned.
            torch.cuda.current_stream(device).synchronize()


def begin_copy_to_host(target: Tensor, source: Tensor, then: Callable[[], None]) -> Callable[[], None]:
    """Begin `copy_now` to the host, beside what the device does next; the result waits until it is done.

    `source` may not be written to before that, but may be freed.

    Args:
        then: queues what else is to be done after the copy, in its stream.
    """
    if not source.is_cuda:
        copy_now(target, source)
        then()
        return _nothing
    stream, done = _stream(source.device), torch.cuda.Event()  # type: ignore[no-untyped-call]
    # What computes `source` may still be under way in the current stream.
    stream.wait_stream(torch.cuda.current_stream(source.device))
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        then()
        done.record()
    # Otherwise torch could give the memory of a freed `source` to others while it is copied.
    source.record_stream(stream)
    return done.synchronize


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _clear_last_error(device: torch.device) -> None:
    """Clear the error that a refused call leaves behind, or the next kernel of the training would report it.

    torch has no name for `cudaGetLastError`, but calls it after every kernel.
    """
    with contextlib.suppress(RuntimeError):
        torch.empty(1, device=device).fill_(0)


def _nothing() -> None:
    pass
