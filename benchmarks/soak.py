"""Many syncs against one running server: do memory, files and sync time stay flat?

    python benchmarks/soak.py --model MODEL --url http://localhost:30000 --syncs 200 --server-pid PID

    python benchmarks/soak.py --cpu-server --syncs 2000

The second form makes a tiny model and starts a vLLM server for it on this CPU. Every round changes the adapter a
little, publishes it through the same path as the trainer, samples a few completions and checks that their
log-probabilities match the version just published, not the one before. The slope of each quantity over the
rounds (least squares, the first tenth left out as warm-up) is what to look at.

A server's memory also grows by sampling alone. With --controls, each round is followed by a control round, which
samples without a sync, and the result has the growth in the rounds of either kind.
"""

import argparse
import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from run_environment import run_environment
from transformers import AutoModelForCausalLM

from trl_lora_sync.adapter.canonical import CanonicalAdapter, Form
from trl_lora_sync.adapter.export import AdapterReader
from trl_lora_sync.addresses import default_sync_dir, is_local_url
from trl_lora_sync.checks.verify import PROBE_PROMPT, TrainedBase
from trl_lora_sync.engines.base import Completion, Deadline, PromptGroup, Sampling
from trl_lora_sync.generation.scoring import base_logprobs
from trl_lora_sync.runtime import run
from trl_lora_sync.settings import ServerAddress, SyncSettings
from trl_lora_sync.sync import AdapterSync, ReadAdapter

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "demo"))

SAMPLING = Sampling.unrestricted(max_tokens=16, logprobs=0, ignore_eos=True)
MEASURED = (
    "total_s", "write_s", "load_s", "server_rss_mb", "server_threads", "server_open_files", "trainer_rss_mb",
    "trainer_threads", "trainer_open_files", "gpu_used_mb", "adapters_on_server", "files", "disk_mb",
)  # fmt: skip
# Of the server on this CPU: all of it has been used, and so counts as its memory, before the warm-up is over.
KV_CACHE_BYTES = 16 << 20


def main() -> None:
    args = parse_args()
    with server_for(args):
        soak(args)


@contextlib.contextmanager
def server_for(args: argparse.Namespace) -> Iterator[None]:
    """The server that was named, or one of our own on this CPU."""
    if not args.cpu_server:
        if not args.model or not args.url:
            raise SystemExit("Give --model and --url of a running server, or --cpu-server.")
        yield
        return
    from make_model import make_model
    from vllm_server import VLLMServer

    with tempfile.TemporaryDirectory() as folder:
        args.model = make_model(Path(folder) / "tiny-qwen3")
        args.rank = min(args.rank, 16)
        cache = ["--kv-cache-memory-bytes", str(KV_CACHE_BYTES)]
        with VLLMServer(args.model, served_model_name="tiny-qwen3", extra_args=cache) as server:
            args.url, args.server_pid = server.base_url, server.pid
            yield


