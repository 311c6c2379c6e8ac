"""Live tier: processes that are interrupted, or whose server hangs or does not unload, let go of everything at once."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from make_model import make_model
from support.faults import UNLOAD
from support.launch import CPU_ENV, LAUNCH_ENV, launch_command
from support.long_run import LONG, ROWS
from support.processes import ForkedScript, start_script
from support.servers import adapters_on, proxy_to
from support.trainers import grpo_trainer
from vllm_server import VLLMServer

from trl_lora_sync.engines.base import TIMEOUTS

LONG_RUN = Path(__file__).parents[1] / "support" / "long_run.py"
# A server is started in this file, and processes that import torch.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
# Two seconds are what is promised, and the machine may be busy; the generation itself takes more than a minute.
AT_ONCE_S = 10.0
# The interpreter takes torch and the rest down, which has taken eight seconds on a busy machine.
EXIT_S = 25.0


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with room for long completions."""
    model = make_model(tmp_path_factory.mktemp("models") / "tiny-qwen3-long")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2 * LONG}))
    return model


@pytest.fixture(scope="module")
def long_server(long_model: Path) -> Iterator[VLLMServer]:
    with VLLMServer(long_model, max_model_len=LONG + 1000) as server:
        yield server


@dataclass
class LongRun:
    """A process of `long_run.py`, or the launcher of several."""

    process: subprocess.Popen[Any] | ForkedScript
    server: VLLMServer
    folder: Path

    def wait_until_generating(self, rows: int) -> None:
        self.until(lambda: running_requests(self.server) >= rows, 240.0)

    def until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.05)

    def pid(self, index: int) -> int:
        return int((self.folder / f"pid-{index}").read_text())

    def end(self, timeout_s: float = 120.0) -> tuple[list[float], float, set[str]]:
        """When each process's training ended, when the last process did, and the errors of the trainings."""
        self.process.wait(timeout_s)
        ended_at = time.monotonic()
        lines = [line.split() for line in self.output().splitlines() if line.startswith("ended ")]
        return [float(at) for _, at, _ in lines], ended_at, {error for _, _, error in lines}

    def output(self) -> str:
        return (self.folder / "log").read_text(errors="replace")


@contextmanager
def running(server: VLLMServer, model: Path, folder: Path, way: str = "main", processes: int = 1) -> Iterator[LongRun]:
    arguments = [way, server.base_url, str(model), str(folder)]
    environment = os.environ | LAUNCH_ENV
    with (folder / "log").open("wb") as log:
        if processes > 1:
            command = launch_command(LONG_RUN, arguments, ["--multi_gpu"], processes=processes)
            environment |= CPU_ENV
            process: Any = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        else:
            process = start_script([sys.executable, LONG_RUN, *arguments], environment, log)
    try:
        yield LongRun(process, server, folder)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def running_requests(server: VLLMServer) -> float:
    text = httpx.get(f"{server.base_url}/metrics", timeout=60, trust_env=False).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("vllm:num_requests_running{"))


def wait_until_idle(server: VLLMServer) -> None:
    deadline = time.monotonic() + AT_ONCE_S
    while running_requests(server):
        assert time.monotonic() < deadline, "the requests go on"
        time.sleep(0.05)


@pytest.mark.parametrize(("way", "sent"), [("main", signal.SIGINT), ("thread", signal.SIGUSR1)])
def test_one_interrupt_ends_a_generation_that_the_server_aborts_and_withdraws_the_versions(
    way: str, sent: signal.Signals, long_server: VLLMServer, long_model: Path, tmp_path: Path
) -> None:
    """Ctrl-C, or an exception from another thread, was noticed when the generation had ended, after three minutes."""
    with running(long_server, long_model, tmp_path, way) as run:
        run.wait_until_generating(ROWS)
        assert len(adapters_on(long_server.base_url)) == 2
        sent_at = time.monotonic()
        os.kill(run.pid(0), sent)
        [ended_at], exited_at, errors = run.end()

    print(f"train() raised after {ended_at - sent_at:.2f} s, the process ended after {exited_at - sent_at:.2f} s")
    assert errors == {"KeyboardInterrupt"}
    assert ended_at - sent_at < AT_ONCE_S
    assert exited_at - ended_at < EXIT_S
    wait_until_idle(long_server)
    assert adapters_on(long_server.base_url) == {}
    assert not (tmp_path / "sync").exists()


def test_an_interrupt_of_process_0_ends_the_others_as_well(
    long_server: VLLMServer, long_model: Path, tmp_path: Path
) -> None:
    with running(long_server, long_model, tmp_path, processes=2) as run:
        run.wait_until_generating(2 * ROWS)
        sent_at = time.monotonic()
        os.kill(run.pid(0), signal.SIGINT)
        ended_at, _, errors = run.end()

    print(f"train() raised after {[round(at - sent_at, 2) for at in ended_at]} s")
    assert errors == {"KeyboardInterrupt"}
    assert len(ended_at) == 2, run.output()
    assert max(ended_at) - sent_at < AT_ONCE_S
    wait_until_idle(long_server)
    assert adapters_on(long_server.base_url) == {}


def test_a_process_whose_server_hangs_ends_soon_after_its_training_and_the_next_run_tidies_up(
    long_server: VLLMServer, long_model: Path, tmp_path: Path
) -> None:
    """It lived for 30 s more for each version that was to be unloaded."""
    with running(long_server, long_model, tmp_path, "impatient") as run:
        run.wait_until_generating(ROWS)
        os.killpg(long_server.pid, signal.SIGSTOP)
        try:
            [ended_at], exited_at, errors = run.end()
        finally:
            os.killpg(long_server.pid, signal.SIGCONT)

    print(f"the process ended {exited_at - ended_at:.2f} s after its training")
    assert errors == {"ServerUnreachableError"}
    assert exited_at - ended_at < EXIT_S
    wait_until_idle(long_server)
    with released(grpo_trainer(long_server.base_url, long_model, tmp_path)):
        assert adapters_on(long_server.base_url) == {}
    assert not (tmp_path / "sync").exists()


@contextmanager
def released(trainer: Any) -> Iterator[Any]:
    try:
        yield trainer
    finally:
        trainer.vllm_generation.close()


def test_names_that_a_gateway_does_not_unload_are_unloaded_by_the_next_run(
    long_server: VLLMServer, long_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An orderly end left more behind than a killed run: its folder, and so its names, were gone."""
    with proxy_to(long_server.base_url) as gateway:
        # The request names an adapter that the server does not have, so the server unloads nothing.
        gateway.before = lambda path, body: body | {"lora_name": "no-such-name"} if path == UNLOAD else body
        gateway.after = lambda path, status, answer: (503, b"no unloads") if path == UNLOAD else (status, answer)
        with monkeypatch.context() as patch:
            patch.setitem(vars(TIMEOUTS), "close_s", 1.0)
            with released(grpo_trainer(gateway.base_url, long_model, tmp_path)) as trainer:
                trainer.train()
        left = set(adapters_on(long_server.base_url))
        assert {name.rpartition("-v")[2] for name in left} == {"trial1", "trial2", "1", "2", "3"}
        assert {path.name for path in (tmp_path / "sync").glob("*/*-v*")} == left

        gateway.before = lambda path, body: body
        gateway.after = lambda path, status, answer: (status, answer)
        with released(grpo_trainer(gateway.base_url, long_model, tmp_path)):
            assert adapters_on(long_server.base_url) == {}
    assert not (tmp_path / "sync").exists()
