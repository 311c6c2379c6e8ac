"""What a server of this folder computes with: a formula that costs nothing, or a real model by Transformers."""

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from trl_lora_sync.adapter.canonical import CanonicalAdapter, LoRAModule
from trl_lora_sync.adapter.flat import FlatBuffer

Array = np.ndarray[Any, np.dtype[Any]]
Tensors = Mapping[str, torch.Tensor]
_BLOCKS = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn") | dict.fromkeys(
    ("gate_proj", "up_proj", "down_proj"), "mlp"
)
MODULES = tuple(_BLOCKS)


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The sizes of a base model; the defaults are the sizes of `examples/demo/make_model.py`."""

    hidden: int = 128
    intermediate: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    layers: int = 2
    vocab: int = 260

    @classmethod
    def of_config(cls, config: Any) -> "Shapes":
        """The sizes of a Transformers model whose decoder layers are dense, such as Llama, Qwen2 or Qwen3."""
        heads = config.num_attention_heads
        return cls(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=heads,
            kv_heads=config.num_key_value_heads,
            # The configuration of Qwen2 has no such field (Transformers 5).
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            layers=config.num_hidden_layers,
            vocab=config.vocab_size,
        )

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


def module_name(layer: int, module: str) -> str:
    """The name of one projection in its model."""
    return f"model.layers.{layer}.{_BLOCKS[module]}.{module}"


def tensor_name(layer: int, module: str, matrix: str) -> str:
    """PEFT's key of `lora_A` or `lora_B` of one projection."""
    return f"base_model.model.{module_name(layer, module)}.lora_{matrix}.weight"


def read_adapter(directory: Path) -> tuple[dict[str, torch.Tensor], float]:
    """The tensors of a PEFT directory and the scaling that SGLang gives them.

    Source: srt/lora/lora.py (0.5.11 to 0.5.23): `scaling = lora_alpha / r`; `use_rslora` and patterns are not read.
    """
    config = json.loads((directory / "adapter_config.json").read_text())
    return load_file(directory / "adapter_model.safetensors"), config["lora_alpha"] / config["r"]


class ServedPolicy(ABC):
    """The base model of a server, and the policies that adapters make of it.

    Attributes:
        shapes: of the base model.
    """

    shapes: Shapes

    @abstractmethod
    def patch(self, tensors: Tensors | None, scaling: float) -> Any:
        """What an adapter adds, in the form that `logits` takes; of the base for None."""

    @abstractmethod
    def logits(self, patch: Any, ids: Sequence[int]) -> Array:
        """`(len(ids), vocab)`: the logits after each token."""

    @abstractmethod
    def step(self, context: Any, token: int) -> Any:
        """The context after one more token; `None` before the first."""

    @abstractmethod
    def logits_of(self, patch: Any, context: Any) -> Array:
        """`(vocab,)`: the logits after a context."""

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
        # Row n has the logits after token n, so the first completion token is judged by the last row of the prompt.
        return [float(rows[len(prompt_ids) + i - 1, token]) for i, token in enumerate(completion_ids)]


class ToyPolicy(ServedPolicy):
    """A formula that is causal, cheap, and changed by every LoRA module of a Llama-shaped model.

    It computes no transformer. Its logits depend on the seed of the base, on the prompt, and on `scaling * lora_B @
    lora_A` of each q, k, v, o, gate, up and down projection.
    """

    def __init__(self, shapes: Shapes, seed: int) -> None:
        self.shapes = shapes
        random = np.random.default_rng(seed)

        # By the root of the number of inputs, so that values keep their size in a model of any shape.
        def matrix(out: int, inside: int, gain: float = 1.0) -> Array:
            return np.asarray(random.standard_normal((out, inside)).astype(np.float32) * gain / np.sqrt(inside))

        # The order of these draws belongs to the seed: in another order, each seed is another base model.
        self._embedding = matrix(shapes.vocab, shapes.hidden, gain=np.sqrt(shapes.hidden))
        self._weights = [{name: matrix(*shapes.of(name)) for name in MODULES} for _ in range(shapes.layers)]
        self._head = matrix(shapes.vocab, shapes.hidden, gain=1.5)

    def patch(self, tensors: Tensors | None, scaling: float) -> dict[tuple[int, str], tuple[Array, Array]]:
        """By layer and module."""
        found = {}
        for layer in range(self.shapes.layers):
            for module in MODULES:
                key = tensor_name(layer, module, "A")
                if tensors is not None and key in tensors:
                    lora_B = tensors[tensor_name(layer, module, "B")].float().numpy() * scaling
                    found[layer, module] = (tensors[key].float().numpy(), lora_B)
        return found

    def logits(self, patch: Mapping[tuple[int, str], tuple[Array, Array]], ids: Sequence[int]) -> Array:
        context = np.zeros(self.shapes.hidden, dtype=np.float32)
        rows = []
        for token in ids:
            # Earlier tokens count less, so that the order of a prompt matters.
            context = 0.6 * context + self._embedding[token]
            rows.append(context)
        return self.logits_of(patch, np.stack(rows))

    def step(self, context: Array | None, token: int) -> Array:
        before = np.zeros(self.shapes.hidden, dtype=np.float32) if context is None else context
        return np.asarray(0.6 * before + self._embedding[token])

    def logits_of(self, patch: Mapping[tuple[int, str], Any], context: Array) -> Array:
        hidden, repeats = _normed(context), self.shapes.heads // self.shapes.kv_heads
        for layer in range(self.shapes.layers):

            def project(module: str, value: Array, layer: int = layer) -> Array:
                result: Array = value @ self._weights[layer][module].T
                if (layer, module) in patch:
                    lora_A, lora_B = patch[layer, module]
                    result = result + (value @ lora_A.T) @ lora_B.T
                return result

            q, k, v = (project(name, hidden) for name in ("q_proj", "k_proj", "v_proj"))
            # To the width of q, as grouped-query attention has fewer heads for keys and values.
            k, v = np.repeat(k, repeats, axis=-1), np.repeat(v, repeats, axis=-1)
            hidden = _normed(hidden + project("o_proj", np.tanh(q * k) + v))
            gated = np.tanh(project("gate_proj", hidden)) * project("up_proj", hidden)
            hidden = _normed(hidden + project("down_proj", gated))
        return np.asarray(hidden @ self._head.T)


