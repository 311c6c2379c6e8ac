"""Why a request to the routes of this folder is refused. Knows nothing of HTTP beyond the status of an answer."""

import re

# No separator, nothing hidden, nothing a shell or a log would stumble over.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)


class Refused(Exception):  # noqa: N818 - the client's error, not the server's
    """A request that is not carried out.

    Attributes:
        status: the HTTP status of the answer.
        message: the reason, for the client.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message

    def __str__(self) -> str:
        return self.message


def check_name(name: str) -> None:
    """Raises Refused for a name that could be more than the name of one folder."""
    if not _NAME.fullmatch(name):
        raise Refused(400, "An adapter's name is 1 to 128 of A-Z a-z 0-9 . _ - and begins with a letter or digit.")
