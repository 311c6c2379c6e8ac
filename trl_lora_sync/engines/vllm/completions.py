"""The body of a vLLM sampling request and the choices of its answer, without any HTTP."""

import hashlib
import math
import re
from typing import Any

from trl_lora_sync.engines.base import Completion, PromptGroup, Sampling

# Fields of a completion request that belong to this package; `generation_kwargs` may not change them.
RESERVED_FIELDS = frozenset(
    {
        "model", "prompt", "messages", "n", "best_of", "stream", "echo", "logprobs", "top_logprobs",
        "return_token_ids", "return_tokens_as_token_ids", "token_ids", "features", "request_id", "cache_salt",
    }
)  # fmt: skip


PROMPT_LOGPROBS = "prompt_logprobs"

# Where an answer lists alternatives of tokens, all of them by their ids. With `logprobs=0` the only one is the sampled
# token, which is listed beside it as well: more than a third of the answer, and most of the time that parsing it takes.
# It matches such a list as a whole and nothing else: in a string, the first quotes would have a backslash before them.
ALTERNATIVES = re.compile(rb'"top_logprobs":\[(?:\{"token_id:\d+":[-+.\deE]+\},?)*\]')


def without_alternatives(content: bytes) -> bytes:
    """The answer to a request with `logprobs=0`, without its repetitions.

    An answer in which they look different is returned unchanged.
    """
    return ALTERNATIVES.sub(b'"top_logprobs":null', content)


def cache_salt(model: str) -> str:
    """What keeps the KV cache of a version apart from that of any other, in a store outside of vLLM too.

    vLLM's own prefix cache has the adapter in its keys. `LMCacheMPConnector` has this field only (vllm#44250), and
    `LMCacheConnectorV1` neither (vllm#56643), so `serve` refuses that one.
    """
    # vLLM takes 128 characters, without some that names may have (`validate_cache_salt`, 0.31).
    return hashlib.sha256(model.encode()).hexdigest()[:32]


def sampling_fields(sampling: Sampling, count: int) -> dict[str, Any]:
    """vLLM's names for the sampling fields, all of them explicit."""
    fields: dict[str, Any] = {
        "n": count,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        # TRL has no fields for these two. Left out, the server takes them from the model's generation_config.json
        # (`get_diff_sampling_param` in vllm/config/model.py, 0.31), and samples from another policy than the trainer's.
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        # Left out, a server with --watermark-config draws every token by its key and the tokens before it, so that all
        # completions of a prompt are the same (v1/watermarking/gumbel.py, 0.31 and 0.32). Others ignore the field.
        "watermarking": False,
        "max_tokens": sampling.max_tokens,
        "logprobs": sampling.logprobs,
    }
    if sampling.regex is not None:
        fields["structured_outputs"] = {"regex": sampling.regex}
    return fields | dict(sampling.extra)


def read_completion(
    choice: dict[str, Any], group: PromptGroup, sampling: Sampling, *, max_model_len: int | None = None
) -> Completion:
    """Check one choice and bring it into the shape TRL expects.

    Args:
        max_model_len: the server's longest prompt plus completion, if known.

    Raises:
        ValueError: with the reason why it cannot be trained on.
    """
    token_ids = choice["token_ids"]
    if not isinstance(token_ids, list):
        raise ValueError("a completion came back without its token ids")
    # A completion that was broken off is not what the policy samples.
    if choice.get("finish_reason") in (None, "abort", "error"):
        raise ValueError(f"a completion ended with finish_reason={choice.get('finish_reason')!r}")
    prompt_ids = choice.get("prompt_token_ids")
    if not isinstance(prompt_ids, list) or not prompt_ids:
        raise ValueError("a completion came back without the token ids of its prompt, which vLLM always sends")
    if not isinstance(group.prompt, str) and prompt_ids != group.prompt:
        raise ValueError("a completion belongs to another prompt")
    # The first is a name of the chat route alone.
    given = (sampling.extra.get(name) for name in ("max_completion_tokens", "max_tokens"))
    most = next(filter(None, given), sampling.max_tokens)
    is_full = max_model_len is None or len(prompt_ids) + len(token_ids) >= max_model_len
    # Source: `override_max_tokens` in vllm/entrypoints/openai/completion/serving.py (0.22 to 0.32).
    if choice["finish_reason"] == "length" and len(token_ids) < most and not is_full:
        raise ValueError(
            f"a completion was cut off after {len(token_ids)} of {most} tokens. The server was started with a smaller "
            "max_new_tokens, in --override-generation-config or in the folder of --generation-config; start it without"
        )
    logprobs = logprob_token_ids = None
    if sampling.logprobs is not None:
        logprobs, logprob_token_ids = read_logprobs(choice["logprobs"], token_ids)
    prompt_logprobs = None
    if PROMPT_LOGPROBS in sampling.extra:
        prompt_logprobs = read_prompt_logprobs(choice[PROMPT_LOGPROBS], prompt_ids)
    return Completion(
        prompt_ids=prompt_ids,
        token_ids=token_ids,
        logprobs=logprobs,
        logprob_token_ids=logprob_token_ids,
        prompt_logprobs=prompt_logprobs,
    )


def read_prompt_logprobs(positions: list[dict[str, Any] | None], prompt_ids: list[int]) -> list[float]:
    """The log-probability of each token of the prompt after the first one, which has none.

    Raises:
        ValueError, KeyError: a token lacks one.
    """
    # Each position has the prompt's own token, and nothing else for `prompt_logprobs=0`. In JSON ids are strings.
    pairs = zip(prompt_ids[1:], positions[1:], strict=True)
    found = [(position or {})[str(token_id)]["logprob"] for token_id, position in pairs]
    if not all(map(_is_logprob, found)):
        raise ValueError("a token of the prompt has a log-probability that is not finite")
    return found


