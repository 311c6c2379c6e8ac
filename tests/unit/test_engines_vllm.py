"""The vLLM engine's reading of answers, against a server that answers as the test says. Real vLLM is in tests/live."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from trl_lora_sync.engines.base import Completion, Deadline, PromptGroup, Sampling
from trl_lora_sync.engines.known import ALLOWED_MAX_LORA_RANKS, allowed_max_lora_rank
from trl_lora_sync.engines.vllm import VLLMEngine, _batches
from trl_lora_sync.errors import (
    AdapterLostError,
    GenerationError,
    ServerAuthError,
    ServerUnreachableError,
    WrongPolicyError,
)
from unit.servers import Request, Server, serving

MODEL = "run-v1"
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, max_tokens=4, logprobs=None)


def completions(request: Request, **changes: Any) -> dict[str, Any]:
    """What a sound server answers: token 100 * first prompt token + number of the completion."""
    body = request.body
    choices = [
        {"token_ids": [100 * prompt[0] + number], "prompt_token_ids": prompt, "finish_reason": "stop", "logprobs": None}
        for prompt in body["prompt"]
        for number in range(body["n"])
    ]
    return {"model": body["model"], "choices": [c | {"index": i} for i, c in enumerate(choices)]} | changes


@pytest.fixture
def engine_at() -> Iterator[Callable[..., tuple[VLLMEngine, Server]]]:
    """An engine connected to a server of that answer."""
    with ExitStack() as stack:

        def start(answer: Callable[[Request], None]) -> tuple[VLLMEngine, Server]:
            server = stack.enter_context(serving(answer))
            engine = VLLMEngine(server.url, is_local=True)
            stack.callback(engine.close)
            return engine, server

        yield start


def sample(engine: VLLMEngine, *prompts: int, count: int = 2, seconds: float = 10) -> list[list[Completion]]:
    groups = [PromptGroup(prompt=[first, 5], count=count) for first in prompts]
    return engine.generate(MODEL, groups, SAMPLING, Deadline.after(seconds, "Generation"))


def tokens(answers: list[list[Completion]]) -> list[list[int]]:
    return [[completion.token_ids[0] for completion in answer] for answer in answers]


def test_completions_come_back_in_the_order_of_the_groups(engine_at: Any) -> None:
    def shuffled(request: Request) -> None:
        answer = completions(request)
        request.send(200, answer | {"choices": answer["choices"][::-1]})

    engine, _ = engine_at(shuffled)
    groups = [PromptGroup(prompt=[first], count=1 + first % 3) for first in range(200)]
    answers = engine.generate(MODEL, groups, SAMPLING, Deadline.after(20, "Generation"))
    assert tokens(answers) == [[100 * first + n for n in range(1 + first % 3)] for first in range(200)]


def test_every_request_names_the_model_and_every_sampling_field(engine_at: Any) -> None:
    engine, server = engine_at(lambda request: request.send(200, completions(request)))
    sample(engine, 1, 2)
    for request in server.requests:
        assert request.path == "/v1/completions"
        body = dict(request.body)
        body.pop("prompt")
        assert body == {
            "model": MODEL, "n": 2, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
            "repetition_penalty": 1.0, "max_tokens": 4, "logprobs": None, "stream": False, "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }  # fmt: skip


def test_completion_of_another_model_is_never_used(engine_at: Any) -> None:
    engine, _ = engine_at(lambda request: request.send(200, completions(request, model="base")))
    with pytest.raises(WrongPolicyError, match="completions of 'base' where 'run-v1' was asked for"):
        sample(engine, 1)


@pytest.mark.parametrize("change", [{"model": None}, {}], ids=["null", "right"])
def test_answer_that_does_not_contradict_is_used(change: dict[str, Any], engine_at: Any) -> None:
    engine, _ = engine_at(lambda request: request.send(200, completions(request, **change)))
    assert tokens(sample(engine, 1)) == [[100, 101]]


def test_server_that_is_busy_for_a_moment_is_asked_again(engine_at: Any) -> None:
    left = iter([503, 502])

    def busy_at_first(request: Request) -> None:
        status = next(left, 200)
        request.send(status, completions(request) if status == 200 else "<html>starting</html>")

    engine, server = engine_at(busy_at_first)
    assert tokens(sample(engine, 1)) == [[100, 101]]
    assert len(server.requests) == 3


def test_connection_that_breaks_once_is_tried_again(engine_at: Any) -> None:
    left = iter([True])

    def reset_once(request: Request) -> None:
        request.reset() if next(left, False) else request.send(200, completions(request))

    engine, server = engine_at(reset_once)
    assert tokens(sample(engine, 1)) == [[100, 101]]
    assert len(server.requests) == 2


def test_server_that_stays_out_of_order_is_an_error_within_the_deadline(
    engine_at: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trl_lora_sync.engines.server.RETRY_S", 0.3)
    engine, _ = engine_at(lambda request: request.send(503, {"error": {"message": "engine is dead"}}))
    with pytest.raises(ServerUnreachableError, match=r"HTTP 503.*engine is dead"):
        sample(engine, 1, seconds=20)


@pytest.mark.parametrize("key", [None, "wrong"])
def test_refused_key_is_an_error_that_says_whether_one_was_set(
    key: str | None, engine_at: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if key:
        monkeypatch.setenv("VLLM_API_KEY", key)
    engine, server = engine_at(lambda request: request.send(401, {"error": "Unauthorized"}))
    with pytest.raises(ServerAuthError, match="is set but was refused" if key else "VLLM_API_KEY is not set") as caught:
        sample(engine, 1)
    assert len(server.requests) == 1
    assert "wrong" not in str(caught.value)


def test_adapter_the_server_forgot_is_an_error_that_suspects_a_restart(engine_at: Any) -> None:
    words = {"error": {"message": "The model `run-v1` does not exist.", "code": 404}}
    engine, server = engine_at(lambda request: request.send(404, words))
    with pytest.raises(AdapterLostError, match=r"no longer knows 'run-v1'.*was restarted.*does not exist"):
        sample(engine, 1)
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [400, 404, 422, 500])
def test_other_refusals_are_quoted_and_not_repeated(status: int, engine_at: Any) -> None:
    engine, server = engine_at(lambda request: request.send(status, {"error": {"message": "prompt too long"}}))
    with pytest.raises(GenerationError, match=f"HTTP {status}.*'prompt too long'"):
        sample(engine, 1)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda c: c["choices"].__delitem__(1), "sent 1 completions where 2 were asked for"),
        (lambda c: c["choices"].append(dict(c["choices"][0], index=2)), "cannot be trained on"),
        (lambda c: c.update(choices=[]), "sent 0 completions where 2"),
        (lambda c: c.__delitem__("choices"), "cannot be trained on: 'choices'"),
        (lambda c: c.update(choices=None), "cannot be trained on"),
        (lambda c: c["choices"][1].update(finish_reason="abort"), "finish_reason='abort'"),
        (lambda c: c["choices"][0].__delitem__("token_ids"), "cannot be trained on: 'token_ids'"),
        (lambda c: c["choices"][0].update(token_ids=None), "came back without its token ids"),
        (lambda c: c["choices"][0].update(prompt_token_ids=[4, 4]), "another prompt"),
        (lambda c: [c], "a JSON list where an object was expected"),
        (lambda c: "<html>proxy</html>", "without valid JSON"),
    ],
    ids=["one missing", "one too many", "none", "no choices", "null choices", "abort", "no ids", "null ids", "prompt",
         "list", "html"],
)  # fmt: skip
def test_answer_that_cannot_be_trained_on_is_refused(damage: Any, words: str, engine_at: Any) -> None:
    def answer(request: Request) -> None:
        content = completions(request)
        replacement = damage(content)
        request.send(200, content if replacement is None else replacement)

    engine, _ = engine_at(answer)
    with pytest.raises(GenerationError, match=words):
        sample(engine, 1)


def test_missing_logprobs_are_refused_if_they_were_asked_for(engine_at: Any) -> None:
    engine, _ = engine_at(lambda request: request.send(200, completions(request)))
    group = PromptGroup(prompt=[1], count=1)
    with pytest.raises(GenerationError, match="cannot be trained on"):
        engine.generate(MODEL, [group], replace(SAMPLING, logprobs=0), Deadline.after(5, "Generation"))


def test_no_prompts_are_no_requests(engine_at: Any) -> None:
    engine, server = engine_at(lambda request: request.send(500))
    assert engine.generate(MODEL, [], SAMPLING, Deadline.after(5, "Generation")) == []
    assert server.requests == []


# Unloading


@pytest.mark.parametrize(("status", "forgotten"), [(200, True), (404, True), (500, False), (401, False), (503, False)])
def test_unload_reports_and_never_raises(status: int, forgotten: bool, engine_at: Any) -> None:
    engine, server = engine_at(lambda request: request.send(status, "words"))
    assert engine.unload("run-v1", Deadline.after(20, "Unloading")) is forgotten
    seen = [(r.path, r.body) for r in server.requests]
    assert seen == [("/v1/unload_lora_adapter", {"lora_name": "run-v1"})] * len(seen)
    assert len(seen) == 1 or status == 503


def test_an_unload_whose_connection_breaks_is_sent_again(engine_at: Any) -> None:
    """The name of a version stayed on the server for ever when the one request to unload it was lost."""
    answers = iter([Request.reset, lambda request: request.send(503), lambda request: request.send(200)])
    engine, server = engine_at(lambda request: next(answers)(request))
    assert engine.unload("run-v1", Deadline.after(10, "Unloading")) is True
    assert len(server.requests) == 3


def test_unload_on_a_server_that_hangs_ends_at_its_deadline(engine_at: Any) -> None:
    engine, server = engine_at(lambda request: request.wait(30))
    started = time.monotonic()
    assert engine.unload("run-v1", Deadline.after(1, "Unloading")) is False
    assert time.monotonic() - started < 10
    assert len(server.requests) == 1


# Batches


def test_batches_hold_every_group_once_and_equal_counts() -> None:
    groups = [PromptGroup(prompt=[i] if i % 5 else "text", count=1 + i % 2) for i in range(300)]
    batches = _batches(groups)
    assert sorted(index for batch in batches for index in batch) == list(range(300))
    for batch in batches:
        assert len({groups[index].count for index in batch}) == 1
        assert len({type(groups[index].prompt) for index in batch}) == 1


def test_few_groups_are_sent_one_by_one_and_many_together() -> None:
    assert [len(b) for b in _batches([PromptGroup(prompt=[i], count=1) for i in range(64)])] == [1] * 64
    assert len(_batches([PromptGroup(prompt=[i], count=1) for i in range(1000)])) <= 64


@pytest.mark.parametrize(("rank", "flag"), [(1, 1), (2, 8), (8, 8), (17, 32), (512, 512), (600, 600)])
def test_suggested_max_lora_rank_is_one_that_vllm_accepts(rank: int, flag: int) -> None:
    assert allowed_max_lora_rank(rank) == flag
    assert flag in ALLOWED_MAX_LORA_RANKS or rank > max(ALLOWED_MAX_LORA_RANKS)
