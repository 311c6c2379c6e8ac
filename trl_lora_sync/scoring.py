"""Log-probabilities of a prompt from the trainer's own model, with its adapter or without."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor


def base_logprobs(
    model: Any, prompt_ids: Sequence[int], *, device: torch.device | None = None
) -> tuple[list[float], float]:
    """`TrainedBase.logprobs` of a PEFT model; the model is left as it was.

    Args:
        device: where a sharded model computes; `None` for where it is.
    """
    logprobs, ids = _score(model, model, prompt_ids, device, with_adapter=False)
    return _picked(logprobs, ids), float(logprobs.std(-1).mean())


def adapter_logprobs(
    model: Any, prompt_ids: Sequence[int], *, forward: Any = None, device: torch.device | None = None
) -> list[float]:
    """Log-probability of each prompt token after the first under the active adapter; the model is left as it was.

    Args:
        model: the PEFT model.
        forward: the wrapper that a launcher has put around it, if the forward pass has to go through that.
        device: where a sharded model computes; `None` for where it is.
    """
    return _picked(*_score(model, forward or model, prompt_ids, device, with_adapter=True))


@torch.no_grad()
def _score(
    model: Any, forward: Any, prompt_ids: Sequence[int], device: torch.device | None, *, with_adapter: bool
) -> tuple[Tensor, Tensor]:
    """Log-probabilities over the vocabulary, `(tokens - 1, vocab)`, and the token ids, `(1, tokens)`."""
    was_training = forward.training
    forward.eval()
    _keep_quantised_layers_as_they_are(model)
    try:
        with nullcontext() if with_adapter else model.disable_adapter():
            ids = torch.tensor([list(prompt_ids)], device=device or model.device)
            logits = forward(input_ids=ids).logits[0, :-1].float()
    finally:
        forward.train(was_training)
    return logits.log_softmax(-1), ids


def _picked(logprobs: Tensor, ids: Tensor) -> list[float]:
    picked: list[float] = logprobs.gather(-1, ids[0, 1:, None])[:, 0].tolist()
    return picked


def _keep_quantised_layers_as_they_are(model: Any) -> None:
    """Leave 4-bit layers in training mode, in which they compute the same.

    In evaluation mode on a CPU, bitsandbytes 0.50 packs the weight anew in place (nn/modules.py `Linear4bit.forward`),
    and FSDP would find another dtype on this process than on the others.
    """
    for layer in model.modules():
        if hasattr(layer, "quant_state"):  # of the layer, as FSDP replaces the weight by one without
            layer.training = True
