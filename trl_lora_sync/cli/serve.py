"""Start a vLLM or SGLang server with the flags and the environment that adapter sync needs.

Finds the engine that is installed, without importing it, prints its own command, and becomes it. Arguments after `--`
go to the engine unchanged, and win over what is chosen here unless that is known to break. A CPU build of vLLM also
gets a small KV cache and one process.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option
from typer.core import TyperCommand, TyperOption

from trl_lora_sync.adapter.support import check_saved_config, saved_rank
from trl_lora_sync.addresses import is_in_use
from trl_lora_sync.cli.console import UsageError, err, out
from trl_lora_sync.cli.installed import Installed, find_engine
from trl_lora_sync.cli.launch import EngineArguments, LaunchCommand, ServerRequest
from trl_lora_sync.cli.model_path import check_exists
from trl_lora_sync.cli.peft_config import adapts_experts, adapts_vision, read_peft_config, served_modules
from trl_lora_sync.cli.unknown import explain_unknown
from trl_lora_sync.engines.registry import ENGINES

_DEFAULT_RANK = 16


class Command(TyperCommand):
    """Sets what follows `--` aside for the engine, as `ctx.args`."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- ENGINE ARGUMENTS]"]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # At the first one; another belongs to the engine.
        end = args.index("--") if "--" in args else len(args)
        typed, rest = args[:end], args[end + 1 :]
        if not {"--help", "-h"}.isdisjoint(typed):  # whatever else is there
            typed = ["--help"]
        options = [one for one in self.get_params(ctx) if isinstance(one, TyperOption)]
        known = {flag: not one.is_flag for one in options for flag in (*one.opts, *one.secondary_opts)}
        # Before click, which names the first unknown flag only, and not that the engine's follow `--`.
        if message := explain_unknown(ctx.command_path, known, typed, rest):
            raise UsageError(message)
        super().parse_args(ctx, typed)
        ctx.args = rest
        return rest


def run(
    ctx: typer.Context,
    engine: Annotated[Literal["vllm", "sglang"], Argument(help="which engine")],
    model: Annotated[str, Argument(help="the base model that is trained: a folder or a name on the Hub")],
    lora_rank: Annotated[
        int | None, Option(min=1, metavar="R", help="rank of the adapter", show_default=str(_DEFAULT_RANK))
    ] = None,
    peft_config: Annotated[
        Path | None,
        Option(metavar="DIR", help="folder with an adapter_config.json to take rank and modules of"),
    ] = None,
    keep: Annotated[int, Option(min=1, metavar="N", help="lora_sync_keep of the trainer")] = 2,
    sleep: Annotated[bool, Option("--sleep", help='allow vllm_server_sleep="kv_cache"')] = False,
    push: Annotated[bool, Option("--push", help="let trainers that share no folder push adapters; vLLM only")] = False,
    fused: Annotated[
        bool, Option("--fused", help='add adapters to the weights, for lora_sync_serving="fused"; vLLM only')
    ] = False,
    quick_load: Annotated[
        bool | None,
        Option(
            help="read large adapters faster, with several threads; vLLM only",
            show_default="where this package is installed beside vLLM",
        ),
    ] = None,
    host: Annotated[str, Option(metavar="ADDRESS", help="where to listen")] = "127.0.0.1",
    port: Annotated[int, Option(metavar="PORT", help="where to listen")] = 8000,
    python: Annotated[
        Path | None,
        Option(metavar="PATH", help="interpreter of the engine's environment", show_default="this one"),
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="print the command and do not run it")] = False,
) -> None:
    check_model(engine, model)
    if not host.strip():  # an engine would listen on all addresses
        raise UsageError("--host is empty. Give an address to listen on, such as 127.0.0.1.")
    if lora_rank is not None and peft_config is not None:
        raise UsageError("--lora-rank cannot be used with --peft-config, which has the rank. Leave one out.")
    if fused and quick_load is not None:
        raise UsageError("--fused cannot be used with --quick-load or --no-quick-load. Leave one out.")
    rank = lora_rank or _DEFAULT_RANK
    modules: tuple[str, ...] = ()
    has_vision = has_experts = False
    if peft_config:
        saved = read_peft_config(peft_config)
        # The trainer proves experts at its start.
        check_saved_config(saved, "fused" if fused else "runtime", proves_groups=ENGINES[engine].proves_groups)
        rank, modules = saved_rank(saved), served_modules(saved.get("target_modules"))
        has_vision, has_experts = adapts_vision(peft_config, saved), adapts_experts(saved)
    request = ServerRequest(
        model=model,
        lora_rank=rank,
        modules=modules,
        keep=keep,
        sleeps=sleep,
        supports_push=push,
        is_fused=fused,
        adapts_vision=has_vision,
        adapts_experts=has_experts,
        loads_quickly=quick_load,
        host=host,
        port=port,
        extra=tuple(ctx.args),
    )
    launch = plan(find_engine(engine, python), request, os.environ)
    for note in launch.notes:
        err().print(f"note: {note}", style="yellow")
    if dry_run:
        out().print(launch.shell_line())
        return
    check_port(request)
    err().print(launch.shell_line(), style="bold")
    # `exec` replaces this process without its cleanup, and what is buffered would be lost.
    sys.stdout.flush()
    sys.stderr.flush()
    # Not a child process, so that signals and the exit status are the engine's.
    os.execvpe(launch.command[0], launch.command, {**os.environ, **launch.env})


