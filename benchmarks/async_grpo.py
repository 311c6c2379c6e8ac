"""What one sync of TRL's asynchronous trainer takes: TRL's own, and this package's, in turns.

    python benchmarks/async_grpo.py                                    # a tiny model on this CPU
    python benchmarks/async_grpo.py --shape 8b --rank 32 --server-gpu 1 --out FILE.json      # a GPU each; or 0 for one

One trainer, one server, and clients that sample from the newest version all the time, as the rollouts of the trainer
do. In each round the adapter changes, and is published twice: by the code of TRL's trainer, which pauses the server,
writes the adapter with PEFT and loads it, and by ours. Their order alternates. That both are the same policy is shown
by the log-probabilities of one prompt under each. Nothing is trained, as that needs neither sync.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "examples" / "demo")]

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "VLLM_SERVER_DEV_MODE": "1"}  # TRL's pause needs the latter
if "--server-gpu" in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"  # Transformers spreads a model over all that it sees

import httpx  # noqa: E402
import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from default_runs import server  # noqa: E402
from make_model import make_model  # noqa: E402
from peft import LoraConfig  # noqa: E402
from run_environment import run_environment  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402
from tree_attention import plain_kernel  # noqa: E402
from trl.chat_template_utils import qwen3_template  # noqa: E402
from trl.experimental import async_grpo as trls  # noqa: E402
from versus.results import command_line  # noqa: E402
from versus.servers import gpu_names  # noqa: E402
from versus.shapes import SHAPES, write_model  # noqa: E402
from vllm_server import DEFAULT_PYTHON, VLLMServer  # noqa: E402

from trl_lora_sync.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer  # noqa: E402
from trl_lora_sync.checks.verify import PROBE_PROMPT  # noqa: E402
from trl_lora_sync.engines.base import Deadline  # noqa: E402
from trl_lora_sync.runtime import run  # noqa: E402

OURS, THEIRS = "trl-lora-sync", "TRL's own"
STALENESS = 2
PLACES = ("--model", "--server-python", "--out")
WARM_UP = 2  # rounds that are not counted


def main() -> None:
    args = parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server and the folder go, too
    on_gpu = args.server_gpu is not None
    torch.set_num_threads(torch.get_num_threads() if on_gpu else 1)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="async-grpo-", dir="/dev/shm") as folder,
        serving(args, Path(folder), on_gpu=on_gpu) as (model, url),
        plain_kernel(),
    ):
        version = httpx.get(f"{url}/version", timeout=30, trust_env=False).json()["version"]
        trainer = build(args, model, url, Path(folder), on_gpu=on_gpu)
        try:
            rows = measure(args, trainer, url)
        finally:
            trainer.vllm_generation.close()
    result = {
        "benchmark": "async_grpo",
        **run_environment("vllm", version),
        "gpus": gpu_names() if on_gpu else [],  # the server's, too
        "command": command_line(PLACES),
        "shape": args.shape if on_gpu else "demo",
        "lora_rank": args.rank,
        "clients": args.clients,
        "completion_tokens": args.completion_tokens,
        "summary": summary(rows),
        "rounds": rows,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["summary"], indent=1))


@contextmanager
def serving(args: argparse.Namespace, folder: Path, *, on_gpu: bool) -> Iterator[tuple[Path, str]]:
    """The model, and the URL of a server for it that has room for all versions of the staleness window."""
    loras = STALENESS + 2
    if not on_gpu:
        model = args.model or make_model(folder / "model")
        log = args.out.with_suffix(".server.log")
        with VLLMServer(
            model, python=args.server_python, max_loras=loras, max_cpu_loras=2 * loras, dev_mode=True, log_path=log
        ) as running:
            yield model, running.base_url
        return
    model = args.model or write_model(folder / f"qwen3-{args.shape}", args.shape, "cuda")
    # TRL's client counts on the route for a server's configuration, and on room for both ways at once.
    room = ("--max-loras", str(loras), "--max-cpu-loras", str(4 * loras))
    with server(model, args, on_gpu=True, engine_args=room) as url:
        yield model, url


def no_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)


def build(args: argparse.Namespace, model: Path, url: str, folder: Path, *, on_gpu: bool) -> Any:
    """Our trainer, which is TRL's as well; its rollouts are not started."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_template = qwen3_template
    config = AsyncGRPOConfig(
        output_dir=str(folder / "out"),
        dtype="bfloat16" if on_gpu else "float32",
        vllm_server_base_url=url,
        vllm_sync_strategy="lora_adapter",
        max_staleness=STALENESS,
        max_completion_length=args.completion_tokens,
        report_to=[],
        save_strategy="no",
        use_cpu=not on_gpu,
        bf16=on_gpu,
    )
    trainer = AsyncGRPOTrainer(
        model=str(model),
        args=config,
        reward_funcs=no_reward,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "hello"}]}]),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM"
        ),
    )
    trainer.model.to(trainer.accelerator.device)
    return trainer


class Clients:
    """Sample from the newest version until they are stopped; a request whose version is gone is sent again."""

    def __init__(self, url: str, count: int, tokens: int) -> None:
        self.model = ""
        self.tokens = 0
        self._url = url
        self._length = tokens
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._sample, args=(place,), daemon=True) for place in range(count)]

    def start(self, model: str) -> None:
        self.model = model
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _sample(self, place: int) -> None:
        fields = {"prompt": [5 + place % 50, 10, 20], "max_tokens": self._length, "ignore_eos": True, "logprobs": 0}
        with httpx.Client(timeout=120, trust_env=False) as client:
            while not self._is_over.is_set():
                answer = client.post(f"{self._url}/v1/completions", json={"model": self.model, **fields})
                if answer.status_code == 200:
                    self.tokens += self._length


