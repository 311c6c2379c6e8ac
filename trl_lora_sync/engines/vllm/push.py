"""The trainer's side of `engine_plugins.vllm_push`: adapters sent to the host of a vLLM server, and deleted there.

What the server answers with is a path on its own host. It is sent back to that server and compared with what it lists,
and never used as a path here.
"""

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httpx
import tenacity

from trl_lora_sync.adapter.canonical import CanonicalAdapter
from trl_lora_sync.adapter.store import StoredAdapter
from trl_lora_sync.engine_plugins.checksum import Checksum, parts_of
from trl_lora_sync.engine_plugins.safetensors_file import METADATA, bytes_of, header_of
from trl_lora_sync.engine_plugins.vllm_push import (
    CHECKSUM_HEADER,
    CONFIG_KEY,
    DIRECTORY_VARIABLE,
    LENGTH_HEADER,
    MAX_MB_VARIABLE,
    PROTOCOL,
    ROUTE,
    STREAMS_HEADER,
    TOKEN_HEADER,
)
from trl_lora_sync.engines.base import Deadline, Timeouts
from trl_lora_sync.engines.http import is_unreachable, json_object, retrying, server_message
from trl_lora_sync.errors import LoRASyncError, ServerError, ServerSetupError, ServerUnreachableError
from trl_lora_sync.runtime import offload

logger = logging.getLogger(__name__)

# Larger pieces are copied more often on their way through httpx, smaller ones cost more calls.
_CHUNK_BYTES = 256 << 10
# Below, the additional requests would take longer than they save.
_STREAMS, STREAMS_FROM_BYTES = 4, 4 << 20
# `ServerEngine._request`: with the server's key; a refused key and an unreachable server come as errors.
Send = Callable[..., Awaitable[httpx.Response]]


class _NoStreamsError(Exception):
    """The adapter has to go in one HTTP request. Never leaves this module."""


