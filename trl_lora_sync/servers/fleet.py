"""Several servers as one: load on all or none, and dispatch prompts.

Knows what a version and an engine are, and nothing of models, files or TRL. A server that is lost is waited for, and
checked as at the start, before it gets a version or a prompt again; the others repeat what it was sampling.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from trl_lora_sync.adapter.canonical import common_form
from trl_lora_sync.adapter.store import NextVersion, StoredAdapter
from trl_lora_sync.addresses import is_gone
from trl_lora_sync.checks.listed import RunChecks
from trl_lora_sync.checks.subject import Expected, TrialStore
from trl_lora_sync.checks.verify import Scores, Trial, VerificationResult
from trl_lora_sync.engines.base import Capabilities, Completion, Deadline, PromptGroup, Sampling
from trl_lora_sync.errors import (
    AdapterRejectedError,
    DeadlineExceededError,
    GenerationError,
    LoRASyncError,
    ServerUnreachableError,
)
from trl_lora_sync.runtime import cancelled, each, in_parallel, offload, run, spawn
from trl_lora_sync.servers.dispatch import Worker, dispatch
from trl_lora_sync.servers.handle import ServerHandle, ServerState, is_loss
from trl_lora_sync.servers.ledger import Holding, VersionLedger
from trl_lora_sync.servers.transports import DiskTransport
from trl_lora_sync.settings import SyncSettings

logger = logging.getLogger(__name__)

Sample = Callable[[ServerHandle, list[int], int], Awaitable[list[list[Completion]]]]


class Fleet:
    """All servers of a run.

    Attributes:
        servers: all of them, excluded ones included, in the order of the setting.
        settings: of the run.
        reserved_for: the name of a version that all of them can take without a request, if there is one.
    """

    def __init__(self, settings: SyncSettings, ledger: VersionLedger) -> None:
        self.servers = [ServerHandle(address, settings, ledger) for address in settings.servers]
        self._ledger = ledger
        self.settings = settings
        self.reserved_for = ""
        self._checks: RunChecks | None = None

    @property
    def base_url(self) -> str:
        return ",".join(server.base_url for server in self.servers)

    @property
    def in_service(self) -> list[ServerHandle]:
        return [server for server in self.servers if not server.is_excluded]

    @property
    def capabilities(self) -> Capabilities:
        """What holds for every server. Names and versions are from the first one."""
        served = [server.engine.capabilities for server in self.servers]
        # The smallest counts, as any prompt may go to any server.
        lengths = [one.max_model_len for one in served if one.max_model_len is not None]
        modes = {one.logprobs_mode for one in served}
        form = common_form(one.form for one in served)
        # A batch is spread over all servers, so raw log-probabilities of one server make the whole batch doubtful.
        doubtful = [mode for mode in ("raw_logprobs", "unknown") if mode in modes]
        return replace(
            served[0],
            max_model_len=min(lengths, default=None),
            logprobs_mode=doubtful[0] if doubtful else served[0].logprobs_mode,
            requires_packed_modules=form.packed_modules,
            supports_stacked_experts=form.stacked_experts,
            lora_dtype=form.dtype,
            rejects_shape_mismatch=all(one.rejects_shape_mismatch for one in served),
            supports_tensor_load=all(one.supports_tensor_load for one in served),
            supports_push=all(one.supports_push for one in served),
            checks_payload=all(one.checks_payload for one in served),
        )

    @property
    def retries(self) -> int:
        """How many requests were sent again so far, to all servers."""
        return sum(server.retries for server in self.servers)

    # At the start and at the end

    async def connect(self) -> None:
        """Wait for all servers and connect to them, each for `startup_timeout_s`.

        Raises:
            LoRASyncError: a server did not come up or cannot be used; a run starts with all of its servers.
        """
        patience_s = self.settings.startup_timeout_s
        await each(
            self.servers,
            lambda server: server.connect(Deadline.after(patience_s, f"Waiting for the server at {server.base_url}")),
        )

    async def check(
        self, expected: Expected, transport: DiskTransport, deadline: Deadline, trials: Sequence[Trial]
    ) -> None:
        """Make all checks on every server.

        Args:
            trials: what to try the servers with now, see `Expected.trials`.

        Raises:
            LoRASyncError: a server cannot be used, and what to change.
        """
        store = TrialStore(transport, self._ledger, clean_up_s=self.settings.timeouts.close_s)
        self._checks = RunChecks(expected, store)
        for server, found in zip(self.servers, await self._checks.require(self.servers, deadline, trials), strict=True):
            server.note_checked(found)

    async def sweep(self, transport: DiskTransport, deadline: Deadline) -> list[str]:
        """Remove what dead runs left in the transport's folder and on these servers; returns their run ids."""
        silent: set[ServerHandle] = set()  # skipped from then on, so that the start is held up once only
        unload_s = self.settings.timeouts.close_s

        async def unload(adapter_name: str) -> bool:
            for server in set(self.servers) - silent:
                if not await server.engine.unload(adapter_name, Deadline.after(unload_s, f"Unloading {adapter_name}")):
                    silent.add(server)
            # False keeps the name on disk for a later sweep, see `sweep_leftovers`.
            return not silent

        def knows(base_url: str) -> bool:
            # A server of this host that has ended has no adapters any more.
            return any(server.base_url == base_url for server in self.servers) or is_gone(base_url)

        return await transport.sweep(lambda name: run(unload(name)), knows, deadline)  # called in the file thread

    async def let_go(self, adapter_names: Sequence[str], deadline: Deadline) -> dict[str, list[str]]:
        """Wake all servers, and unload these names and all that they may have from each.

        Never fails, and ends by the deadline, whatever is still under way.

        Returns:
            The names that servers may still have, by URL; nothing for a server that confirmed all.
        """
        tasks: list[asyncio.Task[Any]] = []
        for server in self.servers:
            # Queued before the unloads, of which none may meet a server asleep.
            if server.is_asleep and not server.is_excluded:
                tasks.append(server.wake_later())
            # A load that was interrupted may still be under way, and its version belongs to no list of versions.
            names = dict.fromkeys([*self._ledger.held(server.base_url), *adapter_names])
            tasks += [server.unload_later(name, deadline) for name in names]
        if tasks:
            # Raises no error of a task. What is late goes on, and its names are in the result.
            await asyncio.wait(tasks, timeout=deadline.left_s())
        held = {server.base_url: self._ledger.held(server.base_url) for server in self.servers}
        left = {url: sorted(names) for url, names in held.items() if names}
        for url in list(left):
            # In a thread, as it opens a connection, which may take a second (addresses.py, `_REFUSED_WITHIN_S`).
            if await offload(partial(is_gone, url)):  # its process has ended, and with it all names
                self._ledger.note_listed(url, ())
                del left[url]
        for server in self.servers:
            server.note_emptied()
        return left

    async def disconnect(self) -> None:
        """Give up all connections."""
        for server in self.servers:
            await server.disconnect()

    # Versions

    async def load(self, stored: StoredAdapter, deadline: Deadline) -> dict[int, float]:
        """Load a version on every server in service, all at the same time.

        After an error the version may be on some of them and is to be unloaded; none samples from it, as the active
        one is the one before.

        Returns:
            The seconds that each server took, by its index in `servers`; without excluded servers.

        Raises:
            LoRASyncError: the first error of any server that may not be excluded.
        """
        # One start for all, so the seconds of a server contain the wait for its recovery.
        started, in_service = time.perf_counter(), self.in_service
        may_exclude = self.settings.on_server_loss == "drop" and len(in_service) > 1

        def patience() -> Deadline:
            # The servers that are left need time for what follows: their own loads, and the comparison of the files.
            half = f"{deadline.task}, half of it for lost servers,"
            return Deadline.after(deadline.remaining_s() / 2, half) if may_exclude else deadline

        # `readmit` raises nothing, so it ends no load on a server in service. The sync waits for it, for half of the
        # time that is left at most.
        excluded = [server for server in self.servers if server.is_excluded]
        readmitting = [spawn(server.readmit(self._checks, stored, deadline)) for server in excluded]
        try:
            await self._on_all_or_none(
                in_service, lambda server: server.load_new(stored, patience()), deadline, patience()
            )
            await asyncio.gather(*readmitting)
        finally:
            # A refusal by a server in service ends the wait for excluded ones.
            await cancelled(readmitting)
        return {
            index: server.loaded_at - started for index, server in enumerate(self.servers) if not server.is_excluded
        }

    async def reserve(self, coming: NextVersion, deadline: Deadline) -> None:
        """See `ServerHandle.reserve`; on all servers."""
        reserved = await asyncio.gather(*[server.reserve(coming, deadline) for server in self.servers])
        self.reserved_for = coming.name if all(reserved) else ""

    @property
    def needs_verification(self) -> bool:
        """Whether a server is to be verified at the next sync."""
        return any(server.needs_verification for server in self.in_service)

    def require_verification(self) -> None:
        """Have every server verified again, by the next versions."""
        for server in self.servers:
            server.require_verification()

    async def verify(self, stored: StoredAdapter, trained: Scores, deadline: Deadline) -> list[VerificationResult]:
        """Prove that a loaded version is what the servers sample from, on each that needs it.

        Args:
            trained: of this version and of the base, as the trainer computes them now.

        Raises:
            VerificationError: a server computes something else.
            LoRASyncError: as for `load`.
        """
        found: list[VerificationResult] = []

        async def verify(server: ServerHandle) -> None:
            if self._ledger.holding(server.base_url, stored.name) is not Holding.LOADED:  # lost since `load`
                await server.load_new(stored, deadline)
            found.append(await server.verify(stored, trained, deadline))

        unverified = [server for server in self.in_service if server.needs_verification]
        await self._on_all_or_none(unverified, verify, deadline)
        return found

    async def _on_all_or_none(
        self,
        servers: Sequence[ServerHandle],
        act: Callable[[ServerHandle], Awaitable[None]],
        deadline: Deadline,
        patience: Deadline | None = None,
    ) -> None:
        """Do the same on several servers at the same time, in rounds: a lost one is waited for and takes part again.

        A round is waited for, because a load that is broken off may still be carried out. An error for good ends the
        wait for lost servers. Servers that stay lost are excluded if that is allowed.

        Args:
            patience: until when a lost server is waited for; until `deadline` by default.
        """
        failures: dict[ServerHandle, LoRASyncError] = {}
        waiting = list(servers)
        acted: set[ServerHandle] = set()
        crashed: set[ServerHandle] = set()

        async def attempt(server: ServerHandle) -> None:
            # Read before the request, so that `lose` can ignore an error of a process that was replaced meanwhile.
            engine = server.engine
            try:
                # A lost server gets no request before `recover` has checked which process answers there.
                if server.last_error is None:
                    await act(server)
                    acted.add(server)
            except LoRASyncError as error:
                lost = await self._as_loss(server, error, deadline)
                # An adapter that a server crashes on would crash it again and again.
                is_repeated = lost is not error and server in crashed
                # With no time left to recover in, a loss is as final as a refusal.
                if lost is None or is_repeated or deadline.is_over():
                    failures[server] = error
                    return
                if lost is not error:
                    crashed.add(server)
                server.lose(lost, engine)

        async def recover(server: ServerHandle) -> None:
            try:
                # The version that `act` loads takes the place of the active one, so a refusal of the latter does not
                # matter. Its files may be gone by now.
                await server.recover(self._checks, patience or deadline, needs_active=False)
            except LoRASyncError as error:
                failures[server] = error
                if not self._may_exclude(error):
                    raise

        while waiting:
            acted.clear()
            await each(waiting, attempt)
            self._raise_fatal(failures)
            waiting = [
                server
                for server in waiting
                # A generation may have excluded it meanwhile.
                if server not in failures and not server.is_excluded
                # Or recovered it, so that it has no error although it took no part.
                if server not in acted or server.last_error is not None
            ]
            # An error that does not exclude its server ends the wait for all others.
            await in_parallel(recover, waiting)
            waiting = [server for server in waiting if server not in failures]
        # No server is left. Which error is raised depends on the order of the setting, not on the clock.
        if failures.keys() >= set(self.in_service):
            raise next(failures[server] for server in self.servers if server in failures)
        for server, error in failures.items():
            self._exclude(server, error)

    def _raise_fatal(self, failures: dict[ServerHandle, LoRASyncError]) -> None:
        # In the order of the setting, so that the error does not depend on which answer came first.
        for server in self.servers:
            if server in failures and not self._may_exclude(failures[server]):
                raise failures[server]

    def _may_exclude(self, error: LoRASyncError) -> bool:
        # A server that hangs while its health check answers shows as a deadline that is over, and not as a loss.
        return self.settings.on_server_loss == "drop" and (is_loss(error) or isinstance(error, DeadlineExceededError))

    def _exclude(self, server: ServerHandle, error: LoRASyncError) -> None:
        """Go on without a server, unless it is the last one."""
        # One server always stays in service: `sample` takes the first one without a check.
        if self.in_service == [server]:
            raise error
        server.exclude(error)
        logger.warning(
            "Going on without %s, with %d of %d servers; each sync probes it. %s",
            server.base_url,
            len(self.in_service),
            len(self.servers),
            error,
        )

    def note_activation(self) -> None:
        """The version that was loaded last is what new requests name."""
        for server in self.in_service:
            server.note_activation()

    def unload_later(self, adapter_name: str) -> "list[asyncio.Task[bool]]":
        """Unload a name on every server, beside the training."""
        return [server.unload_later(adapter_name) for server in self.servers]

    async def wait_for_unloads(self, deadline: Deadline) -> None:
        for server in self.in_service:
            await server.wait_for_unloads(deadline)

    # Sampling

    async def generate(
        self, model: str, groups: Sequence[PromptGroup], sampling: Sampling, deadline: Deadline
    ) -> list[list[Completion]]:
        """See `Engine`. Groups stay whole, and come back in their order."""
        base_model = self.capabilities.base_model

        async def sample(server: ServerHandle, indices: list[int], at_once: int) -> list[list[Completion]]:
            # Servers may name the base model differently, and `model` is the name of the first one.
            name = server.engine.capabilities.base_model if model == base_model else model
            return await server.engine.generate(name, [groups[index] for index in indices], sampling, deadline, at_once)

        return await self._dispatch([group.count for group in groups], model, sample, deadline)

    async def sample(
        self, stored: StoredAdapter, group: PromptGroup, sampling: Sampling, deadline: Deadline
    ) -> list[Completion]:
        """One request for a leased version, on the server that works on the fewest of these; see `Engine.generate`.

        If that server is lost, another one samples. Lost servers are recovered by the next sync, or here if there is
        no other one.
        """
        while True:
            # Found again in each round: during an await, other tasks lose, recover and exclude servers.
            able = [server for server in self.in_service if server.state is ServerState.READY]
            if not able:
                await self._recover(self.in_service[0], deadline)
                continue
            server = min(able, key=lambda one: one.under_way)
            engine = server.engine
            try:
                with server.sampling():
                    [answer] = await engine.generate(stored.name, [group], sampling, deadline)
            except LoRASyncError as error:
                lost = await self._as_loss(server, error, deadline)
                if lost is None or deadline.is_over():
                    raise
                server.lose(lost, engine)
            else:
                server.note_success()
                return answer

    async def chat(
        self, bodies: Sequence[dict[str, Any]], count: int, sampling: Sampling, deadline: Deadline
    ) -> list[list[Completion]]:
        """Sample `count` completions for each OpenAI chat request, which name the same model; see `Engine`."""

        async def converse(server: ServerHandle, indices: list[int], at_once: int) -> list[list[Completion]]:
            # An engine takes one conversation per call, so the number of requests is limited here.
            return await in_parallel(
                lambda index: server.engine.chat(bodies[index], count, sampling, deadline), indices, at_once
            )

        model = bodies[0]["model"] if bodies else ""
        return await self._dispatch([count] * len(bodies), model, converse, deadline)

    async def _dispatch(
        self, samples: Sequence[int], model: str, sample: Sample, deadline: Deadline
    ) -> list[list[Completion]]:
        # A server that is lost is given these versions again, so the same sampling can be repeated there or elsewhere.
        is_kept = any(stored.name == model for stored in self._ledger.needed)

        async def do(server: ServerHandle, indices: list[int], at_once: int) -> list[list[Completion]]:
            engine = server.engine
            try:
                answers = await sample(server, indices, at_once)
            except LoRASyncError as error:
                lost = await self._as_loss(server, error, deadline)
                if lost is None or not is_kept:
                    raise
                server.lose(lost, engine)
                # `error` may be a vague answer; `dispatch` repeats the work for a loss only.
                raise lost from error
            server.note_success()
            return answers

        workers = {
            server: Worker(
                do=partial(do, server),
                # Sampling again is harmless from the same version, which every server has.
                is_loss=lambda error: is_kept and is_loss(error) and not deadline.is_over(),
                recover=partial(self._recover, server, deadline),
                speed=server.speed,
                is_lost=is_kept and server.state is not ServerState.READY,
            )
            for server in self.in_service
        }
        answers = await dispatch(samples, list(workers.values()))
        for server, worker in workers.items():
            if worker.completed:
                server.note_success(worker.speed)
        return answers

    async def _as_loss(self, server: ServerHandle, error: LoRASyncError, deadline: Deadline) -> LoRASyncError | None:
        """The error if it means that the server is lost; a server that crashes may first send a vague answer."""
        if is_loss(error):
            return error
        # vLLM answers open requests with HTTP 500 when its engine has crashed, and ends the server after that
        # (`engine_error_handler` in entrypoints/serve/utils/server_utils.py, 0.26).
        is_vague = isinstance(error, GenerationError) or (
            isinstance(error, AdapterRejectedError) and error.may_be_crash
        )
        down = await server.reason_to_be_down() if is_vague and not deadline.is_over() else None
        return ServerUnreachableError(f"{down} Before that: {error}") if down else None

    async def _recover(self, server: ServerHandle, deadline: Deadline) -> bool:
        """During a generation: wait for a lost server as long as a sync may take. False if it is excluded."""
        patience = Deadline.after(self.settings.sync_timeout_s, f"Waiting for {server.base_url} (lora_sync_timeout)")
        try:
            # It must take the versions that it needs, unlike in a sync: what waits here samples from one of these.
            await server.recover(self._checks, min(patience, deadline, key=lambda one: one.ends_at))
        except LoRASyncError as error:
            if not self._may_exclude(error):
                raise
            self._exclude(server, error)
        return not server.is_excluded  # a sync may have excluded it meanwhile

    # Memory between steps

    async def release_kv_cache(self, deadline: Deadline) -> None:
        """See `Engine`."""
        await each(self.in_service, lambda server: server.release_kv_cache(deadline))

    async def wake(self, deadline: Deadline) -> bool:
        """Take the KV caches back. Returns whether the active version is intact on all servers."""

        async def wake(server: ServerHandle) -> bool:
            try:
                return await server.wake(deadline)
            except LoRASyncError as error:
                if not is_loss(error):
                    raise
                # The caller publishes again then, and that sync waits for the server.
                return False

        # Servers that are awake as well, because a load may have woken them, and waking may cost the active version.
        return all(await each(self.in_service, wake))
