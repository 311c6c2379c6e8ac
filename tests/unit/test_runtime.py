"""The one event loop: what other threads see of it, and what an ending or forked process can still do."""

import asyncio
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.waiting import happens

from trl_lora_sync.runtime import Blocking, Task, in_parallel, offload, run, watch
from unit.servers import serving

SOON_S = 20.0
TESTS = str(Path(__file__).parents[1])


async def double(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


async def fail() -> None:
    raise ValueError("broken")


def test_a_coroutine_is_run_and_its_result_or_its_error_comes_back() -> None:
    assert run(double(4)) == 8
    with pytest.raises(ValueError, match="broken"):
        run(fail())


def test_all_of_it_runs_in_one_thread_whoever_calls() -> None:
    async def thread() -> str:
        return threading.current_thread().name

    found: list[str] = []
    callers = [threading.Thread(target=lambda: found.append(run(thread()))) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(SOON_S)
    assert found == ["lora-sync-loop"] * 8
    assert run(offload(lambda: threading.current_thread().name)) == "lora-sync-work"
    assert sum(one.name.startswith(("lora-sync-loop", "lora-sync-work")) for one in threading.enumerate()) == 2


def test_a_cancelled_task_ends_and_cleans_up() -> None:
    ended: list[str] = []
    began = threading.Event()

    async def work() -> None:
        try:
            began.set()
            await asyncio.sleep(SOON_S)
        finally:
            await asyncio.sleep(0.01)
            ended.append("clean")

    task = Task(work()).begin()
    assert began.wait(SOON_S)
    task.cancel()
    assert task.done()
    assert ended == ["clean"]
    with pytest.raises(asyncio.CancelledError):
        task.result()


def test_an_interrupt_while_a_coroutine_is_being_started_cancels_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It went on without a waiting caller, and a sync left its version on the servers."""
    call_soon, interrupts = asyncio.BaseEventLoop.call_soon_threadsafe, [KeyboardInterrupt()]
    me, went_on = threading.get_ident(), threading.Event()

    def interrupted(*args: Any) -> asyncio.Handle:
        handle = call_soon(*args)
        # To wake the loop, the thread has left the interpreter, so signals and other threads' exceptions come here.
        if interrupts and threading.get_ident() == me:
            raise interrupts.pop()
        return handle

    async def work() -> None:
        await asyncio.sleep(0.1)
        went_on.set()

    run(double(1))  # the loop has been started
    monkeypatch.setattr(asyncio.BaseEventLoop, "call_soon_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(work())
    assert not went_on.wait(0.5)


def test_results_in_parallel_are_in_order_and_at_most_so_many_run_at_once() -> None:
    running, most = 0, 0

    async def act(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02 * (number % 3))
        running -= 1
        return number

    assert run(in_parallel(act, range(12), at_most=4)) == list(range(12))
    assert most == 4
    assert run(in_parallel(act, [])) == []


def test_the_first_error_in_parallel_cancels_the_others() -> None:
    ended: list[type[BaseException]] = []

    async def wait() -> None:
        try:
            await asyncio.sleep(SOON_S)
        except BaseException as error:
            ended.append(type(error))
            raise

    started = time.monotonic()
    with pytest.raises(ValueError, match="broken"):
        run(in_parallel(lambda act: act(), [wait, fail, wait]))
    assert ended == [asyncio.CancelledError] * 2
    assert time.monotonic() - started < SOON_S / 2


def test_a_blocking_face_waits_for_what_is_asynchronous_and_passes_on_the_rest() -> None:
    class Client:
        name = "a"

        async def get(self, number: int) -> int:
            return await double(number)

        def add(self, number: int) -> int:
            return number + 1

    client = Blocking(Client())
    assert (client.name, client.get(2), client.add(2)) == ("a", 4, 3)


@pytest.mark.outside
def test_a_forked_child_has_a_loop_of_its_own_and_leaves_the_parents_alone() -> None:
    assert run(double(1)) == 2
    child = os.fork()
    if not child:
        os._exit(run(double(20)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 40
    assert run(double(3)) == 6


@pytest.mark.outside
def test_a_socket_is_watched_until_that_is_ended_also_in_a_forked_child() -> None:
    ours, theirs = socket.socketpair()
    heard: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    stop = watch(ours, lambda: heard.put(ours.recv(9)))
    theirs.send(b"one")
    assert heard.get(timeout=SOON_S) == b"one"

    child = os.fork()
    if not child:
        stop()
        os._exit(ours.fileno() != -1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    theirs.send(b"two")
    assert heard.get(timeout=SOON_S) == b"two"

    stop()
    assert happens(lambda: ours.fileno() == -1)
    theirs.close()


INTERRUPTED = """
import asyncio, sys

sys.path.insert(0, sys.argv[1])
from support.interrupts import Interrupts
from trl_lora_sync.runtime import from_another_loop, run

ended = set()  # places of calls that came to their end

async def work(place):
    await asyncio.sleep(0.25)  # longer than one turn of the wait
    ended.add(place)

async def answer():
    return await asyncio.wait_for(from_another_loop(asyncio.sleep(0, "alive")), 5)

run(asyncio.sleep(0))
expected = set()
interrupts = Interrupts({"trl_lora_sync.runtime", "concurrent.futures._base", "threading"})
while not interrupts.is_over:
    place = interrupts.place
    interrupts.call(lambda: run(work(place)))
    expected |= {place} & ended
    assert asyncio.run(answer()) == "alive"
run(asyncio.sleep(0.5))
assert ended == {*expected, place}, ended
print(place)
"""


@pytest.mark.outside
def test_an_interrupt_at_any_point_of_a_call_ends_it_and_leaves_the_loop_alive(run_python: Callable[..., str]) -> None:
    """It could leave a lock taken that the loop then waited for, and with it each later request and the end.

    Or the coroutine went on, if the interrupt came just after it was started.
    """
    assert int(run_python(INTERRUPTED, TESTS)) > 10


AT_EXIT = """
import atexit, sys
from trl_lora_sync.engines.base import Deadline
from trl_lora_sync.engines.http import NO_KEY, HTTPClient
from trl_lora_sync.runtime import run

client = HTTPClient(sys.argv[1], api_key=NO_KEY, is_local=True)

def end():
    for path in ("/first", "/second"):
        print(run(client.request("GET", path, Deadline.after(20, "The end"))).text, flush=True)

atexit.register(end)

async def nothing():
    pass

run(nothing())
"""


@pytest.mark.outside
def test_at_exit_a_new_connection_by_host_name_can_still_be_made(run_python: Callable[..., str]) -> None:
    """The default executor, in which asyncio resolves names, takes no more work then."""
    with serving(lambda request: request.send(200, request.path)) as server:
        url = server.url.replace("127.0.0.1", "localhost")
        assert url != server.url
        assert run_python(AT_EXIT, url).split() == ["/first", "/second"]
