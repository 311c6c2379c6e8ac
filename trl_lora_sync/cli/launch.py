"""What a server should be able to do, the command that starts it, and the checks that all engines have in common."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trl_lora_sync.adapter.support import PACKED_LAYERS
from trl_lora_sync.cli.console import UsageError

# vLLM 0.31 and SGLang 0.5.15 take the first two for yes, and some variables of SGLang the third. A word too many
# refuses a harmless setting only.
_ON = ("1", "true", "yes", "on")
_TARGET_MODULES = "--lora-target-modules"
# Flags of the engines whose values are printed nowhere.
_SECRET = frozenset({"--api-key", "--admin-api-key", "--hf-token", "--ssl-keyfile-password"})
# Flags of the engines with which a longer flag in the checks begins (vLLM 0.31, SGLang 0.5.15).
_BEGINNINGS = ("--ssl-keyfile",)


@dataclass(frozen=True, kw_only=True)
class ServerRequest:
    """What a server should be able to do.

    Attributes:
        model: the base model that the engine loads.
        lora_rank: the largest rank of the adapters.
        modules: the adapted layers by their last name; empty if they are not known.
        keep: `lora_sync_keep` of the trainer.
        sleeps: whether `vllm_server_sleep="kv_cache"` will be used.
        supports_push: whether adapters will be pushed to it over HTTP.
        is_fused: whether adapters are added to its weights, `lora_sync_serving="fused"` of the trainer.
        adapts_vision: whether adapters change modules that see images.
        adapts_experts: whether adapters may change the experts of a mixture.
        loads_quickly: whether adapters are read with several threads; None where that is possible.
        host, port: where to listen.
        extra: the engine arguments that were typed.
    """

    model: str
    lora_rank: int
    modules: tuple[str, ...] = ()
    keep: int = 2
    sleeps: bool = False
    supports_push: bool = False
    is_fused: bool = False
    adapts_vision: bool = False
    adapts_experts: bool = False
    loads_quickly: bool | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    extra: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LaunchCommand:
    """A command that starts a server, with what is added to the environment and what to know about it."""

    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def shell_line(self) -> str:
        """The command as it would be typed, without its keys."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*settings, shlex.join(without_keys(self.command))])


