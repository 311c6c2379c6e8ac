"""What it takes to get an adapter out of the trainer: PEFT's `save_pretrained`, the portable export, and the fast one.

    python benchmarks/export.py --out benchmarks/results/export-GPU.json
    python benchmarks/export.py --tiny --device cpu

The arms take turns on the same adapter, with new values each time, in the same folder in shared memory. The model has
the layers of a Qwen3 without their weights, which no arm looks at; the LoRA matrices are real, float32 as PEFT makes
them, and on the device. As in a run, the versions before stay for a while: `lora_sync_keep` is 2.

- `walk_s`: finding the matrices in the model.
- `export_s`: scaling, cast and check.
- `write_s`: the rest, until the version is published by a rename: the copy to the host and the file.

The portable export allocates its memory for each version and writes a plain file. The fast one keeps its buffer, and
writes into page-locked files.

Every fast version is compared byte for byte with the portable one of the same values.
"""

import argparse
import contextlib
import hashlib
import json
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402
from run_environment import run_environment  # noqa: E402
from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from trl_lora_sync.adapter.canonical import LoRAModule  # noqa: E402
from trl_lora_sync.adapter.export import AdapterReader, collect_modules, lora_linears  # noqa: E402
from trl_lora_sync.adapter.flat import FlatBuffer  # noqa: E402
from trl_lora_sync.adapter.pinned_files import PinnedFilePool  # noqa: E402
from trl_lora_sync.adapter.store import AdapterStore, StoredAdapter  # noqa: E402

