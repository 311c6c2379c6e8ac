"""Find out which engine answers at a URL, and connect to it."""

import logging
from pkgutil import resolve_name

import httpx

from trl_lora_sync.engines.base import TIMEOUTS, Deadline, Engine, Timeouts
from trl_lora_sync.engines.http import NO_KEY, APIKey, HTTPClient, is_unreachable, retrying
from trl_lora_sync.engines.registry import ENGINES
from trl_lora_sync.engines.sglang.spec import SGLANG
from trl_lora_sync.engines.spec import EngineSpec
from trl_lora_sync.engines.vllm.spec import VLLM
from trl_lora_sync.errors import (
    DeadlineExceededError,
    LoRASyncError,
    ServerAuthError,
    ServerSetupError,
    ServerUnreachableError,
)

logger = logging.getLogger(__name__)

# 502 and 504 come from a gateway. On /health vLLM answers 503 once its engine has ended (0.26, 0.31), and SGLang
# after 20 s of a pause, because its check samples a token (0.5.11 to 0.5.23).
_STILL_STARTING = frozenset({502, 503, 504})
# Any answer shows that a server is up, so neither route needs a key. For the first one SGLang samples a token.
_HEALTH, _MODELS = "/health", "/v1/models"


async def connect_engine(
    base_url: str,
    *,
    engine: str,
    is_local: bool,
    deadline: Deadline,
    serving: str = "runtime",
    timeouts: Timeouts = TIMEOUTS,
) -> Engine:
    """Wait until the server at `base_url` is up and connect to it.

    Args:
        engine: `"vllm"`, `"sglang"`, or `"auto"` to detect it.
        serving: `"runtime"`, `"fused"` to have adapters added to the weights, or `"auto"` for what the server does.

    Raises:
        ServerUnreachableError: no answer came before the deadline.
        ServerAuthError: it wants another API key.
        ServerSetupError: what answers is not a server that adapter sync can work with.
    """
    # Without a key, as the engine is not known yet: a key of one engine may not go to a server of another.
    async with HTTPClient(base_url, api_key=NO_KEY, is_local=is_local, timeouts=timeouts) as http:
        await _status_once_up(http, deadline)
        spec = await recognise(http, deadline) if engine == "auto" else ENGINES[engine]
    if serving == "fused" and not spec.fused_engine:
        raise ServerSetupError(
            f"{base_url} runs {spec.versions.title}, which cannot add an adapter to its weights while it runs. Set "
            'lora_sync_serving="runtime", or sample on vLLM.'
        )
    is_fused = serving == "fused" or (serving == "auto" and await _is_fused(spec, base_url, is_local, deadline))
    engine_class = resolve_name(spec.fused_engine if is_fused else spec.engine)
    connected: Engine = engine_class(base_url, is_local=is_local, timeouts=timeouts)
    try:
        await connected.connect(deadline)
    # Also after a cancellation: the caller never gets this engine, so it cannot close it.
    except BaseException:
        await connected.close()
        raise
    return connected


async def _is_fused(spec: EngineSpec, base_url: str, is_local: bool, deadline: Deadline) -> bool:
    if not spec.fused_route:
        return False
    # With the key of the engine, which is known by now: the fused routes check keys themselves.
    async with HTTPClient(base_url, api_key=APIKey(spec.api_key_variable), is_local=is_local) as http:
        return await _status_once_up(http, deadline, spec.fused_route) == 200


async def wait_until_up(
    base_url: str, *, is_local: bool, deadline: Deadline, is_asleep: bool = False, if_down: str = ""
) -> None:
    """Wait until a server answers at `base_url`.

    Args:
        is_asleep: whether its KV cache may be released; nothing is sampled then.
        if_down: as of `HTTPClient`.

    Raises:
        ServerUnreachableError: no answer came before the deadline.
    """
    async with HTTPClient(base_url, api_key=NO_KEY, is_local=is_local, if_down=if_down) as http:
        await _status_once_up(http, deadline, _MODELS if is_asleep else _HEALTH)


async def reason_to_be_down(
    base_url: str, *, is_local: bool, timeouts: Timeouts, is_asleep: bool = False, if_down: str = ""
) -> ServerUnreachableError | None:
    """Why a server does not answer now, or None if it does, or is only slow to; arguments as of `wait_until_up`."""
    deadline = Deadline.after(timeouts.probe_s, f"Probing {base_url}")
    try:
        async with HTTPClient(base_url, api_key=NO_KEY, is_local=is_local, timeouts=timeouts, if_down=if_down) as http:
            await _probe(http, deadline, _MODELS if is_asleep else _HEALTH)
    except ServerUnreachableError as error:
        return error
    except LoRASyncError:
        pass  # it is busy, so it is there
    return None


async def _status_once_up(
    http: HTTPClient, deadline: Deadline, route: str = _HEALTH, *, api_key: httpx.Auth | None = None
) -> int:
    """Of the first answer that a server gives which is up; a gateway may fail for a moment at any route."""
    seen: ServerUnreachableError | None = None

    def may_repeat(error: BaseException) -> bool:
        nonlocal seen
        if not is_unreachable(error):
            return False
        # One warning: a server that loads a large model is probed for minutes.
        if seen is None:
            logger.warning("%s Waiting up to %.0f s for it.", error, deadline.budget_s)
        seen = error
        return True

    try:
        async for attempt in retrying(deadline, may_repeat):
            with attempt:
                status = await _probe(http, deadline, route, api_key)
    except DeadlineExceededError as late:
        # The last attempt began just before the deadline. Only an earlier one knows why nothing answers.
        if seen is None:
            raise
        raise seen from late
    return status


async def _probe(http: HTTPClient, deadline: Deadline, route: str, api_key: httpx.Auth | None = None) -> int:
    # Any answer to the routes for it shows that a server is up, also HTTP 429.
    response = await http.request("GET", route, deadline, api_key=api_key, is_probe=route in (_HEALTH, _MODELS))
    if response.status_code in _STILL_STARTING:
        raise ServerUnreachableError(
            f"The server at {http.base_url} is starting or out of order (HTTP {response.status_code})."
        )
    return response.status_code


async def recognise(http: HTTPClient, deadline: Deadline) -> EngineSpec:
    """Which engine a server is.

    Send a request without a key, then with each engine's, because SGLang and any gateway answer 401 on any route.

    Never send a key to a server that identifies itself without one.

    Raises:
        ServerAuthError: no key opens a route that identifies the engine.
    """
    keys = [APIKey(spec.api_key_variable) for spec in (SGLANG, VLLM)]

    for key in (NO_KEY, *keys):
        status = await _status_once_up(http, deadline, SGLANG.own_route, api_key=key)
        # vLLM guards /v1 and a few other prefixes (serve/middleware/authenticate.py, 0.31), so it answers 404 here.
        if status != 401:
            return SGLANG if status == 200 else VLLM
    # With each key 401: a gateway may refuse routes that it does not know, and pass on vLLM's.
    if await _status_once_up(http, deadline, VLLM.own_route, api_key=keys[1]) == 200:
        return VLLM
    raise ServerAuthError(
        f"{http.base_url} answers nothing without another key, so the engine is unknown. In the trainer's "
        f"environment, {keys[0]!r} and {keys[1]!r}. Export {SGLANG.api_key_variable} with the --api-key of an "
        f"SGLang server, or {VLLM.api_key_variable} with that of vLLM; for a gateway, set vllm_server_engine as well."
    )
