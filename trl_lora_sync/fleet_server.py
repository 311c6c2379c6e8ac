"""One server of a fleet: loading, unloading, pausing and its memory, and what is known of it between requests."""

import logging
import threading
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace

from trl_lora_sync.adapter.store import StoredAdapter
from trl_lora_sync.engines.base import Capabilities, Deadline, Engine
from trl_lora_sync.engines.connect import connect_engine
from trl_lora_sync.engines.known import serve_command
from trl_lora_sync.errors import AdapterLostError, LoRASyncError, ServerSetupError, VerificationError
from trl_lora_sync.settings import ServerAddress, SyncSettings
from trl_lora_sync.threads import BackgroundThread, shielded
from trl_lora_sync.transports import is_sent_content
from trl_lora_sync.verify import PROBE_PROMPT, Evidence, Scores, Trial, compare

logger = logging.getLogger(__name__)

# An unload runs beside the training; beyond this time it is stuck.
_UNLOAD_TIMEOUT_S = 30.0
# How long everything together may take at the end of a run; also how long a release of the KV cache waits for unloads.
CLOSE_TIMEOUT_S = 5.0
_PROOFS_IN_A_ROW = 8
# The version that is sampled from, and the version that is loaded meanwhile.
_LORAS_FOR_OVERLAP = 2
# A version that is lost this often after its load is not lost by accident.
_MAX_LOSSES = 3


