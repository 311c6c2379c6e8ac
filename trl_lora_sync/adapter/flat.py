"""Export into one flat buffer that is laid out as the file, so that a GPU is read with one copy.

The scaling is folded into `lora_B` in float32 before the cast. Ranks are padded with zeros to one, because vLLM <= 0.31
and SGLang size their buffers by one rank for all modules. A file of the result is byte for byte what safetensors'
`save_file` makes of the same tensors, except that experts come last. Knows nothing of files: where the buffer goes is
the business of `adapter.store` and `adapter.pinned_files`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trl_lora_sync.adapter.canonical import (
    NO_EXTRAS,
    CanonicalAdapter,
    ExtraTensors,
    LoRAModule,
    all_finite,
    not_finite,
    one_cpu_thread,
    split_flat,
    target_modules_of,
    tensor_keys,
)
from trl_lora_sync.adapter.launches import Launch, in_one_launch
from trl_lora_sync.engine_plugins.repeated import Repeated

# Bounds the float32 copies of lora_B that exist at a time, to 32 MB.
SCRATCH_ELEMENTS = 1 << 23


@dataclass(frozen=True)
class _Plan:
    """Where each matrix goes; for one list of modules, whatever their values and scalings are.

    Attributes:
        key: what the plan was made for.
        adapter: whose tensors are the memory that is filled.
        places: `(lora_A, lora_B)` of each module as views of that, without the padding.
        blocks: each block of tensors as a view of it.
        modules: what `filling` reads; empty if the copies have to be listed for each export.
        filling: copies them to the places, see `_fill`.
    """

    key: tuple[object, ...]
    adapter: CanonicalAdapter
    places: list[tuple[Tensor, Tensor]]
    blocks: list[Tensor]
    modules: tuple[LoRAModule, ...] = ()
    filling: Repeated | None = None


class FlatBuffer:
    """Memory for one adapter, in the dtype that is served and on the device of the matrices, kept between exports."""

    def __init__(self) -> None:
        self.plan: _Plan | None = None

    def export(
        self,
        modules: Sequence[LoRAModule],
        *,
        dtype: torch.dtype,
        base_model: str | None = None,
        fan_in_fan_out: bool = False,
        extras: ExtraTensors = NO_EXTRAS,
    ) -> CanonicalAdapter:
        """The canonical adapter of `modules`, on the device of the first one and valid until the next export.

        Args:
            modules: the adapted layers; not modified. If they are the very tuple that was given before, nothing is
                looked up again.
            dtype: dtype the server computes LoRA in. `torch.float32` loses nothing.
            extras: what is trained beside them.

        Raises:
            AdapterNotFiniteError: a matrix holds NaN or infinity, or does once it is scaled and cast.
        """
        plan = self._plan_for(modules, dtype, extras)
        with torch.no_grad(), one_cpu_thread():
            is_fine = plan.filling.run() if plan.filling else _fill(plan, _copies(plan.places, modules), extras)
            # The copy to the host needs no further waiting, as this waits for all of the above.
            if not bool(is_fine):
                raise not_finite(modules, extras, plan.adapter.tensors, dtype)
        described: dict[str, Any] = {
            "base_model": base_model,
            "fan_in_fan_out": fan_in_fan_out,
            "tokens": extras.tokens,
            "has_stacked_experts": extras.has_stacked_experts,
        }
        # Only at a change, as the new object lacks the views, the header and the checksum that the old one has cached.
        if any(getattr(plan.adapter, name) != value for name, value in described.items()):
            self.plan = plan = replace(plan, adapter=replace(plan.adapter, **described))
        return plan.adapter

    def release(self) -> None:
        """Release the memory; the next export allocates it again."""
        self.plan = None

    def _plan_for(self, modules: Sequence[LoRAModule], dtype: torch.dtype, extras: ExtraTensors) -> _Plan:
        plan = self.plan
        # By identity: `AdapterReader` gives the same tuple as long as no matrix and no scaling has been replaced.
        if plan is not None and plan.modules is modules and extras is NO_EXTRAS and plan.adapter.dtype == dtype:
            return plan
        shapes = tuple((module.name, module.lora_A.shape, module.lora_B.shape) for module in modules)
        others = tuple((name, tensor.shape) for name, tensor in extras.tensors.items())
        blocks = tuple((block.keys[0], block.shape, block.values.shape) for block in extras.blocks)
        key = (dtype, modules[0].lora_A.device, shapes, others, blocks)
        if plan is None or plan.key != key:
            self.plan = plan = None  # before the new one, so that there are never two
            plan = _make_plan(key, modules, dtype, extras)
        # Of modules that are made for each sync, nothing is kept: they may be as large as the adapter.
        self.plan = replace(plan, modules=(), filling=None)
        if isinstance(modules, tuple) and extras is NO_EXTRAS:
            # The scalings are recorded as numbers. Modules with other scalings are another tuple, and recorded again.
            read = [*(one.lora_A for one in modules), *(one.lora_B for one in modules)]
            filling = Repeated(read, _filling(plan, modules))
            self.plan = replace(plan, modules=modules, filling=filling)
        return self.plan


def _fill(plan: _Plan, copies: "Sequence[_Copies]", extras: ExtraTensors = NO_EXTRAS) -> Tensor:
    """Write all tensors of the plan, and return whether they are finite, as `all_finite` does."""
    for some in copies:
        some.make()
    for key, tensor in extras.tensors.items():
        plan.adapter.tensors[key].copy_(tensor)
    for whole, block in zip(plan.blocks, extras.blocks, strict=True):
        block.write_to(whole)
    # As the server will see them: what float32 holds may be infinite in float16.
    return all_finite(plan.adapter.flat)


def _filling(plan: _Plan, modules: Sequence[LoRAModule]) -> Callable[[], Tensor]:
    """Does what `_fill` does without extras."""

    def make() -> Launch:
        from trl_lora_sync.adapter.kernels import Copy, Export

        of_modules = zip(plan.places, modules, strict=True)
        return Export([
            copy for (to_A, to_B), one in of_modules
            for copy in (Copy(to_A, one.lora_A, 1.0), Copy(to_B, one.lora_B, one.scaling))
        ])  # fmt: skip

    fill = partial(_fill, plan, _copies(plan.places, modules))
    return in_one_launch(fill, modules[0].lora_A.device, make, plan.adapter.flat)


def _make_plan(
    key: tuple[object, ...], modules: Sequence[LoRAModule], dtype: torch.dtype, extras: ExtraTensors
) -> _Plan:
    rank = max(extras.rank, *(module.rank for module in modules))
    shapes: dict[str, torch.Size] = {name: tensor.shape for name, tensor in extras.tensors.items()}
    for module in modules:
        key_A, key_B = tensor_keys(module)
        shapes[key_A] = torch.Size((rank, module.lora_A.shape[1]))
        shapes[key_B] = torch.Size((module.lora_B.shape[0], rank))
    # The order in which safetensors writes tensors of one dtype.
    shapes = {name: shapes[name] for name in sorted(shapes, key=str.encode)}
    end, starts = sum(shape.numel() for shape in shapes.values()), []
    for block in extras.blocks:  # behind all others, and one tensor after the other
        starts.append(end)
        shapes |= dict.fromkeys(block.keys, torch.Size(block.shape))
        end += len(block.keys) * block.shape[0] * block.shape[1]
    # Zero once and for all: an export writes between the padding only.
    flat = torch.zeros(end, dtype=dtype, device=modules[0].lora_A.device)
    tensors = split_flat(flat, shapes)
    places = []
    for module in modules:
        key_A, key_B = tensor_keys(module)
        places.append((tensors[key_A][: module.rank], tensors[key_B][:, : module.rank]))
    # All tensors of a block lie side by side, so one view with three dimensions is filled in one copy.
    blocks = [
        flat[start:].as_strided((len(block.keys), *block.shape), (block.shape[0] * block.shape[1], block.shape[1], 1))
        for start, block in zip(starts, extras.blocks, strict=True)
    ]
    adapter = CanonicalAdapter(flat=flat, shapes=shapes, rank=rank, target_modules=target_modules_of(modules))
    return _Plan(key=key, adapter=adapter, places=places, blocks=blocks)


@dataclass(frozen=True)
class _Copies:
    """Some modules and their places, in lists as torch takes them.

    Attributes:
        targets_A, sources_A: of all of them.
        chunks: places, matrices and scalings of lora_B, a few at a time.
    """

    targets_A: list[Tensor]
    sources_A: list[Tensor]
    chunks: list[tuple[list[Tensor], list[Tensor], list[float]]]

    def make(self) -> None:
        """Fill the places: `fold_scaling` and the casts, of many matrices at once."""
        torch._foreach_copy_(self.targets_A, self.sources_A)
        for targets, matrices, scalings in self.chunks:
            scaled = torch._foreach_mul([one.float() for one in matrices], scalings)  # itself if it has that dtype
            torch._foreach_copy_(targets, list(scaled))
            del scaled  # before the next ones are made


def _copies(places: Sequence[tuple[Tensor, Tensor]], modules: Sequence[LoRAModule]) -> list[_Copies]:
    """All copies of an export; one padded matrix makes torch copy all of a list one by one, so these have their own."""
    found = []
    for padded in (False, True):
        # The place of a padded lora_B is a range of columns, so it alone is not contiguous.
        chosen = [
            (place, module)
            for place, module in zip(places, modules, strict=True)
            if place[1].is_contiguous() is not padded
        ]
        if chosen:
            chunks = [
                ([place for place, _ in chunk], [one.lora_B for _, one in chunk], [one.scaling for _, one in chunk])
                for chunk in _chunks([(place[1], module) for place, module in chosen])
            ]
            found.append(_Copies([place[0] for place, _ in chosen], [module.lora_A for _, module in chosen], chunks))
    return found


def _chunks(pairs: list[tuple[Tensor, LoRAModule]]) -> Iterator[list[tuple[Tensor, LoRAModule]]]:
    chunk: list[tuple[Tensor, LoRAModule]] = []
    elements = 0
    for target, module in pairs:
        if chunk and elements + target.numel() > SCRATCH_ELEMENTS:
            yield chunk
            chunk, elements = [], 0
        chunk.append((target, module))
        elements += target.numel()
    yield chunk
