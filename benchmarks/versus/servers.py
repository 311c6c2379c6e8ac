"""Starts the servers that the arms need, side by side where the GPUs have room, and reports their memory.

The trainer has the first GPU. Servers go to the others, and beside the trainer only if those are full or too few; the
server that gets weights over NCCL never does, as NCCL wants a GPU per process. How much KV cache a server gets is given
in bytes: servers that start side by side on one GPU cannot find it out by measuring.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from vllm_server import CPU_ARGS, CPU_ENV, hold_free_port

from trl_lora_sync.engines.vllm.spec import VLLM
from versus.clock import Clock
from versus.sampler import FOLDER_VARIABLE, profile_folder
from versus.shapes import adapter_parameters, model_bytes

ROOT = Path(__file__).resolve().parents[2]
GIB = 1024**3
MAX_MODEL_LEN = 1024
_LIST = "servers.json"
HOST = -1  # in place of a GPU's index, for servers that compute on the CPU
_MAX_SEQS = 256
# CUDA's own memory, the graphs, and the activations of the largest batch.
_OVERHEAD = 4 * GIB
_USABLE = 0.97  # of a GPU's memory
_START_TIMEOUT_S = 400.0

# PR_SET_PDEATHSIG (1) survives the exec: the server ends with the benchmark even if that is killed.
_TIED = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the process that started this server is gone")
os.execvp(sys.argv[2], sys.argv[2:])
"""


class ServerTroubleError(Exception):
    """A server did not come up, or has no room."""


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """A server that some arm needs.

    Attributes:
        kind: `"weights"`, `"runtime"` or `"fused"`.
        model: folder of the model.
        lora_rank: the largest rank it takes; 0 where the server reserves nothing for it.
        kv_bytes: of its KV cache.
        number: distinguishes equal servers.
        workers: that share it by tensor parallelism, each on another GPU.
        is_eager: whether it records no CUDA graphs and compiles nothing.
    """

    kind: str
    shape: str
    model: Path
    lora_rank: int = 0
    kv_bytes: int = 0
    number: int = 0
    workers: int = 1
    is_eager: bool = False

    @property
    def name(self) -> str:
        parts = [self.kind, self.shape]
        parts += [f"r{self.lora_rank}"] * bool(self.lora_rank) + [f"tp{self.workers}"] * (self.workers > 1)
        return "-".join(parts + [str(self.number)] * bool(self.number))

    def memory_bytes(self) -> int:
        """About what it takes of each of its GPUs."""
        # A copy of the base to fuse into; and what TRL's weight transfer leaves reserved, 44.5 GB in all at 8B (0.26).
        weights = model_bytes(self.shape) * (1 if self.kind == "runtime" else 2)
        slots = (
            2 * 2 * adapter_parameters(self.shape, VLLM.allowed_max_lora_rank(self.lora_rank)) if self.lora_rank else 0
        )
        return (weights + slots) // self.workers + self.kv_bytes + _OVERHEAD


