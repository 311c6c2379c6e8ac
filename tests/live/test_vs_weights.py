"""Live tier: `benchmarks/vs_weights.py` at a tiny size, with the arms that a CPU can run."""

import json
import os
import sys
from pathlib import Path

import pytest
from support.processes import run_script

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "vs_weights.py"


@pytest.mark.slow
def test_comparison_measures_every_phase_of_every_arm_that_runs_on_a_cpu(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    environment = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}

    ended = run_script(
        [sys.executable, SCRIPT, "--tiny", "--plot", "--out", file], tmp_path / "log", 400.0, environment
    )

    assert ended.code == 0, ended.output
    found = json.loads(file.read_text())["shapes"]["tiny"]
    assert "NCCL" in found["left_out"]["weights"]
    left_out = set(found["left_out"])
    ours = {"runtime", "fused"} - left_out
    (measured,) = found["ranks"].values()
    assert "failed" not in measured
    synced = ours | {"async trainer", "runtime by file"}
    assert set(measured["sync"]) == set(measured["drift"]) == set(measured["profile"]) == synced
    assert set(measured["decode"]) == set(measured["steps"]) == ours
    assert set(found["fleet"]) == ours
    for arm, seen in measured["sync"].items():
        assert len(seen["samples"]) == 2
        assert seen["served"]["gap"] < seen["served"]["effect"] / 2, arm
        assert 0 < seen["split"]["load_s"] < 60, arm
    for arm, seen in measured["profile"].items():
        assert seen["trainer_ms"], arm
        assert seen["server_ms"], arm
    for arm, seen in measured["drift"].items():
        assert seen["trainer_bit_identical"], arm
        assert seen["served_max_logprob_gap"] == 0, arm
    text = json.dumps(found)
    assert str(tmp_path) not in text
    assert "/dev/shm" not in text
    assert "</svg>" in file.with_suffix(".svg").read_text()
    assert "| tiny | 8 | runtime |" in ended.output
