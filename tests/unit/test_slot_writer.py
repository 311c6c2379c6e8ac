"""Versions are written into the slots of an engine with vLLM's rules; the live tier has vLLM itself."""

import shutil
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.adapters import make_foreign
from support.shared_memory import shared_folder
from support.waiting import happens
from torch import Tensor

from trl_lora_sync.adapter.canonical import CanonicalAdapter
from trl_lora_sync.adapter.flat import FlatBuffer
from trl_lora_sync.adapter.pinned_files import PinnedFilePool
from trl_lora_sync.adapter.store import AdapterStore, StoredAdapter, write_adapter
from trl_lora_sync.colocate import engine, slots
from trl_lora_sync.engine_plugins import slot_writer
from trl_lora_sync.engine_plugins.shared_files import MappedFiles
from trl_lora_sync.engine_plugins.slot_writer import Group, SlotWriter
from trl_lora_sync.engine_plugins.version_note import VersionNote
from trl_lora_sync.errors import AdapterExportError
from unit.tiny import canonical, lora_module

BF16 = torch.bfloat16
R, MOST, IN, OUT, SLOTS, KEPT = 2, 4, 8, 16, 2, 3
NOTE, CONFIG, TENSORS = "lora_sync.json", "adapter_config.json", "adapter_model.safetensors"


class Cache(OrderedDict[int, Any]):
    """As vLLM's `AdapterLRUCache`."""

    def __init__(self, on_remove: Callable[[int], object]) -> None:
        super().__init__()
        self._on_remove = on_remove

    def remove_oldest(self) -> None:
        self.pop(next(iter(self)))

    def pop(self, number: int, default: Any = None) -> Any:
        found = super().pop(number, default)
        self._on_remove(number)
        return found

    def touch(self, number: int) -> None:
        if number in self:
            self.move_to_end(number)


class Layer:
    """Two modules in one, for each slot a flag, and a view of the slots as embeddings have one."""

    def __init__(self, members: tuple[str, ...]) -> None:
        self.members = members
        self.lora_a_stacked = tuple(torch.zeros(SLOTS, 1, MOST, IN, dtype=BF16) for _ in members)
        self.lora_b_stacked = tuple(torch.zeros(SLOTS, 1, OUT, MOST, dtype=BF16) for _ in members)
        self.lora_a_stacked_2d = self.lora_a_stacked[0].view(SLOTS * MOST, IN)
        self.is_on = [False] * SLOTS

    def reset_lora(self, slot: int) -> None:
        self.is_on[slot] = False
        for one in (*self.lora_a_stacked, *self.lora_b_stacked):
            one[slot] = 0

    def set_lora(self, slot: int, pairs: list[tuple[Tensor, Tensor]]) -> None:
        self.reset_lora(slot)
        self.is_on[slot] = True
        for a, b, (lora_a, lora_b) in zip(self.lora_a_stacked, self.lora_b_stacked, pairs, strict=True):
            a[slot, 0, : lora_a.shape[0]].copy_(lora_a)
            b[slot, 0, :, : lora_b.shape[1]].copy_(lora_b)


