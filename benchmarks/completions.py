"""What the trainer does with the completions of a batch, from the request to lists of tokens, beside an older state.

    git worktree add /tmp/before COMMIT
    python benchmarks/completions.py --before /tmp/before
    python benchmarks/completions.py --quick                 # to see that it still works

A server of this script answers with prepared bytes in vLLM's form, so nothing is sampled and nothing is waited for but
the client. Each state of the package runs in its own process; the processes take turns. ``wall_s`` is one call of
``generate`` for the whole batch, ``cpu_s`` what its process computed in it, and ``functions`` where that went, by a
call that is traced and not timed.
"""

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODEL = "policy-v1"
VOCABULARY = 150_000
FUNCTIONS = 8
NOTHING = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


def choice(index: int, prompt: list[int], length: int, generator: random.Random) -> dict[str, Any]:
    """One completion as vLLM 0.31 sends it for `logprobs=0`, with all fields that it has."""
    token_ids = [generator.randrange(VOCABULARY) for _ in range(length)]
    logprobs = [-generator.expovariate(1.0) for _ in token_ids]
    tokens = [f"token_id:{token}" for token in token_ids]
    return {
        "index": index,
        "text": "".join(generator.choice((" the", " a", "ing", ", ", "\n", " 7")) for _ in token_ids),
        "logprobs": {
            "text_offset": [14 * place for place in range(length)],
            "token_logprobs": logprobs,
            "tokens": tokens,
            "top_logprobs": [{token: value} for token, value in zip(tokens, logprobs, strict=True)],
        },
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": token_ids,
        "prompt_logprobs": None,
        "prompt_token_ids": prompt,
        "routed_experts": None,
    }


