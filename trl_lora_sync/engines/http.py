"""One HTTP client for all engines: a deadline for every request, keys that are never shown, transport errors as ours.

Of all routes it knows only /health, which both engines have.
"""

import asyncio
import contextlib
import email.utils
import errno
import json
import logging
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeGuard
from urllib.parse import urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx
import tenacity

from trl_lora_sync.engines.base import CONCURRENT_REQUESTS, TIMEOUTS, Deadline, Timeouts
from trl_lora_sync.engines.vllm.spec import VLLM
from trl_lora_sync.errors import (
    DeadlineExceededError,
    LoRASyncError,
    ServerAuthError,
    ServerSetupError,
    ServerUnreachableError,
)
from trl_lora_sync.runtime import spawn

logger = logging.getLogger(__name__)

# A proxy may answer with a whole page, and these words go into an error.
_MAX_WORDS = 2000
# Between requests that a gateway limits: without a `Retry-After`, twice as long each time.
_FIRST_PAUSE_S, _SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 0.1, 10.0
_NO_CONNECTION = (httpx.ConnectError, httpx.ConnectTimeout)
# httpx sets this header for `json=` only.
_JSON = {"Content-Type": "application/json"}
# While a long completion is sampled, its connection is idle for minutes. Firewalls and load balancers silently drop
# such connections (AWS's after 350 s) unless these probes pass them. macOS lacks the first name.
_KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
        if hasattr(socket, name)
    ),
]
# Variables that name certificate authorities.
_AUTHORITIES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")


