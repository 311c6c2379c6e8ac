"""`accelerate launch` with gloo processes on the CPU."""

import atexit
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

from accelerate import PartialState

from support.processes import Finished, leave_imports_to_parent, run

TESTS = Path(__file__).parents[1]
# DeepSpeed and bitsandbytes, for the processes that need them; `make launchers` fills it.
LAUNCHERS = TESTS.parent / ".launchers"
# With `--cpu`, accelerate 1.15 starts one process, or needs MPI. This way is torchrun's, and the environment keeps the
# processes on the CPU, with gloo.
CPU_ENV = {"ACCELERATE_USE_CPU": "true"}
LAUNCH_ENV = {
    "PYTHONPATH": os.pathsep.join(map(str, [TESTS, TESTS.parent, TESTS.parent / "benchmarks", LAUNCHERS])),
    "OMP_NUM_THREADS": "1",
}


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
    it. A thread that lets go of a tensor while Python is taken down aborts the process (torch 2.13 on Python 3.11).
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_each(main: Callable[..., Any], runs: str) -> None:
    """What a script does that `launch_each` starts: call `main` with the arguments of each run, each in a fork.

    So importing torch, TRL and vLLM, which takes longer than most runs, is paid for once. Each run has its own group
    and port: the store of the launcher still has the keys of the groups before (torch 2.13).
    """
    leave_imports_to_parent()
    for port, arguments in json.loads(runs):
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
            try:
                main(*arguments)
            except BaseException:
                traceback.print_exc()
            os._exit(1)  # `main` ends with `end_process`
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(f"{arguments} ended with status {status}")


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
    return seen_in(folder, ended, processes)


def launch_each(
    script: Path,
    runs: Sequence[Sequence[str]],
    folder: Path,
    way: Sequence[str],
    *,
    env: dict[str, str] | None = None,
    timeout_s: float,
) -> Finished:
    """Run a script in two processes, once for each list of arguments, with one launch.

    The script must hand its argument to `run_each`. A run that fails ends the launch; what the runs before wrote is
    there for `seen_in`.
    """
    from vllm_server import hold_free_port  # not in the path of the processes, which import this file too

    with ExitStack() as stack:
        ports = [stack.enter_context(hold_free_port()).getsockname()[1] for _ in runs]
        arguments = json.dumps([[port, list(one)] for port, one in zip(ports, runs, strict=True)])
        command = launch_command(script, [arguments], way)
        return run(command, folder / "log", timeout_s * len(runs), {**LAUNCH_ENV, **(env or {})})


def seen_in(folder: Path, ended: Finished, processes: int = 2) -> dict[str, Any]:
    """What `launch` returns, of a run that wrote to `folder`."""
    files = [folder / f"process-{index}.json" for index in range(processes)]
    assert all(file.exists() for file in files), ended.output
    return {"seen": [json.loads(file.read_text()) for file in files], "output": ended.output}
