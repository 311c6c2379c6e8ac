"""An adapter in the shape of a model, with random values, as a trainer would have it."""

from typing import Any

import torch

from trl_lora_sync.adapter.canonical import CanonicalAdapter, LoRAModule
from trl_lora_sync.adapter.flat import FlatBuffer


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def linear_shapes(config: Any) -> dict[str, tuple[int, int]]:
    """`(out_features, in_features)` of the linear layers in each layer of a Llama- or Qwen-shaped model."""
    hidden, heads, kv = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    width = getattr(config, "head_dim", None) or hidden // heads
    return {
        "self_attn.q_proj": (heads * width, hidden),
        "self_attn.k_proj": (kv * width, hidden),
        "self_attn.v_proj": (kv * width, hidden),
        "self_attn.o_proj": (hidden, heads * width),
        "mlp.gate_proj": (config.intermediate_size, hidden),
        "mlp.up_proj": (config.intermediate_size, hidden),
        "mlp.down_proj": (hidden, config.intermediate_size),
    }


class RandomAdapter:
    """LoRA on all linear layers of a model, with new values for each version."""

    def __init__(self, config: Any, rank: int, device: str) -> None:
        # A tuple, as in a run, so that nothing is looked up again.
        self._modules = tuple(
            LoRAModule(
                name=f"model.layers.{layer}.{module}",
                lora_A=torch.empty(rank, inside, device=device),
                lora_B=torch.empty(out, rank, device=device),
                scaling=2.0,
            )
            for layer in range(config.num_hidden_layers)
            for module, (out, inside) in linear_shapes(config).items()
        )
        self._buffer = FlatBuffer()
        self.step(0)

    def step(self, seed: int) -> None:
        torch.manual_seed(seed)
        for module in self._modules:
            module.lora_A.normal_(0.0, module.lora_A.shape[1] ** -0.5)
            module.lora_B.normal_(0.0, 0.02)
        synchronize()

    def read(self) -> CanonicalAdapter:
        return self._buffer.export(self._modules, dtype=torch.bfloat16)
