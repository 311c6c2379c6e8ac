"""An adapter in the shape of a model, with random values, as a trainer would have it."""

from typing import Any

import torch

from trl_lora_sync.adapter.canonical import CanonicalAdapter, LoRAModule
from trl_lora_sync.adapter.flat import FlatBuffer
from trl_lora_sync.testing.policy import MODULES, Shapes, module_name


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class RandomAdapter:
    """LoRA on all linear layers of a model, with new values for each version."""

    def __init__(self, config: Any, rank: int, device: str) -> None:
        # A tuple, as in a run, so that nothing is looked up again.
        shapes = Shapes.of_config(config)
        self._modules = tuple(
            LoRAModule(
                name=module_name(layer, module),
                lora_A=torch.empty(rank, inside, device=device),
                lora_B=torch.empty(out, rank, device=device),
                scaling=2.0,
            )
            for layer in range(shapes.layers)
            for module in MODULES
            for out, inside in [shapes.of(module)]
        )
        self._buffer = FlatBuffer()
        self.step(0)

    def step(self, seed: int, std: float = 0.02) -> None:
        """Other values; `std` is that of lora_B."""
        torch.manual_seed(seed)
        for module in self._modules:
            module.lora_A.normal_(0.0, module.lora_A.shape[1] ** -0.5)
            module.lora_B.normal_(0.0, std)
        synchronize()

    def read(self) -> CanonicalAdapter:
        return self._buffer.export(self._modules, dtype=torch.bfloat16)
