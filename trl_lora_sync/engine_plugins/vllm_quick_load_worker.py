"""Loads adapters in each worker of a vLLM server; given to vLLM as its `--worker-extension-cls`, see `vllm_quick_load`.

Where `vllm_quick_load.writes_slots`, versions that a trainer of this package wrote go straight into the slots, see
`slot_writer`. What is below is for all other adapters, and for what the slots do not take.

vLLM copies an adapter tensor by tensor, with one thread, out of the page cache into pinned memory. Here the first
adapter of a kind (the same names, dtypes and shapes) is left to vLLM with all its checks. The bytes of later adapters
of that kind are read by several threads into a few pinned buffers, and vLLM gets its tensors as views of them.
"""

import contextlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trl_lora_sync.engine_plugins import logger
from trl_lora_sync.engine_plugins.cuda_ipc import visible_gpus
from trl_lora_sync.engine_plugins.safetensors_file import (
    DTYPE_NAMES,
    DTYPES,
    MALFORMED,
    TENSORS_FILE,
    Head,
    ParallelReader,
    TensorSpan,
    bytes_of,
    head_of,
)
from trl_lora_sync.engine_plugins.slot_writer import SlotWriter, group_of
from trl_lora_sync.engine_plugins.version_note import NOTE_FILE
from trl_lora_sync.engine_plugins.vllm_quick_load import STACKED, WRITE_SLOTS, writes_slots

_MATRICES = (".lora_A.weight", ".lora_B.weight")
# Options of vLLM's own way that are understood here, if they are set. Source: `_load_adapter` of
# vllm/lora/worker_manager.py (0.26, 0.31 to 0.33).
_UNDERSTOOD = {"lora_model_id", "device", "dtype", "model_vocab_size", "weights_mapper", "skip_prefixes"}
KINDS = 8
_UNREADABLE = (OSError, *MALFORMED)
# torch's allocator of pinned memory rounds each size up to a power of two.
BUFFER_BYTES = 64 << 20


class QuickLoadWorker:
    """Mixed into vLLM's worker, whose `model_runner` and `vllm_config` it uses."""

    # Without values: vLLM refuses an extension with an attribute that its worker has (v1/worker/worker_base.py, 0.31).
    model_runner: Any
    vllm_config: Any
    _lora_sync_slots: SlotWriter

    def lora_sync_load_quickly(self) -> dict[str, str]:
        """Load adapters quickly from now on. Raises nothing; see `FusedWorker`.

        Returns:
            `error`: why that is not possible, `slots`: why none can be written, and `off`: why none is to be written;
            empty if there is no reason. `experts`: `STACKED` if all experts of a layer may be in one tensor. `dtype`:
            in which adapters are kept, by its name in safetensors files. `rank`: the largest one of an adapter.
            `gpus`: what this process sees, if slots are written.
        """
        answer = {"error": "", "slots": "", "off": "", "experts": "", "dtype": "", "rank": ""}
        try:
            manager = self.model_runner.lora_manager
            # While one more is loaded, so many are in host memory. Source: vllm/lora/worker_manager.py (0.26 to 0.33).
            at_once = manager.lora_config.max_cpu_loras + 1
            files = KnownFiles(at_once)
            # Read at each load, by `_load_adapter` of vllm/lora/worker_manager.py (0.31).
            manager._lora_model_cls = quick_model(manager._lora_model_cls, files)
            # Source: `LoRAConfig` in vllm/config/lora.py (0.26, 0.31).
            if getattr(manager.lora_config, "enable_mixed_moe_lora_format", False):
                answer["experts"] = STACKED
            answer["dtype"] = DTYPE_NAMES.get(getattr(manager.lora_config, "lora_dtype", None), "")
            answer["rank"] = str(getattr(manager.lora_config, "max_lora_rank", ""))
        except Exception as error:  # the caller logs it, and adapters are loaded in vLLM's way
            return {**answer, "error": f"{type(error).__name__}: {error}"}
        try:
            device = torch.device(manager.device).type
            if not writes_slots(os.environ):
                return {**answer, "off": f"{WRITE_SLOTS}=0"}
            self._lora_sync_slots = SlotWriter(manager, files.replaced, group_of(self.vllm_config.parallel_config))
            files.writes_slots = True
        except Exception as error:
            # Adapters are read by several threads all the same, by the class that is in place already.
            return {**answer, "slots": f"{type(error).__name__}: {error}"}
        return {**answer, "gpus": ",".join(visible_gpus() if device == "cuda" else [])}

    def lora_sync_reserve(
        self, name: str, number: int, head: str, form: str, listed: int, server_socket: str, reservation: str
    ) -> str:
        """See `SlotWriter.reserve`. Raises nothing, see `SlotWriter.add_adapter`."""
        # With data parallelism the caller gets the answers of one engine, whose workers do not stand for the others'.
        if self.vllm_config.parallel_config.data_parallel_size > 1:
            return ""
        try:
            return self._lora_sync_slots.reserve(name, number, head, form, listed, Path(server_socket), reservation)
        except Exception:
            logger.exception("No slot can be reserved for %s, so it is loaded by a request.", name)
            return ""

    def lora_sync_slot_counts(self) -> dict[str, int]:
        """How many versions came which way, for tests and measurements."""
        return dict(self._lora_sync_slots.counts)

    def lora_sync_slot_seconds(self) -> dict[str, float]:
        """How long the parts of writing all these took, for measurements."""
        return dict(self._lora_sync_slots.seconds)


