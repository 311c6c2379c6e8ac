"""What is measured of the arms that stand side by side; in every loop they take turns."""

import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from sync_measure import distance, plain_sampling, reference_logprobs, rotated

from versus.arms import Arm, Phases, deadline
from versus.clock import Clock, OutOfTimeError
from versus.kinds import OURS
from versus.scoring import prompt_logprobs
from versus.workbench import Workbench

T = TypeVar("T")
Save = Callable[[Any], None]
_TOP_TOKENS = 20
_SPLITS = 2
_SCORED_TOKENS = 64
# Of one turn of an arm, or of each of its many syncs.
_STUCK_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Load:
    """What the servers decode: so many random prompts at once, all answers of the same length."""

    concurrency: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    repeats: int


class Turns:
    """Calls something for each arm, the first one another each time, and goes on without arms that fail.

    Attributes:
        failed: the errors of the arms that failed.
    """

    def __init__(self, arms: Sequence[Arm], clock: Clock) -> None:
        self._arms = {arm.name: arm for arm in arms}
        self._clock = clock
        self._turn = 0
        self.failed: dict[str, str] = {}

    @property
    def arms(self) -> list[Arm]:
        return list(self._arms.values())

    def each(self, act: Callable[[Arm], T]) -> Iterator[tuple[str, T]]:
        names = rotated(list(self._arms), self._turn) if self._arms else []
        self._turn += 1
        for name in names:
            found = self.attempt(name, act)
            if found:
                yield name, found[0]

    def attempt(self, name: str, act: Callable[[Arm], T]) -> list[T]:
        """What `act` returns for one arm, in a list; nothing if it failed, and no more turns for it then."""
        self._clock.check()
        try:
            with self._clock.at_most(_STUCK_S):
                return [act(self._arms[name])]
        except OutOfTimeError:
            raise
        except Exception as error:  # an arm that fails must not cost the others their turn on a lent machine
            traceback.print_exc()
            self._clock.say(f"{name} failed and gets no more turns")
            self.failed[name] = f"{type(error).__name__}: {error}"[:600]
            self._arms.pop(name)
            return []


def measure_syncs(turns: Turns, bench: Workbench, warmup: int, repeats: int, save: Save) -> None:
    """Seconds of a sync and of the first token after it, the trainer's memory, and whether the right policy is served.

    Ours go first in the first round: a stock sync changes the trainer's base weights, and with them the log-
    probabilities that the servers are checked against.
    """
    bench.base_drift()  # puts right what earlier syncs did
    bench.give_back_memory()
    found: dict[str, dict[str, Any]] = {}
    order = sorted((arm.name for arm in turns.arms), key=lambda name: name == "weights")
    for name in order:
        for check in turns.attempt(name, lambda arm: _sync_and_check(arm, bench)):
            found[name] = {"served": check, "samples": []}
    for turn in range(warmup + repeats):
        for name, (sample, split) in turns.each(lambda arm: _one_sync(arm, bench)):
            if turn >= warmup:
                found[name]["samples"].append(sample)
                found[name]["median"] = medians(found[name]["samples"])
                _add_split(found[name], split)
        save(found)
    told = {name for name, one in found.items() if "splits" in one}
    for _ in range(_SPLITS):
        for name, split in turns.each(lambda arm: None if arm.name in told else _one_split(arm, bench)):
            _add_split(found[name], split)
    save(found)


def _add_split(found: dict[str, Any], split: Phases | None) -> None:
    if split is not None:
        found.setdefault("splits", []).append(asdict(split))
        found["split"] = medians(found["splits"])


def _one_sync(arm: Arm, bench: Workbench) -> tuple[dict[str, float], Phases | None]:
    bench.change_adapter()
    (prompt,) = bench.prompts(1, _SCORED_TOKENS)
    with bench.watched_memory() as memory:
        start = time.perf_counter()
        split = arm.sync()
        returned = time.perf_counter()
        # A stock sync leaves the unmerging in the stream in which training goes on.
        bench.settle_compute()
        ready = time.perf_counter()
        # Ours copies the version to its file in another stream.
        bench.settle()
        synced = time.perf_counter()
    asked = time.perf_counter()
    arm.sample([prompt], plain_sampling(max_tokens=1, logprobs=None))
    first_token_s = time.perf_counter() - asked
    ends = {"returned_s": returned, "ready_s": ready, "sync_s": synced}
    return {**{name: end - start for name, end in ends.items()}, "first_token_s": first_token_s, **memory}, split


def _one_split(arm: Arm, bench: Workbench) -> Phases:
    bench.change_adapter()
    return arm.split()


