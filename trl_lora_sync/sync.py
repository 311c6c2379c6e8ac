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

from trl_lora_sync.adapter.canonical import CanonicalAdapter, widened
from trl_lora_sync.adapter.store import StoredAdapter
from trl_lora_sync.engines.base import Capabilities, Deadline, Engine, PromptGroup, Sampling
from trl_lora_sync.engines.connect import connect_engine
from trl_lora_sync.errors import AdapterNotVisibleError, AdapterRejectedError, LoRASyncError, ServerSetupError
from trl_lora_sync.metrics import PhaseTimer, SyncReport
from trl_lora_sync.transports import DiskTransport, TensorTransport, Transport
from trl_lora_sync.verify import PROBE_PROMPT, TrainedBase, base_gap

logger = logging.getLogger(__name__)

# An unload runs beside the training; one that takes longer is stuck.
_UNLOAD_TIMEOUT_S = 30.0
# How long the end of a run, and the release of the KV cache, wait for unloads.
_CLOSE_TIMEOUT_S = 5.0
_TRIAL_PROMPT = PromptGroup(prompt=[0, 1, 2, 3], count=1)
_TRIAL_SAMPLING = Sampling(
    temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, max_tokens=1, logprobs=0
)

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
        self._check_base(adapter, base)
        self._try_out(adapter)
        if settings.frees_kv_cache:
            self._release_kv_cache()
            self.wake()
        return self._summary(adapter)

    def publish(self, read: ReadAdapter, timer: PhaseTimer | None = None) -> SyncReport:
        """Make the adapter that `read` returns the active version.

        On any failure the previous version stays active with its files intact, and nothing of the new one is left.

        Args:
            read: reads the model's adapter as it is now.
            timer: has been running since the sync began, if it began before this call.

        Raises:
            AdapterExportError: it could not be written.
            AdapterRejectedError: the server refused it.
            DeadlineExceededError: the sync outlived `sync_timeout_s`.
        """
        deadline = Deadline.after(self.settings.sync_timeout_s, "The adapter sync (lora_sync_timeout)")
        timer = timer or PhaseTimer()
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
        return SyncReport(
            adapter_name=stored.name,
            version=stored.version,
            payload_bytes=stored.payload_bytes,
            gather_s=timer.phases["gather"],
            write_s=timer.phases["write"],
            load_s=timer.phases["load"],
            total_s=timer.total_s(),
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

    # Proofs at start

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

    def _check_base(self, adapter: CanonicalAdapter, base: TrainedBase) -> None:
        """Find out what can be known about the served base before the first adapter is loaded.

        A server reports no shapes. vLLM pads an adapter that is too small for it with zeros and answers 200; SGLang
        dies of a misfit. So names, vocabulary and the log-probabilities of a prompt are compared.
        """
        self._check_dtype(adapter)
        deadline = self._control_deadline("The check of the base model")
        served, knows = self.engine.capabilities, self.engine.knows_token
        same_name = not base.name or is_same_model(base.name, (served.base_model, served.base_root))
        if not same_name:
            logger.warning(
                "The trainer's base model is %r, but %s serves %r (%s). If these are not the same weights, every "
                "completion comes from another policy than the one being trained.",
                base.name,
                self.settings.base_url,
                served.base_model,
                served.base_root,
            )
        if base.vocab_size and not knows(base.vocab_size - 1, deadline):
            raise self._other_base(base.name, f"its vocabulary has fewer than the trainer's {base.vocab_size} tokens")
        gap = base_gap(base, self.engine.score(served.base_model, list(PROBE_PROMPT), deadline))
        if gap.is_suspicious and not served.survives_misfit:
            raise self._other_base(base.name, f"it computes other log-probabilities ({gap})")
        if gap.is_suspicious:
            logger.warning(
                "The base model at %s computes other log-probabilities than the trainer's: %s. Completions come from "
                "another policy than the one being trained.",
                self.settings.base_url,
                gap,
            )
            self._check_width(adapter, deadline)

    def _check_dtype(self, adapter: CanonicalAdapter) -> None:
        """Refuse an adapter that the server would cast to a dtype which holds other numbers; float32 loses nothing."""
        served, written = self.engine.capabilities.dtype, str(adapter.dtype).removeprefix("torch.")
        if served is not None and served != written and written != "float32":
            raise ServerSetupError(
                f"{self.settings.base_url} was started with --dtype {served}, and the adapter is written in {written}, "
                f"the dtype of the trainer's base model. Both must compute in the same one. Restart the server with "
                f'--dtype {written}, or load the trainer\'s model in {served} and set lora_sync_dtype="{served}".'
            )

    def _check_width(self, adapter: CanonicalAdapter, deadline: Deadline) -> None:
        """Offer an adapter that is one wider than the trainer's; a server with the same base must refuse it."""
        probe = self.transport.write("width", widened(adapter))
        try:
            self.engine.load(probe, deadline)
        except AdapterRejectedError:
            return
        finally:
            self._withdraw(probe)
        raise self._other_base(adapter.base_model, "its layers are wider than the trainer's")

    def _try_out(self, adapter: CanonicalAdapter) -> None:
        deadline = self._control_deadline("The trial load of the adapter")
        trial = self.transport.write(0, adapter)
        try:
            self.engine.load(trial, deadline)
            self.engine.warm_up(trial, deadline)
            self.engine.generate(trial.name, [_TRIAL_PROMPT], _TRIAL_SAMPLING, deadline)
        except AdapterNotVisibleError:
            raise
        except AdapterRejectedError as error:
            evidence = "it refused an adapter of the trainer's shapes"
            raise self._other_base(adapter.base_model, evidence, str(error)) from error
        finally:
            self._withdraw(trial)

    def _other_base(self, name: str | None, evidence: str, words: str = "") -> ServerSetupError:
        served = self.engine.capabilities
        return ServerSetupError(
            f"{self.settings.base_url} serves {served.base_model!r} ({served.base_root}), which is not the base model "
            f"of the trainer, {name!r}: {evidence}. The adapter would be applied to the wrong weights. "
            "Restart the server with the model that is being trained, or point vllm_server_base_url at the right "
            f"server. {words}".rstrip()
        )

    def _summary(self, adapter: CanonicalAdapter) -> str:
        served = self.engine.capabilities
        return (
            f"LoRA adapter sync: {served.engine} {served.version} at {self.settings.base_url} serving "
            f"{served.base_model}; adapter rank {adapter.rank}, {adapter.parameters / 1e6:.2f} M parameters, "
            f"{adapter.payload_bytes / 1e6:.1f} MB per sync as {str(adapter.dtype).removeprefix('torch.')}; versions "
            f"in {self.transport.where}; checked: adapter features, runtime loading, base model, rank, a trial load "
            "and token."
        )


def is_same_model(ours: str, theirs: tuple[str, ...]) -> bool:
    """Whether the trainer's and the server's words for the base model probably mean the same checkpoint.

    Compared by the last path component, because a mount or a hub organisation may differ. Text only: what a server
    says is never opened as a path.
    """
    return _model_name(ours) in {_model_name(name) for name in theirs}


def _model_name(text: str) -> str:
    # A snapshot in the Hugging Face cache ends in a commit hash: .../models--Qwen--Qwen3-8B/snapshots/<hash>
    repository, _, _ = text.partition("/snapshots/")
    return repository.rstrip("/").rpartition("/")[2].rpartition("--")[2].lower()