class FleetServer:
    """One server.

    Attributes:
        trouble: the error by which it was noticed to be away or to have lost its adapters; None if it is fine.
        is_dropped: whether the run goes on without it.
        speed: samples per second in earlier generations.
        lacks: name of the active version if it could not be given to it again; None otherwise.
        base_logprobs: of `PROBE_PROMPT`, as its base model computed them when it was last checked.
        is_proven: whether this process of the server has been seen to sample from an adapter it was sent.
        versions: how many it has been given.
    """

    def __init__(self, address: ServerAddress, settings: SyncSettings) -> None:
        self.address = address
        self.trouble: LoRASyncError | None = None
        self.is_dropped = False
        self.speed: float | None = None
        self.lacks: str | None = None
        self.base_logprobs: list[float] = []
        self.is_proven = False
        self.versions = 0
        self.sends_content = False
        self._settings = settings
        self._engine: Engine | None = None
        self._losses = 0
        self._retries_before = 0
        self._unconfirmed: set[str] = set()
        self._is_asleep = False
        self._lock = threading.Lock()
        self._unloader = BackgroundThread("lora-sync-unload")

    @property
    def base_url(self) -> str:
        return self.address.base_url

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise LoRASyncError(f"{self.base_url} is not connected; start() comes first.")
        return self._engine

    @property
    def retries(self) -> int:
        """How many requests were sent again so far."""
        return self._retries_before + (self._engine.retries if self._engine is not None else 0)

    def connect(self, deadline: Deadline) -> None:
        """Wait until it is up and connect, also to a process that has replaced the one before.

        Raises:
            LoRASyncError: see `connect_engine`; or another engine runs there than before.
        """
        engine = connect_engine(
            self.base_url,
            engine=self._settings.engine,
            is_local=self.address.is_local,
            deadline=deadline,
            serving=self._settings.serving,
        )
        served = engine.capabilities
        if self._engine is not None and served.engine != self.engine.capabilities.engine:
            raise ServerSetupError(
                f"{self.base_url} ran {self.engine.capabilities.engine} when this run began and runs {served.engine} "
                "now. Adapters are written for the engines of the start. Start the same server again."
            )
        if self._settings.overlap and not served.is_fused:
            self._check_overlap(served)
        self.sends_content = is_sent_content(self._settings, self.address, served)
        if self._engine is not None:
            self._retries_before += self._engine.retries
        # The one before is not closed: a thread may still wait for its answer.
        self._engine = engine
        self._is_asleep = False
        self.forget_proof()

    def _check_overlap(self, served: Capabilities) -> None:
        """Refuse a server that cannot load an adapter while it samples from another one."""
        if not served.keeps_adapters_apart:
            raise ServerSetupError(
                f"{self.base_url} runs {served.engine} {served.version}, which may mix up adapters that are loaded "
                "while requests run. lora_sync_overlap=1 needs vLLM 0.26 or later. Install one beside the server, or "
                "set lora_sync_overlap=0."
            )
        if served.max_loras is not None and served.max_loras < _LORAS_FOR_OVERLAP:
            flag, for_base = ("--max-loras", 0) if served.engine == "vllm" else ("--max-loras-per-batch", 1)
            restart = serve_command(
                served.engine,
                served.base_root,
                engine_options=[flag, str(_LORAS_FOR_OVERLAP + for_base)],
                base_url=self.base_url,
                is_local=self.address.is_local,
            )
            raise ServerSetupError(
                f"{self.base_url} was started with {flag} {served.max_loras + for_base}, so the load of a version "
                "waits for the whole batch that is sampled from the version before. lora_sync_overlap=1 needs room for "
                f"{_LORAS_FOR_OVERLAP} adapters. Restart the server with {restart}, or set lora_sync_overlap=0."
            )

    def forget_proof(self) -> None:
        """Have it compared with the trainer again, from the next version on."""
        self.is_proven = False
        self.versions = 0

    def disconnect(self) -> None:
        if self._engine is not None:
            self._engine.close()

    # Away and back

    def note_loss(self, error: LoRASyncError, engine: Engine) -> None:
        """Remember an error that shows the server is away, unless it comes from a process that has been replaced.

        Raises:
            ServerSetupError: the adapter was lost again and again although it was loaded each time.
        """
        if engine is not self._engine or self.trouble is not None:
            return
        self.trouble = error
        if isinstance(error, AdapterLostError):
            self._losses += 1
            if self._losses > _MAX_LOSSES:
                raise ServerSetupError(
                    f"{self.base_url} loses every version that it is given. One server was expected there; does a "
                    f"proxy spread requests over several, or another client unload adapters? Give each server its own "
                    f"URL, separated by commas. {error}"
                ) from error

    def note_success(self) -> None:
        self._losses = 0

    @contextmanager
    def exclusively(self, deadline: Deadline) -> Iterator[None]:
        """One thread at a time takes the server back."""
        if not self._lock.acquire(timeout=deadline.remaining_s()):
            raise deadline.error(f"another attempt to reach {self.base_url} still runs")
        try:
            yield
        finally:
            self._lock.release()

    # Adapters

    def form_of(self, stored: StoredAdapter) -> StoredAdapter:
        """The version in the way this server gets it."""
        if self.sends_content or stored.server_path is None:
            return replace(stored, path=None, server_path=None)
        return replace(stored, content=None)

    def load(self, stored: StoredAdapter, deadline: Deadline) -> dict[str, str]:
        """Load a version, awake and inside a pause if there is to be one; result and errors as of `Engine.load`."""
        self.wake(deadline)
        with self._paused(deadline):
            return self.engine.load(self.form_of(stored), deadline)

    def warm_up(self, stored: StoredAdapter, deadline: Deadline) -> None:
        self.engine.warm_up(self.form_of(stored), deadline)

    @property
    def is_proof_due(self) -> bool:
        """Whether to compare the next version with the trainer: the first one, and others until one is a proof.

        An adapter that is still too small to show will be so for a while, so the pauses between attempts grow.
        """
        is_power_of_two = not self.versions & (self.versions - 1)
        return not self.versions or (not self.is_proven and (self.versions < _PROOFS_IN_A_ROW or is_power_of_two))

    def verify(
        self, stored: StoredAdapter, trained: Scores, deadline: Deadline, trial: Trial | None = None
    ) -> Evidence:
        """Compare what it computes under a loaded version with what the trainer computes.

        Args:
            trial: what the version was made from, if it is none of the training.

        Raises:
            VerificationError: it is not the same.
            LoRASyncError: scoring failed, see `Engine.score`.
        """
        if trial is None or trial.image is None:
            base, adapted = self.base_logprobs, self.engine.score(stored.name, list(PROBE_PROMPT), deadline)
        else:
            one, names = trial.image, (self.engine.capabilities.base_model, stored.name)
            base, adapted = (
                self.engine.score_image(name, one.prompt_ids, one.image, one.image_token_id, one.scored, deadline)
                for name in names
            )
        tolerance = self._settings.verify_tolerance
        evidence = compare(Scores(base=base, adapted=adapted), trained, tolerance=tolerance)
        if evidence.contradicts:
            where = "" if trial is None else f", which is zero outside {trial}"
            advice = f"{trial.advice} " if trial is not None and trial.advice else ""
            raise VerificationError(
                f"{self.base_url} accepted the adapter {stored.name!r} and computes something else with it{where}: "
                f"{evidence}. {advice}The version before stays active. Likely causes: the server's base model is "
                "another checkpoint or is quantised in another way; it ignores tensors, whose names the served model "
                "does not know or whose modules its --lora-target-modules leave out; the scaling is applied twice or "
                "not at all; something between trainer and server answers with another version. "
                "`trl-lora-sync doctor` looks closer. If the difference is known and wanted, raise "
                f'lora_sync_verify_tolerance (now {tolerance:g}), or set lora_sync_verify="off".'
            )
        self.is_proven = self.is_proven or evidence.proves
        return evidence

    @contextmanager
    def _paused(self, deadline: Deadline) -> Iterator[None]:
        """Stop other clients' generation during the block if `lora_sync_pause` is set; always resumed.

        Unloads end first: an unload that waits for a paused request would keep the load waiting as well.
        """
        if self._settings.pause == "off":
            yield
            return
        self.wait_for_unloads(deadline)
        try:
            self.engine.pause(self._settings.pause, deadline)
            yield
        finally:
            with shielded():
                self.engine.resume(Deadline.after(_UNLOAD_TIMEOUT_S, "Resuming generation"))

    def unload_later(self, adapter_name: str, deadline: Deadline | None = None) -> "Future[bool]":
        """Beside the training, one at a time: an unload may wait on the server, and may never hold up a step."""
        if self._engine is not None:
            self._unconfirmed.add(adapter_name)
        return self._unloader.submit(lambda: self.unload(adapter_name, deadline))

    def unload(self, adapter_name: str, deadline: Deadline | None = None) -> bool:
        """Unload a name, now. Returns whether the server confirmed it; if not, the unload is repeated at the end."""
        if self._engine is None:
            return True
        self._unconfirmed.add(adapter_name)
        if self.is_dropped:
            return False
        deadline = deadline or Deadline.after(_UNLOAD_TIMEOUT_S, f"Unloading {adapter_name}")
        if self.engine.unload(adapter_name, deadline):
            self._unconfirmed.discard(adapter_name)
            return True
        logger.info("%s did not confirm the unload of %s; training is not affected.", self.base_url, adapter_name)
        return False

    @property
    def unconfirmed(self) -> frozenset[str]:
        """The names that it may still have although the run needs them no more."""
        return frozenset(self._unconfirmed.copy())

    def note_end(self) -> None:
        """Its process has ended, and with it all names."""
        self._unconfirmed.clear()

    def unload_unconfirmed(self, loaded: dict[str, str]) -> None:
        """Unload the names whose unload failed while the server was away."""
        self._unconfirmed.difference_update(self.unconfirmed - loaded.keys())
        for name in sorted(self.unconfirmed):
            self.unload_later(name)

    def wait_for_unloads(self, deadline: Deadline) -> None:
        try:
            self._unloader.submit(lambda: None).result(timeout=deadline.remaining_s())
        except futures.TimeoutError as error:
            raise deadline.error(f"{self.base_url} is still unloading earlier versions") from error

    # Memory between steps

    @property
    def is_asleep(self) -> bool:
        return self._is_asleep

    def release_kv_cache(self, deadline: Deadline) -> None:
        """See `Engine`; unloads end first, for none may meet the server asleep."""
        if self._is_asleep:
            return
        self.wait_for_unloads(Deadline.after(CLOSE_TIMEOUT_S, "Waiting for unloads"))
        self._is_asleep = True  # before the request, whose answer may be late; waking for nothing is harmless
        self.engine.release_kv_cache(deadline)

    def wake_later(self) -> "Future[bool]":
        """Beside the caller, and before any later unload."""
        deadline = Deadline.after(self._settings.sync_timeout_s, f"Waking {self.base_url} (lora_sync_timeout)")
        return self._unloader.submit(lambda: self._wake_quietly(deadline))

    def _wake_quietly(self, deadline: Deadline) -> bool:
        try:
            return self.wake(deadline)
        except LoRASyncError as error:
            logger.warning("A server could not be woken: %s", error)
            return False

    def wake(self, deadline: Deadline) -> bool:
        """Take the KV cache back. Returns whether loaded adapters are intact."""
        intact = True
        if self._is_asleep:
            intact = self.engine.restore_kv_cache(deadline)
            self._is_asleep = False
        return intact
