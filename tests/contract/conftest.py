"""Fixtures of the contract tier: fakes of every version, an engine in memory, and real servers where there are any.

Real servers are those at TRL_LORA_SYNC_TEST_SGLANG_URL and TRL_LORA_SYNC_TEST_VLLM_URL, which must serve the model in
the folder TRL_LORA_SYNC_TEST_MODEL with --max-lora-rank 16; without the latter, the shared vLLM on this CPU.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import certifi
import pytest
import torch
from conftest import FUSED_KEY

from contract.fleets import FleetAsEngine
from contract.reference import FakeReference, PeftReference
from contract.served import SMALL, Served, engine_at, soon
from trl_lora_sync.adapter.store import AdapterStore
from trl_lora_sync.runtime import Blocking, run
from trl_lora_sync.testing import VERSIONS, FakeSGLang, InMemoryEngine, ServerArgs

KEYS = ("SGLANG_API_KEY", "SGLANG_ADMIN_API_KEY", "VLLM_API_KEY")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # the servers compute at the same time, on the same cores


@pytest.fixture(scope="session", autouse=True)
def _few_certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Reading all authorities takes 50 ms for each client that is made; no server here speaks TLS."""
    first, end, _ = Path(certifi.where()).read_text().partition("-----END CERTIFICATE-----\n")
    file = tmp_path_factory.mktemp("tls") / "one.pem"
    file.write_text(first + end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(file))
        yield


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AdapterStore]:
    opened = AdapterStore(tmp_path / "sync")
    yield opened
    opened.close()


@pytest.fixture
def serve(store: AdapterStore) -> Iterator[Callable[..., Served]]:
    """Starts fakes with the given arguments, connected unless `connect=False`."""
    with ExitStack() as stack:

        def start(version: str = "0.5.23", *, connect: bool = True, **args: Any) -> Served:
            fake = stack.enter_context(FakeSGLang(**{"version": version, "shapes": SMALL, **args}))
            engine = engine_at(fake.base_url, "sglang", connect=connect)
            stack.callback(engine.close)
            return Served(engine, FakeReference(fake), store, fake)

        yield start


@pytest.fixture(params=VERSIONS)
def fake(request: pytest.FixtureRequest, serve: Callable[..., Served]) -> Served:
    """A fake of each version, for what only a fake can be made to do."""
    return serve(request.param)


@pytest.fixture(params=("0.5.11", "0.5.17", "0.5.23"))
def few(request: pytest.FixtureRequest, serve: Callable[..., Served]) -> Served:
    """Like `fake`, for what no version has ever done differently."""
    return serve(request.param)


@pytest.fixture(
    params=[
        *(pytest.param(version, id=f"fake-{version}") for version in VERSIONS),
        "in-memory",
        "fleet",
        pytest.param("sglang", marks=pytest.mark.sglang),
        pytest.param("vllm", marks=pytest.mark.vllm),
        pytest.param("vllm-fused", marks=pytest.mark.vllm),
    ]
)
def served(
    request: pytest.FixtureRequest,
    serve: Callable[..., Served],
    store: AdapterStore,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Served]:
    """Every server there is, and two as one. Real ones are shared, so no adapter may be left on them."""
    if request.param in VERSIONS:
        yield serve(request.param)
        return
    if request.param == "in-memory":
        engine = InMemoryEngine(ServerArgs(shapes=SMALL))
        run(engine.connect(soon()))
        yield Served(Blocking(engine), FakeReference(engine), store)
        return
    if request.param == "fleet":
        fakes = [serve(connect=False).fake for _ in range(2)]
        assert fakes[0]
        assert fakes[1]
        yield Served(FleetAsEngine([fakes[0], fakes[1]], store.root), FakeReference(fakes[0]), store)  # type: ignore[arg-type]
        return
    base_url, model = request.getfixturevalue(f"{request.param.replace('-', '_')}_at")
    if request.param == "vllm-fused":
        monkeypatch.setenv("VLLM_API_KEY", FUSED_KEY)
    engine = engine_at(base_url, request.param)
    before = set(engine.loaded(soon()))
    try:
        yield Served(engine, _peft_reference(model), store)
    finally:
        for name in set(engine.loaded(soon())) - before:
            engine.unload(name, soon())
        engine.close()


@pytest.fixture(scope="session")
def sglang_at() -> tuple[str, str]:
    """URL and model folder of a real SGLang."""
    if "TRL_LORA_SYNC_TEST_SGLANG_URL" not in os.environ:
        pytest.skip("SGLang needs a GPU: TRL_LORA_SYNC_TEST_SGLANG_URL names no server")
    return _from_environment("TRL_LORA_SYNC_TEST_SGLANG_URL")


@pytest.fixture(scope="session")
def vllm_at(request: pytest.FixtureRequest) -> tuple[str, str]:
    """URL and model folder of a real vLLM: the given one, or the server that the other tests share."""
    if "TRL_LORA_SYNC_TEST_VLLM_URL" in os.environ:
        return _from_environment("TRL_LORA_SYNC_TEST_VLLM_URL")
    shared = request.getfixturevalue("server")
    return shared.base_url, str(shared.model)


@pytest.fixture(scope="session")
def vllm_fused_at(request: pytest.FixtureRequest) -> tuple[str, str]:
    """URL and model folder of a real vLLM that adds adapters to its weights."""
    shared = request.getfixturevalue("fused_server")
    return shared.base_url, str(shared.model)


def _from_environment(variable: str) -> tuple[str, str]:
    return os.environ[variable].rstrip("/"), os.environ["TRL_LORA_SYNC_TEST_MODEL"]


_references: dict[str, PeftReference] = {}


def _peft_reference(model: str) -> PeftReference:
    if model not in _references:
        _references[model] = PeftReference(model)
    return _references[model]
