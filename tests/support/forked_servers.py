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

from vllm_server import CPU_ENV, DEFAULT_PYTHON, PYTHON_VARIABLE, VLLMServer

from support.fork_server import ForkServer, connected_to, line_from

SCRIPT = Path(__file__).with_name("vllm_forks.py")
PYTHON = Path(os.environ.get(PYTHON_VARIABLE) or DEFAULT_PYTHON)
# Where the processes of tests find the address of the `ForkServer` that they share.
ADDRESS_VARIABLE = "TRL_LORA_SYNC_TEST_FORKS"


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
    """One process of tests, whose servers end with it."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._socket: socket.socket | None = None

    def __enter__(self) -> "Forks":
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.close()

    def starter_of(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        """What to put in place of `VLLMServer.start_process`, which a server with a wrapper still needs."""

        def start_process(server: VLLMServer, arguments: Sequence[str], environment: Mapping[str, str]) -> Any:
            if server.wrapper or server.python != PYTHON:
                return usual(server, arguments, environment)
            return self.fork(server, arguments, environment)

        return start_process

    def fork(self, server: VLLMServer, arguments: Sequence[str], environment: Mapping[str, str]) -> ForkedProcess:
        self._socket = self._socket or connected_to(self._address)
        order = {"arguments": list(arguments), "environment": dict(environment), "log": str(server.log_path)}
        self._socket.sendall(json.dumps(order).encode() + b"\n")
        return ForkedProcess(int(line_from(self._socket, self._address)))


def fork_server() -> ForkServer:
    """What all processes of tests share."""
    return ForkServer(PYTHON, SCRIPT, CPU_ENV)
