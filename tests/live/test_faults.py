"""Live tier: server processes that crash or hang, trainers that are killed, folders that fill late; one fault each.

Random mixtures of faults are in `test_fault_schedules.py`.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from support.faults import COMPLETIONS, LOAD, FaultProxy, fault_proxy
from support.kills import kill_at
from support.models import randomize_adapter, written_adapter
from support.policies import is_policy_of, sample, token_ids
from support.processes import run_script, start_script
from support.servers import Proxy, adapters_on
from support.trainers import shorten, steps_of
from support.waiting import until
from transformers.trainer_utils import get_last_checkpoint
from vllm_server import VLLMServer

from trl_lora_sync import GRPOTrainer
from trl_lora_sync.engines.base import TIMEOUTS
from trl_lora_sync.errors import GenerationError, ServerUnreachableError

Make = Callable[..., GRPOTrainer]
TESTS = Path(__file__).parents[1]
# Servers are started in this file, which takes minutes on a machine that does other things as well.
pytestmark = pytest.mark.timeout(900)
LOGP_GAP = "sampling/sampling_logp_difference/mean"


@pytest.fixture(scope="module")
def mortal(base_model: Path) -> Iterator[VLLMServer]:
    """A server that tests may stop and kill; each leaves it running, but for the last."""
    with VLLMServer(base_model) as server:
        yield server


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead server is noticed after two seconds, not thirty."""
    monkeypatch.setitem(vars(TIMEOUTS), "watch_every_s", 0.2)
    monkeypatch.setitem(vars(TIMEOUTS), "lifeless_after_s", 2.0)
    monkeypatch.setitem(vars(TIMEOUTS), "health_s", 1.0)


# Server processes


def test_a_server_that_hangs_is_noticed_long_before_the_timeout_and_goes_on_when_it_wakes(
    mortal: VLLMServer, impatient: None, make_trainer: Make, base_model: Path
) -> None:
    """A process that is stopped or swapped out held a generation for all of lora_sync_generation_timeout."""
    with fault_proxy(mortal.base_url) as proxy:
        trainer = make_trainer(proxy.base_url, base_model, lora_sync_generation_timeout=200.0)
        randomize_adapter(trainer.model, seed=1)
        trainer.vllm_generation.sync_weights()
        shorten(trainer, sync_timeout_s=5.0)
        stop_once(proxy, lambda: os.killpg(mortal.pid, signal.SIGSTOP))
        started = time.monotonic()
        try:
            with pytest.raises(ServerUnreachableError, match=r"no sign of life for .* s .*look at its log"):
                sample(trainer.vllm_generation, [token_ids(1)])
            assert time.monotonic() - started < 60
        finally:
            os.killpg(mortal.pid, signal.SIGCONT)

        assert is_policy_of(trainer.model, sample(trainer.vllm_generation, [token_ids(1)]))
        trainer.vllm_generation.close()


def stop_once(proxy: FaultProxy, stop: Callable[[], None]) -> None:
    """Call `stop` at the next request for a completion."""

    def act(path: str, body: dict[str, Any]) -> None:
        if path == COMPLETIONS:
            proxy.on_request = lambda path, body: None
            stop()

    proxy.on_request = act


@pytest.mark.slow
@pytest.mark.parametrize("point", ["after it has loaded", "while it samples"])
def test_a_server_killed_at_this_point_and_restarted_goes_on_with_the_version_it_lost(
    point: str, mortal: VLLMServer, base_model: Path, tmp_path: Path
) -> None:
    """`benchmarks/faults.py --kills` has the other points."""
    found = kill_at(point, mortal, base_model, tmp_path, timeout_s=5.0)

    assert found["violations"] == []
    assert found["raised"] in ("ServerUnreachableError", "DeadlineExceededError")


def test_a_server_told_to_stop_in_the_middle_of_a_generation_is_noticed_long_before_the_timeout(
    mortal: VLLMServer, impatient: None, make_trainer: Make, base_model: Path
) -> None:
    """On SIGTERM, vLLM 0.31 answers running requests with an error, or keeps their connections and never answers."""
    with fault_proxy(mortal.base_url) as proxy:
        trainer = make_trainer(proxy.base_url, base_model, lora_sync_generation_timeout=200.0)
        trainer.vllm_generation.sync_weights()
        shorten(trainer, sync_timeout_s=5.0)

        def terminate(path: str, body: dict[str, Any]) -> None:
            if path == COMPLETIONS:
                until(lambda: running_requests(mortal) > 0)
                os.kill(mortal.pid, signal.SIGTERM)

        proxy.while_asking = terminate
        proxy.rewrite = lambda path, body: body | {"max_tokens": 450, "min_tokens": 450} if "prompt" in body else body
        started = time.monotonic()
        with pytest.raises((ServerUnreachableError, GenerationError)):
            sample(trainer.vllm_generation, [token_ids(1)])

        assert time.monotonic() - started < 100
        proxy.while_asking = lambda path, body: None
        mortal.kill()  # which lets the proxy's own request end


