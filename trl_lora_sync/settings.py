"""What the trainer's arguments come down to: the one object that is passed down whole."""

from dataclasses import dataclass
from pathlib import Path

import torch

from trl_lora_sync.verify import TOLERANCE


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
class SyncSettings:
    """Everything a sync needs to know, passed down whole.

    Attributes:
        servers: all servers that sample for the run, at least one.
        engine: `"vllm"`, `"sglang"` or `"auto"`.
        transport: `"auto"`, `"disk"`, `"push"` or `"tensors"`.
        root: where the trainer writes versions.
        server_root: the same folder as the servers see it; `None` for the same path.
        keep: how many versions stay registered on the servers.
        pause: `"off"`, or how to stop other clients' generation during a load: `"drain"` or `"abort"`.
        frees_kv_cache: whether the servers give back their KV cache between generation and the next sync.
        dtype: dtype of the written adapter; `None` takes that of the base model.
        sync_timeout_s: for one sync, and for a server that is away to come back.
        startup_timeout_s: for the servers to come up.
        generation_timeout_s: for the completions of one generation call.
        serving: `"runtime"`, or `"fused"` to have adapters added to the servers' weights.
        on_server_loss: `"error"`, or `"drop"` to go on without a server that stays away.
        verify: `"first"` to prove once per server that it samples from the adapter, `"every"` at each sync, or `"off"`.
        verify_tolerance: see `verify.compare`.
        samples_older: whether the trainer is to sample from an older version between syncs, as TRL's
            `vllm_sync_frequency` above 1 asks for.
        overlap: whether the servers sample the next batch while the trainer works on this one.
    """

    servers: tuple[ServerAddress, ...]
    engine: str
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
    serving: str = "runtime"
    on_server_loss: str = "error"
    verify: str = "first"
    verify_tolerance: float = TOLERANCE
    samples_older: bool = False
    overlap: bool = False

    @property
    def loads_wait(self) -> bool:
        """Whether a load lasts until every running request has ended."""
        return self.serving == "fused" or self.pause == "drain"
