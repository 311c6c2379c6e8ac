"""Unit tier: the parts of the documentation that are made from the code agree with the code."""

import ast
import dataclasses
import inspect
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import docs_hooks
import page
import pytest
import torch
import trl
from contract.served import SMALL
from peft import IA3Config, LoraConfig

import trl_lora_sync
from trl_lora_sync import GRPOConfig, LoRASyncConfig, errors
from trl_lora_sync.adapter.experts import FAMILIES
from trl_lora_sync.adapter.store import AdapterStore, write_adapter
from trl_lora_sync.adapter.support import check_peft_config, supported_features
from trl_lora_sync.config import check_choice, server_urls
from trl_lora_sync.engines.base import Deadline
from trl_lora_sync.engines.vllm.engine import VLLMEngine
from trl_lora_sync.runtime import Blocking
from trl_lora_sync.testing import random_adapter
from unit.servers import Request, nobody_listening, serving

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def test_every_made_part_is_on_a_page_and_every_mark_has_one() -> None:
    marks = {mark for page in PAGES for mark in re.findall(r"<!-- made: (.*?) -->", page.read_text())}
    assert marks == docs_hooks.MADE.keys()


def test_every_page_is_in_the_navigation() -> None:
    navigation = (DOCS.parent / "mkdocs.yml").read_text().partition("nav:")[2]
    assert {page.name for page in PAGES} == set(re.findall(r": (\S+\.md)$", navigation, re.MULTILINE))


def test_marks_are_replaced_by_what_they_stand_for() -> None:
    made = docs_hooks.on_page_markdown("before <!-- made: support --> after")
    assert made.startswith("before | `LoraConfig` field |")
    assert made.endswith("| after")


def test_a_reader_of_the_files_sees_where_a_part_is_made() -> None:
    """Tables that README links to were silently missing."""
    lines = [line for page in PAGES for line in page.read_text().splitlines() if "<!-- made: " in line]
    lines = [line for line in lines if not any(f": {name} -->" in line for name in docs_hooks.WRITTEN)]
    assert len(lines) == len(docs_hooks.MADE) - len(docs_hooks.WRITTEN)
    assert all("`make docs`" in line for line in lines)
    assert not any("make docs" in docs_hooks.on_page_markdown(line)[:40] for line in lines)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_in_the_pages_are_what_the_code_has(page: Path) -> None:
    """After a change: python tools/docs_hooks.py."""
    assert page.read_text() == docs_hooks.written(page.read_text())


def test_support_table_has_every_field_of_the_installed_peft() -> None:
    table = docs_hooks.support_table()
    known = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    assert known == supported_features().keys()
    assert {field.name for field in dataclasses.fields(LoraConfig)} <= known


def rows_of_support() -> dict[str, list[str]]:
    """The cells of each row after the first, by the field."""
    rows = (line.strip("| ").split(" | ") for line in docs_hooks.support_table().splitlines()[2:])
    return {name.strip("`"): cells for name, *cells in rows}


def test_support_table_says_what_the_code_does_in_both_ways_of_serving() -> None:
    at_run_time, fused = supported_features(), supported_features("fused")
    for name, (first, second, *_) in rows_of_support().items():
        assert first.startswith("refused") == at_run_time[name].startswith("refused")
        assert second == ("the same" if fused[name] == at_run_time[name] else fused[name].replace("|", "\\|"))


def test_table_of_experts_says_what_the_code_does() -> None:
    rows = [line.strip("| ").split(" | ") for line in docs_hooks.experts_table().splitlines()[2:]]
    assert {name.strip("`") for name, *_ in rows} == FAMILIES.keys()
    for name, part, at_run_time, fused, sglang, _ in rows:
        family = FAMILIES[name.strip("`")]
        serves = part == "experts" or family.has_router
        assert at_run_time.startswith("refused") != serves
        assert fused.startswith("refused") == family.is_always_stacked
        assert sglang.startswith("refused") != (part == "experts")


def test_each_row_of_the_support_tables_names_tests_that_exist() -> None:
    of_experts = (line.strip("| ").split(" | ") for line in docs_hooks.experts_table().splitlines()[2:])
    of_fields = ((name, cells[-1]) for name, cells in rows_of_support().items())
    for name, cell in [*of_fields, *((name, cells[-1]) for name, *cells in of_experts)]:
        tests = re.findall(r"`([^`]+)`", cell)
        assert tests, name
        for test in tests:
            path, _, function = test.partition("::")
            function, _, case = function.rstrip("]").partition("[")
            source = (DOCS.parent / "tests" / path).read_text()
            assert f"\ndef {function}(" in source, test
            assert not case or f'"{case}"' in source, test


def test_each_field_with_a_proof_exists() -> None:
    assert docs_hooks.PROOFS.keys() <= supported_features().keys()


def test_notes_on_the_engines_are_about_fields_that_exist() -> None:
    assert docs_hooks.AS_PEFT_SAVES_IT.keys() <= supported_features().keys()


def test_settings_table_has_every_field_of_ours() -> None:
    ours = {field.name for field in dataclasses.fields(GRPOConfig)} - {
        field.name for field in dataclasses.fields(trl.GRPOConfig)
    }
    assert set(re.findall(r"^\| `(\w+)` \|", docs_hooks.settings_table(), re.MULTILINE)) == ours


def test_settings_page_has_every_setting() -> None:
    page = docs_hooks.on_page_markdown((DOCS / "settings.md").read_text())
    for field in dataclasses.fields(LoRASyncConfig):
        assert f"| `{field.name}` |" in page


