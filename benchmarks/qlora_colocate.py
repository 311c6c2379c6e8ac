"""QLoRA with vLLM in the trainer's process, beside TRL's own sync: python benchmarks/qlora_colocate.py

Trainer and vLLM hold the same checkpoint in 4 bits (NF4 with double quantisation, by bitsandbytes). Two runs of the
same settings, each in its own process:

- `weights`: TRL merges the adapter into the 4-bit base, which quantises the sum again, loads that into vLLM, and
  subtracts it, which quantises a third time.
- `lora_adapter`: the adapter is written into vLLM's slots.

For each step: the distance of the sampled tokens' log-probabilities between vLLM and the trainer, as TRL logs it. At
the end: how many numbers of the trainer's 4-bit base are not the loaded ones. Needs vLLM and bitsandbytes in the
trainer's environment; on a CPU that is `.venv-colocate` with PYTHONPATH=.launchers.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "examples" / "demo"), str(ROOT / "benchmarks")]

from colocate_engines import change_engines  # noqa: E402

ARMS = ("weights", "lora_adapter")
LOGGED = {"gap_mean": "sampling/sampling_logp_difference/mean", "gap_max": "sampling/sampling_logp_difference/max"}


def train(strategy: str, checkpoint: Path, folder: Path, steps: int) -> dict[str, Any]:
    import torch
    from support.colocate import colocate_trainer
    from support.models import nf4
    from support.trainers import steps_of

    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        change_engines(kv_cache_memory_bytes=1 << 30)
    else:
        change_engines(enforce_eager=True)  # compiling takes as long as the run
        keep_rows()
    trainer = colocate_trainer(
        checkpoint,
        folder,
        trainer_kwargs={"quantization_config": nf4(bnb_4bit_use_double_quant=True)},
        model_init_kwargs={"dtype": "bfloat16"},
        lora_sync_dtype="auto",
        vllm_sync_strategy=strategy,
        max_steps=steps,
        per_device_train_batch_size=8,
        max_completion_length=32,
        learning_rate=1e-2,
        use_cpu=not on_gpu,
        bf16=on_gpu,
    )
    before = quantised_values(trainer.model)
    trainer.train()
    after = quantised_values(trainer.model)
    return {
        "steps": [{name: step[key] for name, key in LOGGED.items()} for step in steps_of(trainer)],
        "base_elements": sum(value.numel() for value in before),
        "base_elements_changed": sum(int((old != new).sum()) for old, new in zip(before, after, strict=True)),
    }


def quantised_values(model: Any) -> list[Any]:
    """The numbers that each 4-bit weight stands for."""
    import bitsandbytes

    layers = [layer for layer in model.modules() if isinstance(layer, bitsandbytes.nn.Linear4bit)]
    return [bitsandbytes.functional.dequantize_4bit(one.weight.data, one.weight.quant_state) for one in layers]


def keep_rows() -> None:
    """Let CPU builds of vLLM keep linear weights as they are. TRL's sync cannot load into packed ones (vLLM 0.31)."""
    import torch
    from vllm.model_executor.layers import utils

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = dispatch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="default: a random-weight Qwen3 made on the spot")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        found = train(args.arm, args.checkpoint, args.folder, args.steps)
        (args.folder / "found.json").write_text(json.dumps(found))
        return

    from make_model import make_model
    from run_environment import run_environment

    from trl_lora_sync.colocate import engine

    with tempfile.TemporaryDirectory() as name:
        checkpoint = args.checkpoint or make_model(Path(name) / "checkpoint")
        runs = {}
        for arm in ARMS:
            folder = Path(name) / arm
            folder.mkdir()
            own = ["--arm", arm, "--folder", str(folder), "--checkpoint", str(checkpoint), "--steps", str(args.steps)]
            code = subprocess.run([sys.executable, __file__, *own], env=os.environ | {"HF_HUB_OFFLINE": "1"}).returncode
            # The other arm is measured even if one fails.
            runs[arm] = {"failed": f"exit code {code}"} if code else json.loads((folder / "found.json").read_text())
    result = run_environment("vllm", engine.installed_version()) | {"runs": runs}
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
