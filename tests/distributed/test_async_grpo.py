"""Distributed tier: two gloo processes that train one adapter with AsyncGRPO, from samples of the first one."""

import pytest

from distributed.conftest import TwoProcesses

# The test waits for the launch, and for the server as well.
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


def test_two_processes_train_one_adapter_and_the_first_one_samples(two_processes: TwoProcesses) -> None:
    trained = [seen["train"] for seen in two_processes.seen("asynchronous")["seen"]]

    assert all("result" in one for one in trained), [one.get("traceback") for one in trained]
    first, second = (one["result"] for one in trained)
    assert first["samples"]
    assert not second["samples"]
    for one in (first, second):
        assert one["versions"] == [2, 3, 4]
        assert one["model_version"] == 4
        assert one["token_budget"] == 512  # of the server
    assert first["adapter"] == second["adapter"]
    assert len(two_processes.asynchronous.loads()) == 4
