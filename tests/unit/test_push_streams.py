"""A push over several connections: the trainer's side and the middleware, with only HTTP left out."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from support.bodies import bytes_of_body

from trl_lora_sync.adapter.canonical import CanonicalAdapter, LoRAModule
from trl_lora_sync.adapter.flat import FlatBuffer
from trl_lora_sync.adapter.store import StoredAdapter
from trl_lora_sync.engine_plugins import push_middleware, push_streams
from trl_lora_sync.engine_plugins.vllm_push import DIRECTORY_VARIABLE, ROUTE, STREAMS_VARIABLE, PushMiddleware
from trl_lora_sync.engines.base import TIMEOUTS, Deadline
from trl_lora_sync.engines.vllm import push
from trl_lora_sync.engines.vllm.push import PushedAdapters, SafetensorsBody
from trl_lora_sync.errors import ServerError, ServerUnreachableError

pytestmark = pytest.mark.outside  # real connections

URL = "http://127.0.0.1:8000"
# Six rows of the checksum and a rest, for four connections.
ROWS = 3 * 128 + 5
Change = Callable[[httpx.Response], Awaitable[httpx.Response]]


def adapter(rows: int = ROWS) -> CanonicalAdapter:
    lora_A, lora_B = torch.randn(rows, 4096), torch.randn(8, rows)
    return FlatBuffer().export(
        [LoRAModule(name="model.q_proj", lora_A=lora_A, lora_B=lora_B, scaling=1.0)], dtype=torch.bfloat16
    )


def stored(content: CanonicalAdapter, version: int = 1) -> StoredAdapter:
    return StoredAdapter(
        name=f"v{version}",
        version=version,
        rank=8,
        target_modules=content.target_modules,
        payload_bytes=content.payload_bytes,
        content=content,
    )


def soon(seconds: float = 20.0) -> Deadline:
    return Deadline.after(seconds, "the test")


class Link:
    """Requests of the trainer, handed to the middleware.

    Attributes:
        requests: methods, in order.
        after_post: what becomes of the answer that names the port.
        before_put: what happens before a PUT is sent.
        address: where the server's side of the connection is.
        headers: replaced in each PUT.
    """

    def __init__(self) -> None:
        self.middleware = PushMiddleware(self._no_app)
        self.requests: list[str] = []
        self.after_post: Change | None = None
        self.before_put: Callable[[], Awaitable[None]] | None = None
        self.headers: dict[str, str] = {}
        self.address = "127.0.0.1"

    async def _at_address(self, scope: Any, receive: Any, send: Any) -> None:
        await self.middleware(scope | {"server": (self.address, 8000)}, receive, send)

    async def _no_app(self, scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("nothing is passed on")

    async def __call__(
        self, method: str, path: str, deadline: Deadline, *, content: Any = None, headers: Any = None
    ) -> httpx.Response:
        self.requests.append(method)
        if method == "PUT" and self.before_put is not None:
            await self.before_put()
        sent = dict(headers or {}) | (self.headers if method == "PUT" else {})
        if content is not None:
            sent["Content-Length"] = str(len(content))
        transport = httpx.ASGITransport(app=self._at_address)
        async with httpx.AsyncClient(transport=transport, base_url=URL) as client:
            response = await client.request(method, path, content=content, headers=sent)
        if response.status_code == 503:
            raise ServerUnreachableError("as an engine reads this status")
        return await self.after_post(response) if method == "POST" and self.after_post else response


@pytest.fixture
def link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    monkeypatch.setattr(push, "STREAMS_FROM_BYTES", 1 << 20)
    link = Link()
    monkeypatch.setattr(push_middleware, "check_key", lambda scope: None)  # it reads what vLLM notes
    yield link
    assert link.middleware.store.arriving == 0
    link.middleware.store.close()
    assert list(tmp_path.iterdir()) == []


def files(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*") if path.is_file())


async def connected(link: Link, base_url: str = URL) -> PushedAdapters:
    pushed = PushedAdapters(base_url, link, lambda *options: "serve", TIMEOUTS)
    assert await pushed.connect(soon())
    link.requests.clear()
    return pushed


@pytest.mark.parametrize("rows", [1, ROWS])
def test_an_adapter_arrives_whole_over_several_connections(
    link: Link, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr(push, "STREAMS_FROM_BYTES", 1)
    content = adapter(rows)

    async def test() -> str:
        return await (await connected(link)).push(stored(content), soon())

    path = asyncio.run(test())
    assert link.requests == ["POST", "PUT"]
    assert (Path(path) / "adapter_model.safetensors").read_bytes() == bytes_of_body(SafetensorsBody(content))
    assert link.middleware.store.sizes() == {"v1": len(SafetensorsBody(content))}


def test_a_push_that_is_repeated_succeeds(link: Link) -> None:
    content = adapter()

    async def test() -> None:
        pushed = await connected(link)
        assert await pushed.push(stored(content), soon()) == await pushed.push(stored(content), soon())

    asyncio.run(test())


def test_a_server_may_open_no_ports(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STREAMS_VARIABLE, "0")
    link.middleware = PushMiddleware(link.middleware.app)

    async def test() -> httpx.Response:
        await (await connected(link)).push(stored(adapter()), soon())
        return await link("POST", f"{ROUTE}/v2", soon(), headers={"Lora-Sync-Length": "9", "Lora-Sync-Streams": "1"})

    assert asyncio.run(test()).status_code == 405
    assert link.requests == ["PUT", "POST"]


def test_a_small_adapter_and_an_encrypted_one_go_in_one_request(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    content = adapter()

    async def test() -> None:
        await (await connected(link, "https://127.0.0.1:8000")).push(stored(content), soon())
        monkeypatch.setattr(push, "STREAMS_FROM_BYTES", 1 << 30)
        await (await connected(link)).push(stored(content, 2), soon())

    asyncio.run(test())
    assert link.requests == ["PUT"]


def test_a_port_that_cannot_be_reached_is_tried_once(link: Link, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def behind_a_firewall(response: httpx.Response) -> httpx.Response:
        return httpx.Response(200, json=response.json() | {"port": 1}, request=response.request)

    link.after_post = behind_a_firewall

    async def test() -> None:
        pushed = await connected(link)
        for version in (1, 2):
            await pushed.push(stored(adapter(), version), soon())

    asyncio.run(test())
    assert link.requests == ["POST", "PUT", "PUT"]
    assert "in HTTP requests only, which is slower: its port 1 cannot be reached" in caplog.text


@pytest.mark.parametrize(
    ("address", "is_slower"), [("::ffff:127.0.0.1", False), ("/run/vllm.sock", True)], ids=["IPv4 as IPv6", "a socket"]
)
def test_a_push_succeeds_at_an_address_that_cannot_be_bound_as_it_is(
    link: Link, caplog: pytest.LogCaptureFixture, address: str, is_slower: bool
) -> None:
    """Each push ended with HTTP 503, as if the server was down, to a vLLM that listens on `::` for one."""
    caplog.set_level("INFO")
    link.address = address

    async def test() -> None:
        await (await connected(link)).push(stored(adapter()), soon(5))

    asyncio.run(test())
    assert link.requests == ["POST", "PUT"]
    assert ("No port can be opened for the upload" in caplog.text) == is_slower


@pytest.mark.parametrize("sent", [b"x" * 33, b""], ids=["another secret", "nothing"])
def test_a_stranger_is_sent_away(link: Link, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(push_streams, "HEAD_TIMEOUT_S", 0.2)

    async def visited(response: httpx.Response) -> httpx.Response:
        reader, writer = await asyncio.open_connection("127.0.0.1", response.json()["port"])
        writer.write(sent)
        assert await reader.read() == b""
        writer.close()
        return response

    link.after_post = visited
    content = adapter()

    async def test() -> str:
        return await (await connected(link)).push(stored(content), soon())

    path = asyncio.run(test())
    assert link.requests == ["POST", "PUT"]
    assert (Path(path) / "adapter_model.safetensors").read_bytes() == bytes_of_body(SafetensorsBody(content))


def test_connections_that_lead_elsewhere_are_given_up(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    """As through a gateway that takes every connection."""
    monkeypatch.setattr(push_streams, "CONNECT_TIMEOUT_S", 0.2)
    content = adapter()

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 16):
            pass
        writer.close()

    async def test() -> str:
        gateway = await asyncio.start_server(swallow, "127.0.0.1", 0)

        async def through_the_gateway(response: httpx.Response) -> httpx.Response:
            port = gateway.sockets[0].getsockname()[1]
            return httpx.Response(200, json=response.json() | {"port": port}, request=response.request)

        link.after_post = through_the_gateway
        async with gateway:
            return await (await connected(link)).push(stored(content), soon())

    path = asyncio.run(test())
    assert link.requests == ["POST", "PUT", "PUT"]
    assert (Path(path) / "adapter_model.safetensors").read_bytes() == bytes_of_body(SafetensorsBody(content))


def test_damaged_bytes_are_refused_and_leave_nothing(link: Link, tmp_path: Path) -> None:
    link.headers = {"Lora-Sync-Checksum": "0" * 16}

    async def test() -> None:
        with pytest.raises(ServerError, match="do not match the checksum"):
            await (await connected(link)).push(stored(adapter()), soon())

    asyncio.run(test())
    assert files(tmp_path) == []


def test_a_push_that_is_cancelled_leaves_nothing(link: Link, tmp_path: Path) -> None:
    async def test() -> None:
        opened = asyncio.Event()

        async def wait(response: httpx.Response) -> httpx.Response:
            _, writer = await asyncio.open_connection("127.0.0.1", response.json()["port"])
            writer.write(response.json()["token"].encode() + bytes([0]) + b"x" * 1000)
            await writer.drain()
            opened.set()
            try:
                await asyncio.sleep(60)
            finally:
                writer.close()
            return response

        link.after_post = wait
        pushing = asyncio.ensure_future((await connected(link)).push(stored(adapter()), soon()))
        await opened.wait()
        assert files(tmp_path) == ["adapter_model.safetensors"]
        pushing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await pushing
        for _ in range(500):
            if not files(tmp_path):
                break
            await asyncio.sleep(0.01)
        assert files(tmp_path) == []

    asyncio.run(test())


def test_an_upload_whose_end_is_never_sent_goes_with_its_name(link: Link, tmp_path: Path) -> None:
    """Of a trainer that was interrupted or killed then: its file took room for ten minutes, unload or sweep
    notwithstanding, so there was none for the next push."""

    async def test() -> None:
        pushed, is_sent = await connected(link), asyncio.Event()

        async def hang() -> None:
            is_sent.set()
            await asyncio.sleep(60)

        link.before_put = hang
        pushing = asyncio.ensure_future(pushed.push(stored(adapter()), soon()))
        await is_sent.wait()
        while link.middleware.store.arriving:
            await asyncio.sleep(0.01)
        pushing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await pushing
        assert files(tmp_path) == ["adapter_model.safetensors"]
        await pushed.retire("v1", soon())
        assert files(tmp_path) == []

    asyncio.run(test())


def test_a_trainer_that_never_connects_holds_no_room(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_streams, "CONNECT_TIMEOUT_S", 0.05)

    async def test() -> httpx.Response:
        headers = {"Lora-Sync-Length": "4000000", "Lora-Sync-Streams": "2"}
        offer = (await link("POST", f"{ROUTE}/v1", soon(), headers=headers)).json()
        assert link.middleware.store.arriving == 4_000_000
        answer = {"Lora-Sync-Checksum": "0" * 16, "Lora-Sync-Token": offer["token"]}
        return await link("PUT", f"{ROUTE}/v1", soon(), headers=answer)

    response = asyncio.run(test())
    assert response.status_code == 408
    assert link.middleware.store.arriving == 0


@pytest.mark.parametrize("streams", ["0", "9", "two", ""])
def test_a_number_of_connections_that_is_none_is_refused(link: Link, streams: str) -> None:
    headers = {"Lora-Sync-Length": "4000000", "Lora-Sync-Streams": streams}
    response = asyncio.run(link("POST", f"{ROUTE}/v1", soon(), headers=headers))
    assert response.status_code == 400
    assert "from 1 to 8" in response.text


def test_an_upload_that_is_begun_again_replaces_the_one_before(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_streams, "CONNECT_TIMEOUT_S", 0.5)

    async def test() -> None:
        headers = {"Lora-Sync-Length": "4000000", "Lora-Sync-Streams": "2"}
        first, second = [(await link("POST", f"{ROUTE}/v1", soon(), headers=headers)).json() for _ in range(2)]
        assert link.middleware.store.arriving == 4_000_000
        statuses = []
        for offer in (first, second):
            answer = {"Lora-Sync-Checksum": "0" * 16, "Lora-Sync-Token": offer["token"]}
            statuses.append((await link("PUT", f"{ROUTE}/v1", soon(), headers=answer)).status_code)
        assert statuses == [410, 408]

    asyncio.run(test())
