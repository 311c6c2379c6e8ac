"""The ways an adapter version reaches a server: as files in a shared folder, or over HTTP."""

import asyncio
import shlex
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TypeVar

from trl_lora_sync.adapter.canonical import CanonicalAdapter
from trl_lora_sync.adapter.pinned_files import PinnedFilePool
from trl_lora_sync.adapter.store import AdapterStore, StoredAdapter, sweep_leftovers
from trl_lora_sync.engines.base import TIMEOUTS, Capabilities, Deadline, Timeouts
from trl_lora_sync.engines.vllm.spec import VLLM
from trl_lora_sync.errors import ServerSetupError
from trl_lora_sync.origin import install_command, install_elsewhere
from trl_lora_sync.runtime import BlockingThread
from trl_lora_sync.settings import ServerAddress, SyncSettings

T = TypeVar("T")


class DiskTransport:
    """Versions as directories that the servers read.

    A call to a shared file system that hangs cannot be ended. So all of them are made by one thread, in
    order, and only the wait for it ends at the deadline. What it finishes too late is deleted again.

    Args:
        timeouts: `close_s` bounds how long a clean-up is waited for.

    Attributes:
        store: what the thread writes with.
    """

    def __init__(self, store: AdapterStore, timeouts: Timeouts = TIMEOUTS) -> None:
        self.store = store
        self._timeouts = timeouts
        self._files = BlockingThread("lora-sync-files")

    @property
    def where(self) -> str:
        """Where versions are kept, in words."""
        seen = "" if self.store.is_seen_alike else f" (the server sees {self.store.server_root})"
        return f"{self.store.directory}{seen}"

    async def open(self, deadline: Deadline) -> None:
        """Get ready; does nothing if it is ready already.

        Raises:
            AdapterExportError: versions could not be kept there.
            DeadlineExceededError: the file system hangs.
        """
        await self._wait(self._files.submit(self.store.open), deadline)

    async def write(self, version: int | str, adapter: CanonicalAdapter, deadline: Deadline) -> StoredAdapter:
        """Keep a version under a unique name; errors as for `open`.

        After a `close` it gets ready again: an evaluation after the training publishes once more.
        """
        return await self.written(self.begin(version, adapter), deadline)

    def begin(self, version: int | str, adapter: CanonicalAdapter) -> "Future[StoredAdapter]":
        """The first part of `write`, which any thread may call."""
        writing = self._files.submit(partial(self._keep, version, adapter))
        # In the same thread, so that the files are complete before any later call, such as `check` or `delete`.
        self._files.submit(self.store.finish)
        return writing

    def _keep(self, version: int | str, adapter: CanonicalAdapter) -> StoredAdapter:
        return self.store.write(version, adapter)

    async def written(self, writing: "Future[StoredAdapter]", deadline: Deadline) -> StoredAdapter:
        """The second part."""
        try:
            return await self._wait(writing, deadline)
        except BaseException:
            # A call that has begun cannot be cancelled, so what it still writes is deleted after it, in that thread.
            if not writing.cancel():
                self._files.submit(lambda: self._delete_late(writing))
            raise

    async def _wait(self, task: "Future[T]", deadline: Deadline, held_up: str = "") -> T:
        waiting = asyncio.wrap_future(task)
        waiting.add_done_callback(lambda late: late.cancelled() or late.exception())  # else asyncio reports it
        # Not `wait_for`, which would cancel the call as well if it has not begun. Only `written` wants that.
        await asyncio.wait({waiting}, timeout=deadline.left_s())
        if not waiting.done():
            raise deadline.error(
                held_up
                or f"the file system of {self.store.directory} hangs. Set lora_sync_dir to another one, or look at its "
                "server"
            )
        return waiting.result()

    def _delete_late(self, writing: "Future[StoredAdapter]") -> None:
        if writing.exception() is None:
            self.store.delete(writing.result())

    async def finish(self, deadline: Deadline) -> None:
        """Wait until what was written is complete; errors as for `open`."""
        await self._wait(self._files.submit(self.store.finish), deadline)

    async def check(self, stored: StoredAdapter, adapter: CanonicalAdapter, deadline: Deadline) -> None:
        """Once servers have loaded a version, see that what they read is what was written.

        Args:
            adapter: what the version was made from.

        Raises:
            VerificationError: it is not.
        """
        await self._wait(self._files.submit(lambda: self.store.check(stored, adapter)), deadline)

    def prepare(self) -> None:
        """Prepare for the next version between syncs; returns at once, and never fails."""
        self._files.submit(self.store.prepare)

    async def delete(self, stored: StoredAdapter, *, keep_name: bool = False) -> None:
        """Release a version, but its name only if no server has it any more; never fails."""
        await self._clean_up(lambda: self.store.delete(stored, keep_name=keep_name))

    async def sweep(
        self, unload: Callable[[str], bool | None], knows: Callable[[str], bool], deadline: Deadline
    ) -> list[str]:
        """Remove what dead runs left behind, see `sweep_leftovers`."""
        root = self.store.root
        held_up = (
            "adapters of earlier runs are still being unloaded from the servers. To have that done beforehand, run "
            f"`trl-lora-sync sweep URL --dir {shlex.quote(str(root))}` for each server"
        )
        return await self._wait(self._files.submit(lambda: sweep_leftovers(root, unload, knows)), deadline, held_up)

    async def close(self, names: Collection[str] = ()) -> None:
        """Release everything but the names that a server may still have; never fails, and may be called again."""
        await self._clean_up(lambda: self.store.close(names))

    async def _clean_up(self, act: Callable[[], None]) -> None:
        # Not waited for as long as it takes: it is done as soon as the file system answers again.
        await asyncio.wait({asyncio.wrap_future(self._files.submit(act))}, timeout=self._timeouts.close_s)


