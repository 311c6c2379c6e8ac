"""`accelerate launch` with gloo processes on the CPU."""

import atexit
import json
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from accelerate import PartialState

from support.processes import run

TESTS = Path(__file__).parents[1]
# DeepSpeed and bitsandbytes, for the processes that need them; `make launchers` fills it.
LAUNCHERS = TESTS.parent / ".launchers"
# With `--cpu`, accelerate 1.15 starts one process, or needs MPI. This way is torchrun's, and the environment keeps the
# processes on the CPU, with gloo.
CPU_ENV = {"ACCELERATE_USE_CPU": "true"}
LAUNCH_ENV = {"PYTHONPATH": f"{TESTS}:{TESTS.parent}:{LAUNCHERS}", "OMP_NUM_THREADS": "1"}


def check_launchers() -> None:
    """Raises FileNotFoundError if they are not installed, and what to do."""
    if not LAUNCHERS.is_dir():
        raise FileNotFoundError("DeepSpeed and bitsandbytes are not in .launchers; `make launchers` installs them")


def end_process(folder: str, seen: dict[str, Any]) -> NoReturn:
    """**Collective.** The end of a script that `launch` runs: write what this process saw, leave the group and end."""
    state = PartialState()
    (Path(folder) / f"process-{state.process_index}.json").write_text(json.dumps(seen))
    state.destroy_process_group()
    end_without_finalizing()


def end_without_finalizing() -> NoReturn:
    """End with code 0, after waiting for threads and the exit functions, but without taking Python down.

    A group that is wrapped around a model is often kept by torch when it has been destroyed, and gloo's threads with
    it. One that lets go of a tensor while Python is taken down aborts the process (torch 2.13 on Python 3.11).
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def two_processes(scenario: str, folder: Path, url: str, model: Path, *, timeout_s: float) -> dict[str, Any]:
    """Run a scenario of `two_processes.py`; returns and raises what `launch` does."""
    script = TESTS / "support" / "two_processes.py"
    arguments = [scenario, str(folder), url, str(model)]
    return launch(script, arguments, folder, ["--multi_gpu"], env=CPU_ENV, timeout_s=timeout_s)


def launch_command(script: Path, arguments: Sequence[str], way: Sequence[str], *, processes: int = 2) -> list[str]:
    """What `launch` runs, with `LAUNCH_ENV`."""
    common = f"--num_processes {processes} --num_machines 1 --mixed_precision no --dynamo_backend no"
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", *common.split()]
    return [*command, "--main_process_port", "0", *way, str(script), *arguments]


def launch(
    script: Path,
    arguments: Sequence[str],
    folder: Path,
    way: Sequence[str],
    *,
    processes: int = 2,
    env: dict[str, str] | None = None,
    timeout_s: float,
) -> dict[str, Any]:
    """Run a script that writes `process-<index>.json` to `folder` in several processes.

    Args:
        way: arguments of `accelerate launch` that choose the way of training.

    Returns:
        `"seen"`: what each process wrote; `"output"`: what all printed.

    Raises:
        TimeoutError: a process hangs.
    """
    command = launch_command(script, arguments, way, processes=processes)
    ended = run(command, folder / "log", timeout_s, {**LAUNCH_ENV, **(env or {})})
    assert ended.code == 0, ended.output
    seen = [json.loads((folder / f"process-{index}.json").read_text()) for index in range(processes)]
    return {"seen": seen, "output": ended.output}
