"""What a trainer notes beside the files of a version, for workers that write it into their slots.

The file of the tensors may still be on its way from the trainer's GPU; see `engine_plugins.unfinished`.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

NOTE_FILE = "lora_sync.json"
NOTE_FORM = "4"
"""Of `VersionNote`, of `NOTE_KEY` and of the locks of `unfinished`; to be changed with them, as trainer and server are
installed apart."""
NOTE_KEY = "lora_sync_note"
"""In `adapter_config.json`: the form of the note beside it. While a network file system does not show that note, the
version would pass for an adapter of another origin, with which nothing is compared. Engines and PEFT ignore the key."""
DAMAGED = "is damaged: "
"""In the message with which a worker refuses a version that is not what the trainer sent."""
IGNORES = "ignores a part of the adapter: "
"""In the message with which a worker refuses a version of which it would not serve all."""

_DIGEST_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class VersionNote:
    """The note of one version.

    Attributes:
        head: digest of the header and the configuration, see `digest_of`.
        checksum: of the tensors, see `engine_plugins.checksum`.
        files: the socket of `engine_plugins.shared_files`, as a path from the version's folder; empty if the file
            of the tensors is not shared.
        memory: the number of the GPU's memory (`engine_plugins.cuda_ipc`) that holds the tensors until the next version
            is written; offered through that socket. Empty if they are in the file only.
    """

    head: str
    checksum: str
    files: str = ""
    memory: str = ""

    def write(self, folder: Path) -> None:
        """Put it beside the files in `folder`."""
        (folder / NOTE_FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> "VersionNote | None":
        """The note in `folder`; None if there is none that can be read."""
        try:
            found = json.loads((folder / NOTE_FILE).read_bytes())
            # Fields that are unknown here are passed over; a missing one is a KeyError.
            return cls(**{one.name: str(found[one.name]) for one in fields(cls)})
        # A trainer of another version may write another note; its files are then loaded as any adapter's.
        except (OSError, ValueError, KeyError, TypeError):
            return None


def is_noted(config: Any) -> bool:
    """Whether the content of `adapter_config.json` is of a version that has a note, of the form that is known here."""
    return isinstance(config, dict) and config.get(NOTE_KEY) == NOTE_FORM


# All versions of a run have one header, of which the digest takes longer than the look into the cache.
@lru_cache(maxsize=2)
def digest_of(header: bytes, config: bytes) -> str:
    """Of the header of a safetensors file, without its length, and of `adapter_config.json`."""
    return hashlib.blake2b(header + config, digest_size=_DIGEST_BYTES).hexdigest()
