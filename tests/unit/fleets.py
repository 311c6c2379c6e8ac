"""A training run in small on several fake servers, from the first connection to the last unload."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from contract.reference import FakeReference
from contract.served import PROMPT, SMALL, sampling, soon
from support.settings import plain_settings

from trl_lora_sync.adapter.canonical import CanonicalAdapter, Form
from trl_lora_sync.checks.verify import PROBE_PROMPT, TrainedBase
from trl_lora_sync.engines.base import Completion, PromptGroup
from trl_lora_sync.metrics import SyncReport
from trl_lora_sync.runtime import run
from trl_lora_sync.settings import SyncSettings
from trl_lora_sync.sync import AdapterSync
from trl_lora_sync.testing import FakeSGLang, InMemoryEngine, random_adapter

GROUPS = [PromptGroup(prompt=[10 + row, 20, 30 + row], count=2) for row in range(12)]


@dataclass
class FleetRun:
    """A sync, the fakes that it talks to, and an adapter that changes with every step."""

    sync: AdapterSync
    fakes: list[FakeSGLang]
    step: int = 0
    read: list[CanonicalAdapter] = field(default_factory=list)

    def start(self) -> str:
        return self.sync.start(self.read_next, self.base())

    def publish(self) -> SyncReport:
        self.step += 1
        return self.sync.publish(self.read_next(self.sync.form))

    def generate(self, groups: Sequence[PromptGroup] = GROUPS) -> list[list[Completion]]:
        assert self.sync.active is not None
        return self.sync.generate(self.sync.active.name, groups, sampling(), soon())

    def is_policy_of(self, answers: list[list[Completion]], adapter: CanonicalAdapter | None = None) -> bool:
        """Whether the completions are for `GROUPS` in this order, all sampled from `adapter` or the last one read."""
        assert [[completion.prompt_ids for completion in answer] for answer in answers] == [
            [group.prompt] * group.count for group in GROUPS
        ]
        return all(
            max(
                abs(given[0] - expected)  # type: ignore[operator]
                for given, expected in zip(
                    found.logprobs or [],
                    self.fakes[0].expected_logprobs(adapter or self.read[-1], found.prompt_ids, found.token_ids),
                    strict=True,
                )
            )
            < 1e-4
            for answer in answers
            for found in answer
        )

    def base(self) -> TrainedBase:
        logprobs = FakeReference(self.fakes[0]).logprobs(None, PROBE_PROMPT[:1], PROBE_PROMPT[1:])
        return TrainedBase(name=self.fakes[0].args.model_path, vocab_size=SMALL.vocab, scores=(logprobs, 1.5))

    def read_next(self, form: Form) -> CanonicalAdapter:
        self.read.append(small_adapter(self.step))
        return self.read[-1]

    def wait_for_unloads(self) -> None:
        run(self.sync.wait_for_unloads(soon(30)))

    def adapters(self) -> list[list[str]]:
        """The versions on each fake, as numbers."""
        return [[name.rpartition("-")[2] for name in fake.host_adapters] for fake in self.fakes]


def small_adapter(step: int) -> CanonicalAdapter:
    return random_adapter(SMALL, step, rank=8)


class InMemoryRun:
    """A sync with engines in memory, which has published its first version."""

    def __init__(self, engines: list[InMemoryEngine], folder: Path, **changes: Any) -> None:
        self.engines = engines
        urls = [engine.base_url for engine in engines]
        self.sync = AdapterSync(plain_settings(urls, folder / "sync", timeout_s=20.0, **changes))
        logprobs = engines[0].expected_logprobs(None, PROBE_PROMPT[:1], PROBE_PROMPT[1:])
        self.sync.start(self.read, TrainedBase(vocab_size=SMALL.vocab, scores=(logprobs, 1.5)))
        self.sync.publish(small_adapter(1))

    def read(self, form: Form) -> CanonicalAdapter:
        return small_adapter(0)

    def sample(self, count: int = 2) -> list[list[Completion]]:
        assert self.sync.active is not None
        groups = [PromptGroup(prompt=[*PROMPT, number], count=count) for number in range(4)]
        return self.sync.generate(self.sync.active.name, groups, sampling(), soon())

    def samples_from(self, step: int) -> bool:
        return all(
            [one[0] for one in completion.logprobs or []]
            == pytest.approx(
                self.engines[0].expected_logprobs(small_adapter(step), completion.prompt_ids, completion.token_ids)
            )
            for completions in self.sample()
            for completion in completions
        )


def settings_for(
    fakes: list[FakeSGLang], root: Path, *, are_local: Sequence[bool] = (), **changes: Any
) -> SyncSettings:
    """Short timeouts on plain settings, with fields changed."""
    urls = [fake.base_url for fake in fakes]
    return plain_settings(urls, root, timeout_s=20.0, are_local=are_local, **changes)
