"""Live tier: random faults between the trainer and a real server, against the rule in `support.schedules`.

A short cut of `benchmarks/faults.py`, which runs hundreds of schedules.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from support.faults import KINDS, FaultProxy, fault_proxy
from support.models import peft_model, randomize_adapter
from support.policies import sample, token_ids
from support.schedules import SURROUNDINGS, Arena, Checker, Schedule, SmallTrainer, Step, schedule_of
from transformers import AutoTokenizer
from vllm_server import VLLMServer

SEEDS = range(60)


@pytest.fixture(scope="module")
def arena(server: VLLMServer, base_model: Path) -> Arena:
    return Arena([server.base_url], base_model, AutoTokenizer.from_pretrained(base_model))


@pytest.mark.parametrize("seed", SEEDS)
def test_every_accepted_completion_was_sampled_by_the_version_believed_active_or_the_step_raised(
    seed: int, arena: Arena, clean_server: VLLMServer, tmp_path: Path
) -> None:
    schedule = schedule_of(seed)

    outcome = arena.run(schedule, tmp_path)

    assert outcome.violations == []
    assert outcome.accepted > 0
    assert outcome.left == [] or schedule.has_stale_answers


def test_the_schedules_of_these_seeds_have_every_kind_of_fault() -> None:
    steps = [step for seed in SEEDS for step in schedule_of(seed).steps]
    assert {fault.kind for step in steps for fault in step.faults} == set(KINDS)
    assert {step.around for step in steps} == {"", *SURROUNDINGS}
    assert {schedule_of(seed).trainers for seed in SEEDS} == {1, 2}


def test_a_schedule_is_a_function_of_its_seed() -> None:
    assert schedule_of(17) == schedule_of(17)
    assert schedule_of(17) != schedule_of(18)


# The rule can be broken


def sampled_from_the_version_before(proxy: FaultProxy) -> None:
    """A server that answers in the name of the asked version and samples from the one before."""

    def rewrite(path: str, body: dict[str, Any]) -> dict[str, Any]:
        found = re.fullmatch(r"(.*-v)(\d+)", str(body.get("model")))
        if path == "/v1/completions" and found and int(found[2]) > 1:
            return body | {"model": f"{found[1]}{int(found[2]) - 1}"}
        return body

    proxy.rewrite = rewrite
    proxy.rewrite_answer = lambda path, answer: re.sub(rb'("model":"[^"]*-v)1"', rb'\g<1>2"', answer)


QUIET = Schedule(
    seed=1,
    trainers=1,
    steps=tuple(Step(trainer=0, action=action) for action in ("start", "sync", "sync", "generate")),
)


def test_a_schedule_without_faults_breaks_no_rule(arena: Arena, clean_server: VLLMServer, tmp_path: Path) -> None:
    outcome = arena.run(QUIET, tmp_path)

    assert (outcome.violations, outcome.left, outcome.raised) == ([], [], {})
    assert outcome.gap < 0.02 < 0.08 < outcome.margin


def test_a_server_that_samples_from_another_version_and_hides_it_breaks_the_rule(
    arena: Arena, clean_server: VLLMServer, tmp_path: Path
) -> None:
    """Nothing that the client is told gives it away, so only the log-probabilities can."""
    outcome = arena.run(QUIET, tmp_path, tamper=sampled_from_the_version_before)

    assert any("step 3: not sampled by the version believed active" in words for words in outcome.violations)


def test_the_checker_tells_the_version_from_its_neighbours_and_the_base_row_by_row(
    clean_server: VLLMServer, base_model: Path, tmp_path: Path
) -> None:
    model = peft_model(base_model).eval()
    checker = Checker(model)
    with fault_proxy(clean_server.base_url) as proxy:
        tokenizer = AutoTokenizer.from_pretrained(base_model)
        (tmp_path / "sync").mkdir()
        (tmp_path / "seen").symlink_to(tmp_path / "sync", target_is_directory=True)
        trainer = SmallTrainer(model, tokenizer, [proxy.base_url], tmp_path, first_seed=10)
        trainer.start(60.0)
        trainer.sync()
        rows = sample(trainer.generation, [token_ids(seed) for seed in range(6)])
        trainer.close()

    randomize_adapter(model, 99)  # what the model holds meanwhile does not matter
    assert checker.sampled_by(rows, 11)
    for other in (10, 12, 99, None):
        assert not any(checker.sampled_by([row], other) for row in rows)
