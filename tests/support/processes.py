"""Run scripts in processes of their own, with a deadline, and stop all of what they started."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Finished:
    """How a process ended and what it said."""

    code: int
    output: str


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
