"""Read an adapter as PEFT saved it, without PEFT and without its base model."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trl_lora_sync.adapter.canonical import CanonicalAdapter, LoRAModule, pad_packed_modules, target_modules_of
from trl_lora_sync.adapter.flat import FlatBuffer
from trl_lora_sync.adapter.names import ServedNames
from trl_lora_sync.adapter.support import (
    PACKED_LAYERS,
    changes_base,
    check_saved_config,
    is_embedding_module,
    refuse_module,
)
from trl_lora_sync.engine_plugins.safetensors_file import CONFIG_FILE, TENSORS_FILE
from trl_lora_sync.errors import UnsupportedAdapterError

_KEY = re.compile(r"base_model\.model\.(?P<path>.+)\.lora_(?P<letter>[AB])\.weight")


@dataclass(frozen=True, kw_only=True)
class SavedAdapter:
    """A folder that `save_pretrained`, or a trainer's checkpoint, wrote.

    Attributes:
        config: the content of `adapter_config.json`.
        modules: the adapted layers, with the scaling that PEFT gives them.
    """

    config: Mapping[str, Any]
    modules: tuple[LoRAModule, ...]

    @property
    def target_modules(self) -> tuple[str, ...]:
        return target_modules_of(self.modules)

    def as_served(self, base: Mapping[str, Any]) -> "SavedAdapter":
        """With the names that a server has for its layers.

        Args:
            base: the `config.json` of the base model.
        """
        names = ServedNames.of_config(base)
        served = [part.of(module) for module in self.modules for part in names.parts(module.name)]
        return replace(self, modules=tuple(served))

    def lacks_siblings(self, shapes: Mapping[str, tuple[int, int]]) -> bool:
        """Whether `canonical` leaves a q/k/v or gate/up that SGLang cannot serve, as `shapes` do not have its layers.

        Source: SGLang adds zeros for k_proj and up_proj only, and crashes without others (srt/lora/lora.py, 0.5.23).
        """
        present = {module.name for module in self.modules}
        for path, _, leaf in (name.rpartition(".") for name in present - shapes.keys()):
            needed = next(
                (set(group) - {"k_proj", "up_proj"} for group in PACKED_LAYERS.values() if leaf in group), set()
            )
            if any(f"{path}.{sibling}" not in present for sibling in needed):
                return True
        return False

    def canonical(self, *, shapes: Mapping[str, tuple[int, int]] | None = None) -> CanonicalAdapter:
        """The form that is served, in float32.

        Args:
            shapes: of the base model's linear layers, to complete q/k/v and gate/up with zeros.
        """
        modules = list(self.modules)
        return FlatBuffer().export(
            pad_packed_modules(modules, shapes) if shapes is not None else modules,
            dtype=torch.float32,
            base_model=self.config.get("base_model_name_or_path"),
            fan_in_fan_out=bool(self.config.get("fan_in_fan_out")),
        )


def read_saved_adapter(folder: Path) -> SavedAdapter:
    """Read `adapter_config.json` and `adapter_model.safetensors` in `folder`.

    Raises:
        UnsupportedAdapterError: they are missing or broken, or hold more than plain LoRA.
    """
    try:
        config = json.loads((folder / CONFIG_FILE).read_text())
        check_saved_config(config)
        _check_base_is_plain(config)
        with safe_open(folder / TENSORS_FILE, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - the file is not a mapping
    # Broken JSON and broken text raise a ValueError.
    except (OSError, ValueError, SafetensorError) as error:
        # It is a ValueError too, and has its own message.
        if isinstance(error, UnsupportedAdapterError):
            raise
        raise UnsupportedAdapterError(
            f"There is no adapter in {folder} that could be read. A folder with adapter_config.json and "
            f"adapter_model.safetensors was expected, as PEFT saves it ({error})."
        ) from error
    return SavedAdapter(config=config, modules=tuple(_modules(tensors, config)))


def _check_base_is_plain(config: Mapping[str, Any]) -> None:
    """Refuse an adapter for a base that its initialisation has changed: the initial matrices are not in its files."""
    init = config.get("init_lora_weights")
    if changes_base(init):
        raise UnsupportedAdapterError(
            f"The saved adapter has init_lora_weights={init!r}, so it belongs to a base model that lacks the initial "
            "adapter, and its files do not contain that. Either write the form that is served in the process that "
            "trained it, with trl_lora_sync.export_adapter(trainer.model, directory), or let PEFT convert it: "
            "model.save_pretrained(directory, path_initial_model_for_weight_conversion=folder_of_the_initial_adapter)."
        )


def base_shapes(folder: Path) -> dict[str, tuple[int, int]]:
    """`(out_features, in_features)` of the linear layers of a base model on disk; only the files' heads are read."""
    shapes = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - the file is not a mapping
                shape = file.get_slice(key).get_shape()
                if key.endswith(".weight") and len(shape) == 2:
                    shapes[key.removesuffix(".weight")] = (shape[0], shape[1])
    return shapes


def _modules(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> list[LoRAModule]:
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        found = _KEY.fullmatch(key)
        if found is None:
            if ".lora_embedding_" in key:
                raise refuse_module(key.partition(".lora_embedding_")[0])
            raise UnsupportedAdapterError(
                f"The tensor {key!r} belongs to no plain LoRA adapter. Only lora_A and lora_B of linear layers can be "
                "served exactly. Train with peft.LoraConfig and without the feature that the tensor belongs to."
            )
        if is_embedding_module(found["path"]):
            raise refuse_module(found["path"])
        pairs.setdefault(found["path"], {})[found["letter"]] = tensor
    if not pairs or any(len(pair) != 2 for pair in pairs.values()):
        raise UnsupportedAdapterError(
            "The adapter's file is incomplete: each layer needs lora_A and lora_B, and there must be one at least. "
            "Save the adapter again."
        )
    return [
        LoRAModule(name=path, lora_A=pair["A"], lora_B=pair["B"], scaling=_scaling(path, pair["A"].shape[0], config))
        for path, pair in pairs.items()
    ]


def _scaling(path: str, rank: int, config: Mapping[str, Any]) -> float:
    """PEFT's rule; the rank is that of the tensors, so a pattern decides alpha only.

    Source: peft/utils/other.py `get_pattern_key`, 0.21.2.
    """
    # PEFT's default (tuners/lora/config.py, 0.21).
    alpha = config.get("lora_alpha", 8)
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", path):
            alpha = value
            # The first pattern that matches counts, as in `get_pattern_key`.
            break
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)
