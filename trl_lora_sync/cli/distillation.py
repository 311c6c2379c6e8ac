"""TRL's `trl distillation`, with adapter sync: its flags, this package's fields, and the flags of `accelerate launch`.

Settings may come from a YAML file with --config. Launched through accelerate the way `trl distillation` is.
"""

from functools import partial

from trl_lora_sync.cli import training

PARSES_ITSELF = True
add_arguments = partial(training.add_arguments, "distillation")
run = partial(training.run, "distillation")
