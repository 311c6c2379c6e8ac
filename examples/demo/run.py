"""What `make demo` runs: GRPO on this machine's CPU, against a real vLLM server that loads the adapter every step.

Makes a tiny model, starts the server, runs examples/grpo.py, stops the server, and shows how the reward rose and what
each sync took. With `--colocate` there is no server: vLLM runs in the trainer's process. Exits with an error if the run
did not learn. Arguments that this file does not know go to examples/grpo.py: `python examples/demo/run.py
--lora_dropout 0.05` shows what dropout does to the logprob gap.
"""

import argparse
import ast
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from make_model import make_model
from tqdm import tqdm
from transformers.utils import logging as transformers_logging
from vllm_server import ServerStartError, VLLMServer

GRPO_SCRIPT = Path(__file__).resolve().parents[1] / "grpo.py"
EDGE_STEPS = 5  # steps averaged at either end of the run for the rise of the reward
LORA_RANK = 8
LEARNED_REWARD = 0.5  # the untrained model gets 0.13, a uniform choice among ASCII characters 0.2
# Of the server and the trainer, as they should have the same. A CPU without AVX-512 takes up to 25 times as long for a
# product in bfloat16 (torch 2.13), and a step with autocast to it, TRL's default, took 6 s instead of 2.5.
DTYPE = "float32"
PACKAGE_LINE = "LoRA adapter sync:"  # how the package's own line at the start begins
Metrics = dict[str, Any]  # what the trainer logged at one step


class DemoError(Exception):
    """The demo failed, for the reason given."""


def training_command(
    model: Path, base_url: str | None, output_dir: Path, steps: int, more: Sequence[str] = ()
) -> list[str]:
    """The command of examples/grpo.py; of an argument given twice, the one in `more` counts.

    Args:
        base_url: of the server; None for vLLM in the trainer's process.
    """
    # The user's own accelerate configuration could change these, so the command sets them.
    launch = "launch --num_processes 1 --num_machines 1 --cpu --mixed_precision no --dynamo_backend no"
    # One thread, as for the server: more would wait for each other. Quiet, so that an error is the output's end.
    other = "--num_cpu_threads_per_process 1 --quiet"
    # TRL's 0.05 would set the trainer's log-probabilities apart from the server's, which drops nothing.
    dropout = "--lora_dropout 0"
    policy = f"--use_peft --lora_r {LORA_RANK} --lora_alpha 16 --lora_target_modules all-linear {dropout}"
    server = f"--vllm_mode server --vllm_server_base_url {base_url}" if base_url else "--vllm_max_model_length 256"
    sync = "--vllm_sync_strategy lora_adapter --lora_sync_timeout 30"
    # A reward of a whole completion is more informative about each token of a short one, and a group's mean is a better
    # baseline in a large one. With half the completions of twice the length, the reward of some seeds stays low for 30
    # steps.
    batch = "--per_device_train_batch_size 64 --num_generations 16 --max_completion_length 16"
    # Transformers' own rate falls to zero, at which a run that begins to learn late stops half way.
    schedule = f"--max_steps {steps} --learning_rate 1e-2 --lr_scheduler_type constant --beta 0"
    # The second turns autocast off, and the third is what vLLM computes in if it is in the trainer's process.
    precision = f"--dtype {DTYPE} --bf16 False --lora_sync_dtype {DTYPE}"
    output = "--logging_steps 1 --report_to none --save_strategy no --disable_tqdm True --use_cpu True"
    return [
        str(Path(sys.executable).with_name("accelerate")),
        *f"{launch} {other}".split(),
        str(GRPO_SCRIPT),
        *("--model_name_or_path", str(model)),
        *("--output_dir", str(output_dir)),
        *f"{policy} --use_vllm {server} {sync} {batch} {schedule} {precision} {output}".split(),
        *more,
    ]