@dataclass(kw_only=True)
class Running:
    """A server's process.

    Attributes:
        gpus: those it is on, or `HOST` alone.
        memory_bytes: on each of them.
    """

    name: str
    kind: str
    pid: int
    port: int
    gpus: list[int]
    log: str
    memory_bytes: int
    is_up: bool = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def is_alive(self) -> bool:
        return psutil.pid_exists(self.pid) and psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE

    def is_healthy(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health", timeout=5, trust_env=False).status_code == 200
        return False


class ServerPool:
    """The servers of a run, by name.

    Args:
        gpus: indices and memory in bytes, the trainer's first; empty on a CPU.
        trainer_bytes: what the trainer takes of its GPU.
        python: interpreter with vLLM in it.
        work: folder for logs and for the list of kept servers.
        keep: leave the servers running at the end, for the next run to find.
    """

    def __init__(
        self, gpus: dict[int, int], trainer_bytes: int, python: Path, work: Path, clock: Clock, *, keep: bool
    ) -> None:
        self._gpus = gpus
        self._trainer_bytes = trainer_bytes
        self._python = python
        self._work = work
        self._clock = clock
        self._keep = keep
        self.running: dict[str, Running] = {}
        self._troubles: dict[str, str] = {}
        self._ports: list[Any] = []
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def _list(self) -> Path:
        return self._work / _LIST

    def __enter__(self) -> "ServerPool":
        if self._list.exists():
            for fields in json.loads(self._list.read_text()):
                found = Running(**fields)
                if found.is_alive() and found.is_healthy():
                    self.running[found.name] = found
            self._clock.say(f"still running: {', '.join(self.running) or 'no server'}")
            self._list.unlink()
        return self

    def __exit__(self, *exc_info: object) -> None:
        for name, server in list(self.running.items()):
            # No later run could find a server that is still starting.
            if not (self._keep and server.is_alive() and server.is_healthy()):
                self.stop(name)
        if self.running:
            self._list.write_text(json.dumps([asdict(server) for server in self.running.values()]))
            self._clock.say(f"left running: {', '.join(self.running)}")

    def start_what_fits(self, specs: Sequence[ServerSpec]) -> None:
        """Start servers, without waiting for them, as long as there is room."""
        for spec in specs:
            if self._is_missing(spec) and (gpus := self._place(spec)):
                self._launch(spec, gpus)

    def settle(self) -> None:
        """Wait until each started server is up or has failed; `wait` raises for a server that failed."""
        for server in list(self.running.values()):
            with contextlib.suppress(ServerTroubleError):
                self._wait(server)

    def groups(self, specs: Sequence[ServerSpec]) -> list[list[ServerSpec]]:
        """The servers in as few groups as can stand side by side, except servers without any room."""
        groups: list[list[ServerSpec]] = []
        rest = [spec for spec in specs if self.has_room(spec)]
        while rest:
            free = self._capacity()
            group = []
            for spec in rest:
                gpus = _roomiest(spec, free, self._trainer_gpu)
                if gpus:
                    _take(free, gpus, spec.memory_bytes())
                    group.append(spec)
            groups.append(group)
            rest = [spec for spec in rest if spec not in group]
        return groups

    def runs(self, specs: Sequence[ServerSpec]) -> bool:
        """Whether all of them have been started and are not stopped yet."""
        return all(spec.name in self.running for spec in specs)

    def has_room(self, spec: ServerSpec) -> bool:
        """Whether it would fit if nothing else were running."""
        return bool(_roomiest(spec, self._capacity(), self._trainer_gpu))

    def start(self, specs: Sequence[ServerSpec]) -> None:
        """Start what is missing of `specs`, without waiting for it, and stop what is in its way.

        Raises:
            ServerTroubleError: there is no room for all of them at the same time.
        """
        wanted = {spec.name for spec in specs}
        for spec in specs:
            while self._is_missing(spec):
                gpus = self._place(spec)
                if gpus:
                    self._launch(spec, gpus)
                    continue
                others = [name for name in self.running if name not in wanted]
                if not others:
                    raise ServerTroubleError(f"{spec.name} has no room beside {', '.join(self.running)}")
                self.stop(others[-1])

    def wait(self, spec: ServerSpec) -> None:
        """Return once a server that was started answers.

        Raises:
            ServerTroubleError: it does not come up, or did not when it was started before in this run.
        """
        if spec.name in self._troubles:
            raise ServerTroubleError(self._troubles[spec.name])
        self._wait(self.running[spec.name])

    def clear_trainer(self, keep: Sequence[ServerSpec]) -> None:
        """Stop the servers on the trainer's GPU, except the ones still needed."""
        kept = {spec.name for spec in keep}
        for name, server in list(self.running.items()):
            if self._trainer_gpu in server.gpus and name not in kept:
                self.stop(name)

    def url(self, spec: ServerSpec) -> str:
        return self.running[spec.name].url

    def memory(self, spec: ServerSpec) -> dict[str, Any]:
        """Where a server is, and the bytes that it has of its GPUs, or of the host's memory on a CPU.

        The bytes are left out where the driver does not count them by process.
        """
        server = self.running[spec.name]
        family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        if server.gpus == [HOST]:
            return {"bytes": sum(process.memory_info().rss for process in family)}
        pids = {str(process.pid) for process in family}
        apps = _nvidia_smi("--query-compute-apps=pid,used_memory")
        used = sum(int(mib) * 1024**2 for pid, mib in apps if pid in pids and mib.isdigit())
        beside = [name for name, other in self.running.items() if {*other.gpus} & {*server.gpus} and name != spec.name]
        return {"gpus": server.gpus, "beside": beside} | ({"bytes": used} if used else {})

    def stop(self, name: str) -> None:
        server = self.running.pop(name)
        self._clock.say(f"stopping {name}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(server.pid, signal.SIGTERM)
        deadline = time.monotonic() + 5
        while server.is_alive() and time.monotonic() < deadline:
            if (process := self._processes.get(server.pid)) is not None:
                process.poll()
            time.sleep(0.1)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)  # the server leads its group
        if (process := self._processes.pop(server.pid, None)) is not None:
            process.wait()
        if server.gpus != [HOST]:
            time.sleep(1.0)  # until the driver has taken the memory back

    # Room

    @property
    def _trainer_gpu(self) -> int | None:
        return next(iter(self._gpus), None)

    def _capacity(self) -> dict[int, int]:
        if not self._gpus:
            return {HOST: sys.maxsize}
        free = {gpu: int(_USABLE * memory) for gpu, memory in self._gpus.items()}
        free[next(iter(free))] -= self._trainer_bytes
        return free

    def _place(self, spec: ServerSpec) -> list[int]:
        free = self._capacity()
        for server in self.running.values():
            _take(free, server.gpus, server.memory_bytes)
        # Servers of one fleet would compute in turn on one GPU.
        alike = {gpu for server in self.running.values() if server.kind == spec.kind for gpu in server.gpus}
        return _roomiest(spec, free, self._trainer_gpu, avoid=alike)

    # Processes

    def _is_missing(self, spec: ServerSpec) -> bool:
        return spec.name not in self.running and spec.name not in self._troubles

    def _launch(self, spec: ServerSpec, gpus: list[int]) -> None:
        holder = hold_free_port()
        self._ports.append(holder)
        port = int(holder.getsockname()[1])
        log = self._work / f"{spec.name}.log"
        profiles = profile_folder(self._work, spec.name)
        profiles.mkdir(exist_ok=True)
        command = serve_command(spec, port, self._python, on_cpu=gpus == [HOST])
        if not self._keep:
            command = [sys.executable, "-c", _TIED, str(os.getpid()), *command]
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                env=server_environment(gpus, profiles),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes[process.pid] = process
        self.running[spec.name] = Running(
            name=spec.name,
            kind=spec.kind,
            pid=process.pid,
            port=port,
            gpus=gpus,
            log=str(log),
            memory_bytes=spec.memory_bytes(),
        )
        where = "" if gpus == [HOST] else f" on GPU {', '.join(map(str, gpus))}"
        self._clock.say(f"starting {spec.name}{where}")

    def _wait(self, server: Running) -> None:
        if server.is_up and server.is_alive():
            return
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not server.is_up:
            self._clock.check()
            process = self._processes.get(server.pid)
            if (process is not None and process.poll() is not None) or not server.is_alive():
                raise self._trouble(server, "ended")
            if time.monotonic() > deadline:
                raise self._trouble(server, f"was not up after {_START_TIMEOUT_S:g} s")
            server.is_up = server.is_healthy()
            if not server.is_up:
                time.sleep(0.25)
        self._clock.say(f"{server.name} is up")

    def _trouble(self, server: Running, what: str) -> ServerTroubleError:
        tail = "\n".join(Path(server.log).read_text(errors="replace").splitlines()[-25:])
        self.stop(server.name)
        self._troubles[server.name] = f"The server {server.name} {what}. The end of its log:\n{tail}"
        return ServerTroubleError(self._troubles[server.name])


def serve_command(spec: ServerSpec, port: int, python: Path, *, on_cpu: bool) -> list[str]:
    """What starts the server: `trl-lora-sync serve` for our arms, vLLM with TRL's own flags for the stock one."""
    common = ["--served-model-name", "base", "--max-model-len", str(MAX_MODEL_LEN), "--max-logprobs", "-1"]
    if on_cpu:
        common += CPU_ARGS
    else:
        # The share is only looked at, as the KV cache is given.
        common += ["--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", str(spec.kv_bytes)]
        common += ["--max-num-seqs", str(_MAX_SEQS)]
    if spec.workers > 1:
        common += ["--tensor-parallel-size", str(spec.workers)]
    if spec.is_eager:
        common += ["--enforce-eager"]
    if spec.kind == "weights":
        program = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(spec.model)]
        flags = ["--host", "127.0.0.1", "--port", str(port), "--logprobs-mode", "processed_logprobs"]
        return [*program, *flags, "--weight-transfer-config", json.dumps({"backend": "nccl"}), *common]
    ours = [sys.executable, "-m", "trl_lora_sync.cli.main", "serve", "vllm", str(spec.model), "--port", str(port)]
    ours += ["--fused"] if spec.kind == "fused" else ["--quick-load", "--lora-rank", str(spec.lora_rank)]
    return [*ours, "--python", str(python), "--", *common]


