"""The vLLM engine's reading of answers, against a server with the test's answers. Real vLLM is in tests/live."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from trl_lora_sync.adapter.canonical import Form
from trl_lora_sync.adapter.store import StoredAdapter
from trl_lora_sync.engine_plugins.version_note import NOTE_FORM
from trl_lora_sync.engines.base import TIMEOUTS, Capabilities, Completion, Deadline, PromptGroup, Sampling
from trl_lora_sync.engines.vllm.completions import cache_salt
from trl_lora_sync.engines.vllm.engine import VLLMEngine, in_batches
from trl_lora_sync.engines.vllm.spec import VLLM
from trl_lora_sync.errors import (
    AdapterLayersError,
    AdapterLostError,
    AdapterNotVisibleError,
    AdapterRejectedError,
    DeadlineExceededError,
    GenerationError,
    ServerAuthError,
    ServerSetupError,
    ServerUnreachableError,
    WrongPolicyError,
)
from trl_lora_sync.runtime import Blocking
from unit.servers import Request, Server, serving

pytestmark = pytest.mark.outside

MODEL = "run-v1"
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, max_tokens=4, logprobs=None)


CAPABILITIES = Capabilities(
    engine="vllm", version="0.31.0", base_model="base", base_root="base", max_model_len=None, logprobs_mode="unknown"
)


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
            # A class for each, whose capabilities `connected` replaces.
            engine = Blocking(type("VLLMEngine", (VLLMEngine,), {})(server.url, is_local=True))
            stack.callback(engine.close)
            return engine, server

        yield start


def connected(engine: Any, **found: Any) -> None:
    """Have the engine know this of its server, as after `connect`."""
    type(engine.wrapped).capabilities = replace(CAPABILITIES, **found)


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
        assert body.pop("cache_salt") == cache_salt(MODEL) != cache_salt("run-v2")
        assert body == {
            "model": MODEL, "n": 2, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
            "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "watermarking": False,
            "max_tokens": 4, "logprobs": None, "stream": False, "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }  # fmt: skip


def test_completion_of_another_model_is_never_used(engine_at: Any) -> None:
    engine, _ = engine_at(lambda request: request.send(200, completions(request, model="base")))
    with pytest.raises(WrongPolicyError, match="completions of 'base' instead of 'run-v1'"):
        sample(engine, 1)


@pytest.mark.parametrize("is_null", [True, False], ids=["null", "missing"])
def test_completion_that_names_no_model_is_never_used(is_null: bool, engine_at: Any) -> None:
    """A gateway that drops the field, there and back, got completions of the base model into training."""

    def nameless(request: Request) -> None:
        content = completions(request)
        del content["model"]
        request.send(200, content | ({"model": None} if is_null else {}))

    engine, _ = engine_at(nameless)
    with pytest.raises(WrongPolicyError, match=r"name no model instead of 'run-v1'.*drops the field `model`"):
        sample(engine, 1)


def test_chat_answer_must_name_its_model_and_repeat_its_prompt(engine_at: Any) -> None:
    choices = [{"index": 0, "token_ids": [7], "finish_reason": "stop", "logprobs": None}]
    answers = iter(
        [
            {"model": MODEL, "prompt_token_ids": [1, 2], "choices": choices},
            {"prompt_token_ids": [1, 2], "choices": choices},
            {"model": MODEL, "choices": choices},
        ]
    )
    engine, _ = engine_at(lambda request: request.send(200, next(answers)))

    def chat() -> list[Completion]:
        body = {"model": MODEL, "messages": []}
        return engine.chat(body, 1, SAMPLING, Deadline.after(10, "Chat"))

    assert [one.prompt_ids for one in chat()] == [[1, 2]]
    with pytest.raises(WrongPolicyError, match="name no model"):
        chat()
    with pytest.raises(GenerationError, match="without the token ids of its prompt"):
        chat()


IMAGE = Image.new("RGB", (2, 3), "red")
FEATURES = {"mm_hashes": {"image": ["hash"]}, "mm_placeholders": {"image": [{"offset": 0, "length": 1}]}}


@pytest.mark.parametrize(
    ("version", "lacks", "error"),
    [
        ("0.28.0", (), None),
        ("0.28.0", ("model", "prompt_token_ids"), None),  # these versions have neither
        ("0.31.0", (), None),
        ("0.31.0", ("model",), WrongPolicyError),
        ("0.31.0", ("prompt_token_ids",), GenerationError),
    ],
)
def test_token_route_must_name_the_model_from_the_version_on_that_does(
    version: str, lacks: tuple[str, ...], error: type[Exception] | None, engine_at: Any
) -> None:
    def answer(request: Request) -> None:
        if request.path.endswith("/render"):
            request.send(200, {"features": FEATURES})
            return
        assert request.body["return_token_ids"] is True
        choices = [{"index": 0, "token_ids": [7], "finish_reason": "stop", "logprobs": None}]
        content = {"model": MODEL, "prompt_token_ids": request.body["token_ids"], "choices": choices}
        request.send(200, {name: value for name, value in content.items() if name not in lacks})

    engine, _ = engine_at(answer)
    connected(engine, version=version)
    group = PromptGroup(prompt=[1, 9, 2], count=1, images=[IMAGE])
    with pytest.raises(error) if error else nullcontext():
        [[found]] = engine.generate(MODEL, [group], replace(SAMPLING, image_token_id=9), Deadline.after(10, "Images"))
        assert found.prompt_ids == [1, 9, 2]


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
    monkeypatch.setitem(vars(TIMEOUTS), "retry_s", 0.3)
    engine, _ = engine_at(lambda request: request.send(503, {"error": {"message": "engine is dead"}}))
    with pytest.raises(ServerUnreachableError, match=r"HTTP 503.*engine is dead"):
        sample(engine, 1, seconds=20)


def test_gateway_that_gives_up_tells_how_long_it_has_waited(engine_at: Any) -> None:
    def late(request: Request) -> None:
        request.wait(0.3)
        request.send(504, "<html>Gateway Time-out</html>")

    engine, _ = engine_at(late)
    with pytest.raises(ServerUnreachableError, match="HTTP 504") as caught:
        engine.pause("drain", Deadline.after(10, "The test"))
    assert caught.value.waited_s == pytest.approx(0.3, abs=0.25)


@pytest.mark.parametrize(
    ("status", "words", "error", "may_be_crash"),
    [
        (500, "EngineCore encountered an issue.", AdapterRejectedError, True),
        (400, "The lora adapter is invalid.", AdapterRejectedError, False),
        (500, "While loading /f, expected target modules in {'q'} but received ['a.b.c']", AdapterLayersError, False),
    ],
)
def test_refusal_of_a_load_says_whether_its_engine_may_have_crashed(
    status: int, words: str, error: type[AdapterRejectedError], may_be_crash: bool, engine_at: Any
) -> None:
    engine, _ = engine_at(lambda request: request.send(status, {"error": {"message": words}}))
    connected(engine)
    with pytest.raises(AdapterRejectedError, match=words[:12]) as caught:
        engine.load(ADAPTER, Deadline.after(10, "The test"))
    assert type(caught.value) is error
    assert caught.value.may_be_crash == may_be_crash


SCHEMAS = {
    "CompletionRequest": {"properties": {"seed": {}}},
    "ChatCompletionRequest": {"properties": {"min_token": {}}},  # no prompt of a trainer is sent as a chat
    "SamplingParams": {"properties": {"extra_args": {}}},
}


@pytest.mark.parametrize(
    ("status", "body", "ignored"),
    [
        (200, {"components": {"schemas": SCHEMAS}}, ["min_token"]),
        (200, {"components": None}, []),
        (200, "<html>a gateway</html>", []),
        (302, "", []),
        (401, "", []),
        (403, "", []),
        (404, "", []),
    ],
)
def test_fields_that_are_ignored_are_known_only_where_the_server_describes_its_routes(
    status: int, body: Any, ignored: list[str], engine_at: Any
) -> None:
    engine, _ = engine_at(lambda request: request.send(status, body))
    assert engine.ignored_fields(["seed", "extra_args", "min_token"], Deadline.after(10, "The test")) == ignored


@pytest.mark.parametrize("key", [None, "wrong"])
def test_refused_key_is_an_error_that_says_whether_one_was_set(
    key: str | None, engine_at: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if key:
        monkeypatch.setenv("VLLM_API_KEY", key)
    engine, server = engine_at(lambda request: request.send(401, {"error": "Unauthorized"}))
    with pytest.raises(
        ServerAuthError, match="another API key than the one in VLLM_API_KEY" if key else "VLLM_API_KEY is not set"
    ) as caught:
        sample(engine, 1)
    assert len(server.requests) == 1
    assert "wrong" not in str(caught.value)


def test_adapter_the_server_forgot_is_an_error_that_suspects_a_restart(engine_at: Any) -> None:
    words = {"error": {"message": "The model `run-v1` does not exist.", "code": 404}}
    engine, server = engine_at(lambda request: request.send(404, words))
    with pytest.raises(AdapterLostError, match=r"no longer knows 'run-v1'.*was restarted.*does not exist"):
        sample(engine, 1)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "words",
    [
        "This model's maximum context length is 5 tokens. However, you requested 4 output tokens and your prompt",
        "max_tokens=4 cannot be greater than max_model_len=5. Please request fewer output tokens.",
    ],
)
def test_prompt_and_completion_beyond_the_context_are_an_error_with_the_setting_and_the_flag(
    words: str, engine_at: Any
) -> None:
    """The message spoke of a field in generation_kwargs."""
    engine, _ = engine_at(lambda request: request.send(400, {"error": {"message": words}}))
    connected(engine, max_model_len=5)
    expected = r"4 new tokens \(max_completion_length\).*context of 5 tokens.*`trl-lora-sync serve .*--max-model-len N`"
    with pytest.raises(GenerationError, match=expected) as caught:
        sample(engine, 1)
    assert "generation_kwargs" not in str(caught.value)


@pytest.mark.parametrize(("is_cpu_build", "sleep"), [
    (False, "vllm_server_sleep needs a start with `trl-lora-sync serve .*--sleep"),
    (True, "vllm_server_sleep needs a GPU"),
])  # fmt: skip
def test_server_without_its_development_routes_is_an_error_with_what_opens_them(
    is_cpu_build: bool, sleep: str, engine_at: Any
) -> None:
    """For a pause on a CPU it was `serve --sleep`, which `serve` refuses there."""
    engine, _ = engine_at(lambda request: request.send(404, {"detail": "Not Found"}))
    connected(engine, is_cpu_build=is_cpu_build)
    with pytest.raises(ServerSetupError, match=f"lora_sync_pause needs .*VLLM_SERVER_DEV_MODE=1 .*{sleep}"):
        engine.pause("drain", Deadline.after(10, "The test"))


@pytest.mark.parametrize("status", [400, 404, 422, 500])
def test_other_refusals_are_quoted_and_not_repeated(status: int, engine_at: Any) -> None:
    engine, server = engine_at(lambda request: request.send(status, {"error": {"message": "prompt too long"}}))
    with pytest.raises(GenerationError, match=f"HTTP {status}.*'prompt too long'"):
        sample(engine, 1)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda c: c["choices"].__delitem__(1), "sent 1 completions instead of 2"),
        (lambda c: c["choices"].append(dict(c["choices"][0], index=2)), "cannot be trained on"),
        (lambda c: c.update(choices=[]), "sent 0 completions instead of 2"),
        (lambda c: c.__delitem__("choices"), "cannot be trained on: 'choices'"),
        (lambda c: c.update(choices=None), "cannot be trained on"),
        (lambda c: c["choices"][1].update(finish_reason="abort"), "finish_reason='abort'"),
        (lambda c: c["choices"][0].__delitem__("token_ids"), "cannot be trained on: 'token_ids'"),
        (lambda c: c["choices"][0].update(token_ids=None), "came back without its token ids"),
        (lambda c: c["choices"][0].update(prompt_token_ids=[4, 4]), "another prompt"),
        (lambda c: c["choices"][0].__delitem__("prompt_token_ids"), "without the token ids of its prompt"),
        (lambda c: [c], "a JSON list where an object was expected"),
        (lambda c: "<html>proxy</html>", "without valid JSON"),
    ],
    ids=["one missing", "one too many", "none", "no choices", "null choices", "abort", "no ids", "null ids", "prompt",
         "no prompt", "list", "html"],
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


# Gateways


def test_request_that_a_gateway_limits_is_sent_again_after_the_pause_it_asks_for(engine_at: Any) -> None:
    """HTTP 429 was taken for a wrong field in generation_kwargs, and ended the run."""
    moments: list[float] = []

    def limited(request: Request) -> None:
        moments.append(time.monotonic())
        if len(moments) < 3:
            request.send(429, {"error": "slow down"}, Retry_After="1")
        else:
            request.send(200, completions(request))

    engine, _ = engine_at(limited)
    assert tokens(sample(engine, 1, seconds=30)) == [[100, 101]]
    assert min(later - earlier for earlier, later in pairwise(moments)) >= 1.0


def test_date_to_retry_after_is_honoured(engine_at: Any) -> None:
    moments: list[float] = []

    def limited(request: Request) -> None:
        moments.append(time.time())
        if len(moments) == 1:
            request.send(
                429, Retry_After=format_datetime(datetime.now(timezone.utc) + timedelta(seconds=2), usegmt=True)
            )
        else:
            request.send(200, completions(request))

    engine, _ = engine_at(limited)
    sample(engine, 1, seconds=30)
    assert 0.9 < moments[1] - moments[0] < 20


def test_pause_that_outlasts_the_deadline_is_an_error_at_once(engine_at: Any) -> None:
    engine, server = engine_at(lambda request: request.send(429, {"error": "slow down"}, Retry_After="3600"))
    started = time.monotonic()
    with pytest.raises(DeadlineExceededError, match=r"HTTP 429 and a pause of 3600 s.*'slow down'"):
        sample(engine, 1, seconds=60)
    assert time.monotonic() - started < 30
    assert len(server.requests) == 1


@pytest.mark.parametrize("pause", [{}, {"Retry_After": f"Mon, 01 Jan 2024 00:00:00 +{'9' * 14}"}])
def test_limit_without_a_pause_that_can_be_read_ends_with_the_deadline(engine_at: Any, pause: dict[str, str]) -> None:
    engine, server = engine_at(lambda request: request.send(429, **pause))
    with pytest.raises(DeadlineExceededError, match="HTTP 429"):
        sample(engine, 1, seconds=1.5)
    assert 1 < len(server.requests) < 10


ADAPTER = StoredAdapter(
    name=MODEL, version=1, rank=8, target_modules=("q_proj",), payload_bytes=10, path=Path("/a"), server_path="/a"
)


@pytest.mark.parametrize(
    ("location", "fix"),
    [
        ("https://inside.example/vllm/v1/load_lora_adapter", r'vllm_server_base_url="https://inside\.example/vllm"'),
        ("https://user:secret@inside.example/v1/load_lora_adapter?token=secret", 'url="https://inside.example"'),
        ("/login?next=secret", "past any proxy"),
        ("/v1/load_lora_adapter/", "past any proxy"),
    ],
)
def test_redirect_of_a_load_is_no_misfit_of_the_base_model(location: str, fix: str, engine_at: Any) -> None:
    """HTTP 307 was explained by a server that serves another base model."""
    engine, server = engine_at(lambda request: request.send(307, Location=location))
    with pytest.raises(ServerSetupError, match=rf"redirect to \S+ \(HTTP 307\).*{fix}") as caught:
        engine.load(ADAPTER, Deadline.after(10, "Loading"))
    assert "base model" not in str(caught.value)
    assert "secret" not in str(caught.value)
    assert len(server.requests) == 1


# Damaged files


@pytest.mark.parametrize(
    ("is_local", "server_path", "words"),
    [
        (True, "/a", r"on this host, so something has changed it since"),
        (True, "/mnt/a", "a network file system may show files late"),
        (False, "/a", "a network file system may show files late"),
    ],
)
def test_damaged_file_is_explained_by_where_it_is(
    is_local: bool, server_path: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that was cut off on this host was explained by a slow network file system."""
    monkeypatch.setitem(vars(TIMEOUTS), "visibility_s", 0.2)
    message = "Error while deserializing header: incomplete metadata, file not fully covered"
    with serving(lambda request: request.send(500, {"error": {"message": message}})) as server:
        engine = Blocking(VLLMEngine(server.url, is_local=is_local))
        with pytest.raises(AdapterNotVisibleError, match=words) as caught:
            engine.load(replace(ADAPTER, server_path=server_path), Deadline.after(20, "Loading"))
        engine.close()
    assert ("network" in str(caught.value)) is not (is_local and server_path == "/a")


