"""The canonical form of a LoRA adapter: pure tensor algebra.

Every engine version computes the same for it: one rank everywhere, `lora_alpha == r` (scaling 1), no patterns, no
rsLoRA, and the true scaling of each module folded into its `lora_B`. Knows nothing of PEFT models, files or servers.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import chain
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor

from trl_lora_sync.adapter.support import PACKED_LAYERS
from trl_lora_sync.engine_plugins.fused_file import TOKENS_KEY
from trl_lora_sync.errors import AdapterNotFiniteError

KEY_PREFIX = "base_model.model."
# Layers that read the hidden state, and layers whose output is added to it.
_READ_HIDDEN = frozenset(chain(*PACKED_LAYERS.values()))
_WRITE_HIDDEN = frozenset({"o_proj", "down_proj"})


@dataclass(frozen=True, kw_only=True)
class LoRAModule:
    """One adapted linear layer, as the trainer holds it.

    Attributes:
        name: module path in the base model, such as `model.layers.0.self_attn.q_proj`.
        lora_A: shape `(r, in_features)`; may alias training storage.
        lora_B: shape `(out_features, r)`; may alias training storage.
        scaling: what the trainer multiplies `lora_B @ lora_A` with.
    """

    name: str
    lora_A: Tensor
    lora_B: Tensor
    scaling: float

    @property
    def rank(self) -> int:
        return int(self.lora_A.shape[0])

    def less(self, initial: "LoRAModule") -> "LoRAModule":
        """What the layer computes more than with its initial matrices, as an adapter of twice the rank.

        `B A - B0 A0`, each `B` with its scaling, is written as `(B - B0) A + B0 (A - A0)` and not as `B A + (-B0) A0`.
        Both products are then as small as what was gained, and zero before the first step: rounding to the served dtype
        loses a share of that, and not of `B0 A0`, which may be a thousand times as large.
        """
        lora_A, lora_B = self.lora_A.detach().float(), fold_scaling(self.lora_B, self.scaling)
        initial_A = initial.lora_A.to(lora_A.device, torch.float32)
        initial_B = fold_scaling(initial.lora_B.to(lora_B.device), initial.scaling)
        return LoRAModule(
            name=self.name,
            lora_A=torch.cat([lora_A, lora_A - initial_A]),
            lora_B=torch.cat([lora_B - initial_B, initial_B], dim=1),
            scaling=1.0,
        )


@dataclass(frozen=True)
class Block:
    """Tensors of one shape that are filled in one copy; a mixture of experts has tens of thousands.

    Attributes:
        keys: of each tensor.
        shape: of each tensor.
        values: `(tensors, rows, columns)`, which may be smaller than `shape`; the rest is zero. May alias training
            storage.
        scaling: what they are multiplied with, in float32.
    """

    keys: tuple[str, ...]
    shape: tuple[int, int]
    values: Tensor
    scaling: float = 1.0

    def write_to(self, whole: Tensor) -> None:
        """Fill zeros of shape `(tensors, *shape)`."""
        values = self.values if self.scaling == 1.0 else self.values.float() * self.scaling
        whole[:, : values.shape[1], : values.shape[2]].copy_(values)


@dataclass(frozen=True)
class ExtraTensors:
    """What is trained beside the matrices of linear layers, as `adapter.extras` and `adapter.experts` read it.

    Attributes:
        tensors: by their keys, in float32.
        tokens: as for `CanonicalAdapter`.
        blocks: the adapters of experts.
        rank: the largest rank in the blocks.
        has_stacked_experts: whether a block has all experts of a layer in one tensor.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    tokens: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)
    rank: int = 0
    has_stacked_experts: bool = False


NO_EXTRAS = ExtraTensors()


@dataclass(frozen=True, kw_only=True)
class Form:
    """In which of several equal forms servers take an adapter.

    Attributes:
        fused_siblings: whether q/k/v and gate/up are completed with zeros.
        stacked_experts: whether all experts of a layer go into one tensor.
    """

    fused_siblings: bool = False
    stacked_experts: bool = False


PLAIN = Form()