def train(command: list[str], output_dir: Path, log_path: Path, steps: int) -> list[Metrics]:
    """Run the training script with progress shown, and return what it logged at each step."""
    state_path = output_dir / "trainer_state.json"
    state_path.unlink(missing_ok=True)  # an earlier run's numbers must not pass for this one's
    done = 0
    # The bar disables itself where there is no terminal; a line every few steps takes its place.
    with log_path.open("w") as log, running(command) as process, tqdm(total=steps, disable=None, unit="step") as bar:
        for line in process.stdout or ():
            log.write(line)
            log.flush()
            if line.startswith(PACKAGE_LINE):
                bar.write(f"      {line.rstrip()}")
            if metrics := parse_metrics(line):
                done += 1
                bar.update()
                bar.set_postfix_str(reward := f"reward {float(metrics['reward']):.2f}")
                if bar.disable and is_shown(done):
                    print(f"      step {done} of {steps}: {reward}", flush=True)
    if process.returncode:
        code = process.returncode
        raise DemoError(f"The training script ended with code {code}. The end of its output:\n{tail(log_path)}")
    history = json.loads(state_path.read_text())["log_history"]
    return [metrics for metrics in history if "reward" in metrics]


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process whose whole group has ended when the block is left, however it is left."""
    process = subprocess.Popen(
        command,
        env={"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", **os.environ, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        yield process
        process.wait()
    finally:
        end_group(process)


def end_group(process: subprocess.Popen[str], patience_s: float = 10.0) -> None:
    """Interrupt the process's group, so that the trainer still removes its adapters; then end what is left of it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            process.poll()
            os.killpg(process.pid, 0)  # raises once the group is empty
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def is_shown(step: int) -> bool:
    return step == 1 or step % 5 == 0


def parse_metrics(line: str) -> Metrics | None:
    """Return the metrics of a step, which transformers prints as a Python dict when its progress bar is off."""
    if not line.startswith("{") or "'reward'" not in line:
        return None
    try:
        return dict(ast.literal_eval(line.strip()))
    except (SyntaxError, ValueError):
        return None


def tail(path: Path, lines: int = 30) -> str:
    return "\n".join(path.read_text().splitlines()[-lines:])


def mean_reward(history: list[Metrics]) -> float:
    return statistics.fmean(metrics["reward"] for metrics in history)


def sync_ms(metrics: Metrics) -> float:
    return 1000 * float(metrics["lora_sync/total_s"])


def print_table(history: list[Metrics]) -> None:
    header = ("step", "reward", "adapter version", "sync ms", "logprob gap", "importance ratios")
    rule = "  ".join("-" * len(name) for name in header)
    print("  ".join(header), rule, sep="\n")
    for metrics in history:
        if not is_shown(metrics["step"]):
            continue
        row = (
            f"{metrics['step']}",
            f"{metrics['reward']:.3f}",
            f"{metrics['lora_sync/version']:.0f}",
            f"{sync_ms(metrics):.1f}",
            f"{metrics['sampling/sampling_logp_difference/mean']:.1e}",
            " to ".join(f"{metrics[f'sampling/importance_sampling_ratio/{end}']:.2f}" for end in ("min", "max")),
        )
        print("  ".join(cell.rjust(len(name)) for cell, name in zip(row, header, strict=True)))
    print(rule)


