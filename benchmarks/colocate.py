"""Colocate mode: TRL's own and this package's, the same GRPO run one after the other on one GPU.

    python benchmarks/colocate.py --shape 8b                          # vLLM beside TRL in this environment, one GPU
    python benchmarks/colocate.py --shape tiny --arms runtime         # on a CPU, to see that it works
    python benchmarks/colocate.py --shape 8b --launch fsdp2 --arms runtime fused                   # two GPUs
    python benchmarks/colocate.py --shape 8b --launch ddp --tensor-parallel 2 --arms weights runtime

Makes a random-weight model in the shape of Qwen3 and trains it in a process for each arm:

    weights          TRL's own: merges into the trainer's base, loads every tensor into vLLM, unmerges
    runtime          adapters in vLLM's slots, a base for each of the two
    runtime-shared   the same, with one base for both
    fused            merged into vLLM's own weights, computed from the trainer's base
    fused-shared     one base; the adapter is folded into it while vLLM samples

Each process reports the time until the trainer is ready, each step with its sync and its generation, tokens per second
through `trainer.vllm_generation.llm`, the GPU memory that the driver reports, and how many elements of the trainer's
base differ from the checkpoint after training and after `--syncs` further syncs of other adapters. With several
training processes these are the figures of the first one and of its GPU; the others do the same beside it.
"""

import argparse
import cProfile
import faulthandler
import json
import multiprocessing
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "demo"), str(ROOT / "benchmarks")]

from colocate_engines import change_engines  # noqa: E402

LAUNCHERS = ROOT / "examples" / "accelerate"
ADAPTER = {"vllm_sync_strategy": "lora_adapter"}
ARMS: dict[str, dict[str, str]] = {
    "weights": {"vllm_sync_strategy": "weights"},
    "runtime": {**ADAPTER, "vllm_colocate_base": "own"},
    "runtime-shared": {**ADAPTER, "vllm_colocate_base": "shared"},
    "fused": {**ADAPTER, "lora_sync_serving": "fused", "vllm_colocate_base": "own"},
    "fused-shared": {**ADAPTER, "lora_sync_serving": "fused", "vllm_colocate_base": "shared"},
}
PROMPTS = ["hello", "world", "the sea", "a small town", "winter", "bread", "an old clock", "rain"]
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PLACES = ("--model", "--out")


def main() -> None:
    args = parse_args()
    if args.arm:
        measure(args)
        return
    from run_environment import run_environment
    from versus.results import command_line

    from trl_lora_sync.colocate.engine import installed_version

    on_gpu = args.shape != "tiny"
    with tempfile.TemporaryDirectory(prefix="colocate-", dir="/dev/shm") as folder:
        model = args.model or written_model(Path(folder) / f"qwen3-{args.shape}", args.shape, on_gpu=on_gpu)
        result: dict[str, Any] = {
            "benchmark": "colocate",
            **run_environment("vllm", installed_version()),
            "command": command_line(PLACES),
            "settings": {name: value for name, value in vars(args).items() if name not in ("model", "out", "arm")},
            "gpu_memory_gib": memory_gib("total") if on_gpu else None,
            "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
            "arms": {},
        }
        if args.out and args.out.exists():  # arms that were measured before, on the same machine
            result["arms"] = json.loads(args.out.read_text())["arms"]
        for arm in args.arms:
            found = result["arms"][arm] = run(
                arm, model, Path(folder), launcher_of(args.launch), on_gpu=on_gpu, limit_s=args.limit
            )
            print(arm, json.dumps(found), flush=True)
            if args.out:  # what is measured is kept if the machine goes
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(result, indent=1) + "\n")


def written_model(folder: Path, shape: str, *, on_gpu: bool) -> Path:
    """Make the model in a process that has ended when this returns: it would have 3 GiB of the GPU until the end."""
    from versus.shapes import write_model

    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(write_model, folder, shape, "cuda" if on_gpu else "cpu").result()


def launcher_of(launch: str | None) -> list[str]:
    if launch is None:
        return [sys.executable]
    return [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(LAUNCHERS / f"{launch}.yaml")]


