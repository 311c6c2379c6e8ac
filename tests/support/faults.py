"""A proxy that breaks things on purpose, by a script: which request, what happens to it.

Stands between the trainer and a real server, with real sockets on both sides. For several servers, run one per server.
Where there are fewer server processes than servers, proxies with separate `tenant` values make several out of one.
"""

import contextlib
import http.client
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import httpx

from support.servers import is_scoring

COMPLETIONS, LOAD, UNLOAD, MODELS = (
    "/v1/completions",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/v1/models",
)

# What can happen to a request. "Before" means that the server never sees it, "after" that it has carried it out.
DROPS = ("close before", "reset before", "close after", "reset after", "refuse")
DELAYS = ("delay before", "delay after")
HANGS = ("hang before", "hang after", "hang in the middle")
TRUNCATIONS = ("cut", "clip")
DUPLICATES = ("ask twice", "answer twice", "answer the next one as well", "answer from before")
STATUSES = ("500 before", "503 before", "500 after", "503 after")
LOSSES = ("restart",)
OUTAGES = ("outage", "outage and restart")
KINDS = (*DROPS, *DELAYS, *HANGS, *TRUNCATIONS, *DUPLICATES, *STATUSES, *LOSSES, *OUTAGES)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that happens to one request.

    Attributes:
        kind: one of `KINDS`.
        path: the route that is hit; empty for any.
        nth: which request to that route, counted from 1 when the fault is armed.
        seconds: of a delay.
        fraction: of an answer's bytes that come through before it is cut, clipped or hangs.
        times: how many requests in a row a server refuses that is down; of an outage, how many steps it lasts.
    """

    kind: str
    path: str = ""
    nth: int = 1
    seconds: float = 0.0
    fraction: float = 0.5
    times: int = 1


@dataclass
class FaultProxy:
    """Passes requests on to a server, except where a fault is armed.

    Attributes:
        tenant: put in front of the names that adapters have on the server, where no other name is seen through this
            proxy. So several proxies make several servers out of one process.
        on_request: called with (path, body) before anything else happens to a request; may kill the server.
        on_answer: called with (path, body) when the server has answered, before anything is sent back.
        while_asking: called with (path, body) when the server has got the request, before its answer is waited for.
        rewrite: changes the body that the server gets.
        rewrite_answer: changes what the server has answered, before any fault.
        fired: the faults that have happened, with the routes they hit.
        sampled: the models of the requests for completions, in order, without scoring.
        restarts: how often the server has lost its adapters.
        calmed: how often `calm_down` has been called; faults that are still to come from before then do not.
    """

    target: str
    tenant: str = ""
    base_url: str = ""
    on_request: Callable[[str, dict[str, Any]], None] = lambda path, body: None
    on_answer: Callable[[str, dict[str, Any]], None] = lambda path, body: None
    while_asking: Callable[[str, dict[str, Any]], None] = lambda path, body: None
    rewrite: Callable[[str, dict[str, Any]], dict[str, Any]] = lambda path, body: body
    rewrite_answer: Callable[[str, bytes], bytes] = lambda path, answer: answer
    fired: list[tuple[Fault, str]] = field(default_factory=list)
    sampled: list[str] = field(default_factory=list)
    restarts: int = 0
    calmed: int = 0
    _names: set[str] = field(default_factory=set)
    _armed: list[list[Any]] = field(default_factory=list)
    _refusals: int = 0
    _outage: Fault | None = None
    _outage_steps: int = 0
    _answers: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _released: threading.Event = field(default_factory=threading.Event)
    _idle: threading.Condition = field(default_factory=threading.Condition)
    _in_flight: int = 0

    def arm(self, faults: Sequence[Fault]) -> None:
        """Let `faults` happen from the next request on; faults armed before are dropped."""
        with self._lock:
            self._armed = [[fault, fault.nth] for fault in faults]
            self._refusals = 0

    def calm_down(self, timeout_s: float = 30.0) -> None:
        """Let no more faults happen, end hanging requests, and wait until every request has been answered."""
        self.arm([])
        self.end_outage()
        self.calmed += 1
        self._released.set()
        with self._idle:
            assert self._idle.wait_for(lambda: self._in_flight == 0, timeout_s), "a request never ends"
        self._released.clear()

    def end_step(self) -> None:
        """Disarm what has not happened; an outage goes on for as many steps as it has left."""
        self.arm([])
        self._outage_steps -= 1
        if self._outage_steps <= 0:
            self.end_outage()

    def end_outage(self) -> None:
        with self._lock:
            ended, self._outage = self._outage, None
        if ended is not None and ended.kind == "outage and restart":
            self.restart()

    def restart(self) -> None:
        self.restarts += 1
        forget_all(self.target, self.tenant)

    def hits(self, path: str) -> Fault | None:
        """The fault that happens to this request to `path`, if any; it is then used up."""
        with self._lock:
            if self._outage is not None:
                return Fault(kind="close before")
            if self._refusals:
                self._refusals -= 1
                return Fault(kind="close before")
            hit = None
            for entry in self._armed:
                if entry[0].path in ("", path):
                    entry[1] -= 1
                    if entry[1] <= 0 and hit is None:
                        hit = entry
            if hit is None:
                return None
            self._armed.remove(hit)
            fault: Fault = hit[0]
            self.fired.append((fault, path))
            if fault.kind in ("refuse", "restart"):
                self._refusals = fault.times - 1
            if fault.kind in OUTAGES:
                self._outage, self._outage_steps = fault, fault.times
                return Fault(kind="close before")
        if fault.kind == "restart":
            self.restart()
        return fault

    def wait(self, seconds: float | None) -> None:
        self._released.wait(seconds)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        with self._idle:
            self._in_flight += 1
        try:
            yield
        finally:
            with self._idle:
                self._in_flight -= 1
                self._idle.notify_all()

    def ask(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        target = urlsplit(self.target)
        connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=120)
        try:
            connection.request(method, path, body=body, headers=headers)
            self.while_asking(urlsplit(path).path, json.loads(body or b"{}"))
            response = connection.getresponse()
            answer = response.status, response.read()
        except (OSError, http.client.HTTPException):
            raise ConnectionAbortedError from None  # the server is gone, and so is this connection
        finally:
            connection.close()
        return answer

    def as_tenant(self, body: dict[str, Any]) -> dict[str, Any]:
        """The request with the names that adapters have on the server."""
        if "lora_name" in body:
            self._names.add(body["lora_name"])
        return body | {key: self.tenant + body[key] for key in ("lora_name", "model") if body.get(key) in self._names}

    def without_tenants(self, path: str, answer: bytes) -> bytes:
        """The answer with the names that the client knows, and without other tenants' adapters."""
        if not self.tenant:
            return answer
        if path == MODELS:
            listing = json.loads(answer)
            listing["data"] = [
                model for model in listing["data"] if not model["parent"] or model["id"].startswith(self.tenant)
            ]
            answer = json.dumps(listing).encode()
        return answer.replace(self.tenant.encode(), b"")

    def remember(self, path: str, status: int, answer: bytes) -> None:
        self._answers[path] = (status, answer)

    def answer_from_before(self, path: str) -> tuple[int, bytes] | None:
        return self._answers.get(path)


