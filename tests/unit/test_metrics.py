"""What the trainer logs about a sync."""

import contextlib
import dataclasses
import pickle
import time

import pytest

from trl_lora_sync import metrics
from trl_lora_sync.metrics import PhaseTimer, SyncReport, SyncTotals, percentile

REPORT = SyncReport(
    adapter_name="run-v3", version=3, payload_bytes=4096, gather_s=0.1, write_s=0.2, load_s=0.3, total_s=0.7
)


class Clock:
    """Stands for `time`; a test moves it."""

    now = 1000.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the phases."""
    clock = Clock()
    monkeypatch.setattr(metrics, "time", clock)
    return clock


def test_report_logs_these_names() -> None:
    assert REPORT.metrics() == {
        "lora_sync/version": 3,
        "lora_sync/total_s": 0.7,
        "lora_sync/gather_s": 0.1,
        "lora_sync/write_s": 0.2,
        "lora_sync/load_s": 0.3,
        "lora_sync/bytes": 4096,
        "lora_sync/servers": 1,
        "lora_sync/retries": 0,
    }


def test_report_of_several_servers_logs_the_seconds_of_each_under_its_place() -> None:
    metrics = dataclasses.replace(REPORT, servers=2, server_load_s={0: 0.1, 2: 0.3}).metrics()
    assert metrics["lora_sync/servers"] == 2
    assert {name: value for name, value in metrics.items() if name.startswith("lora_sync/load_s/")} == {
        "lora_sync/load_s/0": 0.1,
        "lora_sync/load_s/2": 0.3,
    }


def test_report_travels_between_processes_unchanged() -> None:
    assert pickle.loads(pickle.dumps(REPORT)) == REPORT


def test_report_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        REPORT.version = 4


def test_timer_starts_when_it_is_made() -> None:
    before = time.perf_counter()
    timer = PhaseTimer()
    assert before <= timer.started <= time.perf_counter()


def test_phase_measures_its_block(clock: Clock) -> None:
    timer = PhaseTimer(started=clock.now)
    with timer.phase("write"):
        clock.now += 2
    clock.now += 1
    assert timer.phases == {"write": 2}
    assert timer.total_s() == 3


def test_phase_entered_twice_adds_up(clock: Clock) -> None:
    timer = PhaseTimer(started=clock.now)
    for _ in range(2):
        with timer.phase("write"):
            clock.now += 2
    assert timer.phases == {"write": 4}


def test_phase_that_fails_is_measured_too(clock: Clock) -> None:
    timer = PhaseTimer(started=clock.now)
    with contextlib.suppress(KeyError), timer.phase("load"):
        clock.now += 2
        raise KeyError
    assert timer.phases == {"load": 2}


def test_totals_say_syncs_seconds_bytes_and_retries_in_one_line() -> None:
    totals = SyncTotals()
    for version, seconds in enumerate((0.5, 0.1, 0.3), start=1):
        totals.add(dataclasses.replace(REPORT, version=version, total_s=seconds, payload_bytes=1_000_000, retries=1))
    assert totals.summary() == (
        "LoRA adapter sync, in all: 3 syncs; median 0.300 s, p99 0.500 s; 3.0 MB sent; 3 requests sent again."
    )


def test_totals_name_the_verify_gap_where_versions_were_verified() -> None:
    totals = SyncTotals(seconds=[0.1], gaps=[0.01, 0.03])
    assert "verify gap 0.0200 (at most 0.0300)" in totals.summary()


def test_totals_of_no_sync_say_nothing() -> None:
    assert SyncTotals().summary() == ""


@pytest.mark.parametrize(("count", "expected"), [(1, 1), (2, 2), (99, 99), (100, 99), (1000, 990)])
def test_percentile_is_the_smallest_value_that_enough_do_not_exceed(count: int, expected: int) -> None:
    assert percentile(range(count, 0, -1), 99) == expected
