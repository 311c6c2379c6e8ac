"""The ways an adapter version reaches a server: as files in a shared folder, or over HTTP."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from trl_lora_sync.adapter.canonical import CanonicalAdapter
from trl_lora_sync.adapter.store import AdapterStore, StoredAdapter, new_run_id, sweep_leftovers
from trl_lora_sync.engine_plugins.vllm_push import MIDDLEWARE
from trl_lora_sync.engines.base import Capabilities
from trl_lora_sync.errors import ServerSetupError


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


class PushTransport(TensorTransport):
    """Versions that each server is sent at the load; its engine deletes them there after their unload."""

    where = "the server's memory (pushed over HTTP)"


def choose_transport(
    choice: str, served: Capabilities, *, base_url: str, is_local: bool, root: Path, server_root: str | None
) -> Transport:
    """The way that adapters reach the server at `base_url`.

    Args:
        choice: `"disk"`, `"push"`, `"tensors"`, or `"auto"` for the fastest that is sure to work.
        served: what the server offers.
        is_local: whether it runs on this host.
        root: where the trainer writes versions.
        server_root: the same folder as the server sees it, if that was told.

    Raises:
        ServerSetupError: the server does not offer it, or `"auto"` finds no way; what to change.
    """
    if choice == "disk" or (choice == "auto" and (is_local or server_root is not None)):
        return DiskTransport(root, server_root=server_root)
    if choice in ("auto", "push") and served.takes_pushes:
        return PushTransport()
    if served.takes_tensors:  # what an engine offers in place of pushes
        return TensorTransport()
    if choice == "tensors":
        raise ServerSetupError(
            f"{base_url} runs {served.engine}, which takes no tensors in its load request. Set "
            'lora_sync_transport="auto" to find a way that it offers.'
        )
    seen = (
        f"{base_url} does not offer the push route"
        if choice == "push"
        else f"{base_url} is on another host, and no way is known by which an adapter reaches it"
    )
    raise ServerSetupError(
        f"{seen}. Choose one: install this package next to the server with `pip install --no-deps trl-lora-sync` and "
        f"restart it with --middleware {MIDDLEWARE}; or let both see one folder, and set lora_sync_dir to it and "
        "lora_sync_server_dir to where the server has it mounted, the same path included."
    )
