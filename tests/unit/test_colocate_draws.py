"""Unit tier: the processes of an engine that is split over them draw the same tokens, each from its own generators."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trl_lora_sync.colocate.engine import RandomDraws

# vLLM draws from torch's generator, or from a seed that NumPy draws for each request.
SOURCES: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand(1, dtype=torch.float64)),
    "numpy": lambda: float(np.random.rand()),
}


def begin() -> None:
    """The trainer's random numbers, from their beginning."""
    torch.manual_seed(1)
    np.random.seed(1)


@pytest.fixture(params=SOURCES)
def draw(request: pytest.FixtureRequest) -> Callable[[], float]:
    begin()
    return SOURCES[request.param]


def draws_of(processes: int) -> RandomDraws:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=processes), model_config=SimpleNamespace(seed=3)
    )
    return RandomDraws(SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config)))


def sampled(taken: int, draw: Callable[[], float]) -> list[float]:
    """What one of two processes draws in two calls, if its trainer has taken so many numbers before each of them."""
    draws, found = draws_of(2), []
    for _ in range(2):
        for _ in range(taken):
            draw()
        with draws.same():
            found.append(draw())
    return found


def test_processes_draw_the_same_whatever_their_trainers_have_drawn(draw: Callable[[], float]) -> None:
    first, second = sampled(1, draw), sampled(5, draw)
    assert first == second
    assert first[0] != first[1]


def test_sampling_takes_nothing_from_the_trainer(draw: Callable[[], float]) -> None:
    draws = draws_of(2)
    with draws.same():
        draw()
    found = draw()
    begin()
    assert found == draw()


def test_an_engine_in_one_process_draws_as_vllm_does(draw: Callable[[], float]) -> None:
    with draws_of(1).same():
        found = draw()
    begin()
    assert found == draw()
