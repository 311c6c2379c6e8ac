"""The `trl-lora-sync` command: its arguments, and which module does the work.

A command's module is imported when it is chosen; what it needs beyond the standard library, when it runs.
"""

import argparse
import os
import shlex
import sys
import textwrap
from collections.abc import Sequence
from importlib import import_module

from trl_lora_sync.cli.console import UsageError, err
from trl_lora_sync.cli.unknown import explain_unknown

GOOD, PROBLEM, USAGE = 0, 1, 2
_DESCRIPTION = "LoRA adapter sync for TRL: start servers, check them, train, and make a page of the results."
_EPILOG = """\
examples:
  trl-lora-sync serve vllm Qwen/Qwen3-0.6B --lora-rank 16
  trl-lora-sync doctor http://localhost:8000 --adapter out/checkpoint-100
  trl-lora-sync grpo --config grpo.yaml --num_processes 2
  trl-lora-sync report out

Exit status: 0 if all is well, 1 if something is wrong, 2 if the command cannot be understood.
"""
# Name -> one line; the module of the same name in this package has `add_arguments(parser)` and `run(args, rest)`.
COMMANDS = {
    "serve": "start a vLLM or SGLang server with the flags that adapter sync needs",
    "doctor": "check running servers, and name what to change",
    "grpo": "TRL's `trl grpo`, with adapter sync",
    "rloo": "TRL's `trl rloo`, with adapter sync",
    "distillation": "TRL's `trl distillation`, with adapter sync",
    "sweep": "remove what dead runs left behind",
    "report": "make an HTML page of a run's logs",
}


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Fills each paragraph of a description to the width of the terminal; indented lines stay as written."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(
            paragraph if "\n " in f"\n{paragraph}" else textwrap.fill(paragraph, width)
            for paragraph in text.strip("\n").split("\n\n")
        )


def make_parser(name: str | None = None) -> argparse.ArgumentParser:
    """The parser of one command, or of all."""
    if name is not None:
        module = import_module(f"trl_lora_sync.cli.{name}")
        parser = argparse.ArgumentParser(
            prog=f"trl-lora-sync {name}",
            description=module.__doc__,
            formatter_class=HelpFormatter,
        )
        module.add_arguments(parser)
        return parser
    parser = argparse.ArgumentParser(
        prog="trl-lora-sync",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for command, line in COMMANDS.items():
        commands.add_parser(command, help=line, add_help=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv`, by default the process's own arguments, and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in COMMANDS:
        return _run(arguments[0], arguments[1:])
    if arguments and arguments[0] == "bench":
        from trl_lora_sync.cli.launch import without_keys

        command = shlex.join(without_keys([sys.executable, "benchmarks/sync_cost.py", *arguments[1:]]))
        err().print(
            "trl-lora-sync bench: benchmarks are not part of the installed package. In the folder of the source of "
            f"trl-lora-sync, run: {command}",
            style="red",
        )
        return USAGE
    args = make_parser().parse_args(arguments)
    if args.version:
        from trl_lora_sync import __version__

        print(f"trl-lora-sync {__version__}")
        return GOOD
    make_parser().print_help()
    return GOOD


def _run(name: str, arguments: list[str]) -> int:
    module = import_module(f"trl_lora_sync.cli.{name}")
    from trl_lora_sync.errors import LoRASyncError, UnsupportedSettingError

    try:
        if getattr(module, "PARSES_ITSELF", False):
            if {"-h", "--help"} & set(arguments):
                make_parser(name).print_help()
                return GOOD
            return int(module.run(arguments))
        end = arguments.index("--") if "--" in arguments else len(arguments)
        typed, rest = arguments[:end], arguments[end + 1 :]
        parser = make_parser(name)
        args, unknown = parser.parse_known_args(typed)
        if unknown:
            passes_on = getattr(module, "PASSES_ON", False)
            raise UsageError(explain_unknown(parser, typed, unknown, rest, passes_on=passes_on))
        return int(module.run(args, rest))
    except (UsageError, UnsupportedSettingError) as error:
        err().print(f"trl-lora-sync {name}: {error}", style="red")
        return USAGE
    except LoRASyncError as error:
        err().print(f"trl-lora-sync {name}: {error}", style="red")
        return PROBLEM
    except BrokenPipeError:  # the reader, such as `head`, has seen enough; nothing may be flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return GOOD
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
