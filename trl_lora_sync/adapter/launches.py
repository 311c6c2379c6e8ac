"""A GPU's work for an export or a fingerprint in one launch instead of hundreds, where that is possible."""

import logging
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from trl_lora_sync.engine_plugins.checksum import word_sum

logger = logging.getLogger(__name__)


class Launch(Protocol):
    """The same work on the same tensors each time, on what they hold then."""

    def suits(self) -> bool:
        """Whether it can be done now; the tensors may have moved since the last time."""

    def run(self) -> Tensor:
        """Do it without waiting for the device, and return the result there."""


@torch.no_grad()  # for `work`, which would make what it writes a part of the graph of the trained matrices
def in_one_launch(
    work: Callable[[], Tensor], device: torch.device, make: Callable[[], Launch], written: Tensor | None = None
) -> Callable[[], Tensor]:
    """What does the same as `work`: on a GPU in one launch, if Triton is there and it works.

    Args:
        make: raises if something is missing, such as a compiler.
        written: what both write to; contiguous, of one dimension.
    """
    if device.type != "cuda":
        return work
    try:
        launch = make()
        if not launch.suits():
            return work
        found, expected = [_outcome(one, written) for one in (launch.run, work)]
        if not torch.equal(found, expected):
            raise ArithmeticError("its result is wrong")
    except Exception as error:
        logger.info("A sync works without Triton, and takes longer: %s: %s", type(error).__name__, error)
        return work
    return lambda: launch.run() if launch.suits() else work()


def _outcome(work: Callable[[], Tensor], written: Tensor | None) -> Tensor:
    result = work().view(-1).to(torch.int64)
    return result if written is None else torch.cat([result, word_sum(written).view(1)])
