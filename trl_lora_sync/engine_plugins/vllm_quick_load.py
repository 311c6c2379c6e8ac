"""Has a stock vLLM server load adapters faster: into its slots directly, or else by reading with several threads.

    P=trl_lora_sync.engine_plugins
    vllm serve MODEL --enable-lora --worker-extension-cls $P.vllm_quick_load_worker.QuickLoadWorker \
        --middleware $P.vllm_quick_load.QuickLoadMiddleware ...

Changes nothing of what is loaded, and of what clients see only that answers to loads have a header where every version
is compared with what its trainer sent. Where a version of vLLM is not as expected, the server logs that and loads
adapters in vLLM's way.
"""

from typing import TYPE_CHECKING, Any

from trl_lora_sync.engine_plugins import logger

if TYPE_CHECKING:  # at run time, the trainer's side imports this without Starlette
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MIDDLEWARE = "trl_lora_sync.engine_plugins.vllm_quick_load.QuickLoadMiddleware"
WORKER = "trl_lora_sync.engine_plugins.vllm_quick_load_worker.QuickLoadWorker"
CHECKS_HEADER = "lora-sync-checks"
"""In answers to loads, where workers refuse a version that is not what its trainer sent: the form of note they read."""
NOTE_FORM = "1"
"""Of `version_note`; to be changed with it."""

_LOAD_ROUTE = "/v1/load_lora_adapter"


class QuickLoadMiddleware:
    """Calls the workers once, before the server takes requests, and passes everything on.

    Args:
        app: the server behind it.
    """

    def __init__(self, app: "ASGIApp") -> None:
        self.app = app
        self._checks = False

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] == "lifespan":
            self._checks = await _prepare(scope)
        if self._checks and scope["type"] == "http" and str(scope.get("path", "")).endswith(_LOAD_ROUTE):
            await self.app(scope, receive, _with_header(send))
        else:
            await self.app(scope, receive, send)


def _with_header(send: "Send") -> "Send":
    async def send_with_header(message: "Message") -> None:
        if message["type"] == "http.response.start":
            message = {
                **message,
                "headers": [*message.get("headers", ()), (CHECKS_HEADER.encode(), NOTE_FORM.encode())],
            }
        await send(message)

    return send_with_header


async def _prepare(scope: "Scope") -> bool:
    """Returns whether all workers write slots."""
    try:
        # Source: vllm/entrypoints/openai/api_server.py `init_app_state` (0.26), the same in 0.31.
        engine: Any = scope["app"].state.engine_client
        answers = await engine.collective_rpc("lora_sync_load_quickly")
        failed = [answer["error"] for answer in answers if answer["error"]]
        unable = [answer["slots"] for answer in answers if answer["slots"]]
    except Exception as error:  # whatever it is, the server can do without
        failed = [f"{type(error).__name__}: {error}"]
    if failed:
        logger.warning(
            "Adapters are loaded the usual way, with one thread, because this server could not be prepared (%s). It "
            "needs --enable-lora and --worker-extension-cls %s.",
            failed[0],
            WORKER,
        )
        return False
    if unable:
        logger.warning("Adapters are not written into the slots of this version of vLLM directly (%s).", unable[0])
    logger.info(
        "From the second one of a kind on, %sadapters are read with several threads.",
        "" if unable else "versions of a trainer are written into their slots directly, and other ",
    )
    return not unable
