"""The ways of bringing a policy to a server that are compared.

- `weights`: TRL's own. `VLLMGeneration.sync_weights` merges the adapter, sends every weight over NCCL, unmerges.
- `async trainer`: what `trl.experimental.async_grpo` does each time; its own method is called on an object that has
  what it uses: pause, `save_pretrained`, load under a new name, resume, unload of the version before.
- `runtime`: ours, the server applies the adapter to each token. From GPU to GPU where that works.
- `runtime by file`: the same, by the file that both processes map.
- `fused`: ours, the server computes merged weights from the adapter.
"""

import contextlib
import os
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol
from unittest import mock

import torch
from peft import PeftModel

from trl_lora_sync.adapter.pinned_files import PinnedFilePool
from trl_lora_sync.addresses import default_sync_dir
from trl_lora_sync.engine_plugins.cuda_ipc import CUDADriver, IPCError
from trl_lora_sync.engines.base import Completion, Deadline, PromptGroup, Sampling
from trl_lora_sync.engines.vllm.engine import VLLMEngine
from trl_lora_sync.generation.server import LoRASyncGeneration
from trl_lora_sync.metrics import SyncReport
from trl_lora_sync.runtime import Blocking
from trl_lora_sync.servers import transports
from trl_lora_sync.settings import ServerAddress, SyncSettings
from versus.kinds import BY_FILE, server_kind
from versus.servers import ServerSpec
from versus.workbench import Workbench

TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Phases:
    """One sync, up to the moment from which on the server would sample from the new version.

    Attributes:
        gather_s: for `weights`, merging and unmerging; part of `write_s` for the async trainer.
        write_s: writing for the server; nothing for `weights`.
        load_s: the server's part; for `weights`, sending goes on beside merging, and this is the rest.
        payload_bytes: what went to the server.
    """

    gather_s: float
    write_s: float
    load_s: float
    payload_bytes: int


class Arm(Protocol):
    """One way, with the server that it needs."""

    name: str
    server: ServerSpec
    generation: Any  # None for an arm that TRL's synchronous trainer cannot use

    @property
    def model_name(self) -> str:
        """What requests name to sample from the newest version."""

    @property
    def engine(self) -> Blocking:
        """The client for single prompts to the server."""

    def sync(self) -> Phases | None:
        """Bring the current adapter to the server; None where only `split` can time the parts."""

    def split(self) -> Phases:
        """`sync`, with its parts timed apart even if that takes longer."""

    def sample(self, groups: Sequence[PromptGroup], sampling: Sampling) -> list[list[Completion]]:
        """Sample from the newest version, with this package's client whatever the arm."""

    def use(self, model: PeftModel) -> None:
        """Go on with another adapter of the same rank, or the same one."""

    def close(self) -> None:
        """Withdraw what is on the server."""


def make_arm(name: str, bench: Workbench, server: ServerSpec, urls: Sequence[str], work: Path) -> Arm:
    """Connect an arm to its server, or one of ours to several.

    Raises:
        Exception: whatever the arm's own code raises if it cannot use the server.
    """
    if name == "weights":
        return WeightsArm(bench, server, urls[0])
    if name == "async trainer":
        return AsyncTrainerArm(bench, server, urls[0], work)
    return OurArm(name, bench, server, urls, work)


class _Plain(VLLMEngine):
    """The package's client for a vLLM server that may have no LoRA."""

    async def _check_serving(self, deadline: Deadline) -> dict[str, Any]:
        return {}


def connect_plain(url: str) -> Blocking:
    engine = Blocking(_Plain(url, is_local=True))
    engine.connect(deadline("Connecting"))
    return engine


def deadline(task: str) -> Deadline:
    return Deadline.after(TIMEOUT_S, task)


def _generation_arguments(bench: Workbench, url: str) -> dict[str, Any]:
    return {
        "model": bench.model,
        "accelerator": bench.accelerator,
        "processing_class": bench.tokenizer,
        "mode": "server",
        "server_base_url": url,
        "server_timeout": TIMEOUT_S,
    }


class WeightsArm:
    """TRL's own sync, through the object that its trainer calls."""

    name = "weights"

    def __init__(self, bench: Workbench, server: ServerSpec, url: str) -> None:
        from trl.generation.vllm_generation import VLLMGeneration

        self.server = server
        self._bench = bench
        self.engine = connect_plain(url)
        self.generation = VLLMGeneration(**_generation_arguments(bench, url), group_port=_free_port())
        self.model_name = self.generation.vllm_client.model

    def sync(self) -> None:
        self.generation.sync_weights()

    def split(self) -> Phases:
        model, bench = self.generation.model, self._bench
        merging: list[float] = []
        with _timed(model, "merge_adapter", bench, merging), _timed(model, "unmerge_adapter", bench, merging):
            start = time.perf_counter()
            self.generation.sync_weights()
            bench.settle()
            total_s = time.perf_counter() - start
        sent = (parameter for name, parameter in model.named_parameters() if model.prefix not in name)
        payload_bytes = sum(parameter.numel() * parameter.element_size() for parameter in sent)
        merging_s = sum(merging)
        return Phases(gather_s=merging_s, write_s=0.0, load_s=total_s - merging_s, payload_bytes=payload_bytes)

    def sample(self, groups: Sequence[PromptGroup], sampling: Sampling) -> list[list[Completion]]:
        return self.engine.generate(self.model_name, groups, sampling, deadline("Sampling"))

    def use(self, model: PeftModel) -> None:
        self.generation.model = model
        self.generation.accelerator = self._bench.accelerator

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.generation.vllm_client.close_communicator()
        self.engine.close()


