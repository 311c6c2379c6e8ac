"""What a saved PEFT configuration requires of a server."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trl_lora_sync.adapter.support import FUSED_LAYERS
from trl_lora_sync.cli.console import UsageError

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
        if not isinstance(saved, dict) or not isinstance(saved.get("r", 1), int):
            raise ValueError("it is not a PEFT configuration")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{file} cannot be read ({error}). Give a folder that PEFT or a trainer has saved an adapter to."
        ) from error
    return {"r": 8, **saved}


def served_modules(targets: str | Sequence[str] | None) -> tuple[str, ...]:
    """The layers that a server must be able to adapt, with the siblings that SGLang serves as one with them."""
    if targets is None or isinstance(targets, str):  # "all-linear", or a pattern that only the model resolves
        return USUAL_MODULES
    names = {name.rpartition(".")[2] for name in targets}
    for group in FUSED_LAYERS:
        if names & set(group):
            names |= set(group)
    return tuple(sorted(names, key=lambda name: (*USUAL_MODULES, name).index(name)))
