"""Unit tier: what reads, scores and refuses adapters, under every PEFT that is supported, each in a process of its own.

The versions lie unpacked, without their dependencies, in folders named by version; `make test` puts them there.
"""

import os
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version
from support.processes import Finished, run

from trl_lora_sync.versions import PEFT

pytestmark = pytest.mark.outside

TESTS = Path(__file__).parents[1]
FOLDER_VARIABLE = "TRL_LORA_SYNC_PEFT_VERSIONS_DIR"
FOLDER = Path(os.environ.get(FOLDER_VARIABLE) or TESTS.parent / ".peft-versions")
# Those that were tested, but for the one that all other tests run on, and whatever else was unpacked there.
VERSIONS = sorted({*PEFT.run, *(path.name for path in FOLDER.glob("[0-9]*"))} - {version("peft")}, key=Version)
# Everything that imports PEFT; they compare with what that PEFT computes itself.
CORE = ("canonical", "export", "flat", "initial", "reader", "saved", "support")
RUN_TIMEOUT_S = 300.0  # 16 seconds by itself


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, "Future[Finished]"]]:
    """One for each version, two at a time, as each computes on one core."""
    with ThreadPoolExecutor(2) as pool:
        folder = tmp_path_factory.mktemp("peft")
        yield {version: pool.submit(run_core, version, folder / f"{version}.log") for version in VERSIONS}


def run_core(version: str, log: Path) -> Finished:
    folder = FOLDER / version
    if not (folder / "peft").is_dir():
        raise FileNotFoundError(
            f"PEFT {version} is not in {folder}. Run `make peft-versions`, or install it there: "
            f"{sys.executable} -m pip install --no-deps --target {folder} peft=={version}"
        )
    files = [TESTS / "unit" / f"test_adapter_{name}.py" for name in CORE] + [TESTS / "unit" / "test_scoring.py"]
    command = [sys.executable, TESTS / "support" / "peft_run.py", *files]
    path = os.pathsep.join(map(str, [folder, TESTS])) + os.pathsep + os.environ.get("PYTHONPATH", "")
    env = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return run(command, log, RUN_TIMEOUT_S, env=env)


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_adapters_are_read_scored_and_refused_in_the_same_way_on_every_supported_peft(
    version: str, runs: dict[str, "Future[Finished]"]
) -> None:
    ended = runs[version].result()
    assert ended.code == 0, ended.output
    assert f"peft {version} in {FOLDER / version}" in ended.output
    assert " passed" in ended.output
    assert "failed" not in ended.output
