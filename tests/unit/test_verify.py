"""Unit tier: when a server's answers prove that it samples from the trainer's adapter, and when they disprove it."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from contract.reference import FakeReference
from contract.served import SMALL
from support.adapters import with_tensors

from trl_lora_sync.adapter.canonical import PLAIN
from trl_lora_sync.adapter.store import StoredAdapter
from trl_lora_sync.checks.verify import PROBE_PROMPT, TOLERANCE, Scores, Trial, VerificationResult, compare
from trl_lora_sync.engines.base import Deadline
from trl_lora_sync.errors import LoRASyncError, VerificationError
from trl_lora_sync.metrics import SyncReport
from trl_lora_sync.sync import AdapterSync
from trl_lora_sync.testing import MODULES, FakeSGLang, random_adapter
from unit.fleets import FleetRun, settings_for

pytestmark = pytest.mark.outside

BASE = [-2.0, -3.0, -5.0, -4.0]
CHANGE = [0.4, -0.2, 0.3, -0.5]
NOISE = [0.01, -0.02, 0.015, -0.01]


def plus(left: list[float], right: list[float], times: float = 1.0) -> list[float]:
    return [a + times * b for a, b in zip(left, right, strict=True)]


def judged(*, served_times: float = 1.0, times: float = 1.0, noise: float = 1.0, **kwargs: float) -> VerificationResult:
    """The trained change is `times * CHANGE`, and the served one `served_times` as much, with noise."""
    trained = Scores(base=BASE, adapted=plus(BASE, CHANGE, times))
    served_base = plus(BASE, NOISE, noise)
    served = Scores(base=served_base, adapted=plus(plus(BASE, CHANGE, times * served_times), NOISE[::-1], noise))
    return compare(served, trained, **kwargs)


# Judging


def test_the_same_adapter_up_to_rounding_is_proved() -> None:
    evidence = judged()
    assert evidence.confirms
    assert not evidence.is_mismatch
    assert evidence.gap_mean == pytest.approx(sum(map(abs, NOISE)) / 4)
    assert evidence.gap_max == pytest.approx(0.02)
    assert evidence.trained_change == pytest.approx(0.35)


@pytest.mark.parametrize("served_times", [0.0, 0.5, 2.0, -1.0], ids=["no adapter", "half", "twice", "negated"])
def test_another_change_is_found_out(served_times: float) -> None:
    evidence = judged(served_times=served_times)
    assert evidence.is_mismatch
    assert not evidence.confirms


def test_an_adapter_that_is_zero_neither_proves_nor_contradicts() -> None:
    evidence = judged(times=0.0)
    assert not evidence.confirms
    assert not evidence.is_mismatch


def test_a_zero_adapter_that_changes_the_served_model_is_found_out() -> None:
    trained = Scores(base=BASE, adapted=BASE)
    assert compare(Scores(base=BASE, adapted=plus(BASE, CHANGE)), trained).is_mismatch


def test_a_change_that_drowns_in_the_noise_of_the_base_proves_nothing() -> None:
    evidence = judged(times=0.05, served_times=0.0, noise=1.0)
    assert not evidence.is_mismatch
    assert not evidence.confirms


def test_the_tolerance_grows_with_the_gap_of_the_base_models() -> None:
    precise, rough = judged(noise=0.0), judged(noise=10.0)
    assert rough.tolerance - precise.tolerance == pytest.approx(TOLERANCE * rough.base_gap)
    assert judged(served_times=0.5, noise=0.0).is_mismatch
    assert not judged(served_times=0.5, noise=10.0).is_mismatch


def test_the_tolerance_can_be_relaxed() -> None:
    assert judged(served_times=0.5).is_mismatch
    assert not judged(served_times=0.5, tolerance=20.0).is_mismatch


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_contradicts(value: float) -> None:
    trained = Scores(base=BASE, adapted=plus(BASE, CHANGE))
    assert compare(Scores(base=BASE, adapted=[value, *trained.adapted[1:]]), trained).is_mismatch


def test_words_give_both_changes_and_the_tolerance() -> None:
    words = str(judged(served_times=0.0))
    assert "by 0.0" in words
    assert "by 0.3500 in the trainer" in words
    assert "tolerated" in words


# In a sync, on fakes that compute


class VerifiedRun(FleetRun):
    """A run whose trainer scores the adapter as well.

    Attributes:
        lies: what the trainer computes instead of the adapter that it publishes, for the next syncs.
        comparisons: how often the trainer scored the adapter.
    """

    lies: Callable[[], Any] | None = None
    comparisons = 0
    trial_size = 1.0
    sizes: Mapping[str, float] = MappingProxyType({})

    def start(self) -> str:
        return self.sync.start(self.read_next, self.base(), self.trials() if self.trial_size else ())

    def trials(self) -> list[Trial]:
        return [self.trial("attention", "self_attn"), self.trial("MLP", "mlp")]

    def trial(self, group: str, block: str) -> Trial:
        """Of `trial_size` in one block of each layer, or of the group's size, and zero in the others."""
        some, size = another_adapter(), self.sizes.get(group, self.trial_size)
        tensors = {name: value * (size if f".{block}." in name else 0.0) for name, value in some.tensors.items()}
        adapter = with_tensors(some, tensors)
        return Trial(
            group=group,
            modules=[f"model.layers.*.{block}"],
            read=lambda served: adapter,
            scores=Scores(base=self.logprobs(None), adapted=self.logprobs(adapter)),
        )

    def publish(self) -> SyncReport:
        self.step += 1
        return self.sync.publish(self.read_next(self.sync.form), self.score)

    def score(self) -> Scores:
        self.comparisons += 1
        adapter = self.lies() if self.lies else self.read[-1]
        return Scores(base=self.logprobs(None), adapted=self.logprobs(adapter))

    def logprobs(self, adapter: Any) -> list[float]:
        return FakeReference(self.fakes[0]).logprobs(adapter, PROBE_PROMPT[:1], PROBE_PROMPT[1:])

    def publish_zero(self) -> SyncReport:
        """An adapter as before the first step."""
        some = another_adapter()
        zero = replace(some, flat=torch.zeros_like(some.flat))
        self.comparisons += self.sync.needs_verification
        base = self.logprobs(None)
        return self.sync.publish(zero, lambda: Scores(base=base, adapted=base))


