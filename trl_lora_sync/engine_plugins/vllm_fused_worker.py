"""What each worker of a vLLM server does for fused serving; given to vLLM as its `--worker-extension-cls`.

    vllm serve MODEL --worker-extension-cls trl_lora_sync.engine_plugins.vllm_fused_worker.FusedWorker ...

Its methods are called through `collective_rpc`, on all workers alike, by the middleware in `vllm_fused`. They answer
with plain values and raise nothing: vLLM (0.26 to 0.33) stops collecting answers at the first worker that fails, and
would take the answers of the others for answers to its next call.

Environment of the server:
    TRL_LORA_SYNC_FUSED_BASE   where W0 is kept: gpu, host, or auto (the default) for the GPU if it has room; none for
                               no copy: adapters are folded into the weights, and taken out bit for bit
"""

import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trl_lora_sync.engine_plugins import logger
from trl_lora_sync.engine_plugins.cuda_ipc import visible_gpus
from trl_lora_sync.engine_plugins.folded_weights import FoldedWeights
from trl_lora_sync.engine_plugins.fused_file import AdapterFileError, read_head
from trl_lora_sync.engine_plugins.fused_placement import PlacementError, WeightSlice, copying_only, trace_weight_slices
from trl_lora_sync.engine_plugins.fused_weights import (
    FusedAdapter,
    InPlace,
    KnownLaunches,
    Reader,
    Target,
    copies_of,
    fuse,
)
from trl_lora_sync.engine_plugins.safetensors_file import DTYPE_NAMES

PLACE_VARIABLE = "TRL_LORA_SYNC_FUSED_BASE"

_PLACES = ("auto", "gpu", "host", "none")
_EXPERT_WEIGHTS = ("w13_weight", "w2_weight")
# Kernels that leave the weights of experts as they were loaded, and those on a CPU, which pack them.
# Source: `convert_to_unquantized_kernel_format` in vllm/model_executor/layers/fused_moe/oracle/unquantized.py (0.31).
_EXPERT_BACKENDS = ("TRITON", "CPU")
Answer = dict[str, Any]


class FusedWorker:
    """Mixed into vLLM's worker, whose `get_model` and `vllm_config` it uses. All names begin with `lora_sync_`."""

    # vLLM refuses an extension that shares any name with its worker (v1/worker/worker_base.py, 0.31).
    def lora_sync_state(self) -> Answer:
        """Which adapter is in the weights of this worker, and where the base is kept."""
        return answered(lambda: _model_of(self).state())

    def lora_sync_prepare(self, name: str, path: str | None) -> Answer:
        """Begin a change: read and check an adapter and find where it goes. Touches no weight.

        Args:
            path: None for the base.
        """
        return answered(lambda: _model_of(self).prepare(name, path))

    def lora_sync_apply(self, name: str) -> Answer:
        """Put what was prepared into the weights."""
        return answered(lambda: _model_of(self).apply(name))

    def lora_sync_undo(self) -> Answer:
        """End a change that failed: put back what was there before, if `lora_sync_apply` has touched the weights."""
        return answered(lambda: _model_of(self).undo())

    def lora_sync_equals_base(self) -> Answer:
        """Whether all weights that were ever changed are W0, bit for bit."""
        return answered(lambda: _model_of(self).equals_base())


def answered(act: Callable[[], Answer]) -> Answer:
    try:
        return {"ok": True, **act()}
    except AdapterFileError as error:
        return {"ok": False, "status": 404 if error.is_missing else 422, "error": str(error)}
    except (PlacementError, UnsuitableError) as error:
        return {"ok": False, "status": 422, "error": str(error)}
    except Exception as error:  # the client gets the error, and the worker goes on
        logger.error("%s", traceback.format_exc())
        return {"ok": False, "status": 500, "error": f"{type(error).__name__}: {error}"}


class UnsuitableError(Exception):
    """The served model is none whose weights can be replaced."""


def _model_of(worker: Any) -> "FusedModel":
    if not hasattr(worker, "_lora_sync_model"):
        # At the first call, when the model is loaded. Nothing is kept of an error, so each call reports it.
        worker._lora_sync_model = FusedModel(worker)
    model: FusedModel = worker._lora_sync_model
    return model


