"""Whether the base weights are the checkpoint's, and those below an adapter still the ones that the run began with.

Servers keep the checkpoint's base. Code of a user may write to the trainer's: PEFT's merge does, through `data`, which
no counter of torch shows (2.13). Of each weight one row is compared, as a merge changes all rows.
"""

import logging
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import Parameter

from trl_lora_sync.adapter.canonical import LoRAModule
from trl_lora_sync.adapter.checkpoint import weight_files
from trl_lora_sync.adapter.module_tree import weight_of
from trl_lora_sync.adapter.names import unwrapped_path

if TYPE_CHECKING:
    from peft import PeftModel

logger = logging.getLogger(__name__)

# Of the distance between two numbers next to each other. An undone merge of an adapter a tenth as large as the weights
# leaves 0.1 of it, and an adapter of a hundredth that stays merged in bfloat16 moves them by 1.5.
_ROUNDINGS = 0.5
# Of each weight, as a merge changes nearly all of them.
_SCALES = 256
# A row that is farther from the checkpoint's is another one: some models put their weights in another order.
_OTHER_ROW = 0.5
# What PEFT puts into the name of a weight that it wraps.
_WRAPPED = frozenset({"base_layer", "original_module"})
# The name of a weight from the list of layers on, such as `layers.0.mlp.up_proj.weight`.
_WITHIN_LAYERS = re.compile(r"\w+\.\d+\..+")


class BaseDrift:
    """Compares the base with that of the start.

    Attributes:
        share: how far the rows have moved since the start, as a share of their size.
        is_rounding: whether undone merges alone may leave as much.
    """

    def __init__(self) -> None:
        self.share = 0.0
        self._rows: Tensor | None = None  # of the start
        self._moves = 0  # that were roundings
        self._unit = 0.0  # the coarsest rounding so far, as a model that was in bfloat16 for a while keeps its rounding

    @property
    def is_rounding(self) -> bool:
        # If the adapter is trained between undone merges, what each of them leaves adds up as a random walk does.
        return self.share <= _ROUNDINGS * self._unit * math.sqrt(max(self._moves, 1))

    @torch.no_grad()
    def has_moved(self, base_layers: Sequence[Any]) -> bool:
        """Whether the layers below PEFT's have moved since the last call; the first call notes the start."""
        # No row is kept: it would keep the memory of its whole weight, where the model is moved to another device.
        weights = list(map(weight_of, base_layers))
        scales = [found for found in map(_scales_of, weights) if found is not None]
        rows = [weight[0] for weight in weights if _is_plain(weight)] + scales
        if not rows:
            return False
        # Scales are in float32, and what they scale has the digits of a 16-bit weight at most.
        dtypes = {row.dtype for row in rows} | ({torch.bfloat16} if scales else set())
        self._unit = max(self._unit, *(torch.finfo(dtype).eps for dtype in dtypes))
        if len({row.device for row in rows}) > 1:
            rows = [row.to(rows[0].device) for row in rows]
        found = torch.cat(rows).float()
        # An adapter on other layers has other rows, and so has a model that was moved.
        if self._rows is None or self._rows.shape != found.shape:
            self._rows, self.share, self._moves = found, 0.0, 0
            return False
        start = self._rows.to(found.device)
        before, self.share = self.share, float((found - start).norm() / start.norm().clamp_min(torch.finfo().tiny))
        has_moved = self.share != before
        # Only then, or a change for good would become a rounding by being looked at often.
        self._moves += has_moved and self.is_rounding
        return has_moved


