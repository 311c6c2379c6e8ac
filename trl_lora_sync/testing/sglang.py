"""An HTTP server that obeys the rules of stock SGLang 0.5.11 to 0.5.23, and crashes where SGLang does.

This file holds what SGLang's HTTP process does (`entrypoints/http_server.py`, `managers/tokenizer_manager.py`,
`managers/tokenizer_control_mixin.py`, `lora/lora_registry.py`); `sglang_scheduler.py` holds the rest. Paths in comments
are below `sglang/srt/`; "all" are the versions in `VERSIONS`, whose source was read. A rule that comes with 0.5.15,
0.5.17 or 0.5.20 here may be older, as the versions before these were not read.

Faster than the real one on purpose: /health answers at once (SGLang takes a second), a lost client is noticed at once
(SGLang checks every four seconds), and a pause with mode "abort" looks every 20 ms (SGLang every second).
"""

import base64
import contextlib
import hashlib
import io
import json
import math
import select
import socket
import threading
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from trl_lora_sync.testing.policy import read_adapter
from trl_lora_sync.testing.sglang_scheduler import (
    MEMORY_TAGS,
    TENSOR_PATH,
    LoRARef,
    Sampler,
    Scheduler,
    SchedulerDiedError,
    ServerArgs,
    sampling_params,
)

VERSIONS = ("0.5.11", "0.5.15", "0.5.17", "0.5.20", "0.5.21", "0.5.22", "0.5.23")

# `@auth_level(AuthLevel.ADMIN_OPTIONAL)` in entrypoints/http_server.py (all); the rest wants the API key.
_ADMIN_ROUTES = {
    "/load_lora_adapter", "/unload_lora_adapter", "/pause_generation", "/continue_generation", "/abort_request",
    "/flush_cache", "/release_memory_occupation", "/resume_memory_occupation",
}  # fmt: skip
# Of `ServerArgs`, what /server_info has as it was given.
_REPORTED = (
    "model_path", "dtype", "tp_size", "dp_size", "tokenizer_worker_num", "hicache_storage_backend", "enable_lmcache",
    "max_loras_per_batch", "max_loaded_loras", "enable_memory_saver", "enable_deterministic_inference", "version",
    "speculative_algorithm", "speculative_accept_threshold_single", "speculative_accept_threshold_acc",
)  # fmt: skip
_POLL_S = 0.02


class _ClientError(ValueError):
    """Answered with 400 and `{"error": {"message": ...}}` (`_create_error_response`, all)."""


