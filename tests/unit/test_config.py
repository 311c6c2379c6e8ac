"""The configuration: TRL's fields plus ours, and every contradiction refused before a model is loaded."""

import ast
import dataclasses
import inspect
import json
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
import trl
import yaml
from peft import LoraConfig
from transformers import HfArgumentParser

import trl_lora_sync
from trl_lora_sync import DistillationConfig, GRPOConfig, LoRASyncConfig, RLOOConfig
from trl_lora_sync.addresses import default_sync_dir, is_local_url
from trl_lora_sync.config import check_reference, check_sync_fields, server_urls, sync_settings
from trl_lora_sync.engines.base import TIMEOUTS
from trl_lora_sync.engines.vllm.completions import RESERVED_FIELDS
from trl_lora_sync.errors import LoRASyncError, UnsupportedSettingError

ROOT = Path(__file__).parents[2]
ON_CPU: dict[str, Any] = {"use_cpu": True, "bf16": False, "report_to": "none"}
SYNC: dict[str, Any] = {"use_vllm": True, "vllm_mode": "server", "vllm_sync_strategy": "lora_adapter"}
SECRET = "sk-do-not-show"


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., GRPOConfig]:
    """A configuration for adapter sync, with fields replaced."""
    return lambda **fields: GRPOConfig(**{"output_dir": str(tmp_path / "out"), **ON_CPU, **SYNC, **fields})


# Fields


def test_added_fields_have_these_names_types_and_defaults() -> None:
    trls = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    hints = get_type_hints(GRPOConfig)
    added = {f.name: (hints[f.name], f.default) for f in dataclasses.fields(GRPOConfig) if f.name not in trls}
    assert added == {
        "vllm_sync_strategy": (Literal["weights", "lora_adapter"], "weights"),
        "vllm_server_engine": (Literal["auto", "vllm", "sglang"], "auto"),
        "vllm_server_sleep": (Literal["off", "kv_cache"], "off"),
        "lora_sync_transport": (Literal["auto", "disk", "push", "tensors"], "auto"),
        "vllm_colocate_base": (Literal["auto", "own", "shared"], "auto"),
        "lora_sync_serving": (Literal["runtime", "fused"], "runtime"),
        "lora_sync_pause": (Literal["off", "drain", "abort"], "off"),
        "lora_sync_dir": (str | None, None),
        "lora_sync_server_dir": (str | None, None),
        "lora_sync_keep": (int, 2),
        "lora_sync_timeout": (float, 120.0),
        "lora_sync_generation_timeout": (float, 1200.0),
        "lora_sync_dtype": (Literal["auto", "bfloat16", "float16", "float32"], "auto"),
        "lora_sync_on_server_loss": (Literal["error", "drop"], "error"),
        "lora_sync_verify": (Literal["first", "every", "off"], "first"),
        "lora_sync_verify_tolerance": (float, 3.0),
        "lora_sync_overlap": (Literal[0, 1], 0),
    }


def test_fields_and_defaults_of_trl_are_untouched() -> None:
    ours = {field.name: field for field in dataclasses.fields(GRPOConfig)}
    for field in dataclasses.fields(trl.GRPOConfig):
        assert ours[field.name].default == field.default
        assert ours[field.name].default_factory == field.default_factory
    assert issubclass(GRPOConfig, trl.GRPOConfig)


# Each field is described once

