"""Answers the routes of `vllm_push` inside a vLLM server."""

import asyncio
import atexit
import os
import re
from collections.abc import AsyncIterable, AsyncIterator
from itertools import cycle
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trl_lora_sync.engine_plugins import logger
from trl_lora_sync.engine_plugins.checksum import ROW_BYTES
from trl_lora_sync.engine_plugins.push_store import PushStore, Upload, sweep_dead_servers
from trl_lora_sync.engine_plugins.push_streams import MOST_STREAMS, IncomingStreams
from trl_lora_sync.engine_plugins.refusals import Refused, check_name
from trl_lora_sync.engine_plugins.routes import below, check_key, header, respond
from trl_lora_sync.engine_plugins.vllm_push import (
    CHECKSUM_HEADER,
    DIRECTORY_VARIABLE,
    LENGTH_HEADER,
    MAX_MB_VARIABLE,
    PROTOCOL,
    ROUTE,
    STREAMS_HEADER,
    STREAMS_VARIABLE,
    TOKEN_HEADER,
)

_DEFAULT_MAX_MB, _DEFAULT_DIRECTORY = "4096", "/dev/shm"
_CHECKSUM = re.compile(r"[0-9a-f]{16}")
# Checked and written off the event loop in pieces of this size, so that no other request waits for an upload.
# A whole number of rows of `Checksum`, which it reads without a copy.
_BATCH_BYTES = 2 * ROW_BYTES
# The largest adapter by default, 4,096 MB, arrives in this time at 7 MB/s.
UPLOAD_TIMEOUT_S = 600.0


