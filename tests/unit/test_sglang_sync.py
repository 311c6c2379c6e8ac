"""Unit tier: whole syncs against a fake SGLang, from the first connection to the last unload."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contract.reference import FakeReference
from contract.served import PROMPT, SMALL, sampling, soon

from trl_lora_sync.adapter.canonical import CanonicalAdapter, Form
from trl_lora_sync.checks.verify import PROBE_PROMPT, TrainedBase
from trl_lora_sync.engines.base import TIMEOUTS, PromptGroup
from trl_lora_sync.errors import AdapterRejectedError, GenerationError, LoRASyncError, ServerSetupError
from trl_lora_sync.runtime import run as run_on_loop
from trl_lora_sync.servers.transports import DiskTransport, HTTPTransport, is_sent_content, transport_for
from trl_lora_sync.settings import ServerAddress
from trl_lora_sync.sync import AdapterSync
from trl_lora_sync.testing import FakeSGLang, random_adapter
from unit.fleets import settings_for

pytestmark = pytest.mark.outside


@dataclass
class Run:
    """A training run in small: a sync, the fake it talks to, and an adapter that changes with every step."""

    sync: AdapterSync
    fake: FakeSGLang
    base: TrainedBase
    step: int = 0
    dtype: torch.dtype | None = None  # of the adapter; None for that of the fake's own
    read: list[CanonicalAdapter] = field(default_factory=list)

    def start(self) -> str:
        return self.sync.start(self._read, self.base)

    def publish(self) -> str:
        self.step += 1
        return self.sync.publish(self._read(self.sync.form)).adapter_name

    def _read(self, form: Form) -> CanonicalAdapter:
        adapter = random_adapter(SMALL, self.step, rank=8)
        if self.dtype is not None:
            adapter = replace(adapter, flat=adapter.flat.to(self.dtype))
        self.read.append(adapter)
        return self.read[-1]

    def is_served(self, adapter_name: str, adapter: CanonicalAdapter) -> bool:
        group = PromptGroup(prompt=PROMPT, count=1)
        ((found,),) = self.sync.generate(adapter_name, [group], sampling(), soon())
        assert found.logprobs is not None
        expected = self.fake.expected_logprobs(adapter, PROMPT, found.token_ids)
        return [value[0] for value in found.logprobs] == pytest.approx(expected, abs=1e-4)

    def wait_for_unloads(self) -> None:
        run_on_loop(self.sync.wait_for_unloads(soon(30)))

    def wait_until_unloading(self, adapter_name: str) -> None:
        """Until the server has taken the unload up, which something there may then hold up."""
        self.fake.wait_until(lambda: adapter_name not in self.fake.registered)

    def paths(self) -> list[str]:
        """Control requests and samples since the last `clear`."""
        return [request.path for request in self.fake.requests if request.method == "POST"]


StartRun = Callable[..., Run]


def trained(fake: FakeSGLang) -> TrainedBase:
    logprobs = FakeReference(fake).logprobs(None, PROBE_PROMPT[:1], PROBE_PROMPT[1:])
    return TrainedBase(name=fake.args.model_path, vocab_size=fake.args.shapes.vocab, scores=(logprobs, 1.5))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[StartRun]:
    """Starts a fake and a run on it; server arguments go by `server`, all others are sync settings."""
    with ExitStack() as stack:

        def begin(*, server: dict[str, Any] | None = None, start: bool = True, **settings: Any) -> Run:
            fake = stack.enter_context(FakeSGLang(**{"shapes": SMALL, **(server or {})}))
            settings_of_run = settings_for([fake], tmp_path / "sync", **settings)
            begun = Run(AdapterSync(settings_of_run), fake, trained(fake))
            stack.callback(begun.sync.close)
            if start:
                begun.start()
                fake.requests.clear()
            return begun

        yield begin


# A whole run


@pytest.mark.parametrize("version", ["0.5.11", "0.5.15", "0.5.17", "0.5.22", "0.5.23"])
@pytest.mark.parametrize("transport", ["disk", "tensors"])
def test_a_run_keeps_the_server_flat_and_leaves_nothing(
    run: StartRun, tmp_path: Path, version: str, transport: str
) -> None:
    training = run(server={"version": version}, transport=transport)
    assert training.fake.host_adapters == []
    for _ in range(5):
        name = training.publish()
        assert training.is_served(name, training.read[-1])
        assert training.fake.peak_host_adapters <= 4
    training.wait_for_unloads()
    assert len(training.fake.host_adapters) == 2
    assert training.sync.active is not None
    assert training.sync.active.name == name == training.fake.host_adapters[-1]
    training.sync.close()
    assert training.fake.host_adapters == []
    assert not (tmp_path / "sync").exists()
    assert training.fake.death is None


@pytest.mark.parametrize("transport", ["disk", "tensors"])
def test_what_a_killed_run_left_on_the_server_is_unloaded_by_the_next_one(run: StartRun, transport: str) -> None:
    """A run that sends tensors writes no files, so nothing recorded it."""
    killed = run(transport=transport)
    left = killed.publish()
    lock = killed.sync.transport.store.lock
    os.close(lock)  # as the kernel does
    killed.sync.transport.store.lock = None
    next_run = Run(AdapterSync(killed.sync.settings), killed.fake, trained(killed.fake))
    next_run.start()
    assert left not in killed.fake.host_adapters
    name = next_run.publish()
    assert next_run.is_served(name, next_run.read[-1])
    next_run.sync.close()
    next_run.wait_for_unloads()
    assert killed.fake.host_adapters == []


@pytest.mark.parametrize("transport", ["disk", "tensors"])
def test_tensors_of_the_active_version_alone_are_kept_and_only_where_they_are_sent(
    run: StartRun, transport: str
) -> None:
    training = run(transport=transport)
    for _ in range(3):
        training.publish()
    assert all(stored.content is None for stored in training.sync.ledger.kept)
    assert training.sync.active is not None
    content, read = training.sync.active.content, training.read[-1]
    if transport == "disk":
        assert content is None
        return
    assert content is not None
    assert torch.equal(content.flat, read.flat)
    assert content.flat.data_ptr() != read.flat.data_ptr(), "the next read would overwrite it"


def test_each_load_is_followed_by_one_token_of_that_adapter(run: StartRun) -> None:
    training = run()
    name = training.publish()
    assert training.paths()[:2] == ["/load_lora_adapter", "/generate"]
    (body,) = training.fake.bodies("/generate")
    assert body["lora_path"] == name
    assert body["sampling_params"][0]["max_new_tokens"] == 1


def test_a_refused_version_leaves_the_previous_one_active(run: StartRun) -> None:
    training = run()
    first = training.publish()
    refusal = {"success": False, "error_message": "out of memory", "loaded_adapters": None}
    training.fake.canned["/load_lora_adapter"] = [(400, refusal)]
    with pytest.raises(AdapterRejectedError, match="out of memory"):
        training.publish()
    assert training.sync.active is not None
    assert training.sync.active.name == first
    assert training.is_served(first, training.read[-2])
    assert training.fake.host_adapters == [first]


@pytest.mark.parametrize(
    ("transport", "is_local", "server_root", "expected"),
    [
        ("auto", True, None, DiskTransport),
        ("auto", False, None, HTTPTransport),
        ("auto", False, "/mnt/sync", DiskTransport),
        ("disk", False, None, DiskTransport),
        ("tensors", True, None, HTTPTransport),
    ],
)
def test_the_transport_fits_what_server_and_trainer_share(
    run: StartRun, transport: str, is_local: bool, server_root: str | None, expected: type
) -> None:
    training = run(transport=transport)
    served = training.sync.fleet.capabilities
    address = ServerAddress(base_url=training.fake.base_url, is_local=is_local)
    settings = replace(training.sync.settings, server_root=server_root)
    assert type(transport_for(settings, [is_sent_content(settings, address, served)], is_on_gpu=False)) is expected


# The base model


@pytest.mark.parametrize("shapes", [SMALL, replace(SMALL, hidden=64), replace(SMALL, intermediate=64)])
def test_another_base_is_refused_before_anything_is_loaded(run: StartRun, shapes: Any) -> None:
    """SGLang cuts matrices that are too large to size silently, and crashes on matrices that are too small."""
    training = run(start=False, server={"shapes": shapes, "seed": 1})
    with FakeSGLang(shapes=SMALL) as ours:
        training.base = trained(ours)
        with pytest.raises(ServerSetupError, match="other log-probabilities"):
            training.start()
    assert not {"/load_lora_adapter", "/load_lora_adapter_from_tensors"} & set(training.paths())
    assert training.fake.death is None


def test_a_smaller_vocabulary_is_refused_without_harming_the_server(run: StartRun) -> None:
    training = run(start=False)
    training.base = replace(training.base, vocab_size=SMALL.vocab + 1)
    with pytest.raises(ServerSetupError, match="fewer than the trainer's 261 tokens"):
        training.start()
    assert training.fake.death is None
    assert "/load_lora_adapter" not in training.paths()


def test_a_server_of_another_dtype_is_told_the_flag_before_anything_is_loaded(run: StartRun) -> None:
    training = run(start=False, server={"dtype": "half"})
    training.dtype = torch.bfloat16
    words = r"was started with --dtype float16, .* in bfloat16.*with `\S+ serve .* -- --dtype bf"
    with pytest.raises(ServerSetupError, match=f"^{training.fake.base_url} {words}"):
        training.start()
    assert "/load_lora_adapter" not in training.paths()


@pytest.mark.parametrize(("served", "written"), [("bfloat16", torch.bfloat16), ("half", torch.float32), ("auto", None)])
def test_the_servers_dtype_and_float32_fit(run: StartRun, served: str, written: torch.dtype | None) -> None:
    training = run(start=False, server={"dtype": served})
    training.dtype = written
    training.start()


# Pausing


@pytest.mark.parametrize("transport", ["disk", "tensors"])
@pytest.mark.parametrize(("pause", "mode"), [("off", None), ("drain", "in_place"), ("abort", "abort")])
def test_a_load_happens_inside_the_pause(run: StartRun, pause: str, mode: str | None, transport: str) -> None:
    training = run(pause=pause, transport=transport)
    training.publish()
    load = "/load_lora_adapter" + ("_from_tensors" if transport == "tensors" else "")
    expected = [load] if mode is None else ["/pause_generation", load, "/continue_generation"]
    assert training.paths() == [*expected, "/generate"]
    assert [body["mode"] for body in training.fake.bodies("/pause_generation")] == ([mode] if mode else [])


@pytest.mark.parametrize("pause", ["drain", "abort"])
@pytest.mark.parametrize("answer", [(400, {"success": False, "error_message": "no"}), (500, "Internal Server Error")])
def test_generation_continues_after_a_load_that_failed(run: StartRun, pause: str, answer: tuple[int, Any]) -> None:
    training = run(pause=pause)
    first = training.publish()
    training.fake.canned["/load_lora_adapter"] = [answer]
    with pytest.raises(AdapterRejectedError):
        training.publish()
    assert training.is_served(first, training.read[-2])


@pytest.mark.parametrize("pause", ["drain", "abort"])
def test_generation_continues_after_a_pause_whose_answer_is_lost(run: StartRun, pause: str) -> None:
    training = run(pause=pause)
    first = training.publish()
    training.fake.requests.clear()
    training.fake.drop["/pause_generation"] = 1
    second = training.publish()
    around = [path for path in training.paths() if path != "/generate"]
    assert around == [
        "/pause_generation", "/continue_generation",
        "/pause_generation", "/load_lora_adapter", "/continue_generation",
    ]  # fmt: skip
    assert training.is_served(first, training.read[-2])
    assert training.is_served(second, training.read[-1])


@pytest.mark.parametrize("pause", ["drain", "abort"])
def test_nothing_is_unloaded_while_paused(run: StartRun, pause: str) -> None:
    training = run(pause=pause, keep=1)
    training.fake.delay_s["/unload_lora_adapter"] = 0.1
    for _ in range(4):
        training.publish()
    training.wait_for_unloads()
    inside = False
    for path in training.paths():
        inside = path == "/pause_generation" or (inside and path != "/continue_generation")
        assert not (inside and path == "/unload_lora_adapter")
    assert training.paths().count("/unload_lora_adapter") == 3
    assert len(training.fake.host_adapters) == 1


def test_a_pause_waits_for_the_unload_that_runs(run: StartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paused under it, the unload would wait for requests that do not go on, and the load for the unload."""
    training = run(pause="drain", keep=1)
    first = training.publish()
    training.fake.add_references(first, 1)
    training.publish()
    training.wait_until_unloading(first)
    assert first in training.fake.host_adapters
    engine, seen = training.sync.fleet.servers[0].engine, []
    pause = engine.pause

    async def watched(*args: Any) -> None:
        seen.extend(training.fake.host_adapters)
        await pause(*args)

    monkeypatch.setattr(engine, "pause", watched)
    end_of_unload = threading.Timer(0.3, training.fake.add_references, (first, -1))
    end_of_unload.start()
    training.publish()
    end_of_unload.join()
    assert seen
    assert first not in seen


