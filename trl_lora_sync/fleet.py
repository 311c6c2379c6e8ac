"""Several servers as one: load on all or none, share prompts out, notice a server that restarted and readmit it.

Knows what a version and an engine are, and nothing of models, files or TRL. A server is lost if it cannot be reached
or no longer has the active version. It is waited for, checked as at the start, and given the active version again
before it gets any prompt; the other servers repeat what it was sampling.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from trl_lora_sync.adapter.canonical import CanonicalAdapter
from trl_lora_sync.adapter.store import StoredAdapter
from trl_lora_sync.engines.base import Capabilities, Completion, Deadline, PromptGroup, Sampling
from trl_lora_sync.engines.connect import wait_until_up
from trl_lora_sync.engines.known import KNOWN_VERSIONS
from trl_lora_sync.errors import (
    AdapterLostError,
    AdapterRejectedError,
    DeadlineExceededError,
    GenerationError,
    LoRASyncError,
    ServerUnreachableError,
)
from trl_lora_sync.fleet_server import CLOSE_TIMEOUT_S, FleetServer
from trl_lora_sync.places import is_gone
from trl_lora_sync.preflight import Preflight
from trl_lora_sync.settings import SyncSettings
from trl_lora_sync.sharing import Worker, share_out
from trl_lora_sync.threads import in_parallel
from trl_lora_sync.transports import Transport
from trl_lora_sync.verify import Evidence, Scores, TrainedBase, Trial

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Timeout for probing a dropped server. A dead process refuses the connection immediately.
_LOOK_TIMEOUT_S = 2.0


class Fleet:
    """All servers of a run.

    Attributes:
        servers: all of them, dropped ones included, in the order of the setting.
        active: the version that every server in service has, with its tensors if any server is sent those.
        leased: versions that were active and are still sampled from, as often as they are leased.
    """

    def __init__(self, settings: SyncSettings) -> None:
        self.servers = [FleetServer(address, settings) for address in settings.servers]
        self.active: StoredAdapter | None = None
        self.leased: list[StoredAdapter] = []
        self._settings = settings
        self._preflight: Preflight | None = None
        self._drop_lock = threading.Lock()

    @property
    def base_url(self) -> str:
        return ",".join(server.base_url for server in self.servers)

    @property
    def in_service(self) -> list[FleetServer]:
        return [server for server in self.servers if not server.is_dropped]

    @property
    def capabilities(self) -> Capabilities:
        """What holds for every server. Names and versions are from the first one."""
        served = [server.engine.capabilities for server in self.servers]
        lengths = [one.max_model_len for one in served if one.max_model_len is not None]
        modes = {one.logprobs_mode for one in served}
        doubtful = [mode for mode in ("raw_logprobs", "unknown") if mode in modes]
        return replace(
            served[0],
            max_model_len=min(lengths, default=None),
            logprobs_mode=doubtful[0] if doubtful else served[0].logprobs_mode,
            # Zeros for a sibling change nothing on an engine that does not need them.
            needs_fused_siblings=any(one.needs_fused_siblings for one in served),
            survives_misfit=all(one.survives_misfit for one in served),
            takes_tensors=all(one.takes_tensors for one in served),
            takes_pushes=all(one.takes_pushes for one in served),
            checks_payload=all(one.checks_payload for one in served),
        )

    @property
    def retries(self) -> int:
        """How many requests were sent again so far, to all servers."""
        return sum(server.retries for server in self.servers)

    # At the start

    def connect(self, deadline: Callable[[FleetServer], Deadline]) -> None:
        """Wait for all servers and connect to them.

        Raises:
            LoRASyncError: a server did not come up or cannot be used; a run starts with all of its servers.
        """
        _each(self.servers, lambda server: server.connect(deadline(server)))

    def check(
        self,
        adapter: CanonicalAdapter,
        base: TrainedBase,
        transport: Transport,
        deadline: Deadline,
        trials: Sequence[Trial] = (),
    ) -> None:
        """Prove on every server that it has the trainer's base model and can load and sample from such an adapter.

        Args:
            trials: prove in addition that a server samples from what it loads, each a group of modules.

        Raises:
            LoRASyncError: a server cannot be used, and what to change.
        """
        is_strict = self._settings.verify != "off"
        preflight = self._preflight = Preflight(base, adapter, transport, is_strict=is_strict, trials=trials)
        _each(self.servers, lambda server: preflight.check(server, deadline))
        if trials:
            self._prove(self.servers, deadline)
        else:
            self._try_out(self.servers, adapter, deadline)
        self._warn_of_untested()

    def _prove(self, servers: Sequence[FleetServer], deadline: Deadline) -> None:
        assert self._preflight is not None
        for trial in self._preflight.trials:
            self._try_out(servers, trial.read(self.capabilities.needs_fused_siblings), deadline, trial)

    def _try_out(
        self,
        servers: Sequence[FleetServer],
        adapter: CanonicalAdapter,
        deadline: Deadline,
        trial: Trial | None = None,
    ) -> None:
        preflight = self._preflight
        assert preflight is not None
        with preflight.on_trial(servers, adapter, deadline) as stored:
            _each(servers, lambda server: preflight.try_out(server, stored, deadline, trial))

    def _warn_of_untested(self) -> None:
        """Once for each version that no test ran on, however many servers have it."""
        served = {(server.engine.capabilities.engine, server.engine.capabilities.version) for server in self.servers}
        for engine, version in sorted(served):
            caution = KNOWN_VERSIONS[engine].caution(version)
            if caution:
                logger.warning("%s Look closer with: trl-lora-sync doctor %s", caution, self.servers[0].base_url)

    def disconnect(self) -> None:
        """Give up all connections and threads."""
        for server in self.servers:
            server.disconnect()

    # Versions

    def load(self, stored: StoredAdapter, deadline: Deadline) -> dict[int, float]:
        """Load a version on every server in service, all at the same time.

        After an error the version may be on some of them and is to be unloaded; none samples from it, as `active` is
        the one before.

        Returns:
            The seconds that each server took, by its place in `servers`; without dropped servers.

        Raises:
            LoRASyncError: the first error of any server that may not be dropped.
        """

        def bring(server: FleetServer, halt: threading.Event) -> None:
            if server.is_dropped:
                self._try_again(server, stored, deadline, halt)
            else:
                self._bring(server, stored, deadline, halt)

        return self._on_all_or_none(self.servers, bring)

    @property
    def wants_proof(self) -> bool:
        """Whether a server is to be verified at the next sync."""
        return any(self._wants_proof(server) for server in self.in_service)

    def forget_proofs(self) -> None:
        """Have every server proved again, by the next versions."""
        for server in self.servers:
            server.forget_proof()

    def verify(self, stored: StoredAdapter, trained: Scores, deadline: Deadline) -> list[Evidence]:
        """Prove that a loaded version is what the servers sample from, on each that needs it.

        Args:
            trained: of this version and of the base, as the trainer computes them now.

        Raises:
            VerificationError: a server computes something else.
            LoRASyncError: as for `load`.
        """
        found: list[Evidence] = []

        def prove(server: FleetServer, halt: threading.Event) -> None:
            while True:
                engine = server.engine
                try:
                    found.append(server.verify(stored, trained, deadline))
                    return
                except LoRASyncError as error:
                    if not _can_be_waited_for(error, deadline, halt):
                        raise
                    server.note_loss(error, engine)
                self._bring(server, stored, deadline, halt)

        self._on_all_or_none([server for server in self.in_service if self._wants_proof(server)], prove)
        return found

    def _wants_proof(self, server: FleetServer) -> bool:
        return self._settings.verify == "every" or (self._settings.verify == "first" and server.is_proof_due)

    def _on_all_or_none(
        self, servers: Sequence[FleetServer], act: Callable[[FleetServer, threading.Event], None]
    ) -> dict[int, float]:
        """Do the same on several servers at the same time; drop lost servers, if that is allowed.

        Args:
            act: given a server, and an event that is set once another one has failed for good.

        Returns:
            Seconds by place in `servers`, without dropped servers.
        """
        halt = threading.Event()
        failures: list[tuple[FleetServer, LoRASyncError]] = []
        seconds: dict[int, float] = {}
        place_of = {server: place for place, server in enumerate(self.servers)}

        def attempt(server: FleetServer) -> None:
            started = time.perf_counter()
            try:
                act(server, halt)
            except LoRASyncError as error:
                failures.append((server, error))
                if not self._may_drop(error):
                    halt.set()
                return
            if not server.is_dropped:
                seconds[place_of[server]] = time.perf_counter() - started

        _each(servers, attempt)
        failures.sort(key=lambda failure: place_of[failure[0]])
        is_last = {server for server, _ in failures} >= set(self.in_service)
        for _, error in failures:
            if is_last or not self._may_drop(error):
                raise error
        for server, error in failures:
            self._drop(server, error)
        return dict(sorted(seconds.items()))

    def activate(self, stored: StoredAdapter) -> None:
        """From here on a server that restarts is given this version."""
        for server in self.in_service:
            server.versions += 1
        sends_content = any(server.sends_content for server in self.servers)
        self.active = stored if sends_content else replace(stored, content=None)

    def lease(self) -> StoredAdapter:
        """Take the active version for sampling that may outlast it.

        Until it is given to `release`, a server that restarts is given this version as well.
        """
        assert self.active is not None
        self.leased.append(self.active)
        return self.leased[-1]

    def release(self, stored: StoredAdapter) -> None:
        """Give a lease back."""
        self.leased.remove(stored)  # names distinguish versions, before any tensor is compared

    def is_leased(self, adapter_name: str) -> bool:
        """Whether a version is sampled from although others may have come since."""
        return any(stored.name == adapter_name for stored in self.leased.copy())

    @property
    def _needed(self) -> list[StoredAdapter]:
        """The versions that a server must have, the active one first."""
        found = {stored.name: stored for stored in [self.active, *self.leased.copy()] if stored is not None}
        return list(found.values())

    def _needed_by(self, server: FleetServer) -> list[StoredAdapter]:
        """A fused server has one version at a time, and a version is activated only after the batch before it."""
        is_fused = server.engine.capabilities.is_fused
        return [stored for stored in self._needed if stored is self.active or not is_fused]

    def unload_later(self, adapter_name: str) -> "list[Future[bool]]":
        """Unload a name on every server, beside the training."""
        return [server.unload_later(adapter_name) for server in self.servers]

    def has_forgotten(self, adapter_name: str) -> bool:
        """Whether every server has confirmed the unload of a name."""
        return not any(adapter_name in server.unconfirmed for server in self.servers)

    def let_go(self, adapter_names: Sequence[str], deadline: Deadline) -> dict[str, list[str]]:
        """Wake all servers, and unload these names and the unconfirmed ones from each.

        Never fails, and ends by the deadline, whatever is still under way.

        Returns:
            The names that servers may still have, by URL; nothing for a server that confirmed all.
        """
        tasks: list[Future[Any]] = []
        for server in self.servers:
            if server.is_asleep and not server.is_dropped:
                tasks.append(server.wake_later())
            names = dict.fromkeys([*sorted(server.unconfirmed), *adapter_names])
            tasks += [server.unload_later(name, deadline) for name in names]
        wait(tasks, timeout=deadline.left_s())
        for server in self.servers:
            if server.unconfirmed and is_gone(server.base_url):
                server.note_end()
        return {server.base_url: sorted(server.unconfirmed) for server in self.servers if server.unconfirmed}

    def sweep(self, transport: Transport, deadline: Deadline) -> list[str]:
        """Remove what dead runs left in the transport's folder and on these servers; returns their run ids."""
        silent: set[FleetServer] = set()  # skipped from then on, so that the start is held up once only

        def unload(adapter_name: str) -> bool:
            for server in set(self.servers) - silent:
                if not server.engine.unload(adapter_name, Deadline.after(CLOSE_TIMEOUT_S, f"Unloading {adapter_name}")):
                    silent.add(server)
            return not silent

        def knows(base_url: str) -> bool:
            return any(server.base_url == base_url for server in self.servers) or is_gone(base_url)

        return transport.sweep(unload, knows, deadline)

    def loaded(self, deadline: Deadline) -> dict[str, str]:
        """The adapters that every server in service would serve."""
        first, *others = _each(self.in_service, lambda server: server.engine.loaded(deadline))
        return {name: path for name, path in first.items() if all(name in other for other in others)}

    def wait_for_unloads(self, deadline: Deadline) -> None:
        for server in self.in_service:
            server.wait_for_unloads(deadline)

    def _bring(self, server: FleetServer, stored: StoredAdapter, deadline: Deadline, halt: threading.Event) -> None:
        """Load a version on one server, waiting for it and readmitting it if it is lost.

        A readmitted server gets the active version too, in case this one fails elsewhere. If that cannot
        be had any more, because its files are gone, the new version is brought all the same.
        """
        while True:
            self._recover(server, deadline, halt, needs_active=False)
            engine = server.engine
            try:
                loaded = server.load(stored, deadline)
                # Between loading and the first use, which an engine with another base model may not survive.
                self._check_memory(server, loaded)
                server.warm_up(stored, deadline)
            except LoRASyncError as error:
                if not _can_be_waited_for(error, deadline, halt):
                    raise
                server.note_loss(error, engine)
            else:
                server.note_success()
                return

    def _check_memory(self, server: FleetServer, loaded: dict[str, str]) -> None:
        """Notice a server that restarted since the last sync, whose base model is unchecked."""
        if self.active is None or self.active.name == server.lacks:
            return
        if self.active.name not in loaded:
            raise AdapterLostError(f"{server.base_url} no longer knows {self.active.name!r}; it was restarted.")

    # Lost and found

    def _recover(
        self, server: FleetServer, deadline: Deadline, halt: threading.Event, *, needs_active: bool = True
    ) -> None:
        """Return when the server is fine; at once if it is.

        Raises:
            LoRASyncError: it is not before the deadline, or before `halt`; or another server came up in its place.
        """
        while (trouble := server.trouble) is not None:
            engine = server.engine
            try:
                with server.exclusively(deadline):
                    self._readmit(server, deadline, halt, needs_active)
            except DeadlineExceededError as error:
                if isinstance(trouble, ServerUnreachableError):
                    raise trouble from error  # names the server
                raise
            except LoRASyncError as error:
                if not _can_be_waited_for(error, deadline, halt):
                    raise
                server.note_loss(error, engine)

    def _readmit(self, server: FleetServer, deadline: Deadline, halt: threading.Event, needs_active: bool) -> None:
        """Wait until the server is up; if it lacks a version that it needs, check it again and load all of these."""
        if server.trouble is None:
            return  # another thread took it back meanwhile
        wait_until_up(server.base_url, is_local=server.address.is_local, deadline=deadline, halt=halt)
        needed, loaded = self._needed_by(server), server.engine.loaded(deadline)
        is_complete = needed and all(stored.name in loaded for stored in needed)
        if not is_complete or isinstance(server.trouble, AdapterLostError):
            server.connect(deadline)
            if self._preflight is not None:
                self._preflight.check(server, deadline)
                self._prove([server], deadline)
            server.lacks = None
            for stored in needed:
                self._give_again(server, stored, deadline, needs_active)
        server.unload_unconfirmed(loaded)
        server.trouble = None

    def _give_again(self, server: FleetServer, stored: StoredAdapter, deadline: Deadline, is_needed: bool) -> None:
        try:
            server.load(stored, deadline)
            server.warm_up(stored, deadline)
        except AdapterRejectedError as error:
            if is_needed:
                raise
            if stored is self.active:
                server.lacks = stored.name
            logger.warning("%s had lost %s and could not be given it again. %s", server.base_url, stored.name, error)
            return
        logger.warning("%s had lost %s; it was given it again.", server.base_url, stored.name)
        if all(stored is not other for other in self._needed):  # it was retired meanwhile, or the run has ended
            server.unload_later(stored.name)

    def _take_back(self, server: FleetServer, deadline: Deadline, halt: threading.Event) -> bool:
        """During a generation: wait for a lost server as long as a sync may take. False if it is dropped."""
        patience = Deadline.after(self._settings.sync_timeout_s, f"Waiting for {server.base_url} (lora_sync_timeout)")
        try:
            self._recover(server, min(patience, deadline, key=lambda one: one.ends_at), halt)
        except LoRASyncError as error:
            if halt.is_set():
                return False  # the others have done it all; the next sync or generation goes on with it
            if not self._may_drop(error):
                raise
            self._drop(server, error)
            return False
        return True

    def _may_drop(self, error: LoRASyncError) -> bool:
        return self._settings.on_server_loss == "drop" and (_is_loss(error) or isinstance(error, DeadlineExceededError))

    def _drop(self, server: FleetServer, error: LoRASyncError) -> None:
        """Go on without a server, unless it is the last one."""
        with self._drop_lock:
            if self.in_service == [server]:
                raise error
            server.is_dropped = True
        server.trouble = error
        logger.warning(
            "Going on without %s, with %d of %d servers; each sync probes it. %s",
            server.base_url,
            len(self.in_service),
            len(self.servers),
            error,
        )

    def _try_again(self, server: FleetServer, stored: StoredAdapter, deadline: Deadline, halt: threading.Event) -> None:
        """Readmit a dropped server if it is up; an error here must not fail the sync of the others."""
        reason = _reason_to_be_down(server)
        if reason is not None:
            logger.info("%s stays dropped: %s", server.base_url, reason)
            return
        try:
            half = Deadline.after(deadline.remaining_s() / 2, f"Taking {server.base_url} back")
            self._bring(server, stored, half, halt)
        except LoRASyncError as error:
            logger.warning("%s is up again but stays dropped: %s", server.base_url, error)
        else:
            server.is_dropped = False
            logger.warning("%s is back.", server.base_url)

    # Sampling

    def generate(
        self, model: str, groups: Sequence[PromptGroup], sampling: Sampling, deadline: Deadline
    ) -> list[list[Completion]]:
        """See `Engine`. Groups stay whole, and come back in their order."""
        base_model = self.capabilities.base_model

        def sample(server: FleetServer, places: list[int], at_once: int) -> list[list[Completion]]:
            name = server.engine.capabilities.base_model if model == base_model else model
            return server.engine.generate(name, [groups[place] for place in places], sampling, deadline, at_once)

        return self._share_out([group.count for group in groups], model, sample, deadline)

    def chat(
        self, bodies: Sequence[dict[str, Any]], count: int, sampling: Sampling, deadline: Deadline
    ) -> list[list[Completion]]:
        """Sample `count` completions for each OpenAI chat request, which name the same model; see `Engine`."""

        def converse(server: FleetServer, places: list[int], at_once: int) -> list[list[Completion]]:
            return in_parallel(
                lambda place: server.engine.chat(bodies[place], count, sampling, deadline), places, at_once
            )

        model = bodies[0]["model"] if bodies else ""
        return self._share_out([count] * len(bodies), model, converse, deadline)

    def _share_out(
        self,
        samples: Sequence[int],
        model: str,
        sample: Callable[[FleetServer, list[int], int], list[list[Completion]]],
        deadline: Deadline,
    ) -> list[list[Completion]]:
        # A server that is lost is given these versions again, so the same sampling can be repeated there or elsewhere.
        is_kept = any(stored.name == model for stored in self._needed)

        def do(server: FleetServer, places: list[int], at_once: int) -> list[list[Completion]]:
            engine = server.engine
            try:
                answers = sample(server, places, at_once)
            except LoRASyncError as error:
                lost = self._as_loss(server, error, deadline)
                if lost is None or not is_kept:
                    raise
                server.note_loss(lost, engine)
                raise lost from error
            server.note_success()
            return answers

        workers = {
            server: Worker(
                do=partial(do, server),
                # Sampling again is harmless from the same version, which every server has.
                is_loss=lambda error: is_kept and _is_loss(error) and not deadline.is_over(),
                recover=partial(self._take_back, server, deadline),
                speed=server.speed,
                is_away=is_kept and server.trouble is not None,
            )
            for server in self.in_service
        }
        answers = share_out(samples, list(workers.values()))
        for server, worker in workers.items():
            server.speed = worker.speed
        return answers

    def _as_loss(self, server: FleetServer, error: LoRASyncError, deadline: Deadline) -> LoRASyncError | None:
        """The error if it means that the server is lost; a server that crashes may first send a vague answer."""
        if _is_loss(error):
            return error
        if isinstance(error, GenerationError) and not deadline.is_over():
            return _reason_to_be_down(server)
        return None

    # Memory between steps

    def release_kv_cache(self, deadline: Deadline) -> None:
        """See `Engine`."""
        _each(self.in_service, lambda server: server.release_kv_cache(deadline))

    def wake(self, deadline: Deadline) -> bool:
        """Take the KV caches back. Returns whether loaded adapters are intact on all servers."""

        def wake(server: FleetServer) -> bool:
            engine = server.engine
            try:
                return server.wake(deadline)
            except LoRASyncError as error:
                if not _is_loss(error):
                    raise
                server.note_loss(error, engine)
                return False

        return all(_each([server for server in self.in_service if server.is_asleep], wake))


