"""Random fault schedules, and the rule that they are run against.

**Every completion that the trainer accepts was sampled by the version it believes active, or the step raised.**

What a completion was sampled by is found out from its log-probabilities alone: the trainer's own model, with the
adapter as it was at the last sync that succeeded, must give the same ones. After each sync, accepted or not, a request
past the proxy checks what every server in service samples in the name of that version, which is on all of them or on
none. With overlap, a batch that was sampled ahead is of the version that was believed active when the batch before it
was taken, and is being sampled while syncs and their faults happen. The package's other beliefs are not checked. A
schedule is a pure function of its seed, so a failing one can be run again by itself.
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

import httpx
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
    OUTAGES,
    STATUSES,
    TRUNCATIONS,
    UNLOAD,
    Fault,
    FaultProxy,
    fault_proxies,
    forget_all,
)
from support.folders import becomes_read_only, largest_file
from support.models import peft_model, randomize_adapter
from support.policies import NOISE_MAX, NOISE_MEAN, OTHER_POLICY_MEAN, Row, distance, sample, token_ids
from support.servers import adapters_on, version_of
from support.settings import plain_settings
from support.trainers import change_settings
from trl_lora_sync.errors import LoRASyncError
from trl_lora_sync.generation.server import LoRASyncGeneration
from trl_lora_sync.metrics import SyncReport
from trl_lora_sync.servers.handle import ServerHandle
from trl_lora_sync.settings import SyncSettings

# Things that happen around the trainer instead of on the wire.
SURROUNDINGS = ("full disk", "read-only folder", "clock forward", "clock back", "folder deleted", "shown late")
# Where faults hit, by what the trainer is about to do; the empty one is any route.
_PATHS = {
    "start": ("", COMPLETIONS, LOAD, MODELS, UNLOAD),
    "sync": ("", LOAD, LOAD, MODELS, UNLOAD),
    "generate": ("", COMPLETIONS, COMPLETIONS),
    "close": ("", UNLOAD),
}
_SHORT_KINDS_BY_WEIGHT = ((DROPS, 4), (STATUSES, 4), (TRUNCATIONS, 3), (DUPLICATES, 3), (DELAYS, 2), (LOSSES, 2))
_KINDS_BY_WEIGHT = (*_SHORT_KINDS_BY_WEIGHT, (HANGS, 2), (OUTAGES, 2))
# How often something goes wrong on each of so many servers, so that about as many steps succeed.
_OFTEN = {1: 1.0, 2: 0.6, 3: 0.4}
# What a hang or an outage costs in a schedule that has one; all others get as much time as a busy machine may take.
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
        faults: for each server, what is armed on its proxy just before.
        around: one of `SURROUNDINGS`, or empty.
        prompts: how many different prompts, for `"generate"`.
    """

    trainer: int
    action: str
    faults: tuple[tuple[Fault, ...], ...] = ()
    around: str = ""
    prompts: int = 1


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What happens, in order; made by `schedule_of`."""

    seed: int
    trainers: int
    steps: tuple[Step, ...]
    servers: int = 1
    on_server_loss: str = "error"
    verify: str = "first"
    overlap: bool = False

    @property
    def faults(self) -> list[Fault]:
        return [fault for step in self.steps for faults in step.faults for fault in faults]

    @property
    def has_hang(self) -> bool:
        """Whether something lasts until a deadline ends the wait for it."""
        return self._has((*HANGS, *OUTAGES))

    @property
    def has_stale_answers(self) -> bool:
        """Whether an answer may reach another request than its own, and so confirm an unload that never was."""
        return self._has(DUPLICATES)

    def _has(self, kinds: Sequence[str]) -> bool:
        return any(fault.kind in kinds for fault in self.faults)


@dataclass
class Outcome:
    """What came of a schedule.

    Attributes:
        violations: completions that were accepted although another version sampled them; must be empty.
        accepted: completions that were accepted.
        seen: completions requested from servers in service past their proxies, after a sync.
        dropped: how often a server was gone on without.
        raised: how often each error ended an action.
        fired: how often each kind of fault happened.
        ahead: how many batches were sampled ahead.
        gap: largest mean distance between the log-probabilities of accepted completions and their version's own.
        margin: smallest mean distance to any other version of the run.
        left: adapters or files that stayed behind after the end.
    """

    violations: list[str] = field(default_factory=list)
    accepted: int = 0
    seen: int = 0
    dropped: int = 0
    raised: Counter[str] = field(default_factory=Counter)
    fired: Counter[str] = field(default_factory=Counter)
    ahead: int = 0
    gap: float = 0.0
    margin: float = float("inf")
    left: list[str] = field(default_factory=list)


def schedule_of(seed: int) -> Schedule:
    """The schedule of a seed, always the same one."""
    rng = random.Random(seed)
    trainers = 2 if rng.random() < 0.25 else 1
    servers = rng.choices((1, 2, 3), weights=(3, 4, 2))[0]
    on_server_loss = rng.choice(("error", "drop")) if servers > 1 else "error"
    # What is waited out takes long, so that only some schedules have it.
    kinds = _KINDS_BY_WEIGHT if rng.random() < 0.4 else _SHORT_KINDS_BY_WEIGHT
    steps = [_step(rng, index, "start", servers, kinds, often=0.25) for index in range(trainers)]
    for _ in range(rng.randint(2, 5)):
        trainer = rng.randrange(trainers)
        # Mostly what training does; at times a second generation, a sync without one, or an end and a new start.
        actions = rng.choices((["sync", "generate"], ["generate"], ["sync"], ["close"]), weights=(6, 2, 1, 1))[0]
        steps += [_step(rng, trainer, action, servers, kinds, often=0.8) for action in actions]
    return Schedule(seed=seed, trainers=trainers, steps=tuple(steps), servers=servers, on_server_loss=on_server_loss)


def _step(
    rng: random.Random,
    trainer: int,
    action: str,
    servers: int,
    kinds: Sequence[tuple[Sequence[str], int]],
    often: float,
) -> Step:
    faults = tuple(
        tuple(_fault(rng, action, kinds) for _ in range(rng.choice((1, 1, 1, 2, 3))))
        if rng.random() < often * _OFTEN[servers]
        else ()
        for _ in range(servers)
    )
    around = rng.choice(SURROUNDINGS) if rng.random() < often * 0.2 else ""
    # Enough prompts for every server to get one.
    return Step(trainer=trainer, action=action, faults=faults, around=around, prompts=rng.randint(servers, servers + 2))


def _fault(rng: random.Random, action: str, kinds: Sequence[tuple[Sequence[str], int]]) -> Fault:
    chosen = rng.choices([names for names, _ in kinds], [weight for _, weight in kinds])[0]
    return Fault(
        kind=rng.choice(chosen),
        path=rng.choice(_PATHS[action]),
        nth=rng.choice((1, 1, 1, 2, 3, 5) if action == "start" else (1, 1, 1, 1, 2)),
        seconds=rng.choice((0.01, 0.1, 0.3)),
        fraction=rng.choice((0.0, 0.1, 0.5, 0.9, 0.99)),
        times=1 if action == "start" else rng.choice((1, 2, 3, 4)),  # nothing else happens before a start succeeds
    )


class Checker:
    """Knows which policy log-probabilities belong to, by forward passes of the trainer's model and nothing else."""

    def __init__(self, model: PeftModel) -> None:
        self.model = model

    def distances(self, rows: list[Row], version_seed: int | None) -> torch.Tensor:
        """From the served log-probabilities to the adapter's from a seed, or the base's for `None`."""
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
        accepted: the names of all versions that were reported as accepted, in order.
        sampled_from: seed of the adapter that the last batch is believed to be sampled from.
        lags: of each batch, whether it was sampled ahead.
    """

    def __init__(
        self,
        model: PeftModel,
        tokenizer: Any,
        urls: Sequence[str],
        folder: Path,
        first_seed: int,
        **changes: Any,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.urls = urls
        self.folder = folder
        self.changes = changes
        self.checker = Checker(model)
        self.believed: int | None = None
        self.versions: list[int] = []
        self.accepted: list[str] = []
        self.sampled_from: int | None = None
        self.lags: list[int] = []
        self.generation: LoRASyncGeneration | None = None
        self._asked_from: int | None = None
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
            settings=settings_for(self.urls, self.folder, timeout_s, **self.changes),
            on_sync=self._accept,
        )

    def sync(self) -> None:
        """Change the adapter, as an optimizer step does, and sync."""
        assert self.generation is not None
        self._change_adapter()
        self.generation.sync_weights()

    def generate(self, prompts: list[list[int]], following: list[list[int]] | None = None) -> list[Row]:
        """Sample a batch, which `sampled_from` is then about; with overlap, request the next one too."""
        assert self.generation is not None
        if self.believed is None:  # the generation syncs by itself then
            self._change_adapter()
        if not self.changes.get("overlap"):
            rows = sample(self.generation, prompts)
            self.sampled_from = self.believed
            return rows
        asked_from, self._asked_from = self._asked_from, None
        with self.generation.training_batch(following) as batch:
            rows = sample(self.generation, prompts)
        self._asked_from = self.believed
        assert batch.figures is not None
        self.lags.append(batch.figures.version_lag)
        self.sampled_from = asked_from if batch.figures.version_lag else self.believed
        return rows

    def _change_adapter(self) -> None:
        self._held = self._next_seed = self._next_seed + 1
        self.versions.append(self._held)
        randomize_adapter(self.model, self._held)

    def _accept(self, report: SyncReport) -> None:
        self.believed = self._held
        self.accepted.append(report.adapter_name)

    def close(self) -> None:
        self.believed = None
        if self.generation is not None:
            self.generation.close()


def settings_for(urls: Sequence[str], folder: Path, timeout_s: float, **changes: Any) -> SyncSettings:
    return plain_settings(
        urls,
        folder / "sync",
        timeout_s=timeout_s,
        engine="vllm",
        transport="disk",
        server_root=str(folder / "seen"),
        dtype=torch.bfloat16,
        **changes,
    )


class Arena:
    """Runs schedules against running servers, one after the other.

    Args:
        targets: base URLs of vLLM servers that serve `base`, without adapters. A schedule with more servers than these
            has several on the last one, as tenants that know nothing of each other.
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
        (folder / "sync").mkdir(parents=True)
        (folder / "seen").symlink_to(folder / "sync", target_is_directory=True)
        targets = [self.targets[min(place, len(self.targets) - 1)] for place in range(schedule.servers)]
        with fault_proxies(targets) as proxies:
            for proxy in proxies:
                tamper(proxy)
            urls = [proxy.base_url for proxy in proxies]
            trainers = [
                SmallTrainer(
                    self.models[index],
                    self.tokenizer,
                    urls,
                    folder,
                    10_000 * schedule.seed + 5_000 * index,
                    on_server_loss=schedule.on_server_loss,
                    verify=schedule.verify,
                    overlap=schedule.overlap,
                )
                for index in range(schedule.trainers)
            ]
            outcome = _Run(schedule, trainers, proxies, folder).play()
        outcome.left = self._left(folder)
        return outcome

    def _left(self, folder: Path) -> list[str]:
        left = [f"adapter {name}" for url in self.targets for name in adapters_on(url)]
        left += [f"file {path.relative_to(folder)}" for path in (folder / "sync").rglob("*")]
        for url in self.targets:
            forget_all(url)
        return left


