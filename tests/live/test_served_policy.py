"""Live tier: what the real server samples from is the trainer's own policy, version after version."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.models import base_weights, lora, randomize_adapter, same_tensors
from support.policies import OTHER_POLICY_MEAN, distance, is_policy_of, sample, token_ids
from support.servers import adapters_on
from support.trainers import wait_for_unloads
from support.waiting import happens
from vllm_server import VLLMServer

from trl_lora_sync import GRPOTrainer

Make = Callable[..., GRPOTrainer]

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "rank_pattern": {"rank_pattern": {"q_proj": 2, "down_proj": 16}},
    "alpha_pattern": {"alpha_pattern": {"v_proj": 64, "up_proj": 2}},
    "rank_and_alpha_pattern": {"rank_pattern": {"o_proj": 3}, "alpha_pattern": {"o_proj": 48, "gate_proj": 4}},
    "rslora_with_patterns": {"use_rslora": True, "rank_pattern": {"q_proj": 16}, "alpha_pattern": {"q_proj": 4}},
    "regex_targets": {"target_modules": r"model\.layers\.1\.(self_attn\.[qv]_proj|mlp\.down_proj)"},
    "some_layers": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0]},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_the_server_samples_from_the_policy_that_peft_computes(
    feature: str, make_trainer: Make, clean_server: VLLMServer, base_model: Path
) -> None:
    trainer = make_trainer(clean_server.base_url, base_model, peft_config=lora(**FEATURES[feature]))
    randomize_adapter(trainer.model, seed=1)
    trainer.vllm_generation.sync_weights()

    rows = sample(trainer.vllm_generation, [token_ids(seed) for seed in range(8)])

    assert is_policy_of(trainer.model, rows), distance(trainer.model, rows)
    with trainer.model.disable_adapter():
        assert distance(trainer.model, rows).mean() > OTHER_POLICY_MEAN


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_adapter_written_in_half_precision_is_the_same_policy(
    dtype: str, make_trainer: Make, clean_server: VLLMServer, base_model: Path
) -> None:
    trainer = make_trainer(clean_server.base_url, base_model, lora_sync_dtype=dtype)
    randomize_adapter(trainer.model, seed=1)
    trainer.vllm_generation.sync_weights()

    assert is_policy_of(trainer.model, sample(trainer.vllm_generation, [token_ids(seed) for seed in range(8)]))


def test_a_hundred_syncs_leave_every_base_weight_bit_identical_on_both_sides(
    make_trainer: Make, clean_server: VLLMServer, base_model: Path
) -> None:
    trainer = make_trainer(clean_server.base_url, base_model, max_steps=2)
    before, served_before = base_weights(trainer.model), served_base_logprobs(clean_server)

    trainer.train()
    for seed in range(100):
        randomize_adapter(trainer.model, seed)
        trainer.vllm_generation.sync_weights()

    assert same_tensors(base_weights(trainer.model), before)
    assert served_base_logprobs(clean_server) == served_before
    assert is_policy_of(trainer.model, sample(trainer.vllm_generation, [token_ids(seed) for seed in range(4)]))


def test_no_token_of_a_version_comes_from_the_version_before_although_prompts_are_cached(
    make_trainer: Make, clean_server: VLLMServer, base_model: Path
) -> None:
    """One prompt, longer than vLLM's cache blocks (128 tokens on a CPU), while two adapters far apart alternate."""
    trainer = make_trainer(clean_server.base_url, base_model)
    prompts = [token_ids(seed=7, length=300)] * 4
    hits_before = prefix_cache_hits(clean_server)
    for version in range(1, 13):
        randomize_adapter(trainer.model, seed=version % 2)
        trainer.vllm_generation.sync_weights()
        for _ in range(2):  # the second time the prompt is in the cache for sure
            rows = sample(trainer.vllm_generation, prompts)
            assert is_policy_of(trainer.model, rows), f"version {version}: {distance(trainer.model, rows)}"
        randomize_adapter(trainer.model, seed=(version - 1) % 2)
        assert distance(trainer.model, rows).mean() > OTHER_POLICY_MEAN
    assert prefix_cache_hits(clean_server) > hits_before, "the prefix cache was off, so this test proves nothing"


def test_only_the_newest_versions_stay_registered_and_their_files_one_version_longer(
    make_trainer: Make, clean_server: VLLMServer, base_model: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(clean_server.base_url, base_model, lora_sync_keep=2)

    for version in range(1, 7):
        trainer.vllm_generation.sync_weights()
        kept = list(range(max(1, version - 1), version + 1))
        on_disk = list(range(max(1, version - 2), version + 1))
        wait_for_unloads(trainer)
        assert [version_number(name) for name in sorted(adapters_on(clean_server.base_url))] == kept
        # Deleted beside the training.
        assert happens(
            lambda expected=on_disk: (
                [version_number(path.name) for path in sorted(tmp_path.glob("sync/*/*-v*"))] == expected
            )
        )


def version_number(adapter_name: str) -> int:
    return int(adapter_name.rpartition("-v")[2])


def served_base_logprobs(server: VLLMServer) -> list[float]:
    """The base model's log-probabilities for a fixed prompt, as the server computes them."""
    body = {
        "model": server.served_model_name,
        "prompt": token_ids(seed=3, length=40),
        "max_tokens": 1,
        "prompt_logprobs": 0,
        "temperature": 1.0,
    }
    answer = httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=30, trust_env=False).json()
    return [next(iter(token.values()))["logprob"] for token in answer["choices"][0]["prompt_logprobs"][1:]]


def prefix_cache_hits(server: VLLMServer) -> float:
    text = httpx.get(f"{server.base_url}/metrics", timeout=30, trust_env=False).text
    return sum(float(hits) for hits in re.findall(r"^vllm:prefix_cache_hits_total\{.*\} (\S+)$", text, re.MULTILINE))
