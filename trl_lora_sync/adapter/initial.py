"""The initial matrices of adapters whose initialisation took them out of the base weights.

PiSSA, OLoRA, CorDA and LoRA-GA set `lora_A` and `lora_B` and subtract `scaling * lora_B @ lora_A` from the base weight.
The server has the checkpoint's base, so it is sent the difference to the initial adapter. PEFT keeps no copy of that,
and a trained model does not contain it. Therefore it is copied while the model is new: one more adapter in memory.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from trl_lora_sync.adapter.canonical import LoRAModule
from trl_lora_sync.adapter.checkpoint import weight_files
from trl_lora_sync.adapter.support import refuse
from trl_lora_sync.errors import UnsupportedAdapterError

if TYPE_CHECKING:
    from peft import PeftModel

# By the module that holds the trained `lora_A`, so that a copy lives as long as its adapter and is in no state dict.
_initial: "WeakKeyDictionary[nn.Module, LoRAModule]" = WeakKeyDictionary()

_WHOLE_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# How many units in the last place the sum of two rounded weights may be away from the weight that was split.
_ROUNDING = 4


def remember_initial(model: "PeftModel", found: Iterable[tuple[LoRAModule, Any, nn.Module]], *, is_new: bool) -> None:
    """Copy the matrices of an adapter that its initialisation took out of the base weights.

    Matrices that were copied before are left alone, as they have been trained since.

    Args:
        model: whose adapter has not been trained yet, unless its matrices were copied before.
        found: each adapted layer, as PEFT's object, and the module that holds `lora_A`.
        is_new: whether the adapter is known to be untrained; else it is compared with the checkpoint.

    Raises:
        UnsupportedAdapterError: the initial adapter cannot be known, or it is not all that the base lacks.
    """
    config = model.peft_config[model.active_adapter]
    new = [(module, layer, holder) for module, layer, holder in found if holder not in _initial]
    # All layers before the first copy: a copy that an error leaves behind would count as known at the next attempt.
    for module, layer, _ in new:
        _check_base_layer(layer.get_base_layer(), module.name, config)
    if new and not is_new:
        _check_untrained(model, [(module, layer) for module, layer, _ in new])
    for module, _, holder in new:
        # Copies, because the optimizer writes to the parameters in place.
        lora_A, lora_B = module.lora_A.detach().clone(), module.lora_B.detach().clone()
        _initial[holder] = replace(module, lora_A=lora_A, lora_B=lora_B)


def initial_of(holder: nn.Module) -> LoRAModule | None:
    """The initial matrices of the layer whose trained `lora_A` is in the module `holder`, or None if not copied."""
    return _initial.get(holder)


def unknown_initial(config: Any) -> UnsupportedAdapterError:
    """The error for a model whose initial adapter was not copied."""
    return _refuse(config, "its initial adapter, which the base weights lack, was not copied before the training")


def _refuse(config: Any, why: str) -> UnsupportedAdapterError:
    return refuse(
        f"A PeftModel with LoraConfig(init_lora_weights={config.init_lora_weights!r})",
        why,
        "Give the trainer the base model and the configuration (model=..., peft_config=LoraConfig(...)), so that the "
        "adapter is made there, and continue an earlier run with trainer.train(resume_from_checkpoint=...)",
    )


def _check_base_layer(base_layer: Any, path: str, config: Any) -> None:
    """Refuse a base weight that is not the checkpoint's less the initial adapter.

    Source: peft/tuners/lora/layer.py `olora_init`, 0.18 to 0.21: a weight in 4 or 8 bits is quantised again.
    """
    weight = getattr(base_layer, "weight", None)
    # The dtype alone does not show it: bitsandbytes can store 4-bit weights as bfloat16 (bnb_4bit_quant_storage).
    if weight is None or weight.dtype not in _WHOLE_DTYPES or hasattr(weight, "quant_type"):
        raise refuse(
            f"LoraConfig(init_lora_weights={config.init_lora_weights!r}) on the quantised base layer {path!r}",
            "what is left of its weight is quantised again, which changes all of it, so the server's base would differ "
            "from the trainer's by more than an adapter holds",
            "Load the base model without quantisation, or use init_lora_weights=True",
        )


def _check_untrained(model: "PeftModel", layers: Iterable[tuple[LoRAModule, Any]]) -> None:
    """Check that base and adapter together are the checkpoint's weights, as they are before the first step only."""
    config = model.peft_config[model.active_adapter]
    name = config.base_model_name_or_path or getattr(model.config, "name_or_path", None)
    try:
        files = weight_files(name, config.revision)
    except (OSError, ValueError, SafetensorError) as error:
        raise _refuse(config, f"the checkpoint {name!r} to compare it with cannot be read ({error})") from error
    for module, layer in layers:
        key = _key_of(module.name, files)
        if key is None:
            raise _refuse(config, f"the checkpoint {name!r} has no weight for {module.name!r} to compare it with")
        # One weight at a time, so that the check needs no memory for a second model.
        with safe_open(files[key], framework="pt") as file:
            saved = file.get_tensor(key)
        if not _is_split_of(saved, layer, module):
            raise _refuse(
                config,
                f"base and adapter of {module.name!r} are not the weight in {name!r} any more, so the adapter has been "
                "trained or loaded, or the base has been changed twice",
            )


def _key_of(path: str, keys: Iterable[str]) -> str | None:
    """The checkpoint's name for the weight of a module; one of the two may lack the name of the outermost module."""
    wanted = f"{path}.weight"
    found = [key for key in keys if f".{key}".endswith(f".{wanted}") or f".{wanted}".endswith(f".{key}")]
    # Of several, the comparison might be with the weight of another layer.
    return found[0] if len(found) == 1 else None


def _is_split_of(saved: Tensor, layer: Any, module: LoRAModule) -> bool:
    """Whether base weight and adapter add up to `saved`, but for the rounding of both."""
    left = layer.get_base_layer().weight.detach()
    lora_A, lora_B = module.lora_A.detach().float(), module.lora_B.detach().float() * module.scaling
    # Rounding errors follow the size of the terms, also where the terms cancel in the sum.
    taken, size = lora_B @ lora_A, lora_B.abs() @ lora_A.abs()
    if getattr(layer, "fan_in_fan_out", False):
        taken, size = taken.T, size.T
    # Rounded as the model's own weight was, which may be loaded in another dtype than the checkpoint's.
    saved = saved.to(device=left.device, dtype=left.dtype).float()
    if saved.shape != left.shape:
        return False
    tolerance = _ROUNDING * torch.finfo(left.dtype).eps * (left.float().abs() + size)
    return bool(((left.float() + taken - saved).abs() <= tolerance).all())
