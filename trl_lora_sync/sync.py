"""The story of one weight sync: export, deliver, load, activate, retire.

Runs on process 0 only and knows neither TRL nor PEFT nor HTTP. Versioned names make pausing the server and flushing
its caches needless: no request can meet a half-loaded adapter, and no cache entry of one version fits another.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from trl_lora_sync.adapter.canonical import CanonicalAdapter
from trl_lora_sync.adapter.store import StoredAdapter
from trl_lora_sync.engines.base import Capabilities, Deadline, Engine
from trl_lora_sync.engines.connect import connect_engine
from trl_lora_sync.errors import LoRASyncError, ServerSetupError
from trl_lora_sync.metrics import PhaseTimer, SyncReport
from trl_lora_sync.preflight import Preflight
from trl_lora_sync.transports import DiskTransport, TensorTransport, Transport
from trl_lora_sync.verify import TrainedBase

logger = logging.getLogger(__name__)

# An unload runs beside the training; one that takes longer is stuck.
_UNLOAD_TIMEOUT_S = 30.0
# How long the end of a run, and the release of the KV cache, wait for unloads.
_CLOSE_TIMEOUT_S = 5.0

ReadAdapter = Callable[[Capabilities], CanonicalAdapter]


@dataclass(frozen=True, kw_only=True)
class SyncSettings:
    """Everything a sync needs to know, passed down whole.

    Attributes:
        base_url: the server, without a trailing slash.
        engine: `"vllm"`, `"sglang"` or `"auto"`.
        is_local: whether the server runs on this host.
        transport: `"auto"`, `"disk"` or `"tensors"`.
        root: where the trainer writes versions.
        server_root: the same folder as the server sees it; `None` for the same path.
        keep: how many versions stay registered on the server.
        pause: `"off"`, or how to stop other clients' generation during a load: `"drain"` or `"abort"`.
        frees_kv_cache: whether the server gives back its KV cache between generation and the next sync.
        dtype: dtype of the written adapter; `None` takes that of the base model.
        sync_timeout_s: for one sync.
        startup_timeout_s: for the server to come up.
        generation_timeout_s: for the completions of one generation call.
    """

    base_url: str
    engine: str
    is_local: bool
    transport: str
    root: Path
    server_root: str | None
    keep: int
    pause: str
    frees_kv_cache: bool
    dtype: torch.dtype | None
    sync_timeout_s: float
    startup_timeout_s: float
    generation_timeout_s: float


class AdapterSync:
    """Keeps one server on the newest accepted version of one adapter."""

    def __init__(self, settings: SyncSettings) -> None:
        self.settings = settings
        self._engine: Engine | None = None
        self._transport: Transport | None = None
        self._next_version = 1
        self._registered: deque[StoredAdapter] = deque()
        self._retired: list[StoredAdapter] = []
        self._unloader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="lora-sync-unload")
        self._is_asleep = False
        self._retries_reported = 0

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise LoRASyncError("The server is not connected; start() comes first.")
        return self._engine

    @property
    def transport(self) -> Transport:
        if self._transport is None:
            raise LoRASyncError("The server is not connected; start() comes first.")
        return self._transport

    @property
    def active(self) -> StoredAdapter | None:
        """The version every new request names, or None before the first sync and after `close`."""
        return self._registered[-1] if self._registered else None

    def start(self, read: ReadAdapter, base: TrainedBase) -> str:
        """Connect, clean up after dead runs, and prove that the server can load and sample from such an adapter.

        Args:
            read: reads the model's adapter as it is now; loaded as version 0 and withdrawn at once.
            base: the trainer's base model, to compare with the served one.

        Returns:
            One line that says what was set up.

        Raises:
            LoRASyncError: the server cannot be used as it is, and what to change.
        """
        settings = self.settings
        deadline = Deadline.after(settings.startup_timeout_s, f"Waiting for the server at {settings.base_url}")
        self._engine = connect_engine(
            settings.base_url, engine=settings.engine, is_local=settings.is_local, deadline=deadline
        )
        adapter = read(self.engine.capabilities)
        self._transport = self._choose_transport()
        self.transport.open()
        for run in self.transport.sweep(lambda name: self._unload(name, _CLOSE_TIMEOUT_S)):
            logger.info("Removed what the run %s had left behind.", run)
        Preflight(
            self.engine,
            self.transport,
            deadline=self._control_deadline("Checking the server with a trial adapter"),
            withdraw=self._withdraw,
        ).run(adapter, base)
        if settings.frees_kv_cache:
            self._release_kv_cache()
            self.wake()
        return self._summary(adapter)

    def publish(self, read: ReadAdapter) -> SyncReport:
        """Make the adapter that `read` returns the active version.

        On any failure the previous version stays active with its files intact, and nothing of the new one is left.

        Raises:
            AdapterExportError: it could not be written.
            AdapterRejectedError: the server refused it.
            DeadlineExceededError: the sync outlived `sync_timeout_s`.
        """
        deadline = Deadline.after(self.settings.sync_timeout_s, "The adapter sync (lora_sync_timeout)")
        timer = PhaseTimer()
        with timer.phase("gather"):
            adapter = read(self.engine.capabilities)
        version = self._next_version
        self._next_version += 1  # a name is never used again, not even after a failure
        with timer.phase("write"):
            self.transport.open()
            stored = self.transport.write(version, adapter)
        with timer.phase("load"):
            self._load_or_withdraw(stored, deadline)
        # The server has the tensors now; host memory holds those of one version at a time.
        self._registered.append(replace(stored, content=None))
        self._retire_old_versions()
        retries, self._retries_reported = self.engine.retries - self._retries_reported, self.engine.retries
        return SyncReport(
            adapter_name=stored.name,
            version=stored.version,
            payload_bytes=stored.payload_bytes,
            gather_s=timer.phases["gather"],
            write_s=timer.phases["write"],
            load_s=timer.phases["load"],
            total_s=timer.total_s(),
            retries=retries,
        )

    def close(self) -> None:
        """Unload and delete every version; never fails, and may be called again. A later `publish` starts anew."""
        self._wake_quietly()
        wait([self._unload_later(stored) for stored in self._registered], timeout=_CLOSE_TIMEOUT_S)
        self._registered.clear()
        self._retired.clear()
        if self._transport is not None:
            self._transport.close()

    # Memory between steps

    def sleep(self) -> None:
        """Let the server give back its KV cache until the next `wake`; the base weights stay. Never fails."""
        if self.settings.frees_kv_cache and not self._is_asleep:
            try:
                self._release_kv_cache()
            except LoRASyncError as error:
                logger.warning("The server keeps its KV cache for now: %s", error)

    def _release_kv_cache(self) -> None:
        self._wait_for_unloads(Deadline.after(_CLOSE_TIMEOUT_S, "Waiting for unloads"))  # none may meet it asleep
        self._is_asleep = True  # before the request, whose answer may be late; waking for nothing is harmless
        self.engine.release_kv_cache(self._control_deadline("Releasing the KV cache"))

    def wake(self) -> bool:
        """Take the KV cache back. Returns whether the active version can be sampled from; if not, publish it anew."""
        intact = True
        if self._is_asleep:
            intact = self.engine.restore_kv_cache(self._control_deadline("Restoring the KV cache"))
            self._is_asleep = False
        return intact and self.active is not None

    def _wake_quietly(self) -> None:
        try:
            self.wake()
        except LoRASyncError as error:
            logger.warning("The server could not be woken: %s", error)

    def _control_deadline(self, task: str) -> Deadline:
        return Deadline.after(self.settings.sync_timeout_s, f"{task} (lora_sync_timeout)")

    # Loading and retiring

    def _load_or_withdraw(self, stored: StoredAdapter, deadline: Deadline) -> None:
        try:
            self.wake()
            with self._paused(deadline):
                self.engine.load(stored, deadline)
            self.engine.warm_up(stored, deadline)
        except BaseException:
            self._withdraw(stored)
            raise

    @contextmanager
    def _paused(self, deadline: Deadline) -> Iterator[None]:
        """Stop other clients' generation during the block, if asked to; always resumed.

        Unloads end first: one that waits for a request which does not go on would keep the load waiting as well.
        """
        if self.settings.pause == "off":
            yield
            return
        self._wait_for_unloads(deadline)
        try:
            self.engine.pause(self.settings.pause, deadline)
            yield
        finally:
            self.engine.resume(Deadline.after(_UNLOAD_TIMEOUT_S, "Resuming generation"))

    def _withdraw(self, stored: StoredAdapter) -> None:
        # Unloaded even after a refusal: the request may have been carried out although its answer was lost.
        wait([self._unload_later(stored)], timeout=_CLOSE_TIMEOUT_S)
        self.transport.delete(stored)

    def _retire_old_versions(self) -> None:
        """Unload what is beyond `keep`; delete files one version later, as the server may still re-read them.

        Source: vLLM re-reads an evicted adapter from its path inside the engine step, and dies if it is gone.
        """
        for stored in self._retired:
            self.transport.delete(stored)
        self._retired.clear()
        while len(self._registered) > self.settings.keep:
            oldest = self._registered.popleft()
            self._unload_later(oldest)
            self._retired.append(oldest)

    def _unload_later(self, stored: StoredAdapter) -> "Future[None]":
        """Beside the training, one at a time: an unload may wait on the server, and may never hold up a step."""
        try:
            return self._unloader.submit(self._unload, stored.name, _UNLOAD_TIMEOUT_S)
        except RuntimeError:  # the interpreter is ending and starts no more work beside this
            self._unload(stored.name, _CLOSE_TIMEOUT_S)
            done: Future[None] = Future()
            done.set_result(None)
            return done

    def _wait_for_unloads(self, deadline: Deadline) -> None:
        try:
            self._unloader.submit(lambda: None).result(timeout=deadline.remaining_s())
        except TimeoutError as error:
            raise deadline.error("the server is still unloading earlier versions") from error

    def _unload(self, adapter_name: str, timeout_s: float) -> None:
        if self._engine is None:
            return
        deadline = Deadline.after(timeout_s, f"Unloading {adapter_name}")
        if not self._engine.unload(adapter_name, deadline):
            logger.info("The server did not confirm that it forgot %s; training is not affected.", adapter_name)

    # Setting up

    def _choose_transport(self) -> Transport:
        settings, served = self.settings, self.engine.capabilities
        if settings.transport == "tensors" and not served.takes_tensors:
            raise ServerSetupError(
                f"{settings.base_url} runs {served.engine}, which takes adapters from disk only. Set "
                'lora_sync_transport="auto", and lora_sync_dir to a folder that the server can read.'
            )
        shares_folder = settings.is_local or settings.server_root is not None
        if settings.transport == "tensors" or (
            settings.transport == "auto" and served.takes_tensors and not shares_folder
        ):
            return TensorTransport()
        return DiskTransport(settings.root, server_root=settings.server_root)

    def _summary(self, adapter: CanonicalAdapter) -> str:
        served = self.engine.capabilities
        return (
            f"LoRA adapter sync: {served.engine} {served.version} at {self.settings.base_url} serving "
            f"{served.base_model}; adapter rank {adapter.rank}, {adapter.parameters / 1e6:.2f} M parameters, "
            f"{adapter.payload_bytes / 1e6:.1f} MB per sync as {str(adapter.dtype).removeprefix('torch.')}; versions "
            f"in {self.transport.where}; checked: adapter features, runtime loading, base model, rank, a trial load "
            "and token."
        )
