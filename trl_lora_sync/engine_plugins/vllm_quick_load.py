"""Has a stock vLLM server load adapters faster: by reading with several threads, or into its slots directly.

    P=trl_lora_sync.engine_plugins
    vllm serve MODEL --enable-lora --worker-extension-cls $P.vllm_quick_load_worker.QuickLoadWorker \
        --middleware $P.vllm_quick_load.QuickLoadMiddleware ...

Changes nothing of what is loaded. Of what clients see, it changes only that answers to loads have headers: whether
workers compare each version with what its trainer sent, in which form they take experts, in which dtype they keep
adapters, and up to which rank. Where a version of vLLM is not as expected, the server logs that and loads adapters in
vLLM's way. Only clients with the server's key get these headers.

A trainer on the server's host may also have a slot reserved for its next version, and fill it past the server. The
server then notes the version's name without a call of the engine (`reservations`):

    POST /v1/lora_sync/slots {"lora_name": ..., "lora_path": ..., "head": ..., "folder": where the trainer's socket is}
        ->  {"reservation": empty if no slot was reserved, "socket": the name of the server's}

`TRL_LORA_SYNC_WRITE_SLOTS=0` in the server's environment has it write no slots.
"""

import asyncio
import json
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trl_lora_sync.engine_plugins import logger
from trl_lora_sync.engine_plugins.reservations import ReservationServers
from trl_lora_sync.engine_plugins.version_note import NOTE_FORM

if TYPE_CHECKING:  # at run time, the trainer's side imports this without Starlette
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MIDDLEWARE = "trl_lora_sync.engine_plugins.vllm_quick_load.QuickLoadMiddleware"
WORKER = "trl_lora_sync.engine_plugins.vllm_quick_load_worker.QuickLoadWorker"
CHECKS_HEADER = "lora-sync-checks"
"""In answers to loads: the form of note by which workers refuse a version that is not what its trainer sent."""
GPUS_HEADER = "lora-sync-gpus"
"""Beside `CHECKS_HEADER`: the UUIDs of the GPUs that the first worker sees, with commas; without any on a CPU."""
EXPERTS_HEADER = "lora-sync-experts"
"""In answers to loads: `STACKED` if all experts of a layer may be in one tensor, whatever the model."""
STACKED = "stacked"
DTYPE_HEADER = "lora-sync-dtype"
"""In answers to loads: the dtype of adapters in the workers, by its name in safetensors files."""
RANK_HEADER = "lora-sync-max-rank"
"""In answers to loads: the server's --max-lora-rank."""
ADAPTERS_HEADER = "lora-sync-adapters"
"""In answers to loads: all adapters of the server then, as a JSON object of names and paths."""
RESERVE_ROUTE = "/v1/lora_sync/slots"
NO_LIST = "{}"
"""In place of that object, if it is too long."""
NO_CHECKS = "none"
"""In place of `NOTE_FORM`, if workers compare nothing."""
WRITE_SLOTS = "TRL_LORA_SYNC_WRITE_SLOTS"
"""In the server's environment: `0` to write no slots."""

_LOAD_ROUTE = "/v1/load_lora_adapter"
# Servers and proxies take 8 KB for all headers of an answer.
_MAX_HEADER_BYTES = 4096


def writes_slots(environ: Mapping[str, str]) -> bool:
    """Whether a server in this environment writes slots, if its version of vLLM allows that."""
    return environ.get(WRITE_SLOTS) != "0"


