"""Unit tier: the routes of fused serving as vLLM runs them, with an engine that records its calls."""

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trl_lora_sync.engine_plugins import fused_middleware, reservations, vllm_fused
from trl_lora_sync.engine_plugins.reservations import ReservationClient
from trl_lora_sync.engine_plugins.vllm_fused import BASE, HEADER, ROUTE, WORKER, FusedMiddleware
from trl_lora_sync.engine_plugins.vllm_quick_load import RESERVE_ROUTE

WHOLE = {"q": {"shape": [8, 4], "pieces": [[0, 8, 0, 4]]}}


class Engine:
    """What vLLM's engine client does for the routes, in order; two workers that hold one version.

    Attributes:
        fails: what a worker answers to a method instead of doing it, by (worker, method).
        placed: what each worker has of a new adapter's modules.
    """

    def __init__(self) -> None:
        self.events: list[str] = []
        self._turn = asyncio.Lock()
        self.active: list[str | None] = [None, None]
        self.before: list[str | None] = [None, None]
        self.has_before = [False, False]
        self.prepared: list[str | None] = [None, None]
        self.fails: dict[tuple[int, str], str] = {}
        self.placed: list[dict[str, Any]] = [WHOLE, WHOLE]
        self.cache_is_free = True
        self.paused = False
        self.is_busy = False
        self.encoder_resets = 0
        self.reading_s = 0.0
        self.engine_core = SimpleNamespace(pause_scheduler_async=self._pause)
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(worker_extension_cls=WORKER, _api_process_count=1, data_parallel_size=1),
            lora_config=None,
        )

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[dict[str, Any]]:
        name = method.removeprefix("lora_sync_")
        self.events.append(" ".join([name, *(str(arg) for arg in args)]))
        async with self._turn:  # vLLM's core carries out one call after the other
            await asyncio.sleep(self.reading_s if name == "prepare" else 0)
            return [self._work(rank, name, *args) for rank in range(2)]

    def _work(self, rank: int, name: str, *args: Any) -> dict[str, Any]:
        if name == "prepare":
            self.has_before[rank], self.prepared[rank] = False, None
        if (rank, name) in self.fails:
            if name == "apply":
                self.before[rank], self.active[rank], self.has_before[rank] = self.active[rank], "half", True
            return {"ok": False, "status": 422, "error": self.fails[rank, name]}
        if name == "prepare":
            if args[1] == "/gone":
                return {"ok": False, "status": 404, "error": "No adapter found for /gone"}
            self.prepared[rank] = args[0]
            return {"ok": True, "read_s": 0.1, "place_s": 0.2, "placed": self.placed[rank]}
        if name == "apply" and self.prepared[rank] != args[0]:
            return {"ok": False, "status": 422, "error": f"{args[0]} was not prepared"}
        if name == "apply":
            self.prepared[rank] = None
            active = None if args[0] == BASE else args[0]
            self.before[rank], self.active[rank], self.has_before[rank] = self.active[rank], active, True
            return {"ok": True, "fuse_s": 0.1}
        if name == "undo" and self.has_before[rank]:
            self.active[rank], self.has_before[rank] = self.before[rank], False
        return {"ok": True, "active": self.active[rank]}

    async def _pause(self, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("wait", False)
        self.events.append("pause")
        self.paused = True
        while self.is_busy:
            await asyncio.sleep(0)

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        self.events.append("pause by name")
        await self._pause(mode, clear_cache)

    async def resume_generation(self) -> None:
        self.events.append("resume")
        self.paused = False

    async def is_paused(self) -> bool:
        await asyncio.sleep(0)  # in vLLM this is a call to the engine's process
        return self.paused

    async def reset_prefix_cache(self, reset_connector: bool) -> bool:
        assert self.paused
        self.events.append("reset outside too" if reset_connector else "reset")
        return self.cache_is_free

    async def reset_encoder_cache(self) -> None:
        assert self.paused
        assert not self.is_busy  # vLLM clears it under what runs
        self.encoder_resets += 1


@dataclass
class Server:
    """The middleware in front of an application whose requests go on until they are let go."""

    engine: Engine = field(default_factory=Engine)
    key: str | None = None
    sampling: list[str] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.done.set()
        self.middleware = FusedMiddleware(self._app)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await send({"type": "lifespan.startup.complete"})
            return
        if scope["path"] in ("/pause", "/resume"):
            self.engine.paused = scope["path"] == "/pause"
            while self.engine.paused and self.engine.is_busy:
                await asyncio.sleep(0)
        self.sampling.append(str(self.engine.active[0] or BASE))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x", b"y")]})
        await send({"type": "http.response.body", "body": b"{", "more_body": True})
        await self.done.wait()
        assert str(self.engine.active[0] or BASE) == self.sampling[-1] or not self.done.is_set()
        await send({"type": "http.response.body", "body": b"}"})

    async def ask(
        self, method: str, path: str, body: Any = None, headers: list[tuple[str, str]] | None = None, query: str = ""
    ) -> tuple[int, Any, str | None]:
        """Status, JSON and the version that the answer names."""
        answer: list[Any] = []
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        messages = iter([{"type": "http.request", "body": content}])

        async def receive() -> Any:
            return next(messages)

        async def send(message: Any) -> None:
            answer.append(message)

        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": query.encode(),
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers or []],
            "app": self.app,
        }
        await self.middleware(scope, receive, send)
        content = b"".join(message.get("body", b"") for message in answer[1:])
        named = dict(answer[0]["headers"]).get(HEADER.lower().encode())
        return answer[0]["status"], json.loads(content), named.decode() if named else None

    @property
    def app(self) -> Any:
        return SimpleNamespace(state=SimpleNamespace(args=SimpleNamespace(api_key=self.key), engine_client=self.engine))

    async def load(self, name: str, path: str = "/a", **body: Any) -> tuple[int, Any]:
        status, content, _ = await self.ask("PUT", f"{ROUTE}/{name}", {"path": path, **body})
        return status, content

    async def sample(self, name: str | None = None, path: str = "/v1/completions") -> tuple[int, Any, str | None]:
        return await self.ask("POST", path, {}, [(HEADER, name)] if name else None)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 20))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


