"""How far a trainer has come in filling its files, as one number in memory that the workers on its host see.

The trainer's GPU writes it, right after each part. So workers go on with the next part without a thread of the trainer
in between, which would wait for Python's lock first.
"""

import contextlib
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from trl_lora_sync.engine_plugins.pinned_memory import PinnedMapping

# Short against a part, of which 32 MB take 0.6 ms from a GPU.
_PAUSE_S = 0.00005
_BYTES = 8


class Progress:
    """The trainer's end.

    Args:
        folder: in shared memory; what is made in it has no name there.
        pin: page-locks memory, as `pinned_memory.pin`.

    Attributes:
        file: for workers, by its descriptor.
        promised: what the number will be once everything that was begun is complete.

    Raises:
        OSError: there is no room.
        PinError: the memory cannot be page-locked.
    """

    def __init__(self, folder: Path, pin: Callable[[Tensor], Callable[[], None]]) -> None:
        self.promised = 0
        with contextlib.ExitStack() as undo:
            opened = undo.enter_context(tempfile.TemporaryFile(dir=folder))
            self.file = opened.fileno()
            # Reserved, as writing to a mapped file on a full disk kills the process.
            os.posix_fallocate(self.file, 0, mmap.PAGESIZE)
            self._page = PinnedMapping(self.file, pin)
            undo.callback(self._page.close)
            self._undo = undo.pop_all()

    def promise(self, device: torch.device) -> Callable[[], None]:
        """Count one part more; the result notes that it is complete, after what is queued in the device's stream."""
        self.promised += 1
        number = self.promised

        def note() -> None:
            # Without a wait: a number from the host would be copied from memory that is not page-locked.
            here = self._page.data[:_BYTES].view(torch.int64)
            here.copy_(torch.full((1,), number, device=device), non_blocking=True)

        return note

    def close(self) -> None:
        """To be called once nothing is under way; may be called again."""
        self._undo.close()


class ProgressOf:
    """A worker's end.

    Args:
        file: of the trainer, by its descriptor, which may be closed afterwards.

    Raises:
        OSError, ValueError: it cannot be mapped.
    """

    def __init__(self, file: int) -> None:
        self._map = mmap.mmap(file, _BYTES, prot=mmap.PROT_READ)
        self._number = memoryview(self._map).cast("q")

    def wait_for(self, number: int, patience_s: float) -> bool:
        """Whether the trainer has come so far, or does within so many seconds."""
        given_up_at = time.monotonic() + patience_s
        while self._number[0] < number:
            if time.monotonic() > given_up_at:
                return False
            time.sleep(_PAUSE_S)
        return True

    def close(self) -> None:
        """To be called once."""
        self._number.release()
        self._map.close()
