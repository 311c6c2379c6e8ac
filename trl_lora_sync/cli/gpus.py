"""Which GPUs a server sees: its own, and the GPUs of trainers, whose memory it reads (`engine_plugins.cuda_ipc`)."""

import ctypes
from collections.abc import Mapping

VISIBLE = "CUDA_VISIBLE_DEVICES"
# Source: nvml.h, `NVML_DEVICE_UUID_V2_BUFFER_SIZE`.
_UUID_BYTES = 96


def with_all_gpus(environ: Mapping[str, str]) -> str | None:
    """`CUDA_VISIBLE_DEVICES` of a server with the other GPUs of this host after its own ones; an engine uses the first.

    None if it sees all of them, or if what is there is not understood.
    """
    own = [name.strip() for name in environ.get(VISIBLE, "").split(",") if name.strip()]
    present = gpus_of_host()
    if not own or not present:
        return None
    if all(name.isdecimal() for name in own):
        # Only their number counts: CUDA may order them by speed, and NVML orders them by their place on the bus.
        names = [str(index) for index in range(len(present))]
    elif all(name in present for name in own):  # neither shortened UUIDs nor parts of a GPU
        names = present
    else:
        return None
    others = [name for name in names if name not in own]
    # CUDA sees no GPU after an index that does not exist, so nothing may be added to such a list.
    return ",".join([*own, *others]) if others and all(name in names for name in own) else None


def gpus_of_host() -> list[str]:
    """The UUIDs of the GPUs of this host or container, whatever CUDA_VISIBLE_DEVICES is; empty without a driver."""
    try:
        # By NVML, as CUDA sees the visible GPUs only.
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    count, device, uuid = ctypes.c_uint(), ctypes.c_void_p(), ctypes.create_string_buffer(_UUID_BYTES)
    # Every value but 0 is an error, such as a driver that is not loaded.
    if nvml.nvmlInit_v2():
        return []
    try:
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        found = []
        for index in range(count.value):
            nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
            nvml.nvmlDeviceGetUUID(device, uuid, _UUID_BYTES)
            found.append(uuid.value.decode())
        return found
    finally:
        nvml.nvmlShutdown()
