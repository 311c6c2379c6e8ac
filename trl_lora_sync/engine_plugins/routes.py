"""What the middlewares of this folder share: which requests are theirs, who may send them, and answers in JSON.

vLLM's own check of API keys comes after every middleware that it is given, so each route checks the same keys itself.
A server without a key answers every client here, as it does on vLLM's own routes.
"""

import hashlib
import hmac
import json
import os
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, NamedTuple

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from trl_lora_sync.engine_plugins import logger
from trl_lora_sync.engine_plugins.refusals import Refused

_KEY_VARIABLE = "VLLM_API_KEY"
# Paths of at most 4,096 bytes (PATH_MAX), names, and numbers.
_MAX_BODY_BYTES = 1 << 16


class _Answer(JSONResponse):
    def render(self, content: Any) -> bytes:
        # In ASCII, unlike Starlette's: an error may quote a path with characters that UTF-8 cannot encode.
        return json.dumps(content).encode()


async def json_in(request: Request) -> dict[str, Any]:
    """The JSON object in the body of a request; Refused if there is none."""
    body = bytearray()
    # Counted as it arrives, since a client may announce any length or none.
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY_BYTES:
            raise Refused(413, "The body is too large.")
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, "The body is not JSON.") from error
    if not isinstance(content, dict):
        raise Refused(400, "The body is not a JSON object.")
    return content


class Coming(NamedTuple):
    """A version that a trainer will write next; see `adapter.store.NextVersion`."""

    name: str
    path: str
    head: str
    folder: Path
    has_stacked_experts: bool


async def coming_in(scope: Scope, receive: Receive) -> Coming:
    """What a request for a reservation is for, see `vllm_quick_load`.

    Raises:
        Refused: it is none, or its client does not have the server's key.
    """
    check_key(scope)
    if scope.get("method") != "POST":
        raise Refused(405, "POST is offered here.")
    body = await json_in(Request(scope, receive))
    try:
        name, path, head, folder = (str(body[field]) for field in ("lora_name", "lora_path", "head", "folder"))
    except KeyError as error:
        raise Refused(400, f"A JSON object with lora_name, lora_path, head and folder is needed ({error}).") from error
    if not path.startswith("/"):
        raise Refused(400, "lora_path must be absolute.")
    return Coming(name, path, head, Path(folder), bool(body.get("is_3d_lora_weight")))


async def respond(answer: Awaitable[dict[str, Any]], scope: Scope, receive: Receive, send: Send) -> None:
    """Send an answer once it is there, or why there is none."""
    try:
        response: Response = _Answer(await answer)
    except ClientDisconnect:
        # It reaches no client. Without it, the server would log a traceback as if it had failed.
        response = refusal(scope, Refused(400, "The connection closed before the body was complete."))
    except Refused as refused:
        response = refusal(scope, refused)
    await response(scope, receive, send)


def refusal(scope: Scope, refused: Refused) -> Response:
    """An answer in the form of vLLM's own errors."""
    logger.warning("Refused %s %r: %s", scope.get("method"), path_of(scope), refused.message)
    return _Answer({"error": {"message": refused.message, "code": refused.status}}, refused.status)


def path_of(scope: Scope) -> str:
    """The path of a request as the server's own routes see it."""
    # As vLLM's check of keys computes it (entrypoints/serve/middleware/authenticate.py, 0.31).
    return str(scope.get("path", "")).removeprefix(scope.get("root_path", ""))


def below(route: str, scope: Scope) -> str | None:
    """The rest of a request's path if it is `route` or below it, else None."""
    path = path_of(scope)
    is_ours = scope["type"] == "http" and (path == route or path.startswith(f"{route}/"))
    return path.removeprefix(route) if is_ours else None


def header(scope: Scope, name: str) -> str | None:
    """The value of a header, if it is there exactly once."""
    values = Headers(scope=scope).getlist(name)
    # Of two values, this code and the server behind it could each use another, so both count as missing.
    return values[0] if len(values) == 1 else None


def check_key(scope: Scope) -> None:
    """Raises Refused for a request that vLLM itself would refuse."""
    keys = _keys_of(scope)
    if not keys:
        return
    scheme, _, key = (header(scope, "Authorization") or "").partition(" ")
    # Starlette decodes headers as latin-1, so this gives the bytes that were sent.
    offered = hashlib.sha256(key.encode("latin-1")).digest()
    # All keys are compared, and as digests, so that the time taken reveals nothing about any of them.
    matches = [hmac.compare_digest(offered, hashlib.sha256(known.encode()).digest()) for known in keys]
    if scheme.lower() != "bearer" or not any(matches):
        raise Refused(401, "Unauthorized")


def _keys_of(scope: Scope) -> list[str]:
    """The keys that vLLM itself requires: of its command line or configuration file, else of its environment.

    Raises:
        Refused: this version of vLLM does not show its keys, so no client is let in.
    Source: vllm/entrypoints/serve/middleware/register.py; the parsed arguments are on the application (0.31).
    """
    args: Any = getattr(getattr(scope.get("app"), "state", None), "args", None)
    from_environment = os.environ.get(_KEY_VARIABLE)
    # A list in vLLM 0.26 and 0.31; None without the flag.
    if hasattr(args, "api_key"):
        given = [args.api_key] if isinstance(args.api_key, str) else list(args.api_key or [])
    elif from_environment:
        given = []
    else:
        raise Refused(
            403,
            "This version of vLLM does not let a middleware see whether it was given an --api-key. Start it with "
            f"{_KEY_VARIABLE} in its environment instead.",
        )
    return [key for key in given or [from_environment] if key]
