"""Colocate mode in several processes: accelerate launch ... colocate_ways.py RUNS, each of which is WAY FOLDER MODEL

WAY is one of `ways.py`, with `+tp2` for one engine of both processes, `+fused` for adapters in the weights and
`+shared` for one base. Trains a few steps, then lets one process fail in several ways. Writes what it saw to
FOLDER/process-<index>.json; the tests read that.
"""

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from colocate_engines import change_engines
from torch import Tensor

from support.launch import end_process, run_each
from support.models import base_weights, peft_model, randomize_adapter, same_tensors
from support.policies import distance, sample, token_ids
from support.trainers import steps_of
from support.two_processes import Outcome, attempt
from support.vllm_forks import IMPORTED_LATER
from support.ways import Traffic, choose_stage, copy_policy, make_trainer
from trl_lora_sync.collective.shards import is_sharded, shards_of
from trl_lora_sync.colocate import engine
from trl_lora_sync.errors import VerificationError

# What a part of WAY changes in the configuration.
PARTS: dict[str, dict[str, Any]] = {
    "tp2": {"vllm_tensor_parallel_size": 2},
    "fused": {"lora_sync_serving": "fused"},
    "shared": {"vllm_colocate_base": "shared"},
}
# Where vLLM compiles the model, as it does by default. That takes ten seconds of each process and has little to do with
# the way of training; the other tests of tests/colocate have compiled models of one process.
COMPILED = ("ddp+tp2",)


def run_way(way: str, folder: Path, base: Path) -> dict[str, Outcome]:
    keep_apart()
    set_seed(0)
    if way not in COMPILED:
        change_engines(enforce_eager=True)
    untrained, copy = (peft_model(base) for _ in range(2))  # before the trainer, see `ways.run_way`
    launcher, *parts = way.split("+")
    trainer = make_trainer(
        launcher,
        folder,
        "",
        base,
        vllm_mode="colocate",
        vllm_server_base_url=None,
        vllm_max_model_length=256,
        lora_sync_dtype="float32",
        model_init_kwargs={"dtype": "float32"},
        **{name: value for part in parts for name, value in PARTS[part].items()},
    )
    generation, process = trainer.vllm_generation, trainer.accelerator.process_index
    prompts = [token_ids(2 * process + number) for number in range(2)]
    with generation.holder.serving(None):  # without the adapter, if that is in the weights
        served_base = served_weights(generation.llm)
    randomize_adapter(generation.model, seed=1)  # before it is sharded
    seen = {"train": attempt(lambda: trainer.train() and steps_of(trainer))}

    def sampled() -> Outcome:
        """How far what is sampled is from the policy in one piece, and from the base."""
        copy_policy(trainer, copy)
        rows = sample(generation, prompts)
        return {
            "active": generation.active_name,
            "distance": distance(copy, rows).max().item(),
            "moved": distance(untrained, rows).mean().item(),
        }

    def bases() -> Outcome:
        copy_policy(trainer, copy)
        with generation.holder.serving(None):
            served = served_weights(generation.llm)
        return {
            "served": same_tensors(served, served_base),
            "served_elements": sum(value.numel() for value in served.values()),
            "trained": same_tensors(base_weights(copy), base_weights(untrained)),
        }

    def traffic() -> Outcome:
        with Traffic() as counted:
            generation.sync_weights()
        layout = generation.layout
        return {
            "is_sharded": is_sharded(generation.model),
            "bytes": counted.bytes,
            "adapter_bytes": 4 * sum(shape.numel() for _, shape in layout),
        }

    def failing(fault: Callable[[], Any]) -> None:
        """A sync of other weights, with a fault on process 1; the weights are put back afterwards."""
        with changed(trainer, lambda values: values.mul_(1.5)), fault():
            generation.sync_weights()

    def not_finite() -> Any:
        return changed(trainer, lambda values: values.fill_(torch.nan), processes=[1])

    @contextmanager
    def replaced(owner: Any, name: str, act: Callable[..., Any]) -> Iterator[None]:
        original = getattr(owner, name)
        if process == 1:
            setattr(owner, name, act)
        try:
            yield
        finally:
            setattr(owner, name, original)

    def wrong_slot() -> Any:
        def compare(*_: Any) -> None:
            raise VerificationError("the slot holds other bits")

        generation.is_verified = False  # so that the version would be verified next, by the engine of all
        return replaced(generation.holder, "compare", compare)

    @contextmanager
    def disproved() -> Iterator[None]:
        """What the trainer computes is another thing than what is served, on process 1 alone."""
        scores = generation.scores

        def shifted(*args: Any) -> Any:
            found = scores(*args)
            return type(found)(base=found.base, adapted=[value - 2 for value in found.adapted])

        generation.is_verified = False
        with replaced(generation, "scores", shifted):
            yield

    def lost_slot() -> None:
        """Something else is loaded into the active slot on process 1."""
        slots = generation.holder
        record = slots.contents[generation.active.adapter_id]
        if process == 1:
            slots.contents[generation.active.adapter_id] = None
        try:
            sample(generation, prompts)
        finally:
            slots.contents[generation.active.adapter_id] = record

    def different() -> None:
        with changed(trainer, lambda values: values.mul_(1.25), processes=[1]):
            generation.sync_weights()

    seen["trained"] = attempt(sampled)
    seen["traffic"] = attempt(traffic)
    seen["active"] = attempt(lambda: generation.active_name)
    faults = {"not_finite": not_finite, "wrong_slot": wrong_slot, "disproved": disproved}
    if "fused" in parts:
        del faults["wrong_slot"]
    for name, fault in faults.items():
        seen[name] = attempt(lambda fault=fault: failing(fault))
        seen[f"after_{name}"] = attempt(sampled)
    if not is_sharded(generation.model):
        seen["different"] = attempt(different)
        seen["after_different"] = attempt(sampled)
    if "fused" not in parts:
        seen["lost_slot"] = attempt(lost_slot)
        seen["after_lost_slot"] = attempt(sampled)
    if process == 1:
        torch.rand(3)  # as dropout takes more random numbers for a larger batch
    seen["after_random_numbers"] = attempt(sampled)
    with changed(trainer, lambda values: values.mul_(1.5)):
        seen["new"] = attempt(sampled)
    seen["bases"] = attempt(bases)
    return seen


