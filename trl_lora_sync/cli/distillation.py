"""TRL's script for distillation, with adapter sync: all of its flags, all fields of this package, and accelerate's.

Settings may come from a YAML file with --config. Launched through accelerate the way TRL's commands are.
"""

from trl_lora_sync.cli.grpo import launch

PARSES_ITSELF = True


def run(arguments: list[str]) -> int:
    """Launch the script with `arguments`; `-h` shows them all."""
    return launch("distillation", arguments)
