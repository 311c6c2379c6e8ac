"""Live tier: trainer and server on two hosts that share no folder, which are two network namespaces of this machine."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.policies import RATIO_SPREAD
from support.processes import run
from two_hosts import NotPermittedError, first_host

TESTS = Path(__file__).parents[1]


@pytest.fixture
def private() -> Iterator[Path]:
    """A folder with a short path: vLLM makes sockets in it, whose paths may not exceed 107 characters."""
    with tempfile.TemporaryDirectory(prefix="two-hosts-") as folder:
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_reaches_a_server_on_another_host_without_a_common_folder(tmp_path: Path, private: Path) -> None:
    """With nothing set but the URL and the key, which the server has from its command line."""
    try:
        command = first_host(private, TESTS / "support" / "train_across_hosts.py")
    except NotPermittedError as error:
        pytest.skip(str(error))
    paths = [TESTS.parent, TESTS, TESTS.parent / "examples" / "demo"]
    env = {"PYTHONPATH": ":".join(map(str, paths)), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    ended = run(command, tmp_path / "log", timeout_s=580, env=env)
    assert ended.code == 0, ended.output
    seen = json.loads(ended.output.splitlines()[-1])

    assert seen["shared"] == []
    assert seen["served"], seen
    assert seen["same_base"]
    assert seen["versions"] == [1.0, 2.0, 3.0]
    assert all(abs(ratio - 1) < RATIO_SPREAD for ratio in seen["ratios"])
    assert [name.rpartition("-v")[2] for name in seen["paths"]] == ["4"]
    assert all(path.startswith("/dev/shm/trl-lora-sync-push-") for path in seen["paths"].values())
    assert seen["seen_here"] == seen["files_here"] == []
    assert seen["left"] == seen["left_at_the_end"] == []
    assert list(private.iterdir()) == []