def soak(args: argparse.Namespace) -> None:
    measured = [name for name in MEASURED if name != "adapters_on_server" or not args.sleep]
    model = make_policy(args)
    sync = AdapterSync(settings_for(args))
    # Its matrices lora_B are still zero.
    scores = base_logprobs(model, PROBE_PROMPT, {})
    base = TrainedBase(name=str(args.model), vocab_size=model.config.vocab_size, scores=scores)
    print(sync.start(reader(model), base), flush=True)
    rounds, memory = [], []
    try:
        for number in range(1, args.syncs + 1):
            rounds.append(one_round(model, sync, args))
            if args.controls:
                memory.append(("with a sync", rounds[-1]["server_rss_mb"]))
                sample(sync)
                memory.append(("without", total(args.server_pid, rss_mb)))
            if number % max(1, args.syncs // 10) == 0:
                print(number, {name: round(rounds[-1][name], 4) for name in (*measured, "gap", "change")}, flush=True)
    finally:
        sync.close()
    left = [name for name in on_servers(sync) if name.startswith(sync.transport.store.run_id)]
    result = {
        **run_environment(sync.fleet.capabilities.engine, sync.fleet.capabilities.version),
        "syncs": len(rounds),
        "warm_up_left_out_of_slopes": len(rounds) // 10,
        "lora_rank": args.rank,
        "transport": type(sync.transport).__name__,
        "payload_bytes": rounds[-1]["payload_bytes"],
        "median": {name: statistics.median(row[name] for row in rounds) for name in (*measured, "gap", "change")},
        "max": {name: max(row[name] for row in rounds) for name in (*measured, "gap")},
        "slope_per_100_syncs": {name: 100 * slope([row[name] for row in rounds]) for name in measured},
        **({"server_rss_mb_added_by_100_rounds": added(memory)} if args.controls else {}),
        "adapters_left_on_server": left,
        "rounds": rounds[:: max(1, len(rounds) // 200)],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for name in measured:
        median, change = result["median"][name], result["slope_per_100_syncs"][name]
        print(f"{name:20} median {median:10.4f}   per 100 syncs {change:+.4f}")
    for kind, change in result.get("server_rss_mb_added_by_100_rounds", {}).items():
        print(f"server_rss_mb added by 100 rounds {kind}: {change:+.4f}")
    if left:
        raise SystemExit(f"adapters left on the server: {left}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of the served base model")
    parser.add_argument("--url")
    parser.add_argument("--cpu-server", action="store_true", help="serve a tiny model with vLLM on this CPU")
    parser.add_argument("--server-pid", type=int, help="process whose memory, with its children's, is the server's")
    parser.add_argument("--syncs", type=int, default=200)
    parser.add_argument("--controls", action="store_true", help="also rounds that sync nothing")
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
        servers=(ServerAddress(base_url=args.url, is_local=is_local),),
        engine="auto",
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


def reader(model: PeftModel) -> ReadAdapter:
    adapter = AdapterReader()

    def read(form: Form) -> CanonicalAdapter:
        adapter.linears(model)
        return adapter.read(model, dtype=torch.bfloat16, form=form)

    return read


def one_round(model: PeftModel, sync: AdapterSync, args: argparse.Namespace) -> dict[str, float]:
    before = [parameter.detach().clone() for parameter in moving(model)]
    perturb(model)
    report = sync.publish(reader(model)(sync.form))
    answers = sample(sync)
    sync.sleep()
    looked_at = [answer[0] for answer in answers[:4]]
    served = [token[0] for completion in looked_at for token in completion.logprobs or []]
    wanted = reference(model, looked_at)
    with held(model, before):
        former = reference(model, looked_at)
    # A sleeping server gets no request for its list of adapters.
    on_server = {} if args.sleep else {"adapters_on_server": len(on_servers(sync))}
    gap, change = distance(served, wanted), distance(served, former)
    if not gap < change / 2:
        raise SystemExit(f"{report.adapter_name}: {gap:.4f} from its own version, {change:.4f} from the one before")
    return {
        "total_s": report.total_s,
        "write_s": report.write_s,
        "load_s": report.load_s,
        "payload_bytes": report.payload_bytes,
        "gap": gap,
        "change": change,
        **on_server,
        "server_rss_mb": total(args.server_pid, rss_mb),
        "trainer_rss_mb": rss_mb(psutil.Process()),
        "trainer_threads": psutil.Process().num_threads(),
        "trainer_open_files": psutil.Process().num_fds(),
        "server_threads": total(args.server_pid, psutil.Process.num_threads),
        "server_open_files": total(args.server_pid, psutil.Process.num_fds),
        "disk_mb": disk_mb(sync),
        "gpu_used_mb": gpu_used_mb(),
        "files": count_files(sync),
    }


def on_servers(sync: AdapterSync) -> set[str]:
    return {name for server in sync.fleet.in_service for name in run(server.engine.loaded(deadline()))}


def sample(sync: AdapterSync) -> list[list[Completion]]:
    """Completions of the active version for prompts that no server has seen."""
    assert sync.active is not None
    groups = [PromptGroup(prompt=torch.randint(0, 200, (16,)).tolist(), count=2) for _ in range(8)]
    return sync.generate(sync.active.name, groups, SAMPLING, deadline())


@torch.no_grad()
def perturb(model: PeftModel) -> None:
    """A new adapter that differs clearly from the last one, of bounded size."""
    for parameter in moving(model):
        parameter.copy_(torch.randn_like(parameter) * 0.05)


def moving(model: PeftModel) -> list[torch.nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if "lora_B" in name]


@contextlib.contextmanager
def held(model: PeftModel, values: list[torch.Tensor]) -> Iterator[None]:
    """Other values of what moves while the block lasts."""
    newest = [parameter.data for parameter in moving(model)]
    for parameter, value in zip(moving(model), values, strict=True):
        parameter.data = value
    try:
        yield
    finally:
        for parameter, value in zip(moving(model), newest, strict=True):
            parameter.data = value


@torch.no_grad()
def reference(model: PeftModel, completions: list[Completion]) -> list[float]:
    """The log-probabilities of all tokens of equally long completions, as the model itself computes them."""
    ids = torch.tensor([one.prompt_ids + one.token_ids for one in completions], device=model.device)
    start = len(completions[0].prompt_ids)
    logprobs = model(input_ids=ids).logits[:, start - 1 : -1].float().log_softmax(-1)
    return logprobs.gather(-1, ids[:, start:, None])[..., 0].flatten().tolist()


def distance(a: list[float], b: list[float]) -> float:
    return statistics.fmean(abs(x - y) for x, y in zip(a, b, strict=True))


def deadline() -> Deadline:
    return Deadline.after(120.0, "A request of the soak")


def total(pid: int | None, measure: Callable[[psutil.Process], float]) -> float:
    """Sum over a process and its children; 0 where no process was named."""
    if pid is None:
        return 0.0
    return sum(measure(process) for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)])


def rss_mb(process: psutil.Process) -> float:
    return process.memory_info().rss / 1e6


def disk_mb(sync: AdapterSync) -> float:
    """All space in use on the file system of the adapter folder."""
    root = getattr(sync.transport, "root", None)
    return shutil.disk_usage(root).used / 1e6 if root is not None else 0.0


def gpu_used_mb() -> float:
    if not torch.cuda.is_available():
        return 0.0
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return float(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0])


def count_files(sync: AdapterSync) -> int:
    directory = getattr(sync.transport, "directory", None)
    return sum(1 for _ in directory.rglob("*")) if directory is not None else 0


def added(memory: list[tuple[str, float]]) -> dict[str, float]:
    """What 100 rounds of each kind have added, without the first tenth."""
    changes = defaultdict(list)
    for (_, before), (kind, after) in pairwise(memory[len(memory) // 10 :]):
        changes[kind].append(after - before)
    return {kind: 100 * statistics.fmean(values) for kind, values in changes.items()}


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
