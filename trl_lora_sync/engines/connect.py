"""Find out which engine answers at a URL, and connect to it."""

import logging
import threading

from httpx import Auth

from trl_lora_sync.engine_plugins.vllm_fused import ROUTE as FUSED_ROUTE
from trl_lora_sync.engines import sglang_server, vllm
from trl_lora_sync.engines.base import Deadline, Engine
from trl_lora_sync.engines.http import NO_KEY, APIKey, HTTPClient, is_unreachable, retrying, unthrottled
from trl_lora_sync.engines.sglang import SGLangEngine
from trl_lora_sync.engines.vllm import VLLMEngine
from trl_lora_sync.engines.vllm_fused import VLLMFusedEngine
from trl_lora_sync.errors import ServerAuthError, ServerSetupError, ServerUnreachableError

logger = logging.getLogger(__name__)

_STILL_STARTING = frozenset({502, 503, 504})
# Routes that one engine alone has; vLLM guards its own with no key (0.22 to 0.33).
_SGLANG_ROUTE, _VLLM_ROUTE = "/model_info", "/version"


def connect_engine(
    base_url: str, *, engine: str, is_local: bool, deadline: Deadline, serving: str = "runtime"
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
    http = HTTPClient(base_url, api_key=NO_KEY, is_local=is_local)
    try:
        _wait_until_up(http, deadline, threading.Event())
        is_sglang = engine == "sglang" or (engine == "auto" and _is_sglang(http, deadline))
    finally:
        http.close()
    if is_sglang and serving == "fused":
        raise ServerSetupError(
            f"{base_url} runs SGLang, which cannot add an adapter to its weights while it runs. Set "
            'lora_sync_serving="runtime", or sample on vLLM.'
        )
    connected: Engine
    if is_sglang:
        connected = SGLangEngine(base_url, is_local=is_local)
    else:
        is_fused = serving == "fused" or (serving == "auto" and _is_fused(base_url, is_local, deadline))
        connected = (VLLMFusedEngine if is_fused else VLLMEngine)(base_url, is_local=is_local)
    try:
        connected.connect(deadline)
    except BaseException:
        connected.close()
        raise
    return connected


def _is_fused(base_url: str, is_local: bool, deadline: Deadline) -> bool:
    http = HTTPClient(base_url, api_key=APIKey(vllm.API_KEY_VARIABLE), is_local=is_local)
    try:
        return unthrottled(lambda: http.request("GET", FUSED_ROUTE, deadline), deadline).status_code == 200
    finally:
        http.close()


def wait_until_up(base_url: str, *, is_local: bool, deadline: Deadline, halt: threading.Event) -> None:
    """Wait until a server answers at `base_url`.

    Args:
        halt: once set, no further attempt is made.

    Raises:
        ServerUnreachableError: no answer came before the deadline, or before `halt`.
    """
    http = HTTPClient(base_url, api_key=NO_KEY, is_local=is_local)
    try:
        _wait_until_up(http, deadline, halt)
    finally:
        http.close()


def _wait_until_up(http: HTTPClient, deadline: Deadline, halt: threading.Event) -> None:
    warned = False

    def may_repeat(error: BaseException) -> bool:
        nonlocal warned
        if halt.is_set():
            return False
        if is_unreachable(error) and not warned:
            logger.warning("%s Waiting up to %.0f s for it.", error, deadline.budget_s)
            warned = True
        return is_unreachable(error)

    for attempt in retrying(deadline, may_repeat):
        with attempt:
            response = http.request("GET", "/health", deadline)
            if response.status_code in _STILL_STARTING:
                raise ServerUnreachableError(
                    f"The server at {http.base_url} is starting or out of order (HTTP {response.status_code})."
                )


def _is_sglang(http: HTTPClient, deadline: Deadline) -> bool:
    """Send a request without a key, then with each engine's, because SGLang and any gateway answer 401 on any route.

    Never send a key to a server that identifies itself without one.

    Raises:
        ServerAuthError: no key opens a route that identifies the engine.
    """
    keys = [APIKey(sglang_server.API_KEY_VARIABLE), APIKey(vllm.API_KEY_VARIABLE)]

    def status_of(route: str, key: Auth) -> int:
        return unthrottled(lambda: http.request("GET", route, deadline, api_key=key), deadline).status_code

    for key in (NO_KEY, *keys):
        status = status_of(_SGLANG_ROUTE, key)
        if status != 401:
            return status == 200
    if status_of(_VLLM_ROUTE, keys[1]) == 200:
        return False
    raise ServerAuthError(
        f"{http.base_url} answers nothing without another key, so the engine is unknown. In the trainer's "
        f"environment, {keys[0]!r} and {keys[1]!r}. Export {sglang_server.API_KEY_VARIABLE} with the --api-key of an "
        f"SGLang server, or {vllm.API_KEY_VARIABLE} with that of vLLM; for a gateway, set vllm_server_engine as well."
    )
