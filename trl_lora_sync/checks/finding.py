"""What one check of a server finds. Needs no torch."""

from dataclasses import dataclass, field

from trl_lora_sync.errors import LoRASyncError

OK, NOTE, PROBLEM = "ok", "note", "problem"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: of the check.
        status: `ok`, `note` for what could not be known or is worth knowing, or `problem`.
        message: what was found; of a problem, what was expected and how to mend it as well.
        warning: what a run logs that goes on all the same; empty for nothing.
        error: what a run ends with; None if it goes on.
    """

    name: str
    status: str
    message: str
    warning: str = ""
    error: LoRASyncError | None = field(default=None, kw_only=True)
