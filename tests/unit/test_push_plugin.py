"""Unit tier: the push route as vLLM runs it, called as an ASGI application without a server around it."""

import asyncio
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bodies import checksum_of

from trl_lora_sync.engine_plugins import push_middleware
from trl_lora_sync.engine_plugins.push_store import FOLDER_PREFIX, PushStore, sweep_dead_servers
from trl_lora_sync.engine_plugins.refusals import Refused
from trl_lora_sync.engine_plugins.vllm_push import DIRECTORY_VARIABLE, MAX_MB_VARIABLE, ROUTE, PushMiddleware

CONFIG = {"peft_type": "LORA", "r": 4}


def safetensors(data: bytes = b"12345678", *, config: str | None = None, end: int | None = None) -> bytes:
    """A file of one tensor, with a config or an end that need not be right."""
    entries = {
        "__metadata__": {"adapter_config": json.dumps(CONFIG) if config is None else config},
        "lora_A": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data) if end is None else end]},
    }
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + data


@dataclass
class Server:
    """The middleware in front of an application that identifies itself."""

    root: Path
    args: Any = field(default_factory=lambda: SimpleNamespace(api_key=None))
    passed_on: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.middleware = PushMiddleware(self._app)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.passed_on.append(scope.get("path", scope["type"]))
        if scope["type"] == "lifespan":
            await send({"type": "lifespan.shutdown.complete"})

    def call(
        self,
        method: str,
        rest: str = "",
        body: bytes | Sequence[bytes] = b"",
        *,
        headers: dict[str, str] | None = None,
        path: str | None = None,
        ends_early: bool = False,
    ) -> tuple[int, Any]:
        """Status and JSON of the answer; a body in several chunks arrives that way."""
        chunks = [body] if isinstance(body, bytes) else list(body)
        whole = b"".join(chunks)
        sent = {"Content-Length": str(len(whole)), "Lora-Sync-Checksum": checksum_of(whole), **(headers or {})}
        messages = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
        messages.append({"type": "http.disconnect"} if ends_early else {"type": "http.request"})
        waiting = iter(messages)
        answer: list[Any] = []

        async def receive() -> Any:
            return next(waiting)

        async def send(message: Any) -> None:
            answer.append(message)

        asyncio.run(self.middleware(self.scope(method, rest, sent, path), receive, send))
        return (answer[0]["status"], json.loads(answer[1]["body"])) if answer else (0, None)

    def scope(self, method: str, rest: str, headers: dict[str, str], path: str | None = None) -> dict[str, Any]:
        return {
            "type": "http",
            "method": method,
            "path": f"{ROUTE}{rest}" if path is None else path,
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items() if value],
            "app": SimpleNamespace(state=SimpleNamespace(args=self.args)),
        }

    def files(self) -> list[str]:
        """Everything below the folders of servers."""
        return sorted(str(path.relative_to(folder)) for folder in self.root.iterdir() for path in folder.rglob("*"))


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    root = tmp_path / "shm"
    root.mkdir()
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(root))
    started = []

    def start(**args: Any) -> Server:
        started.append(Server(root, **args))
        return started[-1]

    yield start
    for server in started:
        server.middleware.store.close()
    assert list(tmp_path.iterdir()) == [root]
    assert list(root.iterdir()) == []


WHOLE = ["a-v1", "a-v1/adapter_config.json", "a-v1/adapter_model.safetensors"]


@pytest.mark.outside
def test_it_imports_where_only_torch_and_starlette_are_installed(
    run_python: Callable[..., str],
) -> None:
    source = """
import sys
for name in ("trl", "peft", "transformers", "httpx", "safetensors", "vllm"):
    sys.modules[name] = None
from trl_lora_sync.engine_plugins.vllm_push import MIDDLEWARE, PushMiddleware
print(PushMiddleware.__name__ == MIDDLEWARE.rpartition(".")[2])
print([name for name in sys.modules if name.startswith("trl_lora_sync.") and ".engine_plugins" not in name])
"""
    assert run_python(source).split() == ["True", "[]"]


@pytest.mark.outside
def test_the_trainer_s_side_needs_no_web_framework(run_python: Callable[..., str]) -> None:
    source = """
import sys
sys.modules["starlette"] = None
import trl_lora_sync.cli.launch_vllm, trl_lora_sync.engines.connect, trl_lora_sync.engines.vllm.push
from trl_lora_sync.engine_plugins import vllm_push
try:
    vllm_push.PushMiddleware
except ImportError as error:
    print(error.name.partition(".")[0])
"""
    assert run_python(source).split() == ["starlette"]


