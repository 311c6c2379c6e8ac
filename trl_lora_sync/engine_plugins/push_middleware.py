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
from trl_lora_sync.engine_plugins.refusals import Refused, check_name
from trl_lora_sync.engine_plugins.routes import below, check_key, header, respond
from trl_lora_sync.engine_plugins.timeouts import timeout
from trl_lora_sync.engine_plugins.vllm_push import (
    CHECKSUM_HEADER,
    DIRECTORY_VARIABLE,
    MAX_MB_VARIABLE,
    PROTOCOL,
    ROUTE,
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
            if message["type"].startswith("lifespan.shutdown"):
                self.store.close()
            await send(message)

        return send_and_close

    async def _answer(self, request: Request, rest: str) -> dict[str, Any]:
        check_key(request.scope)
        if not rest and request.method == "GET":
            return {"protocol": PROTOCOL, "max_bytes": self.store.max_bytes, "adapters": self.store.sizes()}
        name = rest.removeprefix("/")
        check_name(name)
        if request.method == "PUT":
            return await self._take(name, request)
        if request.method == "DELETE":
            return {"name": name, "deleted": await asyncio.to_thread(self.store.delete, name)}
        raise Refused(405, f"PUT and DELETE are offered here, and GET {ROUTE}.")

    async def _take(self, name: str, request: Request) -> dict[str, Any]:
        checksum, size = _checksum_in(request.scope), _length_in(request.scope)
        path = self.store.path_of(name, checksum)  # a push that is repeated because its answer was lost
        if path is None:
            upload = self.store.begin(name, size)
            try:
                async with timeout(UPLOAD_TIMEOUT_S):
                    path = await _receive_into(upload, request.stream(), checksum)
            except asyncio.TimeoutError as error:
                raise Refused(408, f"The upload took more than {UPLOAD_TIMEOUT_S:.0f} s.") from error
            finally:
                upload.abort()
        return {"name": name, "path": str(path), "bytes": size, "checksum": checksum}


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


def _length_in(scope: Scope) -> int:
    # Needed before the body, because room for all of it is reserved first.
    length = header(scope, "Content-Length") or ""
    if not re.fullmatch(r"[0-9]{1,15}", length):
        raise Refused(411, "The header Content-Length is needed.")
    return int(length)


def _max_bytes_from_environment() -> int:
    text = os.environ.get(MAX_MB_VARIABLE) or _DEFAULT_MAX_MB
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]+)?", text) or not float(text):
        raise ValueError(f"{MAX_MB_VARIABLE}={text!r} is not a number of MB. Set it to a number above 0, or unset it.")
    return int(float(text) * 1e6)
