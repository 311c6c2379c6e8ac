"""A server that a benchmark starts: its process and all that it starts, from the command to the end."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

START_TIMEOUT_S = 400.0


@dataclass
class Server:
    """One server.

    Attributes:
        process: in its own process group.
        up_s: from its start until it answered; None if it did not yet.
    """

    url: str
    process: "subprocess.Popen[bytes]"
    log: Path
    started: float
    up_s: float | None = None

    def is_up(self) -> bool:
        """Raises RuntimeError if it has ended, or takes too long."""
        passed_s = time.monotonic() - self.started
        if self.up_s is None:
            if self.process.poll() is not None or passed_s > START_TIMEOUT_S:
                raise RuntimeError(
                    f"The server did not start (exit code {self.process.poll()}, {passed_s:.0f} s). The end of its "
                    f"log:\n{self.log_end()}"
                )
            try:
                if httpx.get(f"{self.url}/health", timeout=5, trust_env=False).status_code == 200:
                    self.up_s = passed_s
            except httpx.HTTPError:
                pass
        return self.up_s is not None

    def log_end(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def end(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait(20)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


def start(command: Sequence[str], port: int, env: Mapping[str, str], log: Path) -> Server:
    """Start a server that listens on a port of this host, and do not wait for it."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Server(f"http://127.0.0.1:{port}", process, log, time.monotonic())


@contextmanager
def running(command: Sequence[str], port: int, env: Mapping[str, str], log: Path) -> Iterator[Server]:
    """A server that answers, while the block lasts."""
    server = start(command, port, env, log)
    try:
        while not server.is_up():
            time.sleep(0.5)
        yield server
    finally:
        server.end()
