"""Where the threads of the trainer and of its server are while they sync, to explain a number that is too large."""

import json
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from versus.arms import Arm
from versus.measure import Save, Turns
from versus.sampler import NOTICED_S, SWITCH, Seconds, milliseconds_each, profile_folder, sample_while
from versus.workbench import Workbench

# For a server's processes to write down what they saw.
_WRITTEN_S = 1.0


def measure_profiles(turns: Turns, bench: Workbench, syncs: int, work: Path, save: Save) -> None:
    """For each arm, the functions in which its threads are found, in milliseconds per sync."""
    found = {}
    for name, profile in turns.each(lambda arm: _profiled(arm, bench, syncs, profile_folder(work, arm.server.name))):
        found[name] = profile
        save(found)


def _profiled(arm: Arm, bench: Workbench, syncs: int, folder: Path) -> dict[str, Any]:
    """The trainer's threads while it syncs, and the server's from the first sync to the last, so with its idling."""
    trainer: Seconds = {}
    switch = folder / SWITCH
    for old in folder.glob("*.json"):
        old.unlink()
    switch.touch()
    try:
        time.sleep(2 * NOTICED_S)
        for _ in range(syncs):
            bench.change_adapter()
            for thread, places in _sampled_sync(arm, bench).items():
                trainer.setdefault(thread, Counter()).update(places)
    finally:
        switch.unlink()
    time.sleep(_WRITTEN_S)
    server = {}
    for file in folder.glob("*.json"):
        seen = json.loads(file.read_text())
        if seen["seconds"]:
            places = {thread: Counter(spent) for thread, spent in seen["seconds"].items()}
            server[seen["process"]] = milliseconds_each(places, syncs)
    return {"syncs": syncs, "trainer_ms": milliseconds_each(trainer, syncs), "server_ms": server}


def _sampled_sync(arm: Arm, bench: Workbench) -> Seconds:
    done = threading.Event()
    with ThreadPoolExecutor(1, thread_name_prefix="profile") as pool:
        sampled = pool.submit(sample_while, lambda: not done.is_set())
        try:
            arm.sync()
            bench.settle()
        finally:
            done.set()
        return sampled.result()
