"""A folder in shared memory, and readers of what is written there."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trl_lora_sync import sync
from trl_lora_sync.adapter.pinned_files import is_in_memory
from trl_lora_sync.adapter.store import StoredAdapter
from trl_lora_sync.engine_plugins.shared_files import SharedFiles
from trl_lora_sync.servers.transports import DiskTransport, transport_for

_SHARED_MEMORY = Path("/dev/shm")
# Maps the file as torch and safetensors do, and prints its checksum for each line of input.
_READER = """
import hashlib, sys, torch
storage = torch.UntypedStorage.from_file(sys.argv[1], False, int(sys.argv[2]))
view = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
print("mapped", flush=True)
for _ in sys.stdin:
    print(hashlib.sha256(view).hexdigest(), flush=True)
"""


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """An empty folder in /dev/shm; skips the test where there is none."""
    if not _SHARED_MEMORY.is_dir() or not is_in_memory(_SHARED_MEMORY):
        pytest.skip("there is no shared memory in /dev/shm here")
    with tempfile.TemporaryDirectory(dir=_SHARED_MEMORY, prefix="trl-lora-sync-test-") as folder:
        yield Path(folder)


def written_damaged(write: Callable[[], StoredAdapter]) -> StoredAdapter:
    """What `write` returns, with a byte that is not the trainer's, and not fetched before it is to be loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedFiles, "note_filled", lambda *_: None)
        stored = write()
    assert stored.path
    with (stored.path / "adapter_model.safetensors").open("r+b") as file:
        file.seek(-10, os.SEEK_END)
        file.write(b"\x01")
    return stored


def use_pinned_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have runs of a CPU write versions as on a GPU, into page-locked files; both work without one."""

    def as_for_a_gpu(*given: Any, **named: Any) -> DiskTransport:
        return transport_for(*given, **named | {"is_on_gpu": True})

    monkeypatch.setattr(sync, "transport_for", as_for_a_gpu)


class Reader:
    """Another process that has a file mapped, as an engine does that keeps adapters as views of their files."""

    def __init__(self, file: Path) -> None:
        command = [sys.executable, "-c", _READER, str(file), str(file.stat().st_size)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._said() == "mapped"

    def sha256(self) -> str:
        """Of what it sees now."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._said()

    def _said(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        self._process.communicate(timeout=60)


@contextlib.contextmanager
def reader_of(file: Path) -> Iterator[Reader]:
    reader = Reader(file)
    try:
        yield reader
    finally:
        reader.close()
