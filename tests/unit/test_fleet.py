"""Unit tier: several fake servers as one, what happens to one of them, and that the others never notice."""

import asyncio
import logging
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from contract.served import PROMPT, SMALL, sampling, soon

import trl_lora_sync.servers.handle
from trl_lora_sync.adapter.store import StoredAdapter
from trl_lora_sync.engine_plugins import unfinished
from trl_lora_sync.engine_plugins.safetensors_file import TENSORS_FILE
from trl_lora_sync.engines.base import TIMEOUTS, Capabilities, Deadline, Engine, PromptGroup
from trl_lora_sync.engines.connect import reason_to_be_down
from trl_lora_sync.engines.vllm.fused import VLLMFusedEngine
from trl_lora_sync.errors import (
    AdapterExportError,
    AdapterLostError,
    AdapterRejectedError,
    DeadlineExceededError,
    GenerationError,
    ServerSetupError,
    ServerUnreachableError,
    VerificationError,
)
from trl_lora_sync.runtime import Task
from trl_lora_sync.runtime import run as run_on_loop
from trl_lora_sync.servers.handle import ServerHandle, ServerState
from trl_lora_sync.servers.ledger import VersionLedger
from trl_lora_sync.settings import ServerAddress
from trl_lora_sync.sync import AdapterSync
from trl_lora_sync.testing import FakeSGLang, InMemoryEngine, in_memory_engines
from unit.fleets import GROUPS, FleetRun, InMemoryRun, settings_for, small_adapter
from unit.servers import serving

pytestmark = pytest.mark.outside

WAIT_S = 30.0
REFUSAL = (400, {"success": False, "error_message": "out of memory", "loaded_adapters": None})
StartRun = Callable[..., FleetRun]


@pytest.fixture(autouse=True)
def _brief_hiccups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(TIMEOUTS), "retry_s", 0.2)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[StartRun]:
    """Starts fakes and a run on them; `servers` gives the arguments of each, all others are sync settings."""
    with ExitStack() as stack:

        def begin(*, servers: Any = 2, start: bool = True, **settings: Any) -> FleetRun:
            arguments = [{}] * servers if isinstance(servers, int) else servers
            fakes = [stack.enter_context(FakeSGLang(**{"shapes": SMALL, **args})) for args in arguments]
            begun = FleetRun(AdapterSync(settings_for(fakes, tmp_path / "sync", **settings)), fakes)
            stack.callback(begun.sync.close)
            if start:
                begun.start()
                for fake in fakes:
                    fake.requests.clear()
            return begun

        yield begin


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers are probed once, and then the time to wait for them counts as over."""

    async def look(base_url: str, *, deadline: Deadline, **options: Any) -> None:
        reason = await reason_to_be_down(base_url, timeouts=TIMEOUTS, **options)
        if reason is not None:
            raise deadline.error() from reason

    monkeypatch.setattr(trl_lora_sync.servers.handle, "wait_until_up", look)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def cut_off() -> ServerUnreachableError:
    """As of a request that a gateway has ended after a limit of time."""
    error = ServerUnreachableError("The connection broke.")
    error.waited_s = 0.05
    return error


# A whole run


@pytest.mark.parametrize("transport", ["disk", "tensors"])
def test_every_version_is_on_every_server_and_nothing_is_left(run: StartRun, tmp_path: Path, transport: str) -> None:
    training = run(servers=3, transport=transport)
    for number in range(1, 5):
        report = training.publish()
        assert report.servers == 3
        assert report.server_load_s.keys() == {0, 1, 2}
        assert all(f"v{number}" in versions for versions in training.adapters())
        assert training.is_policy_of(training.generate())
    training.wait_for_unloads()
    assert training.adapters() == [["v3", "v4"]] * 3
    training.sync.close()
    assert training.adapters() == [[]] * 3
    assert not (tmp_path / "sync").exists()


def test_the_line_at_the_start_names_all_servers(run: StartRun) -> None:
    training = run(start=False)
    line = training.start()
    assert all(f"sglang 0.5.23 at {fake.base_url}" in line for fake in training.fakes)


def test_a_group_is_sampled_by_one_server(run: StartRun) -> None:
    training = run()
    training.publish()
    for fake in training.fakes:
        fake.requests.clear()
    training.generate()
    prompts = [
        [tuple(ids) for body in fake.bodies("/generate") for ids in body["input_ids"]] for fake in training.fakes
    ]
    assert sorted(prompts[0] + prompts[1]) == sorted(tuple(group.prompt) for group in GROUPS for _ in range(2))
    assert prompts[0]
    assert prompts[1]
    assert not set(prompts[0]) & set(prompts[1])


def test_a_server_that_is_wrong_from_the_start_is_named(run: StartRun) -> None:
    training = run(start=False, servers=[{}, {"enable_lora": False}])
    with pytest.raises(ServerSetupError, match=f"{training.fakes[1].base_url} was started without LoRA"):
        training.start()


def test_a_server_with_another_base_model_is_named_before_anything_is_loaded(run: StartRun) -> None:
    training = run(start=False, servers=[{}, {"seed": 1}])
    with pytest.raises(ServerSetupError, match=f"{training.fakes[1].base_url} serves .* other log-probabilities"):
        training.start()
    assert not any(fake.bodies("/load_lora_adapter") for fake in training.fakes)


def test_a_server_here_reads_the_folder_and_one_elsewhere_gets_tensors(run: StartRun) -> None:
    training = run(are_local=[True, False])
    training.publish()
    here, elsewhere = training.fakes
    assert [len(here.bodies(path)) for path in ("/load_lora_adapter", "/load_lora_adapter_from_tensors")] == [1, 0]
    assert [len(elsewhere.bodies(path)) for path in ("/load_lora_adapter", "/load_lora_adapter_from_tensors")] == [0, 1]
    assert training.is_policy_of(training.generate())


# What the trainer compares itself


@pytest.fixture
def compares(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """By URL, whether a server claims that it compares what it has loaded with what the trainer sent."""
    claims: dict[str, bool] = {}
    connect = trl_lora_sync.servers.handle.connect_engine

    async def claiming(base_url: str, **options: Any) -> Engine:
        engine = await connect(base_url, **options)
        known = replace(engine.capabilities, checks_payload=claims.get(base_url, False))
        engine.__class__ = type("Claiming", (type(engine),), {"capabilities": known})
        return engine

    monkeypatch.setattr(trl_lora_sync.servers.handle, "connect_engine", claiming)
    return claims


def damage_after_the_load(training: FleetRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that only the trainer's own comparison can notice."""
    fleet = training.sync.fleet
    load = fleet.load

    async def loading(stored: StoredAdapter, deadline: Deadline) -> dict[int, float]:
        seconds = await load(stored, deadline)
        assert stored.path is not None
        file = stored.path / "adapter_model.safetensors"
        file.unlink()  # the fake has it mapped
        file.write_bytes(b"damaged")
        return seconds

    monkeypatch.setattr(fleet, "load", loading)


