"""The checks of a server itself: what it is, what it can take, and whether its base model is the trained one.

A server reports no shapes. vLLM pads an adapter that is too small for it with zeros and answers 200; SGLang crashes
on a misfit. So names, dtype, vocabulary and the log-probabilities of a prompt are compared before a trial load.
"""

from collections.abc import Sequence

from trl_lora_sync.addresses import is_local_url
from trl_lora_sync.checks.finding import NOTE, OK, PROBLEM
from trl_lora_sync.checks.mixed_batches import score_base
from trl_lora_sync.checks.subject import Found, Subject
from trl_lora_sync.engine_plugins import cuda_ipc
from trl_lora_sync.engines.base import Deadline
from trl_lora_sync.engines.registry import ENGINES
from trl_lora_sync.errors import AdapterRejectedError, ServerSetupError

_UNKNOWN_BASE = "not compared: the trained model is not known here"
_UNKNOWN_ADAPTER = "not compared: the adapter is not known here. Give --adapter or --peft-config."


async def loads_at_run_time(subject: Subject, deadline: Deadline) -> Found:
    is_fused = subject.served.is_fused  # `connect` has refused a server that does neither
    return OK, 'they are added to the weights; set lora_sync_serving="fused"' if is_fused else "they can be loaded"


async def is_known_version(subject: Subject, deadline: Deadline) -> Found:
    version = subject.served.version
    known = ENGINES[subject.served.engine].versions
    if doubt := known.doubt(version):
        # It is logged after the last check only, so it may report that all were passed.
        warning = f"{known.caution(version)} Look closer with: trl-lora-sync doctor {subject.url}"
        return NOTE, f"{doubt}; verify an adapter with --adapter", warning
    how = "with which this release was tested" if version in known.run else "known from its source"
    return OK, f"{version}, {how}"


async def processes_logprobs(subject: Subject, deadline: Deadline) -> Found:
    mode = subject.served.logprobs_mode
    if mode == "raw_logprobs":
        fix = ENGINES[subject.served.engine].processed_logprobs.format(command=subject.restart_command())
        message = (
            "they come before the temperature, and TRL compares them with its own after it, so importance ratios "
            f"are wrong at any temperature but 1. {fix}"
        )
        # Not an error: at temperature 1, TRL's default, log-probabilities before and after it are the same.
        return PROBLEM, message, f"The log-probabilities of {subject.url} are raw: {message}"
    if mode == "unknown":
        return NOTE, "unknown whether they come before or after the temperature"
    return OK, "after the temperature, as TRL compares them"


async def uses_fields(subject: Subject, deadline: Deadline) -> Found:
    """Whether it uses every field of the run's `generation_kwargs`."""
    names = subject.server.settings.sampling_fields
    if not names:
        return None
    if ignored := await subject.engine.ignored_fields(names, deadline):
        raise ServerSetupError(
            f"{subject.url} ignores {', '.join(ignored)} of generation_kwargs: {subject.served.engine} "
            f"{subject.served.version} has no such field. Correct the names, or leave these out. (A regular expression "
            "is set by vllm_structured_outputs_regex.)"
        )
    return OK, f"it has {', '.join(names)}"


async def sees_gpus(subject: Subject, deadline: Deadline) -> Found:
    """Whether a server on this host sees the GPUs that this process may use."""
    ours = cuda_ipc.visible_gpus() if subject.served.gpus and is_local_url(subject.url) else []
    if unseen := [gpu for gpu in ours if gpu not in subject.served.gpus]:
        return NOTE, (
            f"the server does not see {', '.join(unseen)}. From a trainer there it gets versions through a file, "
            f"which takes longer. Restart it with {subject.restart_command()}, or add that GPU to its "
            "CUDA_VISIBLE_DEVICES after its own."
        )
    return (OK, "the server sees every GPU that a trainer in this shell does") if ours else None


# Whether it can take the adapters


