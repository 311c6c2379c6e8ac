"""The floor of a sync on one GPU: versions written into vLLM's slots, against files that vLLM loads.

    python benchmarks/floor.py --out floor.json                        # one GPU, six minutes
    python benchmarks/floor.py --cases tiny:8 --rounds 3 --out x.json  # without one, to see that it still works
    python benchmarks/floor.py --url http://localhost:8000 --model MODEL --cases tiny:8 --out x.json

A case is a shape and a rank. Each gets its own server from `trl-lora-sync serve vllm --quick-load`, on the
trainer's GPU, unless there is one at --url. The ways take turns with new values each time:

- ``ipc``: as a run syncs on one host. Read on the GPU, one copy on it to memory that the worker has opened by CUDA IPC.
  The copy to the file goes on beside the load. Without a GPU, or where the driver refuses, it is ``slots``.
- ``slots``: read on the GPU, one copy into a page-locked file, which the worker has mapped.
- ``files``: the same file without its note, so that the worker reads it with several threads and vLLM's layers take
  it apart.
- ``vllm``: the same file with a header that no other has, so that vLLM loads it all by itself.

A sync is reading the adapter from float32 matrices, writing it, and the load until the server lists the name. After the
first round of each case, the log-probabilities of a prompt are compared for the same adapter by all ways; with --peft
they are compared with PEFT's in float32 as well. Tokens per second at 64 requests at once are taken without
and with syncs meanwhile. At the end the base is what it was, bit for bit, after all these syncs. Prints a table, and
writes JSON.
"""

import argparse
import contextlib
import itertools
import json
import logging
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples" / "demo"), str(ROOT / "tests")]
from random_adapter import RandomAdapter, synchronize  # noqa: E402
from run_environment import run_environment  # noqa: E402
from transformers import AutoConfig  # noqa: E402
from versus.clock import Clock  # noqa: E402
from versus.scoring import prompt_logprobs  # noqa: E402
from versus.servers import ServerPool, ServerSpec, gpus_here  # noqa: E402
from versus.shapes import write_model  # noqa: E402

from trl_lora_sync.adapter.pinned_files import PinnedFilePool  # noqa: E402
from trl_lora_sync.adapter.store import AdapterStore, StoredAdapter  # noqa: E402
from trl_lora_sync.engine_plugins.safetensors_file import METADATA, header_of  # noqa: E402
from trl_lora_sync.engines.base import Deadline  # noqa: E402
from trl_lora_sync.engines.connect import connect_engine  # noqa: E402
from trl_lora_sync.runtime import Blocking, run  # noqa: E402

KEEP = 2
SLOTS, TIMED = KEEP + 1, 2  # the slots that `serve` gives, and the syncs after which they all have one kind
AT_ONCE, PROMPT_TOKENS = 64, 24
LEAST_SYNCS = 50
KV_BYTES = {"tiny": 1 << 28, "0.6b": 8 << 30, "8b": 8 << 30, "32b": 12 << 30}
WAYS = ("ipc", "slots", "files", "vllm")


def _apart(scores: list[list[float]]) -> float:
    return max(max(one) - min(one) for one in zip(*scores, strict=True))


def soon() -> Deadline:
    return Deadline.after(300.0, "The measurement")


