"""Training with vLLM in the trainer's process: what is sampled, what is logged, and what stays as it was."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from support.colocate import (
    EXACT,
    OTHER_POLICY,
    answered,
    base_distance,
    colocate_trainer,
    is_exact,
    note_slots,
    noted_slots,
    parts_left_of_a_dropped_trainer,
    samples_policy,
)
from support.launch import LAUNCH_ENV
from support.models import base_weights, lora, merged_model, randomize_adapter, same_tensors
from support.policies import token_ids
from support.processes import run as run_process
from support.trainers import METRICS, prompts, steps_of
from transformers import TrainerCallback

from trl_lora_sync import GRPOConfig, GRPOTrainer
from trl_lora_sync.colocate import engine
from trl_lora_sync.errors import VerificationError

DIFFERENCE = "sampling/sampling_logp_difference/max"


def share_of_letters(completions: list[str], **kwargs: Any) -> list[float]:
    """An easy reward: of the tokens of the untrained model, one in ten is a letter."""
    return [sum(character in "abcdefghijklmnopqrstuvwxyz" for character in text) / 16 for text in completions]


def served_weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Copies of the engine's weights, without the slots of adapters."""
    model = engine.served_model(trainer.vllm_generation.llm)
    return {name: value.clone() for name, value in model.state_dict().items() if "lora_" not in name}


class SamplesEachStep(TrainerCallback):
    """Samples from the engine directly after each step, for a comparison with the trainer's own model."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.exact: list[bool] = []
        self.moved: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        rows = answered(self.trainer.vllm_generation.llm, [token_ids(1), token_ids(2)])
        self.trainer.model.eval()
        self.exact.append(is_exact(self.trainer.model, rows))
        self.moved.append(base_distance(self.trainer.model, rows))
        self.trainer.model.train()


@pytest.fixture(scope="module")
def run(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A trainer that has trained, with what was seen of it before and meanwhile."""
    folder = tmp_path_factory.mktemp("training")
    trainer = colocate_trainer(
        base_model,
        folder,
        reward_funcs=share_of_letters,
        max_steps=20,
        learning_rate=3e-2,
        lr_scheduler_type="constant",
        per_device_train_batch_size=16,
        num_generations=8,
        save_strategy="steps",
        save_steps=10,
    )
    trainer.trained_before, trainer.served_before = base_weights(trainer.model), served_weights(trainer)
    trainer.seen = SamplesEachStep()
    trainer.seen.trainer = trainer
    trainer.add_callback(trainer.seen)
    trainer.train()
    yield trainer
    trainer.vllm_generation.close()


def test_reward_rises(run: Any) -> None:
    rewards = [step["reward"] for step in steps_of(run)]
    assert len(rewards) == 20
    assert sum(rewards[-5:]) > 1.5 * sum(rewards[:5])


def test_each_completion_is_sampled_from_the_policy_that_is_trained(run: Any) -> None:
    """TRL compares the engine's log-probabilities with the trainer's own in each step."""
    differences = [step[DIFFERENCE] for step in steps_of(run)]
    assert len(differences) == 20
    assert max(differences) < EXACT


def test_engine_answers_from_each_new_version_and_not_from_the_base(run: Any) -> None:
    assert len(run.seen.exact) == 20
    assert all(run.seen.exact)
    assert run.seen.moved[-1] > OTHER_POLICY


def test_base_weights_of_trainer_and_engine_are_bit_identical_after_training(run: Any) -> None:
    assert same_tensors(base_weights(run.model), run.trained_before)
    served = served_weights(run)
    assert same_tensors(served, run.served_before)
    linears = [name for name in served if name.endswith("qkv_proj.base_layer.weight")]
    assert linears, "the weights of linear layers are not among what is compared"
    assert all(served[name].numel() for name in linears)


