"""Brings a trainer's versions to the device of a worker, and compares them with what the trainer sent.

They come from the memory of the trainer's GPU if that can be opened, else from the trainer's file if that is mapped
here, and else they are read from the file. From the first two they come ahead: while the engine still handles the
request to load, another thread copies what the trainer has filled. Where a slot was reserved for the version, that
thread fills it as well.
"""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from trl_lora_sync.engine_plugins import logger, unfinished
from trl_lora_sync.engine_plugins.checksum import RepeatedChecksum
from trl_lora_sync.engine_plugins.cuda_ipc import IPCError
from trl_lora_sync.engine_plugins.pinned_memory import copy_now
from trl_lora_sync.engine_plugins.safetensors_file import Head, ParallelReader, bytes_of
from trl_lora_sync.engine_plugins.shared_files import Fetch, Filled, MappedFiles
from trl_lora_sync.engine_plugins.version_note import DAMAGED, VersionNote, digest_of

# The listening thread has other messages to hear, which must not wait for a long load.
_TURN_S = 0.5


class DamagedError(ValueError):
    """The bytes of a version are not what the trainer sent."""


class Staging:
    """Memory that versions of one size are fetched to, in turn.

    Attributes:
        data: uint8 of shape `(size,)`, on the device.
        checksum: returns that of what is there.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        # vLLM also loads within a step, in inference mode. Memory that is made in it cannot be filled outside of it.
        with torch.inference_mode(False):
            self.data = torch.empty(size, dtype=torch.uint8, device=device)
            # A recorded checksum reads this address, so `data` may be filled again but not replaced.
            self.checksum = RepeatedChecksum(self.data)
            if size:
                # Recorded here, in the thread of the engine; what is fetched ahead is compared in another one.
                self.checksum()


class Fetcher:
    """What one worker keeps between versions.

    Attributes:
        files: of all trainers.
        turn: held by the thread that fills or uses the memory `ahead_into`, for all of a version, or fills a slot.
        ahead_into: see `fetch_ahead_into`.
        put_ahead: puts what is there into the slot that was reserved for the version of this name, and returns the
            checksum of what the slot has then; None if none was reserved.
        done_ahead: called in turn with the name of a version, and that checksum, or nothing, at the end.
        counts: how many versions came which way.
        seconds: of the parts, of all versions together.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.files = MappedFiles(device, on_filled=self.fetch_ahead)
        self.turn = threading.RLock()  # again in `SlotWriter`, for what vLLM does within a load
        self.ahead_into: Staging | None = None
        self.put_ahead: Callable[[str], str | None] = lambda name: None
        self.done_ahead: Callable[[str, str], None] = lambda name, held: None
        self._ahead = ""  # the checksum of a version that was fetched ahead and is still there
        self._ahead_stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._reader = ParallelReader()
        # For reads on a GPU. Kept between versions, as pinning it takes longer than filling it.
        self._host = torch.empty(0, dtype=torch.uint8)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the time of the block to `seconds`."""
        started = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - started

    def fetch(
        self, name: str, folder: Path, file: int, head: Head, config: bytes, note: VersionNote, into: Staging
    ) -> None:
        """Fill memory on the device with the tensors of a version.

        Args:
            file: the descriptor of the file of the tensors.
            head: its beginning.
            config: the file `adapter_config.json`.
            into: of the size of its tensors.

        Raises:
            DamagedError: it is not what the trainer sent.
            OSError, ShortFileError: it cannot be read.
        """
        # The checksum covers the tensors only. With a damaged header, the right bytes would get wrong names or shapes.
        if digest_of(head.header, config) != note.head:
            raise DamagedError(
                f"{name!r} {DAMAGED}the header of its file or its configuration are not as the trainer wrote them. "
                "Nothing was loaded."
            )
        if self._has_ahead(note, into):
            self.counts["ahead"] += 1
            return
        if note.memory.isdecimal():
            with self.timed("fetch from GPU"):
                is_there = self._fetch_from_gpu(folder / note.files, note, into)
            if is_there:
                self.counts["from GPU"] += 1
                return
        with self.timed("fetch from file"):
            if note.files and self._copy_mapped(file, folder / note.files, head.start, into.data):
                self.counts["mapped"] += 1
            else:
                # Only here: memory of a GPU is filled before a note names it, and its copy to the file may go on.
                unfinished.wait(file)
                self.read(file, head.start, into.data)
                self.counts["read"] += 1
            found = into.checksum()
        if found != note.checksum:
            raise DamagedError(
                f"The file of {name!r} {DAMAGED}its tensors have the checksum {found}, and the trainer sent "
                f"{note.checksum}. Nothing was loaded."
            )

    def fetch_ahead_into(self, memory: Staging | None) -> None:
        """Where versions of its size are to be fetched from now on, ahead of their loads; None for nowhere.

        To be called in turn, as `fetch` with that memory.
        """
        self.ahead_into = memory
        self._ahead = ""

    def fetch_ahead(self, filled: Filled, fetch: Fetch) -> None:
        """Fetch what a trainer fills; to be called in another thread than `fetch`."""
        if not self.turn.acquire(timeout=_TURN_S):
            return
        held = ""
        try:
            held = self._fetch_ahead(filled, fetch)
        except (IPCError, RuntimeError) as error:
            logger.debug("A version is not fetched ahead of its load: %s", error)
        finally:
            self.done_ahead(filled.name, held)
            self.turn.release()

    def _fetch_ahead(self, filled: Filled, fetch: Fetch) -> str:
        into = self.ahead_into
        if into is None or into.data.numel() != filled.size:
            return ""
        self._ahead = ""  # also if this fails, as the memory is overwritten
        with self._beside_the_engine():
            fetch(into.data)
            held = self.put_ahead(filled.name)
            self._ahead = into.checksum() if held is None else held
        return held or ""

    @contextmanager
    def _beside_the_engine(self) -> Iterator[None]:
        """Use another stream than the engine, for whose steps nothing is to wait."""
        if self._ahead_stream is None:
            yield
            return
        # The device as well: a new thread has the first GPU, on which leaving the stream alone would make a context.
        with torch.cuda.device(self._device), torch.cuda.stream(self._ahead_stream):
            yield

    def _has_ahead(self, note: VersionNote, into: Staging) -> bool:
        """Whether memory has a version, fetched ahead, and it is what the trainer sent."""
        if into is not self.ahead_into:
            return False
        # Used once, and not at all if it is another version, as the memory is overwritten next.
        found, self._ahead = self._ahead, ""
        return found == note.checksum

    def _fetch_from_gpu(self, socket_path: Path, note: VersionNote, into: Staging) -> bool:
        """Copy the tensors from the memory of the trainer's GPU; False unless the version is there and still whole."""
        try:
            with self.files.opened(int(note.memory), socket_path) as memory:
                if memory is None:
                    return False
                memory.copy_to(into.data)
        except IPCError as error:
            # The file has the same bytes, so an error here costs time and no version.
            logger.warning("A version is read from its file instead of the trainer's GPU: %s.", error)
            return False
        return into.checksum() == note.checksum  # else a later version is there, and the file decides

    def _copy_mapped(self, file: int, socket_path: Path, start: int, into: Tensor) -> bool:
        """Copy what a trainer's file has from `start` on, each part once it is complete; False if it is not mapped."""
        for part in torch.split(into, unfinished.PART_BYTES):
            # Outside of the block, which keeps the mapping of a trainer that is gone, and with that its lock.
            unfinished.wait(file, start, len(part))
            with self.files.mapped(file, socket_path) as mapped:
                if mapped is None:
                    return False
                copy_now(part, mapped[start : start + len(part)])
            start += len(part)
        return True

    def read(self, file: int, start: int, into: Tensor) -> None:
        """Fill memory from a file with several threads, by its descriptor and from `start` on; compares nothing.

        Raises:
            OSError, ShortFileError: the file has less.
        """
        # It may be memory into which a version was fetched ahead.
        self._ahead = ""
        # On a CPU the threads fill the target itself. A GPU needs pinned memory in between to copy in the background.
        if self._device.type != "cuda":
            for _ in self._reader.read(file, bytes_of(into), start):
                pass
            return
        if self._host.numel() < into.numel():
            # Freed before its successor is allocated.
            self._host = torch.empty(0, dtype=torch.uint8)
            self._host = torch.empty(into.numel(), dtype=torch.uint8, pin_memory=True)
        host = self._host[: into.numel()]
        parts = self._reader.read(file, bytes_of(host), start)
        try:
            for part in parts:
                # Goes to the GPU while the threads read the next parts.
                into[part].copy_(host[part], non_blocking=True)
        finally:
            # After an error too: no thread may write to the memory, and no copy from it be under way, any more.
            parts.close()
            torch.cuda.current_stream(self._device).synchronize()
