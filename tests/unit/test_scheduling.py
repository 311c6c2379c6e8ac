"""A test that hangs ends its process at its limit, and no other test."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
CONFTEST = """
from support.scheduling import LongestFirst

def pytest_xdist_make_scheduler(config, log):
    return LongestFirst(config, log)
"""
PASSES = """
def test_{name}():
    pass
"""
HANGS = """
import pathlib, time

def test_that_hangs():
    with pathlib.Path("begun").open("a") as file:
        file.write("once ")
    time.sleep(100)
"""


@pytest.mark.outside
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("others", [0, 1, 3])
def test_others_of_its_process_go_on_in_another_one(processes: int, others: int, tmp_path: Path) -> None:
    """What was done already was left to the other process as well, which then waited for ever (xdist 3.8)."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    passes = "".join(PASSES.format(name=number) for number in range(others))
    for name, source in {"a": PASSES, "b": PASSES, "c": HANGS + passes, "d": passes, "e": PASSES}.items():
        (tmp_path / f"test_{name}.py").write_text(source.replace("{name}", name))
    options = f"-p xdist -p pytest_timeout -n {processes} --dist loadfile --timeout 1 --timeout-method thread"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options.split()],
        cwd=tmp_path,
        # Other plugins take seconds of each process to import.
        env=os.environ | {"PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert f"1 failed, {3 + 2 * others} passed" in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "begun").read_text() == "once "
