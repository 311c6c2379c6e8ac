"""Answers the routes of `vllm_fused` inside a vLLM server, and holds requests for tokens back while weights change."""

import asyncio
import contextlib
import json
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from trl_lora_sync.engine_plugins import logger
from trl_lora_sync.engine_plugins.refusals import Refused, check_name
from trl_lora_sync.engine_plugins.reservations import PATIENCE_S, ReservationServers
from trl_lora_sync.engine_plugins.routes import Coming, below, check_key, coming_in, json_in, path_of, refusal, respond
from trl_lora_sync.engine_plugins.version_note import NOTE_FORM
from trl_lora_sync.engine_plugins.vllm_fused import BASE, HEADER, PROTOCOL, ROUTE, WORKER
from trl_lora_sync.engine_plugins.vllm_quick_load import RESERVE_ROUTE
from trl_lora_sync.engine_plugins.weights_lock import WeightsLock

T = TypeVar("T")

_LOAD_TIMEOUT_S = 60.0
# For the engine to pause without a request. So the trainer hears of it before it has waited for `PATIENCE_S`.
_PAST_HTTP_TIMEOUT_S = PATIENCE_S / 2
# For a request that wants another version than the one which requests before it are sampled from.
_CHANGE_TIMEOUT_S = 600.0
# Between two parts of the body of a request for tokens.
BODY_TIMEOUT_S = 30.0
# POST routes that sample nothing, of which some must work while requests are held back. Source: vLLM 0.26 to 0.33.
_CONTROL = frozenset(
    {
        "/abort_requests",
        "/collective_rpc",
        "/detokenize",
        "/inference/v1/abort_requests",
        "/is_scaling_elastic_ep",
        "/pause",
        "/ping",
        "/release_kv_cache_memory",
        "/reset_encoder_cache",
        "/reset_mm_cache",
        "/reset_prefix_cache",
        "/resume",
        "/scale_elastic_ep",
        "/shutdown_weight_transfer_engine",
        "/sleep",
        "/start_profile",
        "/stop_profile",
        "/tokenize",
        "/update_weight_version",
        "/wake_up",
    }
)
# It ends a response that is computed in the background, for which a change may be waiting.
_CANCEL = re.compile(r"/v1/responses/[^/]+/cancel")
# They would change the base weights, of which the workers keep a copy.
_CHANGES_BASE = frozenset(
    {
        "/finish_weight_update",
        "/init_weight_transfer_engine",
        "/start_draft_weight_update",
        "/start_weight_update",
        "/update_weights",
        "/v1/load_lora_adapter",
        "/weight_checker",  # one of its actions sets all weights to zero (rl/online/api_router.py, 0.32)
    }
)


