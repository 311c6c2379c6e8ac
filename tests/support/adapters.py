"""Adapters with other tensors, and of other programs."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from trl_lora_sync.adapter.canonical import CanonicalAdapter
from trl_lora_sync.engine_plugins.version_note import NOTE_FILE, NOTE_KEY


def make_foreign(folder: Path, form: str | None = None) -> None:
    """Turn a version into an adapter of another program: without a note, and without the key that announces it.

    Args:
        form: of a note that this package does not know, which the configuration announces.
    """
    (folder / NOTE_FILE).unlink()
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text())
    del config[NOTE_KEY]
    file.write_text(json.dumps(config | ({NOTE_KEY: form} if form else {})))


def with_tensors(adapter: CanonicalAdapter, tensors: Mapping[str, torch.Tensor]) -> CanonicalAdapter:
    """The same adapter with other tensors, all of one dtype."""
    flat = torch.cat([tensor.flatten() for tensor in tensors.values()])
    return replace(adapter, flat=flat, shapes={key: tensor.shape for key, tensor in tensors.items()})
