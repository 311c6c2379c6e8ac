"""Scoring a served base model beside the requests of another run, where that goes wrong on vLLM-CPU.

In a batch with requests for an adapter, vLLM on a CPU computes those for the base model with an adapter as well (seen
on 0.31): the index -1, which stands for no adapter, selects the last slot. Requests for adapters are right, and so are
both on a GPU (seen on 0.26). Source: `bgmv_shrink` in vllm/lora/ops/torch_ops/lora_ops.py, which 0.33 has mended.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from trl_lora_sync.addresses import is_local_url, next_port
from trl_lora_sync.checks.verify import PROBE_PROMPT
from trl_lora_sync.engines.vllm.spec import VLLM
from trl_lora_sync.errors import DeadlineExceededError, GenerationError, ServerSetupError

if TYPE_CHECKING:
    from trl_lora_sync.engines.base import Deadline, Engine

logger = logging.getLogger(__name__)

_POLL_S = 0.1
# Where the server does not show when others have stopped.
_BLIND_PAUSE_S = 1.0


class SharedCPUServerError(ServerSetupError):
    """The base model of a vLLM-CPU server cannot be scored, because another run always samples there."""


async def score_base(
    engine: "Engine",
    deadline: "Deadline",
    *,
    is_plausible: Callable[[Sequence[float]], bool] = lambda scores: False,
) -> list[float]:
    """Log-probabilities of `PROBE_PROMPT` by the served base model; on vLLM-CPU at a quiet moment if necessary.

    Args:
        is_plausible: whether scores are what was expected, so that it does not matter who else sampled meanwhile.

    Raises:
        SharedCPUServerError: they never were, and there was no quiet moment before the deadline.
    """
    is_disturbed = False
    try:
        while True:
            # Before and after: what another client begins and ends in between shows by its time alone.
            before = await _activity(engine, deadline)
            try:
                scores = await engine.score(engine.capabilities.base_model, list(PROBE_PROMPT), deadline)
                if is_plausible(scores) or not await _was_disturbed(engine, before, deadline):
                    return scores
            except GenerationError:  # one request was mixed up and another one was not, so they contradict each other
                if not await _was_disturbed(engine, before, deadline):
                    raise
            if not is_disturbed:
                is_disturbed = True
                logger.warning(
                    "Another client samples from an adapter at %s. vLLM on a CPU computes requests for the base model "
                    "with that adapter when both are in one batch, so the base model is checked again at a quiet "
                    "moment. Use a vLLM server on a CPU for one run at a time.",
                    engine.base_url,
                )
            await _wait_until_quiet(engine, deadline)
    except DeadlineExceededError as error:
        if not is_disturbed:
            raise
        raise _shared(engine, deadline) from error


async def _activity(engine: "Engine", deadline: "Deadline") -> float | None:
    # None, for an unknown build, counts as a CPU.
    return None if engine.capabilities.is_cpu_build is False else await engine.adapters_ran_at(deadline)


async def _was_disturbed(engine: "Engine", before: float | None, deadline: "Deadline") -> bool:
    if engine.capabilities.is_cpu_build is False:
        return False
    after = await _activity(engine, deadline)
    if before is None or after is None:  # as with --disable-log-stats
        # Without statistics, an adapter that is loaded may be in use.
        return engine.capabilities.is_cpu_build is True and bool(await engine.loaded(deadline))
    # Infinity: a request for an adapter runs now. Another value than before: one ran in between.
    return math.isinf(after) or after != before


async def _wait_until_quiet(engine: "Engine", deadline: "Deadline") -> None:
    is_blind = await _activity(engine, deadline) is None
    # `remaining_s` raises once the time is up, which ends this wait and the attempts of `score_base`.
    await asyncio.sleep(min(_BLIND_PAUSE_S if is_blind else _POLL_S, deadline.remaining_s()))
    while (ran_at := await _activity(engine, deadline)) is not None and math.isinf(ran_at):
        await asyncio.sleep(min(_POLL_S, deadline.remaining_s()))


def _shared(engine: "Engine", deadline: "Deadline") -> SharedCPUServerError:
    served: Any = engine.capabilities
    url = next_port(engine.base_url)
    command = VLLM.serve_command(served.base_root, base_url=url, is_local=is_local_url(url))
    gpu = "" if served.is_cpu_build else " If this server runs on a GPU, it serves another base model."
    return SharedCPUServerError(
        f"Another client samples from an adapter at {engine.base_url}, and did not pause within "
        f"{deadline.budget_s:g} s. vLLM on a CPU computes requests for the base model with that adapter when both are "
        "in one batch, so its base model cannot be checked meanwhile. Use a vLLM server on a CPU for one run at a "
        f"time: wait for the end of the other run, or start a second server with {command}.{gpu}"
    )
