"""TRL's `trl {name}`, with adapter sync: its flags, this package's fields, and the flags of `accelerate launch`.

Adapters are synced with --vllm_sync_strategy lora_adapter. Without it the run is TRL's own.
Settings may come from a YAML file with --config. Launched through accelerate the way `trl {name}` is.
"""

import signal
import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from importlib import import_module, resources
from itertools import chain
from pathlib import Path
from subprocess import CalledProcessError
from typing import Annotated, Any

import psutil
import typer
from typer import Option
from typer.core import TyperCommand

from trl_lora_sync.cli.console import UsageError, err, out, working
from trl_lora_sync.cli.model_path import check_exists
from trl_lora_sync.cli.our_fields import our_flags
from trl_lora_sync.cli.unknown import similar_flag
from trl_lora_sync.errors import UnsupportedSettingError

_USAGE = "trl-lora-sync {} [--config FILE] [settings] [arguments of accelerate launch]"
_ALL = "--help-all"
_TITLE = "Adapter sync"
_EPILOG = """\
\b
Example:
  trl-lora-sync {} --model_name_or_path Qwen/Qwen3-0.6B --dataset_name my/prompts {}\\
      --use_peft --lora_r 16 --lora_dropout 0 --lora_target_modules all-linear --output_dir out \\
      --use_vllm --vllm_mode server --vllm_server_base_url http://localhost:8000 --vllm_sync_strategy lora_adapter
"""
# What the example of each command has besides.
_REWARDS = "--reward_funcs my_rewards.length "
_OWN = {"grpo": _REWARDS, "rloo": _REWARDS, "distillation": "--teacher_model_name_or_path Qwen/Qwen3-8B "}


class Command(TyperCommand):
    """Leaves to TRL and accelerate what it does not know; its short help has what this package adds."""

    ignore_unknown_options = True
    allow_extra_args = True

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[settings] [arguments of accelerate launch]"]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        super().format_options(ctx, formatter)
        with formatter.section(_TITLE):
            formatter.write_dl([*our_flags().values()])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        self.epilog = _EPILOG.format(self.name, _OWN[str(self.name)])
        super().format_epilog(ctx, formatter)


def run(
    ctx: typer.Context,
    config: Annotated[str | None, Option(metavar="FILE", help="YAML file of settings; typed ones win")] = None,
    help_all: Annotated[
        bool, Option(_ALL, help="also show all flags of TRL, which takes some seconds to load")
    ] = False,
) -> None:
    """Launch the script of `trl_lora_sync.scripts` that has the command's name."""
    name = str(ctx.info_name)
    # TRL finds this flag only if its value is a separate word (1.16, cli/accelerate_config.py). accelerate lacks it.
    words = [one.split("=", 1) if one.startswith("--accelerate_config=") else [one] for one in ctx.args]
    arguments = [*(() if config is None else ("--config", config)), *chain(*words)]
    settings = {} if config is None else _read_config(config)
    with working("loading TRL and accelerate"):
        script = import_module(f"trl_lora_sync.scripts.{name}")

        from accelerate.commands.launch import launch_command, launch_command_parser

        from trl_lora_sync import _trl

    parser = script.make_parser(f"trl-lora-sync {name}")
    # argparse's own, which it prints before each error, has 250 lines.
    parser.usage = _USAGE.format(name)
    if help_all:
        out().print(_with_ours_first(name, parser).format_help(), end="")
        return
    accelerates = launch_command_parser()
    # argparse's own table of flags, for which it has no public name.
    # No parser has `--accelerate_config`: TRL takes it out before (1.16, cli/accelerate_config.py).
    known = {"--accelerate_config", *parser._option_string_actions, *accelerates._option_string_actions}
    _check_flags(name, [argument.partition("=")[0] for argument in arguments if argument.startswith("--")], known)
    # In a file TRL takes whole names only (1.16, scripts/utils.py), and accelerate gets what is not among them.
    # `env` has variables for the environment, which TRL's parser sets.
    whole = {f"--{one.dest}" for one in parser._actions} | {"--accelerate_config", *accelerates._option_string_actions}
    _check_flags(name, [f"--{setting}" for setting in settings if setting != "env"], whole, are_whole=True)
    try:
        # What is left over is for accelerate: from the file, and, as a part of `arguments` in their order, typed.
        *parsed, from_file, typed = parser.parse_args_and_config(
            arguments, return_remaining_strings=True, separate_remaining_strings=True
        )
        switches = {flag for flag, one in accelerates._option_string_actions.items() if one.nargs == 0}
        options = _trl.accelerate_options([*_without_truth(from_file, switches), *typed])
        # Before accelerate starts the processes, each of which would end in a traceback of Transformers.
        for model in (getattr(one, "model_name_or_path", None) for one in parsed):
            if model:
                check_exists(model)
    # It is a ValueError, too, and `main` prints it with the same status.
    except UnsupportedSettingError:
        raise
    except ValueError as error:
        raise UsageError(str(error)) from error
    # By its path, as TRL launches its own scripts (1.16, cli/accelerate_launcher.py).
    file = str(resources.files("trl_lora_sync.scripts").joinpath(f"{name}.py"))
    launch = accelerates.parse_args([*options, file, *without(arguments, typed)])
    # accelerate runs the first word that belongs to no flag.
    if launch.training_script != file:
        raise UsageError(
            f"{launch.training_script} belongs to no flag. A file of settings follows --config, and each setting its "
            f"flag: see `trl-lora-sync {name} --help`."
        )
    before = signal.signal(signal.SIGTERM, _pass_on)
    try:
        launch_command(launch)
    # Its traceback would follow the message of the training process.
    except CalledProcessError as error:
        # As Python has it of a process that a signal has ended, and as shells and our scripts have it.
        number = -error.returncode if error.returncode < 0 else error.returncode - 128
        if number == signal.SIGTERM:
            err().print(f"trl-lora-sync {name}: the training was ended by SIGTERM.", style="red")
            raise typer.Exit(128 + number) from None
        err().print(f"trl-lora-sync {name}: the training ended with status {error.returncode}.", style="red")
        raise typer.Exit(1) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _pass_on(number: int, frame: Any) -> None:
    """End the training as well: of one process accelerate (1.15) is waiting for the end, and passes nothing on."""
    training = psutil.Process().children()
    if not training:
        sys.exit(128 + number)
    for process in training:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _without_truth(pairs: Sequence[str], switches: Collection[str]) -> list[str]:
    """Flags with their values, in which a switch is there or not; TRL writes `--multi_gpu True` for one (1.16)."""
    words = []
    for flag, value in zip(pairs[::2], pairs[1::2], strict=True):
        if flag not in switches or value not in (str(True), str(False)):
            words += [flag, value]
        elif value == str(True):
            words.append(flag)
    return words


