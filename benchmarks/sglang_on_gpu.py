"""SGLang on one GPU: experts, images, tokens per second through an adapter, and where the time of a sync goes.

    python benchmarks/sglang_on_gpu.py --out sglang.json --server-path SITE [--budget-s 240] [--cases ...]

Starts one SGLang for each case, all at the same time, each as soon as its model is written, and measures what is up:

- ``qwen3_moe``, ``mixtral``, ``qwen3_vl_moe``: tiny random models with LoRA on attention and experts. The trainer
  proves each group of modules by a trial adapter; a random adapter is compared with the trainer token by token.
- ``images``: a tiny Qwen2.5-VL with LoRA on the language model, on prompts of text and of images, sent to SGLang's own
  route: which token ids it computes with, and its log-probabilities against the trainer's. Then as a run samples them,
  and a GRPO run whose reward rises.
- ``0.6b``, ``8b``: random models in Qwen3's shapes with LoRA of rank 32 on all linear layers. Tokens per second of the
  base and of the adapter in turns, and the parts of a sync: reading, writing, the load, the listing, the first token
  with the adapter (which copies its weights to the GPU) and the next one, which copies nothing.

--server-path goes in front of PYTHONPATH of the servers. The file of results is written again after each case. What is
not measured at the end of the budget is reported as left out. A case that fails reports the end of its server's log.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import torch
from server_process import Server, start

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "examples" / "demo")]

from moe_on_gpu import ATTENTION, BOTH, Results, compare, make_tiny, reward_run, trainer_for  # noqa: E402
from random_adapter import RandomAdapter, synchronize  # noqa: E402
from transformers import AutoConfig  # noqa: E402
from versus.shapes import write_model  # noqa: E402

from trl_lora_sync.adapter.canonical import Form  # noqa: E402
from trl_lora_sync.adapter.export import AdapterReader  # noqa: E402
from trl_lora_sync.adapter.pinned_files import PinnedFilePool  # noqa: E402
from trl_lora_sync.adapter.store import AdapterStore, StoredAdapter  # noqa: E402
from trl_lora_sync.engines.base import Deadline, PromptGroup, Sampling  # noqa: E402
from trl_lora_sync.engines.connect import connect_engine  # noqa: E402
from trl_lora_sync.engines.images import data_url  # noqa: E402
from trl_lora_sync.runtime import Blocking, run  # noqa: E402

LARGE = ("0.6b", "8b")
EXPERTS = ("qwen3_moe", "mixtral", "qwen3_vl_moe")
WITH_IMAGES = ("qwen3_vl_moe", "images")
CASES = (*EXPERTS, "images", *LARGE)
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, KEEP = 32, 2
PROMPT = [10, 20, 30, 40, 50, 60]


def soon(seconds: float = 120.0) -> Deadline:
    return Deadline.after(seconds, "The measurement")


# Servers


def free_port() -> int:
    """SGLang takes the port 10,000 above its own as well, so a high one will not do."""
    while True:
        port = random.randrange(20_000, 50_000)
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port


def start_sglang(case: str, model: Path, args: argparse.Namespace, log: Path) -> Server:
    port = free_port()
    is_large = case in LARGE
    command = [
        args.server_python, "-m", "sglang.launch_server", "--model-path", str(model),
        "--host", "127.0.0.1", "--port", str(port), "--enable-lora", "--max-lora-rank", str(RANK if is_large else 16),
        "--lora-target-modules", *MODULES, "--max-loras-per-batch", str(KEEP + 2),
        # A large share of the memory and few tokens: servers that start side by side see each other's memory go.
        "--mem-fraction-static", "0.8", "--max-total-tokens", "65536" if is_large else "8192",
        "--max-running-requests", "64" if is_large else "16", "--context-length", "1024" if is_large else "512",
        "--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none",
    ]  # fmt: skip
    if not is_large:
        command += ["--disable-cuda-graph"]
    if case in WITH_IMAGES:
        command += ["--mm-attention-backend", "sdpa"]
    command += args.server_args.split()
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    if args.server_path:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [args.server_path, env.get("SERVER_PYTHONPATH")]))
    return start(command, port, env, log)


def make_model(case: str, folder: Path, device: str) -> Path:
    if case == "images":
        from support.vision import make_vision_model

        return make_vision_model(folder / case, "qwen2.5-vl")
    if case in LARGE:
        return write_model(folder / case, case, device)
    return make_tiny(case, folder / case)


# Experts


def measure_experts(family: str, url: str, model: Path, folder: Path) -> dict[str, Any]:
    """Whether SGLang applies adapters on experts, with the trainer's own start, which proves each group by a trial."""
    seen: dict[str, Any] = {}
    cases = {
        "attention": {"target_modules": ATTENTION},
        "experts_and_attention": {"target_modules": ATTENTION, "target_parameters": BOTH},
        "down_proj_only": {"target_modules": ATTENTION, "target_parameters": BOTH[1:]},
    }
    for name, peft in cases.items():
        try:
            trainer = trainer_for(url, model, folder / name, peft)
            seen[name] = compare(trainer)
            trainer.vllm_generation.close()
        except Exception as error:
            seen[name] = {"failed": f"{type(error).__name__}: {str(error)[:1500]}"}
        print(family, name, json.dumps(seen[name]), flush=True)
    return seen