@pytest.mark.parametrize(
    ("first", "second", "verify", "is_refused"),
    [
        (True, True, "start", False),
        (True, False, "start", True),
        (False, True, "start", True),
        (False, False, "start", True),
        (True, False, "off", False),
    ],
)
def test_a_trainer_leaves_the_comparison_to_servers_only_if_all_of_them_compare(
    run: StartRun,
    monkeypatch: pytest.MonkeyPatch,
    compares: dict[str, bool],
    first: bool,
    second: bool,
    verify: str,
    is_refused: bool,
) -> None:
    training = run(start=False, verify=verify)
    compares |= {fake.base_url: claim for fake, claim in zip(training.fakes, (first, second), strict=True)}
    training.start()
    damage_after_the_load(training, monkeypatch)
    with pytest.raises(VerificationError, match="are not what the trainer wrote") if is_refused else nullcontext():
        training.publish()


def test_a_trainer_compares_again_once_a_server_came_back_that_does_not(
    run: StartRun, monkeypatch: pytest.MonkeyPatch, compares: dict[str, bool]
) -> None:
    training = run(start=False)
    compares |= {fake.base_url: True for fake in training.fakes}
    training.start()
    training.publish()
    compares[training.fakes[1].base_url] = False
    training.fakes[1].restart()
    training.generate()
    damage_after_the_load(training, monkeypatch)
    with pytest.raises(VerificationError, match="are not what the trainer wrote"):
        training.publish()


def test_a_trainer_compares_what_has_no_checksum(
    run: StartRun, monkeypatch: pytest.MonkeyPatch, compares: dict[str, bool]
) -> None:
    """Versions have one only if a server wanted it when the run began."""
    training = run()
    training.publish()
    compares |= {fake.base_url: True for fake in training.fakes}
    for fake in training.fakes:
        fake.restart()
    training.generate()
    training.publish()
    assert training.sync.fleet.capabilities.checks_payload
    assert training.sync.active is not None
    assert training.sync.active.note is None
    damage_after_the_load(training, monkeypatch)
    with pytest.raises(VerificationError, match="are not what the trainer wrote"):
        training.publish()


# All or nothing