def run(arm: str, model: Path, folder: Path, launcher: list[str], *, on_gpu: bool, limit_s: float) -> dict[str, Any]:
    """Measure one arm by itself; its outcome, or as much of it as there is and the end of its output."""
    out, log = folder / f"{arm}.json", folder / f"{arm}.log"
    command = [*launcher, __file__, *sys.argv[1:], "--arm", arm, "--model", str(model), "--out", str(out)]
    started, failed = time.perf_counter(), None
    with log.open("wb") as output, driver_memory(on_gpu) as peak:
        try:
            code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=limit_s).returncode
            failed = f"exit code {code}" if code else None
        except subprocess.TimeoutExpired:
            failed = f"still running after {limit_s:.0f} s"
    found = json.loads(out.read_text()) if out.exists() else {}
    found |= {"driver_peak_gib": peak["gib"], "process_s": time.perf_counter() - started}
    if failed or "--profile" in sys.argv:
        text = log.read_text(errors="replace")
        print(text[-6000:], flush=True)
    if failed:
        found |= {"failed": failed, "error": error_of(text)}
    return found


def error_of(output: str) -> str:
    """The last line of a failed process that names an error."""
    lines = [line for line in output.splitlines() if "Error" in line]
    return lines[-1][-400:] if lines else output[-400:]


@contextmanager
def driver_memory(on_gpu: bool) -> Iterator[dict[str, float | None]]:
    """The most memory of the first GPU in use while the block lasts, by the driver's count."""
    found: dict[str, float | None] = {"gib": None}
    if not on_gpu:
        yield found
        return
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(0.2):
            found["gib"] = max(found["gib"] or 0.0, memory_gib("used"))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        is_over.set()
        thread.join()


def memory_gib(which: str) -> float:
    """Memory of the first GPU that this process sees, from the driver: `used` or `total`."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0] or "0"
    query = ["nvidia-smi", f"--query-gpu=memory.{which}", "--format=csv,noheader,nounits", f"--id={gpu}"]
    return float(subprocess.run(query, capture_output=True, text=True, check=True).stdout) / 1024


# In the process of one arm


def measure(args: argparse.Namespace) -> None:
    import torch

    # Where a process is that does not end; the launcher of several ends with them.
    faulthandler.dump_traceback_later(max(1.0, args.limit - 5), exit=True)
    on_gpu = args.shape != "tiny"
    if on_gpu:
        # TRL sets `max_num_seqs` to the completions of one generation batch of a process.
        count = max(args.at_once)
        sizes = [size for size in (1, 2, 4, 8, 16, 24, 32, 64, 128, 256) if size <= count]
        changed: dict[str, Any] = {"max_num_seqs": count, "compilation_config": {"cudagraph_capture_sizes": sizes}}
        changed |= {"kv_cache_memory_bytes": int(args.kv_gib * 2**30)} if args.kv_gib else {}
        changed |= {"enforce_eager": True} if args.eager else {}
        change_engines(**changed)
    started = time.perf_counter()
    parts = start_parts()
    trainer = make_trainer(args, on_gpu=on_gpu)
    ready_s = time.perf_counter() - started
    ready_gib = memory_gib("used") if on_gpu else None
    reserved_ready_gib = torch.cuda.memory_reserved() / 2**30 if on_gpu else None
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    syncs, generations = timed(trainer.vllm_generation, "sync_weights"), timed(trainer.vllm_generation, "generate")
    steps: list[float] = []
    note_steps(trainer, steps)
    trainer.train()
    log = [row for row in trainer.state.log_history if "sampling/sampling_logp_difference/mean" in row]
    found = {
        "ready_s": ready_s,
        "start_parts_s": {name: sum(seconds) for name, seconds in parts.items()},
        "step_s": steps,
        "sync_s": list(syncs),
        "generate_s": list(generations),
        "median_sync_ms": 1e3 * statistics.median(syncs[1:]),
        "median_generate_s": statistics.median(generations[1:]),
        "median_step_s": statistics.median(steps[1:]),
        "logprob_gap": [row["sampling/sampling_logp_difference/mean"] for row in log],
        "verified": [row.get("lora_sync/verified") for row in log],
        "load_s": [row.get("lora_sync/load_s") for row in log],
        "gather_s": [row.get("lora_sync/gather_s") for row in log],
        "kv_cache_tokens": kv_cache_tokens(trainer),
        "driver_ready_gib": ready_gib,
        "reserved_ready_gib": reserved_ready_gib,
        "driver_after_training_gib": memory_gib("used") if on_gpu else None,
        "allocated_peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "reserved_peak_gib": torch.cuda.max_memory_reserved() / 2**30 if on_gpu else None,
        "changed_share_after_training": changed_share(trainer, args.model),
    }
    note(found, args.out)
    trainer.vllm_generation.sync_weights()
    turns = {str(count): tokens_per_s(generate_s, trainer, count, length(count, args.tokens)) for count in args.at_once}
    found["tokens_per_s"] = {count: statistics.median(speeds) for count, speeds in turns.items()}
    found["tokens_per_s_of_turns"] = turns
    found["tokens_per_s_by_trl"] = {
        str(count): statistics.median(tokens_per_s(grpo_s, trainer, count, length(count, args.tokens)))
        for count in args.at_once
    }
    found |= folding(trainer)
    if args.profile:
        print_profile(trainer.vllm_generation.sync_weights)
    note(found, args.out)
    if args.syncs:
        del syncs[:]
        for seed in range(args.syncs):
            perturb(trainer.model, seed)
            trainer.vllm_generation.sync_weights()
            generate_s(trainer, 1, 2)
        found["median_sync_of_many_ms"] = 1e3 * statistics.median(syncs)
        found["changed_share_after_syncs"] = changed_share(trainer, args.model)
    note(found, args.out)


def note(found: dict[str, Any], out: Path) -> None:
    """Keep what has been measured so far, of the first process."""
    if os.environ.get("RANK", "0") == "0":
        out.write_text(json.dumps(found))


def kv_cache_tokens(trainer: Any) -> int:
    """For how many tokens vLLM has memory: 147,456 bytes for each at 8B."""
    cache = trainer.vllm_generation.llm.llm_engine.vllm_config.cache_config
    return int(cache.num_gpu_blocks * cache.block_size)


def folding(trainer: Any) -> dict[str, Any]:
    """The cost of putting the adapter into a shared base and of taking it out, and what is kept meanwhile."""
    base = getattr(getattr(trainer.vllm_generation, "holder", None), "_folded", None)
    if base is None:
        return {}
    folds, unfolds, kept, parts = timed(base, "fold"), timed(base, "unfold"), [], {}
    if base.has_kernels:
        from trl_lora_sync.engine_plugins import folding_kernels

        names = ("make_table", "count_lost", "fold", "take_out", "bit_sums")
        parts = {name: timed(folding_kernels, name) for name in names}
    holder = trainer.vllm_generation.holder
    for _ in range(3):
        with holder.serving(trainer.vllm_generation.active):
            kept.append(base.kept_bytes)
    return {
        "fold_ms": 1e3 * statistics.median(folds),
        "unfold_ms": 1e3 * statistics.median(unfolds),
        "fold_parts_ms": {name: 1e3 * statistics.median(seconds) for name, seconds in parts.items() if seconds},
        "kept_mib": kept[-1] / 2**20,
    }


def print_profile(sync: Callable[[], None]) -> None:
    """Where the time of syncs goes in Python; the GPU's part is in what waits for it."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(10):
        sync()
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(30)


