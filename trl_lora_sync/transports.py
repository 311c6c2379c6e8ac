"""The ways an adapter version reaches a server: as files in a shared folder, or over HTTP."""

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from trl_lora_sync.adapter.canonical import CanonicalAdapter
from trl_lora_sync.adapter.slots import SlotRing
from trl_lora_sync.adapter.store import AdapterStore, StoredAdapter, sweep_leftovers
from trl_lora_sync.engines.base import Capabilities, Deadline
from trl_lora_sync.engines.known import serve_command
from trl_lora_sync.errors import ServerSetupError
from trl_lora_sync.settings import ServerAddress, SyncSettings

# Clean-up is worth waiting for, but not for long.
_CLEAN_UP_S = 5.0

T = TypeVar("T")


class Transport(Protocol):
    """Holds the versions of one run until the servers need them no longer."""

    run_id: str

    @property
    def where(self) -> str:
        """Where versions are kept, in words."""

    def open(self, deadline: Deadline | None = None) -> None:
        """Get ready; does nothing if it is ready already.

        Args:
            deadline: how long to wait; None for as long as it takes.

        Raises:
            AdapterExportError: versions could not be kept there.
            DeadlineExceededError: the file system hangs.
        """

    def write(self, version: int | str, adapter: CanonicalAdapter, deadline: Deadline | None = None) -> StoredAdapter:
        """Keep a version under a name of its own; arguments and errors as for `open`."""

    def prepare(self) -> None:
        """Get ready for the next version while nobody waits for it; returns at once, and never fails."""

    def delete(self, stored: StoredAdapter) -> None:
        """Let go of a version; never fails."""

    def sweep(self, forget: Callable[[str], None], deadline: Deadline | None = None) -> list[str]:
        """Remove what dead runs left behind, see `sweep_leftovers`."""

    def close(self) -> None:
        """Let go of everything; never fails, and may be called again."""


class DiskTransport:
    """Versions as directories that the servers read.

    A call to a shared file system that hangs cannot be ended by anybody. So all of them are made by one thread, in
    order, and only the waiting for it ends at the deadline. What it finishes too late is deleted again.

    Args:
        slots: see `AdapterStore`.
    """

    def __init__(self, root: Path, *, server_root: str | None = None, slots: SlotRing | None = None) -> None:
        self._store = AdapterStore(root, server_root=server_root, slots=slots)
        self._files = _Worker("lora-sync-files")
        self.run_id = self._store.run_id

    @property
    def root(self) -> Path:
        return self._store.root

    @property
    def directory(self) -> Path:
        return self._store.directory

    @property
    def where(self) -> str:
        seen = "" if self._store.is_seen_alike else f" (the server sees {self._store.server_root})"
        return f"{self.directory}{seen}"

    def open(self, deadline: Deadline | None = None) -> None:
        self._wait(self._files.submit(self._store.open), deadline)

    def write(self, version: int | str, adapter: CanonicalAdapter, deadline: Deadline | None = None) -> StoredAdapter:
        return self._keep(lambda: self._store.write(version, adapter), deadline)

    def _keep(self, write: Callable[[], StoredAdapter], deadline: Deadline | None) -> StoredAdapter:
        writing = self._files.submit(write)
        try:
            return self._wait(writing, deadline)
        except BaseException:
            if not writing.cancel():
                writing.add_done_callback(self._delete_late)
            raise

    def _wait(self, task: "Future[T]", deadline: Deadline | None) -> T:
        try:
            return task.result(None if deadline is None else deadline.left_s())
        except TimeoutError as error:
            if task.done() or deadline is None:  # raised by the task itself
                raise
            raise deadline.error(
                f"the file system of {self.directory} hangs. Set lora_sync_dir to another one, or look at its server"
            ) from error

    def _delete_late(self, writing: "Future[StoredAdapter]") -> None:
        if not writing.cancelled() and writing.exception() is None:
            self._store.delete(writing.result())

    def prepare(self) -> None:
        self._files.submit(self._store.prepare)

    def delete(self, stored: StoredAdapter) -> None:
        self._clean_up(lambda: self._store.delete(stored))

    def sweep(self, forget: Callable[[str], None], deadline: Deadline | None = None) -> list[str]:
        return self._wait(self._files.submit(lambda: sweep_leftovers(self.root, forget)), deadline)

    def close(self) -> None:
        self._clean_up(self._store.close)

    def _clean_up(self, act: Callable[[], None]) -> None:
        with contextlib.suppress(TimeoutError):  # done as soon as the file system answers again
            self._files.submit(act).result(_CLEAN_UP_S)


