"""Serves adapters in the weights that vLLM computes with, and decodes at the speed of the base model.

Every version starts from the trainer's frozen weights, so nothing drifts. vLLM's prefix cache does not know which
adapter is in the weights, so it is emptied when another one is put there.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trl_lora_sync.adapter.canonical import CanonicalAdapter, modules_of
from trl_lora_sync.colocate import engine, placing
from trl_lora_sync.colocate.engine import Policy
from trl_lora_sync.engine_plugins.folded_base import BaseChangedError, FoldedBase
from trl_lora_sync.engine_plugins.fused_placement import PlacementError, WeightSlice
from trl_lora_sync.engine_plugins.fused_weights import KnownLaunches, Matrices, OneLaunch, fuse_piece, part_of
from trl_lora_sync.errors import AdapterRejectedError, UnsupportedSettingError, WrongPolicyError


class AdaptersInWeights(ABC):
    """Keeps the adapters of an engine, under the numbers 1 to `engine.SLOTS`, of which one is in the weights at most.

    Args:
        llm: vLLM's `LLM`, started without LoRA.
        base: the trainer's frozen matrices, by the names of their modules.
    """

    def __init__(self, llm: Any, base: Mapping[str, Tensor]) -> None:
        self._llm = llm
        self._base = base
        self._parameters = placing.served_parameters(llm)
        self._held: dict[int, CanonicalAdapter] = {}
        self._matrices: dict[int, Matrices] = {}
        self._names: dict[int, str] = {}
        self._cached: str | None = None  # whose keys and values are in the prefix cache

    def load(self, name: str, adapter_id: int, adapter: CanonicalAdapter) -> Policy:
        """Hold a copy of `adapter`, and return what to sample from it with.

        Raises:
            AdapterRejectedError: it changes a layer that the trainer's base model does not have.
        """
        # The same memory for each version of a layout, as launches that are known (`KnownLaunches`) read from it.
        held = self._held.get(adapter_id)
        if held is None or held.layout != adapter.layout:
            unknown = sorted(set(modules_of(adapter.tensors)) - self._base.keys())
            if unknown:
                raise AdapterRejectedError(f"The trainer's base model has no matrix for {', '.join(unknown[:3])}.")
            device = next(iter(self._parameters.values())).device
            held = replace(adapter, flat=torch.empty_like(adapter.flat, device=device))
            # First: after an interrupt in between, both are made again.
            self._matrices[adapter_id] = modules_of(held.tensors)
            self._held[adapter_id] = held
        # Before the memory changes, so that `check` finds the version that was there gone even if the copy fails.
        self._names[adapter_id] = name
        held.flat.copy_(adapter.flat)
        policy = Policy(name, adapter_id)
        self._prepare(policy, self.matrices(policy))
        return policy

    def check(self, policy: Policy) -> None:
        """Make sure that the adapter is still held; `serving` puts it into the weights if it is not there."""
        assert self._names.get(policy.adapter_id) == policy.name

    @contextmanager
    def serving(self, policy: Policy | None) -> Iterator[None]:
        """While the block lasts, vLLM computes with the adapter of `policy`, or with the base model for None."""
        name = None
        if policy is not None:
            self.check(policy)
            name = policy.name
        if self._cached != name:
            # For the base as well: no request names an adapter here, so blocks of different weights have equal keys.
            engine.empty_prefix_cache(self._llm)
            # Only now: if vLLM keeps its cache, the error leaves the old name, and the next call tries it again.
            self._cached = name
        with self._merged(policy):
            yield

    def matrices(self, policy: Policy) -> Matrices:
        """lora_A and lora_B of each module of an adapter that is held."""
        return self._matrices[policy.adapter_id]

    def release(self) -> None:
        """Drop the adapters."""
        self._held.clear()
        self._matrices.clear()
        self._names.clear()

    @abstractmethod
    def activate(self, policy: Policy) -> None:
        """From now on only this adapter is sampled from, until the next call; the others may be dropped."""

    @abstractmethod
    def _prepare(self, policy: Policy, matrices: Matrices) -> None:
        """Do what does not have to wait until it is sampled from."""

    @abstractmethod
    def _merged(self, policy: Policy | None) -> AbstractContextManager[None]:
        """While the block lasts, the weights hold the adapter."""


class MergedIntoOwnWeights(AdaptersInWeights):
    """vLLM has a second copy of the base, which holds the newest adapter until another one replaces it."""

    def __init__(self, llm: Any, base: Mapping[str, Tensor]) -> None:
        super().__init__(llm, base)
        self._pieces: dict[str, list[WeightSlice]] = {}
        self._written: str | None = None  # the adapter in the weights; None for the base
        self._is_whole = True  # whether that is in all of them
        self._launches = KnownLaunches()
        self._places: list[int] = []  # of the base weights

    def release(self) -> None:
        super().release()
        # They hold the matrices of the adapters that were just dropped.
        self._launches.forget()

    def activate(self, policy: Policy) -> None:
        """Nothing has to be done: the launches that are known read from the memory of both adapters."""

    def _prepare(self, policy: Policy, matrices: Matrices) -> None:
        new = {name: (b.shape[0], a.shape[1]) for name, (a, b) in matrices.items() if name not in self._pieces}
        if new:
            try:
                self._pieces |= placing.find(self._llm, new)
            except PlacementError as error:
                raise UnsupportedSettingError(
                    f'lora_sync_serving="fused" cannot be used with this model in colocate mode: {error}. '
                    'Set lora_sync_serving="runtime".'
                ) from error
        self._write(policy.name, matrices)

    @contextmanager
    def _merged(self, policy: Policy | None) -> Iterator[None]:
        name = None if policy is None else policy.name
        if name != self._written or not self._is_whole:
            self._write(name, {} if policy is None else self.matrices(policy))
        yield

    def _write(self, name: str | None, matrices: Matrices) -> None:
        """Write all weights that any adapter has changed; if it fails, all of them are written before the next use."""
        self._is_whole = False
        device = next(iter(self._parameters.values())).device
        # Such as after the trainer has moved its model to the host and back.
        places = [self._base[module].data_ptr() for module in self._pieces]
        if places != self._places:
            self._launches.forget()
            self._places = places
        self._launches.write(matrices, 1.0, lambda: self._write_in_full(matrices, device))
        if device.type == "cuda":
            # vLLM may compute in another stream.
            torch.cuda.synchronize(device)
        self._written, self._is_whole = name, True

    def _write_in_full(self, matrices: Matrices, device: torch.device) -> OneLaunch:
        launch = OneLaunch(sum(map(len, self._pieces.values())))
        # Under the trainer's autocast the product would be rounded to half precision before it is added.
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            for module, pieces in self._pieces.items():
                base = self._base[module].data
                # As a Linear has it, also with PEFT's `fan_in_fan_out`: `placing.find` refuses a Conv1D.
                for piece in pieces:
                    target = part_of(self._parameters[piece.owner], piece)
                    source = base[slice(*piece.rows), slice(*piece.columns)]
                    if module in matrices:
                        fuse_piece(target, source, *matrices[module], piece, 1.0, launch)
                    else:
                        # Only an earlier adapter has changed this module, so it gets its base back.
                        target.copy_(source)
            launch.run(1.0)
        return launch


class FoldedIntoSharedWeights(AdaptersInWeights):
    """Trainer and vLLM share the weights, so an adapter is in them only while vLLM samples.

    Between syncs the memory of one adapter is held. The next one takes its place, and the active one is set aside until
    that is active. Making the views of an 8B adapter for other memory at each sync would take as long as the sync.
    """

    def __init__(self, llm: Any, base: Mapping[str, Tensor]) -> None:
        super().__init__(llm, base)
        self._folded = FoldedBase([])
        self._modules: Sequence[str] = ()
        self._active: Policy | None = None
        self._aside: CanonicalAdapter | None = None  # a copy of the active one while another one has its memory

    def load(self, name: str, adapter_id: int, adapter: CanonicalAdapter) -> Policy:
        number = 0 if self._active is None else self._active.adapter_id
        active = self._held.get(number)  # not there if the version before this one was refused, see `matrices`
        if active is not None and active.layout == adapter.layout:
            self._aside = replace(active, flat=active.flat.clone())
            self._held[adapter_id], self._matrices[adapter_id] = self._held.pop(number), self._matrices.pop(number)
        return super().load(name, adapter_id, adapter)

    def activate(self, policy: Policy) -> None:
        self._active, self._aside = policy, None
        for number in self._held.keys() - {policy.adapter_id}:
            del self._held[number], self._matrices[number]

    def matrices(self, policy: Policy) -> Matrices:
        if self._aside is not None and policy == self._active:
            # The version that took its place was refused, so nothing samples from that.
            self._held = {policy.adapter_id: self._aside}
            self._matrices = {policy.adapter_id: modules_of(self._aside.tensors)}
            self._aside = None
        return super().matrices(policy)

    def release(self) -> None:
        # An interrupt may have come between the end of a call and of its block, which a traceback then keeps.
        if self._folded.is_folded:
            with suppress(BaseChangedError):  # found again after the next sampling, and raised then
                self._folded.unfold()
        super().release()
        self._active = self._aside = None

    def _prepare(self, policy: Policy, matrices: Matrices) -> None:
        with _changes_noticed():
            self._choose_modules(matrices)

    def _choose_modules(self, matrices: Matrices) -> None:
        """Make `_folded` that of the modules of an adapter, with nothing in the weights."""
        if self._folded.is_folded:  # taking it out has failed before
            self._folded.unfold()
        if list(matrices) != self._modules:
            rank = next(iter(matrices.values()))[0].shape[0]
            # For other modules only: it compiles kernels, and sums up the bits of every weight.
            self._folded = FoldedBase([self._base[name].data for name in matrices], rank)
            # Last, so that after an error the names are still those in `_folded`.
            self._modules = list(matrices)

    def _merged(self, policy: Policy | None) -> AbstractContextManager[None]:
        return nullcontext() if policy is None else self._with_folded(self.matrices(policy))

    @contextmanager
    def _with_folded(self, matrices: Matrices) -> Iterator[None]:
        with _changes_noticed():
            # A version of other modules may have been loaded since, and refused.
            self._choose_modules(matrices)
            self._folded.fold(list(matrices.values()))
            try:
                yield
            finally:
                self._folded.unfold()


@contextmanager
def _changes_noticed() -> Iterator[None]:
    try:
        yield
    except BaseChangedError as error:
        raise WrongPolicyError(
            f"The frozen weights that trainer and vLLM share are not what they were: {error}. Something wrote to "
            "them. Start the run again from its last checkpoint, with "
            'vllm_colocate_base="own" if it happens again.'
        ) from error
