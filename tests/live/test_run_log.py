"""Live tier: what a real run leaves in its output_dir for the report, while it trains and after it was resumed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.trainers import prompts
from transformers import TrainerCallback
from vllm_server import VLLMServer

from trl_lora_sync import GRPOTrainer
from trl_lora_sync.cli.main import main

Make = Callable[..., GRPOTrainer]


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out" / "lora_sync.jsonl").read_text().splitlines()]


class LinesAtEachStep(TrainerCallback):
    """How many lines the log has when a step begins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.counts: list[int] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.counts.append(len(lines_of(self.folder)))


def test_a_run_writes_its_log_as_it_trains_and_the_report_splits_each_step(
    make_trainer: Make, clean_server: VLLMServer, base_model: Path, tmp_path: Path
) -> None:
    watch = LinesAtEachStep(tmp_path)
    trainer = make_trainer(clean_server.base_url, base_model, max_steps=4, trainer_kwargs={"callbacks": [watch]})
    trainer.train()

    assert watch.counts[1:] == [2, 3, 4]  # the header and the steps before, while there is no trainer_state.json
    assert not list((tmp_path / "out").glob("**/trainer_state.json"))
    first, *rows = lines_of(tmp_path)
    assert first["model"] == str(base_model)
    assert first["engine"] == "vllm"
    assert first["max_steps"] == 4
    for row in rows[:4]:
        assert row["lora_sync/generate_s"] > 0
        assert row["lora_sync/generate_s"] + row["lora_sync/total_s"] < row["step_time"]
    assert "train_runtime" in rows[-1]
    assert main(["report", str(tmp_path / "out")]) == 0
    assert "Where the time of a step goes" in (tmp_path / "out" / "lora-sync-report.html").read_text()


@pytest.mark.slow
def test_generation_is_counted_per_step_where_a_batch_is_trained_on_twice(
    make_trainer: Make, clean_server: VLLMServer, base_model: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(
        clean_server.base_url, base_model, max_steps=4, num_iterations=2, eval_dataset=prompts(["evening"]),
        per_device_eval_batch_size=4, eval_strategy="steps", eval_steps=1,
    )  # fmt: skip
    trainer.train()
    # Generated for at steps 1 and 3; the evaluations in between are not counted.
    steps = [entry for entry in trainer.state.log_history if "step_time" in entry]
    assert [step["lora_sync/generate_s"] > 0 for step in steps] == [True, False, True, False]


def test_a_resumed_run_goes_on_in_the_same_log(
    make_trainer: Make, clean_server: VLLMServer, base_model: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    make_trainer(clean_server.base_url, base_model, **settings).train()
    second = make_trainer(clean_server.base_url, base_model, **settings | {"max_steps": 3})
    second.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    headers = [line for line in lines_of(tmp_path) if "started" in line]
    assert [header["from_step"] for header in headers] == [0, 2]
