"""The ways an adapter version reaches a server: as files in a shared folder, or as tensors in the request itself."""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from trl_lora_sync.adapter.canonical import CanonicalAdapter
from trl_lora_sync.adapter.store import AdapterStore, StoredAdapter, new_run_id, sweep_leftovers
from trl_lora_sync.engines.base import Capabilities
from trl_lora_sync.errors import ServerSetupError
from trl_lora_sync.settings import ServerAddress, SyncSettings


class Transport(Protocol):
    """Holds the versions of one run until the servers need them no longer."""

    run_id: str

    @property
    def where(self) -> str:
        """Where versions are kept, in words."""

    def open(self) -> None:
        """Get ready; does nothing if it is ready already.

        Raises:
            AdapterExportError: versions could not be kept there.
        """

    def write(self, version: int | str, adapter: CanonicalAdapter) -> StoredAdapter:
        """Keep a version under a name of its own; errors as for `open`."""

    def delete(self, stored: StoredAdapter) -> None:
        """Let go of a version; never fails."""

    def sweep(self, forget: Callable[[str], None]) -> list[str]:
        """Remove what dead runs left behind, see `sweep_leftovers`."""

    def close(self) -> None:
        """Let go of everything; never fails, and may be called again."""


class DiskTransport(AdapterStore):
    """Versions as directories that the servers read."""

    @property
    def where(self) -> str:
        seen = "" if self.is_seen_alike else f" (the server sees {self.server_root})"
        return f"{self.directory}{seen}"

    def sweep(self, forget: Callable[[str], None]) -> list[str]:
        return sweep_leftovers(self.root, forget)


class DiskAndTensorTransport(DiskTransport):
    """Versions as directories for the servers that share a folder, and in memory for those that take tensors."""

    @property
    def where(self) -> str:
        return f"{super().where}, and in the load request itself"

    def write(self, version: int | str, adapter: CanonicalAdapter) -> StoredAdapter:
        return replace(super().write(version, adapter), content=adapter)


class TensorTransport:
    """Versions that exist only in the load request; needs no shared file system and nothing to clean up."""

    where = "the load request itself (no files)"

    def __init__(self) -> None:
        self.run_id = new_run_id()

    def open(self) -> None:
        pass

    def write(self, version: int | str, adapter: CanonicalAdapter) -> StoredAdapter:
        return StoredAdapter(
            name=f"{self.run_id}-v{version}",
            version=version if isinstance(version, int) else 0,
            rank=adapter.rank,
            target_modules=adapter.target_modules,
            payload_bytes=adapter.payload_bytes,
            content=adapter,
        )

    def delete(self, stored: StoredAdapter) -> None:
        pass

    def sweep(self, forget: Callable[[str], None]) -> list[str]:
        return []

    def close(self) -> None:
        pass


def transport_for(settings: SyncSettings, sends_tensors: list[bool]) -> Transport:
    """The transport that suits every server.

    Args:
        sends_tensors: for each server, whether it gets tensors; see `is_sent_tensors`.
    """
    if all(sends_tensors):
        return TensorTransport()
    kind = DiskAndTensorTransport if any(sends_tensors) else DiskTransport
    return kind(settings.root, server_root=settings.server_root)


def is_sent_tensors(settings: SyncSettings, address: ServerAddress, served: Capabilities) -> bool:
    """Whether adapters go to this server inside the request, and not through a folder.

    Raises:
        ServerSetupError: they should, and it does not take them.
    """
    if settings.transport == "tensors" and not served.takes_tensors:
        raise ServerSetupError(
            f"{address.base_url} runs {served.engine}, which takes adapters from disk only. Set "
            'lora_sync_transport="auto", and lora_sync_dir to a folder that the server can read.'
        )
    shares_folder = address.is_local or settings.server_root is not None
    return settings.transport == "tensors" or (
        settings.transport == "auto" and served.takes_tensors and not shares_folder
    )
