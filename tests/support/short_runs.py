"""`short_run.py` with one TRL after the other: python short_runs.py RUNS, a JSON list of [TRL, URL, MODEL, FOLDER]

TRL is the folder that it is unpacked in. Each run is a process forked from a parent that has loaded the common modules;
what it prints goes to FOLDER/log, and its exit code to FOLDER/code.
"""

import json
import os
import runpy
import sys
from pathlib import Path

from support.processes import enter_fork, load_for_forks

SCRIPT = Path(__file__).with_name("short_run.py")
# Most of what TRL's trainers take to import.
MODULES = (
    *("torch", "torch._dynamo", "transformers", "transformers.trainer", "transformers.models.auto.modeling_auto"),
    *("accelerate", "datasets", "httpx", "pandas", "peft"),
)


def main(runs: str) -> None:
    load_for_forks(MODULES, without="trl")
    for trl, *arguments in json.loads(runs):
        folder = Path(arguments[-1])
        child = os.fork()
        if child == 0:
            enter_fork(folder / "log", trl)
            sys.argv = [str(SCRIPT), *arguments]
            runpy.run_path(str(SCRIPT), run_name="__main__")
            return  # to the end of Python, at which versions are withdrawn
        _, status = os.waitpid(child, 0)
        (folder / "code").write_text(str(os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    main(sys.argv[1])
