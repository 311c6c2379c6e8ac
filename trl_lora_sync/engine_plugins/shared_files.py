"""How workers of an engine map the files that a trainer on their host writes again and again, and page-lock them once.

A trainer may write a file again only if no other process can still read it, and the kernel counts the open files
and their mappings (see `adapter.pinned_files`). A worker that mapped the file by its path would be counted for as long
as it has the mapping. So the trainer passes its own open file through a socket: that is one open file, however many
processes map it. While a worker reads, it also has the file open by its path, and so it is counted then.

Where trainer and worker compute on GPUs, the worker also opens the trainer's memory there (`cuda_ipc`), and reads the
newest version from it instead.

The trainer sends a message when it begins to fill a file, and its GPU notes each part that is complete (`progress`). So
workers can fetch a version while the engine still handles the request to load it, or put it into a slot that was
reserved for it (`slot_writer`).

The socket is in the trainer's folder. Both ends accept only the same user. A worker drops what it has of a trainer once
the trainer withdraws a file or its process is gone, which closes the connection.
"""

import contextlib
import fcntl
import json
import os
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from trl_lora_sync.engine_plugins import logger
from trl_lora_sync.engine_plugins.cuda_ipc import DriverFor, IPCError, Offer, OpenedMemory, driver_for
from trl_lora_sync.engine_plugins.forks import keep_from_children
from trl_lora_sync.engine_plugins.pinned_memory import PinError, PinnedMapping, copy_each_now, pin
from trl_lora_sync.engine_plugins.progress import Progress, ProgressOf
from trl_lora_sync.engine_plugins.reservations import ReservationClient
from trl_lora_sync.engine_plugins.sockets import Watch, short_path

SOCKET = "files"
"""The socket's name in the folder that the trainer makes."""

_OFFER, _WITHDRAW, _MEMORY, _ALL, _PROGRESS, _FILLED = b"+", b"-", b"*", b".", b"#", b"="
# The longest message is an offer of memory, with about 200 bytes.
_MESSAGE_BYTES = 1024
# Locking the pages of a large file takes a part of a second.
PATIENCE_S = 2.0
# For the next part of a file, each of which takes a millisecond unless the trainer has stopped.
NEXT_PART_S = 0.5
_CREDENTIALS = struct.Struct("3i")


class FileKey(NamedTuple):
    """What a file is, whatever its path."""

    device: int
    inode: int

    @classmethod
    def of(cls, file: int | Path) -> "FileKey":
        """By an open descriptor, or by a path."""
        found = os.stat(file)  # noqa: PTH116 - `Path.stat` takes no descriptor
        return cls(found.st_dev, found.st_ino)


class Filled(NamedTuple):
    """Where workers can read the tensors of the next version: all of them now, or each part once it is complete.

    Attributes:
        size: of all tensors, in bytes.
        memory: the number of the GPU's memory that has them; 0 if the file has them.
        file: the key of that file.
        offset: where the tensors begin in the file.
        part_bytes: size of the parts of the file.
        begun: the number of `Progress` before the first part, with which it is one more.
        name: of the version.
    """

    size: int
    memory: int = 0
    file: FileKey = FileKey(0, 0)
    offset: int = 0
    part_bytes: int = 0
    begun: int = 0
    name: str = ""

    def encode(self) -> bytes:
        return json.dumps(self).encode()

    @classmethod
    def decode(cls, message: bytes) -> "Filled":
        """Raises ValueError, TypeError: it is none."""
        size, memory, file, offset, part_bytes, begun, name = json.loads(message)
        return cls(int(size), int(memory), FileKey(*file), int(offset), int(part_bytes), int(begun), str(name))


Fetch = Callable[[Tensor], None]
# Called with what is filled, and with what copies it to a tensor on the device; that is done when it returns.
OnFilled = Callable[[Filled, Fetch], None]


