"""Read the active LoRA adapter of a live PEFT model and write it in canonical form.

Knows PEFT's layers, but no launcher: tensors of the model that are sharded must be given whole.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat
from operator import attrgetter, is_
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trl_lora_sync.adapter.canonical import (
    NO_EXTRAS,
    PLAIN,
    CanonicalAdapter,
    ExtraTensors,
    Form,
    LoRAModule,
    one_cpu_thread,
    pad_packed_modules,
)
from trl_lora_sync.adapter.experts import (
    FAMILIES,
    ExpertLayer,
    Family,
    expert_blocks,
    is_read_directly,
    mark_read_directly,
)
from trl_lora_sync.adapter.extras import Extra, find_extras, read_extras
from trl_lora_sync.adapter.fingerprint import Fingerprints
from trl_lora_sync.adapter.flat import FlatBuffer
from trl_lora_sync.adapter.groups import group_of, without_numbers
from trl_lora_sync.adapter.initial import initial_of, remember_initial, unknown_initial
from trl_lora_sync.adapter.modalities import check_adapted_modules
from trl_lora_sync.adapter.module_tree import ModuleTree, weight_of
from trl_lora_sync.adapter.names import WRAPPER_COMPONENTS, Part, ServedNames, trained_path
from trl_lora_sync.adapter.store import write_adapter
from trl_lora_sync.adapter.support import (
    FUSED_WAY_OUT,
    WEIGHTS_WAY_OUT,
    Serving,
    changes_base,
    check_active_adapters,
    check_other_adapters,
    check_peft_config,
    is_embedding_module,
    refuse,
    refuse_experts,
    refuse_module,
    serves_experts,
)
from trl_lora_sync.errors import UnsupportedAdapterError

if TYPE_CHECKING:
    from peft import PeftModel

# LoRA layers with linear matrices that adapt something other than one linear layer.
_OTHER_LAYERS = frozenset({"MultiheadAttention", "ParamWrapper"})
# Of a linear matrix: its own, and what FSDP1 has in their place (torch/distributed/fsdp/_flat_param.py, 2.4 to 2.13).
_PARAMETERS = frozenset({"weight", "bias", "_flat_param"})


@dataclass(frozen=True, kw_only=True)
class ExportedAdapter:
    """What `export_adapter` wrote.

    Attributes:
        path: the directory, holding `adapter_model.safetensors` and `adapter_config.json`.
        rank: the one LoRA rank of all modules.
        dtype: dtype of all tensors.
        target_modules: last components of the adapted module paths.
        payload_bytes: size of all tensors.
    """

    path: Path
    rank: int
    dtype: torch.dtype
    target_modules: tuple[str, ...]
    payload_bytes: int


def export_adapter(
    model: "PeftModel",
    directory: str | Path,
    *,
    dtype: torch.dtype | None = None,
    adapter_name: str | None = None,
) -> ExportedAdapter:
    """Write the canonical adapter of a PEFT model, readable by PEFT, vLLM and SGLang alike.

    The scaling of every module (alpha/r, alpha/sqrt(r), patterns) is folded into `lora_B` in float32 before the cast,
    ranks are padded to one, and nothing but `lora_A` and `lora_B` is written. The model is not modified.

    Args:
        model: a `peft.PeftModel` with whole (not sharded) parameters.
        directory: created by the call and filled in one rename; must not exist yet or be empty.
        dtype: dtype to write. `None` takes the dtype of the base model's weights; `torch.float32` loses nothing.
        adapter_name: which adapter; `None` takes the active one.

    Returns:
        Where it was written, and its rank and size.

    Raises:
        UnsupportedAdapterError: the adapter uses a feature that no server could serve exactly.
        AdapterExportError: the directory is taken or cannot be written; nothing half-written is left.
    """
    adapter = read_adapter(model, dtype=dtype or base_dtype(model), adapter_name=adapter_name)
    path = Path(directory)
    write_adapter(path, adapter)
    return ExportedAdapter(
        path=path,
        rank=adapter.rank,
        dtype=adapter.dtype,
        target_modules=adapter.target_modules,
        payload_bytes=adapter.payload_bytes,
    )


def read_adapter(
    model: "PeftModel",
    *,
    dtype: torch.dtype,
    adapter_name: str | None = None,
    packed_modules: bool = False,
) -> CanonicalAdapter:
    """Copy an adapter of the model in canonical form, on its device; arguments and errors as for `export_adapter`.

    Args:
        packed_modules: whether to complete q/k/v and gate/up with zeros.
    """
    adapter_name = _checked_name(model, adapter_name)
    modules = collect_modules(model, adapter_name)
    # A new buffer, as the result belongs to the caller.
    return _export(model, adapter_name, modules, FlatBuffer(), dtype, packed_modules, NO_EXTRAS)


def _export(
    model: "PeftModel",
    adapter_name: str,
    modules: Sequence[LoRAModule],
    buffer: FlatBuffer,
    dtype: torch.dtype,
    packed_modules: bool,
    extras: ExtraTensors,
) -> CanonicalAdapter:
    config = model.peft_config[adapter_name]
    return buffer.export(
        # The padded list is another one at each export, so `FlatBuffer` lists its copies each time.
        pad_packed_modules(list(modules), _linear_shapes(model)) if packed_modules else modules,
        dtype=dtype,
        base_model=config.base_model_name_or_path,
        fan_in_fan_out=bool(config.fan_in_fan_out),
        extras=extras,
    )


class AdapterReader:
    """Reads the active adapter of a model again and again, with what is slow about it remembered.

    The adapter stays on the model's device, in a `FlatBuffer`: that is memory for one adapter in the dtype that is
    written, and up to 32 MB of scratch, and as much for fingerprints and for the checksum. The difference to an initial
    adapter takes twice the adapter in float32 besides, while it is read.

    Args:
        serving: `"fused"` to read what only fused serving can serve as well, see `adapter.extras`.
        proves_groups: whether modules that see images may have an adapter.

    Attributes:
        last_linears: what the last call of `linears` returned.
        extras: what is trained beside them; empty unless serving is fused.
        scaled_layers: all of PEFT's layers with the adapter, as it found them.
        base_layers: what lies below each of these.
    """

    def __init__(self, serving: Serving = "runtime", *, proves_groups: bool = False) -> None:
        self._serving = serving
        self._proves_groups = proves_groups
        self.extras: list[Extra] = []
        self._experts: list[ExpertLayer] = []
        self.buffer = FlatBuffer()
        self.fingerprints = Fingerprints()
        self._tree: ModuleTree | None = None
        self._layers: list[_Layer] = []
        self.scaled_layers: list[Any] = []
        self.base_layers: list[Any] = []
        self._others: list[_OtherLayer] = []
        self._has_initial = False
        self.last_linears: list[nn.Linear] = []
        self._adapter_name = ""
        # The same tuple as long as it holds the matrices that are trained; None if it has to be made for each sync.
        self._modules: tuple[LoRAModule, ...] | None = None
        self._as_read: tuple[list[Tensor], tuple[float, ...]] = ([], ())  # what it holds, in the order of the layers
        self._checked: list[object] | None = None  # what `_look` found when all layers were checked
        self._sizes: list[int] = []  # of the matrices in `_modules`

    def linears(self, model: "PeftModel") -> list[nn.Linear]:
        """The linear modules whose weights are the matrices of the active adapter, in model order; errors as a read.

        To find them names every module of the model, which takes longer than to copy the adapter, and is done again
        only if a module has come, gone or been replaced.
        """
        adapter_name = _checked_name(model, None, self._serving, proves_groups=self._proves_groups)
        if self._tree is None or not self._tree.is_of(model) or adapter_name != self._adapter_name:
            # First: if a layer is refused below, `read_again` may not repeat what was read of the layers before.
            self._modules = self._checked = None
            self._layers = find_layers(model, adapter_name, self._serving, proves_groups=self._proves_groups)
            adapted = _adapted(model, adapter_name)
            self.scaled_layers = list(adapted.values())
            # Here and not at each sync, as PEFT's function ends with an exception in each layer.
            self.base_layers = [layer.get_base_layer() for layer in self.scaled_layers]
            self._others = _other_layers(model, adapter_name)
            self._has_initial = any(layer.initial is not None for layer in self._layers)
            self._experts = _find_experts(model, adapter_name, adapted, self._serving)
            self.extras = find_extras(model, adapter_name, adapted) if self._serving == "fused" else []
            pairs = [layer.matrices for layer in self._layers] + [layer.matrices for layer in self._experts]
            self.last_linears = [matrix for pair in pairs for matrix in pair]
            # Last: after an error above, the tree or the name is still the old one, so the next call searches again.
            self._tree, self._adapter_name = ModuleTree(model), adapter_name
        return self.last_linears

    @property
    def reads_parameters(self) -> bool:
        """Whether some of what is trained can be read only if the model is whole."""
        return bool(self.extras or self._experts) or any(is_read_directly(one) for one in self.last_linears)

    def groups(self) -> dict[str, dict[str, tuple[nn.Linear, ...]]]:
        """What the last call of `linears` returned, by group and by the path of the layer in the served model.

        A module of which only `extras` are trained has no matrices.
        """
        found: dict[str, dict[str, tuple[nn.Linear, ...]]] = {}
        for layer in self._layers:
            found.setdefault(group_of(layer.path), {})[layer.path] = layer.matrices
        for expert in self._experts:
            found.setdefault("experts", {})[f"{expert.path}.{expert.parameter}"] = expert.matrices
        for one in self.extras:
            if one.trial_size is not None:
                found.setdefault(group_of(one.path), {}).setdefault(one.path, ())
        return found

    def initial(self) -> dict[Any, LoRAModule]:
        """What an initialisation took out of the base weights, by PEFT's layers."""
        return {one.layer: found for one in self._layers if (found := one.initial) is not None}

    def scalings(self) -> tuple[float, ...]:
        """Of all layers of the last `linears` at this moment, embeddings and experts included."""
        return tuple(float(layer.scaling[self._adapter_name]) for layer in self.scaled_layers)

    def check(self) -> None:
        """Refuse layers that compute something other than plain LoRA at this moment, as `read_adapter` does."""
        found = self._look()
        # A parameter with other `data` stays the same object. A rank of 1 would be copied to all rows of the old one.
        sizes = [weight.numel() for weight in found[: 2 * len(self._layers)] if isinstance(weight, Tensor)]
        # By identity: `==` of two parameters compares their elements on the device, and waits for it.
        if self._checked is None or sizes != self._sizes or not all(map(is_, found, self._checked)):
            self._modules = self._checked = None
            for layer in self._layers:
                # `_checked` is still None here, so a layer that is refused now is checked at the next sync as well.
                layer.check()
            for other in self._others:
                other.check()
            self._checked, self._sizes = found, sizes
        for expert in self._experts:
            if oddity := expert.oddity():
                raise _strange(f"{expert.path}.{expert.parameter}", expert.layer, oddity)

    def _look(self) -> list[object]:
        """All on which it depends what PEFT's layers compute, but for the values of tensors.

        Taken from many layers at once, which is faster than to check each.
        """
        layers, name = [one.layer for one in self._layers], repeat(self._adapter_name)
        all_layers = layers + [one.layer for one in self._others]
        # The dictionaries, as `matrix.weight` is a call of `nn.Module.__getattr__`, in Python, for each matrix.
        parameters = [matrix._parameters for one in self._layers for matrix in one.matrices]
        return [
            *map(dict.get, parameters, repeat("weight")),
            *map(dict.get, parameters, repeat("bias")),
            *map(dict.get, map(attrgetter("scaling"), layers), name),
            *map(dict.get, map(attrgetter("lora_variant"), layers), name),
            *map(attrgetter("merged"), all_layers),
            *map(attrgetter("disable_adapters"), all_layers),
            *map(_active_names, all_layers),
        ]

    def modules(self, gathered: Mapping[nn.Module, Tensor] | None = None) -> Sequence[LoRAModule]:
        """As `collect_modules`, of the layers that the last call of `linears` was about."""
        self.check()
        # Gathered weights, and differences to an initial adapter, are new tensors at each sync, so none is kept.
        if gathered or self._has_initial:
            return _read(self._layers, gathered)
        if self._modules is None:
            # PEFT changes a tensor's scaling in place, which `_look` does not see (0.21, utils/hotswap.py).
            if any(layer.is_new_at_each_read for layer in self._layers):
                return _read(self._layers, None)
            # A tuple, as `FlatBuffer` keeps its copies only for the very tuple that it was given before.
            self._modules = tuple(_read(self._layers, None))
            self._as_read = [*map(weight_of, self.last_linears)], self.scalings()
        return self._modules

    def read(
        self,
        model: "PeftModel",
        *,
        dtype: torch.dtype,
        form: Form = PLAIN,
        gathered: Mapping[nn.Module, Tensor] | None = None,
    ) -> CanonicalAdapter:
        """As `read_adapter`, of the `modules`; valid until the next read."""
        return self._read(model, self.modules(gathered), self.buffer, dtype, form, gathered)

    def read_again(self, model: "PeftModel", *, dtype: torch.dtype, form: Form = PLAIN) -> CanonicalAdapter | None:
        """As `read`, of the matrices that were read before, without a look at the model.

        To be used only if `is_as_read` after a call of `linears`. None where a look is needed first.
        """
        # Extras and experts are read from their layers each time, and zeros for siblings need the shapes of the model.
        if self._modules is None or self.extras or self._experts or form.packed_modules:
            return None
        return _export(model, self._adapter_name, self._modules, self.buffer, dtype, False, NO_EXTRAS)

    @property
    def as_read(self) -> tuple[list[Tensor], tuple[float, ...]]:
        """The weights of the `linears` and the scalings that `read_again` reads, whatever the model has by now."""
        return self._as_read

    def is_as_read(self) -> bool:
        """Whether the layers of the last `linears` compute with what was read; errors as of `check`."""
        self.check()
        # `linears` and `check` clear this at any change.
        return self._modules is not None

    def read_trial(
        self, model: "PeftModel", weights: Mapping[Any, Tensor], *, dtype: torch.dtype, form: Form = PLAIN
    ) -> CanonicalAdapter:
        """As `read`, of other matrices in the place of the adapter's; stays valid.

        Args:
            weights: for each of the `linears`, and each parameter of the `extras`.
        """
        # Not in `self.buffer`: a server that comes back is tried with this while the trainer reads a version there.
        # Nor is the adapter checked, which TRL may have disabled for its reference policy at that moment.
        return self._read(model, _read(self._layers, weights), FlatBuffer(), dtype, form, weights)

    def _read(
        self,
        model: "PeftModel",
        modules: Sequence[LoRAModule],
        buffer: FlatBuffer,
        dtype: torch.dtype,
        form: Form,
        gathered: Mapping[nn.Module, Tensor] | None,
    ) -> CanonicalAdapter:
        instead = gathered or {}
        extras = read_extras(self.extras, instead, dtype) if self.extras else NO_EXTRAS
        if self._experts:
            # vLLM gets as many tensors as there are layers, and not experts, where it takes that, and loads them
            # faster. Of the two engines, SGLang alone gets packed modules.
            is_stacked = not form.packed_modules and (form.stacked_experts or self._experts[0].family.is_always_stacked)
            # Ranks differ within a layer: where gate and up were named apart, PEFT gives gate_up_proj twice the rank
            # (0.21, utils/transformers_weight_conversion.py).
            rank = max(layer.rank for layer in self._experts)
            whole = max(rank, *(module.rank for module in modules))
            blocks = expert_blocks(
                self._experts, lambda matrix: instead.get(matrix, matrix.weight), whole, is_stacked=is_stacked
            )
            extras = replace(extras, blocks=blocks, rank=rank, has_stacked_experts=is_stacked)
        return _export(model, self._adapter_name, modules, buffer, dtype, form.packed_modules, extras)

    def release(self) -> None:
        """Release the memory; the next read allocates it again."""
        self.buffer.release()
        self.fingerprints.forget()


