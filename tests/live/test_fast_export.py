"""Live tier: versions in shared memory, as a trainer on a GPU writes them, on a real server.

vLLM on a CPU is the hard case: without page-locked memory, it keeps adapters as views of their files.
"""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from support.models import randomize_adapter
from support.policies import NOISE_MEAN, OTHER_POLICY_MEAN, distance, is_policy_of, sample, token_ids
from support.shared_memory import shared_folder, use_pinned_files
from support.trainers import wait_for_unloads
from support.waiting import happens
from vllm_server import VLLMServer

from trl_lora_sync import GRPOTrainer
from trl_lora_sync.adapter.pinned_files import PinnedFilePool

Make = Callable[..., GRPOTrainer]


@pytest.fixture
def make_fast_trainer(make_trainer: Make, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Builds trainers that take the way of a GPU, through shared memory, in the server's dtype: it casts copies."""
    use_pinned_files(monkeypatch)
    with shared_folder() as folder:
        chosen = {"lora_sync_dir": str(folder), "lora_sync_dtype": "bfloat16"}
        yield lambda *args, **kwargs: make_trainer(*args, **{**chosen, **kwargs})


def pool_of(trainer: GRPOTrainer) -> PinnedFilePool:
    pool = trainer.vllm_generation.sync.transport.store.pinned
    assert isinstance(pool, PinnedFilePool)
    return pool


def test_the_server_samples_from_every_version_that_goes_through_pinned_files(
    make_fast_trainer: Make, clean_server: VLLMServer, base_model: Path
) -> None:
    trainer = make_fast_trainer(clean_server.base_url, base_model)
    generation = trainer.vllm_generation
    for seed in range(1, 13):
        randomize_adapter(trainer.model, seed=seed)
        generation.sync_weights()
        assert pool_of(trainer).assigned(generation.active_name) is not None
        # Prepared beside the generation.
        assert happens(lambda: bool(pool_of(trainer).new or pool_of(trainer).free)), (
            "the next sync has to wait for a file"
        )
        rows = sample(generation, [token_ids(seed), token_ids(seed + 100)])
        assert is_policy_of(trainer.model, rows), (seed, distance(trainer.model, rows))
    wait_for_unloads(trainer)
    generation.close()
    assert pool_of(trainer).held_bytes == 0


def test_training_through_pinned_files_samples_from_the_policy_that_is_trained(
    make_fast_trainer: Make, clean_server: VLLMServer, base_model: Path
) -> None:
    before = set(threading.enumerate())
    trainer = make_fast_trainer(clean_server.base_url, base_model, max_steps=8)
    trainer.train()
    begun = {thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("lora-sync")}
    assert begun <= {"lora-sync-loop", "lora-sync-work", "lora-sync-files"}
    gaps = [entry["sampling/sampling_logp_difference/mean"] for entry in trainer.state.log_history if "reward" in entry]
    assert len(gaps) == 8
    assert max(gaps) < NOISE_MEAN


def stream(server: VLLMServer, adapter_name: str, prompt: list[int], started: threading.Event) -> tuple[list[int], Any]:
    """A long completion of another client; its tokens and log-probabilities."""
    body = {"model": adapter_name, "prompt": prompt, "max_tokens": 480, "temperature": 1.0, "logprobs": 0}
    body |= {"ignore_eos": True, "stream": True, "return_tokens_as_token_ids": True}
    ids: list[int] = []
    logprobs: list[float] = []
    url = f"{server.base_url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=300, trust_env=False) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            found = json.loads(line.removeprefix("data: "))["choices"][0]["logprobs"]
            ids += [int(token.removeprefix("token_id:")) for token in found["tokens"]]
            logprobs += found["token_logprobs"]
            started.set()
    return ids, torch.tensor(logprobs)


@pytest.fixture
def cramped_server(base_model: Path, tmp_path: Path) -> Iterator[VLLMServer]:
    """Can compute with one adapter at a time; a load displaces the one in use, which is then copied in again."""
    with VLLMServer(base_model, log_path=tmp_path / "server.log", max_loras=1, max_cpu_loras=4) as running:
        yield running


@pytest.mark.slow
def test_a_request_that_outlives_its_version_keeps_its_policy(
    make_fast_trainer: Make, cramped_server: VLLMServer, base_model: Path
) -> None:
    """The server copied the adapter of the request from its views of the file, which had another version by then."""
    trainer = make_fast_trainer(cramped_server.base_url, base_model, lora_sync_keep=1)
    generation = trainer.vllm_generation
    randomize_adapter(trainer.model, seed=1)
    generation.sync_weights()
    prompt, started, answers = token_ids(1), threading.Event(), []
    name = generation.active_name
    other = threading.Thread(target=lambda: answers.append(stream(cramped_server, name, prompt, started)))
    other.start()
    assert started.wait(120)
    synced = 0
    for seed in range(2, 9):  # the fourth version would be the first in the memory of the first
        randomize_adapter(trainer.model, seed=seed)
        generation.sync_weights()
        synced += other.is_alive()
    other.join(300)
    assert synced > 3, "the request was over before its version was"
    ((ids, served),) = answers
    assert len(ids) == 480
    assert is_policy_of(trainer.model, sample(generation, [token_ids(2)]))
    generation.close()
    randomize_adapter(trainer.model, seed=1)
    gap = distance(trainer.model, [(prompt, ids, served)])
    assert gap.mean() < NOISE_MEAN
    assert gap[-100:].mean() < NOISE_MEAN
    randomize_adapter(trainer.model, seed=7)
    assert distance(trainer.model, [(prompt, ids, served)]).mean() > OTHER_POLICY_MEAN
