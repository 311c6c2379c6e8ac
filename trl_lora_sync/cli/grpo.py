"""TRL's `trl grpo`, with adapter sync: all of its flags, all fields of this package, and those of `accelerate launch`.

Settings may come from a YAML file with --config. Launched through accelerate the way `trl grpo` is.
"""

import argparse
from collections.abc import Collection, Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from trl_lora_sync.cli.console import UsageError, out, working
from trl_lora_sync.cli.our_fields import our_fields
from trl_lora_sync.cli.unknown import similar_flag
from trl_lora_sync.errors import UnsupportedSettingError

PARSES_ITSELF = True
_USAGE = "trl-lora-sync grpo [--config FILE] [settings] [arguments of accelerate launch]"
_ALL = "--help-all"
_TITLE = "adapter sync"
_EPILOG = """\
example:
  trl-lora-sync grpo --model_name_or_path Qwen/Qwen3-0.6B --dataset_name my/prompts --reward_funcs my_rewards.length \\
      --use_peft --lora_r 16 --lora_target_modules all-linear --output_dir out \\
      --use_vllm --vllm_mode server --vllm_server_base_url http://localhost:8000 --vllm_sync_strategy lora_adapter
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The short help, which names what this package adds and loads nothing."""
    parser.usage = _USAGE
    parser.epilog = _EPILOG
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of settings; typed ones win")
    parser.add_argument(_ALL, action="store_true", help="also show all flags of TRL, which takes some seconds to load")
    group = parser.add_argument_group(_TITLE)
    for field in our_fields():
        field.add_to(group)


def run(arguments: list[str]) -> int:
    """Launch the script with `arguments`."""
    # TRL knows `--config FILE` only.
    arguments = [part for typed in arguments for part in (typed.split("=", 1) if _is_config(typed) else [typed])]
    settings = _read_config(arguments)
    with working("loading TRL and accelerate"):
        from accelerate.commands.launch import launch_command, launch_command_parser
        from trl.cli.accelerate_config import resolve_accelerate_config_argument

        from trl_lora_sync.scripts.grpo import make_parser

    parser = make_parser("trl-lora-sync grpo")
    if _ALL in arguments:
        out().print(_with_ours_first(parser).format_help(), end="")
        return 0
    accelerates = launch_command_parser()
    known = {"--accelerate_config", *parser._option_string_actions, *accelerates._option_string_actions}
    _check_flags([argument.partition("=")[0] for argument in arguments if argument.startswith("--")], known)
    _check_flags([f"--{name}" for name in settings if name != "env"], known)
    try:
        # What is left over is for accelerate: from the file, and, as a part of `arguments` in their order, typed.
        *_, from_file, typed = parser.parse_args_and_config(
            arguments, return_remaining_strings=True, separate_remaining_strings=True
        )
        launch = resolve_accelerate_config_argument([*from_file, *typed])
    except UnsupportedSettingError:
        raise
    except ValueError as error:
        raise UsageError(str(error)) from error
    script = str(resources.files("trl_lora_sync.scripts").joinpath("grpo.py"))
    launch_command(accelerates.parse_args([*launch, script, *without(arguments, typed)]))
    return 0


def without(arguments: Sequence[str], part: Sequence[str]) -> list[str]:
    """`arguments` less `part`, which is contained in it in the same order."""
    left, kept = list(part), []
    for argument in arguments:
        if left and argument == left[0]:
            left.pop(0)
        else:
            kept.append(argument)
    return kept


def _is_config(argument: str) -> bool:
    return argument.startswith("--config=")


def _read_config(arguments: Sequence[str]) -> dict[str, Any]:
    """The settings in the file of `--config`, which is refused before anything is loaded if it cannot be read."""
    finder = argparse.ArgumentParser("trl-lora-sync grpo", usage=_USAGE, add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    file = finder.parse_known_args(arguments)[0].config
    if file is None:
        return {}
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


def _check_flags(flags: Iterable[str], known: Collection[str]) -> None:
    """Refuse what neither TRL nor accelerate knows; the latter would take its value for the script."""
    for flag in flags:
        if flag == "--" or any(name.startswith(flag) for name in known):  # argparse takes the beginning of a name
            continue
        meant = similar_flag(flag, known)
        hint = f"Did you mean {meant}?" if meant else f"See `trl-lora-sync grpo {_ALL}` and `accelerate launch --help`."
        raise UsageError(f"{flag} is not known, neither to TRL nor to accelerate. {hint}")


def _with_ours_first(parser: Any) -> Any:
    """TRL's parser, whose help begins with the fields of this package and has a usage of one line."""
    names = {field.name for field in our_fields()}
    ours = [action for action in parser._actions if action.dest in names]
    for group in parser._action_groups:
        group._group_actions[:] = [action for action in group._group_actions if action not in ours]
    first = parser.add_argument_group(_TITLE)
    first._group_actions.extend(ours)
    parser._action_groups.insert(0, parser._action_groups.pop())
    parser.usage = f"{_USAGE}\n\n`accelerate launch --help` lists the arguments of accelerate."
    return parser
