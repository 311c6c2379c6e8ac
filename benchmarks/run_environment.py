"""What a reader needs to judge or repeat a benchmark's numbers; no paths, names or addresses of the machine."""

import contextlib
import importlib.metadata
import os
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("torch", "transformers", "peft", "trl", "trl-lora-sync", "safetensors", "bitsandbytes")


def run_environment(engine: str | None = None, engine_version: str = "") -> dict[str, Any]:
    """Command, date, versions and hardware of the running script and of its server, if it has one."""
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        **({"server": {"engine": engine, "version": engine_version}} if engine else {}),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": versions,
        "cpu": cpu_name(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
