"""Live tier: every TRL that is supported trains against the real server, each in a separate process.

The versions lie unpacked, without their dependencies, in folders named by version; `make test` puts them there.
"""

import json
import math
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from support.altered import altered_copy
from support.policies import RATIO_SPREAD
from support.processes import Finished, run
from support.servers import adapters_on
from support.short_run import NEWER, other_kinds
from support.trainers import METRICS
from vllm_server import VLLMServer

from trl_lora_sync.versions import TRL, TRL_ASYNC

TESTS = Path(__file__).parents[1]
FOLDER_VARIABLE = "TRL_LORA_SYNC_TRL_VERSIONS_DIR"
FOLDER = Path(os.environ.get(FOLDER_VARIABLE) or TESTS.parent / ".trl-versions")
# The tested versions, except the one under all other tests, and all other versions unpacked there.
VERSIONS = sorted({*TRL.run, *(path.name for path in FOLDER.glob("[0-9]*"))} - {version("trl")}, key=Version)
RUN_TIMEOUT_S = 200.0  # half a minute by itself
# The first test waits for all runs.
pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Where the run with each TRL writes."""
    return {version: tmp_path_factory.mktemp(version) for version in (*VERSIONS, NEWER)}


@pytest.fixture(scope="module")
def trls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder with each TRL."""
    newer = tmp_path_factory.mktemp("newer") / NEWER
    newer.mkdir()
    altered_copy("trl", newer, {}, version=NEWER)
    return {**{version: FOLDER / version for version in VERSIONS}, NEWER: newer}


@pytest.fixture(scope="module")
def ended(
    server: VLLMServer, base_model: Path, folders: dict[str, Path], trls: dict[str, Path], tmp_path_factory: Any
) -> Finished:
    """Runs with all of them, each in a separate process."""
    runs = [
        [str(trl), server.base_url, str(base_model), str(folders[version])]
        for version, trl in trls.items()
        if (trl / "trl").is_dir()
    ]
    command = [sys.executable, TESTS / "support" / "short_runs.py", json.dumps(runs)]
    path = os.pathsep.join(map(str, [TESTS, TESTS.parent / "benchmarks"]))
    path += os.pathsep + os.environ.get("PYTHONPATH", "")
    env = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return run(command, tmp_path_factory.mktemp("runs") / "log", RUN_TIMEOUT_S * len(runs), env=env)


def short_run(trl: Path, ended: Finished, folder: Path) -> dict[str, Any]:
    """What came of the run with the TRL in a folder."""
    version = trl.name
    if not (trl / "trl").is_dir():
        raise FileNotFoundError(
            f"TRL {version} is not in {trl}. Run `make trl-versions`, or install it there: "
            f"{sys.executable} -m pip install --no-deps --target {trl} trl=={version}"
        )
    assert ended.code == 0, ended.output
    output = (folder / "log").read_text(errors="replace")
    assert (folder / "code").read_text() == "0", output
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result | {"output": output}


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_the_same_run_works_on_every_supported_trl(
    version: str, server: VLLMServer, ended: Finished, folders: dict[str, Path]
) -> None:
    result = short_run(FOLDER / version, ended, folders[version])

    assert result["trl"] == version
    assert Path(result["trl_path"]).is_relative_to(FOLDER / version)
    check_run(result, server, folders[version])
    assert ("is newer than" in result["output"]) == (version not in TRL.run)


@pytest.mark.slow
def test_a_trl_to_come_in_which_nothing_changed_trains_with_one_warning(
    server: VLLMServer, ended: Finished, trls: dict[str, Path], folders: dict[str, Path]
) -> None:
    result = short_run(trls[NEWER], ended, folders[NEWER])

    assert result["trl"] == NEWER
    check_run(result, server, folders[NEWER])
    assert result["output"].count(f"TRL {NEWER} is newer than 1.16, the last that adapter sync was written for.") == 1


def check_run(result: dict[str, Any], server: VLLMServer, folder: Path) -> None:
    assert not result["vllm"]
    assert "from trl_lora_sync import GRPOTrainer" in result["refused"]
    steps = [entry for entry in result["log"] if "lora_sync/version" in entry]
    assert [step["lora_sync/version"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step.keys() >= METRICS | {"lora_sync/generate_s"}
        assert step["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=RATIO_SPREAD)
        assert step["sampling/sampling_logp_difference/mean"] < 0.02
    assert result["script"] == ["trl_lora_sync.config", 7, ["--num_processes", "2"]]
    assert result["others"] == {kind: [1, 2] for kind in other_kinds(result["trl"])}
    assert result["asynchronous"] == (None if Version(result["trl"]) < TRL_ASYNC.oldest else [2, 3])
    assert result["moved"], "training did not change the adapter"
    assert math.isfinite(result["evaluated"]["eval_reward"])
    runs = 1 + len(result["others"]) + (result["asynchronous"] is not None)
    assert result["output"].count("LoRA adapter sync: vllm") == runs
    assert not (folder / "sync").exists(), "versions were left at exit"
    assert not [path for path in adapters_on(server.base_url).values() if str(folder) in path]
