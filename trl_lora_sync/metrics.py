"""Metric names and timers, in one place."""

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

PREFIX = "lora_sync/"
VERIFY_GAP = f"{PREFIX}verify_gap"
GENERATE = f"{PREFIX}generate_s"
VERSION_LAG = f"{PREFIX}version_lag"
OVERLAP_WAIT = f"{PREFIX}overlap_wait_s"
OVERLAP_HIDDEN = f"{PREFIX}overlap_hidden"
OVERLAP_MASKED = f"{PREFIX}overlap_masked"
LOG_FILE = "lora_sync.jsonl"  # in the output_dir of a run


@dataclass
class PhaseTimer:
    """Seconds spent per phase of one sync, and in all since it was made."""

    phases: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to the phase `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            # Added up, as one sync may make two attempts (`AdapterSync.publish`).
            self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - start

    def total_s(self) -> float:
        return time.perf_counter() - self.started


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """What one accepted sync did; the same on every process.

    Attributes:
        adapter_name: the name that generation requests use from now on.
        version: number of the version in this run.
        payload_bytes: size of the adapter's tensors.
        gather_s: reading the adapter from the model into canonical form.
        write_s: writing it for the servers.
        load_s: having the servers load it.
        verify_s: comparing what they read with what was written, and what they compute with the trainer.
        total_s: all of it, with everything in between.
        servers: how many servers have it.
        server_load_s: for each server of several that has it, its place in the setting and its seconds of `load_s`.
        retries: requests that were sent again since the sync before, generation included.
        verify_gap: mean |served - trained log-probability| of the probe prompt under this version; None if that was not
            looked at.
        verify_gap_max: the largest of these.
        is_verified: whether every server has proved, in this sync or before, that it samples from what it is sent; None
            with `lora_sync_verify="off"`.
    """

    adapter_name: str
    version: int
    payload_bytes: int
    gather_s: float
    write_s: float
    load_s: float
    total_s: float
    servers: int = 1
    server_load_s: dict[int, float] = field(default_factory=dict)
    retries: int = 0
    verify_s: float = 0.0
    verify_gap: float | None = None
    verify_gap_max: float | None = None
    is_verified: bool | None = None

    def metrics(self) -> dict[str, float]:
        """What the trainer logs."""
        # Names without a value are left out: a gap of 0 would look like a measured one.
        verified = {
            f"{PREFIX}verify_s": self.verify_s if self.is_verified is not None else None,
            VERIFY_GAP: self.verify_gap,
            f"{VERIFY_GAP}_max": self.verify_gap_max,
            f"{PREFIX}verified": self.is_verified,
        }
        return {
            f"{PREFIX}version": self.version,
            f"{PREFIX}total_s": self.total_s,
            f"{PREFIX}gather_s": self.gather_s,
            f"{PREFIX}write_s": self.write_s,
            f"{PREFIX}load_s": self.load_s,
            f"{PREFIX}bytes": self.payload_bytes,
            f"{PREFIX}servers": self.servers,
            # Numbered by the setting, so that a server keeps its curve while another one is excluded.
            **{f"{PREFIX}load_s/{place}": seconds for place, seconds in self.server_load_s.items()},
            f"{PREFIX}retries": self.retries,
            **{name: float(value) for name, value in verified.items() if value is not None},
        }


@dataclass
class SyncTotals:
    """What all syncs of one training came to, for the line at its end."""

    seconds: list[float] = field(default_factory=list)
    payload_bytes: int = 0
    retries: int = 0
    gaps: list[float] = field(default_factory=list)

    def add(self, report: SyncReport) -> None:
        """Count one accepted sync."""
        self.seconds.append(report.total_s)
        self.payload_bytes += report.payload_bytes
        self.retries += report.retries
        if report.verify_gap is not None:
            self.gaps.append(report.verify_gap)

    def summary(self) -> str:
        """One line: syncs, seconds, bytes, verify gap if there is one, retries; empty without a sync."""
        if not self.seconds:
            return ""
        count = len(self.seconds)
        parts = [
            f"{count} sync{'s' if count > 1 else ''}",
            f"median {statistics.median(self.seconds):.3f} s, p99 {percentile(self.seconds, 99):.3f} s",
            f"{self.payload_bytes / 1e6:.1f} MB sent",
        ]
        if self.gaps:
            parts.append(f"verify gap {statistics.fmean(self.gaps):.4f} (at most {max(self.gaps):.4f})")
        parts.append(f"{self.retries} request{'' if self.retries == 1 else 's'} sent again")
        return f"LoRA adapter sync, in all: {'; '.join(parts)}."


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of `values` that at least `percent` of them do not exceed (nearest rank)."""
    # Not interpolated: with fewer than 100 syncs the p99 is the slowest one, and not a time that no sync took.
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]