class SizedBody(Protocol):
    """Chunks of a request's body, which can be iterated over once per attempt."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    def __len__(self) -> int: ...


class APIKey(httpx.Auth):
    """Sends a bearer token, and never shows or pickles it."""

    def __init__(self, variable: str) -> None:
        self.variable = variable

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        key = os.environ.get(self.variable)
        if key:
            # Before h11 refuses it, in an error that quotes the key.
            if not (key.isascii() and key.isprintable()) or key != key.strip():
                raise ServerAuthError(
                    f"The key in {self.variable} has a blank or a line break at an end, or a character that an HTTP "
                    "header cannot carry. Printable ASCII characters were expected. Export the key without it."
                )
            request.headers["Authorization"] = f"Bearer {key}"
        yield request

    @property
    def is_set(self) -> bool:
        return bool(os.environ.get(self.variable))

    def __repr__(self) -> str:
        return f"APIKey({self.variable}={'set' if self.is_set else 'unset'})"


# Adds nothing to a request.
# An object, because None in `HTTPClient.request` stands for the client's own key.
NO_KEY = httpx.Auth()


class HTTPClient:
    """Requests to one server, all of them on the one event loop.

    Args:
        base_url: such as `http://127.0.0.1:8000`, without a trailing slash.
        api_key: read from the environment at each request, or `NO_KEY`.
        is_local: whether the server is on this host; a proxy from the environment is then bypassed.
        if_down: what to do if no server answers; empty for how to start one.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: httpx.Auth,
        is_local: bool,
        timeouts: Timeouts = TIMEOUTS,
        if_down: str = "",
    ) -> None:
        self.base_url = base_url
        self.api_key = api_key
        self._timeouts = timeouts
        self._is_local = is_local
        self._if_down = if_down
        self._certificates = _certificates()
        self._connections = _Connections(self._new_client)
        self._is_probing = False
        self._alive_at = 0.0  # on the monotonic clock, of an answer with another status than HTTP 5xx

    def _new_client(self) -> httpx.AsyncClient:
        # Follows no redirects, which is the default of httpx: `redirect_error` explains why none may be followed.
        try:
            return httpx.AsyncClient(
                base_url=self.base_url,
                auth=self.api_key,
                verify=self._certificates,
                # The proxies of the environment where it is None, and nothing else, as the certificates are given.
                transport=self._direct_transport(),
            )
        # The text of the error is not quoted, as a proxy's URL may have a password.
        except (ImportError, ValueError, httpx.InvalidURL) as error:
            # httpx makes a client for each proxy that is named, whatever NO_PROXY spares (0.28).
            raise ServerSetupError(
                "A proxy in the environment (HTTP_PROXY, HTTPS_PROXY or ALL_PROXY) cannot be used for "
                f"{self.base_url}. Unset it, or correct it; for a SOCKS proxy, run: pip install 'httpx[socks]'"
            ) from error

    def _direct_transport(self) -> httpx.AsyncHTTPTransport | None:
        """How to connect where no proxy may be used; None to leave it to httpx.

        httpx (0.28) uses no proxy of the environment together with a transport.
        """
        if self._may_use_proxy:
            return None
        return httpx.AsyncHTTPTransport(verify=self._certificates, socket_options=_KEEPALIVE)

    @property
    def _may_use_proxy(self) -> bool:
        url = urlsplit(self.base_url)
        is_named = bool({url.scheme, "all"} & getproxies().keys())
        return not self._is_local and is_named and not proxy_bypass(str(url.hostname))

    async def start_afresh(self) -> None:
        """Use new connections from now on; running requests keep theirs.

        For after an answer that cannot be the one to its request: a peer that sent one answer too many would answer
        every later request on that connection with that of the one before.
        """
        # Before the await, so that no request that begins meanwhile gets an old connection.
        old, self._connections = self._connections, _Connections(self._new_client)
        await old.retire()

    async def __aenter__(self) -> "HTTPClient":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections, and that of a running request once it has ended."""
        await self.start_afresh()

    async def request(
        self,
        method: str,
        path: str,
        deadline: Deadline,
        *,
        body: Any = None,
        content: SizedBody | None = None,
        headers: Mapping[str, str] | None = None,
        api_key: httpx.Auth | None = None,
        is_watched: bool = False,
        abort: Callable[[Deadline], Awaitable[None]] | None = None,
        is_probe: bool = False,
    ) -> httpx.Response:
        """Send one request, and return whatever the server answers. It is sent again after HTTP 429 only.

        If it is cancelled, or ends in an error, its connection is broken off.

        Args:
            body: sent as JSON.
            content: encoded JSON in chunks, instead of `body`; its length is that of all chunks.
            headers: added to the request; for `content` that is not JSON.
            api_key: another key than the client's own.
            is_watched: whether the server's health is checked while its answer is waited for.
            abort: ends the request on the server, by a deadline; called before its connection is broken off.
            is_probe: whether any answer will do, HTTP 429 included.

        Raises:
            ServerUnreachableError: no connection, or it broke before the answer was complete; or the server is dead.
            ServerSetupError: the server's certificate is not trusted, or it requires one of its clients.
            ServerAuthError: the key in the environment does not fit into a header.
            DeadlineExceededError: no complete answer before the deadline, or a gateway wants a pause beyond it.
        """
        pause_s = _FIRST_PAUSE_S
        while True:
            # With no time left nothing is sent: the server would carry out a request that is not waited for.
            deadline.remaining_s()
            # A separate task, because an abort goes on after this method has been left.
            sending = spawn(self._send(method, path, deadline, body, content, headers or {}, api_key or self.api_key))
            # Beside it, because neither the answer nor the deadline may wait until a watch has ended.
            watching: set[asyncio.Task[None]] = {spawn(self._watch())} if is_watched else set()
            try:
                # httpx times each read and each write, so a peer that answers in drops is cut off here.
                # `asyncio.wait` leaves the request running at its timeout, where `wait_for` would cancel it.
                await asyncio.wait({sending, *watching}, timeout=deadline.left_s(), return_when=asyncio.FIRST_COMPLETED)
                if not sending.done():
                    for task in watching:
                        if task.done():
                            task.result()
                    raise deadline.error(f"waiting for {method} {self.base_url}{path}")
            # CancelledError as well: a server goes on sampling for as long as its client seems to wait.
            except BaseException:
                await self._give_up(sending, abort)
                raise
            finally:
                for task in watching:
                    task.add_done_callback(_ignore)
                    task.cancel()
            response = sending.result()
            if response.status_code < 500:
                self._alive_at = time.monotonic()
            if response.status_code != 429 or is_probe:
                return response
            # The request was refused and not carried out, so repeating it is always harmless.
            pause_s = _pause_s(response, pause_s, deadline)
            await asyncio.sleep(pause_s)

    async def _watch(self) -> None:
        """Check the server's health until the answer is there; raises ServerUnreachableError for a dead server.

        vLLM (0.22 to 0.33) closes its port on SIGTERM, but keeps the connections of open requests, which it never
        answers. A process that is stopped or swapped out looks the same. So without this, a dead server would be
        noticed when the deadline of a generation is over.
        """
        # For each request: the silence of an ended process must not count against its successor.
        waiting_since = time.monotonic()
        while True:
            await asyncio.sleep(self._timeouts.watch_every_s)
            await self._probe()
            # Any answer is a sign of life: that of a request cancels its probe, which may be the only one for all.
            # Probes are sent only while a request waits, so the last sign of life may be older than this request.
            silent_s = time.monotonic() - max(waiting_since, self._alive_at)
            if silent_s > self._timeouts.lifeless_after_s:
                raise ServerUnreachableError(
                    f"{self.base_url} has shown no sign of life for {silent_s:.0f} s (no answer from /health) "
                    "while it was to answer a request. The server has been stopped, has crashed or hangs; look at its "
                    "log. Restart it, and resume the run from its last checkpoint."
                )

    async def _probe(self) -> None:
        """One waiting request probes for all."""
        if self._is_probing:
            return
        self._is_probing = True
        try:
            deadline = Deadline.after(self._timeouts.health_s, "The health check")
            await self.request("GET", "/health", deadline, is_probe=True)
        except LoRASyncError as error:
            # A failed probe lets the silence grow, and `_watch` decides by its length.
            logger.debug("%s", error)
        finally:
            # After a cancellation too, or no other request would ever probe.
            self._is_probing = False

    async def _give_up(
        self, sending: "asyncio.Task[httpx.Response]", abort: Callable[[Deadline], Awaitable[None]] | None
    ) -> None:
        sending.add_done_callback(_ignore)
        if abort is None:
            sending.cancel()
        else:  # beside the caller, as an interrupt is to be over within two seconds, and a busy server answers later
            aborting = spawn(self._abort(sending, abort))
            await asyncio.wait({aborting}, timeout=self._timeouts.wait_for_abort_s)

    async def _abort(
        self, sending: "asyncio.Task[httpx.Response]", abort: Callable[[Deadline], Awaitable[None]]
    ) -> None:
        deadline = Deadline.after(self._timeouts.abort_s, "Aborting a request")
        # The request has been given up. Without an abort its connection is still broken off, below.
        with contextlib.suppress(LoRASyncError):
            # More than once, as the server may not have read the request yet.
            while not deadline.is_over() and not sending.done():
                await abort(deadline)
                await asyncio.wait({sending}, timeout=min(deadline.left_s(), self._timeouts.abort_again_s))
        sending.cancel()

    async def _send(
        self,
        method: str,
        path: str,
        deadline: Deadline,
        body: Any,
        content: SizedBody | None,
        headers: Mapping[str, str],
        api_key: httpx.Auth,
    ) -> httpx.Response:
        left = deadline.remaining_s()
        started = time.monotonic()
        try:
            async with self._connections.lent() as client:
                return await client.request(
                    method,
                    path,
                    json=body,
                    content=content,
                    # By default httpx (0.28) sends such a body in chunks. The push route needs its length (HTTP 411).
                    headers=headers if content is None else {**(headers or _JSON), "Content-Length": str(len(content))},
                    auth=api_key,
                    # By default httpx allows 5 s without a byte, and a long completion sends none before it is done.
                    timeout=httpx.Timeout(left, connect=min(left, self._timeouts.connect_s)),
                )
        except httpx.RequestError as error:
            error.request = httpx.Request(method, f"{self.base_url}{path}")  # without the key in its head
            raise self._our_error(error, method, path, deadline, time.monotonic() - started) from error
        # Of alerts after the handshake, which httpx passes on (0.28).
        except ssl.SSLError as error:
            if "CERTIFICATE_REQUIRED" in str(error.reason):
                raise ServerSetupError(
                    f"{self.base_url} requires a client certificate, and none is ever sent. Set vllm_server_base_url "
                    "to a URL that requires none, such as the server's behind a gateway. Protect it by an API key."
                ) from error
            broken = httpx.ReadError(str(error), request=httpx.Request(method, f"{self.base_url}{path}"))
            raise self._our_error(broken, method, path, deadline, time.monotonic() - started) from broken

    def _our_error(
        self, error: httpx.RequestError, method: str, path: str, deadline: Deadline, waited_s: float
    ) -> LoRASyncError:
        # First, because ConnectTimeout is a TimeoutException too: such a server is down, and its answer not just late.
        if isinstance(error, _NO_CONNECTION):
            # No loss of the server: waiting for it would end with the deadline, and other servers are as far away.
            if any(isinstance(one, OSError) and one.errno == errno.EMFILE for one in _errors_behind(error)):
                return LoRASyncError(
                    f"No connection to {self.base_url} can be opened, as this process has as many files open as it "
                    f"may. Up to {CONCURRENT_REQUESTS} connections to each server are needed. Before the run is "
                    'started, raise the limit in the same shell with: ulimit -n "$(ulimit -Hn)" (for a container: '
                    "docker run --ulimit nofile=65536)."
                )
            command = VLLM.serve_command("MODEL", base_url=self.base_url, is_local=self._is_local)
            advice = self._if_down or (
                f"A running server was expected there. Start it on its host, for vLLM with {command}, or correct "
                "vllm_server_base_url."
            )
            return _tls_error(self.base_url, error) or ServerUnreachableError(
                f"No server answers at {self.base_url} ({_reason(error)}). {advice}{self._proxy_hint()}"
            )
        if isinstance(error, httpx.TimeoutException):
            return deadline.error(f"waiting for {method} {self.base_url}{path}")
        # broken off, or a body that does not decode
        broken = ServerUnreachableError(
            f"The connection to {self.base_url} broke during {method} {path} ({_reason(error)}). "
            f"The server may have been stopped or have crashed; look at its log.{self._proxy_hint()}"
        )
        broken.waited_s = waited_s
        return broken

    def _proxy_hint(self) -> str:
        """What else may be the cause, if a proxy of the environment is between; empty if none is."""
        if not self._may_use_proxy:
            return ""
        # Of both spellings, Python reads the one in small letters alone (3.10 to 3.13).
        spared = f'export no_proxy="${{no_proxy:-$NO_PROXY}},{urlsplit(self.base_url).hostname}"'
        return (
            " Requests to it go through the proxy of the environment (HTTP_PROXY, HTTPS_PROXY or ALL_PROXY). If it can "
            f"be reached without one, run this before the training: {spared}"
        )


def _certificates() -> ssl.SSLContext:
    return _read_certificates(*map(os.environ.get, _AUTHORITIES))


@cache
def _read_certificates(file: str | None, folder: str | None, bundle: str | None) -> ssl.SSLContext:
    """The authorities that the environment names, or certifi's; reading them takes longer than opening connections."""
    try:
        # TRL's own client reads this variable alone (requests 2.32), and httpx (0.28) the other two.
        if bundle and not (file or folder):
            is_folder = Path(bundle).is_dir()
            return ssl.create_default_context(
                cafile=None if is_folder else bundle, capath=bundle if is_folder else None
            )
        return httpx.create_ssl_context()
    except (OSError, ssl.SSLError) as error:
        raise ServerSetupError(
            f"The certificate authorities in {', '.join(filter(os.environ.get, _AUTHORITIES))} cannot be read "
            f"({error}). Correct or unset these environment variables."
        ) from error


