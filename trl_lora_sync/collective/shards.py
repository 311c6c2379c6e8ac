"""Which elements of a tensor this process holds when DeepSpeed ZeRO-3, FSDP1 or FSDP2 shards it.

Looks at this process's memory only: nothing is sent, gathered or changed. Putting shards together is the business of
`distributed`. A tensor that is not sharded has no `Shard`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor import Shard as ShardPlacement

from trl_lora_sync.adapter.module_tree import module_tree
from trl_lora_sync.adapter.support import WEIGHTS_WAY_OUT
from trl_lora_sync.errors import UnsupportedSettingError


@dataclass(frozen=True, kw_only=True)
class Shard:
    """This process's part of one tensor.

    Attributes:
        values: the elements held here; may be none, and may alias training storage.
        shape: of the whole tensor.
        region: where they lie, as `(start, stop)` per dimension of the whole tensor.
        is_flat: whether `region` counts elements of the flattened tensor instead.
    """

    values: Tensor
    shape: torch.Size
    region: tuple[tuple[int, int], ...]
    is_flat: bool

    def place_in(self, whole: Tensor) -> Tensor:
        """Where the elements held here lie in `whole`, which has `shape` and is contiguous; not if there are none."""
        place = whole.view(-1) if self.is_flat else whole
        for dim, (start, stop) in enumerate(self.region):
            place = place.narrow(dim, start, stop - start)
        return place

    @property
    def layout(self) -> tuple[tuple[int, ...], str, bool]:
        """What must be the same on every process."""
        return tuple(self.shape), str(self.values.dtype), self.is_flat


def shards_of(linears: Sequence[nn.Module], root: nn.Module) -> list[Shard | None]:
    """This process's shard of the `weight` of each module, or None where the weight is whole.

    Args:
        linears: unwrapped modules inside `root`.
        root: the outermost wrapper of the model, because an FSDP1 unit may hold weights of modules far below it.

    Raises:
        UnsupportedSettingError: a weight is laid out in a way that is not known here.
    """
    flat = _fsdp1_places(root)
    with torch.no_grad():  # in which a DTensor gives its own part without a record for the gradient
        return [_shard_of(linear, flat) for linear in linears]


def is_sharded(model: nn.Module) -> bool:
    """Whether a forward pass of the model needs every process."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    # What follows looks at every module, 20 ms for 36 layers. All that shards does so over the processes of a group.
    return torch.distributed.is_initialized() and (
        # This finds the modules of FSDP1. FSDP2 shows in the parameters, which are DTensors.
        bool(FullyShardedDataParallel.fsdp_modules(model))
        or is_partitioned(model)
        or any(isinstance(parameter, DTensor) for parameter in model.parameters())
    )


def is_partitioned(model: nn.Module) -> bool:
    """Whether DeepSpeed ZeRO-3 has sharded the model."""
    return any(hasattr(parameter, "ds_tensor") for parameter in model.parameters())


def check_quantised(model: nn.Module, device: torch.device) -> None:
    """Refuse 4-bit weights that FSDP2 would gather with other bits.

    It gathers them as the floating-point numbers they are stored as, by a copy that on GPUs (torch 2.11) makes one
    pattern of all NaNs. About one in a thousand packed words of a 4-bit base is such a pattern.

    Args:
        device: where the model computes.

    Raises:
        UnsupportedSettingError: the trained base would not be the loaded one.
    """
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, DTensor) or not hasattr(module, "quant_state"):
            continue
        if weight.dtype.itemsize == 2 and not copies_bits(device, weight.dtype):
            name = str(weight.dtype).removeprefix("torch.")
            raise UnsupportedSettingError(
                f"FSDP2 shards the 4-bit base as {name}, and torch {torch.__version__} changes some of its bits each "
                "time it gathers them on this GPU: the trained base would differ from the served one. Leave "
                "out bnb_4bit_quant_storage, so that each GPU keeps the 4-bit weights whole, or shard them with FSDP1 "
                "(examples/accelerate/fsdp1.yaml) or DeepSpeed ZeRO-3."
            )


