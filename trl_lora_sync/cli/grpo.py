"""TRL's `trl grpo`, with adapter sync: all of its flags, all fields of this package, and those of `accelerate launch`.

Settings may come from a YAML file with --config. Launched through accelerate the way `trl grpo` is.
"""

from collections.abc import Sequence
from importlib import import_module, resources

from trl_lora_sync.cli.console import UsageError, working

PARSES_ITSELF = True


def run(arguments: list[str]) -> int:
    """Launch the script with `arguments`; `-h` shows them all."""
    return launch("grpo", arguments)


def launch(name: str, arguments: list[str]) -> int:
    """Launch the script of that name in `trl_lora_sync.scripts`."""
    with working("loading TRL and accelerate"):
        script = import_module(f"trl_lora_sync.scripts.{name}")

        from accelerate.commands.launch import launch_command, launch_command_parser

        from trl_lora_sync import _trl

    # What is left over is for accelerate: from the file, and, as a part of `arguments` in their order, what was typed.
    *_, from_file, typed = script.make_parser(f"trl-lora-sync {name}").parse_args_and_config(
        arguments, return_remaining_strings=True, separate_remaining_strings=True
    )
    try:
        options = _trl.accelerate_options([*from_file, *typed])
    except ValueError as error:
        raise UsageError(str(error)) from error
    file = str(resources.files("trl_lora_sync.scripts").joinpath(f"{name}.py"))
    launch_command(launch_command_parser().parse_args([*options, file, *without(arguments, typed)]))
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
