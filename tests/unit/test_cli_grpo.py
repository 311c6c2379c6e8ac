"""Unit tier: TRL's script under this package's command, and what is handed to accelerate."""

import dataclasses
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trl
import yaml

import trl_lora_sync
from trl_lora_sync import _trl
from trl_lora_sync.cli.main import main
from trl_lora_sync.cli.our_fields import our_flags
from trl_lora_sync.cli.training import without


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The launch commands for accelerate, instead of a launch."""
    seen: list[Any] = []
    monkeypatch.setattr("accelerate.commands.launch.launch_command", seen.append)
    return seen


def test_every_field_and_accelerates_own_flags_go_where_they_belong(launched: list[Any], tmp_path: Path) -> None:
    ours = {"vllm_sync_strategy": "lora_adapter", "use_vllm": True, "vllm_mode": "server", "lora_sync_keep": 3}
    trls = {"learning_rate": 1e-5, "use_peft": True, "lora_r": 4, "dataset_name": "d", "use_cpu": True, "bf16": False}
    file = tmp_path / "grpo.yaml"
    file.write_text(yaml.safe_dump({**ours, **trls, "output_dir": str(tmp_path), "num_processes": 2}))
    typed = ["--config", str(file), "--max_steps", "5", "--main_process_port", "29501", "--lora_sync_timeout", "60"]
    typed += ["--max_grad_norm", "-1.5"]

    assert main(["grpo", *typed, "--accelerate_config", "zero2"]) == 0

    [args] = launched
    assert args.num_processes == 2
    assert args.main_process_port == 29501
    assert args.config_file.endswith("zero2.yaml")
    assert Path(args.training_script).parts[-3:] == ("trl_lora_sync", "scripts", "grpo.py")
    assert args.training_script_args == [
        "--config", str(file), "--max_steps", "5", "--lora_sync_timeout", "60", "--max_grad_norm", "-1.5",
    ]  # fmt: skip


def test_configuration_of_accelerate_may_be_typed_with_an_equals_sign(launched: list[Any], tmp_path: Path) -> None:
    """accelerate refused it as unknown, after all lines of its usage. The command had taken it for one of TRL's."""
    typed = ["--output_dir", str(tmp_path), "--use_cpu", "True", "--bf16", "False", "--accelerate_config=zero2"]
    assert main(["grpo", *typed]) == 0
    assert launched[0].config_file.endswith("zero2.yaml")


@pytest.mark.parametrize("is_on", [True, False])
def test_switch_of_accelerate_may_be_in_the_file(is_on: bool, launched: list[Any], tmp_path: Path) -> None:
    """TRL passes it on with its value, which accelerate took for the script."""
    fields = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "multi_gpu": is_on, "num_processes": 2}
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(fields))
    assert main(["grpo", "--config", str(tmp_path / "grpo.yaml")]) == 0
    assert (launched[0].multi_gpu, launched[0].num_processes) == (is_on, 2)


