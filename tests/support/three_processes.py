"""Gather shards in three processes: torchrun ... three_processes.py FOLDER

Without a server or a trainer: torch's FSDP alone, in layouts that accelerate does not support on a CPU. Writes what
each process saw to FOLDER/process-<index>.json.
"""

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from support.launch import end_process
from trl_lora_sync.collective.distributed import gather_weights, run_on_main

# Longer than a collective of this test takes on a busy machine, shorter than its patience.
GROUP_TIMEOUT_S = 20.0


class Block(nn.Module):
    """A base layer and two matrices whose sizes three processes cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 13).requires_grad_(False)
        self.lora_A = nn.Linear(8, 2, bias=False)
        self.lora_B = nn.Linear(2, 13, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_B(self.lora_A(x))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(Block(), nn.Linear(13, 8).requires_grad_(False), Block())
    special = made[0].lora_A.weight.data.view(-1)
    special[:4] = torch.tensor([-0.0, float("nan"), float("-inf"), 1e-45])  # no bit of them may change
    return made


def fsdp1(made: nn.Module, *, strategy: ShardingStrategy, use_orig_params: bool) -> nn.Module:
    # A flat parameter takes frozen and trained parameters together only with `use_orig_params`.
    policy = ModuleWrapPolicy({Block} if use_orig_params else {nn.Linear})
    return FullyShardedDataParallel(
        made,
        auto_wrap_policy=policy,
        sharding_strategy=strategy,
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )


def fsdp2(made: nn.Module, **options: Any) -> nn.Module:
    for layer in made:
        if isinstance(layer, Block):
            fully_shard(layer, **options)
    return fully_shard(made, **options)


LAYOUTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fsdp1": lambda made: fsdp1(made, strategy=ShardingStrategy.FULL_SHARD, use_orig_params=False),
    "fsdp1-mixed": lambda made: fsdp1(made, strategy=ShardingStrategy.FULL_SHARD, use_orig_params=True),
    "fsdp1-grad-op": lambda made: fsdp1(made, strategy=ShardingStrategy.SHARD_GRAD_OP, use_orig_params=True),
    "fsdp2": fsdp2,
    # Pinned memory needs a GPU; without it the offload is the same.
    "fsdp2-offload": lambda made: fsdp2(made, offload_policy=CPUOffloadPolicy(pin_memory=False)),
}


def linears_of(made: nn.Module) -> list[nn.Module]:
    return [matrix for layer in made if isinstance(layer, Block) for matrix in (layer.lora_A, layer.lora_B)]


def gather(accelerator: Any, wrap: Callable[[nn.Module], nn.Module]) -> dict[str, Any]:
    """Gather before the first forward pass and after one, and compare bit by bit with what was sharded."""
    made = model()
    linears = linears_of(made)
    expected = [linear.weight.detach().clone() for linear in linears]
    root = wrap(made)
    before = gather_weights(accelerator, linears, root)
    with torch.no_grad():
        root(torch.ones(3, 8))  # leaves the parameters of some layouts whole
    after = gather_weights(accelerator, linears, root)
    same = [
        torch.equal(weights[linear].view(torch.int32), value.view(torch.int32))
        for weights in (before, after)
        for linear, value in zip(linears, expected, strict=True)
        if weights
    ]
    return {"gathered": [len(before), len(after)], "same": same}


def never_coming(accelerator: Any) -> dict[str, Any]:
    """Gather while the last process leaves out the collective that moves the bytes."""
    made = model()
    linears = linears_of(made)
    root = fsdp2(made)
    if accelerator.process_index == accelerator.num_processes - 1:
        torch.distributed.reduce = _fail  # type: ignore[assignment]
    started = time.monotonic()
    try:
        gather_weights(accelerator, linears, root)
        run_on_main(accelerator, lambda: None)  # what a sync goes on with
    except Exception as error:
        return {"error": type(error).__name__, "seconds": time.monotonic() - started}
    return {}


def _fail(*_: Any, **__: Any) -> None:
    raise ConnectionError("the cable is out")


def main(folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    state = PartialState(cpu=True)
    accelerator = SimpleNamespace(
        process_index=state.process_index,
        num_processes=state.num_processes,
        is_main_process=state.is_main_process,
        device=torch.device("cpu"),
    )
    seen = {name: gather(accelerator, wrap) for name, wrap in LAYOUTS.items()}
    seen["never_coming"] = never_coming(accelerator)  # last, as the group is of no use after it
    end_process(folder, seen)


if __name__ == "__main__":
    main(*sys.argv[1:])