def check_port(request: ServerRequest) -> None:
    """Refuse a port on which something else answers: the engine would end with a traceback, after many seconds.

    Raises:
        UsageError: it is in use.
    """
    given = EngineArguments(request.extra)
    if given.has("--uds", "--headless"):  # vLLM then listens on no port (0.31)
        return
    host, port = given.get("--host") or request.host, given.number("--port", default=request.port)
    if is_in_use(host, port):
        raise UsageError(
            f"port {port} of {host} is in use by another program. Stop it, or choose another --port and give the "
            "trainer the same in vllm_server_base_url."
        )


def check_model(engine: str, model: str) -> None:
    """Refuse a path that leads to no model, which the engine would find out after many seconds.

    Raises:
        UsageError: the model is empty, the path does not exist, or it is the folder of an adapter.
    """
    path = Path(model)
    if not model.strip():
        raise UsageError("the model is empty. Give the folder of the base model, or its name on the Hub.")
    if "://" in model:  # a store that the engine reads itself
        return
    check_exists(model)
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        base = read_peft_config(path).get("base_model_name_or_path") or "MODEL"
        raise UsageError(
            f"{model} holds an adapter, not a model. Serve its base model, and take the rank from the adapter: "
            f"{ENGINES[engine].serve_command(str(base), ['--peft-config', model])}"
        )


def plan(installed: Installed, request: ServerRequest, environ: Mapping[str, str]) -> LaunchCommand:
    """The command for `request`.

    Args:
        environ: of the shell; settings in it that break adapter sync are refused.

    Raises:
        UsageError: the combination is known to break, and what to change.
    """
    spec = next(spec for spec in ENGINES.values() if installed.distribution in spec.distributions)
    known = spec.versions
    # Below it something is missing. A version that is newer than known may work, and gets a note.
    if installed.parsed() < known.oldest:
        raise UsageError(
            f"{known.title} {installed.version} is installed, and adapter sync needs {known.oldest} or later. Upgrade "
            "it in its environment."
        )
    launch: LaunchCommand = resolve_name(spec.launch)(installed, request, environ)
    doubt = known.doubt(installed.version)
    notes = (*launch.notes, f"{doubt}. Run `trl-lora-sync doctor` once it is up.") if doubt else launch.notes
    return LaunchCommand(command=launch.command, env=launch.env, notes=notes)
