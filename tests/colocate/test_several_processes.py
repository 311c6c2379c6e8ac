"""Colocate mode with two training processes: each with an engine, or one engine for both.

Run by the Python of `.venv-colocate`, which has vLLM beside the trainer.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.launch import CPU_ENV, TESTS, check_launchers, launch_each, seen_in
from support.processes import Finished

# The first test waits for all ways of a launch.
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]
Seen = dict[str, Any]
# What one of them would exceed if it hung, on average.
TIMEOUT_S = 120.0
# Of log-probabilities; trainer and engine compute in float32.
EXACT = 1e-4
SHARDED = ("fsdp2", "zero3")
MULTI_GPU = ("--multi_gpu",)
# `colocate_ways.py` takes the stage of ZeRO that the name of the way has.
DEEPSPEED = ("--use_deepspeed", "--zero_stage", "3")
# The arguments of accelerate launch.
WAYS = {
    "ddp": MULTI_GPU,
    "ddp+tp2": MULTI_GPU,
    "fsdp2": MULTI_GPU,
    "ddp+tp2+fused": MULTI_GPU,
    "ddp+fused+shared": MULTI_GPU,
    "zero2": DEEPSPEED,
    "zero3": DEEPSPEED,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Where each way writes."""
    return {way: tmp_path_factory.mktemp(way) for way in WAYS}


@pytest.fixture(scope="module")
def launch_of(
    base_model: Path, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[tuple[str, ...]], Finished]:
    """One launch of each kind, for all ways that are started so."""

    @functools.cache
    def launched(arguments: tuple[str, ...]) -> Finished:
        check_launchers()
        env = {} if arguments == DEEPSPEED else CPU_ENV
        script = TESTS / "support" / "colocate_ways.py"
        runs = [[way, str(folders[way]), str(base_model)] for way, others in WAYS.items() if others == arguments]
        return launch_each(script, runs, tmp_path_factory.mktemp("launch"), arguments, env=env, timeout_s=TIMEOUT_S)

    return launched


@pytest.fixture(scope="module", params=WAYS)
def launched(
    request: pytest.FixtureRequest, folders: dict[str, Path], launch_of: Callable[[tuple[str, ...]], Finished]
) -> Seen:
    """What one way came to."""
    way = request.param
    return seen_in(folders[way], launch_of(WAYS[way])) | {"way": way}


def on_all(launched: Seen, step: str) -> list[Any]:
    """What `step` returned on each process."""
    for seen in launched["seen"]:
        assert "result" in seen[step], seen[step].get("traceback")
    return [seen[step]["result"] for seen in launched["seen"]]


def test_what_is_sampled_at_each_step_is_the_trained_policy(launched: Seen) -> None:
    engines = 1 if "+tp2" in launched["way"] else 2
    for steps in on_all(launched, "train"):
        assert [step["lora_sync/version"] for step in steps] == [1, 2]
        assert [step["lora_sync/servers"] for step in steps] == [engines, engines]
        assert [step["lora_sync/verified"] for step in steps] == [1.0, 1.0]
        assert all(step["sampling/sampling_logp_difference/max"] < EXACT for step in steps)


def test_completions_of_each_process_are_of_the_policy_in_one_piece(launched: Seen) -> None:
    for outcome in on_all(launched, "trained"):
        assert outcome["distance"] < EXACT
        assert outcome["moved"] > 0.1


@pytest.mark.parametrize(
    ("step", "error", "words"),
    [
        ("not_finite", "AdapterNotFiniteError", "NaN or infinity"),
        ("wrong_slot", "VerificationError", "the slot holds other bits"),
        ("disproved", "VerificationError", "computes something else"),
        ("different", "VerificationError", "hold different adapters"),
    ],
    ids=["NaN in its matrices", "its slot", "its log-probabilities", "its matrices differ"],
)
def test_a_sync_that_fails_on_process_1_raises_on_both_and_the_previous_version_stays(
    step: str, error: str, words: str, launched: Seen
) -> None:
    if step == "different" and launched["way"] in SHARDED:
        pytest.skip("sharded processes hold parts of one adapter")
    if step == "wrong_slot" and "fused" in launched["way"]:
        pytest.skip("adapters in the weights are in no slot")
    for seen in launched["seen"]:
        assert seen[step].get("error") == error, seen[step]
        assert words in seen[step]["message"]
    before, after = on_all(launched, "active"), on_all(launched, f"after_{step}")
    assert [outcome["active"] for outcome in after] == before
    assert all(outcome["distance"] < EXACT for outcome in after)


def test_a_replaced_adapter_on_process_1_stops_the_generation_of_both(launched: Seen) -> None:
    if "fused" in launched["way"]:
        pytest.skip("adapters in the weights are in no slot")
    for seen in launched["seen"]:
        assert seen["lost_slot"].get("error") == "VerificationError", seen["lost_slot"]
        assert "has replaced the adapter" in seen["lost_slot"]["message"]
    assert all(outcome["distance"] < EXACT for outcome in on_all(launched, "after_lost_slot"))


def test_random_numbers_of_one_process_do_not_part_the_processes_of_an_engine(launched: Seen) -> None:
    """Each process of an engine draws its own tokens, and would go on with others than the rest computes."""
    assert all(outcome["distance"] < EXACT for outcome in on_all(launched, "after_random_numbers"))


def test_training_goes_on_after_failures(launched: Seen) -> None:
    first, second = on_all(launched, "new")
    assert first["active"] == second["active"] != on_all(launched, "active")[0]
    assert all(outcome["distance"] < EXACT for outcome in (first, second))


def test_a_sync_moves_no_parameter_but_the_adapter(launched: Seen) -> None:
    """Every collective of torch is counted; what else moves are outcomes, pickled."""
    for outcome in on_all(launched, "traffic"):
        size, counted = outcome["adapter_bytes"], outcome["bytes"]
        is_sharded = launched["way"] in SHARDED
        assert outcome["is_sharded"] == is_sharded
        assert counted.pop("reduce_", []) == ([size] if is_sharded else [])
        large = [moved for calls in counted.values() for moved in calls if moved > size // 4]
        assert large == ([size] if is_sharded else []), counted


def test_base_weights_stay_bit_for_bit(launched: Seen) -> None:
    for outcome in on_all(launched, "bases"):
        assert outcome["served"]
        assert outcome["trained"]
        assert outcome["served_elements"] > 100_000