OURS = {field.name: field for field in dataclasses.fields(LoRASyncConfig)}
CHOICES = {name: get_args(field.type) for name, field in OURS.items() if get_origin(field.type) is Literal}
SOURCES = sorted(Path(trl_lora_sync.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize("name", OURS)
def test_docstring_has_the_help_of_the_command_line(name: str) -> None:
    documented = " ".join((LoRASyncConfig.__doc__ or "").split())
    assert re.search(rf" {name} \(`\w+`, \*optional\*[^)]*\): {re.escape(OURS[name].metadata['help'])}", documented)


def test_docstring_in_the_source_describes_no_field() -> None:
    """What follows `Args:` is made from the help of each field."""
    tree = ast.parse(Path(inspect.getfile(LoRASyncConfig)).read_text())
    [written] = [
        ast.get_docstring(node) or ""
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "LoRASyncConfig"
    ]
    assert "Args:" not in written
    assert [name for name in OURS if re.search(rf"^\W*{name}\b", written, re.MULTILINE)] == []


@pytest.mark.parametrize("name", OURS)
def test_no_other_text_repeats_the_help_of_a_field(name: str) -> None:
    """Not one run of eight words: a repetition stays behind when the help changes."""
    words = OURS[name].metadata["help"].split()
    runs = [" ".join(words[start : start + 8]) for start in range(len(words) - 7)]
    assert runs or len(words) < 13
    for file in [ROOT / "docs" / "settings.md", *SOURCES]:
        # The table of the page is made from the help.
        written = re.sub(r"<!-- made: .*?<!-- end -->", "", file.read_text(), flags=re.DOTALL)
        # Texts of several lines in one line, without the quotes around each.
        text = " ".join(re.sub(r"[\"']\s*\n\s*f?[\"']", "", written).split())
        found = [run for run in runs if text.count(run) > (file.name == "config.py")]
        assert found == [], f"{file.name} repeats the help of {name}"


@pytest.mark.parametrize("name", CHOICES)
def test_help_names_every_choice_of_a_field(name: str) -> None:
    assert [value for value in CHOICES[name] if f"`{json.dumps(value)}`" not in OURS[name].metadata["help"]] == []


@pytest.mark.parametrize("name", [name for name in CHOICES if name != "lora_sync_overlap"])  # (0, 1) is many things
def test_choices_of_a_field_are_listed_in_its_annotation_only(name: str) -> None:
    """Wherever else they matter, they are read from there."""
    lists = [
        {item.value for item in node.elts if isinstance(item, ast.Constant)}
        for file in SOURCES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Tuple | ast.List | ast.Set)
    ]
    assert len([found for found in lists if found == {*CHOICES[name]}]) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"use_vllm": True, "vllm_mode": "colocate"},
        {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": f"http://user:{SECRET}@host:1/?q"},
        {"lora_sync_keep": 0, "lora_sync_timeout": -1.0, "vllm_server_engine": "sglang"},
        {"generation_kwargs": {"n": 3, "stream": True}},
    ],
    ids=str,
)
def test_weights_accepts_everything_that_trl_accepts(fields: dict[str, Any], tmp_path: Path) -> None:
    trls = {name: value for name, value in fields.items() if hasattr(trl.GRPOConfig, name)}
    plain = trl.GRPOConfig(output_dir=str(tmp_path), **ON_CPU, **trls)
    ours = GRPOConfig(output_dir=str(tmp_path), **ON_CPU, **fields)
    changed = {name for name, value in plain.to_dict().items() if ours.to_dict()[name] != value}
    assert changed <= {"logging_dir", "run_name"}, changed
    assert ours.vllm_sync_strategy == "weights"


def test_defaults_of_adapter_sync_are_accepted(make: Callable[..., GRPOConfig]) -> None:
    check_sync_fields(make())


# Refusals

REFUSED = [
    ({"use_vllm": False}, "use_vllm=False.*loaded by vLLM or SGLang.*Set use_vllm=True"),
    ({"lora_sync_keep": 0}, "lora_sync_keep=0.*at least the active version.*1 or more"),
    ({"lora_sync_keep": -1}, "lora_sync_keep=-1"),
    ({"generation_kwargs": {"n": 2, "seed": 1, "model": "base"}}, "generation_kwargs with 'model', 'n'.*Remove them"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED, ids=lambda value: str(value)[:60])
def test_contradiction_is_refused_with_the_value_the_fix_and_the_way_out(
    fields: dict[str, Any], words: str, make: Callable[..., GRPOConfig]
) -> None:
    with pytest.raises(UnsupportedSettingError, match=words) as caught:
        make(**fields)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, LoRASyncError)
    assert 'cannot be used with vllm_sync_strategy="lora_adapter"' in str(caught.value)
    way_out = str(caught.value).partition('or set vllm_sync_strategy="weights"')[2]
    assert "vLLM in the trainer's environment" in way_out
    assert """--weight-transfer-config '{"backend": "nccl"}'""" in way_out