def answer(body: dict[str, Any]) -> bytes:
    """The whole answer to a request, head included; the same for the same request."""
    prompts, count, length = body["prompt"], body["n"], body["max_tokens"]
    generator = random.Random(str(prompts))
    choices = [choice(index, prompts[index // count], length, generator) for index in range(len(prompts) * count)]
    content = json.dumps(
        {
            "id": "cmpl-1",
            "object": "text_completion",
            "created": 1,
            "model": body["model"],
            "choices": choices,
            "usage": {"prompt_tokens": 1, "total_tokens": 1, "completion_tokens": 1},
        },
        separators=(",", ":"),
    ).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


async def serve() -> None:
    """Answer completion requests for ever, from memory from the second time on; prints its port."""
    prepared: dict[bytes, bytes] = {}

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = re.search(rb"content-length: *(\d+)", head.lower())
                body = await reader.readexactly(int(size[1]) if size else 0)
                if body not in prepared:  # a request for `/health` has no body
                    prepared[body] = answer(json.loads(body)) if body else NOTHING
                writer.write(prepared[body])
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def client(args: argparse.Namespace) -> None:
    """Read the batch once for each line of the standard input, and print what it took."""
    import trl_lora_sync
    from trl_lora_sync.engines.base import TIMEOUTS, Deadline, PromptGroup, Sampling
    from trl_lora_sync.engines.vllm.engine import VLLMEngine
    from trl_lora_sync.runtime import Blocking

    where = Path(trl_lora_sync.__file__).resolve()
    if not where.is_relative_to(args.package.resolve()):
        sys.exit(f"{where} was imported instead of the package in {args.package}.")
    # On a busy machine the client itself may be away for longer than a server may be silent.
    engine = Blocking(VLLMEngine(args.client, is_local=True, timeouts=replace(TIMEOUTS, lifeless_after_s=600.0)))
    generator = random.Random(0)
    groups = [
        PromptGroup(prompt=[generator.randrange(VOCABULARY) for _ in range(args.prompt_tokens)], count=args.per_prompt)
        for _ in range(args.completions // args.per_prompt)
    ]
    sampling = Sampling.unrestricted(max_tokens=args.tokens, logprobs=0, ignore_eos=True)

    def read() -> None:
        found = engine.generate(MODEL, groups, sampling, Deadline.after(600.0, "A batch of the benchmark"))
        assert sum(len(one.token_ids) for group in found for one in group) == args.completions * args.tokens
        assert all(len(one.logprobs or ()) == args.tokens for group in found for one in group)

    for line in sys.stdin:
        if line.strip() == "trace":
            profile = cProfile.Profile()
            # The event loop runs in another thread, and only a tracer set in that thread sees it.
            engine_loop(profile.enable)
            read()
            engine_loop(profile.disable)
            print(json.dumps(functions(profile)), flush=True)
            continue
        wall, cpu = time.perf_counter(), time.process_time()
        read()
        print(json.dumps({"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}), flush=True)


def engine_loop(act: Any) -> None:
    """Call `act` in the thread of the event loop."""
    from trl_lora_sync.runtime import run

    async def call() -> None:
        act()

    run(call())


def functions(profile: cProfile.Profile) -> list[dict[str, Any]]:
    """The functions with the most time in themselves."""
    found = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    ranked = sorted(found.items(), key=lambda item: -item[1][2])[:FUNCTIONS]
    return [
        {"function": f"{Path(file).name}:{name}" if line else name, "calls": calls, "own_s": round(own, 3)}
        for (file, line, name), (calls, _, own, _, _) in ranked
    ]


class Client:
    """A process that reads batches with the package of one folder."""

    def __init__(self, package: Path, url: str, args: argparse.Namespace) -> None:
        sizes = {"completions": args.completions, "tokens": args.tokens, "per-prompt": args.per_prompt}
        options = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--client", url, "--package", package, *options],
            env={**os.environ, "PYTHONPATH": str(package)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, what: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def end(self) -> None:
        self._process.terminate()
        self._process.wait()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """What was found by each arm; what there is so far is written after each round."""
    server = subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True)
    clients: dict[str, Client] = {}
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        packages = {"now": ROOT} if args.before is None else {"before": args.before, "now": ROOT}
        clients = {arm: Client(package, url, args) for arm, package in packages.items()}
        samples: dict[str, list[dict[str, float]]] = {arm: [] for arm in clients}
        traces = {}
        for arm, one in clients.items():
            one.ask("time")  # in the first one the server makes the answers
            traces[arm] = one.ask("trace")
        for turn in range(args.repeats):
            for arm in list(clients)[:: -1 if turn % 2 else 1]:
                found = clients[arm].ask("time")
                samples[arm].append(found)
                print(f"round {turn + 1} of {args.repeats}, {arm}: {found}", file=sys.stderr, flush=True)
            write(args, result := summary(samples, traces))
    finally:
        for one in clients.values():
            one.end()
        server.terminate()
        server.wait()
    return result


def summary(samples: dict[str, list[dict[str, float]]], traces: dict[str, Any]) -> dict[str, Any]:
    arms = {
        arm: {
            **{name: statistics.median(one[name] for one in found) for name in ("wall_s", "cpu_s")},
            "samples": found,
            "functions": traces[arm],
        }
        for arm, found in samples.items()
    }
    ratios = {name: arms["now"][name] / arms["before"][name] for name in ("wall_s", "cpu_s") if "before" in arms}
    return {"arms": arms, "now_over_before": ratios}


def write(args: argparse.Namespace, found: dict[str, Any]) -> None:
    from run_environment import run_environment

    report = {
        "benchmark": "completions",
        **run_environment("vllm", "0.31.0, the form of its answers"),
        "batch": {
            "completions": args.completions,
            "tokens": args.tokens,
            "per_prompt": args.per_prompt,
            "prompt_tokens": args.prompt_tokens,
        },
        "load_average_at_end": os.getloadavg(),
        **found,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    partial = args.out.with_suffix(".partial")
    partial.write_text(json.dumps(report, indent=1) + "\n")
    partial.replace(args.out)


def main() -> None:
    args = parse_args()
    if args.serve:
        asyncio.run(serve())
    elif args.client:
        client(args)
    else:
        found = measure(args)
        for arm, one in found["arms"].items():
            print(f"{arm:>7}  {one['wall_s']:7.2f} s  {one['cpu_s']:7.2f} s of computing")
        print(f"now / before: {found['now_over_before']}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="folder with an older state of the package to compare with")
    parser.add_argument("--completions", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=4096, help="of each completion")
    parser.add_argument("--per-prompt", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of a small batch")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--client", help=argparse.SUPPRESS)
    parser.add_argument("--package", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "completions.json")
    args = parser.parse_args()
    if args.quick:
        args.completions, args.tokens, args.repeats = 16, 64, 1
    return args


if __name__ == "__main__":
    main()
