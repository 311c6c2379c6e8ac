"""What is known of the engines without asking a server: versions, and the values their flags take. Needs no torch."""

from dataclasses import dataclass

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


def allowed_max_lora_rank(rank: int) -> int:
    """The smallest --max-lora-rank of vLLM that holds `rank`; `rank` itself if none does."""
    return next((allowed for allowed in ALLOWED_MAX_LORA_RANKS if allowed >= rank), rank)
