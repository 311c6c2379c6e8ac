"""Live tier: a real vLLM whose workers read adapters with several threads, from the second one of a kind on."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from contract.reference import PeftReference
from contract.served import soon
from safetensors.torch import load_file, save_file
from support.policies import token_ids
from support.servers import damage
from support.trainers import grpo_trainer, steps_of, wait_for_unloads
from versus.scoring import prompt_logprobs
from vllm_server import VLLMServer

from trl_lora_sync.adapter.store import AdapterStore, StoredAdapter
from trl_lora_sync.engine_plugins import vllm_quick_load
from trl_lora_sync.engines.vllm import VLLMEngine
from trl_lora_sync.errors import AdapterRejectedError
from trl_lora_sync.runtime import Blocking

ROOT = Path(__file__).parents[2]
PROMPT = token_ids(3, 24)
FILE = "adapter_model.safetensors"


class Quick:
    """A server, an engine that is connected to it, and the truth about its base model."""

    def __init__(self, server: VLLMServer, reference: PeftReference, folder: Path) -> None:
        self.server, self.reference = server, reference
        self.store = AdapterStore(folder / "store")
        self.engine = Blocking(VLLMEngine(server.base_url, is_local=True))
        self.engine.connect(soon(60))
        self._versions = 0

    def write(self, seed: int, dtype: torch.dtype = torch.bfloat16, rank: int = 8) -> StoredAdapter:
        self._versions += 1
        stored = self.store.write(self._versions, self.reference.adapter(seed, rank=rank))
        assert stored.path
        tensors = load_file(stored.path / FILE)
        save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, stored.path / FILE)
        return stored

    def load(self, seed: int, dtype: torch.dtype = torch.bfloat16, rank: int = 8) -> str:
        stored = self.write(seed, dtype, rank)
        self.engine.load(stored, soon(60))
        return stored.name

    def is_policy(self, name: str, seed: int) -> bool:
        found = self.engine.score(name, PROMPT, soon(60))

        def gap(seed: int | None) -> float:
            adapter = None if seed is None else self.reference.adapter(seed)
            expected = self.reference.logprobs(adapter, PROMPT[:1], PROMPT[1:])
            return sum(abs(one - other) for one, other in zip(found, expected, strict=True)) / len(expected)

        return gap(seed) < 2 * self.reference.tolerance < gap(None)

    def close(self) -> None:
        for name in self.engine.loaded(soon()):
            self.engine.unload(name, soon(60))
        self.engine.close()
        self.store.close()


@pytest.fixture(scope="module")
def reference(base_model: Path) -> PeftReference:
    return PeftReference(base_model)


@pytest.fixture(scope="module")
def quick_server(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    server = VLLMServer(
        base_model,
        extra_args=[
            *("--worker-extension-cls", vllm_quick_load.WORKER),
            *("--middleware", vllm_quick_load.MIDDLEWARE),
        ],
        extra_env={"PYTHONPATH": str(ROOT)},
        log_path=tmp_path_factory.mktemp("server") / "quick.log",
    )
    with server:
        yield server


@pytest.fixture
def quick(quick_server: VLLMServer, reference: PeftReference, tmp_path: Path) -> Iterator[Quick]:
    quick = Quick(quick_server, reference, tmp_path)
    try:
        yield quick
    finally:
        quick.close()


def holds_open(server: VLLMServer, folder: Path) -> bool:
    """Whether a process of the server has a file below `folder` in its memory, as after vLLM's own way on a CPU."""
    process, maps = psutil.Process(server.pid), ""
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # helpers come and go
            maps += Path(f"/proc/{one.pid}/maps").read_text()
    return str(folder) in maps


def test_each_version_is_what_was_exported_and_in_memory_of_the_server(quick: Quick) -> None:
    first = quick.load(1)
    assert quick.is_policy(first, 1)
    for seed in (2, 3, 4):
        stored = quick.write(seed)
        assert stored.path
        quick.engine.load(stored, soon(60))
        assert not holds_open(quick.server, stored.path)
        shutil.rmtree(stored.path)
        assert quick.is_policy(stored.name, seed)
        assert quick.engine.unload(stored.name, soon(60))
    assert quick.is_policy(first, 1)


def test_the_same_adapter_gives_the_same_numbers_both_ways(quick: Quick) -> None:
    """Another rank than the other tests have, so that the first one is left to vLLM, which maps the file here."""
    versions = [quick.write(5, rank=4) for _ in range(3)]
    scores = []
    for stored in versions:
        quick.engine.load(stored, soon(60))
        scores.append(prompt_logprobs(quick.engine, stored.name, PROMPT, soon(60)))
    assert [holds_open(quick.server, stored.path) for stored in versions if stored.path] == [True, False, False]
    assert scores[0] == scores[1] == scores[2]


def test_other_dtypes_and_ranks_in_between_are_served_as_ever(quick: Quick) -> None:
    for seed, dtype, rank in [(1, torch.bfloat16, 8), (2, torch.float32, 8), (3, torch.bfloat16, 16)] * 2:
        name = quick.load(seed, dtype, rank)
        score = quick.engine.score(name, PROMPT, soon(60))
        expected = quick.reference.logprobs(quick.reference.adapter(seed, rank=rank), PROMPT[:1], PROMPT[1:])
        gap = sum(abs(one - other) for one, other in zip(score, expected, strict=True)) / len(expected)
        assert gap < 2 * quick.reference.tolerance
        quick.engine.unload(name, soon(60))


def test_an_adapter_that_cannot_be_read_is_refused_and_the_others_stay(quick: Quick) -> None:
    names = [quick.load(seed) for seed in (1, 2)]
    stored = quick.write(3)
    assert stored.path
    damage(stored.path)
    with pytest.raises(AdapterRejectedError):
        quick.engine.load(stored, soon(60))
    assert quick.engine.loaded(soon()).keys() == set(names)
    assert all(quick.is_policy(name, seed) for seed, name in enumerate(names, 1))


def test_a_run_trains_on_what_it_serves(quick: Quick, base_model: Path, tmp_path: Path) -> None:
    trainer = grpo_trainer(quick.server.base_url, base_model, tmp_path, max_steps=4)
    trainer.train()
    steps = steps_of(trainer)
    assert all(step["sampling/sampling_logp_difference/mean"] < 0.015 for step in steps)
    assert steps[-1]["lora_sync/verified"] == 1
    wait_for_unloads(trainer)
    trainer.vllm_generation.close()


def test_the_log_says_that_adapters_are_read_so(quick: Quick) -> None:
    assert "Adapters are read with several threads" in quick.server.log_path.read_text()
    assert httpx.get(f"{quick.server.base_url}/health", timeout=10, trust_env=False).status_code == 200
