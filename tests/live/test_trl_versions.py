"""Live tier: every TRL that is supported trains against the real server, each in a process of its own.

The versions lie unpacked, without their dependencies, in folders named by version; `make test` puts them there.
"""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from support.policies import RATIO_SPREAD
from support.processes import run
from support.servers import adapters_on
from support.trainers import METRICS
from vllm_server import VLLMServer

TESTS = Path(__file__).parents[1]
FOLDER_VARIABLE = "TRL_LORA_SYNC_TRL_VERSIONS_DIR"
VERSIONS = ["1.11.0", "1.12.0", "1.13.0", "1.14.2", "1.15.0"]  # 1.16 is what all other tests run on
RUN_TIMEOUT_S = 200.0


def folder_of(version: str) -> Path:
    return Path(os.environ.get(FOLDER_VARIABLE) or TESTS.parent / ".trl-versions") / version


def short_run(version: str, server: VLLMServer, base_model: Path, folder: Path) -> dict[str, Any]:
    """Train in a process of its own."""
    trl = folder_of(version)
    if not (trl / "trl").is_dir():
        raise FileNotFoundError(
            f"TRL {version} is not in {trl}. Run `make trl-versions`, or install it there: "
            f"{sys.executable} -m pip install --no-deps --target {trl} trl=={version}"
        )
    command = [sys.executable, TESTS / "support" / "short_run.py", server.base_url, base_model, folder]
    path = os.pathsep.join(map(str, [trl, TESTS]))
    ended = run(command, folder / "log", RUN_TIMEOUT_S, env={"PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
    assert ended.code == 0, ended.output
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result | {"output": ended.output}


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_the_same_run_works_on_every_supported_trl(
    version: str, server: VLLMServer, base_model: Path, tmp_path: Path
) -> None:
    result = short_run(version, server, base_model, tmp_path)

    assert result["trl"] == version
    assert Path(result["trl_path"]).is_relative_to(folder_of(version))
    assert not result["vllm"]
    steps = [entry for entry in result["log"] if "lora_sync/version" in entry]
    assert [step["lora_sync/version"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step.keys() >= METRICS | {"lora_sync/generate_s"}
        assert step["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=RATIO_SPREAD)
        assert step["sampling/sampling_logp_difference/mean"] < 0.02
    assert result["script"] == ["trl_lora_sync.config", 7, ["--num_processes", "2"]]
    assert result["moved"], "training did not change the adapter"
    assert math.isfinite(result["evaluated"]["eval_reward"])
    assert result["output"].count("LoRA adapter sync: vllm") == 1
    assert not (tmp_path / "sync").exists(), "versions were left at exit"
    assert not [path for path in adapters_on(server.base_url).values() if str(tmp_path) in path]
