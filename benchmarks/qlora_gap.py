"""How far a server is from a QLoRA trainer, by the base model it serves: python benchmarks/qlora_gap.py [options]

The trainer holds a 4-bit base (bitsandbytes, NF4) and a LoRA adapter; the server loads the exported adapter on top of

- `bf16`: the unquantised checkpoint,
- `dequantised`: the values that the 4-bit base stands for, written as bfloat16. The same numbers as the trainer's, so
  what is left is rounding,
- `4bit`: the checkpoint quantised by the server. Needs a GPU and a server started by hand, whose URL is given:
  `VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve CHECKPOINT --enable-lora --quantization bitsandbytes
  --logprobs-mode processed_logprobs`, and `--arms 4bit --checkpoint CHECKPOINT --url http://localhost:8000`. Not run
  for this release.

Reports the distance between the server's log-probabilities of sampled tokens and the trainer's for the same tokens.
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

from trl_lora_sync.cli.surroundings import surroundings

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples" / "demo")]
ARMS = ("bf16", "dequantised", "4bit")


def trained_model(checkpoint: Path, seed: int) -> Any:
    """A 4-bit base with an adapter that moves the policy clearly."""
    from peft import get_peft_model
    from support.models import lora, randomize_adapter
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
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
        version = http.get(f"{base_url}/version").json()["version"]
        body = {"lora_name": "adapter", "lora_path": str(adapter)}
        http.post(f"{base_url}/v1/load_lora_adapter", json=body).raise_for_status()
        for prompt in prompts:
            request = {"model": "adapter", "prompt": prompt, "max_tokens": tokens, "temperature": 1.0, "seed": 0}
            request |= {"logprobs": 0, "return_token_ids": True}
            choice = http.post(f"{base_url}/v1/completions", json=request).raise_for_status().json()["choices"][0]
            trained = per_token_logps(model, prompt, choice["token_ids"])
            distances.append((torch.tensor(choice["logprobs"]["token_logprobs"]) - trained).abs())
    every = torch.cat(distances)
    return {"mean": every.mean().item(), "max": every.max().item(), "tokens": every.numel(), "engine_version": version}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["bf16", "dequantised"])
    parser.add_argument("--checkpoint", type=Path, help="default: a random-weight Qwen3 made on the spot")
    parser.add_argument("--url", help="a server that is running already, instead of one on this CPU for each arm")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

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
            with VLLMServer(served[arm]) if not args.url else nullcontext() as server:
                url = args.url or server.base_url
                gaps[arm] = measure(model, adapter, url, args.rows, args.tokens)
    version = gaps[args.arms[0]].pop("engine_version")
    for gap in gaps.values():
        gap.pop("engine_version", None)
    result = surroundings("vllm", str(version)) | {"quantisation": "NF4, computed in bfloat16", "gaps": gaps}
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
