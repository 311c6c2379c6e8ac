"""W = W0 + scaling * lora_B @ lora_A, written over the served weights, and the copy of W0 that makes it repeatable.

Every fuse starts from W0, that of DoRA and of whole tensors too. So nothing drifts, and the base comes back bit for bit
because it is copied. Product and sum are computed in float32 and rounded once. Knows torch and no engine.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from math import gcd
from typing import TYPE_CHECKING, Protocol

import psutil
import torch
from torch import Tensor

from trl_lora_sync.engine_plugins import logger
from trl_lora_sync.engine_plugins.fetching import DamagedError, Fetcher, Staging
from trl_lora_sync.engine_plugins.fused_file import AdapterFile, AdapterFileError, Content, Kind
from trl_lora_sync.engine_plugins.fused_placement import WeightSlice
from trl_lora_sync.engine_plugins.pinned_memory import pin
from trl_lora_sync.engine_plugins.repeated import Repeated
from trl_lora_sync.engine_plugins.safetensors_file import ShortFileError, joined

if TYPE_CHECKING:
    from trl_lora_sync.engine_plugins.fused_kernel import Job, Launch

Kernel = Callable[[Sequence["Job"]], list["Launch"]]
# lora_A and lora_B by the module's name.
Matrices = dict[str, tuple[Tensor, Tensor]]

_KINDS = ("lora_A", "lora_B")
_KERNEL_DTYPES = ({torch.bfloat16}, {torch.float16})
# Bounds a product in float32, where the kernel cannot be used.
_PRODUCT_BYTES = 64 << 20
# Below this row width, a reduction per row is slower than `torch._foreach_norm`.
_LEAST_WIDTH = 256
# Smaller tensors share pages of memory with others, and a page can be pinned once.
_OWN_PAGES_BYTES = 1 << 20
# Left to the engine, whose graphs and kernels allocate now and then.
_GPU_RESERVE_BYTES = 1 << 30


class Target(Protocol):
    """One parameter of the served model."""

    base: Tensor

    def changing(self) -> AbstractContextManager[Tensor]:
        """The weight to write to; in use once the block ends."""


@dataclass
class InPlace:
    """A parameter whose memory the engine reads at each step, so that graphs and compiled code stay valid.

    Attributes:
        weight: `(out_features, in_features)` of this process, written to.
        base: what it held at first, on the same device or in pinned host memory.
    """

    weight: Tensor
    base: Tensor

    @contextmanager
    def changing(self) -> Iterator[Tensor]:
        yield self.weight


@dataclass(frozen=True)
class Change:
    """Another change of a tensor than adding lora_B @ lora_A to it, in the memory of the device.

    Attributes:
        kind: whether `tensor` is its new value, is added to it, or is the new value of some rows.
        tensor: `(rows, columns)`; a vector is one row.
        indices: of the rows, `(rows,)` and in host memory; for `"rows"` only.
    """

    kind: Kind
    tensor: Tensor
    indices: Tensor | None = None

    def write(self, weight: Tensor, base: Tensor, piece: WeightSlice) -> None:
        """Write the changed tensor's rectangle over `weight`, whose base is `base`."""
        columns = self.tensor[:, slice(*piece.columns)]
        if self.kind == "value":
            weight.copy_(columns[slice(*piece.rows)])
        elif self.kind == "added":
            # To the base, which may be on the host: `weight` holds what the adapter before has added.
            weight.copy_(base.to(weight.device).float() + columns[slice(*piece.rows)].float())
        else:
            assert self.indices is not None
            # The whole rectangle, because the adapter before may have replaced other rows.
            weight.copy_(base)
            first, end = piece.rows
            # `nonzero` on a GPU would wait for all that it computes; the indices are on the host.
            chosen = ((self.indices >= first) & (self.indices < end)).nonzero()[:, 0]
            places = (self.indices[chosen] - first).to(weight.device)
            weight[places] = columns[chosen.to(weight.device)].to(weight.dtype)


@dataclass
class FusedAdapter:
    """An adapter in the memory of the device.

    Attributes:
        matrices: lora_A and lora_B of each module that changes anything; all-zero ones are left out, so that their
            weights are copies of W0, -0.0 included.
        magnitudes: of DoRA, `(out_features,)` in float32, for some of these.
        changes: of other tensors, by their names in the checkpoint.
    """

    name: str
    scaling: float
    matrices: Matrices = field(repr=False)
    magnitudes: dict[str, Tensor] = field(default_factory=dict, repr=False)
    changes: dict[str, Change] = field(default_factory=dict, repr=False)


