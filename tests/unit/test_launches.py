"""What replaces a GPU's work by one launch, with launches that run on the CPU."""

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trl_lora_sync.adapter.launches import in_one_launch

GPU = torch.device("cuda")  # which the tensors here are not on


class Doubling:
    """Writes twice the source to the target, with some factor instead of two if it is wrong."""

    def __init__(self, source: Tensor, target: Tensor, factor: float = 2.0) -> None:
        self.source, self.target, self.factor = source, target, factor
        self.is_suited, self.runs = True, 0

    def suits(self) -> bool:
        return self.is_suited

    def run(self) -> Tensor:
        self.runs += 1
        self.target.copy_(self.source.detach() * self.factor)
        return torch.tensor(True)


def work_on(source: Tensor, target: Tensor) -> Callable[[], Tensor]:
    def work() -> Tensor:
        target.copy_(source * 2)
        return target.isfinite().all()

    return work


@pytest.fixture
def source() -> Tensor:
    return torch.arange(8.0, requires_grad=True)  # as trained matrices do


def test_launch_takes_the_place_of_the_work_where_it_suits(source: Tensor) -> None:
    target = torch.zeros(8)
    launch = Doubling(source, target)
    chosen = in_one_launch(work_on(source, target), GPU, lambda: launch, target)
    assert not target.requires_grad
    runs = launch.runs
    assert bool(chosen())
    assert launch.runs == runs + 1
    launch.is_suited = False
    target.zero_()
    with torch.no_grad():
        assert bool(chosen())
    assert launch.runs == runs + 1
    assert torch.equal(target, source.detach() * 2)


def test_launch_that_does_not_suit_at_first_is_never_used(source: Tensor) -> None:
    """It would be used later on without having been compared."""
    target = torch.zeros(8)
    launch = Doubling(source, target)
    launch.is_suited = False
    work = work_on(source, target)
    assert in_one_launch(work, GPU, lambda: launch, target) is work
    assert launch.runs == 0


@pytest.mark.parametrize("reason", ["it is wrong", "it cannot be made"])
def test_work_stays_where_a_launch_fails(reason: str, source: Tensor, caplog: pytest.LogCaptureFixture) -> None:
    target = torch.zeros(8)

    def make() -> Doubling:
        if reason == "it cannot be made":
            raise RuntimeError("there is no compiler")
        return Doubling(source, target, factor=3.0)

    work = work_on(source, target)
    with caplog.at_level(logging.INFO):
        assert in_one_launch(work, GPU, make, target) is work
    assert "works without Triton" in caplog.text


def test_on_a_cpu_nothing_is_made(source: Tensor) -> None:
    def make() -> Doubling:
        pytest.fail("it was made")

    work = work_on(source, torch.zeros(8))
    assert in_one_launch(work, torch.device("cpu"), make) is work
