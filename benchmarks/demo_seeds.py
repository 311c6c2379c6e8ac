"""Whether the demo learns on every seed, and what sets its trainer and its server apart.

    python benchmarks/demo_seeds.py --seeds 0 1 2 3 4 5 6 7 8 9

    python benchmarks/demo_seeds.py --seeds 0 1 --arms autocast autocast-dropout mixed mixed-dropout bfloat16

Each run is one of examples/demo/run.py: a model and its own vLLM server on this CPU, and 40 steps of GRPO. The
seed is that of the model's random weights. Two runs of one seed differ, because the server samples as requests come.

The arms change the dropout and the precision. The demo computes in float32 on both sides. With `autocast`, the server
computes in bfloat16, and the trainer holds float32 weights and computes with autocast to bfloat16, which are the
defaults of TRL's command line; with `mixed`, the trainer alone does; with `bfloat16`, its weights are bfloat16 as well.
"""

import argparse
import json
import re
import signal
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from run_environment import run_environment

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "demo"))

# Arguments for the training script, and for vLLM.
AUTOCAST, BFLOAT16_SERVER, DROPOUT = ["--bf16", "True"], ["--dtype", "bfloat16"], ["--lora_dropout", "0.05"]
ARMS: dict[str, tuple[list[str], list[str]]] = {
    "demo": ([], []),
    "dropout": (DROPOUT, []),
    "autocast": (AUTOCAST, BFLOAT16_SERVER),
    "autocast-dropout": (AUTOCAST + DROPOUT, BFLOAT16_SERVER),
    "mixed": (AUTOCAST, []),
    "mixed-dropout": (AUTOCAST + DROPOUT, []),
    "bfloat16": ([*AUTOCAST, "--dtype", "bfloat16", "--lora_sync_dtype", "auto"], BFLOAT16_SERVER),
}
GAP = "sampling/sampling_logp_difference"
RATIO = "sampling/importance_sampling_ratio"
SHOWN_EVERY = 5


def main() -> None:
    args = parse_args()
    # A plain SIGTERM would leave the server and the training script running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="demo-seeds-") as folder:
        for seed in args.seeds:
            for arm in args.arms:
                print(f"Seed {seed}, arm {arm}", flush=True)
                runs.append(measure(Path(folder), arm, seed, args.steps))
                write(args.out, runs, args.steps)  # after each run, so that an interrupted benchmark keeps the others
    print(table(runs))
    if failed := [run for run in runs if not run["learned"]]:
        sys.exit(f"{len(failed)} of {len(runs)} runs did not learn.")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["demo"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("demo-seeds.json"))
    return parser.parse_args()


def measure(folder: Path, arm: str, seed: int, steps: int) -> dict[str, Any]:
    """Run the demo once and sum up what the trainer logged."""
    from run import EDGE_STEPS, is_learned, mean_reward, play

    training_args, server_args = ARMS[arm]
    history = play(folder, steps, seed, training_args, server_args)
    served = re.search(r"^LoRA adapter sync: vllm (\S+) at", (folder / "train.log").read_text(), re.MULTILINE)
    assert served is not None
    gaps = [metrics[f"{GAP}/mean"] for metrics in history]
    return {
        "seed": seed,
        "arm": arm,
        "vllm": served[1],
        "training_args": training_args,
        "server_args": server_args,
        "learned": is_learned(history),
        "reward_first_steps": round(mean_reward(history[:EDGE_STEPS]), 3),
        "reward_last_steps": round(mean_reward(history[-EDGE_STEPS:]), 3),
        "reward_of_steps": [round(metrics["reward"], 3) for metrics in history[SHOWN_EVERY - 1 :: SHOWN_EVERY]],
        "logprob_gap_mean": round(fmean(gaps), 9),
        "logprob_gap_of_worst_step": round(max(gaps), 9),
        "logprob_gap_of_worst_token": round(max(metrics[f"{GAP}/max"] for metrics in history), 9),
        "importance_ratio_min": round(min(metrics[f"{RATIO}/min"] for metrics in history), 4),
        "importance_ratio_max": round(max(metrics[f"{RATIO}/max"] for metrics in history), 4),
        "steps_s": round(sum(metrics["step_time"] for metrics in history), 1),
    }


def write(out: Path, runs: list[dict[str, Any]], steps: int) -> None:
    engine_version = runs[-1]["vllm"]
    result = {
        **run_environment("vllm", engine_version),
        "steps": steps,
        "reward": "share of lower-case letters, mean of the first and the last 5 steps, and of every fifth step",
        "importance_ratio": "of whole completions (sequence_mask, TRL's default)",
        "runs": [{name: value for name, value in run.items() if name != "vllm"} for run in runs],
    }
    out.write_text(json.dumps(result, indent=1) + "\n")


def table(runs: list[dict[str, Any]]) -> str:
    """The runs as a Markdown table."""
    rows = [
        "| seed | arm | reward, first steps | last steps | logprob gap, mean | worst step | importance ratios |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        cells = (
            f"{run['seed']}",
            run["arm"],
            f"{run['reward_first_steps']:.2f}",
            f"{run['reward_last_steps']:.2f}",
            f"{run['logprob_gap_mean']:.1e}",
            f"{run['logprob_gap_of_worst_step']:.1e}",
            f"{run['importance_ratio_min']:.2f} to {run['importance_ratio_max']:.2f}",
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