class EngineArguments:
    """Engine arguments as typed: `--name value`, `--name=value`, with `_` for `-`, or a short name."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._values: dict[str, list[str]] = {}
        name = ""
        for argument in arguments:
            # A negative number is a value.
            if argument.startswith("-") and not _is_number(argument):
                name, _, value = argument.partition("=")
                # vLLM's parser takes either spelling (0.31, utils/argparse_utils.py).
                name = name.replace("_", "-")
                # A flag that is repeated replaces its values, as with argparse.
                self._values[name] = [value] if "=" in argument else []
            elif name:
                self._values[name].append(argument)

    def has(self, *names: str) -> bool:
        """Whether a flag of `names` was typed.

        Raises:
            UsageError: the beginning of one was typed, which the engine would take for it.
        """
        for typed in self._values:
            flag = next((name for name in names if _may_mean(typed, name)), None)
            if flag is not None and typed not in names:
                raise UsageError(
                    f"{typed} abbreviates {flag}, and arguments are checked by their full names only. Type {flag}."
                )
        return any(name in self._values for name in names)

    def get(self, *names: str) -> str | None:
        """The first value of the flag that goes by `names`, if it is there; raises what `has` does."""
        if not self.has(*names):
            return None
        return next((self._values[name][0] for name in names if self._values.get(name)), None)

    def number(self, *names: str, default: int) -> int:
        value = self.get(*names)
        try:
            return default if value is None else int(value)
        except ValueError as error:
            raise UsageError(f"{names[0]} {value} is not a whole number.") from error

    def check_port(self, request: ServerRequest) -> None:
        port = self.number("--port", default=request.port)
        if not 0 < port < 65536:
            raise UsageError(f"--port {port} is out of range. Give a port from 1 to 65535.")

    def check_rank(self, request: ServerRequest, advised: int) -> None:
        reserved = self.number("--max-lora-rank", default=request.lora_rank)
        if reserved < request.lora_rank:
            raise UsageError(
                f"--max-lora-rank {reserved} is below the adapter's rank {request.lora_rank}. Leave it out, or give "
                f"{advised}."
            )

    def check_room(self, flag: str, request: ServerRequest, consequence: str) -> None:
        """Versions that stay registered, the next one, and the one whose files go last."""
        needed = request.keep + 2
        found = self.number(flag, default=needed)
        if found < needed:
            raise UsageError(
                f"{flag} {found} is too few: with lora_sync_keep={request.keep}, {consequence}. Leave it out, or give "
                f"{needed}."
            )

    def check_modules(self, request: ServerRequest, consequence: str, *, every: str = "") -> None:
        """Every adapted layer must be among the typed ones, by its name or by the name of a layer it is part of.

        Args:
            every: the engine's word for all layers, if it has one.
        """
        typed = {name.rpartition(".")[2] for name in self._values.get(_TARGET_MODULES, ())}
        if not typed or every in typed:
            return
        # One part of a stacked layer is enough, as both engines then adapt the whole layer.
        # Source: `is_in_target_modules` in vllm/lora/utils.py (0.26 and 0.31), and `get_normalized_target_modules` in
        # sglang/srt/lora/utils.py (0.5.15).
        covered = typed.union(*(parts for whole, parts in PACKED_LAYERS.items() if typed & {whole, *parts}))
        missing = [name for name in request.modules if name not in covered]
        if missing:
            raise UsageError(
                f"{_TARGET_MODULES} leaves out {', '.join(missing)}, which the adapter changes: {consequence}. Leave "
                "it out, or name all of them."
            )

    def missing(self, flags: Mapping[str, Any]) -> list[str]:
        """The flags that were not typed, as arguments."""
        missing: list[str] = []
        for name, value in flags.items():
            if not self.has(name):
                missing += [name, *([] if value is None else [value] if isinstance(value, str) else value)]
        return missing


def without_keys(arguments: Sequence[str]) -> list[str]:
    """The arguments with `[key]` for each key, password or token."""
    shown: list[str] = []
    is_secret = False
    for argument in arguments:
        if argument.startswith("-"):
            name, has_value, _ = argument.partition("=")
            # Up to the next flag, as vLLM's --api-key takes several keys (0.31).
            is_secret = any(_may_mean(name.replace("_", "-"), flag) for flag in _SECRET)
            shown.append(f"{name}=[key]" if is_secret and has_value else argument)
        else:
            shown.append("[key]" if is_secret else argument)
    return shown


def key_notes(given: "EngineArguments", advice: str) -> list[str]:
    if not given.has(*_SECRET):
        return []
    return [
        f"the command is printed without its keys. The list of processes shows them to all users of this host{advice}"
    ]


def is_on(environ: Mapping[str, str], name: str) -> bool:
    """Whether a variable of the engine is set to one of the words for yes."""
    return environ.get(name, "").lower() in _ON


def port_notes(host: str, key: str, environ: Mapping[str, str] | None) -> list[str]:
    if host in ("127.0.0.1", "localhost", "::1") or environ is None or environ.get(key):
        return []
    return [
        f"the server listens on {host}. Every client that reaches it can load adapters, and so make it read any "
        f"folder. Keep the port private, and set a key with {key}."
    ]


def _may_mean(name: str, flag: str) -> bool:
    """Whether an engine may take `name` for `flag`."""
    # Both parsers are argparse's, which takes the beginning of a flag for the flag (vLLM 0.31, SGLang 0.5.15).
    return name == flag or (flag.startswith(name) and name not in ("-", "--", *_BEGINNINGS))


def _is_number(argument: str) -> bool:
    return argument.lstrip("-").replace(".", "", 1).isdigit()