class PushMiddleware:
    """Answers the push route and passes everything else on. Bodies are never held in memory as a whole.

    Args:
        app: the server behind it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._streams = 0 if os.environ.get(STREAMS_VARIABLE) == "0" else MOST_STREAMS
        # By name, at most one each: over several connections, or in an HTTP request, whose connection may hang.
        self._arriving: dict[str, IncomingStreams | Upload] = {}
        self.store = PushStore(
            Path(os.environ.get(DIRECTORY_VARIABLE) or _DEFAULT_DIRECTORY), max_bytes=_max_bytes_from_environment()
        )
        for folder in sweep_dead_servers(self.store.root):
            logger.info("Removed %s, which a server that was killed had left behind.", folder)
        # For a server that ends without `lifespan.shutdown`; `close` may be called twice.
        atexit.register(self.store.close)
        logger.info(
            "Adapters of up to %.0f MB can be pushed to this server, into %s.",
            self.store.max_bytes / 1e6,
            self.store.root,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, self._closing(send))
            return
        rest = below(ROUTE, scope)
        if rest is None:
            await self.app(scope, receive, send)
        else:
            await respond(self._answer(Request(scope, receive), rest), scope, receive, send)

    def _closing(self, send: Send) -> Send:
        async def send_and_close(message: Message) -> None:
            # Both `complete` and `failed`. Before it is passed on, as the process may end after that.
            if message["type"].startswith("lifespan.shutdown"):
                for name in list(self._arriving):
                    self._end(name)
                self.store.close()
            await send(message)

        return send_and_close

    async def _answer(self, request: Request, rest: str) -> dict[str, Any]:
        check_key(request.scope)
        if not rest and request.method == "GET":
            return {
                "protocol": PROTOCOL,
                "max_bytes": self.store.max_bytes,
                "streams": self._streams,
                "adapters": self.store.sizes(),
            }
        name = rest.removeprefix("/")
        check_name(name)
        if request.method == "POST":
            return self._open_port(name, request.scope)
        if request.method == "PUT":
            return await self._take(name, request)
        if request.method == "DELETE":
            # What has come over connections is not there by its name until the `PUT`, which the trainer may never send.
            self._end(name)
            return {"name": name, "deleted": await asyncio.to_thread(self.store.delete, name)}
        raise Refused(405, f"PUT, POST and DELETE are offered here, and GET {ROUTE}.")

    def _open_port(self, name: str, scope: Scope) -> dict[str, Any]:
        if not self._streams:
            raise Refused(405, f"{STREAMS_VARIABLE} is 0 here, so no port is opened.")
        size, streams = _length_in(scope, LENGTH_HEADER), _streams_in(scope)
        upload = self._begin(name, size)
        try:
            # Of several addresses of this host, the trainer can reach the one where its request arrived.
            incoming = IncomingStreams(upload, (scope.get("server") or ("127.0.0.1", 0))[0], streams)
        except OSError as error:
            upload.abort()
            # Not 503, as of a server that is down: the trainer then sends it in one HTTP request.
            raise Refused(500, f"No port can be opened for the upload ({error.strerror}).") from error
        self._arriving[name] = incoming
        # For a trainer that never sends the `PUT`, which ends it otherwise.
        asyncio.get_running_loop().call_later(UPLOAD_TIMEOUT_S, self._end, name, incoming)
        return {"name": name, "port": incoming.port, "token": incoming.token}

    def _begin(self, name: str, size: int) -> Upload:
        self._end(name)
        return self.store.begin(name, size)

    def _end(self, name: str, only: IncomingStreams | Upload | None = None) -> None:
        """End an upload; does nothing to a finished one.

        Args:
            only: by default what arrives for the name. The trainer has given that up if it sends another request.
        """
        one = only or self._arriving.get(name)
        if one is not None:
            one.abort()
            if self._arriving.get(name) is one:  # and no later one
                del self._arriving[name]

    async def _take(self, name: str, request: Request) -> dict[str, Any]:
        checksum = _checksum_in(request.scope)
        path = self.store.path_of(name, checksum)
        token = header(request.scope, TOKEN_HEADER)
        if path is not None:  # a push that is repeated because its answer was lost
            self._end(name)
        elif token is not None:
            path = await self._take_streams(name, token, checksum)
        else:
            path = await self._take_body(name, request, checksum)
        return {"name": name, "path": str(path), "bytes": self.store.sizes().get(name), "checksum": checksum}

    async def _take_streams(self, name: str, token: str, checksum: str) -> Path:
        incoming = self._arriving.get(name)
        if not isinstance(incoming, IncomingStreams) or incoming.token != token:
            raise Refused(410, f"No upload of {name} with this token is under way.")
        try:
            await asyncio.wait_for(incoming.received(), UPLOAD_TIMEOUT_S)
            return await asyncio.to_thread(incoming.upload.finish, checksum)
        except (OSError, asyncio.TimeoutError) as error:
            raise Refused(408, f"The bytes of {name} did not come ({error}).") from error
        finally:
            self._end(name, incoming)

    async def _take_body(self, name: str, request: Request, checksum: str) -> Path:
        upload = self._arriving[name] = self._begin(name, _length_in(request.scope, "Content-Length"))
        try:
            return await asyncio.wait_for(_receive_into(upload, request.stream(), checksum), UPLOAD_TIMEOUT_S)
        except asyncio.TimeoutError as error:
            raise Refused(408, f"The upload took more than {UPLOAD_TIMEOUT_S:.0f} s.") from error
        finally:
            self._end(name, upload)


async def _receive_into(upload: Upload, body: AsyncIterable[bytes], checksum: str) -> Path:
    writing: asyncio.Future[None] | None = None
    try:
        async for batch in _batches(body):
            if writing is not None:
                await writing
            # One batch is written while the next one arrives.
            writing = asyncio.ensure_future(asyncio.to_thread(upload.write, batch))
    finally:
        if writing is not None:
            # The thread cannot be stopped. Its file must not be closed, nor its memory used again, while it writes.
            await writing
    return await asyncio.to_thread(upload.finish, checksum)


async def _batches(body: AsyncIterable[bytes]) -> AsyncIterator[memoryview]:
    """The body in pieces of `_BATCH_BYTES`, and the rest of it.

    Two pieces of memory take turns, so each is valid until the next but one: new memory for each would cost as much
    again as copying to it.
    """
    buffers = cycle((memoryview(bytearray(_BATCH_BYTES)), memoryview(bytearray(_BATCH_BYTES))))
    batch, filled = next(buffers), 0
    async for chunk in body:
        left = memoryview(chunk)
        while left:
            part = left[: _BATCH_BYTES - filled]
            batch[filled : filled + len(part)] = part
            filled, left = filled + len(part), left[len(part) :]
            if filled == _BATCH_BYTES:
                yield batch
                batch, filled = next(buffers), 0
    if filled:
        yield batch[:filled]


# Headers


def _checksum_in(scope: Scope) -> str:
    found = header(scope, CHECKSUM_HEADER) or ""
    if not _CHECKSUM.fullmatch(found):
        raise Refused(400, f"The header {CHECKSUM_HEADER} of the body is needed, in 16 hexadecimal digits.")
    return found


def _length_in(scope: Scope, name: str) -> int:
    # Needed before the body, because room for all of it is reserved first.
    length = header(scope, name) or ""
    # `int` alone would also take signs, blanks, underscores and digits of other scripts.
    if not re.fullmatch(r"[0-9]{1,15}", length):
        raise Refused(411, f"The header {name} is needed.")
    return int(length)


def _streams_in(scope: Scope) -> int:
    streams = header(scope, STREAMS_HEADER) or ""
    if not re.fullmatch(r"[0-9]", streams) or not 0 < int(streams) <= MOST_STREAMS:
        raise Refused(400, f"The header {STREAMS_HEADER} must be a number from 1 to {MOST_STREAMS}.")
    return int(streams)


def _max_bytes_from_environment() -> int:
    text = os.environ.get(MAX_MB_VARIABLE) or _DEFAULT_MAX_MB
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]+)?", text) or not float(text):
        raise ValueError(f"{MAX_MB_VARIABLE}={text!r} is not a number of MB. Set it to a number above 0, or unset it.")
    return int(float(text) * 1e6)