# Connecting

METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="m"} 0.0
"""
WITH_LORA = METRICS + "# HELP vllm:lora_requests_info Running stats on lora requests.\n"


def vllm_server(request: Request, load: tuple[int, Any], metrics: str | None) -> None:
    """The routes that connecting uses."""
    match request.path:
        case "/version":
            request.send(200, {"version": "0.31.0"})
        case "/v1/models":
            request.send(200, {"data": [{"id": "served", "root": "/models/a base"}]})
        case "/v1/load_lora_adapter":
            request.send(*load)
        case "/metrics" if metrics is not None:
            request.send(200, metrics)
        case _:
            request.send(404, {"detail": "Not Found"})


BAD_REQUEST = (400, {"error": {"message": "Both 'lora_name' and 'lora_path' must be provided."}})
NO_LORA = (500, {"error": {"message": "Call to add_lora method failed: LoRA is not enabled."}})


@pytest.mark.parametrize(
    ("load", "metrics", "words"),
    [
        ((404, {"detail": "Not Found"}), METRICS, "does not let adapters be loaded while it runs"),
        (BAD_REQUEST, METRICS, "was started without LoRA support"),
    ],
)
def test_server_that_cannot_be_used_is_refused_with_the_whole_command(
    load: tuple[int, Any], metrics: str | None, words: str, engine_at: Any
) -> None:
    """It named a flag or two, and the next check then missed another one."""
    engine, server = engine_at(lambda request: vllm_server(request, load, metrics))
    command = f"`trl-lora-sync serve vllm '/models/a base' --port {server.server_port}"
    with pytest.raises(ServerSetupError, match=words) as caught:
        engine.connect(Deadline.after(20, "Connecting"))
    assert command in str(caught.value)


def test_connecting_asks_the_engine_for_no_adapter_that_is_not_there(engine_at: Any) -> None:
    engine, server = engine_at(lambda request: vllm_server(request, BAD_REQUEST, WITH_LORA))
    engine.connect(Deadline.after(20, "Connecting"))
    loads = [request.body for request in server.requests if request.path == "/v1/load_lora_adapter"]
    assert [body["lora_path"] for body in loads] == [""]


def test_where_metrics_are_off_no_adapter_is_sent_to_be_refused_and_the_first_one_shows_that_lora_is_off(
    engine_at: Any,
) -> None:
    """The refusal of a probe stayed in the queues of the server's workers, and failed the first version."""

    def answer(request: Request) -> None:
        has_path = request.path == "/v1/load_lora_adapter" and request.body["lora_path"]
        vllm_server(request, NO_LORA if has_path else BAD_REQUEST, None)

    engine, server = engine_at(answer)
    engine.connect(Deadline.after(20, "Connecting"))
    assert [one.body["lora_path"] for one in server.requests if one.path == "/v1/load_lora_adapter"] == [""]
    command = f"`trl-lora-sync serve vllm '/models/a base' --port {server.server_port}"
    with pytest.raises(ServerSetupError, match="was started without LoRA support") as caught:
        engine.load(ADAPTER, Deadline.after(20, "Load"))
    assert command in str(caught.value)


