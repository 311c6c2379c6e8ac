"""Whether the base weights below an adapter are still the ones that the run began with.

Servers keep the checkpoint's base. Code of a user may write to the trainer's: PEFT's merge does, through `data`, which
no counter of torch shows (2.13). Of each weight one row is compared, as a merge changes all rows.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Of the distance between two numbers next to each other. A hundred undone merges of an adapter a tenth as large as the
# weights leave 0.3 of it in bfloat16, and an adapter of a hundredth that stays merged moves them by 1.5.
_ROUNDINGS = 0.5


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
