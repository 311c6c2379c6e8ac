"""A tiny policy for fake servers: causal, cheap, and moved by every LoRA module of a Llama-shaped model.

It is no transformer. It only has the property that tests need: what it says depends on the seed of the base, on the
prompt, and on `scaling * lora_B @ lora_A` of each q, k, v, o, gate, up and down projection.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

Tensors = Mapping[str, torch.Tensor]
_LORA_NAME = "base_model.model.model.layers.{layer}.{block}.{module}.lora_{matrix}.weight"
_BLOCKS = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn") | dict.fromkeys(
    ("gate_proj", "up_proj", "down_proj"), "mlp"
)
MODULES = tuple(_BLOCKS)


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The numbers of a base model; the defaults are those of `examples/demo/make_model.py`."""

    hidden: int = 128
    intermediate: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    layers: int = 2
    vocab: int = 260

    def of(self, module: str) -> tuple[int, int]:
        """(out_features, in_features) of a projection."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (q, self.hidden),
            "k_proj": (kv, self.hidden),
            "v_proj": (kv, self.hidden),
            "o_proj": (self.hidden, q),
            "gate_proj": (self.intermediate, self.hidden),
            "up_proj": (self.intermediate, self.hidden),
            "down_proj": (self.hidden, self.intermediate),
        }[module]


def tensor_name(layer: int, module: str, matrix: str) -> str:
    """PEFT's key of `lora_A` or `lora_B` of one projection."""
    return _LORA_NAME.format(layer=layer, block=_BLOCKS[module], module=module, matrix=matrix)


def read_adapter(directory: Path) -> tuple[dict[str, torch.Tensor], float]:
    """The tensors of a PEFT directory and the scaling that SGLang gives them.

    Source: srt/lora/lora.py (0.5.11 to 0.5.23): `scaling = lora_alpha / r`; `use_rslora` and patterns are not read.
    """
    config = json.loads((directory / "adapter_config.json").read_text())
    return load_file(directory / "adapter_model.safetensors"), config["lora_alpha"] / config["r"]


class Policy:
    """The base model of a fake server, and what adapters make of it."""

    def __init__(self, shapes: Shapes, seed: int) -> None:
        self.shapes = shapes
        random = np.random.default_rng(seed)

        def matrix(out: int, inside: int, gain: float = 1.0) -> np.ndarray:
            return random.standard_normal((out, inside)).astype(np.float32) * gain / np.sqrt(inside)

        self._embedding = matrix(shapes.vocab, shapes.hidden, gain=np.sqrt(shapes.hidden))
        self._weights = [{name: matrix(*shapes.of(name)) for name in MODULES} for _ in range(shapes.layers)]
        self._head = matrix(shapes.vocab, shapes.hidden, gain=1.5)

    def patch(self, tensors: Tensors | None, scaling: float) -> dict[tuple[int, str], tuple[np.ndarray, np.ndarray]]:
        """What an adapter adds, by layer and module, in a form that `logits` takes."""
        found = {}
        for layer in range(self.shapes.layers):
            for module in MODULES:
                key = tensor_name(layer, module, "A")
                if tensors is not None and key in tensors:
                    lora_B = tensors[tensor_name(layer, module, "B")].float().numpy() * scaling
                    found[layer, module] = (tensors[key].float().numpy(), lora_B)
        return found

    def logits(self, patch: Mapping[tuple[int, str], tuple[np.ndarray, np.ndarray]], ids: Sequence[int]) -> np.ndarray:
        """`(len(ids), vocab)`: the logits after each token."""
        context = np.zeros(self.shapes.hidden, dtype=np.float32)
        rows = []
        for token in ids:
            context = 0.6 * context + self._embedding[token]
            rows.append(context)
        return self.logits_of(patch, np.stack(rows))

    def step(self, context: np.ndarray | None, token: int) -> np.ndarray:
        """The context after one more token; `None` before the first."""
        before = np.zeros(self.shapes.hidden, dtype=np.float32) if context is None else context
        return 0.6 * before + self._embedding[token]

    def logits_of(self, patch: Mapping[tuple[int, str], Any], context: np.ndarray) -> np.ndarray:
        hidden, repeats = _normed(context), self.shapes.heads // self.shapes.kv_heads
        for layer in range(self.shapes.layers):

            def project(module: str, value: np.ndarray, layer: int = layer) -> np.ndarray:
                result = value @ self._weights[layer][module].T
                if (layer, module) in patch:
                    lora_A, lora_B = patch[layer, module]
                    result = result + (value @ lora_A.T) @ lora_B.T
                return result

            q, k, v = (project(name, hidden) for name in ("q_proj", "k_proj", "v_proj"))
            k, v = np.repeat(k, repeats, axis=-1), np.repeat(v, repeats, axis=-1)
            hidden = _normed(hidden + project("o_proj", np.tanh(q * k) + v))
            gated = np.tanh(project("gate_proj", hidden)) * project("up_proj", hidden)
            hidden = _normed(hidden + project("down_proj", gated))
        return hidden @ self._head.T

    def logprobs(
        self,
        tensors: Tensors | None,
        scaling: float,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        temperature: float = 1.0,
    ) -> list[float]:
        """Log-probability of each completion token."""
        ids = [*prompt_ids, *completion_ids]
        rows = log_softmax(self.logits(self.patch(tensors, scaling), ids) / temperature)
        return [float(rows[len(prompt_ids) + i - 1, token]) for i, token in enumerate(completion_ids)]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _normed(value: np.ndarray) -> np.ndarray:
    return value / np.sqrt((value**2).mean(axis=-1, keepdims=True) + 1e-6)
