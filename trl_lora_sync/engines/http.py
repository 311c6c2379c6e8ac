"""One HTTP client for all engines: a deadline for every request, keys that are never shown, transport errors as ours.

Knows nothing of any engine's routes.
"""

import contextlib
import email.utils
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, Protocol
from urllib.parse import urljoin, urlsplit

import httpx
import tenacity

from trl_lora_sync.engines.base import Deadline
from trl_lora_sync.engines.known import serve_command
from trl_lora_sync.errors import LoRASyncError, ServerSetupError, ServerUnreachableError
from trl_lora_sync.threads import POLL_S, check_cancelled, pause

_CONNECT_TIMEOUT_S = 10.0
# Interval at which a wait for an answer checks that the server is still alive.
_WATCH_EVERY_S = 5.0
# For how long a request that was given up is aborted on its server, and how long its caller waits for that. An
# interrupt is to be over within two seconds, and a busy server may answer later.
_ABORT_S, _WAIT_FOR_ABORT_S = 10.0, 1.2
_MAX_WORDS = 2000
# Between requests that a gateway limits: without a `Retry-After`, twice as long each time.
_FIRST_PAUSE_S, _SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 0.1, 10.0
_JSON = {"Content-Type": "application/json"}


class SizedIterable(Protocol):
    """Chunks of a request's body, which can be iterated over once per attempt."""

    def __iter__(self) -> Iterator[bytes]: ...

    def __len__(self) -> int: ...


class APIKey(httpx.Auth):
    """Sends a bearer token, and never shows or pickles it."""

    def __init__(self, variable: str) -> None:
        self.variable = variable

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        key = os.environ.get(self.variable)
        if key:
            request.headers["Authorization"] = f"Bearer {key}"
        yield request

    @property
    def is_set(self) -> bool:
        return bool(os.environ.get(self.variable))

    def __repr__(self) -> str:
        return f"APIKey({self.variable}={'set' if self.is_set else 'unset'})"


# Adds nothing to a request.
NO_KEY = httpx.Auth()


