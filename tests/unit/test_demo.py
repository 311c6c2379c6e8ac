"""What the demo makes of a run: whether it learned. The run itself needs a server, see `benchmarks/demo_seeds.py`."""

import json
from pathlib import Path
from typing import Any

import pytest
from run import DemoError, check_learned, training_command

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "demo-seeds-cpu.json"


def history(*rewards: float) -> list[dict[str, Any]]:
    return [{"step": step, "reward": reward} for step, reward in enumerate(rewards, start=1)]


def test_a_run_whose_reward_rises_has_learned() -> None:
    check_learned(history(*[0.13] * 5, *[0.4] * 5, *[0.7] * 5))


# The last is a run that doubles its reward and still mostly guesses.
@pytest.mark.parametrize("rewards", [[0.13] * 20, [0.7] * 10 + [0.0] * 5, [0.12] * 10 + [0.25] * 5, [float("nan")] * 5])
def test_a_run_that_does_not_learn_is_an_error_with_both_numbers(rewards: list[float]) -> None:
    with pytest.raises(
        DemoError, match=r"did not learn: the mean reward went from .* to .*, and at least 0.5"
    ) as caught:
        check_learned(history(*rewards))
    assert "demo-seeds-cpu.json" in str(caught.value)


def test_the_demo_trains_without_dropout_unless_told_otherwise() -> None:
    command = training_command(Path("model"), "http://localhost:1", Path("out"), 3)
    assert command[command.index("--lora_dropout") + 1] == "0"

    changed = training_command(Path("model"), "http://localhost:1", Path("out"), 3, ["--lora_dropout", "0.05"])
    assert changed[-2:] == ["--lora_dropout", "0.05"]  # argparse takes the last


def test_the_demo_without_a_server_runs_vllm_in_the_trainers_process() -> None:
    command = training_command(Path("model"), None, Path("out"), 3)
    assert "--use_vllm" in command
    assert not any(word.startswith(("--vllm_server", "--vllm_mode")) for word in command), "colocate is TRL's default"


def test_the_committed_runs_are_of_ten_seeds_in_a_row_and_all_learned() -> None:
    runs = json.loads(RESULT.read_text())["runs"]

    assert [run["seed"] for run in runs] == list(range(10))
    assert {run["arm"] for run in runs} == {"demo"}
    assert all(run["learned"] and run["reward_last_steps"] >= 0.5 for run in runs)