def base_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of the base model's floating-point weights, which is what a server computes in by default."""
    for name, parameter in model.named_parameters():
        # Weights in 4 or 8 bits are stored as integers, and PEFT keeps the adapter of a 16-bit base in float32.
        if parameter.is_floating_point() and "lora_" not in name:
            return parameter.dtype
    return torch.float32


def collect_modules(model: nn.Module, adapter_name: str) -> list[LoRAModule]:
    """List the layers that carry `adapter_name`, in model order, with the scaling PEFT applies to each.

    Raises:
        UnsupportedAdapterError: a layer computes something other than `scaling * lora_B @ lora_A`.
    """
    return _read(find_layers(model, adapter_name))


def remember_initial_adapter(
    model: "PeftModel", *, is_new: bool, serving: Serving = "runtime", proves_groups: bool = False
) -> dict[nn.Module, Tensor]:
    """Copy the active adapter while it is untrained, if its initialisation took it out of the base weights.

    Without such a copy, a model with that initialisation is refused by all the rest here.

    Args:
        is_new: whether the adapter is known to be untrained; else it is compared with the checkpoint.

    Returns:
        The initial matrices by the modules that hold the trained ones; empty if the base is the checkpoint's.

    Raises:
        UnsupportedAdapterError: the initial adapter cannot be known, or the base lacks more than that.
    """
    adapter_name = _checked_name(model, None, serving, proves_groups=proves_groups)
    # Not `find_layers`, which refuses a layer whose initial matrices are still to be copied.
    layers = _plain_layers(model, adapter_name, serving, proves_groups=proves_groups)
    if changes_base(model.peft_config[adapter_name].init_lora_weights):
        layers_of = [(layer.current({}), layer.layer, layer.matrices[0]) for layer in layers]
        remember_initial(model, layers_of, is_new=is_new)
    return {
        matrix: weight
        for layer in layers
        for initial in [layer.initial]
        if initial is not None
        for matrix, weight in zip(layer.matrices, (initial.lora_A, initial.lora_B), strict=True)
    }


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """A layer of the model that carries the adapter.

    Attributes:
        path: of the layer in the served model.
        parts: what it is there.
        matrices: the modules whose weights are `lora_A` and `lora_B`.
        is_active: whether the model computes with this adapter alone, as far as the model itself knows.
    """

    path: str
    parts: tuple[Part, ...]
    layer: Any
    adapter_name: str
    matrices: tuple[Any, Any]
    is_active: bool
    serving: Serving = "runtime"

    def check(self) -> None:
        """Refuse a layer that computes something other than plain LoRA, at this moment."""
        if oddity := self._odd_modules or self._odd_state():
            raise _strange(self.path, self.layer, oddity)

    @cached_property
    def _odd_modules(self) -> str | None:
        """What makes the layer more than plain LoRA for as long as its modules are these, in words, or None."""
        # A `ParamWrapper` of one matrix computes as a linear layer (0.21, `ParamWrapper.get_delta_weight`).
        # `_routers` has marked the matrices of a router whose name on the server is known.
        is_router = type(self.layer).__name__ == "ParamWrapper" and is_read_directly(self.matrices[0])
        if type(self.layer).__name__ in _OTHER_LAYERS and not is_router:
            return "does not adapt one linear layer"
        for matrix in self.matrices:
            if not isinstance(matrix, nn.Linear):
                return f"adapts with {type(matrix).__name__} instead of Linear matrices"
        return None

    def _odd_state(self) -> str | None:
        """What makes it more than plain LoRA at this moment, in words, or None."""
        layer, (lora_A, lora_B) = self.layer, self.matrices
        is_fused = self.serving == "fused"
        # As by `torch.nn.utils.parametrizations` and `prune`. The weight is then another tensor at each read, or the
        # one of the last forward pass.
        if any(matrix._modules or matrix._parameters.keys() - _PARAMETERS for matrix in self.matrices):
            return "computes a LoRA matrix from other parameters"
        if lora_A.bias is not None or (lora_B.bias is not None and not is_fused):
            return "has a bias on a LoRA matrix"
        variant = layer.lora_variant.get(self.adapter_name)
        if variant is not None and not (is_fused and type(variant).__name__ == "DoraLinearVariant"):
            return f"uses the variant {type(variant).__name__}"
        # A merged layer computes with the base weight alone (0.21, `Linear.forward`), so its matrices are not trained.
        if layer.merged:
            return "is merged into the base weights at the moment (call model.unmerge_adapter() first)"
        if layer.disable_adapters:
            return "is disabled at the moment (call model.enable_adapter_layers() first)"
        # A call of the layer's own `set_adapter` leaves the model's name as it was.
        if self.is_active and list(layer.active_adapters) != [self.adapter_name]:
            return f"has other active adapters at the moment (call model.set_adapter({self.adapter_name!r}) first)"
        return None

    @property
    def is_new_at_each_read(self) -> bool:
        """Whether what was read may go out of date although the layer's parameters stay the same objects.

        So do rows of `lora_B`, whose `data` may be replaced, and a scaling that is a tensor, as after PEFT's
        `prepare_model_for_compiled_hotswap`.
        """
        return self.parts[0].parts > 1 or isinstance(self.layer.scaling[self.adapter_name], Tensor)

    @property
    def initial(self) -> LoRAModule | None:
        """The matrices that the base weight lacks, if there are any and they are known."""
        return initial_of(self.matrices[0])

    def current(self, gathered: Mapping[nn.Module, Tensor]) -> LoRAModule:
        """The matrices as they are trained."""
        lora_A, lora_B = (gathered.get(matrix, matrix.weight) for matrix in self.matrices)
        scaling = float(self.layer.scaling[self.adapter_name])
        return LoRAModule(name=self.path, lora_A=lora_A, lora_B=lora_B, scaling=scaling)

    def read(self, gathered: Mapping[nn.Module, Tensor]) -> list[LoRAModule]:
        """What the layer adds to the checkpoint's base, for each of its parts."""
        module, initial = self.current(gathered), self.initial
        whole = module if initial is None else module.less(initial)
        return [part.of(whole) for part in self.parts]