@pytest.mark.parametrize(("told", "rank"), [("", None), ("16", 16), ("many", None)])
def test_the_largest_rank_is_what_the_server_says(told: str, rank: int | None, engine_at: Any) -> None:
    engine, _ = engine_at(loading_server({"lora_sync_max_rank": told}))
    assert engine.connect(Deadline.after(20, "Connecting")).max_lora_rank == rank


OTHERS = "Call to add_lora method failed: Worker failed with error '{}', please check the stack trace above"


@pytest.mark.parametrize(
    "left",
    ["LoRA rank 99 is greater than max_lora_rank 16.", "Loading lora other failed: No adapter found for /elsewhere"],
)
@pytest.mark.parametrize(("workers", "attempts"), [(2, 2), (4, 4)])
def test_an_error_that_another_load_has_left_in_the_workers_is_not_taken_for_this_ones(
    left: str, workers: int, attempts: int, engine_at: Any
) -> None:
    """vLLM with several workers takes answers that a refused load has left for answers to its next calls."""
    stale = iter([(500, {"error": {"message": OTHERS.format(left)}})] * (workers - 1))
    usual = loading_server({})

    def answer(request: Request) -> None:
        if request.path == "/v1/load_lora_adapter" and request.body["lora_path"]:
            request.send(*next(stale, (200, "Success")))
        else:
            usual(request)

    engine, server = engine_at(answer)
    engine.connect(Deadline.after(20, "Connecting"))
    assert "run-v1" in engine.load(replace(ADAPTER, server_path="/f"), Deadline.after(20, "Load"))
    loads = [one for one in server.requests if one.path == "/v1/load_lora_adapter" and one.body["lora_path"]]
    assert len(loads) == attempts


