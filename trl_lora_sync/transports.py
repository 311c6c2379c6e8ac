"""The ways an adapter version reaches a server: as files in a shared folder, or as tensors in the request itself."""

from collections.abc import Callable
from typing import Protocol

from trl_lora_sync.adapter.canonical import CanonicalAdapter
from trl_lora_sync.adapter.store import AdapterStore, StoredAdapter, new_run_id, sweep_leftovers


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
