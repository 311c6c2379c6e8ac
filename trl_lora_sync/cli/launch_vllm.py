"""The command that starts vLLM for adapter sync, and what is refused because it is known to break."""

from collections.abc import Mapping
from dataclasses import replace

from packaging.version import Version

from trl_lora_sync.cli.console import UsageError
from trl_lora_sync.cli.gpus import VISIBLE, with_all_gpus
from trl_lora_sync.cli.installed import Installed
from trl_lora_sync.cli.launch import EngineArguments, LaunchCommand, ServerRequest, is_on, key_notes, port_notes
from trl_lora_sync.cli.vllm_on_cpu import cpu_env, cpu_flags, cpu_notes
from trl_lora_sync.engine_plugins.vllm_fused import MIDDLEWARE as FUSED_MIDDLEWARE
from trl_lora_sync.engine_plugins.vllm_fused import WORKER as FUSED_WORKER
from trl_lora_sync.engine_plugins.vllm_push import MIDDLEWARE
from trl_lora_sync.engine_plugins.vllm_quick_load import MIDDLEWARE as QUICK_MIDDLEWARE
from trl_lora_sync.engine_plugins.vllm_quick_load import WORKER as QUICK_WORKER
from trl_lora_sync.engine_plugins.vllm_quick_load import writes_slots
from trl_lora_sync.engines.vllm.spec import VLLM
from trl_lora_sync.origin import install_command

RUNTIME_LORA = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
# Source: vllm#56643 and vllm#53495; `_compute_prefix_hash` in kv_connector/v1/hf3fs/hf3fs_connector.py, 0.31; and
# `_get_match` in flexkv/integration/vllm/vllm_v1_adapter.py of FlexKV.
_STORES_WITHOUT_ADAPTERS = ("LMCacheConnectorV1", "ExampleConnector", "HF3FSKVConnector", "FlexKVConnectorV1")
# Below, `--kv-offloading-backend lmcache` is LMCacheConnectorV1. Source: vllm#42865; read in 0.22 and 0.23.
_LMCACHE_APART_FROM = Version("0.23")
# vLLM 0.22 to 0.25 may serve running requests from the wrong slot after a load with two slots or more.
# Source: `set_adapter_mapping` in vllm/lora/model_manager.py, fixed in 0.26.
_ONE_SLOT_BELOW = Version("0.26")
# Below, the option was not looked for. With it, adapters with one tensor for each expert are served as well.
_STACKED_EXPERTS_FROM = Version("0.26")
# Source: vllm#43529, which moved bitsandbytes out of vLLM.
_BITSANDBYTES_IN_A_PLUGIN_FROM = Version("0.28")