def test_a_fuse_pauses_checks_and_clears_the_cache_before_it_touches_a_weight() -> None:
    async def test() -> None:
        server = Server()
        status, answer = await server.load("v1")
        assert (status, answer["current"], answer["path"]) == (200, "v1", "/a")
        assert server.engine.events == ["prepare v1 /a", "pause", "reset", "apply v1", "resume"]
        assert server.engine.active == ["v1", "v1"]

    run(test())


def test_an_engine_whose_core_takes_no_pause_is_paused_by_its_own_method() -> None:
    async def test() -> None:
        server = Server()
        server.engine.engine_core = SimpleNamespace()
        assert (await server.load("v1"))[0] == 200
        assert server.engine.events[1:3] == ["pause by name", "pause"]

    run(test())


def test_an_engine_that_stays_busy_is_left_as_it_was() -> None:
    async def test() -> None:
        server = Server()
        await server.load("v1")
        server.engine.is_busy = True
        status, answer = await server.load("v2", timeout_s=0.1)
        assert status == 409
        assert "still busy after" in answer["error"]["message"]
        assert not server.engine.paused
        assert server.engine.active == ["v1", "v1"]
        assert server.engine.events[-5:] == ["prepare v2 /a", "pause", "reset", "undo", "resume"]

    run(test())


def test_the_engine_has_all_of_its_time_to_pause_however_long_an_adapter_is_read() -> None:
    async def test() -> None:
        server = Server()
        server.engine.reading_s = 0.3
        assert (await server.load("v1", timeout_s=0.2))[0] == 200

    run(test())


def test_a_refused_adapter_does_not_wait_for_an_engine_that_stays_busy() -> None:
    async def test() -> None:
        server = Server()
        server.engine.is_busy = True
        server.engine.fails = {(1, "prepare"): "out of memory"}
        status, answer = await asyncio.wait_for(server.load("v1", timeout_s=3600), 20)
        assert (status, "out of memory" in answer["error"]["message"]) == (422, True)
        assert server.engine.events == ["prepare v1 /a", "pause", "reset", "undo", "resume"]
        assert not server.engine.paused

    run(test())


def test_a_cache_outside_the_engine_is_cleared_as_well() -> None:
    async def test() -> None:
        server = Server()
        server.engine.vllm_config.kv_transfer_config = object()
        assert (await server.load("v1"))[0] == 200
        assert "reset outside too" in server.engine.events

    run(test())


def test_the_same_load_again_does_nothing_and_another_path_is_refused() -> None:
    async def test() -> None:
        server = Server()
        await server.load("v1")
        count = len(server.engine.events)
        assert (await server.load("v1"))[0] == 200
        assert (await server.load("v1", "/b"))[0] == 409
        assert len(server.engine.events) == count

    run(test())


def test_requests_are_sampled_from_what_they_ask_for_and_the_answer_says_so() -> None:
    async def test() -> None:
        server = Server()
        await server.load("v1")
        await server.load("v2")
        for name in ("v1", "v2", BASE, "v2"):
            assert (await server.sample(name))[::2] == (200, name)
        assert (await server.sample(None))[::2] == (200, "v2")
        assert server.sampling == ["v1", "v2", BASE, "v2", "v2"]

    run(test())


def test_an_unknown_version_does_not_exist() -> None:
    async def test() -> None:
        server = Server()
        status, answer, _ = await server.sample("v7")
        assert status == 404
        assert "does not exist" in answer["error"]["message"]
        assert server.sampling == []

    run(test())


def test_a_version_whose_files_are_gone_does_not_exist() -> None:
    async def test() -> None:
        server = Server()
        await server.load("v1")
        await server.load("v2")
        server.middleware.adapters["v1"] = "/gone"
        status, answer, _ = await server.sample("v1")
        assert (status, "does not exist" in answer["error"]["message"]) == (404, True)
        assert (await server.sample("v2"))[::2] == (200, "v2")

    run(test())


def test_weights_change_when_the_last_request_is_done_and_not_before() -> None:
    async def test() -> None:
        server = Server()
        await server.load("v1")
        server.done.clear()
        running = asyncio.create_task(server.sample("v1"))
        await until(lambda: len(server.sampling) == 1)
        loading = asyncio.create_task(server.load("v2"))
        held = asyncio.create_task(server.sample("v1"))
        for _ in range(50):
            await asyncio.sleep(0)
        assert server.sampling == ["v1"]
        assert server.engine.active == ["v1", "v1"]
        server.done.set()
        assert (await running)[::2] == (200, "v1")
        assert (await loading)[0] == 200
        assert (await held)[::2] == (200, "v1")

    run(test())


