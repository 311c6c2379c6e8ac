"""One decision for all training processes, and one place for what they hold in pieces.

Process 0 acts and every process gets its result or its exception; each process acts and all get the exception of any;
the shards of tensors are put together on process 0. Knows accelerate's process group and nothing of adapters or
servers.
"""

import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import ReferenceType, ref

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list, gather_object
from torch import Tensor, nn

from trl_lora_sync.adapter.support import WEIGHTS_WAY_OUT
from trl_lora_sync.collective.shards import Shard, shards_of
from trl_lora_sync.errors import RemoteProcessError, UnsupportedSettingError

T = TypeVar("T")
# A multiple of every element size, so that each tensor in a byte buffer starts where its dtype may.
_ALIGNMENT = 16


def run_on_main(accelerator: Accelerator, act: Callable[[], T]) -> T:
    """**Collective.** Run `act` on process 0 and return its result, or raise its exception, on every process.

    The other processes wait inside a broadcast, so `act` must end well before the process group's own timeout.

    Args:
        act: called on process 0 only. Its result must pickle.
    """
    outcome: list[tuple[Any, BaseException | None]] = [(None, None)]
    if accelerator.is_main_process:
        outcome = [_attempt(act)]
    if accelerator.num_processes > 1:
        # An exception that does not pickle would fail inside the broadcast, which the others have entered.
        shared = [sendable(outcome[0])] if accelerator.is_main_process else [None]
        broadcast_object_list(shared, from_process=0)
        if not accelerator.is_main_process:
            # Process 0 keeps its own outcome, as the error that was sent has no traceback and may be a substitute.
            outcome = [shared[0]]  # type: ignore[list-item]
    result, error = outcome[0]
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def run_on_all(accelerator: Accelerator, act: Callable[[], T]) -> T:
    """**Collective.** Run `act` on every process and return its result there, or raise on all what failed on any.

    Each process hears of the others only after its own `act`, so a collective inside `act` must not be the part that
    fails on some of them.

    Args:
        act: its result stays on its process. If several fail, the exception of the lowest process is raised.
    """
    found: list[T] = []
    results_of_all(accelerator, lambda: found.append(act()))
    return found[0]


def results_of_all(accelerator: Accelerator, act: Callable[[], T]) -> list[T]:
    """**Collective.** As `run_on_all`; returns the results of all processes, in their order. They must pickle."""
    outcome = _attempt(act)
    outcomes = [outcome]
    if accelerator.num_processes > 1:
        # accelerate joins the lists in the order of processes (1.15), so a place in it is the number of a process.
        outcomes = gather_object([sendable(outcome, accelerator.process_index)])
    failed = next((number for number, (_, failure) in enumerate(outcomes) if failure is not None), None)
    if failed is None:
        return [result for result, _ in outcomes]  # type: ignore[misc]
    if failed == accelerator.process_index and outcome[1] is not None:  # with what does not travel, as its traceback
        raise outcome[1]
    raise outcomes[failed][1]  # type: ignore[misc]


def gather_weights(accelerator: Accelerator, linears: Sequence[nn.Module], root: nn.Module) -> dict[nn.Module, Tensor]:
    """**Collective.** The whole weights of `linears` on process 0; no other parameter of `root` is gathered.

    Only these weights move or take memory: each process copies its own elements of them into one buffer of their size,
    and the buffers are reduced to process 0. A process that fails does so before that, so no other process waits for
    it.

    Returns:
        On process 0, the weights that are sharded; without sharding, and on the other processes, nothing.

    Raises:
        UnsupportedSettingError: on every process, if the weights are sharded in an unknown way.
        RemoteProcessError: on every process, if their shards do not fit together.
    """
    sharded: dict[nn.Module, Shard] = {}

    def look() -> list[tuple[Any, tuple[tuple[int, int], ...]]]:
        found = zip(linears, shards_of(linears, root), strict=True)
        # In the order of `linears`, which all processes share, and so do the offsets in their buffers.
        sharded.update((linear, shard) for linear, shard in found if shard is not None)
        return [(shard.layout, shard.region) for shard in sharded.values()]

    # Before the reduction, in which buffers of different sizes may hang or be mixed up.
    check_layouts(results_of_all(accelerator, look))
    if not sharded:
        return {}
    # Agreed on by all: if a process ran out of memory here, the others would wait in the reduction.
    buffer, wholes = run_on_all(accelerator, lambda: _fill_buffer(list(sharded.values()), accelerator.device))
    if accelerator.num_processes > 1:
        # Of bytes, so that no bit changes: zero gives way to every byte, and a byte to its equal on a replica.
        torch.distributed.reduce(buffer, dst=0, op=torch.distributed.ReduceOp.MAX)
    return dict(zip(sharded, wholes, strict=True)) if accelerator.is_main_process else {}


def check_layouts(layouts: Sequence[Sequence[tuple[Any, tuple[tuple[int, int], ...]]]]) -> None:
    """Check that the shards of all processes make up whole tensors.

    Args:
        layouts: per process, the layout and the region of each of its shards.

    Raises:
        RemoteProcessError: elements are missing, overlap, or belong to other tensors.
    """
    if len({len(layout) for layout in layouts}) != 1:
        raise RemoteProcessError(_MISFIT.format(f"they hold {[len(layout) for layout in layouts]} sharded matrices"))
    for number, parts in enumerate(zip(*layouts, strict=True)):
        kinds = {layout for layout, _ in parts}
        held = sum(_volume(region) for region in {region for _, region in parts})  # a replica counts once
        if len(kinds) != 1 or held != _volume((0, size) for size in parts[0][0][0]):
            raise RemoteProcessError(_MISFIT.format(f"of matrix {number} they hold {parts}"))