class Tables:
    """As `LRUCacheLoRAModelManager` of vllm/lora/model_manager.py (0.26 to 0.33).

    Attributes:
        notes_first: whether a slot is noted before the layers take an adapter; vLLM 0.33 notes it afterwards.
    """

    capacity = KEPT
    notes_first = True

    def __init__(self, members: list[tuple[str, ...]]) -> None:
        self.modules = {",".join(one): Layer(one) for one in members}
        self.lora_index_to_id: list[int | None] = [None] * SLOTS
        self._registered_adapters = Cache(self.deactivate_adapter)
        self._active_adapters = Cache(self._free)
        self._last_mapping: object = None
        self.scaling = 1.0

    def __len__(self) -> int:
        return len(self._registered_adapters)

    def _free(self, number: int) -> None:
        if number in self.lora_index_to_id:
            self.lora_index_to_id[self.lora_index_to_id.index(number)] = None

    def deactivate_adapter(self, number: int) -> None:
        if number in self._active_adapters:
            self._active_adapters.pop(number)

    def remove_adapter(self, number: int) -> None:
        self.deactivate_adapter(number)
        if number in self._registered_adapters:
            self._registered_adapters.pop(number)

    def remove_oldest_adapter(self) -> None:
        self._registered_adapters.remove_oldest()

    def add_adapter(self, model: Any) -> None:
        self._registered_adapters[model.id] = model

    def activate_adapter(self, number: int) -> bool:
        if number in self._active_adapters:
            self._active_adapters.touch(number)
            return False
        if None not in self.lora_index_to_id:
            self._active_adapters.remove_oldest()
        slot = self.lora_index_to_id.index(None)
        if self.notes_first:
            self._note(number, slot)
        tensors = self._registered_adapters[number].tensors
        for layer in self.modules.values():
            prefix = "base_model.model."
            keys = [[f"{prefix}{one}.lora_{kind}.weight" for kind in "AB"] for one in layer.members]
            if keys[0][0] in tensors:
                layer.set_lora(slot, [(tensors[a], tensors[b] * self.scaling) for a, b in keys])
            else:
                layer.reset_lora(slot)
        if not self.notes_first:
            self._note(number, slot)
        return True

    def _note(self, number: int, slot: int) -> None:
        self._active_adapters[number] = None
        self.lora_index_to_id[slot] = number

    def held_by(self, number: int) -> dict[str, Tensor]:
        """What the layers would compute with, by the names in the file; without the padding, which must be zero."""
        slot = self.lora_index_to_id.index(number)
        found = {}
        for layer in self.modules.values():
            for a, b, member in zip(layer.lora_a_stacked, layer.lora_b_stacked, layer.members, strict=True):
                rank = int((a[slot, 0] != 0).any(1).sum())
                assert not a[slot, 0, rank:].any()
                assert not b[slot, 0, :, rank:].any()
                if rank:
                    assert layer.is_on[slot]
                    found[f"base_model.model.{member}.lora_A.weight"] = a[slot, 0, :rank]
                    found[f"base_model.model.{member}.lora_B.weight"] = b[slot, 0, :, :rank]
        return found


class Manager:
    """As `LRUCacheWorkerLoRAManager` of vllm/lora/worker_manager.py (0.26 to 0.33)."""

    def __init__(self, tables: Tables) -> None:
        self._adapter_manager = tables
        self.instead: Callable[[], dict[str, Tensor]] | None = None
        self.loads = 0

    def _load_adapter(self, request: Any) -> Any:
        self.loads += 1
        if self.instead is not None:
            tensors, self.instead = self.instead(), None
        else:
            tensors = load_file(Path(request.lora_path) / "adapter_model.safetensors")
        return SimpleNamespace(id=request.lora_int_id, tensors=tensors)

    def _apply_adapters(self, requests: Any) -> None:
        for one in requests:
            self.add_adapter(one)

    def add_adapter(self, request: Any) -> bool:
        tables = self._adapter_manager
        if request.lora_int_id not in tables._registered_adapters or request.load_inplace:
            model = self._load_adapter(request)
            tables.remove_adapter(model.id)
            if len(tables) + 1 > tables.capacity:
                tables.remove_oldest_adapter()
            tables.add_adapter(model)
        else:
            tables._registered_adapters.touch(request.lora_int_id)
        tables.activate_adapter(request.lora_int_id)
        return True


