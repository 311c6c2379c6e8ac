"""Which server holds which adapter version, who still samples from one, and when a version goes.

The only place that knows. Knows names and URLs, and nothing of engines, files or TRL.
"""

import contextlib
from collections.abc import Collection
from dataclasses import replace
from enum import Enum

from trl_lora_sync.adapter.store import StoredAdapter


class Holding(Enum):
    """What a server has of a version."""

    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"
    UNCONFIRMED = "unconfirmed"
    """An unload was not answered, so the server may still have it."""
    GONE = "gone"


class VersionLedger:
    """Versions of one run, on all of its servers.

    Attributes:
        active: the version that new requests name, with its tensors if any server is sent those; None before the first.
        kept: versions that are not retired, the active one last.
        leased: versions that were active and are still sampled from, as often as they are leased.

    Args:
        keep: how many versions stay loaded, the active one included.
    """

    def __init__(self, keep: int) -> None:
        self.active: StoredAdapter | None = None
        self.leased: list[StoredAdapter] = []
        self._keep = keep
        self._held: dict[tuple[str, str], Holding] = {}  # by URL and name, what is not gone
        self.kept: list[StoredAdapter] = []
        # By the last `retire`, which left their files in place.
        self._unloaded: list[StoredAdapter] = []

    # What servers hold

    def note(self, base_url: str, adapter_name: str, holding: Holding) -> None:
        """A server has changed, or has been requested to change, what it has of a version."""
        if holding is Holding.GONE:
            # Not kept as a value, or the table would grow by a name per version and server.
            self._held.pop((base_url, adapter_name), None)
        else:
            self._held[base_url, adapter_name] = holding

    def holding(self, base_url: str, adapter_name: str) -> Holding:
        return self._held.get((base_url, adapter_name), Holding.GONE)

    def note_listed(self, base_url: str, adapter_names: Collection[str]) -> None:
        """A server that was away lists these; it has lost the others, or its process was replaced."""
        # In whatever state: a load or an unload that is under way notes its outcome when it ends.
        for url, name in list(self._held):
            if url == base_url and name not in adapter_names:
                del self._held[url, name]

    def held(self, base_url: str, *states: Holding) -> list[str]:
        """The names that a server may have, in one of these states, or in whatever state."""
        return [name for (url, name), held in self._held.items() if url == base_url and (not states or held in states)]

    def is_gone(self, adapter_name: str) -> bool:
        """Whether no server may have a name any more."""
        # In any state: a load may have been carried out although its answer was lost.
        return all(name != adapter_name for _, name in self._held)

    # Versions

    def activate(self, stored: StoredAdapter) -> None:
        """All servers in service have it, so new requests name it, and a server that restarts is given it."""
        self.active = stored
        # A server that restarts needs the tensors of the active version only.
        self.kept.append(replace(stored, content=None))

    def lease(self) -> StoredAdapter:
        """Take the active version for sampling that may outlast it.

        Until it is given to `release`, it stays loaded, and a server that restarts is given this version as well.
        """
        # Needs no lock: one thread at a time leases and releases, and `retire` never takes the active version.
        assert self.active is not None
        self.leased.append(self.active)
        return self.leased[-1]

    def release(self, stored: StoredAdapter) -> None:
        """Give a lease back; does nothing after the end of the run, which ends all of them."""
        with contextlib.suppress(ValueError):
            self.leased.remove(stored)  # names distinguish versions, before any tensor is compared

    @property
    def needed(self) -> list[StoredAdapter]:
        """The versions that a server must have, the active one first."""
        # A copy, because a rollout loop leases and releases in another thread.
        found = {stored.name: stored for stored in [self.active, *self.leased.copy()] if stored is not None}
        return list(found.values())

    def retire(self) -> tuple[list[StoredAdapter], list[StoredAdapter]]:
        """The versions to unload now, and the versions to delete now.

        A version is unloaded once it is out of the window and without a lease. Its files go one version later.
        Source: vLLM re-reads an evicted adapter from its path inside the engine step, and ends if it is gone.
        """
        leased = {stored.name for stored in self.leased.copy()}
        # Also if nothing is unloaded now, so that files wait for one retirement, and not for the next unload.
        deletable = self._unloaded
        # `keep` is at least 1 (config.py); with 0 the slice would be empty, and nothing would ever go.
        self._unloaded = [stored for stored in self.kept[: -self._keep] if stored.name not in leased]
        self.kept = [stored for stored in self.kept if stored not in self._unloaded]
        return self._unloaded, deletable

    def retire_all(self) -> list[StoredAdapter]:
        """The end of the run: every version is to be unloaded now, and leases end.

        An interrupt may have come between a lease and where it is noted. A later training would then give this version
        to each server that restarts, although its files are deleted.
        """
        self.leased = []
        # The unload of what is in `_unloaded` was requested before, and `held` has what was not confirmed of it.
        loaded, self.kept, self._unloaded, self.active = self.kept, [], [], None
        return loaded
