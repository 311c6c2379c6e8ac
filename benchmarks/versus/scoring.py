"""Log-probabilities whose bits are the same as long as the served weights are."""

from typing import Any

from trl_lora_sync.engines.base import Deadline


def prompt_logprobs(engine: Any, model: str, prompt: list[int], deadline: Deadline) -> list[float]:
    """Of each token after the first, in one request by itself; `Engine.score` makes many, which vLLM may batch.

    Args:
        engine: a client of a vLLM server on which nothing else runs.
    """
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0}
    answer = engine._post_sampling("/v1/completions", body, model, deadline)
    entries = answer.raise_for_status().json()["choices"][0]["prompt_logprobs"][1:]
    return [entry[str(token)]["logprob"] for entry, token in zip(entries, prompt[1:], strict=True)]