class AsyncTrainerArm:
    """The adapter sync of TRL's experimental asynchronous trainer, which generates in another process."""

    name = "async trainer"
    generation = None
    # As close to a synchronous trainer as it gets: one version is sampled from, and one is being loaded.
    _MAX_STALENESS = 0

    def __init__(self, bench: Workbench, server: ServerSpec, url: str, work: Path) -> None:
        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
        from trl.experimental.async_grpo import async_grpo_trainer
        from trl.experimental.async_grpo.vllm_client import VLLMClient

        self.server = server
        self.engine = connect_plain(url)
        self._method = async_grpo_trainer.AsyncGRPOTrainer._sync_weight_lora
        # Unique, as a server that is used again may still have the name of an earlier run.
        name = f"trl-policy-{os.getpid()}-{id(self)}"
        self._trainer = SimpleNamespace(
            model=bench.model,
            accelerator=bench.accelerator,
            args=SimpleNamespace(max_staleness=self._MAX_STALENESS),
            vllm_client=VLLMClient(url),
            rollout_worker=None,
            model_version=0,
            _lora_dir=str(default_sync_dir(True, work) / name),
            _lora_name=name,
            _adapter_name="default",
        )

    @property
    def model_name(self) -> str:
        return f"{self._trainer._lora_name}-v{self._trainer.model_version}"

    def sync(self) -> Phases:
        start = time.time()  # the clock that the method reads
        paused, ready, written = self._method(self._trainer, start)
        end = time.time()
        tensors = Path(self._trainer._lora_dir, self.model_name, "adapter_model.safetensors")
        return Phases(
            gather_s=0.0,
            write_s=written - ready,
            load_s=(end - written) + (paused - start),
            payload_bytes=tensors.stat().st_size,
        )

    split = sync

    def sample(self, groups: Sequence[PromptGroup], sampling: Sampling) -> list[list[Completion]]:
        return self.engine.generate(self.model_name, groups, sampling, deadline("Sampling"))

    def use(self, model: PeftModel) -> None:
        self._trainer.model = model

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._trainer.vllm_client.unload_lora_adapter(self.model_name)
        shutil.rmtree(self._trainer._lora_dir, ignore_errors=True)
        self.engine.close()


class OurArm:
    """This package's sync, through the object that TRL's trainer calls."""

    def __init__(self, name: str, bench: Workbench, server: ServerSpec, urls: Sequence[str], work: Path) -> None:
        self.name = name
        self.server = server
        self._bench = bench
        self._reports: list[SyncReport] = []
        settings = SyncSettings(
            servers=tuple(ServerAddress(base_url=url, is_local=True) for url in urls),
            engine="vllm",
            transport="auto",
            root=default_sync_dir(True, work),
            server_root=None,
            keep=2,
            pause="off",
            frees_kv_cache=False,
            dtype=None,
            sync_timeout_s=TIMEOUT_S,
            startup_timeout_s=TIMEOUT_S,
            generation_timeout_s=TIMEOUT_S,
            serving=server_kind(name),
        )
        with _no_shared_gpu() if name == BY_FILE else contextlib.nullcontext():
            self.generation = LoRASyncGeneration(
                **_generation_arguments(bench, ",".join(urls)), settings=settings, on_sync=self._reports.append
            )

    @property
    def model_name(self) -> str:
        return str(self.generation.vllm_client.model)

    @property
    def engine(self) -> Blocking:
        return Blocking(self.generation.sync.fleet.servers[0].engine)

    def sync(self) -> Phases:
        self.generation.sync_weights()
        report = self._reports[-1]
        return Phases(
            gather_s=report.gather_s,
            write_s=report.write_s,
            load_s=report.load_s,
            payload_bytes=report.payload_bytes,
        )

    split = sync

    def sample(self, groups: Sequence[PromptGroup], sampling: Sampling) -> list[list[Completion]]:
        # As TRL's trainer, whose generation looks at the model first.
        self.generation.sync_if_changed()
        return self.generation.sync.generate(self.model_name, groups, sampling, deadline("Sampling"))

    def use(self, model: PeftModel) -> None:
        self.generation.model = model
        self.generation.accelerator = self._bench.accelerator

    def close(self) -> None:
        self.generation.sync.shutdown()


def _no_shared_gpu() -> Any:
    """Trainers that are made meanwhile offer servers no memory of their GPU, as where the driver refuses it."""
    return mock.patch.object(
        transports, "PinnedFilePool", lambda **given: PinnedFilePool(driver_for=_no_driver, **given)
    )


def _no_driver(device: torch.device) -> CUDADriver:
    raise IPCError("this arm is to read files")


@contextlib.contextmanager
def _timed(model: PeftModel, method: str, bench: Workbench, seconds: list[float]) -> Iterator[None]:
    """Time a method by itself, which needs the GPU to have finished before and after; a plain sync does not wait."""
    original = getattr(model, method)

    def timed(*args: Any, **kwargs: Any) -> Any:
        bench.settle()
        start = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            bench.settle()
            seconds.append(time.perf_counter() - start)

    setattr(model, method, timed)
    try:
        yield
    finally:
        delattr(model, method)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
