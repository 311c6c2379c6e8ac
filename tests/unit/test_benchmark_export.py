"""The benchmark of the export runs, on a CPU and with a tiny adapter, so that it cannot rot."""

import json
import sys
from pathlib import Path

import pytest
from support.processes import run_script
from support.shared_memory import shared_folder

pytestmark = pytest.mark.outside

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "export.py"


def test_benchmark_of_the_export_compares_all_ways_and_says_on_what(tmp_path: Path) -> None:
    out = tmp_path / "export.json"
    with shared_folder() as folder:
        command = [sys.executable, SCRIPT, "--tiny", "--device", "cpu", "--dir", folder, "--out", out]
        done = run_script(command, tmp_path / "log", 240.0)
        assert done.code == 0, done.output
        assert list(folder.iterdir()) == []
    result = json.loads(out.read_text())
    assert {"command", "cpu", "versions", "gpus", "device"} <= result.keys()
    assert [case["lora_rank"] for case in result["cases"]] == [2, 8]
    for case in result["cases"]:
        assert case["byte_for_byte_equal"]
        assert case["fast_holds"]["slots_made"] == case["fast_holds"]["slots_of_a_run"] == 4
        assert case["fast_holds"]["shared_memory_bytes"] >= 4 * case["payload_bytes"]
        assert case["arms"].keys() == {"save_pretrained", "portable", "fast"}
        for arm in case["arms"].values():
            assert len(arm["samples"]) == 3
            assert arm["median"]["total_s"] > 0
