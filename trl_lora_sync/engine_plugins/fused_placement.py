"""Where a tensor of the checkpoint lands in the parameters of a served model, by the model's own loading rules.

The model is given a tensor without contents to load; what it would copy where is noted down, and not copied. So
stacked parameters (q, k and v in one) and shards (tensor parallel) are right for every architecture, by its own rules.
Knows torch and no engine.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trl_lora_sync.engine_plugins.fused_file import tensor_name

_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)
LoadWeights = Callable[[Iterable[tuple[str, Tensor]]], Any]


class PlacementError(Exception):
    """The model's loading rules do something else with a weight than copying rectangles of it."""


@dataclass(frozen=True)
class WeightSlice:
    """A rectangle of a checkpoint's weight, and where it is in a parameter.

    Attributes:
        owner: the key of the parameter.
        rows, columns: first and end, in the checkpoint's weight.
        top, left: of the rectangle in the parameter.
        expert: which matrix of the parameter it is in, if that holds one for each expert; else None.
    """

    owner: str
    rows: tuple[int, int]
    columns: tuple[int, int]
    top: int
    left: int
    expert: int | None = None

    @property
    def bottom(self) -> int:
        return self.top + self.rows[1] - self.rows[0]

    @property
    def right(self) -> int:
        return self.left + self.columns[1] - self.columns[0]

    def overlaps(self, other: "WeightSlice") -> bool:
        """Whether both write to one place."""
        return (
            (self.owner, self.expert) == (other.owner, other.expert)
            and max(self.top, other.top) < min(self.bottom, other.bottom)
            and max(self.left, other.left) < min(self.right, other.right)
        )


def trace_weight_slices(
    load_weights: LoadWeights,
    parameters: dict[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
) -> dict[str, list[WeightSlice]]:
    """Find where weights of a checkpoint would go, without changing anything.

    Args:
        load_weights: the model's.
        parameters: the model's parameters that may be written to, on any device.
        shapes: of each weight or bias, by the name of its module in the checkpoint, or by its own (`tensor_name`). One
            of shape `(n,)` is taken for a matrix of shape `(1, n)`.

    Returns:
        The pieces of each of them; none for what is not on this process.

    Raises:
        PlacementError: the model does not know a name, the shape does not fit it, or it does more than copying.
    """
    recorder = _Recorder(parameters)

    def record(chosen: Iterable[str]) -> dict[str, list[WeightSlice]]:
        # In the served dtype, as a loader that converts its weight would seem to compute something from it.
        sources = {module: torch.empty(shapes[module], dtype=dtype, device="meta") for module in chosen}
        recorder.begin(sources)
        with torch.no_grad(), recorder:
            load_weights([(tensor_name(module), source) for module, source in sources.items()])
        return recorder.pieces

    # All at once, as a model may look at all of itself in each call, and experts are tens of thousands of weights.
    with contextlib.suppress(Exception):
        return record(shapes)
    # Module by module, to name the module that it cannot load.
    found: dict[str, list[WeightSlice]] = {}
    for module, shape in shapes.items():
        try:
            found |= record([module])
        except PlacementError as error:
            raise PlacementError(f"{module!r}: {error}") from error
        except Exception as error:  # whatever a model's own code raises for what it cannot load
            raise PlacementError(
                f"{module!r} with a weight of shape {shape} is nothing that the served model can load "
                f"({type(error).__name__}: {error})"
            ) from error
    return found


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes down copies into the parameters instead of making them."""

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pieces: dict[str, list[WeightSlice]] = {}
        # Keyed by storage, as tensors without contents have no address, and held so that a key stays unique.
        self._sources: dict[int, tuple[str, Tensor]] = {}
        self._parameters = {_storage(parameter): (key, parameter) for key, parameter in parameters.items()}

    def begin(self, sources: Mapping[str, Tensor]) -> None:
        self._sources = {_storage(source): (module, source) for module, source in sources.items()}
        self.pieces = {module: [] for module in sources}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and _storage(args[0]) in self._parameters:
            self._note(args[0], args[1])
            return args[0]
        # vLLM fills the rows below an embedding up to its padded vocabulary, which copies no part of a weight.
        if func in _FILLS and _storage(args[0]) in self._parameters:
            return args[0]
        # Only writes are refused. Reads, views and shapes go through, as loading rules depend on them.
        for argument, value in zip(func._schema.arguments, args, strict=False):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and isinstance(value, Tensor) and _storage(value) in self._parameters:
                raise PlacementError(
                    f"the model changes its weight with {func}, which is not a plain copy. It is not a linear layer. "
                    "Leave it out of target_modules"
                )
        return func(*args, **(kwargs or {}))

    def _note(self, target: Tensor, source: Tensor) -> None:
        key, parameter = self._parameters[_storage(target)]
        if _storage(source) not in self._sources:
            raise PlacementError("the model computes something from its weight before it keeps it")
        module, whole = self._sources[_storage(source)]
        if target.ndim == parameter.ndim == source.ndim == 1:
            target, parameter, source, whole = (one.unsqueeze(0) for one in (target, parameter, source, whole))
        expert = None
        if parameter.ndim == 3 and target.ndim == 2 and parameter.is_contiguous():
            # The matrices of a contiguous stack follow each other, so the offset in elements gives the expert.
            offset = int(target.storage_offset()) - int(parameter.storage_offset())
            expert = offset // parameter[0].numel()
            parameter = parameter[expert]
        top, left = _corner(target, parameter)
        row, column = _corner(source, whole)
        rows, columns = source.shape
        self.pieces[module].append(WeightSlice(key, (row, row + rows), (column, column + columns), top, left, expert))


class copying_only(TorchDispatchMode):  # type: ignore[no-untyped-call]  # noqa: N801 - a context manager
    """Inside, copies go to `targets` and nowhere else: what a model loads for other parameters is passed over."""

    def __init__(self, targets: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._targets = {_storage(target) for target in targets}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Other writes may go through: a `fill_` of padding writes the zeros that are there since the first load
        # (`weight_loader` in vllm/model_executor/layers/vocab_parallel_embedding.py, 0.31).
        if func is torch.ops.aten.copy_.default and _storage(args[0]) not in self._targets:
            return args[0]
        return func(*args, **(kwargs or {}))


def _corner(part: Tensor, whole: Tensor) -> tuple[int, int]:
    """First row and column of a rectangle of a matrix.

    Raises:
        PlacementError: it is something else.
    """
    if part.ndim != 2 or whole.ndim != 2 or not whole.is_contiguous():
        raise PlacementError(
            f"it becomes a part of shape {tuple(part.shape)} of a weight of shape {tuple(whole.shape)}, which is "
            "not the matrix of a linear layer or of one expert. Leave it out of target_modules"
        )
    width = whole.shape[1]
    top, left = divmod(int(part.storage_offset()) - int(whole.storage_offset()), width)
    # The stride of a dimension of one element can be any number.
    steps = [step for step, count in zip(part.stride(), part.shape, strict=True) if count > 1]
    wanted = [step for step, count in zip((width, 1), part.shape, strict=True) if count > 1]
    if steps != wanted or top < 0 or top + part.shape[0] > whole.shape[0] or left + part.shape[1] > width:
        raise PlacementError("the model reorders the rows or columns of its weight")
    return top, left


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