@torch.no_grad()
def change_from_checkpoint(
    model: "PeftModel", changed_layers: Collection[Any] = (), initial: Mapping[Any, LoRAModule] | None = None
) -> str:
    """How the base of a model differs from the checkpoint that was loaded, and what to do.

    Of each matrix one row is compared, and of norms and biases all. The weight that is farthest counts. Empty where
    rounding leaves as much, and where there is nothing to compare: the checkpoint is not on this host as safetensors,
    or has other names within its layers, or weights are quantised or sharded.

    Args:
        changed_layers: layers of PEFT whose base weights differ from the checkpoint's for a known reason.
        initial: the adapter that an initialisation took out of the base weights, by layers of PEFT.
    """
    shares = dict[str, float]()
    found: defaultdict[Path, list[tuple[str, str, Any]]] = defaultdict(list)
    try:
        files = weight_files(model.name_or_path, getattr(model.config, "_commit_hash", None))
        alike = _alike(files)
        left_out = {id(weight_of(layer.get_base_layer())) for layer in changed_layers}
        taken = {id(weight_of(layer.get_base_layer())): (layer, one) for layer, one in (initial or {}).items()}
        for path, weight in model.get_base_model().named_parameters():
            if id(weight) in left_out or weight.requires_grad or not _is_plain(weight, least_dim=1):
                continue
            name = ".".join(part for part in unwrapped_path(path).split(".") if part not in _WRAPPED)
            # The norms of two layers may be nearly equal, so the name of a vector has to match.
            others = alike[_within_layers(name)] if weight.dim() > 1 else []
            for key in [name] if name in files else others:
                found[files[key]].append((key, name, weight))
        for file, weights in found.items():
            with safe_open(file, framework="pt") as opened:
                for key, name, weight in weights:
                    saved, is_matrix = opened.get_slice(key), weight.dim() > 1
                    ours, shape = (weight[0], saved.get_shape()[1:]) if is_matrix else (weight, saved.get_shape())
                    # Read only then: FSDP may have made a vector of a large matrix.
                    if shape == list(ours.shape):
                        row = saved[:1][0] if is_matrix else saved[:]
                        added = _taken_out(*taken[id(weight)]) if id(weight) in taken else None
                        shares[name] = min(shares.get(name, _OTHER_ROW), _distance(ours.cpu(), row, added))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        logger.debug("The base weights are not compared with a checkpoint: %s", error)
    farthest = max((share for share in shares.values() if share < _OTHER_ROW), default=0.0)
    if farthest <= _ROUNDINGS * torch.finfo(torch.bfloat16).eps:
        return ""
    return (
        f"The trainer's base weights differ from the checkpoint {model.name_or_path!r} by {farthest:.2g} of their "
        "size, as after merge_and_unload() of another adapter. Completions would come from another policy than the one "
        "being trained. Save the model before the new adapter is added, with model.save_pretrained(FOLDER) and "
        "tokenizer.save_pretrained(FOLDER), and train the model that is loaded from there."
    )


def _alike(keys: Iterable[str]) -> defaultdict[str, list[str]]:
    """Names of a checkpoint, by what they are within its lists of layers.

    Transformers (5.24) loads vision-language models under other names than their checkpoints have. The layers of both
    parts may be called alike; of these, the nearer weight is the right one.
    """
    found: defaultdict[str, list[str]] = defaultdict(list)
    for key in keys:
        found[_within_layers(key)].append(key)
    return found


def _within_layers(name: str) -> str:
    within = _WITHIN_LAYERS.search(name)
    return within[0] if within else name


def _taken_out(layer: Any, initial: LoRAModule) -> tuple[Tensor, Tensor]:
    """The first row of what an initialisation took out of a base weight, and the squares of its terms."""
    lora_A, lora_B = initial.lora_A.cpu().float(), initial.lora_B.cpu().float() * initial.scaling
    # Conv1D, such as GPT-2's, keeps its weight transposed.
    left, right = (lora_A[:, 0], lora_B.T) if getattr(layer, "fan_in_fan_out", False) else (lora_B[0], lora_A)
    return left @ right, left.square() @ right.square()


def _distance(row: Tensor, saved: Tensor, added: tuple[Tensor, Tensor] | None) -> float:
    """How far a row is from the checkpoint's, as a share of the latter.

    Args:
        added: see `_taken_out`; None if the row is whole.
    """
    # Rounded as when it was loaded: in float16 small numbers lose most of their bits.
    loaded, row = saved.to(row.dtype).float(), row.float()
    size = loaded.norm()
    if added is not None:
        # A term may be larger than the weight, and rounding moves each term by a share of that term. Twice their size,
        # because these errors add up: OLoRA in bfloat16 would be 0.0057 of a row away (PEFT 0.21).
        size = torch.maximum(size, 2 * (row.square() + added[1]).sum().sqrt())
        row = row + added[0]
    return float((row - loaded).norm() / size.clamp_min(torch.finfo().tiny))


def _scales_of(weight: Any) -> Tensor | None:
    """The first scales of a weight in 4 or 8 bits, as bitsandbytes (0.50) has them. Each merge makes new ones."""
    state = getattr(weight, "quant_state", None)
    # For some CPUs they are put in another order at the first forward pass.
    if getattr(state, "packing_format_for_cpu", False):
        return None
    # Scales that are quantised themselves have scales again.
    scales = getattr(weight, "SCB", None) if state is None else (state.state2 if state.nested else state).absmax
    return None if scales is None else scales.flatten()[:_SCALES].float()


def _is_plain(weight: Any, *, least_dim: int = 2) -> bool:
    """Whether a weight is there in full, and not quantised."""
    return (
        isinstance(weight, Tensor)
        # A parameter of exactly this type holds a plain tensor: torch keeps the type of any other.
        and (type(weight) is Parameter or type(weight.detach()) is Tensor)
        and weight.is_floating_point()
        and weight.dtype.itemsize > 1  # in 8 bits it goes with scales, and torch (2.13) joins it with no other dtype
        and weight.dim() >= least_dim
        and weight.numel() > 0
        and not weight.is_meta
    )
