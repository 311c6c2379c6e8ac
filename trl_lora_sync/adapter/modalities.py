"""Refuses adapters on the parts of a model that see images or hear sound, where no server applies them.

vLLM ignores such matrices silently unless it runs with --enable-tower-connector-lora (seen on 0.26 and 0.31), and a
text prompt shows nothing of it: log-probabilities of prompts with images are then off by 0.2 to 0.5. So they are let
through where a trial adapter with an image proves them, for models whose names are known. The patch embedding is
ignored in any case.
"""

import copy
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import device, nn

from trl_lora_sync.adapter.groups import without_numbers
from trl_lora_sync.adapter.names import KNOWN_VISION
from trl_lora_sync.adapter.support import is_embedding_module, refuse

_SHOWN = 8


def check_planned_modules(model: Any, peft_config: Any, *, proves_groups: bool = False) -> None:
    """Check which modules PEFT would adapt, on the model without its weights.

    Args:
        model: a Transformers model without an adapter, or the name of one, of which nothing but the config is loaded.
            One whose architecture Transformers itself does not have is left to `check_adapted_modules`.
        proves_groups: as for `check_adapted_modules`.

    Raises:
        UnsupportedAdapterError: some are outside the language model.
    """
    from peft import inject_adapter_in_model

    skeleton = _skeleton(model)
    if skeleton is None:
        return
    try:
        # PEFT writes what it finds into the configuration.
        inject_adapter_in_model(copy.deepcopy(peft_config), skeleton, low_cpu_mem_usage=True)
    except ValueError:
        return  # a target that the model does not have, which PEFT reports when the trainer adds the adapter
    check_adapted_modules(skeleton, _adapted(skeleton), peft_config, proves_groups=proves_groups)


def check_adapted_modules(
    model: Any, adapted: Mapping[str, nn.Module], peft_config: Any, *, proves_groups: bool = False
) -> None:
    """Check where an adapter sits.

    Args:
        model: the model without PEFT's wrapper.
        adapted: the modules of `model` that carry it, by their paths.
        proves_groups: whether the modules that see images will be proved, see `generation.image_probe`.

    Raises:
        UnsupportedAdapterError: some are outside of what a server serves; with the `exclude_modules` to set.
    """
    if not _has_more_than_text(getattr(model, "config", None)):
        return
    inside = set(model.get_decoder().modules())
    # By the modules, so that no family's paths have to be known. The output head is not among them, and is treated as
    # in a text model (`export._plain_layers`).
    outside = [path for path, module in adapted.items() if module not in inside and not is_embedding_module(path)]
    if proves_groups and getattr(model.config, "model_type", None) in KNOWN_VISION:
        left = [path for path in outside if not _is_linear(adapted[path])]
        if left:
            raise refuse(
                f"A LoRA adapter on {', '.join(without_numbers(left))}",
                "vLLM ignores an adapter on the embedding of patches or positions, also with "
                "--enable-tower-connector-lora",
                f"Set LoraConfig(exclude_modules={_joined(_pattern(left), peft_config.exclude_modules)!r})",
            )
        return
    if outside:
        names = without_numbers(outside)
        shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        raise refuse(
            f"A LoRA adapter on modules outside the language model ({shown})",
            "these matrices would be ignored, so completions for images would come from another policy than the one "
            "being trained",
            f"Set LoraConfig(exclude_modules={_exclusion(model, outside, peft_config.exclude_modules)!r})",
        )


def _skeleton(model: Any) -> Any:
    """The model on no device, or None for a text model and for a model that cannot be built."""
    import transformers

    if isinstance(model, str):
        try:
            # A check runs no code of a checkpoint.
            config = transformers.AutoConfig.from_pretrained(model, trust_remote_code=False)
        # TRL loads the model by the same name later, and reports the error itself.
        except (OSError, ValueError):
            return None
        kind = getattr(transformers, (config.architectures or [""])[0], None)
    else:
        config, kind = getattr(model, "config", None), type(model)
    if kind is None or not issubclass(kind, transformers.PreTrainedModel) or not _has_more_than_text(config):
        return None
    # Names and shapes are all that PEFT needs to find its targets, and without contents they take no memory.
    with device("meta"):
        return kind(config)


def _has_more_than_text(config: Any) -> bool:
    # Transformers returns the configuration itself for a model of text alone.
    return hasattr(config, "get_text_config") and config.get_text_config() is not config


def _adapted(model: nn.Module) -> dict[str, nn.Module]:
    from peft.tuners.lora import LoraLayer

    return {path: module for path, module in model.named_modules() if isinstance(module, LoraLayer)}


def _is_linear(layer: Any) -> bool:
    base = layer.get_base_layer()
    # The patch embedding is a convolution, which has channels instead.
    return hasattr(base, "in_features") and hasattr(base, "out_features")


def vision_exclusion(model: Any, peft_config: Any) -> str:
    """The `exclude_modules` that leaves only the language model of `model` in the adapter."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    inside = set(base.get_decoder().modules())
    outside = [path for path, module in _adapted(base).items() if module not in inside]
    return _exclusion(base, outside, peft_config.exclude_modules)


def _pattern(paths: Iterable[str]) -> str:
    """The `exclude_modules` for some modules."""
    return rf"(.*\.)?({'|'.join(map(re.escape, paths))})"


def _joined(pattern: str, existing: Any) -> str:
    """With what was excluded already."""
    if not existing:
        return pattern
    return f"{existing if isinstance(existing, str) else _pattern(sorted(existing))}|{pattern}"


def _exclusion(model: Any, outside: Iterable[str], existing: Any) -> str:
    """The `exclude_modules` for what is beside the language model, with what was excluded already."""
    language_model = model.get_decoder()
    language_path = next(path for path, module in model.named_modules() if module is language_model)
    shared = set(language_path.split("."))
    # The first component that the language model's path lacks, such as `visual`, covers a whole tower.
    roots = dict.fromkeys(next(part for part in path.split(".") if part not in shared) for path in outside)
    return _joined(f".*({'|'.join(map(re.escape, roots))}).*", existing)
