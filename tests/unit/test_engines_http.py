"""The HTTP client, against real servers that answer late, badly or not at all."""

import asyncio
import contextlib
import gc
import gzip
import json
import os
import pickle
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx
import pytest

from trl_lora_sync.engine_plugins.collector import collector_paused
from trl_lora_sync.engines import connect
from trl_lora_sync.engines.base import TIMEOUTS, Deadline
from trl_lora_sync.engines.http import (
    APIKey,
    HTTPClient,
    is_unreachable,
    json_object,
    may_have_acted,
    retrying,
    server_message,
)
from trl_lora_sync.engines.server import models_in
from trl_lora_sync.errors import (
    AdapterRejectedError,
    DeadlineExceededError,
    GenerationError,
    LoRASyncError,
    ServerSetupError,
    ServerUnreachableError,
)
from trl_lora_sync.runtime import Blocking, Task, run
from unit.servers import Answer, Request, Server, nobody_listening, serving

pytestmark = pytest.mark.outside

SECRET = "sk-do-not-show"
VARIABLE = "TEST_API_KEY"
T = TypeVar("T")


def soon(seconds: float = 10.0) -> Deadline:
    return Deadline.after(seconds, "The test")


class Clock:
    """Time that passes only in pauses, each of which takes `late_s` longer than it should."""

    def __init__(self) -> None:
        self.now, self.late_s = 1000.0, 0.0

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds + self.late_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Takes the place of the real one, which goes on while this process does not."""
    made = Clock()
    monkeypatch.setattr(time, "monotonic", made.monotonic)
    monkeypatch.setattr(asyncio, "sleep", made.sleep)
    return made


def finished(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing but the clock."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("it waits for something else")


@pytest.fixture
def ask() -> Iterator[Callable[..., httpx.Response]]:
    """Sends one GET to a server; the time for it counts from when the client is ready."""
    clients = []

    def request(url: str, within_s: float = 10.0, *, is_local: bool = True, **kwargs: object) -> httpx.Response:
        client = Blocking(HTTPClient(url, api_key=APIKey(VARIABLE), is_local=is_local))
        clients.append(client)
        return client.request("GET", "/path", soon(within_s), **kwargs)

    yield request
    for client in clients:
        client.close()


Ask = Callable[..., httpx.Response]


# Answers


@pytest.mark.parametrize("status", [200, 301, 400, 404, 500, 503])
def test_any_status_is_an_answer_and_is_sent_once(status: int, ask: Ask) -> None:
    with serving(lambda request: request.send(status, "words")) as server:
        response = ask(server.url)
        assert (response.status_code, response.text) == (status, "words")
        assert len(server.requests) == 1


def test_body_and_query_arrive(ask: Ask) -> None:
    with serving(lambda request: request.send(200, {"path": request.path, "body": request.body})) as server:
        client = Blocking(HTTPClient(server.url, api_key=APIKey(VARIABLE), is_local=True))
        response = client.request("POST", "/v1/x?q=1", soon(), body={"a": [1, None]})
        assert response.json() == {"path": "/v1/x?q=1", "body": {"a": [1, None]}}
        client.close()


def test_compressed_answer_is_unpacked(ask: Ask) -> None:
    packed = gzip.compress(b'{"words": "unpacked"}')
    with serving(lambda request: request.send(200, packed, content_encoding="gzip")) as server:
        assert ask(server.url).json() == {"words": "unpacked"}


def test_client_may_be_used_by_many_threads_at_once() -> None:
    with serving(lambda request: request.send(200, request.path)) as server:
        client = Blocking(HTTPClient(server.url, api_key=APIKey(VARIABLE), is_local=True))
        paths = [f"/{number}" for number in range(50)]
        with ThreadPoolExecutor(16) as pool:
            assert [answer.text for answer in pool.map(lambda p: client.request("GET", p, soon()), paths)] == paths
        client.close()


# Deadlines


def test_slow_answer_is_cut_off_at_the_deadline(ask: Ask) -> None:
    started = time.monotonic()
    with (
        serving(lambda request: request.wait(30)) as server,
        pytest.raises(DeadlineExceededError, match=r"The test did not finish within 1 s \(waiting for GET") as caught,
    ):
        ask(server.url, within_s=1)
    assert f"{server.url}/path" in str(caught.value)
    assert 1 <= time.monotonic() - started < 10


def test_answer_that_trickles_in_is_cut_off_at_the_deadline(ask: Ask) -> None:
    """Each byte arrives in time for a timeout on reads; all of them would take ten minutes."""
    sent: list[bytes] = []

    def trickle(request: Request) -> None:
        request.begin(10_000)
        while request.wait(0.05):
            request.wfile.write(b"x")
            request.wfile.flush()
            sent.append(b"x")

    started = time.monotonic()
    with serving(trickle) as server, pytest.raises(DeadlineExceededError, match=r"did not finish within 1 s"):
        ask(server.url, within_s=1)
    assert sent
    assert 1 <= time.monotonic() - started < 10


def test_an_upload_that_is_read_slowly_is_cut_off_at_the_deadline() -> None:
    """Each chunk leaves in time for a timeout on writes; all of them would take a quarter of an hour."""

    class Chunks:
        async def __aiter__(self) -> AsyncIterator[bytes]:
            for _ in range(1000):
                yield bytes(1 << 20)

        def __len__(self) -> int:
            return 1000 << 20

    stopped = threading.Event()

    def read_slowly() -> None:
        connection, _ = listener.accept()
        with connection:
            while not stopped.wait(0.05) and connection.recv(1 << 16):
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_slowly)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        client = Blocking(HTTPClient(url, api_key=APIKey(VARIABLE), is_local=True))
        started = time.monotonic()
        with pytest.raises(DeadlineExceededError, match=r"did not finish within 1 s"):
            client.request("POST", "/load", soon(1), content=Chunks())
        assert time.monotonic() - started < 30
        stopped.set()
        client.close()
        reading.result(30)


def test_answer_that_stops_in_the_middle_is_cut_off_at_the_deadline(ask: Ask) -> None:
    """httpx times each read by itself, so an answer that stopped shortly before the deadline took twice as long."""

    def stall(request: Request) -> None:
        request.begin(10_000)
        request.wait(6)
        request.wfile.write(b"x")
        request.wfile.flush()
        request.wait(30)

    started = time.monotonic()
    with serving(stall) as server, pytest.raises(DeadlineExceededError, match=r"did not finish within 7 s"):
        ask(server.url, 7.0)
    assert 7 <= time.monotonic() - started < 12


def test_answer_whose_head_trickles_in_is_cut_off_at_the_deadline(ask: Ask) -> None:
    """The head is read in a loop of httpx that knew no deadline of the whole."""

    def trickle(request: Request) -> None:
        request.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        while request.wait(0.05):
            request.wfile.write(b"x")
            request.wfile.flush()

    started = time.monotonic()
    with serving(trickle) as server, pytest.raises(DeadlineExceededError, match=r"did not finish within 0.4 s"):
        ask(server.url, 0.4)
    assert 0.4 <= time.monotonic() - started < 20


def test_a_request_may_have_been_carried_out_unless_it_was_refused_or_got_no_connection(ask: Ask) -> None:
    """A lost answer counted as a refusal, and SGLang ends if it is to restore its KV cache twice, or not at all."""
    errors: list[LoRASyncError] = []
    with serving(lambda request: request.wait(30)) as late, serving(Request.reset) as lost, nobody_listening() as away:
        for url, within_s in ((late.url, 1.0), (lost.url, 20.0), (away, 20.0)):
            with pytest.raises(LoRASyncError) as caught:
                ask(url, within_s)
            errors.append(caught.value)
    refused = ServerUnreachableError("HTTP 503")
    assert [may_have_acted(one) for one in (*errors, asyncio.CancelledError(), refused)] == [
        True, True, False, True, False,
    ]  # fmt: skip


def test_server_sees_that_nobody_waits_any_more(ask: Ask) -> None:
    """Otherwise it would go on sampling for a request whose answer is never read."""
    left = threading.Event()

    def stall(request: Request) -> None:
        request.begin(10_000)
        if not request.connection.recv(1):
            left.set()

    with serving(stall) as server:
        with pytest.raises(DeadlineExceededError):
            ask(server.url, 1.0)
        assert left.wait(10)


@pytest.mark.parametrize("before", [0, 1])
def test_server_sees_that_a_request_was_cancelled_also_on_a_kept_connection(before: int) -> None:
    """The socket of a connection that was used before was not known until its answer began."""
    arrived, left = threading.Event(), threading.Event()

    def answer(request: Request) -> None:
        if len(server.requests) <= before:
            request.send()
            return
        arrived.set()
        if not request.connection.recv(1):
            left.set()

    with serving(answer) as server:
        client = Blocking(HTTPClient(server.url, api_key=APIKey(VARIABLE), is_local=True))
        for _ in range(before):
            client.request("GET", "/before", soon())
        task = Task(client.wrapped.request("GET", "/path", soon(60))).begin()
        assert arrived.wait(10)
        task.cancel()
        assert left.wait(10)
        with pytest.raises(asyncio.CancelledError):
            task.result()
        client.close()


def test_cancelled_task_sends_no_further_request_but_for_clean_up() -> None:
    began = threading.Event()

    async def work() -> None:
        try:
            began.set()
            await asyncio.sleep(10)
            await client.wrapped.request("GET", "/path", soon())
        finally:
            await client.wrapped.request("POST", "/resume", soon())

    with serving(lambda request: request.send()) as server:
        client = Blocking(HTTPClient(server.url, api_key=APIKey(VARIABLE), is_local=True))
        task = Task(work()).begin()
        assert began.wait(10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            task.result()
        assert [request.path for request in server.requests] == ["/resume"]
        client.close()


def test_a_failing_health_check_ends_a_request_that_would_wait_longer(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vars(TIMEOUTS), "watch_every_s", 0.05)
    monkeypatch.setitem(vars(TIMEOUTS), "lifeless_after_s", 0.2)

    def answer(request: Request) -> None:
        if request.path == "/health":
            request.send(503)
        else:
            request.wait(30)

    started = time.monotonic()
    with serving(answer) as server:
        with pytest.raises(ServerUnreachableError, match="no sign of life"):
            ask(server.url, 20.0, is_watched=True)
        assert time.monotonic() - started < 10
        assert [request.path for request in server.requests].count("/health") > 1


def test_a_request_waits_on_while_health_checks_are_answered(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a gateway that limits requests: a check is not repeated then, and any answer will do."""
    monkeypatch.setitem(vars(TIMEOUTS), "watch_every_s", 0.05)
    monkeypatch.setitem(vars(TIMEOUTS), "lifeless_after_s", 1.0)
    enough = threading.Event()

    def answer(request: Request) -> None:
        if request.path == "/health":
            request.send(429, Retry_After="3600")
            if time.monotonic() - started > 2.0:
                enough.set()
        else:
            assert enough.wait(30)
            request.send(200, "answered")

    started = time.monotonic()
    with serving(answer) as server:
        assert ask(server.url, 60.0, is_watched=True).text == "answered"