_MISFIT = (
    "The shards of the adapter on the training processes do not make up whole matrices: {}. Every process must train "
    "the same adapter. Please report this with the accelerate config of the run."
)


def _volume(region: Any) -> int:
    return math.prod(stop - start for start, stop in region)


def _fill_buffer(shards: list[Shard], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Bytes with this process's elements of all tensors and zeros elsewhere, and the tensors as views of them."""
    sizes = [math.prod(shard.shape) * shard.values.element_size() for shard in shards]
    padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    buffer = torch.zeros(sum(padded), dtype=torch.uint8, device=device)
    wholes, start = [], 0
    for shard, size, room in zip(shards, sizes, padded, strict=True):
        wholes.append(buffer[start : start + size].view(shard.values.dtype).view(shard.shape))
        start += room
    # One copy of all, as each would be a launch. A process may hold nothing of a matrix, or of any.
    held = [(shard.place_in(whole), shard) for shard, whole in zip(shards, wholes, strict=True) if shard.values.numel()]
    if held:
        places = [place for place, _ in held]
        torch._foreach_copy_(places, [shard.values.detach().reshape(place.shape) for place, shard in held])
    return buffer, wholes


def outermost(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """What accelerate has sharded: its wrapper around `model`, or `model` itself, also if it is wrapped by DDP.

    Source: `prepare_model` in accelerate/accelerator.py, 1.15: `_models` holds what FSDP and DeepSpeed make of a model.
    """
    wrappers = [wrapper for wrapper in accelerator._models if any(module is model for module in wrapper.modules())]
    return wrappers[-1] if wrappers else model


def models_prepared(accelerator: Accelerator) -> list[ReferenceType[nn.Module]]:
    """What accelerate holds as wrapped: wrappers, and models that FSDP2 shards without another object around them.

    Their number would not do: a teacher is wrapped before the start, and `train` drops it and wraps the student.
    """
    # An `id` may be given again to a wrapper of the next training; a reference to a dead object equals no other.
    return [ref(model) for model in accelerator._models]


def check_launcher(accelerator: Accelerator) -> None:
    """Refuse the ways of training whose parameters cannot be read, by what accelerate really set up.

    Raises:
        UnsupportedSettingError: under Megatron-LM or XLA, or with parameters on NVMe.
    """
    state = accelerator.state
    if state.distributed_type in (DistributedType.MEGATRON_LM, DistributedType.XLA):
        raise _unreadable(state.distributed_type.value, "it keeps the adapter in a private form")
    deepspeed = getattr(state, "deepspeed_plugin", None)
    zero = (deepspeed.deepspeed_config if deepspeed is not None else {}).get("zero_optimization", {})
    if (zero.get("offload_param") or {}).get("device") == "nvme":
        raise _unreadable("DeepSpeed with parameters offloaded to NVMe", "they are not in memory between steps")


def check_same_start(accelerator: Accelerator, fingerprint: tuple[int, ...]) -> None:
    """**Collective.** Refuse processes that took different initial adapters out of the base, where FSDP would mix them.

    DDP and DeepSpeed replace every parameter by that of process 0, and so does FSDP if it is configured to; otherwise
    FSDP keeps of each process's parameters the part that this process holds.

    Args:
        fingerprint: of this process's initial adapter; empty if the base is the checkpoint's.

    Raises:
        UnsupportedSettingError: the base and the adapter that are trained would belong to no initial adapter.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if accelerator.num_processes == 1 or plugin is None or not fingerprint:
        return
    # With either of these, FSDP takes every parameter from process 0.
    if plugin.cpu_ram_efficient_loading or plugin.sync_module_states:
        return
    if len(set(gather_object([fingerprint]))) > 1:
        raise UnsupportedSettingError(
            "The initialisation gave the training processes different adapters, and FSDP would train a mixture of "
            "them: the base would lack something else than any of them. Call transformers.set_seed(0) on every process "
            "before the trainer is built, or set cpu_ram_efficient_loading=True, which takes all from process 0."
        )


DIFFERENT_ADAPTERS = (
    "The training processes hold different adapters, so completions would come from the policy of some only. They must "
    "be the same after each step; look for code that changes weights on some processes only."
)


def _unreadable(launcher: str, why: str) -> UnsupportedSettingError:
    return UnsupportedSettingError(
        f'vllm_sync_strategy="lora_adapter" does not support {launcher}: {why}. Use DDP, FSDP or DeepSpeed ZeRO with '
        f"parameters on the GPU or the CPU, {WEIGHTS_WAY_OUT}."
    )


def _attempt(act: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return act(), None
    except BaseException as error:  # an interrupt must reach the processes that wait as well
        return None, error


def _message_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # the other processes must hear of the failure all the same
        return "an exception that cannot be shown"


def sendable(outcome: tuple[Any, BaseException | None], process_index: int = 0) -> tuple[Any, BaseException | None]:
    error = outcome[1]
    if error is None:
        return outcome
    try:
        # Both ways: an exception whose `__init__` requires keywords pickles, and fails when it is read.
        pickle.loads(pickle.dumps(error))
    except Exception:
        return None, RemoteProcessError(
            f"Process {process_index} failed with {type(error).__name__}: {_message_of(error)}"
        )
    return None, error
