"""Which versions of other software this package was written for and run with, and a warning about any other."""

import logging
import os
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version


@dataclass(frozen=True, kw_only=True)
class KnownVersions:
    """The versions of a library or an engine that this package was written for.

    Attributes:
        title: what people call it.
        oldest: below it, something that adapter sync needs is missing.
        newest: the last one whose source was read; later ones are used if they pass every check.
        run: the versions that the tests or benchmarks of this release ran on.
    """

    title: str
    oldest: Version
    newest: Version
    run: tuple[str, ...]

    @property
    def tested(self) -> str:
        """The versions that were run, in words."""
        *others, last = self.run
        return f"{', '.join(others)} and {last}" if others else last

    def is_too_old(self, version: str) -> bool:
        """Whether something that adapter sync needs is missing; of no released version this is not known."""
        try:
            return Version(version) < self.oldest
        except InvalidVersion:
            return False

    def doubt(self, version: str) -> str | None:
        """Why `version` may behave otherwise than described here, or None."""
        try:
            found = Version(version)
        except InvalidVersion:
            return f"{self.title} {version} is not a released version, so its behaviour is unknown"
        if found < self.oldest:
            return f"{self.title} {version} is older than {self.oldest}, the first that adapter sync was written for"
        # Compared in as many parts as `newest` has: 0.33.1 is not newer than 0.33.
        if found.release[: len(self.newest.release)] > self.newest.release:
            return f"{self.title} {version} is newer than {self.newest}, the last that adapter sync was written for"
        return None

    def caution(self, version: str) -> str | None:
        """What to warn of once `version` has passed every check, or None if it is one of those described here."""
        doubt = self.doubt(version)
        return doubt and f"{doubt}. It passed every check and is used. Tested with {self.title} {self.tested}."


TRL = KnownVersions(
    title="TRL",
    oldest=Version("1.11"),
    newest=Version("1.16"),
    run=("1.11.0", "1.12.0", "1.13.0", "1.14.2", "1.15.0", "1.16.0"),
)
# Its asynchronous trainer, which trains an adapter since 1.14.
TRL_ASYNC = KnownVersions(
    title="TRL", oldest=Version("1.14"), newest=Version("1.16"), run=("1.14.2", "1.15.0", "1.16.0")
)
PEFT = KnownVersions(
    title="PEFT",
    oldest=Version("0.18"),
    newest=Version("0.21"),
    run=("0.18.0", "0.18.1", "0.19.1", "0.20.0", "0.21.0", "0.21.2"),
)
# In the trainer's process, where private names are relied on.
VLLM_COLOCATE = KnownVersions(
    title="vLLM",
    oldest=Version("0.26"),
    newest=Version("0.33"),
    run=("0.26.0 with fused serving on a GPU", "0.28.0", "0.30.0", "0.31.0", "0.32.0 on a CPU"),
)


def warn(logger: logging.Logger, caution: str | None) -> None:
    """Log a caution once, however many processes train; each of them has the same libraries."""
    # From the launcher: the caution about TRL is due at the import, before accelerate has set up its state.
    if caution and os.environ.get("RANK", "0") == "0":
        logger.warning("%s", caution)