def test_a_load_gives_up_on_requests_that_do_not_end() -> None:
    async def test() -> None:
        server = Server()
        server.done.clear()
        running = asyncio.create_task(server.sample())
        await until(lambda: len(server.sampling) == 1)
        status, answer = await server.load("v1", timeout_s=0.05)
        assert (status, "1 other requests" in answer["error"]["message"]) == (409, True)
        held = asyncio.create_task(server.sample())  # no load holds it back any more
        await until(lambda: len(server.sampling) == 2)
        server.done.set()
        assert (await running)[0] == (await held)[0] == 200

    run(test())


@pytest.mark.parametrize(
    ("left_s", "words", "changes"),
    [
        (0.05, "The engine was still busy", ["prepare v1 /a", "pause", "reset", "undo", "resume"]),
        (-1, "no time is left", []),
    ],
)
def test_waiting_for_requests_and_for_the_engine_has_one_deadline(
    left_s: float, words: str, changes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause got the whole time once more, so a load could take twice as long as its client waits."""
    clock, skipped_s = time.perf_counter, 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + skipped_s)

    async def test() -> None:
        nonlocal skipped_s
        server = Server()
        server.engine.is_busy = True
        server.done.clear()
        running = asyncio.create_task(server.sample())
        await until(lambda: len(server.sampling) == 1)
        loading = asyncio.create_task(server.load("v1", timeout_s=3600))
        await until(lambda: len(server.middleware.lock.waiting) == 1)
        skipped_s = 3600 - left_s
        server.done.set()
        assert (await running)[0] == 200
        await asyncio.wait([loading], timeout=10)
        server.engine.is_busy = False  # a change that has begun goes on to its end, whatever becomes of its request
        status, answer = await loading
        assert (status, words in answer["error"]["message"]) == (409, True)
        assert server.engine.events == changes

    run(test())


def test_requests_for_several_versions_are_all_answered_with_few_changes() -> None:
    async def test() -> None:
        server = Server()
        await server.load("v1")
        await server.load("v2")
        names = ["v1", "v2"] * 20
        answers = await asyncio.gather(*(server.sample(name) for name in names))
        assert [answer[::2] for answer in answers] == [(200, name) for name in names]
        assert sum(event.startswith("apply") for event in server.engine.events) <= 6

    run(test())


def test_requests_that_are_cancelled_wherever_they_are_hold_nobody_up() -> None:
    async def test() -> None:
        server = Server()
        await server.load("v1")
        await server.load("v2")
        for pauses in range(30):
            tasks = [asyncio.create_task(server.sample(name)) for name in ("v1", "v2", None, "v1", "v2")]
            for _ in range(pauses):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert (server.middleware.lock.running, server.middleware.lock.waiting) == (0, [])
            assert (await server.load("v1"))[0] == (await server.load("v2"))[0] == 200
            assert not server.engine.paused
            assert server.middleware.broken is None

    run(test())


def test_weights_are_put_back_while_the_engine_is_paused_which_goes_on_after_a_refused_adapter() -> None:
    async def test() -> None:
        server = Server()
        for method, events in (
            ("prepare", ["prepare v1 /a", "pause", "reset", "undo", "resume"]),
            ("apply", ["prepare v1 /a", "pause", "reset", "apply v1", "undo", "resume"]),
        ):
            server.engine.events.clear()
            server.engine.fails = {(1, method): "out of memory"}
            assert (await server.load("v1"))[0] == 422
            assert server.engine.events == events

    run(test())


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("method", ["prepare", "apply"])
def test_a_fuse_that_fails_on_one_worker_leaves_the_version_before(method: str, rank: int) -> None:
    async def test() -> None:
        server = Server()
        await server.load("v1")
        server.engine.fails[rank, method] = "out of memory"
        status, answer = await server.load("v2")
        assert status == 422
        assert f"out of memory (worker {rank})" in answer["error"]["message"]
        assert server.engine.active == ["v1", "v1"]
        assert not server.engine.paused
        assert (await server.sample("v1"))[::2] == (200, "v1")
        assert (await server.sample("v2"))[0] == 404

    run(test())


def test_a_load_of_which_no_worker_hears_leaves_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers undid the change before it, which had succeeded: the base was sampled from a version that was gone."""

    async def test() -> None:
        server = Server()
        await server.load("v1")
        await server.ask("DELETE", f"{ROUTE}/v1")
        call = server.engine.collective_rpc

        async def encode(method: str, args: tuple[Any, ...] = ()) -> list[dict[str, Any]]:
            "".join(map(str, args)).encode()  # as vLLM does before it sends anything
            return await call(method, args)

        monkeypatch.setattr(server.engine, "collective_rpc", encode)
        with pytest.raises(UnicodeEncodeError):
            await server.load("v2", "/\ud800")
        assert (await server.sample(BASE))[::2] == (200, BASE)
        assert server.sampling == [BASE]
        assert (server.engine.active, server.engine.paused) == ([None, None], False)

    run(test())


def test_a_fuse_that_cannot_be_undone_stops_the_server_until_one_succeeds() -> None:
    async def test() -> None:
        server = Server()
        await server.load("v1")
        server.engine.fails = {(1, "apply"): "out of memory", (1, "undo"): "still out of memory"}
        await server.load("v2")
        for name in ("v1", None):
            status, answer, _ = await server.sample(name)
            assert (status, "unknown state" in answer["error"]["message"]) == (500, True)
        server.engine.fails = {}
        assert (await server.load("v2"))[0] == 200
        assert (await server.sample("v2"))[0] == 200

    run(test())


def test_a_cache_in_use_is_a_request_under_way_and_refuses_the_fuse() -> None:
    async def test() -> None:
        server = Server()
        server.engine.cache_is_free = False
        status, _ = await server.load("v1")
        assert status == 409
        assert server.engine.active == [None, None]
        assert not any(event.startswith("apply") for event in server.engine.events)

    run(test())


def test_a_cache_that_a_request_may_have_filled_until_the_pause_was_complete_is_reset_once_more() -> None:
    """Reset before that, it would hold what the weights of the version before have computed."""

    async def test() -> None:
        server = Server()
        server.engine.is_busy = True  # with a request in the background that has no place in the cache yet
        loading = asyncio.create_task(server.load("v1"))
        await until(lambda: "reset" in server.engine.events)
        server.engine.is_busy = False
        assert (await loading)[0] == 200
        assert server.engine.events == ["prepare v1 /a", "pause", "reset", "reset", "apply v1", "resume"]
        assert server.engine.encoder_resets == 1

    run(test())


@pytest.mark.parametrize("sees_images", [True, False])
def test_the_cache_of_a_vision_tower_is_cleared_if_there_is_one(sees_images: bool) -> None:
    async def test() -> None:
        server = Server()
        server.engine.vllm_config.model_config = SimpleNamespace(is_multimodal_model=sees_images)
        assert (await server.load("v1"))[0] == 200
        assert server.engine.encoder_resets == int(sees_images)

    run(test())


def test_a_refused_change_back_to_the_base_leaves_the_newest_version() -> None:
    async def test() -> None:
        server = Server()
        await server.load("v1")
        await server.load("v2")
        server.engine.cache_is_free = False
        assert (await server.ask("DELETE", f"{ROUTE}/v2"))[0] == 409
        assert server.engine.active == ["v2", "v2"]

    run(test())


@pytest.mark.parametrize(
    ("placed", "status"),
    [
        ([{"q": {"shape": [8, 4], "pieces": [[0, 4, 0, 4]]}}, {"q": {"shape": [8, 4], "pieces": [[4, 8, 0, 4]]}}], 200),
        ([{"q": {"shape": [8, 4], "pieces": [[0, 8, 0, 2]]}}, {"q": {"shape": [8, 4], "pieces": [[0, 8, 2, 4]]}}], 200),
        ([WHOLE, {"q": {"shape": [8, 4], "pieces": []}}], 200),  # on another stage of the pipeline
        ([{"q": {"shape": [9, 4], "pieces": [[0, 4, 0, 4]]}}, {"q": {"shape": [9, 4], "pieces": [[4, 8, 0, 4]]}}], 422),
        ([{"q": {"shape": [8, 4], "pieces": []}}] * 2, 422),
    ],
)
def test_the_workers_must_have_all_of_a_weight_between_them(placed: list[dict[str, Any]], status: int) -> None:
    async def test() -> None:
        server = Server()
        server.engine.placed = placed
        assert (await server.load("v1"))[0] == status
        assert (server.engine.active == ["v1", "v1"]) == (status == 200)

    run(test())


def test_forgetting_the_version_in_the_weights_brings_the_base_back() -> None:
    async def test() -> None:
        server = Server()
        await server.load("v1")
        await server.load("v2")
        for name, current in (("v1", "v2"), ("v2", BASE), ("v2", BASE)):
            status, answer, _ = await server.ask("DELETE", f"{ROUTE}/{name}")
            assert (status, answer["current"]) == (200, current)
        assert server.engine.active == [None, None]
        assert (await server.ask("GET", ROUTE))[1]["adapters"] == {}

    run(test())


@pytest.mark.parametrize("is_load", [True, False], ids=["of a load", "of a request"])
def test_an_unload_waits_for_the_change_that_brings_its_version(is_load: bool) -> None:
    """It was confirmed while the version was on its way, which stayed in the weights for good."""

    async def test() -> None:
        server = Server()
        if not is_load:
            await server.load("v1")
            await server.load("v2")
        server.engine.is_busy = True
        changing: asyncio.Task[Any] = asyncio.create_task(server.load("v1") if is_load else server.sample("v1"))
        await until(lambda: server.engine.paused)
        unloading = asyncio.create_task(server.ask("DELETE", f"{ROUTE}/v1"))
        for _ in range(50):
            await asyncio.sleep(0)
        server.engine.is_busy = False
        assert (await changing)[0] == 200
        status, answer, _ = await unloading
        assert (status, answer["deleted"], answer["current"]) == (200, True, BASE)
        assert server.engine.active == [None, None]
        assert "v1" not in server.middleware.adapters

    run(test())


def test_a_name_whose_load_was_cancelled_at_its_end_can_be_given_to_another_adapter() -> None:
    """Its weights were there, so the other adapter was registered without being read."""

    async def test() -> None:
        server = Server()
        loading = asyncio.create_task(server.load("v1", "/a"))
        await until(lambda: "apply v1" in server.engine.events)
        loading.cancel()
        await asyncio.wait([loading])
        assert (loading.cancelled(), server.engine.active) == (True, ["v1", "v1"])
        assert (await server.load("v1", "/b"))[0] == 200
        assert "prepare v1 /b" in server.engine.events

    run(test())


class Trainer:
    """Has versions loaded past HTTP, as one on the server's host."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server, self.folder = server, folder
        loop = asyncio.get_running_loop()

        def on_loop(readable: Any, act: Callable[[], None]) -> Callable[[], None]:
            loop.add_reader(readable, act)
            return lambda: (loop.remove_reader(readable), readable.close())  # type: ignore[func-returns-value]

        self.client = ReservationClient(folder, on_loop)

    async def announce(self, name: str, path: str = "/a", *, begins: bool = True) -> Callable[[], Any]:
        """Returns what confirms that the version is written."""
        body = {"lora_name": name, "lora_path": path, "head": "digest", "folder": str(self.folder)}
        status, answer, _ = await self.server.ask("POST", RESERVE_ROUTE, body)
        assert status == 200
        number, server = answer["reservation"], answer["socket"]
        self.client.send_at_begin(name, number, server)
        if begins:
            self.client.begin(name)
        return lambda: self.client.confirm(number, server, "sum")


@pytest.mark.parametrize("begins", [True, False])
def test_a_version_is_loaded_past_http_once_its_trainer_has_written_it(begins: bool, tmp_path: Path) -> None:
    async def test() -> None:
        server = Server()
        await server.load("v1", "/1")
        server.engine.events.clear()
        trainer = Trainer(server, tmp_path)
        confirm = await trainer.announce("v2", "/2", begins=begins)
        if begins:
            await until(lambda: "reset" in server.engine.events)
        assert server.engine.events == (["pause", "reset"] if begins else [])
        sampling = asyncio.create_task(server.sample("v2")) if begins else None
        assert json.loads(await confirm()) == {"v1": "/1", "v2": "/2"}
        *before, applied, last = server.engine.events
        assert (sorted(before), applied, last) == (["pause", "prepare v2 /2", "reset"], "apply v2", "resume")
        assert server.engine.active == ["v2", "v2"]
        # A request that came before the version was registered.
        assert sampling is None or (await sampling)[0] == 404
        assert (await server.sample("v2"))[2] == "v2"
        assert server.engine.events.count("apply v2") == 1
        # A request whose first answer came too late for the trainer.
        assert (await server.load("v2", "/2"))[0] == 200
        assert server.engine.events.count("apply v2") == 1

    run(test())


def test_a_version_that_is_announced_and_never_written_holds_requests_back_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_middleware, "PATIENCE_S", 0.05)

    async def test() -> None:
        server = Server()
        await server.load("v1", "/1")
        trainer = Trainer(server, tmp_path)
        await trainer.announce("v2", "/2")
        await until(lambda: server.engine.paused)
        assert (await server.sample("v1"))[2] == "v1"
        assert not server.engine.paused
        assert [one for one in server.engine.events if "v2" in one or "undo" in one] == []
        assert server.middleware.adapters == {"v1": "/1"}
        confirm = await trainer.announce("v3", "/3")
        assert "v3" in json.loads(await confirm())

    run(test())


def test_a_version_that_cannot_be_loaded_past_http_is_left_to_a_request(tmp_path: Path) -> None:
    async def test() -> None:
        server = Server()
        trainer = Trainer(server, tmp_path)
        server.engine.fails[1, "prepare"] = "not finite"
        confirm = await trainer.announce("v1", "/1")
        assert await confirm() == ""
        # The other worker had it in its weights already.
        assert "apply v1" in server.engine.events
        assert server.engine.active == [None, None]
        assert (await server.load("v1", "/1"))[0] == 422
        assert server.engine.active == [None, None]
        server.engine.fails.clear()
        # Requests of other clients, which may take longer than the trainer waits here.
        server.done.clear()
        sampling = asyncio.create_task(server.sample())
        await until(lambda: server.middleware.lock.running == 1)
        confirm = await trainer.announce("v2", "/2")
        assert await confirm() == ""
        loading = asyncio.create_task(server.load("v2", "/2"))
        server.done.set()
        assert (await loading)[0] == (await sampling)[0] == 200
        assert server.engine.active == ["v2", "v2"]

    run(test())


def test_a_load_past_http_that_takes_too_long_is_found_by_the_request_that_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reservations, "PATIENCE_S", 0.05)

    async def test() -> None:
        server = Server()
        server.engine.reading_s = 0.2
        confirm = await Trainer(server, tmp_path).announce("v1", "/1")
        assert await confirm() is None
        # Of the withdrawal, too, which must not find nothing to unload.
        loading, unloading = (
            asyncio.create_task(server.load("v1", "/1")),
            asyncio.create_task(server.ask("DELETE", f"{ROUTE}/v1")),
        )
        assert (await loading)[0] == 200
        assert server.engine.events.count("apply v1") == 1
        assert (await unloading)[1]["current"] == BASE

    run(test())


@pytest.mark.parametrize(
    ("change", "status"),
    [({"lora_name": "../v1"}, 400), ({"lora_path": "v1"}, 400), ({"folder": "/gone"}, 409)],
)
def test_a_version_that_makes_no_sense_is_not_awaited(change: dict[str, str], status: int, tmp_path: Path) -> None:
    async def test() -> None:
        body = {"lora_name": "v1", "lora_path": "/1", "head": "digest", "folder": str(tmp_path)} | change
        assert (await Server().ask("POST", RESERVE_ROUTE, body))[0] == status
        assert (await Server(key="secret").ask("POST", RESERVE_ROUTE, body))[0] == 401

    run(test())


def test_a_client_that_stops_in_the_middle_of_its_body_holds_no_change_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that is gone closes no connection, so its request counted as under way for ever."""
    monkeypatch.setattr(fused_middleware, "BODY_TIMEOUT_S", 0.1)

    async def test() -> None:
        server = Server()
        parts = iter([{"type": "http.request", "body": b"{", "more_body": True}])

        async def receive() -> Any:
            for part in parts:
                return part
            return await asyncio.Future()

        read: list[Any] = []

        async def read_all(scope: Any, receive: Any, send: Any) -> None:
            while not read or read[-1].get("more_body"):
                read.append(await receive())

        server.middleware.app = read_all
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "app": server.app}
        sampling = asyncio.create_task(server.middleware(scope, receive, read_all))
        await until(lambda: len(read) == 1)
        assert (await server.load("v1", timeout_s=10))[0] == 200
        await sampling
        assert [one["type"] for one in read] == ["http.request", "http.disconnect"]

    run(test())


