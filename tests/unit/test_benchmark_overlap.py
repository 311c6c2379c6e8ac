"""What the benchmark of overlap makes of its runs; the runs themselves need a server."""

import importlib.util
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "overlap.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    before = sys.path.copy()
    spec = importlib.util.spec_from_file_location("overlap_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
    return module


def run(arm: str, step_s: float, reward: float, **more: Any) -> dict[str, Any]:
    return {
        "arm": arm,
        "learning_rate": 1e-2,
        "reward_last_steps": reward,
        "importance_ratio_min": 0.5,
        "importance_ratio_mean": 1.0,
        "importance_ratio_max": 2.0,
        "step_s_median": step_s,
        **more,
    }


RUNS = [
    run("no overlap", 2.0, 0.6),
    run("overlap, token_truncate", 1.0, 0.5, masked=0.0, hidden=0.9, wait_s=0.1),
    run("no overlap", 4.0, 0.8),
    run("overlap, token_truncate", 2.0, 0.7, masked=0.1, hidden=1.0, wait_s=0.0),
]


def test_steps_are_compared_with_those_without_overlap_and_rewards_are_averaged(benchmark: ModuleType) -> None:
    plain, overlap = benchmark.summary(RUNS)
    assert (plain["reward_last_steps"], plain["step_against_no_overlap"]) == (0.7, 1.0)
    assert (overlap["reward_last_steps"], overlap["step_against_no_overlap"]) == (0.6, 0.5)
    assert overlap["reward_last_steps_of_runs"] == [0.5, 0.7]
    assert (overlap["masked"], overlap["hidden"]) == (0.05, 0.95)
    assert benchmark.table(RUNS).splitlines()[-1] == (
        "| 0.01 | overlap, token_truncate | 0.60 (0.50, 0.70) | 0.50 to 2.00 | 5.0 % | 1.50 s (0.50x) | 95 % |"
    )


def test_the_chart_has_a_row_for_the_server_and_one_for_the_trainer_of_each_arm(benchmark: ModuleType) -> None:
    timelines = {
        "no overlap": {"steps": [0.0], "end": 4.0, "spans": [("generation", 0.0, 2.0), ("waiting", 0.0, 2.0)]},
        "overlap": {"steps": [0.0], "end": 2.0, "spans": [("generation", 0.0, 2.0), ("sync", 1.0, 1.5)]},
    }
    svg = ElementTree.fromstring(benchmark.chart(timelines))
    texts = [element.text for element in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("server") == texts.count("trainer") == 2
    boxes = [element.attrib for element in svg.iter("{http://www.w3.org/2000/svg}rect")]
    widths = [float(box["width"]) for box in boxes if box["fill"] == "#4c78a8" and box["width"] != "12.0"]
    assert widths == [400.0, 400.0]
