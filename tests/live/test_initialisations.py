"""Live tier: adapters that were taken out of the trainer's base weights, on a server with the checkpoint's base."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.models import R, base_weights, lora, peft_model, randomize_adapter, same_tensors
from support.policies import OTHER_POLICY_MEAN, RATIO_SPREAD, distance, is_policy_of, sample, token_ids
from support.servers import Proxy
from support.trainers import steps_of
from vllm_server import VLLMServer

from live.test_served_policy import served_base_logprobs
from trl_lora_sync import GRPOTrainer
from trl_lora_sync.errors import ServerSetupError, UnsupportedAdapterError, VerificationError

Make = Callable[..., GRPOTrainer]
RATIO = "sampling/importance_sampling_ratio/mean"
LOGP_GAP = "sampling/sampling_logp_difference/mean"
PROMPTS = [token_ids(seed) for seed in range(6)]


def assert_samples_from_it(trainer: GRPOTrainer) -> None:
    """The server samples from the trainer's policy, and what is left of its base would be another one."""
    rows = sample(trainer.vllm_generation, PROMPTS)
    assert is_policy_of(trainer.model, rows), distance(trainer.model, rows)
    with trainer.model.disable_adapter():
        assert distance(trainer.model, rows).mean() > OTHER_POLICY_MEAN


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_a_run_trains_the_policy_it_samples_from_and_the_servers_base_stays(
    init: str,
    make_trainer: Make,
    clean_server: VLLMServer,
    base_model: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = served_base_logprobs(clean_server)
    # Large initial matrices take smaller steps than the zeros of plain LoRA.
    trainer = make_trainer(
        clean_server.base_url,
        base_model,
        peft_config=lora(init_lora_weights=init),
        max_steps=5,
        learning_rate=1e-3,
        lora_sync_verify="every",
    )
    said = capsys.readouterr().out
    assert f"adapter rank {2 * R}" in said
    assert "the servers keep the checkpoint's base" in said.lower()

    trainer.train()

    steps = steps_of(trainer)
    assert [step["lora_sync/version"] for step in steps] == [1, 2, 3, 4, 5]
    assert steps[-1]["lora_sync/verified"] == 1
    for step in steps:
        assert step[RATIO] == pytest.approx(1.0, abs=RATIO_SPREAD)
        assert step[LOGP_GAP] < 0.02
        assert step["lora_sync/bytes"] == 2 * 4 * sum(
            value.numel() for name, value in trainer.model.named_parameters() if "lora_" in name
        )
    assert_samples_from_it(trainer)
    randomize_adapter(trainer.model, seed=3)
    assert_samples_from_it(trainer)
    assert served_base_logprobs(clean_server) == before


def test_after_fifty_syncs_both_bases_are_the_same_and_the_last_version_is_served(
    make_trainer: Make, clean_server: VLLMServer, base_model: Path
) -> None:
    served_before = served_base_logprobs(clean_server)
    trainer = make_trainer(clean_server.base_url, base_model, peft_config=lora(init_lora_weights="pissa"))
    before = base_weights(trainer.model)
    for seed in range(50):
        randomize_adapter(trainer.model, seed=seed)
        trainer.vllm_generation.sync_weights()
    assert_samples_from_it(trainer)
    assert same_tensors(base_weights(trainer.model), before)
    assert served_base_logprobs(clean_server) == served_before


def test_a_run_that_is_resumed_is_served_as_it_is_trained(
    make_trainer: Make, clean_server: VLLMServer, base_model: Path, tmp_path: Path
) -> None:
    def make(**config: Any) -> GRPOTrainer:
        return make_trainer(
            clean_server.base_url,
            base_model,
            peft_config=lora(init_lora_weights="pissa"),
            learning_rate=1e-3,
            save_strategy="steps",
            save_steps=2,
            **config,
        )

    make(max_steps=2).train()
    checkpoint = tmp_path / "out" / "checkpoint-2"
    assert json.loads((checkpoint / "adapter_config.json").read_text())["init_lora_weights"] == "pissa"
    trainer = make(max_steps=4)

    trainer.train(resume_from_checkpoint=str(checkpoint))

    assert all(step[LOGP_GAP] < 0.02 for step in steps_of(trainer)[2:])
    assert_samples_from_it(trainer)


def test_a_model_that_the_user_made_is_served_and_one_that_was_trained_elsewhere_is_refused(
    make_trainer: Make, clean_server: VLLMServer, base_model: Path
) -> None:
    model = peft_model(base_model, init_lora_weights="pissa")
    trainer = make_trainer(clean_server.base_url, model, peft_config=None, max_steps=2, learning_rate=1e-3)
    trainer.train()
    assert_samples_from_it(trainer)
    trainer.vllm_generation.close()

    again = make_trainer(clean_server.base_url, model, peft_config=None, max_steps=2, learning_rate=1e-3)
    again.train()
    assert_samples_from_it(again)

    other = peft_model(base_model, init_lora_weights="pissa")
    randomize_adapter(other, seed=1)
    with pytest.raises(UnsupportedAdapterError, match=r"has been trained or loaded.*peft_config=LoraConfig"):
        make_trainer(clean_server.base_url, other, peft_config=None)


def test_a_server_that_gets_the_trained_matrices_instead_of_the_difference_is_refused(
    make_trainer: Make, clean_server: VLLMServer, base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As other tools write the adapter of such a model: the check must not pass for every served model."""
    monkeypatch.setattr("trl_lora_sync.adapter.canonical.LoRAModule.less", lambda module, initial: module)

    with pytest.raises(VerificationError, match="computes something else with it"):
        make_trainer(clean_server.base_url, base_model, peft_config=lora(init_lora_weights="pissa"))


def test_a_server_for_the_rank_of_the_configuration_is_told_that_it_needs_twice_that(
    make_trainer: Make, proxy: Proxy, base_model: Path
) -> None:
    """The shared server takes 16."""
    command = r"`trl-lora-sync serve vllm \S+ --lora-rank 24 --port \d+[^`]*`"
    with pytest.raises(ServerSetupError, match=rf"Restart it with {command}"):
        make_trainer(proxy.base_url, base_model, peft_config=lora(r=12, init_lora_weights="pissa"))