def test_a_client_whose_body_is_complete_may_wait_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_middleware, "BODY_TIMEOUT_S", 0.05)

    async def test() -> None:
        server, has_left = Server(), asyncio.Event()
        parts = iter(
            [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.request", "body": b"}"}]
        )

        async def receive() -> Any:
            for part in parts:
                return part
            await has_left.wait()
            return {"type": "http.disconnect"}

        async def watch(scope: Any, receive: Any, send: Any) -> None:
            assert b"".join([(await receive())["body"] for _ in range(2)]) == b"{}"
            watching = asyncio.create_task(receive())
            await asyncio.sleep(0.2)
            assert not watching.done()
            has_left.set()
            assert (await watching)["type"] == "http.disconnect"

        server.middleware.app = watch
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "app": server.app}
        await server.middleware(scope, receive, watch)
        assert has_left.is_set()

    run(test())


@pytest.mark.parametrize("is_during", [False, True])
def test_a_pause_of_a_client_is_not_ended(is_during: bool) -> None:
    """A pause during a change was answered at once, and ended with the change."""

    async def test() -> None:
        server = Server()
        if is_during:
            server.engine.reading_s = 0.05
            loading = asyncio.create_task(server.load("v1"))
            await until(lambda: server.engine.paused)
            pausing = asyncio.create_task(server.ask("POST", "/pause"))
        else:
            pausing = asyncio.create_task(server.ask("POST", "/pause"))
            loading = asyncio.create_task(server.load("v1"))
        assert (await loading)[0] == (await pausing)[0] == 200
        assert server.engine.paused
        assert (await server.ask("POST", "/resume"))[0] == 200
        assert not server.engine.paused

    run(test())


