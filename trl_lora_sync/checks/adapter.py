"""The checks of an adapter that a server is tried with. Each builds on the one before."""

from trl_lora_sync.checks.finding import NOTE, OK, PROBLEM
from trl_lora_sync.checks.subject import Found, Offer, Subject
from trl_lora_sync.checks.verify import PROBE_PROMPT, Scores, Trial, VerificationResult, compare, mean_distance
from trl_lora_sync.engines.base import Deadline, PromptGroup, Sampling
from trl_lora_sync.errors import AdapterLayersError, AdapterNotVisibleError, AdapterRejectedError, VerificationError

# Ids that every vocabulary has, as the trainer's may be unknown.
_PROMPT = PromptGroup(prompt=[0, 1, 2, 3], count=1)
_SAMPLING = Sampling.unrestricted(max_tokens=1, logprobs=0)


async def is_sampled_from(subject: Subject, deadline: Deadline, offer: Offer) -> Found:
    """Have it loaded and a token sampled from it, as each sync will, a pause included."""
    stored = offer.stored
    try:
        # By the handle, whose ledger then has the name, so that it is unloaded whatever the checks find.
        await subject.server.load(stored, deadline)
        await subject.engine.warm_up(stored, deadline)
        # On vLLM `warm_up` does nothing, so this is the first use.
        await subject.engine.generate(stored.name, [_PROMPT], _SAMPLING, deadline)
    # It shows that the path is wrong, and nothing of the base model.
    except AdapterNotVisibleError:
        raise
    except AdapterLayersError as error:
        raise AdapterLayersError(f"{error} {offer.trial.advice}".rstrip()) from error
    except AdapterRejectedError as error:
        evidence = "it refused an adapter of the trainer's shapes"
        raise subject.other_base(evidence, f"{offer.trial.advice} {error}".lstrip()) from error
    return OK, f"loaded as {stored.name}, rank {stored.rank}"


async def has_effect(subject: Subject, deadline: Deadline, offer: Offer) -> Found:
    engine, image, name = subject.engine, offer.trial.image, offer.stored.name
    # Scores of the trial before would be compared with what PEFT computes of this one.
    subject.scores = None
    if not subject.is_strict:
        return None
    if not subject.base_logprobs:
        return NOTE, "not compared: the base model could not be scored"
    if image is None:
        base, adapted = subject.base_logprobs, await engine.score(name, list(PROBE_PROMPT), deadline)
    else:
        base, adapted = [
            await engine.score_image(one, image.prompt_ids, image.image, image.image_token_id, image.scored, deadline)
            for one in (subject.served.base_model, name)
        ]
    subject.scores = Scores(base=base, adapted=adapted)
    change = mean_distance(base, adapted)
    if not change and not any(bool(one.any()) for key, one in offer.adapter.tensors.items() if ".lora_B." in key):
        return NOTE, "lora_B is zero, as before the first step: no difference is expected"
    message = f"the adapter moves the server's log-probabilities by {change:.4f} on average"
    # An adapter of a few steps may do less than rounding does, so neither a change nor its absence shows anything.
    if offer.trial.scores is not None and (small := _too_small(_compared(subject, offer.trial.scores))):
        return NOTE, f"{message}. {small}"
    young = "" if offer.trial.scores else " Without PEFT's own, this means little if the adapter is young."
    if change:
        return OK, f"{message}.{young}"
    return PROBLEM, (
        "the server answers as if there were no adapter: its log-probabilities are the base model's. Either no "
        f"layer of the served model has the names in the adapter, or the adapter is too small to show.{young}"
    )


async def is_computed_as_by_peft(subject: Subject, deadline: Deadline, offer: Offer) -> Found:
    trial = offer.trial
    if subject.scores is None:
        return None
    if trial.scores is None:
        return NOTE, f"not compared: {subject.expected.unscored}"
    evidence = _compared(subject, trial.scores)
    subject.evidence.append(evidence)
    message = (
        f"mean |served - PEFT| {evidence.gap_mean:.4f} with the adapter and {evidence.base_gap:.4f} without; the "
        f"adapter itself moves PEFT's by {evidence.trained_change:.4f}"
    )
    gap = subject.expected.base.gap(subject.base_logprobs)
    # Another base model explains any difference, so it does not count against the adapter.
    if gap is not None and gap.is_suspicious:
        return PROBLEM, f"{message}. The server serves another base model."
    if evidence.is_mismatch:
        raise mismatch_error(subject.url, offer.stored.name, evidence, subject.server.settings.verify_tolerance, trial)
    small = _too_small(evidence)
    if not small:
        return OK, message
    unproven = (
        f"A trial adapter does not prove that {subject.url} samples from what it loads on {trial}, because its effect "
        f"is too small beside the difference of the base models: {evidence}. The first versions are verified instead, "
        "and lora_sync/verified stays 0 until one of them is a proof."
    )
    # Not an error: a quantised base may be meant, and its difference can hide what a small adapter adds.
    return NOTE, f"{message}. {small}", unproven


def _compared(subject: Subject, trained: Scores) -> VerificationResult:
    assert subject.scores is not None
    return compare(subject.scores, trained, tolerance=subject.server.settings.verify_tolerance)


def _too_small(evidence: VerificationResult) -> str:
    """Why the scores show nothing of the server, and what to do; empty if they do."""
    if evidence.confirms or evidence.is_mismatch:
        return ""
    return (
        f"This shows nothing of the server: the adapter moves PEFT's own by {evidence.trained_change:.4f}, and up to "
        f"{evidence.tolerance:.4f} may be rounding or the difference of the base models. Give an adapter of a later "
        "step. A run proves the server at its start with a trial adapter of large effect."
    )


def mismatch_error(
    base_url: str, adapter_name: str, evidence: VerificationResult, tolerance: float, trial: Trial | None = None
) -> VerificationError:
    """The error of a server that computes something else with an adapter than the trainer."""
    where = f", which is zero outside {trial}" if trial is not None and trial.modules else ""
    advice = f"{trial.advice} " if trial is not None and trial.advice else ""
    return VerificationError(
        f"{base_url} accepted the adapter {adapter_name!r} and computes something else with it{where}: "
        f"{evidence}. {advice}The version before stays active. Likely causes: the server's base model is "
        "another checkpoint or is quantised in another way; it ignores tensors, whose names the served model "
        "does not know or whose modules its --lora-target-modules leave out; the scaling is applied twice or "
        "not at all; something between trainer and server answers with another version. "
        "`trl-lora-sync doctor` looks closer. If the difference is known and wanted, raise "
        f'lora_sync_verify_tolerance (now {tolerance:g}), or set lora_sync_verify="off".'
    )
