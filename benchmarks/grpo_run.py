"""A whole GRPO run of examples/grpo.py against a server that is running, with what matters of it kept as JSON.

    python benchmarks/grpo_run.py --model MODEL --url http://localhost:30000 --steps 30 -- --learning_rate 2e-3

Keeps, per step, the reward, the adapter version, the seconds of the sync by phase, the distance between the server's
and the trainer's log-probabilities, and the step's own seconds. Ends with an error if the reward did not at least
double from the mean of the first to the mean of the last five steps.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from run_environment import run_environment

from trl_lora_sync.addresses import is_local_url
from trl_lora_sync.engines.base import Deadline
from trl_lora_sync.engines.connect import connect_engine
from trl_lora_sync.runtime import Blocking, run

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "grpo.py"
KEPT = {
    "reward": "reward",
    "version": "lora_sync/version",
    "sync_s": "lora_sync/total_s",
    "gather_s": "lora_sync/gather_s",
    "write_s": "lora_sync/write_s",
    "load_s": "lora_sync/load_s",
    "bytes": "lora_sync/bytes",
    "logprob_gap": "sampling/sampling_logp_difference/mean",
    "importance_ratio": "sampling/importance_sampling_ratio/mean",
    "step_s": "step_time",
}


def main() -> None:
    args, more = parse_args()
    engine = Blocking(
        run(
            connect_engine(
                args.url, engine="auto", is_local=is_local_url(args.url), deadline=Deadline.after(300.0, "Connecting")
            )
        )
    )
    served = engine.capabilities
    with tempfile.TemporaryDirectory(prefix="grpo-run-") as folder:
        history = train(args, more, Path(folder))
    steps = [{name: row[metric] for name, metric in KEPT.items() if metric in row} for row in history]
    rewards = [step["reward"] for step in steps]
    first, last = statistics.mean(rewards[:5]), statistics.mean(rewards[-5:])
    result = {
        **run_environment(served.engine, served.version),
        "lora_rank": args.rank,
        "reward_first_5": first,
        "reward_last_5": last,
        "median": {name: statistics.median(step[name] for step in steps if name in step) for name in steps[0]},
        "steps": steps,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for number, step in enumerate(steps, start=1):
        if number == 1 or number % 5 == 0:
            print(number, {name: round(value, 4) for name, value in step.items()})
    print(f"reward {first:.3f} -> {last:.3f}")
    if last < 2 * first:
        raise SystemExit("The reward did not double.")


def train(args: argparse.Namespace, more: list[str], folder: Path) -> list[dict[str, Any]]:
    launch = "--num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no"
    policy = f"--use_peft --lora_r {args.rank} --lora_alpha {2 * args.rank} --lora_target_modules all-linear"
    server = f"--use_vllm --vllm_mode server --vllm_server_base_url {args.url} --vllm_sync_strategy lora_adapter"
    output = "--beta 0 --logging_steps 1 --report_to none --save_strategy no --disable_tqdm True"
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch", *launch.split(), str(SCRIPT)),
        *("--model_name_or_path", str(args.model), "--dtype", "bfloat16", "--output_dir", str(folder)),
        *f"{policy} {server} {output} --max_steps {args.steps}".split(),
        *more,
    ]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"The run failed. The end of its output:\n{ended.stdout[-4000:]}")
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [row for row in history if "reward" in row]


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the served base model")
    parser.add_argument("--url", required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/grpo_run.json"))
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return parser.parse_args(arguments[:end]), arguments[end + 1 :]


if __name__ == "__main__":
    main()
