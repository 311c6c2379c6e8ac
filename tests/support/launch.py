"""`accelerate launch` with two gloo processes on the CPU."""

import json
import sys
from pathlib import Path
from typing import Any

from support.processes import run

TESTS = Path(__file__).parents[1]


def two_processes(scenario: str, folder: Path, url: str, model: Path, *, timeout_s: float) -> dict[str, Any]:
    """Run a scenario of `two_processes.py`.

    Returns:
        `"seen"`: what each of the two processes wrote; `"output"`: what both printed.

    Raises:
        TimeoutError: a process hangs.
    """
    script = TESTS / "support" / "two_processes.py"
    # With `--cpu`, accelerate 1.15 starts one process, or needs MPI. This way is torchrun's, and the environment keeps
    # the processes on the CPU, with gloo.
    launch = "launch --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no --main_process_port 0"
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", *launch.split(), "--multi_gpu"]
    env = {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    arguments = [scenario, str(folder), url, str(model)]
    ended = run([*command, str(script), *arguments], folder / "log", timeout_s, env)
    assert ended.code == 0, ended.output
    seen = [json.loads((folder / f"process-{index}.json").read_text()) for index in (0, 1)]
    return {"seen": seen, "output": ended.output}
