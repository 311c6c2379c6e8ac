"""What each of two processes does in the distributed tests: accelerate launch ... two_processes.py RUNS

Each run is SCENARIO FOLDER URL MODEL. It writes what it saw to FOLDER/process-<index>.json; the tests read that. Every
scenario ends by itself even if one of its steps fails, so a test sees which process raised what.
"""

import contextlib
import hashlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from support.folders import largest_file
from support.launch import end_process, run_each
from support.models import lora, randomize_adapter
from support.policies import distance, sample, token_ids
from support.trainers import change_settings, grpo_trainer, mean_byte, prompts, steps_of
from trl_lora_sync import GRPOTrainer

Outcome = dict[str, Any]


def attempt(act: Callable[[], Any]) -> Outcome:
    """The result of `act`, or its exception, with the seconds it took."""
    started = time.monotonic()
    try:
        outcome: Outcome = {"result": act()}
    except Exception as error:
        outcome = {"error": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
    return outcome | {"seconds": time.monotonic() - started}


def rows_of(trainer: GRPOTrainer, seeds: list[int]) -> Outcome:
    """Sample one row per seed, and measure the answers' distance from this process's policy for its prompts."""
    if not seeds:
        return {"answers": trainer.vllm_generation.generate([], None, num_generations=1)}
    rows = sample(trainer.vllm_generation, [token_ids(seed) for seed in seeds])
    distances = distance(trainer.accelerator.unwrap_model(trainer.model), rows)
    return {"count": len(rows), "mean": distances.mean().item(), "max": distances.max().item()}


def working(folder: Path, proxy_url: str, model: str) -> dict[str, Outcome]:
    """Generation, failures in the middle, and training, on one trainer; a hang in any of them is a timeout outside."""
    index = PartialState(cpu=True).process_index
    trainer = grpo_trainer(proxy_url, Path(model), folder, max_steps=2, lora_sync_timeout=60.0, ddp_timeout=400)
    generation = trainer.vllm_generation
    policy = trainer.accelerator.unwrap_model(trainer.model)

    def sync(seed: int) -> str | None:
        randomize_adapter(policy, seed)
        generation.sync_weights()
        return generation.active_name

    @contextlib.contextmanager
    def proxy_does(order: str) -> Iterator[None]:
        """What the proxy before the server is to do while the block lasts, on either process."""
        if index == 0:
            (folder / "order").write_text(order)
        try:
            yield
        finally:
            if index == 0:
                (folder / "order").unlink()

    def refused() -> str | None:
        with proxy_does("damage the version"):
            return sync(seed=2)

    def full_disk() -> str | None:
        with largest_file(20_000) if index == 0 else contextlib.nullcontext():
            return sync(seed=2)

    def server_gone() -> str | None:
        if index == 0:
            change_settings(generation.sync, sync_timeout_s=3.0)
        with proxy_does("break all connections"):
            try:
                return sync(seed=2)
            finally:
                if index == 0:
                    change_settings(generation.sync, sync_timeout_s=60.0)

    def wrong_key() -> None:
        with proxy_does("refuse the key"):
            start(proxy_url)

    def start(url: str, **changes: Any) -> None:
        grpo_trainer(url, Path(model), folder / "other", ddp_timeout=400, **changes)

    def not_finite() -> str | None:
        next(value for name, value in policy.named_parameters() if "lora_B" in name).data.fill_(float("nan"))
        generation.sync_weights()
        return generation.active_name

    def different() -> str | None:
        return sync(seed=2 + index)

    def back_to_first() -> Outcome:
        randomize_adapter(policy, seed=1)
        return rows_of(trainer, [index + 1])

    def turns() -> list[Outcome]:
        with generation.tool_turns():
            return [rows_of(trainer, [10 * index + turn]) for turn in range([3, 1][index])]

    def failing_turns() -> None:
        with generation.tool_turns():
            if index == 1:
                raise ZeroDivisionError("a tool is broken")
            rows_of(trainer, [1])

    def refused_turn() -> None:
        with generation.tool_turns():
            if index == 0:
                randomize_adapter(policy, 7)  # on this process alone
                rows_of(trainer, [1])

    def train() -> list[dict[str, Any]]:
        for name, value in policy.named_parameters():
            if "lora_B" in name:
                value.data.zero_()
        trainer.train()
        return steps_of(trainer)

    seen = {
        "synced": attempt(lambda: sync(seed=1)),
        "even": attempt(lambda: rows_of(trainer, [10 * index + 1, 10 * index + 2])),
        "uneven": attempt(lambda: rows_of(trainer, [[1, 2, 3], [21]][index])),
        "none_on_one": attempt(lambda: rows_of(trainer, [[1, 2], []][index])),
        "repeated": attempt(lambda: rows_of(trainer, [[1, 1], [1, 2]][index])),
        "turns": attempt(turns),
        "failing_turns": attempt(failing_turns),
        "refused_turn": attempt(refused_turn),
        "after_refused_turn": attempt(back_to_first),
        "refused": attempt(refused),
        "after_refusal": attempt(back_to_first),
        "not_finite": attempt(not_finite),
        "after_not_finite": attempt(back_to_first),
        "different": attempt(different),
        "after_different": attempt(back_to_first),
        "full_disk": attempt(full_disk),
        "after_full_disk": attempt(back_to_first),
        "server_gone": attempt(server_gone),
        "after_server_gone": attempt(back_to_first),
        "owners": attempt(lambda: [json.loads(file.read_text())["pid"] for file in folder.glob("sync/*/owner.json")]),
        "train": attempt(train),
        # Another trainer takes accelerate's state over, so the first one is no longer used.
        "wrong_key": attempt(wrong_key),
        "refused_feature": attempt(lambda: start(proxy_url, peft_config=lora(use_dora=True))),
        "refused_setting": attempt(lambda: start(proxy_url, vllm_mode="colocate", lora_sync_pause="drain")),
        "broken_reward": attempt(lambda: train_on_a_broken_reward(proxy_url, model, folder)),
        "evaluated_first": attempt(lambda: train_after_an_evaluation(proxy_url, model, folder)),
    }
    return seen | {"process": {"result": os.getpid()}, "client": {"result": hasattr(generation, "vllm_client")}}


def train_on_a_broken_reward(url: str, model: str, folder: Path) -> None:
    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        raise ZeroDivisionError("the reward is broken")

    grpo_trainer(url, Path(model), folder, reward_funcs=reward, ddp_timeout=400).train()


def train_after_an_evaluation(url: str, model: str, folder: Path) -> None:
    """Which leaves the model unwrapped, so that the processes train different adapters."""
    trainer = grpo_trainer(url, Path(model), folder, eval_dataset=prompts(["a"] * 4), max_steps=3, ddp_timeout=400)
    trainer.evaluate()
    trainer.train()


def failing(folder: Path, closed_url: str, model: str) -> dict[str, Outcome]:
    """Starts that fail: on process 0 alone, which talks to the server and writes, or on both."""

    def unreachable() -> None:
        grpo_trainer(closed_url, Path(model), folder, vllm_server_timeout=2.0, ddp_timeout=400)

    return {"unreachable": attempt(unreachable), "unreachable_again": attempt(unreachable)}


def overlapping(folder: Path, proxy_url: str, model: str) -> dict[str, Outcome]:
    """The same run without and with overlap, and one whose sampling fails while both processes train."""

    def train(overlap: int, name: str) -> dict[str, Any]:
        batches, states = [], []

        def reward(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
            batches.append(prompts)
            states.append(hashlib.sha256(bytes(torch.get_rng_state().tolist())).hexdigest())
            return mean_byte(completions)

        trainer = grpo_trainer(
            proxy_url,
            Path(model),
            folder / name,
            reward_funcs=reward,
            train_dataset=prompts([f"prompt {number}" for number in range(12)]),
            lora_sync_overlap=overlap,
            gradient_accumulation_steps=2,
            max_steps=5,
            ddp_timeout=400,
        )
        trainer.train()
        leased = trainer.vllm_generation.sync.ledger.leased if PartialState().is_main_process else []
        return {"batches": batches, "states": states, "steps": steps_of(trainer), "leased": len(leased)}

    def broken() -> None:
        if PartialState().is_main_process:
            (folder / "order").write_text("refuse version 2")
        PartialState().wait_for_everyone()
        train(1, "broken")

    seen = {"plain": attempt(lambda: train(0, "plain")), "overlap": attempt(lambda: train(1, "overlap"))}
    return seen | {"broken": attempt(broken)}


def asynchronous(folder: Path, proxy_url: str, model: str) -> dict[str, Outcome]:
    """A run of AsyncGRPO."""
    # Here, as no other run needs them.
    from tree_attention import plain_kernel

    from support.async_runs import AsyncGRPOTrainer, async_trainer

    def train() -> Outcome:
        with plain_kernel():
            # The server has room for two versions.
            config = {"max_steps": 3, "token_budget": None, "max_staleness": 0}
            trainer = async_trainer(proxy_url, Path(model), folder, trainer_class=AsyncGRPOTrainer, **config)
            trainer.train()
        matrices = [value.double().sum() for name, value in trainer.model.named_parameters() if "lora_" in name]
        return {
            "versions": [entry["lora_sync/version"] for entry in trainer.state.log_history if "loss" in entry],
            "model_version": trainer.model_version,
            "token_budget": trainer.args.token_budget,
            "samples": trainer.rollout_worker is not None,
            "adapter": float(sum(matrices)),
        }

    return {"train": attempt(train)}


def main(scenario: str, folder: str, url: str, model: str) -> None:
    torch.set_num_threads(1)
    scenarios = {"working": working, "failing": failing, "overlapping": overlapping, "asynchronous": asynchronous}
    seen = scenarios[scenario](Path(folder), url, model)
    end_process(folder, seen)


if __name__ == "__main__":
    run_each(main, sys.argv[1])
