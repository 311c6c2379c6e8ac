"""vLLM servers that start in two seconds instead of eighteen: forks of one process that has imported vLLM.

They are the servers that `vllm_server.py` starts, with the same arguments and environment; only how their process comes
to be is another. `make demo`, `trl-lora-sync serve` and the tests of both start theirs without a fork.
"""

import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_server import CPU_ENV, VLLMServer

SCRIPT = Path(__file__).with_name("vllm_forks.py")


class ForkedProcess:
    """A process that is not our child, with what `VLLMServer` needs of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._descriptor: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self._descriptor = None  # it has ended already

    def poll(self) -> int | None:
        """None while it runs. Its exit code is known to its parent only."""
        return None if self._descriptor is not None and not self._has_ended(0) else -1

    def wait(self, timeout: float | None = None) -> int:
        if self._descriptor is not None and not self._has_ended(timeout):
            raise subprocess.TimeoutExpired("vllm", timeout or 0)
        return -1

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def _has_ended(self, timeout: float | None) -> bool:
        return bool(select.select([self._descriptor], [], [], timeout)[0])

    def __del__(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)


class Forks:
    """The process that imports vLLM and forks, begun with the first server; what it prints goes to `log`."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def __enter__(self) -> "Forks":
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the process, and with it every server that is left."""
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._process.wait(30)

    def starter_of(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        """What to put in place of `VLLMServer.start_process`, which a server with a wrapper still needs."""

        def start_process(server: VLLMServer, arguments: Sequence[str], environment: Mapping[str, str]) -> Any:
            if server.wrapper:
                return usual(server, arguments, environment)
            return self.fork(server, arguments, environment)

        return start_process

    def fork(self, server: VLLMServer, arguments: Sequence[str], environment: Mapping[str, str]) -> ForkedProcess:
        self._socket = self._socket or self._begin(server.python)
        order = {"arguments": list(arguments), "environment": dict(environment), "log": str(server.log_path)}
        self._socket.sendall(json.dumps(order).encode() + b"\n")
        answer = b""
        while not answer.endswith(b"\n"):
            received = self._socket.recv(100)
            if not received:
                raise RuntimeError(f"the process that forks vLLM servers has ended:\n{self._log.read_text()}")
            answer += received
        return ForkedProcess(int(answer))

    def _begin(self, python: Path) -> socket.socket:
        ours, theirs = socket.socketpair()
        environment = {**os.environ, **CPU_ENV, "OMP_NUM_THREADS": "1"}  # OpenMP reads its settings at the import
        with theirs, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [python, SCRIPT, str(theirs.fileno())],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return ours
