"""Random fault schedules, and the rule that they are run against.

**Every completion that the trainer accepts was sampled by the version it believes active, or the step raised.**

What a completion was sampled by is found out from its log-probabilities alone: the trainer's own model, with the
adapter as it was at the last sync that succeeded, must give the same ones. Nothing that the package believes is asked.
A schedule is a pure function of its seed, so a failing one can be run again by itself.
"""

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator
from peft import PeftModel

from support.faults import (
    COMPLETIONS,
    DELAYS,
    DROPS,
    DUPLICATES,
    HANGS,
    LOAD,
    LOSSES,
    MODELS,
    STATUSES,
    TRUNCATIONS,
    UNLOAD,
    Fault,
    FaultProxy,
    fault_proxies,
    forget_all,
)
from support.folders import largest_file
from support.models import peft_model, randomize_adapter
from support.policies import NOISE_MAX, NOISE_MEAN, OTHER_POLICY_MEAN, Row, distance, sample, token_ids
from support.servers import adapters_on
from support.settings import plain_settings
from support.trainers import change_settings
from trl_lora_sync.errors import LoRASyncError
from trl_lora_sync.generation import LoRASyncGeneration
from trl_lora_sync.metrics import SyncReport
from trl_lora_sync.settings import SyncSettings

# Things that happen around the trainer instead of on the wire.
SURROUNDINGS = ("full disk", "clock forward", "clock back", "folder deleted", "shown late")
# Where faults hit, by what the trainer is about to do; the empty one is any route.
_PATHS = {
    "start": ("", COMPLETIONS, LOAD, MODELS, UNLOAD),
    "sync": ("", LOAD, LOAD, MODELS, UNLOAD),
    "generate": ("", COMPLETIONS, COMPLETIONS),
    "close": ("", UNLOAD),
}
_KINDS_BY_WEIGHT = ((DROPS, 4), (STATUSES, 4), (TRUNCATIONS, 3), (DUPLICATES, 3), (DELAYS, 2), (LOSSES, 2), (HANGS, 1))
# What a hang costs in a schedule that has one; all others get as much time as a busy machine may take.
_SHORT_S, _LONG_S = 1.5, 60.0
_DAY_S = 86_400.0
# A policy further away than any other, so a completion that fits no known version is not mistaken for noise.
assert OTHER_POLICY_MEAN > NOISE_MEAN


