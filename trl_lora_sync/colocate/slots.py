"""Writes adapters straight into the slots of an engine in this process.

vLLM loads the first adapter of a kind (the same names and shapes) from a file, with all its checks. Then the layers
take the same adapter from one buffer, and every copy that they make is recorded. If the slot holds the same
bits as before, the recorded copies are repeated for each adapter that follows. Otherwise vLLM goes on loading files.
"""

import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trl_lora_sync.adapter.canonical import CanonicalAdapter
from trl_lora_sync.adapter.groups import without_numbers
from trl_lora_sync.adapter.store import write_adapter
from trl_lora_sync.addresses import SHARED_MEMORY
from trl_lora_sync.colocate import engine
from trl_lora_sync.colocate.engine import Policy
from trl_lora_sync.colocate.placing import same_bits
from trl_lora_sync.errors import AdapterExportError, AdapterRejectedError, VerificationError

logger = logging.getLogger(__name__)

Layout = tuple[tuple[str, torch.Size], ...]


@dataclass
class _Copies:
    """What is copied for one slot and one layout, from which memory.

    Attributes:
        flat: the memory that is copied from.
        sources: views of that memory.
        targets: views of the slot.
    """

    layout: Layout
    flat: Tensor
    sources: list[Tensor]
    targets: list[Tensor]

    def fits(self, layout: Layout, flat: Tensor) -> bool:
        """Whether they copy an adapter of this layout that lies in this memory."""
        return self.layout == layout and self.flat.data_ptr() == flat.data_ptr()


