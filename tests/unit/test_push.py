"""Unit tier: pushing from the trainer's side, and which way of delivery is chosen."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors.torch
import torch
from support.bodies import bytes_of_body, checksum_of

from trl_lora_sync.adapter.canonical import CanonicalAdapter, LoRAModule
from trl_lora_sync.adapter.flat import FlatBuffer
from trl_lora_sync.adapter.store import StoredAdapter
from trl_lora_sync.engine_plugins.vllm_push import PROTOCOL, ROUTE
from trl_lora_sync.engines.base import TIMEOUTS, Capabilities, Deadline
from trl_lora_sync.engines.vllm.push import PushedAdapters, SafetensorsBody
from trl_lora_sync.errors import ServerError, ServerSetupError, ServerUnreachableError
from trl_lora_sync.origin import install_command, install_elsewhere
from trl_lora_sync.runtime import Blocking, run
from trl_lora_sync.servers.handle import ServerHandle
from trl_lora_sync.servers.ledger import VersionLedger
from trl_lora_sync.servers.transports import DiskTransport, HTTPTransport, is_sent_content, transport_for
from trl_lora_sync.settings import ServerAddress
from unit.fleets import settings_for
from unit.servers import Request, serving

R, IN, OUT = 2, 8, 16
URL = "http://gpu-1:8000"


def soon(seconds: float = 20.0) -> Deadline:
    return Deadline.after(seconds, "the test")


def adapter(dtype: torch.dtype = torch.bfloat16) -> CanonicalAdapter:
    modules = [
        LoRAModule(name=f"model.layers.{i}.q_proj", lora_A=torch.randn(R, IN), lora_B=torch.randn(OUT, R), scaling=2.0)
        for i in range(3)
    ]
    return FlatBuffer().export(modules, dtype=dtype)


# The body


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_body_is_a_safetensors_file_with_the_configuration(dtype: torch.dtype) -> None:
    sent = adapter(dtype)
    body = SafetensorsBody(sent)

    content = bytes_of_body(body)

    assert content == bytes_of_body(body), "a second attempt sends the same"
    assert len(content) == len(body)
    assert body.checksum() == checksum_of(content)
    loaded = safetensors.torch.load(content)
    assert loaded.keys() == sent.tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in sent.tensors.items())
    length = int.from_bytes(content[:8], "little")
    assert (8 + length) % 8 == 0
    metadata = json.loads(content[8 : 8 + length])["__metadata__"]
    assert json.loads(metadata["adapter_config"]) == sent.config()


# Pushing and deleting


class Server:
    """Answers as the route does, and records the requests.

    Attributes:
        answers: statuses and bodies of pushes, in order; then all succeed.
    """

    def __init__(self, *answers: tuple[int, Any], offer: tuple[int, Any] | None = None) -> None:
        self.requests: list[str] = []
        self.answers = list(answers)
        self.offer = offer or (200, {"protocol": 2, "max_bytes": 10_000, "adapters": {}})

    async def __call__(self, method: str, path: str, deadline: Deadline, **content: Any) -> httpx.Response:
        request = f"{method} {path.removeprefix('/v1/lora_sync/adapters').removeprefix('/')}".strip()
        self.requests.append(request)
        if method == "PUT":
            [chunk async for chunk in content["content"]]
        default = self.offer if method == "GET" else (200, {"path": "/server/a"})
        status, body = self.answers.pop(0) if self.answers and method != "GET" else default
        if status == 0:
            raise ServerUnreachableError("broken")
        return httpx.Response(status, json=body, request=httpx.Request(method, f"{URL}{path}"))


def stored(version: int = 1, content: CanonicalAdapter | None = None) -> StoredAdapter:
    sent = content or adapter()
    return StoredAdapter(
        name=f"v{version}",
        version=version,
        rank=R,
        target_modules=sent.target_modules,
        payload_bytes=sent.payload_bytes,
        content=sent,
    )


def command(*options: str) -> str:
    return f"`serve {' '.join(options)}`"


def connected(server: Server) -> Blocking:
    pushed = Blocking(PushedAdapters(URL, server, command, TIMEOUTS))
    assert pushed.connect(soon())
    server.requests.clear()
    return pushed


@pytest.mark.parametrize(
    "offer",
    [
        (404, {"detail": "Not Found"}),
        (403, {"error": {"message": "no key to see"}}),
        (200, {"protocol": 1, "max_bytes": 10}),
        (200, {"protocol": 2}),
        (200, ["a", "proxy"]),
    ],
)
def test_a_server_that_makes_no_offer_that_we_know_takes_no_pushes(offer: tuple[int, Any]) -> None:
    server = Server(offer=offer)
    pushed = Blocking(PushedAdapters(URL, server, command, TIMEOUTS))

    assert not pushed.connect(soon())
    with pytest.raises(ServerSetupError, match=r"takes no adapters over HTTP.*restart the server with `serve --push`"):
        pushed.push(stored(), soon())
    pushed.retire("v1", soon())
    assert server.requests == ["GET"]


def test_a_push_whose_answer_was_lost_is_repeated() -> None:
    server = Server((0, None))
    assert connected(server).push(stored(), soon()) == "/server/a"
    assert server.requests == ["PUT v1", "PUT v1"]


@pytest.mark.parametrize(
    ("status", "body", "error", "words"),
    [
        (
            413,
            {"error": {"message": "more"}},
            ServerSetupError,
            r"PUSH_MAX_MB=2, and restart it with `serve --lora-rank \d+ --push`.*more",
        ),
        (413, "<html>of a proxy</html>", ServerSetupError, "of a proxy"),
        (507, {"error": {"message": "full"}}, ServerSetupError, r"no room.*--shm-size.*full"),
        (422, {"error": {"message": "other bytes"}}, ServerError, r"HTTP 422.*proxy.*other bytes"),
        (200, {"path": ["/server/a"]}, ServerError, "named no path"),
        (200, {}, ServerError, "named no path"),
    ],
)
def test_a_refused_push_says_what_to_change(status: int, body: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        connected(Server((status, body))).push(stored(), soon())


def test_an_adapter_above_the_server_s_limit_is_not_sent() -> None:
    server = Server(offer=(200, {"protocol": 2, "max_bytes": 500}))
    with pytest.raises(ServerSetupError, match=r"offers 0\.0 MB"):
        connected(server).push(stored(), soon())
    assert server.requests == []


def test_files_go_one_unload_later_and_the_last_ones_with_the_last_version() -> None:
    server = Server()
    pushed = connected(server)
    for version in range(1, 5):
        pushed.push(stored(version), soon())
        pushed.confirm(f"v{version}")
        if version > 2:
            pushed.retire(f"v{version - 2}", soon())
    assert server.requests == ["PUT v1", "PUT v2", "PUT v3", "PUT v4", "DELETE v1"]
    server.requests.clear()

    pushed.retire("v3", soon())
    pushed.retire("v4", soon())

    assert server.requests == ["DELETE v2", "DELETE v3", "DELETE v4"]


def test_what_was_never_loaded_and_what_a_dead_run_pushed_goes_at_once() -> None:
    server = Server()
    pushed = connected(server)
    pushed.push(stored(1), soon())
    pushed.confirm("v1")
    pushed.push(stored(2), soon())
    server.requests.clear()

    pushed.retire("v2", soon())
    pushed.retire("of-a-dead-run-v7", soon())

    assert server.requests == ["DELETE v2", "DELETE of-a-dead-run-v7"]


def test_a_server_that_is_gone_does_not_make_deleting_fail() -> None:
    server = Server((200, {"path": "/server/a"}), (0, None))
    pushed = connected(server)
    pushed.push(stored(1), soon())
    pushed.retire("v1", soon())
    assert server.requests == ["PUT v1", "DELETE v1"]


def test_files_whose_deletion_was_not_answered_go_with_the_next_unload() -> None:
    """After a short outage they stayed on the server for good."""
    server = Server()
    pushed = connected(server)
    for version in range(1, 5):
        pushed.push(stored(version), soon())
        pushed.confirm(f"v{version}")
    pushed.retire("v1", soon())
    server.answers = [(0, None)]
    pushed.retire("v2", soon())
    server.requests.clear()

    pushed.retire("v3", soon())

    assert server.requests == ["DELETE v1", "DELETE v2"]


@pytest.mark.outside
def test_files_that_a_connection_left_behind_go_with_the_next_unload_of_its_successor(tmp_path: Path) -> None:
    """A server that returned to service kept them for good, because the new connection did not know of them."""
    statuses, deleted = [503], []

    def answer(request: Request) -> None:
        if request.command == "DELETE":
            deleted.append(request.path.rpartition("/")[2])
            request.send(statuses.pop() if statuses else 200, {})
        elif request.path == "/v1/models":
            request.send(200, {"data": [{"id": "base", "root": "base"}]})
        elif request.path == ROUTE:
            request.send(200, {"protocol": PROTOCOL, "max_bytes": 10_000})
        else:
            request.send(200, {"version": "0.31.0"})

    with serving(answer) as listening:
        address = ServerAddress(base_url=listening.url, is_local=True)
        settings = settings_for([], tmp_path, engine="vllm", servers=(address,))
        server = ServerHandle(address, settings, VersionLedger(keep=1))
        run(server.connect(soon()))
        run(server.engine.unload("v1", soon()))
        run(server.connect(soon()))
        run(server.engine.unload("v2", soon()))
        run(server.disconnect())

    assert deleted == ["v1", "v1", "v2"]


# The choice


def choice(
    choice: str, *, is_local: bool = False, server_root: str | None = None, pushes: bool = False, tensors: bool = False
) -> Any:
    served = Capabilities(
        engine="sglang" if tensors else "vllm",
        version="1",
        base_model="m",
        base_root="m",
        max_model_len=None,
        logprobs_mode="unknown",
        supports_tensor_load=tensors,
        supports_push=pushes,
    )
    address = ServerAddress(base_url=URL, is_local=is_local)
    settings = settings_for([], Path("nowhere"), transport=choice, server_root=server_root, servers=(address,))
    return type(transport_for(settings, [is_sent_content(settings, address, served)], is_on_gpu=False))


@pytest.mark.parametrize(
    ("settings", "chosen"),
    [
        ({"choice": "auto", "is_local": True, "pushes": True}, DiskTransport),
        ({"choice": "auto", "is_local": True, "tensors": True}, DiskTransport),
        ({"choice": "auto", "server_root": "/mnt", "pushes": True}, DiskTransport),
        ({"choice": "auto", "server_root": "/mnt"}, DiskTransport),
        ({"choice": "auto", "pushes": True}, HTTPTransport),
        ({"choice": "auto", "tensors": True}, HTTPTransport),
        ({"choice": "disk", "pushes": True}, DiskTransport),
        ({"choice": "disk"}, DiskTransport),
        ({"choice": "push", "is_local": True, "pushes": True}, HTTPTransport),
        ({"choice": "push", "tensors": True}, HTTPTransport),
        ({"choice": "tensors", "is_local": True, "tensors": True}, HTTPTransport),
    ],
)
def test_the_way_of_delivery(settings: dict[str, Any], chosen: type) -> None:
    assert choice(**settings) is chosen


def test_without_any_way_the_choices_are_listed() -> None:
    with pytest.raises(ServerSetupError) as caught:
        choice("auto")
    for part in ("another host", install_elsewhere(), "--push", "lora_sync_dir", "lora_sync_server_dir"):
        assert part in str(caught.value)


def test_a_push_to_a_server_without_the_route_says_how_to_add_it() -> None:
    with pytest.raises(
        ServerSetupError, match=r"does not offer the push route.*`trl-lora-sync serve vllm \S+ --push"
    ) as caught:
        choice("push", is_local=True)
    assert f"`{install_command('python')}`" in str(caught.value)


def test_tensors_for_a_server_that_takes_none_are_refused() -> None:
    with pytest.raises(ServerSetupError, match=r'takes no tensors.*lora_sync_transport="auto"'):
        choice("tensors", pushes=True)
