"""Evidence that a server samples from the model that is being trained: log-probabilities of a fixed prompt.

Compares numbers only; who computes them is somebody else's business.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

# Small token ids, which every vocabulary has, in no order that a text would have.
PROBE_PROMPT = tuple((37 * place + 11) % 200 for place in range(24))
# Rounding, quantisation of the served base and other kernels stay well below; another model does not.
_SUSPICIOUS = 0.5


@dataclass(frozen=True, kw_only=True)
class TrainedBase:
    """What the trainer knows of its own base model.

    Attributes:
        name: what the trainer was told to load, if known.
        vocab_size: number of token ids it knows, if known.
        logprobs: computes the log-probability of each token of a prompt after the first, and the spread (standard
            deviation) of the log-probabilities over the vocabulary, without any adapter.
    """

    name: str | None
    vocab_size: int | None
    logprobs: Callable[[Sequence[int]], tuple[list[float], float]]

    def remembered(self) -> "TrainedBase":
        """The same with its answer for `PROBE_PROMPT` computed, so that asking again runs no model."""
        answer = self.logprobs(PROBE_PROMPT)
        return replace(self, logprobs=lambda prompt_ids: answer)


@dataclass(frozen=True, kw_only=True)
class BaseGap:
    """How far the served base is from the trained one.

    Attributes:
        mean: mean absolute difference of the log-probabilities.
        spread: of the trained model's log-probabilities over the vocabulary; the yardstick.
    """

    mean: float
    spread: float

    @property
    def is_suspicious(self) -> bool:
        return not self.mean <= _SUSPICIOUS * self.spread

    def __str__(self) -> str:
        return f"mean |served - trained| {self.mean:.3f}, against a spread of {self.spread:.3f} over the vocabulary"


def base_gap(base: TrainedBase, served: Sequence[float]) -> BaseGap:
    """Compare the served base's log-probabilities of `PROBE_PROMPT` with the trainer's."""
    trained, spread = base.logprobs(PROBE_PROMPT)
    mean = sum(abs(a - b) for a, b in zip(trained, served, strict=True)) / len(trained)
    return BaseGap(mean=mean, spread=spread)


@torch.no_grad()
def base_logprobs(
    model: Any, prompt_ids: Sequence[int], *, device: torch.device | None = None
) -> tuple[list[float], float]:
    """`TrainedBase.logprobs` of a PEFT model; the model is left as it was.

    Args:
        device: where a sharded model computes; `None` for where it is.
    """
    was_training = model.training
    model.eval()
    _keep_quantised_layers_as_they_are(model)
    try:
        with model.disable_adapter():
            ids = torch.tensor([list(prompt_ids)], device=device or model.device)
            logits = model(input_ids=ids).logits[0, :-1].float()
    finally:
        model.train(was_training)
    logprobs = logits.log_softmax(-1)
    picked = logprobs.gather(-1, ids[0, 1:, None])[:, 0]
    return picked.tolist(), float(logprobs.std(-1).mean())


def _keep_quantised_layers_as_they_are(model: Any) -> None:
    """Leave 4-bit layers in training mode, in which they compute the same.

    In evaluation mode on a CPU, bitsandbytes 0.50 packs the weight anew in place (nn/modules.py `Linear4bit.forward`),
    and FSDP would find another dtype on this process than on the others.
    """
    for layer in model.modules():
        if hasattr(getattr(layer, "weight", None), "quant_state"):
            layer.training = True
