"""Which memory of the served model belongs to which weight of the trainer's base model.

vLLM's own loading rules decide it, see `engine_plugins.fused_placement`. Nothing is copied.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trl_lora_sync.adapter.names import ServedNames, unwrapped_path
from trl_lora_sync.colocate import engine
from trl_lora_sync.engine_plugins.fused_placement import PlacementError, WeightSlice, trace_weight_slices

# Of a layer that PEFT has wrapped, where the layer itself is.
_WRAPPED = ".base_layer"


def base_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The frozen matrices of the trainer's base model, by the names of their modules on the server; tied ones once."""
    names = ServedNames.of(model)
    return {
        # Norms and biases are small vectors, of which trainer and vLLM each keep a copy.
        names.served(unwrapped_path(name).removesuffix(".weight").replace(_WRAPPED, "")): weight
        for name, weight in model.named_parameters()
        # The matrices of an adapter that is not active are frozen as well.
        if weight.ndim >= 2 and not weight.requires_grad and "lora_" not in name
    }


def served_parameters(llm: Any) -> dict[str, Tensor]:
    """The parameters of the served model, without the layers that vLLM puts around those with adapters."""
    with _unwrapped(engine.served_model(llm)) as model:
        return _parameters_of(model)


def _parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name.removesuffix(".weight"): value.data for name, value in model.named_parameters()}


def find(llm: Any, shapes: dict[str, tuple[int, int]]) -> dict[str, list[WeightSlice]]:
    """Where weights are in the parameters of the served model.

    Args:
        shapes: `(out_features, in_features)` by the name of the module.

    Raises:
        PlacementError: vLLM does not keep them as matrices of this kind.
    """
    with _unwrapped(engine.served_model(llm)) as model:
        return trace_weight_slices(model.load_weights, _parameters_of(model), shapes, engine.model_dtype(llm))


def whole_views(llm: Any, weights: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """For each weight the view of the served model's memory that holds all of it, contiguous and in the same order.

    Raises:
        PlacementError: vLLM keeps one of them in another form.
    """
    strange = [name for name, weight in weights.items() if weight.ndim != 2]
    if strange:
        raise PlacementError(f"{strange[0]!r} has more than two dimensions")
    found = find(llm, {name: (weight.shape[0], weight.shape[1]) for name, weight in weights.items()})
    parameters, views = served_parameters(llm), {}
    for name, weight in weights.items():
        pieces = found[name]
        view = None
        if len(pieces) == 1 and pieces[0].columns == (0, weight.shape[1]) and pieces[0].rows == (0, weight.shape[0]):
            view = parameters[pieces[0].owner][pieces[0].top : pieces[0].bottom]
        # On a GPU q, k and v are ranges of rows of one parameter, and the padding of an embedding follows its rows, so
        # each of them is contiguous.
        if view is None or view.shape != weight.shape or not view.is_contiguous():
            raise PlacementError(f"vLLM keeps {name!r} in {len(pieces)} parts or beside other columns")
        views[name] = view
    return views


def first_difference(views: dict[str, Tensor], weights: dict[str, nn.Parameter]) -> str | None:
    """The name of a weight whose view does not hold the same bits; None if all do."""
    # The trainer's weights may still be on the host here, so they come to the device in parts.
    for name, view in views.items():
        weight = weights[name].data
        if view.dtype != weight.dtype or not all(same_bits(*parts) for parts in _chunks(view, weight)):
            return name
    return None


# Of a weight on the host, what is brought to the device at a time to be compared.
_ELEMENTS = 1 << 27


def _chunks(view: Tensor, weight: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    step = max(1, _ELEMENTS // view.shape[1])
    for start in range(0, view.shape[0], step):
        yield view[start : start + step], weight[start : start + step].to(view.device, non_blocking=True)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors of one dtype hold the same bits."""
    # As numbers, 0.0 equals -0.0, and NaN differs from itself.
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    return torch.equal(left.view(bits), right.contiguous().view(bits))


@contextmanager
def _unwrapped(model: nn.Module) -> Iterator[Any]:
    """The served model as its loading rules know it.

    With adapters, vLLM wraps linear layers (`qkv_proj.base_layer`), and its loading rules find none of their names
    (0.26 and 0.31).
    """
    from vllm.lora.layers import BaseLayerWithLoRA

    # A list before anything is replaced, as `modules()` walks the tree that is changed below.
    wrapped = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, BaseLayerWithLoRA)
    ]
    try:
        for parent, name, child in wrapped:
            parent._modules[name] = child.base_layer
        yield model
    finally:
        for parent, name, child in wrapped:
            parent._modules[name] = child
