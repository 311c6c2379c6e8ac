"""What a run logged, read from its output_dir: `lora_sync.jsonl`, or else the trainer's own state."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_lora_sync.cli.console import UsageError
from trl_lora_sync.metrics import GENERATE, LOG_FILE, PREFIX

Row = dict[str, Any]
Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run.

    Attributes:
        name: unique among the runs of one page.
        header: what was run, see `run_log.header`; empty where the run has no `lora_sync.jsonl`.
        rows: what was logged, by rising step; evaluations and the summary at the end are among them.
        earlier: when trainings before this one began that logged into the same folder.
    """

    name: str
    header: dict[str, Any]
    rows: Sequence[Row]
    earlier: Sequence[str] = ()

    def series(self, metric: str) -> list[Point]:
        """(step, value) of the rows that have the metric."""
        return [
            (float(row["step"]), float(row[metric]))
            for row in self.rows
            # A bool is an int to Python, and no metric.
            if isinstance(row.get(metric), int | float) and not isinstance(row[metric], bool)
        ]

    def finite(self, metric: str) -> list[float]:
        """The values of `series` that are numbers."""
        return [value for _, value in self.series(metric) if math.isfinite(value)]

    @property
    def last_step(self) -> int:
        return int(self.rows[-1]["step"])

    @property
    def has_ended(self) -> bool:
        """Whether the training came to its end; else it runs, or was killed."""
        return any("train_runtime" in row for row in self.rows)

    def syncs(self) -> dict[float, float]:
        """How many syncs each logged step stands for: the version rises by one with each, and begins again at 1."""
        found, before = {}, 0.0
        for step, version in self.series(f"{PREFIX}version"):
            found[step] = version - before if version >= before else version
            before = version
        return found

    def step_parts(self) -> dict[str, list[Point]]:
        """Seconds of generation, sync and the rest of each step; empty if the run did not log them.

        A row has the mean over the steps since the row before, but the mean sync over those steps that had one.
        """
        parts: dict[str, list[Point]] = {"generate": [], "train": [], "sync": []}
        syncs, before = self.syncs(), float(self.header.get("from_step", 0))
        generated, synced = dict(self.series(GENERATE)), dict(self.series(f"{PREFIX}total_s"))
        for step, whole in self.series("step_time"):
            if step in generated:
                generate = generated[step]
                sync = synced.get(step, 0.0) * syncs.get(step, 0.0) / max(1.0, step - before)
                # These are means over different steps, so their sum may be above the whole.
                sync = min(sync, max(0.0, whole - generate))
                parts["generate"].append((step, generate))
                parts["train"].append((step, max(0.0, whole - generate - sync)))
                parts["sync"].append((step, sync))
                before = step
        return parts if parts["train"] else {}


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in these folders, named after them, and with the parent folders where the names are the same.

    Raises:
        UsageError: a folder has no log of a training.
    """
    # `.` and `runs/..` have no last part to name a run by.
    resolved = [folder.resolve() for folder in folders]
    longest = max(len(folder.parts) for folder in resolved)
    for length in range(1, longest + 1):
        names = ["/".join(folder.parts[-length:]) for folder in resolved]
        if len(set(names)) == len(names):
            return [_read(folder, name) for folder, name in zip(folders, names, strict=True)]
    raise UsageError(f"{', '.join(map(str, folders))} name one folder twice. Give each run once.")


def _read(folder: Path, name: str) -> Run:
    header, rows, earlier = _log(folder / LOG_FILE)
    rows = rows or _trainer_state(folder)
    if not rows and header:
        raise UsageError(
            f"The run in {folder} began at {header['started']} and has not logged a step yet. Wait for its first log "
            "(logging_steps), and run this command again."
        )
    if not rows and (folder / LOG_FILE).is_file():
        raise UsageError(
            f"{folder / LOG_FILE} has no line of a run, and there is no trainer_state.json in {folder} or its "
            "checkpoints. Give the output_dir of a run that has logged a step."
        )
    if not rows:
        raise UsageError(
            f"There is no {LOG_FILE} in {folder}, and no trainer_state.json in it or its checkpoints. Expected the "
            "output_dir of a run, or one of its checkpoints."
        )
    # A distillation logs no reward, and a run with TRL's own sync no version.
    if not any("reward" in row or f"{PREFIX}version" in row for row in rows):
        raise UsageError(
            f"The log in {folder} has no reward and no sync in it. Is it the output folder of a run with a reward?"
        )
    return Run(name=name, header=header, rows=rows, earlier=earlier)


def _log(file: Path) -> tuple[dict[str, Any], list[Row], list[str]]:
    """The header and the rows of the newest training in the file, from its start through all that resumed it.

    The third is when those before it began that have rows.
    """
    header: dict[str, Any] = {}
    rows: list[Row] = []
    earlier: list[str] = []
    try:
        # A run that was killed may have left half of a character.
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []
    except OSError as error:
        raise UsageError(f"{file} cannot be read ({error}).") from error
    for entry in filter(None, map(_entry, lines)):
        if "started" not in entry:
            rows.append(entry)
        elif entry.get("from_step"):
            # Steps after the checkpoint were trained again, and the end of that part is not the end of the run.
            rows = [row for row in rows if row["step"] <= entry["from_step"] and "train_runtime" not in row]
            # Versions and settings come from the last part, and the start from the first.
            header = entry | {key: header[key] for key in ("started", "from_step") if key in header}
        else:
            earlier += [header["started"]] if header and rows else []
            header, rows = entry, []
    return header, rows, earlier


def _entry(line: str) -> dict[str, Any] | None:
    """One line; None for what a killed run wrote of its last, and for a row without a step."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and ("started" in found or _has_step(found)) else None


def _has_step(row: Any) -> bool:
    return isinstance(row, dict) and isinstance(row.get("step"), int | float)


def _trainer_state(folder: Path) -> list[Row]:
    """The log history of the newest state there is."""
    newest: dict[str, Any] = {}
    # The newest by its step, as a copy of a folder changes the times of its files.
    for file in [*folder.glob("trainer_state.json"), *folder.glob("checkpoint-*/trainer_state.json")]:
        try:
            state = json.loads(file.read_text())
            if not isinstance(state, dict):
                raise ValueError("it is not a state of a trainer")
        except (OSError, ValueError) as error:
            raise UsageError(f"{file} cannot be read ({error}). Is the run still writing it?") from error
        if not newest or state.get("global_step", 0) > newest.get("global_step", 0):
            newest = state
    return [row for row in newest.get("log_history") or [] if _has_step(row)]
