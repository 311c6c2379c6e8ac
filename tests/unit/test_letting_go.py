"""Unit tier: a run that is interrupted or ends lets go at once, and adapters that it could not unload are recorded."""

import asyncio
import ctypes
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from contract.served import PROMPT, SMALL, sampling, soon
from support.waiting import happens

from trl_lora_sync.adapter.store import StoredAdapter
from trl_lora_sync.engines.base import TIMEOUTS, Deadline, PromptGroup
from trl_lora_sync.engines.http import NO_KEY, HTTPClient
from trl_lora_sync.errors import GenerationError, LoRASyncError
from trl_lora_sync.runtime import in_parallel, spawn
from trl_lora_sync.runtime import run as run_on_loop
from trl_lora_sync.sync import AdapterSync
from trl_lora_sync.testing import FakeSGLang, in_memory_engines
from unit.fleets import FleetRun, InMemoryRun, settings_for, small_adapter
from unit.servers import nobody_listening

pytestmark = pytest.mark.outside

StartRun = Callable[..., FleetRun]
# Without an interrupt, a generation here takes this long.
GENERATION_S = 100.0
AT_ONCE_S = 10.0  # two seconds, and what a busy machine adds
TOKENS = 100
ROWS = 72  # more than are sent at once, so that some share a request
BUSY = (503, "the gateway is out of order")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[StartRun]:
    """Starts a run on fakes, which are made if none are given; keyword arguments are fields of the fakes."""
    with ExitStack() as stack:

        def begin(fakes: int | list[FakeSGLang] = 1, root: Path = tmp_path / "sync", **args: Any) -> FleetRun:
            if isinstance(fakes, int):
                fakes = [stack.enter_context(FakeSGLang(**{"shapes": SMALL, **args})) for _ in range(fakes)]
            begun = FleetRun(AdapterSync(settings_for(fakes, root, generation_timeout_s=GENERATION_S)), fakes)
            stack.callback(begun.sync.close)
            begun.start()
            return begun

        yield begin


# Interrupts


def generate_for_long(training: FleetRun) -> None:
    """Sample so many tokens that it takes `GENERATION_S`."""
    assert training.sync.active is not None
    for fake in training.fakes:
        fake.token_delay_s = GENERATION_S / TOKENS
    groups = [PromptGroup(prompt=[*PROMPT, row], count=1) for row in range(ROWS)]
    training.sync.generate(training.sync.active.name, groups, sampling(max_tokens=TOKENS), soon(GENERATION_S))


def wait_until_generating(training: FleetRun) -> None:
    """Until all of it is under way.

    Before, threads are started, and an asynchronous exception for the thread that starts another one may hit that
    instead, for which the first then waits for ever (CPython 3.11, whose new threads have the id of the old at first).
    """
    training.fakes[0].wait_until(lambda: sum(fake.running for fake in training.fakes) == ROWS)


def interrupt_main_thread(training: FleetRun) -> None:
    """Ctrl-C in the middle of a generation of the main thread."""

    def send() -> None:
        wait_until_generating(training)
        os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(KeyboardInterrupt):
        generate_for_long(training)
    sender.join()


def interrupt_other_thread(training: FleetRun) -> None:
    """An asynchronous exception, as notebooks and Ray raise it, in a generation of another thread."""
    raise_in_another_thread(lambda: generate_for_long(training), lambda: wait_until_generating(training))


def raise_in_another_thread(act: Callable[[], object], wait: Callable[[], object]) -> None:
    """Raise an exception in a thread that does `act`, after `wait`, which must end `act`."""
    raised: list[type[BaseException]] = []

    def do() -> None:
        try:
            act()
        except BaseException as error:
            raised.append(type(error))

    thread = threading.Thread(target=do)
    thread.start()
    wait()
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
    thread.join(GENERATION_S)
    assert raised == [SystemExit]