class SharedFiles:
    """The trainer's end: hands its open files to every worker that connects.

    Args:
        folder: private to the user; the socket is made in it.
        watch: how to hear of workers that connect.
        pin: page-locks memory that the trainer's GPU writes.

    Attributes:
        workers: a connection for each that has connected.
        progress: of the files that are being filled.
        reservations: of slots, with servers.

    Raises:
        OSError: the socket cannot be made there, or there is no room.
        PinError: memory cannot be page-locked.
    """

    def __init__(self, folder: Path, watch: Watch, pin: Callable[[Tensor], Callable[[], None]]) -> None:
        # Guards what follows, so that a worker that connects meanwhile gets each offer once.
        self._lock = threading.Lock()
        self._offered: dict[FileKey, int] = {}
        self._memory: Offer | None = None
        self.workers: list[socket.socket] = []
        self._is_closed = False
        # First, as the sockets of an attempt that fails would be in the way of the next one.
        self.progress = Progress(folder, pin)
        self.reservations = ReservationClient(folder, watch)
        # Messages keep their borders, and the end of a process is noticed at the other end (unix(7)).
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with short_path(folder / SOCKET) as path:
                self._listener.bind(path)
            self._listener.listen()
        except OSError:
            self._listener.close()
            self.reservations.close()
            self.progress.close()
            raise
        self._listener.setblocking(False)
        # Where no process listens, a connection is refused at once; a forked one would never answer.
        keep_from_children(self._listener)
        self._stop_listening = watch(self._listener, self._accept)

    def offer(self, file: int) -> None:
        """Let workers map a file, until `withdraw`, by its descriptor."""
        with self._lock:
            self._offered[FileKey.of(file)] = file
            self._tell(lambda worker: socket.send_fds(worker, [_OFFER], [file]))

    def withdraw(self, file: int) -> None:
        """Have workers drop a file; to be called before it is closed. Never fails."""
        with self._lock:
            key = FileKey.of(file)
            if self._offered.pop(key, None) is not None:
                self._tell(lambda worker: worker.send(_WITHDRAW + b"%d %d" % key))

    def note_filled(self, filled: Filled) -> None:
        """Let workers fetch a version ahead of its load. Never fails."""

        def send(worker: socket.socket) -> None:
            # Half of the room is left to the other messages. A worker that is behind fetches that version when it is
            # to be loaded.
            if _unread_bytes(worker) < worker.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2:
                worker.send(_FILLED + filled.encode())

        with self._lock:
            self._tell(send)

    def offer_memory(self, memory: Offer) -> None:
        """Let workers open memory of a GPU in the place of what was offered before; see `withdraw_memory`."""
        with self._lock:
            self._memory = memory
            self._tell(lambda worker: worker.send(_MEMORY + memory.encode()))

    def withdraw_memory(self) -> bool:
        """Have workers close the memory of the GPU. Never fails.

        They drop everything, and connect again when they need it.

        Returns:
            Whether all of them have confirmed it, so that the memory may be freed.
        """
        with self._lock:
            self._memory = None
            # By the end of the connections, and not by a message: a process that has ended confirms this too.
            workers, self.workers = self.workers, []
        # Without the lock: this waits, and `_accept` takes the lock on the loop, which serves all of the trainer.
        return self._disconnect(workers)

    def close(self) -> bool:
        """Withdraw everything; result as of `withdraw_memory`."""
        self._stop_listening()
        with self._lock:
            # A worker may still be accepted once, as `_stop_listening` does not wait.
            self._is_closed = True
            self._offered.clear()
            self._memory, had_memory = None, self._memory is not None
            workers, self.workers = self.workers, []
        self.progress.close()
        self.reservations.close()
        return self._disconnect(workers, waits=had_memory)

    @staticmethod
    def _disconnect(workers: list[socket.socket], *, waits: bool = True) -> bool:
        for worker in workers:
            with contextlib.suppress(OSError):
                # All are notified before the first one is waited for, so they close at the same time.
                worker.shutdown(socket.SHUT_WR)
        given_up_at = time.monotonic() + PATIENCE_S
        is_confirmed = True
        for worker in workers:
            if waits:
                # With 0 the socket would not block, and its error would count as a confirmation.
                worker.settimeout(max(given_up_at - time.monotonic(), 0.001))
                try:
                    worker.recv(1)  # a worker closes its end after the memory; a process that is gone has none open
                # Before OSError, which is its base class.
                except TimeoutError:
                    is_confirmed = False
                except OSError:
                    pass
            worker.close()
        return is_confirmed

    def _accept(self) -> None:
        try:
            worker, _ = self._listener.accept()
        except OSError:  # it has gone again
            return
        with self._lock:
            try:
                if self._is_closed or not _is_same_user(worker):
                    raise PermissionError
                worker.setblocking(False)  # a worker that hangs must not hold up the trainer
                socket.send_fds(worker, [_PROGRESS], [self.progress.file])
                for file in self._offered.values():
                    socket.send_fds(worker, [_OFFER], [file])
                if self._memory is not None:
                    worker.send(_MEMORY + self._memory.encode())
                # Last, so that a worker waits no longer for files that are not offered.
                worker.send(_ALL)
            except OSError:
                worker.close()
            else:
                # A worker drops the files of a trainer that is killed once no process has this end open.
                keep_from_children(worker)
                self.workers.append(worker)

    def _tell(self, send: Callable[[socket.socket], object]) -> None:
        for worker in list(self.workers):
            try:
                send(worker)
            except OSError:  # it is gone, or does not listen
                worker.close()
                self.workers.remove(worker)


