"""What is known of the engines without asking a server: versions, flags, and the command that starts one.

Needs no torch.
"""

import shlex
from collections.abc import Sequence
from urllib.parse import urlsplit

from packaging.version import Version

from trl_lora_sync.versions import KnownVersions

# Source: vllm/config/lora.py `MaxLoRARanks`.
ALLOWED_MAX_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)

KNOWN_VERSIONS = {
    "vllm": KnownVersions(title="vLLM", oldest=Version("0.22"), newest=Version("0.33"), run=("0.26.0", "0.31.0")),
    "sglang": KnownVersions(title="SGLang", oldest=Version("0.5.11"), newest=Version("0.5.23"), run=("0.5.15",)),
}


_SERVE_PORT = 8000  # the default of `trl-lora-sync serve`


def serve_command(
    engine: str,
    model: str,
    options: Sequence[str] = (),
    *,
    engine_options: Sequence[str] = (),
    base_url: str | None = None,
    is_local: bool = True,
) -> str:
    """The whole `trl-lora-sync serve` line for a message, in backquotes, to be typed on the server's host.

    Args:
        model: what the server loads.
        options: of `serve` itself, such as `--lora-rank 32`.
        engine_options: the engine's own, which go after `--`.
        base_url: where the server is to answer; None for the default.
        is_local: whether the trainer is on the same host.
    """
    words = ["trl-lora-sync", "serve", engine, model, *options]
    address = urlsplit(base_url or "")
    if address.scheme == "http":  # the URL of a server behind HTTPS does not show the address it listens on
        words += [] if is_local else ["--host", "0.0.0.0"]
        words += [] if address.port in (None, _SERVE_PORT) else ["--port", str(address.port)]
    words += ["--", *engine_options] if engine_options else []
    return f"`{shlex.join(words)}`"


def allowed_max_lora_rank(rank: int) -> int:
    """The smallest --max-lora-rank of vLLM that holds `rank`; `rank` itself if none does."""
    return next((allowed for allowed in ALLOWED_MAX_LORA_RANKS if allowed >= rank), rank)