# What sampling one batch ahead does not go together with

NO_OVERLAP = [
    (
        {"vllm_importance_sampling_correction": False},
        "vllm_importance_sampling_correction=False.*nothing else corrects",
    ),
    ({"vllm_server_sleep": "kv_cache"}, "vllm_server_sleep='kv_cache'.*need their KV cache"),
    ({"lora_sync_pause": "abort"}, 'lora_sync_pause="abort".*end the requests'),
    ({"lora_sync_keep": 1}, "lora_sync_keep=1.*version before the active one.*Set it to 2"),
]


@pytest.mark.parametrize(("fields", "words"), NO_OVERLAP, ids=lambda value: str(value)[:60])
def test_what_overlap_does_not_go_together_with_is_refused_with_both_ways_out(
    fields: dict[str, Any], words: str, make: Callable[..., GRPOConfig]
) -> None:
    with pytest.raises(UnsupportedSettingError, match=f"{words}.*or set lora_sync_overlap=0") as caught:
        make(**fields, lora_sync_overlap=1)
    assert "cannot be used with lora_sync_overlap=1" in str(caught.value)
    make(**fields)


@pytest.mark.outside
@pytest.mark.parametrize("fields", [{}, {"lora_sync_serving": "fused"}, {"lora_sync_pause": "drain"}])
def test_overlap_goes_together_with(fields: dict[str, Any], make: Callable[..., GRPOConfig]) -> None:
    assert sync_settings(make(**fields, lora_sync_overlap=1)).overlap


@pytest.mark.parametrize("fields", [{}, {"use_vllm": True, "vllm_mode": "colocate"}])
def test_overlap_without_adapter_sync_is_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedSettingError, match=r'lora_sync_overlap=1.*vllm_sync_strategy="weights".*take turns'):
        GRPOConfig(output_dir=str(tmp_path), **ON_CPU, **fields, lora_sync_overlap=1)


@pytest.mark.parametrize("overlap", [2, -1, "1", None])
def test_overlap_is_zero_or_one(overlap: Any, make: Callable[..., GRPOConfig]) -> None:
    with pytest.raises(
        UnsupportedSettingError, match=f"lora_sync_overlap={overlap!r} is not known. Choose one of 0, 1"
    ):
        make(lora_sync_overlap=overlap)


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("vllm_sync_strategy", "'weights', 'lora_adapter'"),
        ("vllm_server_engine", "'auto', 'vllm', 'sglang'"),
        ("vllm_server_sleep", "'off', 'kv_cache'"),
        ("lora_sync_transport", "'auto', 'disk', 'push', 'tensors'"),
        ("vllm_colocate_base", "'auto', 'own', 'shared'"),
        ("lora_sync_serving", "'runtime', 'fused'"),
        ("lora_sync_pause", "'off', 'drain', 'abort'"),
        ("lora_sync_on_server_loss", "'error', 'drop'"),
        ("lora_sync_verify", "'first', 'every', 'off'"),
        ("lora_sync_dtype", "'auto', 'bfloat16', 'float16', 'float32'"),
    ],
)
def test_unknown_choice_is_refused_with_the_known_ones(
    name: str, choices: str, make: Callable[..., GRPOConfig]
) -> None:
    with pytest.raises(UnsupportedSettingError, match=f"{name}='lora' is not known. Choose one of {choices}"):
        make(**{name: "lora"})