# Images


def measure_images(url: str, model: Path, folder: Path) -> dict[str, Any]:
    """What SGLang makes of token ids with an image beside them, by its own route, and of an adapter then."""
    from peft import LoraConfig, get_peft_model
    from support.models import randomize_adapter
    from support.vision import NO_IMAGE_TOKEN, completion_logps, picture, tokenized, with_images
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(model)
    base = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=list(MODULES), exclude_modules=".*visual.*")
    peft = get_peft_model(base, config).eval()
    randomize_adapter(peft, seed=1, std=0.1)
    reader = AdapterReader()
    reader.linears(peft)
    adapter = reader.read(peft, dtype=torch.bfloat16, form=Form(packed_modules=True))
    engine: Any = Blocking(run(connect_engine(url, engine="sglang", is_local=True, deadline=soon())))
    store = AdapterStore(folder / "store")
    stored = store.write(1, adapter)
    engine.load(stored, soon())
    engine.warm_up(stored, soon())
    texts = ["What is this?", "Say what you see."]
    prompts = [(text, image) for text in texts for image in (None, picture(len(text)))]
    seen: dict[str, Any] = {"text": [], "image": [], "engine": []}
    image_token = peft.config.image_token_id
    for text, image in prompts:
        inputs = tokenized(processor, image, text)
        ids = inputs["input_ids"][0].tolist()
        forms = {"expanded": ids}
        if image is not None:
            forms["one_token"] = [id for at, id in enumerate(ids) if id != image_token or ids[at - 1] != image_token]
        for form, sent in forms.items():
            # SGLang 0.5.15 counts a refused request as a use of the adapter, and waits for its end at the
            # next unload.
            is_refused = image is not None and form == "expanded"
            models = {"base": None} if is_refused else {"base": None, "adapter": stored.name}
            for name, lora in models.items():
                params = {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True}
                body = {
                    "input_ids": sent, "sampling_params": params,
                    "image_data": None if image is None else data_url(image), "return_logprob": True,
                    "lora_path": lora, "return_prompt_token_ids": True,
                }  # fmt: skip
                response = httpx.post(f"{url}/generate", json=body, timeout=60, trust_env=False)
                found: dict[str, Any] = {"form": form, "model": name, "status": response.status_code}
                if response.status_code == 200:
                    found |= judge(response.json(), ids, inputs, peft, completion_logps)
                else:
                    found["words"] = response.text[:500]
                seen["text" if image is None else "image"].append(found)
                print("images", "text" if image is None else "image", json.dumps(found), flush=True)
        seen["engine"].append(through_the_engine(engine, stored, image, inputs, peft, completion_logps))
        print("images", "engine", json.dumps(seen["engine"][-1]), flush=True)
    engine.unload(stored.name, soon())
    store.close()
    lora = {"target_modules": "all-linear", "exclude_modules": ".*visual.*"}
    run_of_grpo = {"train_dataset": with_images(), "generation_kwargs": NO_IMAGE_TOKEN}
    seen["run"] = reward_run(url, model, folder / "run", lora, 20, **run_of_grpo)
    print("images", "run", json.dumps(seen["run"]), flush=True)
    return seen


