"""A GRPO run that saves every step and is killed in the middle of one: python run_and_die.py URL MODEL FOLDER STEP"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from support.trainers import grpo_trainer, mean_byte


def main(base_url: str, model: str, folder: str, step: str) -> None:
    torch.set_num_threads(1)

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        if trainer.state.global_step == int(step):
            os.kill(os.getpid(), signal.SIGKILL)
        return mean_byte(completions)

    trainer = grpo_trainer(
        base_url,
        Path(model),
        Path(folder),
        reward_funcs=reward,
        max_steps=6,
        save_strategy="steps",
        save_steps=1,
        learning_rate=0.05,
    )
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