class Served:
    """A worker and a trainer's store."""

    def __init__(self, folder: Path, group: Group | None = None) -> None:
        self.tables = Tables([("q", "k"), ("o",), ("unused",)])
        self.manager = Manager(self.tables)
        self.writer = SlotWriter(self.manager, self._loading, group or Group())
        # Nothing comes ahead of its load: whether it is there in time depends on threads.
        self.writer.fetcher.files = MappedFiles(torch.device("cpu"))
        self.store = AdapterStore(folder / "root", pinned=PinnedFilePool())
        self.numbers: dict[str, int] = {}
        self.adapters: dict[str, dict[str, Tensor]] = {}

    @contextmanager
    def _loading(self, tensors: Callable[[], dict[str, Tensor]]) -> Iterator[Callable[[], bool]]:
        self.manager.instead = tensors
        yield lambda: self.manager.instead is None
        self.manager.instead = None

    def write(
        self, seed: int, rank: int = R, dtype: torch.dtype = BF16, *modules: str, store: AdapterStore | None = None
    ) -> StoredAdapter:
        adapter = flat(seed, rank, dtype, *modules)
        stored = (store or self.store).write(seed, adapter)
        self.numbers[stored.name] = len(self.numbers) + 1
        self.adapters[stored.name] = {key: tensor.clone() for key, tensor in adapter.tensors.items()}
        return stored

    def add(self, stored: StoredAdapter, *, load_inplace: bool = False) -> None:
        """What vLLM does for a load."""
        self.manager.add_adapter(self._request(stored, load_inplace))

    def _request(self, stored: StoredAdapter, load_inplace: bool = False) -> Any:
        return SimpleNamespace(
            lora_int_id=self.numbers[stored.name],
            lora_name=stored.name,
            lora_path=str(stored.path),
            load_inplace=load_inplace,
        )

    def serves(self, stored: StoredAdapter) -> bool:
        """Whether a batch with this adapter is computed with its matrices."""
        self.compute(stored)
        held, expected = self.tables.held_by(self.numbers[stored.name]), self.adapters[stored.name]
        return held.keys() == expected.keys() and all(torch.equal(held[key], expected[key]) for key in held)

    def compute(self, *batch: StoredAdapter) -> None:
        """What vLLM does for the adapters of a batch."""
        self.manager._apply_adapters([self._request(stored) for stored in batch])

    def maps(self, stored: StoredAdapter) -> bool:
        """Whether the worker has got the trainer's file; a file that it is sent late, it reads."""
        assert stored.path
        note = VersionNote.read(stored.path)
        assert note
        with (
            (stored.path / "adapter_model.safetensors").open("rb") as file,
            self.writer.fetcher.files.mapped(file.fileno(), stored.path / note.files) as found,
        ):
            return found is not None

    def is_listed(self, stored: StoredAdapter) -> bool:
        return self.numbers[stored.name] in self.tables._registered_adapters


def flat(seed: int, rank: int = R, dtype: torch.dtype = BF16, *modules: str) -> CanonicalAdapter:
    torch.manual_seed(seed)
    made = []
    for name in modules or ("q", "k", "o"):
        module = lora_module(name=name)
        made.append(replace(module, lora_A=torch.randn(rank, IN), lora_B=torch.randn(OUT, rank)))
    return FlatBuffer().export(made, dtype=dtype)


@pytest.fixture
def served() -> Iterator[Served]:
    with shared_folder() as folder:
        served = Served(folder)
        yield served
        served.store.close()


def test_the_first_of_a_kind_is_loaded_by_the_engine_and_later_ones_are_written(served: Served) -> None:
    first = served.write(1)
    assert served.serves(first)
    loads = served.manager.loads
    # The version, two adapters of digits in two slots, and one to try out what was found; each takes an engine seconds.
    assert loads == 4
    for seed in range(2, 8):
        assert served.serves(served.write(seed))
    assert served.manager.loads == loads
    assert served.writer.counts["written"] == 7


def test_an_adapter_of_too_many_tensors_is_left_to_the_engine(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slot_writer, "MOST_TENSORS", 5)
    for seed in range(1, 4):
        assert served.serves(served.write(seed))
    assert served.writer.counts["written"] == 0
    assert "6 tensors are too many" in caplog.text


def test_a_version_that_lost_its_slot_is_loaded_from_its_own_file(served: Served) -> None:
    versions = [served.write(seed) for seed in range(1, 5)]
    for one in versions:
        served.add(one)
    assert [served.is_listed(one) for one in versions] == [False, False, True, True]
    for one in (*versions, *reversed(versions)):
        assert served.serves(one)


def test_later_versions_can_be_loaded_after_a_version_was_loaded_again_within_a_step(served: Served) -> None:
    """A step is computed in inference mode. Views of the staging memory that were made in it took no copies later."""
    first = served.write(1)
    assert served.serves(first)
    assert all(served.serves(served.write(seed, 4)) for seed in (2, 3))  # of another kind, in both slots
    with torch.inference_mode():
        assert served.serves(first)
    assert all(served.serves(served.write(seed)) for seed in range(4, 8))