class Reader:
    """Brings the tensors of a file to the device in one go.

    Keeps its memory, as pinning it is slow, and as the views of it and the table of a launch are then made once. With
    versions in turns, that is memory for three adapters: one is in the weights, one may have to be put back, and the
    next one is fetched ahead of its load.

    Attributes:
        fetcher: by which versions come.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.fetcher = Fetcher(device)
        self._memories: list[_Memory] = []

    def read(self, name: str, adapter: AdapterFile) -> FusedAdapter:
        """The adapter without its all-zero modules, as views of memory that is used again once the result is gone.

        Raises:
            AdapterFileError: the file is gone, cannot be read or is shorter than its header promises, is not what the
                trainer sent, or holds NaN or infinity.
        """
        with self.fetcher.turn:
            # What held other kinds goes with its adapters.
            if any(memory.content is not adapter.content for memory in self._memories):
                self._memories.clear()
                self.fetcher.fetch_ahead_into(None)
            memory = self._free() or self._new(adapter)
            self._fill(name, memory.staging, adapter)
            found = self._in_memory(name, adapter, memory)
            self.fetcher.fetch_ahead_into(self._for_the_next(adapter))
        return found

    def _for_the_next(self, adapter: AdapterFile) -> Staging | None:
        """Where the next version may come; never to an adapter, which may have to be put back, or subtracted."""
        if adapter.note is None or not adapter.note.files:
            return None
        memory = self._free()
        if memory is None and room_on(self.device) > adapter.head.size:
            memory = self._new(adapter)
        return None if memory is None else memory.staging

    def _fill(self, name: str, staging: Staging, adapter: AdapterFile) -> None:
        try:
            with adapter.file.open("rb", buffering=0) as file:
                if adapter.note is None:
                    self.fetcher.read(file.fileno(), adapter.head.start, staging.data)
                else:
                    self.fetcher.fetch(
                        name, adapter.file.parent, file.fileno(), adapter.head, adapter.config, adapter.note, staging
                    )
        except OSError as error:
            # A `TimeoutError` of `unfinished.wait` has a message and no `strerror`.
            raise AdapterFileError(
                f"{adapter.file} cannot be read ({error.strerror or error})",
                is_missing=isinstance(error, FileNotFoundError),
            ) from error
        except ShortFileError as error:
            raise AdapterFileError(f"{adapter.file}: {error}") from error
        except DamagedError as error:
            raise AdapterFileError(str(error)) from error

    def _in_memory(self, name: str, adapter: AdapterFile, memory: "_Memory") -> FusedAdapter:
        """The adapter that is in some memory."""
        data, content = memory.staging.data, adapter.content
        changes = {
            key: Change(
                kind,
                as_matrix(span.view_in(data)),
                torch.tensor(adapter.tokens[key][1]) if kind == "rows" else None,
            )
            for key, (kind, span) in content.tensors.items()
        }
        magnitudes = {key: span.view_in(data).float().sum(0) for key, span in content.magnitudes.items()}
        found = finite(name, adapter.scaling, memory.matrices, magnitudes, changes, are_plain=memory.are_plain())
        # Weak, so that the memory is free once the worker drops the adapter. Last, as a refused adapter holds none.
        memory.newest = weakref.ref(found)
        return found

    def _free(self) -> "_Memory | None":
        """Memory that no adapter is in; first what a version may have been fetched into."""
        free = [memory for memory in self._memories if memory.newest() is None]
        return min(free, key=lambda memory: memory.staging is not self.fetcher.ahead_into, default=None)

    def _new(self, adapter: AdapterFile) -> "_Memory":
        self._memories.append(_Memory(adapter.content, Staging(adapter.head.size, self.device)))
        return self._memories[-1]


class _Memory:
    """Memory for the adapters of one kind.

    Attributes:
        staging: the bytes of all tensors, as in the file.
        matrices: lora_A and lora_B of each module, as views of it.
        are_plain: see `plain_check`.
        newest: returns the adapter that was read last, or None once it is gone.
    """

    def __init__(self, content: Content, staging: Staging) -> None:
        self.content = content
        self.staging = staging
        data = staging.data
        self.matrices = {key: (a.view_in(data), b.view_in(data)) for key, (a, b) in content.modules.items()}
        self.are_plain = plain_check([one for pair in self.matrices.values() for one in pair])
        self.newest: Callable[[], FusedAdapter | None] = lambda: None


def finite(
    name: str,
    scaling: float,
    matrices: Matrices,
    magnitudes: dict[str, Tensor] | None = None,
    changes: dict[str, Change] | None = None,
    *,
    are_plain: bool = False,
) -> FusedAdapter:
    """The adapter without its all-zero modules; with the very `matrices`, if there are none.

    Args:
        are_plain: whether the matrices are known to be finite and not all zero.

    Raises:
        AdapterFileError: it holds NaN or infinity.
    """
    magnitudes, changes = magnitudes or {}, changes or {}
    moved, broken = matrices, []
    if not (are_plain and scaling):
        largest = _largest([one for pair in matrices.values() for one in pair])
        pairs = dict(zip(matrices, zip(largest[::2], largest[1::2], strict=True), strict=True))
        # Comparisons with NaN are false, so `not <` finds NaN and `>=` would not.
        broken = [
            f"{module}.{kind}"
            for module, pair in pairs.items()
            for kind, value in zip(_KINDS, pair, strict=True)
            if not value < float("inf")
        ]
        # With DoRA a zero product moves a weight as well, whose rows get the trained norms.
        is_moved = {module: (a and b and scaling) or module in magnitudes for module, (a, b) in pairs.items()}
        # Otherwise the very dictionary of the memory is passed on, by which `KnownLaunches` recognises its launch.
        if not all(is_moved.values()):
            moved = {module: pair for module, pair in matrices.items() if is_moved[module]}
    others = {f"{module}.magnitude": one for module, one in magnitudes.items()}
    others |= {key: change.tensor for key, change in changes.items()}
    broken += [key for key, one in others.items() if not bool(one.isfinite().all())]
    if broken:
        raise AdapterFileError(f"The adapter holds NaN or infinity, in {', '.join(broken[:3])}.")
    return FusedAdapter(name, scaling, moved, magnitudes, changes)


def _largest(tensors: list[Tensor]) -> list[float]:
    """The largest magnitude in each; NaN for a tensor with a NaN."""
    # Waits for the device once, where an adapter of 8B has 504 matrices.
    return torch.stack(list(torch._foreach_norm(tensors, float("inf")))).tolist() if tensors else []


def plain_check(tensors: list[Tensor]) -> Callable[[], bool]:
    """Returns at each call whether tensors are known to be finite and not all zero, each of them, by one reduction."""
    # Each tensor is then a whole number of rows, and one reduction serves all of them.
    width = gcd(*(tensor.numel() for tensor in tensors))
    flat = joined(tensors) if width >= _LEAST_WIDTH else None
    if flat is None:
        return lambda: False
    check = Repeated([flat], partial(_are_plain, flat.view(-1, width)))
    return lambda: bool(check.run())


def _are_plain(rows: Tensor) -> Tensor:
    low, high = torch.aminmax(rows, dim=1)
    largest = torch.maximum(high, -low)
    # Comparisons with NaN are false.
    return ((largest > 0) & (largest < float("inf"))).all()


def fuse(adapter: FusedAdapter | None, targets: dict[str, Target], pieces: dict[str, list[WeightSlice]]) -> "OneLaunch":
    """Put an adapter, or the base for None, into all weights that any adapter has ever changed.

    Args:
        targets: the parameters by their keys.
        pieces: of every module that was ever adapted.

    Returns:
        What was written with one launch.
    """
    matrices = adapter.matrices if adapter is not None else {}
    changes = adapter.changes if adapter is not None else {}
    by_target: dict[str, list[tuple[str, WeightSlice]]] = {key: [] for key in targets}
    for module, found in pieces.items():
        for piece in found:
            by_target[piece.owner].append((module, piece))
    launch = OneLaunch(sum(map(len, pieces.values())))
    scaling = adapter.scaling if adapter is not None else 1.0
    for key, target in targets.items():
        with target.changing() as weight, torch.no_grad():
            # Bases first: a layer may have been adapted as a whole by one adapter and in parts by another.
            for module, piece in by_target[key]:
                if module not in matrices and module not in changes:
                    part_of(weight, piece).copy_(part_of(target.base, piece), non_blocking=True)
            for module, piece in by_target[key]:
                parts = part_of(weight, piece), part_of(target.base, piece)
                if module in changes:
                    changes[module].write(*parts, piece)
                elif module in matrices:
                    assert adapter is not None
                    fuse_piece(*parts, *matrices[module], piece, scaling, launch, adapter.magnitudes.get(module))
    # After the blocks of all targets: what must be packed again at the end of its block is on a CPU, where the launch
    # has taken nothing.
    launch.run(scaling)
    return launch


def part_of(whole: Tensor, piece: WeightSlice) -> Tensor:
    """The rectangle of a parameter that a piece is; a vector has one row."""
    matrix = as_matrix(whole) if piece.expert is None else whole[piece.expert]
    return matrix[piece.top : piece.bottom, piece.left : piece.right]


def as_matrix(tensor: Tensor) -> Tensor:
    """A vector as a matrix of one row, without a copy."""
    return tensor.unsqueeze(0) if tensor.ndim == 1 else tensor


class OneLaunch:
    """Rectangles that one launch of a kernel writes, instead of one for each.

    Args:
        rectangles: how many are to be written in all, in whatever way.
    """

    def __init__(self, rectangles: int) -> None:
        self._rectangles = rectangles
        self._jobs: dict[tuple[torch.device, torch.dtype], list[Job]] = {}
        self._launches: list[Launch] | None = None

    def takes(self, job: "Job") -> bool:
        """Note down a rectangle for `run`, if there is a kernel for it."""
        weight = job[0]
        suits = (
            weight.is_cuda
            and {one.dtype for one in job} in _KERNEL_DTYPES
            and all(one.stride(1) == 1 for one in job)
            and kernel_on(weight.device, weight.dtype) is not None
        )
        if suits:
            self._jobs.setdefault((weight.device, weight.dtype), []).append(job)
        return suits

    @property
    def is_all(self) -> bool:
        """Whether to run it is to write all rectangles."""
        jobs = [job for of_kind in self._jobs.values() for job in of_kind]
        # A base that is elsewhere has been copied to its weight before.
        return len(jobs) == self._rectangles and all(base is not weight for weight, base, *_ in jobs)

    def run(self, scaling: float) -> None:
        """Write what `takes` has noted down, with what the matrices hold now."""
        if self._launches is None:
            self._launches = []
            for (device, dtype), jobs in self._jobs.items():
                kernel = kernel_on(device, dtype)
                assert kernel is not None
                self._launches += kernel(jobs)
        for launch in self._launches:
            launch.run(scaling)


class KnownLaunches:
    """What is run instead of writing weights one by one, for later adapters in the same memory."""

    def __init__(self) -> None:
        self._known: list[tuple[Matrices, OneLaunch]] = []

    def write(self, matrices: Matrices, scaling: float, in_full: Callable[[], OneLaunch]) -> None:
        """Write an adapter with these matrices to the weights.

        Args:
            in_full: does that, and returns the launch that was a part of it.
        """
        # By identity: the same views of the same memory, so the addresses in the table of the launch hold.
        known = next((launch for those, launch in self._known if those is matrices), None)
        if known is not None:
            known.run(scaling)
            return
        launch = in_full()
        if launch.is_all:
            # Versions are in three memories in turns; see `Reader`.
            self._known = [*self._known, (matrices, launch)][-3:]

    def forget(self) -> None:
        """To be called before anything but the values has changed."""
        self._known.clear()


def fuse_piece(
    weight: Tensor,
    base: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    piece: WeightSlice,
    scaling: float,
    launch: OneLaunch,
    magnitude: Tensor | None = None,
) -> None:
    """Write `base + scaling * lora_B @ lora_A` to a rectangle of a weight, or leave it to `launch`.

    Args:
        weight: the rectangle, in the served dtype.
        base: what it held at first, in any dtype and on any device.
        lora_A, lora_B: of the whole module.
        piece: which rectangle of the module it is.
        magnitude: with DoRA, the norms that the module's rows get; else None.
    """
    rows, columns = lora_B[slice(*piece.rows)], lora_A[:, slice(*piece.columns)]
    if base.device != weight.device:
        # One transfer over the bus, into memory that is there already; the sum may be written over its base.
        weight.copy_(base, non_blocking=True)
        base = weight
    if magnitude is None and launch.takes((weight, base, columns, rows)):
        return
    columns, norms = columns.float(), None if magnitude is None else magnitude[slice(*piece.rows)]
    step = max(1, _PRODUCT_BYTES // (4 * weight.shape[1]))
    for start in range(0, weight.shape[0], step):
        part = slice(start, start + step)
        # A part is read as a whole before it is written, so `weight` may be `base`.
        total = torch.addmm(base[part].float(), rows[part].float(), columns, alpha=scaling)
        weight[part] = total if norms is None else with_norms(total, norms[part])


def with_norms(rows: Tensor, norms: Tensor) -> Tensor:
    """Each row scaled to its norm, `(rows,)`; all in float32.

    Source: DoRA as PEFT merges it, peft/tuners/lora/variants.py `DoraLinearVariant.merge_safe`, 0.18 to 0.21.
    """
    found: Tensor = torch.linalg.vector_norm(rows, dim=1)
    # A row of zeros has no direction; PEFT divides by its norm, which the check for finite values finds there.
    return rows * (norms / found.where(found > 0, 1.0))[:, None]


@cache
def kernel_on(device: torch.device, dtype: torch.dtype) -> Kernel | None:
    """What fuses on a GPU in one pass, if Triton is there and it works."""
    try:
        from trl_lora_sync.engine_plugins.fused_kernel import launches_of

        # Numbers that 16 bits hold exactly, so any difference is an error of the kernel.
        # A size that is aligned and another, for which two variants are compiled.
        jobs = [tuple(torch.ones(size, size, dtype=dtype, device=device) for _ in range(3)) for size in (16, 5)]
        for launch in launches_of([(weight, weight, lora_A, lora_B) for weight, lora_A, lora_B in jobs]):
            launch.run(2.0)
        if not all(bool((weight == 1 + 2 * len(weight)).all()) for weight, _, _ in jobs):
            raise ArithmeticError("its sum is wrong")
    except Exception as error:  # such as a missing compiler
        logger.warning("Adapters are fused without Triton, which takes longer: %s: %s", type(error).__name__, error)
        return None
    return launches_of


def room_on(device: torch.device) -> float:
    """The free bytes of the device beyond the reserve of the engine; infinity for a CPU."""
    # The driver's figure, in which memory that torch has cached counts as used.
    return torch.cuda.mem_get_info(device)[0] - _GPU_RESERVE_BYTES if device.type == "cuda" else float("inf")


def copies_of(weights: Iterable[Tensor], place: str) -> tuple[list[Tensor], str]:
    """Copies of weights, and where they are: `"gpu"`, or `"host"` in pinned memory.

    Args:
        place: `"gpu"`, `"host"`, or `"auto"` for the GPU as long as there is room.

    Raises:
        MemoryError: there is no room; what to change.
        PinError: the host's memory cannot be page-locked.
    """
    weights = list(weights)
    size = sum(weight.numel() * weight.element_size() for weight in weights)
    if not weights or weights[0].device.type != "cuda":
        return [weight.clone() for weight in weights], "host"
    room = room_on(weights[0].device)
    fits, free = room > size, room + _GPU_RESERVE_BYTES
    if place == "gpu" and not fits:
        raise MemoryError(
            f"The copy of the base weights takes {size / 2**30:.1f} GiB of GPU memory and {free / 2**30:.1f} GiB are "
            "free, of which 1 GiB is left to the engine. Lower --gpu-memory-utilization, or keep the copy in host "
            "memory."
        )
    if fits and place != "host":
        return [weight.clone() for weight in weights], "gpu"
    available = psutil.virtual_memory().available
    if available < size * 1.1:
        raise MemoryError(
            f"The copy of the base weights takes {size / 2**30:.1f} GiB, and neither the GPU ({free / 2**30:.1f} GiB "
            f"free) nor the host ({available / 2**30:.1f} GiB) has room. Lower --gpu-memory-utilization, or set "
            "TRL_LORA_SYNC_FUSED_BASE=none for plain LoRA without a copy."
        )
    return _pinned_copies(weights), "host"


def _pinned_copies(weights: list[Tensor]) -> list[Tensor]:
    copies: list[Tensor] = []
    with ExitStack() as unpins:
        for weight in weights:
            if weight.numel() * weight.element_size() < _OWN_PAGES_BYTES:
                copies.append(weight.cpu().pin_memory())
                continue
            # torch's own allocator of pinned memory rounds each size up to a power of two.
            copies.append(torch.empty(weight.shape, dtype=weight.dtype))
            unpins.callback(pin(copies[-1], weight.device))
            copies[-1].copy_(weight)
        # Without an error they stay pinned, as the copies of the base live as long as the worker.
        unpins.pop_all()
    return copies
