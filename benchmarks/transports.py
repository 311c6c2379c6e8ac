"""How fast an adapter reaches a running SGLang server: as files, as tensors, and as tensors built the naive way.

    python benchmarks/transports.py --model MODEL --url http://localhost:30000 --rank 32

The arms take turns with the same adapter. `naive tensors` pickles the unchanged dictionary of tensors and encodes the
request with the standard library, which is what a first attempt at SGLang's endpoint looks like; `tensors` is this
package's one-pass payload, whose base64 is made while it is sent; `disk` writes the files and sends the path. `build`
is the time until the request is ready, `load` the time of the request, `first token` that of the first request that
names the adapter.
"""

import argparse
import base64
import json
import pickle
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import torch
from packaging.version import Version
from run_environment import run_environment
from soak import make_policy, perturb

from trl_lora_sync.adapter.canonical import CanonicalAdapter
from trl_lora_sync.adapter.export import read_adapter
from trl_lora_sync.adapter.store import AdapterStore
from trl_lora_sync.addresses import default_sync_dir, is_local_url
from trl_lora_sync.engines.base import Deadline
from trl_lora_sync.engines.http import SizedBody
from trl_lora_sync.engines.sglang.engine import SGLangEngine
from trl_lora_sync.runtime import Blocking, run
from trl_lora_sync.servers.transports import DiskTransport, HTTPTransport

Seconds = dict[str, float]


async def joined(body: SizedBody) -> bytes:
    return b"".join([chunk async for chunk in body])


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.engine = Blocking(SGLangEngine(args.url, is_local=is_local_url(args.url)))
        self.engine.connect(deadline())
        self.disk = Blocking(DiskTransport(AdapterStore(default_sync_dir(True, "transports"), has_checksums=False)))
        self.tensors = Blocking(HTTPTransport(AdapterStore(default_sync_dir(True, "transports"))))
        self.per_rank = Version(self.engine.capabilities.version) >= Version("0.5.17")
        self.url = args.url
        self._number = 0

    def arms(self) -> dict[str, Callable[[CanonicalAdapter], Seconds]]:
        return {"disk": self.by_disk, "tensors": self.by_tensors, "naive tensors": self.naively}

    def by_disk(self, adapter: CanonicalAdapter) -> Seconds:
        start = time.perf_counter()
        stored = self.disk.write(self._next(), adapter, deadline())
        return self._loaded(stored, start)

    def by_tensors(self, adapter: CanonicalAdapter) -> Seconds:
        start = time.perf_counter()
        stored = self.tensors.write(self._next(), adapter, deadline())
        content = run(joined(self.engine.tensor_body(stored.name, adapter)))
        return self._posted(stored, content, len(content), start)

    def naively(self, adapter: CanonicalAdapter) -> Seconds:
        stored = self.tensors.write(self._next(), adapter, deadline())
        # The adapter's tensors are views of one buffer, which plain pickle would write once for each of them.
        own = {name: tensor.clone() for name, tensor in adapter.tensors.items()}
        start = time.perf_counter()
        encoded = base64.b64encode(pickle.dumps(own)).decode()
        tensors: dict[str, Any] = (
            {"serialized_named_tensors": [encoded]} if self.per_rank else {"serialized_tensors": encoded}
        )
        body = json.dumps({"lora_name": stored.name, "config_dict": adapter.config(), "pinned": False, **tensors})
        content = body.encode()
        return self._posted(stored, content, len(content), start)

    def _posted(self, stored: Any, body: Any, size: int, start: float) -> Seconds:
        built = time.perf_counter()
        response = httpx.post(
            f"{self.url}/load_lora_adapter_from_tensors",
            content=body,
            headers={"Content-Type": "application/json", "Content-Length": str(size)},
            timeout=120.0,
        )
        response.raise_for_status()
        return self._finish(stored, start, built, time.perf_counter())

    def _loaded(self, stored: Any, start: float) -> Seconds:
        built = time.perf_counter()
        self.engine.load(stored, deadline())
        return self._finish(stored, start, built, time.perf_counter())

    def _finish(self, stored: Any, start: float, built: float, loaded: float) -> Seconds:
        self.engine.warm_up(stored, deadline())
        warm = time.perf_counter()
        self.engine.unload(stored.name, deadline())
        self.disk.delete(replace(stored, content=None))
        return {"build_s": built - start, "load_s": loaded - built, "first_token_s": warm - loaded}

    def _next(self) -> int:
        self._number += 1
        return self._number


def main() -> None:
    args = parse_args()
    model = make_policy(args)
    perturb(model)
    bench = Bench(args)
    adapter = read_adapter(model, dtype=torch.bfloat16, packed_modules=True)
    samples: dict[str, list[Seconds]] = {name: [] for name in bench.arms()}
    try:
        for turn in range(args.repeats + 1):
            names = list(bench.arms())
            for name in names[turn % 3 :] + names[: turn % 3]:
                seconds = bench.arms()[name](adapter)
                if turn:  # the first round warms up
                    samples[name].append(seconds)
    finally:
        bench.disk.close()
    medians = {
        name: {part: statistics.median(row[part] for row in rows) for part in rows[0]} for name, rows in samples.items()
    }
    result = {
        **run_environment("sglang", bench.engine.capabilities.version),
        "lora_rank": args.rank,
        "payload_bytes": adapter.payload_bytes,
        "median": medians,
        "tensors_over_naive": {
            part: medians["tensors"][part] / medians["naive tensors"][part] for part in ("build_s", "load_s")
        },
        "samples": samples,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{adapter.payload_bytes / 1e6:.1f} MB, rank {args.rank}")
    for name, row in medians.items():
        print(f"{name:14}" + "".join(f"  {part} {1000 * value:8.1f} ms" for part, value in row.items()))
    print("tensors / naive tensors:", {k: round(v, 3) for k, v in result["tensors_over_naive"].items()})


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the served base model")
    parser.add_argument("--url", required=True, help="of an SGLang server on this host")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/transports.json"))
    return parser.parse_args()


def deadline() -> Deadline:
    return Deadline.after(120.0, "A request of the benchmark")


if __name__ == "__main__":
    main()
