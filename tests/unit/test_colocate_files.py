"""Unit tier: the file from which vLLM in the trainer's process loads its first adapter, if folders cannot be used."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from support.folders import read_only

from trl_lora_sync.colocate import engine, slots
from trl_lora_sync.colocate.slots import AdapterSlots
from trl_lora_sync.errors import AdapterExportError
from unit.tiny import canonical, everything_under

pytestmark = pytest.mark.outside


class Engine:
    """What vLLM does with the file: here it notes the folder."""

    def __init__(self) -> None:
        self.loaded_from: list[Path] = []

    def remove_lora(self, adapter_id: int) -> None: ...

    def add_lora(self, request: Any) -> None:
        assert (request.path / "adapter_model.safetensors").is_file()
        self.loaded_from.append(request.path.parents[1])


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read of vLLM, and made for it."""
    monkeypatch.setattr(engine, "lora_request", lambda name, number, path: SimpleNamespace(path=Path(path)))
    manager = SimpleNamespace(list_adapters=dict)
    monkeypatch.setattr(engine, "adapter_manager", lambda llm: manager)
    monkeypatch.setattr(engine, "slot_of", lambda manager, number: None)


def load() -> list[Path]:
    """The folders in which vLLM was given an adapter."""
    served = Engine()
    AdapterSlots(SimpleNamespace(llm_engine=served)).load_file("version-1", 1, canonical())
    return served.loaded_from


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    with read_only(tmp_path / "closed") as folder:
        yield folder


def no_temporary_folder() -> NoReturn:
    raise FileNotFoundError("No usable temporary directory found")


def test_shared_memory_that_cannot_be_written_leaves_the_folder_for_temporary_files(
    closed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ended with the error of the operating system."""
    monkeypatch.setattr(slots, "SHARED_MEMORY", closed)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert load() == [tmp_path]
    assert everything_under(tmp_path) == ["closed"]


def test_without_a_folder_for_temporary_files_shared_memory_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ended with the error of the operating system, although that folder was not needed."""
    monkeypatch.setattr(slots, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(tempfile, "gettempdir", no_temporary_folder)
    assert load() == [tmp_path]
    assert everything_under(tmp_path) == []


def test_an_error_names_both_places(closed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "SHARED_MEMORY", closed)
    monkeypatch.setattr(tempfile, "gettempdir", no_temporary_folder)
    with pytest.raises(AdapterExportError, match="No usable temporary directory found") as raised:
        load()
    assert str(closed) in str(raised.value)
