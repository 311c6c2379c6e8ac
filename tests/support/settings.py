"""Plain settings of a sync, for tests that use it without a trainer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trl_lora_sync.settings import ServerAddress, SyncSettings


def plain_settings(
    urls: Sequence[str], root: Path, *, timeout_s: float, are_local: Sequence[bool] = (), **changes: Any
) -> SyncSettings:
    """All defaults, with fields changed.

    Args:
        timeout_s: of a sync, of the start and of a generation.
        are_local: for each URL, whether it counts as one of this host; all of them by default.
    """
    local = are_local or [True] * len(urls)
    plain: dict[str, Any] = {
        "servers": tuple(
            ServerAddress(base_url=url, is_local=is_local) for url, is_local in zip(urls, local, strict=True)
        ),
        "engine": "auto",
        "transport": "auto",
        "root": root,
        "server_root": None,
        "keep": 2,
        "pause": "off",
        "frees_kv_cache": False,
        "dtype": None,
        "sync_timeout_s": timeout_s,
        "startup_timeout_s": timeout_s,
        "generation_timeout_s": timeout_s,
    }
    return SyncSettings(**{**plain, **changes})
