"""Memory of a trainer's GPU that the workers of engines on its host read, by CUDA IPC.

The memory is allocated apart from torch's: a handle gives access to all of an allocation, and torch's hold other
tensors as well, or cannot be shared (expandable segments). Handles go through the socket of `shared_files`, raw,
between processes of one user. All calls to the driver are in `CUDADriver`; they leave no error behind in torch.
"""

import ctypes
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

# Source: cuda.h, `CU_IPC_HANDLE_SIZE` and `CUuuid`.
_HANDLE_BYTES, _UUID_BYTES = 64, 16
# Source: cuda.h, `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`.
_WITH_PEER_ACCESS = 1
Wait = Callable[[], None]


class IPCError(Exception):
    """Why the memory of a GPU cannot be shared."""


class Offer(NamedTuple):
    """What a worker needs to open a trainer's memory.

    Attributes:
        number: of the memory; a trainer counts upwards.
        size: in bytes.
        gpu: its UUID.
        handle: of the driver, in hexadecimal.
    """

    number: int
    size: int
    gpu: str
    handle: str

    def encode(self) -> bytes:
        return json.dumps(self).encode()

    @classmethod
    def decode(cls, message: bytes) -> "Offer":
        """Raises ValueError, TypeError: it is none."""
        number, size, gpu, handle = json.loads(message)
        # ctypes raises ValueError for a shorter one too, but not before `open`, whose callers expect an IPCError.
        if len(bytes.fromhex(handle)) != _HANDLE_BYTES:
            raise ValueError("the handle has another length")
        return cls(int(number), int(size), str(gpu), handle)


class GPUMemory:
    """The trainer's end: memory on its GPU from which workers read the newest version.

    Raises:
        IPCError: it cannot be allocated or shared.
    """

    def __init__(self, number: int, size: int, device: torch.device, driver: "CUDADriver") -> None:
        self.size = size
        self.device = device
        self._driver = driver
        self._address = driver.allocate(device, size)
        try:
            self.offer = Offer(number, size, driver.gpu(device), driver.share(device, self._address).hex())
        except IPCError:
            # The caller gets no object by which it could free the memory later.
            self.free()
            raise

    def fill(self, flat: Tensor) -> None:
        """Write to the beginning; done when it returns."""
        # Waits, because no stream of this process orders the reads of workers in other processes.
        self._driver.copy(self.device, self._address, flat.data_ptr(), flat.nbytes)()

    def copy_to(self, target: Tensor, start: int = 0) -> Wait:
        """Begin to copy what is there from `start` on to `target`, in host memory; the result waits for the end."""
        return self._driver.copy(self.device, target.data_ptr(), self._address + start, target.nbytes)

    def free(self) -> None:
        """To be called once, and after all workers have closed it."""
        self._driver.free(self.device, self._address)


class OpenedMemory:
    """A worker's end.

    Args:
        device: that copies from it.

    Raises:
        IPCError: it cannot be opened here.
    """

    def __init__(self, offer: Offer, device: torch.device, driver: "CUDADriver") -> None:
        self._size = offer.size
        self._device = device
        self._driver = driver
        self._address = driver.open(device, bytes.fromhex(offer.handle), offer.gpu)

    def copy_to(self, target: Tensor) -> None:
        """Copy the beginning to `target` on the device; done when it returns.

        Raises:
            IPCError: that is more than there is, or the copy failed.
        """
        if target.nbytes > self._size:
            raise IPCError(f"it has {self._size} bytes, and {target.nbytes} are wanted")
        self._driver.copy(self._device, target.data_ptr(), self._address, target.nbytes)()

    def close(self) -> None:
        """To be called once."""
        self._driver.close(self._device, self._address)


class _Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * _HANDLE_BYTES)]