@pytest.mark.parametrize("path", ["/resume", "/release_kv_cache_memory"])
def test_a_client_neither_ends_nor_uses_the_pause_of_a_change(path: str) -> None:
    """Requests in the background ran while weights changed, and others without a KV cache after the change."""

    async def test() -> None:
        server = Server()
        server.engine.reading_s = 0.05
        loading = asyncio.create_task(server.load("v1"))
        await until(lambda: server.engine.paused)
        asking = asyncio.create_task(server.ask("POST", path))
        assert (await loading)[0] == (await asking)[0] == 200
        assert server.sampling == ["v1"]  # the weights as the request arrived at vLLM

    run(test())


def test_a_pause_that_waits_for_requests_can_be_ended_and_holds_a_change_back_no_longer_than_it_waits() -> None:
    async def test() -> None:
        server = Server()
        server.engine.is_busy = True
        pausing = asyncio.create_task(server.ask("POST", "/pause"))
        await until(lambda: server.engine.paused)
        status, answer = await server.load("v1", timeout_s=0.05)
        assert (status, "still busy" in answer["error"]["message"]) == (409, True)
        loading = asyncio.create_task(server.load("v1", timeout_s=20))
        assert (await server.ask("POST", "/resume"))[0] == (await pausing)[0] == 200
        server.engine.is_busy = False
        assert (await loading)[0] == 200
        assert not server.engine.paused

    run(test())


