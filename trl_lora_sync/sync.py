"""The story of one weight sync: write, load, verify, activate, retire.

Runs on process 0 only and knows neither TRL nor PEFT nor HTTP. Versioned names make pausing the servers and flushing
their caches needless: no request can meet a half-loaded adapter, and no cache entry of one version fits another.

A server that refuses a version ends the sync on all servers. A lost server is waited for until the deadline. With
`lora_sync_on_server_loss="drop"` the run then goes on without it, and each later sync probes it and loads the new
version there (`Fleet.load`). What a lost server was sampling is sampled again, there or elsewhere. An interrupt cancels
the sync, which withdraws the version. `close` runs after `train()`, and `shutdown` when the interpreter exits or the
trainer is garbage (`generation.finalizer`). `_prepare` removes what a killed trainer left on servers and in the folder.

The trainer's threads call the methods without `async`; what they start runs on the event loop of `runtime`.
"""

import asyncio
import logging
import os
import shlex
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from statistics import fmean
from typing import Any

from trl_lora_sync.adapter.canonical import CanonicalAdapter, Form
from trl_lora_sync.adapter.store import StoredAdapter
from trl_lora_sync.checks.subject import Expected
from trl_lora_sync.checks.verify import ReadAdapter, Scores, TrainedBase, Trial, VerificationResult
from trl_lora_sync.engines.base import Completion, Deadline, PromptGroup, Sampling
from trl_lora_sync.errors import LoRASyncError
from trl_lora_sync.metrics import PhaseTimer, SyncReport
from trl_lora_sync.runtime import Event, Outcome, run, spawn
from trl_lora_sync.servers.fleet import Fleet
from trl_lora_sync.servers.ledger import VersionLedger
from trl_lora_sync.servers.transports import DiskTransport, transport_for
from trl_lora_sync.settings import SyncSettings

logger = logging.getLogger(__name__)

# The requests for it take a millisecond of Python, for which the trainer's thread would wait at the end of its sync.
_RETIRED_AFTER_S = 0.01
# Then the requests to load are on their way. The look at an 8B model holds Python's lock for up to 2.5 ms. Begun at
# once it keeps the second half of a request waiting, its body, and begun later it ends after the answer. A sync of 8B
# took 12.0 ms without a pause, 10.3 ms with this one and 10.9 ms with twice as much (two H200).
_SENT_AFTER_S = 0.001

ScoreAdapter = Callable[[], Scores | None]


class VerificationDueError(LoRASyncError):
    """A server has to be verified, and nothing was computed to verify it with. Never leaves this module."""


class _Beside:
    """What the trainer's thread does while the servers load; see `AdapterSync.publish`.

    Attributes:
        may_begin: set once nothing of the version needs this process any more, or it cannot be written.
        done: its outcome; no version is activated before it has succeeded.
    """

    def __init__(self, act: Callable[[], object] | None) -> None:
        self._act = act
        self.may_begin = Event()
        self.done = Outcome()

    def __call__(self) -> None:
        # Not beside the writing, which uses the same device.
        # `_publish` sets the event even if it fails, and its deadline bounds this wait.
        self.may_begin.wait_until_set()
        try:
            if self._act is not None:
                self._act()
        # Not an interrupt, after which `run` cancels `_publish` together with its wait for `done`.
        except Exception as error:  # raised by `_publish`, as a load that is broken off may outlive its unload
            self.done.set(error)
        else:
            self.done.set(None)


