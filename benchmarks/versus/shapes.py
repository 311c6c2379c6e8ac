"""Random-weight models in the shapes of Qwen3, written fast enough for a machine that is lent by the minute."""

import json
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from make_model import make_tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

_COMMON = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024,
    },
    "0.6b": _COMMON | {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "8b": _COMMON | {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    },
    "32b": _COMMON | {
        "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
    },
}  # fmt: skip
_BYTES = 2  # bfloat16
_WRITERS = 8
_STD = 0.02


def config_of(shape: str) -> Qwen3Config:
    tokenizer = make_tokenizer()
    config = Qwen3Config(
        **{"tie_word_embeddings": False, **SHAPES[shape]},
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="bfloat16",
    )
    config.architectures = ["Qwen3ForCausalLM"]
    return config


def parameter_shapes(shape: str) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint by its name."""
    config = config_of(shape)
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    return {name: tuple(value.shape) for name, value in model.named_parameters()}


def parameters_of(shape: str) -> int:
    return sum(torch.Size(size).numel() for size in parameter_shapes(shape).values())


def model_bytes(shape: str) -> int:
    return parameters_of(shape) * _BYTES


def adapter_parameters(shape: str, rank: int) -> int:
    """Parameters of a LoRA adapter on all linear layers of the decoder."""
    sizes = [size for name, size in parameter_shapes(shape).items() if name.endswith("proj.weight")]
    return rank * sum(rows + columns for rows, columns in sizes)


def write_model(folder: Path, shape: str, device: str) -> Path:
    """Write the checkpoint and a byte-level tokenizer, unless they are there already; the weights depend on names only.

    `save_pretrained` copies and writes one tensor after the other, which takes minutes for 64 GB; here several files
    are written at the same time.
    """
    if (folder / "config.json").exists():  # written last
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    shards: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, size in parameter_shapes(shape).items():
        parts = name.split(".")
        shards.setdefault(parts[2] if "layers" in parts else name, {})[name] = size
    files = {f"model-{n:05}-of-{len(shards):05}.safetensors": found for n, found in enumerate(shards.values(), start=1)}
    with ThreadPoolExecutor(_WRITERS) as pool:
        list(pool.map(lambda file: _write_shard(folder / file, files[file], device), files))
    index = {
        "metadata": {"total_size": model_bytes(shape)},
        "weight_map": {name: file for file, found in files.items() for name in found},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    make_tokenizer().save_pretrained(folder)
    config_of(shape).save_pretrained(folder)
    return folder


def _write_shard(file: Path, sizes: Mapping[str, tuple[int, ...]], device: str) -> None:
    """One safetensors file: the header's length in 8 bytes, the header as JSON, and the tensors one after the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, size in sizes.items():
        start, end = end, end + torch.Size(size).numel() * _BYTES
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name, size in sizes.items():
            out.write(memoryview(original(name, size, device).cpu().flatten().view(torch.uint8).numpy()))


def original(name: str, size: tuple[int, ...], device: str) -> torch.Tensor:
    """A tensor of the checkpoint, generated: the same bits each time on the same kind of device."""
    tensor = torch.empty(size, dtype=torch.bfloat16, device=device)
    if len(size) == 1:  # the norms
        return tensor.fill_(1.0)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return tensor.normal_(0.0, _STD, generator=generator)