def perturb(model: Any, seed: int) -> None:
    """Another adapter, about as large as a trained one."""
    import torch

    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=1e-3)


def start_parts() -> dict[str, list[float]]:
    """The seconds of the parts of a start from now on: vLLM with its imports, sharing the base, and the proof."""
    import trl.generation.vllm_generation as generation

    from trl_lora_sync.colocate import engine
    from trl_lora_sync.colocate.generation import ColocateGeneration

    parts = {name.strip("_"): timed(ColocateGeneration, name) for name in ("_share_base", "_make_holder", "_prove")}
    parts["vllm"] = timed(engine, "build")
    parts["vllm of TRL"] = timed(generation, "LLM")
    return parts


def make_trainer(args: argparse.Namespace, *, on_gpu: bool) -> Any:
    from datasets import Dataset
    from peft import LoraConfig

    from trl_lora_sync import GRPOConfig, GRPOTrainer

    fields = {
        "output_dir": str(args.out.parent / f"out-{args.arm}"),
        "use_vllm": True,
        "vllm_gpu_memory_utilization": args.utilisation,
        "vllm_enable_sleep_mode": args.sleep,
        "vllm_tensor_parallel_size": args.tensor_parallel,
        "vllm_max_model_length": args.model_length,
        "per_device_train_batch_size": args.per_device,
        "gradient_accumulation_steps": args.completions // args.per_device,
        "num_generations": 8,
        "max_completion_length": args.tokens,
        "max_steps": args.steps,
        "learning_rate": 1e-5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "gradient_checkpointing": True,
        "use_liger_kernel": args.liger,
        "disable_tqdm": True,
        "model_init_kwargs": {"dtype": "bfloat16"},
        "generation_kwargs": {"ignore_eos": True},
    }
    return GRPOTrainer(
        model=str(args.model),
        reward_funcs=lambda completion_ids, **_: [float(len(set(ids))) for ids in completion_ids],
        args=GRPOConfig(**fields, **ARMS[args.arm]),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * 16}),
        peft_config=LoraConfig(r=args.rank, lora_alpha=2 * args.rank, lora_dropout=0, target_modules=PROJECTIONS),
    )