class _Run:
    """One schedule, step by step."""

    def __init__(
        self, schedule: Schedule, trainers: list[SmallTrainer], proxies: list[FaultProxy], folder: Path
    ) -> None:
        self.schedule = schedule
        self.trainers = trainers
        self.proxies = proxies
        self.folder = folder
        self.outcome = Outcome()
        self.timeout_s = _SHORT_S if schedule.has_hang else _LONG_S
        # How often each server had restarted before the step in which a trainer's version was accepted.
        self._restarts: dict[SmallTrainer, list[int]] = {}

    def play(self) -> Outcome:
        for number, step in enumerate(self.schedule.steps):
            self._step(step, number)
        for proxy in self.proxies:
            proxy.calm_down()
            self.outcome.fired.update(fault.kind for fault, _ in proxy.fired)
        for trainer in self.trainers:
            self._recover(trainer)
        for trainer in self.trainers:
            trainer.close()
        self.outcome.ahead = sum(sum(trainer.lags) for trainer in self.trainers)
        accepted = {name for trainer in self.trainers for name in trainer.accepted}
        for proxy in self.proxies:
            wrong = {name for name in proxy.sampled if (version_of(name) or 0) > 0} - accepted
            if wrong:
                self.outcome.violations.append(f"versions that were never accepted were sampled: {sorted(wrong)}")
        return self.outcome

    def _step(self, step: Step, number: int) -> None:
        trainer, when = self.trainers[step.trainer], f"step {number}"
        if trainer.generation is None and step.action != "start":  # a start that failed is made good without faults
            for proxy in self.proxies:
                proxy.end_outage()
            trainer.start(_LONG_S)
            give_time(trainer.generation, self.timeout_s)
        for proxy, faults in zip(self.proxies, step.faults or [()] * len(self.proxies), strict=True):
            proxy.arm(faults)
        restarts, versions = [proxy.restarts for proxy in self.proxies], len(trainer.accepted)
        error, dropped = None, _dropped(trainer)
        try:
            with surroundings(step.around, self.folder, self.proxies) as happens:
                self.outcome.fired[step.around] += bool(happens)
                match step.action:
                    case "start":
                        trainer.start(self.timeout_s)
                    case "sync":
                        trainer.sync()
                    case "close":
                        trainer.close()
                    case "generate":
                        prompts = prompts_of(step, number)
                        self._judge(trainer, trainer.generate(prompts, self._following(number)), prompts, when)
        except LoRASyncError as raised:
            error = raised
            self.outcome.raised[type(raised).__name__] += 1
        if len(trainer.accepted) > versions:
            self._restarts[trainer] = restarts
        if step.action == "sync" and error is None and len(trainer.accepted) == versions:
            self.outcome.violations.append(f"{when}: a sync did not raise, and accepted nothing")
        self.outcome.dropped += _dropped(trainer) > dropped
        for proxy in self.proxies:
            proxy.end_step()
        if step.action in ("sync", "generate"):
            self._look_beneath(trainer, when)

    def _following(self, number: int) -> list[list[int]] | None:
        """The prompts of the trainer's next batch, if it has one."""
        later = list(enumerate(self.schedule.steps))[number + 1 :]
        trainer = self.schedule.steps[number].trainer
        return next(
            (prompts_of(step, place) for place, step in later if (step.trainer, step.action) == (trainer, "generate")),
            None,
        )

    def _look_beneath(self, trainer: SmallTrainer, when: str) -> None:
        """Whether every server in service samples the active version in its name, unless it has restarted since."""
        if trainer.believed is None:
            return
        name, prompt = trainer.accepted[-1], token_ids(3)
        for place, (server, proxy) in enumerate(zip(servers_of(trainer), self.proxies, strict=True)):
            if server.is_excluded:
                continue
            row = sampled_directly(proxy.target, proxy.tenant + name, prompt)
            if row is None:
                if proxy.restarts == self._restarts[trainer][place]:
                    self.outcome.violations.append(f"{when}: server {place} does not have the active version {name}")
                continue
            self.outcome.seen += 1
            if not trainer.checker.sampled_by([row], trainer.believed):
                self.outcome.violations.append(f"{when}: server {place} samples another version in the name of {name}")

    def _recover(self, trainer: SmallTrainer, again: bool = False) -> None:
        """Without faults, the next step must succeed."""
        outcome, prompts, when = self.outcome, [token_ids(7), token_ids(8)], "the step after all faults"
        # A connection that is one answer ahead, which is invisible, is met once more.
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
                self._recover(trainer, again=True)
            return
        self._restarts[trainer] = [proxy.restarts for proxy in self.proxies]
        self._judge(trainer, rows, prompts, when)
        self._look_beneath(trainer, when)
        if _dropped(trainer):
            outcome.violations.append(f"{when}: {_dropped(trainer)} servers are still dropped")

    def _judge(self, trainer: SmallTrainer, rows: list[Row], prompts: list[list[int]], when: str) -> None:
        outcome = self.outcome
        outcome.accepted += len(rows)
        if [row[0] for row in rows] != prompts:
            outcome.violations.append(f"{when}: the completions belong to other prompts")
        gap = trainer.checker.distances(rows, trainer.sampled_from)
        if not trainer.checker.sampled_by(rows, trainer.sampled_from):
            outcome.violations.append(
                f"{when}: not sampled by the version believed active (mean {gap.mean():.3f}, largest {gap.max():.3f})"
            )
            return
        outcome.gap = max(outcome.gap, float(gap.mean()))
        others = [None, *(seed for seed in trainer.versions[-3:] if seed != trainer.sampled_from)]
        outcome.margin = min(
            [outcome.margin, *(float(trainer.checker.distances(rows, other).mean()) for other in others)]
        )