def test_loads_run_at_the_same_time(run: StartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    training = run(servers=3)
    begun: list[str] = []
    together = asyncio.Event()
    for server in training.sync.fleet.servers:
        meet(server.engine, begun, together, monkeypatch)
    training.publish()
    assert len(begun) == 3


def meet(engine: Engine, begun: list[str], together: asyncio.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    load = engine.load

    async def meeting(*args: Any) -> dict[str, str]:
        begun.append(engine.base_url)
        if len(begun) == 3:
            together.set()
        await asyncio.wait_for(together.wait(), WAIT_S)  # passes only while all loads are under way
        return await load(*args)

    monkeypatch.setattr(engine, "load", meeting)


def test_a_server_that_a_generation_recovers_during_a_sync_gets_the_new_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its load had failed, and the sync succeeded without it, as the server was fine when the other loads ended."""
    with in_memory_engines(2, shapes=SMALL) as engines:
        begun = InMemoryRun(engines, tmp_path)
        lost, load = begun.sync.fleet.servers[1], engines[0].load

        async def load_late(adapter: StoredAdapter, deadline: Deadline) -> dict[str, str]:
            while lost.last_error is None:
                await asyncio.sleep(0)
                deadline.remaining_s()
            await lost.recover(None, deadline)  # as a generation does
            return await load(adapter, deadline)

        monkeypatch.setattr(engines[0], "load", load_late)
        engines[1].errors["load"] = [ServerUnreachableError("gone for a moment")]
        report = begun.sync.publish(small_adapter(2))
        assert report.server_load_s.keys() == {0, 1}
        assert all(report.adapter_name in run_on_loop(engine.loaded(soon())) for engine in engines)
        begun.sync.shutdown()


@pytest.mark.parametrize("on_server_loss", ["error", "drop"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_version_that_one_server_refuses_is_on_none(
    run: StartRun, tmp_path: Path, place: int, on_server_loss: str
) -> None:
    training = run(on_server_loss=on_server_loss)
    first = training.publish()
    files = sorted(path.name for path in tmp_path.glob("sync/*/*-v*"))
    training.fakes[place].canned["/load_lora_adapter"] = [REFUSAL]
    with pytest.raises(AdapterRejectedError, match=f"{training.fakes[place].base_url} refused.*out of memory"):
        training.publish()
    assert training.adapters() == [["v1"], ["v1"]]
    assert sorted(path.name for path in tmp_path.glob("sync/*/*-v*")) == files
    assert training.sync.active is not None
    assert training.sync.active.name == first.adapter_name
    assert training.is_policy_of(training.generate(), training.read[-2])
    training.publish()
    assert training.adapters() == [["v1", "v3"]] * 2


def test_a_refusal_ends_the_wait_for_a_server_that_is_away(run: StartRun) -> None:
    training = run(sync_timeout_s=60.0)
    training.publish()
    training.fakes[1].stop()
    training.fakes[0].canned["/load_lora_adapter"] = [REFUSAL]
    with pytest.raises(AdapterRejectedError):
        training.publish()


# Restarts


@pytest.mark.parametrize("transport", ["disk", "tensors"])
@pytest.mark.parametrize("servers", [1, 2])
def test_a_server_that_restarted_is_given_the_active_version_again(
    run: StartRun, servers: int, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    training = run(servers=servers, transport=transport)
    training.publish()
    training.fakes[-1].restart()
    assert training.is_policy_of(training.generate())
    # With others there, its prompts may be done before it is back.
    training.publish()
    assert all("v2" in versions for versions in training.adapters())
    assert training.is_policy_of(training.generate())
    assert any(f"{training.fakes[-1].base_url} had lost" in warning for warning in warnings_of(caplog))


def test_the_base_of_a_restarted_server_is_looked_at_before_it_gets_an_adapter(run: StartRun) -> None:
    training = run(servers=1)
    training.publish()
    training.fakes[0].restart()
    training.fakes[0].requests.clear()
    training.generate()
    scored = [
        place
        for place, request in enumerate(training.fakes[0].requests)
        if request.path == "/generate" and request.body.get("logprob_start_len") == 0
    ]
    loaded = [place for place, request in enumerate(training.fakes[0].requests) if request.path == "/load_lora_adapter"]
    assert len(scored) == len(loaded) == 1
    assert scored < loaded


@pytest.mark.parametrize("on_server_loss", ["error", "drop"])
def test_a_server_that_came_back_with_another_base_is_never_sampled_from(run: StartRun, on_server_loss: str) -> None:
    training = run(servers=1, on_server_loss=on_server_loss)
    training.publish()
    training.fakes[0].args = replace(training.fakes[0].args, seed=1)
    training.fakes[0].restart()
    with pytest.raises(ServerSetupError, match="which is not the base model of the trainer"):
        training.generate()
    with pytest.raises(ServerSetupError, match="which is not the base model of the trainer"):
        training.publish()


def test_a_restart_between_two_syncs_is_noticed_by_the_sync(run: StartRun) -> None:
    """Loading alone would succeed, on an unchecked base model."""
    training = run()
    training.publish()
    training.fakes[1].args = replace(training.fakes[1].args, seed=1)
    training.fakes[1].restart()
    with pytest.raises(ServerSetupError, match=f"{training.fakes[1].base_url} serves .* not the base model"):
        training.publish()
    assert training.sync.active is not None
    assert training.sync.active.version == 1
    assert training.adapters()[0] == ["v1"]


@pytest.mark.parametrize("servers", [1, 2])
def test_a_restart_between_two_trainings_is_noticed_by_the_first_sync_of_the_second(
    run: StartRun, servers: int
) -> None:
    """With no version loaded, nothing showed the restart, and completions came from another base model."""
    training = run(servers=servers)
    training.publish()
    training.sync.close()
    restart_with_another_base(training.fakes[-1])
    with pytest.raises(ServerSetupError, match=f"{training.fakes[-1].base_url} serves .* not the base model"):
        training.publish()
    assert training.sync.active is None
    assert training.adapters() == [[]] * servers
    training.fakes[-1].args = training.fakes[0].args if servers > 1 else replace(training.fakes[0].args, seed=0)
    training.fakes[-1].restart()
    assert training.publish().servers == servers
    assert training.is_policy_of(training.generate())


def end_training(sync: AdapterSync) -> None:
    sync.close()


def lose_versions(sync: AdapterSync) -> None:
    for server in sync.fleet.servers:
        server.lose(AdapterLostError("no longer known"), server.engine)


@pytest.mark.parametrize("before", [end_training, lose_versions])
@pytest.mark.usefixtures("no_patience")
def test_a_server_that_stays_away_is_named_also_if_it_holds_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: Callable[[AdapterSync], None]
) -> None:
    async def find_nothing(base_url: str, *, deadline: Deadline, **options: Any) -> None:
        await asyncio.sleep(0.05)
        # The attempts of the real one end before the deadline, and there may be no time for another.
        raise (
            deadline.error() if deadline.left_s() < 0.5 else ServerUnreachableError(f"No server answers at {base_url}.")
        )

    with in_memory_engines(shapes=SMALL) as engines:
        begun = InMemoryRun(engines, tmp_path, sync_timeout_s=1.0)
        before(begun.sync)
        monkeypatch.setattr(trl_lora_sync.servers.handle, "wait_until_up", find_nothing)
        with pytest.raises(ServerUnreachableError, match=engines[0].base_url):
            begun.sync.publish(small_adapter(2))
        begun.sync.shutdown()


@pytest.mark.parametrize("before", [end_training, lose_versions])
def test_servers_without_versions_have_time_to_load_after_the_wait_for_another(
    run: StartRun, before: Callable[[AdapterSync], None]
) -> None:
    training = run(on_server_loss="drop", sync_timeout_s=4.0)
    training.publish()
    before(training.sync)
    training.fakes[1].stop()
    assert training.publish().servers == 1
    assert training.is_policy_of(training.generate())


def test_a_new_version_reaches_a_restarted_server_although_the_files_of_the_one_before_are_gone(run: StartRun) -> None:
    """The sync that should have mended it failed, because the old version could not be given again."""
    training = run(servers=1)
    training.publish()
    training.fakes[0].restart()
    shutil.rmtree(training.sync.active.path)
    with pytest.raises(AdapterRejectedError):
        training.generate()
    training.publish()
    assert training.is_policy_of(training.generate())


def test_a_version_that_was_copied_from_the_gpu_is_no_other_when_its_files_are_gone(run: StartRun) -> None:
    """As with SGLang beside a vLLM server that compares versions: the open file was missed before the server was, by an
    error that no sync could recover from."""
    training = run(servers=1)
    training.publish()
    active = training.sync.active
    assert active is not None
    training.sync.ledger.active = replace(active, is_unfinished=True)
    training.fakes[0].restart()
    shutil.rmtree(active.path)
    with pytest.raises(AdapterRejectedError):
        training.generate()
    training.publish()
    assert training.is_policy_of(training.generate())


@pytest.mark.parametrize("is_over", [True, False])
def test_a_file_that_stays_incomplete_is_an_error_in_time(
    run: StartRun, monkeypatch: pytest.MonkeyPatch, is_over: bool
) -> None:
    """It took 20 s, whatever the deadline was, and the error was none of this package's."""
    training = run(servers=1)
    training.publish()
    active = training.sync.active
    assert active is not None
    server, path = training.sync.fleet.servers[0], active.path
    deadline = Deadline.after(0.1 if is_over else WAIT_S, "The adapter sync")
    if not is_over:
        monkeypatch.setattr(unfinished, "PATIENCE_S", 0.1)
    error: Any = DeadlineExceededError if is_over else AdapterExportError
    with (path / TENSORS_FILE).open("r+b") as file:
        assert unfinished.begin(file.fileno())
        started = time.monotonic()
        with pytest.raises(error, match=re.escape(str(path))):
            run_on_loop(server.load(replace(active, is_unfinished=True), deadline))
        assert time.monotonic() - started < 10


def test_a_single_server_is_waited_for(run: StartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    training = run(servers=1)
    training.publish()
    training.fakes[0].stop()
    on_first_wait(monkeypatch, training.fakes[0].restart)
    assert training.is_policy_of(training.generate())
    training.fakes[0].stop()
    on_first_wait(monkeypatch, training.fakes[0].restart)
    assert training.publish().servers == 1
    assert training.adapters() == [["v1", "v2"]]


def on_first_wait(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Do something when the run begins to wait for a server."""
    wait, acted = trl_lora_sync.servers.handle.wait_until_up, threading.Event()

    async def waiting(*args: Any, **kwargs: Any) -> None:
        if not acted.is_set():
            acted.set()
            act()
        await wait(*args, **kwargs)

    monkeypatch.setattr(trl_lora_sync.servers.handle, "wait_until_up", waiting)


def test_a_hiccup_is_no_restart(run: StartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    training = run(servers=1)
    training.publish()
    training.fakes[0].requests.clear()
    training.fakes[0].canned["/generate"] = [(503, "busy")] * 200
    on_first_wait(monkeypatch, training.fakes[0].canned.clear)
    assert training.is_policy_of(training.generate())
    assert not training.fakes[0].bodies("/load_lora_adapter")


def test_an_adapter_that_somebody_unloaded_is_loaded_again(run: StartRun) -> None:
    training = run(servers=1)
    report = training.publish()
    run_on_loop(training.sync.fleet.servers[0].engine.unload(report.adapter_name, soon()))
    assert training.is_policy_of(training.generate())


def test_a_name_that_was_never_active_is_not_waited_for(run: StartRun) -> None:
    training = run()
    training.publish()
    with pytest.raises(AdapterLostError):
        training.sync.generate("never-loaded", GROUPS, sampling(), soon())


def handle_of(fake: FakeSGLang, root: Path) -> ServerHandle:
    address = ServerAddress(base_url=fake.base_url, is_local=True)
    server = ServerHandle(address, settings_for([fake], root), VersionLedger(keep=2))
    run_on_loop(server.connect(soon()))
    return server


def test_a_connection_that_is_interrupted_counts_no_retry_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The retries of the connection before had been added up, while it stayed and counted them as well. The new one
    had no owner, and so was never closed."""
    monkeypatch.setitem(vars(TIMEOUTS), "retry_s", 10.0)  # a busy machine must not miss the second attempt
    with FakeSGLang(shapes=SMALL) as fake:
        server = handle_of(fake, tmp_path)
        fake.canned["/v1/models"] = [(503, "busy")]
        run_on_loop(server.engine.loaded(soon()))
        assert server.retries == 1
        closing = threading.Event()

        async def hang() -> None:
            closing.set()
            await asyncio.sleep(WAIT_S)

        before = server.engine
        monkeypatch.setattr(before, "close", hang)
        connecting = Task(server.connect(soon())).begin()
        assert closing.wait(WAIT_S)
        connecting.cancel()
        assert server.engine is not before
        assert server.retries == 1
        run_on_loop(server.disconnect())


def test_an_adapter_that_is_lost_again_and_again_is_an_error(tmp_path: Path) -> None:
    """Behind one URL of a proxy that spreads requests, each load reaches one server and most samples another."""
    with FakeSGLang(shapes=SMALL) as fake:
        server = handle_of(fake, tmp_path)
        for _ in range(3):
            server.lose(AdapterLostError("no longer known"), server.engine)
            assert server.state is ServerState.LOST
            run_on_loop(server.recover(None, soon()))
            assert server.state is ServerState.READY
        with pytest.raises(ServerSetupError, match=r"Give each server its own URL.*no longer known"):
            server.lose(AdapterLostError("no longer known"), server.engine)


def test_a_server_that_loses_each_version_while_it_recovers_is_an_error(tmp_path: Path) -> None:
    """Such losses were not counted, and it was given the version again and again without a pause."""
    with in_memory_engines(shapes=SMALL) as [engine]:
        begun = InMemoryRun([engine], tmp_path)
        engine.restart()
        engine.errors["warm_up"] = [AdapterLostError("no longer known")] * 9
        with pytest.raises(ServerSetupError, match="Give each server its own URL"):
            begun.sample()
        begun.sync.shutdown()


def test_a_loss_during_a_recovery_has_the_process_that_answers_next_checked(tmp_path: Path) -> None:
    """A process that replaced the checked one was not checked, because it had been given the version."""
    with in_memory_engines(shapes=SMALL) as [engine]:
        begun = InMemoryRun([engine], tmp_path)
        server = begun.sync.fleet.servers[0]
        engine.restart()
        engine.errors["warm_up"] = [AdapterLostError("no longer known")]
        engine.calls.clear()
        server.lose(ServerUnreachableError("gone"), server.engine)
        run_on_loop(server.recover(None, soon()))
        assert [method for method, _ in engine.calls] == ["connect", "load", "warm_up"] * 2
        begun.sync.shutdown()


def test_a_gateway_that_ends_long_requests_ends_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They were sampled again until they were short enough, without a warning."""
    with in_memory_engines(shapes=SMALL) as [engine]:
        training = InMemoryRun([engine], tmp_path, timeouts=replace(TIMEOUTS, cut_off_s=0.01))
        engine.errors["generate"] = [cut_off()]
        assert training.samples_from(1)
        assert "What it had sampled is lost, and is sampled again" in caplog.text
        time.sleep(0.1)  # so that the next request is sent after this one was cut off
        engine.errors["generate"] = [cut_off()]
        with pytest.raises(GenerationError, match=f"Requests to {engine.base_url} are cut off after"):
            training.sample()
        training.sync.shutdown()


def test_requests_that_a_restart_breaks_off_are_no_gateways(tmp_path: Path) -> None:
    with in_memory_engines(shapes=SMALL) as [engine]:
        training = InMemoryRun([engine], tmp_path, timeouts=replace(TIMEOUTS, cut_off_s=0.01))
        for _ in range(3):
            engine.restart()
            engine.errors["generate"] = [cut_off()]
            assert training.samples_from(1)
            time.sleep(0.1)
        training.sync.shutdown()


def test_a_refusal_by_a_server_that_has_crashed_is_a_loss(tmp_path: Path) -> None:
    """vLLM answers a load with HTTP 500 after its engine has crashed, which counted as a refusal of the adapter."""
    with in_memory_engines(2, shapes=SMALL) as engines:
        training = InMemoryRun(engines, tmp_path)
        load = engines[1].load

        async def crash(stored: StoredAdapter, deadline: Deadline) -> dict[str, str]:
            engines[1].load = load  # type: ignore[method-assign]
            engines[1].is_up = False
            threading.Timer(0.3, engines[1].restart).start()
            refusal = AdapterRejectedError("HTTP 500: EngineCore encountered an issue.")
            refusal.may_be_crash = True
            raise refusal

        engines[1].load = crash  # type: ignore[method-assign]
        assert training.sync.publish(small_adapter(2)).servers == 2
        assert training.samples_from(2)
        training.sync.shutdown()


def test_an_adapter_that_a_server_crashes_on_is_loaded_twice_and_the_refusal_is_raised(tmp_path: Path) -> None:
    """It would crash a server that is restarted each time until the deadline, and the cause would be lost."""
    with in_memory_engines(2, shapes=SMALL) as engines:
        training = InMemoryRun(engines, tmp_path)
        loads = 0

        async def crash(stored: StoredAdapter, deadline: Deadline) -> dict[str, str]:
            nonlocal loads
            loads += stored.version == 2
            engines[1].is_up = False
            threading.Timer(0.2, engines[1].restart).start()
            refusal = AdapterRejectedError("CUDA error: device-side assert triggered")
            refusal.may_be_crash = True
            raise refusal

        real, engines[1].load = engines[1].load, crash  # type: ignore[method-assign]
        with pytest.raises(AdapterRejectedError, match="device-side assert"):
            training.sync.publish(small_adapter(2))
        assert loads == 2
        engines[1].load = real  # type: ignore[method-assign]
        training.sync.shutdown()


def test_an_excluded_server_holds_no_version_that_it_never_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was noted for every version of the rest of the run, with a folder for each."""
    monkeypatch.setattr("trl_lora_sync.servers.fleet.is_gone", lambda base_url: False)  # as of a server elsewhere
    with in_memory_engines(2, shapes=SMALL) as engines:
        training = InMemoryRun(engines, tmp_path, on_server_loss="drop", sync_timeout_s=1.0)
        engines[1].is_up = False
        for step in range(2, 8):
            training.sync.publish(small_adapter(step))
        run_on_loop(training.sync.wait_for_unloads(soon()))
        held = training.sync.ledger.held(engines[1].base_url)
        # It may have the second one: the load that showed its loss may have been carried out.
        assert [name.rpartition("-")[2] for name in held] == ["v1", "v2"]
        training.sync.shutdown()
    assert f"did not confirm the unload of {', '.join(held)}. The next run" in caplog.text


def test_a_generation_in_which_a_server_samples_nothing_is_no_success_of_it(tmp_path: Path) -> None:
    """It reset the count of losses, so a server that lost each version was given it for ever."""
    with in_memory_engines(2, shapes=SMALL) as engines:
        begun = InMemoryRun(engines, tmp_path)
        server, active = begun.sync.fleet.servers[1], begun.sync.active
        assert active is not None
        for _ in range(3):
            server.lose(AdapterLostError("no longer known"), server.engine)
            run_on_loop(server.recover(None, soon()))
        begun.sync.generate(active.name, [PromptGroup(prompt=PROMPT, count=1)], sampling(), soon())
        with pytest.raises(ServerSetupError, match="Give each server its own URL"):
            server.lose(AdapterLostError("no longer known"), server.engine)
        begun.sync.shutdown()


def test_an_error_of_a_process_that_was_replaced_says_nothing_of_the_new_one(tmp_path: Path) -> None:
    with FakeSGLang(shapes=SMALL) as fake:
        server = handle_of(fake, tmp_path)
        before = server.engine
        run_on_loop(server.connect(soon()))
        server.lose(ServerUnreachableError("gone"), before)
        assert server.last_error is None
        assert server.state is ServerState.READY


@pytest.mark.parametrize("changes", [{"engine": "vllm"}, {"supports_tensor_load": False}])
def test_a_connection_to_a_server_that_cannot_be_used_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """Each sync left one open to an excluded server in whose place another engine was running."""
    closed: list[InMemoryEngine] = []

    class OtherEngine(InMemoryEngine):
        @property
        def capabilities(self) -> Capabilities:
            return replace(super().capabilities, **changes)

        async def close(self) -> None:
            closed.append(self)

    with in_memory_engines(shapes=SMALL) as [engine]:
        begun, other = InMemoryRun([engine], tmp_path, transport="tensors"), OtherEngine(engine.args)

        async def connect(base_url: str, **options: Any) -> Engine:
            return other

        with monkeypatch.context() as patch:
            patch.setattr(trl_lora_sync.servers.handle, "connect_engine", connect)
            with pytest.raises(ServerSetupError):
                run_on_loop(begun.sync.fleet.servers[0].connect(soon()))
        assert closed == [other]
        assert begun.sync.fleet.servers[0].engine is engine
        begun.sync.shutdown()


def test_a_version_that_was_withdrawn_while_a_server_was_away_is_forgotten_when_it_is_back(run: StartRun) -> None:
    training = run()
    training.publish()
    second = training.fakes[1]
    second.canned["/unload_lora_adapter"] = [(503, "busy")] * 2
    training.fakes[0].canned["/load_lora_adapter"] = [REFUSAL]
    with pytest.raises(AdapterRejectedError):
        training.publish()
    second.canned.clear()
    training.publish()
    training.publish()
    training.wait_for_unloads()
    assert training.adapters() == [["v3", "v4"]] * 2


def test_an_unload_that_is_requested_in_the_same_moment_is_waited_for(run: StartRun) -> None:
    """From Python 3.12 on it was not, and a server was sent to sleep with the unload on its way."""
    training = run()
    training.publish()
    server, fake = training.sync.fleet.servers[0], training.fakes[0]
    [name] = fake.host_adapters

    async def unload_and_wait() -> list[str]:
        server.unload_later(name)
        await server.wait_for_unloads(soon())
        return [*fake.host_adapters]

    assert run_on_loop(unload_and_wait()) == []


# Servers that stay away


def test_prompts_of_a_server_that_dies_are_sampled_by_the_others(run: StartRun) -> None:
    training = run(servers=3)
    training.publish()
    training.fakes[1].stop()
    assert training.is_policy_of(training.generate())
    training.fakes[1].restart()
    training.publish()
    assert all("v2" in versions for versions in training.adapters())


@pytest.mark.usefixtures("no_patience")
def test_a_server_that_stays_away_is_an_error_and_nobody_has_the_new_version(run: StartRun) -> None:
    training = run()
    training.publish()
    training.fakes[1].stop()
    with pytest.raises(ServerUnreachableError, match=training.fakes[1].base_url):
        training.publish()
    assert training.adapters()[0] == ["v1"]
    assert training.sync.active is not None
    assert training.sync.active.version == 1
    training.fakes[1].restart()
    assert training.publish().servers == 2
    assert training.is_policy_of(training.generate())


@pytest.mark.parametrize(("is_generating", "servers", "end"), [
    (True, 1, "last checkpoint."), (False, 1, "last checkpoint."), (False, 2, "goes on without a lost server."),
])  # fmt: skip
def test_a_server_that_stays_away_is_an_error_in_time_which_says_how_to_go_on(
    run: StartRun, is_generating: bool, servers: int, end: str
) -> None:
    training = run(servers=servers)
    training.publish()
    training.sync.settings = training.sync.fleet.settings = replace(training.sync.settings, sync_timeout_s=1.0)
    training.fakes[0].stop()
    message = rf"No server answers at {training.fakes[0].base_url} .*serve sglang .*--lora-rank .*{re.escape(end)}$"
    with pytest.raises(ServerUnreachableError, match=message):
        training.generate() if is_generating else training.publish()


@pytest.mark.usefixtures("no_patience")
def test_a_dropped_server_is_reported_and_taken_back_by_a_later_sync(
    run: StartRun, caplog: pytest.LogCaptureFixture
) -> None:
    training = run(on_server_loss="drop")
    training.publish()
    training.fakes[1].stop()
    report = training.publish()
    assert report.servers == 1
    assert report.metrics()["lora_sync/servers"] == 1
    (warning,) = [text for text in warnings_of(caplog) if text.startswith("Going on without")]
    assert training.fakes[1].base_url in warning
    assert "with 1 of 2 servers" in warning
    assert training.publish().servers == 1
    assert training.is_policy_of(training.generate())

    training.fakes[1].restart()
    assert training.publish().servers == 2
    assert f"{training.fakes[1].base_url} is back." in warnings_of(caplog)
    assert training.is_policy_of(training.generate())
    training.wait_for_unloads()
    training.publish()
    assert "v5" in training.adapters()[1]
    training.sync.close()
    assert training.adapters() == [[], []]


def test_a_server_that_is_away_is_dropped_early_enough_for_the_others_to_complete_the_sync(run: StartRun) -> None:
    training = run(on_server_loss="drop", sync_timeout_s=2.0)
    training.publish()
    training.fakes[1].stop()
    assert training.publish().servers == 1
    assert training.is_policy_of(training.generate())


@pytest.mark.usefixtures("no_patience")
def test_a_server_that_ends_between_a_load_and_its_first_token_is_dropped(run: StartRun) -> None:
    """The loss counted as a misfit of the adapter, and ended the run."""
    training = run(on_server_loss="drop")
    training.publish()
    lost = training.fakes[1]
    lost.requests.clear()
    lost.token_delay_s = 5.0

    def end_at_the_first_token() -> None:
        lost.wait_until(lambda: sampled(lost) > 0)
        lost.stop()

    ending = threading.Thread(target=end_at_the_first_token)
    ending.start()
    assert training.publish().servers == 1
    ending.join()
    assert training.is_policy_of(training.generate())


# Single requests, as an asynchronous trainer sends them


def sample(training: FleetRun, stored: Any) -> Any:
    fleet = training.sync.fleet
    [answer] = run_on_loop(fleet.sample(stored, PromptGroup(prompt=PROMPT, count=1), sampling(), soon()))
    return answer


def sampled(fake: FakeSGLang) -> int:
    """How many sampling requests a server has received, without scores."""
    return sum(request.path == "/generate" and request.body.get("logprob_start_len") != 0 for request in fake.requests)


def test_single_requests_go_to_the_server_that_works_on_the_fewest(run: StartRun) -> None:
    training = run(servers=3)
    training.publish()
    fleet = training.sync.fleet
    stored = training.sync.ledger.lease()
    for fake in training.fakes:
        fake.requests.clear()
    with fleet.servers[0].sampling(), fleet.servers[2].sampling():
        sample(training, stored)
        with fleet.servers[1].sampling(), fleet.servers[1].sampling():
            sample(training, stored)
    assert [sampled(fake) for fake in training.fakes] == [1, 1, 0]
    assert [server.under_way for server in fleet.servers] == [0, 0, 0]


def test_a_single_request_is_repeated_elsewhere_if_its_server_is_lost(run: StartRun) -> None:
    training = run()
    training.publish()
    stored = training.sync.ledger.lease()
    training.publish()
    training.fakes[0].stop()
    for _ in range(3):
        answer = sample(training, stored)
        expected = training.fakes[1].expected_logprobs(training.read[1], PROMPT, answer.token_ids)
        assert [token[0] for token in answer.logprobs] == pytest.approx(expected, abs=1e-4)
    training.fakes[0].restart()
    assert training.publish().servers == 2
    assert "v1" in training.adapters()[0]  # leased, so it is given to the server that came back
    training.sync.ledger.release(stored)


def test_a_single_request_waits_for_the_only_server_and_its_version(run: StartRun) -> None:
    training = run(servers=1)
    training.publish()
    stored = training.sync.ledger.lease()
    training.publish()
    training.publish()
    training.fakes[0].restart()
    answer = sample(training, stored)
    expected = training.fakes[0].expected_logprobs(training.read[1], PROMPT, answer.token_ids)
    assert [token[0] for token in answer.logprobs] == pytest.approx(expected, abs=1e-4)


@pytest.mark.usefixtures("no_patience")
def test_a_dropped_server_with_another_base_stays_dropped_and_fails_nothing(run: StartRun) -> None:
    training = run(on_server_loss="drop")
    training.publish()
    training.fakes[1].stop()
    training.publish()
    training.fakes[1].args = replace(training.fakes[1].args, seed=1)
    training.fakes[1].restart()
    assert training.publish().servers == 1
    assert training.is_policy_of(training.generate())
    assert training.adapters()[1] == []


def restart_with_another_base(fake: FakeSGLang) -> None:
    fake.args = replace(fake.args, seed=1)
    fake.restart()


@pytest.mark.usefixtures("no_patience")
def test_a_dropped_server_is_checked_again_after_a_load_that_it_refused(run: StartRun) -> None:
    """The next sync took whatever process answered by then into service, and compared no base model."""
    training = run(on_server_loss="drop")
    training.publish()
    training.fakes[1].stop()
    training.publish()
    training.fakes[1].restart()
    training.fakes[1].canned["/load_lora_adapter"] = [REFUSAL] * 2  # of the active version, and of the new one
    assert training.publish().servers == 1
    restart_with_another_base(training.fakes[1])
    assert training.publish().servers == 1
    assert training.is_policy_of(training.generate())


@pytest.mark.usefixtures("no_patience")
def test_a_dropped_server_is_checked_although_it_has_the_active_version(
    run: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that replaced the checked one just before a load had the version that the others then activated."""
    training = run(on_server_loss="drop")
    training.publish()
    training.fakes[1].stop()
    training.publish()
    training.fakes[1].restart()
    dropped, load_new = training.sync.fleet.servers[1], ServerHandle.load_new

    async def load_after_a_restart(server: ServerHandle, stored: StoredAdapter, deadline: Deadline) -> None:
        if server is dropped:
            restart_with_another_base(training.fakes[1])
        await load_new(server, stored, deadline)

    with monkeypatch.context() as patch:
        patch.setattr(ServerHandle, "load_new", load_after_a_restart)
        assert training.publish().servers == 1
    assert training.adapters()[1] == ["v3"]
    assert training.publish().servers == 1


@pytest.mark.usefixtures("no_patience")
def test_a_server_that_is_dropped_while_it_recovers_is_checked_by_the_sync_that_takes_it_back(
    run: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recovery cleared the error of the server, for which the sync then checked nothing."""
    training = run(on_server_loss="drop")
    training.publish()
    server, gone = training.sync.fleet.servers[1], ServerUnreachableError("gone")
    server.lose(gone, server.engine)
    on_first_wait(monkeypatch, lambda: server.exclude(gone))
    run_on_loop(server.recover(None, soon()))
    assert server.state is ServerState.EXCLUDED
    training.fakes[1].stop()
    assert training.publish().servers == 1
    restart_with_another_base(training.fakes[1])
    assert training.publish().servers == 1


def test_a_fused_server_that_stays_busy_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of other clients there ended the run, as an adapter that does not fit."""
    busy = {"error": {"message": "3 other requests were still being answered after 9 s, and so on"}}
    with serving(lambda request: request.send(409, busy)) as listening, in_memory_engines(2, shapes=SMALL) as engines:
        begun = InMemoryRun(engines, tmp_path, on_server_loss="drop")
        fused = VLLMFusedEngine(listening.url, is_local=True)
        with monkeypatch.context() as patch:
            patch.setattr(engines[1], "load", fused.load)
            assert begun.sync.publish(small_adapter(2)).servers == 1
        assert begun.samples_from(2)
        assert begun.sync.publish(small_adapter(3)).servers == 2
        begun.sync.shutdown()
        run_on_loop(fused.close())


def test_a_server_that_never_answers_a_load_is_dropped_early_enough_to_complete_the_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was dropped at the deadline, when no time was left to compare the files, and a file system was blamed."""

    async def hang(adapter: StoredAdapter, deadline: Deadline) -> dict[str, str]:
        await asyncio.sleep(deadline.remaining_s())
        raise deadline.error("no answer")

    with in_memory_engines(2, shapes=SMALL) as engines:
        begun = InMemoryRun(engines, tmp_path, on_server_loss="drop", sync_timeout_s=3.0)
        with monkeypatch.context() as patch:
            patch.setattr(engines[1], "load", hang)
            assert begun.sync.publish(small_adapter(2)).servers == 1
        assert begun.samples_from(2)
        assert begun.sync.publish(small_adapter(3)).servers == 2
        # The last server is never dropped.
        with monkeypatch.context() as patch:
            for engine in engines:
                patch.setattr(engine, "load", hang)
            with pytest.raises(DeadlineExceededError, match="no answer"):
                begun.sync.publish(small_adapter(4))
        assert begun.samples_from(3)
        begun.sync.shutdown()


def test_the_last_server_is_never_dropped(run: StartRun) -> None:
    training = run(on_server_loss="drop", sync_timeout_s=6.0)  # half of it is waited for the servers
    training.publish()
    for fake in training.fakes:
        fake.stop()
    with pytest.raises(ServerUnreachableError, match=training.fakes[0].base_url):
        training.publish()
    assert len(training.sync.fleet.in_service) == 2
    for fake in training.fakes:
        fake.restart()
    assert training.publish().servers == 2


# Memory between steps


ASLEEP: dict[str, Any] = {"frees_kv_cache": True, "servers": [{"enable_memory_saver": True}] * 2}


def test_all_servers_sleep_and_wake(run: StartRun) -> None:
    training = run(**ASLEEP)
    training.publish()
    training.sync.sleep()
    assert [fake.scheduler.offloaded for fake in training.fakes] == [{"kv_cache"}] * 2
    assert training.sync.wake()
    assert [fake.scheduler.offloaded for fake in training.fakes] == [set()] * 2
    assert training.is_policy_of(training.generate())


@pytest.mark.parametrize("is_up", [True, False])
def test_a_server_that_went_away_asleep_makes_the_next_generation_publish_anew(
    run: StartRun, is_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore without a prior release would end the new server."""
    training = run(**ASLEEP)
    training.publish()
    training.sync.sleep()
    training.fakes[1].stop()
    if is_up:
        training.fakes[1].restart()
    else:
        on_first_wait(monkeypatch, training.fakes[1].restart)
    assert training.sync.wake() is False
    training.publish()
    assert training.sync.wake()
    assert training.is_policy_of(training.generate())
    assert all(fake.death is None for fake in training.fakes)


def test_a_server_that_was_away_while_it_slept_is_woken_before_anything_is_sampled_there(
    run: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It got a health check, for which SGLang samples a token; without its KV cache, that ends it."""
    training = run(**ASLEEP)
    training.publish()
    training.sync.sleep()
    training.fakes[1].stop()
    on_first_wait(monkeypatch, training.fakes[1].start)  # the same process, as after an outage of the network
    assert training.sync.wake() is False
    training.publish()
    assert training.sync.wake()
    assert training.is_policy_of(training.generate())
    assert all(fake.death is None for fake in training.fakes)


def test_a_server_that_was_lost_in_a_generation_is_not_put_to_sleep_before_it_is_back(run: StartRun) -> None:
    """Its new process lists no version, so it passed for awake, and the prompts that the checks score ended it."""
    training = run(**ASLEEP)
    training.publish()
    training.fakes[1].stop()
    assert training.is_policy_of(training.generate())  # by the other server
    training.fakes[1].restart()
    training.sync.sleep()
    training.publish()
    assert all(fake.death is None for fake in training.fakes)
    assert training.sync.wake()
    assert training.is_policy_of(training.generate())


@pytest.mark.usefixtures("no_patience")
def test_an_excluded_server_that_sleeps_is_woken_before_it_is_checked(run: StartRun) -> None:
    """Its health, and the prompts that the checks score, ended an SGLang server whose KV cache was released."""
    training = run(**ASLEEP, on_server_loss="drop")
    training.publish()
    training.sync.sleep()
    training.fakes[1].stop()
    assert training.sync.wake() is False
    assert training.publish().servers == 1
    training.fakes[1].start()  # the same process
    assert training.publish().servers == 2
    assert training.fakes[1].death is None
    assert training.is_policy_of(training.generate())


def test_a_version_that_was_lost_asleep_counts_as_lost_after_a_sync_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load of the sync had woken the server, and dropped the answer that the active version had gone."""
    with in_memory_engines(2, shapes=SMALL) as engines:
        begun = InMemoryRun(engines, tmp_path, frees_kv_cache=True)
        restore = engines[0].restore_kv_cache

        async def lose_adapters(deadline: Deadline) -> bool:
            await restore(deadline)
            return False

        monkeypatch.setattr(engines[0], "restore_kv_cache", lose_adapters)
        begun.sync.sleep()
        engines[1].errors["load"] = [AdapterRejectedError("no room")]
        with pytest.raises(AdapterRejectedError):
            begun.sync.publish(small_adapter(2))
        assert not engines[0].is_asleep
        assert begun.sync.wake() is False
        assert begun.sync.wake() is False  # also at the second call
        begun.sync.publish(small_adapter(3))
        assert begun.sync.wake()
        begun.sync.shutdown()


# Pausing


def test_each_server_is_paused_for_its_own_load(run: StartRun) -> None:
    training = run(pause="drain")
    training.publish()
    for fake in training.fakes:
        paths = [request.path for request in fake.requests if request.method == "POST"]
        assert paths[:3] == ["/pause_generation", "/load_lora_adapter", "/continue_generation"]


def test_prompts_of_one_token_each_come_back_in_order(run: StartRun) -> None:
    training = run(servers=3)
    training.publish()
    groups = [PromptGroup(prompt=[*PROMPT, row], count=1 + row % 3) for row in range(40)]
    answers = training.generate(groups)
    assert [len(answer) for answer in answers] == [group.count for group in groups]
    assert [answer[0].prompt_ids for answer in answers] == [group.prompt for group in groups]


# Versions that no test ran on


def test_servers_of_a_version_to_come_are_used_with_one_warning(
    run: StartRun, caplog: pytest.LogCaptureFixture
) -> None:
    training = run(servers=[{"version": "0.6.0"}] * 2)

    assert warnings_of(caplog) == [
        "SGLang 0.6.0 is newer than 0.5.23, the last that adapter sync was written for. It passed every check and is "
        "used. Tested with SGLang 0.5.15 and 0.5.17. Look closer with: "
        f"trl-lora-sync doctor {training.fakes[0].base_url}"
    ]


def test_servers_of_a_version_that_is_known_are_not_warned_of(run: StartRun, caplog: pytest.LogCaptureFixture) -> None:
    run(servers=[{"version": "0.5.23"}])

    assert warnings_of(caplog) == []