class FusedModel:
    """The served model of one worker.

    All of its adapters are in the memory of the device: the one in the weights, to go back to, and the next one.
    """

    def __init__(self, worker: Any) -> None:
        self._config = worker.vllm_config
        self._model: Any = worker.get_model()
        check_server(self._config)
        place = os.environ.get(PLACE_VARIABLE) or "auto"
        if place not in _PLACES:
            raise UnsuitableError(f"{PLACE_VARIABLE}={place!r} is not known. Set it to one of {', '.join(_PLACES)}.")
        self._place = place
        self._kept_in = ""
        self._linears = _linears_of(self._model)
        self._embeddings = _embeddings_of(self._model)
        self._experts = experts_of(self._model)
        # On a CPU vLLM packs linear weights and leaves empty ones (`dispatch_cpu_unquantized_gemm`, 0.31).
        self._packed = {owner for owner, layer in self._linears.items() if layer.weight.numel() == 0}
        self._packed |= {owner for owner, layer in self._experts.items() if _backend_of(layer) == "CPU"}
        self._packed_experts: dict[int, _PackedExperts] = {}
        self._reader = Reader(next(self._model.parameters()).device)
        self._targets: dict[str, Target] = {}
        # Instead of targets, where no copy of the base is kept.
        self._folded = FoldedWeights() if place == "none" else None
        self.pieces: dict[str, list[WeightSlice]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        # What was placed last, as the head of its file lists it.
        self._fitting: object = None
        # Placed, and not yet seen to be complete over all workers.
        self._unproved: set[str] = set()
        # The same, of the change that `undo` would end.
        self._just_placed: set[str] = set()
        self._launches = KnownLaunches()
        self._active: FusedAdapter | None = None
        # With its name, as the base is None here too.
        self._prepared: tuple[str, FusedAdapter | None] | None = None
        # What `undo` puts back, until the next change begins.
        self._before: FusedAdapter | None = None
        self._is_changing = False

    def state(self) -> Answer:
        copied = sum(one.base.numel() * one.base.element_size() for one in self._targets.values())
        return {
            "active": self._active.name if self._active is not None else None,
            "base_copy": self._kept_in,
            "base_copy_bytes": copied if self._folded is None else self._folded.kept_bytes,
            "modules": sorted(self.pieces),
            "gpus": visible_gpus() if self._reader.device.type == "cuda" else [],
            "dtype": DTYPE_NAMES.get(self._config.model_config.dtype, ""),
        }

    def prepare(self, name: str, path: str | None) -> Answer:
        started = time.perf_counter()
        # The change before this one is over. An adapter that nothing refers to leaves its memory to the next one.
        self._prepared = self._before = None
        self._is_changing = False
        self._just_placed = set()
        if path is None:
            self._prepared = (name, None)
            return {"place_s": 0.0, "read_s": 0.0, "placed": {}}
        adapter = read_head(path)
        changed = adapter.shapes()
        if adapter.content is not self._fitting:
            if self._folded is not None:
                self._folded.check_content(adapter.content)
            self._place_new(changed)
            # Of this adapter only: what another one has placed may overlap with it, as each starts from the base.
            self._check_overlaps(changed)
            self.check_whole_rows(adapter.content.magnitudes, changed)
            # After all checks, so that an adapter that is refused is checked in full the next time as well.
            self._fitting = adapter.content
            # They write the rectangles that were known when they were made, of which there may be more now.
            self._launches.forget()
        placed = time.perf_counter()
        self._prepared = (name, self._reader.read(name, adapter))
        return {
            "place_s": placed - started,
            "read_s": time.perf_counter() - placed,
            # Of new modules only, as experts are tens of thousands of them, and every worker lists them.
            "placed": {
                module: {
                    "shape": [1, *self._shapes[module]][-2:],
                    "pieces": [[*piece.rows, *piece.columns] for piece in self.pieces[module]],
                }
                for module in sorted(self._unproved & changed.keys())
            },
        }

    def apply(self, name: str) -> Answer:
        if self._prepared is None or self._prepared[0] != name:
            raise UnsuitableError(f"{name!r} was not prepared on this worker.")
        started = time.perf_counter()
        # Noted before the first write, so that `undo` works however far this comes.
        self._before, self._is_changing = self._active, True
        self._active, self._prepared = self._prepared[1], None
        # Proved unless `undo` follows, as the middleware looks at what all workers have of them.
        self._just_placed, self._unproved = self._unproved, set()
        self._write()
        return {"fuse_s": time.perf_counter() - started}

    def undo(self) -> Answer:
        self._prepared = None
        self._unproved |= self._just_placed
        self._just_placed = set()
        self._fitting = None
        # A worker that was only prepared, because another one failed, has nothing to write.
        if self._is_changing:
            self._active = self._before
            self._write()
        self._before, self._is_changing = None, False
        # They may fit no model as a whole, so the next adapter that has them is looked at again. After the write, by
        # which their base comes back.
        for module in self._unproved:
            del self.pieces[module], self._shapes[module]
        self._unproved.clear()
        return {}

    def equals_base(self) -> Answer:
        if self._folded is not None:
            return self._folded.compared()
        # Of a packed weight nothing is left to compare with its base.
        readable = [one for one in self._targets.values() if isinstance(one, InPlace)]
        different = sum(not _same_bits(one.weight, one.base.to(one.weight.device)) for one in readable)
        return {"compared": len(readable), "different": different}

    def _write(self) -> None:
        if self._folded is None:
            active = self._active
            if active is None:
                fuse(None, self._targets, self.pieces)
            else:
                in_full = partial(fuse, active, self._targets, self.pieces)
                self._launches.write(active.matrices, active.scaling, in_full)
        else:
            self._folded.write(self._active, self.pieces)
        if torch.cuda.is_available() and self._reader.device.type == "cuda":
            # Requests may be computed in another stream, and an error of a kernel must be this call's.
            torch.cuda.synchronize(self._reader.device)

    # Where modules go

    def _place_new(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Find out for what changes for the first time, and copy the base weights.

        Raises:
            PlacementError: the model does not take such a weight.
            UnsuitableError: it is part of a layer that cannot be fused.
        """
        for module, shape in shapes.items():
            known = self._shapes.get(module, shape)
            if known != shape:
                raise PlacementError(f"{module!r} has a weight of shape {known} in the served model, not {shape}.")
        new = {module: shape for module, shape in shapes.items() if module not in self._shapes}
        if not new:
            return
        # Around `_add_targets` too, which loads packed weights into such parameters; none of them stays afterwards.
        with self._whole_weights():
            parameters = _parameters_of(self._model)
            dtype = self._config.model_config.dtype
            found = trace_weight_slices(self._model.load_weights, parameters, new, dtype)
            owners = list(dict.fromkeys(piece.owner for pieces in found.values() for piece in pieces))
            for owner in owners:
                check_layer(self._model, owner, {**self._linears, **self._embeddings}, self._experts)
            if self._folded is not None:
                self._folded.check_pieces(found, parameters)
            changed = self._targets if self._folded is None else self._folded
            self._add_targets({owner: parameters[owner] for owner in owners if owner not in changed})
        # Last, so that the next adapter with a refused module is checked from the beginning.
        self.pieces |= found
        self._shapes |= new
        self._unproved |= new.keys()

    def _check_overlaps(self, modules: Any) -> None:
        by_owner: dict[str, list[WeightSlice]] = {}
        for module in modules:
            for piece in self.pieces[module]:
                others = by_owner.setdefault(piece.owner, [])
                # Each piece is written from the base, so the second of two would undo the first where they overlap.
                if any(piece.overlaps(other) for other in others):
                    raise PlacementError(f"{module!r} is adapted twice, once as a part of another module.")
                others.append(piece)

    def check_whole_rows(self, magnitudes: Iterable[str], shapes: dict[str, tuple[int, ...]]) -> None:
        """Raises UnsuitableError for DoRA on a layer of which this worker has a part of each row."""
        for module in magnitudes:
            if any(piece.columns != (0, shapes[module][1]) for piece in self.pieces[module]):
                raise UnsuitableError(
                    f"{module!r} is trained with DoRA, which needs the norm of whole rows of its weight, and each "
                    "tensor-parallel worker has a part of each row. Start the server without --tensor-parallel-size, "
                    "or leave the layer out of target_modules."
                )

    def _add_targets(self, parameters: dict[str, Tensor]) -> None:
        packed = {owner: self._layer(owner) for owner in parameters if owner in self._packed}
        plain = {owner: weight for owner, weight in parameters.items() if owner not in packed}
        elsewhere = [owner for owner, weight in plain.items() if weight.device != self._reader.device]
        if elsewhere:
            raise UnsuitableError(
                f"The weight of {elsewhere[0]!r} is on {plain[elsewhere[0]].device}, apart from others on "
                f"{self._reader.device}. Offloaded weights cannot be changed; leave out --cpu-offload-gb."
            )
        if self._folded is not None:
            self._check_direct(parameters)
            self._folded.add(plain)
            self._kept_in = self._place
            return
        # `copies_of` returns "host" for no weights, wherever earlier copies are.
        if not parameters:
            return
        copies, self._kept_in = copies_of(plain.values(), self._place)
        for (owner, weight), base in zip(plain.items(), copies, strict=True):
            # By address: tied layers are two modules with one parameter (`tie_weights`, 0.31), or one module (0.26).
            layers = [layer for layer in self._embeddings.values() if layer.weight.data_ptr() == weight.data_ptr()]
            is_packed = weight.device.type == "cpu" and bool(layers)
            self._targets[owner] = _Repacked(weight, base, layers) if is_packed else InPlace(weight=weight, base=base)
        if packed:
            for owner, base in self._checkpoint_weights(packed).items():
                self._targets[owner] = self._packed_target(owner, base)

    def _layer(self, owner: str) -> Any:
        return self._linears.get(owner) or self._experts[owner]

    def _packed_target(self, owner: str, base: Tensor) -> Target:
        if owner in self._linears:
            return _Packed(layer=self._linears[owner], base=base)
        layer = self._experts[owner]
        experts = self._packed_experts.setdefault(id(layer), _PackedExperts(layer))
        return _PackedExpert(experts=experts, name=owner.rpartition(".")[2], base=base)

    def _check_direct(self, owners: Iterable[str]) -> None:
        """Raises UnsuitableError for a weight that the server computes with in another form."""
        on_cpu = self._reader.device.type == "cpu"
        packed = [owner for owner in owners if owner in self._packed or (on_cpu and owner in self._embeddings)]
        if packed:
            raise UnsuitableError(
                f"vLLM computes with a packed form of {packed[0]!r} here, which is made from a copy of the base "
                f"weights. Restart the server without {PLACE_VARIABLE}=none."
            )

    # Layers whose weights vLLM has packed into another form

    @contextmanager
    def _whole_weights(self) -> Iterator[None]:
        """Let packed layers have a weight of the original shape, without memory, for the loading rules.

        Source: on a CPU, vLLM 0.26 and 0.31 leave an empty tensor after packing (model_executor/layers/utils.py
        `dispatch_cpu_unquantized_gemm`).
        """
        packed = [(self._layer(owner), _parameter_name(owner, self._experts)) for owner in self._packed]
        kept = [getattr(layer, name) for layer, name in packed]
        try:
            for layer, _ in packed:
                _create_weight(layer, "meta")
            yield
        finally:
            for (layer, name), weight in zip(packed, kept, strict=True):
                layer.register_parameter(name, weight)

    def _checkpoint_weights(self, layers: dict[str, Any]) -> dict[str, Tensor]:
        """The weights of packed layers, loaded from the checkpoint once more; nothing else of it is."""
        from vllm.model_executor.model_loader import get_model_loader

        loader: Any = get_model_loader(self._config.load_config)
        # Only the loader of safetensors and similar files has it (model_loader/default_loader.py, 0.31).
        if not hasattr(loader, "get_all_weights"):
            raise UnsuitableError(
                f"The weights are packed, and {type(loader).__name__} cannot read them a second time. Leave out "
                "--load-format."
            )
        # Both weights of experts are read again if one of them is: what they compute with is packed from both.
        for layer in [layer for owner, layer in self._experts.items() if layer in layers.values()]:
            layers |= {owner: one for owner, one in self._experts.items() if one is layer}
        for layer in {id(layer): layer for layer in layers.values()}.values():
            _create_weight(layer, "cpu")
        weights = {owner: getattr(layer, _parameter_name(owner, self._experts)).data for owner, layer in layers.items()}
        for weight in weights.values():
            # What the checkpoint does not fill stays NaN, which is looked for below.
            weight.fill_(float("nan"))
        with torch.no_grad(), copying_only(weights.values()):
            self._model.load_weights(loader.get_all_weights(self._config.model_config, self._model))
        missing = [owner for owner, weight in weights.items() if not torch.isfinite(weight).all()]
        if missing:
            raise UnsuitableError(f"The weights of {missing[0]!r} could not be read from the checkpoint again.")
        return weights


@dataclass
class _Packed:
    """A layer that computes with a packed form of its weight, which is rebuilt after each change."""

    layer: Any
    base: Tensor

    @contextmanager
    def changing(self) -> Iterator[Tensor]:
        # vLLM packs the weight and drops it (`dispatch_cpu_unquantized_gemm`, 0.31), so it gets a copy of the base.
        weight = self.base.clone()
        yield weight
        self.layer.register_parameter("weight", torch.nn.Parameter(weight, requires_grad=False))
        self.layer.quant_method.process_weights_after_loading(self.layer)


class _PackedExperts:
    """The experts of a layer on a CPU, which computes with packed forms of both of their weights.

    Source: `CPUUnquantizedExperts.process_weights_after_loading` in
    vllm/model_executor/layers/fused_moe/experts/cpu_moe.py (0.31).
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._weights: dict[str, Tensor] = {}

    def hold(self, name: str, weight: Tensor) -> None:
        """Compute with another weight, once both are known."""
        self._weights[name] = weight
        if len(self._weights) < 2:
            return
        for one, value in self._weights.items():
            self._layer.register_parameter(one, torch.nn.Parameter(value.clone(), requires_grad=False))
        self._layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(self._layer)


@dataclass
class _PackedExpert:
    """One of the two weights of a layer of experts on a CPU."""

    experts: _PackedExperts
    name: str
    base: Tensor

    @contextmanager
    def changing(self) -> Iterator[Tensor]:
        weight = self.base.clone()
        yield weight
        self.experts.hold(self.name, weight)


@dataclass
class _Repacked(InPlace):
    """The weight of an embedding on a CPU, of which output heads keep a packed form as well.

    Source: `UnquantizedEmbeddingMethod.process_weights_after_loading` in
    vllm/model_executor/layers/vocab_parallel_embedding.py (0.31).

    Attributes:
        layers: the layers that have this weight; two if they are tied.
    """

    layers: list[Any]

    @contextmanager
    def changing(self) -> Iterator[Tensor]:
        yield self.weight
        for layer in self.layers:
            layer.quant_method.process_weights_after_loading(layer)


# What the served model must be


def check_server(config: Any) -> None:
    """Raises UnsuitableError for a server whose weights cannot be replaced, with what to change."""
    # LoRA and data parallelism are refused before, by `fused_middleware`.
    if config.model_config.quantization is not None:
        raise UnsuitableError(
            f"The base model is quantised ({config.model_config.quantization}), and an adapter cannot be added to "
            'quantised weights without changing them. Serve the unquantised model, or use lora_sync_serving="runtime".'
        )


def _linears_of(model: torch.nn.Module) -> dict[str, Any]:
    """The layers with plain weights, by their names."""
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, LinearBase) and isinstance(layer.quant_method, UnquantizedLinearMethod)
    }


