"""The input of a check: a server, the values to compare it with, and a way to put adapters on it for a while."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trl_lora_sync.adapter.canonical import CanonicalAdapter, widened
from trl_lora_sync.adapter.store import StoredAdapter
from trl_lora_sync.checks.finding import NOTE, PROBLEM, Finding
from trl_lora_sync.checks.mixed_batches import SharedCPUServerError
from trl_lora_sync.checks.verify import Scores, TrainedBase, Trial, VerificationResult
from trl_lora_sync.engines.base import Capabilities, Deadline, Engine
from trl_lora_sync.engines.registry import restart_command
from trl_lora_sync.errors import LoRASyncError, ServerSetupError

if TYPE_CHECKING:
    from trl_lora_sync.servers.handle import ServerHandle
    from trl_lora_sync.servers.ledger import VersionLedger
    from trl_lora_sync.servers.transports import DiskTransport


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What servers are compared with. A run knows all of it; what `doctor` does not know is None or empty.

    Attributes:
        base: the base model that is trained.
        are_of_peer: whether its scores are another server's instead.
        unscored: why there are no scores of the trainer's.
        dtype: in which adapters are written.
        rank: of the adapters.
        target_modules: the layers that they change.
        wider: an adapter that is one wider than the trainer's.
        trials: what to try a server with, one for each group of modules.
        doubt: why these may not fit the server, and what to do; empty in a run.
    """

    base: TrainedBase = field(default_factory=TrainedBase)
    are_of_peer: bool = False
    unscored: str = ""
    dtype: str | None = None
    rank: int | None = None
    target_modules: tuple[str, ...] = ()
    wider: CanonicalAdapter | None = None
    trials: Sequence[Trial] = ()
    doubt: str = ""

    @classmethod
    def of_run(cls, base: TrainedBase, adapter: CanonicalAdapter, trials: Sequence[Trial]) -> "Expected":
        """What a trainer knows.

        Args:
            adapter: one as the trainer makes them, of which only the shapes are kept.
        """
        return cls(
            base=base,
            dtype=str(adapter.dtype).removeprefix("torch."),
            rank=adapter.rank,
            target_modules=adapter.target_modules,
            wider=widened(adapter),
            trials=trials,
        )


class TrialStore:
    """Puts adapters on servers for a while.

    Args:
        transport: how adapters reach the servers.
        ledger: which server has which version.
        clean_up_s: how long the unload of an adapter is waited for.
    """

    def __init__(self, transport: "DiskTransport", ledger: "VersionLedger", *, clean_up_s: float) -> None:
        self._transport = transport
        self._ledger = ledger
        self._clean_up_s = clean_up_s
        # No name is used twice, not even that of a trial.
        self._numbers = itertools.count(1)

    @asynccontextmanager
    async def stored(
        self, kind: str, servers: Sequence["ServerHandle"], adapter: CanonicalAdapter, deadline: Deadline
    ) -> AsyncIterator[StoredAdapter]:
        """Keep an adapter for the block, in which `servers` may load it, under a name that is not used again."""
        await self._transport.open(deadline)
        stored = await self._transport.write(f"{kind}{next(self._numbers)}", adapter, deadline)
        try:
            yield stored
        finally:
            # On all of them: where it was never loaded, the missing name counts as unloaded.
            # `asyncio.wait` leaves a late unload to go on, and its name on disk.
            await asyncio.wait([server.unload_later(stored.name) for server in servers], timeout=self._clean_up_s)
            # Last: vLLM reads an evicted adapter from its path again, and ends if the path is gone.
            await self._transport.delete(stored, keep_name=not self._ledger.is_gone(stored.name))


