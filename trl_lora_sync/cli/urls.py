"""What is typed about servers, URLs above all, and whether a server is there."""

import math
import shlex
import time

from trl_lora_sync.addresses import has_secrets, host_and_port, is_http_url, is_local_url, listen_flags
from trl_lora_sync.cli.console import UsageError
from trl_lora_sync.engines.vllm.spec import VLLM
from trl_lora_sync.errors import ServerUnreachableError
from trl_lora_sync.runtime import run

# A port that refuses connections has no server behind it; a server that restarts opens its port again within this time.
_PATIENCE_S = 3.0


def checked_urls(text: str) -> list[str]:
    """One URL, or several with commas in between as in `vllm_server_base_url`, in the form that requests need.

    Raises:
        UsageError: one is not a URL, or carries a key.
    """
    urls = [url.strip() for url in text.split(",")]
    for url in urls:
        if has_secrets(url):
            raise UsageError(
                "a URL carries a user, password, query or fragment. Give the key in the environment instead."
            )
        if not is_http_url(url):
            raise UsageError(
                f"{url!r} is not a URL. Expected something like http://localhost:8000, with a port from 1 to 65535."
            )
    # Clients of OpenAI's routes are given a URL with /v1, and routes here begin with it.
    return [url.rstrip("/").removesuffix("/v1") for url in urls]


def check_timeout(seconds: float) -> None:
    """Refuse a `--timeout` within which no server can answer.

    Raises:
        UsageError: it is not a positive, finite number.
    """
    # In this form it refuses NaN as well.
    if not 0 < seconds < math.inf:
        raise UsageError(f"--timeout must be a positive, finite number of seconds, got {seconds:g}.")


def check_server_dir(path: str | None) -> None:
    """Refuse a `--server-dir` that is not a path: vLLM and SGLang look for a relative one on the Hub.

    Raises:
        UsageError: it is not absolute.
    """
    if path is not None and not path.startswith("/"):
        raise UsageError(f"--server-dir {path!r} is not an absolute path. Give the folder as the servers see it.")


def check_listening(url: str, timeout_s: float, advice: str) -> None:
    """Return if something accepts connections at `url`, or if more than a few seconds are needed to know.

    Args:
        advice: what to do if nothing does; ends the message.

    Raises:
        ServerUnreachableError: nothing accepts them.
    """
    import httpx

    from trl_lora_sync.engines.base import TIMEOUTS
    from trl_lora_sync.engines.connect import reason_to_be_down

    give_up_at = time.monotonic() + min(_PATIENCE_S, timeout_s)
    while error := run(reason_to_be_down(url, is_local=is_local_url(url), timeouts=TIMEOUTS)):
        # The connection was made, so a server is there; the checks find out whether it works.
        if not isinstance(error.__cause__, httpx.ConnectError):
            return
        if time.monotonic() > give_up_at:
            raise ServerUnreachableError(
                f"No server accepts connections at {url} ({error.__cause__}). {advice}"
            ) from error
        time.sleep(0.2)


def start_command(url: str, *serve_arguments: str, port: str | None = None) -> str:
    """What starts a server at `url`.

    Args:
        serve_arguments: of `trl-lora-sync serve vllm`, the model first.
        port: another one than that of the URL.
    """
    _, own_port = host_and_port(url)
    flags = [*listen_flags(url, is_local=is_local_url(url)), "--port", port or str(own_port), *VLLM.python_flags()]
    return shlex.join(["trl-lora-sync", "serve", "vllm", *serve_arguments, *flags])
