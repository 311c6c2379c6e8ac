"""How fast an adapter is pushed to a vLLM server, beside what plain TCP carries over the same link in the same run.

    python benchmarks/push.py                                # two hosts on this machine, see examples/demo/two_hosts.py
    python benchmarks/push.py --sink-port 9000               # on the server's host, for the next line
    python benchmarks/push.py --url http://gpu-1:8000 --sink-port 9000
    python benchmarks/push.py --quick                        # to see that it still works

Without ``--url``, a real server on the other host takes the adapters, and the cable between them is limited to each
``--rate`` in turn. The arms take turns with the same bytes:

- ``tcp``: one connection, the bytes in one call, until the other side confirms them all. They are not kept.
- ``push``: what a sync does before the load. The digest is computed, the body sent, checked and kept by the server,
  and the answer read.

The link's own noise is that of ``tcp``. The load that follows is that of a file on the server's host: see
``sync_cost.py``.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "demo"))
from run_environment import run_environment  # noqa: E402
from two_hosts import PRIVATE_VARIABLE, THERE_ADDRESS, NotPermittedError, OtherHost, first_host  # noqa: E402
from vllm_server import VLLMServer  # noqa: E402

from trl_lora_sync.adapter.canonical import CanonicalAdapter, LoRAModule  # noqa: E402
from trl_lora_sync.adapter.flat import FlatBuffer  # noqa: E402
from trl_lora_sync.adapter.store import StoredAdapter  # noqa: E402
from trl_lora_sync.addresses import is_local_url  # noqa: E402
from trl_lora_sync.engine_plugins.vllm_push import MIDDLEWARE  # noqa: E402
from trl_lora_sync.engines.base import Deadline  # noqa: E402
from trl_lora_sync.engines.vllm.engine import VLLMEngine  # noqa: E402
from trl_lora_sync.engines.vllm.push import SafetensorsBody  # noqa: E402
from trl_lora_sync.runtime import Blocking, run  # noqa: E402

RANK, HIDDEN = 32, 4096
UNLIMITED = "unlimited"


async def joined(body: SafetensorsBody) -> bytes:
    return b"".join([chunk async for chunk in body])


class Sink:
    """Takes bytes and confirms them: the other end of ``tcp``."""

    def __init__(self, host: str, port: int) -> None:
        self._listener = socket.create_server((host, port))
        self.port = int(self._listener.getsockname()[1])

    def serve(self) -> None:
        room = bytearray(1 << 20)
        while True:
            connection, _ = self._listener.accept()
            with connection:
                left = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big")
                while left:
                    left -= connection.recv_into(room, min(left, len(room))) or left
                connection.sendall(b"!")


class Bench:
    """One server and the sink beside it."""

    def __init__(self, url: str, sink_port: int, args: argparse.Namespace) -> None:
        self.engine = Blocking(VLLMEngine(url, is_local=is_local_url(url)))
        if not self.engine.connect(deadline()).supports_push:
            sys.exit(f"{url} takes no pushes. Restart it with --middleware {MIDDLEWARE}.")
        self.sink = (urlsplit(url).hostname, sink_port)
        self.args = args
        self._number = 0

    def measure(self, rate: str) -> list[dict[str, Any]]:
        found = []
        for megabytes in self.args.megabytes:
            adapter = make_adapter(megabytes)
            samples: dict[str, list[float]] = {"tcp": [], "push": []}
            for turn in range(self.args.repeats + 1):
                print(f"{rate}, {megabytes} MB, round {turn} of {self.args.repeats}", file=sys.stderr, flush=True)
                for arm in (("tcp", "push"), ("push", "tcp"))[turn % 2]:
                    seconds = getattr(self, arm)(adapter)
                    if turn:  # the first round warms up
                        samples[arm].append(seconds)
            found.append(row(rate, adapter.payload_bytes, samples))
        return found

    def tcp(self, adapter: CanonicalAdapter) -> float:
        content = run(joined(SafetensorsBody(adapter)))
        with socket.create_connection(self.sink, timeout=600) as connection:
            start = time.perf_counter()
            connection.sendall(len(content).to_bytes(8, "big"))
            connection.sendall(content)
            connection.recv(1)
            return time.perf_counter() - start

    def push(self, adapter: CanonicalAdapter) -> float:
        self._number += 1
        stored = StoredAdapter(
            name=f"push-benchmark-{os.getpid()}-v{self._number}",
            version=self._number,
            rank=RANK,
            target_modules=adapter.target_modules,
            payload_bytes=adapter.payload_bytes,
            content=adapter,
        )
        start = time.perf_counter()
        self.engine.push(stored, deadline())
        seconds = time.perf_counter() - start
        self.engine.unload(stored.name, deadline())
        return seconds


def row(rate: str, size: int, samples: dict[str, list[float]]) -> dict[str, Any]:
    speeds = {arm: size / 1e6 / statistics.median(seconds) for arm, seconds in samples.items()}
    return {
        "rate": rate,
        "megabytes": size / 1e6,
        "mb_per_s": speeds,
        "push_over_tcp": speeds["push"] / speeds["tcp"],
        "seconds": samples,
    }


def make_adapter(megabytes: float) -> CanonicalAdapter:
    """An adapter of about that size in bfloat16, with the layers of an 8B model as far as they go."""
    width = min(HIDDEN, int(megabytes * 1e6 / (4 * RANK)))
    count = max(1, round(megabytes * 1e6 / (4 * RANK * width)))
    generator = torch.Generator().manual_seed(0)
    modules = [
        LoRAModule(
            name=f"model.layers.{index}.self_attn.q_proj",
            lora_A=torch.randn(RANK, width, generator=generator),
            lora_B=torch.randn(width, RANK, generator=generator),
            scaling=1.0,
        )
        for index in range(count)
    ]
    return FlatBuffer().export(modules, dtype=torch.bfloat16)


def on_two_hosts(args: argparse.Namespace) -> tuple[str, list[dict[str, Any]]]:
    """On the first host: start a server on the other one and measure each rate."""
    private = Path(os.environ[PRIVATE_VARIABLE])
    found = []
    with OtherHost() as there:
        there.run(sys.executable, ROOT / "examples" / "demo" / "make_model.py", private / "model")
        server = VLLMServer(
            private / "model",
            host=THERE_ADDRESS,
            wrapper=there.wrapper,
            extra_args=["--middleware", MIDDLEWARE],
            extra_env={"PYTHONPATH": str(ROOT)},
        )
        sink = subprocess.Popen(
            [*there.wrapper, sys.executable, __file__, "--sink-port", "9000"], stdout=subprocess.PIPE
        )
        try:
            assert sink.stdout is not None
            sink.stdout.readline()
            with server:
                bench = Bench(server.base_url, 9000, args)
                for rate in args.rate:
                    if rate != UNLIMITED:
                        there.limit(rate)
                    found += bench.measure(rate)
                return bench.engine.capabilities.version, found
        finally:
            sink.terminate()
            sink.wait()


def at_url(args: argparse.Namespace) -> tuple[str, list[dict[str, Any]]]:
    port = args.sink_port
    if port is None:
        sink = Sink("127.0.0.1", 0)
        threading.Thread(target=sink.serve, daemon=True).start()
        port = sink.port
    bench = Bench(args.url, port, args)
    return bench.engine.capabilities.version, bench.measure("not limited")


def main() -> None:
    args = parse_args()
    if args.sink_port is not None and not args.url:
        sink = Sink("", args.sink_port)
        print(f"listening on port {sink.port}", flush=True)
        sink.serve()
    if not args.url and not args.on_first_host:
        with tempfile.TemporaryDirectory(prefix="push-benchmark-") as folder:
            try:
                command = first_host(Path(folder), __file__, "--on-first-host", *sys.argv[1:])
            except NotPermittedError as error:
                sys.exit(f"{error}\nGive a server on another host instead: --url and --sink-port.")
            # What is measured comes back through a pipe: the first host can write nowhere else.
            result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    else:
        version, found = on_two_hosts(args) if args.on_first_host else at_url(args)
        result = {"vllm": version, "found": found}
        if args.on_first_host:
            print(json.dumps(result))
            return
    report = {
        "benchmark": "push",
        **run_environment("vllm", result["vllm"]),
        "link": "as given by --url" if args.url else "veth between two network namespaces of one machine",
        "lora_rank": RANK,
        "load_average_at_end": os.getloadavg(),
        "results": result["found"],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{'rate':>10}  {'MB':>7}  {'tcp MB/s':>9}  {'push MB/s':>9}  push / tcp")
    for one in result["found"]:
        speeds = one["mb_per_s"]
        line = f"{one['rate']:>10}  {one['megabytes']:7.1f}  {speeds['tcp']:9.0f}  {speeds['push']:9.0f}"
        print(f"{line}  {one['push_over_tcp']:.2f}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a vLLM server that takes pushes; its key is read from VLLM_API_KEY")
    parser.add_argument("--sink-port", type=int, help="with --url: port of the sink there; without: be that sink")
    parser.add_argument("--megabytes", type=float, nargs="+", default=[10.0, 40.0, 160.0])
    parser.add_argument(
        "--rate", nargs="+", default=[UNLIMITED, "10gbit", "1gbit"], help="of the cable, as tc takes it"
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="one round of a small adapter at one rate")
    parser.add_argument("--on-first-host", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/push.json"))
    args = parser.parse_args()
    if args.quick:
        args.megabytes, args.rate, args.repeats = [0.5], [UNLIMITED], 1
    return args


def deadline() -> Deadline:
    return Deadline.after(600.0, "A request of the benchmark")


if __name__ == "__main__":
    main()