@dataclass(frozen=True, kw_only=True)
class Step:
    """One action of one trainer, with what goes wrong meanwhile.

    Attributes:
        trainer: its index.
        action: `"start"`, `"sync"`, `"generate"` or `"close"`.
        faults: armed on every server's proxy just before.
        around: one of `SURROUNDINGS`, or empty.
        prompts: how many different prompts, for `"generate"`.
    """

    trainer: int
    action: str
    faults: tuple[Fault, ...] = ()
    around: str = ""
    prompts: int = 1


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What happens, in order; made by `schedule_of`."""

    seed: int
    trainers: int
    steps: tuple[Step, ...]

    @property
    def has_hang(self) -> bool:
        return self._has(HANGS)

    @property
    def has_stale_answers(self) -> bool:
        """Whether an answer may reach another request than its own, and so confirm an unload that never was."""
        return self._has(DUPLICATES)

    def _has(self, kinds: Sequence[str]) -> bool:
        return any(fault.kind in kinds for step in self.steps for fault in step.faults)


@dataclass
class Outcome:
    """What came of a schedule.

    Attributes:
        violations: completions that were accepted although another version sampled them; must be empty.
        accepted: completions that were accepted.
        raised: how often each error ended an action.
        fired: how often each kind of fault happened.
        gap: largest mean distance between the log-probabilities of accepted completions and their version's own.
        margin: smallest mean distance to those of any other version of the run.
        left: adapters or files that stayed behind after the end.
    """

    violations: list[str] = field(default_factory=list)
    accepted: int = 0
    raised: Counter[str] = field(default_factory=Counter)
    fired: Counter[str] = field(default_factory=Counter)
    gap: float = 0.0
    margin: float = float("inf")
    left: list[str] = field(default_factory=list)


def schedule_of(seed: int) -> Schedule:
    """The schedule of a seed, always the same one."""
    rng = random.Random(seed)
    trainers = 2 if rng.random() < 0.25 else 1
    steps = [_step(rng, index, "start", often=0.25) for index in range(trainers)]
    for _ in range(rng.randint(2, 5)):
        trainer = rng.randrange(trainers)
        # Mostly what training does; at times a second generation, a sync without one, or an end and a new start.
        actions = rng.choices((["sync", "generate"], ["generate"], ["sync"], ["close"]), weights=(6, 2, 1, 1))[0]
        steps += [_step(rng, trainer, action, often=0.8) for action in actions]
    return Schedule(seed=seed, trainers=trainers, steps=tuple(steps))


def _step(rng: random.Random, trainer: int, action: str, often: float) -> Step:
    faults, around = [], ""
    if rng.random() < often:
        faults = [_fault(rng, action) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
        if rng.random() < 0.15:
            around = rng.choice(SURROUNDINGS)
    return Step(trainer=trainer, action=action, faults=tuple(faults), around=around, prompts=rng.randint(1, 3))


def _fault(rng: random.Random, action: str) -> Fault:
    kinds = rng.choices([kinds for kinds, _ in _KINDS_BY_WEIGHT], [weight for _, weight in _KINDS_BY_WEIGHT])[0]
    return Fault(
        kind=rng.choice(kinds),
        path=rng.choice(_PATHS[action]),
        nth=rng.choice((1, 1, 1, 2, 3, 5) if action == "start" else (1, 1, 1, 1, 2)),
        seconds=rng.choice((0.01, 0.1, 0.3)),
        fraction=rng.choice((0.0, 0.1, 0.5, 0.9, 0.99)),
        times=rng.choice((1, 2, 3, 4)),
    )


class Checker:
    """Knows which policy log-probabilities belong to, by forward passes of the trainer's model and nothing else."""

    def __init__(self, model: PeftModel) -> None:
        self.model = model

    def distances(self, rows: list[Row], version_seed: int | None) -> torch.Tensor:
        """From the served log-probabilities to those of the adapter made from a seed, or of the base for `None`."""
        if version_seed is None:
            with self.model.disable_adapter():
                return distance(self.model, rows)
        with self._adapter(version_seed):
            return distance(self.model, rows)

    def sampled_by(self, rows: list[Row], version_seed: int | None) -> bool:
        """Whether each single row fits the version."""
        return all(self._fits(row, version_seed) for row in rows)

    def _fits(self, row: Row, version_seed: int | None) -> bool:
        found = self.distances([row], version_seed)
        # A row is a few tokens only, so its mean may be off by more than that of a whole step.
        return bool(found.mean() < 2 * NOISE_MEAN and found.max() < NOISE_MAX)

    @contextlib.contextmanager
    def _adapter(self, version_seed: int) -> Iterator[None]:
        held = {name: value.detach().clone() for name, value in self.model.named_parameters() if "lora_" in name}
        randomize_adapter(self.model, version_seed)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, value in self.model.named_parameters():
                    if name in held:
                        value.copy_(held[name])


class SmallTrainer:
    """The part of a trainer that syncs and generates, over the package's real generation object.

    Attributes:
        believed: seed of the adapter that this trainer believes active: the one the model held at the last sync that
            was reported as accepted.
    """

    def __init__(self, model: PeftModel, tokenizer: Any, urls: Sequence[str], folder: Path, first_seed: int) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.urls = urls
        self.folder = folder
        self.checker = Checker(model)
        self.believed: int | None = None
        self.versions: list[int] = []
        self.generation: LoRASyncGeneration | None = None
        self._next_seed = first_seed
        self._held: int | None = None

    def start(self, timeout_s: float) -> None:
        self.generation = None
        self.generation = LoRASyncGeneration(
            model=self.model,
            accelerator=Accelerator(cpu=True),
            processing_class=self.tokenizer,
            mode="server",
            max_completion_length=8,
            logprobs=0,
            settings=settings_for(self.urls, self.folder, timeout_s),
            on_sync=self._accept,
        )

    def sync(self) -> None:
        """Change the adapter, as an optimizer step does, and sync."""
        assert self.generation is not None
        self._change_adapter()
        self.generation.sync_weights()

    def generate(self, prompts: list[list[int]]) -> list[Row]:
        assert self.generation is not None
        if self.believed is None:  # the generation syncs by itself then
            self._change_adapter()
        return sample(self.generation, prompts)

    def _change_adapter(self) -> None:
        self._held = self._next_seed = self._next_seed + 1
        self.versions.append(self._held)
        randomize_adapter(self.model, self._held)

    def _accept(self, report: SyncReport) -> None:
        self.believed = self._held

    def close(self) -> None:
        self.believed = None
        if self.generation is not None:
            self.generation.close()