@cache
def copies_bits(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the copy that FSDP2 gathers with leaves every pattern of 16 bits unchanged."""
    # All 65,536 of them, copied as floating-point numbers and compared as integers, because NaN differs from itself.
    patterns = torch.arange(-(1 << 15), 1 << 15, device=device).to(torch.int16)
    copied = torch.empty_like(patterns)
    torch._foreach_copy_([copied.view(dtype)], [patterns.view(dtype)])
    return torch.equal(copied, patterns)


@contextmanager
def whole_in_forward(model: nn.Module, device: torch.device) -> Iterator[None]:
    """**Collective.** Let a model that ZeRO-3 has sharded compute before DeepSpeed's engine wraps it.

    Each module gathers its own parameters for its own forward, so one module's are whole at a time. Buffers that are
    still on another device, where the engine would find them, are on `device` meanwhile. Other models need nothing:
    FSDP brings its own hooks.
    """
    hooks, buffers = [], []
    try:
        for module in model.modules():
            parameters = [value for value in module.parameters(recurse=False) if hasattr(value, "ds_tensor")]
            if parameters:
                hooks += _gather_around_forward(module, parameters)
        for module in model.modules() if hooks else ():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != device:
                    buffers.append((module, name, buffer))
                    # Not by `module.to`, which would move the shards of the parameters as well.
                    module._buffers[name] = buffer.to(device)
        yield
    finally:
        for module, name, buffer in buffers:
            module._buffers[name] = buffer
        for hook in hooks:
            hook.remove()


def _gather_around_forward(module: nn.Module, parameters: list[nn.Parameter]) -> list[Any]:
    import deepspeed

    gathered: list[Any] = []

    def before(*_: Any) -> None:
        gathered.append(deepspeed.zero.GatheredParameters(parameters))
        gathered[-1].__enter__()

    def after(*_: Any) -> None:
        gathered.pop().__exit__(None, None, None)

    # The second one after an error too, or the parameters would stay gathered on this process alone.
    return [module.register_forward_pre_hook(before), module.register_forward_hook(after, always_call=True)]


def _shard_of(linear: nn.Module, flat: dict[tuple[int, str], tuple[Any, int]]) -> Shard | None:
    # First, because without `use_orig_params` the attribute is a view that is valid during a forward pass only.
    if (id(linear), "weight") in flat:
        return _fsdp1_shard(*flat[id(linear), "weight"])
    weight = linear.weight
    if hasattr(weight, "ds_tensor"):
        return _zero3_shard(weight)
    if isinstance(weight, DTensor):
        return _dtensor_shard(weight)
    return None


def _fsdp1_places(root: nn.Module) -> dict[tuple[int, str], tuple[Any, int]]:
    """Module and parameter name to the flat parameter that holds it, and the number it has there."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    places: dict[tuple[int, str], tuple[Any, int]] = {}
    # Torch's own search takes as long as to read the adapter, to find none.
    if not any(isinstance(module, FullyShardedDataParallel) for module in module_tree(root)):
        return places
    for unit in FullyShardedDataParallel.fsdp_modules(root):
        # A unit whose parameters are all in units below it has none.
        if unit._handle is not None:
            flat = unit._handle.flat_param
            for number, info in enumerate(flat._param_infos):
                places[id(info.module), info.param_name] = (flat, number)
    return places


def _fsdp1_shard(flat: Any, number: int) -> Shard:
    """The slice of a parameter in this process's share of a flat parameter, which base weights share with it.

    Source: torch/distributed/fsdp/_flat_param.py, 2.4 to 2.13. `_local_shard` holds what the optimizer updates, also
    while the parameters are gathered for a forward pass.
    """
    info, shape = flat._shard_param_infos[number], flat._shapes[number]
    local = getattr(flat, "_local_shard", flat.data)  # it appears at the first forward pass
    if not info.in_shard:
        # No elements but the right dtype, as the layouts of all processes must be equal.
        return Shard(values=local[:0], shape=shape, region=((0, 0),), is_flat=True)
    values = local[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard]
    # Torch's end is inclusive.
    region = ((info.intra_param_start_idx, info.intra_param_end_idx + 1),)
    return Shard(values=values, shape=shape, region=region, is_flat=True)


def _zero3_shard(weight: Any) -> Shard:
    """A process's partition of a ZeRO-3 parameter: equal parts of the flattened tensor, the last one padded.

    Source: deepspeed/runtime/zero/partition_parameters.py, 0.19: the optimizer updates `ds_tensor`, also of parameters
    that are kept whole between steps, and `all_gather` joins the partitions in order of the group's ranks.
    """
    part = weight.ds_tensor
    if part.status.name != "AVAILABLE" or part.dtype != weight.dtype:
        raise UnsupportedSettingError(
            f'vllm_sync_strategy="lora_adapter" cannot read a ZeRO-3 parameter that is {part.status.name} as '
            f"{part.dtype}: it is swapped to NVMe or quantised. Offload parameters to the CPU instead, "
            f"{WEIGHTS_WAY_OUT}."
        )
    # `ds_numel` of the part counts its padding, and that of the weight all elements of the whole tensor.
    start = torch.distributed.get_rank(weight.ds_process_group) * part.ds_numel
    # With few elements and many processes, the last partitions hold nothing but padding.
    stop = max(start, min(start + part.ds_numel, weight.ds_numel))
    return Shard(values=part.view(-1)[: stop - start], shape=weight.ds_shape, region=((start, stop),), is_flat=True)


def _dtensor_shard(weight: DTensor) -> Shard:
    # Exact types: a strided shard, of FSDP2 over tensor parallelism, derives from Shard and lies elsewhere.
    if not all(type(placement) in (ShardPlacement, Replicate) for placement in weight.placements):
        raise UnsupportedSettingError(
            f'vllm_sync_strategy="lora_adapter" cannot put together a LoRA matrix with placements {weight.placements}. '
            f"Train without tensor parallelism, {WEIGHTS_WAY_OUT}."
        )
    region = _region_of(weight.shape, weight.device_mesh, weight.placements)
    return Shard(values=weight.to_local(), shape=weight.shape, region=region, is_flat=False)


# An adapter has hundreds of matrices in few shapes, at each sync.
@lru_cache(maxsize=1024)
def _region_of(shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> tuple[tuple[int, int], ...]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, starts = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple((start, start + size) for start, size in zip(starts, sizes, strict=True))
