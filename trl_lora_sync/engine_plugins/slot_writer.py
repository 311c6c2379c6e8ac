"""Writes the versions of a trainer's adapter into the slots of vLLM's layers, in each worker of a server.

vLLM (0.26 to 0.33) reads an adapter tensor by tensor, and calls two methods of each layer for it; at 8B that takes tens
of milliseconds of Python and launches. Here the first adapter of a kind (the same names, shapes and configuration) is
left to vLLM, with all its checks, and where its elements end up is found out (`slot_layout`). Later ones are
copied as a whole to the device, from the memory of the trainer's GPU if that can be opened and else from the file, and
from there into a slot by one batched copy.

Every version comes with the checksum that the trainer computed on its own device. It is compared with what was read,
before anything is changed, and then with what lies in the slot. With tensor parallelism a slot holds a part of the
adapter; all workers of a group refuse a version if one does. Where anything is not as expected, vLLM loads the version
in its own way, and the reason is logged.

A trainer may have a slot reserved for its next version between two syncs (`SlotWriter.reserve`). The thread that
listens to the trainer then puts the version there while the engine goes on. No request can name it until the server has
the checksums of the trainer and all workers, and they are equal (`reservations`).
"""

import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from trl_lora_sync.engine_plugins import logger, unfinished
from trl_lora_sync.engine_plugins.checksum import hexadecimal, word_sum
from trl_lora_sync.engine_plugins.fetching import DamagedError, Fetcher, Staging
from trl_lora_sync.engine_plugins.repeated import Repeated
from trl_lora_sync.engine_plugins.reservations import Sender
from trl_lora_sync.engine_plugins.safetensors_file import (
    CONFIG_FILE,
    DTYPES,
    MALFORMED,
    TENSORS_FILE,
    Head,
    TensorSpan,
    head_of,
)
from trl_lora_sync.engine_plugins.slot_layout import (
    DIGITS,
    Box,
    LayoutError,
    digit_values,
    find_boxes,
    read_digits,
)
from trl_lora_sync.engine_plugins.version_note import DAMAGED, IGNORES, NOTE_FILE, VersionNote, digest_of, is_noted

# All versions of a run are of one kind, so this bounds what runs leave behind on a server that outlives them.
_KINDS = 8
# One tensor for each expert makes tens of thousands; to find out where they go would take minutes of requests waiting.
MOST_TENSORS = 8192
_RESERVED = -1  # no adapter has this number
_SEED = 0
# Drawing hundreds of millions takes seconds. A prime number, so that no two rows of a matrix are alike.
_RANDOM = 1_000_003
Tensors = dict[str, Tensor]
T = TypeVar("T")


class _DoubtError(Exception):
    """Why a version is left to vLLM."""


class _Kind(NamedTuple):
    """What all versions of a run have in common.

    Attributes:
        config: the file `adapter_config.json`.
        format: other fields of the request on which the result depends.
    """

    head: Head
    config: bytes
    format: str


class _Batch(NamedTuple):
    """Copies between a slot and the staging memory that are made together."""

    targets: list[Tensor]
    sources: list[Tensor]


@dataclass
class _Plan:
    """How versions of one kind are written.

    Attributes:
        groups: boxes whose elements in the file are all different; together they fill a slot.
        contents: by slot, for the staging memory that they were made for.
    """

    groups: list[list[Box]]
    contents: "dict[int, _Content]" = field(default_factory=dict)


class _Content(NamedTuple):
    """What one slot holds of versions of one kind.

    Attributes:
        groups: batches between the staging memory and the slot, see `_Plan`.
        put: copies the staging memory to the slot and back; its result is that of `_read_back`.
    """

    groups: list[list[_Batch]]
    put: Repeated


class _Reserved(NamedTuple):
    """A slot for a version that is not there yet.

    Attributes:
        name: of the version.
        number: by which vLLM will know it.
        worker: what this worker is called in its message to the server.
        reservation: for what the message is, see `reservations`.
        slot, content: where it goes.
        freed: after what the engine had under way in the slot; None on a CPU.
    """

    name: str
    number: int
    worker: str
    reservation: str
    slot: int
    content: _Content
    freed: Any