class AdapterSlots:
    """The adapters in one engine, under the numbers 1 to `engine.SLOTS`.

    Args:
        llm: vLLM's `LLM`.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.copies: dict[int, _Copies] = {}
        self._unfamiliar: set[Layout] = set()
        self.stage: CanonicalAdapter | None = None
        self.contents: dict[int, Any] = {}  # vLLM's own record of what is in a slot, by which a change is noticed

    def load(self, name: str, adapter_id: int, adapter: CanonicalAdapter) -> Policy:
        """Have the engine hold `adapter`, and return what to sample from it with.

        Args:
            name: not used before, as entries of the prefix cache belong to it.
            adapter_id: its slot must not be sampled from meanwhile.

        Raises:
            AdapterRejectedError: vLLM refused it, or ignores a part of it.
            AdapterExportError: as for `_written`.
            VerificationError: the slot does not hold the bits of the adapter.
        """
        layout = adapter.layout
        # Another trial would copy the slot and give the warning at each sync.
        if layout in self._unfamiliar:
            return Policy(name, adapter_id, self.load_file(name, adapter_id, adapter))
        sources = self._sources(adapter)
        copies = self.copies.get(adapter_id)
        if copies is None or not copies.fits(layout, sources.flat) or not self._is_held(adapter_id):
            self.load_file(name, adapter_id, adapter)
            copies = self._learn(adapter_id, layout, sources)
        if copies is not None:
            # Layers without matrices, and ranks above the adapter's, are zero since `_learn` has emptied the slot.
            torch._foreach_copy_(copies.targets, copies.sources)
            self.compare(name, copies)
        # The path is never read, as vLLM finds the number loaded (0.31, lora/worker_manager.py). With the name it is
        # part of the prefix cache's key (0.31, v1/core/kv_cache_utils.py).
        return Policy(name, adapter_id, engine.lora_request(name, adapter_id, f"/{name}"))

    @contextmanager
    def serving(self, policy: Policy | None) -> Iterator[None]:
        """Nothing has to be done: vLLM finds the slot by the number in each request."""
        yield

    def activate(self, policy: Policy) -> None:
        """Nothing has to be done: vLLM keeps both slots."""

    def check(self, policy: Policy) -> None:
        """Make sure that a slot still holds what was written to it.

        Raises:
            VerificationError: vLLM has emptied it or written to it.
        """
        if not self._is_held(policy.adapter_id):
            raise VerificationError(
                "vLLM has replaced the adapter in the slot of the active version, so requests would be sampled from "
                "another policy. Do not load adapters into trainer.vllm_generation.llm. Call "
                "trainer.vllm_generation.sync_weights() on every process to load the policy again."
            )

    def release(self) -> None:
        """Give the staging memory back."""
        self.copies.clear()
        self.stage = None

    def _is_held(self, adapter_id: int) -> bool:
        # vLLM makes another `LoRAModel` at each load, which has no `__eq__`, so a reload under one number is noticed.
        return adapter_id in self.contents and self.contents[adapter_id] == self._record(adapter_id)

    def _record(self, adapter_id: int) -> tuple[int | None, Any]:
        """What vLLM itself has noted of an adapter; another one if it was evicted or loaded again."""
        manager = engine.adapter_manager(self._llm)
        return engine.slot_of(manager, adapter_id), manager.list_adapters().get(adapter_id)

    def load_file(self, name: str, adapter_id: int, adapter: CanonicalAdapter) -> Any:
        """vLLM's own way: from a file, which is deleted once it is loaded."""
        llm_engine = self._llm.llm_engine
        folder = _written(name, adapter)
        request = engine.lora_request(name, adapter_id, str(folder / name))
        try:
            # Its targets are views of the slot that the number has now, and a load takes the first free slot (0.31,
            # lora/model_manager.py `activate_adapter`).
            self.copies.pop(adapter_id, None)
            # vLLM loads nothing under a number that it has (0.31, lora/worker_manager.py `add_adapter`).
            llm_engine.remove_lora(adapter_id)
            llm_engine.add_lora(request)
        except (ValueError, RuntimeError, AssertionError, OSError, KeyError, IndexError) as error:
            raise AdapterRejectedError(f"vLLM refused the adapter: {type(error).__name__}: {error}") from error
        finally:
            # vLLM has copied the tensors, or refused them. A folder that stays is never read, as its name is random.
            shutil.rmtree(folder, ignore_errors=True)
        self.contents[adapter_id] = self._record(adapter_id)
        return request

    def _sources(self, adapter: CanonicalAdapter) -> CanonicalAdapter:
        """The adapter in memory that stays where it is from one sync to the next."""
        # All slots have one dtype and device, so the first tensor stands for all of them.
        slot = next(_parts(engine.adapter_manager(self._llm), 0))
        if (adapter.flat.device, adapter.dtype) == (slot.device, slot.dtype):
            return adapter
        if self.stage is None or self.stage.layout != adapter.layout:
            self.stage = replace(adapter, flat=torch.empty_like(adapter.flat, device=slot.device, dtype=slot.dtype))
        self.stage.flat.copy_(adapter.flat)
        return self.stage

    def _learn(self, adapter_id: int, layout: Layout, sources: CanonicalAdapter) -> _Copies | None:
        """Record how the layers take the adapter that vLLM has just loaded; None if the copies leave other bits.

        The slot is emptied before they are repeated, so whatever a layer takes by other means than a copy is missing.
        """
        manager = engine.adapter_manager(self._llm)
        slot = engine.slot_of(manager, adapter_id)
        assert slot is not None  # vLLM has just loaded it
        loaded: list[Tensor] = []
        try:
            loaded = [part.clone() for part in _parts(manager, slot)]
            with _recording(sources.flat) as (targets, from_where):
                self.set_layers(manager, slot, sources)
            torch._foreach_zero_(list(_parts(manager, slot)))
            torch._foreach_copy_(targets, from_where)
            is_same = all(map(same_bits, loaded, _parts(manager, slot)))
            reason = None if is_same else "the slot then holds other values than vLLM puts there"
        except AdapterRejectedError:  # from a file, vLLM would serve no more than this
            raise
        except Exception as error:  # whatever other layers and other versions of vLLM raise
            reason = f"{type(error).__name__}: {error}"
        if reason is not None:
            logger.warning(
                "vLLM loads each version from a file, which takes longer, because the adapter cannot be written into "
                "its slots directly: %s.",
                reason,
            )
            self._unfamiliar.add(layout)
            # The slot gets back what vLLM has put there, so this version is served as one from a file. If there was no
            # memory for the clones, nothing was written yet.
            for part, value in zip(_parts(manager, slot) if loaded else (), loaded, strict=True):
                part.copy_(value)
            return None
        self.copies[adapter_id] = _Copies(layout, sources.flat, from_where, targets)
        return self.copies[adapter_id]

    def set_layers(self, manager: Any, slot: int, sources: CanonicalAdapter) -> None:
        """As `LoRAModelManager.activate_adapter` does, with the tensors of `sources`.

        Raises:
            AdapterRejectedError: vLLM ignores some of them.
        """
        matrices: dict[str, list[Tensor]] = {}
        for key, tensor in sources.tensors.items():
            # lora_A comes before lora_B, in the order of the keys.
            matrices.setdefault(engine.served_name(self._llm, key), []).append(tensor)
        for name, layer in manager.modules.items():
            members = manager.packed_modules.get(name)
            if members is None:
                if name in matrices:
                    layer.set_lora(slot, *matrices.pop(name))
            elif any(member in matrices for member in members):
                # A slice without matrices stays at zero (0.31, lora/layers/column_parallel_linear.py `set_lora`).
                pairs = [matrices.pop(member, [None, None]) for member in members]
                layer.set_lora(slot, [a for a, _ in pairs], [b for _, b in pairs])
        if matrices:
            raise AdapterRejectedError(
                f"vLLM has no layer for the adapter on {', '.join(without_numbers(sorted(matrices)))}, and ignores it "
                "without an error, so samples would come from another policy. Leave these modules out of the adapter "
                'with exclude_modules of the LoraConfig, or set lora_sync_serving="fused", which needs their weights '
                "alone."
            )

    @staticmethod
    def compare(name: str, copies: _Copies) -> None:
        """Compare what lies in the slot with what was copied, bit by bit."""
        flat = copies.flat
        held = flat.clone()  # what other processes of tensor parallelism hold is not in the slot, and stays equal
        first = flat.storage_offset()
        # The sources are views of `flat`, so the same shapes, strides and offsets are their places in its copy.
        views = [held.as_strided(one.shape, one.stride(), one.storage_offset() - first) for one in copies.sources]
        torch._foreach_copy_(views, copies.targets)
        if not same_bits(held, flat):
            raise VerificationError(
                f"The slot of {name} does not hold the bits that were written to it. The last version stays active."
            )


