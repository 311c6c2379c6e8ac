"""The JSON of a comparison, which several runs fill piece by piece."""

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Results:
    """What has been measured, written to its file after each change."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.all: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"benchmark": "vs_weights"}

    def put(self, value: Any, *path: str) -> None:
        """Keep a value under keys of nested objects."""
        place = self.all
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = value
        self.write()

    def get(self, *path: str) -> Any:
        place: Any = self.all
        for key in path:
            place = place.get(key, {})
        return place

    def add_run(self, run: dict[str, Any]) -> None:
        self.all.setdefault("runs", []).append(run)
        self.write()

    def write(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.all, indent=1) + "\n"
        written = self._file.with_suffix(".tmp")
        written.write_text(text)
        written.replace(self._file)


def command_line(places: Sequence[str]) -> str:
    """The running command without the options `places`, which name places on the machine."""
    words, given = iter(sys.argv[1:]), []
    for word in words:
        if word in places:
            next(words, None)
        elif not word.startswith(tuple(places)):
            given.append(word)
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *given])
