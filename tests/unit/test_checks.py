"""Unit tier: one list of checks for the start, for a server that came back, and for the doctor. On SGLang's rules."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contract.served import SMALL

from trl_lora_sync.adapter.store import write_adapter
from trl_lora_sync.checks import listed
from trl_lora_sync.checks.finding import OK
from trl_lora_sync.checks.subject import Check, Found, Subject
from trl_lora_sync.cli.main import main
from trl_lora_sync.engines.base import Deadline
from trl_lora_sync.engines.sglang.spec import SGLANG
from trl_lora_sync.errors import ServerSetupError
from trl_lora_sync.sync import AdapterSync
from trl_lora_sync.testing import MODULES, FakeSGLang, random_adapter
from unit.fleets import FleetRun, settings_for

pytestmark = pytest.mark.outside


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def fake() -> Iterator[FakeSGLang]:
    with FakeSGLang(shapes=SMALL) as started:
        yield started


@pytest.fixture
def training(fake: FakeSGLang, tmp_path: Path) -> Iterator[FleetRun]:
    run = FleetRun(AdapterSync(settings_for([fake], tmp_path / "sync")), [fake])
    yield run
    run.sync.close()


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    write_adapter(tmp_path / "adapter", random_adapter(SMALL, 1, rank=8))
    return tmp_path / "adapter"


def doctor(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, tuple[str, str]]:
    """Status and words of each finding, by its name."""
    capsys.readouterr()
    main(["doctor", *map(str, arguments), "--json", "--timeout", "60"])
    [server] = json.loads(capsys.readouterr().out)["servers"]
    return {one["name"]: (one["status"], one["words"]) for one in server["findings"]}


class Whim:
    """A check that is made of nothing but what the test wants."""

    def __init__(self) -> None:
        self.made = 0
        self.refuses = False

    async def look(self, subject: Subject, deadline: Deadline, *offer: Any) -> Found:
        self.made += 1
        if self.refuses:
            raise ServerSetupError(f"{subject.url} is not what it was expected to be.")
        return OK, "as it should be"


def test_a_check_in_the_list_is_made_at_the_start_of_a_server_that_came_back_and_by_the_doctor(
    fake: FakeSGLang,
    training: FleetRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whim = Whim()
    monkeypatch.setattr(listed, "CHECKS", (*listed.CHECKS, Check("whim", whim.look)))

    training.start()
    assert whim.made == 1
    training.publish()
    fake.restart()
    assert training.is_policy_of(training.generate())
    assert whim.made == 2
    assert doctor(capsys, fake.base_url)["whim"] == ("ok", "as it should be")
    assert whim.made == 3

    whim.refuses = True
    assert doctor(capsys, fake.base_url)["whim"] == ("problem", f"{fake.base_url} is not what it was expected to be.")
    fake.restart()
    with pytest.raises(ServerSetupError, match="is not what it was expected to be"):
        training.generate()
    with pytest.raises(ServerSetupError, match="is not what it was expected to be"):
        training.start()


def test_a_check_of_a_loaded_adapter_is_made_at_the_start_and_by_the_doctor_and_nothing_stays(
    fake: FakeSGLang,
    training: FleetRun,
    adapter: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whim = Whim()
    whim.refuses = True
    monkeypatch.setattr(listed, "ADAPTER_CHECKS", (*listed.ADAPTER_CHECKS, Check("whim", whim.look)))

    with pytest.raises(ServerSetupError, match="is not what it was expected to be"):
        training.start()
    found = doctor(capsys, fake.base_url, "--adapter", adapter, "--dir", tmp_path / "shared")

    assert found["whim"][0] == "problem"
    assert found["clean-up"][0] == "ok"
    assert fake.host_adapters == []


def test_the_doctor_gives_no_adapter_to_a_server_that_may_not_survive_it(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeSGLang(shapes=SMALL, lora_target_modules=("q_proj",)) as fake:
        found = doctor(capsys, fake.base_url, "--adapter", adapter, "--dir", tmp_path / "shared")
        assert found["target modules"][0] == "problem"
        assert found["adapter"][0] == "note"
        assert "crashes on an adapter that does not fit" in found["adapter"][1]
        assert not any(request.path.startswith("/load_lora_adapter") for request in fake.requests)


@pytest.mark.parametrize(
    ("modules", "base_model"),
    [
        (["v_proj"], "tiny-qwen3"),
        (["k_proj", "v_proj"], "tiny-qwen3"),
        (["q_proj"], "tiny-qwen3"),
        (["up_proj"], "tiny-qwen3"),
        (MODULES, "other/qwen3-8b"),
        (MODULES, None),
    ],
)
def test_an_adapter_that_may_not_fit_is_not_loaded_where_it_would_end_the_server(
    modules: Sequence[str], base_model: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the base model's shapes the adapter was loaded as it was, and SGLang crashed at its first token."""
    adapter = replace(random_adapter(SMALL, 1, rank=8, modules=modules), base_model=base_model)
    write_adapter(tmp_path / "adapter", adapter)
    with FakeSGLang(shapes=SMALL) as fake:
        found = doctor(capsys, fake.base_url, "--adapter", tmp_path / "adapter", "--dir", tmp_path / "shared")
        assert found["adapter"][0] == "note"
        assert "--model, " in found["adapter"][1]
        assert not any(request.path.startswith("/load_lora_adapter") for request in fake.requests)


@pytest.mark.parametrize("modules", [["q_proj", "v_proj"], ["gate_proj"]])
def test_the_doctor_tries_an_adapter_that_the_server_completes_itself(
    modules: Sequence[str], fake: FakeSGLang, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_adapter(tmp_path / "adapter", random_adapter(SMALL, 1, rank=8, modules=modules))
    found = doctor(capsys, fake.base_url, "--adapter", tmp_path / "adapter", "--dir", tmp_path / "shared")
    assert found["effect"][0] == "ok"


def test_the_doctor_says_which_checks_it_could_not_make(fake: FakeSGLang, capsys: pytest.CaptureFixture[str]) -> None:
    found = doctor(capsys, fake.base_url)
    for name in ("target modules", "rank", "base model's name", "vocabulary"):
        assert found[name][0] == "note"
        assert found[name][1].startswith("not compared: ")


@pytest.mark.parametrize(("name", "status", "words"), [
    ("{served}", "ok", "the same as the trainer's"),
    ("other/tiny-qwen3", "note", "only the last part agrees"),
    ("other/qwen3-8b", "note", "The trainer's base model is"),
])  # fmt: skip
def test_the_doctor_compares_the_name_of_the_base_model_as_the_start_does(
    name: str, status: str, words: str, fake: FakeSGLang, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = name.format(served=fake.args.model_path)
    config = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"], "base_model_name_or_path": name}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    found = doctor(capsys, fake.base_url, "--peft-config", tmp_path)["base model's name"]
    assert found[0] == status
    assert words in found[1]
    assert name in found[1]


@pytest.mark.parametrize(
    ("is_fused", "words"),
    [(False, "runtime loading, base model, rank, a trial"), (True, "fused serving, base model, a trial")],
)
def test_the_line_at_the_start_names_what_was_checked(
    is_fused: bool, words: str, training: FleetRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It named runtime loading of a server with fused serving, which has none."""
    monkeypatch.setitem(SGLANG.capabilities, "is_fused", is_fused)  # type: ignore[attr-defined]
    assert f"checked: adapter features, {words}" in training.start()
