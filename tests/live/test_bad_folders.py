"""Live tier: folders that are full, read-only, or not the server's; each a clear error with nothing half-written."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.folders import largest_file, read_only, tmpfs
from support.models import randomize_adapter
from support.policies import is_policy_of, sample, token_ids
from support.processes import start_script
from support.servers import Proxy, adapters_on
from support.trainers import steps_of, wait_for_unloads
from vllm_server import VLLMServer

from trl_lora_sync import GRPOTrainer
from trl_lora_sync.errors import AdapterExportError, AdapterNotVisibleError

Make = Callable[..., GRPOTrainer]


def names_below(folder: Path) -> list[str]:
    """Everything below the runs of a sync folder."""
    return sorted(path.name for path in folder.glob("*/*"))


def test_a_disk_that_fills_up_leaves_the_version_before_active_and_nothing_half_written(
    make_trainer: Make, clean_server: VLLMServer, base_model: Path, tmp_path: Path
) -> None:
    with tmpfs(tmp_path / "small", "size=1m") as small:
        trainer = make_trainer(clean_server.base_url, base_model, lora_sync_dir=str(small / "sync"))
        generation = trainer.vllm_generation
        generation.sync_weights()
        before = names_below(small / "sync")
        (small / "filler").write_bytes(b"x" * (os.statvfs(small).f_bavail * os.statvfs(small).f_frsize - 2**15))

        with pytest.raises(AdapterExportError, match=r"no room for the 0\.\d MB of the adapter.*Free some space"):
            generation.sync_weights()

        assert names_below(small / "sync") == before
        assert is_policy_of(trainer.model, sample(generation, [token_ids(1)]))
        (small / "filler").unlink()
        generation.sync_weights()
        assert len(adapters_on(clean_server.base_url)) == 2
        generation.close()
        assert not (small / "sync").exists()


def test_a_file_that_may_not_grow_further_ends_the_run_and_nothing_is_left(
    make_trainer: Make, clean_server: VLLMServer, base_model: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(clean_server.base_url, base_model)

    with (
        largest_file(20_000),
        pytest.raises(AdapterExportError, match=r"no room for the 0\.\d MB of the adapter.*Nothing half-written"),
    ):
        trainer.train()

    assert not (tmp_path / "sync").exists()


def test_a_folder_that_may_not_be_written_is_reported_at_the_start(
    make_trainer: Make, clean_server: VLLMServer, base_model: Path, tmp_path: Path
) -> None:
    with (
        read_only(tmp_path / "locked") as locked,
        pytest.raises(AdapterExportError, match=rf"{locked}.* cannot be created .*Set lora_sync_dir to a folder"),
    ):
        make_trainer(clean_server.base_url, base_model, lora_sync_dir=str(locked / "sync"))


def test_a_folder_below_a_file_is_reported_at_the_start(
    make_trainer: Make, clean_server: VLLMServer, base_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a folder")

    with pytest.raises(AdapterExportError, match=r"cannot be created .*Set lora_sync_dir to a folder"):
        make_trainer(clean_server.base_url, base_model, lora_sync_dir=str(tmp_path / "file" / "sync"))


def test_a_folder_that_the_server_does_not_see_is_reported_at_the_start(
    make_trainer: Make, proxy: Proxy, base_model: Path, tmp_path: Path
) -> None:
    """The server is on this host, so it is not given the time that a shared file system may take."""
    asked_at: list[float] = []

    def note(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("lora_path", "").startswith("/elsewhere/"):
            asked_at.append(time.monotonic())
        return body

    proxy.before = note
    with pytest.raises(
        AdapterNotVisibleError, match=r"does not find the adapter at /elsewhere/.*set lora_sync_dir to a shared one"
    ):
        make_trainer(proxy.base_url, base_model, lora_sync_server_dir="/elsewhere")

    assert asked_at[-1] - asked_at[0] < 10
    assert not (tmp_path / "sync").exists()


def test_a_folder_that_the_server_sees_elsewhere_works_with_lora_sync_server_dir(
    make_trainer: Make, proxy: Proxy, base_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "as_the_server_sees_it").symlink_to(tmp_path / "sync")

    trainer = make_trainer(
        proxy.base_url, base_model, max_steps=2, lora_sync_server_dir=str(tmp_path / "as_the_server_sees_it")
    )
    trainer.train()

    assert [step["lora_sync/version"] for step in steps_of(trainer)] == [1, 2]
    assert all("/as_the_server_sees_it/" in load["lora_path"] for load in proxy.loads())


def test_a_run_sweeps_what_a_killed_run_left_and_never_touches_a_live_one(
    make_trainer: Make, clean_server: VLLMServer, base_model: Path, tmp_path: Path
) -> None:
    live = make_trainer(clean_server.base_url, base_model)
    randomize_adapter(live.model, seed=1)
    live.vllm_generation.sync_weights()
    [live_name] = adapters_on(clean_server.base_url)
    script = Path(__file__).parents[1] / "support" / "run_until_killed.py"
    command = [sys.executable, script, clean_server.base_url, tmp_path / "sync"]
    with start_script(command, os.environ, subprocess.PIPE) as crashing:
        assert crashing.stdout is not None
        killed_name = crashing.stdout.readline().strip()
        crashing.send_signal(signal.SIGKILL)
    assert adapters_on(clean_server.base_url).keys() == {live_name, killed_name}

    make_trainer(clean_server.base_url, base_model)

    assert adapters_on(clean_server.base_url).keys() == {live_name}
    assert not list(tmp_path.glob(f"sync/*/{killed_name}"))
    assert is_policy_of(live.model, sample(live.vllm_generation, [token_ids(1)]))


def test_two_runs_share_a_server_and_a_folder_without_meeting(
    make_trainer: Make, clean_server: VLLMServer, base_model: Path
) -> None:
    first, second = (make_trainer(clean_server.base_url, base_model) for _ in range(2))
    for seed, trainer in enumerate((first, second)):
        randomize_adapter(trainer.model, seed)
    for _ in range(3):
        for trainer in (first, second):
            trainer.vllm_generation.sync_weights()

    rows = [sample(trainer.vllm_generation, [token_ids(1)] * 3) for trainer in (first, second)]

    assert is_policy_of(first.model, rows[0])
    assert is_policy_of(second.model, rows[1])
    assert not is_policy_of(first.model, rows[1])
    first.vllm_generation.close()
    wait_for_unloads(second)
    assert len(adapters_on(clean_server.base_url)) == 2
    assert is_policy_of(second.model, sample(second.vllm_generation, [token_ids(2)]))
