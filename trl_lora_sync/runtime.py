"""One event loop for everything that talks to servers, and threads for calls that block.

The loop runs in one daemon thread per process. `run` is how the trainer's threads call it: an error in the waiting
thread, such as KeyboardInterrupt, cancels what it waits for. Neither a caller nor the interpreter's exit waits longer.
"""

import asyncio
import concurrent.futures
import inspect
import os
import queue
import socket
import threading
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")

# A signal ends a wait at once, but an exception set by another thread (PyThreadState_SetAsyncExc) and
# `_thread.interrupt_main` are seen between two waits only.
_POLL_S = 0.2
# How long cancelled tasks may take to end. Meanwhile a server gets the request to abort or to resume.
GRACE_S = 1.5


class BlockingThread:
    """Carries out blocking calls one after the other in one daemon thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[tuple[concurrent.futures.Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, act: Callable[[], T]) -> "concurrent.futures.Future[T]":
        call: concurrent.futures.Future[T] = concurrent.futures.Future()
        # Queued before the thread starts: if none can be started, the loop below makes the calls that it finds here.
        self._calls.put((call, act))
        if self._thread is None or not self._thread.is_alive():  # not alive in a forked child
            self._thread = threading.Thread(target=self._work, args=(self._calls,), name=self._name, daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # the interpreter is ending and starts no more threads
                self._thread = None
                # The end of a run still has files to delete, so the calls are made in this thread.
                while not self._calls.empty():
                    _carry_out(*self._calls.get())
        return call

    async def run(self, act: Callable[[], T]) -> T:
        """Await a call; if this is cancelled before the call has begun, it never begins."""
        return await asyncio.wrap_future(self.submit(act))

    def __del__(self) -> None:
        # `_work` refers to the queue only, so this object is collected while its thread waits. This ends the thread.
        self._calls.put((concurrent.futures.Future(), _stop))

    @staticmethod
    def _work(calls: "queue.SimpleQueue[tuple[concurrent.futures.Future[Any], Callable[[], Any]]]") -> None:
        while True:
            call, act = calls.get()
            if act is _stop:
                return
            _carry_out(call, act)
            # Otherwise this frame would keep the result and the adapter of the last call until the next one.
            del call, act


def _stop() -> None:
    """Ends the thread."""


def _carry_out(call: "concurrent.futures.Future[T]", act: Callable[[], T]) -> None:
    # From here on `cancel` returns False, by which `DiskTransport` knows that a call will be carried out.
    if not call.set_running_or_notify_cancel():
        return
    try:
        call.set_result(act())
    # All errors belong to the caller that waits. The thread must live for the calls in the queue.
    except BaseException as error:
        call.set_exception(error)


class _Loop(asyncio.SelectorEventLoop):
    """The loop of this process, and the thread for what would hold it up."""

    def __init__(self) -> None:
        super().__init__()
        self.background: set[asyncio.Task[Any]] = set()  # a loop itself does not keep its tasks alive
        self.worker = BlockingThread("lora-sync-work")
        # Started now, because an ending interpreter starts no more threads, and the end of a run needs both.
        self.worker.submit(int)
        threading.Thread(target=self.run_forever, name="lora-sync-loop", daemon=True).start()

    async def getaddrinfo(self, host: Any, port: Any, **hints: Any) -> Any:
        # The default executor refuses work while the interpreter is ending (CPython 3.9 and later).
        return await self.worker.run(partial(socket.getaddrinfo, host, port, **hints))


_loop: _Loop | None = None
_of_parents: list[
    _Loop
] = []  # kept, because closing one in a forked child would take the parent's sockets off its poll
_starting = threading.Lock()


def _our_loop() -> _Loop:
    global _loop
    with _starting:
        if _loop is None:
            _loop = _Loop()
        return _loop


def _leave_to_parent() -> None:
    global _loop, _starting
    # In the child the lock may be held by a thread that exists in the parent only.
    _starting = threading.Lock()
    if _loop is not None:
        _of_parents.append(_loop)
        _loop = None


os.register_at_fork(after_in_child=_leave_to_parent)


class Event:
    """Happens once. A thread may be interrupted anywhere in its wait, and `set` is not held up by that.

    The events and futures of the standard library have a lock that Python code takes and releases. After an interrupt
    between the two it stays taken (CPython issue 74174), and the loop, which needs it next, would wait for ever.
    """

    def __init__(self) -> None:
        self._has_happened = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """By one thread only."""
        if not self._has_happened:
            self._has_happened = True
            self._lock.release()

    def is_set(self) -> bool:
        return self._has_happened

    def wait(self, timeout_s: float) -> None:
        """Until it has happened, or for so long."""
        if not self._has_happened and self._lock.acquire(timeout=timeout_s):
            self._lock.release()  # for other threads that wait

    def wait_until_set(self) -> None:
        """Until it has happened; an error that another thread raises in this one ends that."""
        while not self._has_happened:
            self.wait(_POLL_S)


class Outcome:
    """How a call in another thread went, for one coroutine on the loop to wait for; without a lock, see `Event`."""

    def __init__(self) -> None:
        self._loop = _our_loop()
        self._error: asyncio.Future[Exception | None] = self._loop.create_future()

    def set(self, error: Exception | None) -> None:
        """By the other thread."""
        self._loop.call_soon_threadsafe(self._set, error)

    def _set(self, error: Exception | None) -> None:
        if not self._error.done():  # it is cancelled with the coroutine that waits
            self._error.set_result(error)

    async def wait(self) -> None:
        """Until it is set; raises the error, if there was one."""
        if error := await self._error:
            raise error


class Task(Generic[T]):
    """A coroutine that runs on the loop, for other threads to wait for or to cancel."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._loop = _our_loop()
        self._coroutine = coroutine
        self._outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._ended = Event()
        self._task: asyncio.Task[T] | None = None

    def begin(self) -> "Task[T]":
        """Run it, once the caller has noted where to cancel it: an interrupt may come before this returns."""
        self._loop.call_soon_threadsafe(self._begin)
        return self

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._coroutine)
        self._task.add_done_callback(self._end)

    def _end(self, task: "asyncio.Task[T]") -> None:
        self._task = None
        if task.cancelled():
            # Set as an error, so that `result` raises asyncio's class. A cancelled future would raise that of
            # concurrent.futures, another class, which `except Exception` catches.
            self._outcome.set_exception(asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            self._outcome.set_exception(error)
        else:
            self._outcome.set_result(task.result())
        self._ended.set()

    def wait(self) -> None:
        """Until it has ended, in whatever way."""
        self._ended.wait_until_set()

    def result(self) -> T:
        """Wait for it, and return what it returned or raise what it raised."""
        self.wait()
        return self._outcome.result()

    def done(self) -> bool:
        return self._ended.is_set()

    def cancel(self) -> None:
        """Cancel it, and give it a moment to end."""
        self._loop.call_soon_threadsafe(self._cancel)
        self._ended.wait(GRACE_S)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        elif not self._ended.is_set():  # it has never begun, or `_begin` would have been called before this
            self._coroutine.close()
            self._outcome.set_exception(asyncio.CancelledError())
            self._ended.set()


def run(coroutine: Coroutine[Any, Any, T], meanwhile: Callable[[], object] | None = None) -> T:
    """Run a coroutine on the loop, and wait for it; an error in this thread meanwhile cancels it.

    Args:
        meanwhile: called in this thread before the wait.
    """
    # Not for the loop's own thread, which would wait for itself. `servers.fleet` therefore calls it in the file thread.
    task = Task(coroutine)
    try:
        task.begin()
        if meanwhile is not None:
            meanwhile()
        task.wait()
    except BaseException:
        task.cancel()
        raise
    return task.result()


def from_another_loop(coroutine: Coroutine[Any, Any, T]) -> "asyncio.Future[T]":
    """Run a coroutine on the loop here. The future belongs to the caller's loop, and cancels it if it is cancelled."""
    return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, _our_loop()))