def test_another_kind_in_a_slot_leaves_nothing_behind(served: Served) -> None:
    for seed, rank in enumerate([2, 4, 2, 3, 4, 2, 2, 4, 4], 1):
        assert served.serves(served.write(seed, rank))
    assert served.serves(served.write(10, 2, BF16, "o"))
    assert served.serves(served.write(11, 2))


@pytest.mark.parametrize("notes_first", [True, False])
def test_an_adapter_that_a_layer_refuses_leaves_nothing_behind_in_its_slot(
    served: Served, notes_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers before that one have taken it."""
    served.tables.notes_first = notes_first
    assert all(served.serves(served.write(seed, R, BF16, "q", "k")) for seed in range(1, 4))

    def refuse(slot: int, pairs: object) -> None:
        raise RuntimeError("The size of tensor a (8) must match the size of tensor b (9)")

    monkeypatch.setattr(served.tables.modules["unused"], "set_lora", refuse)
    with pytest.raises(RuntimeError, match="must match the size"):
        served.add(served.write(4, R, BF16, "o", "unused"))
    assert all(served.serves(served.write(seed, R, BF16, "q", "k")) for seed in range(5, 8))


def test_adapters_without_a_note_and_versions_take_turns(served: Served) -> None:
    """Someone else's adapters are the engine's own business, and it may evict versions for them."""
    for seed in range(1, 12):
        stored = served.write(seed)
        if seed % 3 == 0:
            assert stored.path
            make_foreign(stored.path, "of another release" if seed % 2 else None)
        assert served.serves(stored)


def damage_tensors(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    with file.open("r+b") as opened:
        opened.seek(-3, 2)
        byte = opened.read(1)
        opened.seek(-3, 2)
        opened.write(bytes([byte[0] ^ 4]))


def swap_names(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    content = file.read_bytes()
    for name, other in ((b"model.q.", b"model.z."), (b"model.k.", b"model.q."), (b"model.z.", b"model.k.")):
        content = content.replace(name, other)
    with file.open("r+b") as opened:
        opened.write(content)


def double_alpha(folder: Path) -> None:
    file = folder / "adapter_config.json"
    file.write_text(file.read_text().replace('"lora_alpha": 2', '"lora_alpha": 4'))


def cut_short(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    shutil.copy(file, folder / "copy")
    file.unlink()
    file.write_bytes((folder / "copy").read_bytes()[:-8])


def no_head(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.unlink()
    file.write_bytes(b"12345")


@pytest.mark.parametrize("damage", [damage_tensors, swap_names, double_alpha, cut_short, no_head])
@pytest.mark.parametrize("before", [0, 3])
def test_a_damaged_version_is_refused_and_the_others_stay(
    served: Served, damage: Callable[[Path], None], before: int
) -> None:
    good = [served.write(seed) for seed in range(1, before + 1)]
    assert all(served.serves(one) for one in good)
    bad = served.write(9)
    assert bad.path
    damage(bad.path)
    with pytest.raises(ValueError, match="is damaged: "):
        served.add(bad)
    assert not served.is_listed(bad)
    assert [served.is_listed(one) for one in good] == [False, True, True][:before]
    assert served.serves(served.write(10))


@pytest.mark.parametrize(
    "shown",
    [
        {CONFIG: None},
        {TENSORS: None},
        {NOTE: None},
        {NOTE: 0},
        {NOTE: 20},
        {NOTE: None, CONFIG: None},
        {NOTE: None, CONFIG: 40},
    ],
    ids=str,
)
@pytest.mark.parametrize("before", [0, 3])
def test_a_version_of_which_a_file_does_not_show_yet_is_refused_in_words_after_which_the_trainer_tries_again(
    served: Served, shown: dict[str, int | None], before: int
) -> None:
    """On a network file system. The sync failed at once, and blamed the base model; or without the note, the version
    was loaded as an adapter of another origin, and not compared by anything.

    Args:
        shown: of some files, how many bytes can be seen; None if the file cannot.
    """
    assert all(served.serves(served.write(seed)) for seed in range(1, before + 1))
    stored = served.write(9)
    folder = stored.path
    assert folder
    for name, count in shown.items():
        (folder / name).rename(folder / f"whole {name}")
        if count is not None:
            (folder / name).write_bytes((folder / f"whole {name}").read_bytes()[:count])
    with pytest.raises(FileNotFoundError, match=f"No adapter found for {folder}"):
        served.add(stored)
    assert not served.is_listed(stored)
    for name in shown:
        (folder / f"whole {name}").rename(folder / name)
    assert served.serves(stored)


@pytest.mark.parametrize("before", [1, 4])
def test_a_slot_that_does_not_hold_what_was_written_is_not_served(
    served: Served, before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(1, before + 1):
        assert served.serves(served.write(seed))
    bad, copy = served.write(9), torch._foreach_copy_

    def damaging(targets: list[Tensor], sources: list[Tensor]) -> None:
        copy(targets, sources)
        if targets[0].untyped_storage().data_ptr() != served.writer.stage.untyped_storage().data_ptr():
            targets[-1][..., -1:] += 1

    monkeypatch.setattr(torch, "_foreach_copy_", damaging)
    with pytest.raises(ValueError, match=r"What the server holds of .* is damaged: "):
        served.add(bad)
    assert not served.is_listed(bad)
    monkeypatch.undo()
    assert served.serves(bad)


def test_what_is_not_only_copied_is_left_to_the_engine(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    served.tables.scaling = 2.0
    stored = served.write(1)
    served.add(stored)
    assert served.writer.counts == {"mapped": 2, "loaded by vLLM": 1}
    assert "loaded in vLLM's own way: " in caplog.text
    [b] = [one for key, one in served.tables.held_by(1).items() if key.endswith("o.lora_B.weight")]
    assert torch.equal(b, 2 * served.adapters[stored.name]["base_model.model.o.lora_B.weight"])


def test_an_adapter_of_which_the_engine_ignores_a_part_is_refused(served: Served) -> None:
    """vLLM loads it without an error, and a trial shows it only if the ignored part has a large effect."""
    partial = served.write(1, R, BF16, "q", "k", "vision")
    with pytest.raises(ValueError, match=r"ignores a part of the adapter: it has no LoRA for vision, .*vision\.lora_A"):
        served.add(partial)
    assert not served.is_listed(partial)
    assert served.serves(served.write(2))


def test_an_adapter_that_the_engine_ignores_as_a_whole_is_left_to_it(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    served.add(served.write(1, R, BF16, "vision"))
    assert "2 of 2 tensors are not in the slots, base_model.model.vision.lora_A.weight" in caplog.text
    assert served.writer.counts["written"] == 0


def test_another_dtype_than_that_of_the_slots_is_left_to_the_engine(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    served.add(served.write(1, R, torch.float32))
    assert "more than one dtype, torch.bfloat16, torch.float32" in caplog.text


def test_an_engine_that_dropped_everything_gets_it_again(served: Served) -> None:
    versions = [served.write(seed) for seed in range(1, 4)]
    assert all(served.serves(one) for one in versions)
    tables = served.tables
    tables._registered_adapters.clear()
    tables._active_adapters.clear()
    tables.lora_index_to_id = [None] * SLOTS
    for layer in tables.modules.values():
        for one in (*layer.lora_a_stacked, *layer.lora_b_stacked):
            one.fill_(7)  # as after a sleep that does not keep the weights
    assert all(served.serves(one) for one in versions)


def test_nothing_is_taken_for_a_written_version_by_mistake(served: Served) -> None:
    """vLLM would take an adapter without tensors for the base model."""
    for seed in range(1, 4):
        assert served.serves(served.write(seed))
    with pytest.raises(RuntimeError, match="are in its slot only"):
        served.tables._registered_adapters[3].get_lora("q")


def test_a_trainer_writes_to_its_files_again_while_a_worker_has_them_mapped(served: Served) -> None:
    seen = set()
    kept: list[StoredAdapter] = []
    for seed in range(1, 12):
        stored = served.write(seed)
        assert stored.path
        seen.add((stored.path / "adapter_model.safetensors").stat().st_ino)
        assert happens(lambda stored=stored: served.maps(stored))  # type: ignore[misc]
        assert served.serves(stored)
        kept.append(stored)
        if len(kept) > 2:
            served.store.delete(kept.pop(0))
    assert len(seen) == 3
    assert served.writer.counts["read"] == 0


def test_a_file_that_is_being_read_is_not_written_to(served: Served) -> None:
    """A worker has it open by its path for as long as it reads."""
    first = served.write(1)
    assert served.serves(first)
    assert first.path
    with (first.path / "adapter_model.safetensors").open("rb") as reading:
        before = reading.read()
        served.store.delete(first)
        served.write(2)
        reading.seek(0)
        assert reading.read() == before


# The first version in colocate mode, which vLLM loads from a file


def load_without_room_in(full: list[str], monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What vLLM has loaded a version from, if nothing can be written to some folders."""
    loaded: list[Path] = []

    def write(folder: Path, *args: Any, **kwargs: Any) -> None:
        if any(folder.is_relative_to(one) for one in full):
            raise AdapterExportError("set lora_sync_dir") from OSError(28, "No space left on device")
        write_adapter(folder, *args, **kwargs)

    def add(folder: Path) -> None:
        assert load_file(folder / "adapter_model.safetensors")
        loaded.append(folder)

    manager = SimpleNamespace(lora_index_to_id=[1], list_adapters=dict)
    monkeypatch.setattr(slots, "write_adapter", write)
    monkeypatch.setattr(engine, "lora_request", lambda name, adapter_id, path: Path(path))
    monkeypatch.setattr(engine, "adapter_manager", lambda llm: manager)
    llm = SimpleNamespace(llm_engine=SimpleNamespace(remove_lora=lambda number: None, add_lora=add))
    slots.AdapterSlots(llm).load_file("v1", 1, canonical())
    return loaded


def test_version_without_room_in_shared_memory_is_loaded_from_another_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the 64 MB that a container has there, colocate mode did not start."""
    [folder] = load_without_room_in(["/dev/shm"], monkeypatch)
    assert folder.is_relative_to(tempfile.gettempdir())
    assert not folder.parent.exists()


def test_version_without_room_anywhere_is_an_error_about_the_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was one about vLLM, which had refused nothing, and lora_sync_dir, which this mode does not use."""
    with pytest.raises(AdapterExportError, match=r"^The .* MB .* No space left on device.*--shm-size.*TMPDIR"):
        load_without_room_in(["/dev/shm", tempfile.gettempdir()], monkeypatch)


# Several workers


@dataclass(frozen=True)
class Threads(Group):
    """Of two workers in threads of this process; a collective that one of them enters alone breaks the barrier."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(2, timeout=20))
    entered: list[Tensor] = field(default_factory=list)

    def add_up(self, numbers: Tensor) -> None:
        self.entered.append(numbers.clone())
        self.barrier.wait()
        total = self.entered[-2] + self.entered[-1]
        self.barrier.wait()  # before either of them enters the next one
        numbers.copy_(total)


@pytest.fixture
def pair() -> Iterator[tuple[Threads, list[Served]]]:
    """Two workers, which see the same versions in separate folders."""
    group = Threads()
    with shared_folder() as folder:
        pair = [Served(folder / str(rank), replace(group, is_last=rank == 1)) for rank in range(2)]
        yield group, pair
        for one in pair:
            one.store.close()


def added(pair: list[Served], versions: list[StoredAdapter], *, load_inplace: bool = False) -> list[Exception | None]:
    """What each of the workers raises as it loads its version."""

    def add(served: Served, stored: StoredAdapter) -> Exception | None:
        try:
            served.add(stored, load_inplace=load_inplace)
        except Exception as error:
            return error
        return None

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(add, pair, versions))


@pytest.mark.parametrize("late", [[0], [1], [0, 1]], ids=str)
@pytest.mark.parametrize("hidden", [NOTE, CONFIG, TENSORS])
def test_a_version_that_some_workers_do_not_see_yet_is_refused_by_the_whole_group(
    pair: tuple[Threads, list[Served]], late: list[int], hidden: str
) -> None:
    """A single one raised, and the others waited for it in a collective until the timeout of gloo.

    For a file other than the note, the error had no words after which the trainer tries again.
    """
    group, workers = pair
    versions = [one.write(1) for one in workers]
    folders = [folder for rank in late if (folder := versions[rank].path)]
    for folder in folders:
        (folder / hidden).rename(folder / "hidden")
    first, last = added(workers, versions)
    assert not group.barrier.broken
    # The last worker alone, see `SlotWriter.add_adapter`.
    assert first is None
    assert last is not None
    assert "No adapter found" in str(last)
    assert not any(one.is_listed(stored) for one, stored in zip(workers, versions, strict=True))
    for folder in folders:
        (folder / "hidden").rename(folder / hidden)
    assert added(workers, versions) == [None, None]
    assert all(one.serves(stored) for one, stored in zip(workers, versions, strict=True))


def test_a_group_evicts_the_same_versions_whatever_the_order_in_which_each_worker_gets_a_batch(
    pair: tuple[Threads, list[Served]],
) -> None:
    """vLLM gives each worker a set, whose order differs between processes.

    One worker loaded a version again that another had evicted, and waited for it in a collective.
    """
    group, workers = pair
    first, second, third = ([one.write(seed) for one in workers] for seed in (1, 2, 3))
    assert [added(workers, versions) for versions in (first, second)] == [[None, None]] * 2
    orders = [(first[0], second[0]), (second[1], first[1])]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda served, batch: served.compute(*batch), workers, orders))
        assert added(workers, third) == [None, None]
        assert list(pool.map(Served.serves, workers, second)) == [True, True]
        assert list(pool.map(Served.serves, workers, first)) == [True, True]
    assert not group.barrier.broken


def without_notes(workers: list[Served], seed: int) -> list[StoredAdapter]:
    """As another client writes them, or as they come by a push."""
    versions = [one.write(seed) for one in workers]
    for stored in versions:
        assert stored.path
        make_foreign(stored.path)
    return versions


def test_an_adapter_without_a_note_costs_a_group_two_collectives(pair: tuple[Threads, list[Served]]) -> None:
    group, workers = pair
    versions = without_notes(workers, 1)
    assert added(workers, versions) == [None, None]
    assert all(one.serves(stored) for one, stored in zip(workers, versions, strict=True))
    assert len(group.entered) == 4


@pytest.mark.parametrize("refused", [[0], [1], [0, 1]], ids=str)
def test_an_adapter_without_a_note_is_loaded_by_all_workers_or_by_none(
    pair: tuple[Threads, list[Served]], refused: list[int]
) -> None:
    """Each worker raised, and vLLM took what was left of their answers for answers to the loads after it."""
    group, workers = pair
    versions = without_notes(workers, 1)
    files = [folder / TENSORS for rank in refused if (folder := versions[rank].path)]
    for file in files:
        file.rename(file.with_name("hidden"))
    first, last = added(workers, versions)
    assert first is None
    assert last is not None
    assert not any(one.is_listed(stored) for one, stored in zip(workers, versions, strict=True))
    for file in files:
        file.with_name("hidden").rename(file)
    assert added(workers, versions) == [None, None]
    assert all(one.serves(stored) for one, stored in zip(workers, versions, strict=True))
    assert not group.barrier.broken


@pytest.mark.parametrize(("refused", "stays"), [([0], False), ([1], False), ([0, 1], True)], ids=str)
def test_what_an_adapter_was_to_replace_stays_if_no_worker_has_replaced_it(
    pair: tuple[Threads, list[Served]], refused: list[int], stays: bool
) -> None:
    """As vLLM does with `load_inplace`."""
    _, workers = pair
    versions = without_notes(workers, 1)
    assert added(workers, versions) == [None, None]
    for rank in refused:
        folder = versions[rank].path
        assert folder
        (folder / TENSORS).unlink()
    first, last = added(workers, versions, load_inplace=True)
    assert first is None
    assert last is not None
    assert [one.is_listed(stored) for one, stored in zip(workers, versions, strict=True)] == [stays, stays]
