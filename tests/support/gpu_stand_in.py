"""Processes that share the memory of a GPU, in one process and without a GPU, by the rules of CUDA IPC."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from trl_lora_sync.engine_plugins.cuda_ipc import IPCError

GPU = "GPU-01234567-89ab-cdef-0123-456789abcdef"


class StandInGPU:
    """What all processes see of one GPU.

    Attributes:
        opened: how often each allocation is open in another process than its own.
    """

    def __init__(self) -> None:
        self.owners: dict[int, tuple[StandInProcess, Any]] = {}
        self.handles: dict[bytes, int] = {}
        self.opened: dict[int, int] = {}


class StandInProcess:
    """A driver, see `engine_plugins.cuda_ipc.CUDADriver`. A copy happens only when it is waited for."""

    def __init__(self, gpu: StandInGPU, visible: str = GPU) -> None:
        self._all = gpu
        self._visible = visible
        self._open: list[int] = []
        self.refuses_to_share = False

    def __call__(self, device: torch.device) -> "StandInProcess":
        """As `driver_for`."""
        return self

    def gpu(self, device: torch.device) -> str:
        return GPU

    def allocate(self, device: torch.device, size: int) -> int:
        memory = ctypes.create_string_buffer(size)
        address = ctypes.addressof(memory)
        self._all.owners[address] = (self, memory)
        return address

    def free(self, device: torch.device, address: int) -> None:
        assert not self._all.opened.get(address), "it is still open in another process"
        del self._all.owners[address]
        self._all.handles = {handle: one for handle, one in self._all.handles.items() if one != address}

    def share(self, device: torch.device, address: int) -> bytes:
        if self.refuses_to_share:
            raise IPCError("cuIpcGetMemHandle: not supported (801)")
        assert self._all.owners[address][0] is self
        handle = address.to_bytes(8, "little").ljust(64, b"\0")
        self._all.handles[handle] = address
        return handle

    def open(self, device: torch.device, handle: bytes, gpu: str) -> int:
        if gpu != self._visible:
            raise IPCError(f"{gpu} is not visible here")
        if handle not in self._all.handles:
            raise IPCError("cuIpcOpenMemHandle_v2: invalid resource handle (400)")
        address = self._all.handles[handle]
        if self._all.owners[address][0] is self:
            raise IPCError("cuIpcOpenMemHandle_v2: invalid device context (201)")
        self._all.opened[address] = self._all.opened.get(address, 0) + 1
        self._open.append(address)
        return address

    def close(self, device: torch.device, address: int) -> None:
        if address not in self._open:
            raise IPCError("cuIpcCloseMemHandle: invalid argument (1)")
        self._open.remove(address)
        self._all.opened[address] -= 1
        if not self._all.opened[address]:
            del self._all.opened[address]

    def copy(self, device: torch.device, target: int, source: int, size: int) -> Callable[[], None]:
        def wait() -> None:
            for address in (target, source):
                if address in self._all.owners:
                    assert address in self._open or self._all.owners[address][0] is self, "it is not open here"
            ctypes.memmove(target, source, size)

        return wait