StartRun = Callable[..., VerifiedRun]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[StartRun]:
    with ExitStack() as stack:

        def begin(servers: int = 1, *, trial_size: float = 1.0, start: bool = True, **settings: Any) -> VerifiedRun:
            """With trial adapters of the size of any other one; 0 for a run without."""
            fakes = [stack.enter_context(FakeSGLang(shapes=SMALL)) for _ in range(servers)]
            begun = VerifiedRun(AdapterSync(settings_for(fakes, tmp_path / "sync", **settings)), fakes)
            begun.trial_size = trial_size
            stack.callback(begun.sync.close)
            if start:
                begun.start()
            return begun

        yield begin


def another_adapter() -> Any:
    return random_adapter(SMALL, 99, rank=8)


def ignoring(fake: FakeSGLang, modules: Collection[str] = MODULES) -> None:
    """Let the fake load adapters and compute the base with these modules of each of them."""
    fetch = fake.scheduler.fetch

    def fetch_others(lora_id: str | None) -> Any:
        patch = fetch(lora_id)
        return {place: matrices for place, matrices in patch.items() if place[1] not in modules}

    fake.scheduler.fetch = fetch_others  # type: ignore[method-assign]


def test_a_server_is_proved_at_the_start_however_small_the_trained_adapter_is(run: StartRun) -> None:
    training = run(servers=2, verify="first")
    assert training.adapters() == [[], []]

    reports = [training.publish_zero() for _ in range(12)]

    assert all(report.is_verified for report in reports)
    assert [report.verify_gap is not None for report in reports] == [True] + [False] * 11


def test_a_server_that_ignores_adapters_is_refused_at_the_start(run: StartRun) -> None:
    """As vLLM ignores tensors whose names it does not know."""
    training = run(servers=2, verify="first", start=False)
    ignoring(training.fakes[1])
    with pytest.raises(VerificationError, match=r"computes something else with it") as caught:
        training.start()
    assert training.fakes[1].base_url in str(caught.value)
    assert training.adapters() == [[], []]