class Bench:
    """One server and one trainer."""

    def __init__(self, engine: Blocking, trainer: RandomAdapter, folder: Path, url: str) -> None:
        self.engine, self.trainer = engine, trainer
        self._http = httpx.Client(base_url=url, timeout=300, trust_env=False)
        # A store for each way, as files of other sizes would not be used again.
        self.stores = {
            way: AdapterStore(
                folder / way,
                pinned=PinnedFilePool(shares_gpu=way == "ipc"),
                # Without, a worker takes versions for adapters of another origin.
                has_checksums=way not in ("files", "vllm"),
            )
            for way in WAYS
        }
        self._live: dict[str, list[StoredAdapter]] = {way: [] for way in WAYS}
        self._numbers = itertools.count(1)
        self._sampled = ""  # the version that is not retired
        self.syncs = 0

    def sync(self, way: str) -> tuple[str, dict[str, float]]:
        """The name of a new version, and the milliseconds of each part."""
        number = next(self._numbers)
        started = time.perf_counter()
        adapter = self.trainer.read()
        synchronize()
        read = time.perf_counter()
        if way == "vllm":
            adapter = replace(adapter)
            # In the place of the cached property.
            vars(adapter)["header"] = header_of(adapter.tensors, METADATA | {"number": f"{number:08}"})
        stored = self.stores[way].write(number, adapter)
        finishing = threading.Thread(target=self.stores[way].finish)  # as in a run, where another thread writes
        finishing.start()
        written = time.perf_counter()
        before = time.perf_counter()
        self.engine.load(stored, soon())
        loaded = time.perf_counter()
        finishing.join()
        self.syncs += 1
        self._retire(way, stored)
        parts = {"read": read - started, "write": written - read, "load": loaded - before}
        return stored.name, {name: value * 1e3 for name, value in [*parts.items(), ("sync", sum(parts.values()))]}

    def _retire(self, way: str, stored: StoredAdapter) -> None:
        """Not timed, as in a run, where the next batch is sampled meanwhile."""
        live = self._live[way]
        live.append(stored)
        while len(live) > KEEP:
            old = live.pop(next(place for place, one in enumerate(live) if one.name != self._sampled))
            self.engine.unload(old.name, soon())
            self.stores[way].delete(old)
        self.stores[way].prepare()

    def measure(self, rounds: int) -> dict[str, Any]:
        """Blocks of syncs of each way in turns: a slot that another way has had is loaded by vLLM first."""
        seeds = itertools.count(1)
        found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        first: dict[str, list[float]] = {way: [] for way in WAYS}
        came: dict[str, Counter[str]] = {}
        in_worker: dict[str, Counter[str]] = {}
        for turn in range(rounds):
            for way in WAYS[turn % len(WAYS) :] + WAYS[: turn % len(WAYS)]:
                for place in range(SLOTS + TIMED):
                    self.trainer.step(next(seeds))
                    before = self.counts(), self.milliseconds()
                    _, parts = self.sync(way)
                    if place >= SLOTS:
                        found[way].append(parts)
                        came.setdefault(way, Counter()).update(self.counts() - before[0])
                        in_worker.setdefault(way, Counter()).update(self.milliseconds() - before[1])
                    elif turn == 0:
                        first[way].append(round(parts["sync"], 3))
        return {
            "ms": {way: _medians(samples) for way, samples in found.items()},
            "ms_of_all": {way: [round(one["sync"], 3) for one in samples] for way, samples in found.items()},
            "ms_of_first": first,
            "came": came,
            "ms_in_worker": {
                way: {part: round(ms, 3) for part, ms in parts.items()} for way, parts in in_worker.items()
            },
        }

    def compare(self, prompt: list[int]) -> dict[str, Any]:
        """The same adapter by each way, and how far the same way is from itself: vLLM's kernels add in any order."""
        self.trainer.step(99)
        scores = {}
        for way in WAYS:
            name, _ = self.sync(way)
            scores[way] = prompt_logprobs(self.engine, name, prompt, soon())
        again = [prompt_logprobs(self.engine, name, prompt, soon()) for _ in range(3)]
        base = self.base(prompt)
        return {
            "largest_difference_between_ways": _apart(list(scores.values())),
            "largest_difference_of_one_way": _apart([scores[WAYS[-1]], *again]),
            "effect": statistics.fmean(abs(one - other) for one, other in zip(scores["slots"], base, strict=True)),
            "logprobs": scores["slots"],
        }

    def base(self, prompt: list[int]) -> list[float]:
        return prompt_logprobs(self.engine, self.engine.capabilities.base_model, prompt, soon())

    def decode(self, tokens: int, way: str) -> dict[str, Any]:
        """Tokens per second through one version, without and with syncs of later ones meanwhile, in turns."""
        self.trainer.step(7)
        name, _ = self.sync(way)
        self._sampled = name
        self._run_batch(name, 8)
        quiet, busy, during = [], [], []
        for _ in range(2):
            quiet.append(self._run_batch(name, tokens))
            with self._syncing(way) as samples:
                busy.append(self._run_batch(name, tokens))
            during += samples
        return {
            "at_once": AT_ONCE,
            "tokens_per_s": statistics.median(quiet),
            "tokens_per_s_while_syncing": statistics.median(busy),
            "share": statistics.median(busy) / statistics.median(quiet),
            "syncs": len(during),
            "sync_ms": _medians(during) if during else None,
        }

    def _run_batch(self, name: str, tokens: int) -> float:
        prompts = [[5 + place % 200, *range(6, 5 + PROMPT_TOKENS)] for place in range(AT_ONCE)]
        body = {"model": name, "prompt": prompts, "max_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
        started = time.perf_counter()
        answer = self._http.post("/v1/completions", json=body)
        answer.raise_for_status()
        return answer.json()["usage"]["completion_tokens"] / (time.perf_counter() - started)

    @contextlib.contextmanager
    def _syncing(self, way: str) -> Iterator[list[dict[str, float]]]:
        """One sync each half second; a real run has far fewer."""
        samples: list[dict[str, float]] = []
        is_over = threading.Event()

        def work() -> None:
            while not is_over.wait(0.5):
                samples.append(self.sync(way)[1])

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield samples
        finally:
            is_over.set()
            thread.join()

    def counts(self) -> Counter[str]:
        """How versions came to the first worker."""
        return Counter(self._ask("lora_sync_slot_counts"))

    def milliseconds(self) -> Counter[str]:
        """How long the parts took there, of all versions together."""
        return Counter({part: 1e3 * value for part, value in self._ask("lora_sync_slot_seconds").items()})

    def _ask(self, method: str) -> dict[str, Any]:
        answer = self._http.post("/collective_rpc", json={"method": method})
        return dict(answer.json()["results"][0]) if answer.status_code == 200 else {}

    def close(self) -> None:
        for live in self._live.values():
            for one in live:
                self.engine.unload(one.name, soon())
        for store in self.stores.values():
            store.close()
        self._http.close()
        self.engine.close()


def _medians(samples: list[dict[str, float]]) -> dict[str, float]:
    return {part: round(statistics.median(one[part] for one in samples), 3) for part in samples[0]}


def measure_case(case: str, url: str, model: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    _, rank = split(case)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    engine = Blocking(run(connect_engine(url, engine="vllm", is_local=True, deadline=soon())))
    bench = Bench(
        engine, RandomAdapter(AutoConfig.from_pretrained(model), rank, device), folder / case.replace(":", "-"), url
    )
    prompt = [(7 * place) % 250 for place in range(PROMPT_TOKENS)]
    with contextlib.closing(bench):
        base = bench.base(prompt)
        result: dict[str, Any] = {"case": case, "vllm": engine.capabilities.version}
        result["payload_bytes"] = bench.trainer.read().payload_bytes
        result["syncs_in_turns"] = bench.measure(args.rounds)
        result["served"] = bench.compare(prompt)
        if args.peft:
            result["served"] |= gap_to_peft(model, bench.trainer, prompt, result["served"]["logprobs"])
        result["decoding"] = {way: bench.decode(args.tokens, way) for way in ("ipc", "slots")}
        while bench.syncs < LEAST_SYNCS:
            bench.sync("ipc")
        result["syncs"] = bench.syncs
        result["base_is_bit_identical"] = bench.base(prompt) == base
    return result


def gap_to_peft(model: Path, trainer: RandomAdapter, prompt: list[int], served: list[float]) -> dict[str, float]:
    """Mean distance of the served log-probabilities from PEFT's in float32 with what the trainer has now."""
    from contract.reference import PeftReference

    trainer.step(99)
    adapter = trainer.read()
    trained = PeftReference(model).logprobs(adapter, prompt[:1], prompt[1:])
    return {"gap_to_peft": statistics.fmean(abs(one - other) for one, other in zip(served, trained, strict=True))}


def split(case: str) -> tuple[str, int]:
    shape, _, rank = case.partition(":")
    return shape, int(rank)


def table(results: list[dict[str, Any]]) -> str:
    lines = [f"{'case':<10}{'MB':>7}" + "".join(f"{way:>9}" for way in WAYS) + f"{'decoding':>10}"]
    for one in results:
        if "failed" in one:
            lines.append(f"{one['case']:<10} {one['failed'][-300:]}")
            continue
        ms = one["syncs_in_turns"]["ms"]
        lines.append(
            f"{one['case']:<10}{one['payload_bytes'] / 1e6:>7.1f}"
            + "".join(f"{ms[way]['sync']:>9.1f}" for way in WAYS)
            + f"{one['decoding']['ipc']['share']:>10.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--cases", nargs="+", default=["0.6b:32", "8b:8", "8b:32", "8b:128"] if on_gpu else ["tiny:8"])
    parser.add_argument("--rounds", type=int, default=6, help=f"each with {TIMED} timed syncs of each way")
    parser.add_argument("--tokens", type=int, default=256 if on_gpu else 32, help="of each completion when decoding")
    parser.add_argument("--peft", action="store_true", help="compare with PEFT in float32; for small models")
    parser.add_argument("--url", help="of a running server, which serves --model")
    parser.add_argument("--model", type=Path, help="folder of the model at --url")
    parser.add_argument("--python", type=Path, default=None, help="of the environment with vLLM; by default this one")
    parser.add_argument(
        "--models", type=Path, default=Path("/dev/shm/trl-lora-sync-floor"), help="where models are made"
    )
    parser.add_argument("--work", type=Path, help="where the logs of the servers go")
    parser.add_argument("--budget-s", type=float, default=360.0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1 if not on_gpu else 8)
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("trl_lora_sync").setLevel(logging.INFO)  # has the reason if the GPU's memory is not shared
    work = args.work or Path(tempfile.mkdtemp(prefix="floor-"))
    work.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="trl-lora-sync-floor-") as folder:
        for case, url, model in _served(args, work):
            try:
                results.append(measure_case(case, url, model, Path(folder), args))
            except Exception as error:  # the other cases are still measured
                results.append({"case": case, "failed": f"{type(error).__name__}: {error}"})
            said = [log.read_text(errors="replace").splitlines() for log in work.glob("*.log")]
            results[-1]["gpu_to_gpu"] = sorted({line for lines in said for line in lines if "trainer's GPU" in line})
            versions = [one["vllm"] for one in results if "vllm" in one]
            content = {**run_environment("vllm", versions[0] if versions else "unknown"), "cases": results}
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(content, indent=1))
    print(table(results))
    sys.exit(1 if any("failed" in one for one in results) else 0)


def _served(args: argparse.Namespace, work: Path) -> Iterator[tuple[str, str, Path]]:
    """Each case with the URL of a server and the folder of its model, one after the other."""
    if args.url:
        for case in args.cases:
            yield case, args.url, args.model
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    clock = Clock(args.budget_s)
    shapes = {split(case)[0] for case in args.cases}
    models = {shape: write_model(args.models / shape, shape, device) for shape in sorted(shapes)}
    specs = {
        case: ServerSpec(kind="runtime", shape=shape, model=models[shape], lora_rank=rank, kv_bytes=KV_BYTES[shape])
        for case in args.cases
        for shape, rank in [split(case)]
    }
    python = args.python or Path(sys.executable)
    with ServerPool(gpus_here(work), 4 << 30, python, work, clock, keep=False) as pool:
        for group in pool.groups(list(specs.values())):
            pool.start(group)
            pool.settle()  # nothing starts beside a measurement
            for case, spec in specs.items():
                if spec in group:
                    pool.wait(spec)
                    yield case, pool.url(spec), spec.model
                    pool.stop(spec.name)


if __name__ == "__main__":
    main()
