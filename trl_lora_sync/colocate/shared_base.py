"""One copy of the base model for trainer and vLLM: the trainer's frozen weights become views of vLLM's.

The trainer's model stays on the host until vLLM has loaded its own from the checkpoint, so there never are two copies
on the GPU. Then all bits are compared, and only if all agree the trainer's weights are replaced by views.
"""

import os
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import nn

from trl_lora_sync.colocate import placing
from trl_lora_sync.engine_plugins.fused_placement import PlacementError
from trl_lora_sync.errors import UnsupportedSettingError, WrongPolicyError

# With `"auto"` a checkpoint may still be in float32, which `reason_against` finds once the model is loaded.
_HALF = (torch.bfloat16, torch.float16, "bfloat16", "float16", "auto")


def shards_base(args: Any) -> bool:
    """Whether a launcher will shard the trainer's base model, as far as it shows before a model is loaded."""
    # `accelerate launch` hands its own configuration on by the environment alone (1.15, utils/launch.py).
    if args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        return True
    config = getattr(args, "hf_deepspeed_config", None)
    return bool(config is not None and config.is_zero3()) or _zero_stage() == "3"


def _zero_stage() -> str:
    uses = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    return os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "") if uses else ""


def refuse_sharded(args: Any) -> None:
    """Refuse what needs the base model whole, before a model is loaded.

    Raises:
        UnsupportedSettingError: the launcher shards it.
    """
    if not shards_base(args):
        return
    for seen, way in (
        ('lora_sync_serving="fused"', 'lora_sync_serving="runtime"'),
        ('vllm_colocate_base="shared"', 'vllm_colocate_base="auto"'),
    ):
        name, _, value = seen.partition("=")
        if getattr(args, name) == value.strip('"'):
            raise UnsupportedSettingError(
                f"{seen} cannot be used with FSDP or DeepSpeed ZeRO-3 in colocate mode: no process has the whole base "
                f"model there. Set {way}, or train with DDP or ZeRO-2."
            )


def may_share(args: Any, model: Any) -> bool:
    """Whether the trainer's model should wait on the host for vLLM's weights, as far as it shows before loading.

    Args:
        args: the trainer's configuration.
        model: the model, or the path or name that TRL will load it from.
    """
    if args.vllm_colocate_base == "own" or args.vllm_tensor_parallel_size > 1 or args.device.type != "cuda":
        return False
    # Every stage of ZeRO, as `reason_against` refuses DeepSpeed once the launcher has been set up.
    if shards_base(args) or getattr(args, "deepspeed", None) or _zero_stage():
        return False
    options = args.model_init_kwargs or {}
    # A model on the GPU is not waiting there, and `ColocateGeneration` moves it to the host before vLLM starts.
    if isinstance(model, nn.Module):
        return _is_on_host(model) and model.dtype in _HALF and not is_quantised(model)
    # TRL's default dtype is float32, which vLLM serves in 16 bits.
    is_plain = options.get("quantization_config") is None and options.get("device_map") in (None, "cpu")
    return is_plain and options.get("dtype") in _HALF


def _is_on_host(model: nn.Module) -> bool:
    return all(weight.device.type == "cpu" for weight in model.parameters())


def reason_against(
    model: nn.Module, choice: str, dtype: torch.dtype | None, accelerator: Any, tensor_parallel_size: int
) -> str | None:
    """Why the base cannot be shared, as far as it shows before vLLM has started; None if it can.

    Args:
        choice: `vllm_colocate_base`.
        dtype: what vLLM has to compute in; None lets it choose.
    """
    if choice == "own":
        return 'vllm_colocate_base="own"'
    if tensor_parallel_size > 1:
        return f"vllm_tensor_parallel_size is {tensor_parallel_size}, so vLLM splits each weight"
    launcher = accelerator.state.distributed_type
    if launcher not in (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU):
        return f"{launcher.value} was not tried with a shared base"
    if is_quantised(model):
        return "the trainer's base is quantised"
    if choice == "auto" and accelerator.device.type != "cuda":
        return "sharing it saves GPU memory, and this is a CPU"
    # Left to itself, vLLM serves in 16 bits whatever the checkpoint holds (0.26 to 0.31, config/model.py).
    served = dtype or torch.bfloat16
    # Of frozen weights, as PEFT keeps the adapter of a 16-bit base in float32. Which 16-bit format vLLM has chosen
    # shows once it has started: `find_views` compares it then.
    other = next((weight.dtype for weight in model.parameters() if not weight.requires_grad), served)
    return _other_dtype(other, served) if torch.float32 in (other, served) and other != served else None