def ours(trainer: Any, _: dict[str, int]) -> tuple[str, dict[str, float]]:
    """The name of the new version, and the seconds of its sync by their parts."""
    found: list[Any] = []
    record = trainer.vllm_generation.on_sync
    trainer.vllm_generation.on_sync = lambda report: (found.append(report), record(report))
    started = time.perf_counter()
    try:
        trainer._sync_weight()
    finally:
        trainer.vllm_generation.on_sync = record
    total_s = time.perf_counter() - started
    (report,) = found
    parts = {"gather_s": report.gather_s, "write_s": report.write_s, "load_s": report.load_s}
    return report.adapter_name, {"total_s": total_s, **parts, "verify_s": report.verify_s}


def theirs(trainer: Any, counted: dict[str, int]) -> tuple[str, dict[str, float]]:
    """The same for TRL's own code, on the same trainer."""
    before = trainer.model_version, trainer.rollout_worker
    trainer.model_version, trainer.rollout_worker = counted["version"], None
    started = time.time()
    try:
        paused, waited, written = trls.AsyncGRPOTrainer._sync_weight_lora(trainer, started)
        total_s = time.time() - started
        counted["version"] = trainer.model_version
    finally:
        trainer.model_version, trainer.rollout_worker = before
    parts = {"pause_s": paused - started, "write_s": written - waited, "load_and_resume_s": started + total_s - written}
    return f"{trainer._lora_name}-v{counted['version']}", {"total_s": total_s, **parts}


def measure(args: argparse.Namespace, trainer: Any, url: str) -> list[dict[str, Any]]:
    """Rounds of both ways under the load of clients, without the first ones."""
    counted, rows = {"version": 0}, []
    parameters = [one for name, one in trainer.model.named_parameters() if "lora_" in name]
    clients = Clients(url, args.clients, args.completion_tokens)
    ways = [(OURS, ours), (THEIRS, theirs)]
    name, _ = ours(trainer, counted)
    clients.start(name)
    try:
        for number in range(args.rounds + WARM_UP):
            with torch.no_grad():
                for parameter in parameters:
                    parameter.add_(torch.randn_like(parameter), alpha=0.01)
            row: dict[str, Any] = {}
            names = {}
            for way, sync in ways if number % 2 else ways[::-1]:
                if trainer.accelerator.device.type == "cuda":
                    torch.cuda.synchronize()
                names[way], row[way] = sync(trainer, counted)
                clients.model = names[way]
                time.sleep(args.pause)
            engine = trainer.vllm_generation.fleet.servers[0].engine
            deadline = Deadline.after(120, "Scoring")
            left, right = (run(engine.score(names[way], list(PROBE_PROMPT), deadline)) for way in (OURS, THEIRS))
            row["logprob_gap_max"] = max(abs(one - other) for one, other in zip(left, right, strict=True))
            print(f"Round {number}: " + ", ".join(f"{way} {row[way]['total_s']:.3f} s" for way, _ in ways), flush=True)
            if number >= WARM_UP:
                rows.append(row)
    finally:
        clients.stop()
        for version in range(max(1, counted["version"] - STALENESS), counted["version"] + 1):
            trainer.vllm_client.unload_lora_adapter(f"{trainer._lora_name}-v{version}")
    return rows


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians of both ways and of their parts, and ours against TRL's."""
    found: dict[str, Any] = {
        way: {part: round(statistics.median(row[way][part] for row in rows), 4) for part in rows[0][way]}
        for way in (OURS, THEIRS)
    }
    found["ratio"] = round(found[OURS]["total_s"] / found[THEIRS]["total_s"], 3)
    found["ratio_of_rounds"] = [round(row[OURS]["total_s"] / row[THEIRS]["total_s"], 3) for row in rows]
    found["logprob_gap_max"] = round(max(row["logprob_gap_max"] for row in rows), 4)
    return found


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", choices=list(SHAPES), default="8b", help="of the model on a GPU (default: 8b)")
    add("--model", type=Path, help="folder of a model of that shape, if it has been made already")
    add("--rank", type=int, default=None, help="of the adapter (default: 32 on a GPU, 8 on a CPU)")
    add("--rounds", type=int, default=12)
    add("--clients", type=int, default=None, help="requests at a time (default: 64 on a GPU, 4 on a CPU)")
    add("--completion-tokens", type=int, default=None, help="of each request (default: 256 on a GPU, 16 on a CPU)")
    add("--pause", type=float, default=0.5, help="seconds after each sync (default: 0.5)")
    add("--server-python", type=Path, default=DEFAULT_PYTHON if DEFAULT_PYTHON.exists() else Path(sys.executable))
    add("--server-gpu", type=int, help="number of the server's GPU; without it, all runs on the CPU")
    add("--gpu-share", type=float, default=0.4, help="of the GPU's memory for the server (default: 0.4)")
    add("--serve", default="", help="more options of `trl-lora-sync serve`")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results" / "async-grpo.json")
    args = parser.parse_args(arguments)
    on_gpu = args.server_gpu is not None
    for name, for_gpu, for_cpu in (("rank", 32, 8), ("clients", 64, 4), ("completion_tokens", 256, 16)):
        if getattr(args, name) is None:
            setattr(args, name, for_gpu if on_gpu else for_cpu)
    return args


if __name__ == "__main__":
    main()