def _embeddings_of(model: torch.nn.Module) -> dict[str, Any]:
    """The embeddings and output heads with plain weights, by their names."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

    return {
        name: layer
        # A head may be the embedding itself under a second name (model_executor/models/qwen2.py, 0.26).
        for name, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, VocabParallelEmbedding) and isinstance(layer.quant_method, UnquantizedEmbeddingMethod)
    }


def experts_of(model: torch.nn.Module) -> dict[str, Any]:
    """The layers of experts with plain weights, by the names of these.

    Source: vllm/model_executor/layers/fused_moe (0.26, 0.31).
    """
    found = {}
    for name, _ in model.named_parameters():
        path, _, last = name.rpartition(".")
        if last in _EXPERT_WEIGHTS:
            layer = model.get_submodule(path)
            if type(layer.quant_method).__name__ == "UnquantizedFusedMoEMethod":
                found[name] = layer
    return found


def _backend_of(layer: Any) -> str:
    """The kernels that compute a layer of experts."""
    # `check_layer` refuses what is unknown, as other kernels may keep the weights in another order.
    return str(getattr(getattr(layer.quant_method, "unquantized_backend", None), "name", "unknown"))


def _parameter_name(owner: str, experts: dict[str, Any]) -> str:
    """What the weight of a layer is called in it."""
    return owner.rpartition(".")[2] if owner in experts else "weight"


def _parameters_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """All parameters: weights of linear layers by the layer's name, others by their own."""
    return {name.removesuffix(".weight"): value.data for name, value in model.named_parameters()}