def common_form(forms: Iterable[Form]) -> Form:
    """The form that several servers take; zeros for a sibling change nothing on a server that does not need them."""
    forms = list(forms)
    return Form(
        fused_siblings=any(one.fused_siblings for one in forms),
        stacked_experts=all(one.stacked_experts for one in forms),
    )


@dataclass(frozen=True, kw_only=True)
class CanonicalAdapter:
    """A LoRA adapter that needs no further information to be served exactly.

    Attributes:
        tensors: PEFT's state-dict keys to contiguous tensors; on the CPU and aliasing nothing, see `on_host`.
        rank: the one LoRA rank of all modules.
        dtype: dtype of all tensors.
        target_modules: last components of the adapted module paths, sorted.
        fan_in_fan_out: carried over for PEFT; the engines ignore it.
        base_model: what the trainer calls the base model.
        tokens: for each embedding of which rows are replaced, how many it has and which ones; for fused serving only.
        has_stacked_experts: whether all experts of a layer are in one tensor, which requests to load it name.
    """

    tensors: dict[str, Tensor]
    rank: int
    dtype: torch.dtype
    target_modules: tuple[str, ...]
    base_model: str | None = None
    fan_in_fan_out: bool = False
    tokens: Mapping[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    has_stacked_experts: bool = False

    def on_host(self) -> "CanonicalAdapter":
        """The same with tensors on the CPU that nothing overwrites; only a `FlatAdapter` has others."""
        return self

    def with_tensors(self, tensors: dict[str, Tensor]) -> "CanonicalAdapter":
        """A plain copy of this adapter with other `tensors`."""
        return CanonicalAdapter(tensors=tensors, **self.described())

    def described(self) -> dict[str, Any]:
        """All fields but the tensors."""
        return {one.name: getattr(self, one.name) for one in fields(CanonicalAdapter) if one.name != "tensors"}

    @cached_property
    def layout(self) -> tuple[tuple[str, torch.Size], ...]:
        """Keys and shapes of the tensors, in their order."""
        return tuple((key, tensor.shape) for key, tensor in self.tensors.items())

    @property
    def payload_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    @property
    def parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors.values())

    def config(self) -> dict[str, object]:
        """The content of `adapter_config.json`."""
        tokens = {TOKENS_KEY: {path: list(one) for path, one in self.tokens.items()}} if self.tokens else {}
        return tokens | {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base_model,
            "r": self.rank,
            "lora_alpha": self.rank,
            "target_modules": list(self.target_modules),
            "bias": "none",
            "use_rslora": False,
            "use_dora": False,
            "rank_pattern": {},
            "alpha_pattern": {},
            "lora_dropout": 0.0,
            "fan_in_fan_out": self.fan_in_fan_out,
            "init_lora_weights": True,
            "inference_mode": True,
            "modules_to_save": None,
        }


def fold_scaling(lora_B: Tensor, scaling: float) -> Tensor:
    """Return `lora_B * scaling` in float32, so the server may assume scaling 1.

    Args:
        lora_B: `(out_features, r)`, any float dtype; not modified and not aliased.
    Source: vLLM <= 0.31 ignores `alpha_pattern` and SGLang ignores `use_rslora` (srt/lora/lora.py, 0.5.23).
    """
    return lora_B.detach().to(torch.float32, copy=True).mul_(scaling)


