"""A short cut of `benchmarks/qlora_colocate.py`: a base in 4 bits in the trainer and in vLLM in its process."""

import json
import sys
from pathlib import Path

import pytest
from support.launch import LAUNCHERS, check_launchers
from support.policies import NOISE_MEAN
from support.processes import run
from vllm_server import hold_free_port

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "qlora_colocate.py"


@pytest.mark.slow
def test_a_4bit_base_stays_and_the_gap_is_rounding_where_a_merge_changes_both(tmp_path: Path) -> None:
    check_launchers()
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(LAUNCHERS)}
    command = [sys.executable, SCRIPT, "--steps", "4", "--out", tmp_path / "found.json"]

    with hold_free_port() as held:  # the one in the environment is that of this process
        environment["MASTER_PORT"] = str(held.getsockname()[1])
        ended = run(command, tmp_path / "log", 400.0, environment)

    assert ended.code == 0, ended.output[-4000:]
    runs = json.loads((tmp_path / "found.json").read_text())["runs"]
    merged, adapted = runs["weights"], runs["lora_adapter"]
    assert len(adapted["steps"]) == 4
    assert all(step["gap_mean"] < NOISE_MEAN for step in adapted["steps"])
    assert adapted["base_elements_changed"] == 0
    assert merged["steps"][-1]["gap_mean"] > 5 * adapted["steps"][-1]["gap_mean"]
    assert merged["base_elements_changed"] > 0.1 * merged["base_elements"]
