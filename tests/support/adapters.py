"""Adapters with other tensors."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from trl_lora_sync.adapter.canonical import CanonicalAdapter


def with_tensors(adapter: CanonicalAdapter, tensors: Mapping[str, torch.Tensor]) -> CanonicalAdapter:
    """The same adapter with other tensors, all of one dtype."""
    flat = torch.cat([tensor.flatten() for tensor in tensors.values()])
    return replace(adapter, flat=flat, shapes={key: tensor.shape for key, tensor in tensors.items()})