def through_the_engine(
    engine: Any, stored: StoredAdapter, image: Any, inputs: Any, peft: Any, logps: Callable[..., Any]
) -> dict[str, Any]:
    """Two completions as a run samples them, and how far their log-probabilities are from the trainer's."""
    sampling = Sampling.unrestricted(max_tokens=12, logprobs=0, ignore_eos=True)
    sampling = replace(sampling, image_token_id=peft.config.image_token_id)
    group = PromptGroup(prompt=inputs["input_ids"][0].tolist(), images=None if image is None else [image], count=2)
    [found] = engine.generate(stored.name, [group], sampling, soon())
    gaps = [torch.tensor([values[0] for values in one.logprobs]) - logps(peft, inputs, one.token_ids) for one in found]
    return {"has_image": image is not None, "gap_to_trained": float(torch.cat(gaps).abs().mean())}


def judge(answer: dict[str, Any], ids: list[int], inputs: Any, peft: Any, logps: Callable[..., Any]) -> dict[str, Any]:
    """Which prompt it was, and how far the log-probabilities are from the trainer's, with and without the adapter."""
    meta = answer["meta_info"]
    completion = answer.get("output_ids") or [token[1] for token in meta["output_token_logprobs"]]
    served = torch.tensor([token[0] for token in meta["output_token_logprobs"]])
    prompt = answer.get("prompt_token_ids") or meta.get("prompt_token_ids")
    with_adapter = logps(peft, inputs, completion)
    with peft.disable_adapter():
        without = logps(peft, inputs, completion)
    return {
        "prompt_tokens": meta.get("prompt_tokens"),
        "ours": len(ids),
        "prompt_is_ours": None if prompt is None else list(prompt) == ids,
        "gap_to_trained": float((served - with_adapter).abs().mean()),
        "gap_to_base": float((served - without).abs().mean()),
    }


# Speed, and the parts of a sync


def measure_large(url: str, model: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    engine: Any = Blocking(run(connect_engine(url, engine="sglang", is_local=True, deadline=soon())))
    policy = RandomAdapter(AutoConfig.from_pretrained(model), RANK, device)
    store = AdapterStore(folder / "store", pinned=PinnedFilePool(shares=False) if device == "cuda" else None)
    samples = [one_sync(engine, url, policy, store, version) for version in range(1, args.syncs + 2)]
    policy.step(0)
    stored = store.write(args.syncs + 2, policy.read())
    engine.load(stored, soon())
    engine.warm_up(stored, soon())
    speed = tokens_per_second(engine, stored, args)
    engine.unload(stored.name, soon())
    store.close()
    later = samples[1:]
    parts = {name: statistics.median(sample[name] for sample in later) for name in samples[0]}
    return {
        "payload_bytes": stored.payload_bytes,
        "sync": {"first": samples[0], "median": parts, "samples": later},
        "tokens_per_s": speed,
        "adapter_over_base": speed["adapter"]["median"] / speed["base"]["median"],
    }


def one_sync(engine: Any, url: str, policy: RandomAdapter, store: AdapterStore, version: int) -> dict[str, float]:
    """Seconds of each part. `load` is the request, and the listing a separate one."""
    policy.step(version)
    started = time.perf_counter()
    adapter = policy.read()
    synchronize()
    read_s = time.perf_counter() - started
    with httpx.Client(trust_env=False, timeout=60) as http:
        http.get(f"{url}/v1/models")  # opens the connection
        marks = [time.perf_counter()]
        stored = store.write(version, adapter)
        marks.append(time.perf_counter())
        body = {"lora_name": stored.name, "lora_path": stored.server_path}
        http.post(f"{url}/load_lora_adapter", json=body).raise_for_status()
        marks.append(time.perf_counter())
        http.get(f"{url}/v1/models").raise_for_status()
        marks.append(time.perf_counter())
        tokens = []
        for lora in (stored.name, stored.name, None):
            body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}, "lora_path": lora}
            http.post(f"{url}/generate", json=body).raise_for_status()
            marks.append(time.perf_counter())
        tokens = [marks[at] - marks[at - 1] for at in (4, 5, 6)]
        http.get(f"{url}/model_info").raise_for_status()
        marks.append(time.perf_counter())
        body = {"lora_name": stored.name}
        http.post(f"{url}/unload_lora_adapter", json=body).raise_for_status()
        marks.append(time.perf_counter())
    store.delete(stored)
    store.prepare()
    sample = {
        "read": read_s, "write": marks[1] - marks[0], "load": marks[2] - marks[1], "listing": marks[3] - marks[2],
        "first_token": tokens[0], "second_token": tokens[1], "base_token": tokens[2], "copy": tokens[0] - tokens[1],
        "round_trip": marks[7] - marks[6], "unload": marks[8] - marks[7],
    }  # fmt: skip
    sample["sync"] = sum(sample[name] for name in ("read", "write", "load", "listing", "first_token"))
    return sample


