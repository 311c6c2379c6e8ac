"""Where a server is, as seen from this host, and where adapter versions for it are written. Knows no trainer."""

import contextlib
import errno
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trl_lora_sync.errors import AdapterExportError

SHARED_MEMORY = Path("/dev/shm")
# A port of this host refuses at once. Only another host takes as long, and of those nothing is concluded.
_REFUSED_WITHIN_S = 1.0


def has_secrets(url: str) -> bool:
    """Whether a URL carries more than a place, such as a user, a password or a key."""
    # By character, as the text may be several URLs with commas in between, or not a URL at all.
    return bool({"@", "?", "#"} & set(url))


def is_http_url(url: str) -> bool:
    """Whether a request could be sent to `url`."""
    try:
        parts = urlsplit(url)
        # The scheme twice, as of a host that is given as a URL, leaves an empty port and a path that begins with "//".
        is_whole = bool(parts.hostname) and parts.port != 0 and not parts.netloc.endswith(":")
        return parts.scheme in ("http", "https") and is_whole
    except ValueError:  # a port that is not a number or too large, half an IPv6 address
        return False


def next_port(url: str) -> str:
    """The same host, one port on, for an example of a second server."""
    parts = urlsplit(url)
    # `hostname` lacks the brackets that an IPv6 address needs in a URL.
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}:{(parts.port or 8000) + 1}"


def is_local_url(url: str) -> bool:
    """Whether the host in `url` is this one: one of its addresses can be bound here."""
    host = urlsplit(url).hostname or ""
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # unknown, or no possible host name
        return False
    # By a trial, which is right for every name and address of this host, and for TRL's default, 0.0.0.0.
    return any(_can_bind(family, address) for family, _, _, _, address in addresses)


def listen_flags(url: str, *, is_local: bool) -> list[str]:
    """Arguments of `serve` with which a server listens where it is reached at `url`; none for 127.0.0.1, its default.

    Args:
        is_local: whether its clients are on its host.
    """
    host = urlsplit(url).hostname or ""
    if not is_local:
        return ["--host", "::" if ":" in host else "0.0.0.0"]
    if host in ("localhost", "127.0.0.1", "0.0.0.0"):
        return []
    # The name of this host, for one, most often leads to an address that 127.0.0.1 does not cover.
    return ["--host", "::1" if host == "::" else host]


def is_same_server(url: str, others: Iterable[str]) -> bool:
    """Whether a URL is of one of the others' servers: of the same port, and of the same host or of this one as well."""
    host, port = host_and_port(url)
    # The ports first, as `is_local_url` may query a name server.
    return any(
        port == other_port and (host == other_host or (is_local_url(url) and is_local_url(other)))
        for other in others
        for other_host, other_port in [host_and_port(other)]
    )


def host_and_port(url: str) -> tuple[str | None, int]:
    """Where a client connects; raises ValueError for a port that is none."""
    parts = urlsplit(url)
    return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


def _can_bind(family: int, address: Any) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # Port 0 is any free one; that of the server itself is taken.
            probe.bind((address[0], 0))
    except OSError:
        return False
    return True


def is_in_use(host: str, port: int) -> bool:
    """Whether another program of this host listens at an address that a server for `host` would listen at."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # unknown, or no possible host name
        return False
    for family, kind, _, _, address in addresses:
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            # As servers do, so that connections of a server that has ended do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                # Others, such as for a missing right or an address of another host, are the engine's to report.
                if error.errno == errno.EADDRINUSE:
                    return True
    return False


def is_gone(url: str) -> bool:
    """Whether a server of this host has ended: it refuses connections.

    Never true for a server elsewhere, whose connections a gateway or a firewall may refuse.
    """
    try:
        host, port = host_and_port(url)
        socket.create_connection((host or "", port), _REFUSED_WITHIN_S).close()
    except ConnectionRefusedError:
        return is_local_url(url)
    except (OSError, ValueError):  # no answer, or no such host
        return False
    return False


def default_sync_dir(is_local: bool, output_dir: str | Path) -> Path:
    """Where versions are written if `lora_sync_dir` is not given."""
    if is_local and SHARED_MEMORY.is_dir():
        # A folder for each user: versions have mode 0700, and `AdapterStore` refuses the folder of another user here.
        return SHARED_MEMORY / f"trl-lora-sync-{os.getuid()}"
    # With push_to_hub, Transformers (5.24) uploads what is in there except folders of such a name (`trainer.py`).
    return Path(output_dir) / "_lora_sync"


def absolute_dir(folder: Path) -> Path:
    """A `lora_sync_dir` by the path that the servers of this host are given.

    Raises:
        AdapterExportError: it has none.
    """
    try:
        return folder.expanduser().absolute()
    # An unknown user behind ~, or a user without a home folder; a relative path in a folder that was deleted.
    except (RuntimeError, OSError) as error:
        raise AdapterExportError(
            f"The adapter folder {str(folder)!r} stands for no absolute path ({error}). Servers are given an absolute "
            "one. Set lora_sync_dir to it, such as /data/lora-sync."
        ) from error
