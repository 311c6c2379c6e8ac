"""Live tier: adapters that are more than LoRA on linear layers, in the weights of a real vLLM server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from conftest import FUSED_KEY
from make_model import make_model
from support.models import lora
from support.policies import distance, is_policy_of, sample, token_ids
from support.trainers import grpo_trainer, steps_of, wait_for_unloads
from vllm_server import VLLMServer

from trl_lora_sync.engine_plugins.vllm_fused import BASE, MIDDLEWARE, ROUTE, WORKER
from trl_lora_sync.errors import LoRASyncError

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RIGHT = {"Authorization": f"Bearer {FUSED_KEY}"}
ROOT = Path(__file__).parents[2]
PROMPTS = [token_ids(seed) for seed in range(4)]
# Some of these are in the prompts, and all of them can be sampled.
TOKENS = sorted({one for prompt in PROMPTS for one in prompt[:4]})


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", FUSED_KEY)


@pytest.fixture(scope="module")
def biased_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With biases in its attention, and one weight for the embedding and the output head."""
    folder = tmp_path_factory.mktemp("models") / "biased-qwen3"
    return make_model(folder, attention_bias=True, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def biased_server(biased_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    server = VLLMServer(
        biased_model,
        enable_lora=False,
        runtime_updating=False,
        api_key=FUSED_KEY,
        extra_args=["--worker-extension-cls", WORKER, "--middleware", MIDDLEWARE],
        extra_env={"PYTHONPATH": str(ROOT)},
        log_path=tmp_path_factory.mktemp("server") / "biased.log",
    )
    with server:
        yield server


def state(server: VLLMServer) -> dict[str, Any]:
    """What is in the weights, and how many of the weights that were ever changed are not the base's now."""
    url = f"{server.base_url}{ROUTE}?compare=base"
    found: dict[str, Any] = httpx.get(url, headers=RIGHT, timeout=60, trust_env=False).json()
    return found


def move(model: torch.nn.Module, seed: int, *, matrices: bool = True) -> None:
    """Give all that is trained other values, or all but the matrices of linear layers."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not matrices and name.endswith((".lora_A.default.weight", ".lora_B.default.weight")):
                continue
            if parameter.requires_grad and ("lora_A" in name or "lora_B" in name):
                parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.05)
            elif parameter.requires_grad:
                size = parameter.float().pow(2).mean().sqrt() or 1.0
                parameter.mul_(0.9).add_(torch.randn(parameter.shape, generator=random) * 0.2 * size)


def check(server: VLLMServer, model: Path, folder: Path, syncs: int, *, trains: bool = True, **changes: Any) -> None:
    """A run samples from the policy that it trains, whatever version that is, and leaves the base bit for bit."""
    trainer = grpo_trainer(
        server.base_url, model, folder, peft_config=lora(**changes), lora_sync_serving="fused", max_steps=2
    )
    if trains:
        trainer.train()
        steps = steps_of(trainer)
        assert [step["lora_sync/verified"] for step in steps] == [1, 1]
        assert all(step["sampling/sampling_logp_difference/mean"] < 0.02 for step in steps)
    for seed in range(syncs):
        move(trainer.model, seed)
        trainer.vllm_generation.sync_weights()
    move(trainer.model, syncs, matrices=False)  # is noticed before the next completions, as all changes are
    rows = sample(trainer.vllm_generation, PROMPTS)
    assert is_policy_of(trainer.model, rows)
    with trainer.model.disable_adapter():
        assert distance(trainer.model, rows).mean() > 0.08
    trainer.vllm_generation.close()
    wait_for_unloads(trainer)
    found = state(server)
    assert (found["current"], found["broken"]) == (BASE, None)
    assert all(worker["different"] == 0 for worker in found["compared"])


@pytest.mark.parametrize(
    "changes",
    [
        {"use_dora": True},
        {"modules_to_save": ["lm_head", "model.norm"]},
        {"target_modules": [*LINEAR, "embed_tokens"]},
        {"trainable_token_indices": TOKENS},
    ],
    ids=["DoRA", "modules_to_save", "embeddings", "tokens"],
)
def test_the_server_samples_from_what_is_trained(
    fused_server: VLLMServer, base_model: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    check(fused_server, base_model, tmp_path, 2, **changes)


def test_after_fifty_syncs_of_all_of_it_the_base_is_the_same_bit_for_bit(
    fused_server: VLLMServer, base_model: Path, tmp_path: Path
) -> None:
    everything = {
        "use_dora": True,
        "modules_to_save": ["lm_head", "model.norm"],
        "trainable_token_indices": TOKENS,
    }
    check(fused_server, base_model, tmp_path, 50, **everything)


def test_a_bias_is_added_to_that_of_the_layer(biased_server: VLLMServer, biased_model: Path, tmp_path: Path) -> None:
    check(biased_server, biased_model, tmp_path, 2, lora_bias=True, target_modules=["q_proj", "k_proj", "v_proj"])


def test_a_bias_that_the_server_does_not_have_is_found_at_the_start(
    biased_server: VLLMServer, biased_model: Path, tmp_path: Path
) -> None:
    """vLLM's Qwen3 has none in its o_proj, where Transformers has one."""
    with pytest.raises(LoRASyncError, match=r"o_proj\.bias.*has nothing"):
        grpo_trainer(
            biased_server.base_url,
            biased_model,
            tmp_path,
            peft_config=lora(lora_bias=True, target_modules=["q_proj", "o_proj"]),
            lora_sync_serving="fused",
        )


def test_tokens_of_a_tied_model_change_in_the_output_head_as_well(
    biased_server: VLLMServer, biased_model: Path, tmp_path: Path
) -> None:
    """TRL (1.16) cannot train it: it reads a bias of the output head, which PEFT's wrapper does not have."""
    check(biased_server, biased_model, tmp_path, 2, trains=False, trainable_token_indices=TOKENS)


def test_the_embedding_of_a_tied_model_as_a_target_is_refused_at_the_start(
    biased_server: VLLMServer, biased_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(LoRASyncError, match="ties both"):
        grpo_trainer(
            biased_server.base_url,
            biased_model,
            tmp_path,
            peft_config=lora(target_modules=["q_proj", "embed_tokens"]),
            lora_sync_serving="fused",
        )