class _Connections:
    """Connections that are closed together, each once no request uses it.

    Each has a client to itself: at each request a pool of httpcore (1.0) looks through all of its connections twice.
    """

    def __init__(self, new_client: Callable[[], httpx.AsyncClient]) -> None:
        self._new_client = new_client
        self._idle: list[httpx.AsyncClient] = []
        self._is_retired = False

    @contextlib.asynccontextmanager
    async def lent(self) -> AsyncIterator[httpx.AsyncClient]:
        client = self._idle.pop() if self._idle else self._new_client()
        is_kept = False
        try:
            yield client
            # Not after an error or a cancellation: a closed connection shows the server that its answer is not awaited.
            # Nor after `retire`, which closes only the connections that are not lent.
            is_kept = not self._is_retired
        finally:
            if is_kept:
                self._idle.append(client)
            else:
                await client.aclose()

    async def retire(self) -> None:
        # Before the first await, during which a request may end and would keep its connection.
        self._is_retired = True
        while self._idle:
            await self._idle.pop().aclose()


def _ignore(task: "asyncio.Task[Any]") -> None:
    """Of a task that was given up, asyncio would report an error that nothing waits for."""
    if not task.cancelled():
        task.exception()


def _errors_behind(error: BaseException | None) -> Iterator[BaseException]:
    """An error with its causes, which the errors of httpx, httpcore and anyio wrap and do not show."""
    while error is not None:
        yield error
        # A host may have several addresses, and each an error (anyio 4, `connect_tcp`).
        yield from getattr(error, "exceptions", ())
        error = error.__cause__ or error.__context__


