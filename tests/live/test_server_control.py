"""Live tier: pausing a real vLLM, and asking it for its KV cache; both on routes of the development mode."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from contract.reference import PeftReference
from contract.served import PROMPT, Served, engine_at, sampling, soon
from vllm_server import VLLMServer

from trl_lora_sync.adapter.store import AdapterStore
from trl_lora_sync.engines.base import PromptGroup
from trl_lora_sync.errors import ServerError, ServerSetupError

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def dev_server(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    log = tmp_path_factory.mktemp("server") / "dev.log"
    with VLLMServer(base_model, log_path=log, dev_mode=True) as running:
        yield running


@pytest.fixture
def controlled(dev_server: VLLMServer, base_model: Path, tmp_path: Path) -> Iterator[Served]:
    engine = engine_at(dev_server.base_url, "vllm")
    store = AdapterStore(tmp_path / "sync")
    yield Served(engine, PeftReference(base_model), store)
    for name in engine.loaded(soon()):
        engine.unload(name, soon())
    engine.close()
    store.close()
    assert dev_server.is_running()


def is_paused(server: VLLMServer) -> bool:
    answer = httpx.get(f"{server.base_url}/is_paused", timeout=30, trust_env=False)
    return bool(answer.json()["is_paused"])


class Traffic:
    """Another client's long completion, while the server is working on it."""

    def __init__(self, server: VLLMServer, pool: ThreadPoolExecutor) -> None:
        self._url = f"{server.base_url}/v1/completions"
        self._model = str(server.model)
        self._begun = threading.Event()
        self._answer = pool.submit(self._stream)
        assert self._begun.wait(60)

    def _stream(self) -> str:
        body = {
            "model": self._model, "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        reason = ""
        with httpx.stream("POST", self._url, json=body, timeout=120, trust_env=False) as answer:
            for line in answer.iter_lines():
                self._begun.set()
                for known in ("length", "abort", "stop"):
                    if f'"finish_reason":"{known}"' in line:
                        reason = known
        return reason

    def finish_reason(self) -> str:
        return self._answer.result(120)


@pytest.mark.parametrize(("mode", "ending"), [("drain", "length"), ("abort", "abort")])
def test_an_adapter_is_loaded_while_generation_is_paused(
    controlled: Served, dev_server: VLLMServer, mode: str, ending: str
) -> None:
    with ThreadPoolExecutor() as pool:
        traffic = Traffic(dev_server, pool)
        controlled.engine.pause(mode, soon(60))
        try:
            assert is_paused(dev_server)
            assert traffic.finish_reason() == ending
            adapter = controlled.reference.adapter(1)
            stored = controlled.write(adapter)
            controlled.engine.load(stored, soon())
        finally:
            controlled.engine.resume(soon())
    assert not is_paused(dev_server)
    assert len(controlled.sample(stored.name)[0].token_ids) >= 1


def test_resuming_without_a_pause_is_harmless(controlled: Served, dev_server: VLLMServer) -> None:
    controlled.engine.resume(soon())
    assert not is_paused(dev_server)


def test_a_cpu_server_says_that_it_cannot_release_its_kv_cache_and_goes_on(
    controlled: Served, dev_server: VLLMServer
) -> None:
    with ThreadPoolExecutor() as pool:
        traffic = Traffic(dev_server, pool)
        words = "release_kv_cache_memory failed .*the server needs a GPU, as vLLM on a CPU cannot sleep"
        with pytest.raises(ServerError, match=words):
            controlled.engine.release_kv_cache(soon(60))
        assert traffic.finish_reason() == "length", "a release may not break off a request"
    assert not is_paused(dev_server)
    assert len(controlled.sample(controlled.base)[0].token_ids) >= 1


@pytest.mark.parametrize("act", ["pause", "release"])
def test_without_the_development_mode_the_flag_is_named(clean_server: VLLMServer, act: str) -> None:
    engine = engine_at(clean_server.base_url, "vllm")
    with pytest.raises(ServerSetupError, match="a start with VLLM_SERVER_DEV_MODE=1 in the server's environment"):
        engine.pause("drain", soon()) if act == "pause" else engine.release_kv_cache(soon())
    group = PromptGroup(prompt=PROMPT, count=1)
    assert engine.generate(engine.capabilities.base_model, [group], sampling(), soon())
    engine.close()