class AdapterSync:
    """Keeps all servers on the newest accepted version of one adapter."""

    def __init__(self, settings: SyncSettings) -> None:
        self.settings = settings
        self.ledger = VersionLedger(settings.keep)
        self.fleet = Fleet(settings, self.ledger)
        self._transport: DiskTransport | None = None
        self._next_version = 1
        self._retries_reported = 0
        self._retirement: asyncio.TimerHandle | None = None  # what is to come of the last sync
        self._layout: object = None  # names and shapes of the tensors that servers were verified with
        self._pid = os.getpid()

    @property
    def transport(self) -> DiskTransport:
        if self._transport is None:
            raise LoRASyncError("The servers are not connected; start() comes first.")
        return self._transport

    @property
    def active(self) -> StoredAdapter | None:
        """The version every new request names, or None before the first sync and after `close`."""
        return self.ledger.active

    def _check_process(self) -> None:
        """Refuse a forked child: connections, files and versions belong to its parent, which goes on using them."""
        if self._is_of_parent:
            raise LoRASyncError(
                f"The trainer was built in process {self._pid}, and this is process {os.getpid()}, a fork of it. The "
                "connections to the servers and the adapters there belong to the process that has built the trainer. "
                "Build it in the process that trains, such as in the function that multiprocessing.Process calls."
            )

    @property
    def _is_of_parent(self) -> bool:
        return os.getpid() != self._pid

    # The start

    def start(self, read: ReadAdapter, base: TrainedBase, trials: Sequence[Trial] = ()) -> str:
        """Connect, clean up after dead runs, and prove that each server can load and sample from such an adapter.

        Args:
            read: reads the model's current adapter; loaded on trial if there are no `trials`.
            base: the trainer's base model, to compare with the served ones.
            trials: adapters that show what a server samples from, however small the trained one is.

        Returns:
            One line about what was set up.

        Raises:
            LoRASyncError: a server cannot be used, and what to change.
        """
        # In three parts: `read` belongs to this thread, which has the model, and would hold up the loop. It comes after
        # the connection, because the form of an adapter depends on what the servers take.
        run(self.fleet.connect())
        adapter = read(self.form)
        run(self._prepare(adapter, Expected.of_run(base, adapter, trials)))
        return self._summary(adapter)

    async def _prepare(self, adapter: CanonicalAdapter, expected: Expected) -> None:
        fleet = self.fleet
        # Once the servers are connected: how an adapter reaches one depends on what that server offers.
        self._transport = transport_for(
            self.settings,
            [server.sends_content for server in fleet.servers],
            is_on_gpu=adapter.flat.is_cuda,
            has_checksums=any(server.engine.capabilities.checks_payload for server in fleet.servers),
        )
        deadline = self._control_deadline("Preparing the adapter folder")
        await self.transport.open(deadline)
        # Before any load: adapters that a killed run left on SGLang count in its --max-loaded-loras.
        for dead_run in await fleet.sweep(self.transport, deadline):
            logger.info("Removed what the run %s had left behind.", dead_run)
        # What the trials below prove. `publish` has all servers verified again once it sees another layout.
        self._layout = adapter.layout
        deadline = self._control_deadline("Checking the server with a trial adapter")
        # Without trials (lora_sync_verify="off") the trained adapter is loaded. It is not in `expected`, which serves
        # later checks as well, because the next read overwrites its memory.
        any_such = Trial(group="trained", modules=(), read=lambda form: adapter)
        await fleet.check(expected, self.transport, deadline, expected.trials or [any_such])
        # A server that cannot release its cache fails here, before the first step of the training.
        if self.settings.frees_kv_cache:
            await fleet.release_kv_cache(self._control_deadline("Releasing the KV cache"))
            await fleet.wake(self._control_deadline("Restoring the KV cache"))

    # One sync

    @property
    def form(self) -> Form:
        """In which every server takes an adapter."""
        return self.fleet.capabilities.form

    @property
    def needs_verification(self) -> bool:
        """Whether the next `publish` will score the adapter."""
        return self.fleet.needs_verification

    def publish(
        self,
        adapter: CanonicalAdapter,
        score: ScoreAdapter | None = None,
        timer: PhaseTimer | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> SyncReport:
        """Make an adapter the active version, on every server or on none.

        On any failure the previous version stays active with its files intact, and nothing of the new one is left.

        Args:
            adapter: read in `form`.
            score: computes the log-probabilities of `PROBE_PROMPT` with this adapter and without, or None where that
                cannot be done now; called only if a server needs to be verified. Without it, none is.
            timer: has been running since the sync began, if it began before this call.
            meanwhile: called while the servers load, once for each attempt; if it fails, so does the sync.

        Raises:
            AdapterExportError: it could not be written.
            AdapterRejectedError: a server refused it.
            VerificationError: a server computes something else with it.
            DeadlineExceededError: the sync outlived `sync_timeout_s`.
            ServerUnreachableError: a server did not come back in that time.
            LoRASyncError: this is a forked child.
        """
        self._check_process()
        timer = timer or PhaseTimer()
        # Of both attempts and the scores: other processes wait for all of it in one collective (`config`).
        deadline = self._control_deadline("The adapter sync")
        if adapter.layout != self._layout:  # a server may ignore a module that it was not tried with
            self._layout = adapter.layout
            self.fleet.require_verification()

        def attempt(probe: Scores | None, *, is_final: bool) -> SyncReport:
            version = self._next_version
            self._next_version += 1  # a name is never used again, not even after a failure
            # Here, as it takes a while until the loop begins. If an interrupt comes before that, `close` deletes the
            # files.
            writing = self.transport.begin(version, adapter)
            beside = _Beside(meanwhile)
            return run(self._publish(writing, adapter, probe, timer, beside, deadline, is_final=is_final), beside)

        # While no server needs to be verified, a version costs no forward pass of the trainer. If a server comes back
        # during the sync, the attempt is withdrawn, and repeated with scores.
        if score is not None and not self.needs_verification:
            try:
                return attempt(None, is_final=False)
            except VerificationDueError as error:
                logger.warning("%s", error)
        with timer.phase("verify"):
            probe = score() if score is not None and self.needs_verification else None
        return attempt(probe, is_final=True)

    async def _publish(
        self,
        writing: "Future[StoredAdapter]",
        adapter: CanonicalAdapter,
        probe: Scores | None,
        timer: PhaseTimer,
        beside: _Beside,
        deadline: Deadline,
        *,
        is_final: bool,
    ) -> SyncReport:
        """One attempt.

        Args:
            writing: begun by the transport.
            probe: log-probabilities of `PROBE_PROMPT`, for servers that need to be verified.
            deadline: of the whole sync.
            is_final: whether such a server may go unverified if there is no probe.

        Raises:
            VerificationDueError: it may not, and came back during this sync.
        """
        try:
            # Of the sync before, if its timer has not fired yet: the timer below takes its place in `_retirement`.
            self._retire_now()
            with timer.phase("write"):
                stored = await self.transport.written(writing, deadline)
        except BaseException:
            beside.may_begin.set()
            raise
        spawn(self._note_sent(stored, beside.may_begin, deadline))
        async with self._withdrawn_on_error(stored):
            with timer.phase("load"):  # waits for a server that is lost; a refusal by any server ends it
                server_load_s = await self.fleet.load(stored, deadline)
            await beside.done.wait()
            with timer.phase("verify"):
                # Where every server has compared what it holds with what was sent, that shows more than its files do.
                is_compared = stored.note is not None and self.fleet.capabilities.checks_payload
                # After the load: before it, files that are damaged later would pass.
                if self.settings.verify != "off" and not is_compared:
                    await self.transport.check(stored, adapter, deadline)
                if not is_final and self.fleet.needs_verification:
                    raise VerificationDueError("A server came back during the sync. It is verified before it is used.")
                evidence = [] if probe is None else await self.fleet.verify(stored, probe, deadline)
        self.ledger.activate(stored)  # from here on new requests name it, and a server that restarts is given it
        self.fleet.note_activation()
        self._retirement = asyncio.get_running_loop().call_later(_RETIRED_AFTER_S, self._retire_now)
        return self._report(stored, timer, server_load_s, evidence)

    async def _note_sent(self, stored: StoredAdapter, sent: Event, deadline: Deadline) -> None:
        try:
            if self.fleet.reserved_for == stored.name:
                return  # there is no request
            await asyncio.sleep(_SENT_AFTER_S)
            if stored.is_awaited:
                # The thread that has copied the file needs Python's lock to end the wait of the workers, and got it
                # after the look only: 5 ms after it had begun a copy of 175 MB.
                await self.transport.finish(deadline)
        except LoRASyncError:
            logger.debug("The file of %s is not complete yet, and its load still waits for that.", stored.name)
        finally:
            sent.set()

    def _report(
        self,
        stored: StoredAdapter,
        timer: PhaseTimer,
        server_load_s: dict[int, float],
        evidence: Sequence[VerificationResult],
    ) -> SyncReport:
        # The engines count over the whole run, and a report has what came since the one before.
        retries, self._retries_reported = self.fleet.retries - self._retries_reported, self.fleet.retries
        # An excluded server samples nothing, so what it has proved does not count.
        is_verified = all(server.is_verified for server in self.fleet.in_service)
        return SyncReport(
            adapter_name=stored.name,
            version=stored.version,
            payload_bytes=stored.payload_bytes,
            gather_s=timer.phases.get("gather", 0.0),
            write_s=timer.phases["write"],
            load_s=timer.phases["load"],
            verify_s=timer.phases["verify"],
            total_s=timer.total_s(),
            servers=len(self.fleet.in_service),
            # For a single server it is `load_s`.
            server_load_s=server_load_s if len(self.fleet.servers) > 1 else {},
            retries=retries,
            verify_gap=fmean(one.gap_mean for one in evidence) if evidence else None,
            verify_gap_max=max(one.gap_max for one in evidence) if evidence else None,
            is_verified=None if self.settings.verify == "off" else is_verified,
        )

    @asynccontextmanager
    async def _withdrawn_on_error(self, stored: StoredAdapter) -> AsyncIterator[None]:
        try:
            yield
        # BaseException, because an interrupt of the trainer cancels this task.
        except BaseException:
            # Unloaded even after a refusal: the request may have been carried out although its answer was lost.
            # `asyncio.wait` raises no error of an unload, and cancels none at its timeout.
            await asyncio.wait(self.fleet.unload_later(stored.name), timeout=self.settings.timeouts.close_s)
            # After the unload: a server that still carries out the load reads these files.
            await self._delete(stored)
            raise

    def _retire_now(self) -> None:
        """See `VersionLedger.retire`; unloaded and deleted beside the generation that follows. Once for each sync."""
        if self._retirement is None:
            return
        # The next sync, a release of the KV cache and the end of the run come here before the timer does, because the
        # unloads must be queued before what they do. The timer must then not retire once more.
        self._retirement.cancel()
        self._retirement = None
        unloaded, deletable = self.ledger.retire()
        for stored in unloaded:
            self.fleet.unload_later(stored.name)
        spawn(self._tidy_up(deletable))

    async def wait_for_unloads(self, deadline: Deadline) -> None:
        """Until the servers have answered for every version that is over."""
        self._retire_now()
        await self.fleet.wait_for_unloads(deadline)

    async def _tidy_up(self, deletable: Sequence[StoredAdapter]) -> None:
        await asyncio.gather(*map(self._delete, deletable))
        # After that, as a version that goes may leave its memory to the next one.
        self.transport.prepare()
        # Where the KV cache is released, the server is about to sleep, or does already.
        if self.active is not None and not self.settings.frees_kv_cache:
            coming = self.transport.store.after(self.active, self._next_version)
            if coming is not None:
                await self.fleet.reserve(coming, self._control_deadline("Reserving a slot for the next version"))

    async def _delete(self, stored: StoredAdapter) -> None:
        # A name that a server may still have stays as an empty folder, for the sweep of the next run.
        await self.transport.delete(stored, keep_name=not self.ledger.is_gone(stored.name))

    # Sampling

    def generate(
        self, model: str, groups: Sequence[PromptGroup], sampling: Sampling, deadline: Deadline
    ) -> list[list[Completion]]:
        """See `Engine.generate`; on all servers."""
        self._check_process()
        return run(self.fleet.generate(model, groups, sampling, deadline))

    def chat(
        self, bodies: Sequence[dict[str, Any]], count: int, sampling: Sampling, deadline: Deadline
    ) -> list[list[Completion]]:
        """Sample `count` completions for each OpenAI chat request, which name the same model."""
        self._check_process()
        return run(self.fleet.chat(bodies, count, sampling, deadline))

    # Memory between steps

    def sleep(self) -> None:
        """Let the servers give back their KV cache until the next `wake`; the base weights stay. Never fails."""
        if self.settings.frees_kv_cache:
            try:
                run(self._sleep())
            # A cache that is kept costs memory only, and the training may have room for it.
            except LoRASyncError as error:
                logger.warning("A server keeps its KV cache for now: %s", error)

    async def _sleep(self) -> None:
        self._retire_now()  # as unloads end before a server sleeps
        await self.fleet.release_kv_cache(self._control_deadline("Releasing the KV cache"))

    def wake(self) -> bool:
        """Take the KV cache back. Returns whether the active version can be sampled from; if not, publish it again."""
        self._check_process()
        return run(self.fleet.wake(self._control_deadline("Restoring the KV cache"))) and self.active is not None

    def generation_deadline(self) -> Deadline:
        """Of one generation that begins now."""
        return Deadline.after(self.settings.generation_timeout_s, "Generation (lora_sync_generation_timeout)")

    def _control_deadline(self, task: str) -> Deadline:
        return Deadline.after(self.settings.sync_timeout_s, f"{task} (lora_sync_timeout)")

    # The end

    def close(self) -> None:
        """Unload and delete every version; never fails, and may be called again. A later `publish` starts again.

        Servers that do not answer hold it up for `Timeouts.close_s` together. What they do not confirm
        is noted for the sweep of the next run. A forked child ends nothing, as it all belongs to its parent.
        """
        if not self._is_of_parent:
            run(self._close())

    async def _close(self) -> None:
        deadline = Deadline.after(self.settings.timeouts.close_s, "The end of the run")
        self._retire_now()
        # The servers first: vLLM ends if it reads an evicted adapter again and its files are gone.
        left = await self.fleet.let_go([stored.name for stored in self.ledger.retire_all()], deadline)
        if self._transport is not None:
            await self._transport.close({name for names in left.values() for name in names})
        for base_url, names in left.items():
            sweep = shlex.join(["trl-lora-sync", "sweep", base_url, "--dir", str(self.transport.store.root)])
            logger.warning(
                "%s did not confirm the unload of %s. The next run removes it, or: %s",
                base_url,
                ", ".join(names),
                sweep,
            )

    def shutdown(self) -> None:
        """`close` for good: the connections go too."""
        run(self._shut_down())

    async def _shut_down(self) -> None:
        await self._close()
        await self.fleet.disconnect()

    def _summary(self, adapter: CanonicalAdapter) -> str:
        served = [
            f"{one.engine} {one.version} at {server.base_url} serving {one.base_model}"
            for server in self.fleet.servers
            for one in [server.engine.capabilities]
        ]
        is_fused = any(server.engine.capabilities.is_fused for server in self.fleet.servers)
        # A server with fused serving takes any rank.
        loading = "fused serving, base model" if is_fused else "runtime loading, base model, rank"
        return (
            f"LoRA adapter sync: {', '.join(served)}; adapter rank {adapter.rank}, "
            f"{adapter.parameters / 1e6:.2f} M parameters, "
            f"{adapter.payload_bytes / 1e6:.1f} MB per sync as {str(adapter.dtype).removeprefix('torch.')}; versions "
            f"in {self.transport.where}; checked: adapter features, {loading}, a trial load and token."
        )
