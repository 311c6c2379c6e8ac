"""Publish one version, print its name, and wait to be killed: python run_until_killed.py URL FOLDER [POINT]

POINT is where in the sync it waits: `writing`, `written` or `loaded`; after the sync by default.
"""

import signal
import sys
import threading
from pathlib import Path

import torch

from trl_lora_sync.adapter import store
from trl_lora_sync.adapter.canonical import CanonicalAdapter, LoRAModule
from trl_lora_sync.adapter.flat import FlatBuffer
from trl_lora_sync.checks.verify import PROBE_PROMPT, TrainedBase
from trl_lora_sync.settings import ServerAddress, SyncSettings
from trl_lora_sync.sync import AdapterSync

HIDDEN = 128


def adapter() -> CanonicalAdapter:
    lora_A, lora_B = torch.ones(4, HIDDEN), torch.ones(HIDDEN, 4)
    module = LoRAModule(name="model.layers.0.self_attn.q_proj", lora_A=lora_A, lora_B=lora_B, scaling=1.0)
    return FlatBuffer().export([module], dtype=torch.float32)


def wait_at(point: str, sync: AdapterSync) -> None:
    """Let the next sync wait for ever at a point, and print a line there."""

    def wait(*_: object) -> None:
        print(point, flush=True)
        threading.Event().wait()

    if point == "writing":
        store.fsync = wait
        return
    engine = sync.fleet.servers[0].engine
    load = engine.load

    async def load_and_wait(*arguments: object) -> None:
        if point == "loaded":
            await load(*arguments)
        wait()

    engine.load = load_and_wait


def main(url: str, folder: str, point: str | None = None) -> None:
    sync = AdapterSync(
        SyncSettings(
            servers=(ServerAddress(base_url=url, is_local=True),),
            engine="vllm",
            transport="disk",
            root=Path(folder),
            server_root=None,
            keep=2,
            pause="off",
            frees_kv_cache=False,
            dtype=None,
            sync_timeout_s=30,
            startup_timeout_s=30,
            generation_timeout_s=30,
        )
    )
    base = TrainedBase(scores=([0.0] * (len(PROBE_PROMPT) - 1), 1e6))
    sync.start(lambda served: adapter(), base)
    if point:
        wait_at(point, sync)
    print(sync.publish(adapter()).adapter_name, flush=True)
    signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