class FusedMiddleware:
    """Answers the fused routes, and lets requests for tokens through while the weights hold the right version.

    Args:
        app: the server behind it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        # In this process only, which is why `_engine_of` refuses more than one API server.
        self.adapters: dict[str, str] = {}
        self.lock = WeightsLock(BASE)
        # Why the weights may hold anything: set by `_undo` and `_state`, cleared by the next fuse that succeeds.
        self.broken: str | None = None
        self._coming: str | None = None  # what a change that runs puts into the weights
        # One load or unload of a name at a time, as on vLLM's own routes. An entry lasts while a request holds it.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._is_asleep = False
        self._weights = asyncio.Lock()  # who may touch their memory: a fuse, a comparison, or vLLM's sleep
        # A client that pauses the engine, as a fuse would end that pause with its own. Apart from the other lock, as a
        # pause may wait for requests for long, and the client must be able to resume the engine meanwhile.
        self._client_pause = asyncio.Lock()
        self._held = {
            "/pause": self._client_pause,
            # Within the pause of a fuse, they would let requests run while weights change, or without a KV cache.
            "/resume": self._weights,
            "/release_kv_cache_memory": self._weights,
        }
        self._trainers = ReservationServers()
        logger.info("Adapters can be fused into the weights of this server, at %s.", ROUTE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._start(scope, receive, send)
            return
        # Starlette redirects a path with a slash at its end to the route without it (`redirect_slashes`).
        rest, path = below(ROUTE, scope), path_of(scope).rstrip("/")
        try:
            if rest is not None:
                await respond(self._answer(Request(scope, receive), rest), scope, receive, send)
            elif scope["type"] == "http" and path == RESERVE_ROUTE:
                await respond(self._await_version(scope, receive), scope, receive, send)
            elif scope["type"] == "websocket" or _may_sample(scope, path):
                await self._pass_on(scope, receive, send)
            elif path in ("/sleep", "/wake_up"):
                await self._pass_on_sleep(scope, receive, send, path)
            elif path in self._held:
                async with self._held[path]:
                    await self.app(scope, receive, send)
            else:
                await self.app(scope, receive, send)
        except Refused as refused:
            is_socket = scope["type"] == "websocket"
            # A closing frame holds a reason of at most 123 bytes (RFC 6455, 5.5 and 5.5.1).
            response = WebSocketClose(1013, refused.message[:120]) if is_socket else refusal(scope, refused)
            await response(scope, receive, send)

    async def _start(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the server start only if it was started in a way that fused serving works with."""
        try:
            _engine_of(scope)
        except Refused as refused:
            logger.error("%s", refused.message)
            # ASGI: an answer to `lifespan.startup` is expected only once that message was received.
            await receive()
            await send({"type": "lifespan.startup.failed", "message": refused.message})
            return
        await self.app(scope, receive, send)

    async def _pass_on_sleep(self, scope: Scope, receive: Receive, send: Send, path: str) -> None:
        """Note whether the weights are in their place. vLLM reports a pause as a sleep too, hence this record."""
        query, succeeded = _query(scope), False
        tags = query.getlist("tags")

        async def send_and_note(message: Message) -> None:
            nonlocal succeeded
            if message["type"] == "http.response.start":
                succeeded = message["status"] == 200
            await send(message)

        # What is under way ends first: vLLM unmaps the weights (`sleep` in device_allocator/cumem.py, 0.31), and a
        # kernel that reads or writes them then is an illegal memory access.
        async with self._weights:
            await self.app(scope, receive, send_and_note)
            if succeeded and path == "/sleep":
                # Level 0 is a pause, and leaves the weights where they are (`sleep` in v1/engine/core.py, 0.31).
                self._is_asleep = self._is_asleep or query.get("level", "1").strip() != "0"
            # vLLM wakes everything without a tag, and nothing for an empty one (serve/dev/sleep/api_router.py, 0.31).
            elif succeeded and (not tags or "weights" in tags):
                self._is_asleep = False

    # Requests for tokens

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        wanted = _wanted(scope)
        if wanted is not None:
            # vLLM checks keys behind this middleware, which is too late for a request that may change the weights.
            check_key(scope)
            self._check_known(wanted)

        async def change(name: str) -> None:
            # Once more: a `DELETE` that was ahead of this request may have removed it.
            self._check_known(name)
            try:
                await self._change(_engine_of(scope), name)
            except Refused as refused:
                if refused.status == 404:  # its files are gone
                    raise Refused(404, f"The model `{name}` does not exist any more: {refused.message}") from refused
                raise

        async with self.lock.sampling(wanted, change, _CHANGE_TIMEOUT_S) as current:
            # Inside the gate, as a change that this request has waited for may have failed, or repaired the weights.
            if self.broken is not None:
                raise Refused(500, self.broken)
            await self.app(scope, _in_time(receive), _naming(send, current))

    def _check_known(self, name: str) -> None:
        if name != BASE and name not in self.adapters:
            raise Refused(404, f"The model `{name}` does not exist.")

    # The fused routes

    async def _answer(self, request: Request, rest: str) -> dict[str, Any]:
        check_key(request.scope)
        engine, name = _engine_of(request.scope), rest.removeprefix("/")
        if not rest and request.method == "GET":
            return await self._state(engine, compares=request.query_params.getlist("compare") == ["base"])
        check_name(name)
        lock = self._locks.setdefault(name, asyncio.Lock())
        if request.method in ("PUT", "POST"):
            path, timeout_s = await _path_and_timeout_in(request)
            async with lock:
                return await self._load(engine, name, path, timeout_s)
        if request.method == "DELETE":
            # An unload that overtook the load would find nothing, and the version would stay once it is loaded.
            async with lock:
                return await self._forget(engine, name)
        raise Refused(405, f"PUT and DELETE are offered here, and GET {ROUTE}.")

    async def _state(self, engine: Any, *, compares: bool) -> dict[str, Any]:
        before = self.lock.finished_changes
        workers = _good(await _call(engine, "lora_sync_state"))
        # The workers' answers belong to `current` only if no change happened while they were on their way.
        current, is_unchanged = self.lock.current, before is not None and before == self.lock.finished_changes
        if is_unchanged and self.broken is None and any((worker["active"] or BASE) != current for worker in workers):
            self.broken = f"The workers hold {[worker['active'] for worker in workers]} instead of {current!r}."
        state = {
            "protocol": PROTOCOL,
            "checks": NOTE_FORM,
            "current": current,
            "adapters": dict(self.adapters),
            "workers": workers,
            "broken": self.broken,
        }
        if compares:
            # As a change, so that no fuse writes to the weights while they are compared.
            async with self.lock.changing(_LOAD_TIMEOUT_S), self._weights:
                if self._is_asleep:
                    raise Refused(409, "The server sleeps, and its weights cannot be compared. Wake it up first.")
                state["compared"] = _good(await _call(engine, "lora_sync_equals_base"))
        return state

    async def _await_version(self, scope: Scope, receive: Receive) -> dict[str, str]:
        """Load the version that a trainer writes next without a further request, see `reservations`."""
        coming = await coming_in(scope, receive)
        check_name(coming.name)
        engine, number = _engine_of(scope), secrets.token_hex(16)
        server = self._trainers.of(coming.folder)
        load = _LoadPastHTTP(partial(self._load_past_http, engine, coming))
        server.expect(number, (), load.end, load.begin)
        return {"reservation": number, "socket": server.path.name}

    async def _load_past_http(self, engine: Any, coming: Coming, load: "_LoadPastHTTP") -> None:
        if self.lock.running:  # which may take long, and the trainer then has a request wait
            raise Refused(409, "Other requests are being answered.")
        async with self._locks.setdefault(coming.name, asyncio.Lock()):
            await self._load(engine, coming.name, coming.path, _PAST_HTTP_TIMEOUT_S, load)

    async def _load(
        self, engine: Any, name: str, path: str, timeout_s: float, past_http: "_LoadPastHTTP | None" = None
    ) -> dict[str, Any]:
        """Put an adapter into the weights, and register it.

        Args:
            timeout_s: for requests and the engine to end what they do.
        """
        started = time.perf_counter()
        async with self.lock.changing(timeout_s):
            waited_s = time.perf_counter() - started
            # Read inside, as a load that was ahead in the line may have registered the name.
            known = self.adapters.get(name)
            if known not in (None, path):
                raise Refused(409, f"{name} is registered already, with the path {known}. A name is used once.")
            # Registered as well, or the weights may have come from another path, by a load that was cancelled since.
            if known and self.lock.current == name and self.broken is None:
                seconds = {}  # a request that is repeated because its answer was lost
            elif waited_s < timeout_s:
                # The client waits for `timeout_s` in all.
                seconds = await self._fuse(engine, name, path, timeout_s - waited_s, past_http)
            else:
                raise Refused(
                    409,
                    f"Other requests were being answered for {timeout_s:.0f} s, and no time is left to change the "
                    "weights. Wait for them, or end them.",
                )
            # Registered once it was in the weights, so that no request can name an adapter that the workers refuse.
            self.adapters[name] = path
        return {
            "name": name,
            "path": path,
            "current": self.lock.current,
            "adapters": dict(self.adapters),
            "seconds": {"wait": waited_s, **seconds},
        }

    async def _forget(self, engine: Any, name: str) -> dict[str, Any]:
        # A request for the version may be bringing it into the weights; that holds no lock of the name.
        if name in (self.lock.current, self._coming):
            async with self.lock.changing(_LOAD_TIMEOUT_S):
                # Looked at once more: another request may have changed the weights during the wait.
                if self.lock.current == name:
                    await self._change(engine, BASE)
        return {"name": name, "deleted": self.adapters.pop(name, None) is not None, "current": self.lock.current}

    # Changing the weights, while no request is sampled

    async def _change(self, engine: Any, name: str) -> None:
        path = self.adapters[name] if name != BASE else None
        self._coming = name
        try:
            await self._fuse(engine, name, path, _CHANGE_TIMEOUT_S)
        finally:
            self._coming = None

    async def _fuse(
        self, engine: Any, name: str, path: str | None, timeout_s: float, past_http: "_LoadPastHTTP | None" = None
    ) -> dict[str, float]:
        """Put an adapter, or the base for no path, into the weights of all workers, or leave them as they are.

        Raises:
            Refused: it was not done; the weights are what they were.
        """
        return await _to_the_end(self._fuse_now(engine, name, path, timeout_s, past_http))

    async def _fuse_now(
        self, engine: Any, name: str, path: str | None, timeout_s: float, past_http: "_LoadPastHTTP | None"
    ) -> dict[str, float]:
        started = time.perf_counter()
        # Always after the gate and before the pause, in this order. Requests such as `/sleep` take one of these locks
        # alone, so they cannot block each other.
        async with self._no_client_pausing(timeout_s), self._weights:
            left_s = timeout_s - (time.perf_counter() - started)
            if self._is_asleep:
                raise Refused(409, "The server sleeps, and its weights cannot be changed. Wake it up first.")
            async with contextlib.AsyncExitStack() as pause:
                calls: list[asyncio.Future[Any]] = []
                reading: asyncio.Future[list[dict[str, Any]]] | None = None

                def send(call: Coroutine[Any, Any, T]) -> "asyncio.Future[T]":
                    # Not awaited here, as waiting for one answer after the other takes a millisecond more each time.
                    calls.append(sent := asyncio.ensure_future(call))
                    return sent

                try:
                    # While the engine comes to its pause, as reading an adapter touches no weight. In the `try`, as
                    # workers that did prepare hold the adapter's memory until `lora_sync_undo`.
                    if past_http is None:
                        reading = send(_call(engine, "lora_sync_prepare", name, path))
                    pausing = await pause.enter_async_context(_pausing(engine))
                    resetting = send(_reset_in_pause(engine, pausing))
                    if past_http is not None:
                        await past_http.until_written()
                    if reading is None:
                        reading = send(_call(engine, "lora_sync_prepare", name, path))
                    else:
                        # An adapter that is refused does not wait for an engine that stays busy.
                        answers = _accepted(await reading)
                    prepared = time.perf_counter()
                    await _until_paused(pausing, left_s)
                    paused = time.perf_counter()
                    # Before the first weight changes, so that a refusal leaves nothing to undo.
                    if not (await resetting or await _reset_prefix_cache(engine)):
                        raise Refused(409, "The prefix cache could not be reset, because requests still use it.")
                    reset = time.perf_counter()
                    # Not earlier, as vLLM clears it under what runs.
                    clearing = send(_reset_encoder_cache(engine))
                    # Also before all have answered that they can: each one carries out its calls in turn, and what some
                    # have done is undone if others could not.
                    applying = send(_call(engine, "lora_sync_apply", name))
                    if past_http is not None:
                        answers = _accepted(await reading)
                    applied = _good(await applying)
                    await clearing
                # Also a cancelled task or an exit: the workers must not keep different versions. Inside the pause.
                except BaseException as error:
                    await asyncio.gather(*calls, return_exceptions=True)
                    # Workers that were never reached, as with a path that vLLM cannot encode, would undo the change
                    # before this one, which has succeeded.
                    if reading is not None and not reading.cancelled() and reading.exception() is None:
                        await self._undo(engine, error)
                    raise
                # Inside the pause: if resuming the engine fails, the record still matches the weights.
                self.lock.note(name)
                self.broken = None
                if past_http is not None and path is not None:
                    # Already here, as the trainer need not wait for the end of the pause. Its requests do.
                    self.adapters[name] = path
                    past_http.answer.set_result(json.dumps(self.adapters))
        done = time.perf_counter()
        # The slowest worker counts, as all of them do each step at the same time.
        seconds = {
            "read": max(answer["read_s"] for answer in answers),
            "place": max(answer["place_s"] for answer in answers),
            "prepare": prepared - started,
            "pause": paused - prepared,
            "reset": reset - paused,
            "fuse": max(answer["fuse_s"] for answer in applied),
            "total": done - started,
        }
        parts = ", ".join(f"{part} {1000 * spent:.0f}" for part, spent in seconds.items() if part != "total")
        logger.info("The weights hold %s now, after %.0f ms (%s).", name, 1000 * seconds["total"], parts)
        return seconds

    @contextlib.asynccontextmanager
    async def _no_client_pausing(self, timeout_s: float) -> AsyncIterator[None]:
        """Inside, no client begins a pause, and each that had begun is complete.

        Raises:
            Refused: a client's pause still waits for requests after `timeout_s`.
        """
        try:
            await asyncio.wait_for(self._client_pause.acquire(), timeout_s)
        except asyncio.TimeoutError as error:
            raise _busy(timeout_s) from error
        try:
            yield
        finally:
            self._client_pause.release()

    async def _undo(self, engine: Any, error: BaseException) -> None:
        """Put back what was there; if that fails as well, refuse everything until a fuse succeeds."""
        try:
            _good(await _call(engine, "lora_sync_undo"))
        # Not raised: the caller raises the first error, and `broken` refuses requests until a fuse succeeds.
        except BaseException as second:
            self.broken = (
                f"The weights of this server are in an unknown state: changing them failed ({error}), and so did "
                f"changing them back ({second}). Fuse an adapter, or restart the server."
            )
            logger.exception("%s", self.broken)


