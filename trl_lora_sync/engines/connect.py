"""Find out which engine answers at a URL, and connect to it."""

import logging

from httpx import Auth

from trl_lora_sync.engine_plugins.vllm_fused import ROUTE as FUSED_ROUTE
from trl_lora_sync.engines import sglang_server, vllm
from trl_lora_sync.engines.base import TIMEOUTS, Deadline, Engine, Timeouts
from trl_lora_sync.engines.http import NO_KEY, APIKey, HTTPClient, is_unreachable, retrying, unthrottled
from trl_lora_sync.engines.sglang import SGLangEngine
from trl_lora_sync.engines.vllm import VLLMEngine
from trl_lora_sync.engines.vllm_fused import VLLMFusedEngine
from trl_lora_sync.errors import LoRASyncError, ServerAuthError, ServerSetupError, ServerUnreachableError

logger = logging.getLogger(__name__)

_STILL_STARTING = frozenset({502, 503, 504})
# Routes that one engine alone has; vLLM guards its own with no key (0.22 to 0.33).
_SGLANG_ROUTE, _VLLM_ROUTE = "/model_info", "/version"


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
    http = HTTPClient(base_url, api_key=NO_KEY, is_local=is_local, timeouts=timeouts)
    try:
        await _wait_until_up(http, deadline)
        is_sglang = engine == "sglang" or (engine == "auto" and await runs_sglang(http, deadline))
    finally:
        await http.close()
    if is_sglang and serving == "fused":
        raise ServerSetupError(
            f"{base_url} runs SGLang, which cannot add an adapter to its weights while it runs. Set "
            'lora_sync_serving="runtime", or sample on vLLM.'
        )
    connected: Engine
    if is_sglang:
        connected = SGLangEngine(base_url, is_local=is_local, timeouts=timeouts)
    else:
        is_fused = serving == "fused" or (serving == "auto" and await _is_fused(base_url, is_local, deadline))
        connected = (VLLMFusedEngine if is_fused else VLLMEngine)(base_url, is_local=is_local, timeouts=timeouts)
    try:
        await connected.connect(deadline)
    except BaseException:
        await connected.close()
        raise
    return connected


async def _is_fused(base_url: str, is_local: bool, deadline: Deadline) -> bool:
    http = HTTPClient(base_url, api_key=APIKey(vllm.API_KEY_VARIABLE), is_local=is_local)
    try:
        response = await unthrottled(lambda: http.request("GET", FUSED_ROUTE, deadline), deadline)
        return response.status_code == 200
    finally:
        await http.close()


async def wait_until_up(base_url: str, *, is_local: bool, deadline: Deadline) -> None:
    """Wait until a server answers at `base_url`.

    Raises:
        ServerUnreachableError: no answer came before the deadline.
    """
    http = HTTPClient(base_url, api_key=NO_KEY, is_local=is_local)
    try:
        await _wait_until_up(http, deadline)
    finally:
        await http.close()


async def reason_to_be_down(base_url: str, *, is_local: bool, timeouts: Timeouts) -> ServerUnreachableError | None:
    """Why a server does not answer now, or None if it does, or is only slow to."""
    http = HTTPClient(base_url, api_key=NO_KEY, is_local=is_local, timeouts=timeouts)
    try:
        await _probe(http, Deadline.after(timeouts.probe_s, f"Probing {base_url}"))
    except ServerUnreachableError as error:
        return error
    except LoRASyncError:  # it is busy, so it is there
        return None
    finally:
        await http.close()
    return None


async def _wait_until_up(http: HTTPClient, deadline: Deadline) -> None:
    warned = False

    def may_repeat(error: BaseException) -> bool:
        nonlocal warned
        if is_unreachable(error) and not warned:
            logger.warning("%s Waiting up to %.0f s for it.", error, deadline.budget_s)
            warned = True
        return is_unreachable(error)

    async for attempt in retrying(deadline, may_repeat):
        with attempt:
            await _probe(http, deadline)


async def _probe(http: HTTPClient, deadline: Deadline) -> None:
    response = await http.request("GET", "/health", deadline)
    if response.status_code in _STILL_STARTING:
        raise ServerUnreachableError(
            f"The server at {http.base_url} is starting or out of order (HTTP {response.status_code})."
        )


async def runs_sglang(http: HTTPClient, deadline: Deadline) -> bool:
    """Send a request without a key, then with each engine's, because SGLang and any gateway answer 401 on any route.

    Never send a key to a server that identifies itself without one.

    Raises:
        ServerAuthError: no key opens a route that identifies the engine.
    """
    keys = [APIKey(sglang_server.API_KEY_VARIABLE), APIKey(vllm.API_KEY_VARIABLE)]

    async def status_of(route: str, key: Auth) -> int:
        response = await unthrottled(lambda: http.request("GET", route, deadline, api_key=key), deadline)
        return response.status_code

    for key in (NO_KEY, *keys):
        status = await status_of(_SGLANG_ROUTE, key)
        if status != 401:
            return status == 200
    if await status_of(_VLLM_ROUTE, keys[1]) == 200:
        return False
    raise ServerAuthError(
        f"{http.base_url} answers nothing without another key, so the engine is unknown. In the trainer's "
        f"environment, {keys[0]!r} and {keys[1]!r}. Export {sglang_server.API_KEY_VARIABLE} with the --api-key of an "
        f"SGLang server, or {vllm.API_KEY_VARIABLE} with that of vLLM; for a gateway, set vllm_server_engine as well."
    )
