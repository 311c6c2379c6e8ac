"""Bodies of sampling requests, and answers turned into what TRL trains on."""

import json
import math
from collections import Counter
from dataclasses import fields, replace
from itertools import product
from typing import Any

import pytest
import torch

from trl_lora_sync.engines.base import PromptGroup, Sampling
from trl_lora_sync.engines.vllm.completions import (
    FORCES,
    RESERVED_FIELDS,
    read_completion,
    read_logprobs,
    sampling_fields,
    scoring_sampling,
    unforced,
    without_alternatives,
)

SAMPLING = Sampling(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.2, max_tokens=64, logprobs=0)
GROUP = PromptGroup(prompt=[1, 2, 3], count=2)


def completions_form(*positions: tuple[int, float | None, dict[int, float] | None]) -> dict[str, Any]:
    """As `/v1/completions` sends log-probabilities."""
    return {
        "tokens": [f"token_id:{token}" for token, _, _ in positions],
        "token_logprobs": [logprob for _, logprob, _ in positions],
        "top_logprobs": [
            None if top is None else {f"token_id:{token}": value for token, value in top.items()}
            for _, _, top in positions
        ],
    }


def content_form(*positions: tuple[int, float | None, dict[int, float] | None]) -> dict[str, Any]:
    """As chat completions send them, and the token route up to vLLM 0.31."""
    return {
        "content": [
            {
                "token": f"token_id:{token}",
                "logprob": logprob,
                "top_logprobs": [{"token": f"token_id:{t}", "logprob": value} for t, value in (top or {}).items()],
            }
            for token, logprob, top in positions
        ]
    }


def token_route_form(*positions: tuple[int, float | None, dict[int, float] | None]) -> dict[str, Any]:
    """As the token route of vLLM 0.32 and later sends them."""
    return {
        "content": [
            {
                "token_id": token,
                "logprob": logprob,
                "rank": 1,
                "top_logprobs": [{"token_id": t, "logprob": value, "rank": 1} for t, value in (top or {}).items()],
            }
            for token, logprob, top in positions
        ]
    }


FORMS = [completions_form, content_form, token_route_form]


def choice(**changes: Any) -> dict[str, Any]:
    return {
        "index": 0,
        "token_ids": [7, 8],
        "prompt_token_ids": [1, 2, 3],
        "finish_reason": "stop",
        "logprobs": completions_form((7, -0.5, None), (8, -1.5, None)),
    } | changes


# Requests


def test_every_sampling_field_is_sent_even_at_the_engines_default() -> None:
    neutral = Sampling(
        temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, max_tokens=16, logprobs=None
    )
    assert sampling_fields(neutral, 1) == {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "watermarking": False,
        "max_tokens": 16,
        "logprobs": None,
    }


def test_every_attribute_of_sampling_reaches_the_request() -> None:
    """A field that is added to `Sampling` and missing here would be taken from the server's defaults."""
    plain = sampling_fields(SAMPLING, 2)
    other = {"regex": "[a-z]+", "extra": {"seed": 1}}
    for field in fields(Sampling):
        if field.name != "image_token_id":  # marks the place of images, and is not a sampling field
            value = other.get(field.name, 3)
            assert sampling_fields(replace(SAMPLING, **{field.name: value}), 2) != plain, field.name
    assert sampling_fields(SAMPLING, 3)["n"] == 3


def test_regex_becomes_structured_outputs() -> None:
    assert sampling_fields(replace(SAMPLING, regex="[ab]+"), 1)["structured_outputs"] == {"regex": "[ab]+"}
    assert "structured_outputs" not in sampling_fields(SAMPLING, 1)


def test_generation_kwargs_win_over_the_trainers_fields() -> None:
    body = sampling_fields(
        replace(SAMPLING, regex="a", extra={"temperature": 0.0, "structured_outputs": None, "seed": 3}), 1
    )
    assert (body["temperature"], body["structured_outputs"], body["seed"]) == (0.0, None, 3)
    assert body["top_p"] == 0.9


def test_generation_kwargs_themselves_are_not_changed() -> None:
    extra = {"seed": 1}
    sampling_fields(replace(SAMPLING, extra=extra), 1)["seed"] = 2
    assert extra == {"seed": 1}


def test_fields_that_decide_about_policy_and_shape_are_reserved() -> None:
    assert {"model", "n", "stream", "logprobs", "prompt", "return_token_ids"} <= RESERVED_FIELDS
    assert not {"seed", "stop_token_ids", "temperature", "frequency_penalty"} & RESERVED_FIELDS