class HTTPClient:
    """Requests to one server. Thread-safe.

    Args:
        base_url: such as `http://127.0.0.1:8000`, without a trailing slash.
        api_key: read from the environment at each request, or `NO_KEY`.
        is_local: whether the server is on this host; a proxy from the environment is then bypassed.
    """

    def __init__(self, base_url: str, *, api_key: httpx.Auth, is_local: bool) -> None:
        self.base_url = base_url
        self.api_key = api_key
        self._mounts = dict.fromkeys(("http://", "https://")) if is_local else None
        self._certificates = _certificates()
        self._idle: list[_Connection] = []
        self._lock = threading.Lock()

    def start_afresh(self) -> None:
        """Use new connections from now on; running requests keep theirs.

        For after an answer that cannot be the one to its request: a peer that sent one answer too many would answer
        every later request on that connection with that of the one before.
        """
        with self._lock:
            old, self._idle = self._idle, []
        for connection in old:
            connection.close()

    @contextlib.contextmanager
    def _connection(self) -> "Iterator[_Connection]":
        """A connection that no other request uses meanwhile."""
        with self._lock:
            idle = self._idle
            connection = idle.pop() if idle else None
        connection = connection or _Connection(
            httpx.Client(base_url=self.base_url, auth=self.api_key, mounts=self._mounts, verify=self._certificates)
        )
        try:
            yield connection
        finally:
            with self._lock:
                if is_kept := idle is self._idle and not connection.is_broken:
                    idle.append(connection)
            if not is_kept:
                connection.close()

    def request(
        self,
        method: str,
        path: str,
        deadline: Deadline,
        *,
        body: Any = None,
        content: SizedIterable | None = None,
        headers: Mapping[str, str] | None = None,
        api_key: httpx.Auth | None = None,
        watch: Callable[[], None] | None = None,
        abort: Callable[[Deadline], None] | None = None,
    ) -> httpx.Response:
        """Send one request, once, and return whatever the server answers.

        The wait for the answer may end in any error: an interrupt, the cancellation of the task that this thread runs,
        or one of those below. The connection is broken off then.

        Args:
            body: sent as JSON.
            content: encoded JSON in chunks, instead of `body`; its length is that of all chunks.
            headers: added to the request; for `content` that is not JSON.
            api_key: another key than the client's own.
            watch: called every few seconds of waiting; what it raises ends the request.
            abort: ends the request on the server, by a deadline; called before its connection is broken off.

        Raises:
            ServerUnreachableError: no connection, or it broke before the answer was complete.
            ServerSetupError: the server's certificate is not trusted.
            DeadlineExceededError: no complete answer before the deadline.
        """
        exchange = _Exchange(
            lambda running: self._send(
                running, method, path, deadline, body, content, headers or {}, api_key or self.api_key
            ),
            abort,
        )
        deadline.remaining_s()
        check_cancelled()
        try:
            return exchange.result(deadline, watch)
        except _StillWaitingError:
            raise deadline.error(f"waiting for {method} {self.base_url}{path}") from None

    def _send(
        self,
        exchange: "_Exchange",
        method: str,
        path: str,
        deadline: Deadline,
        body: Any,
        content: SizedIterable | None,
        headers: Mapping[str, str],
        api_key: httpx.Auth,
    ) -> httpx.Response:
        left = deadline.remaining_s()
        try:
            with (
                self._connection() as connection,
                exchange.on(connection),
                connection.client.stream(
                    method,
                    path,
                    json=body,
                    content=_until(deadline, content) if content is not None else None,
                    headers=headers if content is None else {**(headers or _JSON), "Content-Length": str(len(content))},
                    auth=api_key,
                    timeout=httpx.Timeout(left, connect=min(left, _CONNECT_TIMEOUT_S)),
                    extensions={"trace": connection.trace},
                ) as response,
            ):
                return httpx.Response(
                    response.status_code,
                    headers=response.headers,
                    content=b"".join(_until(deadline, response.iter_raw())),
                    request=response.request,
                )
        except httpx.RequestError as error:
            error.request = httpx.Request(method, f"{self.base_url}{path}")  # without the key in its head
            raise self._our_error(error, method, path, deadline) from error

    def _our_error(self, error: httpx.RequestError, method: str, path: str, deadline: Deadline) -> LoRASyncError:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return _tls_error(self.base_url, error) or ServerUnreachableError(
                f"No server answers at {self.base_url} ({_reason(error)}). "
                f"A running server was expected there. Start it on its host, for vLLM with "
                f"{serve_command('vllm', 'MODEL', base_url=self.base_url)}, or correct vllm_server_base_url."
            )
        if isinstance(error, httpx.TimeoutException):
            return deadline.error(f"waiting for {method} {self.base_url}{path}")
        # broken off, or a body that does not decode
        return ServerUnreachableError(
            f"The connection to {self.base_url} broke during {method} {path} ({_reason(error)}). "
            "The server may have been stopped or have crashed; look at its log."
        )

    def close(self) -> None:
        self.start_afresh()


def _certificates() -> ssl.SSLContext:
    """Reading the authorities takes longer than opening a connection, so it is done once per server."""
    try:
        return httpx.create_ssl_context()
    except (OSError, ssl.SSLError) as error:
        raise ServerSetupError(
            f"The certificate authorities in SSL_CERT_FILE or SSL_CERT_DIR cannot be read ({error}). "
            "Correct or unset these environment variables."
        ) from error


class _Connection:
    """A client for one request at a time, so that the socket which a request uses is known.

    httpcore (1.0) reports the socket of a new connection only, and a request on a kept one could not be broken off.
    """

    def __init__(self, client: httpx.Client) -> None:
        self.client = client
        self.is_broken = False
        self._socket: socket.socket | None = None

    def trace(self, event: str, info: Any) -> None:
        """Called by httpcore; the connection that is opened will be used."""
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            self._socket = info["return_value"].get_extra_info("socket")
            if self.is_broken:
                self.break_off()

    def break_off(self) -> None:
        """Let the server see that the client has gone; the thread that reads from it is woken by an error."""
        self.is_broken = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self.client.close()


class _StillWaitingError(Exception):
    """The deadline is over, and the exchange is not."""