@dataclass(frozen=True, kw_only=True)
class _OtherLayer:
    """A layer of PEFT's without matrices of the adapter: it must compute its base alone, or with the adapter's rows.

    Attributes:
        path: in the trained model.
        is_active: as for `_Layer`.
    """

    path: str
    layer: Any
    adapter_name: str
    is_active: bool

    def check(self) -> None:
        """Refuse a layer that computes with another adapter at this moment."""
        layer = self.layer
        # A layer of another kind, which was in the model before, may have an adapter of the same name.
        is_ours = hasattr(layer, "lora_A") or hasattr(layer, "trainable_tokens_delta")
        others = [
            name
            for name in layer.active_adapters
            if not (is_ours and name == self.adapter_name)
            and any(name in getattr(layer, kind) for kind in layer.adapter_layer_names)
        ]
        if layer.merged:
            names, how = layer.merged_adapters, "merged into its base weights (call model.unmerge_adapter() first)"
        elif self.is_active and others and not layer.disable_adapters:
            names, how = others, f"active (call model.set_adapter({self.adapter_name!r}) first)"
        else:
            return
        raise UnsupportedAdapterError(
            f"The layer {self.path!r} ({type(layer).__name__}) has {', '.join(map(repr, names))} {how}. Only "
            f"{self.adapter_name!r} is served, and the server's base is the checkpoint's, so the trainer would compute "
            f"something else. Use one adapter, {WEIGHTS_WAY_OUT}."
        )


