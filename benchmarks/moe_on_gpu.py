"""LoRA on the experts of three families on a real vLLM with a GPU: served = trained, runs, export times.

    python benchmarks/moe_on_gpu.py --out benchmarks/results/moe-h100-vllm0.26.json [--server-python PATH]

Makes a tiny random model of each family, starts vLLM for it on a free port, and trains through the public trainer: the
start proves each group of modules by a trial adapter, a random adapter is compared with the trainer token by token, and
GRPO runs for some steps with the experts trained. vLLM on a CPU has no kernels for adapters on experts (0.31). The
export is timed with an adapter of the shape of Qwen3-30B-A3B's experts, whose base is not needed for that. If a family
fails, its report has the end of its server's log, and the others go on.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpx
import torch
from run_environment import run_environment

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "examples" / "demo")]

from trl_lora_sync.adapter.canonical import ExtraTensors, LoRAModule, canonicalize  # noqa: E402
from trl_lora_sync.adapter.experts import FAMILIES, ExpertLayer, expert_blocks  # noqa: E402
from trl_lora_sync.adapter.flat import FlatBuffer  # noqa: E402
from trl_lora_sync.adapter.store import AdapterStore  # noqa: E402
from trl_lora_sync.errors import LoRASyncError  # noqa: E402

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
# Twice the intermediate size is not the hidden one, so that no matrix of the experts is square.
HIDDEN, INTERMEDIATE, EXPERTS = 256, 192, 8
START_TIMEOUT_S = 300.0
LOGP_GAP = "sampling/sampling_logp_difference/mean"


# Tiny models


def make_tiny(family: str, folder: Path) -> Path:
    """Write a random bfloat16 model of a family and its tokenizer or processor to `folder`."""
    from make_model import make_tokenizer
    from support.vision import _processor
    from transformers import (
        MixtralConfig,
        MixtralForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        Qwen3VLMoeConfig,
        Qwen3VLMoeForConditionalGeneration,
    )

    processor = _processor("qwen3-vl") if family == "qwen3_vl_moe" else make_tokenizer()
    tokenizer = getattr(processor, "tokenizer", processor)
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "initializer_range": 0.05,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    moe = {"moe_intermediate_size": INTERMEDIATE, "num_experts": EXPERTS, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    if family == "qwen3_moe":
        model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**text, **moe, norm_topk_prob=True))
    elif family == "mixtral":
        model = MixtralForCausalLM(MixtralConfig(**text, num_local_experts=EXPERTS, num_experts_per_tok=2))
    else:
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [12, 10, 10], "mrope_interleaved": True}
        vision = {
            "hidden_size": 64, "intermediate_size": 128, "depth": 2, "num_heads": 2, "out_hidden_size": HIDDEN,
            "patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
        }  # fmt: skip
        names = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
        start, end, image, video = map(tokenizer.convert_tokens_to_ids, names)
        model = Qwen3VLMoeForConditionalGeneration(
            Qwen3VLMoeConfig(
                text_config={**text, **moe, "norm_topk_prob": True, "decoder_sparse_step": 1, "rope_parameters": rope},
                vision_config=vision,
                tie_word_embeddings=False,
                vision_start_token_id=start,
                vision_end_token_id=end,
                image_token_id=image,
                video_token_id=video,
            )
        )
    model.to(torch.bfloat16).save_pretrained(folder)
    processor.save_pretrained(folder)
    if family == "qwen3_vl_moe":
        transpose_experts(folder / "model.safetensors")
    return folder


def transpose_experts(file: Path) -> None:
    """Store the experts as published checkpoints do; Transformers (5.23) reads both forms and writes the other one.

    Source: transformers/conversion_mapping.py "qwen3_vl_moe"; vllm/model_executor/models/qwen3_vl_moe.py, 0.31.
    """
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    turned = {name: one.transpose(1, 2).contiguous() if ".experts." in name else one for name, one in tensors.items()}
    save_file(turned, file, metadata={"format": "pt"})


# The server


@contextmanager
def serving(model: Path, args: argparse.Namespace, log: Path) -> Iterator[str]:
    """A vLLM for adapters on a free port, ended by its process group."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [
        args.server_python, "-m", "vllm.entrypoints.cli.main", "serve", str(model),
        "--host", "127.0.0.1", "--port", str(port), "--enable-lora", "--max-lora-rank", "16", "--max-loras", "2",
        "--max-cpu-loras", "4", "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1",
        "--max-model-len", "512", "--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", "1G",
        "--enforce-eager",
    ]  # fmt: skip
    if "vl" in model.name:
        command += ["--limit-mm-per-prompt", '{"image": 0, "video": 0}']
    env = os.environ | {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "HF_HUB_OFFLINE": "1"}
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"vLLM did not start (exit code {process.poll()})")
            try:
                if httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(1)
        yield url
    finally:
        try:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(20)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


# Served against trained, and a run


