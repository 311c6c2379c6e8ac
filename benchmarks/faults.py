"""Random fault schedules against a real vLLM server on this CPU: is a wrong completion ever accepted?

    python benchmarks/faults.py --schedules 320

Each schedule starts one or two trainers, lets them sync and generate through a proxy that drops, delays, truncates and
duplicates requests, answers 500 and 503, hangs, and loses the server's adapters as a restart does; meanwhile disks fill
up, clocks jump and folders vanish or appear late. The rule: every completion that a trainer accepts was sampled by the
version it believes active, or the step raised. What sampled it is found out from its log-probabilities, see
`tests/support/schedules.py`. A schedule that breaks the rule is kept in the result as a whole, and runs again with
`--first SEED --schedules 1`.

With `--kills`, the server's process itself is killed and restarted at each point of a sync and of a generation.
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
from pathlib import Path
from typing import Any

from trl_lora_sync.cli.surroundings import surroundings

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
        with VLLMServer(base, served_model_name="tiny-qwen3", extra_args=["--enable-prefix-caching"]) as server:
            result = surroundings("vllm", "0.31.0") | run_schedules(args, server, base, Path(folder))
            if args.kills:
                result["kills"] = run_kills(server, base, Path(folder))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name != "broken"}, indent=1))
    if result["broken"] or any(kill["violations"] for kill in result.get("kills", {}).values()):
        raise SystemExit("the rule was broken, see the result")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=320)
    parser.add_argument("--first", type=int, default=0, help="seed of the first schedule")
    parser.add_argument("--kills", action="store_true", help="kill and restart the server as well")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/faults.json"))
    return parser.parse_args()


def run_schedules(args: argparse.Namespace, server: VLLMServer, base: Path, folder: Path) -> dict[str, Any]:
    arena = Arena([server.base_url], base, AutoTokenizer.from_pretrained(base))
    started = time.monotonic()
    raised: Counter[str] = Counter()
    fired: Counter[str] = Counter()
    accepted, gaps, margins, broken, left = 0, [], [], [], []
    for seed in range(args.first, args.first + args.schedules):
        schedule = schedule_of(seed)
        with contextlib.redirect_stdout(io.StringIO()):  # every trainer that starts says where
            outcome = arena.run(schedule, folder / f"schedule-{seed}")
        raised += outcome.raised
        fired += outcome.fired
        accepted += outcome.accepted
        gaps.append(outcome.gap)
        margins.append(outcome.margin)
        left += [f"{seed}: {what}" for what in outcome.left]
        if outcome.violations:
            broken.append({"violations": outcome.violations, "schedule": as_json(schedule)})
        if (seed + 1) % 20 == 0:
            print(f"{seed + 1 - args.first} schedules, {accepted} completions, {len(broken)} broken", flush=True)
    return {
        "schedules": args.schedules,
        "seconds": round(time.monotonic() - started, 1),
        "completions_accepted": accepted,
        "broken": broken,
        "left_behind": left,
        "faults_that_happened": dict(fired.most_common()),
        "errors_raised": dict(raised.most_common()),
        "largest_distance_to_own_version": max(gaps),
        "smallest_distance_to_another_version": min(margins),
    }


def run_kills(server: VLLMServer, base: Path, folder: Path) -> dict[str, Any]:
    killed = {}
    for point in KILL_POINTS:
        print(f"killing the server: {point}", flush=True)
        killed[point] = kill_at(point, server, base, folder / f"kill-{point.replace(' ', '-')}")
    return killed


if __name__ == "__main__":
    main()