async def has_room(subject: Subject, deadline: Deadline) -> Found:
    """Whether it can load an adapter while it samples from others."""
    served, settings, spec = subject.served, subject.server.settings, ENGINES[subject.served.engine]
    needed, staleness = settings.versions_at_once, settings.staleness
    # Fused serving has one adapter at a time, and a load waits for running requests.
    if needed == 1 or served.is_fused:
        return None
    setting, way_out = (
        ("lora_sync_overlap=1", "set lora_sync_overlap=0")
        if staleness is None
        else (f"max_staleness={staleness}", "lower max_staleness")
    )
    if not served.keeps_adapters_apart:
        raise ServerSetupError(
            f"{subject.url} runs {served.engine} {served.version}, which may mix up adapters that are loaded "
            "while requests run. Sampling beside the training needs vLLM 0.26 or later. Install one beside the "
            f"server{'' if staleness is not None else f', or {way_out}'}."
        )
    if served.max_loras is not None and served.max_loras < needed:
        # SGLang counts the base model as an adapter of the batch, and vLLM does not.
        flag, for_base = spec.max_loras_flag, int(spec.counts_base)
        restart = subject.restart_command(engine_options=[flag, str(needed + for_base)])
        raise ServerSetupError(
            f"{subject.url} was started with {flag} {served.max_loras + for_base}, so the load of a version may "
            f"wait for what is sampled from the versions before. {setting} needs room for {needed} adapters. "
            f"Restart the server with {restart}, or {way_out}."
        )
    return OK, f"the {needed} of the run fit"


async def has_dtype(subject: Subject, deadline: Deadline) -> Found:
    """Refuse an adapter that the server would cast to a dtype which holds other numbers; float32 loses nothing."""
    served, written = subject.served.dtype, subject.expected.dtype
    if served is None:
        return None
    if written is None:
        return NOTE, f"{_UNKNOWN_BASE}; the server computes in {served}"
    # float32 holds every number of float16 and bfloat16.
    if served != written and written != "float32":
        command = subject.restart_command(engine_options=["--dtype", written])
        raise ServerSetupError(
            f"{subject.url} was started with --dtype {served}, and the adapter is written in {written}, "
            f"the dtype of the trainer's base model. Both must compute in the same one. Restart the server with "
            f'{command}, or load the trainer\'s model in {served} and set lora_sync_dtype="{served}".'
        )
    return OK, f"the server computes in {served}"


async def adapts_modules(subject: Subject, deadline: Deadline) -> Found:
    wanted, rank = subject.expected.target_modules, subject.expected.rank
    if not subject.served.target_modules:
        return None
    if not wanted:
        return NOTE, _UNKNOWN_ADAPTER
    if missing := [name for name in wanted if not subject.served.serves_module(name)]:
        command = subject.restart_command("--lora-rank", str(rank), engine_options=["--lora-target-modules", *wanted])
        raise ServerSetupError(
            f"The {ENGINES[subject.served.engine].versions.title} server at {subject.url} was started without "
            f"{', '.join(missing)} among its --lora-target-modules: the adapter needs them. Restart it with {command}."
        )
    return OK, f"{', '.join(wanted)} can be adapted"


async def has_rank(subject: Subject, deadline: Deadline) -> Found:
    """Only for `doctor` without an adapter, as a load on trial shows the same."""
    rank, served = subject.expected.rank, subject.served
    if subject.expected.wider or subject.expected.trials:
        return None
    if served.is_fused:
        return OK, "any fits"
    if rank is None:
        return NOTE, _UNKNOWN_ADAPTER
    # A stock vLLM reports it in its development mode only. It is in the refusal of a larger rank as well, but of a
    # refused load workers may leave answers behind, which vLLM takes for those to the next loads.
    reserved = served.max_lora_rank
    if reserved is None:
        return NOTE, "not checked: the server does not report it. Give --adapter to have one loaded."
    if rank > reserved:
        command = subject.restart_command("--lora-rank", str(rank))
        raise ServerSetupError(
            f"the server reserves {reserved}, and the adapter has {rank}. Restart it with {command}."
        )
    return OK, f"{rank} fits the {reserved} that the server reserves"


# Whether its base model is the trainer's


