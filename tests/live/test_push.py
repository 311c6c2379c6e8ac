"""Live tier: adapters pushed to a real vLLM server that shares no folder with the trainer.

The server here has a key and keeps what is pushed in a small separate file system. `test_two_hosts.py` has trainer
and server on two hosts.
"""

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import torch
from support.bodies import bytes_of_body, checksum_of
from support.folders import tmpfs
from support.models import lora, peft_model, randomize_adapter
from support.policies import is_policy_of, sample, token_ids
from support.processes import run_script
from support.servers import adapters_on
from support.trainers import grpo_trainer
from vllm_server import VLLMServer

from trl_lora_sync.adapter.export import read_adapter
from trl_lora_sync.engine_plugins.vllm_push import DIRECTORY_VARIABLE, MAX_MB_VARIABLE, MIDDLEWARE, ROUTE
from trl_lora_sync.engines.vllm import push
from trl_lora_sync.engines.vllm.push import SafetensorsBody
from trl_lora_sync.errors import ServerSetupError

ROOT = Path(__file__).parents[2]
KEY = "sk-a-key-for-pushing"
RIGHT = {"Authorization": f"Bearer {KEY}"}
MAX_BYTES = 2_000_000


class PushServer:
    """A server and the folder in which it keeps what is pushed."""

    def __init__(self, server: VLLMServer, root: Path, is_small: bool) -> None:
        self.server = server
        self.base_url = server.base_url
        self.root = root
        self.is_small = is_small

    def files(self) -> list[str]:
        return sorted(str(path.relative_to(folder)) for folder in self.root.iterdir() for path in folder.rglob("*"))

    def put(self, body: bytes, name: str = "a-v1", **headers: str | None) -> httpx.Response:
        sent = {
            **RIGHT,
            "Lora-Sync-Checksum": checksum_of(body),
            **{k.replace("_", "-"): v for k, v in headers.items()},
        }
        return self.ask("PUT", f"/{name}", {key: value for key, value in sent.items() if value is not None}, body)

    def ask(self, method: str, rest: str = "", headers: dict[str, str] = RIGHT, body: Any = None) -> httpx.Response:
        return httpx.request(
            method, f"{self.base_url}{ROUTE}{rest}", headers=headers, content=body, timeout=30, trust_env=False
        )

    def connect(self, target: str, size: int, body: bytes) -> socket.socket:
        """Begin a push of `body`, which may be only a part of it, to a path that no client would send like that."""
        url = urlsplit(self.base_url)
        connection = socket.create_connection((url.hostname, url.port), timeout=30)
        lines = [
            f"PUT {target} HTTP/1.1",
            f"Host: {url.netloc}",
            f"Authorization: Bearer {KEY}",
            f"Content-Length: {size}",
            f"Lora-Sync-Checksum: {checksum_of(body)}",
        ]
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        return connection


def status_of(connection: socket.socket) -> int:
    return int(connection.makefile("rb").readline().split()[1])


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


@pytest.fixture(scope="module")
def push_server(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PushServer]:
    """A server of this module's own; stopped as people stop it, after which nothing may be left of its folder."""
    folder = tmp_path_factory.mktemp("push")
    root = folder / "memory"
    root.mkdir()
    small = tmpfs(root, "size=8m")
    try:
        small.__enter__()
        is_small = True
    except pytest.skip.Exception:
        is_small = False
    server = VLLMServer(
        base_model,
        api_key=KEY,
        extra_args=["--middleware", MIDDLEWARE],
        extra_env={"PYTHONPATH": str(ROOT), DIRECTORY_VARIABLE: str(root), MAX_MB_VARIABLE: str(MAX_BYTES / 1e6)},
        log_path=folder / "log",
    )
    try:
        with server:
            yield PushServer(server, root, is_small)
            server.stop(timeout_s=30)
            assert list(root.iterdir()) == [], "the server left its folder behind"
    finally:
        if is_small:
            small.__exit__(None, None, None)


@pytest.fixture
def pushes(push_server: PushServer) -> Iterator[PushServer]:
    """The server, alive and with nothing pushed to it before and after the test."""
    yield push_server
    assert push_server.server.is_running(), push_server.server.log_tail()
    with contextlib.suppress(AssertionError):  # the last unloads may still run
        until(lambda: not push_server.files(), "")
    left = push_server.files()
    for name in push_server.ask("GET").json()["adapters"]:
        push_server.ask("DELETE", f"/{name}")
    assert not left, f"the test left files on the server: {left}"
    assert not adapters_on(push_server.base_url, KEY)