class _LoadPastHTTP:
    """The load of one version, for which its trainer sends messages.

    Args:
        load: carries it out.

    Attributes:
        answer: all adapters of the server, as JSON, once the weights hold this one; empty if the load has failed.
    """

    def __init__(self, load: Callable[["_LoadPastHTTP"], Coroutine[Any, Any, Any]]) -> None:
        self._load = load
        self._loading: asyncio.Future[Any] | None = None
        self._is_written = asyncio.Event()
        self.answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def begin(self) -> None:
        """Do what can be done before it is written."""
        if self._loading is None:
            self._loading = asyncio.ensure_future(self._load(self))
            self._loading.add_done_callback(self._ended)

    async def until_written(self) -> None:
        """Raises Refused if its trainer seems to be gone."""
        try:
            await asyncio.wait_for(self._is_written.wait(), PATIENCE_S)
        except asyncio.TimeoutError as error:
            raise Refused(409, f"It was not written within {PATIENCE_S} s.") from error

    def end(self) -> Awaitable[str]:
        """Go on with what needs its files."""
        self._is_written.set()
        self.begin()
        return self.answer

    def _ended(self, loading: "asyncio.Future[Any]") -> None:
        error = None if loading.cancelled() else loading.exception()
        if error is not None:
            logger.info("A version is left to a request: %s", error)
        if not self.answer.done():
            self.answer.set_result("")