def check_layer(model: torch.nn.Module, owner: str, layers: dict[str, Any], experts: dict[str, Any]) -> None:
    """Check that a parameter is the only form in which the server keeps what it holds.

    Args:
        owner: a layer, for its weight, or the parameter's own name.
        layers: linear layers and embeddings whose weights are plain.
        experts: layers of experts whose weights are plain, by the names of these.
    """
    layer = layers.get(owner.removesuffix(".bias")) or experts.get(owner) or _module_at(model, owner)
    is_plain = owner.removesuffix(".bias") in layers or owner in experts or _is_vector(model, owner)
    if not is_plain:
        raise UnsuitableError(
            f"The adapter changes {owner!r}, which is a {type(layer).__name__} and no unquantised linear layer, "
            "embedding or layer of experts. Leave it out of target_modules, or use "
            'lora_sync_serving="runtime".'
        )
    if owner in experts and _backend_of(layer) not in _EXPERT_BACKENDS:
        raise UnsuitableError(
            f"The adapter changes {owner!r}, whose kernels ({_backend_of(layer)}) keep the weights of experts in "
            "another order. Restart the server with --moe-backend triton."
        )
    for name, module in model.named_modules():
        # Such as latent attention, which keeps matrices made of its `kv_b_proj`.
        has_own_form = module is not layer and callable(getattr(module, "process_weights_after_loading", None))
        if has_own_form and any(child is layer for child in module.modules()):
            raise UnsuitableError(
                f"The adapter changes {owner!r}, whose weights {type(module).__name__} ({name!r}) also keeps in "
                "another form, which would not change. Leave it out of target_modules, or use "
                'lora_sync_serving="runtime".'
            )


