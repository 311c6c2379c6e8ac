"""LoRA on the experts and the router of a mixture of experts: what PEFT trains there, and what a server loads.

Transformers 5 keeps the experts of a layer in two parameters, `gate_up_proj` and `down_proj`, and PEFT (0.18 to 0.21)
adapts each of them by a `ParamWrapper`. Its `lora_A` of shape `(r * experts, in_features)` is grouped by expert, its
`lora_B` of shape `(out_features, r * experts)` by rank. Servers want another layout, and each family other names.

Source: peft/tuners/lora/layer.py `ParamWrapper.get_delta_weight`. What vLLM 0.26 and SGLang 0.5.15
serve of each family was run on a GPU: under other names or in another layout vLLM refuses the experts, or ignores them
without an error.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal
from weakref import WeakSet

from torch import Tensor, nn

from trl_lora_sync.adapter.canonical import KEY_PREFIX, Block

Parameter = Literal["gate_up_proj", "down_proj"]

# The modules whose weights PEFT reads without calling them, so that no hook sees it.
# Weak, so that the modules of a model that is gone are not kept.
_read_directly: "WeakSet[nn.Module]" = WeakSet()


@dataclass(frozen=True, kw_only=True)
class Family:
    """The names of one family of models on a server.

    Attributes:
        moe: what the module that holds experts and router is called there.
        projections: the names of gate, up and down of each expert.
        is_always_stacked: whether vLLM and checkpoints have all experts of a layer in one tensor, as PEFT does.
        has_router: whether vLLM applies an adapter on the router at run time.
    """

    moe: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    is_always_stacked: bool = False
    has_router: bool = False


FAMILIES = {
    # Under `mlp`, vLLM 0.26 loads the experts of a Mixtral without an error and serves the base.
    # It applies an adapter on this router, and ignores one on the router of a Qwen3-MoE.
    "mixtral": Family(moe="block_sparse_moe", projections=("w1", "w3", "w2"), has_router=True),
    "qwen3_moe": Family(),
    # One tensor for each expert is refused by name (vLLM 0.26).
    "qwen3_vl_moe": Family(is_always_stacked=True),
}
"""By `model_type`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertLayer:
    """One parameter of the experts of one layer, with its adapter.

    Attributes:
        path: of the module of all experts, as the server calls it.
        parameter: which one of its parameters.
        matrices: the modules that hold `lora_A` and `lora_B`.
        is_active: whether the model computes with this adapter alone, as far as the model itself knows.
    """

    path: str
    parameter: Parameter
    layer: Any
    adapter_name: str
    family: Family
    matrices: tuple[Any, Any]
    is_active: bool

    @property
    def experts(self) -> int:
        return int(self.layer.num_experts)

    @property
    def rank(self) -> int:
        return int(self.matrices[0].weight.shape[0]) // self.experts

    def oddity(self) -> str | None:
        """What makes it more than LoRA on each expert at this moment, in words, or None."""
        if self.adapter_name in self.layer.lora_variant:
            return f"uses the variant {type(self.layer.lora_variant[self.adapter_name]).__name__}"
        if any(matrix.bias is not None for matrix in self.matrices):
            return "has a bias on a LoRA matrix"
        # Set by `ParamWrapper.update_layer` (0.21) for a parameter of shape `(experts, out_features, in_features)`.
        if not getattr(self.layer, "_did_swap_in_out_features", False):
            return "is stored as (experts, in_features, out_features), or was made by a PEFT older than 0.21"
        if self.layer.merged:
            return "is merged into the base weights at the moment (call model.unmerge_adapter() first)"
        if self.layer.disable_adapters:
            return "is disabled at the moment (call model.enable_adapter_layers() first)"
        # A call of the layer's own `set_adapter` leaves the model's name as it was.
        if self.is_active and list(self.layer.active_adapters) != [self.adapter_name]:
            return f"has other active adapters at the moment (call model.set_adapter({self.adapter_name!r}) first)"
        return None

    @property
    def scaling(self) -> float:
        return float(self.layer.scaling[self.adapter_name])

    def read(self, value_of: Callable[[Any], Tensor]) -> tuple[Tensor, Tensor]:
        """`lora_A` `(experts, r, in_features)` and `lora_B` `(experts, out_features, r)`, as views."""
        lora_A, lora_B = (value_of(matrix).detach() for matrix in self.matrices)
        return (
            # As in PEFT's `get_delta_weight`: the expert is the first index of the rows of lora_A, and the last of the
            # columns of lora_B.
            lora_A.reshape(self.experts, self.rank, -1),
            lora_B.reshape(lora_B.shape[0], self.rank, self.experts).permute(2, 0, 1),
        )


def mark_read_directly(matrices: Iterable[nn.Module]) -> None:
    """Note modules whose weights PEFT reads without calling them."""
    _read_directly.update(matrices)


def is_read_directly(module: nn.Module) -> bool:
    """Whether PEFT reads the weight of a module without calling it."""
    return module in _read_directly


