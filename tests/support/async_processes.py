"""An asynchronous run in two processes: accelerate launch ... async_processes.py FOLDER URL MODEL

Writes what each process saw to FOLDER/process-<index>.json.
"""

import sys
from pathlib import Path

import torch
from tree_attention import plain_kernel

from support.async_runs import AsyncGRPOTrainer, async_trainer
from support.launch import end_process


def main(folder: str, url: str, model: str) -> None:
    torch.set_num_threads(1)
    with plain_kernel():
        trainer = async_trainer(
            url, Path(model), Path(folder), max_steps=3, token_budget=None, trainer_class=AsyncGRPOTrainer
        )
        trainer.train()
    matrices = [value.double().sum() for name, value in trainer.model.named_parameters() if "lora_" in name]
    end_process(
        folder,
        {
            "versions": [entry["lora_sync/version"] for entry in trainer.state.log_history if "loss" in entry],
            "model_version": trainer.model_version,
            "token_budget": trainer.args.token_budget,
            "samples": trainer.rollout_worker is not None,
            "adapter": float(sum(matrices)),
        },
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