def test_the_error_of_an_adapter_itself_is_reported_at_once(engine_at: Any) -> None:
    refusal = OTHERS.format(f"LoRA rank {ADAPTER.rank} is greater than max_lora_rank 4.")
    engine, server = engine_at(lambda request: vllm_server(request, (500, {"error": {"message": refusal}}), None))
    with pytest.raises(ServerSetupError, match="--max-lora-rank below"):
        engine.load(ADAPTER, Deadline.after(20, "Load"))
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("headers", "checks", "gpus", "dtype"),
    [
        ({}, False, (), None),
        ({"lora_sync_checks": "none", "lora_sync_dtype": "F16"}, False, (), torch.float16),
        ({"lora_sync_checks": "2", "lora_sync_dtype": "F8_E4M3"}, False, (), None),
        ({"lora_sync_checks": NOTE_FORM, "lora_sync_gpus": ""}, True, (), None),
        (
            {"lora_sync_checks": NOTE_FORM, "lora_sync_gpus": "GPU-1,GPU-2", "lora_sync_dtype": "BF16"},
            True,
            ("GPU-1", "GPU-2"),
            torch.bfloat16,
        ),
    ],
)
def test_only_a_server_that_says_so_compares_what_it_has_loaded_and_is_sent_another_dtype(
    headers: dict[str, str], checks: bool, gpus: tuple[str, ...], dtype: torch.dtype | None, engine_at: Any
) -> None:
    def answer(request: Request) -> None:
        if request.path == "/v1/load_lora_adapter":
            request.send(*BAD_REQUEST, **headers)
        else:
            vllm_server(request, BAD_REQUEST, WITH_LORA)

    engine, _ = engine_at(answer)
    found = engine.connect(Deadline.after(30, "Connecting"))
    assert (found.checks_payload, found.gpus, found.form.dtype) == (checks, gpus, dtype)