def _tls_error(base_url: str, error: BaseException) -> ServerSetupError | None:
    """What is wrong with the encryption, if that is the cause; waiting would not help."""
    cause = next((one for one in _errors_behind(error) if isinstance(one, ssl.SSLError)), None)
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
) -> tenacity.AsyncRetrying:
    """Repeat while `may_repeat` allows the error and the deadline the time; then raise the last error unchanged.

    Args:
        on_repeat: called before each repetition.
    """
    left = max(0.0, deadline.remaining_s())

    async def before_repeat(state: tenacity.RetryCallState) -> None:
        await asyncio.sleep(state.upcoming_sleep)
        # On a busy machine a pause outlasts the deadline; another attempt could then only fail because the time is up.
        if deadline.is_over() and state.outcome is not None:
            state.outcome.result()
        if on_repeat is not None:
            on_repeat()

    return tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception(may_repeat),
        # With a random part, because all requests that a server breaks off come back after the same pauses otherwise.
        wait=tenacity.wait_exponential(multiplier=0.1, max=2.0) + tenacity.wait_random(0, 0.1),
        # Not `stop_after_delay`, with which the last pause would go past the limit.
        stop=tenacity.stop_before_delay(left if at_most_s is None else min(left, at_most_s)),
        before_sleep=before_repeat,
        sleep=_no_sleep,
        reraise=True,
    )


