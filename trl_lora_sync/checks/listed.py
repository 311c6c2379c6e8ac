"""The list of checks. A run ends at the first error of one; `doctor` makes them all, and reports each.

All users connect with `connect_engine` first, which raises for a server that cannot be used at all.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from trl_lora_sync.adapter.canonical import common_form
from trl_lora_sync.checks import adapter, server
from trl_lora_sync.checks.finding import NOTE, Finding
from trl_lora_sync.checks.subject import Check, Expected, Offer, Subject, TrialStore
from trl_lora_sync.checks.verify import Trial
from trl_lora_sync.engines.base import Deadline
from trl_lora_sync.runtime import each, offload

if TYPE_CHECKING:
    from trl_lora_sync.servers.handle import ServerHandle

logger = logging.getLogger(__name__)

# The order counts: `has_width` needs the scores of `has_base`, before which a run loads no adapter.
CHECKS: tuple[Check, ...] = (
    Check("adapters at run time", server.loads_at_run_time),
    Check("version", server.is_known_version),
    Check("log-probabilities", server.processes_logprobs),
    Check("generation_kwargs", server.uses_fields),
    Check("GPU to GPU", server.sees_gpus),
    Check("room for adapters", server.has_room),
    Check("dtype", server.has_dtype),
    Check("target modules", server.adapts_modules),
    Check("rank", server.has_rank),
    Check("base model's name", server.has_base_name),
    Check("vocabulary", server.knows_tokens),
    Check("base model", server.has_base),
    Check("width of the layers", server.has_width),
)
# Of each adapter that a server is tried with.
ADAPTER_CHECKS: tuple[Check, ...] = (
    Check("adapter", adapter.is_sampled_from),
    Check("effect", adapter.has_effect),
    Check("PEFT", adapter.is_computed_as_by_peft),
)


async def make_checks(
    subjects: Sequence[Subject], trials: Sequence[Trial], limit: Callable[[], Deadline], *, ends: bool = False
) -> None:
    """Make all checks, on all servers at the same time, and leave what they found in the subjects.

    Args:
        trials: what to try the servers with; each is stored once for all of them.
        limit: makes the deadline of each check.
        ends: whether to raise the first error.
    """
    # On all servers before the first trial: a run loads nothing anywhere if one server is refused.
    await each(subjects, partial(_go_through, CHECKS, limit, ends, ()))
    for trial in trials:
        store, unfit = subjects[0].store, subjects[0].unfit_for_trials
        if store is None or unfit:  # only for `doctor`, which has one subject and goes on after an error
            subjects[0].findings.append(Finding("adapter", NOTE, f"not loaded: {unfit}"))
            continue
        # Reading copies and scales every matrix, and the loop must go on sending requests.
        adapter_read = await offload(partial(trial.read, common_form(one.served.form for one in subjects)))
        # Once for all servers: zeros for missing siblings change nothing on an engine that does not need them.
        async with store.stored("trial", [one.server for one in subjects], adapter_read, limit()) as stored:
            offer = Offer(trial, adapter_read, stored)
            await each(subjects, partial(_go_through, ADAPTER_CHECKS, limit, ends, [offer]))


async def _go_through(
    checks: Sequence[Check], limit: Callable[[], Deadline], ends: bool, offer: Sequence[Offer], subject: Subject
) -> None:
    for check in checks:
        finding = await check(subject, limit(), *offer)
        subject.findings += [finding] if finding else []
        if finding and finding.error:
            if ends:
                raise finding.error
            if offer:
                return  # each of these builds on the one before


@dataclass(frozen=True)
class RunChecks:
    """The list as a run makes it: on all of its servers at the start, and on one after its restart."""

    expected: Expected
    store: TrialStore

    async def require(
        self, servers: Sequence["ServerHandle"], deadline: Deadline, trials: Sequence[Trial] | None = None
    ) -> list[Subject]:
        """Make all checks. After the last one, log the warnings.

        Args:
            trials: instead of the expected ones.

        Raises:
            LoRASyncError: the first error of a check.
        """
        # Without what an earlier process of a server has shown: another one may answer there by now.
        subjects = [Subject(server, self.expected, self.store) for server in servers]
        # A trial of another adapter's shapes proves nothing. Then the next version is scored, as no evidence is left.
        if trials is None:
            trials = await offload(lambda: [one for one in self.expected.trials if one.is_current()])
        await make_checks(subjects, trials, lambda: deadline, ends=True)
        warnings: dict[tuple[str, str], str] = {}
        for finding in (finding for subject in subjects for finding in subject.findings if finding.warning):
            warnings.setdefault((finding.name, finding.message), finding.warning)  # of several of one version, once
        # At the end, as a run that is refused needs no advice about its other servers.
        for warning in warnings.values():
            logger.warning("%s", warning)
        return subjects
