"""Make one HTML page of the logs of a run, or of several to compare them: reward, losses, where the time of a step and
of a sync goes, log-probability gaps, importance ratio, servers, and what is out of the ordinary.

Reads lora_sync.jsonl in RUN_DIR, which grows while the run trains; without it, the newest trainer_state.json in RUN_DIR
or its checkpoints. The page holds all it needs, so it can be sent and opened anywhere, without a network.
"""

import importlib.util
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from trl_lora_sync.cli.console import UsageError, out
from trl_lora_sync.cli.run_history import read_runs


def run(
    run_dirs: Annotated[
        list[Path],
        Argument(metavar="RUN_DIR", help="output_dir of a run, or one of its checkpoints; several to compare them"),
    ],
    file: Annotated[
        Path | None,
        Option("--out", metavar="FILE", show_default="lora-sync-report.html in the first RUN_DIR", help="the page"),
    ] = None,
) -> None:
    runs = read_runs(run_dirs)
    # Modules of the page import it only when they draw, too late for this message. After the logs are read, so that
    # a wrong folder is reported without plotly as well.
    if importlib.util.find_spec("plotly") is None:
        raise UsageError(
            "plotly is not installed, and draws the page. Install it with: "
            f"{shlex.quote(sys.executable)} -m pip install 'plotly>=6.3'"
        )
    from trl_lora_sync.cli.report_page import page

    file = file or run_dirs[0] / "lora-sync-report.html"
    text = page(runs)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"The page cannot be written to {file} ({error}). Name another file with --out.") from error
    steps = ", ".join(f"{one.name} up to step {one.last_step}" for one in runs)
    out().print(f"Written to {os.path.relpath(file)}: {steps}.")