def loading_server(headers: dict[str, str]) -> Callable[[Request], None]:
    """Takes every adapter, has `run-v1` from `/f`, and adds headers to its answers to loads."""

    def answer(request: Request) -> None:
        if request.path == "/v1/load_lora_adapter":
            request.send(*((200, "Success") if request.body["lora_path"] else BAD_REQUEST), **headers)
        elif request.path == "/v1/models":
            models = [{"id": "served", "root": "/m"}, {"id": "run-v1", "root": "/f", "parent": "served"}]
            request.send(200, {"data": models})
        else:
            vllm_server(request, BAD_REQUEST, WITH_LORA)

    return answer


@pytest.mark.parametrize("is_stacked", [False, True])
@pytest.mark.parametrize("header", [None, "stacked", "another form"])
def test_the_form_of_experts_is_what_the_server_takes_and_is_said_in_the_load(
    header: str | None, is_stacked: bool, engine_at: Any
) -> None:
    engine, server = engine_at(loading_server({} if header is None else {"lora_sync_experts": header}))
    form = engine.connect(Deadline.after(30, "Connecting")).form
    assert form == Form(stacked_experts=header == "stacked")
    stored = StoredAdapter(
        name="run-v1",
        version=1,
        rank=8,
        target_modules=(),
        payload_bytes=1,
        server_path="/f",
        has_stacked_experts=is_stacked,
    )
    engine.load(stored, Deadline.after(30, "Loading"))
    [body] = [one.body for one in server.requests if one.body and one.body.get("lora_path") == "/f"]
    assert body.get("is_3d_lora_weight", False) is is_stacked