def _strange(path: str, layer: Any, oddity: str) -> UnsupportedAdapterError:
    return UnsupportedAdapterError(
        f"The LoRA layer {path!r} ({type(layer).__name__}) {oddity}, so its product lora_B @ lora_A "
        "is not what the trainer computes and no server could serve it exactly. Use plain LoRA on linear "
        f"layers, {WEIGHTS_WAY_OUT}."
    )


def _active_names(layer: Any) -> str:
    # One object for equal names, as `check` compares by identity. PEFT's `set_adapter` makes a new list at each call,
    # as for the teacher of SDPO and back.
    return sys.intern("\n".join(layer.active_adapters))


def _read(layers: list[_Layer], gathered: Mapping[nn.Module, Tensor] | None = None) -> list[LoRAModule]:
    # A difference to an initial adapter takes several small operations for each layer.
    with one_cpu_thread():
        return [module for layer in layers for module in layer.read(gathered or {})]


def find_layers(
    model: nn.Module, adapter_name: str, serving: Serving = "runtime", *, proves_groups: bool = False
) -> list[_Layer]:
    """The linear layers that carry the adapter, in model order, all of them plain LoRA, and served as such."""
    layers = _plain_layers(model, adapter_name, serving, proves_groups=proves_groups)
    config = getattr(model, "peft_config", {}).get(adapter_name)
    if changes_base(getattr(config, "init_lora_weights", None)) and any(layer.initial is None for layer in layers):
        raise unknown_initial(config)
    return layers