def plan_vllm(installed: Installed, request: ServerRequest, environ: Mapping[str, str]) -> LaunchCommand:
    """The command for `request`; see `serve.plan`."""
    given = EngineArguments(request.extra)
    given.check_port(request)
    # First, as the checks depend on the choice.
    request = _with_quick_load(installed, request, given)
    _check_vllm(installed, given, request, environ)
    _check_plugins(installed, request)
    notes: list[str] = []
    on_cpu = installed.is_cpu_build(environ)
    if on_cpu and request.sleeps:
        # It ends with a traceback of its configuration (0.31, config/model.py).
        raise UsageError(
            f"--sleep cannot be used: vLLM {installed.version} is a CPU build, which has no sleep mode. Leave it out."
        )
    # A written version exists in its slot only, so every kept version needs a slot, and so does the next version.
    has_written_slots = bool(request.loads_quickly) and writes_slots(environ)
    # Otherwise vLLM keeps versions in host memory and copies them to slots: one slot for the active version, and one
    # for the next version, so that its load does not wait for requests that still run.
    slots = request.keep + 1 if has_written_slots else 2
    if installed.parsed() < _ONE_SLOT_BELOW and not request.is_fused:
        slots = 1
        typed = given.number("--max-loras", default=slots)
        if typed > slots:
            raise UsageError(
                f"--max-loras {typed} cannot be used with vLLM {installed.version}, which may mix up adapters that are "
                "loaded while requests run. Leave it out, or use vLLM 0.26 or later."
            )
        notes.append(
            f"vLLM {installed.version} may mix up adapters that are loaded while requests run if it has two slots, so "
            "it gets one (--max-loras 1). vLLM 0.26 has the fix."
        )
    if given.has("--lora-target-modules") and not request.modules:
        notes.append(
            "vLLM silently ignores the parts of an adapter that --lora-target-modules leaves out. With --peft-config "
            "this is checked."
        )
    is_4bit = "bitsandbytes" in (given.get("--quantization", "-q"), given.get("--load-format"))
    if is_4bit and installed.parsed() >= _BITSANDBYTES_IN_A_PLUGIN_FROM:
        notes.append(
            f"vLLM {installed.version} has bitsandbytes in a plugin: {installed.python} -m pip install vllm-bnb-plugin"
        )
    flags: dict[str, str | None] = {
        "--host": request.host,
        "--port": str(request.port),
        # vLLM's default is before the temperature (0.31, config/model.py), and TRL compares with log-probabilities
        # after it.
        "--logprobs-mode": "processed_logprobs",
    }
    env: dict[str, str] = {}
    if request.is_fused:
        flags |= {"--worker-extension-cls": FUSED_WORKER, "--max-logprobs": "-1"}
    else:
        flags |= {
            "--enable-lora": None,
            "--max-lora-rank": str(VLLM.allowed_max_lora_rank(request.lora_rank)),
            "--max-loras": str(slots),
            # vLLM does not start with fewer of these than `--max-loras` (0.31, config/lora.py).
            "--max-cpu-loras": str(max(request.keep + 2, given.number("--max-loras", default=slots))),
        }
        if request.adapts_vision:
            # Without it vLLM accepts adapters on these modules and ignores them (run on 0.26 and 0.31).
            flags["--enable-tower-connector-lora"] = None
        # The trainer learns from the quick loader that the server takes that form.
        if request.adapts_experts and request.loads_quickly and installed.parsed() >= _STACKED_EXPERTS_FROM:
            flags["--enable-mixed-moe-lora-format"] = None
        # Without it vLLM has no routes that load adapters (0.22 to 0.33).
        env[RUNTIME_LORA] = "True"
    # Written slots and fused weights are read from a trainer's GPU by CUDA IPC; vLLM's own loader reads files.
    visible = with_all_gpus(environ) if (has_written_slots or request.is_fused) and not on_cpu else None
    # Ray would place workers on them.
    if visible is not None and given.get("--distributed-executor-backend") != "ray":
        env[VISIBLE] = visible
        notes.append(
            f"the server computes on the GPUs in {VISIBLE}={environ[VISIBLE]}, and sees the others of this host as "
            "well, so that it can read versions from a trainer's GPU"
        )
    if request.loads_quickly:
        flags["--worker-extension-cls"] = QUICK_WORKER
    if given.number("--data-parallel-size", "-dp", default=1) > 1:
        flags["--api-server-count"] = "1"  # vLLM starts one per replica otherwise, and refuses runtime loading then
    if request.sleeps:
        flags["--enable-sleep-mode"] = None
        # Without it vLLM has no routes for sleep (0.31).
        # A number: vLLM parses it with `int`, which ends at the word true (0.31, envs.py).
        env["VLLM_SERVER_DEV_MODE"] = "1"
        notes.append("--sleep opens vLLM's development routes, which no API key guards. Keep the port private.")
    if on_cpu:
        flags |= cpu_flags(given, environ, request.model)
        env |= cpu_env(given, environ)
        notes += cpu_notes(installed.version, flags)
    has_key = given.has("--api-key")
    notes += port_notes(given.get("--host") or request.host, "VLLM_API_KEY", None if has_key else environ)
    if not (request.loads_quickly or request.is_fused or installed.has_plugins):
        notes.append(
            "Large adapters are loaded three times as fast with this package beside vLLM, where it brings nothing else "
            f"with it: {install_command(installed.python, has_pip=installed.has_pip)}"
        )
    notes += key_notes(given, "; export VLLM_API_KEY instead of --api-key." if has_key else ".")
    if given.has("--reasoning-parser"):
        # Source: `_get_constraint_start` in vllm/v1/structured_output/__init__.py, 0.31.
        notes.append(
            "with --reasoning-parser, vLLM applies vllm_structured_outputs_regex only to what follows the reasoning. "
            "Leave it out to have whole completions constrained."
        )
    if given.has("--config"):
        notes.append("the file of --config is not read here, so nothing in it is checked.")
    command = [*_vllm_program(installed, request.model), *given.missing(flags)]
    wanted = {
        MIDDLEWARE: request.supports_push,
        FUSED_MIDDLEWARE: request.is_fused,
        QUICK_MIDDLEWARE: bool(request.loads_quickly),
    }
    for middleware in (one for one, is_wanted in wanted.items() if is_wanted):
        if not any(typed.removeprefix("--middleware=") == middleware for typed in request.extra):
            command += ["--middleware", middleware]  # may be given several times, so a typed one stays
    # Typed arguments come last, as the last value of a flag counts.
    return LaunchCommand(command=(*command, *request.extra), env=env, notes=tuple(notes))