async def has_base_name(subject: Subject, deadline: Deadline) -> Found:
    base, served = subject.expected.base, subject.served
    name = base.name
    if not name:
        return NOTE, _UNKNOWN_BASE
    if is_same_model(name, (served.base_model, served.base_root)):
        if not base.change:
            if name.rstrip("/") in (served.base_model, served.base_root.rstrip("/")):
                return OK, f"the same as the trainer's, {name}"
            return NOTE, f"only the last part agrees: the trainer has {name}, and the server {served.base_root}"
        restart = subject.restart_command(model="FOLDER")
        message = (
            f"{base.change} {subject.url} serves {served.base_model!r} ({served.base_root}); serve FOLDER, {restart}."
        )
        # What is served under the name of the checkpoint may be a folder into which the changed model was saved.
        if subject.is_strict and is_same_model(name, (served.base_root,)):
            raise ServerSetupError(f'{message} If they are meant to differ, set lora_sync_verify="off".')
        return PROBLEM, message, message
    differ = (
        f"The trainer's base model is {name!r}, but {subject.url} serves {served.base_model!r} ({served.base_root})."
    )
    if_other = "every completion comes from another policy than the one being trained."
    return NOTE, differ, f"{differ} If these are not the same weights, {if_other}"


async def knows_tokens(subject: Subject, deadline: Deadline) -> Found:
    size = subject.expected.base.vocab_size
    if not size:
        return NOTE, _UNKNOWN_BASE
    # The largest id: if that is known, all smaller ones are.
    if not await subject.engine.has_token(size - 1, deadline):
        raise subject.other_base(f"its vocabulary has fewer than the trainer's {size} tokens")
    return OK, f"the server knows the trainer's {size} tokens"


async def has_base(subject: Subject, deadline: Deadline) -> Found:
    expected, served = subject.expected, subject.served

    def is_plausible(scores: Sequence[float]) -> bool:
        # With nothing to compare them with, any scores will do.
        gap = expected.base.gap(scores)
        return gap is None or not gap.is_suspicious

    subject.base_logprobs = await score_base(subject.engine, deadline, is_plausible=is_plausible)
    gap = expected.base.gap(subject.base_logprobs)
    if gap is None:
        message = f"it scores a prompt of token ids; not compared with the trainer's: {expected.unscored}"
        return (NOTE, message) if expected.unscored else (OK, message)
    if not gap.is_suspicious:
        whose = "the first server" if expected.are_of_peer else "the trainer"
        return OK, f"it scores a prompt of token ids like {whose} (mean distance {gap.mean:.4f})"
    if expected.are_of_peer:
        raise ServerSetupError(
            f"it gives other log-probabilities than the first server's (mean distance {gap.mean:.3f}). Serve the same "
            "model everywhere."
        )
    # An engine that crashes on an adapter of other shapes gets none, whatever the setting.
    if subject.is_strict or not served.rejects_shape_mismatch:
        relaxed = 'If they are meant to differ, set lora_sync_verify="off".' if served.rejects_shape_mismatch else ""
        raise subject.other_base(f"it computes other log-probabilities ({gap})", relaxed)
    message = (
        f"The base model at {subject.url} computes other log-probabilities than the trainer's: {gap}. Completions come "
        "from another policy than the one being trained."
    )
    return PROBLEM, message, message


async def has_width(subject: Subject, deadline: Deadline) -> Found:
    """Offer an adapter that is one wider than the trainer's; a base of other weights and the same shapes refuses it."""
    wider, gap = subject.expected.wider, subject.expected.base.gap(subject.base_logprobs)
    # A base with the trainer's log-probabilities has its shapes too. Another one gets this far only with
    # `lora_sync_verify="off"` and an engine that refuses a misfit.
    if wider is None or gap is None or not gap.is_suspicious:
        return None
    assert subject.store is not None
    async with subject.store.stored("width", [subject.server], wider, deadline) as stored:
        try:
            await subject.server.load(stored, deadline)
        except AdapterRejectedError:
            return OK, "not wider than the trainer's"
    raise subject.other_base("its layers are wider than the trainer's")


def is_same_model(ours: str, theirs: tuple[str, ...]) -> bool:
    """Whether the trainer's and the server's words for the base model probably mean the same checkpoint.

    Compared by the last path component, because a mount or a hub organisation may differ. Text only: a server's
    answer is never opened as a path.
    """
    return _model_name(ours) in {_model_name(name) for name in theirs}


def _model_name(text: str) -> str:
    # A snapshot in the Hugging Face cache ends in a commit hash: .../models--Qwen--Qwen3-8B/snapshots/<hash>
    repository, _, _ = text.partition("/snapshots/")
    return repository.rstrip("/").rpartition("/")[2].rpartition("--")[2].lower()
