"""Files in shared memory that are written again: page-locked once, assigned to a version, reused after it.

A pinned file is *renamed* into the version's directory and back, so its pages, and the mapping they are written
through, stay the same. A process that still reads an older version must never see the new bytes. An unload is not
enough: an engine that has no page-locked memory (vLLM on a CPU), and SGLang for some layers, keep the tensors of an
adapter as views of the mapped file for as long as they keep the adapter. So a pinned file is written again only when

- its version has been retired, and no path leads to it any more, not even a hard link, so that no process can open it,
- the kernel grants a write lease on it, which it does only if no other process has it open or mapped, under any user
  and in any container of this host. Workers that were handed the open file itself (`engine_plugins.shared_files`) are
  not counted by their mapping, and open it by its path for as long as they read.

A file that fails the second test is given up: its memory goes when the last reader does, and a new one takes its place.

Workers on this host may read the newest version from memory of the trainer's GPU (`engine_plugins.cuda_ipc`). It is
copied into its pinned file at the same time, and readers of the file wait until that is done
(`engine_plugins.unfinished`). So the file is there for all other readers, and for a worker that needs it again later.
Where workers cannot read the GPU, that copy goes on while the server gets the request to load.
"""

import contextlib
import fcntl
import itertools
import logging
import mmap
import os
import signal
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from trl_lora_sync.engine_plugins import unfinished
from trl_lora_sync.engine_plugins.cuda_ipc import DriverFor, GPUMemory, IPCError, Wait, driver_for
from trl_lora_sync.engine_plugins.pinned_memory import PinError, begin_copy_to_host, copy_now, pin
from trl_lora_sync.engine_plugins.shared_files import FileKey, Filled, SharedFiles
from trl_lora_sync.runtime import watch

logger = logging.getLogger(__name__)

_MODE = 0o600
# Bounds what comparing a file takes of the device's memory.
CHUNK_BYTES = 64 << 20
Pin = Callable[[Tensor, torch.device], Callable[[], None]]