def test_a_sleeping_server_is_not_written_to() -> None:
    async def test() -> None:
        server = Server()
        for query in ("level=1", ""):
            await server.ask("POST", "/sleep", query=query)
            status, answer = await server.load("v1")
            assert (status, "Wake it up" in answer["error"]["message"]) == (409, True)
            await server.ask("POST", "/wake_up", query="tags=kv_cache")
            assert (await server.load("v1"))[0] == 409
            assert server.engine.active == [None, None]
            await server.ask("POST", "/wake_up")
            assert (await server.load("v1"))[0] == 200
            await server.ask("DELETE", f"{ROUTE}/v1")
        await server.ask("POST", "/sleep", query="level=0")  # which is a pause
        assert (await server.load("v1"))[0] == 200

    run(test())


def test_a_pause_does_not_wake_a_sleeping_server_up() -> None:
    """A version was then written to weights that vLLM had unmapped."""

    async def test() -> None:
        server = Server()
        await server.ask("POST", "/sleep", query="level=1")
        await server.ask("POST", "/sleep", query="level=0")
        assert (await server.load("v1"))[0] == 409
        assert server.engine.active == [None, None]
        await server.ask("POST", "/wake_up")
        assert (await server.load("v1"))[0] == 200

    run(test())


def test_weights_of_a_sleeping_server_are_not_compared() -> None:
    """vLLM unmaps the weights at level 1, so that reading them was an illegal memory access."""

    async def test() -> None:
        server = Server()
        await server.ask("POST", "/sleep")
        status, answer, _ = await server.ask("GET", ROUTE, query="compare=base")
        assert (status, "Wake it up" in answer["error"]["message"]) == (409, True)
        assert "equals_base" not in server.engine.events
        assert (await server.ask("GET", ROUTE))[0] == 200  # which reads no weight
        await server.ask("POST", "/wake_up")
        assert (await server.ask("GET", ROUTE, query="compare=base"))[0] == 200

    run(test())