@pytest.mark.parametrize(
    ("listed", "asked", "is_taken"),
    [
        ('{"run-v1": "/f"}', 1, True),
        ('{"run-v1": "/other"}', 1, False),
        ("{}", 1, False),
        ("[]", 2, True),
        ("<html>", 2, True),
        (None, 2, True),
    ],
)
def test_from_the_second_load_on_the_answer_may_list_the_adapters(
    listed: str | None, asked: int, is_taken: bool, engine_at: Any
) -> None:
    engine, server = engine_at(loading_server({} if listed is None else {"lora_sync_adapters": listed}))
    engine.connect(Deadline.after(30, "Connecting"))
    stored = StoredAdapter(name="run-v1", version=1, rank=8, target_modules=(), payload_bytes=1, server_path="/f")
    before = len([one for one in server.requests if one.path == "/v1/models"])
    engine.load(stored, Deadline.after(30, "Loading"))
    if is_taken:
        assert engine.load(stored, Deadline.after(30, "Loading")) == {"run-v1": "/f"}
    else:
        with pytest.raises(AdapterRejectedError, match="instead of '/f'"):
            engine.load(stored, Deadline.after(30, "Loading"))
    assert len([one for one in server.requests if one.path == "/v1/models"]) - before == asked


@pytest.mark.parametrize(("status", "metrics"), [(401, ""), (500, ""), (200, "<html>a gateway</html>"), (404, "")])
def test_metrics_that_are_not_to_be_had_are_not_needed(status: int, metrics: str, engine_at: Any) -> None:
    def answer(request: Request) -> None:
        if request.path == "/metrics":
            request.send(status, metrics)
        else:
            vllm_server(request, BAD_REQUEST, None)

    engine, _ = engine_at(answer)
    assert engine.connect(Deadline.after(30, "Connecting")).is_cpu_build is None
    assert engine.adapters_ran_at(Deadline.after(30, "Asking")) is None