# The engine


def _engine_of(scope: Scope) -> Any:
    """The engine behind the server.

    Raises:
        Refused: the server was started in a way that fused serving does not work with; what to change.
    Source: `init_app_state` in vllm/entrypoints/openai/api_server.py (0.26), the same in launchers/api_server (0.31 to
    0.33).
    """
    engine = getattr(getattr(scope.get("app"), "state", None), "engine_client", None)
    if engine is None:
        raise Refused(503, "The engine of this server is not there yet, or this version of vLLM keeps it elsewhere.")
    parallel = engine.vllm_config.parallel_config
    if parallel.worker_extension_cls != WORKER:
        raise Refused(
            500,
            f"Fused serving needs --worker-extension-cls {WORKER} as well, "
            f"and the server was started with {parallel.worker_extension_cls or 'none'!r}.",
        )
    # Private, but the configuration has no public field for it (config/parallel.py, 0.31).
    if parallel._api_process_count > 1:
        raise Refused(500, "Fused serving needs --api-server-count 1: each API server would know other requests.")
    if parallel.data_parallel_size > 1:
        raise Refused(
            500,
            "Fused serving cannot be used with --data-parallel-size above 1, because vLLM reports the result "
            "of one replica only. Start one server for each, and give the trainer all URLs with commas in between.",
        )
    # vLLM moves the rows of experts between their places meanwhile (distributed/eplb/rebalance_execute.py, 0.31), and
    # versions are written to the places of the start, over the weights of other experts.
    if getattr(parallel, "enable_eplb", False):
        raise Refused(
            500,
            "Fused serving cannot be used with --enable-eplb, which moves experts while the server runs. Leave it out.",
        )
    # The weights of such a layer are in host memory, and what is written on the device are buffers that the next copy
    # from there goes over (model_executor/offloader/prefetch.py, 0.31). Older versions have no such configuration.
    prefetch = getattr(getattr(engine.vllm_config, "offload_config", None), "prefetch", None)
    if getattr(prefetch, "offload_group_size", 0) > 0:
        raise Refused(
            500,
            "Fused serving cannot be used with --offload-group-size, which copies the weights of layers from host "
            "memory again and again, without the adapter. Leave it out.",
        )
    if engine.vllm_config.lora_config is not None:
        raise Refused(
            500, "Fused serving cannot be used with --enable-lora, as an adapter could be applied twice. Leave it out."
        )
    return engine


