"""Threads that can be cancelled, and that neither a caller nor the interpreter's exit waits for.

A `ThreadPoolExecutor` joins its threads when its block is left and when the interpreter exits, so Ctrl-C during a
generation would wait for the generation. Here an error in the caller's thread, or in one of several tasks, cancels the
other tasks: each request that they wait for is broken off, and each later one is refused.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

# A signal ends a wait at once, but an exception set by another thread (PyThreadState_SetAsyncExc) and
# `_thread.interrupt_main` are seen between two waits only.
POLL_S = 0.2
# How long cancelled tasks may take to end. Meanwhile a server gets the request to abort or to resume.
_GRACE_S = 1.5

_thread = threading.local()


class CancelledError(BaseException):
    """The task that this thread runs was cancelled. Not an `Exception`, so that it is never taken for a failure."""


def check_cancelled() -> None:
    """Raise CancelledError in the thread of a cancelled task."""
    group: TaskGroup | None = getattr(_thread, "group", None)
    if group is not None and group.is_cancelled:
        raise CancelledError


def pause(seconds: float) -> None:
    """Sleep, but no longer than until this thread's task is cancelled.

    Raises:
        CancelledError: it was.
    """
    until = time.monotonic() + seconds
    while (left_s := until - time.monotonic()) > 0:
        check_cancelled()
        time.sleep(min(left_s, POLL_S))
    check_cancelled()


@contextmanager
def shielded() -> Iterator[None]:
    """For clean-up that a cancelled task must still do."""
    with _in_group(None):
        yield


@contextmanager
def _in_group(group: "TaskGroup | None") -> Iterator[None]:
    before = getattr(_thread, "group", None)
    _thread.group = group
    try:
        yield
    finally:
        _thread.group = before


class TaskGroup:
    """Tasks in daemon threads. An error that leaves the block cancels the tasks, and gives them a moment."""

    def __init__(self) -> None:
        self._parent: TaskGroup | None = getattr(_thread, "group", None)
        self._cancelled = threading.Event()
        self._tasks: list[Future[Any]] = []

    def __enter__(self) -> "TaskGroup":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self.cancel()

    def cancel(self) -> None:
        """Cancel the tasks, and give them a moment to end."""
        self._cancelled.set()
        wait(self._tasks, timeout=_GRACE_S)

    @property
    def is_cancelled(self) -> bool:
        """Whether this group was cancelled, or the one whose task made it."""
        return self._cancelled.is_set() or (self._parent is not None and self._parent.is_cancelled)

    def start(self, act: Callable[[], T]) -> "Future[T]":
        """Run `act` in a thread."""
        task: Future[T] = Future()
        self._tasks.append(task)
        run = partial(self._run, task, act)
        try:
            threading.Thread(target=run, name="lora-sync-task", daemon=True).start()
        except RuntimeError:  # the interpreter is ending and starts no more threads
            run()
        return task

    def _run(self, task: "Future[T]", act: Callable[[], T]) -> None:
        with _in_group(self):
            _carry_out(task, act)


def wait_for_any(tasks: "Collection[Future[Any]]") -> "set[Future[Any]]":
    """Wait until one of several tasks has ended, and return all that have."""
    while True:
        done, _ = wait(tasks, timeout=POLL_S, return_when=FIRST_COMPLETED)
        if done:
            return done
        check_cancelled()


def in_parallel(act: Callable[[T], R], items: Sequence[T], at_most: int) -> list[R]:
    """Call `act` for each item, in several threads, and return the results in the order of the items.

    Args:
        at_most: how many threads.

    Raises:
        BaseException: the first error of any call, immediately; the other calls are cancelled.
    """
    results: dict[int, R] = {}
    waiting = deque(range(len(items)))

    def work() -> None:
        while True:
            check_cancelled()
            try:
                index = waiting.popleft()
            except IndexError:
                return
            results[index] = act(items[index])

    with TaskGroup() as group:
        running = {group.start(work) for _ in range(min(at_most, len(items)))}
        while running:
            for task in (ended := wait_for_any(running)):
                task.result()
            running -= ended
    return [results[index] for index in range(len(items))]


class BackgroundThread:
    """Carries out tasks one after the other in one daemon thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, act: Callable[[], T]) -> "Future[T]":
        task: Future[T] = Future()
        self._tasks.put((task, act))
        if self._thread is None or not self._thread.is_alive():  # not alive in a forked child
            self._thread = threading.Thread(target=self._work, args=(self._tasks,), name=self._name, daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # the interpreter is ending and starts no more threads
                self._thread = None
                while not self._tasks.empty():
                    _carry_out(*self._tasks.get())
        return task

    def __del__(self) -> None:
        self._tasks.put((Future(), _stop))

    @staticmethod
    def _work(tasks: "queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]]") -> None:
        while True:
            task, act = tasks.get()
            if act is _stop:
                return
            _carry_out(task, act)
            del task, act


def _stop() -> None:
    """Ends the thread."""


def _carry_out(task: "Future[Any]", act: Callable[[], Any]) -> None:
    if not task.set_running_or_notify_cancel():
        return
    try:
        task.set_result(act())
    except BaseException as error:
        task.set_exception(error)
