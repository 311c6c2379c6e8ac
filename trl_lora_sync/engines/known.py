"""What is known of the engines without asking a server: versions, and the values their flags take. Needs no torch."""

from packaging.version import Version

from trl_lora_sync.versions import KnownVersions

# Source: vllm/config/lora.py `MaxLoRARanks`.
ALLOWED_MAX_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)

KNOWN_VERSIONS = {
    "vllm": KnownVersions(title="vLLM", oldest=Version("0.22"), newest=Version("0.33"), run=("0.26.0", "0.31.0")),
    "sglang": KnownVersions(title="SGLang", oldest=Version("0.5.11"), newest=Version("0.5.23"), run=("0.5.15",)),
}


def allowed_max_lora_rank(rank: int) -> int:
    """The smallest --max-lora-rank of vLLM that holds `rank`; `rank` itself if none does."""
    return next((allowed for allowed in ALLOWED_MAX_LORA_RANKS if allowed >= rank), rank)
