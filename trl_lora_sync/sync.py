"""The story of one weight sync: export, deliver, load, activate, retire.

Runs on process 0 only and knows neither TRL nor PEFT nor HTTP. Versioned names make pausing the server and flushing
its caches needless: no request can meet a half-loaded adapter, and no cache entry of one version fits another.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from trl_lora_sync.adapter.canonical import CanonicalAdapter, widened
from trl_lora_sync.adapter.store import AdapterStore, StoredAdapter, sweep_leftovers
from trl_lora_sync.engines.base import Deadline, Engine, PromptGroup, Sampling
from trl_lora_sync.engines.connect import connect_engine
from trl_lora_sync.errors import AdapterNotVisibleError, AdapterRejectedError, LoRASyncError, ServerSetupError
from trl_lora_sync.metrics import PhaseTimer, SyncReport

logger = logging.getLogger(__name__)

# An unload only removes a name; a server that takes longer is busy with something else and may keep the name.
_UNLOAD_TIMEOUT_S = 5.0
_TRIAL_PROMPT = PromptGroup(prompt=[0, 1, 2, 3], count=1)
_TRIAL_SAMPLING = Sampling(
    temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, max_tokens=1, logprobs=0
)


@dataclass(frozen=True, kw_only=True)
class SyncSettings:
    """Everything a sync needs to know, passed down whole.

    Attributes:
        base_url: the server, without a trailing slash.
        engine: `"vllm"` or `"auto"`.
        is_local: whether the server runs on this host.
        root: where the trainer writes versions.
        server_root: the same folder as the server sees it; `None` for the same path.
        keep: how many versions stay registered on the server.
        dtype: dtype of the written adapter; `None` takes that of the base model.
        sync_timeout_s: for one sync.
        startup_timeout_s: for the server to come up.
        generation_timeout_s: for the completions of one generation call.
    """

    base_url: str
    engine: str
    is_local: bool
    root: Path
    server_root: str | None
    keep: int
    dtype: torch.dtype | None
    sync_timeout_s: float
    startup_timeout_s: float
    generation_timeout_s: float


class AdapterSync:
    """Keeps one server on the newest accepted version of one adapter."""

    def __init__(self, settings: SyncSettings) -> None:
        self.settings = settings
        self._engine: Engine | None = None
        self._store = AdapterStore(settings.root, server_root=settings.server_root)
        self._next_version = 1
        self._registered: deque[StoredAdapter] = deque()
        self._retired: list[StoredAdapter] = []

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise LoRASyncError("The server is not connected; start() comes first.")
        return self._engine

    @property
    def active(self) -> StoredAdapter | None:
        """The version every new request names, or None before the first sync and after `close`."""
        return self._registered[-1] if self._registered else None

    def start(self, adapter: CanonicalAdapter, *, vocab_size: int | None) -> str:
        """Connect, clean up after dead runs, and prove that the server can load and sample from such an adapter.

        Args:
            adapter: the model's adapter as it is now; loaded as version 0 and withdrawn at once.
            vocab_size: of the trainer's base model, if it is known.

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
        self._store.open()
        self._sweep()
        self._check_base(adapter, vocab_size)
        self._try_out(adapter)
        return self._summary(adapter)

    def publish(self, read: Callable[[], CanonicalAdapter]) -> SyncReport:
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
            adapter = read()
        version = self._next_version
        self._next_version += 1  # a name is never used again, not even after a failure
        with timer.phase("write"):
            stored = self._store.write(version, adapter)
        with timer.phase("load"):
            self._load_or_withdraw(stored, deadline)
        self._registered.append(stored)
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
        for stored in self._registered:
            self._unload(stored.name)
        self._registered.clear()
        self._retired.clear()
        self._store.close()

    def _load_or_withdraw(self, stored: StoredAdapter, deadline: Deadline) -> None:
        try:
            self.engine.load(stored, deadline)
        except BaseException:
            self._withdraw(stored)
            raise

    def _withdraw(self, stored: StoredAdapter) -> None:
        # Unloaded even after a refusal: the request may have been carried out although its answer was lost.
        self._unload(stored.name)
        self._store.delete(stored)

    def _retire_old_versions(self) -> None:
        """Unload what is beyond `keep`; delete files one version later, as the server may still re-read them.

        Source: vLLM re-reads an evicted adapter from its path inside the engine step, and dies if it is gone.
        """
        for stored in self._retired:
            self._store.delete(stored)
        self._retired.clear()
        while len(self._registered) > self.settings.keep:
            oldest = self._registered.popleft()
            self._unload(oldest.name)
            self._retired.append(oldest)

    def _unload(self, adapter_name: str) -> None:
        if self._engine is None:
            return
        deadline = Deadline.after(_UNLOAD_TIMEOUT_S, f"Unloading {adapter_name}")
        if not self._engine.unload(adapter_name, deadline):
            logger.info("The server did not confirm that it forgot %s; training is not affected.", adapter_name)

    def _sweep(self) -> None:
        for run in sweep_leftovers(self._store.root, self._unload):
            logger.info("Removed what the run %s had left behind.", run)

    # Proofs at start

    def _check_base(self, adapter: CanonicalAdapter, vocab_size: int | None) -> None:
        """Find out what can be known about the served base: its vocabulary always, its width if in doubt.

        A server reports no shapes, and vLLM pads an adapter that is too small for it with zeros and answers 200.
        """
        deadline = Deadline.after(self.settings.sync_timeout_s, "The check of the base model (lora_sync_timeout)")
        served = self.engine.capabilities
        same_name = not adapter.base_model or is_same_model(adapter.base_model, (served.base_model, served.base_root))
        if not same_name:
            logger.warning(
                "The trainer's base model is %r, but %s serves %r (%s). If these are not the same weights, every "
                "completion comes from another policy than the one being trained.",
                adapter.base_model,
                self.settings.base_url,
                served.base_model,
                served.base_root,
            )
        knows = self.engine.knows_token
        if vocab_size and not knows(vocab_size - 1, deadline):
            raise self._other_base(adapter, f"its vocabulary has fewer than the trainer's {vocab_size} tokens")
        if not same_name or (vocab_size and knows(vocab_size, deadline)):
            self._check_width(adapter, deadline)

    def _check_width(self, adapter: CanonicalAdapter, deadline: Deadline) -> None:
        """Offer an adapter that is one wider than the trainer's; a server with the same base must refuse it."""
        probe = self._store.write("width", widened(adapter))
        try:
            self.engine.load(probe, deadline)
        except AdapterRejectedError:
            return
        finally:
            self._withdraw(probe)
        raise self._other_base(adapter, "its layers are wider than the trainer's")

    def _try_out(self, adapter: CanonicalAdapter) -> None:
        deadline = Deadline.after(self.settings.sync_timeout_s, "The trial load of the adapter (lora_sync_timeout)")
        trial = self._store.write(0, adapter)
        try:
            self.engine.load(trial, deadline)
            self.engine.generate(trial.name, [_TRIAL_PROMPT], _TRIAL_SAMPLING, deadline)
        except AdapterNotVisibleError:
            raise
        except AdapterRejectedError as error:
            raise self._other_base(adapter, "it refused an adapter of the trainer's shapes", str(error)) from error
        finally:
            self._withdraw(trial)

    def _other_base(self, adapter: CanonicalAdapter, evidence: str, words: str = "") -> ServerSetupError:
        served = self.engine.capabilities
        return ServerSetupError(
            f"{self.settings.base_url} serves {served.base_model!r} ({served.base_root}), which is not the base model "
            f"of the trainer, {adapter.base_model!r}: {evidence}. The adapter would be applied to the wrong weights. "
            "Restart the server with the model that is being trained, or point vllm_server_base_url at the right "
            f"server. {words}".rstrip()
        )

    def _summary(self, adapter: CanonicalAdapter) -> str:
        served = self.engine.capabilities
        seen = f" (the server sees {self.settings.server_root})" if self.settings.server_root else ""
        return (
            f"LoRA adapter sync: {served.engine} {served.version} at {self.settings.base_url} serving "
            f"{served.base_model}; adapter rank {adapter.rank}, {adapter.parameters / 1e6:.2f} M parameters, "
            f"{adapter.payload_bytes / 1e6:.1f} MB per sync as {str(adapter.dtype).removeprefix('torch.')}; versions "
            f"in {self._store.directory}{seen}; checked: adapter features, runtime loading, shared folder, rank, "
            "a trial load and token."
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