def test_an_adapter_arrives_whole_private_and_with_its_configuration(serve: Callable[..., Server]) -> None:
    server, body = serve(), safetensors()

    status, answer = server.call("PUT", "/a-v1", [body[:10], body[10:11], b"", body[11:]])

    folder = Path(answer["path"])
    assert (status, answer["bytes"], answer["checksum"]) == (200, len(body), checksum_of(body))
    assert (folder / "adapter_model.safetensors").read_bytes() == body
    assert json.loads((folder / "adapter_config.json").read_text()) == CONFIG
    assert server.files() == WHOLE
    assert [path.stat().st_mode & 0o777 for path in (folder.parent, folder, *sorted(folder.iterdir()))] == [
        0o700, 0o700, 0o600, 0o600,
    ]  # fmt: skip
    assert server.call("GET")[1]["adapters"] == {"a-v1": len(body)}


def test_a_body_larger_than_a_batch_is_written_in_order(serve: Callable[..., Server]) -> None:
    body = safetensors(bytes(range(256)) * 12_000)

    status, answer = serve().call("PUT", "/a-v1", [body[i : i + 300_001] for i in range(0, len(body), 300_001)])

    assert status == 200
    assert (Path(answer["path"]) / "adapter_model.safetensors").read_bytes() == body


def test_a_push_that_is_repeated_succeeds_and_one_with_other_bytes_is_refused(serve: Callable[..., Server]) -> None:
    server = serve()
    first = server.call("PUT", "/a-v1", safetensors())

    assert server.call("PUT", "/a-v1", safetensors()) == first
    assert server.call("PUT", "/a-v1", safetensors(b"other"))[0] == 409
    assert server.files() == WHOLE


def test_a_deleted_adapter_is_gone_and_deleting_it_again_says_so(serve: Callable[..., Server]) -> None:
    server = serve()
    server.call("PUT", "/a-v1", safetensors())

    assert server.call("DELETE", "/a-v1") == (200, {"name": "a-v1", "deleted": True})
    assert server.files() == []
    assert server.call("DELETE", "/a-v1") == (200, {"name": "a-v1", "deleted": False})


@pytest.mark.parametrize(
    ("body", "call", "status", "words"),
    [
        (safetensors(), {"headers": {"Lora-Sync-Checksum": checksum_of(b"other")}}, 422, "do not match the checksum"),
        (safetensors(), {"headers": {"Lora-Sync-Checksum": ""}}, 400, "Lora-Sync-Checksum"),
        (safetensors(), {"headers": {"Lora-Sync-Checksum": "0123456789abcde"}}, 400, "Lora-Sync-Checksum"),
        (safetensors(), {"headers": {"Content-Length": ""}}, 411, "Content-Length"),
        (safetensors(), {"headers": {"Content-Length": "-1"}}, 411, "Content-Length"),
        (safetensors(), {"headers": {"Content-Length": "10"}}, 400, "More than the announced 10"),
        (safetensors(), {"headers": {"Content-Length": "999"}}, 400, "bytes before the announced 999"),
        (safetensors(), {"headers": {"Content-Length": "2000001"}}, 413, "2000001 bytes are more than the 2000000"),
        (safetensors(), {"ends_early": True}, 400, "connection closed"),
        (safetensors(end=7), {}, 422, "end at 7"),
        (safetensors(end=9), {}, 422, "end at 9"),
        (safetensors(config="[]"), {}, 422, "not a safetensors file"),
        (safetensors(config="no JSON"), {}, 422, "not a safetensors file"),
        (struct.pack("<Q", 1 << 60) + b"{}", {}, 422, "a header of"),
        (b"short", {}, 422, "not a safetensors file"),
        (b"", {}, 422, "not a safetensors file"),
        (struct.pack("<Q", 2) + b"[]", {}, 422, "not a safetensors file"),
    ],
)
def test_a_body_that_is_not_what_was_announced_is_refused_and_leaves_nothing(
    serve: Callable[..., Server],
    monkeypatch: pytest.MonkeyPatch,
    body: bytes,
    call: dict[str, Any],
    status: int,
    words: str,
) -> None:
    monkeypatch.setenv(MAX_MB_VARIABLE, "2")
    server = serve()

    seen, answer = server.call("PUT", "/a-v1", body, **call)

    assert seen == status
    assert words in answer["error"]["message"]
    assert server.files() == []
    assert server.middleware.store.arriving == 0


