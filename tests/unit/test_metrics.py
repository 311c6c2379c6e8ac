"""What the trainer logs about a sync."""

import contextlib
import dataclasses
import pickle
import time

import pytest

from trl_lora_sync.metrics import PhaseTimer, SyncReport, SyncTotals, percentile

REPORT = SyncReport(
    adapter_name="run-v3", version=3, payload_bytes=4096, gather_s=0.1, write_s=0.2, load_s=0.3, total_s=0.7
)


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


def test_phase_measures_its_block() -> None:
    timer = PhaseTimer()
    with timer.phase("write"):
        time.sleep(0.02)
    time.sleep(0.01)
    assert 0.02 <= timer.phases["write"] < timer.total_s() - 0.01 + 1e-9


def test_phase_entered_twice_adds_up() -> None:
    timer = PhaseTimer()
    for _ in range(2):
        with timer.phase("write"):
            time.sleep(0.02)
    assert timer.phases.keys() == {"write"}
    assert timer.phases["write"] >= 0.04


def test_phase_that_fails_is_measured_too() -> None:
    timer = PhaseTimer()
    with contextlib.suppress(KeyError), timer.phase("load"):
        time.sleep(0.02)
        raise KeyError
    assert timer.phases["load"] >= 0.02


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
