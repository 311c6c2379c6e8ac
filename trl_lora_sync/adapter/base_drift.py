"""Whether the base weights below an adapter are the checkpoint's, and still the ones that the run began with.

Servers keep the checkpoint's base. Code of a user may write to the trainer's: PEFT's merge does, through `data`, which
no counter of torch shows (2.13). Of each weight one row is compared, as a merge changes all rows.
"""

import json
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

if TYPE_CHECKING:
    from peft import PeftModel

logger = logging.getLogger(__name__)

# Of the distance between two numbers next to each other. A hundred undone merges of an adapter a tenth as large as the
# weights leave 0.3 of it in bfloat16, and an adapter of a hundredth that stays merged moves them by 1.5.
_ROUNDINGS = 0.5
# A row that is farther from the checkpoint's is another one: some models put their weights in another order.
_OTHER_ROW = 0.5


class BaseDrift:
    """Compares the base with that of the start.

    Attributes:
        share: how far the rows have moved since the start, as a share of their size.
        is_rounding: whether undone merges alone may leave as much.
    """

    def __init__(self) -> None:
        self.share = 0.0
        self._rows: Tensor | None = None  # of the start
        self._unit = 0.0  # the coarsest rounding so far, as a model that was in bfloat16 for a while keeps its rounding

    @property
    def is_rounding(self) -> bool:
        return self.share <= _ROUNDINGS * self._unit

    @torch.no_grad()
    def has_moved(self, layers: Sequence[Any]) -> bool:
        """Whether the base of PEFT's layers has moved since the last call; the first call notes the start."""
        weights: list[Any] = [getattr(layer.get_base_layer(), "weight", None) for layer in layers]
        rows = [weight.detach()[0] for weight in weights if _is_plain(weight)]
        if not rows:
            return False
        self._unit = max(self._unit, *(torch.finfo(dtype).eps for dtype in {row.dtype for row in rows}))
        found = torch.cat([row.to(rows[0].device) for row in rows]).float()
        # An adapter on other layers has other rows, and so has a model that was moved.
        if self._rows is None or self._rows.shape != found.shape:
            self._rows, self.share = found, 0.0
            return False
        start = self._rows.to(found.device)
        before, self.share = self.share, float((found - start).norm() / start.norm().clamp_min(torch.finfo().tiny))
        return self.share != before


@torch.no_grad()
def change_from_checkpoint(model: "PeftModel", layers: Collection[Any]) -> str:
    """How the base of PEFT's `layers` differs from the checkpoint that was loaded, and what to do.

    The layer that is farthest counts. Empty where rounding leaves as much, and where there is nothing to compare: the
    checkpoint is not on this host as safetensors or has other names, or weights are quantised or sharded.
    """
    if not model.name_or_path:  # made in memory
        return ""
    wanted, shares = set(layers), [0.0]
    try:
        with _rows_of(model.name_or_path, getattr(model.config, "_commit_hash", None)) as row_of:
            for path, module in model.get_base_model().named_modules():
                weight = getattr(module.get_base_layer(), "weight", None) if module in wanted else None
                row = row_of(f"{path}.weight") if _is_plain(weight) else None
                if weight is not None and row is not None and row.shape == weight[0].shape:
                    # Rounded as when it was loaded: in float16 small numbers lose most of their bits.
                    found, row = weight.detach()[0].float().cpu(), row.to(weight.dtype).float()
                    shares.append(float((found - row).norm() / row.norm().clamp_min(torch.finfo().tiny)))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        logger.debug("The base weights are not compared with a checkpoint: %s", error)
    farthest = max(share for share in shares if share < _OTHER_ROW)
    if farthest <= _ROUNDINGS * torch.finfo(torch.bfloat16).eps:
        return ""
    return (
        f"The trainer's base weights differ from the checkpoint {model.name_or_path!r} by {farthest:.2g} of their "
        "size, as after merge_and_unload() of another adapter. Completions would come from another policy than the one "
        "being trained. Save the model before the new adapter is added, with model.save_pretrained(FOLDER) and "
        "tokenizer.save_pretrained(FOLDER), and train the model that is loaded from there."
    )


@contextmanager
def _rows_of(name: str, revision: str | None) -> Iterator[Callable[[str], Tensor | None]]:
    """Returns the first row of a weight of a checkpoint, by its name there; None for a name that it lacks."""

    def file(wanted: str) -> Path | None:
        if Path(name).is_dir():
            return path if (path := Path(name, wanted)).is_file() else None
        found = try_to_load_from_cache(name, wanted, revision=revision)
        return Path(found) if isinstance(found, str) else None  # or a mark that the repository has none

    index = file(SAFE_WEIGHTS_INDEX_NAME)
    files: dict[str, str] | None = None if index is None else json.loads(index.read_text())["weight_map"]
    opened: dict[str, Any] = {}

    def row_of(key: str) -> Tensor | None:
        part = SAFE_WEIGHTS_NAME if files is None else files.get(key)
        if part is None:
            return None
        if part not in opened:
            path = file(part)
            opened[part] = None if path is None else stack.enter_context(safe_open(path, framework="pt"))
        here = opened[part]
        return None if here is None or key not in here.keys() else here.get_slice(key)[:1][0]  # noqa: SIM118

    with ExitStack() as stack:
        yield row_of


def _is_plain(weight: Any) -> bool:
    """Whether a weight is there in full, and not quantised."""
    return (
        isinstance(weight, Tensor)
        and type(weight.detach()) is Tensor
        and weight.is_floating_point()
        and weight.dim() > 1
        and weight.numel() > 0
        and not weight.is_meta
    )
