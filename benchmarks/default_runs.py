"""What a sync takes in whole GRPO runs with default settings, one after the other on one server.

    python benchmarks/default_runs.py --shape 8b --runs 2 --steps 12                 # a GPU for each, or one for both
    python benchmarks/default_runs.py --shape tiny --runs 2 --steps 4                # on a CPU, to see that it works

Makes a random-weight model in the shape of Qwen3, starts a server for it with `trl-lora-sync serve vllm MODEL`, and
trains with examples/grpo.py through `accelerate launch`, at the learning rate that is given. No setting of
`lora_sync_*` is changed. Keeps every sync of every run with its parts. The median leaves out the first sync of each
run, which also compares the version with the trainer.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "demo")]

from grpo_run import train  # noqa: E402
from run_environment import run_environment  # noqa: E402
from server_process import running  # noqa: E402
from versus.results import command_line  # noqa: E402
from versus.shapes import SHAPES, write_model  # noqa: E402
from vllm_server import CPU_ARGS, CPU_ENV, DEFAULT_PYTHON, hold_free_port  # noqa: E402

PLACES = ("--model", "--server-python", "--out")
PARTS = ("total_s", "gather_s", "write_s", "load_s", "verify_s", "verified", "version")


def main() -> None:
    args = parse_args()
    on_gpu = args.shape != "tiny"
    if on_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"  # Transformers spreads a model over all that it sees
    with tempfile.TemporaryDirectory(prefix="default-runs-", dir="/dev/shm") as folder:
        model = args.model or write_model(Path(folder) / f"qwen3-{args.shape}", args.shape, "cuda" if on_gpu else "cpu")
        with server(model, args, on_gpu=on_gpu) as url:
            version = httpx.get(f"{url}/version", timeout=30, trust_env=False).json()["version"]
            runs = []
            for number in range(args.runs):
                started = time.perf_counter()
                history = run(model, url, args, Path(folder) / f"run-{number}", on_gpu=on_gpu)
                syncs = [{name: row[f"lora_sync/{name}"] for name in PARTS} for row in history]
                steps = [row["step_time"] for row in history]
                runs.append({"syncs": syncs, "step_s": steps, "seconds": time.perf_counter() - started})
                print(f"run {number + 1}: " + ", ".join(f"{sync['total_s']:.3f}" for sync in syncs), flush=True)
    later = [sync for one in runs for sync in one["syncs"][1:]]
    result = {
        "benchmark": "default_runs",
        **run_environment("vllm", version),
        "command": command_line(PLACES),
        "shape": args.shape,
        "lora_rank": args.rank,
        "learning_rate": args.learning_rate,
        "serve": args.serve,
        "median_after_the_first": {name: statistics.median(sync[name] for sync in later) for name in PARTS[:5]},
        "largest_after_the_first_s": max(sync["total_s"] for sync in later),
        "all_verified": all(sync["verified"] == 1.0 for one in runs for sync in one["syncs"]),
        "runs": runs,
    }
    kept = json.loads(args.out.read_text()) if args.out.exists() else []
    args.out.write_text(json.dumps([*kept, result], indent=1) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name.startswith(("median", "largest", "all"))}))


def run(model: Path, url: str, args: argparse.Namespace, folder: Path, *, on_gpu: bool) -> list[dict[str, Any]]:
    """The log of each step of one run."""
    more = ["--learning_rate", str(args.learning_rate), "--num_generations", "8"]
    more += ["--per_device_train_batch_size", "8", "--max_completion_length", str(args.completion_tokens)]
    more += ["--gradient_accumulation_steps", str(args.completions // 8), "--lora_dropout", "0"]
    more += [] if on_gpu else ["--use_cpu", "--bf16", "False"]
    more += ["--lora_sync_serving", "fused"] if "--fused" in args.serve else []
    return train(argparse.Namespace(model=model, url=url, steps=args.steps, rank=args.rank), more, folder)


@contextmanager
def server(model: Path, args: argparse.Namespace, *, on_gpu: bool, engine_args: Sequence[str] = ()) -> Iterator[str]:
    """The URL of a server as `trl-lora-sync serve` starts it, with some options of the engine, on the last GPU."""
    with hold_free_port() as holder:
        port = holder.getsockname()[1]
        command = [sys.executable, "-m", "trl_lora_sync.cli.main", "serve", "vllm", str(model), "--port", str(port)]
        command += ["--python", str(args.server_python), *args.serve.split()]
        command += [] if "--fused" in args.serve else ["--lora-rank", str(args.rank)]
        command += ["--", "--served-model-name", "base", "--max-model-len", "1024", *engine_args]
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        if on_gpu:
            command += ["--gpu-memory-utilization", str(args.gpu_share)]
            env |= {"CUDA_VISIBLE_DEVICES": str(args.server_gpu), "VLLM_USE_FLASHINFER_SAMPLER": "0"}
        else:
            command += CPU_ARGS
            env |= CPU_ENV
        with running(command, port, env, args.out.with_suffix(".server.log")) as started:
            yield started.url


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", choices=list(SHAPES), default="8b")
    add("--model", type=Path, help="folder of a model of that shape, if it has been made already")
    add("--rank", type=int, default=32)
    add("--runs", type=int, default=2)
    add("--steps", type=int, default=12)
    add("--learning-rate", type=float, default=1e-6)
    add("--completions", type=int, default=16, help="of a step (default: 16)")
    add("--completion-tokens", type=int, default=64, help="at most, of each completion (default: 64)")
    add("--serve", default="", help="more options of `trl-lora-sync serve`, such as --fused")
    add("--server-python", type=Path, default=DEFAULT_PYTHON if DEFAULT_PYTHON.exists() else Path(sys.executable))
    add("--server-gpu", type=int, default=0, help="number of the server's GPU (default: 0, the trainer's)")
    add("--gpu-share", type=float, default=0.4, help="of the GPU's memory for the server (default: 0.4)")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results" / "default-runs.json")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