class QuickLoadMiddleware:
    """Calls the workers once, before the server takes requests, and passes everything on.

    Args:
        app: the server behind it.
    """

    def __init__(self, app: "ASGIApp") -> None:
        self.app = app
        self._headers: dict[str, str] = {}
        self._trainers = ReservationServers()

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] == "lifespan":
            # Before the application starts, so that no load runs while the workers are changed.
            self._headers = await _prepare(scope)
        if self._headers and _is_load(scope):
            await self.app(scope, receive, _with_headers(send, self._headers, scope))
        elif self._headers.get(CHECKS_HEADER) == NOTE_FORM and _is_reservation(scope):
            from trl_lora_sync.engine_plugins.routes import respond

            await respond(self._reserve(scope, receive), scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _reserve(self, scope: "Scope", receive: "Receive") -> dict[str, Any]:
        from trl_lora_sync.engine_plugins.routes import coming_in

        coming = await coming_in(scope, receive)
        server = self._trainers.of(coming.folder)
        # Source: `OpenAIServingModels.load_lora_adapter` in vllm/entrypoints/openai/models/serving.py (0.26, 0.31).
        from vllm.lora.request import LoRARequest

        models: Any = scope["app"].state.openai_serving_models
        options = {"is_3d_lora_weight": True} if coming.has_stacked_experts else {}
        name, lora_id = coming.name, models.lora_id_counter.inc(1)
        request: Any = LoRARequest(name, lora_id, coming.path, **options)
        reservation, form = secrets.token_hex(16), str(getattr(request, "is_3d_lora_weight", None))

        async def note() -> str:
            """Do what vLLM does once its engine has loaded an adapter."""
            # A name that is taken keeps its path, which the trainer sees.
            models.lora_requests.setdefault(name, request)
            # Later, as the trainer waits.
            asyncio.get_running_loop().call_soon(logger.info, "Noted %s, which is in its slot.", name)
            return _adapters_of(scope).get(ADAPTERS_HEADER, NO_LIST)

        arguments = (name, lora_id, coming.head, form, len(models.lora_requests), str(server.path), reservation)
        workers = await scope["app"].state.engine_client.collective_rpc("lora_sync_reserve", args=arguments)
        if not all(workers):
            return {"reservation": ""}
        server.expect(reservation, workers, note)
        return {"reservation": reservation, "socket": server.path.name}


def _is_load(scope: "Scope") -> bool:
    """Whether it is a load by a client that the server lets in: others get no names, paths and UUIDs of GPUs."""
    # Here, because the trainer's side imports this module without Starlette.
    from trl_lora_sync.engine_plugins.refusals import Refused
    from trl_lora_sync.engine_plugins.routes import check_key, path_of

    if scope["type"] != "http" or scope.get("method") != "POST" or path_of(scope) != _LOAD_ROUTE:
        return False
    try:
        check_key(scope)
    except Refused:  # vLLM, whose check of keys is behind this middleware, answers it
        return False
    return True


def _is_reservation(scope: "Scope") -> bool:
    return scope["type"] == "http" and str(scope.get("path", "")).endswith(RESERVE_ROUTE)


def _with_headers(send: "Send", headers: Mapping[str, str], scope: "Scope") -> "Send":
    async def send_with_headers(message: "Message") -> None:
        if message["type"] == "http.response.start":
            # Only now, as the load has ended.
            given = {**headers, **_adapters_of(scope)}
            added = [(name.encode(), value.encode()) for name, value in given.items()]
            message = {**message, "headers": [*message.get("headers", ()), *added]}
        await send(message)

    return send_with_headers


def _adapters_of(scope: "Scope") -> dict[str, str]:
    """The header that lists all adapters of the server; none if they are too many, or cannot be found out.

    Source: `OpenAIServingModels` in vllm/entrypoints/openai/models/serving.py (0.26, 0.31).
    """
    try:
        requests = scope["app"].state.openai_serving_models.lora_requests.values()
        # Other characters are escaped, as the value of a header is ASCII.
        listed = json.dumps({one.lora_name: one.lora_path for one in requests})
    except Exception:  # the client then requests the list
        return {}
    return {ADAPTERS_HEADER: listed} if len(listed) <= _MAX_HEADER_BYTES else {}


async def _prepare(scope: "Scope") -> dict[str, str]:
    """Headers for answers to loads; none where adapters are loaded in vLLM's way."""
    try:
        # Source: `init_app_state` in vllm/entrypoints/openai/api_server.py (0.26) and launchers/api_server (0.31 to
        # 0.33).
        engine: Any = scope["app"].state.engine_client
        answers = await engine.collective_rpc("lora_sync_load_quickly")
        failed = [answer["error"] for answer in answers if answer["error"]]
        unable = [answer["slots"] for answer in answers if answer["slots"]]
        off = [answer["off"] for answer in answers if answer["off"]]
    except Exception as error:  # whatever it is, the server can do without
        failed = [f"{type(error).__name__}: {error}"]
    if failed:
        logger.warning(
            "Adapters are loaded the usual way, with one thread, because this server could not be prepared (%s). It "
            "needs --enable-lora and --worker-extension-cls %s.",
            failed[0],
            WORKER,
        )
        return {}
    if unable:
        logger.warning("Adapters are not written into the slots of this version of vLLM directly (%s).", unable[0])
    elif off:
        logger.info("Adapters are not written into their slots directly (%s).", off[0])
    logger.info(
        "From the second one of a kind on, %sadapters are read with several threads.",
        "" if unable or off else "versions of a trainer are written into their slots directly, and other ",
    )
    headers = {CHECKS_HEADER: NO_CHECKS}
    # Of all workers: if one compares nothing, a damaged version can be served.
    if not (unable or off):
        headers = {CHECKS_HEADER: NOTE_FORM, GPUS_HEADER: answers[0].get("gpus", "")}
    if all(answer.get("experts") == STACKED for answer in answers):
        headers[EXPERTS_HEADER] = STACKED
    for header, field in ((DTYPE_HEADER, "dtype"), (RANK_HEADER, "rank")):
        if answers[0].get(field):  # which all workers have from one configuration
            headers[header] = answers[0][field]
    return headers
