"""What talking to a vLLM and to an SGLang server has in common, below the `Engine` protocol.

Knows the routes that both have, and no way of sampling.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import httpx

from trl_lora_sync.engines.base import Capabilities, Deadline
from trl_lora_sync.engines.http import APIKey, HTTPClient, is_unreachable, json_object, retrying, server_words
from trl_lora_sync.errors import (
    AdapterNotVisibleError,
    LoRASyncError,
    ServerAuthError,
    ServerSetupError,
    ServerUnreachableError,
)

CONCURRENT_REQUESTS = 64
# A server that restarts or a network that hiccups; longer outages are reported.
RETRY_S = 15.0
_TRANSIENT_STATUSES = frozenset({502, 503, 504})
# File systems shared over a network may show a new directory late (up to 30 s on FUSE mounts).
_VISIBILITY_GRACE_S = 35.0


class ServerEngine(ABC):
    """The base of both engines: connection, keys, retries, and the list of models.

    Args:
        base_url: without a trailing slash and without `/v1`.
        is_local: whether the server runs on this host.
    """

    title: ClassVar[str]
    key_variable: ClassVar[str]
    local_visibility_grace_s: ClassVar[float]

    def __init__(self, base_url: str, *, is_local: bool) -> None:
        self.base_url = base_url
        self._is_local = is_local
        self._http = HTTPClient(
            base_url, api_key=APIKey(self.key_variable), is_local=is_local, max_connections=CONCURRENT_REQUESTS
        )
        self._capabilities: Capabilities | None = None
        self._retries = 0
        self._counting = threading.Lock()

    @property
    def capabilities(self) -> Capabilities:
        if self._capabilities is None:
            raise LoRASyncError(f"connect() has not been called for {self.base_url}.")
        return self._capabilities

    @property
    def retries(self) -> int:
        return self._retries

    def _count_retry(self) -> None:
        with self._counting:
            self._retries += 1

    def loaded(self, deadline: Deadline) -> dict[str, str]:
        return {model["id"]: str(model.get("root")) for model in self._models(deadline) if model.get("parent")}

    def close(self) -> None:
        self._http.close()

    def _models(self, deadline: Deadline) -> list[dict[str, Any]]:
        content = json_object(self._get("/v1/models", deadline), ServerSetupError)
        return [model for model in content.get("data", []) if isinstance(model, dict) and "id" in model]

    def _until_visible(self, load: Callable[[], None], deadline: Deadline) -> None:
        """Load, again after a broken connection, and for a while if the server does not see the files yet."""
        grace_s = self.local_visibility_grace_s if self._is_local else _VISIBILITY_GRACE_S
        grace = Deadline.after(grace_s, "waiting for the directory to appear")

        def may_repeat(error: BaseException) -> bool:
            return is_unreachable(error) or (isinstance(error, AdapterNotVisibleError) and not grace.is_over())

        for attempt in retrying(deadline, may_repeat, on_repeat=self._count_retry):
            with attempt:
                load()

    # Requests

    def _get(self, path: str, deadline: Deadline) -> httpx.Response:
        """A GET that is repeated while the server is unreachable; only success comes back."""
        response = self._retried("GET", path, deadline)
        if response.status_code != 200:
            raise ServerSetupError(
                f"{self.base_url}{path} answered HTTP {response.status_code}, so this is not {self.title}. "
                f"Correct vllm_server_base_url or vllm_server_engine. It said: {server_words(response)!r}"
            )
        return response

    def _retried(self, method: str, path: str, deadline: Deadline, *, body: Any = None) -> httpx.Response:
        """For reading and for sampling, which do no harm again: repeated while the server is down or busy."""
        for attempt in retrying(deadline, is_unreachable, at_most_s=RETRY_S, on_repeat=self._count_retry):
            with attempt:
                response = self._request(method, path, deadline, body=body)
        return response

    def _request(self, method: str, path: str, deadline: Deadline, *, body: Any = None) -> httpx.Response:
        return self._checked(self._http.request(method, path, deadline, body=body))

    def _checked(self, response: httpx.Response) -> httpx.Response:
        if response.status_code == 401:
            raise ServerAuthError(self._key_words(response.request.url.path))
        if response.status_code in _TRANSIENT_STATUSES:
            raise ServerUnreachableError(
                f"{self.base_url} is up but not serving (HTTP {response.status_code}). It may be starting, paused or "
                f"out of order; look at its log. It said: {server_words(response)!r}"
            )
        return response

    @abstractmethod
    def _key_words(self, path: str) -> str:
        """Which key the server refused at `path`, and what to export."""


def logprobs_mode(spread: Callable[[float], float | None]) -> str:
    """Tell processed from raw log-probabilities: only processed ones are flattened by the temperature.

    Neither engine reports its mode, so it is measured. Source: vLLM 0.31 and SGLang 0.5.15, where the spread of the
    top 5 is proportional to 1/T or constant.

    Args:
        spread: the gap between the most and the fifth most probable token at a temperature, or None if unknown.
    """
    sharp, flat = spread(0.5), spread(2.0)
    if sharp is None or flat is None or sharp < 1e-3:  # a uniform distribution looks the same either way
        return "unknown"
    return "processed_logprobs" if flat < 0.5 * sharp else "raw_logprobs"