def test_metrics_are_in_the_log_under_the_names_of_server_mode(run: Any) -> None:
    steps = steps_of(run)
    assert all(step.keys() >= METRICS | {"lora_sync/generate_s"} for step in steps)
    versions = [step["lora_sync/version"] for step in steps]
    assert versions == sorted(set(versions))
    assert all(step["lora_sync/verified"] == 1 for step in steps)
    assert steps[0]["lora_sync/verify_gap"] < EXACT
    assert steps[0]["lora_sync/bytes"] == 4 * sum(
        value.numel() for name, value in run.model.named_parameters() if "lora_" in name
    )


def test_log_of_the_run_begins_with_what_was_run(run: Any) -> None:
    lines = (Path(run.args.output_dir) / "lora_sync.jsonl").read_text().splitlines()
    header, first = json.loads(lines[0]), json.loads(lines[1])
    assert header["engine"] == "vllm (colocate)"
    assert header["engine_version"] == engine.installed_version()
    assert header["servers"] == 1
    assert header["settings"]["vllm_sync_strategy"] == "lora_adapter"
    assert header["lora_rank"] == 8
    assert first.keys() >= METRICS


def test_engine_samples_from_the_policy_after_training_has_ended(run: Any) -> None:
    assert samples_policy(run)


def test_evaluation_samples_from_the_policy(run: Any) -> None:
    run.evaluate()
    evaluation = run.state.log_history[-1]
    assert "eval_reward" in evaluation
    assert evaluation[f"eval_{DIFFERENCE}"] < EXACT


def test_a_second_training_samples_from_its_own_policy(run: Any) -> None:
    randomize_adapter(run.model, seed=3)
    begun, last = len(run.seen.exact), steps_of(run)[-1]["lora_sync/version"]
    run.args.max_steps = 3
    run.train()
    steps = steps_of(run)
    assert [step[DIFFERENCE] < EXACT for step in steps] == [True] * 3
    assert all(run.seen.exact[begun:])
    assert steps[0]["lora_sync/version"] > last


def test_training_that_is_resumed_samples_from_the_saved_policy_on(run: Any) -> None:
    randomize_adapter(run.model, seed=4)  # not what the checkpoint holds
    run.args.max_steps = 12
    run.train(resume_from_checkpoint=str(Path(run.args.output_dir) / "checkpoint-10"))
    steps = steps_of(run)
    assert len(steps) == 12
    assert max(step[DIFFERENCE] for step in steps[10:]) < EXACT
    assert samples_policy(run)
    assert same_tensors(base_weights(run.model), run.trained_before)
    assert same_tensors(served_weights(run), run.served_before)


def test_checkpoint_holds_the_adapter_alone(run: Any) -> None:
    files = {file.name for file in (Path(run.args.output_dir) / "checkpoint-20").iterdir()}
    assert "adapter_model.safetensors" in files
    assert not any(name.startswith("model") for name in files)


# Other trainers in the same process


