"""The canonical form of a LoRA adapter: pure tensor algebra.

Every engine version computes the same for it: one rank everywhere, `lora_alpha == r` (scaling 1), no patterns, no
rsLoRA, and the true scaling of each module folded into its `lora_B`. Knows nothing of PEFT models, files or servers.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from types import BuiltinFunctionType

import torch
from torch import Tensor

from trl_lora_sync.adapter.support import PACKED_LAYERS
from trl_lora_sync.engine_plugins.checksum import RepeatedChecksum
from trl_lora_sync.engine_plugins.fused_file import TOKENS_KEY
from trl_lora_sync.engine_plugins.safetensors_file import METADATA, header_of
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
        # The copy stays where the model was at the start, and the model may have been moved since.
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
        packed_modules: whether q/k/v and gate/up are completed with zeros.
        stacked_experts: whether all experts of a layer go into one tensor.
        dtype: in which they keep adapters, so that a version in another one is cast there; None if that is unknown.
    """

    packed_modules: bool = False
    stacked_experts: bool = False
    dtype: torch.dtype | None = None


PLAIN = Form()


def common_form(forms: Iterable[Form]) -> Form:
    """The form that several servers take; zeros for a sibling change nothing on a server that does not need them."""
    forms = list(forms)
    dtypes = {one.dtype for one in forms}
    return Form(
        packed_modules=any(one.packed_modules for one in forms),
        # All servers get the same tensors, so these have the layout that each of them takes.
        stacked_experts=all(one.stacked_experts for one in forms),
        dtype=dtypes.pop() if len(dtypes) == 1 else None,
    )


