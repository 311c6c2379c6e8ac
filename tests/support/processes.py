"""Run scripts in separate processes, with a deadline, and stop all of what they started."""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from support.fork_server import ForkServer, connected_to, line_from

# Where the processes of tests find the address of the `fork_server` that they share.
ADDRESS_VARIABLE = "TRL_LORA_SYNC_TEST_TRAINER_FORKS"


@dataclass(frozen=True)
class Finished:
    """How a process ended and what it printed."""

    code: int
    output: str


def load_for_forks(modules: Iterable[str], *, without: str) -> None:
    """Import in this process what its forks need, and not a module of which each will have another version."""
    gc.disable()  # among imports there is no garbage, and looking for it takes a fifth of their time
    for module in modules:
        importlib.import_module(module)
    assert without not in sys.modules, "another one could not take its place"
    leave_imports_to_parent()


def leave_imports_to_parent() -> None:
    """Else each garbage collection of a fork looks through everything that was imported."""
    gc.collect()
    gc.freeze()
    gc.enable()


def enter_fork(log: str | Path, folder: str) -> None:
    """Write to a file from now on, and import from `folder` first."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.path.insert(0, folder)


def fork_server() -> ForkServer:
    """The process whose forks run scripts; what all processes of tests share."""
    tests = Path(__file__).parents[1]
    path = os.pathsep.join(map(str, [tests, tests.parent, *filter(None, [os.environ.get("PYTHONPATH")])]))
    return ForkServer(Path(sys.executable), Path(__file__).with_name("trainer_forks.py"), {"PYTHONPATH": path})


class ForkedScript:
    """What `start_script` starts, with what the tests need of `subprocess.Popen`."""

    def __init__(self, command: Sequence[str | Path], env: Mapping[str, str], stdout: int | IO[bytes]) -> None:
        assert command[0] == sys.executable
        self.args = command
        self.returncode: int | None = None
        self.stdout: IO[str] | None = None
        address = os.environ[ADDRESS_VARIABLE]
        self._socket = connected_to(address)
        with contextlib.ExitStack() as stack:
            nothing = stack.enter_context(open(os.devnull, "rb"))  # noqa: PTH123 - a device
            if stdout == subprocess.PIPE:
                read, written = os.pipe()
                self.stdout = open(read)  # noqa: PTH123, SIM115 - closed with this object
                stack.callback(os.close, written)
                outputs = [written, 2]
            else:
                assert not isinstance(stdout, int)
                outputs = [stdout.fileno()] * 2
            order = {"arguments": list(map(str, command[1:])), "environment": dict(env)}
            socket.send_fds(self._socket, [json.dumps(order).encode() + b"\n"], [nothing.fileno(), *outputs])
            self.pid = int(line_from(self._socket, address))

    def poll(self) -> int | None:
        if self.returncode is None and self._has_answered(0):
            self.returncode = int(line_from(self._socket, os.environ[ADDRESS_VARIABLE]))
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not self._has_answered(timeout):
            raise subprocess.TimeoutExpired(list(map(str, self.args)), timeout or 0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def __enter__(self) -> "ForkedScript":
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.stdout is not None:
            self.stdout.close()
        self.wait()
        self._socket.close()

    def _has_answered(self, timeout: float | None) -> bool:
        return bool(select.select([self._socket], [], [], timeout)[0])


def start_script(
    command: Sequence[str | Path], env: Mapping[str, str], stdout: int | IO[bytes]
) -> "ForkedScript | subprocess.Popen[str]":
    """Start a script of Python in its own session, as a fork of a process that has imported what a trainer needs.

    Args:
        command: Python, the script and its arguments.
        env: may not lead to other versions of what is imported, or to packages that process has not, as bitsandbytes.
        stdout: a file for all that it prints, or `subprocess.PIPE`.
    """
    if ADDRESS_VARIABLE in os.environ:
        return ForkedScript(command, env, stdout)
    stderr = None if stdout == subprocess.PIPE else subprocess.STDOUT
    return subprocess.Popen(command, env=env, stdout=stdout, stderr=stderr, start_new_session=True, text=True)


def run_script(
    command: Sequence[str | Path], log: Path, timeout_s: float, env: Mapping[str, str] | None = None
) -> Finished:
    """As `run`, for what `start_script` can start, without the time that the imports take."""
    with log.open("wb") as out:
        return _to_its_end(start_script(command, {**os.environ, **(env or {})}, out), log, timeout_s)


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
    return _to_its_end(process, log, timeout_s)


def _to_its_end(process: "subprocess.Popen[Any] | ForkedScript", log: Path, timeout_s: float) -> Finished:
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired as error:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-60:])
        raise TimeoutError(
            f"{process.args} did not end within {timeout_s:g} s. The end of its output:\n{tail}"
        ) from error
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Finished(code, log.read_text(errors="replace"))
