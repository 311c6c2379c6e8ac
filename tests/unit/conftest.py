"""Fixtures of the unit tier."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No key, proxy or hub of the person who runs the tests reaches them."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name == "VLLM_API_KEY":
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def run_python() -> Callable[[str], str]:
    """Runs source in a fresh interpreter and returns what it printed; fails the test with its stderr otherwise."""

    def run(source: str, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", source, *arguments], capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