class CUDADriver:
    """What is needed of libcuda. Addresses are numbers; every method raises IPCError.

    Source: the manual of the driver API, "Memory Management"; the same from 11.4 to 13.
    """

    def __init__(self) -> None:
        try:
            # Not the runtime's library: after a refused call there, torch's next kernel would report the error.
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise IPCError(f"there is no CUDA driver ({error})") from error
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._call("cuInit", 0)

    def gpus(self) -> list[str]:
        """The UUIDs of all devices that this process sees, in the order of their numbers."""
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        return [self._gpu(index) for index in range(count.value)]

    def gpu(self, device: torch.device) -> str:
        """The UUID of a device."""
        return self._gpu(_index(device))

    def allocate(self, device: torch.device, size: int) -> int:
        """Memory that shares nothing with other allocations."""
        address = ctypes.c_uint64()
        with self._on(device):
            # ctypes passes a plain integer as a C int of 32 bits, so every size and address here is given its type.
            # `_v2`: the plain symbol of the library is an older function, with addresses of 32 bits.
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def free(self, device: torch.device, address: int) -> None:
        """To be called once no other process has it open."""
        with self._on(device):
            self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def share(self, device: torch.device, address: int) -> bytes:
        """The handle by which another process opens it."""
        handle = _Handle()
        with self._on(device):
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle.bytes)

    def open(self, device: torch.device, handle: bytes, gpu: str) -> int:
        """Another process's memory, on the same or another GPU, as `device` sees it."""
        own, visible = _index(device), self.gpus()
        if gpu not in visible:
            raise IPCError(f"{gpu} is not visible here; CUDA_VISIBLE_DEVICES of the server leaves it out")
        # Found by its UUID, because CUDA_VISIBLE_DEVICES gives one GPU another index in each process.
        other, reaches = visible.index(gpu), ctypes.c_int(1)
        if other != own:
            self._call("cuDeviceCanAccessPeer", ctypes.byref(reaches), self._device(own), self._device(other))
        if not reaches.value:
            raise IPCError(f"{visible[own]} has no peer access to {gpu}")
        address = ctypes.c_uint64()
        with self._on(device):
            # cuda.h passes the handle by value, hence a structure and not a pointer.
            given = _Handle.from_buffer_copy(handle)
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(_WITH_PEER_ACCESS))
        return address.value

    def close(self, device: torch.device, address: int) -> None:
        """End what `open` began."""
        with self._on(device):
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def copy(self, device: torch.device, target: int, source: int, size: int) -> Wait:
        """Begin a copy, after what the current stream does; the result waits until it is done."""
        # On another stream, so that what the current one gets next does not wait for it.
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream, done = self._streams[device], torch.cuda.Event()  # type: ignore[no-untyped-call]
        # What fills the source, or still uses the target, was launched in the current stream.
        stream.wait_stream(torch.cuda.current_stream(device))
        with self._on(device):
            places = (ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(size))
            self._call("cuMemcpyAsync", *places, ctypes.c_void_p(stream.cuda_stream))
        done.record(stream)
        return done.synchronize

    @contextmanager
    def _on(self, device: torch.device) -> Iterator[None]:
        """With the context that torch has for a device, in any thread."""
        number, context = self._device(_index(device)), ctypes.c_void_p()
        # Released below. Memory lives as long as the context, which torch keeps on each device that it uses.
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
        try:
            # A context is current in one thread only, and torch may not have used this one yet.
            self._call("cuCtxPushCurrent_v2", context)
            try:
                yield
            finally:
                self._call("cuCtxPopCurrent_v2", ctypes.byref(context))
        finally:
            self._call("cuDevicePrimaryCtxRelease_v2", number)

    def _gpu(self, index: int) -> str:
        found = (ctypes.c_ubyte * _UUID_BYTES)()
        self._call("cuDeviceGetUuid_v2", ctypes.byref(found), self._device(index))
        text = bytes(found).hex()
        # The form of nvidia-smi and of CUDA_VISIBLE_DEVICES, so that messages name what a user can set.
        return "GPU-" + "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))

    def _device(self, index: int) -> ctypes.c_int:
        number = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(number), index)
        return number

    def _call(self, name: str, *arguments: object) -> None:
        try:
            result = getattr(self._library, name)(*arguments)
        except AttributeError as error:
            raise IPCError(f"the CUDA driver is too old: {error}") from error
        if result:
            words = ctypes.c_char_p()
            self._library.cuGetErrorString(result, ctypes.byref(words))
            raise IPCError(f"{name}: {(words.value or b'unknown error').decode()} ({result})")


@cache
def _cuda_driver() -> CUDADriver:
    return CUDADriver()


def driver_for(device: torch.device) -> CUDADriver:
    """The driver of a device.

    Raises:
        IPCError: it has none.
    """
    if device.type != "cuda":
        raise IPCError(f"this process computes on {device.type}, not on a GPU")
    return _cuda_driver()


DriverFor = Callable[[torch.device], CUDADriver]


def visible_gpus() -> list[str]:
    """The UUIDs of the GPUs that this process sees; empty without a CUDA driver. Nothing is allocated on them."""
    try:
        return _cuda_driver().gpus()
    except IPCError:
        return []


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