def _other_dtype(trained: torch.dtype, served: torch.dtype) -> str:
    ours, theirs = (str(dtype).removeprefix("torch.") for dtype in (trained, served))
    return f'the trainer\'s base is {ours} and vLLM\'s is {theirs}; set model_init_kwargs={{"dtype": "{theirs}"}}'


def is_quantised(model: nn.Module) -> bool:
    """Whether some of the model's weights are integers that stand for others."""
    return any(not weight.is_floating_point() for weight in model.parameters())


def find_views(llm: Any, weights: dict[str, nn.Parameter], served_dtype: torch.dtype) -> dict[str, torch.Tensor] | str:
    """Views of vLLM's memory with the same bits as the trainer's weights, or why there are none.

    Args:
        weights: the trainer's frozen matrices.
        served_dtype: what vLLM computes in.
    """
    other = next((weight.dtype for weight in weights.values() if weight.dtype != served_dtype), None)
    if other is not None:
        return _other_dtype(other, served_dtype)
    try:
        views = placing.whole_views(llm, weights)
    except PlacementError as error:
        return f"vLLM keeps the weights in another form: {error}"
    # All bits, as the trainer's model may differ from the checkpoint that vLLM has loaded in a few elements only.
    different = placing.first_difference(views, weights)
    return f"{different!r} holds other values in vLLM than in the trainer" if different else views


class SharedBase:
    """The weights that trainer and vLLM share.

    Args:
        weights: the trainer's, by name.
        views: of vLLM's memory, with the same bits.
    """

    def __init__(self, weights: dict[str, nn.Parameter], views: dict[str, torch.Tensor]) -> None:
        self._weights = weights
        self.views = views

    @property
    def nbytes(self) -> int:
        """Of the memory that is shared."""
        return sum(view.nbytes for view in self.views.values())

    def connect(self, model: nn.Module, device: torch.device) -> None:
        """Replace the memory of the trainer's weights by the views, and move the rest of its model to the device."""
        for weight in self._weights.values():
            weight.data = weight.data.new_empty(0)  # so that moving makes no copy
        model.to(device)
        for name, view in self.views.items():
            # After the move, which may copy what is on the device already, see `reconnect`.
            self._weights[name].data = view

    def reconnect(self) -> None:
        """Connect again what was copied meanwhile, as `model.to` does from the device `cpu` to `cpu:0` (torch 2.13).

        Raises:
            WrongPolicyError: the trainer computes with other values than vLLM. These stay as they are, because
                connecting them would discard them.
        """
        different = []
        for name, view in self.views.items():
            if self._weights[name].data_ptr() == view.data_ptr():
                continue
            if placing.first_difference({name: view}, self._weights) is None:
                self._weights[name].data = view
            else:
                different.append(name)
        if different:
            raise WrongPolicyError(
                f"The trainer's frozen weight {different[0]!r} holds other values than vLLM's, with which it was "
                "shared, so samples would come from another policy. Do not merge the adapter or cast the model during "
                'a run, or set vllm_colocate_base="own".'
            )


def refusal(reason: str) -> UnsupportedSettingError:
    """The error for a base that was to be shared and cannot be."""
    return UnsupportedSettingError(
        f'vllm_colocate_base="shared" cannot be used here: {reason}. Set vllm_colocate_base="auto", with which vLLM '
        "has a second copy of the base then."
    )