def running_requests(server: VLLMServer) -> float:
    text = httpx.get(f"{server.base_url}/metrics", timeout=30, trust_env=False).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("vllm:num_requests_running{"))


# Folders


def test_files_that_a_network_file_system_shows_late_and_in_part_are_waited_for(
    make_trainer: Make, proxy: Proxy, base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory with half of its files was taken for a refusal of the adapter, and ended the run."""
    monkeypatch.setattr("trl_lora_sync.engines.vllm.engine.VLLMEngine.local_visibility_grace_s", 60.0)
    shown, seen = tmp_path / "sync", tmp_path / "seen"
    seen.mkdir()
    trainer = make_trainer(proxy.base_url, base_model, lora_sync_server_dir=str(tmp_path / "sync"))
    trainer.vllm_generation.sync.transport.store.server_root = str(seen)
    attempts: list[str] = []

    def show_more(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == LOAD:
            attempts.append(path)
            theirs = Path(body["lora_path"])
            ours = shown / theirs.relative_to(seen)
            show(ours, theirs, len(attempts))
        return body

    proxy.before = show_more
    randomize_adapter(trainer.model, seed=3)
    trainer.vllm_generation.sync_weights()

    assert len(attempts) == 6
    assert is_policy_of(trainer.model, sample(trainer.vllm_generation, [token_ids(1), token_ids(2)]))


def show(ours: Path, theirs: Path, attempt: int) -> None:
    """What the server sees of an adapter at its first, second, ... look; all of it at the sixth."""
    config, tensors = "adapter_config.json", "adapter_model.safetensors"
    theirs.mkdir(parents=True, exist_ok=True)
    content = (ours / tensors).read_bytes()
    match attempt:
        case 2:
            (theirs / config).touch()
        case 3:
            (theirs / config).write_bytes((ours / config).read_bytes())
        case 4:
            (theirs / tensors).touch()
        case 5:
            (theirs / tensors).write_bytes(content[:-100])
        case 6:
            (theirs / tensors).write_bytes(content)


# Trainer processes


@pytest.mark.parametrize("point", ["writing", "written", "loaded"])
def test_a_process_killed_in_the_middle_of_a_sync_leaves_nothing_that_the_next_run_does_not_remove(
    point: str, make_trainer: Make, clean_server: VLLMServer, base_model: Path, tmp_path: Path
) -> None:
    script = TESTS / "support" / "run_until_killed.py"
    command = [sys.executable, script, clean_server.base_url, tmp_path / "sync", point]
    with start_script(command, os.environ, subprocess.PIPE) as dying:
        assert dying.stdout is not None
        assert dying.stdout.readline().strip() == point
        dying.send_signal(signal.SIGKILL)
    [dead] = (tmp_path / "sync").iterdir()
    left = [path.name for path in dead.iterdir()]
    assert any(name.endswith(".partial") for name in left) == (point == "writing")
    assert len(adapters_on(clean_server.base_url)) == (point == "loaded")

    trainer = make_trainer(clean_server.base_url, base_model)

    assert not dead.exists()
    assert adapters_on(clean_server.base_url) == {}
    randomize_adapter(trainer.model, seed=1)
    trainer.vllm_generation.sync_weights()
    assert is_policy_of(trainer.model, sample(trainer.vllm_generation, [token_ids(1)]))


def test_a_run_killed_in_the_middle_of_a_step_resumes_with_the_adapter_of_its_checkpoint(
    make_trainer: Make, proxy: Proxy, base_model: Path, tmp_path: Path
) -> None:
    script = TESTS / "support" / "run_and_die.py"
    environment = {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, script, proxy.target, base_model, tmp_path, "3"]
    died = run_script(command, tmp_path / "log", 200.0, environment)
    assert died.code == -signal.SIGKILL, died.output
    unsaved = adapters_on(proxy.target)
    assert len(unsaved) == 2, "the killed run's versions are gone, so this test proves less"
    checkpoint = get_last_checkpoint(str(tmp_path / "out"))
    assert checkpoint is not None
    assert checkpoint.endswith("checkpoint-3")
    trained = written_adapter(Path(checkpoint))
    assert any(bool(tensor.any()) for name, tensor in trained.items() if "lora_B" in name)
    pushed: list[dict[str, torch.Tensor]] = []

    def keep(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == LOAD and body["lora_name"].endswith("-v1"):
            pushed.append(written_adapter(Path(body["lora_path"])))
        return body

    proxy.before = keep
    trainer = make_trainer(proxy.base_url, base_model, tmp_path, max_steps=5, learning_rate=0.05)
    assert adapters_on(proxy.target) == {}, "what the killed run left is still there"
    trainer.train(resume_from_checkpoint=checkpoint)

    [first_version] = pushed
    for name, tensor in trained.items():
        assert torch.equal(first_version[name], 2.0 * tensor if "lora_B" in name else tensor), name
    resumed = [step for step in steps_of(trainer) if step["step"] > 3]
    assert [step["lora_sync/version"] for step in resumed] == [1, 2]
    assert all(step[LOGP_GAP] < 0.02 for step in resumed)
    assert {load["lora_name"] for load in proxy.loads()}.isdisjoint(unsaved)