# Log-probabilities


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("top", [None, {}, {7: -0.5}])
def test_logprobs_0_is_the_sampled_token_alone(form: Any, top: Any) -> None:
    assert read_logprobs(form((7, -0.5, top)), [7]) == ([[-0.5]], [[7]])


@pytest.mark.parametrize("form", FORMS)
def test_logprobs_n_are_sorted_by_falling_probability(form: Any) -> None:
    values, ids = read_logprobs(form((7, -2.0, {9: -3.0, 7: -2.0, 8: -0.1}), (8, -0.1, {8: -0.1, 7: -4.0})), [7, 8])
    assert values == [[-0.1, -2.0, -3.0], [-0.1, -4.0]]
    assert ids == [[8, 7, 9], [8, 7]]


@pytest.mark.parametrize("form", FORMS)
def test_sampled_token_outside_the_top_n_is_kept(form: Any) -> None:
    assert read_logprobs(form((7, -9.0, {8: -0.1, 9: -2.0})), [7]) == ([[-0.1, -2.0, -9.0]], [[8, 9, 7]])


def test_alternatives_that_are_not_numbers_become_none_after_the_others() -> None:
    """NaN compares with nothing, so a plain sort would leave the numbers around it in any order."""
    top = {5: -3.0, 6: math.nan, 7: -2.0, 8: None, 9: -0.1}
    values, ids = read_logprobs(completions_form((7, -2.0, top)), [7])
    assert values == [[-0.1, -2.0, -3.0, None, None]]
    assert ids[0][:3] == [9, 7, 5]
    assert sorted(ids[0][3:]) == [6, 8]


def test_alternative_of_probability_zero_comes_last() -> None:
    values, ids = read_logprobs(completions_form((7, -2.0, {7: -2.0, 8: -math.inf, 9: -9999.0})), [7])
    assert (values, ids) == ([[-2.0, -9999.0, -math.inf]], [[7, 9, 8]])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -9999.0, None])
@pytest.mark.parametrize("form", FORMS)
def test_sampled_token_without_a_finite_logprob_is_refused(form: Any, value: float | None) -> None:
    with pytest.raises(ValueError, match=rf"the sampled token 8 has the log-probability {value!r}"):
        read_logprobs(form((7, -0.5, None), (8, value, None)), [7, 8])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("token_ids", [[7, 8, 9], [7], []])
def test_more_or_fewer_logprobs_than_tokens_are_refused(form: Any, token_ids: list[int]) -> None:
    with pytest.raises(ValueError, match=f"{len(token_ids)} tokens came with 2 log-probabilities"):
        read_logprobs(form((7, -0.5, None), (8, -0.5, None)), token_ids)


def test_lists_of_different_lengths_are_refused() -> None:
    broken = completions_form((7, -0.5, None), (8, -0.5, None)) | {"token_logprobs": [-0.5]}
    with pytest.raises(ValueError, match="shorter"):
        read_logprobs(broken, [7, 8])


@pytest.mark.parametrize("form", FORMS)
def test_logprob_of_another_token_is_refused(form: Any) -> None:
    with pytest.raises(ValueError, match="token 8 came with the log-probability of 'token_id:9'"):
        read_logprobs(form((7, -0.5, None), (9, -0.5, None)), [7, 8])


def test_token_as_text_is_refused_because_it_names_no_id() -> None:
    broken = completions_form((7, -0.5, None)) | {"tokens": ["hello"]}
    with pytest.raises(ValueError, match="hello"):
        read_logprobs(broken, [7])


def test_empty_completion_has_no_logprobs() -> None:
    assert read_logprobs(completions_form(), []) == ([], [])


# Answers without repetitions


def shortened(content: Any) -> Any:
    return json.loads(without_alternatives(json.dumps(content, separators=(",", ":")).encode()))


def test_answer_without_alternatives_is_read_as_the_whole_one() -> None:
    whole = completions_form((7, -0.5, {7: -0.5}), (8, -1.5e-07, {8: -1.5e-07}), (9, 0.0, {9: 0.0}))
    short = shortened({"logprobs": whole, "text": "x"})
    assert short == {"logprobs": whole | {"top_logprobs": None}, "text": "x"}
    assert read_logprobs(short["logprobs"], [7, 8, 9]) == read_logprobs(whole, [7, 8, 9])