def settings_for(urls: Sequence[str], folder: Path, timeout_s: float) -> SyncSettings:
    return plain_settings(
        urls,
        folder / "sync",
        timeout_s=timeout_s,
        engine="vllm",
        transport="disk",
        server_root=str(folder / "seen"),
        dtype=torch.bfloat16,
    )


class Arena:
    """Runs schedules against running servers, one after the other.

    Args:
        targets: base URLs of vLLM servers that serve `base`, without adapters.
        base: folder of the model.
    """

    def __init__(self, targets: Sequence[str], base: Path, tokenizer: Any) -> None:
        self.targets = targets
        self.tokenizer = tokenizer
        self.models = [peft_model(base).eval() for _ in range(2)]

    def run(
        self, schedule: Schedule, folder: Path, tamper: Callable[[FaultProxy], None] = lambda proxy: None
    ) -> Outcome:
        """Run a schedule, then let all faults end, and see that every trainer goes on as if nothing had been.

        Args:
            tamper: changes the proxies before the run; for tests of the rule itself.
        """
        outcome = Outcome()
        (folder / "sync").mkdir(parents=True)
        (folder / "seen").symlink_to(folder / "sync", target_is_directory=True)
        with fault_proxies(self.targets) as proxies:
            for proxy in proxies:
                tamper(proxy)
            urls = [proxy.base_url for proxy in proxies]
            trainers = [
                SmallTrainer(self.models[index], self.tokenizer, urls, folder, 10_000 * schedule.seed + 5_000 * index)
                for index in range(schedule.trainers)
            ]
            timeout_s = _SHORT_S if schedule.has_hang else _LONG_S
            for number, step in enumerate(schedule.steps):
                self._step(step, number, trainers, proxies, folder, timeout_s, outcome)
            for proxy in proxies:
                proxy.calm_down()
                outcome.fired.update(fault.kind for fault, _ in proxy.fired)
            for trainer in trainers:
                self._recover(trainer, outcome)
            for trainer in trainers:
                trainer.close()
        outcome.left = self._left(folder)
        return outcome

    def _step(
        self,
        step: Step,
        number: int,
        trainers: list[SmallTrainer],
        proxies: list[FaultProxy],
        folder: Path,
        timeout_s: float,
        outcome: Outcome,
    ) -> None:
        trainer = trainers[step.trainer]
        if trainer.generation is None and step.action != "start":  # a start that failed is made good without faults
            trainer.start(_LONG_S)
            give_time(trainer.generation, timeout_s)
        for proxy in proxies:
            proxy.arm(step.faults)
        if step.around:
            outcome.fired[step.around] += 1
        try:
            with surroundings(step.around, folder, proxies):
                match step.action:
                    case "start":
                        trainer.start(timeout_s)
                    case "sync":
                        trainer.sync()
                    case "close":
                        trainer.close()
                    case "generate":
                        prompts = [token_ids(100 * number + i) for i in range(step.prompts) for _ in range(2)]
                        rows = trainer.generate(prompts)
                        self._judge(trainer, rows, prompts, f"step {number}", outcome)
        except LoRASyncError as error:
            outcome.raised[type(error).__name__] += 1
        for proxy in proxies:
            proxy.arm([])

    def _recover(self, trainer: SmallTrainer, outcome: Outcome, again: bool = False) -> None:
        """Without faults, the next step must succeed."""
        prompts, when = [token_ids(7), token_ids(8)], "the step after all faults"
        # A connection that is one answer ahead, which nobody can see, is met once more.
        may_fail = any(outcome.fired[kind] for kind in DUPLICATES)
        try:
            if trainer.generation is None:
                trainer.start(_LONG_S)
            give_time(trainer.generation, _LONG_S)
            trainer.sync()
            rows = trainer.generate(prompts)
        except LoRASyncError as error:
            if not may_fail or again:
                outcome.violations.append(f"{when}: {type(error).__name__}: {error}")
            else:
                outcome.raised[type(error).__name__] += 1
                self._recover(trainer, outcome, again=True)
            return
        self._judge(trainer, rows, prompts, when, outcome)

    def _judge(
        self, trainer: SmallTrainer, rows: list[Row], prompts: list[list[int]], when: str, outcome: Outcome
    ) -> None:
        outcome.accepted += len(rows)
        if [row[0] for row in rows] != prompts:
            outcome.violations.append(f"{when}: the completions belong to other prompts")
        if not trainer.checker.sampled_by(rows, trainer.believed):
            gap = trainer.checker.distances(rows, trainer.believed)
            outcome.violations.append(
                f"{when}: not sampled by the version believed active (mean {gap.mean():.3f}, largest {gap.max():.3f})"
            )
            return
        outcome.gap = max(outcome.gap, float(trainer.checker.distances(rows, trainer.believed).mean()))
        others = [None, *(seed for seed in trainer.versions[-3:] if seed != trainer.believed)]
        outcome.margin = min(
            [outcome.margin, *(float(trainer.checker.distances(rows, other).mean()) for other in others)]
        )

    def _left(self, folder: Path) -> list[str]:
        left = [f"adapter {name}" for url in self.targets for name in adapters_on(url)]
        left += [f"file {path.relative_to(folder)}" for path in (folder / "sync").rglob("*")]
        for url in self.targets:
            forget_all(url)
        return left