@contextmanager
def changed(trainer: Any, act: Callable[[Tensor], Any], processes: Any = (0, 1)) -> Iterator[None]:
    """The parts of the adapter that some processes hold are others while the block lasts."""
    generation = trainer.vllm_generation
    linears = generation.linears()
    shards = shards_of(linears, trainer.model_wrapped)
    held = [linear.weight if one is None else one.values for linear, one in zip(linears, shards, strict=True)]
    values = [one.detach() for one in held]
    before = [value.clone() for value in values]
    with torch.no_grad():
        if trainer.accelerator.process_index in processes:
            for value in values:
                act(value)
        try:
            yield
        finally:
            for value, old in zip(values, before, strict=True):
                value.copy_(old)


def served_weights(llm: Any) -> dict[str, Tensor]:
    """Copies of the weights that vLLM computes with, without adapters' weights."""
    return {name: value.clone() for name, value in engine.served_model(llm).named_parameters() if "lora" not in name}


def keep_rows() -> None:
    """Let CPU builds of vLLM keep linear weights as they are, not packed and out of sight."""
    from vllm.model_executor.layers import utils

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = dispatch


def keep_apart() -> None:
    """Let engines of other runs on this host, and what killed ones left, have other names for shared memory."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    name, port = _CPUSHMDistributed.make_group_name, os.environ["MASTER_PORT"]
    _CPUSHMDistributed.make_group_name = staticmethod(lambda group: f"/{port}{name(group).strip('/')}")


def main(way: str, folder: str, model: str) -> None:
    torch.set_num_threads(1)
    choose_stage(way)
    end_process(folder, run_way(way, Path(folder), Path(model)))


if __name__ == "__main__":
    keep_rows()  # before vLLM's layers take what it replaces
    # In the process that all runs are forks of.
    for module in ("vllm.entrypoints.llm", *IMPORTED_LATER, "deepspeed", "trl_lora_sync.colocate.generation"):
        importlib.import_module(module)
    run_each(main, sys.argv[1])