def quick_model(base: Any, files: "KnownFiles") -> Any:
    """A kind of vLLM's `LoRAModel` that is loaded faster and is the same in everything else."""

    class QuickLoRAModel(base):  # type: ignore[misc, unused-ignore]
        @classmethod
        def from_local_checkpoint(
            cls, lora_dir: str, expected_lora_modules: set[str], peft_helper: Any, **options: Any
        ) -> Any:
            given = {name: value for name, value in options.items() if value is not None}
            # An option that is unknown here could change which tensors vLLM keeps, as `moe_ep_spec` does (0.31).
            is_understood = given.keys() <= _UNDERSTOOD and given.get("device") == "cpu" and "lora_model_id" in given
            tensors = files.read(Path(lora_dir), given.get("dtype")) if is_understood else None
            if tensors is not None:
                return cls.from_lora_tensors(tensors=tensors, peft_helper=peft_helper, **given)
            model = super().from_local_checkpoint(lora_dir, expected_lora_modules, peft_helper=peft_helper, **options)
            # Only now, as vLLM raises for an adapter that it refuses.
            files.learn(Path(lora_dir))
            return model

    return QuickLoRAModel


class _Buffer(NamedTuple):
    """Neighbours in the file.

    Attributes:
        start: where they begin in the region of the tensors.
        spans: their places from there on, in the order of the file.
    """

    start: int
    spans: dict[str, TensorSpan]

    @property
    def size(self) -> int:
        return next(reversed(self.spans.values())).end


class KnownFiles:
    """Reads files that are like one which vLLM has accepted.

    Args:
        at_once: how many of them are in memory at a time.

    Attributes:
        writes_slots: whether versions of a trainer are not in host memory as a rule.
    """

    writes_slots = False

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._kinds: OrderedDict[tuple[Head, torch.dtype | None], list[_Buffer]] = OrderedDict()
        self._files = ParallelReader()
        self._instead: Callable[[], dict[str, Tensor]] | None = None

    @contextmanager
    def replaced(self, tensors: Callable[[], dict[str, Tensor]]) -> Iterator[Callable[[], bool]]:
        """Give vLLM other tensors than a file's, once in the block; yields a function that returns whether it was."""
        self._instead = tensors
        try:
            yield lambda: self._instead is None
        finally:
            self._instead = None

    def learn(self, folder: Path) -> None:
        """Remember the kind of the file in `folder`, which vLLM accepted; harmless if the file cannot be read here."""
        with (
            contextlib.suppress(*_UNREADABLE),
            (folder / TENSORS_FILE).open("rb", buffering=0) as file,
        ):
            head = head_of(file.fileno())
            spans = _spans_in(head)
            if spans:
                dtype = DTYPES[next(iter(spans.values())).dtype]
                self._kinds[head, dtype] = _in_buffers(spans)
                # Later versions of a trainer go into the slots, so pinned memory for them would stay unused.
                if not (self.writes_slots and (folder / NOTE_FILE).exists()):
                    self._reserve(self._kinds[head, dtype])
                while len(self._kinds) > KINDS:
                    self._kinds.popitem(last=False)

    def _reserve(self, buffers: list[_Buffer]) -> None:
        """Have torch allocate the pinned memory of all adapters with the first one, which a trainer loads on trial.

        It keeps what is given back and hands it out again. Without this, each sync allocates for itself until vLLM
        evicts the first version, and pinning 64 MB takes longer than filling it.
        """
        # All at the same time, or the allocator would hand out one piece again and again.
        held = [memory_for(buffer) for buffer in buffers for _ in range(self._at_once)]
        held.clear()

    def read(self, folder: Path, dtype: torch.dtype | None) -> dict[str, Tensor] | None:
        """The tensors of an adapter, in separate memory; None if vLLM should load it by itself.

        Args:
            dtype: that the tensors must have.
        """
        if self._instead is not None:
            instead, self._instead = self._instead, None
            return instead()
        # What is wrong with a file, vLLM has words for.
        with contextlib.suppress(*_UNREADABLE), (folder / TENSORS_FILE).open("rb", buffering=0) as file:
            head = head_of(file.fileno())
            # Names, dtypes and shapes are in the header, so what vLLM has accepted holds for all files with it.
            kind = (head, dtype)
            if kind not in self._kinds:
                return None
            self._kinds.move_to_end(kind)
            tensors: dict[str, Tensor] = {}
            for buffer in self._kinds[kind]:
                memory = memory_for(buffer)
                for _ in self._files.read(file.fileno(), bytes_of(memory), head.start + buffer.start):
                    pass
                tensors |= {name: span.view_in(memory) for name, span in buffer.spans.items()}
            return tensors
        return None


def memory_for(buffer: _Buffer) -> Tensor:
    return torch.empty(buffer.size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


def _spans_in(head: Head) -> dict[str, TensorSpan]:
    """Where each tensor is, in the order of the file; empty unless they are lora_A and lora_B of one known dtype."""
    spans = head.spans()
    dtypes = {span.dtype for span in spans.values()}
    if len(dtypes) != 1 or not dtypes <= DTYPES.keys() or not all(name.endswith(_MATRICES) for name in spans):
        return {}
    # A header may list its tensors in any order, and a buffer is a region of the file.
    return dict(sorted(spans.items(), key=lambda item: item[1].start))


def _in_buffers(spans: dict[str, TensorSpan]) -> list[_Buffer]:
    buffers: list[_Buffer] = []
    for name, span in spans.items():
        # So a tensor of more than that has a buffer for itself.
        if not buffers or span.end - buffers[-1].start > BUFFER_BYTES:
            buffers.append(_Buffer(span.start, {}))
        start = buffers[-1].start
        buffers[-1].spans[name] = span._replace(start=span.start - start, end=span.end - start)
    return buffers
