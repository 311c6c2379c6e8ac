"""Unit tier: what a sweep removes, and what it leaves alone."""

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from contract.served import SMALL, engine_at, soon

from trl_lora_sync import addresses
from trl_lora_sync.adapter.store import AdapterStore, StoredAdapter, run_states
from trl_lora_sync.cli.main import main
from trl_lora_sync.engines.base import Deadline, Engine
from trl_lora_sync.runtime import run
from trl_lora_sync.servers.transports import HTTPTransport
from trl_lora_sync.testing import FakeSGLang, random_adapter
from unit.servers import nobody_listening
from unit.tiny import everything_under

ADAPTER = random_adapter(SMALL, 1, rank=8)


@pytest.fixture
def fake() -> Iterator[FakeSGLang]:
    with FakeSGLang(shapes=SMALL) as running:
        yield running


@pytest.fixture
def engine(fake: FakeSGLang) -> Iterator[Engine]:
    connected = engine_at(fake.base_url, "sglang")
    yield connected
    connected.close()


@pytest.fixture
def live(tmp_path: Path) -> Iterator[AdapterStore]:
    store = AdapterStore(tmp_path / "sync")
    store.write(1, ADAPTER)
    yield store
    store.close()


def dead_run(root: Path, servers: Sequence[str] = ()) -> tuple[AdapterStore, StoredAdapter]:
    """A run that was killed: its folder is there, and its lock is free."""
    store = AdapterStore(root, servers=servers)
    stored = store.write(1, ADAPTER)
    assert store.lock is not None
    os.close(store.lock)
    return store, stored


def foreign_run(root: Path) -> AdapterStore:
    """A run on another host."""
    store, _ = dead_run(root)
    owner = store.directory / "owner.json"
    owner.write_text(json.dumps(json.loads(owner.read_text()) | {"boot": "another", "host": "elsewhere"}))
    return store


