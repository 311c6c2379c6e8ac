"""Where the trainer's threads are while they sync, so that a number which is too large can be explained."""

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from versus.arms import Arm
from versus.measure import Save, Turns
from versus.workbench import Workbench

_EVERY_S = 0.002
_MOST_LINES = 12
# A frame of these says what was waited for; what they call is torch's and the standard library's.
_TELLING = ("trl_lora_sync", "trl", "peft", "vllm", "safetensors")


def measure_profiles(turns: Turns, bench: Workbench, syncs: int, save: Save) -> None:
    """For each arm, the functions in which its threads are found, by their share of the syncs' time."""
    found = {}
    for name, shares in turns.each(lambda arm: _profiled(arm, bench, syncs)):
        found[name] = {"syncs": syncs, "threads": shares}
        save(found)


def _profiled(arm: Arm, bench: Workbench, syncs: int) -> dict[str, dict[str, float]]:
    counts: dict[str, Counter[str]] = {}
    samples = 0
    for _ in range(syncs):
        bench.change_adapter()
        with _sampling(counts) as taken:
            arm.sync()
            bench.settle()
        samples += taken[0]
    return {
        thread: {where: round(count / max(1, samples), 3) for where, count in places.most_common(_MOST_LINES)}
        for thread, places in counts.items()
    }


@contextmanager
def _sampling(counts: dict[str, Counter[str]]) -> Iterator[list[int]]:
    """Look at all threads again and again while the block lasts; yields how often, in a list."""
    done, taken = threading.Event(), [0]

    def look() -> None:
        while not done.wait(_EVERY_S):
            taken[0] += 1
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            for ident, frame in sys._current_frames().items():
                where = _place(frame)
                if ident != threading.get_ident() and where:
                    # Threads of a pool differ by a number only.
                    counts.setdefault(names.get(ident, "").rstrip("0123456789_-"), Counter())[where] += 1

    looking = threading.Thread(target=look, name="profile")
    looking.start()
    try:
        yield taken
    finally:
        done.set()
        looking.join()


def _place(frame: FrameType | None) -> str:
    """The innermost function that is one of the packages that sync, with the one it called last; empty if none is."""
    called = ""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] in _TELLING:
            return f"{module}.{frame.f_code.co_name}" + (f" > {called}" if called else "")
        called, frame = f"{module}.{frame.f_code.co_name}", frame.f_back
    return ""