def _with_quick_load(installed: Installed, request: ServerRequest, given: EngineArguments) -> ServerRequest:
    """The request with quick loading chosen, unless that was typed, or another extension of the workers is wanted."""
    if request.loads_quickly is not None:
        return request
    # vLLM takes one worker extension, and fused serving is one, too.
    is_possible = installed.has_plugins and not request.is_fused and not given.has("--worker-extension-cls")
    return replace(request, loads_quickly=is_possible)


def _vllm_program(installed: Installed, model: str) -> tuple[str, ...]:
    if installed.distribution != "vllm":
        # Its console script reads the version of a distribution called `vllm`, finds none, and ends (0.31.0).
        return (str(installed.python), "-m", "vllm.entrypoints.openai.api_server", "--model", model)
    if installed.script is not None:
        return (str(installed.script), "serve", model)
    # A script that was moved with its environment names an interpreter that is gone.
    return (str(installed.python), "-m", "vllm.entrypoints.cli.main", "serve", model)


def _check_plugins(installed: Installed, request: ServerRequest) -> None:
    options = {
        "--push": request.supports_push,
        "--fused": request.is_fused,
        "--quick-load": bool(request.loads_quickly),
    }
    needing = [option for option, is_set in options.items() if is_set]
    if needing and not installed.has_plugins:
        raise UsageError(
            f"{' and '.join(needing)} cannot be used: the server needs this package beside vLLM, and "
            f"{installed.python} does not find it there. Install it, which brings nothing else with it:\n"
            f"{install_command(installed.python, has_pip=installed.has_pip)}"
        )