@pytest.mark.parametrize("replicas", [1, 2, None], ids=["one", "two", "metrics are off"])
def test_samples_that_replicas_may_share_get_seeds_which_all_differ(replicas: int | None, engine_at: Any) -> None:
    """All replicas begin with one seed, and drew the same samples of a prompt."""
    running = "".join(f'vllm:num_requests_running{{engine="{one}"}} 0.0\n' for one in range(replicas or 0))
    page = WITH_LORA + running if replicas else ""

    def answer(request: Request) -> None:
        if request.path == "/v1/completions" and request.body["model"] == MODEL:
            request.send(200, completions(request))
        else:
            vllm_server(request, BAD_REQUEST, page)

    engine, server = engine_at(answer)
    engine.connect(Deadline.after(20, "Connecting"))
    groups = [PromptGroup(prompt=[1, 5], count=2)] * 70
    for sampling in (SAMPLING, replace(SAMPLING, extra={"seed": 7})):
        engine.generate(MODEL, groups, sampling, Deadline.after(20, "Generation"))
    seeds = [request.body.get("seed") for request in server.requests if request.body and "n" in request.body]
    chosen = [seed for seed in seeds if seed not in (7, None)]
    assert len(set(chosen)) == len(chosen) == (0 if replicas == 1 else 70)
    assert seeds.count(7) > 0