def _written(name: str, adapter: CanonicalAdapter) -> Path:
    """A new private folder, in which vLLM finds the adapter under its name.

    Raises:
        AdapterExportError: there is no room for it.
    """
    failures = []
    # First in memory, as vLLM reads the file once and right away. Docker gives a container 64 MB there.
    for place in (SHARED_MEMORY, None):
        folder: Path | None = None
        try:
            # `mkdtemp` makes the folder private to this user. None is the folder for temporary files, which is looked
            # for only then, as a container may have none that can be written.
            folder = Path(tempfile.mkdtemp(prefix="trl-lora-sync-", dir=place))
            write_adapter(folder / name, adapter, private=True)
            return folder
        except BaseException as error:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            if not isinstance(error, OSError):  # as `AdapterExportError` is, too
                raise
            # Without a folder, the error names the place.
            failures.append(f"{folder.parent}: {error.__cause__ or error}" if folder is not None else str(error))
    raise AdapterExportError(
        f"The {adapter.payload_bytes / 1e6:.1f} MB of the adapter cannot be written to a file for vLLM, which loads "
        f"the first version from one ({'; '.join(failures)}). Free some space there, give the container more shared "
        "memory (docker run --shm-size), or set TMPDIR to a folder with room."
    )


def _parts(manager: Any, slot: int) -> Iterator[Tensor]:
    """Views of all that a slot holds."""
    for layer in manager.modules.values():
        for matrices in (layer.lora_a_stacked, layer.lora_b_stacked):
            # Embedding and output head have one tensor, linear layers one for each slice of theirs (0.31, lora/layers).
            for stacked in (matrices,) if isinstance(matrices, Tensor) else matrices:
                yield stacked[slot]


@contextmanager
def _recording(memory: Tensor) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """The targets and sources of all copies out of `memory` in the block, which are made as well."""
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    # The storage, because under tensor parallelism layers copy from slices of what they are given (0.31,
    # `slice_lora_a`).
    storage = memory.untyped_storage()._cdata

    class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.copy_.default and args[1].untyped_storage()._cdata == storage:
                targets.append(args[0])
                sources.append(args[1])
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Recorder():  # type: ignore[no-untyped-call]
        yield targets, sources