def _put(stage: Tensor, groups: list[list[_Batch]]) -> Tensor:
    _write(groups)
    return _read_back(stage, groups)


def _write(groups: list[list[_Batch]]) -> None:
    """Copy the staging memory to a slot."""
    for targets, sources in chain(*groups):
        torch._foreach_copy_(targets, sources)


def _read_back(stage: Tensor, groups: list[list[_Batch]]) -> Tensor:
    """Copy a slot to the staging memory, and return the checksum of that for each group, see `word_sum`.

    What the slot does not hold, as other workers do, stays what was read.
    """
    sums = []
    for group in groups:
        for targets, sources in group:
            torch._foreach_copy_(sources, targets)
        sums.append(word_sum(stage))
    return torch.stack(sums)


class SlotWriter:
    """Takes the place of `add_adapter` in one worker.

    Args:
        manager: vLLM's `LRUCacheWorkerLoRAManager`.
        loading: makes vLLM read given tensors instead of the file, for as long as the block lasts.
        group: the workers among which each adapter is divided, all of the engine; see `group_of`.

    Raises:
        AttributeError, TypeError: this version of vLLM keeps its adapters in another way.
    """

    def __init__(self, manager: Any, loading: Callable[[Callable[[], Tensors]], Any], group: "Group") -> None:
        self._manager = manager
        self._tables: Any = manager._adapter_manager
        self._loading = loading
        self._usual_add = manager.add_adapter
        self._usual_activate = self._tables.activate_adapter
        # Checked here so that an unknown version is found out before anything is changed.
        self._index: list[int | None] = self._tables.lora_index_to_id  # the list itself, which vLLM changes
        for table in (self._tables._active_adapters, self._tables._registered_adapters):
            table.remove_oldest, table.pop, table.touch  # noqa: B018
        self._tables.remove_adapter, self._tables.remove_oldest_adapter, manager._load_adapter  # noqa: B018
        self._parts = slot_parts(self._tables.modules.values(), len(self._index))
        self._device = self._parts[0].device
        self.fetcher = Fetcher(self._device)
        self.fetcher.put_ahead, self.fetcher.done_ahead = self._put_ahead, self._answer
        self._server = Sender(Path())
        self._reserved: _Reserved | None = None
        self._plans: OrderedDict[_Kind, _Plan | None] = OrderedDict()
        self._staging = Staging(0, torch.device("cpu"))
        self._staged: _Kind | None = None
        # Slots that hold an adapter of a kind and nothing else, so that another one of that kind may go over it.
        self._primed: dict[int, _Kind] = {}
        # Adapters that are in a slot and not in host memory, from which vLLM could activate them a second time.
        self._written: set[int] = set()
        self.counts, self.seconds = self.fetcher.counts, self.fetcher.seconds
        self._group = group
        # Whether a batch needs the adapters. Otherwise a request to load has brought one; see `add_adapter`.
        self._is_in_step = False
        # Replaced last, so that an error above leaves vLLM's own methods in place.
        self._usual_apply = manager._apply_adapters
        manager._apply_adapters = self._apply
        manager.add_adapter = self.add_adapter
        self._tables.activate_adapter = self._activate

    @property
    def stage(self) -> Tensor:
        """The staging memory."""
        return self._staging.data

    def add_adapter(self, request: Any) -> bool:
        """See vLLM's own; called for each adapter of a batch at each step as well."""
        # First, because a version that has lost its slot may not count as registered below.
        self._notice_removals()
        number = request.lora_int_id
        is_there = number in self._tables._registered_adapters
        if is_there and not request.load_inplace:
            return bool(self._usual_add(request))
        note, is_ours = _note_of(Path(request.lora_path))
        # Counted first: a network folder may show a version late on some hosts, and a worker that fails before the
        # collectives of `_load` would leave the others waiting there.
        counts = torch.tensor([int(is_ours), int(note is None), 1])
        self._group.add_up(counts)
        ours, missing, workers = counts.tolist()
        if not ours:
            # A step fails on all workers in any case, so there it is left to vLLM.
            return bool(self._usual_add(request)) if self._is_in_step else self._add_of_others(request, is_there)
        try:
            if note is None or missing:
                # With vLLM's words for a folder that does not show, after which the trainer tries again for a while.
                raise FileNotFoundError(
                    f"No adapter found for {request.lora_path} by {missing} of {workers} workers. They have to see and "
                    f"read the folder of the trainer, with {CONFIG_FILE} and {NOTE_FILE} in it. Nothing was loaded."
                )
            self._load(request, note)
        except Exception:
            self._remove(number)
            if self._may_raise():
                raise
            return False
        return True

    def _add_of_others(self, request: Any, is_there: bool) -> bool:
        """Have vLLM load an adapter of another origin, on all workers of the group or on none."""
        loaded: list[bool] = []
        try:
            self._together(lambda: loaded.append(bool(self._usual_add(request))))
        except Exception:
            # vLLM keeps what `load_inplace` was to replace if it cannot read the new one (lora/worker_manager.py, 0.26
            # to 0.33). That holds here as well, unless some worker has replaced it.
            if not (self._agree(not loaded) and is_there):
                self._remove(request.lora_int_id)
            if self._may_raise():
                raise
            return False
        return loaded[0]

    def _may_raise(self) -> bool:
        """Whether this worker is the one to report what has failed on all of the group.

        vLLM (0.26 to 0.33) collects the answers of workers up to the first error, and takes what is left for answers to
        its next call (`get_response` in v1/executor/multiproc_executor.py). So only the last one raises. In a step each
        of them raises, as vLLM reads the answer of one worker.
        """
        return self._is_in_step or self._group.is_last

    def _apply(self, requests: Any) -> None:
        self._is_in_step = True
        try:
            # vLLM gives a set (0.26 to 0.33), whose order differs between processes, as the hash is that of a name. The
            # workers of a group have to use adapters in one order: by it vLLM evicts, and a version that only some of
            # them must load again would keep these in a collective for ever.
            self._usual_apply(sorted(filter(None, requests), key=lambda request: request.lora_int_id))
        finally:
            self._is_in_step = False

    # Loading

    def _load(self, request: Any, note: VersionNote) -> None:
        path = Path(request.lora_path) / TENSORS_FILE
        # Open until the end, which keeps the trainer from writing to it.
        with self.fetcher.turn, ExitStack() as opened:
            # Its slot is as good as a free one for this version.
            self._give_up_reserved()

            def begin() -> tuple[int, _Kind]:
                try:
                    file = opened.enter_context(path.open("rb", buffering=0)).fileno()
                    return file, self._fetch(file, request, note)
                except FileNotFoundError as error:  # in the words that `add_adapter` has for it
                    raise FileNotFoundError(f"No adapter found for {request.lora_path}: {error}") from error

            file, kind = self._together(begin)
            # All workers have plans for the same kinds, or they would meet in different collectives below.
            if kind not in self._plans:
                self._together(lambda: self._add_usually(file, request))
                self._learn(kind, request)
                # Once more, because finding the plan has put other values into the staging memory.
                self._together(lambda: self._fetch(file, request, note))
            self._plans.move_to_end(kind)
            plan = self._plans[kind]
            if plan is None:
                self._together(lambda: self._add_usually(file, request))
                self.counts["loaded by vLLM"] += 1
            else:
                self._together(lambda: self._put(file, kind, plan, request, note))

    def _together(self, act: Callable[[], T]) -> T:
        """What `act` returns, if no worker of the group fails; each does the same for the same versions in turn.

        Raises:
            Exception: what `act` raised here, or that another worker failed.
        """
        error: Exception | None = None
        try:
            result = act()
        except Exception as caught:  # the others hear of it first
            error = caught
        # What may be there a moment later is counted apart: the trainer gets the error of one worker, which may not be
        # the worker that missed it, and tries again only after such an error.
        counts = torch.tensor([int(error is not None), int(isinstance(error, FileNotFoundError | DamagedError))])
        self._group.add_up(counts)
        failed, unseen = counts.tolist()
        if not failed:
            return result
        if error is None and unseen == failed:
            error = FileNotFoundError("No adapter found that is complete, by another worker of the group; see its log.")
        raise error or RuntimeError("Another worker of the group failed; see its log.")

    def _add_usually(self, file: int, request: Any) -> None:
        # vLLM knows nothing of the lock, and would read a file that is not complete.
        unfinished.wait(file)
        self._usual_add(request)

    def _put(self, file: int, kind: _Kind, plan: _Plan, request: Any, note: VersionNote) -> None:
        """Make the version that was read the content of a slot, and compare it.

        vLLM does it itself in a slot that another kind has had.
        """
        number = request.lora_int_id
        self._remove(number)
        slot = self._free_slot(kind)
        if slot is None:
            self._add_usually(file, request)
            slot = self._index.index(number)
            self._primed[slot] = kind
            self._compare(_read_back(self.stage, self._content(plan, slot).groups).tolist(), slot, request, note)
            self.counts["loaded by vLLM"] += 1
            return
        with self.fetcher.timed("put"):
            sums = self._content(plan, slot).put.run().tolist()
        # After the copy: an error there leaves a free slot, and the next version of this kind goes over all of it.
        self._note_written(number, slot)
        self._compare(sums, slot, request, note)
        self.counts["written"] += 1

    def _free_slot(self, kind: _Kind) -> int | None:
        """A slot that has had this kind only; None if there is none. Makes room for one adapter in any case."""
        # What vLLM does. Its oldest registered adapter need not be in a slot, so that alone may free none.
        if len(self._tables) + 1 > self._tables.capacity:
            self._tables.remove_oldest_adapter()
        if None not in self._index:
            self._tables._active_adapters.remove_oldest()
        self._notice_removals()
        free = [slot for slot, content in enumerate(self._index) if content is None]
        return next((slot for slot in free if self._primed.get(slot) == kind), None)

    def _note_written(self, number: int, slot: int) -> None:
        self._tables._registered_adapters[number] = _Written(number)
        self._tables._active_adapters[number] = None
        self._index[slot] = number
        # The layout of the slots has changed while the batch may be the same as before.
        self._tables._last_mapping = None
        self._written.add(number)

    def _compare(self, sums: list[int], slot: int, request: Any, note: VersionNote) -> None:
        """Compare what was read back from a slot with what the trainer sent."""
        for found in map(hexadecimal, sums):
            if found != note.checksum:
                # What else is wrong with the slot is not known, so vLLM fills it the next time.
                self._primed.pop(slot, None)
                raise DamagedError(
                    f"What the server holds of {request.lora_name!r} {DAMAGED}the checksum is {found}, and the "
                    f"trainer sent {note.checksum}. The version was removed."
                )

    def _content(self, plan: _Plan, slot: int) -> "_Content":
        if slot not in plan.contents:
            # As for `Staging`: of memory that is viewed in another dtype, a view that is made within a step of vLLM
            # could not be written to outside of it.
            with torch.inference_mode(False):
                parts = [part[slot] for part in self._parts]
                flat = self.stage.view(self._parts[0].dtype)
                groups = [
                    _in_batches([(box.in_slot(parts), box.in_file(flat)) for box in group]) for group in plan.groups
                ]
            # No method of this object: the two would keep each other, and the memory, until garbage is collected.
            plan.contents[slot] = _Content(groups, Repeated([self.stage, *parts], partial(_put, self.stage, groups)))
        return plan.contents[slot]

    def _fetch(self, file: int, request: Any, note: VersionNote) -> _Kind:
        """Copy the tensors of a file to the device, and compare them with what the trainer sent."""
        folder = Path(request.lora_path)
        try:
            head = head_of(file)
        except MALFORMED as error:
            raise DamagedError(f"The file of {request.lora_name!r} {DAMAGED}{error}. Nothing was loaded.") from error
        kind = _Kind(head, (folder / CONFIG_FILE).read_bytes(), str(getattr(request, "is_3d_lora_weight", None)))
        self._prepare_stage(kind)
        self.fetcher.fetch(request.lora_name, folder, file, head, kind.config, note, self._staging)
        return kind

    def _prepare_stage(self, kind: _Kind) -> None:
        """Have memory on the device for one kind at a time."""
        if kind != self._staged:
            for plan in self._plans.values():
                if plan is not None:
                    # Views would keep the memory that is replaced below.
                    plan.contents.clear()
            if self.stage.numel() != kind.head.size:
                # Freed before its successor is allocated, so that there need not be room for both.
                self.fetcher.fetch_ahead_into(None)
                self._staged = None  # also if there is no room for the next one
                self._staging = Staging(0, torch.device("cpu"))
                self._staging = Staging(kind.head.size, self._device)
                self.fetcher.fetch_ahead_into(self._staging)
            self._staged = kind

    # Ahead of its load

    def reserve(
        self, name: str, number: int, head: str, form: str, listed: int, server_socket: Path, reservation: str
    ) -> str:
        """Keep a slot for a version that is still to come, and let the thread that listens to its trainer fill it.

        No request may name the number before all workers have sent the checksum of the version.

        Args:
            number: by which vLLM will know it.
            head: the digest of its header and configuration, which must be that of the version before.
            form: as `_Kind.format`.
            listed: how many adapters the server lists, each of which needs a slot.
            server_socket, reservation: where and for what to send the checksum, see `reservations`.

        Returns:
            What this worker is called there; empty if there is no such slot here or in another worker.
        """
        with self.fetcher.turn:
            self._give_up_reserved()
            kind = self._staged
            plan = None if kind is None else self._plans.get(kind)
            is_known = (
                kind is not None
                and plan is not None
                and (digest_of(kind.head.header, kind.config), kind.format) == (head, form)
                and listed < len(self._index)
            )
            if not self._agree(is_known):
                return ""
            assert kind is not None
            assert plan is not None
            slot = self._together(lambda: self._free_slot(kind))
            if not self._agree(slot is not None):
                return ""
            assert slot is not None
            content = self._content(plan, slot)
            # Recorded here, in the engine's thread. That puts an older version there, which no request can name.
            content.put.run()
            self._note_written(number, slot)
            freed = None
            if self._device.type == "cuda":
                freed = torch.cuda.Event()  # type: ignore[no-untyped-call]
                freed.record(torch.cuda.current_stream(self._device))
            if server_socket != self._server.path:
                self._server.close()
                self._server = Sender(server_socket)
            self._reserved = _Reserved(name, number, secrets.token_hex(8), reservation, slot, content, freed)
            return self._reserved.worker

    def _give_up_reserved(self) -> None:
        if self._reserved is not None:
            self._remove(self._reserved.number)
            self._answer(self._reserved.name, "")

    def _put_ahead(self, name: str) -> str | None:
        """See `Fetcher.put_ahead`; in another thread than all else, in turn."""
        reserved = self._reserved
        if reserved is None or reserved.name != name:
            return None
        # Other adapters may have needed its slot meanwhile. In turn, none can take it from here on, see `_activate`.
        if self._tables.lora_index_to_id[reserved.slot] != reserved.number:
            return None
        if reserved.freed is not None:
            torch.cuda.current_stream(self._device).wait_event(reserved.freed)
        sums = {*map(hexadecimal, reserved.content.put.run().tolist())}
        self.counts["written"] += 1
        self.counts["reserved"] += 1
        # With more than one, a copy has failed, and the trainer has this version loaded into another slot.
        return sums.pop() if len(sums) == 1 else ""

    def _answer(self, name: str, held: str) -> None:
        """Send the server the checksum of what lies in the slot, or nothing; in turn, also by that other thread."""
        reserved = self._reserved
        if reserved is not None and reserved.name == name:
            self._reserved = None
            self._server.send([reserved.reservation, reserved.worker, held])

    # What vLLM does meanwhile

    def _activate(self, number: int, *rest: Any, **options: Any) -> Any:
        """vLLM's own, which resets a slot before it puts anything there."""
        was_active = number in self._tables._active_adapters
        try:
            with nullcontext() if was_active else self.fetcher.turn:
                result = self._usual_activate(number, *rest, **options)
        except Exception:
            # Some layers may have taken it, and in which slot is not known any more.
            self._primed.clear()
            raise
        if not was_active and number in self._tables.lora_index_to_id:
            self._primed.pop(self._tables.lora_index_to_id.index(number), None)
        return result

    def _notice_removals(self) -> None:
        """Remove from vLLM's tables what was written to a slot and has lost it: its tensors are not in host memory.

        A request for it then loads it again, from its own file.
        """
        # `remove_all_adapters` makes a new list (vllm/lora/model_manager.py, 0.26 and 0.31).
        if self._index is not self._tables.lora_index_to_id:  # vLLM has dropped everything
            self._index = self._tables.lora_index_to_id
            self._primed.clear()
        for number in [one for one in self._written if one not in self._tables._active_adapters]:
            self._remove(number)

    def _remove(self, number: int) -> None:
        self._tables.remove_adapter(number)
        self._written.discard(number)

    def _agree(self, is_fine: bool) -> bool:
        """Whether all workers of the group are fine; each of them is called for the same versions in the same order."""
        failed = torch.tensor([int(not is_fine)])
        self._group.add_up(failed)
        return not bool(failed)

    # Learning a kind

    def _learn(self, kind: _Kind, request: Any) -> None:
        """Find out where the elements of an adapter go that vLLM has accepted; it is not loaded any more afterwards."""
        started = time.perf_counter()
        found: _Plan | None = None
        spans: dict[str, TensorSpan] = {}
        reason = ""
        try:
            spans = kind.head.spans()
            found = self._find_plan(kind, request, spans)
        except Exception as error:  # whatever other layers and other versions of vLLM raise
            reason = _reason(error)
        try:
            # Taken together with the other workers of the group, whatever happened here.
            if not self._agree(found is not None):
                raise _DoubtError("another worker of the group cannot write them")
            assert found is not None
            self._check_complete(found, spans)
        except _DoubtError as doubt:
            found, reason = None, reason or str(doubt)
        finally:
            self._remove(request.lora_int_id)
        if found is None:
            logger.warning("Adapters like %s are loaded in vLLM's own way: %s.", request.lora_name, reason)
        else:
            logger.info(
                "Adapters like %s are written into their slots from now on, in %d copies at once. Finding out took "
                "%.1f s.", request.lora_name, sum(map(len, found.groups)), time.perf_counter() - started,
            )  # fmt: skip
        # Also None: to find out again that there is no plan would take as long at every sync.
        self._plans[kind] = found
        while len(self._plans) > _KINDS:
            self._plans.popitem(last=False)

    def _find_plan(self, kind: _Kind, request: Any, spans: dict[str, TensorSpan]) -> _Plan:
        if len(spans) > MOST_TENSORS:
            raise _DoubtError(f"{len(spans)} tensors are too many to find out where each of them goes")
        dtype = self._parts[0].dtype
        dtypes = {DTYPES.get(span.dtype) for span in spans.values()} | {part.dtype for part in self._parts}
        # vLLM would cast the values, and a slot would not have the bytes that the checksum is of.
        if dtypes != {dtype}:
            raise _DoubtError(f"file and slots have more than one dtype, {', '.join(sorted(map(str, dtypes)))}")
        count = kind.head.size // dtype.itemsize
        # Frees the slot of the adapter itself, so that there is at least one.
        self._remove(request.lora_int_id)
        # Each load of a large adapter takes vLLM seconds, and one is needed in each of these, since layers of experts
        # note which slots are in use (`adapter_enabled` in lora/layers/fused_moe.py, 0.31).
        free = [slot for slot, content in enumerate(self._index) if content is None]
        digits: list[list[Tensor]] = [[] for _ in self._parts]
        for digit in range(DIGITS):
            slot = free[digit % len(free)]
            self._load_values(request, spans, digit_values(count, digit, dtype), slot)
            for found, part in zip(digits, self._parts, strict=True):
                found.append(read_digits(part[slot]))
        # Part by part: this takes several numbers of eight bytes on the device for each element of a slot.
        boxes = [
            box
            for number, (part, found) in enumerate(zip(self._parts, digits, strict=True))
            for box in find_boxes(number, [one.to(self._device) for one in found], part[0].stride(), count)
        ]
        del digits
        plan = _Plan(_in_groups(boxes, count, self._device))
        self._smoke_test(plan, request, spans, count, free[0])
        for slot in free[DIGITS:]:
            self._load_values(request, spans, torch.zeros(count, dtype=dtype), slot)
        self._remove(request.lora_int_id)
        # The last thing that vLLM has loaded into each of them was of this kind: digits, random values or zeros.
        self._primed.update(dict.fromkeys(free, kind))
        return plan

    def _check_complete(self, plan: _Plan, spans: dict[str, TensorSpan]) -> None:
        """Make sure that each element of the file is in a slot of some worker of the group.

        Raises:
            ValueError: vLLM serves a part of the tensors and ignores the others.
            _DoubtError: none is in a slot, or not all of one.
        """
        size = self._parts[0].element_size()
        held = torch.zeros(self.stage.numel() // size, dtype=torch.bool, device=self._device)
        for group in plan.groups:
            for box in group:
                box.in_file(held).fill_(True)
        placed = torch.stack([held[one.start // size : one.end // size].sum() for one in spans.values()]).cpu()
        # As counts, which may exceed what is needed: some workers have the same elements.
        self._group.add_up(placed)
        has = dict(zip(spans, placed.tolist(), strict=True))
        ignored = [name for name in spans if not has[name]]
        # Of a group of modules that vLLM ignores as a whole, the trainer finds out by a trial, and has words for it.
        if 0 < len(ignored) < len(spans):
            # PEFT's name for one of two parameters of the experts has this part besides.
            modules = sorted({name.replace(".base_layer", "").split(".")[-3] for name in ignored})
            raise ValueError(
                f"This server {IGNORES}it has no LoRA for {', '.join(modules)}, {ignored[0]} for one. If it was "
                "started with --lora-target-modules, these have to be among them. Nothing was loaded."
            )
        missing = [name for name, one in spans.items() if has[name] < (one.end - one.start) // size]
        if missing:
            raise _DoubtError(f"{len(missing)} of {len(spans)} tensors are not in the slots, {missing[0]} for one")

    def _smoke_test(self, plan: _Plan, request: Any, spans: dict[str, TensorSpan], count: int, slot: int) -> None:
        """Compare what is written here with what vLLM loads, for values of every kind."""
        values = _random_values(count, self._parts[0].dtype)
        # A clone: vLLM scales lora_B in place if the scaling is not 1 (`optimize` in lora/lora_weights.py, 0.31).
        self._load_values(request, spans, values.clone(), slot)
        loaded = [part[slot].cpu() for part in self._parts]
        self.stage.copy_(values.view(torch.uint8))
        # Nothing of vLLM's load may stay, or an element that the plan leaves out would look right.
        torch._foreach_zero_([part[slot] for part in self._parts])
        _write(self._content(plan, slot).groups)
        for ours, theirs in zip(self._parts, loaded, strict=True):
            if not torch.equal(ours[slot].cpu().view(torch.uint8), theirs.view(torch.uint8)):
                raise _DoubtError("a slot then holds other values than vLLM puts there")

    def _load_values(self, request: Any, spans: dict[str, TensorSpan], values: Tensor, slot: int) -> None:
        """Have vLLM load an adapter of these values into a free slot, under the number of `request`."""
        data = values.view(torch.uint8)
        with self._loading(lambda: {name: span.view_in(data) for name, span in spans.items()}) as was_used:
            model = self._manager._load_adapter(request)
            is_used = was_used()
        if not is_used:
            raise _DoubtError("this version of vLLM reads adapters in another way")
        self._remove(request.lora_int_id)
        others = [one for one, content in enumerate(self._index) if content is None and one != slot]
        for other in others:  # vLLM takes the first free slot (lora/model_manager.py, 0.31), so these look taken
            self._index[other] = _RESERVED
        try:
            self._tables.add_adapter(model)
            self._tables.activate_adapter(request.lora_int_id)
        finally:
            for other in others:
                self._index[other] = None
        if self._index.index(request.lora_int_id) != slot:
            raise _DoubtError("this version of vLLM chooses the slot of an adapter in another way")


def _note_of(folder: Path) -> tuple[VersionNote | None, bool]:
    """The note of an adapter, and whether it must have one, as adapters of another origin need not."""
    note = VersionNote.read(folder)
    try:
        return note, note is not None or is_noted(json.loads((folder / CONFIG_FILE).read_bytes()))
    except (OSError, *MALFORMED):
        # It may show a moment later, when vLLM reads it. Paths of a trainer are absolute; others may be names on a hub.
        return note, folder.is_absolute()


class _Written:
    """What vLLM notes as the model of an adapter that is in a slot and nowhere else."""

    def __init__(self, number: int) -> None:
        self.id = number

    def __getattr__(self, name: str) -> Any:
        # vLLM would take an adapter without tensors for the base model.
        raise RuntimeError(
            f"The tensors of adapter {self.id} are in its slot only, and vLLM wants to read {name!r} from host memory."
        )


def slot_parts(layers: Any, slots: int) -> list[Tensor]:
    """The tensors that layers keep for their slots, first dimension: slots.

    Layers have views of them as well, which begin with other dimensions or do not have all of the memory.
    """
    found: dict[int, Tensor] = {}
    for layer in layers:
        for name, value in vars(layer).items():
            if "lora_" in name and "_stacked" in name:
                for one in (value,) if isinstance(value, Tensor) else value:
                    is_whole = one.untyped_storage().nbytes() == one.numel() * one.element_size()
                    if one.dim() > 1 and one.shape[0] == slots and is_whole and one.is_contiguous():
                        found.setdefault(one.data_ptr(), one)
    return list(found.values())


def _in_batches(pairs: list[tuple[Tensor, Tensor]]) -> list[_Batch]:
    """One batch that torch copies in one launch, and one of matrices that are not dense.

    Source: `can_use_fast_route` in aten/src/ATen/native/ForeachUtils.h (2.11): one pair of other strides makes it copy
    all of a list one by one.
    """
    batches = []
    for is_alike in (True, False):
        chosen = [(a, b) for a, b in pairs if (a.stride() == b.stride() and a.is_contiguous()) is is_alike]
        if chosen:
            batches.append(_Batch([a for a, _ in chosen], [b for _, b in chosen]))
    return batches


def _in_groups(boxes: list[Box], count: int, device: torch.device) -> list[list[Box]]:
    """Boxes that have elements of the file in common are put into different groups."""
    groups: list[list[Box]] = []
    left = boxes
    while left:
        group: list[Box] = []
        again: list[Box] = []
        taken = torch.zeros(count, dtype=torch.bool, device=device)
        for box in left:
            view = box.in_file(taken)
            if bool(view.any()):
                again.append(box)
            else:
                view.fill_(True)
                group.append(box)
        groups.append(group)
        left = again
    return groups


def _reason(error: Exception) -> str:
    is_ours = isinstance(error, _DoubtError | LayoutError)
    return str(error) if is_ours else f"{type(error).__name__}: {error}"


def _random_values(count: int, dtype: torch.dtype) -> Tensor:
    # A generator for this alone: vLLM samples from the global one (v1/sample/ops/topk_topp_sampler.py, 0.31).
    some = torch.randn(min(count, _RANDOM), generator=torch.Generator().manual_seed(_SEED)).to(dtype)
    return some.repeat(-(-count // len(some)))[:count]


@dataclass(frozen=True)
class Group:
    """The workers among which each adapter is divided.

    Attributes:
        group: for collectives on the host; None for a single worker.
        is_last: whether this worker is the last one.
    """

    group: Any = None
    is_last: bool = True

    def add_up(self, numbers: Tensor) -> None:
        """**Collective.** Replace numbers on the host by their sum over all workers."""
        if self.group is not None:
            torch.distributed.all_reduce(numbers, group=self.group)


def group_of(parallel_config: Any) -> Group:
    """The group of this worker.

    Raises:
        RuntimeError: adapters are divided in other ways than by tensor parallelism.
    """
    if parallel_config.world_size == 1:
        return Group()
    # Here, because tests import this module without vLLM.
    from vllm.distributed import get_tp_group

    found: Any = get_tp_group()
    if found.world_size != parallel_config.world_size:
        raise RuntimeError(
            f"{parallel_config.world_size} workers are not divided by tensor parallelism alone, which is all that is "
            "known here"
        )
    return Group(found.cpu_group, found.rank_in_group == found.world_size - 1)
