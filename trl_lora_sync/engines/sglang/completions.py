"""The requests and answers of SGLang's `/generate`, one sample at a time. Does no I/O."""

import math
from typing import Any, NamedTuple

from trl_lora_sync.engines.base import Completion, Sampling


class Sample(NamedTuple):
    """One sample, in the form that is sent.

    Attributes:
        prompt_ids: as the answer must have them.
        sent_ids: the same, with one token for each image.
        images: as data URLs.
        params: SGLang's sampling parameters.
    """

    prompt_ids: list[int]
    sent_ids: list[int]
    images: list[str]
    params: dict[str, Any]


def sampling_params(sampling: Sampling, sample: int) -> dict[str, Any]:
    """SGLang's names for the sampling fields, all of them explicit, for one single sample.

    Args:
        sample: which of a group's samples; a fixed seed is advanced by it, so that they differ.
    """
    extra = dict(sampling.extra)
    # vLLM's name is `seed`, SGLang's `sampling_seed`, and generation_kwargs may have either.
    seed = extra.pop("seed", extra.pop("sampling_seed", None))
    fields: dict[str, Any] = {
        # Never more, which leaves a reference to the adapter behind up to 0.5.21, see `sglang.engine`.
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        # SGLang switches it off with -1.
        "top_k": sampling.top_k if sampling.top_k > 0 else -1,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "max_new_tokens": sampling.max_tokens,
        "regex": sampling.regex,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if seed is not None:
        fields["sampling_seed"] = seed + sample
    return fields | extra


def read_completion(
    answer: dict[str, Any],
    prompt_ids: list[int],
    sampling: Sampling,
    *,
    must_echo: bool = False,
    max_model_len: int | None = None,
) -> Completion:
    """Check one answer and bring it into the shape TRL expects.

    Args:
        must_echo: whether the answer must have the prompt.
        max_model_len: the server's longest prompt plus completion, if known.

    No version names the adapter in its answer. All give the length of the prompt, unless the sample was aborted in the
    queue, and newer ones the prompt itself.

    Raises:
        ValueError: with the reason why it cannot be trained on.
    Source: SGLang calls a token outside of the vocabulary a stop at "NaN happened", and puts the end of sequence in its
        place (srt/managers/schedule_batch.py `_check_vocab_boundary_finish`, 0.5.11 to 0.5.23).
    """
    meta, token_ids = answer["meta_info"], answer["output_ids"]
    reason = meta["finish_reason"] or {}
    if reason.get("type") not in ("stop", "length"):
        raise ValueError(f"a completion was cut off ({reason.get('type')}: {reason.get('message', 'no reason given')})")
    length, echo = meta.get("prompt_tokens"), answer.get("prompt_token_ids")
    if must_echo and echo is None:
        raise ValueError("the answer has no prompt_token_ids, by which the tokens of its images are compared")
    if length != len(prompt_ids) or (echo is not None and echo != prompt_ids):
        raise ValueError(
            f"a completion belongs to another prompt (prompt_tokens={length!r}, where {len(prompt_ids)} were sent)"
        )
    most = sampling.extra.get("max_new_tokens") or sampling.max_tokens
    # It ends a completion two tokens before the end of its context, and of a KV cache that is smaller, without an error
    # (`init_req_max_new_tokens` in srt/managers/scheduler.py).
    is_full = max_model_len is None or len(prompt_ids) + len(token_ids) >= max_model_len - 2
    if reason["type"] == "length" and len(token_ids) < most and not is_full:
        raise ValueError(
            f"a completion was cut off after {len(token_ids)} of {most} tokens. The KV cache of the server holds no "
            "longer sequence; give it more memory (--mem-fraction-static), or lower max_completion_length"
        )
    if reason.get("matched") == "NaN happened":
        raise ValueError("the server sampled from NaN; look for its cause in the adapter or in the server's log")
    logprobs = logprob_token_ids = None
    if sampling.logprobs is not None:
        logprobs, logprob_token_ids = _read_logprobs(meta, token_ids, sampling.logprobs)
    return Completion(
        prompt_ids=prompt_ids, token_ids=token_ids, logprobs=logprobs, logprob_token_ids=logprob_token_ids
    )


def _read_logprobs(
    meta: dict[str, Any], token_ids: list[int], top: int
) -> tuple[list[list[float | None]], list[list[int]]]:
    """Per token, the log-probabilities by falling probability and the tokens they belong to.

    Infinity and NaN of alternatives arrive as null, for instance where a regular expression forbids them; they become
    None and go last.
    """
    # Each entry is a log-probability, a token id, and the token's text or null.
    sampled = meta["output_token_logprobs"]
    if len(sampled) != len(token_ids):
        raise ValueError(f"{len(token_ids)} tokens came with {len(sampled)} log-probabilities")
    if not top:
        for token_id, (logprob, owner, *_) in zip(token_ids, sampled, strict=True):
            _check_sampled(token_id, logprob, owner)
        return [[entry[0]] for entry in sampled], [[token_id] for token_id in token_ids]
    values: list[list[float | None]] = []
    ids: list[list[int]] = []
    for token_id, (logprob, owner, *_), others in zip(token_ids, sampled, meta["output_top_logprobs"], strict=True):
        _check_sampled(token_id, logprob, owner)
        # The sampled token need not be among the top ones. It is listed in any case, as in the answers of vLLM.
        found = {entry[1]: entry[0] if _is_finite(entry[0]) else None for entry in others or []} | {token_id: logprob}
        ranked = sorted(found.items(), key=lambda item: math.inf if item[1] is None else -item[1])
        ids.append([token for token, _ in ranked])
        values.append([value for _, value in ranked])
    return values, ids


def _check_sampled(token_id: int, logprob: float | None, owner: int) -> None:
    if owner != token_id:
        raise ValueError(f"token {token_id} came with the log-probability of token {owner}")
    if not _is_finite(logprob):
        raise ValueError(f"the sampled token {token_id} has the log-probability {logprob!r}")


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