# Memory between steps

ASLEEP: dict[str, Any] = {"frees_kv_cache": True, "server": {"enable_memory_saver": True}}


def test_only_the_kv_cache_is_released_and_loads_wait_for_it(run: StartRun) -> None:
    training = run(**ASLEEP)
    name = training.publish()
    for _ in range(2):
        training.sync.sleep()
    assert training.fake.scheduler.offloaded == {"kv_cache"}
    assert training.sync.wake()
    assert training.is_served(name, training.read[-1])
    training.sync.sleep()
    training.fake.requests.clear()
    name = training.publish()
    assert training.paths()[:2] == ["/resume_memory_occupation", "/load_lora_adapter"]
    assert training.is_served(name, training.read[-1])
    assert training.sync.wake()


def test_a_sample_without_waking_is_not_sent(run: StartRun) -> None:
    training = run(**ASLEEP)
    name = training.publish()
    training.sync.sleep()
    with pytest.raises(GenerationError, match="KV cache"):
        training.is_served(name, training.read[-1])
    training.sync.close()
    assert training.fake.death is None
    assert training.fake.scheduler.offloaded == set()


def test_an_interrupt_while_a_server_wakes_has_the_end_wake_it_no_second_time(
    run: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server carried out what it was sent although its client had left, and a second restore ended it."""
    training = run(**ASLEEP)
    training.publish()
    training.sync.sleep()
    answer, is_interrupted = training.fake.answer, threading.Event()

    def answer_late(request: Any, connection: Any) -> tuple[int, Any]:
        answered = answer(request, connection)
        if request.path == "/resume_memory_occupation":
            os.kill(os.getpid(), signal.SIGINT)
            is_interrupted.wait(30)
        return answered

    with monkeypatch.context() as patch:
        patch.setattr(training.fake, "answer", answer_late)
        with pytest.raises(KeyboardInterrupt):
            training.sync.wake()
        is_interrupted.set()
    training.sync.close()
    assert training.fake.death is None
    assert training.fake.scheduler.offloaded == set()
    assert training.paths().count("/resume_memory_occupation") == 1
    assert training.fake.host_adapters == []


@pytest.mark.parametrize("path", ["/release_memory_occupation", "/resume_memory_occupation"])
def test_a_lost_answer_to_a_release_or_a_restore_of_the_kv_cache_does_not_end_the_server(
    run: StartRun, path: str
) -> None:
    """It counted as a refusal: no restore was sent before the next prompt, or a second one, and SGLang ends at both."""
    training = run(**ASLEEP)
    name = training.publish()
    training.fake.drop[path] = 1
    for _ in range(2):
        training.sync.sleep()
        if not training.sync.wake():
            name = training.publish()
        assert training.is_served(name, training.read[-1])
    assert training.fake.drop[path] == 0
    assert training.fake.death is None


def test_a_server_with_other_clients_keeps_its_kv_cache(
    run: StartRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(vars(TIMEOUTS), "idle_s", 0.2)
    training = run(**ASLEEP)
    name = training.publish()
    training.fake.other_clients = 1
    training.sync.sleep()
    training.fake.other_clients = 0
    assert "keeps its KV cache" in caplog.text
    assert "/release_memory_occupation" not in training.paths()
    assert training.sync.wake()
    assert training.is_served(name, training.read[-1])


def test_a_server_without_the_memory_saver_is_refused_at_the_start(
    run: StartRun, caplog: pytest.LogCaptureFixture
) -> None:
    training = run(start=False, frees_kv_cache=True)
    with pytest.raises(ServerSetupError, match=r"memory saver.*`trl-lora-sync serve sglang .*--sleep"):
        training.start()
    training.sync.close()
    assert "could not be woken" not in caplog.text


# Unloads that do not end


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[None]]:
    """Unloads are soon given up in its block, which is for hanging unloads; others may be slow on a busy machine."""

    @contextmanager
    def block() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setitem(vars(TIMEOUTS), "unload_s", 1.0)
            patch.setitem(vars(TIMEOUTS), "unstuck_s", 0.1)
            yield

    return block


def publish_in_vain(training: Run, match: str) -> None:
    """Publish with little time."""
    settings = training.sync.settings
    training.sync.settings = replace(settings, sync_timeout_s=1.0)
    with pytest.raises(LoRASyncError, match=match):
        training.publish()
    training.sync.settings = settings


@pytest.mark.parametrize("version", ["0.5.15", "0.5.23"])
def test_a_stuck_unload_is_reported_and_holds_nobody_up(
    run: StartRun, caplog: pytest.LogCaptureFixture, version: str, hasty: Callable[[], AbstractContextManager[None]]
) -> None:
    def reports() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]

    training = run(server={"version": version})
    first = training.publish()
    training.publish()
    training.fake.add_references(first, -1)
    with hasty():
        third = training.publish()  # retires the first
        assert reports() == [], "the unload was waited for until it was given up"
        assert training.is_served(third, training.read[-1])
        training.wait_for_unloads()
        (report,) = reports()
        assert first in report
        assert "restart" in report
        started = time.monotonic()
        publish_in_vain(training, match=r"(?s)unload.*restart")
        assert time.monotonic() - started < 10
        assert training.is_served(third, training.read[-2])


@pytest.mark.parametrize("version", ["0.5.15", "0.5.23"])
def test_an_unload_that_ends_after_all_lets_the_run_go_on_and_catch_up(
    run: StartRun, version: str, hasty: Callable[[], AbstractContextManager[None]]
) -> None:
    training = run(server={"version": version})
    first = training.publish()
    training.publish()
    training.fake.add_references(first, 1)
    with hasty():
        training.publish()
        training.wait_until_unloading(first)
        training.wait_for_unloads()
        publish_in_vain(training, match="restart")
    training.fake.add_references(first, -1)
    for _ in range(2):
        name = training.publish()
    assert training.is_served(name, training.read[-1])
    training.wait_for_unloads()
    assert len(training.fake.host_adapters) == 2


def test_the_end_of_a_run_does_not_wait_for_a_stuck_unload(run: StartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """The unload itself is given up after 30 s."""
    training = run()
    name = training.publish()
    training.fake.add_references(name, -1)
    monkeypatch.setitem(vars(TIMEOUTS), "close_s", 0.3)
    started = time.monotonic()
    training.sync.close()
    assert time.monotonic() - started < 10
    training.wait_until_unloading(name)
    assert name in training.fake.host_adapters


def test_a_server_is_not_put_to_sleep_under_an_unload(
    run: StartRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    training = run(**ASLEEP, keep=1)
    first = training.publish()
    training.fake.add_references(first, 1)
    name = training.publish()
    with monkeypatch.context() as patch:
        patch.setitem(vars(TIMEOUTS), "close_s", 0.1)
        training.sync.sleep()
    assert "keeps its KV cache" in caplog.text
    assert "/release_memory_occupation" not in training.paths()
    training.fake.add_references(first, -1)
    training.wait_for_unloads()
    training.sync.sleep()
    assert training.fake.scheduler.offloaded == {"kv_cache"}
    assert training.sync.wake()
    assert training.is_served(name, training.read[-1])