def prompts_of(step: Step, number: int) -> list[list[int]]:
    """What the step of a schedule samples, each prompt twice."""
    return [token_ids(100 * number + i) for i in range(step.prompts) for _ in range(2)]


def servers_of(trainer: SmallTrainer) -> list[ServerHandle]:
    assert trainer.generation is not None
    servers: list[ServerHandle] = trainer.generation.sync.fleet.servers
    return servers


def _dropped(trainer: SmallTrainer) -> int:
    return sum(server.is_excluded for server in servers_of(trainer)) if trainer.generation is not None else 0


def sampled_directly(base_url: str, model: str, prompt: list[int]) -> Row | None:
    """One completion of a model, by nothing but HTTP; None if the server does not know the model."""
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "ignore_eos": True, "logprobs": 0}
    body |= {"temperature": 1.0, "return_token_ids": True}
    response = httpx.post(f"{base_url}{COMPLETIONS}", json=body, timeout=60, trust_env=False, verify=False)
    if response.status_code == 404:
        return None
    [choice] = response.raise_for_status().json()["choices"]
    return prompt, choice["token_ids"], torch.tensor(choice["logprobs"]["token_logprobs"])


def give_time(generation: Any, timeout_s: float) -> None:
    """Let everything that follows take longer."""
    changed = {"sync_timeout_s": timeout_s, "startup_timeout_s": timeout_s, "generation_timeout_s": timeout_s}
    generation.settings = replace(generation.settings, **changed)
    change_settings(generation.sync, **changed)