class MappedFiles:
    """A worker's end: the files of all trainers that it has heard of.

    Args:
        device: that copies from the files.
        on_filled: called in the thread that listens to a trainer.
    """

    def __init__(
        self,
        device: torch.device,
        driver_for: DriverFor = driver_for,
        on_filled: OnFilled = lambda part, fetch: None,
    ) -> None:
        self._device = device
        self._driver_for = driver_for
        self._on_filled = on_filled
        self._trainers: dict[FileKey, _Trainer] = {}

    def mapped(self, file: int, socket_path: Path) -> AbstractContextManager[Tensor | None]:
        """The bytes of an open file, if its trainer shares it; they stay there until the block ends.

        Args:
            socket_path: of the trainer that wrote the file.
        """
        trainer = self._trainer_at(socket_path)
        return nullcontext() if trainer is None else trainer.mapped(FileKey.of(file))

    def opened(self, number: int, socket_path: Path) -> AbstractContextManager[OpenedMemory | None]:
        """The memory of this number that a trainer has offered, if it can be opened; open until the block ends."""
        trainer = self._trainer_at(socket_path)
        return nullcontext() if trainer is None else trainer.opened(number)

    def _trainer_at(self, path: Path) -> "_Trainer | None":
        try:
            key = FileKey.of(path)
        except OSError:
            return None
        # First, since the socket of a new trainer may get the inode of an old one.
        self._trainers = {key: one for key, one in self._trainers.items() if not one.is_gone}
        if key not in self._trainers:
            try:
                self._trainers[key] = _Trainer(path, self._device, self._driver_for, self._on_filled)
            except OSError as error:
                logger.warning("The files of a trainer are read instead of mapped: %s: %s", path, error)
                return None
        return self._trainers[key]