class _Exchange:
    """One request in a separate thread, so that its caller can stop waiting at any time.

    httpx times each read and each write, and name resolution not at all, so a peer that answers in drops, or stops in
    the middle, would hold up its caller for longer than the deadline.
    """

    def __init__(self, send: Callable[["_Exchange"], httpx.Response], abort: Callable[[Deadline], None] | None) -> None:
        self._send = send
        self._abort = abort
        self._done = threading.Event()
        self._response: httpx.Response | None = None
        self._error: BaseException | None = None
        self._connection: _Connection | None = None
        self._is_given_up = False
        self._lock = threading.Lock()

    def result(self, deadline: Deadline, watch: Callable[[], None] | None) -> httpx.Response:
        try:
            threading.Thread(target=self._run, name="lora-sync-request", daemon=True).start()
        except RuntimeError:  # the interpreter is ending and starts no more threads
            self._run()
        try:
            self._wait(deadline, watch)
        except BaseException:
            self._give_up()
            raise
        if self._error is not None:
            raise self._error
        assert self._response is not None
        return self._response

    def _wait(self, deadline: Deadline, watch: Callable[[], None] | None) -> None:
        watch_at = time.monotonic() + _WATCH_EVERY_S
        while not deadline.is_over():
            if self._done.wait(min(deadline.left_s(), POLL_S)):
                return
            check_cancelled()
            if watch is not None and time.monotonic() >= watch_at and not deadline.is_over():
                watch()
                watch_at = time.monotonic() + _WATCH_EVERY_S
        if not self._done.is_set():
            raise _StillWaitingError

    def _give_up(self) -> None:
        if self._abort is None:
            self._break_off()
            return
        ending = threading.Thread(target=self._abort_and_break_off, name="lora-sync-abort", daemon=True)
        try:
            ending.start()
        except RuntimeError:  # the interpreter is ending and starts no more threads
            self._break_off()
        else:
            ending.join(_WAIT_FOR_ABORT_S)

    def _abort_and_break_off(self) -> None:
        assert self._abort is not None
        deadline = Deadline.after(_ABORT_S, "Aborting a request")
        try:
            with contextlib.suppress(LoRASyncError):
                # More than once, as the server may not have read the request yet.
                while not deadline.is_over() and not self._done.is_set():
                    self._abort(deadline)
                    self._done.wait(min(deadline.left_s(), POLL_S))
        finally:
            self._break_off()

    def _break_off(self) -> None:
        with self._lock:
            self._is_given_up = True
            if self._connection is not None:
                self._connection.break_off()

    def _run(self) -> None:
        try:
            self._response = self._send(self)
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    @contextlib.contextmanager
    def on(self, connection: _Connection) -> Iterator[None]:
        """It is broken off with this request, until the block ends and another request may use it."""
        with self._lock:
            self._connection = connection
            if self._is_given_up:
                connection.break_off()
        try:
            yield
        finally:
            with self._lock:
                self._connection = None


def _until(deadline: Deadline, chunks: SizedIterable | Iterator[bytes]) -> Iterator[bytes]:
    """The chunks, for as long as there is time."""
    for chunk in chunks:
        deadline.remaining_s()
        yield chunk