@pytest.mark.parametrize("name", ["vllm_server_sleep", "lora_sync_pause", "lora_sync_verify"])
def test_bare_off_in_yaml_is_refused_with_the_form_that_is_taken(name: str, tmp_path: Path) -> None:
    """YAML reads it as a boolean, and the message offered 'off', which is what was written."""
    file, parser = tmp_path / "run.yaml", trl.TrlParser((GRPOConfig,))
    plain = yaml.safe_dump({**ON_CPU, **SYNC, "output_dir": "out"})
    file.write_text(f"{plain}{name}: off\n")
    with pytest.raises(UnsupportedSettingError, match=r"In a YAML file, put it in quotes: (.*)\.$") as caught:
        parser.parse_args_and_config(["--config", str(file)])
    advised = str(caught.value).rpartition("quotes: ")[2].removesuffix(".")
    file.write_text(f"{plain}{advised}\n")
    assert getattr(parser.parse_args_and_config(["--config", str(file)])[0], name) == "off"


@pytest.mark.parametrize("name", sorted(RESERVED_FIELDS))
def test_field_that_chooses_the_policy_or_the_answers_shape_is_refused_in_generation_kwargs(
    name: str, make: Callable[..., GRPOConfig]
) -> None:
    with pytest.raises(UnsupportedSettingError, match=f"generation_kwargs with '{name}'"):
        make(generation_kwargs={name: 1})


def test_fused_serving_on_sglang_is_refused(make: Callable[..., GRPOConfig]) -> None:
    with pytest.raises(UnsupportedSettingError, match=r'lora_sync_serving="runtime", or sample on vLLM'):
        make(lora_sync_serving="fused", vllm_server_engine="sglang")


@pytest.mark.parametrize("value", ["seed=1", ["seed", 1]])
def test_generation_kwargs_that_are_no_dictionary_are_refused(value: Any, make: Callable[..., GRPOConfig]) -> None:
    with pytest.raises(UnsupportedSettingError, match=r"generation_kwargs must be a dictionary .*got .*seed"):
        make(generation_kwargs=value)


def test_other_generation_kwargs_are_accepted(make: Callable[..., GRPOConfig]) -> None:
    assert make(generation_kwargs={"seed": 1, "stop_token_ids": [3]}).generation_kwargs["seed"] == 1


@pytest.mark.parametrize("name", ["lora_sync_timeout", "lora_sync_generation_timeout"])
@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf")])
def test_timeout_that_is_not_a_positive_number_is_refused(
    name: str, seconds: float, make: Callable[..., GRPOConfig]
) -> None:
    with pytest.raises(
        UnsupportedSettingError, match=f"{name} must be a positive, finite number of seconds, got {seconds:g}"
    ):
        make(**{name: seconds})


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"lora_sync_keep": "3"}, "a whole number, got '3'"),
        ({"lora_sync_keep": 2.5}, "a whole number, got 2.5"),
        ({"lora_sync_keep": True}, "a whole number, got True"),
        ({"lora_sync_timeout": "2 min"}, "a number, got '2 min'"),
        ({"lora_sync_timeout": "2 min", "vllm_mode": "colocate"}, "a number, got '2 min'"),
        ({"lora_sync_generation_timeout": None}, "a number, got None"),
        ({"lora_sync_verify_tolerance": "3"}, "a number, got '3'"),
        ({"vllm_server_timeout": "60"}, "a number, got '60'"),
        ({"vllm_tensor_parallel_size": "1", "vllm_mode": "colocate"}, "a whole number, got '1'"),
    ],
    ids=str,
)
def test_value_that_is_not_a_number_is_refused_by_its_field(
    fields: dict[str, Any], kind: str, make: Callable[..., GRPOConfig]
) -> None:
    with pytest.raises(UnsupportedSettingError, match=f"{next(iter(fields))} must be {kind}"):
        make(**fields)


@pytest.mark.parametrize("path", ["", "lora-sync", "~/lora-sync"])
def test_path_on_the_server_that_is_not_absolute_is_refused(path: str, make: Callable[..., GRPOConfig]) -> None:
    with pytest.raises(UnsupportedSettingError, match=f"lora_sync_server_dir='{path}' is not an absolute path"):
        make(lora_sync_server_dir=path)