def read_logprobs(logprobs: dict[str, Any], token_ids: list[int]) -> tuple[list[list[float | None]], list[list[int]]]:
    """Per token, the log-probabilities by falling probability and the tokens they belong to.

    The sampled token is always among them, even outside the top N. NaN alternatives become None, as in TRL.

    Raises:
        ValueError: a length mismatch, or a sampled token whose log-probability is not finite.
    """
    if "content" in logprobs:  # chat completions and the token route
        positions = [
            (_name_of(entry), entry["logprob"], {_name_of(top): top["logprob"] for top in entry["top_logprobs"]})
            for entry in logprobs["content"]
        ]
    elif logprobs["top_logprobs"] is None:  # `without_alternatives`
        tokens, found = logprobs["tokens"], logprobs["token_logprobs"]
        # Answers for GRPO end here (`logprobs=0`). Below, a dictionary is made and sorted for each token.
        are_sampled = tokens == [f"token_id:{token_id}" for token_id in token_ids] and len(found) == len(tokens)
        if are_sampled and all(map(_is_logprob, found)):
            return [[value] for value in found], [[token_id] for token_id in token_ids]
        positions = [(token, value, {}) for token, value in zip(tokens, found, strict=True)]
    else:
        positions = list(zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True))
    if len(positions) != len(token_ids):
        raise ValueError(f"{len(token_ids)} tokens came with {len(positions)} log-probabilities")
    values: list[list[float | None]] = []
    ids: list[list[int]] = []
    for token_id, (token, logprob, alternatives) in zip(token_ids, positions, strict=True):
        if _token_id(token) != token_id:
            raise ValueError(f"token {token_id} came with the log-probability of {token!r}")
        if not _is_logprob(logprob):
            raise ValueError(f"the sampled token {token_id} has the log-probability {logprob!r}")
        # NaN compares with nothing, so it is replaced before the sort, and goes last.
        numbers = {
            name: None if value is None or math.isnan(value) else value
            for name, value in ({token: logprob} | (alternatives or {})).items()
        }
        ranked = sorted(numbers.items(), key=lambda item: math.inf if item[1] is None else -item[1])
        ids.append([_token_id(name) for name, _ in ranked])
        values.append([value for _, value in ranked])
    return values, ids


def _is_logprob(value: float | None) -> bool:
    """Whether a sampled token can have it; vLLM sends -9999 for minus infinity."""
    return value is not None and -9999.0 < value < math.inf


def _name_of(entry: dict[str, Any]) -> str:
    """How an entry names its token; the token route gives the number alone since vLLM 0.32."""
    token: str = entry["token"] if "token" in entry else f"token_id:{entry['token_id']}"
    return token


def _token_id(token: str) -> int:
    return int(token.removeprefix("token_id:"))


# Scoring a prompt. Added to the logit of an unlikely token, so that the server reports it with the likely ones; the
# next value if that was not enough. vLLM 0.26 adds it to a bfloat16 number on GPUs, where 100 would round a
# logit to halves. It takes none beyond that.
# Source: vllm/v1/worker/gpu/sample/logit_bias.py.
FORCES = (12.0, 100.0)
_RANKED = 5
# Above the likely ones by so much, a token is there because of the force.
_CLEARLY = 2.0


def scoring_sampling(token_id: int | None = None, force: float = 0.0) -> Sampling:
    """How to sample the next token for its log-probabilities: freely, or with a force towards `token_id`."""
    forced: dict[str, Any] = {} if token_id is None else {"logit_bias": {str(token_id): force}}
    return Sampling.unrestricted(max_tokens=1, logprobs=_RANKED, ignore_eos=True, **forced)


def ranked_logprobs(completion: Completion) -> dict[int, float]:
    """Log-probabilities of the likeliest tokens, and of the sampled one, at the only position of a completion.

    Raises:
        ValueError: there are none.
    """
    if not completion.logprobs or not completion.logprob_token_ids:
        raise ValueError("the next token came back without log-probabilities")
    pairs = zip(completion.logprob_token_ids[0], completion.logprobs[0], strict=True)
    return {token_id: logprob for token_id, logprob in pairs if logprob is not None}


def unforced(token_id: int, force: float, free: dict[int, float], forced: dict[int, float]) -> float | None:
    """The log-probability that a token has when it is not forced; None if the force was too weak.

    Processed log-probabilities are shifted by the force, all others' by the same; raw ones do not know it.

    Args:
        free: log-probabilities without the force, without `token_id`.
        forced: with it.

    Raises:
        ValueError: with the strongest force, the token or every other one is missing.
    """
    others = free.keys() & forced.keys()
    is_strongest = force == FORCES[-1]
    if not others or token_id not in forced:
        if is_strongest:
            raise ValueError(f"the answer lacks the log-probability of token {token_id}")
        return None
    other = max(others, key=lambda one: free[one])
    shift = forced[other] - free[other]
    told = forced[token_id] - shift - force
    if is_strongest:
        # A shift of nearly nothing would be a token of probability exp(-100).
        return forced[token_id] if abs(shift) < 1.0 else told
    # The last of the ranked ones. One more entry is the sampled token, which is listed whatever its rank.
    least = sorted(free.values(), reverse=True)[:_RANKED][-1]
    return told if forced[token_id] > least + _CLEARLY else None