def server_environment(gpus: Sequence[int], profiles: Path) -> dict[str, str]:
    """The environment of a server, whose processes leave their profiles in a folder on request."""
    benchmarks = ROOT / "benchmarks"
    ours = map(str, [ROOT, benchmarks, benchmarks / "versus" / "in_server"])
    path = os.pathsep.join([*ours, *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "VLLM_SERVER_DEV_MODE": "1"}
    env |= {
        FOLDER_VARIABLE: str(profiles),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
    }
    if HOST in gpus:
        return env | CPU_ENV
    # FlashInfer would compile its sampler with nvcc at the first request.
    return env | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), "VLLM_USE_FLASHINFER_SAMPLER": "0"}


def gpus_here(work: Path | None) -> dict[int, int]:
    """Memory in bytes that the run may use of each GPU that CUDA_VISIBLE_DEVICES leaves; empty without any.

    Args:
        work: folder of the run. What servers take that an earlier run kept there counts as free.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    has_kept = work is not None and (work / _LIST).exists()
    return {
        int(index): (int(total) - (0 if has_kept else int(used))) * 1024**2
        for index, total, used in _nvidia_smi("--query-gpu=index,memory.total,memory.used")
        if visible is None or index in visible.split(",")
    }


def gpu_names() -> list[str]:
    return [name for (name,) in _nvidia_smi("--query-gpu=name")]


def _roomiest(
    spec: ServerSpec, free: dict[int, int], trainer_gpu: int | None, *, avoid: Collection[int] = ()
) -> list[int]:
    """The GPUs with the most room; the trainer's only if too few others have enough; empty if it does not suffice.

    Args:
        avoid: taken only if too few others have enough.
    """
    enough = [gpu for gpu in free if free[gpu] >= spec.memory_bytes()]
    others = sorted((gpu for gpu in enough if gpu != trainer_gpu), key=lambda gpu: (gpu in avoid, -free[gpu]))
    trainers = [gpu for gpu in enough if gpu == trainer_gpu and spec.kind != "weights"]
    # On a CPU all workers share the host's memory.
    wanted = 1 if HOST in free else spec.workers
    found = [*others, *trainers][:wanted]
    return sorted(found) if len(found) == wanted else []


def _take(free: dict[int, int], gpus: Sequence[int], memory_bytes: int) -> None:
    for gpu in gpus:
        free[gpu] -= memory_bytes


def _nvidia_smi(query: str) -> list[list[str]]:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in found.splitlines() if line.strip()]
