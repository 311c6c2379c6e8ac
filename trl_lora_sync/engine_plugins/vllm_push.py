"""A route through which adapters are pushed to a stock vLLM server, for trainers that share no folder with it.

    vllm serve MODEL --middleware trl_lora_sync.engine_plugins.vllm_push.PushMiddleware ...

    PUT    /v1/lora_sync/adapters/NAME   a safetensors file; answers with the path to load it from
    DELETE /v1/lora_sync/adapters/NAME   its files, after it was unloaded
    GET    /v1/lora_sync/adapters        what is there, and the largest adapter that is taken

Environment of the server:
    TRL_LORA_SYNC_PUSH_MAX_MB  largest adapter, in MB; 4096 by default
    TRL_LORA_SYNC_PUSH_DIR     where adapters are kept; /dev/shm by default
"""

import asyncio
import atexit
import base64
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from trl_lora_sync.engine_plugins.push_store import PushStore, Upload, sweep_dead_servers
from trl_lora_sync.engine_plugins.routes import (
    App,
    Message,
    Receive,
    Refused,
    Scope,
    Send,
    check_key,
    check_name,
    header,
    logger,
    path_of,
    refuse,
    respond,
)
from trl_lora_sync.engine_plugins.timeouts import timeout

MIDDLEWARE = "trl_lora_sync.engine_plugins.vllm_push.PushMiddleware"
ROUTE = "/v1/lora_sync/adapters"
PROTOCOL = 1
MAX_MB_VARIABLE = "TRL_LORA_SYNC_PUSH_MAX_MB"
DIRECTORY_VARIABLE = "TRL_LORA_SYNC_PUSH_DIR"

_DEFAULT_MAX_MB, _DEFAULT_DIRECTORY = "4096", "/dev/shm"
# RFC 9530
_DIGEST = re.compile(rb"sha-256=:([A-Za-z0-9+/]{43}=):")
# Hashed and written off the event loop in pieces of this size, so that nobody else's tokens wait for an upload.
_BATCH_BYTES = 1 << 20
_UPLOAD_TIMEOUT_S = 600.0


class PushMiddleware:
    """Answers the push route and passes everything else on. Plain ASGI, so that bodies are never held in memory.

    Args:
        app: the server behind it.
    """

    def __init__(self, app: App) -> None:
        self.app = app
        self._store = PushStore(
            Path(os.environ.get(DIRECTORY_VARIABLE) or _DEFAULT_DIRECTORY), max_bytes=_max_bytes_from_environment()
        )
        for folder in sweep_dead_servers(self._store.root):
            logger.info("Removed %s, which a server that was killed had left behind.", folder)
        atexit.register(self._store.close)
        logger.info(
            "Adapters of up to %.0f MB can be pushed to this server, into %s.",
            self._store.max_bytes / 1e6,
            self._store.root,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, self._closing(send))
            return
        path = path_of(scope)
        if scope["type"] != "http" or not (path == ROUTE or path.startswith(f"{ROUTE}/")):
            await self.app(scope, receive, send)
            return
        try:
            content = await self._answer(scope, path.removeprefix(ROUTE), receive)
        except Refused as refusal:
            await refuse(send, scope, refusal)
            return
        await respond(send, 200, content)

    def _closing(self, send: Send) -> Send:
        async def send_and_close(message: Message) -> None:
            if message["type"].startswith("lifespan.shutdown"):
                self._store.close()
            await send(message)

        return send_and_close

    async def _answer(self, scope: Scope, rest: str, receive: Receive) -> dict[str, Any]:
        check_key(scope)
        method = scope["method"]
        if not rest and method == "GET":
            return {"protocol": PROTOCOL, "max_bytes": self._store.max_bytes, "adapters": self._store.sizes()}
        name = rest.removeprefix("/")
        check_name(name)
        if method == "PUT":
            return await self._take(name, scope, receive)
        if method == "DELETE":
            return {"name": name, "deleted": await asyncio.to_thread(self._store.delete, name)}
        raise Refused(405, f"PUT and DELETE are offered here, and GET {ROUTE}.")

    async def _take(self, name: str, scope: Scope, receive: Receive) -> dict[str, Any]:
        digest, size = _digest_in(scope), _length_in(scope)
        path = self._store.path_of(name, digest)  # a push that is repeated because its answer was lost
        if path is None:
            upload = self._store.begin(name, size)
            try:
                async with timeout(_UPLOAD_TIMEOUT_S):
                    path = await _receive_into(upload, receive, digest)
            except asyncio.TimeoutError as error:
                raise Refused(408, f"The upload took more than {_UPLOAD_TIMEOUT_S:.0f} s.") from error
            finally:
                upload.abort()
        return {"name": name, "path": str(path), "bytes": size, "sha256": digest.hex()}


async def _receive_into(upload: Upload, receive: Receive, digest: bytes) -> Path:
    writing: asyncio.Future[None] | None = None
    try:
        async for batch in _batches(receive):
            if writing is not None:
                await writing
            # One batch is written while the next one arrives.
            writing = asyncio.ensure_future(asyncio.to_thread(upload.write, batch))
    finally:
        if writing is not None:
            await writing
    return await asyncio.to_thread(upload.finish, digest)


async def _batches(receive: Receive) -> AsyncIterator[bytearray]:
    """The body in pieces of at least `_BATCH_BYTES`, and the rest of it.

    Raises:
        Refused: the client has gone.
    """
    batch = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refused(400, "The connection closed before the body was complete.")
        batch += message.get("body", b"")
        more = message.get("more_body", False)
        if batch and (len(batch) >= _BATCH_BYTES or not more):
            yield batch
            batch = bytearray()


# Headers


def _digest_in(scope: Scope) -> bytes:
    found = _DIGEST.fullmatch(header(scope, b"content-digest") or b"")
    if found is None:
        raise Refused(400, "The header Content-Digest with sha-256=:BASE64: of the body is needed.")
    return base64.b64decode(found[1])


def _length_in(scope: Scope) -> int:
    length = header(scope, b"content-length") or b""
    if not re.fullmatch(rb"[0-9]{1,15}", length):
        raise Refused(411, "The header Content-Length is needed.")
    return int(length)


def _max_bytes_from_environment() -> int:
    text = os.environ.get(MAX_MB_VARIABLE) or _DEFAULT_MAX_MB
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]+)?", text) or not float(text):
        raise ValueError(f"{MAX_MB_VARIABLE}={text!r} is no number of MB. Set it to one above 0, or unset it.")
    return int(float(text) * 1e6)