# Every two of a way, a number and a version come together in one of these.
@pytest.mark.parametrize(
    ("interrupt", "servers", "version"),
    [
        (interrupt_main_thread, 1, "0.5.11"),
        (interrupt_other_thread, 2, "0.5.11"),
        (interrupt_main_thread, 2, "0.5.15"),
        (interrupt_other_thread, 1, "0.5.15"),
        (interrupt_main_thread, 1, "0.5.21"),
        (interrupt_other_thread, 2, "0.5.21"),
        (interrupt_main_thread, 2, "0.5.23"),
        (interrupt_other_thread, 1, "0.5.23"),
    ],
)
def test_an_interrupt_ends_a_generation_at_once_and_the_servers_abort_it(
    run: StartRun, interrupt: Callable[[FleetRun], None], servers: int, version: str
) -> None:
    """It was noticed when the generation had ended. Up to 0.5.21 a client that just leaves keeps the adapter loaded."""
    training = run(servers, version=version)
    for _ in range(2):  # the second one on kept connections
        training.publish()
        for fake in training.fakes:
            fake.token_delay_s = 0.0
        training.generate()
        started = time.monotonic()

        interrupt(training)

        assert time.monotonic() - started < AT_ONCE_S
        for fake in training.fakes:
            fake.wait_until(lambda fake=fake: not fake.running and set(fake.in_flight.values()) == {0})
    started = time.monotonic()
    training.sync.close()
    assert time.monotonic() - started < AT_ONCE_S
    assert training.adapters() == [[]] * servers


INTERRUPTED_SYNCS = """
import faulthandler, sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from contract.served import SMALL
from support.interrupts import Interrupts
from trl_lora_sync.testing import in_memory_engines
from unit.fleets import InMemoryRun, small_adapter

faulthandler.dump_traceback_later(60, exit=True)
with in_memory_engines(shapes=SMALL) as engines:
    begun, adapter = InMemoryRun(engines, Path(sys.argv[2])), small_adapter(2)
    modules = {"trl_lora_sync.sync", "trl_lora_sync.runtime", "concurrent.futures._base", "threading"}
    interrupts = Interrupts(modules)
    while not interrupts.is_over:
        interrupts.call(lambda: begun.sync.publish(adapter, meanwhile=int))
    assert begun.samples_from(2)
    begun.sync.close()
    assert not any(Path(sys.argv[2]).rglob("*-v*"))
print(len(interrupts.kept))
"""


def test_an_interrupt_at_any_point_of_a_sync_leaves_the_loop_alive(
    run_python: Callable[..., str], tmp_path: Path
) -> None:
    """It could leave a lock taken for which the loop waited, as the sync was cancelled, and the end of the run with it.

    That was as the trainer's thread noted that its part of the sync was done.
    """
    assert int(run_python(INTERRUPTED_SYNCS, str(Path(__file__).parents[1]), str(tmp_path))) > 10


