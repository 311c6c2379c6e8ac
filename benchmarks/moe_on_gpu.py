"""LoRA on the experts of three families on a real vLLM with a GPU: served = trained, runs, a sync in the shape of 30B.

    python benchmarks/moe_on_gpu.py --out benchmarks/results/moe-h100-vllm0.26.json [--budget-s 560] [--server-python P]

Makes a tiny random model of each family and starts vLLM for it on a free port, with --enable-mixed-moe-lora-format and
the quick loader, as `trl-lora-sync serve` does. It trains through the public trainer: the start proves each group of
modules by a trial adapter, a random adapter is compared with the trainer token by token in both layouts of experts, and
GRPO runs for some steps with the experts trained. vLLM on a CPU has no kernels for adapters on experts (0.31).

`export` times the trainer's side with an adapter of the shape of Qwen3-30B-A3B's experts, whose base is not needed for
that. `sync` times whole syncs of such adapters to a vLLM that serves that shape with random weights (--load-format
dummy, 61 GB); --sync-layers takes fewer layers. `fused` serves the experts in the weights.

The file of results is written again after each case. A case that would begin after the budget is left out and
reported. If a case fails, its report has the end of its server's log, and the others go on.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpx
import torch
from run_environment import run_environment
from server_process import running

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "examples" / "demo")]

from support.moe import make_tiny  # noqa: E402

from trl_lora_sync.adapter.canonical import CanonicalAdapter, ExtraTensors, LoRAModule  # noqa: E402
from trl_lora_sync.adapter.experts import FAMILIES, ExpertLayer, expert_blocks  # noqa: E402
from trl_lora_sync.adapter.flat import FlatBuffer  # noqa: E402
from trl_lora_sync.adapter.pinned_files import PinnedFilePool  # noqa: E402
from trl_lora_sync.adapter.store import AdapterStore, StoredAdapter  # noqa: E402
from trl_lora_sync.engine_plugins import vllm_fused, vllm_quick_load  # noqa: E402
from trl_lora_sync.engines.base import Deadline  # noqa: E402
from trl_lora_sync.engines.connect import connect_engine  # noqa: E402
from trl_lora_sync.engines.vllm import engine as vllm_engine  # noqa: E402
from trl_lora_sync.errors import LoRASyncError  # noqa: E402
from trl_lora_sync.runtime import Blocking, run  # noqa: E402
from trl_lora_sync.servers.transports import DiskTransport  # noqa: E402

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
LOGP_GAP = "sampling/sampling_logp_difference/mean"
PARTS = ("export", "families", "sync", "fused")


# The server


def lora_flags(max_rank: int = 16) -> tuple[str, ...]:
    """As `trl-lora-sync serve` chooses them for an adapter on experts."""
    return (
        "--enable-lora", "--max-lora-rank", str(max_rank), "--max-loras", "2", "--max-cpu-loras", "4",
        "--enable-mixed-moe-lora-format", "--worker-extension-cls", vllm_quick_load.WORKER,
        "--middleware", vllm_quick_load.MIDDLEWARE,
    )  # fmt: skip


# Of the kernels for experts, these leave the weights as they were loaded.
FUSED_FLAGS = (
    "--moe-backend",
    "triton",
    "--worker-extension-cls",
    vllm_fused.WORKER,
    "--middleware",
    vllm_fused.MIDDLEWARE,
)


@contextmanager
def serving(
    model: Path, args: argparse.Namespace, log: Path, flags: Sequence[str], *, memory: float | None = None
) -> Iterator[str]:
    """A vLLM for adapters on a free port, ended by its process group."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [
        args.server_python, "-m", "vllm.entrypoints.cli.main", "serve", str(model),
        "--host", "127.0.0.1", "--port", str(port), *flags,
        "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1", "--max-model-len", "512", "--enforce-eager",
        # A fixed size for tiny models, so that others may use the GPU meanwhile.
        "--gpu-memory-utilization", str(memory or 0.05), *([] if memory else ["--kv-cache-memory-bytes", "1G"]),
    ]  # fmt: skip
    if "vl" in model.name:
        command += ["--limit-mm-per-prompt", '{"image": 0, "video": 0}']
    env = os.environ | {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "HF_HUB_OFFLINE": "1"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    with running(command, port, env, log) as server:
        yield server.url


def per_expert() -> Any:
    """Have the trainer send one tensor for each expert in the block, although the server takes the other form."""
    return mock.patch.object(vllm_engine, "STACKED", "never")


# Served against trained, and a run


def trainer_for(url: str, model: Path, folder: Path, peft: dict[str, Any], **config: Any) -> Any:
    from peft import LoraConfig
    from support.trainers import grpo_trainer, prompts

    exclude = {"exclude_modules": ".*(visual).*"} if "vl" in model.name else {}
    fields = {
        "peft_config": LoraConfig(r=8, lora_alpha=16, task_type="CAUSAL_LM", **{**exclude, **peft}),
        "train_dataset": prompts(conversational=True),
        "use_cpu": False,
        "model_init_kwargs": {"dtype": "float32"},
        "lora_sync_dtype": "bfloat16",
        "lora_sync_timeout": 120.0,
        "vllm_server_timeout": 60.0,
    }
    return grpo_trainer(url, model, folder, **{**fields, **config})


def compare(trainer: Any) -> dict[str, float]:
    """Mean distances of served log-probabilities: to the trained policy, to the base, and to it without experts."""
    from support.models import randomize_adapter

    randomize_adapter(trainer.model.cpu(), seed=1, std=0.1)
    trainer.model.to("cuda")
    trainer.vllm_generation.sync_weights()
    generation, random = trainer.vllm_generation, torch.Generator().manual_seed(3)
    rows = [torch.randint(0, 255, (12,), generator=random).tolist() for _ in range(16)]
    generation.generation_kwargs = {"ignore_eos": True}
    _, completions, served, _ = generation.generate(rows, None, num_generations=1)
    generation.generation_kwargs = {}

    def distance() -> float:
        gaps = []
        with torch.no_grad():
            for prompt, ids, logprobs in zip(rows, completions, served, strict=True):
                logits = trainer.model(input_ids=torch.tensor([prompt + ids], device="cuda")).logits[0].float()
                own = logits.log_softmax(-1)[len(prompt) - 1 : -1].cpu().gather(1, torch.tensor(ids)[:, None])[:, 0]
                gaps += (own - torch.tensor([token[0] for token in logprobs])).abs().tolist()
        return statistics.fmean(gaps)

    found = {"trained": distance()}
    with trainer.model.disable_adapter():
        found["base"] = distance()
    experts = [p for name, p in trainer.model.named_parameters() if ".experts." in name and "lora_B" in name]
    kept = [p.detach().clone() for p in experts]
    with torch.no_grad():
        for p in experts:
            p.zero_()
        found["without_experts"] = distance()
        for p, value in zip(experts, kept, strict=True):
            p.copy_(value)
    return found


def reward_run(url: str, model: Path, folder: Path, peft: dict[str, Any], steps: int, **config: Any) -> dict[str, Any]:
    """A GRPO run with a reward that a random model can learn."""
    from support.trainers import LEARNABLE, steps_of

    trainer = trainer_for(url, model, folder, peft, max_steps=steps, **{**LEARNABLE, **config})
    trainer.train()
    found = steps_of(trainer)
    rewards = [step["reward"] for step in found]
    trainer.vllm_generation.close()
    return {
        "reward_first_five": statistics.fmean(rewards[:5]),
        "reward_last_five": statistics.fmean(rewards[-5:]),
        "logp_gap": [step[LOGP_GAP] for step in found],
        "verified": all(step["lora_sync/verified"] == 1 for step in found),
        "sync_s": statistics.median(step["lora_sync/total_s"] for step in found),
    }


def refusal(start: Callable[[], Any], family: str) -> str:
    """The error of a start with the experts under a name unknown to the server; last, as it may end the server."""
    wrong = replace(FAMILIES[family], moe="mlp" if family == "mixtral" else "moe")
    with mock.patch.dict(FAMILIES, {family: wrong}):
        try:
            start()
        except LoRASyncError as error:
            return f"{type(error).__name__}: {str(error)[:600]}"
    return "nothing: it was not noticed"


def check_family(family: str, args: argparse.Namespace, folder: Path, *, fused: bool = False) -> dict[str, Any]:
    log = folder / "server.log"
    seen: dict[str, Any] = {}
    config: dict[str, Any] = {"lora_sync_serving": "fused"} if fused else {}
    try:
        model = make_tiny(family, folder / family)
        with serving(model, args, log, FUSED_FLAGS if fused else lora_flags()) as url:
            seen["vllm"] = httpx.get(f"{url}/version", timeout=30, trust_env=False).json()["version"]
            everything = {"target_modules": ATTENTION, "target_parameters": BOTH}
            layouts: dict[str, tuple[dict[str, Any], Any]] = {
                "experts_and_attention": (everything, nullcontext()),
                "down_proj_only": ({**everything, "target_parameters": BOTH[1:]}, nullcontext()),
            }
            if family == "mixtral" or (fused and family == "qwen3_moe"):
                layouts["all_linear_with_router"] = ({"target_modules": "all-linear"}, nullcontext())
            if not fused and not FAMILIES[family].is_always_stacked:
                layouts["experts_and_attention_per_expert"] = (everything, per_expert())
            for name, (peft, form) in layouts.items():
                with form:
                    trainer = trainer_for(url, model, folder / name, peft, **config)
                stacked = trainer.vllm_generation.sync.form.stacked_experts
                seen[name] = {**compare(trainer), "one_tensor_for_all_experts_of_a_layer": stacked}
                print(family, name, json.dumps(seen[name]), flush=True)
                trainer.vllm_generation.close()
            seen["run"] = reward_run(url, model, folder / "run", everything, args.steps, **config)
            if not fused:
                wrong = partial(trainer_for, url, model, folder / "wrong", everything)
                seen["wrong_name"] = refusal(wrong, family)
    except Exception:
        seen["failed"] = traceback.format_exc()[-3000:]
        seen["log"] = log.read_text(errors="replace")[-3000:] if log.exists() else ""
    return seen


# The export of a large one


def big_layers(family: str, args: argparse.Namespace, device: str) -> list[ExpertLayer]:
    """The trained matrices of experts in the shape of Qwen3-30B-A3B's, on `device`, without their base."""
    hidden, intermediate = args.hidden, args.intermediate
    shapes = {"gate_up_proj": (2 * intermediate, hidden), "down_proj": (hidden, intermediate)}
    base = SimpleNamespace(**{name: torch.empty(args.experts, *shape, device="meta") for name, shape in shapes.items()})
    layers = []
    for layer in range(args.layers):
        for name, (out_features, in_features) in shapes.items():
            inner = args.rank * args.experts
            lora_A = torch.nn.Linear(in_features, inner, bias=False, device=device)
            lora_B = torch.nn.Linear(inner, out_features, bias=False, device=device)
            wrapper = SimpleNamespace(
                num_experts=args.experts, scaling={"default": 2.0}, get_base_layer=lambda: base, parameter_name=name
            )
            layers.append(
                ExpertLayer(
                    path=f"model.layers.{layer}.mlp.experts",
                    parameter=name,  # type: ignore[arg-type]
                    layer=wrapper,
                    adapter_name="default",
                    family=FAMILIES[family],
                    matrices=(lora_A, lora_B),
                )
            )
    return layers


class Exporter:
    """Exports and writes adapters as a run does: in the flat form, and for servers on this host."""

    def __init__(self, family: str, args: argparse.Namespace, folder: Path, *, is_stacked: bool) -> None:
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self.layers = big_layers(family, args, self._device)
        self._rank, self._is_stacked, self._versions = args.rank, is_stacked, 0
        self._attention = LoRAModule(
            name="model.layers.0.self_attn.q_proj",
            lora_A=torch.ones(args.rank, args.hidden, device=self._device),
            lora_B=torch.ones(args.heads * args.head_dim, args.rank, device=self._device),
            scaling=1.0,
        )
        self._buffer = FlatBuffer()
        pool = PinnedFilePool(shares_gpu=True) if self._device == "cuda" else None
        self._transport = DiskTransport(AdapterStore(folder / "store", pinned=pool))

    def write(self) -> tuple[StoredAdapter, CanonicalAdapter, dict[str, float]]:
        """The next version, and the seconds of each part."""
        self._versions += 1
        times = [time.perf_counter()]
        blocks = expert_blocks(self.layers, lambda matrix: matrix.weight, self._rank, is_stacked=self._is_stacked)
        extras = ExtraTensors(blocks=blocks, rank=self._rank, has_stacked_experts=self._is_stacked)
        adapter = self._buffer.export([self._attention], dtype=torch.bfloat16, extras=extras)
        if self._device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter())
        stored = run(self._transport.write(self._versions, adapter, Deadline.after(120.0, "A write")))
        times.append(time.perf_counter())
        return stored, adapter, {"export_s": times[1] - times[0], "write_s": times[2] - times[1]}

    def delete(self, stored: StoredAdapter) -> None:
        run(self._transport.delete(stored))
        self._transport.prepare()

    def close(self) -> None:
        run(self._transport.close())


