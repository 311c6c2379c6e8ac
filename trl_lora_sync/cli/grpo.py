"""TRL's `trl grpo`, with adapter sync: its flags, this package's fields, and the flags of `accelerate launch`.

Settings may come from a YAML file with --config. Launched through accelerate the way `trl grpo` is.
"""

from functools import partial

from trl_lora_sync.cli import training

PARSES_ITSELF = True
add_arguments = partial(training.add_arguments, "grpo")
run = partial(training.run, "grpo")
