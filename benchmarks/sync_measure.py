"""What one adapter sync costs on a running server: export and load, against PEFT's `save_pretrained` and load.

The arms take turns on one server, with the same adapter values, in the same folder, each version under a new name:

- `save_pretrained`: what a script without this package would do. PEFT writes the adapter as it trains it, which is
  float32 even on a bfloat16 base, with the configuration's alpha, a model card, and no fsync or rename. The server
  casts it and multiplies the scaling in at each load.
- `export DTYPE`: what the trainer of this package does. The scaling is folded into `lora_B` in float32, the result is
  cast to DTYPE, written, fsynced and renamed. `export float32` shows the effect of half the bytes apart from that of
  the rest.

After every load one token is sampled and its log-probabilities are compared with PEFT's own: a load only counts if the
server really samples from the adapter. That request is timed apart, as it would show work that a load put off.

Unmerged adapters make decoding slower, so the tokens per second through the base and through the adapter stand beside
the seconds of a sync.
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from run_environment import run_environment
from transformers import AutoModelForCausalLM

from trl_lora_sync.adapter.export import AdapterReader
from trl_lora_sync.adapter.pinned_files import PinnedFilePool
from trl_lora_sync.adapter.store import AdapterStore, StoredAdapter
from trl_lora_sync.addresses import default_sync_dir, is_local_url
from trl_lora_sync.cli.console import err
from trl_lora_sync.engines.base import Deadline, Engine, PromptGroup, Sampling
from trl_lora_sync.engines.connect import connect_engine
from trl_lora_sync.errors import LoRASyncError
from trl_lora_sync.runtime import Blocking, run

PROMPT_TOKENS = 32
TOP_TOKENS = 20  # vLLM's default limit
TIMEOUT_S = 600.0


class BenchmarkError(LoRASyncError):
    """The numbers would mean nothing, for the reason given."""


@dataclass(frozen=True, kw_only=True)
class SyncSample:
    """One sync of one arm.

    Attributes:
        gather_s: reading the adapter into canonical form; part of ``write_s`` for ``save_pretrained``.
        write_s: writing it.
        load_s: from the request until the server lists the name.
        sync_s: the three together.
        first_token_s: the first request that names it, one token long.
        payload_bytes: size of the tensor file.
        gap: mean distance of the served log-probabilities from PEFT's own with the adapter.
        effect: the same from PEFT's own without the adapter.
    """

    gather_s: float
    write_s: float
    load_s: float
    sync_s: float
    first_token_s: float
    payload_bytes: int
    gap: float
    effect: float


@dataclass(frozen=True, kw_only=True)
class Written:
    """What an arm hands to the server, and the seconds it took to get there."""

    stored: StoredAdapter
    store: AdapterStore
    gather_s: float
    write_s: float


Arm = Callable[[int], Written]


class Bench:
    """One server, one trainer's model, one folder between them."""

    def __init__(
        self, engine: Engine, store: AdapterStore, stores: dict[str, AdapterStore], args: argparse.Namespace
    ) -> None:
        self.engine = engine
        self.store = store
        self.args = args
        self._versions = 0
        # Each dtype is exported as in a run that has no other.
        self._exports = {dtype: (AdapterReader(), stores[dtype]) for dtype in args.dtype}
        self._random = random.Random(0)

    def measure_rank(self, model: PeftModel, rank: int) -> dict[str, Any]:
        """The syncs of all arms in turn, then decoding through the base and the adapter in turn."""
        arms: dict[str, Arm] = {"save_pretrained": partial(self._save_pretrained, model, rank)}
        arms |= {f"export {dtype}": partial(self._export, model, dtype) for dtype in self.args.dtype}
        prompt = self._prompt(model.config.vocab_size)
        references = reference_logprobs(model, prompt)
        samples: dict[str, list[SyncSample]] = {name: [] for name in arms}
        for turn in range(self.args.warmup + self.args.repeats):
            say(f"rank {rank}: round {turn + 1} of {self.args.warmup + self.args.repeats}")
            for name in rotated(list(arms), turn):
                sample = self._sync(arms[name], prompt, references)
                if turn >= self.args.warmup:
                    samples[name].append(sample)
        return {
            "lora_rank": rank,
            "adapter_parameters": sum(p.numel() for n, p in model.named_parameters() if "lora_" in n),
            "sync": {name: {"median": medians(found), "samples": rows(found)} for name, found in samples.items()},
            "tokens_per_s": self._measure_decoding(model),
        }

    def _sync(self, arm: Arm, prompt: list[int], references: tuple[torch.Tensor, torch.Tensor]) -> SyncSample:
        self._versions += 1
        self._settle()
        written = arm(self._versions)
        stored = written.stored
        start = time.perf_counter()
        self.engine.load(stored, self._deadline())
        load_s = time.perf_counter() - start
        start = time.perf_counter()
        served = self._top_logprobs(stored.name, prompt)
        first_token_s = time.perf_counter() - start
        self._retire(written)
        gap, effect = (distance(served, reference) for reference in references)
        if not gap < effect / 3:
            raise BenchmarkError(
                f"{stored.name} was loaded, but the server's log-probabilities are {gap:.4f} from PEFT's with the "
                f"adapter and {effect:.4f} from PEFT's without. The server must serve the very model given here."
            )
        return SyncSample(
            gather_s=written.gather_s,
            write_s=written.write_s,
            load_s=load_s,
            sync_s=written.gather_s + written.write_s + load_s,
            first_token_s=first_token_s,
            payload_bytes=stored.payload_bytes,
            gap=gap,
            effect=effect,
        )

    def _save_pretrained(self, model: PeftModel, rank: int, version: int) -> Written:
        name = f"{self.store.run_id}-plain{version}"
        path = self.store.directory / name
        start = time.perf_counter()
        model.save_pretrained(path)
        write_s = time.perf_counter() - start
        server_root = self.args.server_dir or str(self.store.root)
        stored = StoredAdapter(
            name=name,
            version=version,
            path=path,
            server_path=f"{server_root.rstrip('/')}/{self.store.run_id}/{name}",
            rank=rank,
            target_modules=(),  # vLLM reads the files
            payload_bytes=tensor_file_bytes(path),
        )
        return Written(stored=stored, store=self.store, gather_s=0.0, write_s=write_s)

    def _export(self, model: PeftModel, dtype: str, version: int) -> Written:
        reader, store = self._exports[dtype]
        start = time.perf_counter()
        reader.linears(model)
        adapter = reader.read(model, dtype=getattr(torch, dtype))
        gathered = time.perf_counter()
        stored = store.write(version, adapter)
        write_s = time.perf_counter() - gathered
        return Written(stored=stored, store=store, gather_s=gathered - start, write_s=write_s)

    def _measure_decoding(self, model: PeftModel) -> list[dict[str, Any]]:
        self._versions += 1
        written = self._export(model, self.args.dtype[0], self._versions)
        stored = written.stored
        self.engine.load(stored, self._deadline())
        names = {"base": self.engine.capabilities.base_model, "adapter": stored.name}
        found = []
        for concurrency in self.args.concurrency:
            say(f"decoding, {concurrency} at once")
            speeds: dict[str, list[float]] = {"base": [], "adapter": []}
            for turn in range(1 + self.args.decode_repeats):  # the first one warms up
                for which in rotated(list(names), turn):
                    speed = self._tokens_per_s(names[which], concurrency, model.config.vocab_size)
                    if turn:
                        speeds[which].append(speed)
            base, adapter = (statistics.median(speeds[which]) for which in ("base", "adapter"))
            found.append(
                {
                    "concurrency": concurrency,
                    "base": base,
                    "adapter": adapter,
                    "adapter_over_base": adapter / base,
                    "samples": speeds,
                }
            )
        self._retire(written)
        return found

    def _tokens_per_s(self, model: str, concurrency: int, vocab_size: int) -> float:
        """Completion tokens per second of so many one-prompt requests at once, prompts never seen before."""
        groups = [PromptGroup(prompt=self._prompt(vocab_size), count=1) for _ in range(concurrency)]
        sampling = plain_sampling(max_tokens=self.args.new_tokens, logprobs=None)
        start = time.perf_counter()
        answers = self.engine.generate(model, groups, sampling, self._deadline())
        elapsed_s = time.perf_counter() - start
        return sum(len(answer[0].token_ids) for answer in answers) / elapsed_s

    def _top_logprobs(self, model: str, prompt: list[int]) -> dict[int, float]:
        sampling = plain_sampling(max_tokens=1, logprobs=TOP_TOKENS)
        ((completion,),) = self.engine.generate(
            model, [PromptGroup(prompt=prompt, count=1)], sampling, self._deadline()
        )
        assert completion.logprobs is not None
        assert completion.logprob_token_ids is not None
        pairs = zip(completion.logprob_token_ids[0], completion.logprobs[0], strict=True)
        return {token: value for token, value in pairs if value is not None}

    def _prompt(self, vocab_size: int) -> list[int]:
        return [self._random.randrange(vocab_size) for _ in range(PROMPT_TOKENS)]

    def _retire(self, written: Written) -> None:
        self.engine.unload(written.stored.name, self._deadline())
        written.store.delete(written.stored)

    def _settle(self) -> None:
        if self.args.device == "cuda":
            torch.cuda.synchronize()

    def _deadline(self) -> Deadline:
        return Deadline.after(TIMEOUT_S, "A request of the benchmark")