# Scoring


def scores(first: int, second: int) -> list[dict[str, Any] | None]:
    """What vLLM 0.26 answers to `prompt_logprobs=0`."""
    return [None, *({str(token): {"logprob": -0.5 * token, "rank": 1}} for token in (first, second))]


@pytest.mark.parametrize(("is_cpu_build", "count"), [(False, 1), (True, 2), (None, 2)])
def test_only_a_server_on_a_gpu_scores_a_prompt_in_one_request(
    is_cpu_build: bool | None, count: int, engine_at: Any
) -> None:
    """On a CPU all tokens are sampled freely in one request, and the last one again, by force."""

    def answer(request: Request) -> None:
        content = completions(request)
        for choice in content["choices"]:
            if "prompt_logprobs" in request.body:
                choice["prompt_logprobs"] = scores(5, 6)
            else:
                forced = "logit_bias" in request.body
                choice["token_ids"] = [6 if forced else 5]
                top = {"token_id:5": -2.5, **({"token_id:6": -3.0 + 12.0} if forced else {})}
                [token] = [f"token_id:{one}" for one in choice["token_ids"]]
                choice["logprobs"] = {"tokens": [token], "token_logprobs": [top[token]], "top_logprobs": [top]}
        request.send(200, content)

    engine, server = engine_at(answer)
    connected(engine, is_cpu_build=is_cpu_build)
    assert engine.score(MODEL, [4, 5, 6], Deadline.after(10, "Scoring")) == [-2.5, -3.0]
    assert len(server.requests) == count


@pytest.mark.parametrize(
    "found", [None, [None], [None, {"5": {"logprob": -9999.0}}, {"6": {"logprob": -3.0}}], scores(5, 7)]
)
def test_a_prompt_without_all_log_probabilities_is_scored_token_by_token(found: Any, engine_at: Any) -> None:
    asked: list[bool] = []

    def answer(request: Request) -> None:
        asked.append("prompt_logprobs" in request.body)
        if asked[-1]:
            content = completions(request)
            content["choices"][0] |= {} if found is None else {"prompt_logprobs": found}
            request.send(200, content)
        else:
            request.send(400, {"error": {"message": "token by token"}})

    engine, _ = engine_at(answer)
    connected(engine, is_cpu_build=False)
    with pytest.raises(GenerationError, match="token by token"):
        engine.score(MODEL, [4, 5, 6], Deadline.after(10, "Scoring"))
    assert asked[0]
    assert not any(asked[1:])


# Batches


def test_batches_hold_every_group_once_and_equal_counts() -> None:
    groups = [PromptGroup(prompt=[i] if i % 5 else "text", count=1 + i % 2) for i in range(300)]
    batches = in_batches(groups)
    assert sorted(index for batch in batches for index in batch) == list(range(300))
    for batch in batches:
        assert len({groups[index].count for index in batch}) == 1
        assert len({type(groups[index].prompt) for index in batch}) == 1


def test_few_groups_are_sent_one_by_one_and_many_together() -> None:
    assert [len(b) for b in in_batches([PromptGroup(prompt=[i], count=1) for i in range(64)])] == [1] * 64
    assert len(in_batches([PromptGroup(prompt=[i], count=1) for i in range(1000)])) <= 64


@pytest.mark.parametrize(("rank", "flag"), [(1, 1), (2, 8), (8, 8), (17, 32), (512, 512), (600, 600)])
def test_suggested_max_lora_rank_is_one_that_vllm_accepts(rank: int, flag: int) -> None:
    assert VLLM.allowed_max_lora_rank(rank) == flag
    assert flag in VLLM.max_lora_ranks or rank > max(VLLM.max_lora_ranks)
