"""A short GRPO run on one host with the vLLM server on another: python train_across_hosts.py; prints a line of JSON.

Run by `two_hosts.first_host`. The server's key is on its command line only, and each host has its own model.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

import torch
from make_model import make_model
from two_hosts import PRIVATE_VARIABLE, THERE_ADDRESS, OtherHost
from vllm_server import VLLMServer

from support.models import base_weights, randomize_adapter, same_tensors
from support.policies import distance, is_policy_of, sample, token_ids
from support.servers import adapters_on
from support.trainers import grpo_trainer, steps_of
from trl_lora_sync.engine_plugins.vllm_push import MIDDLEWARE

TESTS = Path(__file__).parents[1]
DEMO = TESTS.parent / "examples" / "demo"
KEY = "sk-on-the-command-line"


def main() -> None:
    torch.set_num_threads(1)
    private = Path(os.environ[PRIVATE_VARIABLE])
    with OtherHost() as there:
        marker = private / "only-here"
        marker.touch()
        shared = there.run("find", private, "/dev/shm", "-mindepth", "1").split()
        there.run(sys.executable, DEMO / "make_model.py", private / "model")
        server = VLLMServer(
            private / "model",
            host=THERE_ADDRESS,
            wrapper=there.wrapper,
            extra_args=["--middleware", MIDDLEWARE, "--api-key", KEY],
            extra_env={"PYTHONPATH": str(TESTS.parent)},
        )
        # The model of this host is made while the server starts.
        making = threading.Thread(target=make_model, args=[private / "model"])
        making.start()
        with server:
            making.join()
            try:
                result = train(server, private)
            except Exception:
                print(server.log_tail(200))  # its file goes with this host
                raise
            result["left"] = what_stays(there)
        result |= {"shared": shared, "left_at_the_end": there.run("find", "/dev/shm", "-name", "*push*").split()}
    print(json.dumps(result))


def what_stays(there: OtherHost) -> list[str]:
    """What the server still keeps, once the last unloads have had time to end."""
    deadline = time.monotonic() + 60
    while found := there.run("find", "/dev/shm", "-path", "*push*/*").split():
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return found


def train(server: VLLMServer, private: Path) -> dict[str, object]:
    os.environ["VLLM_API_KEY"] = KEY
    # The server compiles its sampling kernels at the first request, as this host has none from before.
    patience = dict.fromkeys(("vllm_server_timeout", "lora_sync_timeout", "lora_sync_generation_timeout"), 400.0)
    trainer = grpo_trainer(server.base_url, private / "model", private, **patience)
    before = base_weights(trainer.model)
    trainer.train()
    randomize_adapter(trainer.model, seed=1)
    trainer.vllm_generation.sync_weights()
    rows = sample(trainer.vllm_generation, [token_ids(seed) for seed in range(8)])
    paths = adapters_on(server.base_url, KEY)
    result = {
        "served": is_policy_of(trainer.model, rows),
        "distance": float(distance(trainer.model, rows).mean()),
        "same_base": same_tensors(base_weights(trainer.model), before),
        "versions": [step["lora_sync/version"] for step in steps_of(trainer)],
        "ratios": [step["sampling/importance_sampling_ratio/mean"] for step in steps_of(trainer)],
        "paths": paths,
        "seen_here": [path for path in paths.values() if Path(path).exists()],
        "files_here": sorted(path.name for path in private.rglob("*.safetensors") if path.parent.name != "model"),
    }
    trainer.vllm_generation.close()
    return result


if __name__ == "__main__":
    main()
