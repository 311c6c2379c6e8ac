"""TRL's own scripts with this package's classes, which `trl-lora-sync` launches.

Everything in them is TRL's, whatever the version: their arguments, datasets, rewards and teachers. They have a separate
folder, because it comes first on their module path.
"""

import signal
import sys
from collections.abc import Callable
from typing import Any

from accelerate import PartialState

from trl_lora_sync import _trl


def functions_of(name: str, config: type, trainer: type) -> tuple[Callable[..., Any], Callable[[], None]]:
    """What makes the parser of a script of TRL, with our fields beside TRL's, and what runs the script."""

    def make_parser(prog: str | None = None) -> Any:
        with _trl.script(name, config, trainer) as script:
            return script.make_parser(prog=prog)

    def main() -> None:
        signal.signal(signal.SIGTERM, _end)
        with _trl.script(name, config, trainer) as script:
            # As in TRL (1.16): the file of --config may have settings of accelerate, which this parser does not know.
            script.main(*script.make_parser().parse_args_and_config(fail_with_unknown_args=False))
        PartialState().destroy_process_group()  # makes it rare that gloo aborts a process that is through (torch 2.13)

    return make_parser, main


def _end(number: int, frame: Any) -> None:
    """End by an exception, with which a training unloads its versions; by default the process ends on the spot."""
    # A scheduler may send it to all processes of a job, and the launcher passes on its own: the second one would end
    # what the first one began.
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)
