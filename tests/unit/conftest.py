"""Fixtures of the unit tier."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

KEYS = ("VLLM_API_KEY", "SGLANG_API_KEY", "SGLANG_ADMIN_API_KEY")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No key, proxy or hub of the person who runs the tests reaches them."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name in KEYS:
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def nothing_outside(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test without the mark `outside` fails where it opens a connection or starts a process.

    A socket in a folder, through which files are shared, is not a connection in this sense.
    """
    if request.node.get_closest_marker("outside"):
        return

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise AssertionError("this test opens a connection or starts a process: mark it with `outside`")

    def only_in_folders(act: Callable[..., Any]) -> Callable[..., Any]:
        return lambda one, *rest: act(one, *rest) if one.family == socket.AF_UNIX else refuse()

    for name in ("connect", "connect_ex", "bind"):
        monkeypatch.setattr(socket.socket, name, only_in_folders(getattr(socket.socket, name)))
    for owner, name in (
        (subprocess, "Popen"),
        (os, "fork"),
        (os, "posix_spawn"),
    ):
        monkeypatch.setattr(owner, name, refuse)


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