@dataclass(frozen=True, kw_only=True)
class CanonicalAdapter:
    """A LoRA adapter that needs no further information to be served exactly.

    Attributes:
        flat: all tensors one after the other, as in a safetensors file; shape `(parameters,)`, on any device. May be
            the memory of a `FlatBuffer`, which the next export into that overwrites.
        shapes: of the tensors in it, by PEFT's state-dict keys.
        rank: the one LoRA rank of all modules.
        target_modules: last components of the adapted module paths, sorted.
        fan_in_fan_out: carried over for PEFT; the engines ignore it.
        base_model: what the trainer calls the base model.
        tokens: for each embedding of which rows are replaced, how many it has and which ones; for fused serving only.
        has_stacked_experts: whether all experts of a layer are in one tensor, which requests to load it name.
    """

    flat: Tensor
    shapes: Mapping[str, torch.Size]
    rank: int
    target_modules: tuple[str, ...]
    base_model: str | None = None
    fan_in_fan_out: bool = False
    tokens: Mapping[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    has_stacked_experts: bool = False

    def on_host(self) -> "CanonicalAdapter":
        """A copy on the CPU, which nothing overwrites."""
        return replace(self, flat=self.flat.to("cpu", copy=True))

    # Kept, as experts are tens of thousands of tensors.

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Views of `flat`, by their keys."""
        return split_flat(self.flat, self.shapes)

    @cached_property
    def header(self) -> bytes:
        """What precedes the tensors in a safetensors file of them."""
        return header_of(self.tensors, METADATA)

    @cached_property
    def layout(self) -> tuple[tuple[str, torch.Size], ...]:
        """Keys and shapes of the tensors, in their order."""
        return tuple(self.shapes.items())

    @cached_property
    def checksum(self) -> RepeatedChecksum:
        """Returns that of what `flat` holds when it is called; waits for the device."""
        return RepeatedChecksum(self.flat)

    @property
    def dtype(self) -> torch.dtype:
        return self.flat.dtype

    @property
    def payload_bytes(self) -> int:
        return int(self.flat.nbytes)

    @property
    def parameters(self) -> int:
        return self.flat.numel()

    def config(self) -> dict[str, object]:
        """The content of `adapter_config.json`."""
        tokens = {TOKENS_KEY: {path: list(one) for path, one in self.tokens.items()}} if self.tokens else {}
        return tokens | {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base_model,
            "r": self.rank,
            # Scaling 1: the engines divide lora_alpha by r, and vLLM 0.22 to 0.31 and SGLang ignore patterns.
            "lora_alpha": self.rank,
            # Spelled out, as SGLang (0.5) cannot load a configuration in which they are null.
            "target_modules": list(self.target_modules),
            "bias": "none",
            "use_rslora": False,
            "use_dora": False,
            "rank_pattern": {},
            "alpha_pattern": {},
            "lora_dropout": 0.0,
            "fan_in_fan_out": self.fan_in_fan_out,
            # Also for a difference to an initial adapter: vLLM 0.32 and later refuse an initialisation such as PiSSA.
            "init_lora_weights": True,
            "inference_mode": True,
            # vLLM (0.22 to 0.28) refuses a list here. Fused serving finds the tensors of such modules by their keys.
            "modules_to_save": None,
        }


def fold_scaling(lora_B: Tensor, scaling: float) -> Tensor:
    """Return `lora_B * scaling` in float32, so the server may assume scaling 1.

    Args:
        lora_B: `(out_features, r)`, any float dtype; not modified and not aliased.
    Source: vLLM <= 0.31 ignores `alpha_pattern` and SGLang ignores `use_rslora` (srt/lora/lora.py, 0.5.23).
    """
    # Without `copy`, a float32 parameter comes back itself, and the trained matrix would be multiplied in place.
    return lora_B.detach().to(torch.float32, copy=True).mul_(scaling)


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


def all_finite(flat: Tensor) -> Tensor:
    """Whether there is no NaN and no infinity among the values; a boolean on their device.

    Both show in the extremes, which are found forty times as fast on a CPU as by looking at each value.
    """
    # With a NaN among the values, both results are NaN.
    return torch.stack(torch.aminmax(flat)).isfinite().all()


def pad_packed_modules(modules: list[LoRAModule], shapes: Mapping[str, tuple[int, int]]) -> list[LoRAModule]:
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
            # A model that has the group as one layer, such as `qkv_proj`, lacks the siblings, and needs none.
            if name not in present and name in shapes:
                out_features, in_features = shapes[name]
                # Of rank 1, as the export pads every module to the rank of the adapter.
                zero_A, zero_B = module.lora_A.new_zeros(1, in_features), module.lora_B.new_zeros(out_features, 1)
                completed.append(LoRAModule(name=name, lora_A=zero_A, lora_B=zero_B, scaling=1.0))
                present.add(name)
    return completed


def widened(adapter: CanonicalAdapter) -> CanonicalAdapter:
    """One zero module of `adapter`, made for a base whose hidden size is one larger; fits no base the adapter fits.

    Only the side that meets the hidden state is widened, because the other one may have the same size in a wider
    base, and because a server that splits layers over GPUs cuts that side to its share without checking the size.
    """
    keys = [key for key in adapter.shapes if key.endswith(".lora_A.weight")]
    key_A = next((key for key in keys if _kind(key) in _READ_HIDDEN | _WRITE_HIDDEN), keys[0])
    # By its name: only of linear layers does lora_B follow lora_A, and experts have every lora_A first.
    key_B = key_A.replace(".lora_A.", ".lora_B.")
    wider, taller = int(_kind(key_A) not in _WRITE_HIDDEN), int(_kind(key_A) not in _READ_HIDDEN)
    shapes = {
        key_A: torch.Size((adapter.rank, adapter.shapes[key_A][1] + wider)),
        key_B: torch.Size((adapter.shapes[key_B][0] + taller, adapter.rank)),
    }
    # Zeros, so that a server that accepts it by mistake still computes the base model.
    flat = torch.zeros(sum(map(torch.Size.numel, shapes.values())), dtype=adapter.dtype)
    return replace(adapter, flat=flat, shapes=shapes, tokens={})


def _kind(key: str) -> str:
    """The last component of the module path in a tensor's key."""
    return key.rpartition(".lora_")[0].rpartition(".")[2]


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


def not_finite(
    modules: Iterable[LoRAModule], extras: ExtraTensors, tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> AdapterNotFiniteError:
    """The error for the first of the `tensors` that is not finite, in the order of what they were made of."""
    for module in modules:
        if all(bool(tensors[key].isfinite().all()) for key in tensor_keys(module)):
            continue
        # The trained matrices are finite, so the scaling or the cast made the infinity.
        if module.lora_A.isfinite().all() and module.lora_B.isfinite().all():
            return AdapterNotFiniteError(
                f"The LoRA matrices of {module.name!r}, scaled by {module.scaling:g}, do not fit into {dtype}. The "
                'last published version stays active. Set lora_sync_dtype="bfloat16", if the server runs in it, or '
                "lower the learning rate."
            )
        return AdapterNotFiniteError(
            f"The LoRA matrices of {module.name!r} hold NaN or infinity. Training has diverged; the last published "
            "version stays active. Lower the learning rate or clip gradients, and resume from an earlier checkpoint."
        )
    others = chain(extras.tensors, *(block.keys for block in extras.blocks))
    key = next(key for key in others if not tensors[key].isfinite().all())
    return AdapterNotFiniteError(
        f"The trained tensor {key!r} holds NaN or infinity in {dtype}. The last published version stays active. "
        "Lower the learning rate or clip gradients, and resume from an earlier checkpoint."
    )