async def offload(act: Callable[[], T]) -> T:
    """Make a call that would hold up the loop, such as hashing or copying an adapter, in the one thread for these."""
    return await _our_loop().worker.run(act)


def spawn(coroutine: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
    """Start a task beside the caller, on whose loop it runs to its end even if nothing refers to it."""
    background = _our_loop().background
    task = asyncio.ensure_future(coroutine)
    background.add(task)
    task.add_done_callback(background.discard)
    return task


def watch(readable: socket.socket, act: Callable[[], None]) -> Callable[[], None]:
    """Call `act` on the loop, briefly, whenever there is something to read.

    Returns:
        What ends that and closes the socket; it does not wait, and may be called by any thread and in a forked child.
    """
    loop = _our_loop()

    def end() -> None:
        loop.remove_reader(readable)
        readable.close()

    def stop() -> None:
        if loop is _loop:
            loop.call_soon_threadsafe(end)
        else:  # in a forked child, where taking it off the poll would take it off the parent's
            readable.close()

    loop.call_soon_threadsafe(loop.add_reader, readable, act)
    return stop


async def in_parallel(act: Callable[[T], Awaitable[R]], items: Sequence[T], at_most: int | None = None) -> list[R]:
    """Call `act` for each item, `at_most` at a time, and return the results in the order of the items.

    Raises:
        BaseException: the first error of any call, immediately; the other calls are cancelled.
    """
    if not items:
        return []  # without a turn of the loop
    turns = asyncio.Semaphore(at_most or len(items))

    async def in_turn(item: T) -> R:
        async with turns:
            return await act(item)

    tasks = [asyncio.ensure_future(in_turn(item)) for item in items]
    try:
        return await asyncio.gather(*tasks)
    finally:
        # `gather` raises the first error and lets the other tasks run on.
        await cancelled(tasks)


async def each(items: Sequence[T], act: Callable[[T], Awaitable[R]]) -> list[R]:
    """Do the same to all items at the same time; wait for all, then raise the first error."""
    # Without `return_exceptions` the first error would be raised while the others still run.
    outcomes = await asyncio.gather(*map(act, items), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes  # type: ignore[return-value]


async def cancelled(tasks: "Collection[asyncio.Future[Any]]") -> None:
    """Cancel tasks that still run, and give them a moment to end."""
    left = [task for task in tasks if not task.done()]
    for task in left:
        task.cancel()
    if left:
        # `asyncio.wait` has a limit and raises nothing, whatever a task does with its cancellation.
        await asyncio.wait(left, timeout=GRACE_S)


class Blocking:
    """The synchronous face of an engine or a client, for scripts: asynchronous methods are waited for."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.wrapped, name)
        if not inspect.iscoroutinefunction(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            return run(found(*args, **kwargs))

        return call
