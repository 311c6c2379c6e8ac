"""Unit tier: the trainer's side of fused serving, against servers that answer as a test wants."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trl_lora_sync.adapter.store import StoredAdapter
from trl_lora_sync.engine_plugins.vllm_fused import BASE, HEADER, PROTOCOL, ROUTE
from trl_lora_sync.engines.base import Deadline
from trl_lora_sync.engines.connect import connect_engine
from trl_lora_sync.engines.vllm.fused import VLLMFusedEngine
from trl_lora_sync.errors import (
    AdapterLostError,
    AdapterNotVisibleError,
    AdapterRejectedError,
    DeadlineExceededError,
    GenerationError,
    ServerAuthError,
    ServerSetupError,
    WrongPolicyError,
)
from trl_lora_sync.runtime import Blocking, run
from unit.servers import Request, Server, serving

pytestmark = pytest.mark.outside

STORED = StoredAdapter(
    name="a-v1",
    version=1,
    path=Path("/sync/a-v1"),
    server_path="/sync/a-v1",
    rank=8,
    target_modules=("q_proj",),
    payload_bytes=10,
)
BUSY = {"error": {"message": "3 other requests were still being answered after 9 s, and so on"}}
COMPLETION = {
    "model": "base",
    "choices": [
        {
            "index": 0,
            "prompt_token_ids": [1],
            "token_ids": [2],
            "finish_reason": "length",
            "logprobs": {
                "tokens": ["token_id:2"],
                "token_logprobs": [-1.0],
                "top_logprobs": [{"token_id:2": -1.0, "token_id:3": -2.0}],
            },
        }
    ],
}


def soon() -> Deadline:
    return Deadline.after(20.0, "the test")


class Fused:
    """How the server answers; each may be changed by a test."""

    def __init__(self) -> None:
        self.state: tuple[int, Any] = (200, {"protocol": PROTOCOL, "adapters": {"a-v1": "/sync/a-v1"}})
        self.put: tuple[int, Any] = (200, {"current": "a-v1", "path": "/sync/a-v1"})
        self.completion: tuple[int, Any] = (200, COMPLETION)
        self.names: Callable[[str | None], str | None] = lambda wanted: wanted

    def __call__(self, request: Request) -> None:
        if request.path == "/version":
            request.send(200, {"version": "0.31.0"})
        elif request.path == "/v1/models":
            request.send(200, {"data": [{"id": "base", "root": "base"}]})
        elif request.path == ROUTE:
            request.send(*self.state)
        elif request.path.startswith(ROUTE):
            request.send(*self.put)
        elif request.path == "/v1/completions":
            name = self.names(request.headers.get(HEADER))
            request.send(*self.completion, **({"X_LoRA_Sync_Adapter": name} if name else {}))
        else:
            request.send(404 if request.path == "/model_info" else 200, {})


def connected(server: Server) -> Blocking:
    engine = Blocking(run(connect_engine(server.url, engine="vllm", is_local=True, deadline=soon(), serving="fused")))
    assert isinstance(engine.wrapped, VLLMFusedEngine)
    return engine


def test_requests_name_the_base_and_the_version_in_a_header() -> None:
    with serving(Fused()) as server:
        engine = connected(server)
        assert engine.capabilities.is_fused
        assert engine.score("a-v1", [1, 2], soon()) == [-1.0]
        assert engine.score("base", [1, 2], soon()) == [-1.0]
    asked = [(seen.body["model"], seen.headers[HEADER]) for seen in server.requests if seen.path == "/v1/completions"]
    assert asked[-2:] == [("base", "a-v1"), ("base", BASE)]


@pytest.mark.parametrize(
    ("workers", "dtype"),
    [([{"dtype": "BF16"}, {"dtype": "BF16"}], torch.bfloat16), ([{"dtype": ""}], None), ([{}], None), ([], None)],
)
def test_the_dtype_of_the_weights_is_the_one_for_adapters(workers: list[Any], dtype: torch.dtype | None) -> None:
    fused = Fused()
    fused.state[1]["workers"] = workers
    with serving(fused) as server:
        assert connected(server).capabilities.form.dtype == dtype


@pytest.mark.parametrize("named", [None, BASE, "a-v2"])
def test_an_answer_from_another_version_or_without_one_is_not_used(named: str | None) -> None:
    fused = Fused()
    with serving(fused) as server:
        engine = connected(server)
        fused.names = lambda wanted: named
        with pytest.raises(WrongPolicyError, match=re.escape(f"completions of {named!r} instead of 'a-v1'")):
            engine.score("a-v1", [1, 2], soon())


def test_a_version_that_the_server_forgot_is_lost() -> None:
    fused = Fused()
    with serving(fused) as server:
        engine = connected(server)
        fused.completion = (404, {"error": {"message": "The model `a-v1` does not exist."}})
        with pytest.raises(AdapterLostError):
            engine.score("a-v1", [1, 2], soon())
        fused.completion = (500, {"error": {"message": "unknown state"}})
        with pytest.raises(GenerationError, match="unknown state"):
            engine.score("a-v1", [1, 2], soon())


def test_loaded_adapters_are_those_that_are_registered() -> None:
    with serving(Fused()) as server:
        assert connected(server).loaded(soon()) == {"a-v1": "/sync/a-v1"}


def test_a_load_gives_the_server_a_time_to_wait_that_ends_before_ours() -> None:
    with serving(Fused()) as server:
        connected(server).load(STORED, soon())
    [body] = [seen.body for seen in server.requests if seen.path == f"{ROUTE}/a-v1"]
    assert body["path"] == "/sync/a-v1"
    assert 0 < body["timeout_s"] < 20


def test_a_load_with_days_to_wait_asks_for_a_time_that_the_server_accepts() -> None:
    """With a lora_sync_timeout of 96,000 s and more, the server refused every load."""
    with serving(Fused()) as server:
        connected(server).load(STORED, Deadline.after(1e6, "the test"))
    [body] = [seen.body for seen in server.requests if seen.path == f"{ROUTE}/a-v1"]
    assert body["timeout_s"] < 86400  # see `FusedMiddleware`


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        ((200, {"current": "a-v2", "path": "/sync/a-v1"}), AdapterRejectedError, "holds.*a-v2"),
        ((200, {"current": "a-v1", "path": "/other"}), AdapterRejectedError, "holds.*/other"),
        ((409, BUSY), DeadlineExceededError, "other clients.*3 other requests"),
        ((409, {"error": {"message": "The engine was still busy after 9 s."}}), DeadlineExceededError, "still busy"),
        ((409, {"error": {"message": "because requests still use it."}}), DeadlineExceededError, "still use it"),
        ((409, {"error": {"message": "The server sleeps, and"}}), ServerSetupError, r"curl -X POST http\S+/wake_up"),
        ((409, {"error": {"message": "a-v1 is registered already"}}), AdapterRejectedError, "registered already"),
        ((422, {"error": {"message": "The adapter holds NaN"}}), AdapterRejectedError, "holds NaN"),
        ((422, {"error": {"message": "it was not written completely"}}), AdapterNotVisibleError, "cut off or damaged"),
        ((404, {"error": {"message": "No adapter found for /sync"}}), AdapterNotVisibleError, "lora_sync_server_dir"),
        ((401, {"error": {"message": "Unauthorized"}}), ServerAuthError, "VLLM_API_KEY"),
    ],
)
def test_a_load_that_is_refused_says_why(answer: tuple[int, Any], error: type[Exception], words: str) -> None:
    fused = Fused()
    with serving(fused) as server:
        engine = connected(server)
        fused.put = answer
        with pytest.raises(error, match=words):
            engine.load(STORED, soon())


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ((404, {"detail": "Not Found"}), r"`trl-lora-sync serve vllm base --fused --port \d+[^`]*`"),
        ((500, {"error": {"message": "needs --api-server-count 1"}}), "needs --api-server-count 1"),
        ((200, {"protocol": 2}), "Install the same trl-lora-sync next to both"),
    ],
)
def test_a_server_that_cannot_is_refused_with_what_to_do(state: tuple[int, Any], words: str) -> None:
    fused = Fused()
    fused.state = state
    with serving(fused) as server, pytest.raises(ServerSetupError, match=words):
        connected(server)


def test_sglang_is_refused_with_what_to_do() -> None:
    with (
        serving(lambda request: request.send(200, {})) as server,
        pytest.raises(ServerSetupError, match=r'SGLang.*lora_sync_serving="runtime"'),
    ):
        Blocking(run(connect_engine(server.url, engine="auto", is_local=True, deadline=soon(), serving="fused")))


def test_what_the_server_does_is_asked_for_where_nothing_is_set() -> None:
    fused = Fused()
    with serving(fused) as server:
        engine = Blocking(
            run(connect_engine(server.url, engine="vllm", is_local=True, deadline=soon(), serving="auto"))
        )
        assert engine.capabilities.is_fused
        fused.state = (404, {})
        engine = Blocking(
            run(connect_engine(server.url, engine="vllm", is_local=True, deadline=soon(), serving="auto"))
        )
        assert not engine.capabilities.is_fused
