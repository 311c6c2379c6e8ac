"""What is known of the engines without asking a server: versions, flags, and the command that starts one.

Needs no torch.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from packaging.version import InvalidVersion, Version

# Source: vllm/config/lora.py `MaxLoRARanks`.
ALLOWED_MAX_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True, kw_only=True)
class KnownVersions:
    """The versions of an engine that this package was written for.

    Attributes:
        title: what people call the engine.
        oldest: below it, something that adapter sync needs is missing.
        newest: the last one whose source was read; later ones are taken to be alike.
        run: those that the tests or benchmarks of this release ran on.
    """

    title: str
    oldest: Version
    newest: Version
    run: tuple[str, ...]

    def doubt(self, version: str) -> str | None:
        """Why `version` may behave otherwise than described here, or None."""
        try:
            found = Version(version)
        except InvalidVersion:
            return f"{self.title} {version} is no released version, so it is not known what it does"
        if found < self.oldest:
            return f"{self.title} {version} is older than {self.oldest}, the first that adapter sync was written for"
        if found.release[: len(self.newest.release)] > self.newest.release:
            return f"{self.title} {version} is newer than {self.newest}, the last that adapter sync was written for"
        return None


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
    if address.scheme == "http":  # a server behind HTTPS has an address that its URL does not tell
        words += [] if is_local else ["--host", "0.0.0.0"]
        words += [] if address.port in (None, _SERVE_PORT) else ["--port", str(address.port)]
    words += ["--", *engine_options] if engine_options else []
    return f"`{shlex.join(words)}`"


def allowed_max_lora_rank(rank: int) -> int:
    """The smallest --max-lora-rank of vLLM that holds `rank`; `rank` itself if none does."""
    return next((allowed for allowed in ALLOWED_MAX_LORA_RANKS if allowed >= rank), rank)
