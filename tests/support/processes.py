"""Run scripts in separate processes, with a deadline, and stop all of what they started."""

import gc
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Finished:
    """How a process ended and what it printed."""

    code: int
    output: str


def load_for_forks(modules: Iterable[str], *, without: str) -> None:
    """Import in this process what its forks need, and not a module of which each will have another version."""
    for module in modules:
        importlib.import_module(module)
    assert without not in sys.modules, "another one could not take its place"
    leave_imports_to_parent()


def leave_imports_to_parent() -> None:
    """Else each garbage collection of a fork looks through everything that was imported."""
    gc.collect()
    gc.freeze()


def enter_fork(log: str | Path, folder: str) -> None:
    """Write to a file from now on, and import from `folder` first."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.path.insert(0, folder)


def run(command: Sequence[str | Path], log: Path, timeout_s: float, env: Mapping[str, str] | None = None) -> Finished:
    """Run `command` to its end.

    Args:
        log: file for its output.
        env: added to this process's environment.

    Raises:
        TimeoutError: it did not end in time; it and its children have been stopped.
    """
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env={**os.environ, **(env or {})}, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired as error:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-60:])
        raise TimeoutError(f"{command} did not end within {timeout_s:g} s. The end of its output:\n{tail}") from error
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Finished(code, log.read_text(errors="replace"))
