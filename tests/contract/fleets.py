"""Two fake servers as one engine, for the part of the engine contract that a fleet keeps as well."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.settings import plain_settings

from trl_lora_sync.adapter.store import StoredAdapter
from trl_lora_sync.engines.base import Capabilities, Completion, Deadline, PromptGroup, Sampling
from trl_lora_sync.runtime import run
from trl_lora_sync.servers.fleet import Fleet
from trl_lora_sync.servers.ledger import VersionLedger
from trl_lora_sync.testing import FakeSGLang


class FleetAsEngine:
    """A fleet with the method names of `Engine`; loading includes the first use."""

    def __init__(self, fakes: Sequence[FakeSGLang], root: Path) -> None:
        urls = [fake.base_url for fake in fakes]
        settings = plain_settings(urls, root, timeout_s=20.0, transport="disk")
        self.fleet = Fleet(settings, VersionLedger(settings.keep))
        self.base_url = self.fleet.base_url
        run(self.fleet.connect())

    @property
    def capabilities(self) -> Capabilities:
        return self.fleet.capabilities

    def has_token(self, token_id: int, deadline: Deadline) -> bool:
        return all(run(server.engine.has_token(token_id, deadline)) for server in self.fleet.servers)

    def score(self, model: str, prompt_ids: list[int], deadline: Deadline) -> list[float]:
        first, second = (run(server.engine.score(model, prompt_ids, deadline)) for server in self.fleet.servers)
        assert first == second
        return first

    def load(self, adapter: StoredAdapter, deadline: Deadline) -> dict[str, str]:
        run(self.fleet.load(adapter, deadline))
        return self.loaded(deadline)

    def warm_up(self, adapter: StoredAdapter, deadline: Deadline) -> None:
        pass

    def unload(self, adapter_name: str, deadline: Deadline) -> bool:
        has_forgotten = [run(server.engine.unload(adapter_name, deadline)) for server in self.fleet.servers]
        return all(has_forgotten)

    def loaded(self, deadline: Deadline) -> dict[str, str]:
        first, *others = [run(server.engine.loaded(deadline)) for server in self.fleet.in_service]
        return {name: path for name, path in first.items() if all(name in other for other in others)}

    def generate(
        self, model: str, groups: Sequence[PromptGroup], sampling: Sampling, deadline: Deadline
    ) -> list[list[Completion]]:
        return run(self.fleet.generate(model, groups, sampling, deadline))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a fleet has no {name}, or the test does not apply to it")