def test_server_goes_to_sleep_after_a_comparison_and_not_during_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM unmapped the weights while the workers read them."""

    async def test() -> None:
        server, may_end = Server(), asyncio.Event()
        call = server.engine.collective_rpc

        async def answer_late(method: str, args: tuple[Any, ...] = ()) -> list[dict[str, Any]]:
            answers = await call(method, args)
            if method == "lora_sync_equals_base":
                await may_end.wait()
            return answers

        monkeypatch.setattr(server.engine, "collective_rpc", answer_late)
        comparing = asyncio.create_task(server.ask("GET", ROUTE, query="compare=base"))
        await until(lambda: "equals_base" in server.engine.events)
        sleeping = asyncio.create_task(server.ask("POST", "/sleep"))
        for _ in range(50):
            await asyncio.sleep(0)
        assert server.sampling == []
        may_end.set()
        assert (await comparing)[0] == (await sleeping)[0] == 200

    run(test())


def test_a_server_that_was_woken_for_no_part_still_sleeps() -> None:
    """vLLM reads an empty tag as the name of a part, and does not bring the weights back."""

    async def test() -> None:
        server = Server()
        await server.ask("POST", "/sleep")
        await server.ask("POST", "/wake_up", query="tags=")
        assert (await server.load("v1"))[0] == 409
        assert server.engine.active == [None, None]

    run(test())


def test_a_refusal_that_quotes_what_utf_8_cannot_hold_arrives(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="vllm.trl_lora_sync")  # pytest-xdist cannot send it in a captured log

    async def test() -> None:
        server = Server()
        await server.load("v1", "/\ud800")
        status, answer = await server.load("v1", "/b")
        assert (status, "/\ud800" in answer["error"]["message"]) == (409, True)

    run(test())


def test_workers_that_hold_something_else_stop_the_server() -> None:
    async def test() -> None:
        server = Server()
        await server.load("v1")
        server.engine.active[1] = None
        assert "instead of 'v1'" in (await server.ask("GET", ROUTE))[1]["broken"]
        assert (await server.sample("v1"))[0] == 500

    run(test())


@pytest.mark.parametrize(
    "path", ["/update_weights", "/start_weight_update", "/v1/load_lora_adapter", "/weight_checker", "/sleep"]
)
def test_what_would_change_the_base_is_refused(path: str) -> None:
    async def test() -> None:
        server = Server()
        assert (await server.ask("POST", path, query="level=2"))[0] == 409
        assert server.sampling == []

    run(test())


@pytest.mark.parametrize(
    "path",
    [
        *("/pause", "/resume", "/wake_up", "/tokenize", "/inference/v1/abort_requests", "/v1/lora_sync/adapters/x"),
        *("/ping", "/v1/responses/resp_1/cancel"),
    ],
)
def test_routes_that_sample_nothing_are_never_held_back(path: str) -> None:
    async def test() -> None:
        server = Server()
        async with server.middleware.lock.changing(1.0):
            assert (await server.ask("POST", path))[0] == 200

    run(test())


def test_only_the_key_of_the_server_opens_the_routes_and_chooses_a_version() -> None:
    async def test() -> None:
        server = Server(key="right")
        wrong = [("Authorization", "Bearer wrong")]
        for headers in (None, wrong):
            assert (await server.ask("GET", ROUTE, headers=headers))[0] == 401
            assert (await server.ask("PUT", f"{ROUTE}/v1", {"path": "/a"}, headers))[0] == 401
            assert (await server.ask("DELETE", f"{ROUTE}/v1", headers=headers))[0] == 401
            assert (await server.ask("POST", "/v1/completions", {}, [*(headers or []), (HEADER, BASE)]))[0] == 401
        assert (await server.ask("GET", ROUTE, headers=[("Authorization", "Bearer right")]))[0] == 200
        # vLLM checks these itself.
        assert (await server.ask("POST", "/v1/completions", {}))[0] == 200

    run(test())


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/../x", {"path": "/a"}, 400),
        ("/.hidden", {"path": "/a"}, 400),
        ("/(base)", {"path": "/a"}, 400),
        ("/v1", {"path": "relative"}, 400),
        ("/v1", {"path": 7}, 400),
        ("/v1", {}, 400),
        ("/v1", [], 400),
        ("/v1", {"path": "/a", "timeout_s": "x"}, 400),
        ("/v1", {"path": "/" + "a" * 70000}, 413),
        ("/v1", b"[" * 60000, 400),
    ],
)
def test_requests_that_make_no_sense_are_refused(path: str, body: Any, status: int) -> None:
    async def test() -> None:
        server = Server()
        assert (await server.ask("PUT", f"{ROUTE}{path}", body))[0] == status
        assert server.engine.events == []

    run(test())


def offloading(group_size: int) -> Any:
    """As `OffloadConfig` in vllm/config/offload.py (0.31)."""
    return SimpleNamespace(prefetch=SimpleNamespace(offload_group_size=group_size))


def test_a_server_without_offloading_is_taken() -> None:
    async def test() -> None:
        server = Server()
        server.engine.vllm_config.offload_config = offloading(0)
        assert (await server.load("v1"))[0] == 200

    run(test())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda config: setattr(config.parallel_config, "worker_extension_cls", ""), "--worker-extension-cls"),
        (lambda config: setattr(config.parallel_config, "_api_process_count", 2), "--api-server-count 1"),
        (lambda config: setattr(config.parallel_config, "data_parallel_size", 2), "--data-parallel-size"),
        (lambda config: setattr(config.parallel_config, "data_parallel_size", 2), "Start one server for each"),
        (lambda config: setattr(config.parallel_config, "enable_eplb", True), "--enable-eplb, which.* Leave it out"),
        (lambda config: setattr(config, "offload_config", offloading(8)), "--offload-group-size, .* Leave it out"),
        (lambda config: setattr(config, "lora_config", object()), "--enable-lora"),
        (lambda config: setattr(config, "lora_config", object()), "Leave it out"),
    ],
)
def test_a_server_that_was_started_wrongly_does_not_start(change: Callable[[Any], None], words: str) -> None:
    async def test() -> None:
        server = Server()
        change(server.engine.vllm_config)
        said: list[Any] = []

        async def receive() -> Any:
            return {"type": "lifespan.startup"}

        async def send(message: Any) -> None:
            said.append(message)

        await server.middleware({"type": "lifespan", "app": server.app}, receive, send)
        assert [message["type"] for message in said] == ["lifespan.startup.failed"]
        assert re.search(words, said[0]["message"])
        assert (await server.load("v1"))[0] == 500

    run(test())


def test_a_socket_is_held_back_like_a_request_and_closed_with_the_reason_of_a_refusal() -> None:
    async def test() -> None:
        server = Server()
        await server.load("v1")
        sent: list[Any] = []

        async def accept(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "websocket.accept"})

        async def send(message: Any) -> None:
            sent.append(message)

        server.middleware.app = accept
        scope = {"type": "websocket", "path": "/v1/realtime", "headers": [], "app": server.app}
        await server.middleware(scope, None, send)
        assert sent == [{"type": "websocket.accept", "headers": [(HEADER.lower().encode(), b"v1")]}]
        sent.clear()
        server.engine.fails = {(1, "apply"): "out of memory", (1, "undo"): "still out of memory"}
        await server.load("v2")
        await server.middleware(scope, None, send)
        assert [(message["type"], message["code"]) for message in sent] == [("websocket.close", 1013)]
        assert "unknown state" in sent[0]["reason"]
        assert len(sent[0]["reason"]) <= 120

    run(test())


def test_two_names_in_one_request_are_refused() -> None:
    async def test() -> None:
        server = Server()
        assert (await server.ask("POST", "/v1/completions", {}, [(HEADER, BASE), (HEADER, "v1")]))[0] == 400

    run(test())


@pytest.mark.outside
def test_the_routes_import_where_only_starlette_is_installed(
    run_python: Callable[..., str],
) -> None:
    source = """