def _tls_error(base_url: str, error: BaseException) -> ServerSetupError | None:
    """What is wrong with the encryption, if that is the cause; waiting would not help."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, ssl.SSLCertVerificationError):
        return ServerSetupError(
            f"The certificate of {base_url} is not trusted: {cause.verify_message}. Certificates are always verified, "
            "against the authorities that certifi ships. If yours is signed by another one, export "
            "SSL_CERT_FILE=/path/to/ca.pem (or SSL_CERT_DIR) for the trainer; if the name does not match, correct "
            "vllm_server_base_url."
        )
    if isinstance(cause, ssl.SSLError):
        return ServerSetupError(
            f"{base_url} does not answer in TLS ({cause.reason or cause}). If it is a plain inference server, write "
            "http:// in vllm_server_base_url."
        )
    return None


def retrying(
    deadline: Deadline,
    may_repeat: Callable[[BaseException], bool],
    *,
    at_most_s: float | None = None,
    on_repeat: Callable[[], None] | None = None,
) -> tenacity.Retrying:
    """Repeat while `may_repeat` allows the error and the deadline the time; then raise the last error unchanged.

    Args:
        on_repeat: called before each repetition.
    """
    left = max(0.0, deadline.remaining_s())

    def before_repeat(state: tenacity.RetryCallState) -> None:
        pause(state.upcoming_sleep)
        # On a busy machine a pause outlasts the deadline; another attempt could then only fail because the time is up.
        if deadline.is_over() and state.outcome is not None:
            state.outcome.result()
        if on_repeat is not None:
            on_repeat()

    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(may_repeat),
        wait=tenacity.wait_exponential(multiplier=0.1, max=2.0) + tenacity.wait_random(0, 0.1),
        stop=tenacity.stop_before_delay(left if at_most_s is None else min(left, at_most_s)),
        before_sleep=before_repeat,
        sleep=lambda _: None,
        reraise=True,
    )


def unthrottled(send: Callable[[], httpx.Response], deadline: Deadline) -> httpx.Response:
    """The answer of `send`, called again after the pause in `Retry-After` for as long as requests are limited.

    A request that was refused with HTTP 429 has not been carried out, so repeating it is always harmless.

    Raises:
        DeadlineExceededError: the pause would outlast the deadline.
    """
    pause_s = _FIRST_PAUSE_S
    while (response := send()).status_code == 429:
        wanted_s = _retry_after_s(response)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S) if wanted_s is None else wanted_s
        if pause_s >= deadline.left_s():
            raise deadline.error(
                f"{response.request.url} limits the rate of requests, with HTTP 429 and a pause of {pause_s:g} s. "
                "Raise the limit of the gateway in front of the server, or give vllm_server_base_url the server's own "
                f"URL. The server answered: {server_words(response)!r}"
            )
        pause(pause_s)
    return response


def _retry_after_s(response: httpx.Response) -> float | None:
    """The header as seconds from now; RFC 9110 allows a date as well. None if there is none that can be read."""
    text = response.headers.get("Retry-After", "")
    with contextlib.suppress(ValueError):
        if text.strip().isdecimal():
            return max(_SHORTEST_PAUSE_S, float(text))
        return max(_SHORTEST_PAUSE_S, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    return None


def redirect_error(response: httpx.Response) -> ServerSetupError:
    """For an answer that sends the client to another address."""
    url = response.request.url
    target = urlsplit(urljoin(str(url), response.headers.get("Location", "")))
    place = f"{target.scheme}://{target.netloc.rpartition('@')[2]}{target.path}"  # without anything secret
    fix = "Give vllm_server_base_url the URL of the server itself, past any proxy"
    if place.endswith(url.path) and place != str(url):
        fix = f'Set vllm_server_base_url="{place.removesuffix(url.path)}"'
    return ServerSetupError(
        f"{url} answered with a redirect to {place} (HTTP {response.status_code}). An answer of the inference server "
        "itself was expected. Redirects are not followed, because the key and the adapter would go to another address. "
        f"{fix}."
    )


def is_unreachable(error: BaseException) -> bool:
    """Whether the request may simply be sent again, if sending it twice does no harm."""
    return isinstance(error, ServerUnreachableError)


def server_words(response: httpx.Response) -> str:
    """The text of the server's answer, as one line; without the key of the request, which some gateways repeat."""
    text = response.text
    with contextlib.suppress(ValueError):
        text = _message_in(json.loads(text)) or text
    key = response.request.headers.get("Authorization", "").removeprefix("Bearer ")
    if key:
        text = text.replace(key, "[key]")
    words = " ".join(text.split())
    return words if len(words) <= _MAX_WORDS else f"{words[:_MAX_WORDS]}..."


def json_object(response: httpx.Response, error: type[LoRASyncError]) -> dict[str, Any]:
    """The JSON object in a response.

    Raises:
        error: the body is something else, for instance a truncated answer or a proxy's page.
    """
    try:
        content = response.json()
    except ValueError:
        raise error(
            f"{response.request.method} {response.request.url} answered HTTP {response.status_code} without valid "
            f"JSON. Is it the inference server itself, and not a proxy? The server answered: {server_words(response)!r}"
        ) from None  # which holds the whole body, with whatever it repeats
    if not isinstance(content, dict):
        raise error(
            f"{response.request.url} answered a JSON {type(content).__name__} where an object was expected. Is it the "
            "inference server itself? Point vllm_server_base_url past any proxy."
        )
    return content


def _message_in(content: Any) -> str | None:
    """`error` as an object or a string (vLLM, SGLang), `detail` (FastAPI), `error_message` (SGLang)."""
    if not isinstance(content, dict):
        return None
    for name in ("error", "detail", "error_message"):
        found = content.get(name)
        if isinstance(found, dict):
            found = found.get("message")
        if isinstance(found, str) and found:
            return found
    return None


def _reason(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__
