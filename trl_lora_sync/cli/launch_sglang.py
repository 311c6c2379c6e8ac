"""The command that starts SGLang for adapter sync, and what is refused because it is known to break."""

import json
from collections.abc import Mapping
from dataclasses import replace

from packaging.version import Version

from trl_lora_sync.cli.console import UsageError
from trl_lora_sync.cli.installed import Installed
from trl_lora_sync.cli.launch import EngineArguments, LaunchCommand, ServerRequest, is_on, key_notes, port_notes
from trl_lora_sync.cli.peft_config import USUAL_MODULES

# Source: sglang#36894; a request with n > 1 leaves its adapter in use for ever, so that no unload ends.
_SAMPLES_SAFELY_FROM = Version("0.5.22")
# Flags whose number must be 1, and why.
_ONE_OF_EACH = {
    ("--dp-size", "--data-parallel-size", "--dp"): "SGLang loads adapters into one replica only. Start independent "
    "servers, one URL each",
    ("--attn-dp-size", "--attention-data-parallel-size"): "SGLang then takes pinned adapters only, and versions are "
    "not pinned. Leave it out",
    ("--tokenizer-worker-num",): "each worker keeps a separate list of adapters, so requests to the others would "
    "fail. Leave it out",
}
# What SGLang calls the matrices of each expert, also in families with other names (0.5.15).
_EXPERT_MODULES = ("gate_proj", "up_proj", "down_proj")


def plan_sglang(installed: Installed, request: ServerRequest, environ: Mapping[str, str]) -> LaunchCommand:
    """The command for `request`; see `serve.plan`."""
    # Without named modules the usual ones are served, and these are among them.
    if request.adapts_experts and request.modules:
        request = replace(request, modules=tuple(dict.fromkeys((*request.modules, *_EXPERT_MODULES))))
    given = EngineArguments(request.extra)
    given.check_port(request)
    _check_sglang(installed, given, request, environ)
    notes: list[str] = []
    if installed.parsed() < _SAMPLES_SAFELY_FROM:
        notes.append(
            f"no client of SGLang {installed.version} may sample with n > 1: its adapter could never be unloaded "
            "again. Adapter sync never does. SGLang 0.5.22 has the fix."
        )
    flags: dict[str, str | tuple[str, ...] | None] = {
        "--host": request.host,
        "--port": str(request.port),
        "--enable-lora": None,
        "--max-lora-rank": str(request.lora_rank),
        "--max-loras-per-batch": str(request.keep + 2),  # one of them is the base model
        # Without initial adapters SGLang does not start unless it is given these (0.5.15, server_args.py).
        "--lora-target-modules": request.modules or USUAL_MODULES,
    }
    # Without it the trainer refuses `vllm_server_sleep`, as SGLang would keep its memory.
    if request.sleeps:
        flags["--enable-memory-saver"] = None
    notes += port_notes(
        given.get("--host") or request.host, "--api-key", environ if not given.has("--api-key") else None
    )
    notes += key_notes(given, ".")
    notes += _notes_of_unread_keys(given, environ)
    program = (str(installed.python), "-m", "sglang.launch_server", "--model-path", request.model)
    return LaunchCommand(command=(*program, *given.missing(flags), *request.extra), notes=tuple(notes))


def _notes_of_unread_keys(given: EngineArguments, environ: Mapping[str, str]) -> list[str]:
    # Names of the trainer's side (`engines/sglang`). SGLang takes its keys as arguments only (0.5.15, server_args.py).
    names = [name for name in ("SGLANG_API_KEY", "SGLANG_ADMIN_API_KEY") if environ.get(name)]
    if not names or given.has("--api-key", "--admin-api-key", "--config"):
        return []
    return [
        f"SGLang does not read {' and '.join(names)}, so this server has no key. Write api-key and admin-api-key into "
        "a YAML file that only you can read, and end the command with: -- --config FILE"
    ]


def _check_sglang(
    installed: Installed, given: EngineArguments, request: ServerRequest, environ: Mapping[str, str]
) -> None:
    if request.supports_push:
        raise UsageError(
            "--push cannot be used with SGLang, which takes adapters in the load request without any flag. Leave it "
            "out; the trainer needs no setting for it."
        )
    if request.is_fused:
        raise UsageError(
            "--fused cannot be used with SGLang, which cannot add an adapter to its weights while it runs. Leave it "
            "out, or serve with vLLM."
        )
    if request.loads_quickly:
        raise UsageError("--quick-load cannot be used with SGLang; it changes how vLLM reads adapters. Leave it out.")
    for flags, why in _ONE_OF_EACH.items():
        if (count := given.number(*flags, default=1)) > 1:
            raise UsageError(f"{flags[0]} {count} cannot be used: {why}.")
    if is_on(environ, "SGLANG_RUST_SERVER"):
        raise UsageError("SGLANG_RUST_SERVER is set: SGLang's Rust server loads no adapters. Unset it.")
    if is_on(environ, "SGLANG_RETURN_ORIGINAL_LOGPROB"):
        raise UsageError(
            "SGLANG_RETURN_ORIGINAL_LOGPROB is set: log-probabilities would come before the temperature, and TRL's "
            "importance ratios would be wrong. Unset it."
        )
    # They apply to each request that leaves a field out, requests of other clients included.
    samples = _preferred_samples(given)
    if samples > 1 and installed.parsed() < _SAMPLES_SAFELY_FROM:
        raise UsageError(
            f"--preferred-sampling-params with n={samples} cannot be used with SGLang {installed.version}: an adapter "
            "that was sampled with n > 1 can never be unloaded again. Use n=1, or SGLang 0.5.22 or later."
        )
    given.check_rank(request, request.lora_rank)
    given.check_modules(request, "SGLang would refuse it", every="all")
    consequence = "a load would have to wait for requests that still use an older version"
    given.check_room("--max-loaded-loras", request, consequence)


def _preferred_samples(given: EngineArguments) -> int:
    try:
        return int(json.loads(given.get("--preferred-sampling-params") or "{}").get("n", 1))
    except (ValueError, AttributeError, TypeError):
        return 1  # SGLang itself reports what is wrong with it
