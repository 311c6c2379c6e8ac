"""The names by which a server knows the trained modules: the one place that maps them.

A server that does not know a name ignores the matrices, without an error. Under `model.layers`, Qwen3-VL and Gemma3 on
vLLM (0.26 and 0.31) answer as the base model; under `model.language_model.layers` they and Qwen2.5-VL are right.
A model that is not in the table is named as the trainer names it, and the trial at the start proves the names.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

# Wrappers that add a component to module paths; the served model has none of them.
WRAPPER_COMPONENTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_PEFT_PREFIX = "base_model.model."
# What servers call the language model, by `model_type` of the whole model.
LANGUAGE_MODELS = dict.fromkeys(("gemma3", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), "model.language_model")
KNOWN_VISION = frozenset({"gemma3", "qwen2_5_vl", "qwen3_vl"})
"""The types of models whose modules that see images are known by their names on a server."""
# Transformers 5 leaves a level out of the tower's names that vLLM (0.26 and 0.31) has. Under the shorter name it
# ignores the matrices.
_TOWER, _SERVED_TOWER = "model.vision_tower", "model.vision_tower.vision_model"
# What vLLM calls the parts of a layer that Transformers has as one. It refuses an adapter by the trainer's name
# ("expected target modules in ...", 0.31). Phi-3 and GLM-4.1V have such a layer in vLLM as well.
_GATE_AND_UP = {"gate_up_proj": ("gate_proj", "up_proj")}
# By `model_type`.
_DIVIDED = {"glm": _GATE_AND_UP, "glm4": _GATE_AND_UP}


class Part(NamedTuple):
    """A layer of the served model that computes what a layer of the trainer does, or a part of its outputs.

    Attributes:
        path: in the served model.
        number: its place among the parts, which are of one size.
        parts: how many these are.
    """

    path: str
    number: int = 0
    parts: int = 1

    def of(self, lora_B: Tensor) -> Tensor:
        """The rows that belong to it."""
        return lora_B if self.parts == 1 else lora_B.chunk(self.parts)[self.number]


def unwrapped_path(path: str) -> str:
    """A module path without the components that FSDP, activation checkpointing and torch.compile put into it."""
    return ".".join(part for part in path.split(".") if part not in WRAPPER_COMPONENTS)


def trained_path(path: str) -> str:
    """As `unwrapped_path`, from the base model on."""
    return unwrapped_path(path).removeprefix(_PEFT_PREFIX)


@dataclass(frozen=True, kw_only=True)
class ServedNames:
    """Maps the modules of one model.

    Attributes:
        prefixes: what the paths of some modules begin with in the trainer, and on the server.
        divided: names of the parts of layers that are several on the server, by the layer's own name.
        keys_as_values: paths in the trainer of the layers whose output is the values of an attention as well.
    """

    prefixes: Mapping[str, str] = field(default_factory=dict)
    divided: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    keys_as_values: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model: Any) -> "ServedNames":
        """The names of a model, with or without the wrapper of PEFT."""
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        kind = getattr(getattr(base, "config", None), "model_type", "")
        served, divided = LANGUAGE_MODELS.get(kind), _DIVIDED.get(kind, {})
        # Of Gemma 4 (`Gemma4TextAttention`, Transformers 5.24).
        keys_as_values = frozenset(
            trained_path(f"{path}.k_proj")
            for path, module in base.named_modules()
            if getattr(module, "use_alternative_attention", False) and getattr(module, "v_proj", module) is None
        )
        if served is None:
            return cls(divided=divided, keys_as_values=keys_as_values)
        language_model = base.get_decoder()
        found = next(path for path, module in base.named_modules() if module is language_model)
        prefixes = {trained_path(found): served}
        paths = [trained_path(path) for path, _ in base.named_modules()]
        if _TOWER in paths and _SERVED_TOWER not in paths:
            prefixes[_TOWER] = _SERVED_TOWER
        return cls(prefixes=prefixes, divided=divided, keys_as_values=keys_as_values)

    @classmethod
    def of_config(cls, config: Mapping[str, Any], paths: Iterable[str]) -> "ServedNames":
        """The names of a model of text by its `config.json`.

        Args:
            paths: of the adapted layers in the trainer.
        """
        kinds = config.get("layer_types") or [] if config.get("attention_k_eq_v") else []
        ends = tuple(f".layers.{n}.self_attn.k_proj" for n, kind in enumerate(kinds) if kind == "full_attention")
        return cls(
            divided=_DIVIDED.get(config.get("model_type", ""), {}),
            keys_as_values=frozenset(path for path in paths if path.endswith(ends)),
        )

    def with_routers(self, paths: Mapping[str, str]) -> "ServedNames":
        """The same with other names for the modules at some paths, of the served model already."""
        return replace(
            self,
            # First, because the first match counts, and these paths are more specific.
            prefixes={**{f"{self.served(path)}": other for path, other in paths.items()}, **self.prefixes},
        )

    def served(self, path: str) -> str:
        """The path on the server of the module with this path in the trainer."""
        path = trained_path(path)
        for ours, theirs in self.prefixes.items():
            if path == ours or path.startswith(f"{ours}."):
                return f"{theirs}{path.removeprefix(ours)}"
        return path

    def parts(self, path: str) -> tuple[Part, ...]:
        """What a layer of the trainer is on a server, which may have several layers in its place."""
        served = self.served(path)
        parent, _, name = served.rpartition(".")
        if names := self.divided.get(name):
            return tuple(Part(f"{parent}.{one}", number, len(names)) for number, one in enumerate(names))
        # vLLM (0.31) loads the weight of `k_proj` for both, and an adapter for each by its name.
        if trained_path(path) in self.keys_as_values:
            return Part(served), Part(f"{parent}.v_proj")
        return (Part(served),)
