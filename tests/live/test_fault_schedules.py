"""Live tier: random faults between trainers and real servers, against the rule in `support.schedules`.

A short cut of `benchmarks/faults.py`, which runs hundreds of schedules.
"""

import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.faults import (
    COMPLETIONS,
    KINDS,
    LOAD,
    MODELS,
    FaultProxy,
    fault_proxies,
    fault_proxy,
    forget_all,
)
from support.models import peft_model, randomize_adapter
from support.policies import sample, token_ids
from support.schedules import SURROUNDINGS, Arena, Checker, Schedule, SmallTrainer, Step, schedule_of
from support.servers import adapters_on, version_of
from transformers import AutoTokenizer
from vllm_server import VLLMServer

from trl_lora_sync import export_adapter

# They have every kind of fault between them, which is tested.
SEEDS = (53, 180, 226, 306, 307)
OVERLAP_SEEDS = (101, 103, 104, 106)


@pytest.fixture(scope="module")
def second(base_model: Path) -> Iterator[VLLMServer]:
    """Beside the shared server; has room for the adapters of two tenants with two trainers each."""
    with VLLMServer(base_model, max_cpu_loras=32) as running:
        yield running


@pytest.fixture(scope="module")
def arena(server: VLLMServer, second: VLLMServer, base_model: Path) -> Arena:
    return Arena([server.base_url, second.base_url], base_model, AutoTokenizer.from_pretrained(base_model))


@pytest.mark.parametrize("seed", SEEDS)
def test_every_accepted_completion_was_sampled_by_the_version_believed_active_or_the_step_raised(
    seed: int, arena: Arena, clean_server: VLLMServer, tmp_path: Path
) -> None:
    schedule = schedule_of(seed)

    outcome = arena.run(schedule, tmp_path)

    assert outcome.violations == []
    assert outcome.accepted > 0
    assert outcome.left == [] or schedule.has_stale_answers


@pytest.mark.parametrize("seed", OVERLAP_SEEDS)
def test_with_overlap_every_accepted_completion_is_of_the_version_of_its_batch_or_the_step_raised(
    seed: int, arena: Arena, clean_server: VLLMServer, tmp_path: Path
) -> None:
    schedule = replace(schedule_of(seed), overlap=True)

    outcome = arena.run(schedule, tmp_path)

    assert outcome.violations == []
    assert outcome.accepted > 0
    assert outcome.left == [] or schedule.has_stale_answers


def test_the_schedules_of_these_seeds_have_every_kind_of_fault() -> None:
    schedules = [schedule_of(seed) for seed in SEEDS]
    assert {fault.kind for schedule in schedules for fault in schedule.faults} == set(KINDS)
    assert {step.around for schedule in schedules for step in schedule.steps} == {"", *SURROUNDINGS}
    assert {schedule.trainers for schedule in schedules} == {1, 2}
    assert {(schedule.servers, schedule.on_server_loss) for schedule in schedules} == {
        (1, "error"),
        *((servers, choice) for servers in (2, 3) for choice in ("error", "drop")),
    }


def test_a_schedule_is_a_function_of_its_seed() -> None:
    assert schedule_of(17) == schedule_of(17)
    assert schedule_of(17) != schedule_of(18)


# The rule can be broken


def sampled_from_the_version_before(proxy: FaultProxy) -> None:
    """A server that answers in the name of the requested version and samples from the one before."""

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
    steps=tuple(Step(trainer=0, action=action, prompts=4) for action in ("start", "sync", "sync", "generate")),
)
# Verification would end these syncs before a token is sampled.
UNVERIFIED = replace(QUIET, verify="off")


@pytest.mark.parametrize("servers", [1, 3])
def test_a_schedule_without_faults_breaks_no_rule(
    servers: int, arena: Arena, clean_server: VLLMServer, tmp_path: Path
) -> None:
    outcome = arena.run(replace(QUIET, servers=servers), tmp_path)

    assert (outcome.violations, outcome.left, outcome.raised) == ([], [], {})
    assert outcome.gap < 0.02 < 0.08 < outcome.margin
    assert outcome.seen == servers * 4  # after two syncs, a generation, and the step after all faults


def test_batches_sampled_ahead_are_judged_by_the_version_before(
    arena: Arena, clean_server: VLLMServer, tmp_path: Path
) -> None:
    actions = ("start", "sync", "generate", "sync", "generate", "sync", "sync", "generate")
    steps = tuple(Step(trainer=0, action=action, prompts=4) for action in actions)

    outcome = arena.run(replace(QUIET, servers=2, steps=steps, overlap=True), tmp_path)

    assert (outcome.violations, outcome.left, outcome.raised) == ([], [], {})
    assert outcome.ahead == 2
    assert outcome.gap < 0.02 < 0.08 < outcome.margin


def test_a_server_that_samples_from_another_version_and_hides_it_breaks_the_rule(
    arena: Arena, clean_server: VLLMServer, tmp_path: Path
) -> None:
    """No answer to the client reveals it, so only the log-probabilities can."""
    outcome = arena.run(UNVERIFIED, tmp_path, tamper=sampled_from_the_version_before)

    assert any("step 3: not sampled by the version believed active" in words for words in outcome.violations)


def test_one_of_several_servers_that_samples_from_another_version_breaks_the_rule(
    arena: Arena, clean_server: VLLMServer, tmp_path: Path
) -> None:
    def tamper(proxy: FaultProxy) -> None:
        if proxy.target != clean_server.base_url:
            sampled_from_the_version_before(proxy)

    outcome = arena.run(replace(UNVERIFIED, servers=2), tmp_path, tamper)

    assert any("step 3: not sampled by the version believed active" in words for words in outcome.violations)


def test_one_of_several_servers_without_the_active_version_breaks_the_rule(
    arena: Arena, clean_server: VLLMServer, tmp_path: Path
) -> None:
    """It confirms that it has the version, and loses it without a restart that would explain it."""

    def tamper(proxy: FaultProxy) -> None:
        def forget(path: str, body: dict[str, Any]) -> None:
            if path == MODELS and any(version_of(name) == 1 for name in adapters_on(proxy.target)):
                forget_all(proxy.target)

        if proxy.target != clean_server.base_url:
            proxy.on_answer = forget

    outcome = arena.run(replace(UNVERIFIED, servers=2), tmp_path, tamper)

    assert any("step 1: server 1 does not have the active version" in words for words in outcome.violations)


def test_tenants_of_one_server_do_not_see_each_other_s_adapters(clean_server: VLLMServer) -> None:
    with fault_proxies([clean_server.base_url] * 2) as proxies:
        first, second = (httpx.Client(base_url=proxy.base_url, timeout=60, trust_env=False) for proxy in proxies)
        with first, second, tempfile.TemporaryDirectory() as folder:
            export_adapter(peft_model(Path(clean_server.model)), Path(folder) / "adapter")
            loaded = first.post(LOAD, json={"lora_name": "one", "lora_path": f"{folder}/adapter"})
            assert loaded.status_code == 200, loaded.text
            body = {"prompt": [1, 2, 3], "max_tokens": 1}
            answers = [client.post(COMPLETIONS, json=body | {"model": "one"}) for client in (first, second)]
            assert [answer.status_code for answer in answers] == [200, 404]
            assert answers[0].json()["model"] == "one"
            assert [adapters_on(proxy.base_url).keys() for proxy in proxies] == [{"one"}, set()]
            proxies[1].restart()
            assert len(adapters_on(clean_server.base_url)) == 1
            proxies[0].restart()
            assert adapters_on(clean_server.base_url) == {}


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
