"""Tiny mixtures of experts with random weights, of three families, for the trainer and for vLLM alike."""

from pathlib import Path
from typing import Any

import torch
from make_model import make_tokenizer
from safetensors.torch import load_file, save_file
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from support.vision import _processor

# Twice the intermediate size is not the hidden one, so that no matrix of the experts is square.
HIDDEN, INTERMEDIATE, EXPERTS = 256, 192, 8


def make_tiny(family: str, folder: Path) -> Path:
    """Write a random bfloat16 model of a family and its tokenizer or processor to `folder`."""
    processor = _processor("qwen3-vl") if family == "qwen3_vl_moe" else make_tokenizer()
    tokenizer = getattr(processor, "tokenizer", processor)
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "initializer_range": 0.05,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    moe = {"moe_intermediate_size": INTERMEDIATE, "num_experts": EXPERTS, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    if family == "qwen3_moe":
        model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**text, **moe, norm_topk_prob=True))
    elif family == "mixtral":
        model = MixtralForCausalLM(MixtralConfig(**text, num_local_experts=EXPERTS, num_experts_per_tok=2))
    else:
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [12, 10, 10], "mrope_interleaved": True}
        # SGLang takes three of them for given (0.5.15, srt/models/qwen3_vl_moe.py), as all published checkpoints have.
        vision = {
            "hidden_size": 64, "intermediate_size": 128, "depth": 3, "num_heads": 2, "out_hidden_size": HIDDEN,
            "patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1, 2],
        }  # fmt: skip
        text["num_hidden_layers"] = 3
        names = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
        start, end, image, video = map(tokenizer.convert_tokens_to_ids, names)
        model = Qwen3VLMoeForConditionalGeneration(
            Qwen3VLMoeConfig(
                text_config={**text, **moe, "norm_topk_prob": True, "decoder_sparse_step": 1, "rope_parameters": rope},
                vision_config=vision,
                tie_word_embeddings=False,
                vision_start_token_id=start,
                vision_end_token_id=end,
                image_token_id=image,
                video_token_id=video,
            )
        )
    model.to(torch.bfloat16).save_pretrained(folder)
    processor.save_pretrained(folder)
    if family == "qwen3_vl_moe":
        transpose_experts(folder / "model.safetensors")
    return folder


def transpose_experts(file: Path) -> None:
    """Store the experts as published checkpoints do; Transformers (5.23) reads both forms and writes the other one.

    Source: transformers/conversion_mapping.py "qwen3_vl_moe"; vllm/model_executor/models/qwen3_vl_moe.py, 0.31.
    """
    tensors = load_file(file)
    turned = {name: one.transpose(1, 2).contiguous() if ".experts." in name else one for name, one in tensors.items()}
    save_file(turned, file, metadata={"format": "pt"})
