"""The names by which a server knows the trained modules: the one place that maps them.

A server that does not know a name ignores the matrices, without an error. Under `model.layers`, Qwen3-VL and Gemma3 on
vLLM (0.26 and 0.31) answer as the base model; under `model.language_model.layers` they and Qwen2.5-VL are right.
A model that is not in the table is named as the trainer names it, and the trial at the start proves the names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from trl_lora_sync.adapter.canonical import LoRAModule

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

    def of(self, layer: LoRAModule) -> LoRAModule:
        """What the whole layer's adapter is for it."""
        if self == Part(layer.name):
            return layer
        return replace(layer, name=self.path, lora_B=layer.lora_B.chunk(self.parts)[self.number])


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
        keys_as_values: what the paths of layers end with whose output is the values of an attention as well.
    """

    prefixes: Mapping[str, str] = field(default_factory=dict)
    divided: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    keys_as_values: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: Any) -> "ServedNames":
        """The names of a model, with or without the wrapper of PEFT."""
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        config: Any = getattr(base, "config", None)
        kind = getattr(config, "model_type", "")
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        served, divided = LANGUAGE_MODELS.get(kind), _DIVIDED.get(kind, {})
        keys_as_values = _keys_as_values(
            getattr(text, "attention_k_eq_v", False), getattr(text, "layer_types", None) or ()
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
    def of_config(cls, config: Mapping[str, Any]) -> "ServedNames":
        """The names of a model of text by its `config.json`."""
        return cls(
            divided=_DIVIDED.get(config.get("model_type", ""), {}),
            keys_as_values=_keys_as_values(config.get("attention_k_eq_v", False), config.get("layer_types") or ()),
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
        if served.endswith(self.keys_as_values):
            return Part(served), Part(f"{parent}.v_proj")
        return (Part(served),)


def _keys_as_values(is_so: bool, kinds: Sequence[str]) -> tuple[str, ...]:
    """See `ServedNames`; of Gemma 4, by two fields of its configuration.

    Source: `Gemma4TextAttention` in Transformers (5.24), and `k_eq_v_layers` in vllm/model_executor/models/gemma4.py
    (0.31).
    """
    full = [number for number, kind in enumerate(kinds) if is_so and kind == "full_attention"]
    return tuple(f".layers.{number}.self_attn.k_proj" for number in full)