def summary(samples: list[dict[str, float]]) -> dict[str, Any]:
    """The first sample, which makes the plans, and medians of the later ones."""
    later = samples[1:]
    return {
        "first": samples[0],
        "median": {name: statistics.median(sample[name] for sample in later) for name in samples[0]},
        "total_median_s": statistics.median(sum(sample.values()) for sample in later),
    }


def time_export(args: argparse.Namespace, folder: Path, *, is_stacked: bool) -> dict[str, Any]:
    """Seconds of each part of an export."""
    exporter, samples = Exporter("qwen3_moe", args, folder, is_stacked=is_stacked), []
    for _ in range(args.repeats + 2):
        stored, adapter, sample = exporter.write()
        samples.append(sample)
        exporter.delete(stored)
    exporter.close()
    return {
        "parameters": sum(matrix.weight.numel() for layer in exporter.layers for matrix in layer.matrices),
        "tensors": len(adapter.tensors),
        "bytes": adapter.payload_bytes,
        **summary(samples[1:]),
        "very_first": samples[0],
    }


def write_config(args: argparse.Namespace, folder: Path) -> Path:
    """The configuration and a tokenizer of a Qwen3-MoE in the large shape, without weights."""
    from make_model import make_tokenizer
    from transformers import Qwen3MoeConfig

    tokenizer = make_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=151936, hidden_size=args.hidden, intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers, num_attention_heads=args.heads, num_key_value_heads=4, head_dim=args.head_dim,
        moe_intermediate_size=args.intermediate, num_experts=args.experts, num_experts_per_tok=8, norm_topk_prob=True,
        max_position_embeddings=4096, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, dtype="bfloat16",
    )  # fmt: skip
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def time_sync(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Seconds of each part of a whole sync to a server of the large shape, in both layouts of experts."""
    args = argparse.Namespace(**{**vars(args), "layers": args.sync_layers})
    seen: dict[str, Any] = {"layers": args.layers}
    log = folder / "server.log"
    try:
        model = write_config(args, folder / "qwen3_moe_large")
        memory = args.sync_memory
        with serving(model, args, log, (*lora_flags(args.rank), "--load-format", "dummy"), memory=memory) as url:
            seen["vllm"] = httpx.get(f"{url}/version", timeout=30, trust_env=False).json()["version"]
            for name, is_stacked in {"stacked": True, "per_expert": False}.items():
                exporter = Exporter("qwen3_moe", args, folder / name, is_stacked=is_stacked)
                deadline = partial(Deadline.after, 120.0, "The measurement")
                engine: Any = Blocking(run(connect_engine(url, engine="vllm", is_local=True, deadline=deadline())))
                samples = []
                for _ in range(args.repeats + 2):
                    stored, _, sample = exporter.write()
                    started = time.perf_counter()
                    engine.load(stored, deadline())
                    samples.append(sample | {"load_s": time.perf_counter() - started})
                    print("sync", name, json.dumps(samples[-1]), flush=True)
                    engine.unload(stored.name, deadline())
                    exporter.delete(stored)
                exporter.close()
                seen[name] = {**summary(samples[1:]), "very_first": samples[0]}
                del exporter
            # Versions are called lora-sync-..., and the package has the other name.
            lines = log.read_text(errors="replace").splitlines()
            seen["said"] = [line[-300:] for line in lines if "lora-sync" in line or "lora_sync" in line]
    except Exception:
        seen["failed"] = traceback.format_exc()[-3000:]
        seen["log"] = log.read_text(errors="replace")[-3000:] if log.exists() else ""
    return seen


class Results:
    """The file of results, written again after each case, and the time that is left for more.

    Args:
        engine: what serves; a case has its version under this name.
        budget_s: a case that would begin later than this is left out.
    """

    def __init__(self, out: Path, engine: str, budget_s: float) -> None:
        self._out, self._engine = out, engine
        self._started, self._budget_s = time.monotonic(), budget_s
        self._cases: dict[str, Any] = {}

    def passed_s(self) -> float:
        return time.monotonic() - self._started

    def has_time(self) -> bool:
        return self.passed_s() <= self._budget_s

    def measure(self, name: str, measure: Callable[[Path], dict[str, Any]], root: str | None = None) -> None:
        began_s = self.passed_s()
        if not self.has_time():
            self.add(name, {"left_out": f"after {began_s:.0f} s"})
            return
        with tempfile.TemporaryDirectory(dir=root) as folder:
            found = measure(Path(folder))
        self.add(name, found | {"case_s": self.passed_s() - began_s})

    def add(self, name: str, found: dict[str, Any]) -> None:
        print(name, json.dumps(found), flush=True)
        self._cases[name] = found
        version = next((case[self._engine] for case in self._cases.values() if self._engine in case), "unknown")
        result = run_environment(self._engine, version) | {"cases": self._cases}
        partial_file = self._out.with_suffix(".partial")
        partial_file.write_text(json.dumps(result, indent=1) + "\n")
        partial_file.replace(self._out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--server-python", default=sys.executable, help="interpreter of vLLM's environment")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--families", nargs="*", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--budget-s", type=float, default=3600.0, help="begin no case later than this")
    parser.add_argument("--sync-memory", type=float, default=0.86, help="the GPU's share for a server of that shape")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--sync-layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers go, too
    results = Results(args.out, "vllm", args.budget_s)
    if "export" in args.parts:
        for name, is_stacked in {"stacked": True, "per_expert": False}.items():
            results.measure(f"export-{name}", partial(time_export, args, is_stacked=is_stacked), "/dev/shm")
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    if "families" in args.parts:
        for family in args.families:
            results.measure(family, partial(check_family, family, args))
    if "fused" in args.parts:
        for family in (family for family in args.families if not FAMILIES[family].is_always_stacked):
            results.measure(f"fused-{family}", partial(check_family, family, args, fused=True))
    if "sync" in args.parts:
        results.measure("sync", partial(time_sync, args), "/dev/shm")


if __name__ == "__main__":
    main()