def test_dead_run_goes_and_live_and_foreign_ones_stay(
    live: AdapterStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dead, _ = dead_run(tmp_path / "sync")
    foreign = foreign_run(tmp_path / "sync")
    assert run_states(tmp_path / "sync") == {live.run_id: "live", dead.run_id: "dead", foreign.run_id: "elsewhere"}
    assert main(["sweep", str(tmp_path / "sync")]) == 0
    said = capsys.readouterr().out
    assert f"removed {dead.run_id}" in said
    assert f"left {live.run_id}: its run goes on" in said
    assert f"left {foreign.run_id}: its run was started on another host" in said
    assert not dead.directory.exists()
    assert live.directory.exists()
    assert foreign.directory.exists()


def test_dry_run_removes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dead, _ = dead_run(tmp_path / "sync")
    assert main(["sweep", str(tmp_path / "sync"), "--dry-run"]) == 0
    assert f"would remove {dead.run_id}" in capsys.readouterr().out
    assert dead.directory.exists()


def test_clean_folder_is_said_to_be_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", str(tmp_path)]) == 0
    assert "nothing was left behind" in capsys.readouterr().out


def test_page_of_a_report_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lora-sync-report.html").write_text("<html>")
    assert run_states(tmp_path) == {}
    assert main(["sweep", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}: nothing was left behind.\n"


@pytest.mark.parametrize("owner", [None, ""])
def test_run_that_was_killed_before_it_noted_its_host_is_named_and_left(
    owner: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report was that nothing is left. A run on another host may be making the folder at this moment."""
    half = tmp_path / ".lora-sync-20260101-000000-abcdef12.starting"
    half.mkdir()
    if owner is not None:
        (half / "owner.json").write_text(owner)
    assert main(["sweep", str(tmp_path)]) == 0
    assert capsys.readouterr().out == (
        f"left {half.name}: its run was started on another host, or before this one booted, or was killed before it "
        "noted that; delete it there, or by hand\n"
    )
    assert half.exists()


def test_runs_below_an_output_dir_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where they are by default if a server is on another host."""
    dead, _ = dead_run(tmp_path / "_lora_sync")
    assert main(["sweep", str(tmp_path)]) == 0
    assert f"removed {dead.run_id}" in capsys.readouterr().out
    assert not dead.directory.exists()


@pytest.mark.parametrize("is_there", [True, False])
def test_without_an_argument_the_default_folder_is_swept(
    is_there: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "SHARED_MEMORY", tmp_path)
    root = tmp_path / f"trl-lora-sync-{os.getuid()}"
    dead = dead_run(root)[0] if is_there else None
    assert main(["sweep"]) == 0
    said = capsys.readouterr().out
    assert said == (f"removed {dead.run_id}\n" if dead else f"{root}: nothing was left behind.\n")


def test_folder_of_dir_is_swept_without_a_url(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The default folder was swept instead, and the answer was that nothing was left behind."""
    dead, _ = dead_run(tmp_path / "sync")
    assert main(["sweep", "--dir", str(tmp_path / "sync")]) == 0
    assert capsys.readouterr().out == f"removed {dead.run_id}\n"
    assert main(["sweep", "--dir", str(tmp_path / "missing")]) == 2
    assert "is not a folder" in capsys.readouterr().err


@pytest.mark.outside
def test_server_that_is_stopped_is_not_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    with nobody_listening() as url:
        started = time.monotonic()
        assert main(["sweep", url]) == 1
    assert time.monotonic() - started < 20  # the default --timeout is 30
    assert "`trl-lora-sync sweep` removes the files" in capsys.readouterr().err


@pytest.mark.outside
def test_server_forgets_adapters_of_dead_runs_only(
    fake: FakeSGLang, engine: Engine, live: AdapterStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "sync"
    dead, left = dead_run(root)
    gone = AdapterStore(root)
    orphan = gone.write(2, ADAPTER)
    foreign = foreign_run(root)
    active = live.write(2, ADAPTER)
    elsewhere = AdapterStore(tmp_path / "other")
    unknown = elsewhere.write(1, ADAPTER)
    strange = StoredAdapter(
        name="a-chat-adapter",
        version=0,
        rank=8,
        target_modules=ADAPTER.target_modules,
        payload_bytes=0,
        path=active.path,
        server_path=active.server_path,
    )
    sent = run(
        HTTPTransport(AdapterStore(tmp_path / "of-another-host")).write(1, ADAPTER, Deadline.after(10.0, "the test"))
    )
    abroad = foreign.directory / f"{foreign.run_id}-v1"
    kept = StoredAdapter(
        name=abroad.name,
        version=1,
        rank=8,
        target_modules=ADAPTER.target_modules,
        payload_bytes=0,
        path=abroad,
        server_path=str(abroad),
    )
    for stored in (left, orphan, active, unknown, strange, sent, kept):
        engine.load(stored, soon())
    gone.close()  # as a run does that could not reach the server at its end

    assert main(["sweep", fake.base_url, "--dir", str(root)]) == 0

    said = capsys.readouterr().out
    assert f"unloaded {left.name}" in said
    assert f"left {orphan.name}: its run has no folder" in said
    assert f"left {active.name}: its run goes on" in said
    assert f"left {unknown.name}: its run keeps its files elsewhere" in said
    assert f"left {sent.name}: its run keeps its files elsewhere, or sends none" in said
    assert f"left {kept.name}: its run was started on another host" in said
    assert "left a-chat-adapter: it is not an adapter of this package" in said
    others = {active.name, unknown.name, strange.name, sent.name, kept.name}
    assert set(engine.loaded(soon())) == {orphan.name, *others}
    assert not dead.directory.exists()

    assert main(["sweep", fake.base_url, "--dir", str(root), "--missing"]) == 0

    assert f"unloaded {orphan.name}" in capsys.readouterr().out
    assert set(engine.loaded(soon())) == others
    elsewhere.close()


@pytest.mark.outside
def test_adapter_of_a_live_run_in_another_container_stays(
    fake: FakeSGLang, engine: Engine, live: AdapterStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was unloaded under the live run: each container has a separate /dev/shm, by the same path."""
    active = live.write(2, ADAPTER)
    engine.load(active, soon())
    (tmp_path / "sync").rename(tmp_path / "of-the-container")

    assert main(["sweep", fake.base_url, "--dir", str(tmp_path / "sync")]) == 0

    said = capsys.readouterr().out
    assert said.startswith(f"left {active.name}: ")
    assert "in another container; if it is over, sweep with --missing" in said
    assert list(engine.loaded(soon())) == [active.name]
    (tmp_path / "of-the-container").rename(tmp_path / "sync")


@pytest.mark.outside
def test_dry_run_unloads_nothing(
    fake: FakeSGLang, engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, left = dead_run(tmp_path / "sync")
    engine.load(left, soon())
    assert main(["sweep", fake.base_url, "--dir", str(tmp_path / "sync"), "--dry-run"]) == 0
    assert f"would unload {left.name}" in capsys.readouterr().out
    assert left.name in engine.loaded(soon())


@pytest.mark.outside
def test_dry_run_lists_what_the_sweep_then_does(
    fake: FakeSGLang, engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It announced a run whose adapters another server may have, and left out a run that was killed at its start."""
    root = tmp_path / "sync"
    dead, left = dead_run(root)
    engine.load(left, soon())
    killed, _ = dead_run(root)
    killed.directory.rename(root / f".{killed.run_id}.starting")
    with FakeSGLang(shapes=SMALL) as other:
        shared, _ = dead_run(root, [other.base_url])
        before = everything_under(root)
        assert main(["sweep", fake.base_url, "--dir", str(root), "--dry-run"]) == 0
        announced = capsys.readouterr().out.splitlines()
        assert everything_under(root) == before
        assert left.name in engine.loaded(soon())
        assert main(["sweep", fake.base_url, "--dir", str(root)]) == 0
    done = capsys.readouterr().out.splitlines()
    assert [line.replace("would remove", "removed").replace("would unload", "unloaded") for line in announced] == done
    assert done == [
        f"unloaded {left.name}",
        f"removed .{killed.run_id}.starting",
        f"removed {dead.run_id}",
        f"left {shared.run_id}: a server may still have its adapters; sweep the URL of each server that it used",
    ]


@pytest.mark.outside
def test_home_folder_in_dir_is_the_one_that_runs_write_to(
    fake: FakeSGLang, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell does not expand `--dir=~/sync`, and nothing was found in a folder of that very name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    dead, _ = dead_run(Path("~/sync"))
    assert main(["sweep", fake.base_url, "--dir=~/sync"]) == 0
    assert f"removed {dead.run_id}" in capsys.readouterr().out


@pytest.mark.parametrize("target", ["missing", "", "localhost:8000"])
def test_what_is_neither_a_folder_nor_a_url_ends_with_2(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", target]) == 2
    said = capsys.readouterr().err
    assert f"{target!r} is not a folder" in said
    assert "such as http://localhost:8000" in said


@pytest.mark.parametrize("flags", [["--missing"], ["--server-dir", "/mnt/sync"]])
@pytest.mark.parametrize("has_folder", [True, False])
def test_flags_about_a_server_need_one(
    flags: list[str], has_folder: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were ignored, and the adapters stayed."""
    assert main(["sweep", *([str(tmp_path)] if has_folder else []), *flags]) == 2
    assert f"{flags[0]} is about the adapters on a server, and no server is named" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "-3", "nan"])
def test_timeout_that_is_not_a_positive_number_ends_with_2(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "http://localhost:8000", "--timeout", seconds]) == 2
    assert f"--timeout must be a positive, finite number of seconds, got {seconds}" in capsys.readouterr().err


@pytest.mark.outside
def test_record_of_an_adapter_that_another_server_may_have_is_kept(
    fake: FakeSGLang, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeSGLang(shapes=SMALL) as other:
        ended = AdapterStore(tmp_path / "sync", servers=[other.base_url])
        stored = ended.write(1, ADAPTER)
        name = stored.name
        engine = engine_at(other.base_url, "sglang")
        engine.load(stored, soon())
        engine.close()
        ended.close([name])  # as where the server did not confirm the unload
        assert main(["sweep", fake.base_url, "--dir", str(tmp_path / "sync")]) == 0
        assert f"left {ended.run_id}: a server may still have its adapters" in capsys.readouterr().out
        assert list((ended.directory / name).iterdir()) == []
        assert main(["sweep", other.base_url, "--dir", str(tmp_path / "sync")]) == 0
    assert capsys.readouterr().out == f"unloaded {name}\nremoved {ended.run_id}\n"
    assert not ended.directory.exists()
