"""What sampling the next batch while the trainer works on this one gains, and what it costs in reward.

    python benchmarks/overlap.py --seeds 1 2 3 4 5 --learning-rates 1e-3 1e-2          # the demo's task, on this CPU

    python benchmarks/overlap.py --shape 8b --rank 32 --server-gpu 1 --learning-rates 1e-5 --steps 12 --rounds 2 \
        --completions 64 --per-device 8 --completion-tokens 512                          # a GPU each

Runs of GRPO with the reward of the demo, one after the other on one server: without overlap, and with it for two modes
of TRL's importance sampling correction. In each round every arm runs once, so that no arm has the quiet hours for
itself. Keeps of each run the reward, the importance ratios, the share of masked sequences and the seconds of its steps,
and of the first run of each arm when the server sampled and what the trainer did meanwhile, which is also drawn.

A step lasts from the end of the one before to its own end. The seed is that of the adapter and of the order of the
data; two runs of one seed differ, because the server samples as requests come.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "examples"), str(ROOT / "examples" / "demo")]

if "--server-gpu" in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"  # Transformers spreads a model over all that it sees

import httpx  # noqa: E402
import torch  # noqa: E402
from default_runs import PARTS, server  # noqa: E402
from grpo import builtin_prompts, lowercase_reward  # noqa: E402
from make_model import make_model  # noqa: E402
from peft import LoraConfig  # noqa: E402
from run_environment import run_environment  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from versus.results import command_line  # noqa: E402
from versus.servers import gpu_names  # noqa: E402
from versus.shapes import SHAPES, write_model  # noqa: E402
from versus.timelines import chart  # noqa: E402
from vllm_server import DEFAULT_PYTHON, VLLMServer  # noqa: E402

from trl_lora_sync import GRPOConfig, GRPOTrainer  # noqa: E402

ARMS: dict[str, dict[str, Any]] = {
    "no overlap": {},
    "overlap, sequence_mask": {"lora_sync_overlap": 1},
    "overlap, token_truncate": {"lora_sync_overlap": 1, "vllm_importance_sampling_mode": "token_truncate"},
}
EDGE_STEPS = 5
RATIO = "sampling/importance_sampling_ratio"
# Steps that are drawn, counted from the first; those before are still warming up.
DRAWN = range(3, 7)
PLACES = ("--model", "--url", "--server-python", "--out")
Span = tuple[str, float, float]


def main() -> None:
    args = parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server and the folder go, too
    on_gpu = args.server_gpu is not None
    torch.set_num_threads(torch.get_num_threads() if on_gpu else 1)
    runs: list[dict[str, Any]] = []
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="overlap-", dir="/dev/shm") as folder,
        serving(args, Path(folder), on_gpu=on_gpu) as (model, url),
    ):
        version = httpx.get(f"{url}/version", timeout=30, trust_env=False).json()["version"]
        for number in range(args.rounds):
            for seed in args.seeds:
                for rate in args.learning_rates:
                    for arm in args.arms:
                        place = Path(folder) / f"run-{len(runs)}"
                        print(f"Round {number}, learning rate {rate:g}, seed {seed}, {arm}", flush=True)
                        runs.append(measure(args, arm, rate, seed, model, url, place, on_gpu=on_gpu))
                        # After each run, so that an interrupted benchmark keeps the others.
                        write(args, runs, version)
    print(table(runs))


@contextmanager
def serving(args: argparse.Namespace, folder: Path, *, on_gpu: bool) -> Iterator[tuple[Path, str]]:
    """The model, and the URL of a server for it."""
    if args.url:
        yield args.model, args.url
        return
    if not on_gpu:
        model = args.model or make_model(folder / "model")
        with VLLMServer(model, python=args.server_python, log_path=args.out.with_suffix(".server.log")) as running:
            yield model, running.base_url
        return
    model = args.model or write_model(folder / f"qwen3-{args.shape}", args.shape, "cuda")
    with server(model, args, on_gpu=True) as url:
        yield model, url


class Watch(TrainerCallback):
    """Notes when the server samples, and what the trainer does meanwhile."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.ends: list[float] = []

    def follow(self, trainer: Any) -> None:
        generation = trainer.vllm_generation
        generation.fleet.generate = self._noting_async("generation", generation.fleet.generate)
        for owner, name, what in (
            (generation, "sync_weights", "sync"),
            (generation, "generate", "waiting"),
        ):
            setattr(owner, name, self._noting(what, getattr(owner, name)))

    def _noting(self, what: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return act(*args, **kwargs)
            finally:
                self.spans.append((what, started, time.perf_counter()))

        return noted

    def _noting_async(self, what: str, act: Callable[..., Any]) -> Callable[..., Any]:
        async def noted(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return await act(*args, **kwargs)
            finally:
                self.spans.append((what, started, time.perf_counter()))

        return noted

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())

    def steps_s(self) -> list[float]:
        return [end - start for start, end in zip(self.ends, self.ends[1:], strict=False)]

    def drawn(self) -> dict[str, Any]:
        """The spans of the steps that are drawn, in seconds from the first one's start."""
        steps = [step for step in DRAWN if step + 1 < len(self.ends)]
        if not steps:
            return {}
        start, end = self.ends[steps[0]], self.ends[steps[-1] + 1]
        spans = [
            (what, round(max(since, start) - start, 3), round(min(until, end) - start, 3))
            for what, since, until in sorted(self.spans, key=lambda span: span[1])
            if until > start and since < end and until - since > 1e-3
        ]
        return {
            "steps": [round(self.ends[step] - start, 3) for step in steps],
            "end": round(end - start, 3),
            "spans": spans,
        }


def measure(
    args: argparse.Namespace, arm: str, rate: float, seed: int, model: Path, url: str, folder: Path, *, on_gpu: bool
) -> dict[str, Any]:
    """One run, and what the trainer logged of it, summed up."""
    watch = Watch()
    config = GRPOConfig(
        output_dir=str(folder),
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=url,
        vllm_sync_strategy="lora_adapter",
        lora_sync_serving="fused" if "--fused" in args.serve else "runtime",
        per_device_train_batch_size=args.per_device,
        gradient_accumulation_steps=args.completions // args.per_device,
        num_generations=args.generations,
        max_completion_length=args.completion_tokens,
        generation_kwargs={"ignore_eos": True} if on_gpu else None,
        max_steps=args.steps,
        learning_rate=rate,
        seed=seed,
        beta=0.0,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=not on_gpu,
        bf16=on_gpu,
        gradient_checkpointing=not args.no_checkpointing,
        model_init_kwargs={"dtype": "bfloat16" if on_gpu else "float32"},
        **ARMS[arm],
    )
    torch.manual_seed(seed)
    trainer = GRPOTrainer(
        model=str(model),
        args=config,
        reward_funcs=lowercase_reward,
        train_dataset=builtin_prompts(),
        peft_config=LoraConfig(
            r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM"
        ),
        callbacks=[watch],
    )
    watch.follow(trainer)
    trainer.train()
    logged = [row for row in trainer.state.log_history if "reward" in row]
    steps_s = watch.steps_s()
    found = {
        "arm": arm,
        "learning_rate": rate,
        "seed": seed,
        "reward_first_steps": _mean(logged[:EDGE_STEPS], "reward"),
        "reward_last_steps": _mean(logged[-EDGE_STEPS:], "reward"),
        "reward_of_steps": [round(row["reward"], 3) for row in logged],
        "importance_ratio_min": round(min(row[f"{RATIO}/min"] for row in logged), 4),
        "importance_ratio_mean": _mean(logged, f"{RATIO}/mean"),
        "importance_ratio_max": round(max(row[f"{RATIO}/max"] for row in logged), 4),
        "logprob_gap_mean": _mean(logged, "sampling/sampling_logp_difference/mean"),
        "step_s_median": round(statistics.median(steps_s[1:]), 3),
        "steps_s": [round(seconds, 3) for seconds in steps_s],
        "generation_s_median": round(
            statistics.median(end - start for what, start, end in watch.spans if what == "generation"), 3
        ),
        "syncs": [{part: row[f"lora_sync/{part}"] for part in PARTS} for row in logged],
        "timeline": watch.drawn(),
    }
    if "lora_sync_overlap" in ARMS[arm]:
        ahead = [row for row in logged if row["lora_sync/version_lag"] == 1]
        found |= {
            "batches_sampled_ahead": len(ahead),
            "masked": _mean(logged, "lora_sync/overlap_masked"),
            "hidden": _mean(ahead, "lora_sync/overlap_hidden"),
            "wait_s": _mean(ahead, "lora_sync/overlap_wait_s"),
        }
    return found


def _mean(rows: Sequence[dict[str, Any]], name: str) -> float:
    return round(statistics.fmean(row[name] for row in rows), 4)


def write(args: argparse.Namespace, runs: list[dict[str, Any]], version: str) -> None:
    """The JSON, with the timeline of each arm's first run, and the chart of these."""
    timelines: dict[str, Any] = {}
    for run in runs:
        timelines.setdefault(run["arm"], run["timeline"])
    result = {
        "benchmark": "overlap",
        **run_environment("vllm", version),
        "gpus": gpu_names() if args.server_gpu is not None else [],  # the server's, too
        "command": command_line(PLACES),
        "shape": args.shape if args.server_gpu is not None else "demo",
        "serve": args.serve,
        "lora_rank": args.rank,
        "completions": args.completions,
        "completion_tokens": args.completion_tokens,
        "steps": args.steps,
        "reward": "share of lower-case letters; mean of the first and the last 5 steps",
        "summary": summary(runs),
        "runs": [{name: value for name, value in run.items() if name != "timeline"} for run in runs],
        "timelines": timelines,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    args.out.with_suffix(".svg").write_text(chart({arm: one for arm, one in timelines.items() if one}))


def summary(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each learning rate and arm: the mean over its runs, and the step against the one without overlap."""
    rows = []
    for rate in dict.fromkeys(run["learning_rate"] for run in runs):
        of_rate = [run for run in runs if run["learning_rate"] == rate]
        for arm in dict.fromkeys(run["arm"] for run in of_rate):
            found = [run for run in of_rate if run["arm"] == arm]
            row: dict[str, Any] = {"learning_rate": rate, "arm": arm, "runs": len(found)}
            row |= {
                name: _mean(found, name) for name in ("reward_last_steps", "importance_ratio_mean", "step_s_median")
            }
            row["reward_last_steps_of_runs"] = [run["reward_last_steps"] for run in found]
            row["importance_ratios"] = [
                min(run["importance_ratio_min"] for run in found), max(run["importance_ratio_max"] for run in found)
            ]  # fmt: skip
            row |= {name: _mean(found, name) for name in ("masked", "hidden", "wait_s") if name in found[0]}
            plain = [run["step_s_median"] for run in of_rate if run["arm"] == "no overlap"]
            if plain:
                row["step_against_no_overlap"] = round(row["step_s_median"] / statistics.fmean(plain), 3)
            rows.append(row)
    return rows


def table(runs: Sequence[dict[str, Any]]) -> str:
    """The summary as a Markdown table."""
    lines = [
        "| learning rate | arm | reward, last 5 steps: mean (each seed) | importance ratios | masked | step | hidden |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in summary(runs):
        each = ", ".join(f"{value:.2f}" for value in row["reward_last_steps_of_runs"])
        low, high = row["importance_ratios"]
        cells = (
            f"{row['learning_rate']:g}",
            row["arm"],
            f"{row['reward_last_steps']:.2f} ({each})",
            f"{low:.2f} to {high:.2f}",
            f"{100 * row['masked']:.1f} %" if "masked" in row else "",
            f"{row['step_s_median']:.2f} s ({row.get('step_against_no_overlap', 1.0):.2f}x)",
            f"{100 * row['hidden']:.0f} %" if "hidden" in row else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    add("--seeds", type=int, nargs="+", default=[1])
    add("--learning-rates", type=float, nargs="+", default=[1e-2])
    add("--rounds", type=int, default=1)
    add("--steps", type=int, default=30)
    add("--rank", type=int, default=8)
    add("--completions", type=int, default=64, help="of a step (default: 64)")
    add("--per-device", type=int, default=64, help="completions of one forward pass (default: 64)")
    add("--generations", type=int, default=16, help="completions of a prompt (default: 16)")
    add("--completion-tokens", type=int, default=16, help="at most, of each completion (default: 16)")
    add("--no-checkpointing", action="store_true", help="gradient_checkpointing=False, where the memory allows it")
    add("--shape", choices=list(SHAPES), default="8b", help="on GPUs (default: 8b)")
    add("--model", type=Path, help="folder of a model, if it has been made already")
    add("--url", help="a server of that model that is running already")
    add(
        "--server-gpu", type=int, help="number of the server's GPU; the trainer's is 0. Without it, all runs on the CPU"
    )
    add("--gpu-share", type=float, default=0.8, help="of that GPU's memory (default: 0.8)")
    add("--serve", default="", help="more options of `trl-lora-sync serve` on GPUs")
    add("--server-python", type=Path, default=DEFAULT_PYTHON if DEFAULT_PYTHON.exists() else Path(sys.executable))
    add("--out", type=Path, default=ROOT / "benchmarks" / "results" / "overlap-cpu.json")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
