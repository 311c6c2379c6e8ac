"""What the package knows of an engine without asking a server of it."""

import contextlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any
from urllib.parse import urlsplit

from trl_lora_sync.addresses import listen_flags
from trl_lora_sync.versions import KnownVersions

_SERVE_PORT = 8000  # the default of `trl-lora-sync serve`


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """One engine. References have the form `module:name`, so that a spec loads no slow library.

    Attributes:
        name: as in `vllm_server_engine` and `trl-lora-sync serve`.
        versions: what this package was written for and run with; their title is what people call the engine.
        description: what a server of it is, in messages.
        distributions: the packages that hold it; the first that is installed counts.
        api_key_variable: the environment variable with the key of its servers.
        own_route: a route that this engine alone has.
        version_route: the route whose answer has its version.
        guards_version: whether that route needs the key.
        engine: the class that talks to a server.
        fused_engine: the class for fused serving; empty if it has none.
        fused_route: a route that only a server with fused serving has.
        launch: the function that plans what `serve` starts.
        capabilities: values of `Capabilities` that hold for every server of it.
        max_lora_ranks: what its flag --max-lora-rank takes; empty for anything.
        max_loras_flag: the flag for how many adapters one batch can have.
        counts_base: whether that flag counts the base model as one.
        proves_groups: whether the trainer proves each group of modules at its start, experts included.
        processed_logprobs: how a server is restarted so that log-probabilities come after the temperature; `{command}`
            stands for the command of `serve`.
    """

    name: str
    versions: KnownVersions
    description: str
    distributions: tuple[str, ...]
    api_key_variable: str
    own_route: str
    version_route: str
    guards_version: bool
    engine: str
    launch: str
    max_loras_flag: str
    processed_logprobs: str
    fused_engine: str = ""
    fused_route: str = ""
    capabilities: Mapping[str, Any] = field(default_factory=dict)
    max_lora_ranks: tuple[int, ...] = ()
    counts_base: bool = False
    proves_groups: bool = False

    def allowed_max_lora_rank(self, rank: int) -> int:
        """The smallest --max-lora-rank that holds `rank`; `rank` itself if none does."""
        return next((allowed for allowed in self.max_lora_ranks if allowed >= rank), rank)

    def python_flags(self) -> list[str]:
        """The argument without which `serve` finds no engine; none where this environment has it."""
        for name in self.distributions:
            with contextlib.suppress(metadata.PackageNotFoundError):
                metadata.version(name)
                return []
        return ["--python", f"PATH/TO/{self.name}-env/bin/python"]

    def serve_command(
        self,
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
        words = ["trl-lora-sync", "serve", self.name, model, *options]
        address = urlsplit(base_url or "")
        # HTTPS, or a path, is a gateway's, whose URL does not show the address that the server listens on.
        if address.scheme == "http" and address.path in ("", "/"):
            words += listen_flags(address.geturl(), is_local=is_local)
            port = address.port or 80  # that of HTTP
            words += [] if port == _SERVE_PORT else ["--port", str(port)]
        words += self.python_flags()
        words += ["--", *engine_options] if engine_options else []
        return f"`{shlex.join(words)}`"