def test_every_list_of_alternatives_is_left_out() -> None:
    one = completions_form((7, -0.5, {7: -0.5}))
    assert [each["top_logprobs"] for each in shortened([one, one, completions_form()])] == [None] * 3


@pytest.mark.parametrize(
    "content",
    [
        {"text": '"top_logprobs":[{"token_id:7":-0.5}]'},  # what a model may sample
        {"text": '\\"top_logprobs":[]'},
        completions_form((7, -0.5, None)),
        {"top_logprobs": [{"]": -0.5}, {'"}]': -0.5}]},
        {"top_logprobs": [{"token_id:7": None}]},
        content_form((7, -0.5, {7: -0.5})),
        token_route_form((7, -0.5, {7: -0.5})),
    ],
)
def test_what_looks_otherwise_stays_as_it_is(content: Any) -> None:
    assert shortened(content) == content


@pytest.mark.parametrize("value", [math.nan, math.inf, -9999.0, None])
def test_sampled_token_without_a_finite_logprob_is_refused_without_alternatives(value: float | None) -> None:
    short = completions_form((7, -0.5, None), (8, value, None)) | {"top_logprobs": None}
    with pytest.raises(ValueError, match=rf"the sampled token 8 has the log-probability {value!r}"):
        read_logprobs(short, [7, 8])


@pytest.mark.parametrize(
    ("changed", "token_ids", "message"),
    [
        ({}, [7, 9], "token 9 came with the log-probability of 'token_id:8'"),
        ({"tokens": ["token_id:7", "hello"]}, [7, 8], "hello"),
        ({"token_logprobs": [-0.5]}, [7, 8], "shorter"),
        ({}, [7], "1 tokens came with 2 log-probabilities"),
    ],
)
def test_what_does_not_fit_is_refused_without_alternatives(
    changed: dict[str, Any], token_ids: list[int], message: str
) -> None:
    short = completions_form((7, -0.5, None), (8, -0.5, None)) | {"top_logprobs": None} | changed
    with pytest.raises(ValueError, match=message):
        read_logprobs(short, token_ids)


# Completions


def test_completion_holds_what_the_server_sent() -> None:
    completion = read_completion(choice(), GROUP, SAMPLING)
    assert completion.prompt_ids == [1, 2, 3]
    assert completion.token_ids == [7, 8]
    assert completion.logprobs == [[-0.5], [-1.5]]
    assert completion.logprob_token_ids == [[7], [8]]


@pytest.mark.parametrize("logprobs", [None, completions_form((7, -0.5, None), (8, -1.5, None))])
def test_no_logprobs_are_read_if_none_were_asked_for(logprobs: Any) -> None:
    completion = read_completion(choice(logprobs=logprobs), GROUP, replace(SAMPLING, logprobs=None))
    assert completion.logprobs is completion.logprob_token_ids is None


@pytest.mark.parametrize("logprobs", [None, 0])
def test_completion_without_token_ids_is_refused(logprobs: int | None) -> None:
    """A server that does not know `return_token_ids` leaves them out or null."""
    with pytest.raises(ValueError, match="came back without its token ids"):
        read_completion(choice(token_ids=None), GROUP, replace(SAMPLING, logprobs=logprobs))


@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls"])
def test_completion_that_ended_by_itself_is_taken(reason: str) -> None:
    assert read_completion(choice(finish_reason=reason), GROUP, SAMPLING).token_ids == [7, 8]


@pytest.mark.parametrize("extra", [{}, {"max_tokens": 3}])
def test_completion_that_is_shorter_than_asked_for_is_refused(extra: dict[str, Any]) -> None:
    """A server with max_new_tokens in --override-generation-config answers so, with HTTP 200."""
    with pytest.raises(ValueError, match=f"cut off after 2 of {extra.get('max_tokens', 64)} tokens"):
        read_completion(choice(finish_reason="length"), GROUP, replace(SAMPLING, extra=extra), max_model_len=512)


@pytest.mark.parametrize(
    ("fields", "max_model_len"),
    [
        ({"max_tokens": 2}, 512),
        ({"extra": {"max_completion_tokens": 2}}, 512),
        ({"max_tokens": 64}, 5),
        ({"max_tokens": 64}, None),
    ],
)
def test_completion_that_has_all_of_its_tokens_or_fills_the_context_is_taken(
    fields: dict[str, Any], max_model_len: int | None
) -> None:
    asked = replace(SAMPLING, **fields)
    found = read_completion(choice(finish_reason="length"), GROUP, asked, max_model_len=max_model_len)
    assert found.token_ids == [7, 8]


