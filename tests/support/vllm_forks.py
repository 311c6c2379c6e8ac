"""The process of which the tests' vLLM servers are forks: python vllm_forks.py LISTENER OWNER, see `forking.py`.

Imports vLLM once, with the server's Python, which is most of what a start takes. Each line of JSON on a connection has
the arguments of a server, its environment and the file of its log; the answer is the process id of a fork that became
that server. Servers end with their connection. Its other end is in `forked_servers.py`.
"""

import gc
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

SERVER = "vllm.entrypoints.openai.api_server"
# What the engine of a text model imports after its start.
IMPORTED_LATER = (
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.lora.worker_manager",
    "vllm.model_executor.models.qwen3",
)


def main(listener: str, owner: str) -> None:
    from forking import fork_for_each_connection

    gc.disable()
    sys.path[0] = str(Path.cwd())  # as `python -m` has it
    from vllm.utils import system_utils

    # On a CPU vLLM spawns its engine (0.31, vllm/platforms/cpu.py), which would then import all of it again.
    system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    for module in (SERVER, *IMPORTED_LATER):
        importlib.import_module(module)
    fork_for_each_connection(listener, owner, take_orders)


def take_orders(connection: socket.socket) -> NoReturn:
    with connection.makefile("rw") as orders:
        for order in orders:
            child = os.fork()
            if child == 0:
                serve(**json.loads(order))
            orders.write(f"{child}\n")
            orders.flush()
    os._exit(0)


def serve(arguments: list[str], environment: dict[str, str], log: str) -> NoReturn:
    """What `python -m` does with the module of vLLM's server, in its own session."""
    from forking import end_with_parent

    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    end_with_parent()
    for number, (path, flags) in enumerate([(os.devnull, os.O_RDONLY), (log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)]):
        opened = os.open(path, flags, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    os.dup2(1, 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.argv = ["vllm", *arguments]
    code: Any = 1
    try:
        runpy.run_module(SERVER, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
