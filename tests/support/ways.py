"""Ways of training, end to end: accelerate launch ... ways.py RUNS, each of which is WAY FOLDER URL MODEL

Each trains a few steps against the real server, then looks at what a sync gathers, at the adapter it publishes and at
failures of one process. Writes what it saw to FOLDER/process-<index>.json; the tests read that.
"""

import functools
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import trl_lora_sync.collective.distributed
import trl_lora_sync.generation.base
from support.launch import end_process, run_each
from support.models import base_weights, lora, nf4, peft_model, randomize_adapter, same_tensors
from support.policies import distance, sample, token_ids
from support.trainers import grpo_trainer, prompts, steps_of, sync_fields
from support.two_processes import Outcome, attempt
from trl_lora_sync import (
    DistillationConfig,
    DistillationTrainer,
    GRPOTrainer,
    RLOOConfig,
    RLOOTrainer,
    export_adapter,
)
from trl_lora_sync.adapter.export import remember_initial_adapter
from trl_lora_sync.collective.shards import is_sharded
from trl_lora_sync.engines.vllm.engine import VLLMEngine
from trl_lora_sync.metrics import SyncReport

# FSDP1 as accelerate wraps by default, as it wraps LoRA layers by PEFT's policy, and two more layouts of a shard.
COMMON = {
    "auto_wrap_policy": "transformer_based_wrap",
    "cpu_ram_efficient_loading": False,
    "state_dict_type": "SHARDED_STATE_DICT",  # as in examples/accelerate
}
FSDP1 = COMMON | {"fsdp_version": 1}
FSDP2 = COMMON | {"fsdp_version": 2}
FSDP: dict[str, dict[str, Any]] = {
    "fsdp1": FSDP1 | {"use_orig_params": False},
    "fsdp1-orig": FSDP1 | {"use_orig_params": True},
    "fsdp1-grad-op": FSDP1 | {"use_orig_params": True, "reshard_after_forward": "SHARD_GRAD_OP"},
    "fsdp2": FSDP2 | {"reshard_after_forward": True},
    "fsdp2-whole": FSDP2 | {"reshard_after_forward": True},
}


# A 4-bit base in the trainer, while the server has the same base unquantised.
QLORA = "-qlora"
# RLOO instead of GRPO.
WITH_RLOO = "-rloo"
# Distillation from a teacher in the trainer, which is wrapped before the model is.
WITH_TEACHER = "-distillation"
# An initialisation that takes the initial adapter out of the base weights.
WITH_PISSA = "-pissa"
# Whose 4-bit weights are floating-point numbers to FSDP, which it shards.
AS_NUMBERS = ("fsdp1-orig", "fsdp2")


class OnCPU:
    """A mixin for a trainer that runs real FSDP on the CPU.

    accelerate takes FSDP for GPUs only and goes on with DDP without one (state.py, 1.15); torch's FSDP runs on gloo. So
    accelerate's state is set as if it had found GPUs; everything else is accelerate's and torch's own.
    """

    plugin: FullyShardedDataParallelPlugin

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, self.plugin
        PartialState().distributed_type = DistributedType.FSDP
        state.device = PartialState().device = torch.device("cpu")  # FSDP1 takes "cpu:0" for another device
        self.is_fsdp_enabled = True


class FSDPTrainer(OnCPU, GRPOTrainer):
    """GRPO."""


class FSDPDistillationTrainer(OnCPU, DistillationTrainer):
    """Distillation."""