async def _to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Carry out `work` even if its request is cancelled meanwhile, which then comes after it."""
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            # `wait` leaves the task alone when it is cancelled, unlike `await task`, and may be cancelled again.
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        task.exception()  # marks it as retrieved: the request that would report it is gone
        raise cancelled
    return task.result()


async def _call(engine: Any, method: str, *args: str | None) -> list[dict[str, Any]]:
    # Without a timeout, after which vLLM would take a late answer for that to its next call.
    answers: list[dict[str, Any]] = await engine.collective_rpc(method, args=args)
    return answers


def _good(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers of all workers.

    Raises:
        Refused: one of them failed.
    """
    for rank, answer in enumerate(answers):
        if not answer["ok"]:
            where = f" (worker {rank})" if len(answers) > 1 else ""
            raise Refused(answer["status"], f"{answer['error']}{where}")
    return answers


def _accepted(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers of all workers to `lora_sync_prepare`.

    Raises:
        Refused: one of them failed, or an element of the adapter is on none, as with an adapter that is too wide.
    """
    _good(answers)
    pieces: dict[str, set[tuple[int, ...]]] = {}
    shapes: dict[str, tuple[int, int]] = {}
    for answer in answers:
        for module, placed in answer["placed"].items():
            shapes[module] = tuple(placed["shape"])
            # A set, because tensor-parallel workers may hold the same rows, as with replicated k and v heads.
            pieces.setdefault(module, set()).update(map(tuple, placed["pieces"]))
    for module, found in pieces.items():
        rows, columns = shapes[module]
        if sum((bottom - top) * (right - left) for top, bottom, left, right in found) != rows * columns:
            raise Refused(
                422,
                f"The adapter's {module!r} has a weight of shape {rows, columns}, of which the served model has "
                f"{sorted(found) or 'nothing'} (first and end of rows and columns). It belongs to another base model.",
            )
    return answers


@contextlib.asynccontextmanager
async def _pausing(engine: Any) -> "AsyncIterator[asyncio.Future[None]]":
    """Inside, the engine is being paused, or was paused by a client, who resumes it; see `_until_paused`.

    It is vLLM's pause without the 20 ms that it sleeps afterwards, which order its answers and protect nothing.
    Source: `pause_generation` in vllm/v1/engine/async_llm.py (0.26, 0.31).
    """
    if await engine.is_paused():
        pausing = asyncio.get_running_loop().create_future()
        pausing.set_result(None)
        yield pausing
        return
    # `engine_core` is internal to vLLM, so another version may lack it.
    core = getattr(engine, "engine_core", None)
    pause = getattr(core, "pause_scheduler_async", engine.pause_generation)
    # The pause would clear caches with `reset_running_requests=True`, which succeeds whatever still runs
    # (`_reset_caches` in v1/engine/core.py, 0.26, 0.31). So `_reset_prefix_cache` below does it apart.
    pausing = asyncio.ensure_future(pause(mode="wait", clear_cache=False))
    try:
        yield pausing
    finally:
        pausing.cancel()
        await asyncio.gather(pausing, return_exceptions=True)
        # Also after a pause that took too long, as the engine would still complete it, and stay paused.
        await engine.resume_generation()


async def _until_paused(pausing: "asyncio.Future[None]", timeout_s: float) -> None:
    """Return once the engine is idle, requests that are answered in the background included.

    Raises:
        Refused: it is still busy after `timeout_s`.
    """
    try:
        await asyncio.wait_for(pausing, timeout_s)
    except asyncio.TimeoutError as error:
        raise _busy(timeout_s) from error


def _busy(timeout_s: float) -> Refused:
    return Refused(409, f"The engine was still busy after {timeout_s:.0f} s.")


async def _reset_prefix_cache(engine: Any) -> bool:
    """Clear what was computed with the weights before. That this succeeds proves that nothing runs."""
    # With a connector, the KV cache has a part outside the engine.
    has_connector = getattr(engine.vllm_config, "kv_transfer_config", None) is not None
    return bool(await engine.reset_prefix_cache(reset_connector=has_connector))


async def _reset_in_pause(engine: Any, pausing: "asyncio.Future[None]") -> bool:
    """Whether the prefix cache was reset in a pause that was complete by then.

    Before that, a request could fill it again. The engine answers in the order in which it is done with calls, and
    tasks go on in the order of their answers.
    """
    return await _reset_prefix_cache(engine) and pausing.done()


async def _reset_encoder_cache(engine: Any) -> None:
    """Clear what a vision tower computed, whose layers an adapter may change."""
    # A model of text has none, and asking all workers takes a millisecond. Source: `ModelConfig` (0.31).
    if getattr(getattr(engine.vllm_config, "model_config", None), "is_multimodal_model", True):
        await engine.reset_encoder_cache()


# Requests


def _query(scope: Scope) -> QueryParams:
    """As vLLM reads it, so that both understand the same."""
    return QueryParams(scope.get("query_string", b""))


def _may_sample(scope: Scope, path: str) -> bool:
    """Whether a request may run the model; unknown routes are taken to.

    Raises:
        Refused: it would change the base weights.
    """
    if scope["type"] != "http" or scope["method"] != "POST" or path.startswith("/v1/lora_sync/"):
        return False
    # vLLM parses the level by `int`, which takes "02" for 2, so only the two known spellings pass.
    if path in _CHANGES_BASE or (path == "/sleep" and _query(scope).get("level", "1").strip() not in ("0", "1")):
        raise Refused(409, f"{path} would change the base weights under the adapter, so fused serving refuses it.")
    return path not in _CONTROL and _CANCEL.fullmatch(path) is None


def _wanted(scope: Scope) -> str | None:
    values = Headers(scope=scope).getlist(HEADER)
    if len(values) > 1:
        raise Refused(400, f"The header {HEADER} is there more than once.")
    return values[0] if values else None


def _in_time(receive: Receive) -> Receive:
    """Takes a client for gone that sends nothing more before its body is complete.

    The connection of a host that is gone stays open for ever, and weights never change under a request.
    """
    is_complete = False

    async def receive_in_time() -> Message:
        nonlocal is_complete
        if is_complete:
            return await receive()
        try:
            message = await asyncio.wait_for(receive(), BODY_TIMEOUT_S)
        except asyncio.TimeoutError:
            return {"type": "http.disconnect"}
        is_complete = not message.get("more_body", False)
        return message

    return receive_in_time


def _naming(send: Send, current: str) -> Send:
    """Adds to the head of an answer what it is sampled from."""

    async def send_with_name(message: Message) -> None:
        if message["type"] in ("http.response.start", "websocket.accept"):
            message.setdefault("headers", [])
            MutableHeaders(scope=message)[HEADER] = current
        await send(message)

    return send_with_name


async def _path_and_timeout_in(request: Request) -> tuple[str, float]:
    """What a request to load an adapter has in its body."""
    body = await json_in(request)
    path, timeout_s = body.get("path"), body.get("timeout_s", _LOAD_TIMEOUT_S)
    if not isinstance(path, str) or not path.startswith("/"):
        raise Refused(400, 'The body must be {"path": FOLDER} with an absolute path.')
    # NaN, which `json` reads, fails both comparisons.
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s < 86400:
        raise Refused(400, "timeout_s must be a number of seconds.")
    return path, timeout_s
