"""Unit tier: which requests a gateway has cut off."""

import logging

import pytest

from trl_lora_sync.errors import AdapterLostError, GenerationError, LoRASyncError, ServerUnreachableError
from trl_lora_sync.servers.cut_offs import CutOffs


@pytest.fixture
def cut_offs() -> CutOffs:
    return CutOffs("http://gateway:8000", 5.0)


def broken_after(waited_s: float | None) -> ServerUnreachableError:
    error = ServerUnreachableError("The connection broke.")
    error.waited_s = waited_s
    return error


def test_second_request_that_is_cut_off_after_the_same_time_ends_the_run(
    cut_offs: CutOffs, caplog: pytest.LogCaptureFixture
) -> None:
    cut_offs.note(broken_after(60.0), 1000.0)
    assert "A request to http://gateway:8000 was cut off after 60 s, and its server is well" in caplog.text
    with pytest.raises(GenerationError, match=r"cut off after 60 s.*lora_sync_generation_timeout, or set") as raised:
        cut_offs.note(broken_after(60.3), 1061.0)
    assert isinstance(raised.value.__cause__, ServerUnreachableError)


def test_every_caller_gets_the_error_from_then_on(cut_offs: CutOffs) -> None:
    cut_offs.note(broken_after(60.0), 1000.0)
    for at in (1061.0, 1061.1, 1062.0):
        with pytest.raises(GenerationError):
            cut_offs.note(broken_after(60.0), at)
    cut_offs.note(broken_after(0.1), 9000.0)  # hours later, when the gateway may be another one


def test_limit_of_hours_ends_the_run_as_well(cut_offs: CutOffs) -> None:
    cut_offs.note(broken_after(7200.0), 10000.0)
    with pytest.raises(GenerationError, match="cut off after 7200 s"):
        cut_offs.note(broken_after(7200.0), 17201.0)


@pytest.mark.parametrize(
    ("waited_s", "at"),
    [
        (60.3, 1000.2),  # was under way together with the first one
        (45.0, 1061.0),  # after another time
        (60.0, 5000.0),  # more than an hour later
    ],
)
def test_request_that_may_have_ended_for_another_reason_ends_no_run(
    cut_offs: CutOffs, waited_s: float, at: float
) -> None:
    cut_offs.note(broken_after(60.0), 1000.0)
    cut_offs.note(broken_after(waited_s), at)


def test_requests_that_end_together_are_warned_of_once(cut_offs: CutOffs, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(5):
        cut_offs.note(broken_after(60.0), 1000.0 + number / 10)
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1


@pytest.mark.parametrize(
    "error", [None, broken_after(None), broken_after(0.5), AdapterLostError("It no longer knows it.")]
)
def test_server_that_was_away_or_lost_an_adapter_has_cut_off_nothing(
    cut_offs: CutOffs, error: LoRASyncError | None, caplog: pytest.LogCaptureFixture
) -> None:
    for at in (1000.0, 1100.0):
        cut_offs.note(error, at)
    assert not caplog.records
