"""Live tier: real GRPO runs through the public interface, and what they leave behind (nothing)."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from support.models import base_weights, lora, peft_model, randomize_adapter, same_tensors, written_adapter
from support.policies import RATIO_SPREAD, is_policy_of, sample, token_ids
from support.servers import Proxy, adapters_on, vllm_version
from support.trainers import METRICS, mean_byte, prompts, steps_of
from transformers import TrainerCallback
from vllm_server import VLLMServer

from trl_lora_sync import GRPOTrainer

Make = Callable[..., GRPOTrainer]
RATIO = "sampling/importance_sampling_ratio/mean"
LOGP_GAP = "sampling/sampling_logp_difference/mean"


def nothing_left(server: VLLMServer, folder: Path) -> bool:
    """Whether a run removed every adapter and every file."""
    return not adapters_on(server.base_url) and not (folder / "sync").exists()


class SpyTrainer(GRPOTrainer):
    """Notes the steps at which TRL starts to generate."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.generated_at: list[int] = []
        super().__init__(*args, **kwargs)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        self.generated_at.append(self.state.global_step)
        return super()._generate_single_turn(*args, **kwargs)


def test_a_run_trains_the_policy_it_samples_from_and_leaves_nothing_behind(
    make_trainer: Make, clean_server: VLLMServer, base_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[list[Path]] = []

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        seen.append(sorted(tmp_path.glob("sync/*/*-v*")))
        return mean_byte(completions)

    trainer = make_trainer(clean_server.base_url, base_model, reward_funcs=reward, max_steps=6)
    announced = [line for line in capsys.readouterr().out.splitlines() if line.startswith("LoRA adapter sync:")]
    before = base_weights(trainer.model)

    trainer.train()

    printed = capsys.readouterr().out
    assert printed.count("LoRA adapter sync, in all: 6 syncs; median ") == 1
    steps = steps_of(trainer)
    assert len(steps) == 6
    assert [step["lora_sync/version"] for step in steps] == [1, 2, 3, 4, 5, 6]
    for step in steps:
        assert step.keys() >= METRICS
        assert step["lora_sync/total_s"] >= step["lora_sync/load_s"] > 0
        assert step[RATIO] == pytest.approx(1.0, abs=RATIO_SPREAD)
        assert step[LOGP_GAP] < 0.02
    assert sum(step[RATIO] for step in steps) / len(steps) == pytest.approx(1.0, abs=0.03)
    assert steps[0]["lora_sync/bytes"] == 4 * sum(
        value.numel() for name, value in trainer.model.named_parameters() if "lora_" in name
    )
    assert any(value.abs().max() > 0 for name, value in trainer.model.named_parameters() if "lora_B" in name)
    assert same_tensors(base_weights(trainer.model), before)
    assert len(announced) == 1
    version = vllm_version(clean_server.base_url)
    for said in (f"vllm {version}", clean_server.base_url, "rank 8", str(tmp_path / "sync"), "checked:"):
        assert said in announced[0]
    assert all(len(versions) >= 1 for versions in seen), "versions were written somewhere else"
    assert nothing_left(clean_server, tmp_path)


@pytest.mark.parametrize(
    ("dropout", "config", "lines"),
    [(0.05, {}, 1), (0.0, {}, 0), (0.05, {"disable_dropout": True}, 0)],
    ids=["dropout", "no dropout", "dropout that TRL disables"],
)
def test_a_run_with_dropout_says_so_in_one_line_at_its_start(
    dropout: float,
    config: dict[str, bool],
    lines: int,
    make_trainer: Make,
    clean_server: VLLMServer,
    base_model: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_trainer(clean_server.base_url, base_model, peft_config=lora(lora_dropout=dropout), **config)

    said = [line for line in capsys.readouterr().out.splitlines() if "lora_dropout" in line]

    assert len(said) == lines
    for line in said:
        assert line.startswith("LoRA adapter sync: lora_dropout is 0.05, where 0 is advised.")
        assert "Set lora_dropout=0 (--lora_dropout 0), or disable_dropout=True." in line


def test_dropout_sets_the_trainer_apart_from_the_server_and_a_run_without_it_does_not(
    make_trainer: Make, clean_server: VLLMServer, base_model: Path, tmp_path: Path
) -> None:
    gaps = {}
    for dropout in (0.0, 0.05):
        model = peft_model(base_model, lora_dropout=dropout)
        randomize_adapter(model, seed=1)
        folder = tmp_path / str(dropout)
        trainer = make_trainer(clean_server.base_url, model, folder, peft_config=None, max_steps=2, learning_rate=1e-6)
        trainer.train()
        gaps[dropout] = max(step[LOGP_GAP] for step in steps_of(trainer))

    assert gaps[0.0] < 0.02
    assert gaps[0.05] > 2 * gaps[0.0]


def test_evaluation_works_during_training_and_again_after_the_clean_up(
    make_trainer: Make, clean_server: VLLMServer, base_model: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(
        clean_server.base_url,
        base_model,
        max_steps=4,
        eval_dataset=prompts(["evening", "morning"]),
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=4,
    )

    trainer.train()

    evaluations = [entry for entry in trainer.state.log_history if "eval_reward" in entry]
    assert len(evaluations) == 2
    assert nothing_left(clean_server, tmp_path)

    again = trainer.evaluate()

    assert math.isfinite(again["eval_reward"])
    assert again[f"eval_{LOGP_GAP}"] < 0.02
    assert len(adapters_on(clean_server.base_url)) == 1
    trainer.vllm_generation.close()
    assert nothing_left(clean_server, tmp_path)


def test_an_evaluation_at_the_same_step_samples_from_the_version_that_is_there(
    make_trainer: Make, proxy: Proxy, base_model: Path
) -> None:
    trainer = make_trainer(proxy.base_url, base_model, eval_dataset=prompts(["evening"]), per_device_eval_batch_size=4)

    trainer.evaluate()
    trainer.evaluate()

    assert len(proxy.loads()) == 1
    assert len({body["model"] for body in proxy.generations()}) == 1


@pytest.mark.parametrize(
    ("config", "syncs"),
    [
        # Generation every steps_per_generation * num_iterations micro-batches, one optimizer step per
        # gradient_accumulation_steps of them: at steps 0, 1, 2, 3 ...
        ({"max_steps": 4}, 4),
        ({"max_steps": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 2}, 4),
        ({"max_steps": 4, "num_iterations": 2, "gradient_accumulation_steps": 1, "steps_per_generation": 1}, 2),
        # ... twice at the same step, of which the second needs no sync
        ({"max_steps": 3, "gradient_accumulation_steps": 2, "steps_per_generation": 1}, 3),
        ({"max_steps": 4, "num_iterations": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 2}, 2),
    ],
)
def test_there_is_one_sync_for_each_step_at_which_trl_generates(
    config: dict[str, int], syncs: int, make_trainer: Make, proxy: Proxy, base_model: Path
) -> None:
    trainer = make_trainer(proxy.base_url, base_model, trainer_class=SpyTrainer, **config)

    trainer.train()

    assert len(proxy.loads()) == syncs == len(set(trainer.generated_at))
    used = [int(body["model"].rpartition("-v")[2]) for body in proxy.generations()]
    assert sorted(set(used)) == list(range(1, syncs + 1))
    assert used == sorted(used)


def test_a_resumed_run_starts_with_the_adapter_of_its_checkpoint(
    make_trainer: Make, proxy: Proxy, base_model: Path, tmp_path: Path
) -> None:
    first = make_trainer(
        proxy.base_url, base_model, tmp_path, max_steps=2, save_strategy="steps", save_steps=2, learning_rate=0.05
    )
    first.train()
    checkpoint = tmp_path / "out" / "checkpoint-2"
    trained = written_adapter(checkpoint)
    pushed: list[dict[str, torch.Tensor]] = []

    def keep(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/v1/load_lora_adapter" and body["lora_name"].endswith("-v1"):
            pushed.append(written_adapter(Path(body["lora_path"])))
        return body

    proxy.before = keep
    second = make_trainer(proxy.base_url, base_model, tmp_path, max_steps=4, learning_rate=0.05)
    second.train(resume_from_checkpoint=str(checkpoint))

    assert second.state.global_step == 4
    [first_version] = pushed
    scaling = 2.0  # lora_alpha / r
    assert first_version.keys() == trained.keys()
    for name, tensor in trained.items():
        assert torch.equal(first_version[name], tensor * scaling if "lora_B" in name else tensor), name
    resumed = [step for step in steps_of(second) if step["step"] > 2]
    assert [step["lora_sync/version"] for step in resumed] == [1, 2]
    assert resumed[0][LOGP_GAP] < 0.02


def test_with_a_reference_adapter_the_trained_one_is_served(
    make_trainer: Make, clean_server: VLLMServer, base_model: Path
) -> None:
    """GRPO gives a PeftModel a second adapter, "ref", when beta is not 0."""
    model = peft_model(base_model)
    randomize_adapter(model, seed=5)
    trainer = make_trainer(clean_server.base_url, model, peft_config=None, beta=0.1, max_steps=4, learning_rate=0.02)
    assert isinstance(trainer.model, PeftModel)
    assert set(trainer.model.peft_config) == {"default", "ref"}

    trainer.train()

    steps = steps_of(trainer)
    assert steps[-1]["kl"] > 0.01, "the two adapters are still alike, so this test proves nothing"
    assert all(step[LOGP_GAP] < 0.02 for step in steps)
    trainer.vllm_generation.sync_weights()
    rows = sample(trainer.vllm_generation, [token_ids(seed) for seed in range(8)])
    assert is_policy_of(trainer.model, rows)
    trainer.model.set_adapter("ref")
    assert not is_policy_of(trainer.model, rows)
    trainer.model.set_adapter("default")


def test_a_conversational_run_with_several_prompts_per_batch_trains(
    make_trainer: Make, clean_server: VLLMServer, base_model: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(
        clean_server.base_url,
        base_model,
        train_dataset=prompts(conversational=True),
        per_device_train_batch_size=8,
        num_generations=2,
    )

    trainer.train()

    assert all(step[RATIO] == pytest.approx(1.0, abs=RATIO_SPREAD) for step in steps_of(trainer))
    assert nothing_left(clean_server, tmp_path)


def test_an_exception_in_a_reward_function_leaves_nothing_behind(
    make_trainer: Make, clean_server: VLLMServer, base_model: Path, tmp_path: Path
) -> None:
    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        if trainer.state.global_step == 1:
            assert len(adapters_on(clean_server.base_url)) == 2
            raise ZeroDivisionError("the reward is broken")
        return mean_byte(completions)

    trainer = make_trainer(clean_server.base_url, base_model, reward_funcs=reward)

    with pytest.raises(ZeroDivisionError, match="the reward is broken"):
        trainer.train()

    assert nothing_left(clean_server, tmp_path)


def test_ctrl_c_in_the_middle_of_a_run_leaves_nothing_behind(
    make_trainer: Make, clean_server: VLLMServer, base_model: Path, tmp_path: Path
) -> None:
    class Interrupt(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    trainer = make_trainer(clean_server.base_url, base_model, trainer_kwargs={"callbacks": [Interrupt()]})

    with pytest.raises(KeyboardInterrupt):
        trainer.train()

    assert nothing_left(clean_server, tmp_path)


def test_by_default_versions_are_kept_in_shared_memory_for_a_server_on_this_host(
    make_trainer: Make, proxy: Proxy, base_model: Path
) -> None:
    trainer = make_trainer(proxy.base_url, base_model, lora_sync_dir=None, max_steps=1)

    trainer.train()

    [load] = proxy.loads()
    assert load["lora_path"].startswith("/dev/shm/trl-lora-sync-")
    assert not Path(load["lora_path"]).parent.exists()


def test_the_run_needs_no_vllm_in_the_environment_of_the_trainer() -> None:
    """All tests of this folder train in this process, so its lacking vLLM is what they prove."""
    with pytest.raises(ModuleNotFoundError, match="vllm"):
        import vllm  # noqa: F401
