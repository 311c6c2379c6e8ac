"""Live tier: a short cut of `benchmarks/qlora_gap.py`, a QLoRA trainer against servers of two base models."""

import json
import sys
from pathlib import Path

import pytest
from support.launch import LAUNCHERS, check_launchers
from support.policies import NOISE_MEAN
from support.processes import run

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "qlora_gap.py"


@pytest.mark.slow
def test_a_server_with_the_same_4bit_base_is_as_near_as_rounding(tmp_path: Path) -> None:
    check_launchers()
    size = ["--rows", "4", "--tokens", "16", "--steps", "3"]
    options = ["--arms", "bf16", "4bit", *size, "--out", tmp_path / "gap.json"]
    # For the server too, which finds bitsandbytes and vLLM's plugin for it there.
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(LAUNCHERS)}

    ended = run([sys.executable, SCRIPT, *options], tmp_path / "log", 400.0, environment)

    assert ended.code == 0, ended.output
    gaps = json.loads((tmp_path / "gap.json").read_text())["gaps"]
    assert gaps["4bit"]["mean"] < NOISE_MEAN
    assert gaps["bf16"]["mean"] > 5 * gaps["4bit"]["mean"]
    steps = gaps["4bit"]["grpo_steps"]
    assert all(step["logp_difference_mean"] < NOISE_MEAN for step in steps)
    assert steps[-1]["verified"] == 1.0
