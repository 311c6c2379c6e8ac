"""Fused serving on a running server: what a sync takes and where, that it is right, and how fast tokens come.

    trl-lora-sync serve vllm MODEL --fused --port 8001 [-- --tensor-parallel-size 2]
    python benchmarks/fused_check.py --model MODEL --url http://localhost:8001

MODEL is the folder that the server was given. Random adapters are fused one after the other; each version's
log-probabilities of a prompt are compared with PEFT's in float32 (unless --no-peft). Decoding is timed on the base and
on a fused adapter in turn. At the end the weights must be the base's, bit for bit: compared on the server, and by the
base's log-probabilities. Prints JSON.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from contract.reference import PeftReference  # noqa: E402
from random_adapter import RandomAdapter  # noqa: E402
from run_environment import run_environment  # noqa: E402
from transformers import AutoConfig  # noqa: E402
from versus.scoring import prompt_logprobs  # noqa: E402

from trl_lora_sync.adapter.store import AdapterStore, StoredAdapter  # noqa: E402
from trl_lora_sync.engine_plugins.vllm_fused import BASE, HEADER, ROUTE  # noqa: E402
from trl_lora_sync.engines.base import Deadline, PromptGroup, Sampling  # noqa: E402
from trl_lora_sync.engines.connect import connect_engine  # noqa: E402
from trl_lora_sync.runtime import Blocking, run  # noqa: E402

PROMPT_TOKENS = 128
STD_OF_B = 0.025


def soon() -> Deadline:
    return Deadline.after(600.0, "The check")


class Server:
    """The fused routes of the server, as they are."""

    def __init__(self, url: str) -> None:
        engine = connect_engine(url, engine="vllm", is_local=True, deadline=soon(), serving="fused")
        self.engine = Blocking(run(engine))
        key = os.environ.get("VLLM_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=600, trust_env=False)

    def fuse(self, stored: StoredAdapter) -> dict[str, float]:
        started = time.perf_counter()
        answer = self._http.put(f"{ROUTE}/{stored.name}", json={"path": stored.server_path})
        seconds = time.perf_counter() - started
        if answer.status_code != 200:
            sys.exit(f"refused: {answer.text}")
        return {"client": seconds, **answer.json()["seconds"]}

    def state(self, **query: str) -> dict[str, Any]:
        state: dict[str, Any] = self._http.get(ROUTE, params=query).raise_for_status().json()
        return state

    def to_base(self) -> float:
        started = time.perf_counter()
        body = {"model": self.engine.capabilities.base_model, "prompt": [1], "max_tokens": 1}
        assert self._http.post("/v1/completions", json=body, headers={HEADER: BASE}).headers[HEADER] == BASE
        return time.perf_counter() - started


def gap(one: list[float], other: list[float]) -> dict[str, float]:
    distances = [abs(a - b) for a, b in zip(one, other, strict=True)]
    return {"mean": sum(distances) / len(distances), "max": max(distances)}


def tokens_per_s(engine: Blocking, model: str, concurrency: int, new_tokens: int, vocab: int) -> float:
    groups = [
        PromptGroup(prompt=[random.randrange(vocab) for _ in range(PROMPT_TOKENS)], count=1) for _ in range(concurrency)
    ]
    sampling = Sampling.unrestricted(max_tokens=new_tokens, logprobs=None, ignore_eos=True)
    started = time.perf_counter()
    answers = engine.generate(model, groups, sampling, soon())
    return sum(len(answer[0].token_ids) for answer in answers) / (time.perf_counter() - started)


def measure(args: argparse.Namespace, store: AdapterStore) -> dict[str, Any]:
    server = Server(args.url.rstrip("/"))
    engine, config = server.engine, AutoConfig.from_pretrained(args.model)
    base, vocab = engine.capabilities.base_model, min(config.vocab_size, 500)
    policy = RandomAdapter(config, args.rank, "cpu")
    prompt = [random.randrange(vocab) for _ in range(PROMPT_TOKENS)]
    before = prompt_logprobs(engine, base, prompt, soon())

    versions, adapters = [], {}
    for version in range(1, args.versions + 1):
        policy.step(version, STD_OF_B)
        adapter = policy.read()
        stored = store.write(version, adapter)
        row: dict[str, Any] = {"seconds": server.fuse(stored)}
        served = prompt_logprobs(engine, stored.name, prompt, soon())
        row["gap_to_base"] = gap(served, before)
        versions.append(row)
        # The next version is read into the same memory.
        adapters[stored.name] = (replace(adapter, flat=adapter.flat.clone()), served)
        if version > 2:
            engine.unload(next(iter(engine.loaded(soon()))), soon())
        print(json.dumps(row), file=sys.stderr, flush=True)

    name = list(adapters)[-1]
    decoding = []
    for concurrency in args.concurrency:
        speeds: dict[str, list[float]] = {"base": [], "fused": []}
        for turn in range(1 + args.decode_repeats):
            for which, model in (("base", base), ("fused", name)):
                engine.score(model, prompt, soon())  # changes the weights outside of what is timed
                speed = tokens_per_s(engine, model, concurrency, args.new_tokens, vocab)
                if turn:
                    speeds[which].append(speed)
        median = {which: statistics.median(found) for which, found in speeds.items()}
        decoding.append({"concurrency": concurrency, **median, "fused_over_base": median["fused"] / median["base"]})
        print(json.dumps(decoding[-1]), file=sys.stderr, flush=True)

    engine.score(name, prompt, soon())
    back_s = server.to_base()
    state = server.state(compare="base")
    policy.step(0, 0.0)
    zero = store.write(args.versions + 1, policy.read())
    server.fuse(zero)
    zeros_equal = prompt_logprobs(engine, zero.name, prompt, soon()) == before
    zero_state = server.state(compare="base")
    for left in engine.loaded(soon()):
        engine.unload(left, soon())

    steady = [row["seconds"] for row in versions[1:]] or [versions[0]["seconds"]]
    result: dict[str, Any] = {
        **run_environment("vllm", engine.capabilities.version),
        "model": Path(args.model).resolve().name,
        "adapter_parameters": adapters[name][0].parameters,
        "adapter_bytes": adapters[name][0].payload_bytes,
        "workers": len(state["workers"]),
        "base_copy": [
            {"where": worker["base_copy"], "bytes": worker["base_copy_bytes"]} for worker in state["workers"]
        ],
        "first_sync_s": versions[0]["seconds"],
        "sync_s_median": {key: statistics.median(one[key] for one in steady) for key in steady[0]},
        "syncs": versions,
        "decoding_tokens_per_s": decoding,
        "back_to_base": {
            "seconds_with_one_token": back_s,
            "weights_compared": state["compared"],
            "logprobs_equal": prompt_logprobs(engine, base, prompt, soon()) == before,
            "zero_adapter_logprobs_equal": zeros_equal,
            "zero_adapter_weights_compared": zero_state["compared"],
        },
    }
    if not args.no_peft:
        peft, ends = PeftReference(args.model), (prompt[:1], prompt[1:])
        result["gap_to_float32"] = {
            "base": gap(before, peft.logprobs(None, *ends)),
            "adapters": [gap(served, peft.logprobs(adapter, *ends)) for adapter, served in adapters.values()],
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--url", required=True, help="of the server with fused serving")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--versions", type=int, default=8)
    parser.add_argument("--concurrency", type=int, nargs="*", default=[32, 256])
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--decode-repeats", type=int, default=2)
    parser.add_argument("--no-peft", action="store_true", help="do not compute the adapters here in float32")
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="folder that the server reads too")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fused-check-", dir=args.dir) as folder:
        store = AdapterStore(Path(folder) / "store")
        try:
            result = measure(args, store)
        finally:
            store.close()
    text = json.dumps(result, indent=2)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