def _adapted(model: nn.Module, adapter_name: str) -> dict[str, Any]:
    """PEFT's layers that carry the adapter, in model order, by their paths."""
    from peft.tuners.lora import LoraLayer

    return {
        trained_path(path): layer
        for path, layer in model.named_modules()
        if isinstance(layer, LoraLayer) and (adapter_name in layer.lora_A or adapter_name in layer.lora_embedding_A)
    }


def _is_active(model: Any, adapter_name: str) -> bool:
    """Whether a model of PEFT's computes with this adapter alone, as far as it knows."""
    return hasattr(model, "get_base_model") and list(model.active_adapters) == [adapter_name]


def _other_layers(model: nn.Module, adapter_name: str) -> list[_OtherLayer]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    is_active = _is_active(model, adapter_name)
    return [
        _OtherLayer(path=trained_path(path), layer=layer, adapter_name=adapter_name, is_active=is_active)
        for path, layer in model.named_modules()
        if isinstance(layer, BaseTunerLayer) and adapter_name not in getattr(layer, "lora_A", ())
    ]


def _is_of_experts(layer: Any) -> bool:
    return type(layer).__name__ == "ParamWrapper" and layer.num_experts > 1


def _family(model: Any) -> Family:
    """The names of the experts on a server; raises UnsupportedAdapterError for a family whose names are not known."""
    name = str(getattr(model.config, "model_type", ""))
    family = FAMILIES.get(name)
    if family is None:
        raise refuse_experts(model.active_peft_config, name)
    return family