def test_api_page_has_every_public_name() -> None:
    shown = re.findall(r"^::: trl_lora_sync\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert sorted(shown) == sorted(trl_lora_sync.__all__)


# Messages


def test_every_error_class_is_explained() -> None:
    reference = docs_hooks.error_reference()
    for name, found in inspect.getmembers(errors, inspect.isclass):
        if issubclass(found, errors.LoRASyncError):
            assert f"### {name}\n" in reference


def test_every_message_has_a_cause_or_a_fix() -> None:
    rows = re.findall(r"^\| (.*?) \| (.*?) \|$", docs_hooks.error_reference(), re.MULTILINE)
    assert len(rows) > 60
    for first, rest in rows:
        assert re.search(r"[a-z]{3}", first)
        assert rest


def literals_of_errors() -> set[str]:
    """The sentences, and parts of sentences, that the source passes to an error of this package."""
    names = {name for name, _ in inspect.getmembers(errors, inspect.isclass)}
    calls = [
        call
        for file in docs_hooks.sources()
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and call.args and getattr(call.func, "id", "") in names
    ]
    texts = [
        node.value
        for call in calls
        for node in ast.walk(call.args[0])
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    parts = {" ".join(part.split()) for text in texts for part in re.split(r"(?<=\.)\s", text)}
    return {part for part in parts if re.search(r"[a-z]{2} \w", part)}


def test_every_literal_of_the_errors_is_on_the_page() -> None:
    """A helper that makes an error in one file and is called in others only is easily missed."""
    page = " ".join(docs_hooks.error_reference().replace("\\", "").split())
    literals = literals_of_errors()
    assert len(literals) > 150
    assert [text for text in sorted(literals) if text not in page] == []


def unset(setting: dict[str, Any]) -> Callable[[], Any]:
    return lambda: check_peft_config(LoraConfig(target_modules=["q_proj"], **setting))


def full_folder(folder: Path) -> None:
    (folder / "taken").mkdir()
    (folder / "taken" / "file").touch()
    write_adapter(folder / "taken", random_adapter(SMALL, 1, rank=2))


def unreachable() -> None:
    with nobody_listening() as url:
        Blocking(VLLMEngine(url, is_local=True)).connect(Deadline.after(10, "The test"))


def without_runtime_loading() -> None:
    def answer(request: Request) -> None:
        answers: dict[str, Any] = {"/version": {"version": "0.31.0"}, "/v1/models": {"data": [{"id": "base"}]}}
        found = answers.get(request.path)
        request.send(200 if found else 404, found or {"detail": "Not Found"})

    with serving(answer) as server:
        Blocking(VLLMEngine(server.url, is_local=True)).connect(Deadline.after(20.0, "The test"))


@pytest.mark.outside
@pytest.mark.parametrize(
    "fail",
    [
        unset({"use_dora": True}),
        unset({"bias": "all"}),
        unset({"init_lora_weights": "mica"}),
        lambda: check_peft_config(None),
        lambda: check_peft_config(IA3Config()),
        lambda: check_choice("name", "value", ("a", "b")),
        lambda: server_urls(type("Args", (), {"vllm_server_base_url": "nonsense"})),
        lambda: server_urls(type("Args", (), {"vllm_server_base_url": "http://user@host"})),
        lambda: Deadline.after(-1.0, "The test").remaining_s(),
        unreachable,
        without_runtime_loading,
    ],
    ids=range(11),
)
def test_message_that_is_really_raised_is_on_the_page(fail: Callable[[], Any]) -> None:
    with pytest.raises(errors.LoRASyncError) as caught:
        fail()
    assert is_listed(caught.value)


def test_message_of_the_store_is_on_the_page(tmp_path: Path) -> None:
    with pytest.raises(errors.AdapterExportError) as caught:
        full_folder(tmp_path)
    assert is_listed(caught.value)
    (tmp_path / "file").touch()
    with pytest.raises(errors.AdapterExportError) as caught:
        AdapterStore(tmp_path / "file").open()
    assert is_listed(caught.value)


def test_message_of_a_broken_adapter_is_on_the_page() -> None:
    from trl_lora_sync.adapter.canonical import LoRAModule
    from trl_lora_sync.adapter.flat import FlatBuffer

    broken = LoRAModule(name="q", lora_A=torch.full((1, 2), torch.nan), lora_B=torch.ones(2, 1), scaling=1.0)
    with pytest.raises(errors.AdapterNotFiniteError) as caught:
        FlatBuffer().export([broken], dtype=torch.float32)
    assert is_listed(caught.value)


def is_listed(error: Exception) -> bool:
    """Whether the page's list has the words of `error` for its class."""
    said = " ".join(str(error).split())
    patterns = docs_hooks.collect_messages()[type(error).__name__]
    return any(re.fullmatch(re.escape(" ".join(text.split())).replace("…", ".*"), said) for text in patterns)


_ROOT = Path(docs_hooks.__file__).parents[1]


def test_the_figures_of_whole_runs_are_those_of_the_results() -> None:
    """No headline is faster than the syncs of whole GRPO steps in the same run."""
    found = page.read(page.NEWEST["runtime"])["shapes"]["8b"]["ranks"]["32"]
    readme = " ".join((_ROOT / "README.md").read_text().split())
    syncs = [step["sync_s"] for step in found["steps"]["runtime"]["samples"]]
    median, largest = (round(1000 * seconds) for seconds in (statistics.median(syncs), max(syncs)))
    assert f"{median} ms (median of {len(syncs)}, at most {largest}) with `runtime`" in readme
    headline = round(1000 * found["sync"]["runtime"]["median"]["sync_s"])
    assert f"| `runtime` | {headline} ms |" in readme
    assert median <= headline
    ahead = page.read("overlap-2xh100")
    assert ahead["shape"] == "8b"
    assert all(sync["verified"] == 1.0 for run in ahead["runs"] for sync in run["syncs"])
