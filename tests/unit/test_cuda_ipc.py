"""Workers read the newest version from the memory of the trainer's GPU; by a stand-in, and on a GPU by CUDA itself."""

import concurrent.futures
import errno
import fcntl
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

import pytest
import torch
from contract.served import SMALL, soon
from support.adapters import make_foreign
from support.gpu_stand_in import StandInGPU, StandInProcess
from support.shared_memory import shared_folder
from support.waiting import happens
from torch import Tensor

from trl_lora_sync.adapter import pinned_files
from trl_lora_sync.adapter.canonical import CanonicalAdapter
from trl_lora_sync.adapter.flat import FlatBuffer
from trl_lora_sync.adapter.pinned_files import PinnedFilePool
from trl_lora_sync.adapter.store import AdapterStore, StoredAdapter
from trl_lora_sync.engine_plugins import fused_weights, shared_files, unfinished
from trl_lora_sync.engine_plugins.checksum import checksum
from trl_lora_sync.engine_plugins.cuda_ipc import CUDADriver, IPCError, Offer, OpenedMemory, driver_for
from trl_lora_sync.engine_plugins.fetching import Fetcher, Staging
from trl_lora_sync.engine_plugins.fused_file import AdapterFileError, read_head
from trl_lora_sync.engine_plugins.fused_weights import FusedAdapter, Reader
from trl_lora_sync.engine_plugins.reservations import ReservationClient, ReservationServer, Sender
from trl_lora_sync.engine_plugins.safetensors_file import head_of
from trl_lora_sync.engine_plugins.shared_files import Fetch, Filled, MappedFiles, SharedFiles
from trl_lora_sync.engine_plugins.version_note import VersionNote
from trl_lora_sync.engines.base import Deadline
from trl_lora_sync.runtime import Blocking, run, watch
from trl_lora_sync.servers.transports import DiskTransport
from trl_lora_sync.testing import FakeSGLang
from unit.test_fleet import handle_of
from unit.test_shared_files import unlocked
from unit.test_slot_writer import BF16, SLOTS, Served, damage_tensors, flat
from unit.tiny import lora_module

CPU = torch.device("cpu")
FILE = "adapter_model.safetensors"


class OnOneHost(Served):
    """A worker and a trainer whose GPU it sees."""

    def __init__(self, folder: Path, visible: str | None = None) -> None:
        super().__init__(folder)
        self.gpu = StandInGPU()
        self.trainer = StandInProcess(self.gpu)
        self.worker = StandInProcess(self.gpu) if visible is None else StandInProcess(self.gpu, visible)
        self.store = AdapterStore(folder / "root", pinned=PinnedFilePool(driver_for=self.trainer, shares_gpu=True))
        self.writer.fetcher.files = MappedFiles(CPU, self.worker)

    def publish(self, seed: int, rank: int = 2) -> StoredAdapter:
        """As a run does: the file is completed while the worker loads."""
        stored = self.write(seed, rank)
        finishing = threading.Thread(target=self.store.finish)
        finishing.start()
        self.add(stored)
        finishing.join()
        return stored


@pytest.fixture
def served() -> Iterator[OnOneHost]:
    with shared_folder() as folder:
        served = OnOneHost(folder)
        yield served
        served.store.close()
        assert not served.gpu.owners
        assert not served.gpu.opened


@pytest.fixture
def apart() -> Iterator[OnOneHost]:
    """The worker does not see the trainer's GPU."""
    with shared_folder() as folder:
        apart = OnOneHost(folder, visible="GPU-other")
        yield apart
        apart.store.close()


def note_of(stored: StoredAdapter) -> tuple[Path, VersionNote]:
    """The folder of a version, and its note."""
    assert stored.path
    note = VersionNote.read(stored.path)
    assert note
    return stored.path, note


def socket_of(stored: StoredAdapter) -> Path:
    folder, note = note_of(stored)
    return folder / note.files


def is_complete(stored: StoredAdapter) -> bool:
    assert stored.path
    with (stored.path / FILE).open("rb") as file:
        try:
            unfinished.wait(file.fileno(), patience_s=0)
        except TimeoutError:
            return False
    return True


def test_versions_come_from_the_gpu_and_their_files_follow(served: OnOneHost) -> None:
    for seed in range(1, 6):
        stored = served.publish(seed)
        assert served.serves(stored)
        assert is_complete(stored)
        served.store.check(stored, flat(seed))
    assert served.writer.counts["from GPU"] == 6  # the first one twice, as vLLM loads it before
    assert served.writer.counts["mapped"] == served.writer.counts["read"] == 0


def test_a_load_of_a_known_kind_needs_no_file(served: OnOneHost) -> None:
    for seed in range(1, 4):
        served.publish(seed)
    stored = served.write(4)
    assert stored.is_unfinished
    assert not is_complete(stored)
    assert served.serves(stored)
    assert not is_complete(stored)
    served.store.finish()
    assert is_complete(stored)


def test_a_version_that_is_withdrawn_at_once_leaves_its_file_complete(served: OnOneHost) -> None:
    stored = served.write(1)
    served.store.delete(stored)
    pool = served.store.pinned
    assert pool is not None
    assert [pinned.is_unfinished for pinned in pool.free] == [False]
    assert served.serves(served.publish(2))