def _sync_and_check(arm: Arm, bench: Workbench) -> dict[str, float]:
    """Distance of the served log-probabilities from the trainer's own, with its adapter and without."""
    bench.change_adapter()
    arm.sync()
    (group,) = bench.prompts(1, _SCORED_TOKENS)
    references = reference_logprobs(bench.model, list(group.prompt))
    ((completion,),) = arm.sample([group], plain_sampling(max_tokens=1, logprobs=_TOP_TOKENS))
    assert completion.logprobs is not None
    assert completion.logprob_token_ids is not None
    pairs = zip(completion.logprob_token_ids[0], completion.logprobs[0], strict=True)
    served = {token: value for token, value in pairs if value is not None}
    gap, effect = (distance(served, reference) for reference in references)
    if not gap < effect:
        raise RuntimeError(
            f"the served log-probabilities are {gap:.4f} from the trainer's with its adapter and {effect:.4f} from "
            "those without, so the server does not sample from what was sent"
        )
    return {"gap": gap, "effect": effect}


def measure_decoding(turns: Turns, bench: Workbench, load: Load, clock: Clock, save: Save) -> None:
    """Tokens per second of each arm's server, with a version active that is not the base."""
    found: dict[str, dict[str, Any]] = {}
    bench.change_adapter()
    list(turns.each(lambda arm: arm.sync()))
    for concurrency in load.concurrency:
        for turn in range(1 + load.repeats):  # the first one warms up
            clock.say(f"decoding, {concurrency} at once, round {turn + 1} of {1 + load.repeats}")
            for name, speed in turns.each(lambda arm, n=concurrency: _tokens_per_s(arm, bench, load, n)):
                if turn:
                    at_once = found.setdefault(name, {}).setdefault(str(concurrency), {"samples": []})
                    at_once["samples"].append(speed)
                    at_once["median"] = statistics.median(at_once["samples"])
            save(found)


def _tokens_per_s(arm: Arm, bench: Workbench, load: Load, concurrency: int) -> float:
    groups = bench.prompts(concurrency, load.prompt_tokens)
    start = time.perf_counter()
    answers = arm.sample(groups, plain_sampling(max_tokens=load.new_tokens, logprobs=None))
    elapsed_s = time.perf_counter() - start
    return sum(len(answer[0].token_ids) for answer in answers) / elapsed_s


def measure_drift(turns: Turns, bench: Workbench, syncs: int, clock: Clock, save: Save) -> None:
    """What many syncs with changing adapters do to the base weights, the trainer's and the served ones.

    The served base is seen through an adapter of zeros, under which every arm serves it.
    """
    found: dict[str, dict[str, Any]] = {}
    (group,) = bench.prompts(1, _SCORED_TOKENS)
    prompt = list(group.prompt)
    bench.base_drift()  # puts right what earlier syncs did

    def many(arm: Arm) -> dict[str, Any]:
        before = _scored_without_effect(arm, bench, prompt)
        for _ in range(syncs):
            clock.check()
            bench.change_adapter()
            arm.sync()
        after = _scored_without_effect(arm, bench, prompt)
        drift = bench.base_drift()
        gaps = [abs(a - b) for a, b in zip(after, before, strict=True)]
        return {
            "syncs": syncs,
            "trainer_bit_identical": drift.is_bit_identical,
            "trainer_changed_share": drift.changed_share,
            "trainer_max_abs": drift.max_abs,
            "served_max_logprob_gap": max(gaps),
        }

    for name in [arm.name for arm in turns.arms]:
        clock.say(f"{syncs} syncs of {name}")
        for seen in turns.attempt(name, many):
            found[name] = seen
            save(found)


def _scored_without_effect(arm: Arm, bench: Workbench, prompt: list[int]) -> list[float]:
    bench.change_adapter(std=0.0)
    arm.sync()
    return prompt_logprobs(arm.engine, arm.model_name, prompt, deadline("Scoring"))


def measure_fleets(
    make: Callable[[int], Arm], counts: Sequence[int], bench: Workbench, warmup: int, repeats: int, clock: Clock
) -> dict[str, Any]:
    """Seconds of a sync to one server and to several, with a request between two syncs, as in `measure_syncs`.

    Args:
        make: connects an arm to so many servers.
    """
    found = {}
    for count in counts:
        clock.check()
        arm = make(count)
        assert arm.name in OURS
        try:
            served = _sync_and_check(arm, bench)
            samples = []
            for turn in range(warmup + repeats):
                sample, phases = _one_sync(arm, bench)
                assert phases is not None
                if turn >= warmup:
                    samples.append(sample | asdict(phases))
        finally:
            arm.close()
        found[str(count)] = {"served": served, "median": medians(samples), "samples": samples}
    return found


def medians(samples: Sequence[dict[str, Any]]) -> dict[str, float]:
    values = {name: [sample[name] for sample in samples] for name in samples[0]}
    return {name: statistics.median(found) for name, found in values.items() if not math.isnan(found[0])}