@pytest.mark.parametrize(
    ("ignored", "group", "served_group"),
    [
        (["gate_proj", "up_proj", "down_proj"], "the MLP modules (model.layers.*.mlp)", "attention"),
        (["down_proj"], "the MLP modules (model.layers.*.mlp)", "attention"),
        (["q_proj", "k_proj", "v_proj", "o_proj"], "the attention modules (model.layers.*.self_attn)", "MLP"),
    ],
    ids=["MLP", "down_proj", "attention"],
)
def test_a_server_that_ignores_one_group_of_modules_is_refused_with_the_name_of_that_group(
    run: StartRun, ignored: list[str], group: str, served_group: str
) -> None:
    training = run(verify="first", start=False)
    ignoring(training.fakes[0], ignored)
    with pytest.raises(VerificationError, match="computes something else with it") as caught:
        training.start()
    assert group in str(caught.value)
    assert f"the {served_group} modules" not in str(caught.value)
    assert training.adapters() == [[]]


@pytest.mark.parametrize("weak", ["attention", "MLP"])
def test_a_server_is_not_proved_while_one_group_of_modules_is_not(
    run: StartRun, caplog: pytest.LogCaptureFixture, weak: str
) -> None:
    training = run(verify="first", start=False)
    training.sizes = {weak: 1e-6}
    training.start()
    warnings = [line for line in caplog.messages if "A trial adapter does not prove" in line]
    assert len(warnings) == 1
    assert f"the {weak} modules" in warnings[0]
    assert training.publish_zero().is_verified is False


def test_a_server_that_ignores_one_group_after_a_restart_is_not_taken_back(run: StartRun) -> None:
    training = run(verify="first")
    training.publish_zero()
    training.fakes[0].restart()
    ignoring(training.fakes[0], ["gate_proj", "up_proj", "down_proj"])
    with pytest.raises(VerificationError, match=r"the MLP modules"):
        training.generate()


def test_a_server_that_was_restarted_is_proved_by_the_trial_adapter_again(run: StartRun) -> None:
    training = run(servers=2, verify="first")
    training.publish_zero()
    training.fakes[1].restart()
    training.generate()

    reports = [training.publish_zero() for _ in range(3)]

    assert all(report.is_verified for report in reports)
    assert [report.verify_gap is not None for report in reports] == [True, False, False]  # the first one it is given


def test_a_server_that_ignores_adapters_after_a_restart_is_not_taken_back(run: StartRun) -> None:
    training = run(verify="first")
    training.publish_zero()
    training.fakes[0].restart()
    ignoring(training.fakes[0])
    with pytest.raises(VerificationError, match="computes something else"):
        training.generate()
    assert all("trial" not in version for versions in training.adapters() for version in versions)


def test_an_adapter_of_other_modules_than_the_trial_adapter_has_to_be_proved_again(run: StartRun) -> None:
    training = run(verify="first")
    assert training.publish_zero().is_verified
    fewer = random_adapter(SMALL, 7, rank=8, modules=["q_proj", "v_proj"])
    zero = replace(fewer, flat=torch.zeros_like(fewer.flat))
    base = training.logprobs(None)

    report = training.sync.publish(zero, lambda: Scores(base=base, adapted=base))

    assert report.verify_gap is not None
    assert report.is_verified is False


def test_a_trial_adapter_without_effect_proves_nothing_and_that_is_said(
    run: StartRun, caplog: pytest.LogCaptureFixture
) -> None:
    training = run(verify="first", trial_size=1e-6)
    assert "A trial adapter does not prove" in caplog.text
    assert training.publish_zero().is_verified is False
    assert training.publish().is_verified


def test_first_verifies_until_it_is_proved_and_then_no_more(run: StartRun) -> None:
    training = run(verify="first", trial_size=0)
    report = training.publish()
    assert report.is_verified
    assert report.verify_gap is not None
    assert report.verify_gap_max is not None
    assert report.verify_gap <= report.verify_gap_max < 1e-3
    again = training.publish()
    assert again.is_verified
    assert again.verify_gap is None
    assert training.comparisons == 1


def test_every_verifies_at_each_sync(run: StartRun) -> None:
    training = run(verify="every")
    assert all(training.publish().verify_gap is not None for _ in range(3))
    assert training.comparisons == 3


