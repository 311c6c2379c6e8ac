"""Which GPUs a server sees: its own, and the GPUs of trainers, whose memory it reads (`engine_plugins.cuda_ipc`)."""

import re
from collections.abc import Mapping
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
# One folder for each GPU of this host or container. Source: the README of NVIDIA's driver for Linux.
_PROC = Path("/proc/driver/nvidia/gpus")


def with_all_gpus(environ: Mapping[str, str]) -> str | None:
    """`CUDA_VISIBLE_DEVICES` of a server with the other GPUs of this host after its own ones; an engine uses the first.

    None if it sees all of them, or if what is there is not understood.
    """
    own = [name.strip() for name in environ.get(VISIBLE, "").split(",") if name.strip()]
    present = _uuids()
    if not own or not present:
        return None
    if all(name.isdecimal() for name in own):
        names = [str(index) for index in range(len(present))]
    elif all(name in present for name in own):  # neither shortened UUIDs nor parts of a GPU
        names = present
    else:
        return None
    others = [name for name in names if name not in own]
    return ",".join([*own, *others]) if others and all(name in names for name in own) else None


def _uuids() -> list[str]:
    try:
        found = [
            re.search(r"^GPU UUID:\s*(GPU-\S+)", (folder / "information").read_text(), re.MULTILINE)
            for folder in sorted(_PROC.iterdir())
        ]
    except OSError:
        return []
    return [one[1] for one in found if one]