class PinnedFile:
    """One file of a fixed size in shared memory, mapped and page-locked.

    Args:
        path: where to make it.
        size: in bytes; all of it is reserved at once, as writing to a mapped file on a full disk kills the process.
        device: where it will be written from.
        shared: through which workers of engines map it; None if they cannot.

    Raises:
        OSError: there is no room.
        PinError: the memory cannot be page-locked.
    """

    def __init__(
        self,
        path: Path,
        size: int,
        device: torch.device,
        lock: Pin = pin,
        shared: SharedFiles | None = None,
    ) -> None:
        self.path = path
        self.size = size
        self.device = device
        self._shared = shared
        self.is_awaited = False
        self._copying: list[tuple[int, Wait]] = []
        # Undone from the last to the first: workers drop the file, and pages are unlocked before they are unmapped.
        with contextlib.ExitStack() as undo:
            self._file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, _MODE)
            undo.callback(os.close, self._file)
            undo.callback(self._unlink)
            os.posix_fallocate(self._file, 0, size)
            self._map = mmap.mmap(self._file, size)
            undo.callback(self._unmap)
            self.memory = torch.frombuffer(self._map, dtype=torch.uint8)
            undo.callback(lock(self.memory, device))
            if shared is not None:
                shared.offer(self._file)
                undo.callback(shared.withdraw, self._file)
            self._undo = undo.pop_all()

    def fill(self, header: bytes, flat: Tensor) -> None:
        """Write `header` and then `flat`, which together are as large as the pinned file."""
        self.is_awaited = False
        self._map[: len(header)] = header
        copy_now(self.memory[len(header) :].view(flat.dtype), flat)
        self._end()

    def begin(
        self, header: bytes, begin_copy: Callable[[Tensor, int], Wait], *, part_bytes: int, is_awaited: bool
    ) -> None:
        """Write `header`, and begin to fill what follows it; readers wait for `finish`.

        Args:
            begin_copy: begins to fill memory with what is so many bytes after the header.
            part_bytes: size of the parts in which readers get what follows the header, each once it is complete.
        """
        do_wait = unfinished.begin(self._file)
        self.is_awaited = is_awaited
        self._map[: len(header)] = header
        start = len(header)
        for part in torch.split(self.memory[len(header) :], part_bytes):
            copying = begin_copy(part, start - len(header))
            start += len(part)
            self._copying.append((start, copying))
        if not do_wait:
            self.finish()

    @property
    def is_unfinished(self) -> bool:
        """Whether `finish` is still to come."""
        return bool(self._copying)

    def finish(self) -> None:
        """Wait for what `begin` began, if it did. Never fails, but after an error readers go on waiting."""
        # Taken first, so that a copy that has failed is reported once.
        copying, self._copying = self._copying, []
        if not copying:
            return
        try:
            for size, wait in copying:
                wait()
                unfinished.end(self._file, size)
        except Exception:
            logger.exception("An adapter version could not be copied from the GPU to %s.", self.path)
        else:
            self._end()

    @property
    def key(self) -> FileKey:
        """By which workers know it."""
        return FileKey.of(self._file)

    @property
    def is_shared(self) -> bool:
        """Whether workers of engines map it."""
        return self._shared is not None

    def _end(self) -> None:
        os.utime(self._file)  # a file that is written through memory does not look changed
        unfinished.end(self._file)

    def holds(self, header: bytes, flat: Tensor) -> bool:
        """Whether the file still has what `fill` wrote, bit by bit; compared on the device of `flat`."""
        if self._map[: len(header)] != header:
            return False
        expected = flat.view(torch.uint8)
        parts = torch.split(self.memory[len(header) :], CHUNK_BYTES)
        pairs = zip(parts, torch.split(expected, CHUNK_BYTES), strict=True)
        # Each comparison is queued behind its transfer on the same stream, so it needs no other wait.
        return all(torch.equal(part.to(flat.device, non_blocking=True), there) for part, there in pairs)

    def fits(self, size: int, device: torch.device) -> bool:
        """Whether a version of this size can have it; something else may have deleted it."""
        return (self.size, self.device) == (size, device) and self.is_at(self.path)

    def move(self, path: Path) -> None:
        self.path.rename(path)
        self.path = path

    def note_moved(self, path: Path) -> None:
        """Its path is another one by now, as its folder was renamed."""
        self.path = path

    def is_at(self, path: Path) -> bool:
        """Whether the file at `path` is this one."""
        try:
            return os.path.samestat(path.stat(), os.fstat(self._file))
        except OSError:
            return False

    def is_idle(self) -> bool:
        """Whether no other process has the file open or mapped, or has a path to it; False also if that is unknown.

        Source: fcntl(2), `F_SETLEASE`: a write lease needs that no other open file refers to it, and a mapping is one.
        """
        try:
            # A process that opens the file during the lease waits for these few microseconds, and this process gets a
            # signal; the default one would end it, and SIGURG is ignored (signal(7)).
            fcntl.fcntl(self._file, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(self._file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(self._file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError:
            return False
        # Also without readers now, a second path could be opened later.
        return os.fstat(self._file).st_nlink == 1

    def discard(self) -> None:
        """Give it up; other processes keep their mappings. Never fails, and may be called again."""
        # The copy from the GPU must not go on into memory that is unmapped.
        self.finish()
        self._undo.close()

    def _unlink(self) -> None:
        # Another file may have taken its place at this path.
        if self.is_at(self.path):
            self.path.unlink(missing_ok=True)

    def _unmap(self) -> None:
        del self.memory
        with contextlib.suppress(BufferError):  # an error's traceback may still hold a view; it goes with that
            self._map.close()


class PinnedFilePool:
    """The pinned files of one run: at most one more than versions have files, each written again once it is idle.

    With the `lora_sync_keep` versions that stay registered and the version that is being retired, that makes
    `lora_sync_keep + 2` pinned files of the adapter's size, which is also what as many plain files take at that moment.

    Not thread-safe.

    Args:
        shares: whether workers of engines may map the pinned files; see `engine_plugins.shared_files`.
        shares_gpu: whether they may read the newest version from the GPU as well, if it can be shared. Readers of a
            version's file must then wait until it is complete.

    Attributes:
        shared: hands the files to workers, from the first file on if `shares`.
    """

    def __init__(
        self,
        lock: Pin = pin,
        driver_for: DriverFor = driver_for,
        *,
        shares: bool = True,
        shares_gpu: bool = False,
    ) -> None:
        self._lock = lock
        self._driver_for = driver_for
        self._shares = shares
        # The second stays set when the GPU cannot be shared after all: workers wait for files in any case, so the copy
        # into the file may go on during the request.
        self._shares_gpu = self._readers_wait = shares_gpu
        self._memory: GPUMemory | None = None
        # From 1 on, because a worker that was offered nothing is at 0 (`engine_plugins.shared_files`).
        self._memories = itertools.count(1)
        self.free: list[PinnedFile] = []  # assigned to no version
        self._assigned: dict[str, PinnedFile] = {}
        self.new: list[PinnedFile] = []  # the next one, if it was made ahead of its use
        self._wanted: tuple[int, torch.device] | None = None  # by the last `acquire`
        self._numbers = itertools.count()
        self._is_given_up = False
        self.shared: SharedFiles | None = None

    def acquire(self, pool: Path, size: int, device: torch.device) -> PinnedFile | None:
        """A pinned file without readers, or None where pinned files cannot be had, which is warned of once.

        Args:
            pool: folder for files that are not assigned; on the file system of the versions, and private to this run.

        Raises:
            OSError: there is no room for another one.
        """
        self._wanted = size, device
        pinned = self._idle(size, device)
        if pinned is not None:
            self.free.remove(pinned)
            return pinned
        self._discard(self.free)  # of another size, or still read
        if self.new and self.new[0].fits(size, device):
            return self.new.pop()
        self._discard(self.new)
        return self._make(pool, size, device)

    def prepare(self, pool: Path) -> None:
        """Make the pinned file that the next `acquire` would have to make for the same size and device.

        Page-locking takes longer than the rest of a sync. Arguments and errors as for `acquire`.
        """
        if self._wanted is None or self.new:
            return
        if self._idle(*self._wanted) is None:
            self._discard(self.free)
            pinned = self._make(pool, *self._wanted)
            if pinned is not None:
                self.new.append(pinned)

    def assign(self, name: str, pinned: PinnedFile) -> None:
        """Let the version `name` have a pinned file, until `release`."""
        self._assigned[name] = pinned

    def assigned(self, name: str) -> PinnedFile | None:
        """The pinned file that the version `name` has, if it has one."""
        return self._assigned.get(name)

    def fill(
        self, pinned: PinnedFile, header: bytes, flat: Tensor, before_copy: Callable[[], object], *, noted_as: str = ""
    ) -> str:
        """See `PinnedFile.fill`; where workers read the GPU, the file may be complete only after `finish`.

        Args:
            before_copy: called before it is copied to the file. Workers that read the GPU are notified first, and
                workers that read the file afterwards, as they look for its parts again and again.
            noted_as: the name of the version if it has a note, so that workers can fetch it ahead of its load.

        Returns:
            The number of the GPU's memory that workers can read until the next `fill`; empty if there is none.
        """
        # The GPU's memory is written again below, so no copy from it may be under way.
        self.finish()
        shared = self.shared if noted_as else None
        try:
            memory = self._memory_for(flat)
            if memory is not None:
                # First, and the file is filled from `memory`: workers that read the GPU do not wait for the file, so
                # the next export may overwrite `flat` before the file is complete.
                memory.fill(flat)
                number = memory.offer.number
                if shared is not None:
                    shared.note_filled(Filled(flat.nbytes, memory=number, name=noted_as))
                before_copy()
                pinned.begin(header, memory.copy_to, part_bytes=flat.nbytes, is_awaited=False)
                return str(number)
        except IPCError as error:
            # For the rest of the run, or each sync would try it and log it again.
            self._shares_gpu = False
            level = logging.INFO if flat.is_cuda else logging.DEBUG
            logger.log(level, "Servers read adapter versions from files, not from the trainer's GPU: %s.", error)
        part_bytes = unfinished.PART_BYTES if self._readers_wait else flat.nbytes
        before_copy()
        if shared is not None:
            begun = shared.progress.promised
            shared.note_filled(Filled(flat.nbytes, 0, pinned.key, len(header), part_bytes, begun, noted_as))
        if self._readers_wait:
            # From `flat` itself, which the next export overwrites: a load ends after this copy, as workers and
            # `ServerHandle.load` wait for the file, and a version that fails is deleted after `finish`.
            data = flat.view(torch.uint8)

            def begin_copy(target: Tensor, start: int) -> Wait:
                note = (lambda: None) if shared is None else shared.progress.promise(flat.device)
                return begin_copy_to_host(target, data[start : start + len(target)], note)

            pinned.begin(header, begin_copy, part_bytes=part_bytes, is_awaited=True)
        else:
            pinned.fill(header, flat)
            if shared is not None:
                shared.progress.promise(torch.device("cpu"))()
        return ""

    def _memory_for(self, flat: Tensor) -> GPUMemory | None:
        if not self._shares_gpu or self.shared is None:
            return None
        # Larger memory stays, as workers read as many bytes from its beginning as the file has.
        if self._memory is not None and (self._memory.device != flat.device or self._memory.size < flat.nbytes):
            self._release_memory(self.shared.withdraw_memory())
        if self._memory is None:
            driver = self._driver_for(flat.device)
            self._memory = GPUMemory(next(self._memories), flat.nbytes, flat.device, driver)
            self.shared.offer_memory(self._memory.offer)
        return self._memory

    def finish(self) -> None:
        """Wait until the pinned files that were begun are complete; never fails."""
        for pinned in self._assigned.values():
            pinned.finish()

    def _release_memory(self, is_closed: bool) -> None:
        """Free the memory of the GPU, unless a worker may still read it."""
        memory, self._memory = self._memory, None
        if memory is None:
            return
        # To free memory that another process has open is undefined (CUDA's manual, `cudaIpcOpenMemHandle`).
        if not is_closed:
            logger.warning(
                "%.1f MB of the GPU are held until this process ends: a server on this host did not confirm that it "
                "has closed them.", memory.size / 1e6,
            )  # fmt: skip
            return
        try:
            memory.free()
        except IPCError as error:
            logger.warning("%.1f MB of the GPU could not be freed: %s.", memory.size / 1e6, error)

    def discard(self, name: str) -> None:
        """Give up the pinned file of a version that could not be written; does nothing for one without. Never fails."""
        pinned = self._assigned.pop(name, None)
        if pinned is not None:
            pinned.discard()

    def release(self, name: str, pool: Path, file: Path) -> None:
        """Move the file of a version that is over out of its directory; does nothing for one without. Never fails.

        Args:
            file: where the version has it. If that is another file by now, the pinned file is given up.
        """
        pinned = self._assigned.pop(name, None)
        if pinned is None:
            return
        # Until then the copy from the GPU may still write to it.
        pinned.finish()
        # `store.write_adapter` renames the folder after the file was moved into it, so the old path is outdated.
        pinned.note_moved(file)
        try:
            if not pinned.is_at(file):
                raise FileNotFoundError(file)
            pinned.move(pool / str(next(self._numbers)))
        except OSError:
            pinned.discard()
        else:
            self.free.append(pinned)

    def close(self) -> None:
        """Give up all pinned files, assigned ones included; never fails, and a later `acquire` makes new ones."""
        assigned = list(self._assigned.values())
        self._assigned.clear()
        for files in (self.free, self.new, assigned):
            self._discard(files)
        if self.shared is not None:
            # After the files, each of which is withdrawn through it.
            self._release_memory(self.shared.close())
            self.shared = None

    @property
    def held_bytes(self) -> int:
        """Size of all pinned files."""
        return sum(pinned.size for pinned in [*self.free, *self.new, *self._assigned.values()])

    def _idle(self, size: int, device: torch.device) -> PinnedFile | None:
        return next((pinned for pinned in self.free if pinned.fits(size, device) and pinned.is_idle()), None)

    def _make(self, pool: Path, size: int, device: torch.device) -> PinnedFile | None:
        if self._is_given_up:
            return None
        pool.mkdir(mode=0o700, exist_ok=True)
        if not is_in_memory(pool):
            self._give_up(
                f"{pool.parent.parent} is not in shared memory. Leave lora_sync_dir unset, or set it to a folder in "
                "/dev/shm"
            )
            return None
        try:
            # A new number each time, as a file that could not be deleted would be in the way of `O_EXCL`.
            return PinnedFile(pool / str(next(self._numbers)), size, device, self._lock, self._share(pool, device))
        except PinError as error:
            self._give_up(
                f"{size / 1e6:.1f} MB of shared memory cannot be page-locked. Raise the limit of locked memory "
                f"(ulimit -l; docker run --ulimit memlock=-1) ({error})"
            )
            return None

    def _share(self, pool: Path, device: torch.device) -> SharedFiles | None:
        if self.shared is None and self._shares:
            try:
                self.shared = SharedFiles(pool, watch, lambda memory: self._lock(memory, device))
            except OSError as error:
                logger.warning(
                    "Servers on this host read adapter versions instead of mapping them: %s: %s", pool, error
                )
        return self.shared

    def _give_up(self, why: str) -> None:
        # For the rest of the run, or each sync would try it and log it again.
        self._is_given_up = True
        logger.warning("Adapter versions are written the slow way, as plain files: %s.", why)

    @staticmethod
    def _discard(files: list[PinnedFile]) -> None:
        for pinned in files:
            pinned.discard()
        files.clear()


def is_in_memory(folder: Path) -> bool:
    """Whether a folder lies on a tmpfs, such as /dev/shm. Pages of other file systems cannot be locked for long.

    Source: proc(5), /proc/PID/mountinfo.
    """
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    fields = [mount.split() for mount in mounts]
    return any(field[2] == number and field[field.index("-") + 1] == "tmpfs" for field in fields)