def give_time(generation: Any, timeout_s: float) -> None:
    """Let everything that follows take longer."""
    changed = {"sync_timeout_s": timeout_s, "startup_timeout_s": timeout_s, "generation_timeout_s": timeout_s}
    generation._settings = replace(generation._settings, **changed)
    change_settings(generation._sync, **changed)


@contextlib.contextmanager
def surroundings(what: str, folder: Path, proxies: list[FaultProxy]) -> Iterator[None]:
    """Let something happen around the trainer while the block lasts."""
    match what:
        case "full disk":
            with largest_file(20_000):
                yield
        case "clock forward" | "clock back":
            jump = _DAY_S if what == "clock forward" else -_DAY_S
            with wall_clock_off_by(jump):
                yield
        case "folder deleted":
            # As a cleaner of temporary files does it, under the feet of a run; its lock goes as well.
            for path in (folder / "sync").glob("*/*-v*"):
                path.rename(folder / f"deleted-{path.name}-{time.monotonic_ns()}")
            yield
        case "shown late":
            with shown_late(folder, proxies):
                yield
        case _:
            yield


@contextlib.contextmanager
def wall_clock_off_by(seconds: float) -> Iterator[None]:
    """Let the wall clock of this process jump at the beginning and back at the end of the block."""
    real = time.time

    def jumped() -> float:
        return real() + seconds

    with mock.patch.object(time, "time", jumped):
        yield


@contextlib.contextmanager
def shown_late(folder: Path, proxies: Sequence[FaultProxy], requests: int = 2) -> Iterator[None]:
    """Let the server see nothing of the sync folder until it has been asked for the `requests`-th load.

    As a network file system does it whose clients remember for a while what a folder held.
    """
    seen, asked = folder / "seen", iter(range(1, 10**6))
    _point(seen, folder / "nowhere")

    def show(path: str, body: dict[str, Any]) -> None:
        if path == LOAD and next(asked) == requests:
            _point(seen, folder / "sync")

    for proxy in proxies:
        proxy.on_request = show
    try:
        yield
    finally:
        for proxy in proxies:
            proxy.on_request = lambda path, body: None
        _point(seen, folder / "sync")


def _point(link: Path, target: Path) -> None:
    new = link.with_suffix(".new")
    new.symlink_to(target, target_is_directory=True)
    new.replace(link)


def as_json(schedule: Schedule) -> dict[str, Any]:
    """The schedule in a form that can be kept beside its outcome."""
    return asdict(schedule)
