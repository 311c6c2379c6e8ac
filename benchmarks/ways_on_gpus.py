"""Each way of training on two GPUs, offload included: what a sync moves, its memory peak, and the served policy.

    python benchmarks/ways_on_gpus.py --model MODEL --url http://localhost:8000 [--ways fsdp2_offload] [--load-in-4bit]
                                      [--quant-storage uint8]

Launches `accelerate launch --config_file examples/accelerate/WAY.yaml` once per way, from the repository's root,
against a server that is running already. Reports per way the bytes that torch's collectives saw during one sync, how
far the GPU's memory rose above what training holds, the time of a sync, and the logprob gap of each training step; or
the end of the output, where a way fails. A sync that verifies its version computes as well, which gathers the base;
so the inspected sync does not verify. Needs DeepSpeed and bitsandbytes for their ways
(`pip install '.[deepspeed,qlora]'`).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from run_environment import run_environment

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
WAYS = sorted(file.stem for file in (ROOT / "examples" / "accelerate").glob("*.yaml"))


def launch(way: str, args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        seen = launch_in(Path(folder), way, args)
    print(way, json.dumps(seen), flush=True)
    return seen


def launch_in(folder: Path, way: str, args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0"]
    command += ["--config_file", f"examples/accelerate/{way}.yaml", "--num_processes", str(args.processes)]
    command += [__file__, "--model", args.model, "--url", args.url]
    command += ["--steps", str(args.steps), "--rank", str(args.rank)]
    command += ["--load-in-4bit"] * args.load_in_4bit + ["--quant-storage", args.quant_storage]
    command += ["--worker", str(folder)]
    try:
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=args.timeout_s)
    except subprocess.TimeoutExpired:
        return {"failed": f"no end within {args.timeout_s:g} s"}
    if ended.returncode:
        return {"failed": (ended.stdout + ended.stderr)[-3000:]}
    processes = [json.loads(file.read_text()) for file in sorted(folder.glob("process-*.json"))]
    return processes[0] | {"peak_bytes": [process["peak_bytes"] for process in processes]}


def work(args: argparse.Namespace) -> None:
    """What each training process does."""
    from peft import LoraConfig
    from support.launch import end_process
    from support.models import nf4, randomize_adapter
    from support.trainers import grpo_trainer, steps_of
    from support.ways import Traffic, set_proof

    folder = Path(args.worker)
    options: dict[str, Any] = {}
    if args.load_in_4bit:
        options["quantization_config"] = nf4(bnb_4bit_quant_storage=getattr(torch, args.quant_storage))
    trainer = grpo_trainer(
        args.url,
        args.model,
        folder,
        peft_config=LoraConfig(r=args.rank, target_modules="all-linear", task_type="CAUSAL_LM"),
        trainer_kwargs=options,
        model_init_kwargs={"dtype": "bfloat16"},
        max_steps=args.steps,
        max_completion_length=64,
        use_cpu=False,
        bf16=True,
        learning_rate=1e-4,
        # Many ways side by side take long over everything.
        vllm_server_timeout=120.0,
        lora_sync_timeout=120.0,
        lora_sync_generation_timeout=120.0,
        lora_sync_dir=None,  # in memory, as by default
    )
    generation = trainer.vllm_generation
    randomize_adapter(generation.model, seed=1)  # makes the policy differ from the base; before it is sharded
    trainer.train()
    set_proof(generation, is_verified=True)  # a sync by itself, without the forward pass of a verification
    with Traffic() as traffic:
        generation.sync_weights()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held, started = torch.cuda.memory_allocated(), time.perf_counter()
    generation.sync_weights()
    torch.cuda.synchronize()
    seen = {
        "sync_s": time.perf_counter() - started,
        "step_sync_s": [
            {part: step[f"lora_sync/{part}_s"] for part in ("gather", "write", "load", "verify", "total")}
            for step in steps_of(trainer)
        ],
        "peak_bytes": torch.cuda.max_memory_allocated() - held,
        "adapter_bytes": steps_of(trainer)[-1]["lora_sync/bytes"],
        "collective_bytes": {name: sum(sizes) for name, sizes in traffic.bytes.items()},
        "logp_difference": [step["sampling/sampling_logp_difference/mean"] for step in steps_of(trainer)],
        "importance_ratio": [step["sampling/importance_sampling_ratio/mean"] for step in steps_of(trainer)],
        "verify_gap": [step.get("lora_sync/verify_gap") for step in steps_of(trainer)],
        "verified": [step["lora_sync/verified"] for step in steps_of(trainer)],
    }
    generation.close()
    end_process(args.worker, seen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--load-in-4bit", action="store_true")
    parser.add_argument(
        "--quant-storage",
        choices=["bfloat16", "uint8"],
        default="bfloat16",
        help="what 4-bit weights are stored as (default: bfloat16, which can be sharded)",
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--at-once", type=int, default=1, help="ways side by side; the seconds are then no measure")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--timeout-s", type=float, default=500.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    import httpx

    version = httpx.get(f"{args.url}/version", timeout=30, trust_env=False).json()["version"]
    with ThreadPoolExecutor(args.at_once) as pool:
        ways = dict(zip(args.ways, pool.map(lambda way: launch(way, args), args.ways), strict=True))
    result = run_environment("vllm", version)
    result["versions"] |= {name: metadata.version(name) for name in ("accelerate", "deepspeed")}
    if args.load_in_4bit:
        result["quant_storage"] = args.quant_storage
    result |= {"at_once": args.at_once, "ways": ways}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