def test_urls_in_a_list_are_refused_without_showing_them(make: Callable[..., GRPOConfig]) -> None:
    with pytest.raises(UnsupportedSettingError, match="vllm_server_base_url must be text, got a list") as caught:
        make(vllm_server_base_url=[f"http://user:{SECRET}@a:8000", "http://b:8000"])
    assert "'http://gpu-1:8000,http://gpu-2:8000'" in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("name", ["lora_sync_timeout", "lora_sync_generation_timeout", "vllm_server_timeout"])
def test_timeout_beyond_what_the_other_processes_wait_is_refused(
    name: str, make: Callable[..., GRPOConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GRPOConfig, "world_size", 2)
    fields = {"ddp_timeout": 100}
    fields |= dict.fromkeys(["lora_sync_timeout", "lora_sync_generation_timeout", "vllm_server_timeout"], 10.0)
    make(**fields | {"lora_sync_generation_timeout": 40.0})
    with pytest.raises(UnsupportedSettingError, match=f"{name}=41 is too long for ddp_timeout=100") as caught:
        make(**fields | {name: 41.0})
    assert "raise ddp_timeout" in str(caught.value)


@pytest.mark.parametrize(("sleep", "longest"), [("off", 20.0), ("kv_cache", 20.0)])
def test_start_beyond_what_the_other_processes_wait_is_refused(
    sleep: str, longest: float, make: Callable[..., GRPOConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may come up at the last moment, and each check after it take its own time."""
    monkeypatch.setattr(GRPOConfig, "world_size", 2)
    fields = {"ddp_timeout": 100, "lora_sync_timeout": 10.0 if sleep == "off" else 5.0}
    fields |= {"lora_sync_generation_timeout": 40.0, "vllm_server_sleep": sleep}
    make(**fields, vllm_server_timeout=longest)
    with pytest.raises(UnsupportedSettingError, match="are too long for ddp_timeout=100: the start") as caught:
        make(**fields, vllm_server_timeout=longest + 1)
    assert "raise ddp_timeout" in str(caught.value)


def test_single_process_may_wait_as_long_as_it_likes(make: Callable[..., GRPOConfig]) -> None:
    assert make(ddp_timeout=100, lora_sync_generation_timeout=1e6).lora_sync_generation_timeout == 1e6


def test_defaults_fit_the_default_ddp_timeout(make: Callable[..., GRPOConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GRPOConfig, "world_size", 8)
    make()


def test_engines_that_do_not_share_the_processes_out_are_refused(
    make: Callable[..., GRPOConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL refuses them too, but after the model has been loaded."""
    monkeypatch.setattr(GRPOConfig, "world_size", 4)
    make(vllm_mode="colocate", vllm_tensor_parallel_size=2)
    with pytest.raises(UnsupportedSettingError, match=r"vllm_tensor_parallel_size=3 .* 4 training process.* multiple"):
        make(vllm_mode="colocate", vllm_tensor_parallel_size=3)


def test_field_changed_after_construction_is_seen_by_the_second_check(make: Callable[..., GRPOConfig]) -> None:
    args = make()
    args.vllm_mode = "elsewhere"
    with pytest.raises(UnsupportedSettingError, match="vllm_mode='elsewhere' is not known"):
        check_sync_fields(args)


# The URL and the key


@pytest.mark.parametrize(
    "url",
    [
        f"http://user:{SECRET}@host:8000",
        f"http://{SECRET}@host:8000",
        f"http://host:8000?api_key={SECRET}",
        f"http://host:8000/#{SECRET}",
        f"user:{SECRET}@host:8000",
        f"http://user:{SECRET}@a:8000,http://b:8000",
        f"http://user:{SECRET}@host:99999",
    ],
)
def test_url_that_carries_a_secret_is_refused_without_showing_it(url: str, make: Callable[..., GRPOConfig]) -> None:
    with pytest.raises(UnsupportedSettingError, match="environment variable VLLM_API_KEY") as caught:
        make(vllm_server_base_url=url)
    assert SECRET not in str(caught.value)
    assert SECRET not in repr(caught.value.__cause__)


@pytest.mark.parametrize(
    "url",
    ["localhost:8000", "host", "ftp://host:21", "http://", "http://:8000", "http://host:port", "http://host:99999",
     "http://[::1", "http://host:0", "unix:///tmp/socket", "http://a:1,", "http://a:1,,http://b:2", "http://a:1,b:2",
     "http://a:1;http://b:2,", "http://http://a:1", "http://a:"],
)  # fmt: skip
def test_text_that_is_no_http_url_is_refused_with_an_example(url: str, make: Callable[..., GRPOConfig]) -> None:
    with pytest.raises(UnsupportedSettingError, match=r"vllm_server_base_url=.*: '.*' is not a URL") as caught:
        make(vllm_server_base_url=url)
    assert "http://localhost:8000" in str(caught.value)


@pytest.mark.parametrize("fields", [{"vllm_server_host": "http://a"}, {"vllm_server_port": None}], ids=str)
def test_host_that_makes_no_url_is_refused_by_the_settings_that_were_given(
    fields: dict[str, Any], make: Callable[..., GRPOConfig]
) -> None:
    words = re.escape("http://{vllm_server_host}:{vllm_server_port}=") + ".* is not a URL.*Set vllm_server_base_url"
    with pytest.raises(UnsupportedSettingError, match=words):
        make(**fields)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"vllm_server_base_url": "http://host:8000/"}, "http://host:8000"),
        ({"vllm_server_base_url": "http://host:8000/v1"}, "http://host:8000"),
        ({"vllm_server_base_url": "http://host:8000/v1/"}, "http://host:8000"),
        ({"vllm_server_base_url": "https://host/team/v1"}, "https://host/team"),
        ({"vllm_server_base_url": "http://[::1]:8000"}, "http://[::1]:8000"),
        ({"vllm_server_base_url": "http://a:1/v1, http://b:2/,https://c"}, "http://a:1 http://b:2 https://c"),
        ({"vllm_server_host": "10.0.0.7", "vllm_server_port": 8123}, "http://10.0.0.7:8123"),
        ({}, "http://0.0.0.0:8000"),
    ],
    ids=str,
)
def test_server_urls_are_read_from_trls_fields(
    fields: dict[str, Any], expected: str, make: Callable[..., GRPOConfig]
) -> None:
    assert server_urls(make(**fields)) == tuple(expected.split())


