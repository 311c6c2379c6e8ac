"""Many syncs against one running server: do memory, files and sync time stay flat?

    python benchmarks/soak.py --model MODEL --url http://localhost:30000 --syncs 200 --server-pid PID

Every round changes the adapter a little, publishes it through the same path as the trainer, samples a few completions
and checks that the server computes the log-probabilities of the version just published, not of the one before. The
slope of each quantity over the rounds (least squares, the first tenth left out as warm-up) is what to look at.
"""

import argparse
import json
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from trl_lora_sync.adapter.export import read_adapter
from trl_lora_sync.cli.surroundings import surroundings
from trl_lora_sync.engines.base import Deadline, PromptGroup, Sampling
from trl_lora_sync.places import default_sync_dir, is_local_url
from trl_lora_sync.sync import AdapterSync, SyncSettings
from trl_lora_sync.verify import TrainedBase, base_logprobs

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, max_tokens=16, logprobs=0)
MEASURED = (
    "total_s", "write_s", "load_s", "server_rss_mb", "trainer_rss_mb", "gpu_used_mb", "trainer_threads",
    "trainer_open_files", "adapters_on_server", "files",
)  # fmt: skip


def main() -> None:
    args = parse_args()
    model = make_policy(args)
    sync = AdapterSync(settings_for(args))
    base = TrainedBase(
        name=str(args.model), vocab_size=model.config.vocab_size, logprobs=lambda ids: base_logprobs(model, ids)
    )
    print(sync.start(reader(model), base), flush=True)
    rounds = []
    try:
        for number in range(1, args.syncs + 1):
            rounds.append(one_round(model, sync, args))
            if number % max(1, args.syncs // 10) == 0:
                print(number, {name: round(rounds[-1][name], 4) for name in (*MEASURED, "gap", "change")}, flush=True)
    finally:
        sync.close()
    left = [name for name in sync.engine.loaded(deadline()) if name.startswith(sync.transport.run_id)]
    result = {
        **surroundings(sync.engine.capabilities.engine, sync.engine.capabilities.version),
        "syncs": len(rounds),
        "lora_rank": args.rank,
        "transport": type(sync.transport).__name__,
        "payload_bytes": rounds[-1]["payload_bytes"],
        "median": {name: statistics.median(row[name] for row in rounds) for name in (*MEASURED, "gap", "change")},
        "max": {name: max(row[name] for row in rounds) for name in (*MEASURED, "gap")},
        "slope_per_100_syncs": {name: 100 * slope([row[name] for row in rounds]) for name in MEASURED},
        "adapters_left_on_server": left,
        "rounds": rounds,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for name in MEASURED:
        median, change = result["median"][name], result["slope_per_100_syncs"][name]
        print(f"{name:20} median {median:10.4f}   per 100 syncs {change:+.4f}")
    if left:
        raise SystemExit(f"adapters left on the server: {left}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the served base model")
    parser.add_argument("--url", required=True)
    parser.add_argument("--server-pid", type=int, help="process whose memory, with its children's, is the server's")
    parser.add_argument("--syncs", type=int, default=200)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--transport", choices=["auto", "disk", "tensors"], default="auto")
    parser.add_argument("--sleep", action="store_true", help="release the KV cache between the rounds")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/soak.json"))
    return parser.parse_args()


def make_policy(args: argparse.Namespace) -> PeftModel:
    base = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).to(args.device)
    config = LoraConfig(r=args.rank, lora_alpha=args.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    torch.manual_seed(0)
    return get_peft_model(base, config).eval()


def settings_for(args: argparse.Namespace) -> SyncSettings:
    is_local = is_local_url(args.url)
    return SyncSettings(
        base_url=args.url,
        engine="auto",
        is_local=is_local,
        transport=args.transport,
        root=default_sync_dir(is_local, "soak"),
        server_root=None,
        keep=2,
        pause="off",
        frees_kv_cache=args.sleep,
        dtype=torch.bfloat16,
        sync_timeout_s=120.0,
        startup_timeout_s=300.0,
        generation_timeout_s=300.0,
    )


def reader(model: PeftModel) -> Any:
    return lambda served: read_adapter(model, dtype=torch.bfloat16, fused_siblings=served.needs_fused_siblings)


def one_round(model: PeftModel, sync: AdapterSync, args: argparse.Namespace) -> dict[str, float]:
    prompt = torch.randint(0, 200, (32,)).tolist()
    before = reference(model, prompt)
    perturb(model)
    report = sync.publish(reader(model))
    wanted = reference(model, prompt)
    served = sync.engine.score(report.adapter_name, prompt, deadline())
    groups = [PromptGroup(prompt=torch.randint(0, 200, (16,)).tolist(), count=2) for _ in range(8)]
    sync.engine.generate(report.adapter_name, groups, SAMPLING, deadline())
    sync.sleep()
    gap, change = distance(served, wanted), distance(served, before)
    if not gap < change / 2:
        raise SystemExit(f"{report.adapter_name}: {gap:.4f} from its own version, {change:.4f} from the one before")
    return {
        "total_s": report.total_s,
        "write_s": report.write_s,
        "load_s": report.load_s,
        "payload_bytes": report.payload_bytes,
        "gap": gap,
        "change": change,
        "adapters_on_server": len(sync.engine.loaded(deadline())) if not args.sleep else 0,
        "server_rss_mb": rss_mb(args.server_pid),
        "trainer_rss_mb": rss_mb(os.getpid()),
        "trainer_threads": psutil.Process().num_threads(),
        "trainer_open_files": psutil.Process().num_fds(),
        "gpu_used_mb": gpu_used_mb(),
        "files": count_files(sync),
    }


@torch.no_grad()
def perturb(model: PeftModel) -> None:
    """A new adapter that differs clearly from the last one, of bounded size."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.copy_(torch.randn_like(parameter) * 0.05)


@torch.no_grad()
def reference(model: PeftModel, prompt: list[int]) -> list[float]:
    ids = torch.tensor([prompt], device=model.device)
    logprobs = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(-1, ids[0, 1:, None])[:, 0].tolist()


def distance(a: list[float], b: list[float]) -> float:
    return statistics.fmean(abs(x - y) for x, y in zip(a, b, strict=True))


def deadline() -> Deadline:
    return Deadline.after(120.0, "A request of the soak")


def rss_mb(pid: int | None) -> float:
    if pid is None:
        return 0.0
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return sum(process.memory_info().rss for process in processes) / 1e6


def gpu_used_mb() -> float:
    if not torch.cuda.is_available():
        return 0.0
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return float(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0])


def count_files(sync: AdapterSync) -> int:
    directory = getattr(sync.transport, "directory", None)
    return sum(1 for _ in directory.rglob("*")) if directory is not None else 0


def slope(values: list[float]) -> float:
    """Least-squares slope per round, without the first tenth."""
    kept = values[len(values) // 10 :]
    if len(kept) < 2:
        return 0.0
    return float(statistics.linear_regression(range(len(kept)), kept).slope)


if __name__ == "__main__":
    started = time.perf_counter()
    main()
    print(f"{time.perf_counter() - started:.0f} s")