def test_off_verifies_nothing(run: StartRun) -> None:
    training = run(verify="off")
    training.lies = another_adapter
    report = training.publish()
    assert report.is_verified is None
    assert report.verify_gap is None
    assert training.comparisons == 0


def test_a_version_of_another_policy_is_withdrawn_and_the_one_before_stays_active(run: StartRun) -> None:
    training = run(servers=2, verify="every")
    training.publish()
    training.lies = another_adapter
    with pytest.raises(VerificationError, match=r"computes something else.*wrong|another checkpoint") as caught:
        training.publish()
    for said in ("-v2'", "on the server and by", "Likely causes", "lora_sync_verify_tolerance (now 3)"):
        assert said in str(caught.value)
    assert isinstance(caught.value, LoRASyncError)
    assert training.adapters() == [["v1"], ["v1"]]
    assert training.is_policy_of(training.generate(), training.read[1])
    training.lies = None
    assert training.publish().version == 3


def test_an_adapter_that_the_server_ignores_is_found_out(run: StartRun) -> None:
    """As vLLM ignores tensors whose names it does not know."""
    training = run(verify="first", trial_size=0)
    lied = training.sync.fleet.servers[0].base_logprobs

    async def lie(*args: Any) -> list[float]:
        return lied

    training.sync.fleet.servers[0].engine.score = lie  # type: ignore[method-assign]
    with pytest.raises(VerificationError, match=r"by 0\.0000 on the server"):
        training.publish()
    assert training.sync.active is None


def test_while_the_adapter_is_zero_nothing_is_proved_and_the_next_sync_tries_again(run: StartRun) -> None:
    training = run(verify="first", trial_size=0)
    report = training.publish_zero()
    assert report.is_verified is False
    assert report.verify_gap is not None
    assert report.metrics()["lora_sync/verified"] == 0.0
    assert training.publish().is_verified


def test_an_adapter_that_stays_too_small_to_show_is_looked_at_ever_more_rarely(run: StartRun) -> None:
    training = run(verify="first", trial_size=0)
    attempts = []
    for number in range(1, 41):
        before = training.comparisons
        assert training.publish_zero().is_verified is False
        attempts += [number] * (training.comparisons - before)
    assert attempts == [1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 33]


def test_a_server_that_was_restarted_has_to_prove_itself_again(run: StartRun) -> None:
    training = run(servers=2, verify="first", trial_size=0)
    training.publish()
    assert training.comparisons == 1
    training.fakes[1].restart()
    training.generate()
    assert training.publish().is_verified
    assert training.comparisons == 2
    training.publish()
    assert training.comparisons == 2


def test_a_sync_that_is_repeated_to_verify_a_server_has_one_deadline(
    run: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second attempt began with a new one, so a sync could take twice the time that the setting allows."""
    training = run(verify="first", trial_size=0)
    training.publish()
    deadlines: list[float] = []
    fleet, load = training.sync.fleet, training.sync.fleet.load

    async def loading(stored: StoredAdapter, deadline: Deadline) -> dict[int, float]:
        deadlines.append(deadline.ends_at)
        return await load(stored, deadline)

    monkeypatch.setattr(fleet, "load", loading)
    training.fakes[0].restart()
    assert training.publish().is_verified
    assert len(deadlines) == 2
    assert len(set(deadlines)) == 1


def test_a_server_that_is_restarted_while_it_is_verified_is_given_the_version_again(run: StartRun) -> None:
    training = run(servers=2, verify="every")
    training.publish()
    server = training.sync.fleet.servers[1]
    score = server.engine.score

    async def restart_first(*args: Any) -> list[float]:
        server.engine.score = score  # type: ignore[method-assign]
        training.fakes[1].restart()
        return await score(*args)

    server.engine.score = restart_first  # type: ignore[method-assign]
    assert training.publish().is_verified
    assert all("v2" in versions for versions in training.adapters())
    assert training.is_policy_of(training.generate())


def test_without_a_score_nothing_is_verified_and_the_next_sync_wants_one(run: StartRun) -> None:
    training = run(verify="first", trial_size=0)
    training.sync.publish(training.read_next(PLAIN), lambda: None)
    assert training.sync.needs_verification
    assert training.publish().is_verified
    assert not training.sync.needs_verification