def plot(history: list[Metrics], path: Path) -> None:
    """Draw the reward over the steps, and below it what each sync spent its time on."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    steps = [metrics["step"] for metrics in history]
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 7), sharex=True, layout="constrained")
    top.plot(steps, [metrics["reward"] for metrics in history], marker="o", markersize=3)
    # As the reward rises, there is room below its first steps and above its last ones.
    ends = ((history[:EDGE_STEPS], "first", "left", -18), (history[-EDGE_STEPS:], "last", "right", 14))
    for part, label, side, offset in ends:
        mean, edge = mean_reward(part), part[0 if side == "left" else -1]["step"]
        top.hlines(mean, part[0]["step"], part[-1]["step"], color="tab:red", linewidth=3)
        text = f"mean of the {label} {len(part)} steps: {mean:.2f}"
        top.annotate(text, (edge, mean), (0, offset), textcoords="offset points", ha=side, color="tab:red")
    top.set(ylabel="reward (share of lower-case letters)", ylim=(0, 1))
    top.set_title("GRPO against vLLM on a CPU, which loads a new LoRA adapter every step")

    below_ms = [0.0] * len(history)
    for phase in ("gather", "write", "load"):
        phase_ms = [1000 * metrics[f"lora_sync/{phase}_s"] for metrics in history]
        bottom.bar(steps, phase_ms, bottom=below_ms, label=phase)
        below_ms = [below + own for below, own in zip(below_ms, phase_ms, strict=True)]
    bottom.scatter(steps, [sync_ms(metrics) for metrics in history], marker="_", color="black", label="whole sync")
    bottom.set(xlabel="training step", ylabel="time of one sync (ms)", xlim=(0, steps[-1] + 1))
    bottom.set_ylim(bottom=0)
    bottom.legend(ncols=4, loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
    for axes in (top, bottom):
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def report(history: list[Metrics], picture: Path, started: float) -> None:
    """Print the table and the verdict; raises DemoError if the run did not learn."""
    print()
    print_table(history)
    first, last = mean_reward(history[:EDGE_STEPS]), mean_reward(history[-EDGE_STEPS:])
    times_ms = [sync_ms(metrics) for metrics in history]
    print(f"Reward: mean {first:.3f} in the first {EDGE_STEPS} steps, {last:.3f} in the last: {last / first:.1f}x.")
    size_kb = history[-1]["lora_sync/bytes"] / 1000
    print(f"Sync: median {statistics.median(times_ms):.1f} ms, longest {max(times_ms):.1f} ms, {size_kb:.0f} kB each.")
    plot(history, picture)
    print(f"Picture: {picture}")
    print(f"The whole run took {time.monotonic() - started:.0f} s.")
    check_learned(history)


def is_learned(history: list[Metrics]) -> bool:
    return mean_reward(history[-EDGE_STEPS:]) >= LEARNED_REWARD


def check_learned(history: list[Metrics]) -> None:
    """Raise DemoError if the reward at the end is not what a run that learns has."""
    if not is_learned(history):
        first, last = mean_reward(history[:EDGE_STEPS]), mean_reward(history[-EDGE_STEPS:])
        raise DemoError(
            f"The run did not learn: the mean reward went from {first:.3f} in the first {EDGE_STEPS} steps to "
            f"{last:.3f} in the last, and at least {LEARNED_REWARD} is expected after 40 steps. "
            "benchmarks/results/demo-seeds-cpu.json has runs of ten seeds that learned."
        )


def run(folder: Path, steps: int, seed: int, training_args: Sequence[str] = (), *, colocate: bool = False) -> None:
    started = time.monotonic()
    history = (play_in_process if colocate else play)(folder, steps, seed, training_args)
    report(history, folder / "demo.png", started)


def play(
    folder: Path, steps: int, seed: int, training_args: Sequence[str] = (), server_args: Sequence[str] = ()
) -> list[Metrics]:
    """Make the model, train it against its own server, and return what was logged at each step.

    Args:
        folder: gets model, logs and the trained adapter.
        seed: of the model's random weights.
        training_args: appended to the training script's, so they win.
        server_args: appended to vLLM's, likewise.
    """
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    transformers_logging.disable_progress_bar()
    model = make_model(folder / "model", seed=seed)
    server_log, train_log = folder / "server.log", folder / "train.log"
    print(f"[1/4] A tiny Qwen3 with random weights is in {model}.", flush=True)
    print(f"[2/4] Starting vLLM; its log is {server_log}.", flush=True)
    with VLLMServer(
        model,
        served_model_name="demo",
        max_lora_rank=LORA_RANK,
        log_path=server_log,
        extra_args=["--dtype", DTYPE, *server_args],
    ) as server:
        print(f"      Ready on {server.base_url} after {time.monotonic() - started:.0f} s.", flush=True)
        print(f"[3/4] Training for {steps} steps; the log is {train_log}.", flush=True)
        command = training_command(model, server.base_url, folder / "training", steps, training_args)
        try:
            history = train(command, folder / "training", train_log, steps)
        except DemoError as error:
            if server.is_running():
                raise
            raise DemoError(f"{error}\n\nThe server had ended. The end of its log:\n{server.log_tail()}") from error
    print("[4/4] The server is stopped.", flush=True)
    return history


def play_in_process(folder: Path, steps: int, seed: int, training_args: Sequence[str] = ()) -> list[Metrics]:
    """As `play`, with vLLM in the trainer's process."""
    folder.mkdir(parents=True, exist_ok=True)
    transformers_logging.disable_progress_bar()
    model, train_log = make_model(folder / "model", seed=seed), folder / "train.log"
    print(f"[1/2] A tiny Qwen3 with random weights is in {model}.", flush=True)
    print(f"[2/2] Training for {steps} steps, with vLLM in the trainer's process; the log is {train_log}.", flush=True)
    return train(
        training_command(model, None, folder / "training", steps, training_args), folder / "training", train_log, steps
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("demo-output"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="of the model's random weights")
    parser.add_argument("--colocate", action="store_true", help="run vLLM in the trainer's process, without a server")
    args, training_args = parser.parse_known_args()
    # The server and the training script are stopped on the way out, which a plain SIGTERM would skip.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        run(args.output_dir, args.steps, args.seed, training_args, colocate=args.colocate)
    except (DemoError, ServerStartError) as error:
        sys.exit(f"\nThe demo failed. {error}\n\nAll logs are in {args.output_dir}/.")
    except KeyboardInterrupt:
        sys.exit("\nInterrupted; the server and the training script are stopped.")


if __name__ == "__main__":
    main()