def forget_all(base_url: str, tenant: str = "") -> None:
    """Take every adapter from a server, which is what a restart does to it."""
    with httpx.Client(base_url=base_url, timeout=60, trust_env=False) as client:
        for model in client.get(MODELS).json()["data"]:
            if model["parent"] and model["id"].startswith(tenant):
                client.post(UNLOAD, json={"lora_name": model["id"]})


@contextlib.contextmanager
def fault_proxies(base_urls: Sequence[str]) -> Iterator[list[FaultProxy]]:
    """A proxy for each URL while the block lasts; equal URLs still give separate servers."""
    shared = {url for url in base_urls if base_urls.count(url) > 1}
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(fault_proxy(url, tenant=f"tenant-{place}-of-" if url in shared else ""))
            for place, url in enumerate(base_urls)
        ]


@contextlib.contextmanager
def fault_proxy(base_url: str, tenant: str = "") -> Iterator[FaultProxy]:
    proxy = FaultProxy(base_url, tenant)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(proxy))
    server.daemon_threads = True
    server.block_on_close = False
    server.handle_error = lambda *_: None  # type: ignore[method-assign] # broken connections are what this is for
    proxy.base_url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.calm_down()
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)


def _handler(proxy: FaultProxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        left_over: tuple[bytes, int] | None = None  # sent in front of the answer to the connection's next request

        def _pass_on(self) -> None:
            sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with proxy.counted():
                try:
                    self._handle(urlsplit(self.path).path, sent)
                except (OSError, ConnectionAbortedError):
                    self.close_connection = True

        def _handle(self, path: str, sent: bytes) -> None:
            body = json.loads(sent or b"{}")
            if path == COMPLETIONS and not is_scoring(body):
                proxy.sampled.append(body["model"])
            proxy.on_request(path, body)
            fault = proxy.hits(path) or Fault(kind="none")
            if self.left_over and self.left_over[1] == proxy.calmed:
                self.wfile.write(self.left_over[0])
            self.left_over = None
            if not self._before(fault, path):
                return
            status, answer = self._ask(path, sent)
            if fault.kind == "ask twice":
                status, answer = self._ask(path, sent)
            proxy.on_answer(path, body)
            answer = proxy.rewrite_answer(path, answer)
            self._after(fault, status, answer)

        def _before(self, fault: Fault, path: str) -> bool:
            """What happens before the request to the server; returns whether to send it."""
            match fault.kind:
                case "close before" | "refuse" | "restart":
                    self.close_connection = True
                case "reset before":
                    self._reset()
                case "hang before":
                    proxy.wait(None)
                    self.close_connection = True
                case "500 before" | "503 before":
                    self._send(int(fault.kind[:3]), b"the proxy is out of order")
                case "answer from before" if proxy.answer_from_before(path):
                    self._send(*proxy.answer_from_before(path))  # type: ignore[misc]
                case _:
                    if fault.kind == "delay before":
                        proxy.wait(fault.seconds)
                    return True
            return False

        def _after(self, fault: Fault, status: int, answer: bytes) -> None:
            head, short = _head(status, len(answer)), answer[: int(fault.fraction * len(answer))]
            match fault.kind:
                case "close after":
                    self.close_connection = True
                case "reset after":
                    self._reset()
                case "hang after":
                    proxy.wait(None)
                    self.close_connection = True
                case "hang in the middle":
                    self.wfile.write(head + short)
                    proxy.wait(None)
                    self.close_connection = True
                case "cut":
                    self.wfile.write(head + short)
                    self.close_connection = True
                case "clip":
                    self._send(status, short)
                case "500 after" | "503 after":
                    self._send(int(fault.kind[:3]), b"the proxy lost the answer")
                case _:
                    if fault.kind == "delay after":
                        proxy.wait(fault.seconds)
                    self._send(status, answer)
                    if fault.kind == "answer twice":
                        self._send(status, answer)
                    if fault.kind == "answer the next one as well":
                        self.left_over = head + answer, proxy.calmed

        def _ask(self, path: str, sent: bytes) -> tuple[int, bytes]:
            headers = {name: self.headers[name] for name in ("Content-Type", "Authorization") if name in self.headers}
            body = json.dumps(proxy.as_tenant(proxy.rewrite(path, json.loads(sent)))).encode() if sent else b""
            status, answer = proxy.ask(self.command, self.path, body, headers)
            answer = proxy.without_tenants(path, answer)
            proxy.remember(path, status, answer)
            return status, answer

        def _send(self, status: int, answer: bytes) -> None:
            self.wfile.write(_head(status, len(answer)) + answer)

        def _reset(self) -> None:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True

        do_GET = do_POST = _pass_on

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


def _head(status: int, length: int) -> bytes:
    reason = http.client.responses.get(status, "")
    return f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n".encode()
