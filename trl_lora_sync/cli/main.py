"""The `trl-lora-sync` command: which module does the work, and how it ends.

A command's module is imported when it is chosen; what it needs beyond typer and rich, when it runs.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer
from typer.core import TyperCommand

from trl_lora_sync.cli.console import UsageError, err
from trl_lora_sync.errors import LoRASyncError, UnsupportedSettingError

GOOD, PROBLEM, USAGE = 0, 1, 2
_HELP = "LoRA adapter sync for TRL: start servers, check them, train, and make a page of the results."
_EPILOG = """\
\b
Examples:
  trl-lora-sync serve vllm Qwen/Qwen3-0.6B --lora-rank 16
  trl-lora-sync doctor http://localhost:8000 --adapter out/checkpoint-100
  trl-lora-sync grpo --config grpo.yaml --num_processes 2
  trl-lora-sync report out

Exit status: 0 if all is well, 1 if something is wrong, 2 if the command cannot be understood.
"""
# Name -> one line. The module of the same name in this package has the function `run`, and the class `Command` if the
# command parses in its own way; `training` is that of TRL's three, and its text names the command as `{name}`.
COMMANDS = {
    "serve": "start a vLLM or SGLang server with the flags that adapter sync needs",
    "doctor": "check running servers, and name what to change",
    "grpo": "TRL's `trl grpo`, with adapter sync",
    "rloo": "TRL's `trl rloo`, with adapter sync",
    "distillation": "TRL's `trl distillation`, with adapter sync",
    "sweep": "remove what dead runs left behind",
    "report": "make an HTML page of a run's logs",
}
TRAINING = ("grpo", "rloo", "distillation")


def make_app(chosen: str) -> typer.Typer:
    """The command line, with the arguments of the command `chosen`; of the others it has the names."""
    app = typer.Typer(
        help=_HELP,
        epilog=_EPILOG,
        context_settings={"help_option_names": ["--help", "-h"]},
        rich_markup_mode=None,  # boxes are for terminals; lines can be searched and copied
        pretty_exceptions_enable=False,  # a traceback with local variables may show keys
        add_completion=False,
    )
    app.callback(invoke_without_command=True)(_start)
    for name, line in COMMANDS.items():
        # In the list only. Without their modules, `--help` loads nothing that a command needs.
        if name != chosen:
            app.command(name, short_help=line)(lambda: None)
            continue
        module = import_module(f"trl_lora_sync.cli.{'training' if name in TRAINING else name}")
        text = str(module.__doc__).format(name=name)
        app.command(name, cls=getattr(module, "Command", TyperCommand), help=text)(module.run)
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv`, by default the process's own arguments, and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # The command line itself has flags without values only, so the first other word is the command.
    chosen = next((word for word in arguments if not word.startswith("-")), "")
    try:
        make_app(chosen)(arguments, prog_name="trl-lora-sync")
    except SystemExit as ended:  # the end of each command of typer
        # A text, which the interpreter prints before it ends with status 1.
        if isinstance(ended.code, str):
            raise
        return ended.code or GOOD
    # OSError: a folder without rights, in which `Path.is_dir` raises it before Python 3.14, or a full disk.
    except (UsageError, LoRASyncError, OSError) as error:
        err().print(f"trl-lora-sync {chosen}: {error}", style="red")
        # These two are about flags or a saved configuration; the others are about servers, files and libraries.
        return USAGE if isinstance(error, UsageError | UnsupportedSettingError) else PROBLEM
    return GOOD


def _start(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="print the version and exit")] = False,
) -> None:
    if version:
        from trl_lora_sync import __version__

        typer.echo(f"trl-lora-sync {__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


if __name__ == "__main__":
    sys.exit(main())
