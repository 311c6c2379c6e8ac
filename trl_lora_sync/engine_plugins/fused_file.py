"""What an adapter's folder holds, by its configuration and the head of its safetensors file; reads no tensors.

Takes plain LoRA only. Everything else is refused here, before any weight is touched.
"""

import json
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from pathlib import Path
from typing import Any

from trl_lora_sync.engine_plugins.safetensors_file import (
    CONFIG_FILE,
    MALFORMED,
    TENSORS_FILE,
    Head,
    TensorSpan,
    head_of,
)

_PREFIX = "base_model.model."
# Fields of the configuration that change what is computed; with these values they change nothing.
# Source: peft/tuners/lora/config.py (0.21).
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, []),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (False, None),
}


class AdapterFileError(Exception):
    """An adapter that cannot be fused.

    Attributes:
        is_missing: whether there is no adapter at all.
    """

    def __init__(self, message: str, *, is_missing: bool = False) -> None:
        super().__init__(message)
        self.is_missing = is_missing


@dataclass(frozen=True, kw_only=True)
class AdapterFile:
    """One adapter on disk.

    Attributes:
        head: which region of the file holds all tensors.
        modules: lora_A `(r, in_features)` and lora_B `(out_features, r)` by the module's name in the checkpoint; the
            same object for every file with the same header.
        scaling: what `lora_B @ lora_A` is multiplied with.
    """

    file: Path
    head: Head
    modules: dict[str, tuple[TensorSpan, TensorSpan]]
    scaling: float


def read_head(folder: str) -> AdapterFile:
    """What is in `folder`.

    Raises:
        AdapterFileError: the folder holds no adapter, or an adapter that is not a plain LoRA.
    """
    root = Path(folder)
    try:
        config = json.loads((root / CONFIG_FILE).read_bytes())
        file = root / TENSORS_FILE
        with file.open("rb", buffering=0) as opened:
            head = head_of(opened.fileno())
        scaling = _scaling_of(config)
        modules = _modules_in(head)
    except FileNotFoundError as error:
        message = f"No adapter found for {folder} ({error.strerror}: {error.filename})"
        raise AdapterFileError(message, is_missing=True) from error
    except OSError as error:
        raise AdapterFileError(f"{folder} cannot be read ({error.strerror})") from error
    except MALFORMED as error:
        raise AdapterFileError(
            f"{folder} holds no adapter that can be read ({type(error).__name__}: {error})"
        ) from error
    return AdapterFile(file=file, head=head, modules=modules, scaling=scaling)


def _scaling_of(config: dict[str, Any]) -> float:
    strange = {name: config[name] for name, plain in _PLAIN.items() if name in config and config[name] not in plain}
    if strange:
        raise AdapterFileError(
            f"The adapter is not a plain LoRA: its configuration has {strange}. Fused serving adds scaling * lora_B "
            "@ lora_A and nothing else; export the adapter with trl_lora_sync.export_adapter."
        )
    rank, alpha = int(config["r"]), float(config["lora_alpha"])
    return alpha / (sqrt(rank) if config.get("use_rslora") else rank)


# All versions of a run have one header. The worker knows modules that it has placed by the identity of this result.
@lru_cache(maxsize=2)
def _modules_in(head: Head) -> dict[str, tuple[TensorSpan, TensorSpan]]:
    found: dict[str, dict[str, TensorSpan]] = defaultdict(dict)
    for name, entry in head.content()[1].items():
        module, _, kind = name.removesuffix(".weight").rpartition(".lora_")
        if kind not in ("A", "B") or not name.endswith(".weight") or not name.startswith(_PREFIX):
            raise AdapterFileError(
                f"The adapter holds {name!r}. Fused serving accepts only lora_A and lora_B of linear layers; train "
                "linear layers only."
            )
        found[module.removeprefix(_PREFIX)][kind] = _span(name, entry, head.size)
    if not found:
        raise AdapterFileError("The adapter holds no tensors.")
    modules = {}
    for module, pair in found.items():
        if pair.keys() != {"A", "B"} or pair["A"].shape[0] != pair["B"].shape[1] or pair["A"].dtype != pair["B"].dtype:
            raise AdapterFileError(f"lora_A and lora_B of {module!r} do not belong together: {pair}.")
        modules[module] = (pair["A"], pair["B"])
    return modules


def _span(name: str, entry: Any, size: int) -> TensorSpan:
    try:
        span = TensorSpan.of(entry)
        if len(span.shape) != 2 or min(span.shape) < 1 or not span.fits(size):
            raise ValueError
    except (KeyError, ValueError, TypeError) as error:
        raise AdapterFileError(
            f"The tensor {name!r} of the adapter cannot be used: {entry!r} in a file of {size} bytes of tensors. A "
            "matrix in float32, bfloat16 or float16 was expected; was the file written completely?"
        ) from error
    return span
