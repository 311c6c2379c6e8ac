"""Unit tier: what a collected object leaves behind is ended, and in no code's way."""

import concurrent.futures.thread as executors
import gc
import os
import threading
from collections.abc import Callable

import pytest

from trl_lora_sync.generation.finalizer import Finalizer

SOON_S = 20.0


class Owner:
    """Something that is collected."""


class Ends:
    """Counts calls, and takes `lock` for each."""

    def __init__(self, lock: threading.Lock) -> None:
        self.lock = lock
        self.count = 0
        self.has_ended = threading.Event()
        self.thread = 0

    def __call__(self) -> None:
        with self.lock:
            self.count += 1
            self.thread = threading.get_ident()
            self.has_ended.set()


@pytest.mark.timeout(SOON_S)
def test_collecting_waits_for_no_lock_of_the_code_that_it_interrupts() -> None:
    lock = threading.Lock()
    ends, owner = Ends(lock), Owner()
    Finalizer(owner, ends)
    with lock:
        del owner
        gc.collect()
        assert not ends.has_ended.is_set()
    assert ends.has_ended.wait(SOON_S)
    assert ends.thread != threading.get_ident()


@pytest.mark.timeout(SOON_S)
@pytest.mark.parametrize("lock", [executors._global_shutdown_lock, threading._active_limbo_lock])
def test_collecting_may_interrupt_whoever_starts_a_thread(lock: threading.Lock) -> None:
    """Where Transformers loads weights, an executor holds the first one while it allocates."""
    started = threading.Event()
    pool = executors.ThreadPoolExecutor(1)
    owner = Owner()
    Finalizer(owner, lambda: started.set() if pool.submit(int).result(SOON_S) == 0 else None)
    with lock:
        del owner
        gc.collect()
    assert started.wait(SOON_S)
    pool.shutdown()


def test_object_that_lives_is_not_ended() -> None:
    ends, owner = Ends(threading.Lock()), Owner()
    Finalizer(owner, ends)
    gc.collect()
    assert ends.count == 0
    assert owner


AT_EXIT = """
import gc, time
from trl_lora_sync.generation.finalizer import Finalizer

class Owner:
    pass

def end():
    time.sleep(0.5)
    print("ended", flush=True)

owner = Owner()
Finalizer(owner, end)
"""


@pytest.mark.outside
@pytest.mark.parametrize("last", ["", "del owner", "del owner; gc.collect()"])
def test_exit_waits_for_the_one_end(run_python: Callable[[str], str], last: str) -> None:
    assert run_python(AT_EXIT + last).split() == ["ended"]


HELD = """
import gc, time
from functools import partial
from trl_lora_sync.generation.finalizer import Finalizer

class Owner:
    pass

class Held:
    def __del__(self):
        time.sleep(0.5)
        print("freed", flush=True)

def end(held):
    print("ended", flush=True)

owner = Owner()
Finalizer(owner, partial(end, Held()))
del owner
gc.collect()
"""


@pytest.mark.outside
def test_exit_waits_until_what_was_held_for_the_end_is_freed(run_python: Callable[[str], str]) -> None:
    """With a trainer's tensors, `terminate called without an active exception` ended the process otherwise."""
    assert run_python(HELD).split() == ["ended", "freed"]


@pytest.mark.outside
def test_forked_child_ends_nothing() -> None:
    ends, owner = Ends(threading.Lock()), Owner()
    ending = Finalizer(owner, ends)
    child = os.fork()
    if not child:
        ending.run()
        os._exit(ends.count)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    ending.run()
    ending.run()
    assert ends.count == 1
