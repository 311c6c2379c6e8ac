"""Tiny models and adapters with random weights, built from config objects; nothing is downloaded."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.nn.functional import pad
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from trl_lora_sync.adapter.canonical import CanonicalAdapter, LoRAModule
from trl_lora_sync.adapter.flat import FlatBuffer

R, IN, OUT = 2, 8, 16
VOCABULARY = 32
PROMPT = torch.tensor([[1, 5, 9, 2, 30, 7]])

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}


def base_model(architecture: str = "qwen3", *, seed: int = 0) -> torch.nn.Module:
    """The same random weights for the same arguments, in float32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if architecture == "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(**_SHAPE))
        elif architecture == "llama":
            model = LlamaForCausalLM(LlamaConfig(**_SHAPE))
        else:
            model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=2, n_head=2))
    return model.eval()


def randomize_adapters(model: torch.nn.Module, *, seed: int = 1) -> None:
    """Fill every LoRA matrix, as if it had been trained; the lora_B of a fresh adapter is zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


def lora_model(architecture: str = "qwen3", **lora: Any) -> PeftModel:
    """A model with a trained-looking adapter; the fields of `LoraConfig` default to a plain adapter of rank R."""
    settings = {"r": R, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"} | lora
    model = get_peft_model(base_model(architecture), LoraConfig(**settings)).eval()
    randomize_adapters(model)
    return model


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model(PROMPT).logits


def lora_module(
    name: str = "model.layers.0.q_proj", *, rank: int = R, scaling: float = 1.5, seed: int = 0
) -> LoRAModule:
    generator = torch.Generator().manual_seed(seed)
    return LoRAModule(
        name=name,
        lora_A=torch.randn(rank, IN, generator=generator),
        lora_B=torch.randn(OUT, rank, generator=generator),
        scaling=scaling,
    )


def reference_tensors(modules: Iterable[LoRAModule], dtype: torch.dtype) -> dict[str, Tensor]:
    """What the canonical form is, made of one matrix after the other."""
    modules, tensors = list(modules), {}
    rank = max(module.rank for module in modules)
    for module in modules:
        missing, prefix = rank - module.rank, f"base_model.model.{module.name}"
        lora_A, lora_B = module.lora_A.detach(), module.lora_B.detach().float() * module.scaling
        tensors[f"{prefix}.lora_A.weight"] = pad(lora_A, (0, 0, 0, missing)).to(dtype)
        tensors[f"{prefix}.lora_B.weight"] = pad(lora_B, (0, missing)).to(dtype)
    return tensors


def canonical(modules: Sequence[LoRAModule] | None = None, *, dtype: torch.dtype = torch.float32) -> CanonicalAdapter:
    return FlatBuffer().export(modules or [lora_module()], dtype=dtype, base_model="org/base")


def big_adapter(payload_bytes: int) -> CanonicalAdapter:
    """An adapter of about `payload_bytes`, to meet the end of a disk."""
    width = payload_bytes // (2 * 4 * R)
    module = LoRAModule(name="layer", lora_A=torch.ones(R, width), lora_B=torch.ones(width, R), scaling=1.0)
    return FlatBuffer().export([module], dtype=torch.float32)


def everything_under(folder: Path) -> list[str]:
    """Every path below `folder`, hidden ones too."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