def test_an_exception_from_another_thread_ends_a_sync_whose_files_are_not_written_yet(
    run: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came once they were, which on a file system that hangs is after `lora_sync_timeout`."""
    training = run()
    writing = threading.Event()

    async def hang(*args: Any) -> StoredAdapter:
        writing.set()
        await asyncio.sleep(GENERATION_S)
        raise AssertionError("the sync went on")

    monkeypatch.setattr(training.sync.transport, "written", hang)
    started = time.monotonic()
    raise_in_another_thread(training.publish, lambda: writing.wait(30))
    assert time.monotonic() - started < AT_ONCE_S


@pytest.mark.parametrize("interrupt", [interrupt_main_thread, interrupt_other_thread])
def test_a_server_that_is_slow_to_abort_is_not_left_before_it_has(
    run: StartRun, interrupt: Callable[[FleetRun], None]
) -> None:
    """The connection was broken off after 1.2 s, and the server kept the adapter loaded until it was restarted."""
    training = run(version="0.5.15")
    training.publish()
    [fake] = training.fakes
    fake.delay_s["/abort_request"] = 2.0
    started = time.monotonic()

    interrupt(training)

    assert time.monotonic() - started < AT_ONCE_S
    fake.wait_until(lambda: not fake.running and set(fake.in_flight.values()) == {0})
    training.sync.close()
    assert training.adapters() == [[]]


def test_a_request_that_fails_ends_the_others_at_once(run: StartRun) -> None:
    """All others were waited for before the error was raised."""
    training = run()
    training.publish()
    [fake] = training.fakes
    fake.abort_with = [400]
    started = time.monotonic()
    with pytest.raises(GenerationError, match="could not sample"):
        generate_for_long(training)
    assert time.monotonic() - started < AT_ONCE_S
    fake.wait_until(lambda: not fake.running)


def test_a_request_that_fails_ends_the_pauses_of_limited_ones_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause of `Retry-After` was slept to its end."""
    limited = httpx.Response(429, headers={"Retry-After": "300"}, request=httpx.Request("POST", "http://server"))
    ended: list[type[BaseException]] = []

    async def pauses() -> None:
        is_answered = asyncio.Event()

        async def send(*request: object, **options: object) -> httpx.Response:
            is_answered.set()
            return limited

        monkeypatch.setattr(httpx.AsyncClient, "request", send)

        async def wait() -> None:
            try:
                await HTTPClient("http://server", api_key=NO_KEY, is_local=True).request("POST", "/", soon(600))
            except BaseException as error:
                ended.append(type(error))
                raise

        async def fail() -> None:
            await is_answered.wait()
            await asyncio.sleep(0.1)  # nothing else runs on the loop, so the pause has begun
            raise GenerationError("refused")

        await in_parallel(lambda act: act(), [wait, fail])

    started = time.monotonic()
    with pytest.raises(GenerationError, match="refused"):
        run_on_loop(pauses())
    assert time.monotonic() - started < AT_ONCE_S
    assert ended == [asyncio.CancelledError]


def test_an_interrupt_of_a_load_withdraws_the_version_on_every_server(run: StartRun) -> None:
    training = run(2)
    first = training.publish().adapter_name
    for fake in training.fakes:
        fake.delay_s["/load_lora_adapter"] = 1.0
        fake.requests.clear()

    def send() -> None:
        for fake in training.fakes:
            fake.wait_until(lambda fake=fake: any(one.path == "/load_lora_adapter" for one in fake.requests))
        os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(KeyboardInterrupt):
        training.publish()
    sender.join()
    assert training.sync.active is not None
    assert training.sync.active.name == first
    training.wait_for_unloads()
    for fake in training.fakes:
        fake.wait_until(lambda fake=fake: fake.host_adapters == [first])


def test_an_interrupted_load_is_carried_out_before_its_version_is_unloaded(tmp_path: Path) -> None:
    """The unload overtook it, was confirmed as there was no such name, and the version stayed on the server."""
    has_begun = threading.Event()
    with in_memory_engines(shapes=SMALL) as [engine]:
        begun = InMemoryRun([engine], tmp_path)
        load = engine.load

        async def load_late(adapter: StoredAdapter, deadline: Deadline) -> dict[str, str]:
            await asyncio.sleep(0.3)
            return await load(adapter, deadline)

        async def act_as_a_server(adapter: StoredAdapter, deadline: Deadline) -> dict[str, str]:
            """Carries out each load, also if the client no longer waits for the answer."""
            has_begun.set()
            return await asyncio.shield(spawn(load_late(adapter, deadline)))

        engine.load = act_as_a_server  # type: ignore[method-assign]
        sender = threading.Thread(target=lambda: has_begun.wait(30) and os.kill(os.getpid(), signal.SIGINT))
        sender.start()
        with pytest.raises(KeyboardInterrupt):
            begun.sync.publish(small_adapter(2))
        sender.join()
        run_on_loop(begun.sync.wait_for_unloads(soon(30)))
        assert [name for method, name in engine.calls if method == "load"][-1].endswith("-v2")
        assert [name.rpartition("-")[2] for name in run_on_loop(engine.loaded(soon()))] == ["v1"]
        begun.sync.shutdown()


def test_a_load_that_outlives_an_interrupt_and_the_end_of_the_run_leaves_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that hung during a pause had the version once it went on, and nothing on disk named it."""
    monkeypatch.setitem(vars(TIMEOUTS), "close_s", 0.5)
    with FakeSGLang(shapes=SMALL) as fake:
        training = FleetRun(AdapterSync(settings_for([fake], tmp_path / "sync", pause="abort")), [fake])
        training.start()
        training.publish()
        for path in ("/load_lora_adapter", "/unload_lora_adapter", "/continue_generation"):
            fake.delay_s[path] = 60.0

        def interrupt() -> None:
            fake.wait_until(lambda: sum(request.path == "/load_lora_adapter" for request in fake.requests) > loads)
            os.kill(os.getpid(), signal.SIGINT)

        loads = sum(request.path == "/load_lora_adapter" for request in fake.requests)
        sender = threading.Thread(target=interrupt)
        sender.start()
        with pytest.raises(KeyboardInterrupt):
            training.publish()
        sender.join()
        training.sync.close()
        assert [name.rpartition("-")[2] for name in left_in(tmp_path / "sync")] == ["v1", "v2"]


# The end


@pytest.mark.parametrize("act", ["publish", "generate"])
def test_a_forked_child_is_refused_and_takes_nothing_from_its_parent(act: str, run: StartRun) -> None:
    """It used its parent's connections, failed with a RuntimeError of asyncio, and unloaded its parent's versions."""
    training = run()
    training.publish()
    before = len(training.fakes[0].requests)

    child = os.fork()
    if not child:
        code = 1
        try:
            getattr(training, act)()
        except LoRASyncError as error:
            code = 0 if "Build it in the process that trains" in str(error) else 2
        finally:
            training.sync.close()
            os._exit(code)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(training.fakes[0].requests) == before
    assert training.is_policy_of(training.generate())


def test_servers_that_do_not_answer_hold_up_the_end_once_and_together(
    run: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vars(TIMEOUTS), "close_s", 1.0)
    training = run(3)
    for _ in range(3):
        training.publish()
    for fake in training.fakes:
        fake.delay_s["/unload_lora_adapter"] = 60.0
    started = time.monotonic()
    training.sync.close()
    assert time.monotonic() - started < AT_ONCE_S


# Names that were not unloaded


def left_in(folder: Path) -> list[str]:
    """The names for which there is a folder, and that there is nothing in these."""
    versions = sorted(folder.glob("lora-sync-*/lora-sync-*-v*"))
    assert not [entry for version in versions for entry in version.iterdir()]
    return [version.name for version in versions]


@pytest.mark.parametrize("transport", ["disk", "tensors"])
def test_a_name_whose_unload_was_not_confirmed_is_unloaded_by_the_next_run(
    run: StartRun, tmp_path: Path, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder of the run was deleted, and with it the only record of the name."""
    root = tmp_path / "two words"
    training = run(root=root)
    [fake] = training.fakes
    name = training.publish().adapter_name
    fake.canned["/unload_lora_adapter"] = [BUSY]
    training.sync.close()
    assert fake.host_adapters == [name]
    assert left_in(root) == [name]
    assert f"{fake.base_url} did not confirm the unload of {name}" in caplog.text
    assert f"trl-lora-sync sweep {fake.base_url} --dir '{root}'" in caplog.text

    after = run([fake], root)
    assert fake.host_adapters == []
    after.sync.close()
    assert not root.exists()


def test_what_could_not_be_unloaded_is_unloaded_with_the_next_version(run: StartRun) -> None:
    training = run()
    [fake] = training.fakes
    for _ in range(2):
        training.publish()
    fake.canned["/unload_lora_adapter"] = [BUSY]
    for kept in (["v1", "v2", "v3"], ["v3", "v4"]):
        training.publish()
        training.wait_for_unloads()
        assert training.adapters() == [kept]


@pytest.mark.parametrize("is_load_faster", [True, False])
def test_what_fails_beside_the_load_leaves_the_version_before_and_nothing_of_the_new_one(
    run: StartRun, is_load_faster: bool
) -> None:
    """An interrupted load ended after its unload, and a faster load had been activated."""
    training = run()
    [fake] = training.fakes
    name = training.publish().adapter_name
    fake.delay_s["/load_lora_adapter"] = 0.0 if is_load_faster else 0.3

    def fail() -> None:
        time.sleep(0.3 if is_load_faster else 0.0)
        raise ValueError("the model has changed")

    with pytest.raises(ValueError, match="the model has changed"):
        training.sync.publish(training.read_next(training.sync.form), meanwhile=fail)
    training.wait_for_unloads()
    assert training.sync.active is not None
    assert training.sync.active.name == name
    assert fake.host_adapters == [name]


def look_beside(
    training: FleetRun,
    monkeypatch: pytest.MonkeyPatch,
    look: Callable[[], object],
    finish: Callable[[Deadline], Awaitable[None]],
    *,
    is_awaited: bool = True,
) -> None:
    """Publish a version that `finish` completes, and `look` beside the load."""
    transport = training.sync.transport
    written = transport.written

    async def write_the_rest_later(*args: Any) -> StoredAdapter:
        return replace(await written(*args), is_awaited=is_awaited)

    monkeypatch.setattr(transport, "written", write_the_rest_later)
    monkeypatch.setattr(transport, "finish", finish)
    training.sync.publish(training.read_next(training.sync.form), meanwhile=look)


@pytest.mark.parametrize("is_awaited", [True, False])
def test_the_model_is_looked_at_once_no_server_waits_for_the_file_any_more(
    run: StartRun, monkeypatch: pytest.MonkeyPatch, is_awaited: bool
) -> None:
    """The look had kept the thread that completes the file waiting for Python's lock."""
    complete: list[bool] = []
    looks: list[list[bool]] = []

    async def finish(deadline: Deadline) -> None:
        await asyncio.sleep(0.2)
        complete.append(True)

    look_beside(run(), monkeypatch, lambda: looks.append(list(complete)), finish, is_awaited=is_awaited)
    assert looks == [[True] if is_awaited else []]


def test_the_model_is_looked_at_although_the_file_is_not_complete_in_time(
    run: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[bool] = []

    async def finish(deadline: Deadline) -> None:
        raise deadline.error("the file system hangs")

    # Whether it is an error is the load's business, and this one succeeds.
    look_beside(run(), monkeypatch, lambda: looks.append(True), finish)
    assert looks == [True]


def test_the_command_that_removes_what_was_left_works_in_any_folder(
    run: StartRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It named a relative lora_sync_dir as it was set."""
    monkeypatch.chdir(tmp_path)
    training = run(root=Path("out"))
    training.publish()
    [fake] = training.fakes
    fake.canned["/unload_lora_adapter"] = [BUSY]
    training.sync.close()
    assert f"trl-lora-sync sweep {fake.base_url} --dir {tmp_path / 'out'}" in caplog.text


def test_a_name_that_was_not_unloaded_during_the_run_is_known_after_it_was_killed(
    run: StartRun, tmp_path: Path
) -> None:
    training = run()
    [fake] = training.fakes
    first = training.publish().adapter_name
    training.publish()
    fake.canned["/unload_lora_adapter"] = [BUSY] * 2  # the next unload tries it again
    for _ in range(2):
        training.publish()
        training.wait_for_unloads()
    assert first in fake.host_adapters
    record = tmp_path / "sync" / training.sync.transport.store.run_id / first
    assert happens(lambda: list(record.iterdir()) == [])  # never missing, not even while its files are deleted

    training.sync.close()
    assert fake.host_adapters == []
    assert not (tmp_path / "sync").exists()


def test_the_end_that_comes_later_unloads_what_an_earlier_one_could_not(run: StartRun, tmp_path: Path) -> None:
    training = run()
    [fake] = training.fakes
    training.publish()
    fake.canned["/unload_lora_adapter"] = [BUSY]
    training.sync.close()
    assert len(left_in(tmp_path / "sync")) == 1
    training.sync.close()
    assert fake.host_adapters == []
    assert not (tmp_path / "sync").exists()


def test_a_run_that_goes_on_after_its_end_keeps_the_record_of_what_it_left(run: StartRun, tmp_path: Path) -> None:
    """`evaluate` after `train` publishes again."""
    training = run()
    [fake] = training.fakes
    left = training.publish().adapter_name
    fake.canned["/unload_lora_adapter"] = [BUSY]
    training.sync.close()
    evaluated = training.publish().adapter_name
    assert evaluated.rpartition("-v")[0] != left.rpartition("-v")[0]
    assert (tmp_path / "sync" / left.rpartition("-v")[0] / left).is_dir()
    training.sync.close()
    assert fake.host_adapters == []
    assert not (tmp_path / "sync").exists()


def test_a_record_is_kept_until_a_run_on_the_same_server_comes(run: StartRun, tmp_path: Path) -> None:
    training = run()
    [fake] = training.fakes
    name = training.publish().adapter_name
    fake.canned["/unload_lora_adapter"] = [BUSY]
    training.sync.close()

    run().sync.close()  # on another server
    assert left_in(tmp_path / "sync") == [name]
    fake.canned["/unload_lora_adapter"] = [BUSY]
    run([fake]).sync.close()  # on this one, which does not confirm again
    assert left_in(tmp_path / "sync") == [name]
    run([fake]).sync.close()
    assert fake.host_adapters == []
    assert not (tmp_path / "sync").exists()


def test_a_record_of_a_server_that_is_gone_is_removed(run: StartRun, tmp_path: Path) -> None:
    training = run()
    [fake] = training.fakes
    training.publish()
    fake.canned["/unload_lora_adapter"] = [BUSY]
    training.sync.close()
    assert len(left_in(tmp_path / "sync")) == 1
    with nobody_listening() as url:
        owner = next((tmp_path / "sync").glob("*/owner.json"))
        owner.write_text(owner.read_text().replace(fake.base_url, url))
        run().sync.close()
    assert not (tmp_path / "sync").exists()


def test_a_server_that_ended_before_the_run_leaves_no_record_and_no_warning(
    run: StartRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = run()
    training.publish()
    training.fakes[0].stop()
    training.sync.close()
    assert not (tmp_path / "sync").exists()
    assert "did not confirm" not in caplog.text
