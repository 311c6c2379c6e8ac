"""TRL's own script for distillation with this package's classes; `trl-lora-sync distillation` launches it.

Everything in it is TRL's, whatever the version: its arguments, its datasets, its teacher.
"""

from typing import Any

from accelerate import PartialState

from trl_lora_sync import DistillationConfig, DistillationTrainer, _trl


def make_parser(prog: str | None = None) -> Any:
    """TRL's parser of the script, with this package's fields beside TRL's."""
    with _trl.script("distillation", DistillationConfig, DistillationTrainer) as script:
        return script.make_parser(prog=prog)


def main() -> None:
    with _trl.script("distillation", DistillationConfig, DistillationTrainer) as script:
        # As in TRL (1.16): the file of --config may have settings of accelerate, which this parser does not know.
        script.main(*script.make_parser().parse_args_and_config(fail_with_unknown_args=False))
    PartialState().destroy_process_group()  # makes it rare that gloo aborts a process that is through (torch 2.13)


if __name__ == "__main__":
    main()