class _HTTPStatusError(Exception):
    """FastAPI's HTTPException, in the shape of `ErrorResponse`."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status, self.detail = status, detail


class _ClientLeftError(Exception):
    """The client of a request is gone."""


@dataclass
class Request:
    """One request as it arrived."""

    method: str
    path: str
    body: Any
    token: str | None


@dataclass
class _Running:
    """One sub-request in the scheduler."""

    rid: str
    lora_name: str | None
    is_queued: bool = False
    is_aborted: bool = False


class FakeSGLang:
    """One server; `with FakeSGLang(version="0.5.17") as fake`. It answers as long as the block lasts.

    Args:
        args: how it is started.
        changes: fields of `ServerArgs` instead.

    Attributes:
        requests: everything that arrived, in order.
        death: why the server has ended, or None.
        delay_s: seconds to wait before a path is acted on.
        drop: how many answers of a path to drop after acting.
        canned: path to answers (status, body) that are given, one each, without acting.
        edit_output: called with each output of /generate before it is sent.
        abort_with: status codes with which the scheduler aborts the next samples; None is an abort without a code.
        token_delay_s: seconds that one token takes.
        other_clients: requests of other clients, which the server reports as running.
    """

    def __init__(self, args: ServerArgs | None = None, **changes: Any) -> None:
        self.args = args or ServerArgs(**changes)
        self.requests: list[Request] = []
        self.delay_s: dict[str, float] = {}
        self.drop: Counter[str] = Counter()
        self.canned: dict[str, list[tuple[int, Any]]] = {}
        self.edit_output: Callable[[dict[str, Any]], None] = lambda output: None
        self.abort_with: list[int | None] = []
        self.token_delay_s = 0.0
        self.death: str | None = None
        self.other_clients = 0
        # Reentrant, as the scheduler ends the server (`_die`) from inside of calls that hold it.
        self._cond = threading.Condition(threading.RLock())
        self._http: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None
        self._sockets: set[socket.socket] = set()  # of all handlers that have not ended
        # The system chooses one at the first start, and a restart uses it again.
        self._port = 0
        self._holding: str | None = None
        self._reset()

    def _reset(self) -> None:
        """The state of a process that has just started."""
        self.scheduler = Scheduler(self.args, self._die)
        self.peak_host_adapters = 0
        self._registry: OrderedDict[str, LoRARef] = OrderedDict()
        self._counters: dict[str, int] = {}  # by `lora_id`
        self._ref_cache: dict[str, LoRARef] = {}  # never shrinks
        self._pending_unloads: dict[str, str] = {}
        self._update_lock = threading.Lock()
        self._readers = 0  # of `model_update_lock`: requests between the pause gate and their end
        self._running: list[_Running] = []
        self._pause_mode: str | None = None
        self._draws: Counter[str] = Counter()

    # Starting, stopping, dying

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> "FakeSGLang":
        self.death = None
        self._http = _Server(self)
        self._port = self._http.server_port
        # By default `serve_forever` looks twice a second for its end, and each `stop` would wait for that.
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Refuse connections and break the open ones, as a process that ends does."""
        with self._cond:
            self.death = self.death or "stopped"
            # Under the lock, as a test and a scheduler that ends may both come here, and one of them closes the port.
            http, self._http = self._http, None
            self._cond.notify_all()
        if http is not None:
            http.shutdown()
            http.server_close()
        # A copy, as sockets whose handlers end are removed meanwhile.
        for open_socket in list(self._sockets):
            with contextlib.suppress(OSError):
                # Not `close`, by which another thread that reads from the socket would not be woken.
                open_socket.shutdown(socket.SHUT_RDWR)

    def restart(self) -> None:
        """The same command line on the same port: nothing is loaded then."""
        self.stop()
        if self._thread is not None:
            self._thread.join(5)
        # A sample ends after its forward pass only, and would change the state of the new process then.
        self.wait_until(lambda: not self._sockets)
        self._reset()
        self.start()

    def _die(self, reason: str) -> None:
        # managers/scheduler.py `run_scheduler_process`: SIGQUIT to the parent, which kills the process tree
        # First, as `stop` keeps a reason that is there.
        self.death = reason
        self.stop()

    def __enter__(self) -> "FakeSGLang":
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
        if self._thread is not None:
            self._thread.join(5)

    # What tests look at

    def expected_logprobs(
        self,
        adapter: Any,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        temperature: float = 1.0,
    ) -> list[float]:
        """What this server must report for a completion.

        Args:
            adapter: None for the base; a PEFT directory; a canonical adapter; or tensors by PEFT's keys (scaling 1).
        """
        tensors, scaling = None, 1.0
        if isinstance(adapter, (str, Path)):
            tensors, scaling = read_adapter(Path(adapter))
        elif adapter is not None:
            tensors = getattr(adapter, "tensors", adapter)
        return self.scheduler.policy.logprobs(tensors, scaling, prompt_ids, completion_ids, temperature)

    def bodies(self, path: str) -> list[Any]:
        return [request.body for request in self.requests if request.path == path]

    @property
    def in_flight(self) -> dict[str, int]:
        """The reference counters by adapter name, of registered adapters and of adapters that wait to be unloaded."""
        with self._cond:
            names = {ref.lora_id: ref.name for ref in self._ref_cache.values()}
            return {names[key]: count for key, count in self._counters.items()}

    @property
    def host_adapters(self) -> list[str]:
        """Names of the adapters in host memory."""
        with self._cond:
            return [adapter.ref.name for adapter in self.scheduler.loras.values()]

    @property
    def gpu_slots(self) -> int:
        """Slots of the GPU pool in use, that of the base model included."""
        with self._cond:
            return len(self.scheduler.slots)

    @property
    def registered(self) -> list[str]:
        """Names of the adapters that requests can name; an unload first takes its name from here, and then waits."""
        with self._cond:
            return list(self._registry)

    @property
    def running(self) -> int:
        """How many samples are running or queued."""
        with self._cond:
            return len(self._running)

    def add_references(self, adapter_name: str, count: int) -> None:
        """Change how many requests the server counts for an adapter; an unload waits until it counts none."""
        with self._cond:
            self._counters[self._ref_cache[adapter_name].lora_id] += count
            self._cond.notify_all()

    def abort_all(self) -> None:
        """End all samples, as for another client that aborts them."""
        self._abort(lambda run: True)

    def wait_until(self, is_so: Callable[[], bool], timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_so():
            if time.monotonic() > deadline:
                raise TimeoutError("the fake did not get there in time")
            time.sleep(0.005)

    @contextlib.contextmanager
    def hold(self, *, queued: bool = False) -> Iterator[None]:
        """Samples do not proceed while the block lasts; `queued` keeps them out of the running batch."""
        self._holding = "queued" if queued else "running"
        try:
            yield
        finally:
            self.let_go()

    def let_go(self) -> None:
        """End a `hold` before its block ends."""
        self._holding = None

    # HTTP

    def answer(self, request: Request, connection: socket.socket) -> tuple[int, Any]:
        """Status and body: a JSON value, or text.

        Raises:
            SchedulerDiedError, _ClientLeftError: no answer can be given.
        """
        # Before the key is checked: tests look at what was refused as well.
        self.requests.append(request)
        path = urlsplit(request.path).path
        request.path, query = path, parse_qs(urlsplit(request.path).query)
        if not self._is_allowed(path, request.token):
            return 401, {"error": "Unauthorized"}  # utils/auth.py (all)
        if self.canned.get(path):
            return self.canned[path].pop(0)
        self._wait(connection, lambda: False, self.delay_s.get(path, 0.0))
        route = self._routes().get((request.method, path))
        if route is None:
            return 404, _error_response("Not Found", 404)
        try:
            return route(request.body, query, connection)
        except _ClientError as error:
            return 400, {"error": {"message": str(error)}}
        except _HTTPStatusError as error:
            return error.status, _error_response(error.detail, error.status)
        except (SchedulerDiedError, _ClientLeftError):
            raise
        except Exception:  # uvicorn's answer to whatever the application does not catch
            return 500, "Internal Server Error"

    def _routes(self) -> dict[tuple[str, str], Callable[[Any, dict[str, list[str]], socket.socket], tuple[int, Any]]]:
        return {
            ("GET", "/health"): self._health,
            ("GET", "/model_info"): self._model_info,
            ("GET", "/server_info"): self._server_info,
            ("GET", "/v1/loads"): self._loads,
            ("GET", "/v1/models"): self._models,
            ("POST", "/generate"): self._generate,
            ("POST", "/load_lora_adapter"): self._load_route,
            ("POST", "/load_lora_adapter_from_tensors"): self._load_tensors_route,
            ("POST", "/unload_lora_adapter"): self._unload_route,
            ("POST", "/pause_generation"): self._pause,
            ("POST", "/continue_generation"): self._continue,
            ("POST", "/abort_request"): self._abort_route,
            ("POST", "/flush_cache"): self._flush,
            ("POST", "/release_memory_occupation"): self._release,
            ("POST", "/resume_memory_occupation"): self._resume,
        }

    def _is_allowed(self, path: str, token: str | None) -> bool:
        """utils/auth.py `decide_request_auth` (all)."""
        args = self.args
        if path.startswith(("/health", "/ready", "/metrics")):
            return True
        is_admin = path in _ADMIN_ROUTES or (path == "/load_lora_adapter_from_tensors" and args.at_least("0.5.22"))
        wanted = (args.admin_api_key or args.api_key) if is_admin else args.api_key
        return wanted is None or token == wanted

    def _wait(self, connection: socket.socket, is_over: Callable[[], bool], at_most_s: float = math.inf) -> None:
        """Wait without the lock.

        Raises:
            SchedulerDiedError: the server has ended.
            _ClientLeftError: the client left.
        """
        deadline = time.monotonic() + at_most_s
        while True:
            with self._cond:
                self._check_alive()
                if is_over() or time.monotonic() >= deadline:
                    return
                # Polled, as neither a client that leaves nor the end of a `hold` notifies this thread.
                self._cond.wait(min(_POLL_S, deadline - time.monotonic()) if at_most_s < math.inf else _POLL_S)
            if _has_left(connection):
                raise _ClientLeftError

    def _wait_for_ever(self, is_over: Callable[[], bool]) -> None:
        """A wait that ends with the server only: control requests never notice that their client is gone."""
        with self._cond:
            while not is_over():
                self._check_alive()
                self._cond.wait(_POLL_S)

    def _check_alive(self) -> None:
        if self.death is not None:
            raise SchedulerDiedError

    # Information

    def _health(self, body: Any, query: Any, connection: socket.socket) -> tuple[int, Any]:
        """entrypoints/http_server.py `health_generate`: generates a token, so it fails after 20 s of a pause (all)."""
        self._wait(connection, lambda: self._pause_mode is None, 20.0)
        self.scheduler.check_awake()
        return (200 if self._pause_mode is None else 503), ""

    def _model_info(self, body: Any, query: Any, connection: socket.socket) -> tuple[int, Any]:
        found = {
            "model_path": self.args.model_path,
            "tokenizer_path": self.args.model_path,
            "is_generation": True,
            "preferred_sampling_params": self.args.preferred_sampling_params,
            "weight_version": "default",
            "has_image_understanding": self.args.image_token_id is not None,
            "has_audio_understanding": False,
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
        }
        if self.args.at_least("0.5.20"):
            found["served_model_name"] = self._base_name
        return 200, found

    @property
    def _base_name(self) -> str:
        return self.args.served_model_name or self.args.model_path

    def _server_info(self, body: Any, query: Any, connection: socket.socket) -> tuple[int, Any]:
        """The fields of `server_args` and more; `lora_target_modules` is a set there, as given (all)."""
        args = self.args
        # `--dp-size N --enable-dp-attention` is another spelling of `--attn-dp-size N` from 0.5.22 on.
        attention = {"attn_dp_size": args.attn_dp_size} if args.at_least("0.5.22") else {}
        return 200, {name: getattr(args, name) for name in _REPORTED} | attention | {
            "tokenizer_path": args.model_path,
            "served_model_name": self._base_name,
            "context_length": None,  # the flag, not the model's own length
            "enable_dp_attention": args.attn_dp_size > 1,
            "enable_lora": args.enable_lora or None,
            "max_lora_rank": args.max_lora_rank if args.enable_lora else None,
            "lora_target_modules": sorted(set(args.lora_target_modules)) if args.enable_lora else None,
            "lora_paths": [] if args.enable_lora else None,
        }

    def _counts(self) -> tuple[int, int]:
        with self._cond:
            queued = sum(run.is_queued for run in self._running)
            return self.other_clients + len(self._running) - queued, queued

    def _loads(self, body: Any, query: Any, connection: socket.socket) -> tuple[int, Any]:
        """entrypoints/v1_loads.py (all)."""
        running, queued = self._counts()
        load = {
            "dp_rank": 0,
            "num_running_reqs": running,
            "num_waiting_reqs": queued,
            "num_total_reqs": running + queued,
        }
        return 200, {"timestamp": "2026-01-01T00:00:00+00:00", "version": self.args.version, "loads": [load]}

    def _models(self, body: Any, query: Any, connection: socket.socket) -> tuple[int, Any]:
        """entrypoints/http_server.py `available_models` (all)."""
        base = {"id": self._base_name, "object": "model", "created": 0, "owned_by": "sglang", "root": self._base_name}
        cards = [base | {"parent": None, "max_model_len": self.args.context_length}]
        with self._cond:
            for ref in self._registry.values() if self.args.enable_lora else ():
                own = {"id": ref.name, "root": ref.path, "parent": self._base_name, "max_model_len": None}
                cards.append(base | own)
        return 200, {"object": "list", "data": cards}

    # Adapters: managers/tokenizer_control_mixin.py

    def _load_route(self, body: Any, query: Any, connection: socket.socket) -> tuple[int, Any]:
        name, path = _fields(body, "lora_name", "lora_path")
        ref = LoRARef(name=name, path=path, pinned=bool(body.get("pinned")))
        return self._update_answer(lambda: self._load(ref, lambda: self.scheduler.load(ref)))

    def _load_tensors_route(self, body: Any, query: Any, connection: socket.socket) -> tuple[int, Any]:
        """managers/io_struct.py: one string up to 0.5.16, one per tensor-parallel rank from 0.5.17 on."""
        per_rank = self.args.at_least("0.5.17")
        name, config, payloads = _fields(
            body, "lora_name", "config_dict", "serialized_named_tensors" if per_rank else "serialized_tensors"
        )
        if not isinstance(payloads, list if per_rank else str):
            return 400, _error_response("1 validation error: serialized tensors", 400, "Bad Request")
        ref = LoRARef(name=name, path=TENSOR_PATH, pinned=bool(body.get("pinned")))

        def load() -> dict[str, Any]:
            data: list[Any] = payloads if isinstance(payloads, list) else [payloads]
            return self.scheduler.load_tensors(ref, data, config, body.get("load_format"))

        return self._update_answer(lambda: self._load(ref, load))

    def _unload_route(self, body: Any, query: Any, connection: socket.socket) -> tuple[int, Any]:
        (name,) = _fields(body, "lora_name")
        return self._update_answer(lambda: self._unload(name))

    def _update_answer(self, act: Callable[[], dict[str, Any]]) -> tuple[int, Any]:
        """Only ValueError is turned into a 400; AssertionError and others are a plain 500 (all).

        `lora_update_lock` is held for the whole load or unload, without a timeout, even if no client waits for it.
        """
        try:
            if not self.args.enable_lora:
                raise ValueError("LoRA is not enabled. Please set `--enable-lora` to enable LoRA.")
            # "dp_size must be 1 for dynamic lora loading" up to 0.5.16, other words later, the same 500
            assert self.args.dp_size == 1
            while not self._update_lock.acquire(timeout=_POLL_S):
                self._check_alive()
            try:
                result = act()
            finally:
                self._update_lock.release()
        except ValueError as error:
            result = {"success": False, "error_message": str(error), "loaded_adapters": None}
        return (200 if result["success"] else 400), {"rid": None, "http_worker_ipc": None, **result}

    def _load(self, ref: LoRARef, act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if ref.name in self._pending_unloads:
            raise ValueError(
                f"LoRA adapter '{ref.name}' has an incomplete unload. Retry the unload before loading it again."
            )
        with self._cond:
            self._check_alive()
            # Under the lock with the registry, so that no request finds an adapter in one of them only.
            result = act()
            self.peak_host_adapters = max(self.peak_host_adapters, len(self.scheduler.loras))
            if result["success"]:
                self._registry[ref.name] = self._ref_cache[ref.name] = ref
                self._counters[ref.lora_id] = 0
        # Also after a failed load; through the unload that waits.
        limit = self.args.max_loaded_loras
        while limit is not None and len(self._registry) > limit:
            oldest = next(iter(self._registry))
            self._unload(oldest)
            del result["loaded_adapters"][oldest]
        return result

    def _unload(self, name: str) -> dict[str, Any]:
        """Unregister, wait until the counter is exactly 0, then remove it from the scheduler."""
        with self._cond:
            lora_id = self._pending_unloads.get(name)
            if lora_id is None:
                ref = self._registry.pop(name, None)
                if ref is None:
                    raise ValueError(
                        f"LoRA with name {name} does not exist. Loaded LoRAs: odict_keys({list(self._registry)})"
                    )
                lora_id = ref.lora_id
                if self.args.at_least("0.5.21"):
                    self._pending_unloads[name] = lora_id
        self._wait_for_ever(lambda: self._counters.get(lora_id, 0) == 0)
        with self._cond:
            self._counters.pop(lora_id, None)
            self._pending_unloads.pop(name, None)
            return self.scheduler.unload(lora_id)

    # Generation: managers/tokenizer_manager.py `generate_request`

    def _generate(self, body: Any, query: Any, connection: socket.socket) -> tuple[int, Any]:
        job = _Job(body)
        # Not `_wait`: SGLang looks for a client that has left only while it waits for an answer (0.5.15).
        self._wait_for_ever(lambda: self._pause_mode is None)
        with self._cond:
            self._readers += 1
        try:
            # Before the request is validated (all), so a request that is refused holds a reference already.
            self._resolve(job)
            outputs = self._submit(job, connection)
        finally:
            with self._cond:
                self._readers -= 1
                self._cond.notify_all()
        return 200, outputs[0] if job.is_single else outputs

    def _resolve(self, job: "_Job") -> None:
        """`_validate_and_resolve_lora` and `_resolve_lora_path` (all)."""
        name = job.lora_name
        if name is None:
            return
        if not self.args.enable_lora:
            raise _ClientError(
                f"LoRA adapter '{name}' was requested, but LoRA is not enabled. "
                "Please launch the server with --enable-lora flag and preload adapters "
                "using --lora-paths or /load_lora_adapter endpoint."
            )
        with self._cond:
            if is_registered := name in self._registry:
                # The least recently used one is first, and `_load` evicts from there.
                self._registry.move_to_end(name)
            old = self._ref_cache.get(name)
        if old is None:
            raise _ClientError(
                f"Got LoRA adapter that has never been loaded: {name}\n"
                f"All loaded adapters: dict_keys({list(self._ref_cache)})."
            )
        if not is_registered:
            # An unloaded name is loaded again from its old path, and the client is not informed.
            ref = LoRARef(name=old.name, path=old.path, pinned=old.pinned)
            _, result = self._update_answer(partial(self._load, ref, partial(self.scheduler.load, ref)))
            if not result["success"] and "already loaded" not in result["error_message"]:
                raise _ClientError(f"Failed to implicitly load LoRA adapter {name}: {result['error_message']}")
        with self._cond:
            # Looked up and counted under one lock: an unload in between would not wait for this request.
            job.lora_id = self._registry[name].lora_id
            self._counters[job.lora_id] += len(job.prompts)

    def _release_reference(self, lora_id: str | None, count: int = 1) -> None:
        with self._cond:
            # It is not there once the unload has ended. It may fall below 0, as in SGLang, and then no unload ends.
            if lora_id in self._counters:
                self._counters[lora_id] -= count
            self._cond.notify_all()

    def _submit(self, job: "_Job", connection: socket.socket) -> list[dict[str, Any]]:
        try:
            prompts = [self._tokenize(*pair) for pair in zip(job.prompts, job.images, strict=True)]
            preferred = self.args.preferred_sampling_params or {}
            params = [sampling_params(preferred | given, self.args) for given in job.params]
            for prompt, given in zip(prompts, params, strict=True):
                self._validate(prompt, given)
            with self._cond:
                known = {run.rid for run in self._running}
                if (taken := next((rid for rid in job.rids if rid in known), None)) is not None:
                    raise ValueError(f"Duplicate request ID detected: {taken}")
                is_queued = self._holding == "queued"
                runs = [_Running(rid, job.lora_name, is_queued=is_queued) for rid in job.rids]
                self._running += runs
        except (TypeError, ValueError) as error:
            # Up to 0.5.21, a request that is refused after it acquired its adapter keeps the reference for ever.
            if self.args.at_least("0.5.22"):  # `_release_req_states_on_failure`
                self._release_reference(job.lora_id, len(job.prompts))
            if isinstance(error, TypeError):  # not converted: HTTP 500
                raise
            raise _ClientError(str(error)) from error
        outputs: list[dict[str, Any]] = []
        done = 0
        try:
            # One after the other in this thread, while all of them count as running, as in a batch.
            for index, run in enumerate(runs):
                outputs.append(self._run(job, run, prompts[index], params[index], connection))
                done = index + 1
        except _ClientLeftError:
            # The samples before these have ended, and have given their references back.
            for run in runs[done:]:
                if self._lets_go_of_abandoned(run):
                    self._release_reference(job.lora_id)
            raise
        finally:
            with self._cond:
                self._running = [other for other in self._running if not any(other is run for run in runs)]
                self._cond.notify_all()
        return outputs

    def _lets_go_of_abandoned(self, run: _Running) -> bool:
        """Whether a request whose client left releases its adapter once the scheduler has aborted it.

        0.5.15 and 0.5.17 drop its state at once (`_discard_pending_req_states`), so that nothing releases it.
        """
        if run.is_queued:
            return self.args.at_least("0.5.22")
        return not self.args.at_least("0.5.15") or self.args.at_least("0.5.20")

    def _tokenize(self, prompt: list[int], images: list[str]) -> list[int]:
        if not prompt:
            raise ValueError("input_ids cannot be empty.")
        marker = self.args.image_token_id
        if not images or marker is None:  # a model of text has no `mm_processor` (all)
            return list(prompt)
        if prompt.count(marker) != len(images):
            raise TypeError("another number of image tokens than of images")  # seen: HTTP 500 (0.5.15)
        lengths = iter([image_length(image) for image in images])
        return [token for one in prompt for token in ([marker] * next(lengths) if one == marker else [one])]

    def _validate(self, prompt: list[int], params: dict[str, Any]) -> None:
        """`_validate_one_request`. Ids of the prompt are not checked: `_validate_input_ids_in_vocab` has no caller."""
        limit = self.args.context_length
        if len(prompt) >= limit:
            raise ValueError(
                f"The input ({len(prompt)} tokens) is longer than the model's context length ({limit} tokens)."
            )
        if len(prompt) + params["max_new_tokens"] > limit:
            raise ValueError(
                "Requested token count exceeds the model's maximum context length "
                f"of {limit} tokens. You requested a total of {len(prompt) + params['max_new_tokens']} tokens"
            )

    def _run(
        self,
        job: "_Job",
        run: _Running,
        prompt: list[int],
        params: dict[str, Any],
        connection: socket.socket,
    ) -> dict[str, Any]:
        self._wait(connection, lambda: run.is_aborted or (self._holding is None and self._pause_mode is None))
        if run.is_aborted and run.is_queued:
            if self.args.at_least("0.5.22"):
                self._release_reference(job.lora_id)
            return self._aborted_in_queue(job, run)
        with self._cond:
            self._check_alive()
            self.scheduler.check_awake()
            if any(not 0 <= token < self.args.shapes.vocab for token in prompt):  # INF: an embedding out of range
                self._die("CUDA error: device-side assert triggered")
                raise SchedulerDiedError
            patch = self.scheduler.fetch(job.lora_id)
            # By adapter and prompt, so that a sample does not depend on what other requests draw meanwhile.
            key = hashlib.sha256(repr((run.lora_name, prompt)).encode()).hexdigest()
            self._draws[key] += 1
            sampler = Sampler(self.args, self.scheduler.policy, patch, prompt, params, self._draws[key])
        # Nothing is released in a `finally`: what an abandoned request gives back depends on the version.
        finish = self._sample(sampler, run, job, connection)
        self._release_reference(job.lora_id)
        status = finish.get("status_code")
        if status is not None:
            self._raise_abort(job.lora_id, status, finish["message"])
        return self._output(job, run, prompt, sampler, finish)

    def _sample(self, sampler: Sampler, run: _Running, job: "_Job", connection: socket.socket) -> dict[str, Any]:
        if self.abort_with:
            status = self.abort_with.pop(0)
            return {"type": "abort", "message": "Aborted", "status_code": status, "err_type": None}
        while sampler.finish is None:
            # A pause freezes what runs; an abort ends it after one more step.
            self._wait(connection, lambda: run.is_aborted or self._pause_mode is None)
            if run.is_aborted:
                return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
            sampler.advance(job.top_logprobs)
            if self.token_delay_s:
                self._wait(connection, lambda: run.is_aborted, self.token_delay_s)
        return sampler.finish

    def _raise_abort(self, lora_id: str | None, status: int, message: str) -> None:
        """`_handle_abort_finish_reason`: 400 is a ValueError, 500 and 503 an HTTPException (others from 0.5.23 on).

        Up to 0.5.21 the latter release a second time, after `_handle_batch_output` did.
        """
        if status == 400:
            raise _ClientError(message)
        if status in (500, 503):
            if not self.args.at_least("0.5.22"):
                self._release_reference(lora_id)
            raise _HTTPStatusError(status, message)
        if self.args.at_least("0.5.23"):
            raise _HTTPStatusError(status, message)

    def _aborted_in_queue(self, job: "_Job", run: _Running) -> dict[str, Any]:
        """`_handle_abort_req` (all): the scheduler never counted the tokens of the prompt."""
        meta: dict[str, Any] = {
            "id": run.rid,
            "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
            "weight_version": "default",
            "e2e_latency": 0.01,
            "completion_tokens": 0,
        }
        if job.return_logprob:
            meta |= {"input_token_logprobs": [], "output_token_logprobs": [], "output_token_logprobs_length": 0}
        return {"text": "", "output_ids": [], "meta_info": meta}

    def _output(self, job: "_Job", run: _Running, prompt: list[int], sampler: Sampler, finish: Any) -> dict[str, Any]:
        tokens = sampler.output
        meta: dict[str, Any] = {
            "id": run.rid,
            "finish_reason": finish,
            "prompt_tokens": len(prompt),
            "weight_version": "default",
            "num_retractions": 0,
        }
        if job.return_logprob:
            values = sampler.logprobs
            start = len(prompt) if job.logprob_start == -1 else job.logprob_start
            meta["input_token_logprobs"] = sampler.input_logprobs(start) if start < len(prompt) else []
            meta["output_token_logprobs"] = [(v, t, None) for v, t in zip(values, tokens, strict=True)]
            meta["output_token_logprobs_length"] = len(values)
            if job.top_logprobs > 0:
                top = [[(v, t, None) for v, t in zip(*pair, strict=True)] for pair in sampler.top]
                meta |= {"input_top_logprobs": [], "output_top_logprobs": top}
        meta |= {"reasoning_tokens": 0, "completion_tokens": len(tokens), "cached_tokens": 0, "e2e_latency": 0.01}
        output = {"text": self.args.text_of(tokens), "output_ids": list(tokens), "meta_info": meta}
        if job.return_prompt_token_ids and self.args.at_least("0.5.15"):
            output["prompt_token_ids"] = prompt
        self.edit_output(output)
        return output

    # Pausing: `pause_generation`, `continue_generation`, `abort_request` (all)

    def _pause(self, body: Any, query: Any, connection: socket.socket) -> tuple[int, Any]:
        mode = (body or {}).get("mode", "abort")
        if mode not in ("abort", "in_place", "retract"):
            return 400, _error_response("Input should be 'abort', 'retract' or 'in_place'", 400, "Bad Request")
        with self._cond:
            # "abort" only closes the gate for new requests; the scheduler itself is not paused.
            self._pause_mode = mode
        if mode == "abort":

            def is_drained() -> bool:
                self._abort(lambda run: True)
                return self._readers == 0

            self._wait_for_ever(is_drained)
        return 200, {"message": "Generation paused successfully.", "status": "ok"}

    def _continue(self, body: Any, query: Any, connection: socket.socket) -> tuple[int, Any]:
        with self._cond:
            self._pause_mode = None
            self._cond.notify_all()
        return 200, {"message": "Generation continued successfully.", "status": "ok"}

    def _abort_route(self, body: Any, query: Any, connection: socket.socket) -> tuple[int, Any]:
        rid = body.get("rid") or ""
        if body.get("abort_all"):
            self._abort(lambda run: True)
        # Only a whole id gets to the scheduler, which then takes it for the beginning of any (all).
        elif any(run.rid == rid for run in self._running):
            self._abort(lambda run: run.rid.startswith(rid))
        return 200, ""

    def _abort(self, is_meant: Callable[[_Running], bool]) -> None:
        with self._cond:
            for run in self._running:
                if is_meant(run):
                    run.is_aborted = True
            self._cond.notify_all()

    def _flush(self, body: Any, query: dict[str, list[str]], connection: socket.socket) -> tuple[int, Any]:
        def is_idle() -> bool:
            return not self._running and not self.other_clients

        self._wait(connection, is_idle, float(query.get("timeout", ["0"])[0]))
        if not is_idle():
            return 400, "Flush cache failed.\n"
        return 200, (
            "Cache flushed.\nPlease check backend logs for more details. "
            "(When there are running or waiting requests, the operation will not be performed.)\n"
        )

    def _release(self, body: Any, query: Any, connection: socket.socket) -> tuple[int, Any]:
        with self._cond:
            running, queued = self._counts()
            # managers/scheduler_components/weight_updater.py: 0.5.21 overlooks the queue while it is paused
            is_idle = not running and (not queued or (self.args.at_least("0.5.21") and self._pause_mode is not None))
            self.scheduler.release_memory((body or {}).get("tags") or list(MEMORY_TAGS), is_idle)
        return 200, None

    def _resume(self, body: Any, query: Any, connection: socket.socket) -> tuple[int, Any]:
        with self._cond:
            self.scheduler.resume_memory((body or {}).get("tags") or list(MEMORY_TAGS))
        return 200, None


class _Job:
    """A body of /generate: lists over samples, with one adapter and one form of log-probabilities for all of them.

    Source: managers/io_struct.py `GenerateReqInput.normalize_batch_and_arguments` (all); unknown fields are ignored.
    Of its fields for prompts it takes `input_ids` only.
    """

    def __init__(self, body: dict[str, Any]) -> None:
        prompts = body.get("input_ids")
        if not prompts:
            raise _ClientError("input_ids cannot be empty.")
        is_one = isinstance(prompts[0], int)
        given = body.get("sampling_params") or {}
        # Unlike SGLang, where it leaves a reference behind up to 0.5.21, so that no unload of its adapter ends.
        if any(one.get("n") not in (None, 1) for one in (given if isinstance(given, list) else [given])):
            raise _ClientError("The fake takes n=1 only, as adapter sync may send nothing else.")
        self.is_single = is_one
        self.prompts = [prompts] if is_one else prompts
        count = len(self.prompts)
        # `_normalize_image_data`: one image, a list of them for one prompt, or a list for each prompt.
        images = body.get("image_data") or []
        images = [images] if isinstance(images, str) else images
        self.images = [images] if is_one else images or [[]] * count
        self.params = given if isinstance(given, list) else [given] * count
        self.lora_name: str | None = body.get("lora_path")
        self.lora_id: str | None = None
        self.return_logprob = bool(body.get("return_logprob"))
        self.logprob_start: int = body.get("logprob_start_len", -1)
        self.top_logprobs: int = body.get("top_logprobs_num") or 0
        self.return_prompt_token_ids = bool(body.get("return_prompt_token_ids"))
        rids = body.get("rid") or [uuid.uuid4().hex for _ in range(count)]
        rids = rids if isinstance(rids, list) else [rids] if self.is_single else [f"{rids}_{i}" for i in range(count)]
        if len(rids) != count:
            raise _ClientError("The specified rids length mismatch with the batch_size for batch processing.")
        self.rids = rids
        if not len(self.params) == len(self.images) == count:
            raise IndexError("lists of different lengths")


def image_length(url: str) -> int:
    """How many tokens an image has: one for each 28 x 28 pixels, as in Qwen2.5-VL."""
    from PIL import Image  # only a server for images needs it

    with Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) as image:
        return max(1, int(image.width // 28) * int(image.height // 28))


def _fields(body: Any, *names: str) -> list[Any]:
    missing = [name for name in names if not isinstance(body, dict) or body.get(name) is None]
    if missing:
        # FastAPI's RequestValidationError, turned into a 400 by `validation_exception_handler` (all)
        raise _HTTPStatusError(400, f"1 validation error: {{'type': 'missing', 'loc': ('body', '{missing[0]}')}}")
    return [body[name] for name in names]


def _error_response(message: str, code: int, kind: str | None = None) -> dict[str, Any]:
    """entrypoints/openai/protocol.py `ErrorResponse` (all)."""
    return {"object": "error", "message": message, "type": kind or str(code), "param": None, "code": code}


def _has_left(connection: socket.socket) -> bool:
    try:
        readable, _, _ = select.select([connection], [], [], 0)
        return bool(readable) and connection.recv(1, socket.MSG_PEEK) == b""
    except (OSError, ValueError):
        return True


def _finite(value: Any) -> Any:
    """orjson writes NaN and infinity as null (utils/json_response.py, all)."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # A restart needs the same port, while connections of the server before it are still closing.
    allow_reuse_address = True
    # Python's default is 5, and one generation opens up to 64 connections at once.
    request_queue_size = 128

    def __init__(self, fake: FakeSGLang) -> None:
        super().__init__(("127.0.0.1", fake._port), _handler(fake))
        self._fake = fake

    def get_request(self) -> tuple[socket.socket, Any]:
        # Not in the handler's thread, which may begin after `stop` has broken the open connections.
        connection, address = super().get_request()
        self._fake._sockets.add(connection)
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        self._fake._sockets.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients that leave are part of the tests


def _handler(fake: FakeSGLang) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        # Connections stay open between requests, as uvicorn's do, so clients meet whatever goes wrong with kept ones.
        protocol_version = "HTTP/1.1"
        # Headers and body are two writes, of which the second would wait until the client has confirmed the first.
        disable_nagle_algorithm = True

        def finish(self) -> None:
            with contextlib.suppress(OSError):
                super().finish()

        def _serve(self) -> None:
            sent = self._body()
            kind, _, token = (self.headers.get("Authorization") or "").partition(" ")
            try:
                body = json.loads(sent) if sent else None
            except ValueError:
                self._send(400, _error_response("JSON decode error", 400, "Bad Request"))
                return
            request = Request(self.command, self.path, body, token if kind.lower() == "bearer" else None)
            try:
                status, answer = fake.answer(request, self.connection)
            except (SchedulerDiedError, _ClientLeftError):
                self._break()
                return
            # The server may have ended while the answer was made, and a process that has ended sends none.
            if fake.death is not None:
                self._break()
            # After the request was acted on: what is tested is an answer that is lost, not a request.
            elif fake.drop[request.path] > 0:
                fake.drop[request.path] -= 1
                self._break()
            else:
                self._send(status, answer)

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            chunks = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)

        def _break(self) -> None:
            # Or the handler would go on to read a next request.
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

        def _send(self, status: int, answer: Any) -> None:
            is_text = isinstance(answer, str)
            content = answer.encode() if is_text else json.dumps(_finite(answer)).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; charset=utf-8" if is_text else "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = _serve

        def log_message(self, *args: Any) -> None:
            pass

    return Handler
