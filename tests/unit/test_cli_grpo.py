"""Unit tier: TRL's script under this package's command, and what is handed to accelerate."""

from pathlib import Path
from typing import Any

import pytest
import trl
import yaml

import trl_lora_sync
from trl_lora_sync import _trl
from trl_lora_sync.cli.grpo import without
from trl_lora_sync.cli.main import main


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What accelerate is asked to launch, instead of launching it."""
    seen: list[Any] = []
    monkeypatch.setattr("accelerate.commands.launch.launch_command", seen.append)
    return seen


def test_every_field_and_accelerates_own_flags_go_where_they_belong(launched: list[Any], tmp_path: Path) -> None:
    ours = {"vllm_sync_strategy": "lora_adapter", "use_vllm": True, "vllm_mode": "server", "lora_sync_keep": 3}
    trls = {"learning_rate": 1e-5, "use_peft": True, "lora_r": 4, "dataset_name": "d", "use_cpu": True, "bf16": False}
    file = tmp_path / "grpo.yaml"
    file.write_text(yaml.safe_dump({**ours, **trls, "output_dir": str(tmp_path), "num_processes": 2}))
    typed = ["--config", str(file), "--max_steps", "5", "--main_process_port", "29501", "--lora_sync_timeout", "60"]

    assert main(["grpo", *typed, "--accelerate_config", "zero2"]) == 0

    [args] = launched
    assert args.num_processes == 2
    assert args.main_process_port == 29501
    assert args.config_file.endswith("zero2.yaml")
    assert Path(args.training_script).parts[-3:] == ("trl_lora_sync", "scripts", "grpo.py")
    assert args.training_script_args == [
        "--config", str(file), "--max_steps", "5", "--lora_sync_timeout", "60",
    ]  # fmt: skip


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