def trainer_for(url: str, model: Path, folder: Path, peft: dict[str, Any], **config: Any) -> Any:
    from peft import LoraConfig
    from support.trainers import grpo_trainer, prompts

    exclude = {"exclude_modules": ".*(visual).*"} if "vl" in model.name else {}
    return grpo_trainer(
        url,
        model,
        folder,
        peft_config=LoraConfig(r=8, lora_alpha=16, task_type="CAUSAL_LM", **peft, **exclude),
        train_dataset=prompts(conversational=True),
        use_cpu=False,
        model_init_kwargs={"dtype": "float32"},
        lora_sync_dtype="bfloat16",
        lora_sync_timeout=120.0,
        vllm_server_timeout=60.0,
        **config,
    )


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


def share_of_ascii(completions: list[Any], **kwargs: Any) -> list[float]:
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    return [sum(map(str.isascii, text)) / max(1, len(text)) for text in texts]


def refusal(start: Callable[[], Any], family: str) -> str:
    """What a start says if the experts go to the server under a name that it does not know; last, as it may end it."""
    wrong = replace(FAMILIES[family], moe="mlp" if family == "mixtral" else "moe")
    with mock.patch.dict(FAMILIES, {family: wrong}):
        try:
            start()
        except LoRASyncError as error:
            return f"{type(error).__name__}: {str(error)[:600]}"
    return "nothing: it was not noticed"


def check_family(family: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from support.trainers import steps_of

    log = folder / "server.log"
    seen: dict[str, Any] = {}
    try:
        model = make_tiny(family, folder / family)
        with serving(model, args, log) as url:
            seen["vllm"] = httpx.get(f"{url}/version", timeout=30, trust_env=False).json()["version"]
            everything = {"target_modules": ATTENTION, "target_parameters": BOTH}
            layouts = {
                "experts_and_attention": everything,
                "down_proj_only": {**everything, "target_parameters": BOTH[1:]},
            }
            if family == "mixtral":
                layouts["all_linear_with_router"] = {"target_modules": "all-linear"}
            for name, peft in layouts.items():
                trainer = trainer_for(url, model, folder / name, peft)
                seen[name] = compare(trainer)
                trainer.vllm_generation.close()
            trainer = trainer_for(
                url,
                model,
                folder / "run",
                everything,
                reward_funcs=share_of_ascii,
                max_steps=args.steps,
                learning_rate=1e-2,
                lr_scheduler_type="constant",
                per_device_train_batch_size=32,
                num_generations=16,
                max_completion_length=8,
            )
            trainer.train()
            steps = steps_of(trainer)
            rewards = [step["reward"] for step in steps]
            seen["run"] = {
                "reward_first_five": statistics.fmean(rewards[:5]),
                "reward_last_five": statistics.fmean(rewards[-5:]),
                "logp_gap": [step[LOGP_GAP] for step in steps],
                "verified": all(step["lora_sync/verified"] == 1 for step in steps),
                "sync_s": statistics.median(step["lora_sync/total_s"] for step in steps),
            }
            trainer.vllm_generation.close()
            seen["wrong_name"] = refusal(lambda: trainer_for(url, model, folder / "wrong", everything), family)
    except Exception:
        seen["failed"] = traceback.format_exc()[-3000:]
        seen["log"] = log.read_text(errors="replace")[-3000:] if log.exists() else ""
    print(family, json.dumps(seen), flush=True)
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


def time_export(family: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Seconds of each part of an export, in the layout of a family; the first one makes the plan."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers = big_layers(family, args, device)
    one = LoRAModule(
        name="model.layers.0.self_attn.q_proj",
        lora_A=torch.ones(args.rank, args.hidden, device=device),
        lora_B=torch.ones(args.hidden, args.rank, device=device),
        scaling=1.0,
    )
    buffer, store, samples = FlatBuffer(), AdapterStore(folder / "store"), []
    export = buffer.export if device == "cuda" else canonicalize
    tensors = payload = 0
    for version in range(1, args.repeats + 2):
        times = [time.perf_counter()]
        blocks = expert_blocks(layers, lambda matrix: matrix.weight, args.rank)
        adapter = export([one], dtype=torch.bfloat16, extras=ExtraTensors(blocks=blocks, rank=args.rank))
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter())
        stored = store.write(version, adapter)
        times.append(time.perf_counter())
        samples.append({"export_s": times[1] - times[0], "write_s": times[2] - times[1]})
        tensors, payload = len(adapter.tensors), adapter.payload_bytes
        store.delete(stored)
    store.close()
    later = samples[1:]
    return {
        "parameters": sum(matrix.weight.numel() for layer in layers for matrix in layer.matrices),
        "tensors": tensors,
        "bytes": payload,
        "first": samples[0],
        "median": {name: statistics.median(sample[name] for sample in later) for name in samples[0]},
        "total_median_s": statistics.median(sum(sample.values()) for sample in later),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--server-python", default=sys.executable, help="interpreter of vLLM's environment")
    parser.add_argument("--families", nargs="*", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    result: dict[str, Any] = {"families": {}, "export": {}}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        for layout, family in {"per_expert": "qwen3_moe", "3d": "qwen3_vl_moe"}.items():
            result["export"][layout] = time_export(family, args, Path(shared) / layout)
            print(layout, json.dumps(result["export"][layout]), flush=True)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    for family in args.families:
        with tempfile.TemporaryDirectory() as folder:
            result["families"][family] = check_family(family, args, Path(folder))
    found = [seen["vllm"] for seen in result["families"].values() if "vllm" in seen]
    result = run_environment("vllm", found[0] if found else "none") | result
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