@pytest.mark.parametrize("urls", ["http://a:1,http://b:2,http://a:1", "http://a:1/,http://b:2,http://a:1/v1"])
def test_server_that_is_named_twice_is_refused(urls: str, make: Callable[..., GRPOConfig]) -> None:
    with pytest.raises(UnsupportedSettingError, match="names http://a:1 more than once"):
        make(vllm_server_base_url=urls)


def test_config_survives_its_own_json(make: Callable[..., GRPOConfig]) -> None:
    """With a `Path`, a run that logs to TensorBoard ended at its start."""
    args = make(lora_sync_keep=3, lora_sync_dir=Path("/mnt/adapters"), lora_sync_server_dir=Path("/mnt/there"))
    wanted = {
        "vllm_sync_strategy": "lora_adapter",
        "lora_sync_keep": 3,
        "lora_sync_dir": "/mnt/adapters",
        "lora_sync_server_dir": "/mnt/there",
    }
    stored = json.loads(args.to_json_string())
    assert {name: stored[name] for name in wanted} == wanted


@pytest.mark.parametrize("tolerance", [0.0, -1.0, float("nan"), float("inf")])
def test_a_tolerance_that_is_none_is_refused(tolerance: float, make: Callable[..., GRPOConfig]) -> None:
    with pytest.raises(
        UnsupportedSettingError, match=f'must be a positive, finite number, got {tolerance:g}. .*lora_sync_verify="off"'
    ):
        make(lora_sync_verify_tolerance=tolerance)


# The command line

