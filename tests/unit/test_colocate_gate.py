"""Unit tier: the gate that decides which policy a request to an engine in this process is for, and its KV cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from support.interrupts import Interrupts

from trl_lora_sync.colocate.engine import KVCacheMemory, Policy, SamplingGate
from trl_lora_sync.errors import WrongPolicyError

REQUEST = SimpleNamespace(lora_name="version-3", lora_int_id=1)
POLICY = Policy("version-3", 1, REQUEST)
OTHER_REQUEST = SimpleNamespace(lora_name="version-2", lora_int_id=1)
OTHER = Policy("version-2", 1, OTHER_REQUEST)


def request(lora_request: Any = None) -> Any:
    return SimpleNamespace(lora_request=lora_request)


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest.fixture
def gate(calls: list[str]) -> SamplingGate:
    """With an active version, noting what it calls."""

    @contextmanager
    def folded(policy: Policy | None) -> Iterator[None]:
        calls.append("fold")
        try:
            yield
        finally:
            calls.append("unfold")

    made = SamplingGate(lambda: calls.append("before"), folded)
    made.policy, made.is_ready = POLICY, True
    return made


def test_request_that_names_no_adapter_is_for_the_policy(gate: SamplingGate) -> None:
    asked = request()
    gate.sample(lambda: gate.check(asked))
    assert asked.lora_request is REQUEST


def test_a_call_whose_end_was_interrupted_leaves_no_way_around_the_gate(gate: SamplingGate, calls: list[str]) -> None:
    """The next calls saw no change of the adapter, and were sampled without it in the weights, or from another one."""

    def sample() -> None:
        gate.sample(lambda: None)
        gate.ask(OTHER, lambda: gate.sample(lambda: None))

    interrupts = Interrupts({"contextlib", "trl_lora_sync.colocate.engine", __name__})
    while not interrupts.is_over:
        interrupts.call(sample)
        calls.clear()
        asked = request()
        gate.sample(lambda asked=asked: gate.check(asked))
        assert calls == ["before", "fold", "unfold"]
        assert asked.lora_request is REQUEST
    assert len(interrupts.kept) > 10


def test_request_that_names_the_active_version_is_for_the_policy(gate: SamplingGate) -> None:
    asked = request(SimpleNamespace(lora_name="version-3", lora_int_id=9))
    gate.sample(lambda: gate.check(asked))
    assert asked.lora_request is REQUEST


def test_request_for_an_earlier_version_is_refused(gate: SamplingGate) -> None:
    with pytest.raises(WrongPolicyError, match="'version-2', which is not the active version"):
        gate.sample(lambda: gate.check(request(OTHER_REQUEST)))


def test_request_for_an_adapter_is_refused_where_the_policy_is_in_the_weights(gate: SamplingGate) -> None:
    gate.policy = None
    with pytest.raises(WrongPolicyError, match="'version-2', which is not the active version"):
        gate.sample(lambda: gate.check(request(OTHER_REQUEST)))


def test_request_outside_a_call_is_refused(gate: SamplingGate) -> None:
    gate.sample(lambda: None)
    with pytest.raises(WrongPolicyError, match=r"generate\(\) or \.chat\(\)"):
        gate.check(request())


def test_request_before_the_first_version_is_refused(gate: SamplingGate) -> None:
    gate.is_ready = False
    with pytest.raises(WrongPolicyError, match="sampled from the base model"):
        gate.sample(lambda: gate.check(request()))


def test_calls_inside_a_call_are_part_of_it(gate: SamplingGate, calls: list[str]) -> None:
    gate.sample(lambda: gate.sample(lambda: gate.check(request())))
    assert calls == ["before", "fold", "unfold"]
    with pytest.raises(WrongPolicyError):
        gate.check(request())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_gate_is_closed_and_the_weights_restored_after_an_error(
    error: type[BaseException], gate: SamplingGate, calls: list[str]
) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(error):
        gate.sample(fail)
    assert calls == ["before", "fold", "unfold"]
    with pytest.raises(WrongPolicyError):
        gate.check(request())


def test_gate_stays_closed_if_what_comes_before_fails(calls: list[str]) -> None:
    def fail() -> None:
        raise ValueError("the sync failed")

    gate = SamplingGate(fail)
    gate.policy, gate.is_ready = POLICY, True
    with pytest.raises(ValueError, match="the sync failed"):
        gate.sample(lambda: pytest.fail("the gate was opened"))
    with pytest.raises(WrongPolicyError):
        gate.check(request())


def test_requests_of_our_own_go_to_what_they_are_for_and_nothing_comes_before_them(
    gate: SamplingGate, calls: list[str]
) -> None:
    gate.is_ready = False
    asked, base = request(), request()
    gate.ask(OTHER, lambda: gate.sample(lambda: gate.check(asked)))
    gate.ask(None, lambda: gate.sample(lambda: gate.check(base)))
    assert asked.lora_request is OTHER_REQUEST
    assert base.lora_request is None
    assert calls == ["fold", "unfold"] * 2, "what has to be in force, and no sync"
    assert gate.policy is POLICY


def test_policy_is_the_same_after_requests_of_our_own_have_failed(gate: SamplingGate) -> None:
    def fail() -> None:
        raise ValueError("no answer")

    with pytest.raises(ValueError, match="no answer"):
        gate.ask(OTHER, fail)
    asked = request()
    gate.sample(lambda: gate.check(asked))
    assert asked.lora_request is REQUEST


def test_syncs_within_what_comes_before_a_call_are_not_part_of_it() -> None:
    """A sync verifies a version by separate requests, before the call that triggered it."""
    seen = []

    def sync() -> None:
        trial = request()
        gate.ask(OTHER, lambda: gate.sample(lambda: gate.check(trial)))
        gate.policy, gate.is_ready = POLICY, True
        seen.append(trial.lora_request)

    gate = SamplingGate(sync)
    asked = request()
    gate.sample(lambda: gate.check(asked))
    assert seen == [OTHER_REQUEST]
    assert asked.lora_request is REQUEST


# The memory of the KV cache


class SleepingEngine:
    """By the rules of vLLM 0.31, which is also its own core and scheduler here."""

    def __init__(self) -> None:
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=True))
        self.engine_core = SimpleNamespace(engine_core=self)
        self.scheduler = self
        self.batch_queue: list[str] = []
        self.finished: set[str] = set()
        self.is_paused = self.is_released = False
        self.errors: list[Exception] = []

    def has_requests(self) -> bool:
        return bool(self.finished)

    def step(self) -> None:
        self.finished.clear()
        self.batch_queue.clear()

    def sleep(self, level: int) -> None:
        self.is_paused = True

    def release_kv_cache_memory(self) -> None:
        if self.errors:
            raise self.errors.pop()
        if not self.is_paused or self.has_requests() or self.batch_queue:
            raise RuntimeError("release_kv_cache_memory() requires a completed pause first")
        self.is_released = True

    def wake_up(self, tags: list[str]) -> None:
        self.is_paused = self.is_released = False

    def sample(self) -> None:
        assert not self.is_paused
        assert not self.is_released
        # Both are left behind the last answer.
        self.finished.add("0")
        self.batch_queue.append("0")


def test_memory_is_given_back_after_each_call_whatever_the_scheduler_has_left_over() -> None:
    """A finished request that no later step had removed ended the first call in a RuntimeError."""
    sleeping = SleepingEngine()
    memory = KVCacheMemory(SimpleNamespace(llm_engine=sleeping))
    memory.release()
    for _ in range(2):
        with memory.there():
            sleeping.sample()
        assert sleeping.is_released


def test_call_after_a_release_that_failed_half_way_is_sampled() -> None:
    """The scheduler stayed paused, and the next call waited for it."""
    sleeping = SleepingEngine()
    memory = KVCacheMemory(SimpleNamespace(llm_engine=sleeping))
    memory.release()
    sleeping.errors.append(RuntimeError("no memory left"))
    with pytest.raises(RuntimeError, match="no memory left"), memory.there():
        sleeping.sample()
    with memory.there():
        sleeping.sample()
    assert sleeping.is_released