KEEP = 2
_HEADS = {"head_dim": 128, "num_key_value_heads": 8}
SHAPES: dict[str, dict[str, int]] = {
    "8b": {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288}
    | _HEADS,
    "32b": {"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64, "intermediate_size": 25600}
    | _HEADS,
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    | {"head_dim": 16, "num_key_value_heads": 2},
}
# Shape and ranks; 8B with r=32 has 87.3 M parameters, 32B has 268 M.
CASES = {"8b": (8, 32, 128, 256), "32b": (32,), "tiny": (2, 8)}


def make_model(shape: str, rank: int, device: torch.device) -> PeftModel:
    """Layers without weights, and LoRA matrices on all linear ones."""
    with torch.device("meta"):
        base = Qwen3ForCausalLM(Qwen3Config(vocab_size=256, **SHAPES[shape]))
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(base, config)
    for linear in lora_linears(model):
        linear.to_empty(device=device)
    return model


@torch.no_grad()
def step(model: PeftModel) -> None:
    """New values, as an optimizer leaves them."""
    for linear in lora_linears(model):
        linear.weight.normal_(std=0.02)


class Arm:
    """One way to write versions, which keeps as many as a run does."""

    def __init__(self, model: PeftModel, device: torch.device, store: AdapterStore) -> None:
        self.model = model
        self.device = device
        self.store = store
        self._live: deque[StoredAdapter] = deque()

    def sync(self, version: int) -> tuple[dict[str, float], Path]:
        """One version; the seconds that its parts took, and its file."""
        settle(self.device)
        seconds, stored = self._write(version)
        seconds["total_s"] = sum(seconds.values())
        self._live.append(stored)
        while len(self._live) > KEEP + 1:
            self.store.delete(self._live.popleft())
        assert stored.path is not None
        return seconds, stored.path / "adapter_model.safetensors"

    def _write(self, version: int) -> tuple[dict[str, float], StoredAdapter]:
        started = time.perf_counter()
        modules, buffer = self._read()
        walked = time.perf_counter()
        adapter = buffer.export(modules, dtype=torch.bfloat16, base_model="org/base")
        exported = time.perf_counter()
        stored = self.store.write(version, adapter)
        written = time.perf_counter()
        seconds = {"walk_s": walked - started, "export_s": exported - walked, "write_s": written - exported}
        return seconds, stored

    def _read(self) -> tuple[Sequence[LoRAModule], FlatBuffer]:
        """The matrices, and where they are exported to."""
        lora_linears(self.model)  # which ones are sharded; none
        return collect_modules(self.model, "default"), FlatBuffer()


class FastArm(Arm):
    """The export to shared memory."""

    def __init__(self, model: PeftModel, device: torch.device, store: AdapterStore) -> None:
        super().__init__(model, device, store)
        self.buffer = FlatBuffer()
        self._reader = AdapterReader()

    def _read(self) -> tuple[Sequence[LoRAModule], FlatBuffer]:
        self._reader.linears(self.model)
        return self._reader.modules(), self.buffer


class SavePretrained(Arm):
    """PEFT's own file, in float32, as trained."""

    def _write(self, version: int) -> tuple[dict[str, float], StoredAdapter]:
        self.store.open()
        name = f"{self.store.run_id}-plain{version}"
        path = self.store.directory / name
        started = time.perf_counter()
        self.model.save_pretrained(path, save_embedding_layers=False)
        seconds = {"write_s": time.perf_counter() - started}
        stored = StoredAdapter(name=name, version=version, rank=0, target_modules=(), payload_bytes=0, path=path)
        return seconds, stored


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(shape: str, rank: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    device = torch.device(args.device)
    model = make_model(shape, rank, device)
    pool = PinnedFilePool()
    with contextlib.ExitStack() as stack:
        stores = {
            "save_pretrained": AdapterStore(folder),
            "portable": AdapterStore(folder),
            "fast": AdapterStore(folder, pinned=pool),
        }
        for store in stores.values():
            stack.callback(store.close)
        fast = FastArm(model, device, stores["fast"])
        arms: dict[str, Arm] = {
            "save_pretrained": SavePretrained(model, device, stores["save_pretrained"]),
            "portable": Arm(model, device, stores["portable"]),
            "fast": fast,
        }
        samples: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
        first: dict[str, float] = {}
        memory: dict[str, dict[str, int]] = {}
        inodes = set()
        warmup = KEEP + 3  # until every file was there once
        for version in range(1, warmup + args.repeats + 1):
            step(model)
            digests = {}
            for name in rotated(list(arms), version):
                before = gpu_memory(device)
                seconds, file = arms[name].sync(version)
                first.setdefault(name, seconds["total_s"])
                if version > warmup:
                    samples[name].append(seconds)
                    memory[name] = gpu_memory_since(before, device)
                if name == "fast":
                    inodes.add(file.stat().st_ino)
                if name != "save_pretrained":
                    digests[name] = hashlib.sha256(file.read_bytes()).hexdigest()
            if digests["fast"] != digests["portable"]:
                sys.exit(f"The fast export of {shape}, r={rank}, differs from the portable one.")
        plan = fast.buffer.plan
        assert plan is not None
        payload_bytes = plan.adapter.payload_bytes
        held = {
            "buffer_bytes": payload_bytes,
            "shared_memory_bytes": pool.held_bytes,
            "slots_made": len(inodes),
            "slots_of_a_run": KEEP + 2,
        }
        fast.buffer.release()
    result = {
        "shape": shape,
        "lora_rank": rank,
        "adapter_parameters": plan.adapter.parameters,
        "payload_bytes": payload_bytes,
        "byte_for_byte_equal": True,
        "fast_holds": held,
        "arms": {
            name: {
                "median": {key: statistics.median(one[key] for one in found) for key in found[0]},
                "first_s": first[name],
                "gpu_memory": memory[name],
                "samples": found,
            }
            for name, found in samples.items()
        },
    }
    for name in ("portable", "fast"):
        median = result["arms"][name]["median"]
        median["gb_per_s"] = payload_bytes / 1e9 / (median["export_s"] + median["write_s"])
        median["write_gb_per_s"] = payload_bytes / 1e9 / median["write_s"]
    return result


def rotated(names: list[str], turn: int) -> list[str]:
    start = turn % len(names)
    return names[start:] + names[:start]


def gpu_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def gpu_memory_since(before: int, device: torch.device) -> dict[str, int]:
    """How far the memory rose above what was there before this version, the buffer that is kept not counted."""
    if device.type != "cuda":
        return {"peak_bytes": 0, "kept_bytes": 0}
    return {
        "peak_bytes": torch.cuda.max_memory_allocated(device) - before,
        "kept_bytes": torch.cuda.memory_allocated(device) - before,
    }


def print_result(found: dict[str, Any]) -> None:
    print(f"{found['shape']}, r={found['lora_rank']}: {found['payload_bytes'] / 1e6:.1f} MB")
    for name, arm in found["arms"].items():
        parts = "  ".join(
            f"{key.removesuffix('_s')} {1e3 * value:.2f} ms" for key, value in arm["median"].items() if "gb" not in key
        )
        speed = arm["median"].get("gb_per_s")
        print(f"  {name:16s} {parts}" + (f"  {speed:.1f} GB/s" if speed else ""), flush=True)


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape and few repeats, to see that this runs")
    parser.add_argument("--cases", nargs="+", metavar="SHAPE:RANK", help="such as 8b:32; all of them by default")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="a folder in shared memory")
    parser.add_argument("--out", type=Path, help="file for the result as JSON")
    args = parser.parse_args(arguments)
    shapes = ["tiny"] if args.tiny else ["8b", "32b"]
    chosen = [case.split(":") for case in args.cases or ()]
    args.chosen = [(shape, int(rank)) for shape, rank in chosen] or [
        (shape, rank) for shape in shapes for rank in CASES[shape]
    ]
    if args.tiny:
        args.repeats = min(args.repeats, 3)
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    seen = run_environment()
    cases = []
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="trl-lora-sync-benchmark-") as folder:
        for shape, rank in args.chosen:
            cases.append(measure(shape, rank, args, Path(folder)))
            print_result(cases[-1])
    result = seen | {"device": args.device, "dtype": "bfloat16", "lora_sync_keep": KEEP, "cases": cases}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