@pytest.mark.parametrize("reason", ["abort", "error", None])
def test_completion_that_was_cut_off_by_the_server_is_refused(reason: str | None) -> None:
    with pytest.raises(ValueError, match=f"a completion ended with finish_reason={reason!r}"):
        read_completion(choice(finish_reason=reason), GROUP, SAMPLING)


@pytest.mark.parametrize("prompt", [[1, 2, 3], "hello"])
@pytest.mark.parametrize("echo", [None, [], "1 2 3"])
def test_completion_without_the_token_ids_of_its_prompt_is_refused(echo: Any, prompt: Any) -> None:
    """It was taken for one of the prompt that was sent."""
    with pytest.raises(ValueError, match="without the token ids of its prompt, which vLLM always sends"):
        read_completion(choice(prompt_token_ids=echo), PromptGroup(prompt=prompt, count=1), SAMPLING)


def test_text_prompt_comes_back_as_the_servers_token_ids() -> None:
    group = PromptGroup(prompt="hello", count=1)
    assert read_completion(choice(prompt_token_ids=[4, 5]), group, SAMPLING).prompt_ids == [4, 5]


# Scoring


def ranked(logits: torch.Tensor, sampled: int) -> dict[int, float]:
    """A server's report of the next token: the five likeliest, and the sampled one."""
    logprobs = logits.log_softmax(-1)
    tokens = {*logprobs.topk(5).indices.tolist(), sampled}
    return {token: float(logprobs[token]) for token in tokens}


def force_on(token: int, force: float) -> float:
    """The amount that a request adds to the token's logit, and to no other."""
    [(key, added)] = scoring_sampling(token, force).extra["logit_bias"].items()
    assert key == str(token)
    return float(added)


@pytest.mark.parametrize("std", [0.0, 0.3, 6.0])
@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logprobs"])
def test_a_forced_token_has_the_log_probability_that_it_has_without_force(mode: str, std: float) -> None:
    logits = std * torch.randn(300, generator=torch.Generator().manual_seed(1)) + 1e-6 * torch.arange(300)
    expected = logits.log_softmax(-1)
    free = ranked(logits, sampled=int(logits.argmax()))
    forces = Counter[float]()
    for token in set(range(300)) - free.keys():
        for force in FORCES:
            biased = logits.clone()
            biased[token] += force_on(token, force)
            shown = biased if mode == "processed_logprobs" else logits
            found = unforced(token, force, free, ranked(shown, sampled=int(biased.argmax())))
            if found is not None:
                break
        assert found == pytest.approx(float(expected[token]), abs=1e-4)
        forces[force] += 1
    weak, strong = (forces[force] for force in FORCES)
    if mode == "raw_logprobs":
        assert not weak
    else:
        assert weak > 4 * strong or std == 6.0
        assert strong or std < 6.0  # for tokens of exp(-20) and less


def test_a_weak_force_rounds_a_bfloat16_logit_less_than_a_strong_one() -> None:
    """As vLLM 0.26 has them on GPUs."""
    logits = 3.0 * torch.randn(300, generator=torch.Generator().manual_seed(1))
    expected = logits.bfloat16().float().log_softmax(-1)
    free = ranked(logits.bfloat16().float(), sampled=int(logits.argmax()))
    errors: dict[float, list[float]] = {force: [] for force in FORCES}
    for token, force in product(set(range(300)) - free.keys(), FORCES):
        biased = logits.bfloat16()
        biased[token] += force_on(token, force)
        found = unforced(token, force, free, ranked(biased.float(), sampled=int(biased.argmax())))
        if found is not None:
            errors[force].append(abs(found - float(expected[token])))
    weak, strong = errors.values()
    assert len(weak) > 200
    assert max(weak) < 0.07
    assert max(strong) > 0.2


def test_a_forced_token_without_another_to_compare_with_is_an_error() -> None:
    answer = {1: -0.5}, {7: 0.0, 2: -100.0}
    assert unforced(7, FORCES[0], *answer) is None
    with pytest.raises(ValueError, match="the answer lacks the log-probability of token 7"):
        unforced(7, FORCES[-1], *answer)
