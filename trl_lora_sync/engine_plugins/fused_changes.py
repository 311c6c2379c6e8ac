"""What an adapter does to served weights beside adding lora_B @ lora_A to them: DoRA, whole tensors, biases, rows.

As everywhere in fused serving, all is computed in float32 from the base, and rounded once. Knows torch and no engine.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trl_lora_sync.engine_plugins.fused_file import Kind
from trl_lora_sync.engine_plugins.fused_placement import WeightSlice


@dataclass(frozen=True)
class Change:
    """A change of one tensor of the checkpoint, in the memory of the device.

    Attributes:
        kind: whether `tensor` is its new value, is added to it, or is the new value of some rows.
        tensor: `(rows, columns)`; a vector is one row.
        indices: of the rows, `(rows,)` and in host memory; for `"rows"` only.
    """

    kind: Kind
    tensor: Tensor
    indices: Tensor | None = None

    def write(self, weight: Tensor, base: Tensor, piece: WeightSlice) -> None:
        """Write the changed tensor's rectangle over `weight`, whose base is `base`."""
        columns = self.tensor[:, slice(*piece.columns)]
        if self.kind == "value":
            weight.copy_(columns[slice(*piece.rows)])
        elif self.kind == "added":
            # To the base, which may be on the host: `weight` holds what the adapter before has added.
            weight.copy_(base.to(weight.device).float() + columns[slice(*piece.rows)].float())
        else:
            assert self.indices is not None
            # The whole rectangle, because the adapter before may have replaced other rows.
            weight.copy_(base)
            first, end = piece.rows
            # `nonzero` on a GPU would wait for all that it computes; the indices are on the host.
            chosen = ((self.indices >= first) & (self.indices < end)).nonzero()[:, 0]
            places = (self.indices[chosen] - first).to(weight.device)
            weight[places] = columns[chosen.to(weight.device)].to(weight.dtype)


def with_norms(rows: Tensor, norms: Tensor) -> Tensor:
    """Each row scaled to its norm, `(rows,)`; all in float32.

    Source: DoRA as PEFT merges it, peft/tuners/lora/variants.py `DoraLinearVariant.merge_safe`, 0.18 to 0.21.
    """
    found: Tensor = torch.linalg.vector_norm(rows, dim=1)
    # A row of zeros has no direction; PEFT divides by its norm, which the check for finite values finds there.
    return rows * (norms / found.where(found > 0, 1.0))[:, None]


def as_matrix(tensor: Tensor) -> Tensor:
    """A vector as a matrix of one row, without a copy."""
    return tensor.unsqueeze(0) if tensor.ndim == 1 else tensor