def _is_vector(model: torch.nn.Module, owner: str) -> bool:
    """Whether it is a vector that a module reads at each step, such as the weight of a norm."""
    parameters = _parameters_of(model)
    module = _module_at(model, owner)
    makes_another_form = any(
        callable(getattr(one, "process_weights_after_loading", None))
        for one in (module, getattr(module, "quant_method", None))
    )
    return owner in parameters and parameters[owner].ndim == 1 and not makes_another_form


def _module_at(model: torch.nn.Module, name: str) -> torch.nn.Module:
    while name:
        try:
            return model.get_submodule(name)
        except AttributeError:
            name = name.rpartition(".")[0]
    return model


def _create_weight(layer: Any, device: str) -> None:
    """Give a layer a weight as it had before it was loaded, or both weights to a layer of experts.

    Source: the layers of vllm/model_executor/layers/linear.py (0.26, 0.31) and fused_moe/routed_experts.py (0.31).
    """
    if hasattr(layer, _EXPERT_WEIGHTS[0]):
        with torch.device(device):
            layer.quant_method.create_weights(
                layer=layer,
                num_experts=layer.local_num_experts,
                hidden_size=layer.hidden_size,
                intermediate_size_per_partition=layer.intermediate_size_per_partition,
                params_dtype=layer.params_dtype,
                weight_loader=layer.weight_loader,
            )
        return
    from vllm.model_executor.layers.linear import WEIGHT_LOADER_V2_SUPPORTED

    is_v2 = type(layer.quant_method).__name__ in WEIGHT_LOADER_V2_SUPPORTED
    with torch.device(device):
        layer.quant_method.create_weights(
            layer=layer,
            input_size_per_partition=getattr(layer, "input_size_per_partition", layer.input_size),
            output_partition_sizes=layer.output_partition_sizes,
            input_size=layer.input_size,
            output_size=layer.output_size,
            params_dtype=layer.params_dtype,
            weight_loader=getattr(layer, "weight_loader_v2", layer.weight_loader) if is_v2 else layer.weight_loader,
        )
    # Until then a new parameter has the global rank, also in a layer that is not sharded (linear.py, 0.31).
    layer.update_param_tp_status()


def _same_bits(one: Tensor, other: Tensor) -> bool:
    # As bits, because as numbers -0.0 equals 0.0 and NaN differs from itself.
    return bool(torch.equal(one.contiguous().view(torch.int8), other.contiguous().view(torch.int8)))