class _Trainer:
    """One connection, and what came through it."""

    def __init__(self, path: Path, device: torch.device, driver_for: DriverFor, on_filled: OnFilled) -> None:
        self._device = device
        self._driver_for = driver_for
        self._on_filled = on_filled
        self._changed = threading.Condition()
        self._maps: dict[FileKey, PinnedMapping] = {}
        self._progress: ProgressOf | None = None
        self._heard = 0  # the number of the memory that was offered last
        self._memory: OpenedMemory | None = None
        self._has_all = False
        self.is_gone = False
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with short_path(path) as short:
                self._connection.connect(short)
            if not _is_same_user(self._connection):
                raise PermissionError("it belongs to another user")
        except OSError:
            self._connection.close()
            raise
        # A daemon thread, because it waits for as long as the trainer lives.
        threading.Thread(target=self._listen, name="lora-sync-mapped-files", daemon=True).start()

    @contextmanager
    def mapped(self, key: FileKey) -> Iterator[Tensor | None]:
        with self._changed:
            # The first file is needed while it is still on its way.
            self._changed.wait_for(lambda: self.is_gone or key in self._maps or self._has_all, PATIENCE_S)
            # The lock is held until the block ends, so the listening thread cannot unmap what is being read.
            found = self._maps.get(key)
            yield None if found is None else found.data

    @contextmanager
    def opened(self, number: int) -> Iterator[OpenedMemory | None]:
        with self._changed:
            # The offer was made before any version in that memory.
            self._changed.wait_for(lambda: self.is_gone or self._heard >= number, PATIENCE_S)
            # The lock is held until the block ends, so the listening thread cannot close it meanwhile.
            yield self._memory if self._heard == number else None

    def _listen(self) -> None:
        try:
            while True:
                message, files, _, _ = socket.recv_fds(self._connection, _MESSAGE_BYTES, 1)
                if not message:
                    return
                try:
                    self._hear(message, files)
                finally:
                    for file in files:
                        # `mmap` has a duplicate of the descriptor.
                        os.close(file)
        # A broken connection counts as the end of the trainer, like an empty message.
        except OSError:
            pass
        finally:
            with self._changed:
                self.is_gone = True
                for one in self._maps.values():
                    one.close()
                self._maps.clear()
                if self._progress is not None:
                    self._progress.close()
                self._close_memory()
                self._changed.notify_all()
            self._connection.close()  # by which the trainer knows that the memory is closed

    def _hear(self, message: bytes, files: list[int]) -> None:
        # At the limit of open files, the kernel delivers the message without its descriptor (recvmsg(2), MSG_CTRUNC).
        if message == _PROGRESS and files:
            with contextlib.suppress(OSError, ValueError):  # without it, versions are fetched when they are loaded
                self._progress = ProgressOf(files[0])
        elif message == _OFFER and files:
            try:
                # Without the lock, as locking pages takes a part of a second, in which other files may be read.
                new = PinnedMapping(files[0], lambda memory: pin(memory, self._device))
            except (OSError, ValueError, PinError) as error:
                logger.warning("A file of a trainer is read instead of mapped: %s", error)
                return
            with self._changed:
                self._maps[FileKey.of(files[0])] = new
                self._changed.notify_all()
        elif message.startswith(_WITHDRAW):
            device, inode = message[1:].split()
            with self._changed:
                gone = self._maps.pop(FileKey(int(device), int(inode)), None)
                if gone is not None:
                    gone.close()
        elif message.startswith(_MEMORY):
            self._open(message[1:])
        elif message.startswith(_FILLED):
            self._tell_filled(message[1:])
        elif message == _ALL:
            with self._changed:
                self._has_all = True
                self._changed.notify_all()

    def _tell_filled(self, message: bytes) -> None:
        try:
            filled = Filled.decode(message)
        except (ValueError, TypeError):  # of a trainer of another version; its files are read as they are loaded
            return
        # Messages keep their order, so the file or memory was heard of before what fills it.
        self._on_filled(filled, lambda into: self._fetch(filled, into))

    def _fetch(self, filled: Filled, into: Tensor) -> None:
        """Copy a version to the device, each part once the trainer has filled it; done when it returns.

        Raises:
            IPCError: it cannot be read here, or its trainer has stopped.
        """
        # Without a wait as in `opened` and `mapped`, because what would be waited for is heard in this very thread.
        with self._changed:
            mapping = self._maps.get(filled.file)
            if filled.memory and filled.memory == self._heard and self._memory is not None:
                self._memory.copy_to(into)
            elif mapping is not None and self._progress is not None:
                data = mapping.data[filled.offset : filled.offset + filled.size]
                targets, sources = (torch.split(whole, filled.part_bytes) for whole in (into, data))
                # Not strict: of a file that is too short, as none of ours is, the checksum is another one.
                copy_each_now(self._complete(filled, zip(targets, sources, strict=False)))
            else:
                raise IPCError("the trainer's memory is not open here, or its file not mapped")

    def _complete(self, filled: Filled, parts: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Each part once it is complete."""
        assert self._progress is not None
        for number, part in enumerate(parts, filled.begun + 1):
            if not self._progress.wait_for(number, NEXT_PART_S):
                raise IPCError(f"the trainer has not filled it for {NEXT_PART_S:g} s")
            yield part

    def _open(self, message: bytes) -> None:
        try:
            offer = Offer.decode(message)
        except (ValueError, TypeError):
            logger.warning("A trainer offers memory of its GPU in another form; its files are read instead.")
            return
        opened: OpenedMemory | None = None
        try:
            # Without the lock: the first opening takes 0.2 s (H200), in which a version may be read from its file.
            opened = OpenedMemory(offer, self._device, self._driver_for(self._device))
        except IPCError as error:
            logger.warning("The files of a trainer are read instead of its GPU's memory: %s.", error)
        else:
            logger.info("Versions are read from the memory of the trainer's GPU, %s.", offer.gpu)
        with self._changed:
            self._close_memory()
            # The number is noted even if the memory cannot be opened, so that `opened` does not wait for it.
            self._heard, self._memory = offer.number, opened
            self._changed.notify_all()

    def _close_memory(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            try:
                memory.close()
            except IPCError as error:
                logger.warning("The memory of a trainer's GPU could not be closed: %s.", error)


def _unread_bytes(peer: socket.socket) -> int:
    """What the kernel keeps for the process at the other end. Source: unix(7), `SIOCOUTQ`."""
    (unread,) = struct.unpack("i", fcntl.ioctl(peer, termios.TIOCOUTQ, bytes(4)))  # which is the same number
    return int(unread)


def _is_same_user(peer: socket.socket) -> bool:
    """Whether the process at the other end belongs to the user of this one. Source: unix(7), `SO_PEERCRED`."""
    given = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(given)[1] == os.geteuid())