@contextlib.contextmanager
def surroundings(what: str, folder: Path, proxies: list[FaultProxy]) -> Iterator[bool]:
    """Let something happen around the trainer while the block lasts; yields whether it does."""
    match what:
        case "full disk":
            with largest_file(20_000):
                yield True
        case "read-only folder":
            with becomes_read_only(folder / "sync") as is_read_only:
                yield is_read_only
        case "clock forward" | "clock back":
            jump = _DAY_S if what == "clock forward" else -_DAY_S
            with wall_clock_off_by(jump):
                yield True
        case "folder deleted":
            # As a cleaner of temporary files does it, under the feet of a run; its lock goes as well.
            for path in (folder / "sync").glob("*/*-v*"):
                path.rename(folder / f"deleted-{path.name}-{time.monotonic_ns()}")
            yield True
        case "shown late":
            # Each server looks once in vain.
            with shown_late(folder, proxies, requests=1 + len(proxies)):
                yield True
        case _:
            yield False


@contextlib.contextmanager
def wall_clock_off_by(seconds: float) -> Iterator[None]:
    """Let the wall clock of this process jump at the beginning and back at the end of the block."""
    real = time.time

    def jumped() -> float:
        return real() + seconds

    with mock.patch.object(time, "time", jumped):
        yield


@contextlib.contextmanager
def shown_late(folder: Path, proxies: Sequence[FaultProxy], requests: int) -> Iterator[None]:
    """Let the server see nothing of the sync folder until the `requests`-th request for a load.

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
