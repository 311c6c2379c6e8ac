"""What a saved PEFT configuration requires of a server."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from trl_lora_sync.adapter.groups import group_of, sees_images
from trl_lora_sync.adapter.support import PACKED_LAYERS
from trl_lora_sync.cli.console import UsageError

# Names that only modules which see images have, in Qwen2.5-VL, Qwen3-VL and Gemma3.
_VISION_NAMES = frozenset({"qkv", "linear_fc1", "linear_fc2", "fc1", "fc2"})
# The linear layers of Llama, Qwen, Mistral, Gemma and the like.
USUAL_MODULES: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def read_peft_config(path: Path) -> dict[str, Any]:
    """The `adapter_config.json` in a folder, or given by its own path.

    Raises:
        UsageError: there is none.
    """
    file = path / "adapter_config.json" if path.is_dir() else path
    try:
        saved = json.loads(file.read_text())
        _check_types(saved)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{file} cannot be read ({error}). Give a folder that PEFT or a trainer has saved an adapter to."
        ) from error
    # PEFT's default (0.21), for a configuration that leaves it out.
    return {"r": 8, **saved}


def _check_types(saved: Any) -> None:
    """Raise a ValueError unless the fields that are read here have the types that PEFT writes."""
    if not isinstance(saved, dict) or not isinstance(saved.get("rank_pattern") or {}, dict):
        raise ValueError("it is not a PEFT configuration")
    for rank in (saved.get("r", 8), *(saved.get("rank_pattern") or {}).values()):
        # `isinstance` would take True for a rank.
        if type(rank) is not int or rank < 1:
            raise ValueError(f"a rank in it is {rank!r}, and must be a whole number above 0")
    for field in ("target_modules", "exclude_modules", "target_parameters"):
        names = saved.get(field) or []
        if not isinstance(names, str) and not (isinstance(names, list) and all(isinstance(one, str) for one in names)):
            raise ValueError(f"{field} in it is {names!r}, and must be a name or a list of names")


def served_modules(targets: str | Sequence[str] | None) -> tuple[str, ...]:
    """The layers that a server must be able to adapt, with the siblings that SGLang serves as one with them."""
    if targets is None or isinstance(targets, str):  # "all-linear", or a pattern that only the model resolves
        return USUAL_MODULES
    names = {name.rpartition(".")[2] for name in targets}
    for group in PACKED_LAYERS.values():
        if names & set(group):
            names |= set(group)
    # In the usual order, as a set has none and the names are printed in commands.
    return tuple(sorted(names, key=lambda name: (*USUAL_MODULES, name).index(name)))


def adapts_vision(path: Path, saved: dict[str, Any]) -> bool:
    """Whether a saved adapter changes modules that see images: by its tensors, or else by the names of its targets."""
    file = (path if path.is_dir() else path.parent) / "adapter_model.safetensors"
    if file.is_file():
        return any(sees_images(group_of(key)) for key in _keys_in(file))
    targets = saved.get("target_modules") or ()
    names = [targets] if isinstance(targets, str) else targets
    excluded = saved.get("exclude_modules") or ()
    excluded = excluded if isinstance(excluded, str) else "|".join(excluded)
    # A pattern that leaves out anything that sees images is taken to leave out all of it.
    return not re.search("visual|vision", excluded) and any(
        sees_images(group_of(name)) or name.rpartition(".")[2] in _VISION_NAMES for name in names
    )


def adapts_experts(saved: dict[str, Any]) -> bool:
    """Whether a saved adapter may change the experts of a mixture.

    PEFT makes `target_parameters` of "all-linear" and of the experts' layers on such a model, when it adds the adapter.
    """
    return bool(saved.get("target_parameters")) or saved.get("target_modules") in ("all-linear", "all")


def _keys_in(file: Path) -> list[str]:
    """The names of the tensors in a safetensors file; none if it is damaged."""
    try:
        with safe_open(file, framework="np") as opened:
            return list(opened.keys())
    except (OSError, SafetensorError):
        return []