def _is_loss(error: BaseException) -> bool:
    return isinstance(error, ServerUnreachableError | AdapterLostError)


def _can_be_waited_for(error: LoRASyncError, deadline: Deadline, halt: threading.Event) -> bool:
    return _is_loss(error) and not halt.is_set() and not deadline.is_over()


def _reason_to_be_down(server: FleetServer) -> ServerUnreachableError | None:
    gone = threading.Event()
    gone.set()
    look = Deadline.after(_LOOK_TIMEOUT_S, f"Looking for {server.base_url}")
    try:
        wait_until_up(server.base_url, is_local=server.address.is_local, deadline=look, halt=gone)
    except ServerUnreachableError as error:
        return error
    except LoRASyncError:  # it is busy, so it is there
        return None
    return None


def _each(servers: Sequence[FleetServer], act: Callable[[FleetServer], T]) -> list[T]:
    """Do the same on all servers at the same time; wait for all, then raise the first error."""

    def attempt(server: FleetServer) -> tuple[T | None, Exception | None]:
        try:
            return act(server), None
        except Exception as error:
            return None, error

    if len(servers) < 2:
        return [act(server) for server in servers]
    outcomes = in_parallel(attempt, servers, len(servers))
    for _, error in outcomes:
        if error is not None:
            raise error
    return [result for result, _ in outcomes]  # type: ignore[misc]
