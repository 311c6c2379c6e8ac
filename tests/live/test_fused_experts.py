"""Live tier: adapters on the experts and the router of a mixture, in the weights of a real vLLM server.

vLLM on a CPU has no kernels for adapters on experts at run time (0.31); with fused serving it needs none.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import FUSED_KEY
from peft import LoraConfig
from support.learning import EndsOnce, reward_rose_by
from support.models import base_weights, randomize_adapter, same_tensors
from support.moe import make_tiny
from support.policies import distance, sample, token_ids
from support.trainers import LEARNABLE, grpo_trainer, prompts, steps_of
from vllm_server import VLLMServer

from trl_lora_sync.adapter.experts import FAMILIES, ExpertLayer
from trl_lora_sync.engine_plugins.vllm_fused import MIDDLEWARE, ROUTE, WORKER
from trl_lora_sync.errors import LoRASyncError

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
LORAS: dict[str, dict[str, Any]] = {
    "experts and attention": {"target_modules": ATTENTION, "target_parameters": BOTH},
    "one of the two": {"target_modules": ATTENTION, "target_parameters": BOTH[1:]},
    "all-linear, which is the router as well": {"target_modules": "all-linear"},
}
PROMPTS = [token_ids(seed) for seed in range(32)]
# Enough of each prompt for a meaningful mean: without experts of which one matrix is trained, it is 0.26 to 0.29 away,
# and with 8 tokens 0.20 to 0.28.
TOKENS = 32
# Mean distance to the trained policy; measured up to 0.052. There is no bound for one token: in bfloat16 a near tie of
# the router goes to another expert, which was seen to move one by 0.85.
NOISE = 0.07
# The same in float32, where the farthest token is left out: measured up to 6e-6, and one near tie of the router in many
# runs, which moved one token of 253 by 0.13.
EXACT = 1e-4


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", FUSED_KEY)


@pytest.fixture(scope="module", params=["qwen3_moe", "mixtral"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(request.param, tmp_path_factory.mktemp("models") / request.param)


def fused_server(model: Path, log_path: Path, *extra_args: str) -> VLLMServer:
    return VLLMServer(
        model,
        enable_lora=False,
        runtime_updating=False,
        api_key=FUSED_KEY,
        extra_args=["--worker-extension-cls", WORKER, "--middleware", MIDDLEWARE, *extra_args],
        extra_env={"PYTHONPATH": str(Path(__file__).parents[2])},
        log_path=log_path,
    )


@pytest.fixture(scope="module")
def moe_server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    with fused_server(model, tmp_path_factory.mktemp("server") / "moe.log") as server:
        yield server


@pytest.fixture(scope="module")
def exact_server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    """In float32, as training leads to near ties of the router, at which a server in bfloat16 takes other experts."""
    with fused_server(model, tmp_path_factory.mktemp("server") / "exact.log", "--dtype", "float32") as server:
        yield server


@pytest.fixture
def make_trainer(moe_server: VLLMServer, model: Path, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes trainers of the server's model; ends what they hold there."""
    made = []

    def make(lora: str = "experts and attention", server: VLLMServer = moe_server, **config: Any) -> Any:
        peft_config = LoraConfig(r=8, lora_alpha=16, task_type="CAUSAL_LM", **LORAS[lora])
        trainer = grpo_trainer(
            server.base_url, model, tmp_path, peft_config=peft_config, lora_sync_serving="fused", **config
        )
        made.append(trainer)
        return trainer

    yield make
    for trainer in made:
        trainer.vllm_generation.close()


@pytest.mark.parametrize("lora", LORAS)
def test_experts_and_routers_are_served_as_they_are_trained(make_trainer: Callable[..., Any], lora: str) -> None:
    trainer = make_trainer(lora, max_completion_length=TOKENS)
    for seed in range(3):
        randomize_adapter(trainer.model, seed, std=0.1)
        trainer.vllm_generation.sync_weights()
    rows = sample(trainer.vllm_generation, PROMPTS)
    assert distance(trainer.model, rows).mean() < NOISE
    for part in {"experts", *(["router"] if "router" in lora else [])}:
        name = ".experts." if part == "experts" else ".gate."
        parameters = [p for path, p in trainer.model.named_parameters() if name in path and "lora_B" in path]
        kept = [p.detach().clone() for p in parameters]
        assert kept
        for parameter in parameters:
            parameter.data.zero_()
        assert distance(trainer.model, rows).mean() > 3 * NOISE, f"the {part} does not show"
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.data.copy_(value)


def test_the_reward_of_a_run_that_trains_experts_rises(
    make_trainer: Callable[..., Any], exact_server: VLLMServer, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer(
        server=exact_server,
        train_dataset=prompts(conversational=True),
        max_steps=20,
        **LEARNABLE,
    )
    assert (
        "Trained: attention (k_proj, o_proj, q_proj, v_proj), experts (down_proj, gate_up_proj)"
        in capfd.readouterr().out
    )
    base = base_weights(trainer.model)
    has_risen = reward_rose_by(0.15)
    trainer.add_callback(EndsOnce(has_risen))
    trainer.train()
    steps = steps_of(trainer)
    assert has_risen(steps), [step["reward"] for step in steps]
    assert all(step["lora_sync/verified"] == 1 for step in steps)
    for step in steps:
        mean, largest = (step[f"sampling/sampling_logp_difference/{one}"] for one in ("mean", "max"))
        tokens = step["completions/mean_length"] * LEARNABLE["per_device_train_batch_size"]
        assert mean - largest / tokens < EXACT
    distances = distance(trainer.model, sample(trainer.vllm_generation, PROMPTS))
    assert distances.mean() - distances.max() / len(distances) < EXACT
    assert same_tensors(base, base_weights(trainer.model))
    url = f"{exact_server.base_url}{ROUTE}?compare=base"
    trainer.vllm_generation.close()
    state = httpx.get(url, headers={"Authorization": f"Bearer {FUSED_KEY}"}, timeout=60, trust_env=False).json()
    assert (state["broken"], state["compared"][0]["different"]) == (None, 0)


def test_experts_under_a_name_that_the_server_does_not_know_are_refused_at_the_start(
    make_trainer: Callable[..., Any], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, model.name, replace(FAMILIES[model.name], moe="mixture"))
    with pytest.raises(LoRASyncError, match=r"mixture\.experts\.\d+\..*is nothing that the served model can load"):
        make_trainer()


def test_experts_in_another_order_than_the_servers_are_refused_at_the_start_by_their_name(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server finds a place for each of them, so only what it computes shows the wrong layout."""
    read = ExpertLayer.read

    def reversed_read(layer: ExpertLayer, value_of: Callable[[Any], Any]) -> Any:
        return tuple(matrices.flip(0) for matrices in read(layer, value_of))

    monkeypatch.setattr(ExpertLayer, "read", reversed_read)
    with pytest.raises(LoRASyncError, match=r"zero outside the experts modules \(.*experts\.down_proj"):
        make_trainer()
