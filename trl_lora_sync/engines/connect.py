"""Find out which engine answers at a URL, and connect to it."""

import logging

from trl_lora_sync.engines.base import Deadline, Engine
from trl_lora_sync.engines.http import APIKey, HTTPClient, is_unreachable, retrying
from trl_lora_sync.engines.sglang import SGLangEngine
from trl_lora_sync.engines.vllm import API_KEY_VARIABLE, VLLMEngine
from trl_lora_sync.errors import ServerUnreachableError

logger = logging.getLogger(__name__)

_STILL_STARTING = frozenset({502, 503, 504})
# A route that SGLang alone has. With an API key it answers 401, where vLLM says 404.
_SGLANG_ROUTE = "/model_info"


def connect_engine(base_url: str, *, engine: str, is_local: bool, deadline: Deadline) -> Engine:
    """Wait until the server at `base_url` is up and connect to it.

    Args:
        engine: `"vllm"`, `"sglang"`, or `"auto"` to ask the server.

    Raises:
        ServerUnreachableError: nobody answered before the deadline.
        ServerSetupError: what answers is not a server that adapter sync can work with.
    """
    http = HTTPClient(base_url, api_key=APIKey(API_KEY_VARIABLE), is_local=is_local)
    try:
        _wait_until_up(http, deadline)
        is_sglang = engine == "sglang" or (engine == "auto" and _is_sglang(http, deadline))
    finally:
        http.close()
    connected: Engine
    connected = SGLangEngine(base_url, is_local=is_local) if is_sglang else VLLMEngine(base_url, is_local=is_local)
    try:
        connected.connect(deadline)
    except BaseException:
        connected.close()
        raise
    return connected


def _wait_until_up(http: HTTPClient, deadline: Deadline) -> None:
    warned = False

    def may_repeat(error: BaseException) -> bool:
        nonlocal warned
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
    return http.request("GET", _SGLANG_ROUTE, deadline).status_code in (200, 401)
