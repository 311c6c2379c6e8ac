"""Unit tier: what reads, scores and refuses adapters, under every PEFT that is supported, each in a separate process.

The versions lie unpacked, without their dependencies, in folders named by version; `make test` puts them there.
"""

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version
from support.processes import Finished, run

from trl_lora_sync.versions import PEFT

TESTS = Path(__file__).parents[1]
FOLDER_VARIABLE = "TRL_LORA_SYNC_PEFT_VERSIONS_DIR"
FOLDER = Path(os.environ.get(FOLDER_VARIABLE) or TESTS.parent / ".peft-versions")
# The tested versions, except the one under all other tests, and all other versions unpacked there.
VERSIONS = sorted({*PEFT.run, *(path.name for path in FOLDER.glob("[0-9]*"))} - {version("peft")}, key=Version)
# Everything that imports PEFT; they compare with what that PEFT computes itself.
CORE = ("export", "initial", "reader", "saved", "support")
# Which take long and do not depend on PEFT: sums of tensors, and an interrupt at each point.
LEFT_OUT = (
    "test_scoring.py::test_an_interrupt_at_any_point_leaves_the_model_computing_as_before",
    "test_scoring.py::test_every_sign_shows_in_the_fingerprint",
    "test_scoring.py::test_large_and_empty_tensors_have_fingerprints",
)
RUN_TIMEOUT_S = 300.0  # 25 seconds beside another one
# The first test waits for all runs.
pytestmark = [pytest.mark.outside, pytest.mark.timeout(1600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the run with each PEFT writes."""
    return tmp_path_factory.mktemp("peft")


@pytest.fixture(scope="module")
def ended(folder: Path) -> Finished:
    """Runs with all of them, each in a separate process."""
    files = [TESTS / "unit" / f"test_adapter_{name}.py" for name in CORE] + [TESTS / "unit" / "test_scoring.py"]
    runs = [
        [str(FOLDER / version), str(folder / f"{version}.log"), str(folder / f"{version}.code")]
        for version in VERSIONS
        if (FOLDER / version / "peft").is_dir()
    ]
    command = [
        sys.executable,
        TESTS / "support" / "peft_run.py",
        json.dumps(runs),
        *files,
        *(f"--deselect=tests/unit/{test}" for test in LEFT_OUT),
    ]
    path = str(TESTS) + os.pathsep + os.environ.get("PYTHONPATH", "")
    env = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return run(command, folder / "log", RUN_TIMEOUT_S * len(runs), env=env)


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_adapters_are_read_scored_and_refused_in_the_same_way_on_every_supported_peft(
    version: str, ended: Finished, folder: Path
) -> None:
    if not (FOLDER / version / "peft").is_dir():
        raise FileNotFoundError(
            f"PEFT {version} is not in {FOLDER / version}. Run `make peft-versions`, or install it there: "
            f"{sys.executable} -m pip install --no-deps --target {FOLDER / version} peft=={version}"
        )
    assert ended.code == 0, ended.output
    output = (folder / f"{version}.log").read_text(errors="replace")
    assert (folder / f"{version}.code").read_text() == "0", output
    assert f"peft {version} in {FOLDER / version}" in output
    assert " passed" in output
    assert "failed" not in output