def timed(owner: Any, name: str) -> list[float]:
    """The seconds of each call of a method or function from now on; the GPU is waited for before it and after it."""
    import torch

    seconds: list[float] = []
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        start = time.perf_counter()
        answer = original(*args, **kwargs)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        return answer

    setattr(owner, name, call)
    return seconds


def note_steps(trainer: Any, seconds: list[float]) -> None:
    from transformers import TrainerCallback

    class Clock(TrainerCallback):  # type: ignore[misc]
        started = 0.0

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            seconds.append(time.perf_counter() - self.started)

    trainer.add_callback(Clock())


def changed_share(trainer: Any, model: Path) -> float:
    """The share of the elements of the adapted layers' base weights that differ from the checkpoint."""
    import torch
    from safetensors import safe_open

    layers = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): weight.data
        for name, weight in trainer.model.named_parameters()
        if ".base_layer." in name
    }
    changed = total = 0
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dictionary
                if name in layers:
                    layer = layers[name]
                    layer = layer.full_tensor() if hasattr(layer, "full_tensor") else layer  # FSDP2's
                    original = tensors.get_tensor(name).to(layer.device)
                    # accelerate has FSDP2 keep float32 in mixed precision.
                    changed += int((original.view(torch.int16) != layer.to(original.dtype).view(torch.int16)).sum())
                    total += original.numel()
    return changed / total


def length(at_once: int, tokens: int) -> int:
    """Of completions whose tokens per second are measured: a quarter if there are many, to fit into the KV cache."""
    return tokens if at_once <= 64 else tokens // 4


def tokens_per_s(seconds: Callable[[Any, int, int], float], trainer: Any, count: int, tokens: int) -> list[float]:
    """Tokens per second of three generations of `count` completions, after a short one."""
    seconds(trainer, count, 8)
    return [count * tokens / seconds(trainer, count, tokens) for _ in range(3)]


def generate_s(trainer: Any, count: int, tokens: int) -> float:
    """The seconds of one generation of `count` completions."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": ids} for ids in token_ids(count)]
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=1.0)
    start = time.perf_counter()
    trainer.vllm_generation.llm.generate(prompts, sampling_params=sampling, use_tqdm=False)
    return time.perf_counter() - start


def grpo_s(trainer: Any, count: int, tokens: int) -> float:
    """The same as a GRPO step has it generated: with the log-probabilities of the tokens, by TRL's `generate`."""
    generation = trainer.vllm_generation
    generation.max_completion_length = tokens
    start = time.perf_counter()
    generation.generate(token_ids(count), None, 1)
    return time.perf_counter() - start


def token_ids(count: int) -> list[list[int]]:
    """Different prompts."""
    return [[1 + (7 * row + place) % 400 for place in range(16)] for row in range(count)]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["tiny", "0.6b", "8b", "32b"], required=True)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument(
        "--launch", choices=["ddp", "fsdp2"], help="train with two processes, by examples/accelerate/WAY.yaml"
    )
    parser.add_argument("--tensor-parallel", type=int, default=1, help="vllm_tensor_parallel_size; needs --launch")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--completions", type=int, default=32, help="for each step")
    parser.add_argument("--per-device", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="of each completion")
    parser.add_argument("--at-once", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--utilisation", type=float, default=0.3, help="vllm_gpu_memory_utilization")
    parser.add_argument("--kv-gib", type=float, help="size of the KV cache, instead of what is left of --utilisation")
    parser.add_argument("--profile", action="store_true", help="print where the time of ten syncs goes")
    parser.add_argument("--eager", action="store_true", help="vLLM without compiling and CUDA graphs, to start faster")
    parser.add_argument("--limit", type=float, default=600, help="seconds for each arm")
    parser.add_argument("--model-length", type=int, default=1024, help="vllm_max_model_length")
    parser.add_argument("--liger", action="store_true", help="use_liger_kernel; needs liger-kernel in the environment")
    parser.add_argument("--sleep", action="store_true", help="vllm_enable_sleep_mode")
    parser.add_argument("--syncs", type=int, default=50, help="further syncs, after which the base is compared again")
    parser.add_argument("--model", type=Path, help="a checkpoint of this shape; made if not given")
    parser.add_argument("--out", type=Path, help="where to write the result as JSON")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