async def _no_sleep(seconds: float) -> None:
    """The pause was made before the time was looked at."""


def _pause_s(limited: httpx.Response, before_s: float, deadline: Deadline) -> float:
    """How long to wait after HTTP 429: as `Retry-After` wants it, or twice as long as before.

    Raises:
        DeadlineExceededError: the pause would outlast the deadline.
    """
    wanted_s = _retry_after_s(limited)
    pause_s = min(2 * before_s, _LONGEST_PAUSE_S) if wanted_s is None else wanted_s
    if pause_s >= deadline.left_s():
        raise deadline.error(
            f"{limited.request.url} limits the rate of requests, with HTTP 429 and a pause of {pause_s:g} s. "
            "Raise the limit of the gateway in front of the server, or give vllm_server_base_url the server's own "
            f"URL. The server answered: {server_message(limited)!r}"
        )
    return pause_s


def _retry_after_s(response: httpx.Response) -> float | None:
    """The header as seconds from now; RFC 9110 allows a date as well. None if there is none that can be read."""
    text = response.headers.get("Retry-After", "")
    with contextlib.suppress(ValueError, OverflowError):
        # At least a short pause, even after a header of 0 or a date in the past.
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


def is_unreachable(error: BaseException) -> TypeGuard[ServerUnreachableError]:
    """Whether the request may simply be sent again, if sending it twice does no harm."""
    return isinstance(error, ServerUnreachableError)


def may_have_acted(error: BaseException) -> bool:
    """Whether the server may have carried out a request that ended in this error, as its answer was lost or is late."""
    if isinstance(error, ServerUnreachableError):
        cause = error.__cause__  # none for a refusal such as HTTP 503
        return isinstance(cause, httpx.RequestError) and not isinstance(cause, _NO_CONNECTION)
    return isinstance(error, DeadlineExceededError | asyncio.CancelledError)


def server_message(response: httpx.Response) -> str:
    """The text of the server's answer, as one line; without the key of the request, which some gateways repeat."""
    # Not `text` of httpx (0.28), which fails for a charset that is not one of text, such as base64.
    text = response.content.decode(errors="replace")
    # RecursionError of what is nested deeply.
    with contextlib.suppress(ValueError, RecursionError):
        text = _message_in(json.loads(text)) or text
    key = response.request.headers.get("Authorization", "").removeprefix("Bearer ")
    if key:
        text = text.replace(key, "[key]")
    message = " ".join(text.split())
    return message if len(message) <= _MAX_WORDS else f"{message[:_MAX_WORDS]}..."


def json_object(
    response: httpx.Response, error: type[LoRASyncError], shorten: Callable[[bytes], bytes] | None = None
) -> dict[str, Any]:
    """The JSON object in a response.

    Args:
        shorten: leaves out what need not be parsed.

    Raises:
        error: the body is something else, for instance a truncated answer or a proxy's page.
    """
    try:
        content = response.json() if shorten is None else json.loads(shorten(response.content))
    except (ValueError, RecursionError):
        raise error(
            f"{response.request.method} {response.request.url} answered HTTP {response.status_code} without valid "
            "JSON. Is it the inference server itself, and not a proxy? The server answered: "
            f"{server_message(response)!r}"
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
