"""Distributed tier: two gloo processes that train while the real server samples their next batch."""

from typing import Any

import pytest
from support.servers import Proxy, version_of

from distributed.conftest import TwoProcesses

# The first test waits for the launch, and for the server as well.
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def launched(two_processes: TwoProcesses) -> tuple[list[dict[str, Any]], Proxy, dict[str, str]]:
    """What each process saw, the requests that were made, and the adapters that stayed."""
    return two_processes.seen("overlapping")["seen"], two_processes.overlapping, two_processes.left


def result(seen: dict[str, Any], step: str) -> dict[str, Any]:
    assert "result" in seen[step], seen[step].get("traceback")
    found: dict[str, Any] = seen[step]["result"]
    return found


def test_prompts_and_random_states_of_each_process_are_those_of_a_run_without_overlap(launched: Any) -> None:
    for seen in launched[0]:
        plain, overlap = result(seen, "plain"), result(seen, "overlap")
        assert overlap["batches"] == plain["batches"]
        assert overlap["states"] == plain["states"]
    first, second = (result(seen, "overlap")["batches"] for seen in launched[0])
    assert first != second


def test_each_batch_of_both_processes_is_of_the_version_before(launched: Any) -> None:
    seen, proxy, _ = launched
    steps = result(seen[0], "overlap")["steps"]
    lags = [step["lora_sync/version_lag"] for step in steps]
    assert lags == [0, 1, 1, 1, 1]  # across the end of an epoch of three batches
    runs = list(dict.fromkeys(request["model"].rpartition("-v")[0] for request in proxy.generations()))
    asked = [version_of(request["model"]) for request in proxy.generations() if runs[1] in request["model"]]
    assert list(dict.fromkeys(asked)) == [1, 2, 3, 4]
    assert sum(version == 1 for version in asked) == 2 * sum(version == 2 for version in asked)


def test_an_error_of_sampling_ahead_is_raised_on_both_processes_and_leaves_nothing(launched: Any) -> None:
    seen, _, left = launched
    for process in seen:
        assert process["broken"]["error"] == "GenerationError", process["broken"]
        assert "this batch is not to be" in process["broken"]["message"]
    assert left == {}
    assert result(seen[0], "overlap")["leased"] == 0