class Traffic(TorchDispatchMode):
    """Counts the bytes of every tensor that a collective of torch sees, by the name of the collective."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            sizes = [tensor.numel() * tensor.element_size() for tensor in _tensors((args, kwargs))]
            self.bytes.setdefault(func.__name__.partition(".")[0], []).append(sum(sizes))
        return func(*args, **(kwargs or {}))


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple | dict):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _tensors(value)


@contextmanager
def whole(model: nn.Module, root: nn.Module) -> Iterator[None]:
    """All parameters gathered by the launcher's own means, to compare with."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    is_quantised = getattr(model, "is_loaded_in_4bit", False)
    parameters = [value for name, value in model.named_parameters() if "lora_" in name or not is_quantised]
    if FullyShardedDataParallel.fsdp_modules(root):
        with FullyShardedDataParallel.summon_full_params(root, writeback=False):
            yield
    elif hasattr(parameters[0], "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters(parameters):
            yield
    else:
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for unit in units:
            unit.unshard()
        yield
        for unit in units:
            unit.reshard()


def copy_policy(trainer: GRPOTrainer, copy: nn.Module) -> None:
    """**Collective.** Make `copy` the policy in one piece, as a single process would hold it."""
    model, values = trainer.vllm_generation.model, {}
    is_quantised = getattr(model, "is_loaded_in_4bit", False)
    wanted = {} if is_quantised else dict(copy.named_parameters())  # else the base stays what the server has
    with whole(model, trainer.model_wrapped):
        for name, value in model.named_parameters():
            name = name.replace("_fsdp_wrapped_module.", "")
            if "lora_" in name or name in wanted:
                values[name] = value.detach().clone()
    missing = copy.load_state_dict(values, strict=False)
    assert not missing.unexpected_keys, missing
    assert all("lora_" not in name for name in missing.missing_keys), missing


def make_trainer(way: str, folder: Path, url: str, model: Path, **changes: Any) -> GRPOTrainer:
    trainer_class, config = GRPOTrainer, {"max_steps": 2, "ddp_timeout": 400, **changes}
    if way.endswith(WITH_RLOO):
        trainer_class, config["config_class"] = RLOOTrainer, RLOOConfig
        way = way.removesuffix(WITH_RLOO)
    if way.endswith(WITH_PISSA):
        config |= {"peft_config": lora(init_lora_weights="pissa")}
        way = way.removesuffix(WITH_PISSA)
    has_teacher, way = way.endswith(WITH_TEACHER), way.removesuffix(WITH_TEACHER)
    is_qlora, way = way.endswith(QLORA), way.removesuffix(QLORA)
    if is_qlora:
        config |= four_bit(torch.bfloat16 if way in AS_NUMBERS else torch.uint8)
    if way in FSDP:
        trainer_class = FSDPTrainer
        OnCPU.plugin = FullyShardedDataParallelPlugin(**FSDP[way])
    elif way.startswith("zero"):
        # accelerate drops DeepSpeed with `use_cpu`; it takes the CPU when there is nothing else.
        config |= {"use_cpu": False, "ddp_backend": "gloo"}
        without_compiled_parts()
    if has_teacher:
        args = DistillationConfig(**sync_fields(url, folder, **config))
        fields = {"args": args, "train_dataset": prompts(), "peft_config": lora()}
        # Of the same checkpoint, which differs from the student by its adapter.
        return FSDPDistillationTrainer(model=str(model), teacher_model=str(model), **fields)
    return grpo_trainer(url, model, folder, trainer_class=trainer_class, **config)


def four_bit(storage: torch.dtype) -> dict[str, Any]:
    return {
        "trainer_kwargs": {"quantization_config": nf4(bnb_4bit_quant_storage=storage)},
        "model_init_kwargs": {"dtype": "bfloat16", "device_map": None},
    }


def without_compiled_parts() -> None:
    """Keep DeepSpeed from compiling its collectives for shared memory, for which a machine may have no compiler."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def init_of(way: str) -> Any:
    return "pissa" if way.endswith(WITH_PISSA) else True


@functools.cache
def models_of(base: Path, init: Any) -> tuple[PeftModel, PeftModel]:
    """Two models that are not trained, made before any trainer: Transformers shards what is loaded under ZeRO-3."""
    first, second = (peft_model(base, init_lora_weights=init) for _ in range(2))
    return first, second


def run_way(way: str, folder: Path, url: str, base: Path) -> dict[str, Outcome]:
    init = init_of(way)
    untrained, copy = models_of(base, init)
    remember_initial_adapter(copy, is_new=True)
    trainer = make_trainer(way, folder, url, base)
    generation, process = trainer.vllm_generation, trainer.accelerator.process_index
    deepspeed_plugin = trainer.accelerator.state.deepspeed_plugin
    seen = {"stage": attempt(lambda: deepspeed_plugin and deepspeed_plugin.zero_stage)}
    randomize_adapter(generation.model, seed=1)  # before it is sharded
    seen["train"] = attempt(lambda: trainer.train() and steps_of(trainer))

    def traffic() -> Outcome:
        set_proof(generation, is_verified=True)
        with Traffic() as counted:
            generation.sync_weights()
        return {"is_sharded": is_sharded(generation.model), "bytes": counted.bytes}

    def published() -> Outcome:
        """Compare the files with a single process's for the same weights."""
        copy_policy(trainer, copy)
        rows = sample(generation, [token_ids(process)])
        outcome = {"base_is_intact": same_tensors(base_weights(copy), base_weights(untrained))}
        outcome["distance"] = distance(copy, rows).mean().item()
        outcome["moved"] = distance(untrained, rows).mean().item()
        if process == 0:
            alone = export_adapter(copy, folder / "alone", dtype=generation.dtype_in(generation.sync.form)).path
            stored = generation.sync.active.path
            names = sorted(file.name for file in alone.iterdir())
            outcome["files"] = names
            outcome["same"] = {name: (alone / name).read_bytes() == (stored / name).read_bytes() for name in names}
            outcome["adapter_bytes"] = generation.sync.active.payload_bytes
        return outcome

    def verified() -> Outcome:
        """The log of a sync that must verify its version again."""
        reports: list[SyncReport] = []
        generation.on_sync, log = reports.append, generation.on_sync
        set_proof(generation, is_verified=False)
        generation.sync_weights()
        generation.on_sync = log
        return reports[0].metrics()

    def disproved() -> None:
        module = trl_lora_sync.generation.base
        score = module.adapter_logprobs
        module.adapter_logprobs = lambda *args, **kwargs: [x - 2 for x in score(*args, **kwargs)]
        set_proof(generation, is_verified=False)
        try:
            generation.sync_weights()
        finally:
            module.adapter_logprobs = score

    def saved() -> Outcome | None:
        """What the end of a script saves, compared with what PEFT saves of the policy in one piece."""
        trainer.save_model(str(folder / "saved"))
        if process != 0:
            return None
        with_plain_names = load_file(folder / "saved" / "adapter_model.safetensors")
        wanted = get_peft_model_state_dict(copy)
        restored = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder / "saved")
        return {
            "names": with_plain_names.keys() == wanted.keys(),
            "same": all(torch.equal(with_plain_names[name].float(), value) for name, value in wanted.items()),
            "restored": same_tensors(get_peft_model_state_dict(restored), wanted),
        }

    def refused() -> None:
        if process == 0:
            (folder / "damage-the-next-version").touch()
        # The files are there; only a network file system would show them late.
        with mock.patch.object(VLLMEngine, "local_visibility_grace_s", 0.1):
            generation.sync_weights()

    def failing_gather() -> None:
        """The last process cannot read its part of the adapter, which is a shard or all of it."""
        gathering = (trl_lora_sync.collective.distributed, "shards_of")
        owner, name = gathering if is_sharded(generation.model) else (generation, "linears")
        original = getattr(owner, name)
        if process == trainer.accelerator.num_processes - 1:
            setattr(owner, name, broken)
        try:
            generation.sync_weights()
        finally:
            setattr(owner, name, original)

    def sampled() -> float:
        return float(distance(copy, sample(generation, [token_ids(process)])).mean())

    # First, as the first sync after a training checks the server again, with a forward pass of the model.
    seen["published"] = attempt(published)
    seen["traffic"] = attempt(traffic)
    seen["verified"] = attempt(verified)
    seen["disproved"] = attempt(disproved)
    if way.removesuffix(QLORA).removesuffix(WITH_PISSA).removesuffix(WITH_TEACHER) in FSDP:
        seen["saved"] = attempt(saved)
    seen["refused"] = attempt(refused)
    seen["after_refusal"] = attempt(sampled)
    seen["failing_gather"] = attempt(failing_gather)
    seen["after_failing_gather"] = attempt(lambda: (generation.sync_weights(), sampled())[1])
    generation.close()
    return seen


def set_proof(generation: Any, *, is_verified: bool) -> None:
    """Make the next sync verify its version, or not."""
    if generation.accelerator.is_main_process:
        for server in generation.sync.fleet.servers:
            server.is_verified = is_verified


def broken(*_: Any) -> None:
    raise MemoryError("no room for the shards")


def choose_stage(way: str) -> None:
    """Set what `accelerate launch --zero_stage` sets (1.15). All stages are forks of one launch."""
    if way.startswith("zero"):
        os.environ["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = way.removeprefix("zero")[0]


def main(way: str, folder: str, url: str, model: str) -> None:
    torch.set_num_threads(1)
    choose_stage(way)
    seen = run_way(way, Path(folder), url, Path(model))
    end_process(folder, seen)


if __name__ == "__main__":
    # In the process that all runs are forks of.
    import deepspeed  # noqa: F401 - which accelerate imports in any case

    for _, (chosen, _, _, model) in json.loads(sys.argv[1]):
        models_of(Path(model), init_of(chosen))
    run_each(main, sys.argv[1])