def _check_vllm(
    installed: Installed, given: EngineArguments, request: ServerRequest, environ: Mapping[str, str]
) -> None:
    servers = given.number("--api-server-count", "-asc", default=1)
    if servers > 1:
        raise UsageError(
            f"--api-server-count {servers} cannot be used: each API server would know other adapters, and vLLM refuses "
            "to start with runtime loading. Leave it out; for more throughput, start several servers on "
            "separate ports."
        )
    if request.is_fused:
        _check_fused(given)
    elif given.has("--no-enable-lora"):
        raise UsageError("--no-enable-lora cannot be used: adapters are what is loaded. Leave it out.")
    if request.loads_quickly:
        _check_extension(given, "--quick-load", QUICK_WORKER)
    mode = given.get("--logprobs-mode")
    if mode not in (None, "processed_logprobs"):
        raise UsageError(
            f"--logprobs-mode {mode} cannot be used: TRL compares log-probabilities after the temperature with its "
            "own, so its importance ratios would be wrong. Leave it out."
        )
    # Source: `validate_request_compat` in rust/src/server/src/routes/openai/completions/validate.rs of vLLM.
    if is_on(environ, "VLLM_USE_RUST_FRONTEND"):
        raise UsageError(
            "VLLM_USE_RUST_FRONTEND is set: vLLM's Rust server refuses several samples of a prompt, and has no routes "
            "of this package. Unset it."
        )
    if is_on(environ, "VLLM_SKIP_MODEL_NAME_VALIDATION"):
        raise UsageError(
            "VLLM_SKIP_MODEL_NAME_VALIDATION is set: a request for an adapter that is not there would be answered by "
            "the base model, silently. Unset it."
        )
    # In JSON, or in a flag such as `--speculative-config.rejection_sample_method`. For benchmarks: it takes drafts at a
    # rate that is given (`RejectionSampleMethod` in vllm/config/speculative.py, 0.22 to 0.32).
    if any(typed.rpartition("=")[2] == "synthetic" or '"synthetic"' in typed for typed in request.extra):
        raise UsageError(
            "rejection_sample_method=synthetic cannot be used: completions would have tokens of the draft model that "
            "the policy would not have sampled. Leave it out."
        )
    # As JSON, or a part of it in a flag such as `--kv-transfer-config.kv_connector`.
    stores = [name for name in _STORES_WITHOUT_ADAPTERS if any(name in typed for typed in request.extra)]
    if given.get("--kv-offloading-backend") == "lmcache" and installed.parsed() < _LMCACHE_APART_FROM:
        stores = ["--kv-offloading-backend lmcache"]
    if stores:
        raise UsageError(
            f"{stores[0]} cannot be used: the keys of that cache lack the adapter, so a version would be computed from "
            "what another one has left there. Leave it out, or use LMCacheMPConnector."
        )
    if request.is_fused:
        return  # any rank, and any number of versions
    if request.lora_rank > VLLM.max_lora_ranks[-1]:
        raise UsageError(
            f"vLLM serves ranks up to {VLLM.max_lora_ranks[-1]}, and the adapter has rank {request.lora_rank}. "
            "Lower it."
        )
    given.check_rank(request, VLLM.allowed_max_lora_rank(request.lora_rank))
    # Source: vllm#55193; seen on 0.31, read in 0.26. Not chosen here, as an adapter of other layers may come any time.
    given.check_modules(request, "vLLM would load it and silently ignore those parts")
    consequence = "vLLM would evict versions that are still in use, and would crash if their files are gone"
    given.check_room("--max-cpu-loras", request, consequence)


def _check_fused(given: EngineArguments) -> None:
    if given.has("--enable-lora"):
        raise UsageError(
            "--enable-lora cannot be used with --fused: an adapter could be applied twice. Leave one of them out."
        )
    replicas = given.number("--data-parallel-size", "-dp", default=1)
    if replicas > 1:
        raise UsageError(
            f"--data-parallel-size {replicas} cannot be used with --fused: vLLM reports changed weights "
            "for one replica only. Start one server for each, and give the trainer all URLs."
        )
    if given.has("--enable-eplb"):
        raise UsageError(
            "--enable-eplb cannot be used with --fused: it moves experts while the server runs, and a version would be "
            "written to the places that they had at the start. Leave one of them out."
        )
    if given.number("--offload-group-size", default=0) > 0:
        raise UsageError(
            "--offload-group-size cannot be used with --fused: vLLM copies the weights of layers from host memory "
            "again and again, without the adapter. Leave one of them out."
        )
    quantization = given.get("--quantization", "-q")
    if quantization is not None:
        raise UsageError(
            f"--quantization {quantization} cannot be used with --fused: an adapter cannot be added to quantised "
            "weights without changing them. Leave one of them out."
        )
    _check_extension(given, "--fused", FUSED_WORKER)


def _check_extension(given: EngineArguments, option: str, needed: str) -> None:
    extension = given.get("--worker-extension-cls")
    if extension not in (None, needed):
        raise UsageError(f"--worker-extension-cls {extension} cannot be used with {option}, which needs its own.")
