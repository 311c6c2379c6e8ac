"""One server of a run, as a state machine: its engine, its checks, and what is known of it between requests."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import replace
from enum import Enum
from functools import partial

from trl_lora_sync.adapter.store import NextVersion, StoredAdapter
from trl_lora_sync.checks.adapter import mismatch_error
from trl_lora_sync.checks.listed import RunChecks
from trl_lora_sync.checks.subject import Expected, Subject
from trl_lora_sync.checks.verify import PROBE_PROMPT, Scores, VerificationResult, compare
from trl_lora_sync.engine_plugins import unfinished
from trl_lora_sync.engine_plugins.safetensors_file import TENSORS_FILE
from trl_lora_sync.engines.base import Deadline, Engine
from trl_lora_sync.engines.connect import connect_engine, reason_to_be_down, wait_until_up
from trl_lora_sync.errors import (
    AdapterExportError,
    AdapterLostError,
    AdapterRejectedError,
    DeadlineExceededError,
    LoRASyncError,
    ServerSetupError,
    ServerUnreachableError,
)
from trl_lora_sync.runtime import cancelled, offload, spawn
from trl_lora_sync.servers.cut_offs import CutOffs
from trl_lora_sync.servers.ledger import Holding, VersionLedger
from trl_lora_sync.servers.transports import is_sent_content
from trl_lora_sync.settings import ServerAddress, SyncSettings

logger = logging.getLogger(__name__)

# So many versions in a row are compared until one is a proof. After that, only those after 8, 16, 32, ... versions.
_PROOFS_IN_A_ROW = 8
# A version that is lost this often after its load is not lost by accident.
_MAX_LOSSES = 3


class ServerState(Enum):
    """CONNECTING -> READY -> LOST -> RECOVERING -> READY, and from LOST to EXCLUDED -> READY."""

    CONNECTING = "connecting"
    READY = "ready"
    LOST = "lost"
    """It could not be reached, or no longer has the active version."""
    RECOVERING = "recovering"
    EXCLUDED = "excluded"
    """The run goes on without it; each sync probes it."""


class ServerHandle:
    """One server. No other class writes its fields.

    Attributes:
        state: where it is, see `ServerState`.
        last_error: the error by which it was lost; None if it is not.
        loaded_at: when it had taken its last version, by `time.perf_counter`.
        base_logprobs: of `PROBE_PROMPT`, as its base model computed them when it was last checked.
        is_verified: whether this process of the server has been seen to sample from an adapter it was sent.
        sends_content: whether adapters go to it over HTTP.
        speed: samples per second in earlier generations.
        under_way: single requests that it works on.
        is_asleep: whether its KV cache is released.
        settings: of the run.
        ledger: which server has which version.
    """

    def __init__(self, address: ServerAddress, settings: SyncSettings, ledger: VersionLedger) -> None:
        self.address = address
        self.state = ServerState.CONNECTING
        self.last_error: LoRASyncError | None = None
        self.loaded_at = 0.0
        self.base_logprobs: list[float] = []
        self.is_verified = False
        self.sends_content = False
        self.speed: float | None = None
        self.under_way = 0
        self.is_asleep = False
        self.settings = settings
        self._timeouts = settings.timeouts
        self.ledger = ledger
        self._engine: Engine | None = None
        self._versions = 0  # how many this process of the server was given
        self._losses = 0
        self._lost_at = 0.0  # by the monotonic clock
        self._cut_offs = CutOffs(self.base_url, self._timeouts.cut_off_s)
        # Whether waking has cost it what was loaded then. Kept, as a load wakes it too, and the sync may fail after it.
        self._lacks_active = False
        self._retries_before = 0
        self._recovery = asyncio.Lock()  # one task at a time readmits it
        self._unloads = asyncio.Lock()  # in the order of the requests

    @property
    def base_url(self) -> str:
        return self.address.base_url

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise LoRASyncError(f"{self.base_url} is not connected; start() comes first.")
        return self._engine

    @property
    def is_excluded(self) -> bool:
        return self.state is ServerState.EXCLUDED

    @property
    def retries(self) -> int:
        """How many requests were sent again so far."""
        return self._retries_before + (self._engine.retries if self._engine is not None else 0)

    # Connecting

    async def connect(self, deadline: Deadline) -> None:
        """Wait until it is up and connect, also to a process that has replaced the one before.

        Raises:
            LoRASyncError: see `connect_engine`; or another engine runs there than before.
        """
        engine = await connect_engine(
            self.base_url,
            engine=self.settings.engine,
            is_local=self.address.is_local,
            deadline=deadline,
            serving=self.settings.serving,
            timeouts=self._timeouts,
        )
        served = engine.capabilities
        try:
            if self._engine is not None and served.engine != self.engine.capabilities.engine:
                raise ServerSetupError(
                    f"{self.base_url} ran {self.engine.capabilities.engine} when this run began and runs "
                    f"{served.engine} now. Adapters are written for the engines of the start. Start the same server "
                    "again."
                )
            # Before the engine is replaced: it raises if this process lacks the way that versions take, such as pushes.
            self.sends_content = is_sent_content(self.settings, self.address, served)
        except ServerSetupError:
            await engine.close()  # which nothing else refers to
            raise
        before, self._engine = self._engine, engine
        self.is_asleep = False
        self.require_verification()
        # A server that was lost gets ready in `_readmit`, after its checks.
        if self.state is ServerState.CONNECTING:
            self.state = ServerState.READY
        if before is not None:
            # A new engine counts from zero, and reports need the sum of the run.
            self._retries_before += before.retries
            engine.take_over(before)
            # Last, as an interrupt during this wait may leave nothing half done.
            await before.close()  # as soon as its requests have ended

    def note_checked(self, found: Subject) -> None:
        """It has passed all checks."""
        self.base_logprobs = found.base_logprobs
        self.is_verified = found.is_verified

    async def disconnect(self) -> None:
        if self._engine is not None:
            await self._engine.close()

    # Lost and found

    def lose(self, error: LoRASyncError, engine: Engine) -> None:
        """Remember an error that shows the server is away, unless it comes from a process that has been replaced.

        Raises:
            ServerSetupError: the adapter was lost again and again although it was loaded each time.
        """
        # Of several requests that fail together the first one counts, because one recovery is enough for all.
        if engine is not self._engine or self.last_error is not None:
            return
        if self.state is ServerState.READY:
            self.state = ServerState.LOST
        self._note_loss(error)

    def _note_loss(self, error: LoRASyncError) -> None:
        self.last_error = error
        self._lost_at = time.monotonic()
        if isinstance(error, AdapterLostError):
            self._losses += 1
            if self._losses > _MAX_LOSSES:
                raise ServerSetupError(
                    f"{self.base_url} loses every version that it is given. One server was expected there; does a "
                    f"proxy spread requests over several, or another client unload adapters? Give each server its own "
                    f"URL, separated by commas. {error}"
                ) from error

    def note_emptied(self) -> None:
        """All versions were unloaded, so nothing shows whether its process is replaced: the next version checks it."""
        if self.state is ServerState.READY:
            self.state = ServerState.LOST
            self.last_error = AdapterLostError(f"{self.base_url} has had no version since the end of a training.")
            # Already here, as the next sync looks before it begins whether it needs scores.
            self.require_verification()

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Count a single request while the block lasts."""
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1

    def note_success(self, speed: float | None = None) -> None:
        """A request for a version was answered; at so many samples per second, if that was measured."""
        self._losses = 0
        self.speed = speed or self.speed

    def exclude(self, error: LoRASyncError) -> None:
        """Go on without it until a sync finds it up."""
        self.state, self.last_error = ServerState.EXCLUDED, error

    async def recover(self, checks: RunChecks | None, deadline: Deadline, *, needs_active: bool = True) -> None:
        """Return when the server is fine; at once if it is, or if it is excluded, which only `readmit` ends.

        Args:
            needs_active: whether it must take the active version again; else a refusal of that is a warning.

        Raises:
            LoRASyncError: it is not before the deadline; or another server came up in its place; or as for `lose`.
        """
        seen = self.last_error
        # Again after another loss, as the server may crash while it gets its versions.
        while self.last_error is not None and not self.is_excluded:
            try:
                async with self._alone(deadline):
                    if not self.is_excluded:  # meanwhile
                        await self._readmit(checks, deadline, needs_active)
            except DeadlineExceededError as late:
                if isinstance(seen, ServerUnreachableError):
                    raise seen from late  # names the server
                raise
            except LoRASyncError as again:
                if not is_loss(again) or deadline.is_over():
                    raise
                seen = again
                # No other loss replaces it: after an AdapterLostError `_readmit` checks the process that answers.
                if isinstance(again, AdapterLostError):
                    self._note_loss(again)

    async def _readmit(self, checks: RunChecks | None, deadline: Deadline, needs_active: bool) -> None:
        """Wait until it is up; if it lacks a version that it needs, check it again and load all of these."""
        if self.last_error is None:
            return  # another task readmitted it meanwhile
        if self.state is ServerState.LOST:
            self.state = ServerState.RECOVERING
        try:
            await wait_until_up(
                self.base_url,
                is_local=self.address.is_local,
                deadline=deadline,
                is_asleep=self.is_asleep,
                if_down=self._if_down,
            )
            # After a short outage the same process may answer. If it has all versions, it is not checked again.
            loaded = await self.engine.loaded(deadline)
            self.ledger.note_listed(self.base_url, loaded)
            needed = self._needed()
            # If nothing is needed, nothing shows whether the process was replaced, so it is checked.
            is_complete = needed and all(stored.name in loaded for stored in needed)
            # After an AdapterLostError another process may run there, whatever it lists. So it may on an excluded
            # server: a load that failed may have been carried out, by a process that had just replaced the one before.
            if not is_complete or self.is_excluded or isinstance(self.last_error, AdapterLostError):
                # First, as connecting and the checks sample, which ends an SGLang process that is asleep. A process
                # that lists a version may be the same as before the loss.
                if self.ledger.held(self.base_url):
                    await self.wake(deadline)
                await self.connect(deadline)
                # Checked before any load: SGLang crashes on an adapter that does not fit its base model.
                if checks is not None:
                    self.note_checked(*await checks.require([self], deadline))
                for stored in needed:
                    await self._reload(stored, deadline, needs_active)
            else:
                self._cut_offs.note(self.last_error, self._lost_at)
            # An excluded server keeps its error until `readmit` has loaded the new version as well.
            if not self.is_excluded:
                self._serve_again()
        finally:
            # After a failed attempt it is lost again, so that the next one tries to reach it.
            if self.state is ServerState.RECOVERING:
                self.state = ServerState.LOST

    @property
    def _if_down(self) -> str:
        """What to do about a server that has answered in this run and answers no longer."""
        active = self.ledger.active
        start = Subject(self, Expected(rank=active.rank if active else None), None).restart_command()
        go_on = ""
        if len(self.settings.servers) > 1 and self.settings.on_server_loss == "error":
            go_on = ' With lora_sync_on_server_loss="drop", a run goes on without a lost server.'
        return (
            f"It answered earlier in this run. Start it again on its host with {start}; once the run has ended, resume "
            f"it from its last checkpoint.{go_on}"
        )

    def _alone(self, deadline: Deadline) -> AbstractAsyncContextManager[None]:
        return held(self._recovery, deadline, f"another attempt to reach {self.base_url} still runs")

    def _serve_again(self) -> None:
        # After all else: other tasks send requests to a server without an error.
        self.state, self.last_error = ServerState.READY, None
        # What it missed while it was away.
        for name in self.ledger.held(self.base_url, Holding.UNLOADING, Holding.UNCONFIRMED):
            self.unload_later(name)

    def _needed(self) -> list[StoredAdapter]:
        """A fused server has one version at a time, and a version is activated only after the batch before it."""
        is_fused = self.engine.capabilities.is_fused
        return [stored for stored in self.ledger.needed if stored is self.ledger.active or not is_fused]

    async def _reload(self, stored: StoredAdapter, deadline: Deadline, needs_active: bool) -> None:
        try:
            await self.load(stored, deadline)
            await self.engine.warm_up(stored, deadline)
        except AdapterRejectedError as error:
            self.ledger.note(self.base_url, stored.name, Holding.GONE)
            if needs_active:
                raise
            logger.warning("%s had lost %s and could not be given it again. %s", self.base_url, stored.name, error)
            return
        logger.warning("%s had lost %s; it was given it again.", self.base_url, stored.name)
        if stored.name not in [needed.name for needed in self.ledger.needed]:  # retired meanwhile, or the run is over
            self.unload_later(stored.name)

    async def reason_to_be_down(self) -> ServerUnreachableError | None:
        """Why it does not answer now; None if it does."""
        return await reason_to_be_down(
            self.base_url,
            is_local=self.address.is_local,
            timeouts=self._timeouts,
            is_asleep=self.is_asleep,
            if_down=self._if_down,
        )

    async def readmit(self, checks: RunChecks | None, stored: StoredAdapter, deadline: Deadline) -> None:
        """Take an excluded server back with a new version if it is up; never fails, as the others go on without it."""
        # A short probe, because `_readmit` waits for a server until its deadline, and so would each sync.
        reason = await self.reason_to_be_down()
        if reason is not None:
            logger.info("%s stays excluded: %s", self.base_url, reason)
            return
        try:
            # The other half is for what follows the load on the servers in service.
            half = Deadline.after(deadline.remaining_s() / 2, f"Taking {self.base_url} back")
            async with self._alone(half):
                await self._readmit(checks, half, needs_active=False)
                await self.load_new(stored, half)
        except LoRASyncError as error:
            logger.warning("%s is up again but stays excluded: %s", self.base_url, error)
        else:
            self._serve_again()
            logger.warning("%s is back.", self.base_url)

    # Adapters

    def form_of(self, stored: StoredAdapter) -> StoredAdapter:
        """The version in the way this server gets it."""
        # Both engines send the tensors of a version that has no `server_path`.
        if self.sends_content or stored.server_path is None:
            return replace(stored, path=None, server_path=None)
        return replace(stored, content=None)

    async def load_new(self, stored: StoredAdapter, deadline: Deadline) -> None:
        """Load a new version beside the active one.

        Raises:
            AdapterLostError: the active version is gone, so another process may run there, of another base model.
            LoRASyncError: see `Engine.load` and `Engine.warm_up`.
        """
        active = self.ledger.active
        has_active = active is not None and self.ledger.holding(self.base_url, active.name) is Holding.LOADED
        loaded = await self.load(stored, deadline)
        # Between loading and the first use, which an engine with another base model may not survive.
        if active is not None and has_active and active.name not in loaded:
            self.ledger.note_listed(self.base_url, loaded)
            raise AdapterLostError(f"{self.base_url} no longer knows {active.name!r}; it was restarted.")
        await self.engine.warm_up(stored, deadline)
        self.note_success()
        self.loaded_at = time.perf_counter()

    async def load(self, stored: StoredAdapter, deadline: Deadline) -> dict[str, str]:
        """Load a version, awake and inside a pause if there is to be one; result and errors as of `Engine.load`."""
        # Before the request, whose answer may be lost: the name counts as held until an unload is confirmed.
        self.ledger.note(self.base_url, stored.name, Holding.LOADING)
        # SGLang ends if it samples without its KV cache, and `warm_up` samples. Before the pause, because on vLLM
        # waking resumes generation as well (`VLLMEngine.restore_kv_cache`).
        await self.wake(deadline)
        if stored.is_unfinished and not self.engine.capabilities.checks_payload:
            await offload(partial(_wait_for_file, stored, deadline))  # as its workers do not wait
        async with self._paused(deadline):
            loading = spawn(self.engine.load(self.form_of(stored), deadline))
            try:
                # Without the shield, a cancellation of this would reach the load at its current await.
                loaded = await asyncio.shield(loading)
            except asyncio.CancelledError:
                # A server completes it in any case, and an unload that overtook it would find no such name, which would
                # then stay.
                await asyncio.wait({loading}, timeout=self._timeouts.wait_for_abort_s)
                await cancelled([loading])
                raise
        self.ledger.note(self.base_url, stored.name, Holding.LOADED)
        return loaded

    @asynccontextmanager
    async def _paused(self, deadline: Deadline) -> AsyncIterator[None]:
        """Stop other clients' generation during the block if `lora_sync_pause` is set; always resumed.

        Unloads end first: an unload that waits for a paused request would keep the load waiting as well.
        """
        if self.settings.pause == "off":
            yield
            return
        await self.wait_for_unloads(deadline)
        try:
            # Inside `try`: it may be paused although the answer was lost, and resuming without a pause is harmless.
            await self.engine.pause(self.settings.pause, deadline)
            yield
        finally:
            # A new deadline, as that of the sync may be over, and a server that stays paused serves no client.
            await self.engine.resume(Deadline.after(self._timeouts.unload_s, "Resuming generation"))

    def unload_later(self, adapter_name: str, deadline: Deadline | None = None) -> "asyncio.Task[bool]":
        """Beside the training, one at a time: an unload may wait on the server, and may never hold up a step.

        Returns:
            Whether the server confirmed it; if not, the unload is repeated with the next one, and at the end.
        """
        if self._may_have(adapter_name):
            # Before the task gets its turn: from here on the name does not count as loaded.
            self.ledger.note(self.base_url, adapter_name, Holding.UNLOADING)
        return spawn(self._unload(adapter_name, deadline))

    async def _unload(self, adapter_name: str, deadline: Deadline | None) -> bool:
        # SGLang holds one lock for a whole unload (`lora_update_lock`, 0.5.11 to 0.5.23), so a second request would
        # only wait there. asyncio's locks are fair: `let_go` relies on the order of the turns.
        async with self._unloads:
            if not self._may_have(adapter_name):
                return True
            deadline = deadline or Deadline.after(self._timeouts.unload_s, f"Unloading {adapter_name}")
            is_confirmed = False
            # With the names that were not confirmed before. A missing name counts as unloaded: repeating is harmless.
            # Without those in UNLOADING, whose unload is queued or runs already.
            for name in dict.fromkeys([*self.ledger.held(self.base_url, Holding.UNCONFIRMED), adapter_name]):
                # An excluded server gets no request; `_serve_again` unloads what it missed.
                is_confirmed = not self.is_excluded and await self.engine.unload(name, deadline)
                self.ledger.note(self.base_url, name, Holding.GONE if is_confirmed else Holding.UNCONFIRMED)
        if not is_confirmed:
            logger.info("%s did not confirm the unload of %s; training is not affected.", self.base_url, adapter_name)
        return is_confirmed

    def _may_have(self, adapter_name: str) -> bool:
        # Of those in service any may: a process can be replaced, and list what a killed run has left under that name.
        # An excluded one was sent nothing since, and would hold a name for each version of the rest of the run.
        is_gone = self.ledger.holding(self.base_url, adapter_name) is Holding.GONE
        return self._engine is not None and not (self.is_excluded and is_gone)

    async def wait_for_unloads(self, deadline: Deadline) -> None:
        # Unloads that were requested in this very step have no turn yet, and from Python 3.12 on `asyncio.wait_for`
        # takes a free lock at once.
        await asyncio.sleep(0)
        # The lock is fair, so this is the turn after all unloads that were requested before.
        async with held(self._unloads, deadline, f"{self.base_url} is still unloading earlier versions"):
            return

    async def reserve(self, coming: NextVersion, deadline: Deadline) -> bool:
        """Between two syncs, and after the unloads, see `Engine.reserve`; never fails."""
        if self.is_excluded or self.last_error is not None:
            return False
        try:
            await self.wait_for_unloads(deadline)
            return await self.engine.reserve(coming, deadline)
        except LoRASyncError as error:
            logger.debug("%s reserves no slot for %s: %s", self.base_url, coming.name, error)
            return False

    # Verification

    def require_verification(self) -> None:
        """Have it compared with the trainer again, from the next version on."""
        self.is_verified = False
        self._versions = 0

    def note_activation(self) -> None:
        """One more version was given to it, after it was woken."""
        self._versions += 1
        self._lacks_active = False

    @property
    def needs_verification(self) -> bool:
        """Whether to compare the next version with the trainer: the first one, and others until one is a proof.

        An adapter that is still too small to show will be so for a while, so the pauses between attempts grow.
        """
        if self.settings.verify != "first":
            return self.settings.verify == "every"
        is_power_of_two = not self._versions & (self._versions - 1)
        return not self._versions or (not self.is_verified and (self._versions < _PROOFS_IN_A_ROW or is_power_of_two))

    async def verify(self, stored: StoredAdapter, trained: Scores, deadline: Deadline) -> VerificationResult:
        """Compare what it computes under a loaded version with what the trainer computes.

        Raises:
            VerificationError: it is not the same.
            LoRASyncError: scoring failed, see `Engine.score`.
        """
        # The base is not scored again: it stays the same while the process runs, and a new process is checked first.
        adapted = await self.engine.score(stored.name, list(PROBE_PROMPT), deadline)
        tolerance = self.settings.verify_tolerance
        evidence = compare(Scores(base=self.base_logprobs, adapted=adapted), trained, tolerance=tolerance)
        if evidence.is_mismatch:
            raise mismatch_error(self.base_url, stored.name, evidence, tolerance)
        # A proof holds until `require_verification`, as a later version may be too small to prove anything.
        self.is_verified = self.is_verified or evidence.confirms
        return evidence

    # Memory between steps

    async def release_kv_cache(self, deadline: Deadline) -> None:
        """See `Engine`; unloads end first, for none may meet the server asleep."""
        # A lost one stays awake: another process may run there by now, and the checks of its recovery sample.
        if self.is_asleep or self.last_error is not None:
            return
        # Not until the caller's deadline, as the training step waits, and an unload on SGLang may be stuck for ever.
        await self.wait_for_unloads(Deadline.after(self._timeouts.close_s, "Waiting for unloads"))
        self.is_asleep = True  # before the request, whose answer may be late; waking for nothing is harmless
        try:
            await self.engine.release_kv_cache(deadline)
        except ServerSetupError:
            self.is_asleep = False  # Nothing was released. To wake it would fail with the same words.
            raise

    def wake_later(self) -> "asyncio.Task[None]":
        """Beside the caller, and before any later unload."""
        return spawn(self._wake_in_turn())

    async def _wake_in_turn(self) -> None:
        deadline = Deadline.after(self.settings.sync_timeout_s, f"Waking {self.base_url} (lora_sync_timeout)")
        async with self._unloads:
            try:
                await self.wake(deadline)
            except LoRASyncError as error:
                logger.warning("A server could not be woken: %s", error)

    async def wake(self, deadline: Deadline) -> bool:
        """Take the KV cache back. Returns whether the active version is intact; not if the server was lost."""
        if not self.is_asleep:
            return not self._lacks_active
        engine = self.engine
        try:
            intact = await engine.restore_kv_cache(deadline)
        except LoRASyncError as error:
            if is_loss(error):
                self.lose(error, engine)
            raise
        # After an answer only, so that after an error the next call tries again.
        self.is_asleep = False
        self._lacks_active = self._lacks_active or not intact
        return not self._lacks_active


