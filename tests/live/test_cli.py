"""Live tier: the command line against the real vLLM server, from starting it to a run's page."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.models import peft_model, randomize_adapter
from support.processes import run
from support.servers import adapters_on, vllm_version
from vllm_server import DEFAULT_PYTHON, PYTHON_VARIABLE, VLLMServer, hold_free_port

from trl_lora_sync import export_adapter
from trl_lora_sync.adapter.store import AdapterStore
from trl_lora_sync.cli.main import main
from trl_lora_sync.engines.base import Deadline
from trl_lora_sync.engines.vllm.engine import VLLMEngine
from trl_lora_sync.runtime import Blocking

CLI = [sys.executable, "-m", "trl_lora_sync.cli.main"]
START_TIMEOUT_S = 240.0


@pytest.fixture(scope="module")
def adapter(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As PEFT saves it, with features that an unchanged vLLM 0.31 would serve wrongly."""
    folder = tmp_path_factory.mktemp("adapter")
    model = peft_model(base_model, rank_pattern={"q_proj": 4}, alpha_pattern={"down_proj": 40})
    randomize_adapter(model, seed=1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def served_by_command(base_model: Path, tmp_path: Path) -> Iterator[str]:
    """A server that `trl-lora-sync serve` started on this CPU, with the engine arguments that it chooses alone.

    Without them vLLM 0.31.0 ended with "less than desired CPU memory utilization".
    """
    holder, log = hold_free_port(), tmp_path / "serve.log"
    port = holder.getsockname()[1]
    python = os.environ.get(PYTHON_VARIABLE) or str(DEFAULT_PYTHON)
    command = [*CLI, "serve", "vllm", str(base_model), "--python", python, "--lora-rank", "9", "--port", str(port)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            # With this package beside vLLM, for the largest rank to be known.
            env=os.environ
            | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
            | {"PYTHONPATH": str(Path(__file__).parents[2])},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        ends_at = time.monotonic() + START_TIMEOUT_S
        while not is_up(port):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < ends_at, log.read_text()[-4000:]
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        holder.close()


def is_up(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5, trust_env=False, verify=False).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.slow
def test_served_server_passes_the_doctor_with_an_adapter(
    served_by_command: str, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", served_by_command, "--adapter", str(adapter), "--json", "--timeout", "120"]) == 0
    [server] = json.loads(capsys.readouterr().out)["servers"]
    found = {one["name"]: one["status"] for one in server["findings"]}
    assert (server["engine"], server["version"]) == ("vllm", vllm_version(served_by_command))
    for name in ("adapter", "effect", "PEFT", "clean-up", "log-probabilities"):
        assert found[name] == "ok"
    assert not adapters_on(served_by_command)
    # Rank 9 was rounded up to a rank with a buffer in vLLM.
    capsys.readouterr()
    (adapter.parent / "r17").mkdir(exist_ok=True)
    config = json.loads((adapter / "adapter_config.json").read_text()) | {"r": 17}
    (adapter.parent / "r17" / "adapter_config.json").write_text(json.dumps(config))
    assert main(["doctor", served_by_command, "--peft-config", str(adapter.parent / "r17")]) == 1
    assert "the server reserves 16, and the adapter has 17. Restart it with `trl-lora-sync serve vllm" in (
        capsys.readouterr().out
    )


def test_doctor_knows_another_base_model(
    clean_server: VLLMServer, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from make_model import make_model

    other = make_model(tmp_path / "other", seed=7)
    options = ["--adapter", str(adapter), "--model", str(other), "--timeout", "120"]
    assert main(["doctor", clean_server.base_url, *options]) == 1
    assert "The server serves another base model" in capsys.readouterr().out


def test_doctor_compares_the_base_model_without_an_adapter(
    clean_server: VLLMServer, base_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a start does: by the log-probabilities and the vocabulary of the model that is to be trained."""
    from make_model import make_model

    assert main(["doctor", clean_server.base_url, "--model", str(base_model), "--timeout", "120"]) == 0
    found = capsys.readouterr().out
    assert "ok      base model: it scores a prompt of token ids like the trainer" in found
    assert "ok      vocabulary: " in found
    for difference, evidence in (
        ({"seed": 7}, "it computes other log-probabilities"),
        ({"vocab_size": 300}, "its vocabulary has fewer than the trainer's 300 tokens"),
    ):
        other = make_model(tmp_path / "-".join(difference), **difference)
        assert main(["doctor", clean_server.base_url, "--model", str(other), "--timeout", "120"]) == 1
        assert evidence in capsys.readouterr().out


def test_doctor_compares_with_the_model_that_the_server_names(
    clean_server: VLLMServer, base_model: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An adapter from elsewhere names its base by a path that does not exist here."""
    copy = tmp_path / "adapter"
    shutil.copytree(adapter, copy)
    config = json.loads((copy / "adapter_config.json").read_text()) | {"base_model_name_or_path": "elsewhere/tiny"}
    (copy / "adapter_config.json").write_text(json.dumps(config))
    assert main(["doctor", clean_server.base_url, "--adapter", str(copy), "--json", "--timeout", "120"]) == 0
    [server] = json.loads(capsys.readouterr().out)["servers"]
    [peft] = [one for one in server["findings"] if one["name"] == "PEFT"]
    assert peft["status"] == "ok"
    assert "mean |served - PEFT|" in peft["words"]


def test_sweep_unloads_what_a_killed_run_left_and_nothing_else(
    clean_server: VLLMServer, base_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "sync"
    engine = Blocking(VLLMEngine(clean_server.base_url, is_local=True))
    names = {}
    stores = {which: AdapterStore(root) for which in ("dead", "live")}
    for which, store in stores.items():
        store.open()
        path = store.directory / f"{store.run_id}-v1"
        export_adapter(peft_model(base_model), path)
        names[which] = path.name
        body = {"lora_name": path.name, "lora_path": str(path)}
        url = f"{clean_server.base_url}/v1/load_lora_adapter"
        httpx.post(url, json=body, timeout=60, trust_env=False).raise_for_status()
    lock = stores["dead"].lock
    assert lock is not None
    os.close(lock)

    assert main(["sweep", clean_server.base_url, "--dir", str(root), "--timeout", "60"]) == 0

    said = capsys.readouterr().out
    assert f"unloaded {names['dead']}" in said
    assert f"left {names['live']}: its run goes on" in said
    assert set(adapters_on(clean_server.base_url)) == {names["live"]}
    assert [path.name for path in root.iterdir()] == [stores["live"].run_id]
    assert engine.unload(names["live"], Deadline.after(60, "the test"))
    engine.close()
    stores["live"].close()


@pytest.mark.slow
def test_grpo_trains_with_a_file_and_flags_and_its_run_makes_a_page(
    clean_server: VLLMServer, base_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    prompts = [json.dumps({"prompt": text}) for text in ("hello", "the sea", "winter", "bread")]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(prompts))
    (tmp_path / "cli_rewards.py").write_text(
        "def mean_byte(completions, **kwargs):\n"
        "    return [sum(text.encode()) / (1 + len(text.encode())) for text in completions]\n"
    )
    settings = {
        "model_name_or_path": str(base_model),
        "dataset_name": str(tmp_path / "data"),
        "reward_funcs": ["cli_rewards.mean_byte"],
        "output_dir": str(tmp_path / "out"),
        "use_peft": True,
        "lora_r": 8,
        "lora_target_modules": "all-linear",
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": "http://127.0.0.1:1",  # the flag wins
        "vllm_sync_strategy": "lora_adapter",
        "lora_sync_dir": str(tmp_path / "sync"),
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "max_steps": 2,
        "logging_steps": 1,
        "save_steps": 2,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "num_processes": 1,  # accelerate's
        "mixed_precision": "no",
    }
    (tmp_path / "grpo.yaml").write_text(json.dumps(settings))  # JSON is YAML
    flags = ["--vllm_server_base_url", clean_server.base_url, "--num_machines", "1", "--dynamo_backend", "no"]
    command = [*CLI, "grpo", "--config", str(tmp_path / "grpo.yaml"), *flags, "--lora_sync_overlap", "1"]
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])

    ended = run(command, tmp_path / "log", 240, env={"OMP_NUM_THREADS": "1", "PYTHONPATH": path})

    assert ended.code == 0, ended.output[-4000:]
    assert "LoRA adapter sync, in all: 2 syncs" in ended.output
    assert not adapters_on(clean_server.base_url)
    assert main(["report", str(tmp_path / "out")]) == 0
    assert "Sync time by phase" in (tmp_path / "out" / "lora-sync-report.html").read_text()
