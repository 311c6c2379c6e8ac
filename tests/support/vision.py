"""Tiny vision-language models with random weights, of three shapes, for the trainer and for vLLM alike.

Nothing is downloaded. The tokenizer is the demo's, with one token per byte, and the tokens that stand for images.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from make_model import make_tokenizer
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3Processor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

SHAPES = ("qwen2.5-vl", "qwen3-vl", "gemma3")
# Of vLLM: the route for images, and no room for videos, of which the largest would not fit into a tiny context.
SERVER_ARGS = ("--enable-scale-out", "--limit-mm-per-prompt", '{"image": 1, "video": 0}')
TEXTS = ("what is it?", "a colour", "describe", "and this?")
# A random model samples it now and then, and the trainer then misses an image. Its probability is 0.004 here.
NO_IMAGE_TOKEN = {"logit_bias": {"262": -100.0}}
# What `lora` is given for it.
LANGUAGE_MODEL = {"target_modules": "all-linear", "exclude_modules": ".*(visual|vision_tower|multi_modal_projector).*"}
IMAGE_SIZE = 112
# Gemma3 makes one token of 16 patches here, as vLLM (0.31) expects of it. There is one token only, because an image's
# tokens see each other, and on a CPU vLLM (0.31) lets each see only earlier tokens: log-probabilities of a prompt with
# four were 0.013 away.
_GEMMA_IMAGE_SIZE, _GEMMA_IMAGE_TOKENS = 56, 1

_TEXT: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.05,
    "bos_token_id": None,
}
_VISION: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.1}
_QWEN_VISION = {**_VISION, "depth": 2, "num_heads": 2, "out_hidden_size": 128}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
_QWEN_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
_GEMMA_TOKENS = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
# vLLM (0.31) looks these up to put an image between empty lines.
_GEMMA_NEWLINES = ["\n" * count for count in range(1, 5)]
# The demo's, for messages of several parts as well.
_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['content'] is string -%}{{ message['content'] }}{%- else -%}"
    "{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'text' -%}{{ part['text'] }}{%- else -%}{{ 'IMAGE' }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{{ '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


def make_vision_model(out_dir: Path, shape: str, *, seed: int = 0) -> Path:
    """Write a random-weight bfloat16 model of one of the `SHAPES` and its processor to `out_dir`, and return that."""
    processor = _processor(shape)
    tokenizer = processor.tokenizer
    text = {**_TEXT, "vocab_size": len(tokenizer)}
    text |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _model(shape, text, tokenizer).to(torch.bfloat16)
        if shape == "gemma3":  # Transformers makes zeros, with which no image shows
            torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.1)
    model.save_pretrained(out_dir)
    processor.save_pretrained(out_dir)
    if shape == "gemma3":
        _name_as_vllm_reads(out_dir / "model.safetensors")
    return out_dir


def _processor(shape: str) -> Any:
    tokenizer = make_tokenizer()
    if shape == "gemma3":
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.backend_tokenizer,
            eos_token="<|im_end|>",
            pad_token="<|pad|>",
            clean_up_tokenization_spaces=False,
            extra_special_tokens=_GEMMA_TOKENS,
        )
        tokenizer.add_tokens(_GEMMA_NEWLINES)
        size = {"height": _GEMMA_IMAGE_SIZE, "width": _GEMMA_IMAGE_SIZE}
        template = _CHAT_TEMPLATE.replace("IMAGE", "<start_of_image>")
        return Gemma3Processor(
            Gemma3ImageProcessorPil(size=size), tokenizer, chat_template=template, image_seq_length=_GEMMA_IMAGE_TOKENS
        )
    tokenizer.add_special_tokens({"additional_special_tokens": _QWEN_TOKENS})
    template = _CHAT_TEMPLATE.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    is_third = shape == "qwen3-vl"
    size = {"shortest_edge": 56 * 56, "longest_edge": IMAGE_SIZE * IMAGE_SIZE}
    images = Qwen2VLImageProcessorPil(patch_size=16 if is_third else 14, size=size)
    videos = (Qwen3VLVideoProcessor if is_third else Qwen2VLVideoProcessor)()
    return (Qwen3VLProcessor if is_third else Qwen2_5_VLProcessor)(images, tokenizer, videos, chat_template=template)


def _model(shape: str, text: dict[str, Any], tokenizer: Any) -> Any:
    if shape == "gemma3":
        tower = {**_VISION, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": _GEMMA_IMAGE_SIZE}
        tokens = {name: tokenizer.convert_tokens_to_ids(token) for name, token in _GEMMA_TOKENS.items()}
        return Gemma3ForConditionalGeneration(
            Gemma3Config(
                text_config={**text, "head_dim": 32, "query_pre_attn_scalar": 32},
                vision_config={**tower, "patch_size": 14, "vision_use_head": False},
                mm_tokens_per_image=_GEMMA_IMAGE_TOKENS,
                boi_token_index=tokens["boi_token"],
                eoi_token_index=tokens["eoi_token"],
                image_token_index=tokens["image_token"],
                eos_token_id=tokenizer.eos_token_id,
                initializer_range=0.05,
            )
        )
    start, end, image, video = (tokenizer.convert_tokens_to_ids(token) for token in _QWEN_TOKENS)
    tokens = {
        "vision_start_token_id": start, "vision_end_token_id": end, "image_token_id": image, "video_token_id": video,
    }  # fmt: skip
    text = {**text, "rope_parameters": _ROPE}
    if shape == "qwen3-vl":
        vision = {**_QWEN_VISION, "patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
        text = {**text, "head_dim": 32, "rope_parameters": {**_ROPE, "mrope_interleaved": True}}
        return Qwen3VLForConditionalGeneration(
            Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **tokens)
        )
    vision = {**_QWEN_VISION, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **tokens)
    )


def _name_as_vllm_reads(file: Path) -> None:
    """Transformers 5 leaves a level out of the tower's names that vLLM (0.31) needs."""
    tensors = load_file(file)
    renamed = {
        name.replace("vision_tower.", "vision_tower.vision_model.") if ".vision_model." not in name else name: tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, file, metadata={"format": "pt"})