def test_a_version_that_is_needed_again_comes_from_its_own_file(served: OnOneHost) -> None:
    versions = [served.publish(seed) for seed in range(1, 5)]
    assert served.writer.counts["mapped"] == 0
    assert all(served.serves(one) for one in versions)
    assert served.writer.counts["mapped"] > 0


def test_a_worker_that_does_not_see_the_gpu_says_so_once_and_waits_for_the_file(
    apart: OnOneHost, caplog: pytest.LogCaptureFixture
) -> None:
    stored = apart.write(1)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(apart.add, stored)
        assert happens(lambda: "is not visible here" in caplog.text)
        assert not loading.done()
        assert not is_complete(stored)
        apart.store.finish()
        loading.result(20)
    assert apart.serves(stored)
    for seed in range(2, 5):
        assert apart.serves(apart.publish(seed))
    assert apart.writer.counts["from GPU"] == 0
    assert caplog.text.count("is not visible here") == 1


def test_a_driver_that_shares_nothing_leaves_the_file(served: OnOneHost, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    served.trainer.refuses_to_share = True
    for seed in (1, 2, 3):
        stored = served.publish(seed)
        assert served.serves(stored)
        served.store.check(stored, flat(seed))
    stored = served.write(4)
    # The copy to the file goes on beside the request to load.
    assert stored.is_unfinished
    assert not is_complete(stored)
    served.store.finish()
    assert is_complete(stored)
    assert served.serves(stored)
    assert served.writer.counts["from GPU"] == 0
    assert not served.gpu.owners
    assert caplog.text.count("cuIpcGetMemHandle: not supported (801)") == 1


def test_what_is_damaged_on_the_gpu_comes_from_the_file(served: OnOneHost) -> None:
    served.publish(1)
    stored = served.write(2)
    served.store.finish()
    # What the worker has not heard of yet, it reads.
    assert happens(lambda: served.maps(stored))
    damage_gpu(served)
    assert served.serves(stored)
    assert served.writer.counts["mapped"] == 1


def damage_gpu(served: OnOneHost) -> None:
    [(_, memory)] = served.gpu.owners.values()
    memory[3] = bytes([memory[3][0] ^ 4])


def test_what_is_damaged_in_both_places_is_refused(served: OnOneHost) -> None:
    served.publish(1)
    stored = served.write(2)
    served.store.finish()
    damage_gpu(served)
    assert stored.path
    damage_tensors(stored.path)
    with pytest.raises(ValueError, match="is damaged: its tensors have the checksum"):
        served.add(stored)
    assert not served.is_listed(stored)


def test_a_larger_adapter_gets_other_memory(served: OnOneHost) -> None:
    older = served.publish(1)
    [first] = served.gpu.owners
    served.publish(2, rank=4)
    [second] = served.gpu.owners
    assert served.gpu.opened == {second: 1}
    started = time.monotonic()
    with served.writer.fetcher.files.opened(1, socket_of(older)) as memory:
        assert memory is None
    assert time.monotonic() - started < shared_files.PATIENCE_S  # no memory of the past is waited for
    assert first != second
    mapped = served.writer.counts["mapped"]
    assert served.serves(served.publish(3))  # a smaller one fits
    assert [*served.gpu.owners] == [second]
    assert served.writer.counts["mapped"] == mapped


def test_a_worker_closes_the_memory_once_the_trainer_is_gone(served: OnOneHost) -> None:
    served.publish(1)
    assert served.gpu.opened
    [connection] = served.store.pinned.shared.workers  # type: ignore[union-attr]
    connection.close()
    assert happens(lambda: not served.gpu.opened)


def test_memory_that_a_worker_does_not_close_is_not_freed(
    served: OnOneHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_files, "PATIENCE_S", 0.2)
    stored = served.publish(1)
    with served.writer.fetcher.files.opened(1, socket_of(stored)) as memory:
        assert memory is not None
        served.store.close()
        assert served.gpu.owners
    assert "are held until this process ends" in caplog.text
    assert happens(lambda: not served.gpu.opened)
    served.gpu.owners.clear()


def test_an_offer_of_another_form_is_no_reason_to_fail(
    served: OnOneHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_files, "PATIENCE_S", 0.2)
    monkeypatch.setattr(Offer, "encode", lambda self: b'[1, 5, "GPU-x", "abcd"]')
    assert served.serves(served.publish(1))
    assert "offers memory of its GPU in another form" in caplog.text


def test_a_file_that_nobody_finishes_is_given_up(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as writer, (tmp_path / "file").open("rb") as reader:
        unfinished.wait(reader.fileno(), patience_s=0)
        unfinished.begin(writer.fileno())
        with pytest.raises(TimeoutError, match="has not finished the file"):
            unfinished.wait(reader.fileno(), patience_s=0.01)
    with (tmp_path / "file").open("rb") as reader:
        unfinished.wait(reader.fileno(), patience_s=0)  # the writer has closed it, as the system does at its exit


def test_a_reader_waits_for_its_part_of_a_file_only(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as writer, (tmp_path / "file").open("rb") as reader:
        assert unfinished.begin(writer.fileno())
        unfinished.end(writer.fileno(), 100)
        unfinished.wait(reader.fileno(), 0, 100, patience_s=0)
        for start, size in [(0, 101), (100, 1), (500, 10), (0, 0)]:
            with pytest.raises(TimeoutError):
                unfinished.wait(reader.fileno(), start, size, patience_s=0)
        unfinished.end(writer.fileno())
        unfinished.wait(reader.fileno(), patience_s=0)


def test_a_worker_copies_each_part_once_the_trainer_has(served: OnOneHost, monkeypatch: pytest.MonkeyPatch) -> None:
    served.trainer.refuses_to_share = True
    served.publish(1)
    size = flat(2).payload_bytes // 4 + 1
    copied = [threading.Event() for _ in range(4)]
    left = iter(copied)

    def begin_copy(target: Tensor, source: Tensor, then: Callable[[], None]) -> Callable[[], object]:
        target.copy_(source)
        return partial(next(left).wait, 20)

    monkeypatch.setattr(unfinished, "PART_BYTES", size)
    monkeypatch.setattr(pinned_files, "begin_copy_to_host", begin_copy)
    stored = served.write(2)
    expected, stage = flat(2).flat.view(torch.uint8), served.writer.stage
    with ThreadPoolExecutor(2) as pool:
        finishing, loading = pool.submit(served.store.finish), pool.submit(served.add, stored)
        for number, one in enumerate(copied):
            has = number * size
            assert happens(lambda has=has: torch.equal(stage[:has], expected[:has]))  # type: ignore[misc]
            assert not torch.equal(stage[has:], expected[has:])
            assert not loading.done()
            one.set()
        finishing.result(20)
        loading.result(20)
    assert served.serves(stored)
    assert served.writer.counts["mapped"] == 3  # the first version twice, as vLLM loads it before


def test_a_trainer_that_ends_within_a_version_leaves_no_worker_waiting(
    served: OnOneHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.trainer.refuses_to_share = True
    served.publish(1)
    ended = threading.Event()
    monkeypatch.setattr(pinned_files, "begin_copy_to_host", lambda *_: partial(ended.wait, 20))
    stored = served.write(2)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(served.add, stored)
        with pytest.raises(concurrent.futures.TimeoutError):
            loading.result(0.2)
        # Its descriptors and mappings, and so its locks, go with the process; here the store stands for that.
        ended.set()
        served.store.close()
        with pytest.raises(ValueError, match="is damaged"):
            loading.result(20)
    assert not served.is_listed(stored)


@pytest.mark.parametrize("reason", [errno.EINVAL, errno.ENOLCK])
def test_without_such_locks_a_file_is_complete_when_it_is_found(
    served: OnOneHost, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    call = fcntl.fcntl

    def refusing(file: int, command: int, argument: bytes | int = 0) -> bytes | int:
        if command in (fcntl.F_OFD_SETLK, fcntl.F_OFD_GETLK):
            raise OSError(reason, os.strerror(reason))
        return call(file, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refusing)
    served.trainer.refuses_to_share = True
    for seed in (1, 2, 3):
        stored = served.write(seed)
        assert not stored.is_unfinished
        served.add(stored)
        assert served.serves(stored)


# Ahead of the load


class CopiesLater:
    """As `begin_copy_to_host`, of copies that are not complete before `all`, except for the first one."""

    def __init__(self) -> None:
        self.all = threading.Event()
        self._is_first = True

    def __call__(self, target: Tensor, source: Tensor, then: Callable[[], None]) -> Callable[[], object]:
        is_first, self._is_first = self._is_first, False

        def copy() -> None:
            if not is_first:
                self.all.wait(20)
            target.copy_(source)
            then()

        # As a GPU does, whether or not the trainer waits for it.
        copying = threading.Thread(target=copy)
        copying.start()
        return copying.join


def copies_in_two_parts(monkeypatch: pytest.MonkeyPatch, *, next_part_s: float) -> tuple[CopiesLater, int]:
    """Have versions copied in two parts, the second one later; returns the copies and the size of a part."""
    copies, part = CopiesLater(), flat(3).payload_bytes // 2
    monkeypatch.setattr(unfinished, "PART_BYTES", part)
    monkeypatch.setattr(pinned_files, "begin_copy_to_host", copies)
    monkeypatch.setattr(shared_files, "NEXT_PART_S", next_part_s)
    return copies, part


class Ahead(OnOneHost):
    """A worker that fetches what its trainer has filled before the engine gets the request."""

    def __init__(self, folder: Path, *, is_by_file: bool) -> None:
        super().__init__(folder)
        self.trainer.refuses_to_share = is_by_file
        self.writer.fetcher.files = MappedFiles(CPU, self.worker, self._fetch_ahead)
        self.damage = 0
        self.publish(1)  # the worker connects, and learns the kind
        self.noted: list[str] = []
        self.server = run(server_in(self.store.directory / ".pinned"))

    def _fetch_ahead(self, filled: Filled, fetch: Fetch) -> None:
        def fetch_damaged(into: Tensor) -> None:
            fetch(into)
            into[5] += self.damage

        self.writer.fetcher.fetch_ahead(filled, fetch_damaged)

    def reserve(self, seed: int, of: StoredAdapter) -> str:
        """As the server does for a trainer, for the version that is written with this seed next."""
        coming = self.store.after(of, seed)
        assert coming is not None
        self.numbers[coming.name] = len(self.numbers) + 1
        reservation, number = f"for {seed}", self.numbers[coming.name]
        worker = self.writer.reserve(coming.name, number, coming.head, "None", 1, self.server.path, reservation)
        assert worker
        run(self._expect(reservation, worker))
        return reservation

    async def _expect(self, reservation: str, worker: str) -> None:
        async def note() -> str:
            self.noted.append(reservation)
            return "noted"

        self.server.expect(reservation, [worker], note)

    def write_reserved(self, seed: int) -> StoredAdapter:
        number = self.numbers[f"{self.store.run_id}-v{seed}"]
        stored = self.write(seed)
        self.numbers[stored.name] = number
        self.store.finish()
        return stored

    def confirm(self, reservation: str, stored: StoredAdapter) -> str | None:
        assert stored.reservations
        assert stored.note
        answer = run(stored.reservations.confirm(reservation, self.server.path.name, stored.note.checksum))
        assert (answer == "noted") is (reservation in self.noted)
        return answer

    def has(self, seed: int, size: int | None = None) -> bool:
        return torch.equal(self.writer.stage[8:size], flat(seed).flat.view(torch.uint8)[8:size])


@pytest.fixture(params=["from the GPU", "by file"])
def ahead(request: pytest.FixtureRequest) -> Iterator[Ahead]:
    with shared_folder() as folder:
        ahead = Ahead(folder, is_by_file=request.param == "by file")
        ahead.writer.counts.clear()
        yield ahead
        ahead.store.close()
        assert not ahead.gpu.owners


async def server_in(folder: Path) -> ReservationServer:
    return ReservationServer(folder)


def test_a_version_is_put_into_its_reserved_slot_without_a_load(ahead: Ahead) -> None:
    last = ahead.publish(2)
    loads = ahead.manager.loads
    for seed in range(3, 8):
        reservation = ahead.reserve(seed, last)
        stored = ahead.write_reserved(seed)
        assert ahead.confirm(reservation, stored) == "noted"
        assert ahead.serves(stored)
        assert ahead.serves(last)
        last = stored
    assert ahead.manager.loads == loads
    assert ahead.writer.counts["reserved"] == 5


def test_a_damaged_version_in_a_reserved_slot_is_not_noted_and_loaded_elsewhere(ahead: Ahead) -> None:
    last = ahead.publish(2)
    reservation = ahead.reserve(3, last)
    ahead.damage = 1
    stored = ahead.write_reserved(3)
    assert ahead.confirm(reservation, stored) == ""
    ahead.numbers[stored.name] = len(ahead.numbers) + 1  # a load gets another number
    ahead.add(stored)
    assert ahead.serves(stored)
    ahead.damage = 0
    reservation = ahead.reserve(4, stored)
    assert ahead.confirm(reservation, ahead.write_reserved(4)) == "noted"


def test_an_adapter_that_needs_the_reserved_slot_gets_it(ahead: Ahead) -> None:
    first, last = ahead.publish(2), ahead.publish(3)
    reservation = ahead.reserve(4, last)
    ahead.compute(first)  # which has lost its slot to the reservation
    assert ahead.serves(last)
    stored = ahead.write_reserved(4)
    assert ahead.confirm(reservation, stored) == ""
    assert ahead.serves(first)
    assert ahead.serves(last)
    # By the number of the reservation, which no request can name before it is noted: from its own file.
    assert ahead.serves(stored)


def test_an_adapter_of_another_origin_that_needs_the_reserved_slot_gets_it(ahead: Ahead) -> None:
    last = ahead.publish(2)
    reservation = ahead.reserve(3, last)
    others = [ahead.write(seed) for seed in (10, 11)]
    ahead.store.finish()
    for other in others:
        assert other.path
        make_foreign(other.path)
        ahead.add(other)
    stored = ahead.write_reserved(3)
    assert ahead.confirm(reservation, stored) == ""
    assert all(ahead.serves(one) for one in (*others, stored, last))


def test_another_trainer_may_reserve_the_slot_and_the_first_one_hears_of_it(ahead: Ahead, tmp_path: Path) -> None:
    last = ahead.publish(2)
    reservation = ahead.reserve(3, last)
    assert last.note
    other = run(server_in(tmp_path))
    assert ahead.writer.reserve("of another trainer", 99, last.note.head, "None", 1, other.path, "another")
    assert ahead.confirm(reservation, ahead.write_reserved(3)) == ""
    run_on_loop(other.close)


def test_a_version_of_another_kind_gets_no_reserved_slot(ahead: Ahead) -> None:
    last = ahead.publish(2)
    coming = ahead.store.after(last, 3)
    assert coming is not None

    def reserves(head: str, form: str, listed: int) -> bool:
        return bool(ahead.writer.reserve(coming.name, 7, head, form, listed, ahead.server.path, "reservation"))

    assert not reserves("another head", "None", 1)
    assert not reserves(coming.head, "True", 1)
    assert not reserves(coming.head, "None", SLOTS)
    assert reserves(coming.head, "None", SLOTS - 1)


def test_all_workers_of_a_server_have_to_hold_a_version(tmp_path: Path) -> None:
    client = ReservationClient(tmp_path, watch)
    server = run(server_in(tmp_path))
    noted: list[str] = []

    async def expect(reservation: str) -> None:
        async def note() -> str:
            noted.append(reservation)
            return reservation

        server.expect(reservation, ["a", "b"], note)

    def confirm(reservation: str) -> str | None:
        return run(client.confirm(reservation, server.path.name, "sum"))

    worker = Sender(server.path)
    for reservation, sums in {
        "1": ("sum", "sum"),
        "2": ("sum", "other"),
        "3": ("", "sum"),
        "4": ("sum", "sum"),
    }.items():
        run(expect(reservation))
        for name, found in zip("ab", sums, strict=True):
            assert worker.send([reservation, name, found])
        assert confirm(reservation) == (reservation if reservation in "14" else "")
    run(expect("5"))
    assert worker.send(["5", "a", "sum"])
    assert worker.send(["4", "b", "sum"])  # which is void
    assert confirm("5") is None
    assert worker.send(["5", "b", "sum"])  # late
    assert confirm("6") is None
    assert confirm("5") is None
    assert noted == ["1", "4"]
    server_name = server.path.name
    run_on_loop(server.close)
    assert run(client.confirm("7", server_name, "sum")) is None
    assert not worker.send(["7", "a", "sum"])
    assert not Sender(tmp_path / "gone").send(["7", "a", "sum"])
    client.close()
    assert [*tmp_path.iterdir()] == []


def run_on_loop(act: Callable[[], None]) -> None:
    async def on_loop() -> None:
        act()

    run(on_loop())


def test_a_server_makes_no_socket_in_a_folder_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(PermissionError, match="belongs to another user"):
        run(server_in(tmp_path))


def test_a_version_is_there_before_the_request_to_load_it(ahead: Ahead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unfinished, "PART_BYTES", flat(3).payload_bytes // 3)
    for seed in (3, 4, 5):
        stored = ahead.write(seed)
        ahead.store.finish()
        assert happens(lambda seed=seed: ahead.has(seed))  # type: ignore[misc]
        ahead.add(stored)
        assert ahead.serves(stored)
    assert ahead.writer.counts == {"ahead": 3, "written": 3}


def test_what_was_fetched_ahead_is_used_only_if_it_is_what_the_trainer_sent(ahead: Ahead) -> None:
    ahead.damage = 1
    stored = ahead.write(3)
    ahead.store.finish()
    assert happens(lambda: ahead.has(3))
    ahead.add(stored)
    assert ahead.serves(stored)
    assert ahead.writer.counts["ahead"] == 0


def test_two_trainers_that_publish_at_the_same_time_both_get_their_versions(ahead: Ahead) -> None:
    pool = PinnedFilePool(driver_for=ahead.trainer, shares_gpu=True)
    other = AdapterStore(ahead.store.root.parent / "other", pinned=pool)
    first = ahead.write(2, store=other)
    other.finish()
    ahead.add(first)
    for seed in (3, 5, 7):
        stored, later = ahead.write(seed), ahead.write(seed + 1, store=other)
        ahead.store.finish()
        other.finish()
        assert happens(lambda seed=seed: ahead.has(seed) or ahead.has(seed + 1))  # type: ignore[misc]
        for one in (stored, later):
            ahead.add(one)
            assert ahead.serves(one)
    other.close()
    assert ahead.writer.counts["written"] == 7


@pytest.mark.parametrize("ahead", ["by file"], indirect=True)  # a GPU's memory is filled before the request is sent
def test_a_load_waits_for_the_parts_that_are_still_to_come(ahead: Ahead, monkeypatch: pytest.MonkeyPatch) -> None:
    copies, part = copies_in_two_parts(monkeypatch, next_part_s=20)
    stored = ahead.write(3)
    with ThreadPoolExecutor(1) as pool:
        # Without `finish`: no thread of the trainer is needed for it.
        assert happens(lambda: ahead.has(3, part))
        loading = pool.submit(ahead.add, stored)
        with pytest.raises(concurrent.futures.TimeoutError):
            loading.result(0.2)
        copies.all.set()
        loading.result(20)
    ahead.store.finish()
    assert ahead.serves(stored)
    assert ahead.writer.counts["ahead"] == 1


@pytest.mark.parametrize("ahead", ["by file"], indirect=True)
def test_a_trainer_that_stops_within_a_version_holds_up_no_other(ahead: Ahead, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker gives up what it fetches ahead, and loads the version from its file once that is complete."""
    copies, part = copies_in_two_parts(monkeypatch, next_part_s=0.5)
    stored = ahead.write(3)
    apart = AdapterStore(ahead.store.root.parent / "apart")
    assert happens(lambda: ahead.has(3, part))
    ahead.add(other := ahead.write(4, store=apart))
    assert ahead.serves(other)
    copies.all.set()
    ahead.store.finish()
    ahead.add(stored)
    assert ahead.serves(stored)
    apart.close()
    assert ahead.writer.counts["ahead"] == 0


def test_a_version_that_comes_before_the_load_of_another_is_not_taken_for_it() -> None:
    """The listener of a second trainer may get its turn before the load of what was fetched ahead."""
    with shared_folder() as folder, ThreadPoolExecutor(3) as pool:
        store = AdapterStore(folder / "root", pinned=PinnedFilePool())
        stored = store.write(1, flat(1))
        for _ in range(30):
            assert torch.equal(loaded_while_another_comes(stored, pool), flat(1).flat.view(torch.uint8))
        store.close()


def copies_from(source: Tensor) -> Fetch:
    def fetch(target: Tensor) -> None:
        target.copy_(source)

    return fetch


def loaded_while_another_comes(stored: StoredAdapter, pool: ThreadPoolExecutor) -> Tensor:
    """What a load of `flat(1)` makes of memory for which `flat(2)` comes once `flat(1)` is there."""
    data, other = (flat(seed).flat.view(torch.uint8) for seed in (1, 2))
    size = len(data)
    folder, note = note_of(stored)
    fetcher, into, is_copied, all_wait = Fetcher(CPU), Staging(size, CPU), threading.Event(), threading.Barrier(3)
    fetcher.files = MappedFiles(CPU)

    def load() -> Tensor:
        all_wait.wait(20)
        with fetcher.turn, (folder / FILE).open("rb", buffering=0) as file:
            config = (folder / "adapter_config.json").read_bytes()
            fetcher.fetch("1", folder, file.fileno(), head_of(file.fileno()), config, note, into)
            return into.data.clone()

    def copy(target: Tensor) -> None:
        target.copy_(data)
        is_copied.set()
        all_wait.wait(20)

    def come() -> None:
        all_wait.wait(20)
        fetcher.fetch_ahead(Filled(size), copies_from(other))

    with fetcher.turn:
        fetcher.fetch_ahead_into(into)
    first = pool.submit(fetcher.fetch_ahead, Filled(size), copy)
    assert is_copied.wait(20)
    loading, coming = pool.submit(load), pool.submit(come)
    for one in (first, coming):
        one.result(20)
    return loading.result(20)


def test_memory_that_was_made_within_a_step_of_the_engine_can_be_filled_outside_of_it() -> None:
    with torch.inference_mode():
        staging = Staging(32, CPU)
    staging.data.copy_(torch.ones(32, dtype=torch.uint8))
    assert staging.checksum() == checksum(torch.ones(32, dtype=torch.uint8))


def reader_that_listens() -> tuple[Reader, threading.Event]:
    """A reader for fused serving, and what is set once it has handled a version that a trainer fills."""
    reader, is_there = Reader(CPU), threading.Event()

    def fetch_ahead(filled: Filled, fetch: Fetch) -> None:
        reader.fetcher.fetch_ahead(filled, fetch)
        is_there.set()

    reader.fetcher.files = MappedFiles(CPU, on_filled=fetch_ahead)
    return reader, is_there


def test_versions_to_be_fused_are_fetched_ahead_and_never_into_memory_that_an_adapter_is_in() -> None:
    reader, is_there = reader_that_listens()
    with shared_folder() as folder:
        store = AdapterStore(folder / "root", pinned=PinnedFilePool())
        kept: list[FusedAdapter] = []
        for seed in range(1, 8):
            is_there.clear()
            stored = store.write(seed, flat(seed))
            store.finish()
            if seed > 1:  # with the first version, the worker connects
                assert is_there.wait(20)
            # What is in the weights, and what would be put back after an error; neither has changed.
            for adapter, of in zip(reversed(kept), (seed - 1, seed - 2), strict=False):
                assert same_bits(adapter, flat(of))
            kept = kept[-1:]
            kept.append(reader.read(stored.name, read_head(str(stored.path))))
            assert same_bits(kept[-1], flat(seed))
            if seed == 5:
                # Of another trainer, without a file that is shared; into what the next version would have come.
                apart = AdapterStore(folder / "apart")
                other = reader.read("other", read_head(str(apart.write(9, flat(9)).path)))
                is_there.clear()
                store.write(50, flat(50))
                store.finish()
                assert is_there.wait(20)
                assert same_bits(other, flat(9))
                apart.close()
        assert reader.fetcher.counts == {"mapped": 2, "ahead": 5, "read": 1}  # 6 follows one of another trainer
        store.close()


def test_what_a_refused_adapter_has_gone_over_is_fetched_again() -> None:
    reader, is_there = reader_that_listens()
    with shared_folder() as folder:
        store, apart = AdapterStore(folder / "root", pinned=PinnedFilePool()), AdapterStore(folder / "apart")
        kept = [reader.read("1", read_head(str(store.write(1, flat(1)).path)))]
        is_there.clear()
        stored = store.write(2, flat(2))
        assert is_there.wait(20)
        # Of another client, without a note, and cut short once its head has been read.
        other, _ = note_of(apart.write(9, flat(9)))
        make_foreign(other)
        head = read_head(str(other))
        os.truncate(other / FILE, (other / FILE).stat().st_size - 64)
        with pytest.raises(AdapterFileError):
            reader.read("9", head)
        kept.append(reader.read("2", read_head(str(stored.path))))
        assert same_bits(kept[-1], flat(2))
        apart.close()
        store.close()


def test_without_room_for_the_next_adapter_versions_are_loaded_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    staged: list[Staging] = []

    def staging(size: int, device: torch.device) -> Staging:
        staged.append(Staging(size, device))
        return staged[-1]

    monkeypatch.setattr(fused_weights, "Staging", staging)
    monkeypatch.setattr(fused_weights, "room_on", lambda device: 0)
    reader = Reader(CPU)
    with shared_folder() as folder:
        store = AdapterStore(folder / "root", pinned=PinnedFilePool())
        kept: list[FusedAdapter] = []
        for seed in range(1, 5):
            kept = kept[-1:]
            kept.append(reader.read(str(seed), read_head(str(store.write(seed, flat(seed)).path))))
            assert same_bits(kept[-1], flat(seed))
        store.close()
    assert len(staged) == 2  # for the one in the weights and the next one


def test_a_worker_that_does_not_listen_is_still_waited_for_before_memory_is_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_files, "PATIENCE_S", 0.1)
    accept: list[Callable[[], None]] = []

    def watch(_: socket.socket, act: Callable[[], None]) -> Callable[[], None]:
        accept.append(act)
        return lambda: None

    shared = SharedFiles(tmp_path, watch, unlocked)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as worker:
        worker.connect(str(tmp_path / shared_files.SOCKET))
        accept[-1]()
        for _ in range(2000):  # more than the kernel keeps for the worker
            shared.note_filled(Filled(1 << 33))
        with (tmp_path / "file").open("w") as file:
            shared.offer(file.fileno())
            shared.withdraw(file.fileno())
        assert not shared.withdraw_memory()
    shared.close()


def same_bits(adapter: FusedAdapter, of: CanonicalAdapter) -> bool:
    found = torch.cat([one.flatten() for pair in adapter.matrices.values() for one in pair])
    expected = torch.cat([one.flatten() for one in of.tensors.values()])
    return torch.equal(found.view(torch.uint8).sort().values, expected.view(torch.uint8).sort().values)


def test_there_is_a_reason_where_there_is_no_gpu() -> None:
    with pytest.raises(IPCError, match="this process computes on cpu, not on a GPU"):
        driver_for(CPU)


def test_a_run_completes_its_files_by_itself() -> None:
    gpu = StandInGPU()
    with shared_folder() as folder:
        pool = PinnedFilePool(driver_for=StandInProcess(gpu), shares_gpu=True)
        transport = Blocking(DiskTransport(AdapterStore(folder / "root", pinned=pool)))
        stored = transport.write(1, flat(1), soon(20))
        assert stored.is_unfinished
        assert happens(lambda: is_complete(stored))
        transport.check(stored, flat(1), soon(20))
        transport.close()
    assert not gpu.owners


@pytest.mark.outside
def test_a_server_that_does_not_wait_for_a_file_is_told_of_it_once_it_is_complete() -> None:
    loads: list[bool] = []

    async def load(stored: StoredAdapter, deadline: Deadline) -> dict[str, str]:
        loads.append(is_complete(stored))
        return {}

    with shared_folder() as folder, FakeSGLang(shapes=SMALL) as fake:
        server = handle_of(fake, folder)
        server.engine.load = load  # type: ignore[method-assign]
        pool = PinnedFilePool(driver_for=StandInProcess(StandInGPU()), shares_gpu=True)
        store = AdapterStore(folder / "root", pinned=pool)
        with ThreadPoolExecutor(1) as thread:
            loading = thread.submit(run, server.load(store.write(1, flat(1)), soon(60)))
            with pytest.raises(concurrent.futures.TimeoutError):
                loading.result(0.3)
            assert not loads
            store.finish()
            loading.result(20)
        store.close()
    assert loads == [True]


# On a GPU

GPU = torch.device("cuda", 0)
COLUMNS = 64 << 10  # 128 MB in bfloat16, far more than what a process takes by itself varies
_ENVIRONMENT = """
import sys
sys.path[:0] = {path!r}
from unit.test_cuda_ipc import *
"""
# Prints the checksum of what it sees of the version in each folder that it reads.
_WORKER = """
device = torch.device("cuda", {index})
stage = torch.empty({size}, dtype=torch.uint8, device=device)
files = MappedFiles(device)
for line in sys.stdin:
    print(seen(files, Path(line.strip()), stage), flush=True)
"""
# Prints the folder of a version, and waits for its end.
_TRAINER = """
store = AdapterStore(Path(sys.argv[1]), pinned=PinnedFilePool(shares_gpu=True))
stored = store.write(1, large(1))
store.finish()
print(stored.path, checksum(large(1).flat), flush=True)
signal.pause()
"""
Case = TypeVar("Case", bound=Callable[..., None])


def on_gpus(count: int) -> Callable[[Case], Case]:
    has_them = torch.cuda.device_count() >= count
    skips = pytest.mark.skipif(not has_them, reason=f"there are fewer than {count} CUDA devices here")
    return lambda case: cast("Case", pytest.mark.gpu(pytest.mark.outside(skips(case))))


def large(seed: int) -> CanonicalAdapter:
    torch.manual_seed(seed)
    matrices = {"lora_A": torch.randn(1024, COLUMNS, device=GPU), "lora_B": torch.randn(8, 1024, device=GPU)}
    return FlatBuffer().export([replace(lora_module(name="q"), **matrices)], dtype=BF16)


def seen(files: MappedFiles, folder: Path, stage: Tensor) -> str:
    """The checksum of a version in the trainer's memory; empty if that is not open."""
    note = VersionNote.read(folder)
    assert note
    with files.opened(int(note.memory), folder / note.files) as memory:
        if memory is None:
            return ""
        memory.copy_to(stage)
    return checksum(stage)


def process_of(source: str, *args: object, **env: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", _ENVIRONMENT.format(path=sys.path) + source, *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | env,
        text=True,
    )


class OtherProcess:
    """A worker of an engine, on another GPU or on the trainer's."""

    def __init__(self, index: int = 0, **env: str) -> None:
        self.process = process_of(_WORKER.format(size=large(0).flat.nbytes, index=index), **env)

    def sees(self, stored: StoredAdapter) -> str:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{stored.path}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, self.end()
        return line.strip()

    def end(self) -> str:
        """What it has logged."""
        _, errors = self.process.communicate(timeout=120)
        return errors


@pytest.fixture
def store() -> Iterator[AdapterStore]:
    with shared_folder() as folder:
        store = AdapterStore(folder / "root", pinned=PinnedFilePool(shares_gpu=True))
        yield store
        store.close()


def free_bytes() -> int:
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(GPU)[0]


def check_versions(store: AdapterStore, worker: OtherProcess) -> None:
    for seed in range(1, 6):
        adapter = large(seed)
        stored = store.write(seed, adapter)
        assert worker.sees(stored) == checksum(adapter.flat)
        store.check(stored, adapter)
        store.delete(stored)
    worker.end()


@on_gpus(1)
def test_another_process_reads_each_version_on_the_same_gpu(store: AdapterStore) -> None:
    check_versions(store, OtherProcess())


@on_gpus(2)
def test_another_process_reads_each_version_on_another_gpu(store: AdapterStore) -> None:
    check_versions(store, OtherProcess(index=1))


@on_gpus(2)
def test_another_process_that_does_not_see_the_gpu_says_so(store: AdapterStore) -> None:
    worker = OtherProcess(CUDA_VISIBLE_DEVICES="1")
    assert worker.sees(store.write(1, large(1))) == ""
    assert "is not visible here; CUDA_VISIBLE_DEVICES" in worker.end()


@on_gpus(1)
def test_a_file_is_fetched_as_the_gpu_fills_it_without_a_thread_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver(_: torch.device) -> CUDADriver:
        raise IPCError("files are to be used")

    stage = torch.empty(large(0).flat.nbytes, dtype=torch.uint8, device=GPU)
    found: queue.Queue[str] = queue.Queue()

    def fetch_ahead(filled: Filled, fetch: Fetch) -> None:
        fetch(stage)
        found.put(checksum(stage))

    monkeypatch.setattr(unfinished, "PART_BYTES", stage.nbytes // 20)
    monkeypatch.setattr(shared_files, "NEXT_PART_S", 20)
    files = MappedFiles(GPU, on_filled=fetch_ahead)
    with shared_folder() as folder:
        store = AdapterStore(folder / "root", pinned=PinnedFilePool(driver_for=no_driver, shares_gpu=True))
        for seed in range(1, 30):
            # Each version is finished before the next one is written.
            stored = store.write(seed, large(seed))
            path, note = note_of(stored)
            if seed == 1:
                store.finish()
            else:
                assert found.get(timeout=20) == note.checksum
            # The worker connects, and learns of the file; the parts of another file are fetched ahead from then on.
            with (path / FILE).open("rb") as file, files.mapped(file.fileno(), path / note.files) as mapped:
                assert mapped is not None
            store.delete(stored)
        store.close()


@on_gpus(1)
@pytest.mark.parametrize("is_killed", [False, True], ids=["that goes on", "that was killed"])
def test_nothing_is_held_after_the_run_beside_a_worker(store: AdapterStore, is_killed: bool) -> None:
    worker, adapter = OtherProcess(), large(1)
    assert worker.sees(store.write(1, adapter)) == checksum(adapter.flat)
    if is_killed:
        worker.process.send_signal(signal.SIGKILL)
        worker.process.wait(60)
    before = free_bytes()
    store.close()
    assert free_bytes() - before > 0.9 * adapter.flat.nbytes
    assert int(torch.ones(8, device=GPU).sum()) == 8
    worker.end()


@on_gpus(1)
@pytest.mark.parametrize("segments", ["expandable_segments:False", "expandable_segments:True"])
def test_a_trainer_that_is_killed_leaves_no_memory_taken(segments: str) -> None:
    stage = torch.empty(large(0).flat.nbytes, dtype=torch.uint8, device=GPU)
    before = free_bytes()
    with shared_folder() as folder:
        trainer = process_of(_TRAINER, folder / "root", PYTORCH_CUDA_ALLOC_CONF=segments)
        try:
            assert trainer.stdout
            path, expected = trainer.stdout.readline().split()
            files = MappedFiles(GPU)
            assert seen(files, Path(path), stage) == expected
            assert before - free_bytes() > stage.nbytes
        finally:
            trainer.send_signal(signal.SIGKILL)
            _, errors = trainer.communicate(timeout=60)
        assert happens(lambda: before - free_bytes() < 0.1 * stage.nbytes), errors
    assert int(torch.ones(8, device=GPU).sum()) == 8


@on_gpus(1)
def test_what_the_driver_refuses_leaves_torch_as_it_was() -> None:
    driver = CUDADriver()
    with pytest.raises(IPCError, match="cuIpcOpenMemHandle_v2: "):
        OpenedMemory(Offer(1, 8, driver.gpu(GPU), "00" * 64), GPU, driver)
    with pytest.raises(IPCError, match=r"cuMemAlloc_v2: out of memory"):
        driver.allocate(GPU, 1 << 50)
    assert int(torch.ones(8, device=GPU).sum()) == 8
    assert driver.gpu(GPU).removeprefix("GPU-") == str(torch.cuda.get_device_properties(GPU).uuid)
