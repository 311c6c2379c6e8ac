"""The process that scripts of the tests are forks of: python trainer_forks.py LISTENER OWNER, see `forking.py`.

Imports what a trainer needs once, which is most of what a short script takes. A connection brings one line of JSON with
the script, its arguments and its environment, and the three descriptors that it is to read and print to. The answers
are its process id and, when it has ended, its exit code. Its other end is `ForkedScript` in `processes.py`.
"""

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from forking import fork_for_each_connection

# TRL imports its trainers at their first use.
MODULES = ("torch._dynamo", "pandas", "support.policies", "support.trainers")


def main(listener: str, owner: str) -> None:
    gc.disable()
    for module in MODULES:
        importlib.import_module(module)
    fork_for_each_connection(listener, owner, run_script)


def run_script(connection: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # as an exit code is wanted
    order, descriptors = received(connection)
    child = os.fork() if order else None
    if child == 0:
        become(connection, descriptors, **order)
        return  # to the end of Python, as any script ends
    if child:
        for descriptor in descriptors:
            os.close(descriptor)
        connection.sendall(b"%d\n" % child)
        _, status = os.waitpid(child, 0)
        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def received(connection: socket.socket) -> tuple[Any, list[int]]:
    line, descriptors = b"", list[int]()
    while not line.endswith(b"\n"):
        part, found, *_ = socket.recv_fds(connection, 1 << 16, 3)
        if not part:
            return None, descriptors
        line += part
        descriptors.extend(found)
    return json.loads(line), descriptors


def become(
    connection: socket.socket, descriptors: list[int], arguments: list[str], environment: dict[str, str]
) -> None:
    """Be the process that `python` makes of a script and its arguments, in its own session."""
    connection.close()
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which it has not where a shell ignores it
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    script = arguments[0]
    own = [str(Path(script).parent), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    common = {sys.path[0], *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    sys.path[:] = [*own, *(path for path in sys.path if path not in common)]
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = arguments
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