def without(arguments: Sequence[str], part: Sequence[str]) -> list[str]:
    """`arguments` less `part`, which is contained in it in the same order."""
    # By value, as argparse returns strings and not their places. In order, as a value may occur twice.
    left, kept = list(part), []
    for argument in arguments:
        if left and argument == left[0]:
            left.pop(0)
        else:
            kept.append(argument)
    return kept


def _read_config(file: str) -> dict[str, Any]:
    """The settings in the file of `--config`, which is refused before anything is loaded if it cannot be read."""
    if not Path(file).is_file():
        raise UsageError(f"--config {file}: there is no such file. Give a YAML file of settings.")
    import yaml

    try:
        settings = yaml.safe_load(Path(file).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise UsageError(f"--config {file} cannot be read: {why}. Give a YAML file of settings.") from error
    if not isinstance(settings, dict):
        raise UsageError(f"--config {file} holds no settings. Give one on each line, such as `lora_r: 16`.")
    return settings


def _check_flags(name: str, flags: Iterable[str], known: Collection[str], *, are_whole: bool = False) -> None:
    """Refuse what neither TRL nor accelerate knows; the latter would take its value for the script.

    Args:
        are_whole: whether a name must be given in full; argparse takes its beginning.
    """
    for flag in flags:
        if flag == "--" or flag in known or (not are_whole and any(one.startswith(flag) for one in known)):
            continue
        meant = similar_flag(flag, known)
        hint = (
            f"Did you mean {meant}?" if meant else f"See `trl-lora-sync {name} {_ALL}` and `accelerate launch --help`."
        )
        raise UsageError(f"{flag} is not known, neither to TRL nor to accelerate. {hint}")


def _with_ours_first(name: str, parser: Any) -> Any:
    """TRL's parser, whose help begins with the fields of this package and has a usage of one line."""
    names = our_flags()
    ours = [action for action in parser._actions if action.dest in names]
    for group in parser._action_groups:
        # Moved, as argparse's help has an action once for each group that holds it.
        group._group_actions[:] = [action for action in group._group_actions if action not in ours]
    first = parser.add_argument_group(_TITLE)
    first._group_actions.extend(ours)
    parser._action_groups.insert(0, parser._action_groups.pop())
    parser.usage += "\n\n`accelerate launch --help` lists the arguments of accelerate."
    return parser
