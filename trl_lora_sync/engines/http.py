"""One HTTP client for all engines: a timeout on every request, keys that are never shown, transport errors as ours.

Knows nothing of any engine's routes.
"""

import contextlib
import json
import os
from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol

import httpx
import tenacity

from trl_lora_sync.engines.base import Deadline
from trl_lora_sync.errors import LoRASyncError, ServerUnreachableError

_CONNECT_TIMEOUT_S = 10.0
_MAX_WORDS = 2000
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


class HTTPClient:
    """Requests to one server. Thread-safe.

    Args:
        base_url: such as `http://127.0.0.1:8000`, without a trailing slash.
        api_key: read from the environment at each request.
        is_local: whether the server is on this host; a proxy from the environment is then bypassed.
    """

    def __init__(self, base_url: str, *, api_key: APIKey, is_local: bool, max_connections: int = 64) -> None:
        self.base_url = base_url
        self.api_key = api_key
        self._client = httpx.Client(
            base_url=base_url,
            auth=api_key,
            mounts=dict.fromkeys(("http://", "https://")) if is_local else None,
            limits=httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections),
        )

    def request(
        self,
        method: str,
        path: str,
        deadline: Deadline,
        *,
        body: Any = None,
        content: SizedIterable | None = None,
        api_key: APIKey | None = None,
    ) -> httpx.Response:
        """Send one request, once, and return whatever the server answers.

        Args:
            body: sent as JSON.
            content: encoded JSON in chunks, instead of `body`; its length is that of all chunks.
            api_key: another key than the client's own.

        Raises:
            ServerUnreachableError: no connection, or it broke before the answer was complete.
            DeadlineExceededError: no complete answer before the deadline.
        """
        left = deadline.remaining_s()
        timeout = httpx.Timeout(left, connect=min(left, _CONNECT_TIMEOUT_S))
        try:
            with self._client.stream(
                method,
                path,
                json=body,
                content=content,
                headers=_JSON | {"Content-Length": str(len(content))} if content is not None else None,
                auth=api_key or self.api_key,
                timeout=timeout,
            ) as response:
                return _read(response, deadline)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise ServerUnreachableError(
                f"No server answers at {self.base_url} ({_reason(error)}). "
                "A running server was expected there. Start it, or correct vllm_server_base_url."
            ) from error
        except httpx.TimeoutException as error:
            raise deadline.error(f"waiting for {method} {self.base_url}{path}") from error
        except httpx.RequestError as error:  # broken off, or a body that does not decode
            raise ServerUnreachableError(
                f"The connection to {self.base_url} broke during {method} {path} ({_reason(error)}). "
                "The server may have been stopped or have crashed; look at its log."
            ) from error

    def close(self) -> None:
        self._client.close()


def _read(response: httpx.Response, deadline: Deadline) -> httpx.Response:
    """Read the body; httpx times each read only, so an answer that trickles in is cut off here."""
    chunks = []
    for chunk in response.iter_raw():
        chunks.append(chunk)
        deadline.remaining_s()
    return httpx.Response(
        response.status_code, headers=response.headers, content=b"".join(chunks), request=response.request
    )


def retrying(
    deadline: Deadline,
    may_repeat: Callable[[BaseException], bool],
    *,
    at_most_s: float | None = None,
    on_repeat: Callable[[], None] | None = None,
) -> tenacity.Retrying:
    """Repeat while `may_repeat` allows the error and the deadline the time; then raise the last error as it is.

    Args:
        on_repeat: called before each repetition.
    """
    left = max(0.0, deadline.remaining_s())
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(may_repeat),
        wait=tenacity.wait_exponential(multiplier=0.1, max=2.0) + tenacity.wait_random(0, 0.1),
        stop=tenacity.stop_before_delay(left if at_most_s is None else min(left, at_most_s)),
        before_sleep=(lambda _: on_repeat()) if on_repeat else None,
        reraise=True,
    )


def is_unreachable(error: BaseException) -> bool:
    """Whether the request may simply be sent again, if sending it twice does no harm."""
    return isinstance(error, ServerUnreachableError)


def server_words(response: httpx.Response) -> str:
    """What the server itself said, as one line."""
    text = response.text
    with contextlib.suppress(ValueError):
        text = _message_in(json.loads(text)) or text
    words = " ".join(text.split())
    return words if len(words) <= _MAX_WORDS else f"{words[:_MAX_WORDS]}..."


def json_object(response: httpx.Response, error: type[LoRASyncError]) -> dict[str, Any]:
    """The JSON object in a response.

    Raises:
        error: the body is something else, for instance a truncated answer or a proxy's page.
    """
    try:
        content = response.json()
    except ValueError as cause:
        raise error(
            f"{response.request.method} {response.request.url} answered HTTP {response.status_code} without valid "
            f"JSON. Is it the inference server itself, and not a proxy? It said: {server_words(response)!r}"
        ) from cause
    if not isinstance(content, dict):
        raise error(f"{response.request.url} answered a JSON {type(content).__name__} where an object was expected.")
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
