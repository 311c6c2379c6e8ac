"""The attention of TRL's asynchronous trainer in plain torch, for machines without FlashAttention 3.

TRL fetches that kernel from a hub, and it needs a Hopper GPU. What is computed is the same.
"""

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import trl
from packaging.version import Version
from torch import Tensor

# Before, the trainer computed with an attention of Transformers by its name.
_TREE_FROM = Version("1.16")


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Attention of several sequences laid end to end, each to its own keys.

    Args:
        q: `(queries, heads, size)`, of all sequences.
        k: `(keys, key heads, size)`, likewise.
        v: as `k`.
        cu_seqlens_q: where each sequence begins in `q`, and where the last one ends.
        cu_seqlens_k: the same in `k`; the queries of a sequence are the last of its keys.
    """
    assert causal
    assert window_size == (-1, -1)
    parts = []
    for place in range(len(cu_seqlens_q) - 1):
        queries = q[cu_seqlens_q[place] : cu_seqlens_q[place + 1]].transpose(0, 1)
        begin, end = cu_seqlens_k[place], cu_seqlens_k[place + 1]
        keys, values = k[begin:end].transpose(0, 1), v[begin:end].transpose(0, 1)
        length, seen = queries.shape[1], keys.shape[1]
        mask = torch.ones(length, seen, dtype=torch.bool, device=q.device).tril(seen - length)
        out = torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=softmax_scale, enable_gqa=True
        )
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


@contextlib.contextmanager
def plain_kernel() -> Iterator[None]:
    """Let TRL's asynchronous trainer compute with this attention in the block, also without a GPU."""
    from trl.experimental.async_grpo import async_grpo_trainer

    with contextlib.ExitStack() as patches:
        if not torch.cuda.is_available():  # whose name TRL looks up, for the share of its peak that is used
            no_peak = mock.patch.object(async_grpo_trainer, "get_peak_flops_per_device", return_value=None, create=True)
            patches.enter_context(no_peak)
        patches.enter_context(_plain_attention(async_grpo_trainer))
        yield


@contextlib.contextmanager
def _plain_attention(async_grpo_trainer: ModuleType) -> Iterator[None]:
    if Version(trl.__version__) >= _TREE_FROM:
        from trl.experimental.async_grpo import packing

        kernel = mock.Mock(spec=["flash_attn_varlen_func"], flash_attn_varlen_func=flash_attn_varlen_func)
        with mock.patch.object(packing, "_flash_attn", return_value=kernel):
            yield
        return
    create = async_grpo_trainer.create_model_from_path

    def with_sdpa(*args: Any, **kwargs: Any) -> Any:
        return create(*args, **{**kwargs, "attn_implementation": "sdpa"})

    with mock.patch.object(async_grpo_trainer, "create_model_from_path", with_sdpa):
        yield