def test_training_needs_no_setting_but_two(
    base_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All else is TRL's default, but for what keeps the run short and on a CPU."""
    args = GRPOConfig(
        output_dir=str(tmp_path),
        use_vllm=True,
        vllm_sync_strategy="lora_adapter",
        use_cpu=True,
        max_steps=2,
        logging_steps=1,
        max_completion_length=8,
        report_to=[],
    )
    trainer = GRPOTrainer(
        model=str(base_model), reward_funcs=share_of_letters, args=args, train_dataset=prompts(), peft_config=lora()
    )
    trainer.train()
    assert len(steps_of(trainer)) == 2
    assert all(step["lora_sync/verified"] == 1 for step in steps_of(trainer))
    assert "in the trainer's process" in capsys.readouterr().out


def test_rollout_function_samples_from_the_active_version_of_each_step(base_model: Path, tmp_path: Path) -> None:
    exact = []

    def rollout(texts: list[str], trainer: Any) -> dict[str, Any]:
        ids = [trainer.processing_class(text)["input_ids"] for text in texts]
        rows = answered(trainer.vllm_generation.llm, ids)
        exact.append(is_exact(trainer.model, rows))
        return {
            "prompt_ids": ids,
            "completion_ids": [row[1] for row in rows],
            "logprobs": [row[2].tolist() for row in rows],
        }

    trainer = colocate_trainer(base_model, tmp_path, trainer_kwargs={"rollout_func": rollout})
    randomize_adapter(trainer.model, seed=5)
    rows = answered(trainer.vllm_generation.llm, [token_ids(1)])  # before any sync
    assert is_exact(trainer.model, rows)
    assert base_distance(trainer.model, rows) > OTHER_POLICY
    trainer.train()
    assert exact == [True] * 3


ENDING = """
import sys
from pathlib import Path

from support.colocate import colocate_trainer

trainer = colocate_trainer(Path(sys.argv[1]), Path(sys.argv[2]), max_steps=1)
trainer.train()
trainer.accelerator.end_training()
"""


def test_process_ends_quietly_after_end_training(
    base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`trl-lora-sync grpo` ended with a traceback of vLLM, whose groups of processes were gone by then."""
    monkeypatch.delenv("MASTER_PORT")  # of this process, where a group may listen
    script = tmp_path / "train.py"
    script.write_text(ENDING)
    command = [sys.executable, script, base_model, tmp_path]
    finished = run_process(command, tmp_path / "log", timeout_s=120.0, env=LAUNCH_ENV)
    assert finished.code == 0, finished.output
    assert "Traceback" not in finished.output


def test_the_revision_that_is_trained_is_the_one_that_is_served(
    base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL gives vLLM the name alone, so completions came from the main branch, and every check passed."""
    downloads = tmp_path / "hub" / "models--org--tiny"
    (downloads / "refs").mkdir(parents=True)
    for number, (branch, commit) in enumerate({"main": "0" * 40, "step-10": "1" * 40}.items()):
        (downloads / "refs" / branch).write_text(commit)
        shutil.copytree(base_model, downloads / "snapshots" / commit)
        merged_model(base_model, 0.05 * number).bfloat16().save_pretrained(downloads / "snapshots" / commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    trainer = colocate_trainer(
        "org/tiny", tmp_path, model_init_kwargs={"dtype": "float32", "revision": "step-10"}, max_steps=1
    )
    randomize_adapter(trainer.model, seed=8)
    trainer.model.eval()
    assert samples_policy(trainer)
    trainer.vllm_generation.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": 1e-2},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}},
        {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention"] * 2},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_settings_that_the_checkpoint_lacks_reach_vllm(
    changes: dict[str, Any], base_model: Path, tmp_path: Path
) -> None:
    """TRL gives them to the trainer's model alone, and a short prompt may show no difference."""
    trainer = colocate_trainer(base_model, tmp_path, model_init_kwargs={"dtype": "float32", **changes}, max_steps=1)
    randomize_adapter(trainer.model, seed=8)
    trainer.model.eval()
    assert samples_policy(trainer)
    trainer.vllm_generation.close()


def test_a_base_that_an_adapter_was_merged_into_is_refused_where_vllm_has_the_checkpoint(
    base_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        VerificationError, match=r"base weights differ from the checkpoint .* vLLM has loaded the checkpoint"
    ):
        colocate_trainer(merged_model(base_model, 0.02), tmp_path, model_init_kwargs=None)


# Last, as each garbage collection takes longer afterwards.
def test_trainer_that_is_dropped_is_freed_and_another_one_samples_on(
    base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM hides all objects from the garbage collector, so a notebook kept every trainer, its model and its engine.

    Its kernels keep slots, and their strides by their addresses, which the slots of another trainer may get.
    """
    kept = colocate_trainer(base_model, tmp_path / "kept", max_steps=1)
    note_slots(kept.vllm_generation.llm)
    noted = noted_slots()
    assert parts_left_of_a_dropped_trainer(base_model, tmp_path / "dropped", monkeypatch) == []
    assert noted_slots() == noted
    randomize_adapter(kept.model, seed=6)
    kept.model.eval()
    assert samples_policy(kept)
    kept.vllm_generation.close()