import sys
for name in ("trl", "peft", "torch", "transformers", "httpx", "safetensors", "vllm"):
    sys.modules[name] = None
from trl_lora_sync.engine_plugins.vllm_fused import MIDDLEWARE, FusedMiddleware
print(FusedMiddleware.__name__ == MIDDLEWARE.rpartition(".")[2])
print([name for name in sys.modules if name.startswith("trl_lora_sync.") and ".engine_plugins" not in name])
"""
    assert run_python(source).split() == ["True", "[]"]


@pytest.mark.outside
def test_the_worker_needs_torch_and_nothing_of_the_rest_of_this_package(run_python: Callable[..., str]) -> None:
    source = """
import sys
for name in ("trl", "peft", "transformers", "httpx", "safetensors"):
    sys.modules[name] = None
from trl_lora_sync.engine_plugins.vllm_fused import WORKER
from trl_lora_sync.engine_plugins.vllm_fused_worker import FusedWorker
print(f"{FusedWorker.__module__}.{FusedWorker.__name__}" == WORKER)
print([name for name in sys.modules if name.startswith("trl_lora_sync.") and ".engine_plugins" not in name])
print([name for name in dir(FusedWorker) if not name.startswith(("__", "lora_sync_"))])
"""
    assert run_python(source).split() == ["True", "[]", "[]"]


def test_what_trainer_and_server_must_agree_on() -> None:
    """The trainer and the server are installed apart, so these may change with the protocol's number only."""
    assert (HEADER, BASE, ROUTE, vllm_fused.PROTOCOL) == (
        "X-LoRA-Sync-Adapter",
        "(base)",
        "/v1/lora_sync/fused",
        1,
    )
