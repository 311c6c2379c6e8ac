"""Fused serving without a copy of the base: each adapter is folded into the served weights and taken out bit for bit.

What is kept beside the weights is what subtraction does not bring back, see `folded_base`. Plain LoRA only. Knows torch
and no engine.
"""

from torch import Tensor

from trl_lora_sync.engine_plugins.folded_base import BaseChangedError, FoldedBase
from trl_lora_sync.engine_plugins.fused_file import AdapterFileError, Content
from trl_lora_sync.engine_plugins.fused_placement import PlacementError, WeightSlice
from trl_lora_sync.engine_plugins.fused_weights import FusedAdapter, part_of


class FoldedWeights:
    """Parameters of the served model, by their keys, with one adapter in them at most."""

    def __init__(self) -> None:
        self._weights: dict[str, Tensor] = {}
        # Sums over the bits of each parameter's base, by which `compared` does without a copy.
        self._unchanged: dict[str, FoldedBase] = {}
        # Of the modules that the last adapter has changed, which is in them.
        self._folded = FoldedBase([])
        self._modules: list[str] = []

    @property
    def kept_bytes(self) -> int:
        """Memory that the present adapter takes beside the weights and its own matrices."""
        return self._folded.kept_bytes

    # The worker looks for known parameters here or in its table of targets, by the same expression.
    def __contains__(self, owner: str) -> bool:
        return owner in self._weights

    def add(self, parameters: dict[str, Tensor]) -> None:
        """Parameters that no adapter has changed yet."""
        self._weights |= parameters
        self._unchanged |= {owner: FoldedBase([weight]) for owner, weight in parameters.items()}

    def check_content(self, content: Content) -> None:
        """Raises AdapterFileError for an adapter that does more than adding lora_B @ lora_A."""
        others = [*content.magnitudes, *content.tensors]
        if others:
            raise AdapterFileError(
                f"The adapter changes {others[0]!r} by more than LoRA's two matrices, which this server can only do "
                "with a copy of its base weights: it was started with TRL_LORA_SYNC_FUSED_BASE=none. Restart it "
                "without that."
            )

    def check_pieces(self, found: dict[str, list[WeightSlice]], parameters: dict[str, Tensor]) -> None:
        """Raises PlacementError for what is not whole rows of a parameter."""
        for module, pieces in found.items():
            for piece in pieces:
                weight = parameters[piece.owner]
                # `FoldedBase` flattens its weights, and a part of a matrix is contiguous only if its rows are whole.
                if weight.ndim != 2 or not weight.is_contiguous() or (piece.left, piece.right) != (0, weight.shape[1]):
                    raise PlacementError(
                        f"{module!r} is not whole rows of {piece.owner!r}, which TRL_LORA_SYNC_FUSED_BASE=none needs. "
                        "Restart the server without that"
                    )

    def write(self, adapter: FusedAdapter | None, pieces: dict[str, list[WeightSlice]]) -> None:
        """Put an adapter into the weights, or none; after an error they hold the base, or what was not taken out yet.

        Raises:
            RuntimeError: the base did not come back, so nothing can be put into it.
        """
        try:
            # Also after a write that failed: what was not taken out then is taken out before anything is added.
            self._folded.unfold()
        except BaseChangedError as error:
            raise RuntimeError(
                f"The base weights are not what they were: {error}. Something else has written to them. Restart the "
                "server."
            ) from error
        if adapter is None:
            return
        # Kept for all adapters of the same modules, because making it reads all of their weights.
        # All-zero matrices are left out of an adapter, so versions of one run can have different modules.
        if list(adapter.matrices) != self._modules:
            # Made while no adapter is in the weights, because it remembers what they hold.
            self._folded = FoldedBase(
                [part_of(self._weights[piece.owner], piece) for name in adapter.matrices for piece in pieces[name]]
            )
            # Last, so that after an error the names are still those in `_folded`.
            self._modules = list(adapter.matrices)
        self._folded.fold(
            [
                _matrices_of(piece, *adapter.matrices[name], adapter.scaling)
                for name in self._modules
                for piece in pieces[name]
            ]
        )

    def compared(self) -> dict[str, int]:
        """How many parameters there are, and how many of them are not the base, by the sums of their bits."""
        different = sum(base.has_changed() for base in self._unchanged.values())
        return {"compared": len(self._unchanged), "different": different}


def _matrices_of(piece: WeightSlice, lora_A: Tensor, lora_B: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    rows = lora_B[slice(*piece.rows)]
    # The trainer writes adapters with a scaling of 1. In 16 bits, the product with another one would be rounded.
    return lora_A[:, slice(*piece.columns)], rows if scaling == 1.0 else rows.float() * scaling