@pytest.mark.parametrize("answers", [True, False])
def test_neither_an_answer_nor_the_deadline_waits_for_a_watch(
    answers: bool, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request ended when its health check did: up to five seconds after its answer, or after its deadline."""
    monkeypatch.setitem(vars(TIMEOUTS), "watch_every_s", 0.05)
    monkeypatch.setitem(vars(TIMEOUTS), "health_s", 20.0)
    watched, ended = threading.Event(), threading.Event()

    def answer(request: Request) -> None:
        if request.path == "/health":
            watched.set()
            # Nothing comes before the connection is closed, at the latest after `health_s`.
            request.connection.recv(1)
            ended.set()
            return
        assert watched.wait(30)
        if answers:
            request.send(200, "answered")
        else:
            request.wait(30)

    with serving(answer) as server:
        if answers:
            assert ask(server.url, 60.0, is_watched=True).text == "answered"
        else:
            with pytest.raises(DeadlineExceededError, match="did not finish within 1 s"):
                ask(server.url, 1.0, is_watched=True)
        assert ended.wait(10)


# Connections


def test_an_answer_too_many_never_becomes_that_of_every_later_request(ask: Ask) -> None:
    """A peer that sent one answer twice made every later request on that connection get the answer before its own."""

    def answer(request: Request) -> None:
        for _ in range(2 if len(server.requests) == 1 else 1):
            request.send(200, f"answer {len(server.requests)}")

    with serving(answer) as server:
        client = Blocking(HTTPClient(server.url, api_key=APIKey(VARIABLE), is_local=True))
        assert client.request("GET", "/1", soon()).text == "answer 1"
        client.start_afresh()
        assert client.request("GET", "/2", soon()).text == "answer 2"
        assert client.request("GET", "/3", soon()).text == "answer 3"
        client.close()


def test_running_requests_keep_their_connections_when_others_start_afresh() -> None:
    arrived, go_on = threading.Event(), threading.Event()

    def answer(request: Request) -> None:
        arrived.set()
        assert go_on.wait(10)
        request.send(200, "whole")

    with serving(answer) as server, ThreadPoolExecutor(1) as pool:
        client = Blocking(HTTPClient(server.url, api_key=APIKey(VARIABLE), is_local=True))
        running = pool.submit(client.request, "GET", "/1", soon())
        assert arrived.wait(10)
        client.start_afresh()
        go_on.set()
        assert running.result(10).text == "whole"
        assert client.request("GET", "/2", soon()).text == "whole"
        client.close()


def test_request_after_the_deadline_is_not_sent(ask: Ask) -> None:
    with serving(lambda request: request.send()) as server:
        with pytest.raises(DeadlineExceededError, match="within 0 s"):
            ask(server.url, within_s=0)
        assert server.requests == []


def test_deadline_counts_down_and_then_raises(clock: Clock) -> None:
    deadline = soon(0.05)
    clock.now += 0.02
    assert deadline.remaining_s() == pytest.approx(0.03)
    assert not deadline.is_over()
    clock.now += 0.04
    assert deadline.is_over()
    with pytest.raises(DeadlineExceededError, match=r"^The test did not finish within 0\.05 s\.$"):
        deadline.remaining_s()


# Broken connections


@pytest.mark.parametrize("is_local", [True, False])
def test_nobody_listening_is_an_error_with_the_url_the_setting_and_a_command_that_is_reached(
    is_local: bool, ask: Ask
) -> None:
    with (
        nobody_listening() as url,
        pytest.raises(ServerUnreachableError, match=r"No server answers at .*vllm_server_base_url") as caught,
    ):
        ask(url, is_local=is_local)
    assert url in str(caught.value)
    assert ("serve vllm MODEL --host 0.0.0.0 --port" in str(caught.value)) is not is_local
    assert isinstance(caught.value, ConnectionError)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_process_with_as_many_open_files_as_it_may_have_is_an_error_with_the_command_that_raises_the_limit(
    host: str, ask: Ask
) -> None:
    """The server was waited for until the deadline, and then called away."""
    with serving(lambda request: request.send(200, {})) as server:
        url = server.url.replace("127.0.0.1", host)
        ask(url)  # what is opened once is open
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        next_file = os.open(os.devnull, os.O_RDONLY)
        os.close(next_file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (next_file, hard))
        try:
            with pytest.raises(
                LoRASyncError, match=r'as many files open as it may.* ulimit -n "\$\(ulimit -Hn\)"'
            ) as caught:
                ask(url)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not is_unreachable(caught.value)


def test_host_without_an_address_is_an_error_with_the_url(ask: Ask) -> None:
    with pytest.raises(ServerUnreachableError, match=r"No server answers at http://no-such-host\.invalid"):
        ask("http://no-such-host.invalid:8000")


def stop_in_the_middle(request: Request) -> None:
    request.begin(100)
    request.wfile.write(b'{"half": ')
    request.wfile.flush()
    request.close_connection = True


def reset_in_the_middle(request: Request) -> None:
    request.begin(100)
    request.wfile.write(b'{"half": ')
    request.wfile.flush()
    request.reset()


def no_http(request: Request) -> None:
    request.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
    request.close_connection = True


def broken_compression(request: Request) -> None:
    request.send(200, b"this is not gzip", content_encoding="gzip")


@pytest.mark.parametrize(
    "answer",
    [Request.reset, reset_in_the_middle, stop_in_the_middle, no_http, broken_compression],
    ids=lambda answer: answer.__name__,
)
def test_broken_answer_is_an_error_of_ours_that_names_the_request(answer: Answer, ask: Ask) -> None:
    with serving(answer) as server, pytest.raises(ServerUnreachableError, match="broke during GET /path") as caught:
        ask(server.url)
    assert server.url in str(caught.value)
    assert "look at its log" in str(caught.value)


def late_reset(request: Request) -> None:
    request.wait(0.3)
    request.reset()


def test_broken_connection_tells_how_long_its_answer_was_waited_for(ask: Ask) -> None:
    with serving(late_reset) as server, pytest.raises(ServerUnreachableError) as caught:
        ask(server.url)
    assert caught.value.waited_s == pytest.approx(0.3, abs=0.25)
    with nobody_listening() as url, pytest.raises(ServerUnreachableError) as caught:
        ask(url)
    assert caught.value.waited_s is None


@pytest.mark.skipif(sys.platform != "linux", reason="the names of these options are Linux's")
def test_a_connection_that_is_silent_for_minutes_is_kept_alive(ask: Ask) -> None:
    """A load balancer of AWS drops it after 350 s, and the answer to a long completion never came."""
    names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    seen: list[list[int]] = []

    def look(request: Request) -> None:
        for one in gc.get_objects():
            if isinstance(one, socket.socket) and one.family == socket.AF_INET and one.fileno() >= 0:
                with contextlib.suppress(OSError):  # a socket that is not connected
                    if one.getpeername() == request.server.server_address:
                        keeps = one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                        seen.append([keeps, *(one.getsockopt(socket.IPPROTO_TCP, name) for name in names)])
        request.send()

    with serving(look) as server:
        ask(server.url)
    assert seen == [[1, 60, 15, 4]]


def test_a_server_that_no_proxy_names_is_reached_without_one(
    proxy: Server, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the options of direct connections, which one through a proxy has not."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving(lambda request: request.send()) as server:
        ask(server.url, is_local=False)
    assert (len(server.requests), len(proxy.requests)) == (1, 0)


# Retries


def failing(times: int, error: Exception) -> Callable[[], Awaitable[str]]:
    left = iter(range(times))

    async def act() -> str:
        for _ in left:
            raise error
        return "done"

    return act


def test_unreachable_server_is_tried_again() -> None:
    assert run(retrying(soon(), is_unreachable)(failing(2, ServerUnreachableError("starting")))) == "done"


@pytest.mark.parametrize(
    "error",
    [AdapterRejectedError("no"), DeadlineExceededError("late"), GenerationError("bad"), ConnectionError("not ours")],
    ids=lambda error: type(error).__name__,
)
def test_nothing_else_is_tried_again(error: Exception) -> None:
    assert not is_unreachable(error)
    with pytest.raises(type(error)) as caught:
        run(retrying(soon(), is_unreachable)(failing(1, error)))
    assert caught.value is error


def test_retries_end_before_the_deadline_with_the_last_error_as_it_is(clock: Clock) -> None:
    started = clock.now
    with pytest.raises(ServerUnreachableError, match=r"^still starting$"):
        finished(retrying(soon(0.5), is_unreachable)(failing(10**6, ServerUnreachableError("still starting"))))
    assert 0 < clock.now - started <= 0.5


def test_retries_end_earlier_if_told_so(clock: Clock) -> None:
    started = clock.now
    with pytest.raises(ServerUnreachableError):
        finished(retrying(soon(60), is_unreachable, at_most_s=0.3)(failing(10**6, ServerUnreachableError("starting"))))
    assert 0 < clock.now - started <= 0.3


def test_pause_that_outlasts_the_deadline_is_followed_by_the_last_error_and_no_attempt(clock: Clock) -> None:
    """A busy machine overslept, and the attempt after it hid what was wrong: `did not finish within 0.5 s`."""
    clock.late_s = 1.0
    deadline = soon(0.5)
    attempts = []

    async def ask_a_dead_server() -> None:
        deadline.remaining_s()
        attempts.append(clock.now)
        raise ServerUnreachableError("engine is dead")

    with pytest.raises(ServerUnreachableError, match=r"^engine is dead$"):
        finished(retrying(deadline, is_unreachable)(ask_a_dead_server))
    assert len(attempts) == 1


def test_pauses_between_retries_grow_but_stay_short() -> None:
    """A server that comes up after a minute is noticed within seconds, without hundreds of requests before."""
    wait = retrying(soon(), is_unreachable).wait

    class State:
        attempt_number = 1

    pauses = []
    for State.attempt_number in range(1, 20):
        pauses.append(wait(State))
    assert pauses[0] <= 0.3
    assert pauses[4] > pauses[0]
    assert 1.5 < max(pauses) <= 2.2


# The server's own words


def response(body: str | bytes, status: int = 400) -> httpx.Response:
    content = body.encode() if isinstance(body, str) else body
    return httpx.Response(status, content=content, request=httpx.Request("POST", "http://host/v1/x"))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"error": {"message": "No adapter found", "type": "NotFoundError", "code": 404}}', "No adapter found"),
        ('{"error": "Unauthorized"}', "Unauthorized"),
        ('{"detail": "Not Found"}', "Not Found"),
        ('{"success": false, "error_message": "is already loaded"}', "is already loaded"),
        ('{"success": true, "error_message": ""}', '{"success": true, "error_message": ""}'),
        ('{"detail": [{"loc": ["body"], "msg": "missing"}]}', '{"detail": [{"loc": ["body"], "msg": "missing"}]}'),
        ('{"error": {"code": 1}}', '{"error": {"code": 1}}'),
        ('{"message": "elsewhere"}', '{"message": "elsewhere"}'),
        ('["a list"]', '["a list"]'),
        ("Success: LoRA adapter 'x' added successfully.", "Success: LoRA adapter 'x' added successfully."),
        ("<html>\n  <h1>502 Bad Gateway</h1>\n</html>", "<html> <h1>502 Bad Gateway</h1> </html>"),
        ('{"error": {"message": "two\\nlines\\tand a tab"}}', "two lines and a tab"),
        ('{"truncat', '{"truncat'),
        ("", ""),
        (b"\xff\xfe not text", "\ufffd\ufffd not text"),
    ],
)
def test_words_of_a_server_become_one_line(body: str, words: str) -> None:
    assert server_message(response(body)) == words


@pytest.mark.parametrize("content", [{}, {"data": None}])
def test_an_answer_without_models_has_none(content: dict[str, Any]) -> None:
    assert models_in(content) == []


def test_words_in_a_charset_that_is_none_of_text_are_read() -> None:
    odd = httpx.Response(502, headers={"Content-Type": "text/plain; charset=base64"}, content=b"no server")
    odd.request = httpx.Request("GET", "http://host")
    assert server_message(odd) == "no server"


def test_long_words_are_shortened() -> None:
    words = server_message(response("x" * 100_000))
    assert len(words) < 2100
    assert words.endswith("x...")


@pytest.mark.parametrize(
    "body",
    ["<html>502</html>", '{"half": ', "", "Success: plain text", b"\xff\xfe", pytest.param("[" * 100_000, id="deep")],
)
def test_body_without_json_is_the_error_asked_for_and_suspects_a_proxy(body: str) -> None:
    with pytest.raises(
        GenerationError, match=r"POST http://host/v1/x answered HTTP 200 without valid JSON.*proxy"
    ) as caught:
        json_object(response(body, 200), GenerationError)
    assert server_message(response(body)) in str(caught.value)


@pytest.mark.parametrize(("body", "kind"), [("[1]", "list"), ('"text"', "str"), ("null", "NoneType"), ("1", "int")])
def test_json_that_is_no_object_is_the_error_asked_for(body: str, kind: str) -> None:
    with pytest.raises(ServerSetupError, match=f"answered a JSON {kind} where an object was expected"):
        json_object(response(body, 200), ServerSetupError)


# The key


def test_key_is_read_from_the_environment_at_each_request(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda request: request.send()) as server:
        client = Blocking(HTTPClient(server.url, api_key=APIKey(VARIABLE), is_local=True))
        for key in (None, "first", "second"):
            if key:
                monkeypatch.setenv(VARIABLE, key)
            client.request("GET", "/", soon())
        client.close()
        sent = [request.headers.get("Authorization") for request in server.requests]
        assert sent == [None, "Bearer first", "Bearer second"]


def test_key_that_a_gateway_repeats_is_not_in_our_error(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors quote the server, and some gateways quote the request they refuse, with its head."""
    monkeypatch.setenv(VARIABLE, SECRET)

    def repeat(request: Request) -> None:
        request.send(502, f"bad request: Authorization: {request.headers['Authorization']}")

    with serving(repeat) as server:
        response = ask(server.url)
        assert SECRET in response.text, "the server did not repeat it, so this test proves nothing"
        assert server_message(response) == "bad request: Authorization: Bearer [key]"
        with pytest.raises(GenerationError) as caught:
            json_object(response, GenerationError)
        assert SECRET not in str(caught.value)


def test_key_says_whether_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    key = APIKey(VARIABLE)
    assert (key.is_set, repr(key)) == (False, f"APIKey({VARIABLE}=unset)")
    monkeypatch.setenv(VARIABLE, SECRET)
    assert (key.is_set, repr(key)) == (True, f"APIKey({VARIABLE}=set)")
    assert pickle.loads(pickle.dumps(key)).variable == VARIABLE


def test_empty_key_is_no_key(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    with serving(lambda request: request.send()) as server:
        ask(server.url)
        assert "Authorization" not in server.requests[0].headers


# Proxies


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A proxy in the environment, which answers for every host itself."""
    with serving(lambda request: request.send(200, "from the proxy")) as server:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, server.url)
        yield server


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_proxy_is_bypassed_for_a_server_on_this_host(host: str, proxy: Server, ask: Ask) -> None:
    try:
        with serving(lambda request: request.send(200, "from the server"), host) as server:
            assert ask(server.url, is_local=True).text == "from the server"
    except OSError as error:
        if host != "::1":
            raise
        pytest.skip(f"this host has no IPv6 loopback: {error}")
    assert proxy.requests == []


def test_proxy_is_used_for_a_server_elsewhere(proxy: Server, ask: Ask) -> None:
    assert ask("http://inference.example:8000", is_local=False).text == "from the proxy"
    assert proxy.requests[0].path == "http://inference.example:8000/path"


def test_proxy_that_does_not_answer_is_named_with_a_command_that_spares_the_server(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("NO_PROXY", "other.example")
    with nobody_listening() as refusing:
        for name in ("HTTP_PROXY", "http_proxy"):
            monkeypatch.setenv(name, refusing)
        with pytest.raises(ServerUnreachableError, match="go through the proxy of the environment") as caught:
            ask("http://inference.invalid:8000", is_local=False)
    command = str(caught.value).partition("before the training: ")[2]
    told = subprocess.run(["bash", "-c", f"{command}; echo $no_proxy"], capture_output=True, text=True, check=True)
    assert told.stdout == "other.example,inference.invalid\n"
    monkeypatch.setenv("no_proxy", told.stdout.strip())
    with pytest.raises(ServerUnreachableError) as caught:
        ask("http://inference.invalid:8000", is_local=False)
    assert "proxy" not in str(caught.value)


@pytest.fixture(params=["socks5://user:secret@127.0.0.1:9", "ftp://user:secret@127.0.0.1:9", "http://[::1"])
def unusable_proxy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy in the environment for which httpx has no package or no rule, or whose URL it cannot read."""
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, request.param)
    monkeypatch.setitem(sys.modules, "socksio", None)


@pytest.mark.usefixtures("unusable_proxy")
def test_proxy_that_cannot_be_used_is_no_matter_for_a_server_on_this_host(ask: Ask) -> None:
    """An error of httpx ended the run and `doctor`, although the proxy is bypassed there."""
    with serving(lambda request: request.send(200, "from the server")) as server:
        assert ask(server.url, is_local=True).text == "from the server"


@pytest.mark.usefixtures("unusable_proxy")
def test_proxy_that_cannot_be_used_is_an_error_with_what_to_change(ask: Ask) -> None:
    with pytest.raises(ServerSetupError, match=r"ALL_PROXY\) cannot be used.*pip install 'httpx\[socks\]'") as caught:
        ask("http://inference.example:8000", is_local=False)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("was_enabled", [True, False])
def test_garbage_collection_is_as_before_after_an_answer_was_read(was_enabled: bool) -> None:
    if not was_enabled:
        gc.disable()
    try:
        with contextlib.suppress(ValueError), collector_paused():
            assert not gc.isenabled()
            json.loads("unreadable")
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()


def test_a_server_whose_gateway_limits_requests_is_up() -> None:
    with serving(lambda request: request.send(429, Retry_After="3600")) as server:
        run(connect.wait_until_up(server.url, is_local=True, deadline=soon()))
        assert len(server.requests) == 1


def test_a_server_that_never_came_up_is_named_though_the_last_attempt_outlived_the_deadline(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([ServerUnreachableError("It does not answer. Start it."), DeadlineExceededError("too late")])

    async def request(*args: object, **kwargs: object) -> httpx.Response:
        raise next(answers)

    monkeypatch.setattr(HTTPClient, "request", request)
    with pytest.raises(ServerUnreachableError, match="Start it"):
        finished(connect.wait_until_up("http://localhost:1", is_local=True, deadline=soon()))
