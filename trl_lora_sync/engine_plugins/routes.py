"""What the middlewares of this folder share: who may use their routes, refusals, and answers in JSON. Plain ASGI.

vLLM's own check of API keys comes after every middleware that it is given, so each route checks the same keys itself.
Where the server has none, anybody who reaches it may use them, as anybody may use vLLM's own.
"""

import hashlib
import hmac
import json
import logging
import os
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_KEY_VARIABLE = "VLLM_API_KEY"
# No separator, nothing hidden, nothing a shell or a log would stumble over.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)

# A child of the logger that vLLM sets up, so that its level and format hold here too.
logger = logging.getLogger("vllm.trl_lora_sync")


class Refused(Exception):  # noqa: N818 - it is said to the client, and no error of the server
    """A request that is not carried out.

    Attributes:
        status: the HTTP status that says so.
        words: the reason, for the client.
    """

    def __init__(self, status: int, words: str) -> None:
        super().__init__(status, words)
        self.status = status
        self.words = words


def check_name(name: str) -> None:
    """Raises Refused for a name that could be more than the name of one folder."""
    if not _NAME.fullmatch(name):
        raise Refused(400, "An adapter's name is 1 to 128 of A-Z a-z 0-9 . _ - and begins with a letter or digit.")


def path_of(scope: Scope) -> str:
    """The path of a request as the server's own routes see it."""
    return str(scope.get("path", "")).removeprefix(scope.get("root_path", ""))


def check_key(scope: Scope) -> None:
    """Raises Refused for a request that vLLM itself would refuse."""
    keys = _keys_of(scope)
    if not keys:
        return
    scheme, _, key = (header(scope, b"authorization") or b"").partition(b" ")
    offered = hashlib.sha256(key).digest()
    # All are compared, and as digests, so that the time taken tells nothing about any of them.
    matches = [hmac.compare_digest(offered, hashlib.sha256(known.encode()).digest()) for known in keys]
    if scheme.lower() != b"bearer" or not any(matches):
        raise Refused(401, "Unauthorized")


def _keys_of(scope: Scope) -> list[str]:
    """The keys that vLLM itself asks for: of its command line or configuration file, else of its environment.

    Raises:
        Refused: that cannot be told, so nobody is let in.
    Source: vllm/entrypoints/serve/middleware/register.py; the parsed arguments are on the application (0.31).
    """
    args: Any = getattr(getattr(scope.get("app"), "state", None), "args", None)
    from_environment = os.environ.get(_KEY_VARIABLE)
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


def header(scope: Scope, name: bytes) -> bytes | None:
    """The value of a header, if it is there exactly once."""
    headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
    values = [value for key, value in headers if key.lower() == name]
    return values[0] if len(values) == 1 else None


async def respond(send: Send, status: int, content: dict[str, Any]) -> None:
    """Answer with JSON."""
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def refuse(send: Send, scope: Scope, refusal: Refused) -> None:
    """Answer as vLLM does for an error."""
    logger.warning("Refused %s %r: %s", scope.get("method"), path_of(scope), refusal.words)
    content = {"error": {"message": refusal.words, "code": refusal.status}}
    await respond(send, refusal.status, content)