class ModelPolicy(ServedPolicy):
    """A model that Transformers loads from `model_path`, computed in float32 on the CPU.

    For models of a few million parameters: each sampled token is a forward pass over everything before it.
    """

    def __init__(self, model_path: str | Path) -> None:
        from transformers import AutoModelForCausalLM

        # In float32, so that a trainer in float32 computes the same to 1e-4, and tests can compare closely.
        self._model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        self._weights = dict(self._model.named_parameters())
        self._computing = threading.Lock()  # `functional_call` replaces the weights of the one model meanwhile
        self.config = self._model.config
        self.shapes = Shapes.of_config(self.config)

    def patch(self, tensors: Tensors | None, scaling: float) -> dict[str, torch.Tensor]:
        """The adapted weights as a whole."""
        adapted = {}
        for key, lora_A in (tensors or {}).items():
            if ".lora_A." in key:
                name = f"{key.removeprefix('base_model.model.').removesuffix('.lora_A.weight')}.weight"
                lora_B = (tensors or {})[key.replace(".lora_A.", ".lora_B.")]
                # (out, r) @ (r, in), the shape in which `nn.Linear` keeps its weight.
                # Detached, or each patch would hold a graph of the weights.
                adapted[name] = (self._weights[name] + scaling * lora_B.float() @ lora_A.float()).detach()
        return adapted

    def logits(self, patch: Mapping[str, torch.Tensor], ids: Sequence[int]) -> Array:
        given = {"input_ids": torch.tensor([list(ids)])}
        with self._computing, torch.no_grad():
            rows = torch.func.functional_call(self._model, dict(patch), kwargs=given).logits[0]
        return np.asarray(rows.numpy())

    def step(self, context: tuple[int, ...] | None, token: int) -> tuple[int, ...]:
        return (*(context or ()), token)

    def logits_of(self, patch: Mapping[str, torch.Tensor], context: tuple[int, ...]) -> Array:
        return np.asarray(self.logits(patch, context)[-1])


def random_adapter(
    shapes: Shapes, seed: int, *, rank: int, modules: Sequence[str] = MODULES, std: float = 0.08
) -> CanonicalAdapter:
    """An adapter with random matrices, which moves a policy of these shapes clearly.

    Args:
        std: standard deviation of both matrices; the scaling is 4.
    """
    random = torch.Generator().manual_seed(seed)
    layers = []
    for layer in range(shapes.layers):
        for module in modules:
            out, inside = shapes.of(module)
            # The order of these draws belongs to the seed, as in `ToyPolicy`.
            lora_A = torch.randn(rank, inside, generator=random) * std
            lora_B = torch.randn(out, rank, generator=random) * std
            name = module_name(layer, module)
            layers.append(LoRAModule(name=name, lora_A=lora_A, lora_B=lora_B, scaling=4.0))
    return FlatBuffer().export(layers, dtype=torch.float32, base_model="tiny-qwen3")


def log_softmax(logits: Array) -> Array:
    # In float64: a sum over a vocabulary loses digits in float32, and tests compare these values.
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def _normed(value: Array) -> Array:
    return np.asarray(value / np.sqrt((value**2).mean(axis=-1, keepdims=True) + 1e-6))