@pytest.mark.parametrize("value", ["true", 1])
def test_switch_of_accelerate_with_another_value_is_not_left_out(
    value: Any, launched: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The training ran without it."""
    fields = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "multi_gpu": value, "num_processes": 2}
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(fields))
    assert main(["grpo", "--config", str(tmp_path / "grpo.yaml")]) == 2
    assert f"{value} belongs to no flag" in capsys.readouterr().err
    assert not launched


def test_script_parses_every_field_of_trl_and_of_this_package(tmp_path: Path) -> None:
    with _trl.script("grpo", trl_lora_sync.GRPOConfig, trl_lora_sync.GRPOTrainer) as script:
        parsed = script.make_parser().parse_args_and_config(
            ["--output_dir", str(tmp_path), "--use_cpu", "True", "--bf16", "False", "--lora_sync_keep", "4"]
        )
    config = parsed[1]
    assert type(config) is trl_lora_sync.GRPOConfig
    assert config.lora_sync_keep == 4
    assert type(parsed[0]).__name__ == "GRPOScriptArguments"


def test_trl_is_as_it_was_after_the_script() -> None:
    before = trl.GRPOConfig, trl.GRPOTrainer
    with pytest.raises(KeyError), _trl.script("grpo", trl_lora_sync.GRPOConfig, trl_lora_sync.GRPOTrainer):
        raise KeyError(trl.GRPOTrainer is trl_lora_sync.GRPOTrainer)
    assert (trl.GRPOConfig, trl.GRPOTrainer) == before


def test_contradicting_settings_end_with_2_before_anything_is_launched(
    launched: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = [
        "--output_dir",
        str(tmp_path),
        "--vllm_sync_strategy",
        "lora_adapter",
        "--use_cpu",
        "True",
        "--bf16",
        "False",
    ]
    assert main(["grpo", *typed]) == 2
    assert 'use_vllm=False cannot be used with vllm_sync_strategy="lora_adapter"' in capsys.readouterr().err
    assert not launched


@pytest.mark.parametrize(
    ("model", "exists"), [("/no/such/model", False), ("./typo", False), ("Qwen/Qwen3-0.6B", True), ("gpt2", True)]
)
def test_path_of_a_model_that_leads_nowhere_ends_with_2_before_anything_is_launched(
    model: str, exists: bool, launched: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The training ended in a traceback of Transformers. What may be a name on the Hub is not refused."""
    typed = ["--output_dir", str(tmp_path), "--use_cpu", "True", "--bf16", "False", "--model_name_or_path", model]
    assert main(["grpo", *typed]) == (0 if exists else 2)
    assert (f"{model} does not exist" in capsys.readouterr().err) == (not exists)
    assert bool(launched) == exists


def test_unknown_accelerate_configuration_ends_with_2(
    launched: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = ["--output_dir", str(tmp_path), "--use_cpu", "True", "--bf16", "False", "--accelerate_config", "nonsense"]
    assert main(["grpo", *typed]) == 2
    assert "nonsense" in capsys.readouterr().err
    assert not launched


@pytest.mark.parametrize("name", ["rloo", "distillation"])
def test_other_trainers_have_commands_of_the_same_form(name: str, launched: list[Any], tmp_path: Path) -> None:
    ours = ["--vllm_sync_strategy", "lora_adapter", "--use_vllm", "True", "--vllm_mode", "server"]
    typed = ["--output_dir", str(tmp_path), "--use_cpu", "True", "--bf16", "False", *ours, "--lora_sync_keep", "3"]

    assert main([name, *typed, "--num_processes", "2"]) == 0

    [args] = launched
    assert args.num_processes == 2
    assert Path(args.training_script).parts[-3:] == ("trl_lora_sync", "scripts", f"{name}.py")
    assert args.training_script_args == typed


@pytest.mark.parametrize("name", ["RLOO", "Distillation"])
def test_scripts_of_other_trainers_find_the_classes_of_this_package(name: str, tmp_path: Path) -> None:
    ours = [getattr(trl_lora_sync, f"{name}{what}") for what in ("Config", "Trainer")]
    with _trl.script(name.lower(), *ours) as script:
        assert [getattr(trl, one.__name__) for one in ours] == ours
        options = ["--output_dir", str(tmp_path), "--use_cpu", "True", "--bf16", "False", "--lora_sync_keep", "4"]
        _, config, *_ = script.make_parser().parse_args_and_config(options)
    assert type(config) is ours[0]
    assert config.lora_sync_keep == 4


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (None, "there is no such file"),
        ("a: [", "cannot be read"),
        ("lora_r", "holds no settings"),
    ],
)
@pytest.mark.parametrize("form", ["--config {}", "--config={}"])
def test_configuration_that_cannot_be_read_ends_with_2(
    form: str, file: str | None, said: str, launched: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if file is not None:
        (tmp_path / "grpo.yaml").write_text(file)
    assert main(["grpo", *form.format(tmp_path / "grpo.yaml").split()]) == 2
    found = capsys.readouterr().err
    assert said in found
    assert "loading" not in found
    assert not launched


@pytest.mark.parametrize(
    ("typed", "file", "meant"),
    [
        (["--lora_sync_kep", "3"], "", "Did you mean --lora_sync_keep?"),
        (["--lerning_rate=1"], "", "Did you mean --learning_rate?"),
        (["--num_proceses", "2"], "", "Did you mean --num_processes?"),
        ([], "lora_sync_timeuot: 3", "Did you mean --lora_sync_timeout?"),
        ([], "learning_rat: 1.0", "Did you mean --learning_rate?"),
        ([], "lora-sync-keep: 3", "Did you mean --lora_sync_keep?"),
        (["--xyzzy"], "", "See `trl-lora-sync grpo --help-all` and `accelerate launch --help`."),
    ],
)
def test_unknown_flag_ends_with_2_and_a_suggestion(
    typed: list[str],
    file: str,
    meant: str,
    launched: list[Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "grpo.yaml").write_text(f"output_dir: out\n{file}")
    assert main(["grpo", "--config", str(tmp_path / "grpo.yaml"), *typed]) == 2
    assert capsys.readouterr().err.rstrip().endswith(meant)
    assert not launched


def test_value_of_another_type_ends_with_2_and_a_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """The usage of all flags, 250 lines, stood before the message."""
    assert main(["grpo", "--lora_sync_keep", "two"]) == 2
    said = capsys.readouterr().err
    assert "--lora_sync_keep" in said
    assert "invalid int value: 'two'" in said
    assert len(said.splitlines()) < 10


def test_beginning_of_a_flag_is_taken_as_argparse_does(launched: list[Any], tmp_path: Path) -> None:
    typed = ["--output_dir", str(tmp_path), "--use_cpu", "True", "--bf16", "False", "--lora_sync_timeo", "60"]
    assert main(["grpo", *typed, f"--config={_empty(tmp_path)}"]) == 0
    assert launched


def _empty(folder: Path) -> Path:
    file = folder / "grpo.yaml"
    file.write_text("lora_r: 4")
    return file


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_short_help_has_every_field_of_this_package_and_none_of_trl(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["grpo", flag]) == 0
    said = capsys.readouterr().out
    ours, theirs = _fields()
    assert all(f"--{name} " in said for name in ours)
    listed = said.partition("Example:")[0]
    assert not [name for name in theirs if f"--{name} " in listed]
    assert "--help-all" in said


def test_whole_help_begins_with_the_fields_of_this_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grpo", "--help-all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    ours, theirs = _fields()
    found = {name: _line_of(lines, name) for name in (*ours, *theirs)}
    assert min(found[name] for name in ours) < 10
    assert max(found[name] for name in ours) < min(found[name] for name in theirs)


def _line_of(lines: list[str], name: str) -> int:
    return next(number for number, line in enumerate(lines) if line.startswith(f"  --{name}"))


def _fields() -> tuple[set[str], set[str]]:
    theirs = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    return {field.name for field in dataclasses.fields(trl_lora_sync.GRPOConfig)} - theirs, theirs


def test_short_help_shows_the_fields_as_they_are() -> None:
    ours, _ = _fields()
    read = our_flags()
    assert read.keys() == ours
    hints = typing.get_type_hints(trl_lora_sync.GRPOConfig)
    for field in dataclasses.fields(trl_lora_sync.GRPOConfig):
        if field.name in ours:
            flag, text = read[field.name]
            default = "" if field.default is None else f"  [default: {field.default}]"
            assert text == f"{field.metadata['help']}{default}"
            if typing.get_origin(hints[field.name]) is typing.Literal:
                assert flag == f"--{field.name} <{'|'.join(map(str, typing.get_args(hints[field.name])))}>"
            else:
                assert flag in {f"--{field.name} {kind}" for kind in ("STR", "INT", "FLOAT")}


@pytest.mark.parametrize("typed", [["grpo.yaml"], ["--lora_r", "16", "32"]])
def test_word_that_belongs_to_no_flag_is_not_run_as_the_script(
    typed: list[str], launched: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As accelerate takes it."""
    assert main(["grpo", *typed, "--output_dir", str(tmp_path), "--use_cpu", "--bf16", "False"]) == 2
    assert f"{typed[-1]} belongs to no flag" in capsys.readouterr().err
    assert not launched


@pytest.mark.outside
def test_message_of_a_failed_training_is_followed_by_one_line(tmp_path: Path, run_python: Callable[..., str]) -> None:
    """And by no traceback of the launch."""
    code = "import sys; from trl_lora_sync.cli.main import main; sys.stderr = sys.stdout; print(main(sys.argv[1:]))"
    typed = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "False", "--num_processes", "1"]
    *_, line, status = run_python(code, "grpo", *typed).splitlines()
    assert line.startswith("trl-lora-sync grpo: the training ended with status ")
    assert status == "1"


_LAUNCHED_AND_TERMINATED = """
import os, signal, subprocess, sys
from accelerate.commands import launch

def launch_as_accelerate_does(args):
    wait = "import time; print('up', flush=True); time.sleep(100)"
    training = subprocess.Popen([sys.executable, "-c", wait], stdout=subprocess.PIPE)
    training.stdout.readline()
    os.kill(os.getpid(), signal.SIGTERM)
    status = training.wait()
    raise subprocess.CalledProcessError(status, "the script")

launch.launch_command = launch_as_accelerate_does
sys.stderr = sys.stdout
from trl_lora_sync.cli.main import main
print(main(sys.argv[1:]))
"""


@pytest.mark.outside
def test_a_command_that_is_terminated_terminates_its_training(tmp_path: Path, run_python: Callable[..., str]) -> None:
    """It ended alone, and the training went on with its GPU and its server."""
    typed = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "False", "--num_processes", "1"]
    *_, line, status = run_python(_LAUNCHED_AND_TERMINATED, "grpo", *typed).splitlines()
    assert line == "trl-lora-sync grpo: the training was ended by SIGTERM."
    assert status == "143"  # by which a scheduler knows it


_TERMINATED = """
import contextlib, signal, types
from trl_lora_sync import _trl

@contextlib.contextmanager
def script(*_):
    parser = types.SimpleNamespace(parse_args_and_config=lambda **_: ())
    yield types.SimpleNamespace(make_parser=lambda: parser, main=train)

def train():
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.raise_signal(signal.SIGTERM)
        print("cleaned up")

_trl.script = script
from trl_lora_sync.scripts import grpo
try:
    grpo.main()
except SystemExit as ended:
    print(ended.code)
"""


@pytest.mark.outside
def test_a_script_that_is_terminated_ends_by_an_exception(run_python: Callable[..., str]) -> None:
    """It ended on the spot, or at the second signal, and its versions stayed on the server until the next run.

    `timeout`, for one, sends the signal to the launcher, which passes it on, and to all of its process group.
    """
    assert run_python(_TERMINATED).splitlines() == ["cleaned up", "143"]


@pytest.mark.parametrize(
    ("arguments", "part", "rest"),
    [
        (["--a", "1", "--b", "2"], ["--a", "1"], ["--b", "2"]),
        (["--a", "1", "--b", "1"], ["--b", "1"], ["--a", "1"]),
        (["x"], [], ["x"]),
        ([], [], []),
    ],
)
def test_what_accelerate_takes_is_not_passed_to_the_script(
    arguments: list[str], part: list[str], rest: list[str]
) -> None:
    assert without(arguments, part) == rest