@pytest.fixture
def small(pushes: PushServer) -> PushServer:
    """The same, where its folder is a file system of 8 MB."""
    if not pushes.is_small:
        pytest.skip("only a privileged user can mount a file system here")
    return pushes


@pytest.fixture(scope="module")
def body(base_model: Path) -> bytes:
    """The body of a push."""
    adapter = read_adapter(peft_model(base_model), dtype=torch.float32)
    return bytes_of_body(SafetensorsBody(adapter))


# Refused, and nothing left behind


@pytest.mark.parametrize("key", [None, "wrong", f"{KEY}x", KEY[:-1], ""])
@pytest.mark.parametrize("method", ["PUT", "GET", "DELETE"])
def test_a_missing_or_wrong_key_is_refused(pushes: PushServer, body: bytes, method: str, key: str | None) -> None:
    headers = {
        "Lora-Sync-Checksum": checksum_of(body),
        **({} if key is None else {"Authorization": f"Bearer {key}".strip()}),
    }

    response = pushes.ask(method, "" if method == "GET" else "/a-v1", headers, body if method == "PUT" else None)

    assert response.status_code == 401
    assert "a-v1" not in response.text


def test_a_body_that_ends_early_is_refused(pushes: PushServer, body: bytes) -> None:
    with pushes.connect(f"{ROUTE}/a-v1", len(body), body[: len(body) // 2]):
        until(lambda: any(name.endswith(".safetensors") for name in pushes.files()), "the upload did not begin")
    until(lambda: not pushes.files(), "a half-written adapter stays on the server")


def test_too_large_a_body_is_refused(pushes: PushServer) -> None:
    with pushes.connect(f"{ROUTE}/a-v1", MAX_BYTES + 1, b"the beginning") as connection:
        assert status_of(connection) == 413


def test_a_body_without_a_length_is_refused(pushes: PushServer, body: bytes) -> None:
    response = pushes.ask("PUT", "/a-v1", {**RIGHT, "Lora-Sync-Checksum": checksum_of(body)}, iter([body]))
    assert response.status_code == 411


def fill(folder: Path, leave: int) -> Path:
    """Leave `leave` bytes of the file system free, rounded down to its blocks."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        while (free := (system := os.statvfs(folder)).f_frsize * system.f_bavail - leave) > 0:
            with contextlib.suppress(OSError):  # the server may write meanwhile
                file.write(bytes(free))
    return filler


def test_a_full_disk_is_refused_before_anything_is_sent(small: PushServer, body: bytes) -> None:
    small.put(body)  # its folder exists from the first one on
    small.ask("DELETE", "/a-v1")
    filler = fill(small.root, leave=len(body) // 2)
    try:
        response = small.put(body)
    finally:
        filler.unlink()
    assert response.status_code == 507
    assert small.put(body).status_code == 200
    small.ask("DELETE", "/a-v1")


def test_a_disk_that_fills_up_during_an_upload_is_refused(small: PushServer, body: bytes) -> None:
    large = body + bytes(MAX_BYTES - len(body))  # more than one batch of the server, so that it writes before the end
    with small.connect(f"{ROUTE}/a-v1", len(large), large[:1_500_000]) as connection:
        until(lambda: any(path.stat().st_size for path in small.root.rglob("*.safetensors")), "nothing was written")
        filler = fill(small.root, leave=0)
        try:
            connection.sendall(large[1_500_000:])
            assert status_of(connection) == 507
        finally:
            filler.unlink()
    assert small.files() == []


@pytest.mark.parametrize(
    "name",
    [
        "..", "../a", "a/../../b", "..%2f..%2fa", "%2e%2e%2fa", "%2e%2e", "%2Fetc%2Fa", "/etc/a", "a%2fb", ".a", "~a",
        "a%00b", "a%0ab", "a%20b", "a%5cb", "a" * 129, "%C3%A9", "", "a;b", "$(a)",
    ],
)  # fmt: skip
def test_a_path_trick_is_refused(pushes: PushServer, body: bytes, name: str, tmp_path: Path) -> None:
    before = sorted(pushes.root.parent.rglob("*"))
    with pushes.connect(f"{ROUTE}/{name}", len(body), body) as connection:
        assert status_of(connection) == 400
    assert sorted(pushes.root.parent.rglob("*")) == before


def test_every_other_route_keeps_vllm_s_own_check(pushes: PushServer) -> None:
    models = f"{pushes.base_url}/v1/models"
    assert httpx.get(models, headers=RIGHT, trust_env=False).status_code == 200
    assert httpx.get(models, trust_env=False).status_code == 401
    assert httpx.get(f"{models}x", headers=RIGHT, trust_env=False).status_code == 404


# Training


@pytest.fixture
def trainer(
    pushes: PushServer, base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    made = []

    def make(**config: Any) -> Any:
        made.append(grpo_trainer(pushes.base_url, base_model, tmp_path, **{"lora_sync_transport": "push", **config}))
        return made[-1]

    yield make
    for one in made:
        one.vllm_generation.close()


@pytest.fixture(params=[True, False], ids=["several connections", "one request"])
def has_streams(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether adapters of the tests' size go over several connections, as large ones do."""
    monkeypatch.setattr(push, "STREAMS_FROM_BYTES", 0 if request.param else 1 << 40)
    return bool(request.param)


def test_versions_are_deleted_one_version_after_their_unload_and_all_at_the_end(
    trainer: Callable[..., Any], pushes: PushServer, tmp_path: Path, has_streams: bool
) -> None:
    posts = pushes.server.log_tail(1 << 20).count('"POST /v1/lora_sync')
    training = trainer(lora_sync_keep=2)
    generation = training.vllm_generation
    until(lambda: not pushes.files(), "the trial adapter stays")
    for version in range(1, 6):
        randomize_adapter(training.model, seed=version)
        generation.sync_weights()
        assert is_policy_of(training.model, sample(generation, [token_ids(version)]))
        # Unloads and what goes with them happen beside the training.
        registered, there = kept(version, 2), kept(version, 3)
        until(partial(is_down_to, registered, pushes, loaded=True), f"{registered} should be loaded")
        until(partial(is_down_to, there, pushes), f"{there} should be there")
    generation.close()

    until(lambda: not pushes.files(), "something stays after the run")
    assert (pushes.server.log_tail(1 << 20).count('"POST /v1/lora_sync') > posts) is has_streams
    assert not (tmp_path / "sync").exists(), "nothing is written on the trainer's side"


def is_down_to(numbers: list[int], server: PushServer, *, loaded: bool = False) -> bool:
    """Whether just these versions are loaded, or there."""
    return versions(adapters_on(server.base_url, KEY) if loaded else server.ask("GET").json()["adapters"]) == numbers


def versions(names: Any) -> list[int]:
    return sorted(int(name.rpartition("-v")[2]) for name in names)


def kept(newest: int, count: int) -> list[int]:
    return list(range(max(1, newest - count + 1), newest + 1))


@pytest.mark.usefixtures("has_streams")
def test_a_server_that_fills_up_ends_the_sync_with_the_version_before_active(
    trainer: Callable[..., Any], small: PushServer
) -> None:
    training = trainer()
    generation = training.vllm_generation
    generation.sync_weights()
    until(partial(is_down_to, [1], small), "the trial adapter stays")
    before = small.files()
    filler = fill(small.root, leave=50_000)
    try:
        with pytest.raises(ServerSetupError, match=r"no room for the 0\.\d MB of the adapter.*--shm-size"):
            generation.sync_weights()
    finally:
        filler.unlink()

    assert small.files() == before
    assert is_policy_of(training.model, sample(generation, [token_ids(1)]))
    generation.sync_weights()


def test_an_adapter_above_the_limit_is_refused_at_the_start(trainer: Callable[..., Any], pushes: PushServer) -> None:
    with pytest.raises(ServerSetupError, match=rf"takes no adapters of .*export {MAX_MB_VARIABLE}=\d+"):
        trainer(peft_config=lora(r=128))
    assert pushes.files() == []


def test_a_server_without_the_route_is_told_how_to_add_it(
    make_trainer: Callable[..., Any], clean_server: VLLMServer, base_model: Path
) -> None:
    with pytest.raises(ServerSetupError, match=r"does not offer the push route.*`trl-lora-sync serve vllm \S+ --push"):
        make_trainer(clean_server.base_url, base_model, lora_sync_transport="push")


def test_the_benchmark_runs(pushes: PushServer, tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "benchmarks" / "push.py", "--quick", "--url", pushes.base_url]
    env = {"VLLM_API_KEY": KEY, "OMP_NUM_THREADS": "1"}

    ended = run_script([*command, "--out", tmp_path / "push.json"], tmp_path / "log", timeout_s=120, env=env)

    assert ended.code == 0, ended.output
    [result] = json.loads((tmp_path / "push.json").read_text())["results"]
    assert result["megabytes"] > 0.4
    assert result["mb_per_s"].keys() == {"tcp", "push"}