def _wait_for_file(stored: StoredAdapter, deadline: Deadline) -> None:
    """Until the file of the tensors is complete.

    Raises:
        DeadlineExceededError: it is not in time.
        AdapterExportError: its copy from the GPU has failed.
    """
    assert stored.path is not None
    try:
        # By its path: flock(2) locks belong to an open file, and the trainer's open file holds this one.
        with (stored.path / TENSORS_FILE).open("rb") as file:
            unfinished.wait(file.fileno(), patience_s=min(unfinished.PATIENCE_S, deadline.left_s()))
    except FileNotFoundError:
        pass  # The server refuses such a version, and callers know that error.
    except TimeoutError as error:
        if deadline.is_over():
            raise deadline.error(f"{stored.path} is still copied from the GPU") from error
        raise AdapterExportError(
            f"{stored.path} was not copied from the trainer's GPU: {error} The version is not used. Look for the "
            "reason in the log of this process."
        ) from error


def is_loss(error: BaseException) -> bool:
    """Whether an error means that a server is away, or has lost its adapters."""
    return isinstance(error, ServerUnreachableError | AdapterLostError)


@asynccontextmanager
async def held(lock: asyncio.Lock, deadline: Deadline, message: str) -> AsyncIterator[None]:
    """The lock, during the block.

    Raises:
        DeadlineExceededError: it was not free in time.
    """
    left_s = deadline.remaining_s()
    try:
        await asyncio.wait_for(lock.acquire(), left_s)
    # In Python 3.10, the oldest that is supported, this is another class than TimeoutError.
    except asyncio.TimeoutError as error:
        raise deadline.error(message) from error
    try:
        yield
    finally:
        lock.release()
