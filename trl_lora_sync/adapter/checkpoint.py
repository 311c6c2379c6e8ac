"""The files of the checkpoint that a model was loaded from."""

import json
from pathlib import Path

from safetensors import safe_open

_INDEX = "model.safetensors.index.json"


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
