"""Processes that have imported much, for all processes of tests to fork from: of vLLM, and of the trainer's libraries.

Importing these takes eight seconds of a core, and a fork no time. Each begins when the first fork is wanted.
"""

import contextlib
import os
import select
import socket
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path


class ForkServer:
    """Starts a script that calls `forking.fork_for_each_connection` at the first connection to `address`.

    Args:
        python: the interpreter of the script.
        environment: what it adds to this process's.
    """

    def __init__(self, python: Path, script: Path, environment: Mapping[str, str]) -> None:
        self._command = [python, script]
        self._environment = environment
        self._folder = tempfile.TemporaryDirectory(prefix="forks-")  # the path of a socket must be short
        self.address = str(Path(self._folder.name) / "socket")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.address)
        self._listener.listen()
        self._ours, self._theirs = socket.socketpair()
        self._process: subprocess.Popen[bytes] | None = None
        self._has_ended = False
        self._thread = threading.Thread(target=self._begin_when_wanted, daemon=True)

    def start(self) -> "ForkServer":
        self._thread.start()
        return self

    def stop(self) -> None:
        """Ends the process, and with it every fork that is left."""
        self._has_ended = True
        self._ours.close()  # which the thread and the process notice
        self._thread.join(30)
        self._listener.close()
        self._theirs.close()
        self._folder.cleanup()

    def _begin_when_wanted(self) -> None:
        select.select([self._listener, self._theirs], [], [])
        if self._has_ended:
            return
        descriptors = [self._listener.fileno(), self._theirs.fileno()]
        with log_at(self.address).open("wb") as log:
            self._process = subprocess.Popen(
                [*self._command, *map(str, descriptors)],
                # OpenMP reads its settings at the import.
                env={**os.environ, "OMP_NUM_THREADS": "1", **self._environment},
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._process.wait()
        self._listener.close()  # which ends connections that are waiting, should it not have come up


def connected_to(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    return connection


def line_from(connection: socket.socket, address: str) -> str:
    """An answer; raises RuntimeError if the process has ended, with what it printed."""
    answer = b""
    while not answer.endswith(b"\n"):
        received = b""
        with contextlib.suppress(ConnectionError):
            received = connection.recv(1)  # as another answer may follow
        if not received:
            raise RuntimeError(f"the process that forks has ended:\n{log_at(address).read_text()}")
        answer += received
    return answer.decode()


def log_at(address: str) -> Path:
    """What the process that forks prints."""
    return Path(address).with_name("log")
