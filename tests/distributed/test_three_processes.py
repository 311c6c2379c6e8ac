"""Distributed tier: the gather alone in three gloo processes, with sizes that three cannot share evenly."""

from pathlib import Path
from typing import Any

import pytest
from support.launch import CPU_ENV, TESTS, launch

pytestmark = pytest.mark.slow
LAYOUTS = ["fsdp1", "fsdp1-mixed", "fsdp1-grad-op", "fsdp2", "fsdp2-offload"]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of three processes saw of every layout; one launch for all of them."""
    folder = tmp_path_factory.mktemp("three")
    script = TESTS / "support" / "three_processes.py"
    return launched(script, folder)


def launched(script: Path, folder: Path) -> list[dict[str, Any]]:
    ended = launch(script, [str(folder)], folder, ["--multi_gpu"], processes=3, env=CPU_ENV, timeout_s=240.0)
    processes: list[dict[str, Any]] = ended["seen"]
    return processes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_process_0_gets_every_bit_and_the_others_nothing(layout: str, seen: list[dict[str, Any]]) -> None:
    """Before the first forward pass and after one, NaN, minus zero and denormals included."""
    first, *others = (process[layout] for process in seen)

    assert first == {"gathered": [4, 4], "same": [True] * 8}
    assert others == [{"gathered": [0, 0], "same": []}] * 2


def test_a_gather_that_a_process_leaves_out_raises_on_all_within_the_timeout(seen: list[dict[str, Any]]) -> None:
    from support.three_processes import GROUP_TIMEOUT_S

    outcomes = [process["never_coming"] for process in seen]

    assert all("error" in outcome for outcome in outcomes), outcomes
    assert outcomes[2]["error"] == "ConnectionError"
    assert all(outcome["seconds"] < 3 * GROUP_TIMEOUT_S for outcome in outcomes)