@dataclass
class Subject:
    """A server while it is checked, with what the checks so far have found.

    Attributes:
        store: None if no adapter can reach the server.
        base_logprobs: of `PROBE_PROMPT`, by its base model; empty until they are computed.
        scores: with and without the adapter of the current trial; None if nothing was scored.
        evidence: for each trial, how its scores compare with the trainer's.
    """

    server: "ServerHandle"
    expected: Expected
    store: TrialStore | None
    findings: list[Finding] = field(default_factory=list)
    base_logprobs: list[float] = field(default_factory=list)
    scores: Scores | None = None
    evidence: list[VerificationResult] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.server.base_url

    @property
    def engine(self) -> Engine:
        return self.server.engine

    @property
    def served(self) -> Capabilities:
        return self.engine.capabilities

    @property
    def is_strict(self) -> bool:
        """Whether another base model than the trainer's is an error wherever it can be seen."""
        return self.server.settings.verify != "off"

    @property
    def unfit_for_trials(self) -> str:
        """The reason to load no adapter there; empty if there is none."""
        if self.store is None:
            return "the server is elsewhere. Give --dir, a folder that it sees too."
        # vLLM survives a misfit. SGLang loads it, and crashes at the first batch with the requests of all clients.
        if self.served.rejects_shape_mismatch:
            return ""
        doubt = "Mend the problems first." if any(finding.error for finding in self.findings) else self.expected.doubt
        return doubt and f"{self.served.engine} crashes on an adapter that does not fit. {doubt}"

    @property
    def is_verified(self) -> bool:
        """Whether every trial was a proof."""
        # Without any trial there is nothing that proves it, and `all` of nothing is true.
        return bool(self.evidence) and all(one.confirms for one in self.evidence)

    def restart_command(self, *options: str, engine_options: Sequence[str] = (), model: str | None = None) -> str:
        """See `registry.restart_command`; with what the run needs, and a server does not report."""
        rank, settings = self.expected.rank, self.server.settings
        # A stock vLLM does not report its largest rank, and `serve` has 16 by default. Fused serving takes any.
        if rank is not None and "--lora-rank" not in options and not self.served.is_fused:
            options += ("--lora-rank", str(max(rank, self.served.max_lora_rank or 0)))
        if self.served.supports_push and self.server.sends_content:
            options += ("--push",)
        if settings.frees_kv_cache:
            options += ("--sleep",)
        is_local = self.server.address.is_local
        return restart_command(self.engine, *options, engine_options=engine_options, model=model, is_local=is_local)

    def other_base(self, evidence: str, message: str = "") -> ServerSetupError:
        served, name = self.served, self.expected.base.name
        restart = self.restart_command(model=name or "MODEL")
        return ServerSetupError(
            f"{self.url} serves {served.base_model!r} ({served.base_root}), which is not the base model "
            f"of the trainer, {name!r}: {evidence}. The adapter would be applied to the wrong weights. Restart the "
            f"server with the model that is being trained, {restart}, or point "
            f"vllm_server_base_url at the right server. {message}".rstrip()
        )


@dataclass(frozen=True)
class Offer:
    """An adapter to try servers with: the plan, its tensors in the form of all servers, and where these are stored."""

    trial: Trial
    adapter: CanonicalAdapter
    stored: StoredAdapter


# Status and message of a finding, and what a run logs; None where the question does not arise.
Found = tuple[str, str] | tuple[str, str, str] | None


@dataclass(frozen=True)
class Check:
    """One thing that must be true of a server.

    `look` raises the error that ends a run. The checks of an adapter get the offer as a third argument.
    """

    name: str
    look: Callable[..., Awaitable[Found]]

    async def __call__(self, subject: Subject, deadline: Deadline, *offer: Offer) -> Finding | None:
        try:
            found = await self.look(subject, deadline, *offer)
        # Any other error is a defect of a check, which must not pass for one of the server.
        except LoRASyncError as error:
            # Beside another client of a vLLM-CPU server nothing can be known of its base model.
            status = NOTE if isinstance(error, SharedCPUServerError) else PROBLEM
            return Finding(self.name, status, str(error), error=error)
        return found and Finding(self.name, *found)