def tokens_per_second(engine: Any, stored: StoredAdapter, args: argparse.Namespace) -> dict[str, Any]:
    sampling = Sampling.unrestricted(max_tokens=args.tokens, logprobs=0, ignore_eos=True)
    groups = [PromptGroup(prompt=[10 + row, 20, 30, 40, 50], count=1) for row in range(64)]
    speed: dict[str, list[float]] = {"base": [], "adapter": []}
    for turn in range(args.turns + 1):
        for name, model in {"base": engine.capabilities.base_model, "adapter": stored.name}.items():
            started = time.perf_counter()
            found = engine.generate(model, groups, sampling, soon())
            tokens = sum(len(one.token_ids) for row in found for one in row)
            if turn:  # the first turn warms up
                speed[name].append(tokens / (time.perf_counter() - started))
    return {name: {"median": statistics.median(found), "samples": found} for name, found in speed.items()}


# The order of things


def measured(case: str, server: Server, model: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"up_s": server.up_s}
    try:
        info = httpx.get(f"{server.url}/server_info", timeout=30, trust_env=False).json()
        found |= {"sglang": str(info.get("version")), "lora_backend": info.get("lora_backend")}
        work = folder / f"{case}-work"
        if case in LARGE:
            found |= measure_large(server.url, model, work, args)
        elif case == "images":
            found |= measure_images(server.url, model, work)
        else:
            found |= measure_experts(case, server.url, model, work)
    except Exception:
        found["failed"] = traceback.format_exc()[-3000:]
    if server.process.poll() is not None or "failed" in json.dumps(found):
        found["log"] = server.log_end()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=CASES)
    parser.add_argument("--budget-s", type=float, default=240.0, help="begin no case later than this")
    parser.add_argument("--server-python", default=sys.executable)
    parser.add_argument("--server-path", default="", help="folder with SGLang's packages, in place of PYTHONPATH")
    parser.add_argument("--server-args", default="", help="more arguments for each server")
    parser.add_argument("--syncs", type=int, default=10)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers go, too
    results = Results(args.out, "sglang", args.budget_s)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    servers: dict[str, tuple[Server, Path]] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        try:
            for case in args.cases:
                model = make_model(case, folder, device)
                if device == "cuda":
                    torch.cuda.empty_cache()
                servers[case] = (start_sglang(case, model, args, folder / f"{case}.log"), model)
                print("started", case, f"{results.passed_s():.0f} s", flush=True)
            waiting = list(servers)

            def is_quiet(case: str) -> bool:
                return case in LARGE and servers[case][0].up_s is not None

            while waiting:
                for case in list(waiting):
                    server, model = servers[case]
                    if not results.has_time():
                        results.add(case, {"left_out": "no time was left", "log": server.log_end()})
                    else:
                        try:
                            # Speed is measured once nothing starts or computes beside it.
                            others = [one for one in waiting if one != case]
                            if not server.is_up() or (case in LARGE and not all(map(is_quiet, others))):
                                continue
                        except RuntimeError as error:
                            results.add(case, {"failed": str(error)})
                        else:
                            results.add(case, measured(case, server, model, folder, args))
                    waiting.remove(case)
                    server.end()
                time.sleep(0.5)
        finally:
            for server, _ in servers.values():
                server.end()


if __name__ == "__main__":
    main()