def picture(seed: int) -> Image.Image:
    """A picture of random colours."""
    pixels = torch.randint(0, 256, (IMAGE_SIZE, IMAGE_SIZE, 3), generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(pixels.to(torch.uint8).numpy())


def odd_pictures() -> dict[str, Image.Image]:
    """Pictures that Transformers and vLLM may convert to RGB in different ways, by what is odd about them."""
    plain = picture(7)
    noise = plain.convert("L")
    transparent = plain.copy()
    transparent.putalpha(noise)
    by_palette = plain.quantize(16)
    by_palette.info["transparency"] = 0
    turned = plain.crop((0, 0, IMAGE_SIZE, IMAGE_SIZE // 2))
    turned.getexif()[0x0112] = 6  # by 90 degrees
    return {
        "RGBA": transparent,
        "LA": transparent.convert("LA"),
        "transparent palette": by_palette,
        "CMYK": plain.convert("CMYK"),
        "F": noise.convert("F"),
        "turned by EXIF": turned,
    }


def with_images(texts: Sequence[str] = TEXTS) -> Dataset:
    """A conversational dataset with one picture for each prompt, in the column that TRL knows."""
    return Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": text}] for text in texts],
            "image": [picture(seed) for seed in range(len(texts))],
        }
    )


def tokenized(processor: Any, image: Image.Image | None, text: str) -> dict[str, Tensor]:
    """What the model is given for one user message, by the names of its arguments."""
    parts = [] if image is None else [{"type": "image", "image": image}]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
    return dict(
        processor.apply_chat_template(
            [[message]], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
    )


def completion_logps(model: Any, inputs: dict[str, Tensor], completion_ids: list[int]) -> Tensor:
    """Log-probability of each completion token after `inputs` under the trainer's model, at temperature 1."""
    length, added = inputs["input_ids"].shape[1], torch.tensor([completion_ids])
    longer = {name: value for name, value in inputs.items() if name != "attention_mask"}
    longer["input_ids"] = torch.cat([inputs["input_ids"], added], dim=1)
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in inputs:
            longer[name] = torch.cat([inputs[name], torch.zeros_like(added)], dim=1)
    was_training = model.training
    with torch.no_grad():
        logits = model.eval()(**longer).logits[0].float()
    model.train(was_training)
    return logits.log_softmax(-1)[length - 1 : -1].gather(1, added[0, :, None])[:, 0]
