"""What the trainer's arguments come down to: the one object that is passed down whole."""

from dataclasses import dataclass
from pathlib import Path

import torch

from trl_lora_sync.adapter.support import Serving
from trl_lora_sync.checks.verify import TOLERANCE
from trl_lora_sync.engines.base import TIMEOUTS, Timeouts


@dataclass(frozen=True, kw_only=True)
class ServerAddress:
    """Where one server is.

    Attributes:
        base_url: without a trailing slash.
        is_local: whether it runs on this host.
    """

    base_url: str
    is_local: bool


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """What generation on servers and in the trainer's process both need to know.

    The other attributes are the fields of `LoRASyncConfig` without `lora_sync_`, described there.

    Attributes:
        dtype: `None` takes that of the base model.
        proves_groups: whether an adapter may change modules that see images, which is then proved with one.
        samples_older: whether the trainer is to sample from an older version between syncs, as TRL's
            `vllm_sync_frequency` above 1 requests.
    """

    dtype: torch.dtype | None
    serving: Serving = "runtime"
    verify: str = "first"
    verify_tolerance: float = TOLERANCE
    proves_groups: bool = False
    samples_older: bool = False

    @property
    def reads(self) -> Serving:
        """What may be trained: what adapters at run time serve, or what fused serving on a server does."""
        return self.serving


@dataclass(frozen=True, kw_only=True)
class ColocateSettings(PolicySettings):
    """What generation in the trainer's process needs to know.

    Attributes:
        base: `vllm_colocate_base`.
    """

    base: str = "auto"

    @property
    def reads(self) -> Serving:
        """Plain LoRA only, also with fused serving: it computes the weights from the trainer's own base."""
        return "runtime"


@dataclass(frozen=True, kw_only=True)
class SyncSettings(PolicySettings):
    """Everything that sampling on servers needs to know, passed down whole.

    The other attributes are the fields of `LoRASyncConfig` without `vllm_server_` and `lora_sync_`, described there.

    Attributes:
        servers: all servers that sample for the run, at least one.
        root: where the trainer writes versions.
        server_root: the same folder as the servers see it; `None` for the same path.
        sampling_fields: names of the fields in `generation_kwargs`.
        frees_kv_cache: whether the servers release their KV cache between generation and the next sync.
        sync_timeout_s: for one sync, and for a server that is away to come back.
        startup_timeout_s: for the servers to come up.
        staleness: with an asynchronous trainer, how many versions older than the newest a sample may be; else None.
        timeouts: of the steps that have no setting.
    """

    servers: tuple[ServerAddress, ...]
    engine: str
    transport: str
    root: Path
    server_root: str | None
    keep: int
    pause: str
    frees_kv_cache: bool
    sync_timeout_s: float
    startup_timeout_s: float
    generation_timeout_s: float
    on_server_loss: str = "error"
    overlap: bool = False
    staleness: int | None = None
    sampling_fields: tuple[str, ...] = ()
    timeouts: Timeouts = TIMEOUTS

    @property
    def versions_at_once(self) -> int:
        """How many versions a server needs room for: all that are sampled from, and the next one."""
        if self.staleness is not None:
            # The newest one, as many older ones as samples may be behind, and the version that is loaded meanwhile.
            return self.staleness + 2
        # Without overlap nothing is sampled during a load, so the version before can give up its slot.
        return 2 if self.overlap else 1

    @property
    def loads_wait(self) -> bool:
        """Whether a load lasts until every running request has ended."""
        # Fused serving writes the served weights, which every running request computes with.
        return self.serving == "fused" or self.pause == "drain"
