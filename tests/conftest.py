"""Fixtures of all tiers: the tiny model, the one real server that most live tests share, and quiet libraries."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from vllm_server import VLLMServer

# The time of an example depends on the machine only.
hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("patient")

# Several processes of tests share the cores: with two threads each, that wait for each other, the tests of the adapters
# took 36 s instead of 21. OpenMP reads this when torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"
# No test may reach a hub, and tokenizers warns about its threads when a test starts a process.
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ.pop("VLLM_API_KEY", None)  # a key in the developer's shell belongs to another server
# A shell ignores interrupts in what it starts in the background, and tests send some.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Let all processes that run tests share two others: what is imported there, their forks need not import."""
    if sys.platform != "linux" or hasattr(config, "workerinput"):
        return
    from support import forked_servers, processes

    for kind in (forked_servers, processes):
        forks = kind.fork_server().start()
        config.add_cleanup(forks.stop)
        os.environ[kind.ADDRESS_VARIABLE] = forks.address


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object | None:
    if config.getoption("dist") != "loadfile":
        return None
    from support.scheduling import LongestFirst

    return LongestFirst(config, log)


# Looking for garbage takes a fifth of the time of the imports, which make none.
gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        from support.scheduling import sort

        sort(items)


@pytest.fixture(scope="module", autouse=True)
def _imported_objects_are_left_out_of_garbage_collections() -> None:
    """A training collects garbage at its start and end: 0.25 s each time with the million objects of the imports."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _forked_servers() -> Iterator[None]:
    """Every server that a test starts in this process is a fork of a process that has imported vLLM."""
    if sys.platform != "linux":
        yield
        return
    from support.forked_servers import ADDRESS_VARIABLE, Forks
    from vllm_server import VLLMServer

    with Forks(os.environ[ADDRESS_VARIABLE]) as forks, pytest.MonkeyPatch.context() as patch:
        patch.setattr(VLLMServer, "start_process", forks.starter_of(VLLMServer.start_process))
        yield


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that the shared server serves."""
    from make_model import make_model

    return make_model(tmp_path_factory.mktemp("models") / "tiny-qwen3")


@pytest.fixture(scope="session")
def server(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator["VLLMServer"]:
    """A real vLLM server; starting one takes twenty seconds, so tests share it and must leave no adapter on it."""
    from vllm_server import VLLMServer

    log = tmp_path_factory.mktemp("server") / "shared.log"
    with VLLMServer(base_model, log_path=log, extra_args=["--enable-prefix-caching"]) as running:
        yield running


FUSED_KEY = "sk-a-key-for-fusing"


@pytest.fixture(scope="session")
def fused_server(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator["VLLMServer"]:
    """A real vLLM server with fused serving, both middlewares and the key `FUSED_KEY`; shared like `server`."""
    from vllm_server import VLLMServer

    from trl_lora_sync.engine_plugins import vllm_fused, vllm_push

    server = VLLMServer(
        base_model,
        enable_lora=False,
        runtime_updating=False,
        api_key=FUSED_KEY,
        extra_args=[
            "--enable-prefix-caching",
            *("--worker-extension-cls", vllm_fused.WORKER),
            *("--middleware", vllm_fused.MIDDLEWARE),
            *("--middleware", vllm_push.MIDDLEWARE),
        ],
        extra_env={"PYTHONPATH": str(Path(__file__).parents[1])},
        log_path=tmp_path_factory.mktemp("server") / "fused.log",
    )
    with server:
        yield server
