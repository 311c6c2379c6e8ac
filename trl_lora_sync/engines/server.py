"""What talking to a vLLM and to an SGLang server has in common, below the `Engine` protocol.

Knows the routes that both have, and no way of sampling.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import httpx
import tenacity

from trl_lora_sync.adapter.store import NextVersion
from trl_lora_sync.engines.base import TIMEOUTS, Capabilities, Deadline, Timeouts
from trl_lora_sync.engines.http import (
    APIKey,
    HTTPClient,
    SizedBody,
    is_unreachable,
    json_object,
    redirect_error,
    retrying,
    server_message,
)
from trl_lora_sync.engines.spec import EngineSpec
from trl_lora_sync.errors import (
    AdapterNotVisibleError,
    AdapterRejectedError,
    GenerationError,
    LoRASyncError,
    ServerAuthError,
    ServerSetupError,
    ServerUnreachableError,
    WrongPolicyError,
)

# vLLM answers 503 while it is paused; a gateway answers with any of them for a server that is down.
_TRANSIENT_STATUSES = frozenset({502, 503, 504})


class ServerEngine(ABC):
    """The base of both engines: connection, keys, retries, and the list of models.

    Args:
        base_url: without a trailing slash and without `/v1`.
        is_local: whether the server runs on this host.
    """

    spec: ClassVar[EngineSpec]
    local_visibility_grace_s: ClassVar[float]

    def __init__(self, base_url: str, *, is_local: bool, timeouts: Timeouts = TIMEOUTS) -> None:
        self.base_url = base_url
        self._is_local = is_local
        self._timeouts = timeouts
        self._api_key = APIKey(self.spec.api_key_variable)
        self._http = HTTPClient(base_url, api_key=self._api_key, is_local=is_local, timeouts=timeouts)
        self._capabilities: Capabilities | None = None
        self._base_root: str | None = None  # the base that the server was started with, once known
        self._retries = 0

    @property
    def capabilities(self) -> Capabilities:
        if self._capabilities is None:
            raise LoRASyncError(f"connect() has not been called for {self.base_url}.")
        return self._capabilities

    @property
    def retries(self) -> int:
        return self._retries

    def _count_retry(self) -> None:
        self._retries += 1

    async def loaded(self, deadline: Deadline) -> dict[str, str]:
        models = models_in(await self._get("/v1/models", deadline))
        # Adapters have their base model as the parent, and base models have none.
        return {model["id"]: str(model.get("root")) for model in models if model.get("parent")}

    async def reserve(self, coming: NextVersion, deadline: Deadline) -> bool:
        """See `Engine`. SGLang cannot."""
        return False

    async def adapters_ran_at(self, deadline: Deadline) -> float | None:
        """See `Engine`."""
        return None

    async def ignored_fields(self, names: Collection[str], deadline: Deadline) -> list[str]:
        """See `Engine`. SGLang refuses a request with such a field."""
        return []

    async def close(self) -> None:
        await self._http.close()

    @asynccontextmanager
    async def _distrusting_connections(self) -> AsyncIterator[None]:
        """After an answer that does not fit its request, the next request starts on a new connection."""
        try:
            yield
        # This answer fits its request: the files do not show yet.
        except AdapterNotVisibleError:
            raise
        # Not for ServerUnreachableError: a connection that broke is closed in any case (`_Connections.lent`).
        except (AdapterRejectedError, GenerationError, ServerSetupError, WrongPolicyError):
            await self._http.start_afresh()
            raise

    def _attempts_to_load(self, deadline: Deadline) -> tenacity.AsyncRetrying:
        """More than one after a broken connection, and for a while if the server does not see the files yet."""
        grace_s = self.local_visibility_grace_s if self._is_local else self._timeouts.visibility_s
        grace = Deadline.after(grace_s, "waiting for the directory to appear")
        # Short, because the fleet waits for longer outages, and then checks whether the server was restarted.
        hiccup = Deadline.after(self._timeouts.retry_s, "waiting for the network")

        def may_repeat(error: BaseException) -> bool:
            return (is_unreachable(error) and not hiccup.is_over()) or (
                isinstance(error, AdapterNotVisibleError) and not grace.is_over()
            )

        return retrying(deadline, may_repeat, on_repeat=self._count_retry)

    # Requests

    async def _get(self, path: str, deadline: Deadline) -> dict[str, Any]:
        """The JSON object at `path`."""
        response = await self._retried("GET", path, deadline)
        if response.status_code != 200:
            raise ServerSetupError(
                f"{self.base_url}{path} answered HTTP {response.status_code}, so this is not {self.spec.description}. "
                f"Correct vllm_server_base_url or vllm_server_engine. The server answered: {server_message(response)!r}"
            )
        return json_object(response, ServerSetupError)

    async def _retried(
        self, method: str, path: str, deadline: Deadline, *, body: Any = None, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        """For reading and for sampling, which do no harm again: repeated while the server is down or busy."""
        async for attempt in self._retrying(deadline):
            with attempt:
                response = self._checked(
                    await self._http.request(
                        method, path, deadline, body=body, headers=headers, is_watched=self._is_watched
                    )
                )
        return response

    def _retrying(self, deadline: Deadline) -> tenacity.AsyncRetrying:
        return retrying(deadline, is_unreachable, at_most_s=self._timeouts.retry_s, on_repeat=self._count_retry)

    @property
    def _is_watched(self) -> bool:
        """Whether its health can be checked while an answer is waited for."""
        return True

    async def _request(
        self,
        method: str,
        path: str,
        deadline: Deadline,
        *,
        body: Any = None,
        content: SizedBody | None = None,
        headers: dict[str, str] | None = None,
    ) -> httpx.Response:
        """Not repeated, and not watched: for what changes something on the server."""
        return self._checked(
            await self._http.request(method, path, deadline, body=body, content=content, headers=headers)
        )

    def _checked(self, response: httpx.Response) -> httpx.Response:
        if response.status_code == 401:
            raise ServerAuthError(self._key_words(response.request.url.path))
        if response.status_code in _TRANSIENT_STATUSES:
            error = ServerUnreachableError(
                f"{self.base_url} is up but not serving (HTTP {response.status_code}). It may be starting, paused or "
                f"out of order; look at its log. The server answered: {server_message(response)!r}"
            )
            error.waited_s = response.elapsed.total_seconds()
            raise error
        if 300 <= response.status_code < 400:
            raise redirect_error(response)
        return response

    def _serve_command(self, *options: str, engine_options: Sequence[str] = ()) -> str:
        """The whole command that starts this server with these options; see `EngineSpec`."""
        model = self._base_root or "MODEL"
        return self.spec.serve_command(
            model, options, engine_options=engine_options, base_url=self.base_url, is_local=self._is_local
        )

    # Answers that cannot be used

    def _wrong_count(self, found: int, wanted: int) -> GenerationError:
        return GenerationError(
            f"{self.base_url} sent {found} completions instead of {wanted}. Is it the inference server "
            "itself? Point vllm_server_base_url past any proxy or load balancer."
        )

    def _untrainable(self, reason: Exception) -> GenerationError:
        return GenerationError(
            f"{self.base_url} sent completions that cannot be trained on: {reason or type(reason).__name__}. They were "
            "not used. Look at the server's log, and at generation_kwargs; a proxy in between may have changed them."
        )

    def _unscored(self) -> GenerationError:
        return GenerationError(
            f"{self.base_url} scored a prompt without log-probabilities. They are needed to compare it with the "
            "trainer. Is there a proxy in between that drops fields?"
        )

    @abstractmethod
    def _key_words(self, path: str) -> str:
        """Which key the server refused at `path`, and what to export."""


def models_in(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Of an answer to /v1/models."""
    return [model for model in content.get("data") or [] if isinstance(model, dict) and "id" in model]


def logprobs_mode(sharp: float | None, flat: float | None) -> str:
    """Distinguish processed from raw log-probabilities: only processed ones are flattened by the temperature.

    Neither engine reports its mode, so it is measured. Source: vLLM 0.31 and SGLang 0.5.15, where the spread of the
    top 5 is proportional to 1/T or constant.

    Args:
        sharp, flat: the gap between the most and the fifth most probable token at the temperatures 0.5 and 2, or None
            if unknown.
    """
    if sharp is None or flat is None or sharp < 1e-3:  # a uniform distribution looks the same either way
        return "unknown"
    # Dividing by T makes the gap at T=2 a quarter of the gap at T=0.5; raw log-probabilities have the same gap.
    return "processed_logprobs" if flat < 0.5 * sharp else "raw_logprobs"
