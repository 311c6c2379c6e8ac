"""The story of one weight sync: export, deliver, load, verify, activate, retire.

Runs on process 0 only and knows neither TRL nor PEFT nor HTTP. Versioned names make pausing the servers and flushing
their caches needless: no request can meet a half-loaded adapter, and no cache entry of one version fits another.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean

import torch

from trl_lora_sync.adapter.canonical import CanonicalAdapter
from trl_lora_sync.adapter.store import StoredAdapter
from trl_lora_sync.engines.base import Deadline
from trl_lora_sync.engines.known import serve_command
from trl_lora_sync.errors import LoRASyncError
from trl_lora_sync.fleet import Fleet
from trl_lora_sync.fleet_server import CLOSE_TIMEOUT_S
from trl_lora_sync.metrics import PhaseTimer, SyncReport
from trl_lora_sync.settings import SyncSettings
from trl_lora_sync.transports import Transport, transport_for
from trl_lora_sync.verify import Evidence, ReadAdapter, Scores, TrainedBase, Trial

logger = logging.getLogger(__name__)

ScoreAdapter = Callable[[], Scores | None]


class AdapterSync:
    """Keeps all servers on the newest accepted version of one adapter."""

    def __init__(self, settings: SyncSettings) -> None:
        self.settings = settings
        self.fleet = Fleet(settings)
        self._transport: Transport | None = None
        self._next_version = 1
        self._registered: list[StoredAdapter] = []
        self._retired: list[StoredAdapter] = []
        self._retries_reported = 0
        self._layout: dict[str, torch.Size] = {}  # names and shapes of the tensors that servers were proved with

    @property
    def transport(self) -> Transport:
        if self._transport is None:
            raise LoRASyncError("The servers are not connected; start() comes first.")
        return self._transport

    @property
    def active(self) -> StoredAdapter | None:
        """The version every new request names, or None before the first sync and after `close`."""
        return self.fleet.active

    def start(self, read: ReadAdapter, base: TrainedBase, trials: Sequence[Trial] = ()) -> str:
        """Connect, clean up after dead runs, and prove that each server can load and sample from such an adapter.

        Args:
            read: reads the model's adapter as it is now; loaded on trial if there are no `trials`.
            base: the trainer's base model, to compare with the served ones.
            trials: adapters that show what a server samples from, however small the trained one is.

        Returns:
            One line that says what was set up.

        Raises:
            LoRASyncError: a server cannot be used as it is, and what to change.
        """
        settings, fleet = self.settings, self.fleet
        fleet.connect(
            lambda server: Deadline.after(settings.startup_timeout_s, f"Waiting for the server at {server.base_url}")
        )
        adapter = read(fleet.capabilities.needs_fused_siblings)
        self._transport = transport_for(settings, [server.sends_content for server in fleet.servers])
        deadline = self._control_deadline("Preparing the adapter folder")
        self.transport.open(deadline)
        for run in fleet.sweep(self.transport, deadline):
            logger.info("Removed what the run %s had left behind.", run)
        self._layout = _layout_of(adapter)
        deadline = self._control_deadline("Checking the server with a trial adapter")
        fleet.check(adapter, base, self.transport, deadline, trials)
        if settings.frees_kv_cache:
            fleet.release_kv_cache(self._control_deadline("Releasing the KV cache"))
            self.wake()
        if fleet.capabilities.logprobs_mode == "raw_logprobs":
            served = fleet.capabilities
            logger.warning(
                "A server returns raw log-probabilities, which do not know the temperature. At other temperatures than "
                "1 TRL's importance ratios are wrong. Restart vLLM with "
                f"{serve_command('vllm', served.base_root, served.serve_options)}, or SGLang without "
                "SGLANG_RETURN_ORIGINAL_LOGPROB."
            )
        return self._summary(adapter)

    @property
    def wants_proof(self) -> bool:
        """Whether the next `publish` is to be given log-probabilities under the adapter."""
        return self.fleet.wants_proof

    def publish(
        self, read: ReadAdapter, timer: PhaseTimer | None = None, score: ScoreAdapter | None = None
    ) -> SyncReport:
        """Make the adapter that `read` returns the active version, on every server or on none.

        On any failure the previous version stays active with its files intact, and nothing of the new one is left.

        Args:
            read: reads the model's adapter as it is now.
            timer: has been running since the sync began, if it began before this call.
            score: computes the log-probabilities of `PROBE_PROMPT` with the adapter that `read` reads and without, or
                None where that cannot be done now; called only if `wants_proof`. Without it, nothing is verified.

        Raises:
            AdapterExportError: it could not be written.
            AdapterRejectedError: a server refused it.
            VerificationError: a server computes something else with it.
            DeadlineExceededError: the sync outlived `sync_timeout_s`.
            ServerUnreachableError: a server did not come back in that time.
        """
        deadline = Deadline.after(self.settings.sync_timeout_s, "The adapter sync (lora_sync_timeout)")
        timer = timer or PhaseTimer()
        with timer.phase("gather"):
            adapter = read(self.fleet.capabilities.needs_fused_siblings)
        if _layout_of(adapter) != self._layout:  # a server may ignore a module that it was not tried with
            self._layout = _layout_of(adapter)
            self.fleet.forget_proofs()
        version = self._next_version
        self._next_version += 1  # a name is never used again, not even after a failure
        with timer.phase("write"):
            self.transport.open(deadline)
            stored = self.transport.write(version, adapter, deadline)
        with self._withdrawn_on_error(stored):
            with timer.phase("load"):
                server_load_s = self.fleet.load(stored, deadline)
            with timer.phase("verify"):
                # Servers that compare what they have loaded with what was sent have seen more than the files.
                is_compared = stored.has_checksum and self.fleet.capabilities.checks_payload
                if self.settings.verify != "off" and not is_compared:
                    self.transport.check(stored, adapter, deadline)
                evidence = self._verify(stored, score, deadline)
        self.fleet.activate(stored)
        # A server that restarts needs the tensors of the active version only.
        self._registered.append(replace(stored, content=None))
        self._retire_old_versions()
        self.transport.prepare()  # beside the generation that follows
        retries, self._retries_reported = self.fleet.retries - self._retries_reported, self.fleet.retries
        return SyncReport(
            adapter_name=stored.name,
            version=stored.version,
            payload_bytes=stored.payload_bytes,
            gather_s=timer.phases["gather"],
            write_s=timer.phases["write"],
            load_s=timer.phases["load"],
            verify_s=timer.phases["verify"],
            total_s=timer.total_s(),
            servers=len(self.fleet.in_service),
            server_load_s=server_load_s if len(self.fleet.servers) > 1 else {},
            retries=retries,
            verify_gap=fmean(one.gap_mean for one in evidence) if evidence else None,
            verify_gap_max=max(one.gap_max for one in evidence) if evidence else None,
            is_verified=self._is_verified(),
        )

    def close(self) -> None:
        """Unload and delete every version; never fails, and may be called again. A later `publish` starts anew.

        Servers that do not answer hold it up for `CLOSE_TIMEOUT_S` together. What they do not confirm to have
        forgotten is noted for the sweep of the next run.
        """
        deadline = Deadline.after(CLOSE_TIMEOUT_S, "The end of the run")
        left = self.fleet.let_go([stored.name for stored in self._registered], deadline)
        self.fleet.active = None
        self._registered.clear()
        self._retired.clear()
        if self._transport is not None:
            self._transport.close({name for names in left.values() for name in names})
        for base_url, names in left.items():
            logger.warning(
                "%s did not confirm that it forgot %s. The next run removes it, or: trl-lora-sync sweep %s --dir %s",
                base_url,
                ", ".join(names),
                base_url,
                self.settings.root,
            )

    def end(self) -> None:
        """`close` for good: the connections and the threads go too."""
        self.close()
        self.fleet.disconnect()

    # Memory between steps

    def sleep(self) -> None:
        """Let the servers give back their KV cache until the next `wake`; the base weights stay. Never fails."""
        if self.settings.frees_kv_cache:
            try:
                self.fleet.release_kv_cache(self._control_deadline("Releasing the KV cache"))
            except LoRASyncError as error:
                logger.warning("A server keeps its KV cache for now: %s", error)

    def wake(self) -> bool:
        """Take the KV cache back. Returns whether the active version can be sampled from; if not, publish it anew."""
        return self.fleet.wake(self._control_deadline("Restoring the KV cache")) and self.active is not None

    def _control_deadline(self, task: str) -> Deadline:
        return Deadline.after(self.settings.sync_timeout_s, f"{task} (lora_sync_timeout)")

    # Loading and retiring

    @contextmanager
    def _withdrawn_on_error(self, stored: StoredAdapter) -> Iterator[None]:
        try:
            yield
        except BaseException:
            # Unloaded even after a refusal: the request may have been carried out although its answer was lost.
            wait(self.fleet.unload_later(stored.name), timeout=CLOSE_TIMEOUT_S)
            self.transport.delete(stored, keep_name=not self.fleet.has_forgotten(stored.name))
            raise

    def _verify(self, stored: StoredAdapter, score: ScoreAdapter | None, deadline: Deadline) -> list[Evidence]:
        trained = score() if score is not None and self.wants_proof else None
        return [] if trained is None else self.fleet.verify(stored, trained, deadline)

    def _is_verified(self) -> bool | None:
        return None if self.settings.verify == "off" else all(server.is_proven for server in self.fleet.in_service)

    def _retire_old_versions(self) -> None:
        """Unload what is beyond `keep` and not leased; delete files one version later, as a server may re-read them.

        Source: vLLM re-reads an evicted adapter from its path inside the engine step, and dies if it is gone.
        """
        for stored in self._retired:
            self.transport.delete(stored, keep_name=not self.fleet.has_forgotten(stored.name))
        self._retired.clear()
        beyond = self._registered[: -self.settings.keep]
        self._retired += [stored for stored in beyond if not self.fleet.is_leased(stored.name)]
        for stored in self._retired:
            self._registered.remove(stored)
            self.fleet.unload_later(stored.name)

    def _summary(self, adapter: CanonicalAdapter) -> str:
        served = [
            f"{one.engine} {one.version} at {server.base_url} serving {one.base_model}"
            for server in self.fleet.servers
            for one in [server.engine.capabilities]
        ]
        return (
            f"LoRA adapter sync: {', '.join(served)}; adapter rank {adapter.rank}, "
            f"{adapter.parameters / 1e6:.2f} M parameters, "
            f"{adapter.payload_bytes / 1e6:.1f} MB per sync as {str(adapter.dtype).removeprefix('torch.')}; versions "
            f"in {self.transport.where}; checked: adapter features, runtime loading, base model, rank, a trial load "
            "and token."
        )


def _layout_of(adapter: CanonicalAdapter) -> dict[str, torch.Size]:
    return {key: tensor.shape for key, tensor in adapter.tensors.items()}
