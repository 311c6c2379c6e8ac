"""Random fault schedules against a real vLLM server on this CPU: is a wrong completion ever accepted?

    python benchmarks/faults.py --schedules 320

Each schedule starts one or two trainers on one to three servers, and lets them sync and generate through proxies, one
per server, that drop, delay, truncate and duplicate requests, answer 500 and 503, hang, stay away for a while, and lose
the server's adapters as a restart does, each independently of the others; meanwhile disks fill up or turn read-only,
clocks jump and folders vanish or appear late. The rule: every completion that a trainer accepts was sampled by the
version it believes active, or the step raised; and a version is on every server in service or on none. What sampled a
completion is found out from its log-probabilities, see `tests/support/schedules.py`. A schedule that breaks the rule is
kept in the result as a whole, and runs again with `--first SEED --schedules 1`.

Two vLLM servers run; a third one is the second process again, whose proxy gives adapters other names.

    python benchmarks/faults.py --kills

Instead, the process of a server is killed and restarted at each point of a sync and of a generation: the only one of
the run, and one of two that the run waits for or goes on without.
"""

import argparse
import contextlib
import io
import json
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from run_environment import run_environment

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples" / "demo")]
os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402
from make_model import make_model  # noqa: E402
from support.kills import KILL_POINTS, kill_at  # noqa: E402
from support.schedules import Arena, as_json, schedule_of  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402
from vllm_server import VLLMServer  # noqa: E402


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    logging.getLogger("trl_lora_sync").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        base = make_model(Path(folder) / "tiny-qwen3")
        with running(base, 2) as servers:
            run = run_kills if args.kills else run_schedules
            result = run_environment("vllm", "0.31.0") | run(args, servers, base, Path(folder))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name != "broken"}, indent=1))
    if result["broken"]:
        raise SystemExit("the rule was broken, see the result")


@contextlib.contextmanager
def running(base: Path, count: int) -> Iterator[list[VLLMServer]]:
    """Servers that start side by side. Adapters of two trainers and two tenants stay in memory."""
    options = {"served_model_name": "tiny-qwen3", "max_cpu_loras": 32, "extra_args": ["--enable-prefix-caching"]}
    servers = [VLLMServer(base, **options) for _ in range(count)]
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
            server.launch()
        for server in servers:
            server.wait_until_ready()
        yield servers


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=320)
    parser.add_argument("--first", type=int, default=0, help="seed of the first schedule")
    parser.add_argument("--kills", action="store_true", help="kill and restart a server instead")
    parser.add_argument("--points", nargs="+", choices=KILL_POINTS, default=list(KILL_POINTS), help="where to kill it")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/faults.json or kills.json")
    args = parser.parse_args()
    args.out = args.out or Path("benchmarks/results", "kills.json" if args.kills else "faults.json")
    return args


def run_schedules(args: argparse.Namespace, servers: list[VLLMServer], base: Path, folder: Path) -> dict[str, Any]:
    arena = Arena([server.base_url for server in servers], base, AutoTokenizer.from_pretrained(base))
    started = time.monotonic()
    raised: Counter[str] = Counter()
    fired: Counter[str] = Counter()
    drawn: Counter[str] = Counter()
    accepted, seen, dropped, gaps, margins, broken, left = 0, 0, 0, [], [], [], []
    for done, seed in enumerate(range(args.first, args.first + args.schedules), start=1):
        schedule = schedule_of(seed)
        with contextlib.redirect_stdout(io.StringIO()):  # every trainer prints a line at its start
            outcome = arena.run(schedule, folder / f"schedule-{seed}")
        raised += outcome.raised
        fired += outcome.fired
        drawn[f"{schedule.servers} servers, {schedule.on_server_loss}"] += 1
        accepted += outcome.accepted
        seen += outcome.seen
        dropped += outcome.dropped
        gaps.append(outcome.gap)
        margins.append(outcome.margin)
        left += [f"{seed}: {what}" for what in outcome.left]
        if outcome.violations:
            broken.append({"violations": outcome.violations, "schedule": as_json(schedule)})
        if done % 10 == 0 or done == args.schedules:
            passed_s = time.monotonic() - started
            print(
                f"{done} of {args.schedules} schedules in {passed_s:.0f} s, {accepted} completions accepted, "
                f"{len(broken)} schedules broken; {passed_s / done * (args.schedules - done):.0f} s to go",
                flush=True,
            )
    return {
        "schedules": args.schedules,
        "schedules_by_servers_and_on_server_loss": dict(sorted(drawn.items())),
        "seconds": round(time.monotonic() - started, 1),
        "completions_accepted": accepted,
        "completions_asked_of_each_server_after_a_sync": seen,
        "servers_dropped": dropped,
        "broken": broken,
        "left_behind": left,
        "faults_that_happened": dict(fired.most_common()),
        "errors_raised": dict(raised.most_common()),
        "largest_distance_to_own_version": max(gaps),
        "smallest_distance_to_another_version": min(margins),
    }


def run_kills(args: argparse.Namespace, servers: list[VLLMServer], base: Path, folder: Path) -> dict[str, Any]:
    server, beside = servers
    fleets: dict[str, dict[str, Any]] = {
        "the only server": {},
        "one of two": {"beside": beside},
        "one of two, on_server_loss=drop": {"beside": beside, "on_server_loss": "drop"},
    }
    started = time.monotonic()
    killed: dict[str, dict[str, Any]] = {fleet: {} for fleet in fleets}
    for place, (fleet, options) in enumerate(fleets.items()):
        for number, point in enumerate(args.points):
            passed_s = time.monotonic() - started
            print(f"{passed_s:.0f} s: killing {fleet}, {point}", flush=True)
            with contextlib.redirect_stdout(io.StringIO()):
                found = kill_at(point, server, base, folder / f"kill-{place}-{number}", timeout_s=6.0, **options)
            killed[fleet][point] = found
    return {
        "kills": sum(map(len, killed.values())),
        "seconds": round(time.monotonic() - started, 1),
        "broken": [
            f"{fleet}, {point}: {violation}"
            for fleet, points in killed.items()
            for point, found in points.items()
            for violation in found["violations"]
        ],
        "killed": killed,
    }


if __name__ == "__main__":
    main()