def test_an_upload_that_takes_too_long_is_broken_off_and_leaves_nothing(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push_middleware, "UPLOAD_TIMEOUT_S", 0.01)
    server, body, answer = serve(), safetensors(), []

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        answer.append(message)

    headers = {"Content-Length": str(len(body)), "Lora-Sync-Checksum": checksum_of(body)}
    asyncio.run(server.middleware(server.scope("PUT", "/a-v1", headers), receive, send))

    assert answer[0]["status"] == 408
    assert server.files() == []


def test_bytes_that_are_still_to_arrive_count_as_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PushStore(tmp_path, max_bytes=1000)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_frsize=1, f_bavail=1000, f_blocks=2000))
    first = store.begin("a", 800)  # 900 are free, as 100 of the 2000 are left to others

    with pytest.raises(Refused, match=r"no room .*200 bytes were announced, 100 are free") as caught:
        store.begin("b", 200)
    assert caught.value.status == 507
    first.abort()
    store.begin("b", 200).abort()
    store.close()


def test_a_push_that_is_repeated_while_its_first_attempt_hangs_takes_its_place(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A half-open connection kept its room until a timeout of minutes, and each retry was refused with 507."""
    server, body = serve(), safetensors()
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_frsize=1, f_bavail=1.5 * len(body), f_blocks=0))
    scope = server.scope("PUT", "/a-v1", {"Content-Length": str(len(body)), "Lora-Sync-Checksum": checksum_of(body)})

    async def push(receive: Callable[[], Any]) -> int:
        answer: list[Any] = []

        async def send(message: Any) -> None:
            answer.append(message)

        await server.middleware(scope, receive, send)
        return int(answer[0]["status"])

    async def test() -> None:
        hangs, goes_on = asyncio.Event(), asyncio.Event()
        parts = iter([body[:8], body[8:]])

        async def receive_late() -> Any:
            part = next(parts)
            if part != body[:8]:
                hangs.set()
                await goes_on.wait()
            return {"type": "http.request", "body": part, "more_body": part == body[:8]}

        async def receive_at_once() -> Any:
            return {"type": "http.request", "body": body}

        first = asyncio.create_task(push(receive_late))
        await hangs.wait()
        assert await push(receive_at_once) == 200
        goes_on.set()
        assert await first == 409
        assert server.files() == WHOLE

    asyncio.run(test())


def test_of_two_uploads_of_one_name_the_second_to_end_is_refused(tmp_path: Path) -> None:
    store, body = PushStore(tmp_path, max_bytes=1000), safetensors()
    first, second = store.begin("a", len(body)), store.begin("a", len(body))
    for upload in (first, second):
        upload.write(body)
    checksum = checksum_of(body)
    first.finish(checksum)

    with pytest.raises(Refused) as caught:
        second.finish(checksum)
    second.abort()

    assert caught.value.status == 409
    assert [path.name for path in store.open_folder().iterdir()] == ["a"]
    store.close()


# Names and paths


@settings(deadline=None, derandomize=True, max_examples=60)
@given(name=st.text(st.characters(codec="utf-8") | st.sampled_from("./\\~%\0-_aA1"), max_size=140))
def test_a_name_is_refused_or_is_the_name_of_one_folder(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    root = tmp_path_factory.mktemp("root")
    store, body = PushStore(root / "shm", max_bytes=1000), safetensors()
    store.root.mkdir()
    refused, path = 0, None
    try:
        upload = store.begin(name, len(body))
        upload.write(body)
        path = upload.finish(checksum_of(body))
    except Refused as refusal:
        refused = refusal.status
    below = [str(found.relative_to(store.root)) for found in store.root.glob("*/*")]
    store.close()
    if path is None:
        assert (refused, below) == (400, [])
    else:
        assert below == [f"{path.parent.name}/{name}"]
        assert name.isascii()
    assert [found.name for found in root.iterdir()] == ["shm"]


@pytest.mark.parametrize(
    "rest", ["/", "//a", "/.", "/..", "/../a", "/a/..", "/a/b", "/.a", "/~root", "/a\0b", "/a b", "/é", "/" + "a" * 129]
)
@pytest.mark.parametrize("method", ["PUT", "DELETE", "GET"])
def test_a_path_that_is_more_than_a_name_goes_nowhere(serve: Callable[..., Server], method: str, rest: str) -> None:
    server = serve()

    assert server.call(method, rest, safetensors())[0] == 400
    assert server.files() == server.passed_on == []


@pytest.mark.parametrize("method", ["HEAD", "GET", "OPTIONS", "PATCH"])
def test_other_methods_are_refused(serve: Callable[..., Server], method: str) -> None:
    assert serve().call(method, "/a-v1")[0] == 405


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/v1/lora_sync/adaptersX", "/", ""])
def test_every_other_path_is_vllm_s(serve: Callable[..., Server], path: str) -> None:
    server = serve()
    server.call("PUT", path=path)
    assert server.passed_on == [path]


# Keys


@pytest.mark.parametrize(
    ("args", "variable", "keys"),
    [
        (SimpleNamespace(api_key=None), None, None),
        (SimpleNamespace(api_key=[]), "", None),
        (SimpleNamespace(api_key=None), "env", {"env"}),
        (SimpleNamespace(api_key=["one", "two"]), None, {"one", "two"}),
        (SimpleNamespace(api_key=["one"]), "env", {"one"}),
        (SimpleNamespace(api_key="one"), None, {"one"}),
        (SimpleNamespace(), "env", {"env"}),
        (None, "env", {"env"}),
        (None, None, set()),
    ],
)
def test_the_keys_are_those_that_vllm_itself_asks_for(
    serve: Callable[..., Server],
    monkeypatch: pytest.MonkeyPatch,
    args: Any,
    variable: str | None,
    keys: set[str] | None,
) -> None:
    """A version that does not show its arguments, and has no key in its environment, may have one: it refuses all."""
    if variable is not None:
        monkeypatch.setenv("VLLM_API_KEY", variable)
    server = serve(args=args)
    for key in ("one", "two", "env", "", None):
        status, _ = server.call("GET", headers={} if key is None else {"Authorization": f"Bearer {key}"})
        refused = 403 if keys == set() else 401
        assert status == (200 if keys is None or key in keys else refused), key


@pytest.mark.parametrize("scheme", ["Basic right", "right", "Bearer", "Bearer  right", "Bearer right ", "Bearer Right"])
def test_anything_but_the_bearer_token_is_no_key(serve: Callable[..., Server], scheme: str) -> None:
    server = serve(args=SimpleNamespace(api_key=["right"]))
    assert server.call("PUT", "/a-v1", safetensors(), headers={"Authorization": scheme})[0] == 401
    assert server.files() == []


# The life of a server


def test_the_folder_goes_when_the_server_ends(serve: Callable[..., Server]) -> None:
    server = serve()
    server.call("PUT", "/a-v1", safetensors())
    sent = []

    async def send(message: Any) -> None:
        sent.append((message["type"], list(server.root.iterdir())))

    asyncio.run(server.middleware({"type": "lifespan"}, None, send))  # type: ignore[arg-type]

    assert sent == [("lifespan.shutdown.complete", [])]


HOLD = """
import os, sys
from pathlib import Path
from trl_lora_sync.engine_plugins.push_store import PushStore
store = PushStore(Path(sys.argv[1]), max_bytes=1000)
store.begin("a", 100)
if os.fork() == 0:
    store.close()  # a child's, so it does nothing
    os._exit(0)
os.wait()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.outside
def test_the_folder_of_a_killed_server_is_swept_and_that_of_a_live_one_is_not(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        [folder] = tmp_path.glob(f"{FOLDER_PREFIX}*")
        assert sweep_dead_servers(tmp_path) == []
        assert len(list(folder.iterdir())) == 1
        process.send_signal(signal.SIGKILL)
    assert sweep_dead_servers(tmp_path) == [folder.name]
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_private_folder_of_ours_is_never_swept(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (tmp_path / f"{FOLDER_PREFIX}link").symlink_to(elsewhere)
    (tmp_path / f"{FOLDER_PREFIX}file").write_text("")
    (tmp_path / f"{FOLDER_PREFIX}open").mkdir(mode=0o755)

    assert sweep_dead_servers(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("text", ["-1", "0", "many", "1e3", "inf"])
def test_a_limit_that_is_no_number_of_megabytes_is_an_error(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(MAX_MB_VARIABLE, text)
    with pytest.raises(ValueError, match=f"{MAX_MB_VARIABLE}='{text}' is not a number of MB"):
        serve()


def test_the_limit_is_4096_megabytes_unless_told_otherwise(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert serve().call("GET")[1]["max_bytes"] == 4_096_000_000
    monkeypatch.setenv(MAX_MB_VARIABLE, "0.5")
    assert serve().call("GET")[1]["max_bytes"] == 500_000
