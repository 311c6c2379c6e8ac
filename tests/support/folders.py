"""Folders that cannot be written, in the ways a machine makes them so."""

import contextlib
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[Path]:
    """Mount an empty file system in memory; skips the test where that is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"only a privileged user can mount a file system here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        # Lazy, as a process that was forked meanwhile may have a file there for a moment.
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let this process write no file beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[Path]:
    """A folder without permission to write: by its mode, or by its mount for root, whom modes do not hold back."""
    if os.geteuid() == 0:
        with tmpfs(folder, "ro,size=1m") as mounted:
            yield mounted
        return
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o500)
    try:
        yield folder
    finally:
        folder.chmod(0o700)


@contextlib.contextmanager
def becomes_read_only(folder: Path) -> Iterator[bool]:
    """Forbid every change below a folder that is in use; others go on reading it.

    Yields:
        Whether that was possible: root, whom modes do not hold back, has to mount the folder over itself.
    """
    if os.geteuid() != 0:
        modes = {path: path.stat().st_mode for path in [folder, *folder.rglob("*")] if path.is_dir()}
        for path, mode in modes.items():
            path.chmod(mode & ~0o222)
        try:
            yield True
        finally:
            for path, mode in modes.items():
                path.chmod(mode)
        return
    if subprocess.run(["mount", "--bind", folder, folder], capture_output=True).returncode:
        yield False
        return
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        yield True
    finally:
        # Also while a process has a file open there, as a run has its lock.
        subprocess.run(["umount", "--lazy", folder], check=True)
