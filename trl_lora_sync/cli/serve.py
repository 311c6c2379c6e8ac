"""Start a vLLM or SGLang server with the flags and the environment that adapter sync needs.

Finds the engine that is installed, without importing it, prints its own command, and becomes it. Arguments after `--`
go to the engine unchanged, and win over what is chosen here unless that is known to break. A CPU build of vLLM also
gets a small KV cache and one process.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from trl_lora_sync.adapter.support import check_saved_config, saved_rank
from trl_lora_sync.cli.console import UsageError, err, out
from trl_lora_sync.cli.installed import Installed, find_engine
from trl_lora_sync.cli.launch import Launch, Wanted
from trl_lora_sync.cli.launch_sglang import plan_sglang
from trl_lora_sync.cli.launch_vllm import plan_vllm
from trl_lora_sync.cli.peft_config import read_peft_config, served_modules
from trl_lora_sync.engines.known import KNOWN_VERSIONS

PASSES_ON = True  # what follows `--`
_DEFAULT_RANK = 16
# A name on the Hub has one slash at most. Source: huggingface_hub/utils/_validators.py `validate_repo_id`, 1.2.
_HUB_NAME_PARTS = 2


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
    serving = parser.add_mutually_exclusive_group()
    serving.add_argument(
        "--fused", action="store_true", help='add adapters to the weights, for lora_sync_serving="fused"; vLLM only'
    )
    serving.add_argument(
        "--quick-load",
        action=argparse.BooleanOptionalAction,
        help="read large adapters faster, with several threads; vLLM only (default: where this package is installed "
        "beside vLLM)",
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
    check_model(args.engine, args.model)
    rank = _DEFAULT_RANK if args.lora_rank is None else args.lora_rank
    modules: tuple[str, ...] = ()
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
        loads_quickly=args.quick_load,
        host=args.host,
        port=args.port,
        extra=tuple(rest),
    )


def check_model(engine: str, model: str) -> None:
    """Refuse a path that leads to no model, which the engine would find out after many seconds.

    Raises:
        UsageError: the path does not exist, or is the folder of an adapter.
    """
    path = Path(model)
    if "://" in model:  # a store that the engine reads itself
        return
    if not path.exists():
        if model.startswith((".", "/", "~")) or len(Path(model).parts) > _HUB_NAME_PARTS:
            raise UsageError(
                f"{model} does not exist{_similar(path)}. Give the folder of the base model, or its name on the Hub."
            )
    elif (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        base = read_peft_config(path).get("base_model_name_or_path") or "MODEL"
        raise UsageError(
            f"{model} holds an adapter, not a model. Serve its base model, and take the rank from the adapter: "
            f"{shlex.join(['trl-lora-sync', 'serve', engine, str(base), '--peft-config', model])}"
        )


def _similar(path: Path) -> str:
    """The folder that was probably meant, as a part of a sentence."""
    found = get_close_matches(
        path.name, [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    )
    return f"; {path.parent / found[0]} does" if found else ""


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
    launch = (plan_vllm if engine == "vllm" else plan_sglang)(installed, request, environ)
    doubt = known.doubt(installed.version)
    notes = (*launch.notes, f"{doubt}. Run `trl-lora-sync doctor` once it is up.") if doubt else launch.notes
    return Launch(command=launch.command, env=launch.env, notes=notes)