class PushedAdapters:
    """What this process has pushed to one server and not deleted there yet."""

    def __init__(self, base_url: str, send: Send, serve_command: Callable[..., str], timeouts: Timeouts) -> None:
        self._base_url = base_url
        self._send = send
        self._serve_command = serve_command
        self._timeouts = timeouts
        self._max_bytes: int | None = None
        self._streams = 0  # how many connections a large adapter may take
        # Names by what has become of them, in order.
        self._pushed: dict[str, None] = {}
        self._loaded: dict[str, None] = {}
        self._retired: dict[str, None] = {}
        self._overdue: dict[str, None] = {}

    async def connect(self, deadline: Deadline) -> bool:
        """Find out whether the server takes pushes."""
        response: httpx.Response = await self._retrying(deadline)(self._send, "GET", ROUTE, deadline)
        if response.status_code == 403:
            logger.warning("%s takes no adapters over HTTP: %s", self._base_url, server_message(response))
        if response.status_code != 200:
            return False
        # Whatever is not such an offer counts as none.
        with contextlib.suppress(ServerError):
            offer = json_object(response, ServerError)
            if offer.get("protocol") == PROTOCOL and isinstance(offer.get("max_bytes"), int):
                self._max_bytes = offer["max_bytes"]
                # They are not encrypted.
                if isinstance(offer.get("streams"), int) and self._base_url.startswith("http://"):
                    self._streams = min(_STREAMS, offer["streams"])
        return self._max_bytes is not None

    def take_over(self, before: "PushedAdapters") -> None:
        """Delete what an earlier connection to the same server has left to delete."""
        # With its last unload, which was before this connection. A DELETE of a missing name is harmless.
        self._overdue |= before._overdue | before._retired

    async def push(self, adapter: StoredAdapter, deadline: Deadline) -> str:
        """Send an adapter's tensors; sending the same again succeeds.

        Returns:
            The server's path of them.

        Raises:
            ServerSetupError: the server takes no pushes, none of this size, or has no room.
            ServerError: it refused for another reason.
        """
        if adapter.content is None or self._max_bytes is None:
            raise ServerSetupError(
                f"{self._base_url} takes no adapters over HTTP. Install this package next to vLLM, and restart the "
                f"server with {self._serve_command('--push')}."
            )
        # In the thread for long calls: a header that names every expert takes hundreds of milliseconds.
        body = await offload(partial(SafetensorsBody, adapter.content))
        if len(body) > self._max_bytes:
            raise self._too_large(adapter, f"it offers {self._max_bytes / 1e6:.1f} MB")
        self._pushed[adapter.name] = None  # before the request, whose answer may be lost
        response = await self._deliver(f"{ROUTE}/{adapter.name}", body, deadline)
        if response.status_code != 200:
            raise self._push_error(adapter, response)
        path = json_object(response, ServerError).get("path")
        if not isinstance(path, str) or not path:
            raise ServerError(f"{self._base_url} took the adapter {adapter.name!r} but named no path for it.")
        return path

    async def _deliver(self, path: str, body: "SafetensorsBody", deadline: Deadline) -> httpx.Response:
        if self._streams and len(body) >= STREAMS_FROM_BYTES:
            try:
                return await self._retrying(deadline)(self._deliver_in_streams, path, body, deadline)
            except _NoStreamsError as error:
                # For the rest of the run: a port that a firewall drops would cost each push that wait.
                self._streams = 0
                logger.info("%s takes adapters in HTTP requests only, which is slower: %s", self._base_url, error)
        # In the thread for long calls, because all bytes are read.
        checksum = await offload(body.checksum)
        headers = {"Content-Type": "application/octet-stream", CHECKSUM_HEADER: checksum}
        return await self._retrying(deadline)(self._send, "PUT", path, deadline, content=body, headers=headers)

    async def _deliver_in_streams(self, path: str, body: "SafetensorsBody", deadline: Deadline) -> httpx.Response:
        """See `engine_plugins.push_streams`.

        Raises:
            _NoStreamsError: the server, or something on the way to it, does not allow that.
        """
        headers = {LENGTH_HEADER: str(len(body)), STREAMS_HEADER: str(self._streams)}
        response = await self._send("POST", path, deadline, headers=headers)
        # The size is refused, and it is the same in one HTTP request.
        if response.status_code in (413, 507):
            return response
        if response.status_code != 200:
            raise _NoStreamsError(server_message(response))
        offer = json_object(response, ServerError)
        port, token = offer.get("port"), offer.get("token")
        if not isinstance(port, int) or not isinstance(token, str):
            raise _NoStreamsError(server_message(response))
        # Each connection begins with the token and the number of its part, see `engine_plugins.push_streams`.
        sending = [
            asyncio.ensure_future(self._send_part(port, token.encode() + bytes([number]), body.part(*part)))
            for number, part in enumerate(parts_of(len(body), self._streams))
        ]
        try:
            # The checksum is computed while the bytes are sent.
            together = asyncio.gather(offload(body.checksum), *sending)
            found: list[Any] = await asyncio.wait_for(together, deadline.remaining_s())
        except asyncio.TimeoutError:
            raise deadline.error(f"sending an adapter to {self._base_url}") from None
        except OSError as error:
            raise ServerUnreachableError(f"A connection to {self._base_url} broke during a push ({error}).") from error
        finally:
            # `gather` raises the first error and lets the other connections go on.
            for one in sending:
                one.cancel()
        headers = {CHECKSUM_HEADER: found[0], TOKEN_HEADER: token}
        response = await self._send("PUT", path, deadline, headers=headers)
        # The connections led elsewhere, or the answer to an earlier request was lost.
        if response.status_code in (408, 409, 410):
            raise _NoStreamsError(server_message(response))
        return response

    async def _send_part(self, port: int, head: bytes, pieces: Iterable[memoryview]) -> None:
        try:
            connecting = asyncio.open_connection(urlsplit(self._base_url).hostname, port)
            _, writer = await asyncio.wait_for(connecting, self._timeouts.connect_streams_s)
        except (OSError, asyncio.TimeoutError) as error:
            raise _NoStreamsError(f"its port {port} cannot be reached ({str(error) or 'no answer'})") from error
        try:
            writer.write(head)
            for piece in pieces:
                writer.write(piece)
                # Without it, asyncio would buffer a whole part in this process.
                await writer.drain()
        finally:
            writer.close()
        # Raises what went wrong with the bytes that were still buffered.
        await writer.wait_closed()

    def confirm(self, adapter_name: str) -> None:
        """The server has loaded it, and may read its files again."""
        if adapter_name in self._pushed:
            del self._pushed[adapter_name]
            self._loaded[adapter_name] = None

    async def retire(self, adapter_name: str, deadline: Deadline) -> None:
        """After an unload, delete what the server cannot read any more; never fails.

        What was loaded goes one unload later, because vLLM reads an evicted adapter again for a request that still
        runs, and crashes if it is gone; or with the last one. What never was loaded, or was pushed by a dead run, goes
        at once.
        """
        if self._max_bytes is None:
            return
        if adapter_name in self._loaded:
            self._overdue |= self._retired
            del self._loaded[adapter_name]
            self._retired = {adapter_name: None}
        else:
            self._pushed.pop(adapter_name, None)
            self._overdue[adapter_name] = None
        if not self._loaded:
            self._overdue |= self._retired
            self._retired = {}
        for name in list(self._overdue):
            try:
                await self._send("DELETE", f"{ROUTE}/{name}", deadline)
            except LoRASyncError as error:
                # Each further one would wait for the same server.
                logger.info("The files of %s stay on the server for now: %s", name, error)
                return
            self._overdue.pop(name, None)

    def _retrying(self, deadline: Deadline) -> tenacity.AsyncRetrying:
        """While the server is unreachable: it answers a push that it has carried out already as before."""
        return retrying(deadline, is_unreachable, at_most_s=self._timeouts.retry_s)

    def _push_error(self, adapter: StoredAdapter, response: httpx.Response) -> ServerError:
        message = server_message(response)
        if response.status_code == 413:
            return self._too_large(adapter, message)
        if response.status_code == 507:
            return ServerSetupError(
                f"{self._base_url} has no room for the {adapter.payload_bytes / 1e6:.1f} MB of the adapter. Give its "
                f"host or container a larger /dev/shm (docker run --shm-size), or set {DIRECTORY_VARIABLE} in its "
                f"environment to a folder with more room. The server answered: {message!r}"
            )
        return ServerError(
            f"{self._base_url} refused the push of the adapter {adapter.name!r} (HTTP {response.status_code}). "
            f"Is there a proxy in between that changes or limits requests? The server answered: {message!r}"
        )

    def _too_large(self, adapter: StoredAdapter, message: str) -> ServerSetupError:
        return ServerSetupError(
            f"{self._base_url} takes no adapters of {adapter.payload_bytes / 1e6:.1f} MB. In its environment, export "
            f"{MAX_MB_VARIABLE}={math.ceil(adapter.payload_bytes / 1e6) + 1}, and restart it with "
            f"{self._serve_command('--lora-rank', str(adapter.rank), '--push')}; or set "
            f'lora_sync_dtype="bfloat16" if it runs in that. The server answered: {message!r}'
        )


class SafetensorsBody:
    """An adapter as the bytes of a safetensors file with its configuration in the metadata, never joined."""

    def __init__(self, adapter: CanonicalAdapter) -> None:
        header = header_of(adapter.tensors, METADATA | {CONFIG_KEY: json.dumps(adapter.config())})
        self._pieces = [memoryview(header), bytes_of(adapter.flat)]

    def checksum(self) -> str:
        """See `engine_plugins.checksum`; reads all bytes."""
        checksum = Checksum()
        for piece in self._pieces:
            checksum.update(piece)
        return checksum.hexdigest()

    def __len__(self) -> int:
        return sum(map(len, self._pieces))

    def part(self, start: int, end: int) -> Iterator[memoryview]:
        """The bytes from `start` to `end`, in chunks."""
        for piece in self._pieces:
            stop = min(end, len(piece))
            for at in range(start, stop, _CHUNK_BYTES):
                yield piece[at : min(stop, at + _CHUNK_BYTES)]
            start, end = max(0, start - len(piece)), max(0, end - len(piece))

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self.part(0, len(self)):
            yield bytes(chunk)