def say(progress: str) -> None:
    err().print(progress)


def plain_sampling(*, max_tokens: int, logprobs: int | None) -> Sampling:
    return Sampling.unrestricted(max_tokens=max_tokens, logprobs=logprobs, ignore_eos=True)


def make_adapter(base: Any, rank: int) -> PeftModel:
    """A rank-``rank`` adapter on all linear layers, with values as if it had been trained; PEFT makes it float32."""
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    generator = torch.Generator().manual_seed(rank)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            noise = torch.randn(parameter.shape, generator=generator) * (0.1 / rank**0.5)
            parameter.data.copy_(noise)
    return model.eval()


@torch.no_grad()
def reference_logprobs(model: PeftModel, prompt: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """PEFT's own log-probabilities of the token after the prompt, with and without the adapter."""
    ids = torch.tensor([prompt], device=model.device)
    with_adapter = model(ids).logits[0, -1].float().log_softmax(-1).cpu()
    with model.disable_adapter():
        without = model(ids).logits[0, -1].float().log_softmax(-1).cpu()
    return with_adapter, without


def distance(served: dict[int, float], reference: torch.Tensor) -> float:
    return statistics.fmean(abs(value - float(reference[token])) for token, value in served.items())


def tensor_file_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def rotated(names: list[str], turn: int) -> list[str]:
    """The names starting elsewhere each turn, so that no arm always follows the same one."""
    start = turn % len(names)
    return names[start:] + names[:start]


def medians(samples: Sequence[SyncSample]) -> dict[str, float]:
    return {name: statistics.median(getattr(s, name) for s in samples) for name in SyncSample.__dataclass_fields__}


def rows(samples: Sequence[SyncSample]) -> list[dict[str, Any]]:
    return [asdict(sample) for sample in samples]


def environment(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """Everything that a reader needs to judge or repeat the numbers."""
    served = engine.capabilities
    return run_environment(served.engine, served.version) | {
        "device_of_the_trainer": args.device,
        "file_system": "/dev/shm" if str(args.dir).startswith("/dev/shm") else "other",
    }


def print_result(result: dict[str, Any]) -> None:
    print()
    print_table(
        ("rank", "arm", "MB", "gather ms", "write ms", "load ms", "sync ms", "vs save_pretrained", "1st token ms"),
        [sync_row(rank, name, arm["median"]) for rank in result["ranks"] for name, arm in rank["sync"].items()],
    )
    print()
    print_table(
        ("rank", "concurrent", "base tok/s", "adapter tok/s", "adapter / base"),
        [
            (
                str(rank["lora_rank"]),
                str(row["concurrency"]),
                f"{row['base']:.1f}",
                f"{row['adapter']:.1f}",
                f"{row['adapter_over_base']:.2f}",
            )
            for rank in result["ranks"]
            for row in rank["tokens_per_s"]
        ],
    )
    medians_of = [arm["median"] for rank in result["ranks"] for arm in rank["sync"].values()]
    print(
        f"\nServed log-probabilities against PEFT's own, medians: {min(m['gap'] for m in medians_of):.4f} to "
        f"{max(m['gap'] for m in medians_of):.4f} apart with the adapter, at least "
        f"{min(m['effect'] for m in medians_of):.2f} without it."
    )


def sync_row(rank: dict[str, Any], name: str, median: dict[str, float]) -> tuple[str, ...]:
    plain = rank["sync"]["save_pretrained"]["median"]["sync_s"]
    return (
        str(rank["lora_rank"]),
        name,
        f"{median['payload_bytes'] / 1e6:.2f}",
        *(f"{1000 * median[part]:.1f}" for part in ("gather_s", "write_s", "load_s", "sync_s")),
        f"{median['sync_s'] / plain:.2f}",
        f"{1000 * median['first_token_s']:.1f}",
    )


def print_table(header: tuple[str, ...], body: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in [header, *body]) for column in range(len(header))]
    for row in [header, tuple("-" * width for width in widths), *body]:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All ranks on the server at `args.url`, which must serve the model in `args.model`.

    Raises:
        BenchmarkError: the server does not sample from what it loads.
        LoRASyncError: it cannot be used.
    """
    is_local = is_local_url(args.url)
    args.dir = args.dir or default_sync_dir(is_local, "sync-cost-output")
    engine = Blocking(
        run(
            connect_engine(
                args.url,
                engine="auto",
                is_local=is_local,
                deadline=Deadline.after(TIMEOUT_S, "Waiting for the server"),
                serving="auto",
            )
        )
    )
    store = AdapterStore(args.dir, server_root=args.server_dir)
    stores = {
        dtype: AdapterStore(args.dir, server_root=args.server_dir, pinned=PinnedFilePool() if is_local else None)
        for dtype in args.dtype
    }
    try:
        store.open()
        bench = Bench(engine, store, stores, args)
        base = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).to(args.device)
        started = time.monotonic()
        found = []
        for rank in args.ranks:
            model = make_adapter(base, rank)
            found.append(bench.measure_rank(model, rank))
            base = model.unload()
        return {
            "benchmark": "sync_cost",
            **environment(engine, args),
            "model": args.model.resolve().name,
            "base_parameters": sum(parameter.numel() for parameter in base.parameters()),
            "base_dtype": "bfloat16",
            "repeats": args.repeats,
            "decode_repeats": args.decode_repeats,
            "prompt_tokens": PROMPT_TOKENS,
            "new_tokens": args.new_tokens,
            "load_average_at_end": list(os.getloadavg()),
            "measured_s": time.monotonic() - started,
            "ranks": found,
        }
    finally:
        for opened in (store, *stores.values()):
            opened.close()
        engine.close()
