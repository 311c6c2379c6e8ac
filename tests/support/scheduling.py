"""Which process of `make test` runs what: files as a whole, since their tests share servers, and the long ones first.

A long file that begins last has one of two cores wait for the other.
"""

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

# Files that take a minute or more of one core, the longest first.
LONGEST = (
    "tests/colocate/test_several_processes.py",
    "tests/colocate/test_in_weights.py",
    "tests/colocate/test_qlora.py",
    "tests/distributed/test_ways_of_training.py",
    "tests/live/test_trl_versions.py",
    "tests/live/test_vision.py",
    "tests/live/test_fault_schedules.py",
    "tests/live/test_async_grpo.py",
    "tests/live/test_letting_go.py",
    "tests/unit/test_peft_versions.py",
    "tests/live/test_fleet.py",
    "tests/live/test_faults.py",
    "tests/live/test_vs_weights.py",
    "tests/live/test_trainers.py",
    "tests/live/test_overlap.py",
    "tests/distributed/test_two_processes.py",
    "tests/distributed/test_accelerate_configs.py",
    "tests/live/test_bad_servers.py",
    "tests/live/test_quick_load.py",
    "tests/live/test_training.py",
    "tests/contract/test_engine_contract.py",
    "tests/live/test_fused.py",
    "tests/live/test_fused_extras.py",
    "tests/live/test_fused_experts.py",
    "tests/live/test_fused_no_copy.py",
    "tests/live/test_qlora_bases.py",
    "tests/live/test_two_hosts.py",
    "tests/distributed/test_overlap.py",
    "tests/distributed/test_async_grpo.py",
    "tests/distributed/test_three_processes.py",
    "tests/live/test_cli.py",
    "tests/live/test_soak.py",
    "tests/live/test_push.py",
    "tests/unit/test_altered_versions.py",
    "tests/unit/test_letting_go.py",
    "tests/unit/test_fleet.py",
    "tests/unit/test_sglang_sync.py",
)
# Which share a server, or a launch of two processes.
TOGETHER = {
    "tests/live/test_fused.py": "fused",
    "tests/live/test_fused_extras.py": "fused",
    "tests/contract/test_engine_contract.py": "fused",
    "tests/distributed/test_two_processes.py": "two processes",
    "tests/distributed/test_overlap.py": "two processes",
    "tests/distributed/test_async_grpo.py": "two processes",
}


class LongestFirst(LoadFileScheduling):  # type: ignore[misc]
    """Keeps the order of the tests, which `sort` has changed."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return TOGETHER.get(file, file)

    def remove_node(self, node: Any) -> str | None:
        """Return the test in which a process has ended, and leave the rest of its tests to another process.

        xdist (3.8) has it repeated, and a test that hangs takes its limit of time again. It also leaves finished tests
        to the other process, which then waits for ever.
        """
        work = self.assigned_work[node]
        left = ((tests, test) for tests in work.values() for test, is_done in tests.items() if not is_done)
        tests, ended_in = next(left, ({}, None))
        if ended_in is not None:
            tests[ended_in] = True
        self.assigned_work[node] = {file: tests for file, tests in work.items() if not all(tests.values())}
        super().remove_node(node)
        return ended_in

    def schedule(self) -> None:
        super().schedule()
        # A second file for a process that was added, as the others have: it begins no test before it knows the next.
        for node in self.nodes:
            self._reschedule(node)


def sort(items: list[pytest.Item]) -> None:
    """The longest files first, and at the end the unit tests, whose files are the shortest."""
    places = {file: place for place, file in enumerate(LONGEST)}

    def place_of(item: pytest.Item) -> tuple[int, bool]:
        file = item.nodeid.partition("::")[0]
        return places.get(file, len(places)), file.startswith("tests/unit/")

    items.sort(key=place_of)