class _Worker:
    """Carries out tasks one after the other in a thread that the interpreter does not wait for at its end."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, act: Callable[[], T]) -> "Future[T]":
        task: Future[T] = Future()
        self._tasks.put((task, act))
        if self._thread is None or not self._thread.is_alive():  # not alive in a forked child
            self._thread = threading.Thread(target=self._work, args=(self._tasks,), name=self._name, daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # the interpreter is ending and starts no more threads
                self._thread = None
                while not self._tasks.empty():
                    _carry_out(*self._tasks.get())
        return task

    def __del__(self) -> None:
        self._tasks.put((Future(), _stop))

    @staticmethod
    def _work(tasks: "queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]]") -> None:
        while True:
            task, act = tasks.get()
            if act is _stop:
                return
            _carry_out(task, act)
            del task, act


def _stop() -> None:
    """Ends a worker's thread."""


def _carry_out(task: "Future[Any]", act: Callable[[], Any]) -> None:
    if not task.set_running_or_notify_cancel():
        return
    try:
        task.set_result(act())
    except BaseException as error:
        task.set_exception(error)


class DiskAndHTTPTransport(DiskTransport):
    """Versions as directories for the servers that share a folder, and in memory for those that are sent them."""

    @property
    def where(self) -> str:
        return f"{super().where}, and over HTTP"

    def write(self, version: int | str, adapter: CanonicalAdapter, deadline: Deadline | None = None) -> StoredAdapter:
        return replace(super().write(version, adapter, deadline), content=adapter.on_host())


class HTTPTransport(DiskTransport):
    """Versions that each server is sent when it loads them, inside the request or before it.

    Only the names are on disk, as empty folders, so that the next run can unload what a killed one left on the servers.
    """

    @property
    def where(self) -> str:
        return "no shared folder (sent over HTTP)"

    def write(self, version: int | str, adapter: CanonicalAdapter, deadline: Deadline | None = None) -> StoredAdapter:
        return replace(self._keep(lambda: self._store.note(version, adapter), deadline), content=adapter.on_host())


def transport_for(settings: SyncSettings, sends_content: list[bool]) -> Transport:
    """The transport that suits every server.

    Args:
        sends_content: for each server, whether it is sent adapters over HTTP; see `is_sent_content`.
    """
    if all(sends_content):
        return HTTPTransport(settings.root)
    kind = DiskAndHTTPTransport if any(sends_content) else DiskTransport
    # Only this host's kernel can tell whether a file of this host is still read.
    are_local = all(server.is_local for server, sent in zip(settings.servers, sends_content, strict=True) if not sent)
    return kind(settings.root, server_root=settings.server_root, slots=SlotRing() if are_local else None)


def is_sent_content(settings: SyncSettings, address: ServerAddress, served: Capabilities) -> bool:
    """Whether adapters go to this server over HTTP, and not through a folder.

    `"auto"` takes the fastest way that is sure to work.

    Raises:
        ServerSetupError: the server does not offer the chosen way, or `"auto"` finds none; what to change.
    """
    choice = settings.transport
    shares_folder = address.is_local or settings.server_root is not None
    if choice == "disk" or (choice == "auto" and shares_folder):
        return False
    if served.takes_tensors or (choice in ("auto", "push") and served.takes_pushes):
        return True
    if choice == "tensors":
        raise ServerSetupError(
            f"{address.base_url} runs {served.engine}, which takes no tensors in its load request. Set "
            'lora_sync_transport="auto" to find a way that it offers.'
        )
    if choice == "push":
        raise _no_way(f"{address.base_url} does not offer the push route", address, served)
    raise _no_way(
        f"{address.base_url} is on another host, and no way is known by which an adapter reaches it", address, served
    )


def _no_way(seen: str, address: ServerAddress, served: Capabilities) -> ServerSetupError:
    command = serve_command("vllm", served.base_root, ["--push"], base_url=address.base_url, is_local=address.is_local)
    return ServerSetupError(
        f"{seen}. Choose one: install this package next to the server with `pip install --no-deps trl-lora-sync` and "
        f"restart it with {command}; or let both see one folder, and set lora_sync_dir to it and "
        "lora_sync_server_dir to where the server has it mounted, the same path included."
    )
