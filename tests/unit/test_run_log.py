"""Unit tier: the log of a run is whole lines, survives kills and full disks, and ends no training."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerControl, TrainerState

from trl_lora_sync.run_log import RunLog
from unit.tiny import lora_model

ARGS: dict[str, Any] = {
    "vllm_sync_strategy": "lora_adapter",
    "learning_rate": 1e-4,
    "lora_sync_keep": 2,
    "lora_sync_dir": "/secret/folder",
    "lora_sync_server_dir": None,
    "vllm_server_base_url": "http://secret:8000",
}


class Run:
    """A training that logs, without a trainer."""

    def __init__(self, folder: Path, *, step: int = 0, is_main: bool = True, generate_s: float | None = None) -> None:
        self.taken = generate_s
        self.metrics: dict[str, Any] = {}
        summary = {"engine": "vllm", "engine_version": "0.31.0", "servers": 2}
        generation = SimpleNamespace(engine_summary=summary, take_generate_s=self._take)
        model = lora_model(rank_pattern={"q_proj": 32})
        model.train()
        trainer: Any = SimpleNamespace(
            args=SimpleNamespace(output_dir=str(folder), **ARGS),
            model=model,
            vllm_generation=generation,
            accelerator=SimpleNamespace(num_processes=4),
            _metrics={"train": self.metrics},
        )
        self.log = RunLog(trainer)
        self.state = TrainerState(global_step=step, max_steps=10, is_world_process_zero=is_main)

    def _take(self) -> float | None:
        return self.taken

    def begin(self) -> None:
        self.log.on_train_begin(None, self.state, TrainerControl())

    def step(self, **metrics: Any) -> None:
        self.state.global_step += 1
        self.state.log_history.append({**metrics, "step": self.state.global_step})
        self.log.on_log(None, self.state, TrainerControl())


def lines_of(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "lora_sync.jsonl").read_text().splitlines()]


def test_first_line_says_what_was_run_and_each_log_entry_is_one_more(tmp_path: Path) -> None:
    run = Run(tmp_path / "out")
    run.begin()
    run.step(reward=0.5)
    first, second = lines_of(tmp_path / "out")
    assert (first["engine"], first["engine_version"], first["servers"]) == ("vllm", "0.31.0", 2)
    assert (first["lora_rank"], first["max_steps"], first["from_step"]) == (32, 10, 0)
    assert first["versions"].keys() == {"trl-lora-sync", "trl", "transformers", "peft", "torch", "python"}
    assert first["settings"] == {"vllm_sync_strategy": "lora_adapter", "learning_rate": 1e-4, "lora_sync_keep": 2}
    assert second["reward"] == 0.5
    assert second["step"] == 1
    assert second["time"] >= first["started"]


def test_folders_and_hosts_are_not_in_the_log(tmp_path: Path) -> None:
    Run(tmp_path).begin()
    assert "secret" not in (tmp_path / "lora_sync.jsonl").read_text()


def test_processes_other_than_the_first_write_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, is_main=False)
    run.begin()
    run.step(reward=0.5)
    assert list(tmp_path.iterdir()) == []


def test_an_evaluation_before_any_training_is_not_logged(tmp_path: Path) -> None:
    Run(tmp_path).step(eval_reward=0.5)
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_appends_after_the_partial_line_of_the_killed_one(tmp_path: Path) -> None:
    killed = Run(tmp_path)
    killed.begin()
    killed.step(reward=0.1)
    with (tmp_path / "lora_sync.jsonl").open("a") as file:
        file.write('{"time": "2026-01-01T00:00:00+00:00", "rew')
    resumed = Run(tmp_path, step=1)
    resumed.begin()
    resumed.step(reward=0.2)
    text = (tmp_path / "lora_sync.jsonl").read_text().splitlines()
    assert len(text) == 5
    assert json.loads(text[3])["from_step"] == 1
    assert json.loads(text[4])["reward"] == 0.2


def test_a_full_disk_warns_once_and_the_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "lora_sync.jsonl").symlink_to("/dev/full")
    run = Run(tmp_path)
    with caplog.at_level(logging.WARNING):
        run.begin()
        run.step(reward=0.1)
        run.step(reward=0.2)
    assert ["No space left" in record.getMessage() for record in caplog.records] == [True]


def test_an_output_dir_that_cannot_be_made_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    run = Run(tmp_path / "file" / "out")
    with caplog.at_level(logging.WARNING):
        run.begin()
        run.step(reward=0.1)
    assert len(caplog.records) == 1


def test_a_value_that_json_does_not_know_is_written_as_text(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.begin()
    run.step(reward=float("nan"), extra=Path("a"))
    assert lines_of(tmp_path)[1]["extra"] == "a"


@pytest.mark.parametrize(
    ("seconds", "logged"), [(2.0, {"lora_sync/generate_s": [2.0]}), (0.0, {"lora_sync/generate_s": [0.0]}), (None, {})]
)
def test_each_step_gets_the_seconds_of_its_generation(
    seconds: float | None, logged: dict[str, list[float]], tmp_path: Path
) -> None:
    run = Run(tmp_path, generate_s=seconds)
    run.metrics["lora_sync/generate_s"] = []
    run.log.on_step_end(None, run.state, TrainerControl())
    assert run.metrics == {"lora_sync/generate_s": [], **logged}
