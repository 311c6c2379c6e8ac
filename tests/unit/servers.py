"""Throw-away HTTP servers on ports that the system chooses; what they answer is the test's own function."""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[["Request"], None]


@dataclass(frozen=True)
class Seen:
    """What arrived; a handler serves several requests of one connection."""

    path: str
    headers: Any
    body: Any


class Request(BaseHTTPRequestHandler):
    """One request, with short ways to answer it."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # as in the proxy of the live tests
    server: "Server"

    def answer(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        self.body = json.loads(self.rfile.read(length)) if length else None
        self.server.requests.append(Seen(self.path, self.headers, self.body))
        self.server.answer(self)

    do_GET = do_POST = do_PUT = do_DELETE = answer

    def send(self, status: int = 200, body: "str | bytes | dict[str, Any] | list[Any]" = "", **headers: str) -> None:
        """A whole answer."""
        if isinstance(body, dict | list):
            body = json.dumps(body)
            headers.setdefault("content_type", "application/json")
        content = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def begin(self, length: int) -> None:
        """The head of an answer of `length` bytes, whose bytes are up to the caller."""
        self.send_response(200)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.flush()

    def reset(self) -> None:
        """Break the connection, as a killed server does."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        self.connection.close()
        self.close_connection = True

    def wait(self, seconds: float) -> bool:
        """Sleep, but no longer than the server lives; returns whether it is still wanted."""
        return not self.server.stopped.wait(seconds)

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128  # an engine opens 64 connections at once

    def __init__(self, answer: Answer, host: str = "127.0.0.1") -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, 0), Request)
        self.answer = answer
        self.requests: list[Seen] = []
        self.stopped = threading.Event()
        self.url = f"http://[{host}]:{self.server_port}" if ":" in host else f"http://{host}:{self.server_port}"

    def handle_error(self, *_: object) -> None:
        """Broken connections are what some tests are about."""


@contextlib.contextmanager
def serving(answer: Answer, host: str = "127.0.0.1") -> Iterator[Server]:
    server = Server(answer, host)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stopped.set()
        server.shutdown()
        server.server_close()
        thread.join(10)


@contextlib.contextmanager
def nobody_listening() -> Iterator[str]:
    """The URL of a port without a listener, which stays reserved while the block lasts."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{holder.getsockname()[1]}"