def shapes_of(experts: Any) -> dict[str, tuple[int, int]]:
    """`(out_features, in_features)` of each parameter of a module of experts, below PEFT's wrappers."""
    # One wrapper for each adapted parameter, one around the other.
    while hasattr(experts, "get_base_layer"):
        experts = experts.get_base_layer()
    return {name: tuple(getattr(experts, name).shape[1:]) for name in ("gate_up_proj", "down_proj")}


def expert_blocks(
    layers: Iterable[ExpertLayer], value_of: Callable[[Any], Tensor], rank: int, *, is_stacked: bool
) -> list[Block]:
    """The adapters of all experts as a server loads them.

    Servers need all three projections of an expert, so zeros stand for a projection that is not trained.

    Args:
        value_of: the weight of a module that holds a matrix.
        rank: to pad to.
        is_stacked: whether all experts of a layer go into one tensor.
    """
    together: dict[str, dict[str, ExpertLayer]] = {}
    for layer in layers:
        together.setdefault(layer.path, {})[layer.parameter] = layer
    return [block for path, found in together.items() for block in _blocks_of(path, found, value_of, rank, is_stacked)]


def _blocks_of(
    path: str, found: dict[str, ExpertLayer], value_of: Callable[[Any], Tensor], rank: int, is_stacked: bool
) -> list[Block]:
    # At least one of the two parameters is adapted, and either leads to the module that holds both.
    some = next(iter(found.values()))
    read = {name: layer.read(value_of) for name, layer in found.items()}
    for name, (out_features, in_features) in shapes_of(some.layer).items():
        if name not in read:
            like = some.matrices[0].weight
            # Of rank 0, as the matrices are padded with zeros to the adapter's rank anyway.
            read[name] = (
                like.new_zeros(some.experts, 0, in_features),
                like.new_zeros(some.experts, out_features, 0),
            )
    # The product is made as a block is written, so that there is one in float32 at a time.
    scaling = {name: found[name].scaling if name in found else 1.0 for name in read}
    (gate_up_A, gate_up_B), (down_A, down_B) = read["gate_up_proj"], read["down_proj"]
    if is_stacked:
        return [
            # PEFT's key of the inner wrapper, which vLLM takes for gate and up (lora/lora_model.py, 0.31).
            *_in_one(f"{path}.base_layer", gate_up_A, gate_up_B, rank, scaling["gate_up_proj"]),
            *_in_one(path, down_A, down_B, rank, scaling["down_proj"]),
        ]
    gate, up, down = some.family.projections
    # In all of `FAMILIES`. GPT-OSS has the rows of gate and up in turns, and is refused by its `model_type`.
    half = gate_up_B.shape[1] // 2  # the gate is the first half of the rows
    parts = {
        gate: (gate_up_A, gate_up_B[:, :half], scaling["gate_up_proj"]),
        up: (gate_up_A, gate_up_B[:, half:], scaling["gate_up_proj"]),
        down: (down_A, down_B, scaling["down_proj"]),
    }
    blocks = []
    for name, (lora_A, lora_B, factor) in parts.items():
        keys_A, keys_B = _keys(path, some.experts, name)
        blocks += [
            # Gate and up have one lora_A in PEFT. A server reads one for each, so it is written twice.
            Block(keys_A, (rank, lora_A.shape[2]), lora_A),
            Block(keys_B, (lora_B.shape[1], rank), lora_B, factor),
        ]
    return blocks


# Tens of thousands of names, which are the same ones at each sync.
@lru_cache(maxsize=4096)
def _keys(path: str, experts: int, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    keys = [f"{KEY_PREFIX}{path}.{expert}.{name}" for expert in range(experts)]
    return tuple(f"{key}.lora_A.weight" for key in keys), tuple(f"{key}.lora_B.weight" for key in keys)


def _in_one(path: str, lora_A: Tensor, lora_B: Tensor, rank: int, scaling: float) -> list[Block]:
    """All experts in one tensor, as PEFT has them."""
    experts, own_rank, in_features = lora_A.shape
    out_features = lora_B.shape[1]
    tall, wide = lora_A, lora_B.permute(1, 2, 0)
    if own_rank < rank:
        # The padding follows the ranks of each expert in lora_A. In lora_B, where the expert is the last index, it
        # follows the ranks of all experts.
        tall = lora_A.new_zeros(experts, rank, in_features)
        tall[:, :own_rank] = lora_A
        wide = lora_B.new_zeros(out_features, rank, experts)
        wide[:, :own_rank] = lora_B.permute(1, 2, 0)
    key = f"{KEY_PREFIX}{path}"
    return [
        Block((f"{key}.lora_A.weight",), (experts * rank, in_features), tall.reshape(1, -1, in_features)),
        Block((f"{key}.lora_B.weight",), (out_features, rank * experts), wide.reshape(1, out_features, -1), scaling),
    ]
