"""How far a server is from a QLoRA trainer, by the base model it serves: python benchmarks/qlora_gap.py [options]

The trainer holds a 4-bit base (bitsandbytes, NF4) and a LoRA adapter; the server loads the exported adapter on top of

- `bf16`: the unquantised checkpoint,
- `dequantised`: the values that the 4-bit base stands for, written as bfloat16. The same numbers as the trainer's, so
  what is left is rounding,
- `4bit`: the checkpoint quantised by the server (`--quantization bitsandbytes`). From 0.28 on, vLLM needs a plugin for
  it in its environment: `pip install vllm-bnb-plugin`.

Each arm has two parts: the distance between the server's log-probabilities of sampled tokens and the trainer's for the
same tokens, with an adapter that moves the policy clearly; and what a short GRPO run logs, from its own adapter.
A random-weight model spreads its weights evenly, which quantises worse than a trained one.
"""

import argparse
import json
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from run_environment import run_environment

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples" / "demo")]
ARMS = ("bf16", "dequantised", "4bit")
# As the server quantises: the scales of the blocks once more.
QUANTISATION = {"bnb_4bit_use_double_quant": True}
LOGGED = {
    "logp_difference_mean": "sampling/sampling_logp_difference/mean",
    "logp_difference_max": "sampling/sampling_logp_difference/max",
    "importance_ratio_mean": "sampling/importance_sampling_ratio/mean",
    "verify_gap": "lora_sync/verify_gap",
    "verified": "lora_sync/verified",
}


def trained_model(checkpoint: Path, seed: int) -> Any:
    """A 4-bit base with an adapter that moves the policy clearly."""
    from peft import get_peft_model
    from support.models import lora, nf4, randomize_adapter
    from transformers import AutoModelForCausalLM

    quantization = nf4(**QUANTISATION)
    base = AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=quantization, dtype=torch.bfloat16)
    model = get_peft_model(base, lora(lora_dropout=0.0))
    randomize_adapter(model, seed)
    return model.train()  # in evaluation mode bitsandbytes repacks the weights on a CPU


def write_dequantised(checkpoint: Path, model: Any, folder: Path) -> Path:
    """The checkpoint with each 4-bit weight replaced by the values it stands for."""
    import bitsandbytes
    from transformers import AutoModelForCausalLM, AutoTokenizer

    plain = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    replaced = 0
    for name, layer in model.get_base_model().named_modules():
        weight = getattr(layer, "weight", None)
        if isinstance(layer, bitsandbytes.nn.Linear4bit):
            values = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
            plain.get_submodule(name.removesuffix(".base_layer")).weight.data.copy_(values)
            replaced += 1
    assert replaced, "nothing was quantised"
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(folder)
    return folder


def measure(model: Any, adapter: Path, base_url: str, rows: int, tokens: int) -> dict[str, Any]:
    import httpx
    from support.models import per_token_logps
    from support.policies import token_ids

    distances: list[torch.Tensor] = []
    prompts = [token_ids(seed) for seed in range(rows)]
    with httpx.Client(timeout=300, trust_env=False) as http, torch.device(model.device):
        body = {"lora_name": "adapter", "lora_path": str(adapter)}
        http.post(f"{base_url}/v1/load_lora_adapter", json=body).raise_for_status()
        for prompt in prompts:
            request = {"model": "adapter", "prompt": prompt, "max_tokens": tokens, "temperature": 1.0, "seed": 0}
            request |= {"logprobs": 0, "return_token_ids": True}
            choice = http.post(f"{base_url}/v1/completions", json=request).raise_for_status().json()["choices"][0]
            trained = per_token_logps(model, prompt, choice["token_ids"])
            distances.append((torch.tensor(choice["logprobs"]["token_logprobs"]) - trained).abs())
        http.post(f"{base_url}/v1/unload_lora_adapter", json={"lora_name": "adapter"}).raise_for_status()
    every = torch.cat(distances)
    return {"mean": every.mean().item(), "max": every.max().item(), "tokens": every.numel()}


def train(checkpoint: Path, base_url: str, folder: Path, steps: int) -> dict[str, Any]:
    """A QLoRA run on the server, and what it logs at each step; or in what words a base too far away is refused."""
    from support.models import nf4
    from support.trainers import grpo_trainer, steps_of

    from trl_lora_sync.errors import ServerSetupError

    try:
        trainer = grpo_trainer(
            base_url,
            checkpoint,
            folder,
            trainer_kwargs={"quantization_config": nf4(**QUANTISATION)},
            model_init_kwargs={"dtype": "bfloat16"},
            max_steps=steps,
            max_completion_length=32,
            use_cpu=not torch.cuda.is_available(),
            learning_rate=1e-2,
        )
    except ServerSetupError as error:
        return {"refused": str(error).replace(str(checkpoint), "CHECKPOINT")}
    trainer.train()
    trainer.vllm_generation.close()
    return {"grpo_steps": [{name: step.get(key) for name, key in LOGGED.items()} for step in steps_of(trainer)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--checkpoint", type=Path, help="default: a random-weight Qwen3 made on the spot")
    parser.add_argument("--url", help="a server that is running already, instead of one on this CPU for each arm")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--steps", type=int, default=4, help="of the GRPO run (default: 4)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    import httpx
    from make_model import make_model
    from vllm_server import VLLMServer

    from trl_lora_sync import export_adapter

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = args.checkpoint or make_model(folder / "checkpoint")
        model = trained_model(checkpoint, seed=1)
        adapter = export_adapter(model, folder / "adapter", dtype=torch.bfloat16).path
        served = dict.fromkeys(args.arms, checkpoint)
        if "dequantised" in served:
            served["dequantised"] = write_dequantised(checkpoint, model, folder / "dequantised")
        gaps = {}
        for arm in args.arms:
            extra = ["--quantization", "bitsandbytes"] if arm == "4bit" else []
            with VLLMServer(served[arm], extra_args=extra) if not args.url else nullcontext() as server:
                url = args.url or server.base_url
                gaps[arm] = measure(model, adapter, url, args.rows, args.tokens)
                version = httpx.get(f"{url}/version", timeout=30, trust_env=False).json()["version"]
                gaps[arm] |= train(checkpoint, url, folder / arm, args.steps)
    quantisation = "NF4 with double quantisation, computed in bfloat16"
    result = run_environment("vllm", version) | {"quantisation": quantisation, "gaps": gaps}
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
