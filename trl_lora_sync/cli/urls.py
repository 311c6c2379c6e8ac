"""URLs of servers, as typed."""

from trl_lora_sync.cli.console import UsageError
from trl_lora_sync.places import has_secrets, is_http_url


def checked_url(url: str) -> str:
    """The URL as it is used.

    Raises:
        UsageError: it is none, or carries a key.
    """
    if has_secrets(url):
        raise UsageError("a URL carries a user, password, query or fragment. Give the key in the environment instead.")
    if not is_http_url(url):
        raise UsageError(f"{url!r} is not a URL. Expected something like http://localhost:8000.")
    return url.rstrip("/").removesuffix("/v1")
