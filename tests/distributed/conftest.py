"""The launch that several files share: starting it and importing in its processes takes as long as what they do."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from support.processes import Finished
    from support.servers import Proxy
    from vllm_server import VLLMServer

SCENARIOS = ("working", "failing", "overlapping", "asynchronous")
# What a hang would exceed; each scenario takes 20 to 60 s.
TIMEOUT_S = 120.0


@dataclass
class TwoProcesses:
    """What came of a launch of `two_processes.py`.

    Attributes:
        folders: by scenario.
        urls: likewise, what stands for the server.
        overlapping, asynchronous: the proxies of these scenarios.
        left: the adapters on the server after all of them.
    """

    folders: dict[str, Path]
    urls: dict[str, str]
    ended: "Finished"
    overlapping: "Proxy"
    asynchronous: "Proxy"
    left: dict[str, str]

    def seen(self, scenario: str) -> dict[str, Any]:
        from support.launch import seen_in

        return seen_in(self.folders[scenario], self.ended)


@pytest.fixture(scope="session")
def two_processes(
    server: "VLLMServer", base_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TwoProcesses]:
    """One launch, through all that works and failures that a run survives, starts that fail, overlap and AsyncGRPO."""
    from support.launch import CPU_ENV, TESTS, launch_each
    from support.servers import adapters_on, nobody_listening, proxy_to

    folders = {name: tmp_path_factory.mktemp(name) for name in SCENARIOS}
    with (
        proxy_to(server.base_url) as working,
        proxy_to(server.base_url) as overlapping,
        proxy_to(server.base_url) as asynchronous,
        nobody_listening() as closed,
    ):
        do_as_ordered(working, order_in(folders["working"]))
        refuse_as_ordered(overlapping, order_in(folders["overlapping"]))
        proxies = {"working": working, "overlapping": overlapping, "asynchronous": asynchronous}
        urls = {name: proxy.base_url for name, proxy in proxies.items()} | {"failing": closed}
        runs = [[name, str(folders[name]), urls[name], str(base_model)] for name in SCENARIOS]
        script = TESTS / "support" / "two_processes.py"
        ended = launch_each(script, runs, folders["working"], ["--multi_gpu"], env=CPU_ENV, timeout_s=TIMEOUT_S)
        yield TwoProcesses(folders, urls, ended, overlapping, asynchronous, adapters_on(server.base_url))


def order_in(folder: Path) -> Callable[[], str]:
    """What a process of the launch wants the proxy to do."""

    def order() -> str:
        with contextlib.suppress(FileNotFoundError):
            return (folder / "order").read_text()
        return ""

    return order


def do_as_ordered(proxy: "Proxy", order: Callable[[], str]) -> None:
    from support.servers import damage

    def before(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if order() == "break all connections":
            raise ConnectionAbortedError
        if order() == "damage the version" and path == "/v1/load_lora_adapter":
            damage(body["lora_path"])
        return body

    def after(path: str, status: int, answer: bytes) -> tuple[int, bytes]:
        return (401, b'{"error": "Unauthorized"}') if order() == "refuse the key" else (status, answer)

    proxy.before, proxy.after = before, after


def refuse_as_ordered(proxy: "Proxy", order: Callable[[], str]) -> None:
    def after(path: str, status: int, answer: bytes) -> tuple[int, bytes]:
        if order() and path == "/v1/completions" and b"-v2" in answer:
            return 400, b'{"error": {"message": "this batch is not to be"}}'
        return status, answer

    proxy.after = after
