"""Servers between the trainer and vLLM, or instead of it, that record or misbehave; all of them real sockets."""

import contextlib
import http.client
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx


def adapters_on(base_url: str, api_key: str | None = None) -> dict[str, str]:
    """The adapters that the server lists: name to path."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    # Without certificates, which take 16 ms to read; each live test sends two requests.
    answer = httpx.get(f"{base_url}/v1/models", headers=headers, timeout=30, trust_env=False, verify=False)
    models = answer.json()["data"]
    return {model["id"]: model["root"] for model in models if model["parent"]}


def vllm_version(base_url: str) -> str:
    """The version that a vLLM server reports."""
    answer = httpx.get(f"{base_url}/version", timeout=30, trust_env=False, verify=False)
    return str(answer.raise_for_status().json()["version"])


@contextlib.contextmanager
def nobody_listening() -> Iterator[str]:
    """The URL of a port without a listener, which stays reserved while the block lasts."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{holder.getsockname()[1]}"


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    """A server that takes every connection and never answers; yields its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # The kernel completes the handshakes of waiting connections by itself.
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@dataclass
class Exchange:
    """One request that passed the proxy, with what came back."""

    method: str
    path: str
    body: dict[str, Any]
    status: int = 0
    answer: bytes = b""


@dataclass
class Proxy:
    """Passes requests on to a server, keeps a record of them, and lets a test change either side.

    Attributes:
        before: called with (path, body) before a request is passed on; what it returns replaces the body, and a
            `ConnectionAbortedError` closes the connection without an answer.
        after: called with (path, status, answer); what it returns, (status, answer), is sent instead.
    """

    target: str
    before: Callable[[str, dict[str, Any]], dict[str, Any]] = lambda path, body: body
    after: Callable[[str, int, bytes], tuple[int, bytes]] = lambda path, status, answer: (status, answer)
    exchanges: list[Exchange] = field(default_factory=list)
    base_url: str = ""

    def requests(self, path: str) -> list[dict[str, Any]]:
        """The bodies that were sent to `path`."""
        return [exchange.body for exchange in self.exchanges if exchange.path == path]

    def loads(self) -> list[dict[str, Any]]:
        """The loads of synced versions, without the probes and trials at the start of a run."""
        bodies = self.requests("/v1/load_lora_adapter")
        return [body for body in bodies if (version_of(body["lora_name"]) or 0) > 0]

    def generations(self) -> list[dict[str, Any]]:
        """The sampling requests of a run, without the probes at its start."""
        bodies = self.requests("/v1/completions") + self.requests("/v1/chat/completions")
        sampled = [body for body in bodies if not is_scoring(body)]
        return [body for body in sampled if (version_of(str(body.get("model"))) or 0) > 0]


def is_scoring(body: dict[str, Any]) -> bool:
    """Whether a request for completions scores a prompt; no answer to these is trained on."""
    return body.get("max_tokens") == 1 and body.get("logprobs") == 5


def version_of(adapter_name: str) -> int | None:
    """N of `<run id>-v<N>`."""
    number = adapter_name.rpartition("-v")[2]
    return int(number) if number.isdecimal() else None


@contextlib.contextmanager
def proxy_to(base_url: str) -> Iterator[Proxy]:
    """Run a `Proxy` in front of a server while the block lasts."""
    proxy = Proxy(base_url)
    server = _Server(("127.0.0.1", 0), _handler(proxy))
    proxy.base_url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # an engine opens 64 connections at once

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client may break a request off."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def _handler(proxy: Proxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Headers and body are two writes. The second would wait for the client to confirm the first, 40 ms on Linux.
        disable_nagle_algorithm = True

        def _pass_on(self) -> None:
            sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = urlsplit(self.path).path
            exchange = Exchange(self.command, path, json.loads(sent or b"{}"))
            proxy.exchanges.append(exchange)
            try:
                body = proxy.before(path, exchange.body)
            except ConnectionAbortedError:
                self.close_connection = True
                return
            exchange.status, exchange.answer = self._ask(json.dumps(body).encode() if sent else b"")
            status, answer = proxy.after(path, exchange.status, exchange.answer)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def _ask(self, body: bytes) -> tuple[int, bytes]:
            target = urlsplit(proxy.target)
            connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=120)
            headers = {name: self.headers[name] for name in ("Content-Type", "Authorization") if name in self.headers}
            try:
                connection.request(self.command, self.path, body=body, headers=headers)
                response = connection.getresponse()
                return response.status, response.read()
            finally:
                connection.close()

        do_GET = do_POST = _pass_on

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


def damage(directory: str | Path) -> None:
    """Cut the written tensors short, so that the real server refuses to load them."""
    file = Path(directory) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