def pad_rank(lora_A: Tensor, lora_B: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Zero-pad the rows of `lora_A` and the columns of `lora_B` to `rank`; the product stays the same.

    Source: vLLM <= 0.31 and SGLang size their buffers by one rank for all modules.
    """
    missing = rank - lora_A.shape[0]
    if missing:
        lora_A = torch.nn.functional.pad(lora_A, (0, 0, 0, missing))
        lora_B = torch.nn.functional.pad(lora_B, (0, missing))
    return lora_A, lora_B


def canonicalize(
    modules: Iterable[LoRAModule],
    *,
    dtype: torch.dtype,
    base_model: str | None = None,
    fan_in_fan_out: bool = False,
    extras: ExtraTensors = NO_EXTRAS,
) -> CanonicalAdapter:
    """Fold the scaling, pad to one rank and cast, in that order.

    Args:
        modules: the adapted layers; not modified.
        dtype: dtype the server computes LoRA in. `torch.float32` loses nothing.
        extras: what is trained beside them; for fused serving only.

    Returns:
        Tensors on the CPU that alias no training storage.

    Raises:
        AdapterNotFiniteError: a matrix holds NaN or infinity, or does once it is scaled and cast.
    """
    modules = list(modules)
    rank = max(common_rank(modules), extras.rank)
    with one_cpu_thread():
        tensors = _served_tensors(modules, rank, dtype, extras)
    return CanonicalAdapter(
        tensors=tensors,
        rank=rank,
        dtype=dtype,
        target_modules=target_modules_of(modules),
        base_model=base_model,
        fan_in_fan_out=fan_in_fan_out,
        tokens=extras.tokens,
        has_stacked_experts=extras.has_stacked_experts,
    )


def common_rank(modules: Iterable[LoRAModule]) -> int:
    """The rank that all modules are padded to."""
    return max(module.rank for module in modules)


def target_modules_of(modules: Iterable[LoRAModule]) -> tuple[str, ...]:
    """Last components of the module paths, sorted."""
    return tuple(sorted({module.name.rpartition(".")[2] for module in modules}))


def tensor_keys(module: LoRAModule) -> tuple[str, str]:
    """PEFT's state-dict keys of `lora_A` and `lora_B`."""
    return f"{KEY_PREFIX}{module.name}.lora_A.weight", f"{KEY_PREFIX}{module.name}.lora_B.weight"


def modules_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """`lora_A` and `lora_B` by module path, from tensors with `tensor_keys`."""
    suffix_A, suffix_B = ".lora_A.weight", ".lora_B.weight"
    return {
        key.removeprefix(KEY_PREFIX).removesuffix(suffix_A): (
            lora_A, tensors[f"{key.removesuffix(suffix_A)}{suffix_B}"]
        )
        for key, lora_A in tensors.items()
        if key.endswith(suffix_A)
    }  # fmt: skip


def split_flat(flat: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Views of `flat` with these shapes, one after the other."""
    parts = torch.split(flat, [shape.numel() for shape in shapes.values()])
    return {key: part.view(shape) for (key, shape), part in zip(shapes.items(), parts, strict=True)}


def is_finite(flat: Tensor) -> bool:
    """Whether there is no NaN and no infinity among the values.

    Both show in the extremes, which are found forty times as fast on a CPU as by looking at each value.
    """
    return bool(torch.stack(torch.aminmax(flat)).isfinite().all())


def complete_siblings(modules: list[LoRAModule], shapes: Mapping[str, tuple[int, int]]) -> list[LoRAModule]:
    """Add a zero module for each member of a fused layer that is not adapted while another one is.

    Args:
        modules: the adapted layers.
        shapes: `(out_features, in_features)` of the base model's linear layers, by module path.

    Source: SGLang serves q/k/v and gate/up as one layer and crashes on some incomplete sets (srt/lora/lora.py, 0.5.23).
    """
    present = {module.name for module in modules}
    completed = list(modules)
    for module in modules:
        parent, _, leaf = module.name.rpartition(".")
        for sibling in next((group for group in PACKED_LAYERS.values() if leaf in group), ()):
            name = f"{parent}.{sibling}"
            if name not in present and name in shapes:
                out_features, in_features = shapes[name]
                zero_A, zero_B = module.lora_A.new_zeros(1, in_features), module.lora_B.new_zeros(out_features, 1)
                completed.append(LoRAModule(name=name, lora_A=zero_A, lora_B=zero_B, scaling=1.0))
                present.add(name)
    return completed


def widened(adapter: CanonicalAdapter) -> CanonicalAdapter:
    """One zero module of `adapter`, made for a base whose hidden size is one larger; fits no base the adapter fits.

    Only the side that meets the hidden state is widened, because the other one may have the same size in a wider
    base, and because a server that splits layers over GPUs cuts that side to its share without checking the size.
    """
    keys = [key for key in adapter.tensors if key.endswith((".lora_A.weight", ".lora_B.weight"))]
    pairs = list(zip(keys[::2], keys[1::2], strict=True))
    key_A, key_B = next((pair for pair in pairs if _kind(pair[0]) in _READ_HIDDEN | _WRITE_HIDDEN), pairs[0])
    wider, taller = int(_kind(key_A) not in _WRITE_HIDDEN), int(_kind(key_A) not in _READ_HIDDEN)
    lora_A, lora_B = adapter.tensors[key_A], adapter.tensors[key_B]
    tensors = {
        key_A: lora_A.new_zeros(adapter.rank, lora_A.shape[1] + wider, device="cpu"),
        key_B: lora_B.new_zeros(lora_B.shape[0] + taller, adapter.rank, device="cpu"),
    }
    return replace(adapter.with_tensors(tensors), tokens={})


def _kind(key: str) -> str:
    """The last component of the module path in a tensor's key."""
    return key.rpartition(".lora_")[0].rpartition(".")[2]


def _served_tensors(
    modules: list[LoRAModule], rank: int, dtype: torch.dtype, extras: ExtraTensors
) -> dict[str, Tensor]:
    matrices = {
        key: matrix.to(dtype)
        for module in modules
        for key, matrix in zip(tensor_keys(module), _scaled_and_padded(module, rank), strict=True)
    }
    matrices |= {key: tensor.to(dtype) for key, tensor in extras.tensors.items()}
    for block in extras.blocks:
        whole = torch.zeros(len(block.keys), *block.shape, dtype=dtype, device=block.values.device)
        block.write_to(whole)
        matrices |= zip(block.keys, whole, strict=True)
    # One buffer for all of them, so that a GPU is waited for once and the copy to the host is one.
    device = modules[0].lora_A.device
    flat = torch.cat([matrix.to(device).reshape(-1) for matrix in matrices.values()])
    # Checked as the server will see it: what float32 holds may be infinite in float16.
    if not is_finite(flat):
        raise _not_finite(modules, matrices, dtype)
    return split_flat(flat.cpu(), {key: matrix.shape for key, matrix in matrices.items()})


@contextmanager
def one_cpu_thread() -> Iterator[None]:
    """Keep small CPU operations on this thread.

    Waking the others for each of hundreds of small matrices took 30 times as long on two busy cores, and 150 times as
    long on 16 virtual ones.
    """
    threads = torch.get_num_threads()
    # A CPU build of vLLM in this process replaces this function with a warning (0.31, v1/worker/cpu_worker.py).
    if threads == 1 or not isinstance(torch.set_num_threads, BuiltinFunctionType):
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _scaled_and_padded(module: LoRAModule, rank: int) -> tuple[Tensor, Tensor]:
    return pad_rank(module.lora_A.detach(), fold_scaling(module.lora_B, module.scaling), rank)


def _not_finite(modules: list[LoRAModule], matrices: dict[str, Tensor], dtype: torch.dtype) -> AdapterNotFiniteError:
    """The error for the first tensor that is not finite; the first ones are two for each module."""
    index, key = next((index, key) for index, (key, one) in enumerate(matrices.items()) if not one.isfinite().all())
    if index >= 2 * len(modules):
        return AdapterNotFiniteError(
            f"The trained tensor {key!r} holds NaN or infinity in {dtype}. The last published version stays active. "
            "Lower the learning rate or clip gradients, and resume from an earlier checkpoint."
        )
    broken = modules[index // 2]
    if broken.lora_A.isfinite().all() and broken.lora_B.isfinite().all():
        return AdapterNotFiniteError(
            f"The LoRA matrices of {broken.name!r}, scaled by {broken.scaling:g}, do not fit into {dtype}. The last "
            'published version stays active. Set lora_sync_dtype="bfloat16", if the server runs in it, or lower the '
            "learning rate."
        )
    return AdapterNotFiniteError(
        f"The LoRA matrices of {broken.name!r} hold NaN or infinity. Training has diverged; the last published version "
        "stays active. Lower the learning rate or clip gradients, and resume from an earlier checkpoint."
    )