def _find_experts(model: Any, adapter_name: str, adapted: Mapping[str, Any], serving: Serving) -> list[ExpertLayer]:
    """The parameters of experts that carry the adapter."""
    found = {path: layer for path, layer in adapted.items() if _is_of_experts(layer)}
    if not found:
        return []
    family, names = _family(model), ServedNames.of(model)
    # Fused serving writes each expert's matrices by their names in the checkpoint, which this family does not have.
    if serving == "fused" and family.is_always_stacked:
        raise refuse_experts(model.active_peft_config, str(model.config.model_type))
    layers = []
    for path, layer in found.items():
        # The wrappers of two parameters are one inside the other.
        served = names.served(path.removesuffix(".base_layer")).replace(".mlp.experts", f".{family.moe}.experts")
        matrices = _matrices(layer, adapter_name)
        # PEFT multiplies these weights without calling the modules (0.21, `ParamWrapper`), so no forward hook sees
        # them, and a trial adapter replaces the weights themselves (`generation.scoring.computing_with`).
        mark_read_directly(matrices)
        layers.append(
            ExpertLayer(
                path=served,
                parameter=layer.parameter_name,
                layer=layer,
                adapter_name=adapter_name,
                family=family,
                matrices=matrices,
                is_active=_is_active(model, adapter_name),
            )
        )
    return layers


