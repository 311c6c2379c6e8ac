"""Has a stock vLLM server read the adapters that it loads with several threads.

    P=trl_lora_sync.engine_plugins
    vllm serve MODEL --enable-lora --worker-extension-cls $P.vllm_quick_load_worker.QuickLoadWorker \
        --middleware $P.vllm_quick_load.QuickLoadMiddleware ...

Changes nothing of what clients see, and nothing of what is loaded. Where a version of vLLM is not as expected, the
server logs that and loads adapters in vLLM's way.
"""

from typing import TYPE_CHECKING, Any

from trl_lora_sync.engine_plugins import logger

if TYPE_CHECKING:  # at run time, the trainer's side imports this without Starlette
    from starlette.types import ASGIApp, Receive, Scope, Send

MIDDLEWARE = "trl_lora_sync.engine_plugins.vllm_quick_load.QuickLoadMiddleware"
WORKER = "trl_lora_sync.engine_plugins.vllm_quick_load_worker.QuickLoadWorker"


class QuickLoadMiddleware:
    """Calls the workers once, before the server takes requests, and passes everything on.

    Args:
        app: the server behind it.
    """

    def __init__(self, app: "ASGIApp") -> None:
        self.app = app

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] == "lifespan":
            await _prepare(scope)
        await self.app(scope, receive, send)


async def _prepare(scope: "Scope") -> None:
    try:
        # Source: vllm/entrypoints/openai/api_server.py `init_app_state` (0.26), the same in 0.31.
        engine: Any = scope["app"].state.engine_client
        answers = await engine.collective_rpc("lora_sync_load_quickly")
        failed = [answer["error"] for answer in answers if answer["error"]]
    except Exception as error:  # whatever it is, the server can do without
        failed = [f"{type(error).__name__}: {error}"]
    if failed:
        logger.warning(
            "Adapters are loaded the usual way, with one thread, because this server could not be prepared (%s). It "
            "needs --enable-lora and --worker-extension-cls %s.",
            failed[0],
            WORKER,
        )
    else:
        logger.info("Adapters are read with several threads, from the second one of a kind on.")
