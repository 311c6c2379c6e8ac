"""The checkpoint that a model was loaded from."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn

_INDEX = "model.safetensors.index.json"
# Of a configuration: how a model is loaded, run and saved, not what it computes. Tokens that were added show elsewhere.
_NOT_COMPUTED = {
    "architectures", "dtype", "name_or_path", "_name_or_path", "quantization_config", "torch_dtype",
    "transformers_version", "use_cache", "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id",
}  # fmt: skip


def weight_files(name: str | None, revision: str | None) -> dict[str, Path]:
    """Tensor names to the safetensors files of a checkpoint that is in a folder or in the cache.

    Raises:
        OSError, ValueError, SafetensorError: it is not there, or cannot be read.
    """
    if not name:
        raise ValueError("the model does not record where it was loaded from")
    folder = Path(name)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        # The trainer has loaded the model, so its files are in the cache, and a check starts no download.
        folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
    there = {path.name: path for path in sorted(folder.glob("*.safetensors"))}
    files: dict[str, Path] = {}
    if (folder / _INDEX).exists():
        # Other files may lie beside its own, as of an earlier download, and servers leave them out
        # (vLLM 0.31, model_loader/weight_utils.py `filter_duplicate_safetensors_files`).
        weights = json.loads((folder / _INDEX).read_text()).get("weight_map", {})
        files = {key: there[file] for key, file in weights.items() if file in there}
    else:
        for path in there.values():
            with safe_open(path, framework="pt") as opened:
                files |= dict.fromkeys(opened.keys(), path)
    if not files:
        raise ValueError("it has no safetensors file")
    return files


def config_changes(model: nn.Module) -> dict[str, Any]:
    """Settings of a model that its checkpoint lacks, such as RoPE scaling by `model_init_kwargs`.

    Returns:
        Fields of the configuration with the model's values, nested as there; empty also if the checkpoint is not here.
    """
    config: Any = model.config
    try:
        # Of this class, as other ones may need `trust_remote_code`.
        saved = type(config).from_pretrained(
            model.name_or_path, revision=getattr(config, "_commit_hash", None), local_files_only=True
        )
    except (OSError, ValueError):
        return {}
    return _changes(saved.to_dict(), config.to_dict())


def _changes(saved: Mapping[str, Any], used: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in used.items():
        before = saved.get(name)
        if isinstance(value, dict) and isinstance(before, dict) and name.endswith("_config"):
            value, before = _changes(before, value), {}
        if name not in _NOT_COMPUTED and value != before:
            found[name] = value
    return found