def _routers(model: Any, adapted: Mapping[str, Any], serving: Serving) -> dict[str, str]:
    """The served paths of adapted routers that Transformers keeps in a parameter, by their paths in the trainer.

    Raises:
        UnsupportedAdapterError: the server ignores them.
    """
    found = [
        path for path, layer in adapted.items() if type(layer).__name__ == "ParamWrapper" and layer.num_experts == 1
    ]
    if not found:
        return {}
    family = _family(model)
    if not family.has_router and serving != "fused":
        config = model.active_peft_config
        others = sorted(name for name in config.target_parameters if "gate.weight" not in name)
        raise refuse(
            f"A LoRA adapter on the router ({', '.join(without_numbers(found))})",
            'vLLM ignores it for this family of models, without an error. On this model, target_modules="all-linear" '
            "includes it, and exclude_modules does not keep it out",
            f"Set target_modules={sorted(config.target_modules)!r} and target_parameters={others!r}, or "
            f"{FUSED_WAY_OUT}",
        )
    for path in found:
        mark_read_directly(_matrices(adapted[path], model.active_adapter))
    return {path: path.replace(".mlp.gate", f".{family.moe}.gate") for path in found}


def _plain_layers(model: nn.Module, adapter_name: str, serving: Serving, *, proves_groups: bool) -> list[_Layer]:
    """The linear layers that carry the adapter, in model order, all of them plain LoRA on some base weight."""
    adapted = _adapted(model, adapter_name)
    takes_experts = serves_experts(serving, proves_groups=proves_groups)
    found = [
        (path, layer)
        for path, layer in adapted.items()
        # Adapters on embeddings are read as extras, and these experts as blocks.
        if adapter_name not in layer.lora_embedding_A and not (takes_experts and _is_of_experts(layer))
    ]
    if not adapted:
        raise UnsupportedAdapterError(
            f"The adapter {adapter_name!r} has no LoRA layer in this model, so there is nothing to serve. "
            "Check target_modules of the LoraConfig. One linear layer is needed at least. PEFT's merge_and_unload() "
            "and unload() take them out of the model that they are called on: call them on a copy "
            "(copy.deepcopy(model))."
        )
    for path, layer in adapted.items():
        if serving != "fused" and (adapter_name in layer.lora_embedding_A or is_embedding_module(path)):
            raise refuse_module(path)
    if not found:
        # Its file would have no `target_modules`, and no engine was tried with that.
        raise UnsupportedAdapterError(
            f"The adapter {adapter_name!r} is on no linear layer, but on {', '.join(without_numbers(adapted))} alone. "
            "Add linear layers, such as q_proj, to target_modules of the LoraConfig. One linear layer is needed at "
            "least."
        )
    peft_model: Any = model
    is_active = _is_active(model, adapter_name)
    if hasattr(peft_model, "get_base_model"):
        config = peft_model.peft_config[adapter_name]
        check_adapted_modules(peft_model.get_base_model(), adapted, config, proves_groups=proves_groups)
        # Here and not in `check_peft_config`, as PEFT sets the field for a Conv1D and unsets it for a Linear.
        for path, layer in found:
            if serving == "fused" and (config.fan_in_fan_out or getattr(layer, "fan_in_fan_out", False)):
                raise refuse(
                    f"A LoRA adapter on {path!r} with fan_in_fan_out=True",
                    "a server with fused serving adds it to weights as a Linear keeps them, and a Conv1D, such as "
                    "GPT-2's, keeps its weight transposed",
                    'Unset fan_in_fan_out unless the layer is a Conv1D, or set lora_sync_serving="runtime"',
                )
    names = ServedNames.of(model)
    if takes_experts:
        # Before the layers are checked below: without its mark a router counts as a layer that is not linear.
        names = names.with_routers(_routers(model, adapted, serving))
    layers = [
        _Layer(
            path=names.served(path),
            # Fused serving finds the places of a layer's weight by itself, under the name in the checkpoint.
            parts=(Part(names.served(path)),) if serving == "fused" else names.parts(path),
            layer=layer,
            adapter_name=adapter_name,
            matrices=_matrices(layer, adapter_name),
            is_active=is_active,
            serving=serving,
        )
        for path, layer in found
    ]
    for one in layers:
        one.check()
    for other in _other_layers(model, adapter_name):
        other.check()
    return layers


