"""Distributed tier: two gloo processes on the CPU, the real server, and failures of process 0 alone."""

import re
from typing import Any

import pytest
from support.policies import NOISE_MAX, NOISE_MEAN, RATIO_SPREAD
from support.trainers import METRICS

from distributed.conftest import TwoProcesses

# The first test of a launch waits for all of it, and the very first for the server as well.
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]
Seen = dict[str, Any]


@pytest.fixture(scope="module")
def launched(two_processes: TwoProcesses) -> dict[str, Seen]:
    """Of everything that works and failures that a run survives, and of starts that fail."""
    return {name: two_processes.seen(name) | {"folder": two_processes.folders[name]} for name in ("working", "failing")}


@pytest.fixture(scope="module")
def working(launched: dict[str, Seen]) -> Seen:
    return launched["working"]


def both(launched: Seen, step: str) -> list[Any]:
    """What `step` returned on each process."""
    for seen in launched["seen"]:
        assert "result" in seen[step], seen[step].get("traceback")
    return [seen[step]["result"] for seen in launched["seen"]]


def both_errors(launched: Seen, step: str) -> list[tuple[str, str]]:
    """What `step` raised on each process."""
    for seen in launched["seen"]:
        assert "error" in seen[step], f"nothing was raised: {seen[step]}"
    return [(seen[step]["error"], seen[step]["message"]) for seen in launched["seen"]]


@pytest.mark.parametrize(("step", "counts"), [("even", [2, 2]), ("uneven", [3, 1]), ("repeated", [2, 2])])
def test_each_process_gets_the_completions_of_its_own_rows_in_order(
    step: str, counts: list[int], working: Seen
) -> None:
    results = both(working, step)

    assert [result["count"] for result in results] == counts
    for result in results:
        assert result["mean"] < NOISE_MEAN
        assert result["max"] < NOISE_MAX


def test_a_process_without_rows_gets_none_and_holds_up_nobody(working: Seen) -> None:
    first, second = both(working, "none_on_one")

    assert first["count"] == 2
    assert first["mean"] < NOISE_MEAN
    assert second["answers"] == [[], [], [], []]


def test_a_process_may_take_more_turns_with_tools_than_the_others(working: Seen) -> None:
    """The others were in another collective by then, and one of them crashed or both hung."""
    first, second = both(working, "turns")

    assert (len(first), len(second)) == (3, 1)
    assert all(turn["mean"] < NOISE_MEAN for turn in [*first, *second])


@pytest.mark.parametrize(
    ("step", "error", "words"),
    [
        ("failing_turns", "ZeroDivisionError", "a tool is broken"),
        ("refused_turn", "VerificationError", "hold different adapters"),
    ],
)
def test_an_error_during_turns_with_tools_is_raised_on_both(step: str, error: str, words: str, working: Seen) -> None:
    for raised, message in both_errors(working, step):
        assert raised == error
        assert words in message


def test_both_processes_name_the_same_version(working: Seen) -> None:
    first, second = both(working, "synced")

    assert first == second
    assert first.endswith("-v1")


@pytest.mark.parametrize(
    ("step", "error", "words"),
    [
        ("refused", "AdapterNotVisibleError", r"refused to load the adapter .*-v2.* The server answered: "),
        ("not_finite", "AdapterNotFiniteError", "hold NaN or infinity"),
        ("different", "VerificationError", "hold different adapters.*changes weights on some processes only"),
        ("full_disk", "AdapterExportError", "there is no room for the .* Free some space"),
        ("server_gone", "ServerUnreachableError", "http://127.0.0.1.*(look at its log|Start it)"),
    ],
)
def test_a_version_that_fails_on_process_0_raises_the_same_on_both(
    step: str, error: str, words: str, working: Seen
) -> None:
    first, second = both_errors(working, step)

    assert first == second
    assert first[0] == error
    assert re.search(words, first[1])
    assert all(seen[step]["seconds"] < 45 for seen in working["seen"])


@pytest.mark.parametrize(
    ("step", "error", "words"),
    [
        ("wrong_key", "ServerAuthError", "VLLM_API_KEY"),
        ("refused_feature", "UnsupportedAdapterError", 'use_dora.*vllm_sync_strategy="weights"'),
        ("refused_setting", "UnsupportedSettingError", "colocate"),
    ],
)
def test_a_start_that_is_refused_raises_the_same_on_both(step: str, error: str, words: str, working: Seen) -> None:
    first, second = both_errors(working, step)

    assert first == second
    assert first[0] == error
    assert re.search(words, first[1])
    assert all(seen[step]["seconds"] < 45 for seen in working["seen"])


@pytest.mark.parametrize(
    "step",
    [
        "after_refused_turn",
        "after_refusal",
        "after_not_finite",
        "after_different",
        "after_full_disk",
        "after_server_gone",
    ],
)
def test_after_a_failed_version_both_processes_go_on_with_the_one_before(step: str, working: Seen) -> None:
    for result in both(working, step):
        assert result["mean"] < NOISE_MEAN


def test_only_process_0_writes_and_talks_to_the_server(two_processes: TwoProcesses, working: Seen) -> None:
    first_pid, _ = both(working, "process")

    assert both(working, "owners")[0] == [first_pid]
    assert both(working, "client") == [True, False]
    started = re.findall(rf"LoRA adapter sync: vllm \S+ at {two_processes.urls['working']} ", working["output"])
    assert len(started) == 3, "one line for each of the trainers that start"


def test_training_logs_the_same_sync_on_both_processes(working: Seen) -> None:
    first, second = both(working, "train")

    assert len(first) == len(second) == 2
    for ours, theirs in zip(first, second, strict=True):
        assert ours.keys() >= METRICS
        assert {name: ours[name] for name in METRICS} == {name: theirs[name] for name in METRICS}
        assert ours["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=RATIO_SPREAD)
        assert ours["sampling/sampling_logp_difference/mean"] < 0.02
    assert first[1]["lora_sync/version"] == first[0]["lora_sync/version"] + 1


def test_an_exception_on_both_processes_leaves_nothing_behind(two_processes: TwoProcesses, working: Seen) -> None:
    assert {error for error, _ in both_errors(working, "broken_reward")} == {"ZeroDivisionError"}
    assert two_processes.left == {}
    assert not (working["folder"] / "sync").exists()


def test_a_training_whose_gradients_are_not_averaged_is_refused_before_it_samples_from_it(working: Seen) -> None:
    """The rows of process 1 came from the policy of process 0, and the processes trained different adapters."""
    first, second = both_errors(working, "evaluated_first")

    assert first == second
    assert first[0] == "UnsupportedSettingError"
    assert "no gradients are averaged" in first[1]
    assert "a train() after an evaluate(). Set eval_on_start=True" in first[1]


@pytest.fixture(scope="module")
def failing(launched: dict[str, Seen]) -> Seen:
    return launched["failing"]


@pytest.mark.parametrize("step", ["unreachable", "unreachable_again"])
def test_a_start_that_fails_on_process_0_raises_on_both_in_time(step: str, failing: Seen) -> None:
    first, second = both_errors(failing, step)

    assert first == second
    assert first[0] == "ServerUnreachableError"
    assert "Start it" in first[1]
    assert all(seen[step]["seconds"] < 60 for seen in failing["seen"])
    assert not (failing["folder"] / "sync").exists()
