"""A GRPO run whose generations take minutes, to be interrupted in one: python long_run.py WAY URL MODEL FOLDER

WAY is `main`, where it trains in the main thread, `impatient`, where it also gives up a server that hangs after a few
seconds, or `thread`, where it trains in another thread, in which SIGUSR1 raises KeyboardInterrupt. Some versions have
been loaded and unloaded before it trains. Process N writes its id to FOLDER/pid-N, and prints a line when its training
ends, with the system's monotonic clock and the error.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from support.trainers import grpo_trainer, shorten
from trl_lora_sync.engines.base import TIMEOUTS

LONG = 14_000  # tokens
ROWS = 8


def main(way: str, base_url: str, model: str, folder: str) -> None:
    torch.set_num_threads(1)
    if way == "impatient":
        vars(TIMEOUTS)["lifeless_after_s"] = 5.0
    trainer = grpo_trainer(
        base_url,
        Path(model),
        Path(folder),
        max_completion_length=LONG,
        generation_kwargs={"min_tokens": LONG, "ignore_eos": True},
        lora_sync_generation_timeout=1200.0,
        per_device_train_batch_size=ROWS,
        num_generations=ROWS // 2,
    )
    for _ in range(3):
        trainer.vllm_generation.sync_weights()
    if way == "impatient":
        shorten(trainer, sync_timeout_s=10.0)
    (Path(folder) / f"pid-{trainer.accelerator.process_index}").write_text(str(os.getpid()))
    if way != "thread":
        train(trainer)
        return
    interrupted = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: interrupted.set())
    thread = threading.Thread(target=train, args=(trainer,))
    thread.start()
    while not interrupted.wait(0.1):
        pass
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt))
    thread.join()


def train(trainer: Any) -> None:
    try:
        trainer.train()
    except BaseException as error:
        print(f"ended {time.monotonic()} {type(error).__name__}", flush=True)
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
