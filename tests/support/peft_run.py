"""Unit tests under one PEFT after the other: python peft_run.py RUNS TEST_FILE... [PYTEST_OPTION...]

RUNS is a JSON list of [PEFT, LOG, CODE]. PEFT is the folder that it is unpacked in. Each run is a process forked from
a parent that has loaded the common modules. Its version, where it lies and pytest's output go to the file LOG, and its
exit code to the file CODE. Two run at a time, as each computes on one core.
"""

import json
import os
import sys
from pathlib import Path

from support.processes import enter_fork, load_for_forks

# Most of what PEFT and the tests take to import.
MODULES = (
    *("torch", "torch._dynamo", "transformers.modeling_utils", "transformers.models.qwen3.modeling_qwen3"),
    *("accelerate", "safetensors.torch", "httpx", "pytest", "hypothesis"),
)
AT_A_TIME = 2


def main(runs: str, *files: str) -> None:
    load_for_forks(MODULES, without="peft")
    running: dict[int, str] = {}
    for peft, log, code in json.loads(runs):
        if len(running) == AT_A_TIME:
            wait_for_one(running)
        child = os.fork()
        if child == 0:
            run_tests(peft, log, files)
        running[child] = code
    while running:
        wait_for_one(running)


def run_tests(folder: str, log: str, files: tuple[str, ...]) -> None:
    enter_fork(log, folder)
    import peft
    import pytest

    print(f"peft {peft.__version__} in {peft.__file__}", flush=True)
    sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-W", "ignore", *files]))


def wait_for_one(running: dict[int, str]) -> None:
    child, status = os.wait()
    Path(running.pop(child)).write_text(str(os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    main(*sys.argv[1:])