ARGUMENTS = [
    "--vllm_sync_strategy", "lora_adapter", "--vllm_server_engine", "vllm", "--lora_sync_keep", "3",
    "--vllm_server_sleep", "kv_cache", "--lora_sync_transport", "disk", "--lora_sync_pause", "drain",
    "--lora_sync_serving", "fused", "--lora_sync_timeout", "30", "--vllm_colocate_base", "own",
    "--lora_sync_dir", "/mnt/a", "--lora_sync_server_dir", "/mnt/b",
    "--lora_sync_on_server_loss", "drop", "--lora_sync_generation_timeout", "600", "--lora_sync_dtype", "bfloat16",
    "--lora_sync_verify", "every", "--lora_sync_verify_tolerance", "2.5",
    "--use_vllm", "--vllm_mode", "server", "--use_cpu", "--bf16", "False",
]  # fmt: skip


def values(args: Any) -> dict[str, Any]:
    return {
        field.name: getattr(args, field.name)
        for field in dataclasses.fields(GRPOConfig)
        if field.name.startswith(("lora_sync", "vllm_sync", "vllm_server_engine", "vllm_server_sleep", "vllm_colocate"))
    }


PARSED = {
    "vllm_sync_strategy": "lora_adapter",
    "vllm_server_engine": "vllm",
    "vllm_server_sleep": "kv_cache",
    "vllm_colocate_base": "own",
    "lora_sync_transport": "disk",
    "lora_sync_serving": "fused",
    "lora_sync_pause": "drain",
    "lora_sync_dir": "/mnt/a",
    "lora_sync_server_dir": "/mnt/b",
    "lora_sync_keep": 3,
    "lora_sync_timeout": 30.0,
    "lora_sync_generation_timeout": 600.0,
    "lora_sync_dtype": "bfloat16",
    "lora_sync_on_server_loss": "drop",
    "lora_sync_verify": "every",
    "lora_sync_verify_tolerance": 2.5,
    "lora_sync_overlap": 0,  # 1 does not go together with the others
}


@pytest.mark.parametrize("parser", [trl.TrlParser, HfArgumentParser])
def test_argument_parsers_of_trl_and_transformers_take_every_field(parser: type[Any], tmp_path: Path) -> None:
    arguments = [*ARGUMENTS, "--output_dir", str(tmp_path)]
    parsed = parser((GRPOConfig,)).parse_args_into_dataclasses(arguments)[0]
    assert type(parsed) is GRPOConfig
    assert values(parsed) == PARSED


def test_yaml_config_takes_every_field(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**PARSED, **ON_CPU, "use_vllm": True, "vllm_mode": "server", "output_dir": "out"}))
    parsed = trl.TrlParser((GRPOConfig,)).parse_args_and_config(["--config", str(file)])[0]
    assert values(parsed) == PARSED


def test_overlap_is_a_number_on_the_command_line_and_in_yaml(tmp_path: Path) -> None:
    fields = {**ON_CPU, **SYNC, "output_dir": "out", "lora_sync_overlap": 1}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(fields))
    typed = [word for name, value in fields.items() for word in (f"--{name}", str(value))]
    parser = trl.TrlParser((GRPOConfig,))
    by_file = parser.parse_args_and_config(["--config", str(tmp_path / "run.yaml")])[0]
    by_flags = HfArgumentParser((GRPOConfig,)).parse_args_into_dataclasses(typed)[0]
    assert (by_file.lora_sync_overlap, by_flags.lora_sync_overlap) == (1, 1)


def test_unknown_choice_on_the_command_line_lists_the_known_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        trl.TrlParser((GRPOConfig,)).parse_args_into_dataclasses(["--vllm_sync_strategy", "lora"])
    assert "lora_adapter" in capsys.readouterr().err


# Where things are


@pytest.mark.outside
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.8.8", "0.0.0.0", "[::1]", socket.gethostname()])
def test_url_of_this_host_is_local(host: str) -> None:
    if host == "[::1]" and not socket.has_ipv6:
        pytest.skip("this Python has no IPv6")
    assert is_local_url(f"http://{host}:8000")