def active_dropout(model: "PeftModel") -> float:
    """The largest `lora_dropout` that the active adapter's layers have now; TRL's `disable_dropout` sets it to 0."""
    adapter_name = check_active_adapters(model.active_adapters)
    layers = (module.lora_dropout for module in model.modules() if hasattr(module, "lora_dropout"))
    # PEFT puts an Identity, which has no `p`, where the configuration has 0.
    shares = (float(getattr(layer[adapter_name], "p", 0.0)) for layer in layers if adapter_name in layer)
    return max(shares, default=0.0)


def _linear_shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """`(out_features, in_features)` of every linear layer of the base model, quantised ones included."""
    names = ServedNames.of(model)
    return {
        # PEFT's layer has both sizes and stands at the path of the layer that it wraps, quantised or not.
        names.served(path): (layer.out_features, layer.in_features)
        for path, layer in model.named_modules()
        if "lora_" not in path and hasattr(layer, "in_features") and hasattr(layer, "out_features")
    }


def _checked_name(
    model: "PeftModel", adapter_name: str | None, serving: Serving = "runtime", *, proves_groups: bool = False
) -> str:
    """The adapter to read, by default the active one, whose configuration can be served."""
    if not hasattr(model, "peft_config"):
        # Raises, because there is no configuration at all.
        check_peft_config(None)
    adapter_name = adapter_name or check_active_adapters(model.active_adapters)
    if adapter_name not in model.peft_config:
        known = ", ".join(repr(name) for name in model.peft_config)
        raise UnsupportedAdapterError(f"The model has no adapter {adapter_name!r}. Choose one of {known}.")
    # At each read, as an adapter may be added or made active at any time, by TRL or by the user.
    config = model.peft_config[adapter_name]
    check_peft_config(config, is_of_model=True, serving=serving, proves_groups=proves_groups)
    check_other_adapters(model.peft_config, adapter_name)
    return adapter_name


def _matrices(layer: Any, adapter_name: str) -> tuple[Any, Any]:
    return _unwrapped(layer.lora_A[adapter_name]), _unwrapped(layer.lora_B[adapter_name])


def _unwrapped(module: nn.Module) -> nn.Module:
    """The layer itself; FSDP1 wraps each LoRA matrix when it follows PEFT's wrap policy."""
    wrapped = next((module._modules[name] for name in WRAPPER_COMPONENTS if name in module._modules), None)
    return module if wrapped is None else _unwrapped(wrapped)
