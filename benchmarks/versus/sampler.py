"""Where the threads of a process are, looked at every few milliseconds; the standard library alone.

A server of the comparison runs it too: `in_server/sitecustomize.py` starts it in each of its processes.
"""

import gc
import json
import multiprocessing
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

# Where a server looks for its folder, and what the folder holds while it shall take samples.
FOLDER_VARIABLE = "VERSUS_PROFILE"
SWITCH = "on"
# How long a process takes at most to notice the switch.
NOTICED_S = 0.1

_EVERY_S = 0.002
_MOST_LINES = 15
# A frame of these names what the thread waits for; their callees belong to torch and the standard library.
_TELLING = ("trl_lora_sync", "trl", "peft", "vllm", "safetensors")

Seconds = dict[str, Counter[str]]


def profile_folder(work: Path, server: str) -> Path:
    """Where the processes of a server look for the switch and leave what they saw."""
    return work / f"{server}.profile"


def sample_while(goes_on: Callable[[], bool]) -> Seconds:
    """Look at all other threads again and again.

    Returns:
        By thread, the seconds in each function of the packages that sync.
    """
    seconds: Seconds = {}
    last = time.perf_counter()
    while goes_on():
        time.sleep(_EVERY_S)
        # Not every look comes in time: a thread in Python code lets another one in after 5 ms only.
        now = time.perf_counter()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in _frames().items():
            where = _place(frame)
            if ident != threading.get_ident() and where:
                # Threads of a pool differ by a number only.
                thread = names.get(ident, "").rstrip("0123456789_-")
                seconds.setdefault(thread, Counter())[where] += now - last
        last = now
    return seconds


def _frames() -> dict[int, FrameType]:
    """Of all threads; without a garbage collection meanwhile, which stops the process for ever before Python 3.12.

    Source: python/cpython#106883; mended in 3.11.9.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if was_enabled:
            gc.enable()


def milliseconds_each(seconds: Seconds, syncs: int) -> dict[str, dict[str, float]]:
    """The functions that took longest, in milliseconds per sync, by thread."""
    return {
        thread: {where: round(1000 * spent / syncs, 2) for where, spent in places.most_common(_MOST_LINES)}
        for thread, places in seconds.items()
    }


def watch(folder: Path) -> None:
    """Take samples of this process from now on whenever the switch is in `folder`, and leave them there."""

    def look() -> None:
        while True:
            if is_on():
                seconds = sample_while(is_on)
                draft = folder / f"{os.getpid()}.draft"
                draft.write_text(json.dumps({"process": multiprocessing.current_process().name, "seconds": seconds}))
                draft.rename(draft.with_suffix(".json"))
            time.sleep(NOTICED_S / 2)

    def is_on() -> bool:
        return (folder / SWITCH).exists()

    def start() -> None:
        threading.Thread(target=look, name="profile", daemon=True).start()

    start()
    os.register_at_fork(after_in_child=start)  # vLLM forks where it can


def _place(frame: FrameType | None) -> str:
    """The innermost function that is one of the packages that sync, with the one it called last; empty if none is."""
    called = ""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] in _TELLING:
            return f"{module}.{frame.f_code.co_name}" + (f" > {called}" if called else "")
        called, frame = f"{module}.{frame.f_code.co_name}", frame.f_back
    return ""