@pytest.mark.outside
@pytest.mark.parametrize("host", ["192.0.2.1", "[2001:db8::1]", "no-such-host.invalid", "a" * 70 + ".invalid"])
def test_url_of_another_host_is_not_local(host: str) -> None:
    assert not is_local_url(f"http://{host}:8000")


def test_versions_go_to_shared_memory_of_this_user_for_a_local_server() -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("this host has no /dev/shm")
    assert default_sync_dir(True, "out") == Path(f"/dev/shm/trl-lora-sync-{os.getuid()}")


def test_versions_go_under_output_dir_for_a_server_elsewhere(tmp_path: Path) -> None:
    assert default_sync_dir(False, tmp_path) == tmp_path / "_lora_sync"


@pytest.mark.outside
@pytest.mark.parametrize(
    ("urls", "is_shared_memory"),
    [("http://127.0.0.1:1,http://localhost:2", True), ("http://127.0.0.1:1,http://192.0.2.1:2", False)],
)
def test_versions_go_to_shared_memory_only_if_every_server_is_on_this_host(
    urls: str, is_shared_memory: bool, make: Callable[..., GRPOConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trl_lora_sync.addresses.SHARED_MEMORY", tmp_path)
    settings = sync_settings(make(vllm_server_base_url=urls))
    assert (settings.root.parent == tmp_path) is is_shared_memory


def test_versions_go_under_output_dir_on_a_host_without_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trl_lora_sync.addresses.SHARED_MEMORY", tmp_path / "missing")
    assert default_sync_dir(True, tmp_path) == tmp_path / "_lora_sync"


@pytest.mark.outside
def test_settings_carry_every_field_on(make: Callable[..., GRPOConfig]) -> None:
    settings = sync_settings(make(**PARSED, vllm_server_base_url="http://192.0.2.1:9/v1", vllm_server_timeout=7.0))
    assert dataclasses.asdict(settings) == {
        "servers": ({"base_url": "http://192.0.2.1:9", "is_local": False},),
        "engine": "vllm",
        "transport": "disk",
        "pause": "drain",
        "serving": "fused",
        "frees_kv_cache": True,
        "root": Path("/mnt/a"),
        "server_root": "/mnt/b",
        "keep": 3,
        "dtype": torch.bfloat16,
        "sync_timeout_s": 30.0,
        "startup_timeout_s": 7.0,
        "generation_timeout_s": 600.0,
        "on_server_loss": "drop",
        "verify": "every",
        "verify_tolerance": 2.5,
        "samples_older": False,
        "proves_groups": False,  # with fused serving
        "overlap": False,
        "staleness": None,
        "sampling_fields": (),
        "timeouts": dataclasses.asdict(TIMEOUTS),
    }


@pytest.mark.outside
def test_automatic_dtype_is_left_to_the_model(make: Callable[..., GRPOConfig]) -> None:
    assert sync_settings(make()).dtype is None


# The reference policy


@pytest.mark.parametrize("config", [GRPOConfig, RLOOConfig])
def test_kl_term_against_what_an_initialisation_left_of_the_base_is_refused(config: Any, tmp_path: Path) -> None:
    """TRL's reference policy is the model with the adapter disabled."""
    made = config(**{"output_dir": str(tmp_path), **ON_CPU, **SYNC, "beta": 0.05})
    with pytest.raises(UnsupportedSettingError, match=r"beta=0.05 .*init_lora_weights='olora'.* Set beta=0"):
        check_reference(made, LoraConfig(init_lora_weights="olora"))
    check_reference(made, LoraConfig())
    check_reference(made, None)
    made.beta = 0.0
    check_reference(made, LoraConfig(init_lora_weights="olora"))


def test_beta_of_another_meaning_is_left_alone(tmp_path: Path) -> None:
    made = DistillationConfig(**{"output_dir": str(tmp_path), **ON_CPU, **SYNC, "beta": 0.5})
    check_reference(made, LoraConfig(init_lora_weights="pissa"))
