"""Distributed tier: the configs in `examples/accelerate/` choose the named way, and those for a CPU train the example.

accelerate starts no FSDP without a GPU, so its tests check that the launcher passes on the file's values; FSDP's own
behaviour is tested in `test_ways_of_training.py`.
"""

import json
import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from support.launch import CPU_ENV, LAUNCHERS, TESTS
from support.processes import run
from support.servers import adapters_on
from vllm_server import VLLMServer

ROOT = TESTS.parent
CONFIGS = ROOT / "examples" / "accelerate"
# What accelerate must hand to the training processes.
ZERO = "ACCELERATE_DEEPSPEED_ZERO_STAGE"
FILE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
EXPECTED: dict[str, dict[str, str]] = {
    "ddp": {},
    "zero1": {ZERO: "1"},
    "zero2": {ZERO: "2"},
    "zero2_offload": {FILE: "examples/accelerate/zero2_offload.json"},
    "zero3": {ZERO: "3", "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true"},
    "zero3_offload": {FILE: "examples/accelerate/zero3_offload.json"},
    "fsdp1": {"FSDP_VERSION": "1", "FSDP_OFFLOAD_PARAMS": "false", "FSDP_USE_ORIG_PARAMS": "true"},
    "fsdp1_offload": {"FSDP_VERSION": "1", "FSDP_OFFLOAD_PARAMS": "true"},
    "fsdp2": {"FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "false", "FSDP_RESHARD_AFTER_FORWARD": "true"},
    "fsdp2_offload": {"FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"},
}


def parsed(name: str, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """What `accelerate launch --config_file` makes of a config."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    args = launch_command_parser().parse_args(["--config_file", str(CONFIGS / f"{name}.yaml"), "examples/grpo.py"])
    args, defaults, _ = _validate_launch_command(args)
    if args.use_deepspeed:  # as `accelerate launch` does next
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
    return args


def test_there_is_a_config_for_each_way_of_training() -> None:
    assert {file.stem for file in CONFIGS.glob("*.yaml")} == EXPECTED.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_each_config_is_short_and_says_what_it_is_for(name: str) -> None:
    text = (CONFIGS / f"{name}.yaml").read_text()

    assert text.startswith("# ")
    assert len(text.splitlines()) < 20
    assert yaml.safe_load(text)["num_processes"] == 2


@pytest.mark.parametrize("name", EXPECTED)
def test_each_config_launches_what_it_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = parsed(name, monkeypatch)
    env = prepare_deepspeed_cmd_env(args)[1] if args.use_deepspeed else prepare_multi_gpu_env(args)

    assert args.num_processes == 2
    assert args.use_deepspeed == name.startswith("zero")
    assert args.use_fsdp == name.startswith("fsdp")
    assert env.get("ACCELERATE_USE_FSDP", "false") == str(name.startswith("fsdp")).lower()
    assert {key: env.get(key) for key in EXPECTED[name]} == EXPECTED[name]
    if FILE not in env:
        assert env["ACCELERATE_MIXED_PRECISION"] == "bf16"


@pytest.mark.parametrize(("name", "stage"), [("zero2_offload", 2), ("zero3_offload", 3)])
def test_deepspeed_configs_offload_without_a_compiler(name: str, stage: int) -> None:
    config = json.loads((CONFIGS / f"{name}.json").read_text())

    assert config["zero_optimization"]["stage"] == stage
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert ("offload_param" in config["zero_optimization"]) == (stage == 3)
    assert config["zero_force_ds_cpu_optimizer"] is False


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "zero3_offload"])
def test_the_example_trains_with_the_config(name: str, server: VLLMServer, base_model: Path, tmp_path: Path) -> None:
    options: list[Any] = ["--config_file", f"examples/accelerate/{name}.yaml", "--main_process_port", "0"]
    script: list[Any] = ["--model_name_or_path", base_model, "--output_dir", tmp_path / "out", "--use_peft"]
    script += ["--lora_r", "8", "--lora_target_modules", "all-linear", "--use_vllm", "--vllm_mode", "server"]
    script += ["--vllm_server_base_url", server.base_url, "--vllm_sync_strategy", "lora_adapter"]
    script += ["--lora_sync_dir", tmp_path / "sync", "--max_steps", "2", "--logging_steps", "1", "--report_to", "none"]
    script += ["--per_device_train_batch_size", "4", "--num_generations", "4", "--max_completion_length", "8"]
    script += ["--save_strategy", "no", "--bf16", "false", "--gradient_checkpointing", "false", "--dtype", "float32"]
    env = {"PYTHONPATH": f"{TESTS}:{ROOT}:{LAUNCHERS}", "OMP_NUM_THREADS": "1"}
    if name.startswith("zero"):
        script += ["--ddp_backend", "gloo"]  # accelerate takes NCCL for granted
    else:
        options += ["--mixed_precision", "no"]
        env |= CPU_ENV
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", *options]
    command += [TESTS / "support" / "example.py", *script]

    ended = run(list(map(str, command)), tmp_path / "log", 240.0, env)

    assert ended.code == 0, ended.output
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert [step["lora_sync/version"] for step in state["log_history"] if "reward" in step] == [1, 2]
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    assert adapters_on(server.base_url) == {}
