"""Tiny models, LoRA configurations, and the log-probabilities of the trainer's own forward pass."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

R, ALPHA = 8, 16


def lora(**changes: Any) -> LoraConfig:
    """A plain LoRA configuration on all linear layers, with the given fields changed."""
    fields = {"r": R, "lora_alpha": ALPHA, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return LoraConfig(**{**fields, **changes})


def nf4(**changes: Any) -> BitsAndBytesConfig:
    """A base model in 4 bits that computes in bfloat16, with the given fields changed."""
    fields = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
    return BitsAndBytesConfig(**{**fields, **changes})


def peft_model(base: Path, **changes: Any) -> PeftModel:
    return get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), lora(**changes))


def randomize_adapter(model: torch.nn.Module, seed: int, std: float = 0.05) -> None:
    """Give the adapter matrices random values that move the policy clearly; `lora_B` is zero after PEFT's init."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def per_token_logps(model: torch.nn.Module, prompt_ids: list[int], completion_ids: list[int]) -> Tensor:
    """Log-probability of each completion token under the trainer's model, in float32 and at temperature 1."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt_ids + completion_ids])).logits[0].float()
    logps = logits.log_softmax(-1)[len(prompt_ids) - 1 : -1]
    return logps.gather(1, torch.tensor(completion_ids).unsqueeze(1)).squeeze(1)


def base_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """Copies of everything in the model but adapters."""
    return {name: value.clone() for name, value in model.state_dict().items() if "lora_" not in name}


def same_tensors(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Whether both hold the same names with bit-identical values."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def written_adapter(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "adapter_model.safetensors")


def change_base(layer: LoraLayer, strength: float) -> None:
    """Change the base weight of a layer by a share of its size, as a merge does."""
    base = layer.get_base_layer().weight
    change = torch.randn(base.shape, generator=torch.Generator().manual_seed(1))
    base.data += strength * base.norm() / change.norm() * change


def merged_model(folder: Path, strength: float) -> Any:
    """The model of a checkpoint, into which an adapter of an earlier stage was merged in memory."""
    model = peft_model(folder)
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            change_base(layer, strength)
    return model.unload()