class DiskAndHTTPTransport(DiskTransport):
    """Versions as directories for the servers that share a folder, and in memory for the others."""

    @property
    def where(self) -> str:
        return f"{super().where}, and over HTTP"

    def _keep(self, version: int | str, adapter: CanonicalAdapter) -> StoredAdapter:
        return _with_content(self.store.write, version, adapter)


class HTTPTransport(DiskTransport):
    """Versions that each server is sent when it loads them, inside the request or before it.

    Only the names are on disk, as empty folders, so that the next run can unload what a killed one left on the servers.
    """

    @property
    def where(self) -> str:
        return "no shared folder (sent over HTTP)"

    def _keep(self, version: int | str, adapter: CanonicalAdapter) -> StoredAdapter:
        # A copy: a server that restarts needs this version, and the next read of the model overwrites its memory.
        return _with_content(self.store.note, version, adapter)

    async def check(self, stored: StoredAdapter, adapter: CanonicalAdapter, deadline: Deadline) -> None:
        """Does nothing: a push carries a digest that the server compares, and there is no file."""


def _with_content(
    keep: Callable[[int | str, CanonicalAdapter], StoredAdapter], version: int | str, adapter: CanonicalAdapter
) -> StoredAdapter:
    content = adapter.on_host()  # first, as nothing would delete the version's folder if there is no memory for a copy
    return replace(keep(version, adapter), content=content)


def transport_for(
    settings: SyncSettings, sends_content: list[bool], *, is_on_gpu: bool, has_checksums: bool = False
) -> DiskTransport:
    """The transport that suits every server.

    Args:
        sends_content: for each server, whether it is sent adapters over HTTP; see `is_sent_content`.
        is_on_gpu: whether adapters are. A CPU writes a plain file as fast as a pinned one.
        has_checksums: whether a server compares what it has loaded with a checksum.
    """
    servers = [server.base_url for server in settings.servers]
    if all(sends_content):
        return HTTPTransport(AdapterStore(settings.root, servers=servers), settings.timeouts)
    kind = DiskAndHTTPTransport if any(sends_content) else DiskTransport
    # Only this host's kernel knows whether a file of this host is still read.
    are_local = all(server.is_local for server, sent in zip(settings.servers, sends_content, strict=True) if not sent)
    # A worker learns of the shared files and the GPU's memory from a version's note, which holds a checksum.
    pinned = PinnedFilePool(shares=has_checksums, shares_gpu=has_checksums) if is_on_gpu and are_local else None
    store = AdapterStore(
        settings.root,
        server_root=settings.server_root,
        servers=servers,
        pinned=pinned,
        has_checksums=has_checksums,
    )
    return kind(store, settings.timeouts)


def is_sent_content(settings: SyncSettings, address: ServerAddress, served: Capabilities) -> bool:
    """Whether adapters go to this server over HTTP, and not through a folder.

    `"auto"` takes the fastest way that is sure to work.

    Raises:
        ServerSetupError: the server does not offer the chosen way, or `"auto"` finds none; what to change.
    """
    choice = settings.transport
    shares_folder = address.is_local or settings.server_root is not None
    # On SGLang 0.5.15 (H200, 0.6B model, rank 32) a load from disk took 0.02 s, and one of tensors 0.47 s.
    if choice == "disk" or (choice == "auto" and shares_folder):
        return False
    if served.supports_tensor_load or (choice in ("auto", "push") and served.supports_push):
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
    here = f"run `{install_command('python')}` in the server's environment"
    installing = here if address.is_local else install_elsewhere()
    command = VLLM.serve_command(served.base_root, ["--push"], base_url=address.base_url, is_local=address.is_local)
    return ServerSetupError(
        f"{seen}. Choose one of two ways. To push adapters to vLLM, install this package beside it: {installing}. Then "
        f"restart the server with {command}. Or let both see one folder, and set lora_sync_dir to it "
        "and lora_sync_server_dir to where the server has it mounted, the same path included."
    )
