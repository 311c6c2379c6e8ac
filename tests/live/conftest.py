"""Fixtures of the live tier: trainers that clean up after themselves, and a check that nothing stays on the server."""

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import torch
from support.servers import Proxy, adapters_on, proxy_to
from support.trainers import grpo_trainer
from vllm_server import VLLMServer

from trl_lora_sync import GRPOTrainer

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # the server computes at the same time, on the same two cores


@pytest.fixture
def make_trainer(tmp_path: Path, clean_server: VLLMServer) -> Iterator[Callable[..., GRPOTrainer]]:
    """Builds trainers as `grpo_trainer` does, below `tmp_path`; their adapters are withdrawn after the test.

    Comes after `clean_server`, so that its check sees what trainers leave behind.
    """
    made = []

    def make(base_url: str, model: object, folder: Path = tmp_path, **kwargs: object) -> GRPOTrainer:
        trainer = grpo_trainer(base_url, model, folder, **kwargs)
        made.append(trainer)
        return trainer

    yield make
    for trainer in made:
        trainer.vllm_generation.close()


@pytest.fixture
def proxy(clean_server: VLLMServer) -> Iterator[Proxy]:
    """In front of the shared server."""
    with proxy_to(clean_server.base_url) as running:
        yield running


@pytest.fixture
def clean_server(server: VLLMServer) -> Iterator[VLLMServer]:
    """The shared server, alive and without any adapter before and after the test."""
    yield server
    assert server.is_running(), f"the test killed the shared server:\n{server.log_tail()}"
    left = adapters_on(server.base_url)
    for name in left:  # so that the next test fails for its own reasons only
        httpx.post(f"{server.base_url}/v1/unload_lora_adapter", json={"lora_name": name}, timeout=30, trust_env=False)
    assert not left, f"the test left adapters on the shared server: {left}"
