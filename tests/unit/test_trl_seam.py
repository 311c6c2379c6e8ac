"""The seam to TRL: untouched with "weights", restored after "lora_adapter", and refusals before anything loads."""

import inspect
import json
import re
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import trl
from datasets import Dataset
from make_model import make_model, make_tokenizer
from packaging.requirements import Requirement
from peft import LoraConfig, PrefixTuningConfig
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

import trl_lora_sync
from trl_lora_sync import GRPOConfig, GRPOTrainer, _trl, trl_checks
from trl_lora_sync.adapter.peft_checks import check_peft
from trl_lora_sync.errors import (
    LoRASyncError,
    UnsupportedAdapterError,
    UnsupportedPEFTError,
    UnsupportedSettingError,
    UnsupportedTRLError,
)
from trl_lora_sync.versions import PEFT, TRL
from unit.tiny import lora_model

ON_CPU: dict[str, Any] = {"use_cpu": True, "bf16": False, "report_to": "none"}
SYNC: dict[str, Any] = {"use_vllm": True, "vllm_mode": "server", "vllm_sync_strategy": "lora_adapter"}


@pytest.fixture
def arguments(tmp_path: Path) -> dict[str, Any]:
    """Arguments of a trainer whose model does not exist, so that it fails as soon as it tries to load."""
    return {
        "model": str(tmp_path / "no" / "such" / "model"),
        "args": GRPOConfig(output_dir=str(tmp_path / "out"), **ON_CPU, **SYNC),
        "reward_funcs": lambda completions, **_: [0.0] * len(completions),
        "train_dataset": Dataset.from_list([{"prompt": "a"}]),
    }


# Refusals come first


@pytest.mark.outside
@pytest.mark.parametrize(
    ("peft_config", "words"),
    [
        (None, "needs a LoRA adapter"),
        (PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "PEFT type PREFIX_TUNING"),
        (peft.IA3Config(), "PEFT type IA3"),
        (LoraConfig(use_dora=True), "use_dora=True"),
        (LoraConfig(target_modules=["q_proj", "lm_head"]), "adapter on 'lm_head'"),
    ],
    ids=["none", "prefix", "ia3", "dora", "lm_head"],
)
def test_adapter_that_cannot_be_served_is_refused_before_a_model_is_loaded(
    peft_config: Any, words: str, arguments: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedAdapterError, match=words):
        GRPOTrainer(**arguments, peft_config=peft_config)


@pytest.mark.outside
def test_model_is_what_fails_to_load_once_the_adapter_can_be_served(arguments: dict[str, Any]) -> None:
    """Shows that the refusals above come before the load, and not instead of it."""
    with pytest.raises(Exception, match="no/such/model") as caught:
        GRPOTrainer(**arguments, peft_config=LoraConfig())
    assert not isinstance(caught.value, LoRASyncError)
    assert grpo_trainer.VLLMGeneration is VLLMGeneration


@pytest.mark.outside
def test_positional_arguments_are_checked_like_keyword_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedAdapterError, match="needs a LoRA adapter"):
        GRPOTrainer(arguments["model"], arguments["reward_funcs"], arguments["args"])


@pytest.mark.outside
def test_peft_model_is_checked_by_the_config_it_carries(arguments: dict[str, Any]) -> None:
    arguments["model"] = lora_model(use_dora=True)
    with pytest.raises(UnsupportedAdapterError, match="use_dora=True"):
        GRPOTrainer(**arguments)


def test_setting_changed_after_the_config_was_made_is_refused(arguments: dict[str, Any]) -> None:
    arguments["args"].lora_sync_keep = 0
    with pytest.raises(UnsupportedSettingError, match="lora_sync_keep=0"):
        GRPOTrainer(**arguments, peft_config=LoraConfig())


def test_unknown_strategy_that_was_set_after_the_config_was_made_is_refused(arguments: dict[str, Any]) -> None:
    """It counted as "weights", and the run was silently TRL's own."""
    arguments["args"].vllm_sync_strategy = "lora-adapter"
    with pytest.raises(UnsupportedSettingError, match="vllm_sync_strategy='lora-adapter' is not known"):
        GRPOTrainer(**arguments)


def test_unknown_argument_is_refused_as_trl_refuses_it(arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'peft_confg'"):
        GRPOTrainer(**arguments, peft_confg=LoraConfig())


# The rebinding


def test_factory_is_in_place_inside_the_block_only() -> None:
    def factory(**_: Any) -> Any:
        return None

    with _trl.generation_class(GRPOTrainer, factory):
        assert grpo_trainer.VLLMGeneration is factory
    assert grpo_trainer.VLLMGeneration is VLLMGeneration


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_rebinding_is_undone_after_an_exception(error: type[BaseException]) -> None:
    with pytest.raises(error), _trl.generation_class(GRPOTrainer, lambda **_: None):
        raise error
    assert grpo_trainer.VLLMGeneration is VLLMGeneration


def test_trainers_built_in_two_threads_do_not_get_each_others_factory() -> None:
    seen: dict[str, list[bool]] = defaultdict(list)
    start = threading.Barrier(2)

    def build(name: str) -> None:
        def factory(**_: Any) -> Any:
            return None

        start.wait(10)
        for _ in range(50):
            with _trl.generation_class(GRPOTrainer, factory):
                time.sleep(0)
                seen[name].append(grpo_trainer.VLLMGeneration is factory)

    threads = [threading.Thread(target=build, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert {name: (len(found), all(found)) for name, found in seen.items()} == {"a": (50, True), "b": (50, True)}
    assert grpo_trainer.VLLMGeneration is VLLMGeneration


# The strategy "weights"


@pytest.fixture
def bound_during_init(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Lets TRL's own class be built where no vLLM is installed, and notes what the trainer's module held meanwhile."""
    bound: list[Any] = []

    def init_vllm(generation: VLLMGeneration) -> None:
        bound.append(grpo_trainer.VLLMGeneration)
        info = {"model_config": {"logprobs_mode": "processed_logprobs"}}
        generation.vllm_client = SimpleNamespace(get_server_info=lambda: info)

    monkeypatch.setattr(VLLMGeneration, "_init_vllm", init_vllm)
    return bound


@pytest.mark.parametrize("config_class", [GRPOConfig, trl.GRPOConfig], ids=["ours", "trl's"])
def test_weights_builds_trls_own_generation_object(
    config_class: type[Any], arguments: dict[str, Any], tmp_path: Path, bound_during_init: list[Any]
) -> None:
    make_model(tmp_path / "model", num_hidden_layers=1, hidden_size=16, intermediate_size=16, head_dim=8)
    arguments |= {
        "model": str(tmp_path / "model"),
        "processing_class": make_tokenizer(),
        "args": config_class(output_dir=str(tmp_path / "out"), use_vllm=True, vllm_mode="server", **ON_CPU),
    }
    trainer = GRPOTrainer(**arguments, peft_config=LoraConfig(use_dora=True))
    assert bound_during_init == [VLLMGeneration]
    assert type(trainer.vllm_generation) is VLLMGeneration
    assert grpo_trainer.VLLMGeneration is VLLMGeneration
    assert isinstance(trainer, trl.GRPOTrainer)


@pytest.mark.parametrize(
    ("rank", "fields", "words"),
    [
        ("0", {"lora_sync_serving": "fused", "lora_sync_keep": 5}, "lora_sync_serving='fused', lora_sync_keep=5: "),
        ("1", {"lora_sync_serving": "fused", "lora_sync_keep": 5}, ""),
        ("0", {"vllm_sync_strategy": "weights", "lora_sync_keep": 2}, ""),
    ],
)
def test_fields_that_have_no_effect_with_weights_are_named_by_the_first_process(
    rank: str,
    fields: dict[str, Any],
    words: str,
    arguments: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They were taken silently, and the run was TRL's own."""
    monkeypatch.setenv("RANK", rank)
    arguments["args"] = GRPOConfig(output_dir=str(tmp_path / "out"), use_vllm=True, **ON_CPU, **fields)
    with pytest.raises(Exception, match="no/such/model"):
        GRPOTrainer(**arguments)
    logged = [one.getMessage() for one in caplog.records if one.name.startswith("trl_lora_sync")]
    assert len(logged) == bool(words)
    assert all(one.startswith(words) and 'Set vllm_sync_strategy="lora_adapter"' in one for one in logged)


_SAME_AS_TRL = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import torch
from datasets import Dataset
from make_model import make_model, make_tokenizer
from packaging.requirements import Requirement
from peft import LoraConfig
from transformers import set_seed

folder = sys.argv[2]
make_model(folder + "/model", num_hidden_layers=1, hidden_size=16, intermediate_size=16, head_dim=8)


def train(trainer_class, config_class, **fields):
    set_seed(3)  # some TRL versions draw the adapter before they seed
    args = config_class(
        output_dir=folder + "/out", use_cpu=True, bf16=False, report_to="none", max_steps=2, num_generations=2,
        per_device_train_batch_size=2, max_completion_length=4, save_strategy="no", disable_tqdm=True,
        logging_steps=1, learning_rate=1e-2, seed=3, **fields,
    )
    trainer = trainer_class(
        model=folder + "/model", args=args, processing_class=make_tokenizer(),
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        train_dataset=Dataset.from_list([{"prompt": "abc"}] * 4),
        peft_config=LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    )
    trainer.train()
    logged = [{k: v for k, v in entry.items() if "time" not in k and "runtime" not in k and "second" not in k}
              for entry in trainer.state.log_history]
    return trainer, {name: value.clone() for name, value in trainer.model.state_dict().items()}, logged


import trl
from trl.trainer import grpo_trainer
original = grpo_trainer.VLLMGeneration
stock, stock_weights, stock_log = train(trl.GRPOTrainer, trl.GRPOConfig)
before = set(sys.modules)
trls = {name: id(value) for name, value in vars(grpo_trainer).items()}

import trl_lora_sync
ours, our_weights, our_log = train(trl_lora_sync.GRPOTrainer, trl_lora_sync.GRPOConfig, vllm_sync_strategy="weights")

print(json.dumps({
    "loaded": sorted(set(sys.modules) - before),
    "unpatched": trls == {name: id(value) for name, value in vars(grpo_trainer).items()},
    "original": grpo_trainer.VLLMGeneration is original,
    "same weights": our_weights.keys() == stock_weights.keys()
        and all(torch.equal(value, stock_weights[name]) for name, value in our_weights.items()),
    "trained": any(entry.get("grad_norm") for entry in our_log),
    "same log": our_log == stock_log,
    "log": [our_log, stock_log],
}))
"""


@pytest.mark.outside
def test_weights_trains_bit_for_bit_as_trl_does_and_loads_nothing_more(
    tmp_path: Path, run_python: Callable[..., str]
) -> None:
    examples = Path(__file__).parents[2] / "examples" / "demo"
    result = json.loads(run_python(_SAME_AS_TRL, str(examples), str(tmp_path)).splitlines()[-1])
    assert result["loaded"] == [
        "trl_lora_sync",
        "trl_lora_sync._trl",
        "trl_lora_sync.addresses",
        "trl_lora_sync.config",
        "trl_lora_sync.errors",
        "trl_lora_sync.trainers",
        "trl_lora_sync.trl_checks",
        "trl_lora_sync.versions",
    ]
    assert result["unpatched"]
    assert result["original"]
    assert result["trained"], result["log"]
    assert result["same weights"]
    assert result["same log"], result["log"]


# Which TRL; copies of TRL with changes in them are in test_altered_versions.py


def test_installed_trl_has_everything_that_is_relied_on() -> None:
    trl_checks.check_trl()


@pytest.mark.parametrize("version", ["1.10.9", "0.29.0"])
def test_trl_that_is_too_old_is_refused_with_what_is_needed(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl, "__version__", version)
    with pytest.raises(UnsupportedTRLError) as caught:
        trl_checks.check_trl()
    assert str(caught.value) == (
        f"TRL {version} is installed, and adapter sync needs 1.11 or later. Install one with: pip install 'trl>=1.11'"
    )
    assert isinstance(caught.value, ImportError)


@pytest.mark.parametrize(
    ("version", "warning"),
    [
        ("1.11.0", None),
        ("1.16.9", None),
        ("1.17.0.dev0", "TRL 1.17.0.dev0 is newer than 1.16"),
        ("2.0", "TRL 2.0 is newer than 1.16"),
        ("unknown", "TRL unknown is not a released version"),  # TRL's own version without its metadata
    ],
)
def test_version_that_was_not_tested_is_used_with_a_warning(
    version: str, warning: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trl, "__version__", version)
    trl_checks.check_trl()
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == ([warning] if warning else [])


def test_only_the_first_process_warns(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(trl, "__version__", "2.0")
    monkeypatch.setenv("RANK", "1")
    trl_checks.check_trl()
    assert not caplog.records


class NewerGeneration(VLLMGeneration):  # type: ignore[misc]
    """With a parameter that a TRL to come may have."""

    __module__ = VLLMGeneration.__module__

    def __init__(self, model: Any, presence_penalty: float = 0.0, temperature: float = 1.0) -> None:
        """Needs nothing."""


class OurGeneration(NewerGeneration):
    """In the place of `LoRASyncGeneration`."""


def test_new_parameter_of_the_generation_object_is_refused_as_soon_as_it_says_something() -> None:
    trl_checks.check_arguments(OurGeneration, "model", presence_penalty=0.0, temperature=0.5)
    with pytest.raises(UnsupportedTRLError, match=r"the trainer passes presence_penalty=0\.5 to VLLMGeneration"):
        trl_checks.check_arguments(OurGeneration, "model", presence_penalty=0.5)


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("vllm_generation", "builds its generation object in another way"),
        ("_metrics", 'have no "train" and "eval"'),
        ("_last_loaded_step", "has none of _last_loaded_step, _last_vllm_sync_step"),
        ("is_fsdp_enabled", "has no is_fsdp_enabled"),
    ],
)
def test_built_trainer_without_something_is_refused(missing: str, words: str) -> None:
    attributes = {
        "accelerator": None, "is_fsdp_enabled": False, "vllm_generation": OurGeneration(None),
        "_metrics": {"train": {}, "eval": {}}, "_last_loaded_step": -1,
    }  # fmt: skip
    trl_checks.check_built(SimpleNamespace(**attributes), OurGeneration)
    del attributes[missing]
    with pytest.raises(UnsupportedTRLError, match=words):
        trl_checks.check_built(SimpleNamespace(**attributes), OurGeneration)


def test_package_requires_no_trl_that_is_older_than_some_other() -> None:
    """So that installing it never replaces a newer TRL."""
    required = next(one for one in map(Requirement, metadata.requires("trl-lora-sync") or []) if one.name == "trl")
    assert str(required.specifier) == f">={TRL.oldest}"


def test_tested_versions_are_those_of_the_makefile_and_the_installed_one() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    [listed] = re.findall(r"^TRL_VERSIONS := (.*)$", makefile, flags=re.MULTILINE)
    assert trl.__version__ in TRL.run
    if sys.version_info >= (3, 11):  # as TRL 1.15 and later need
        assert {*listed.split(), trl.__version__} == set(TRL.run)


def test_installed_peft_was_tested() -> None:
    check_peft()
    assert peft.__version__ in PEFT.run


def test_peft_that_is_too_old_is_refused_with_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peft, "__version__", "0.17.1")
    with pytest.raises(UnsupportedPEFTError, match=r"needs 0\.18 or later.*pip install 'peft>=0\.18'"):
        check_peft.__wrapped__()


def test_check_of_peft_leaves_the_random_state_as_it_is() -> None:
    state = torch.get_rng_state()
    check_peft.__wrapped__()
    assert torch.equal(torch.get_rng_state(), state)


# Metrics through the trainer's own logging


def test_metrics_go_where_trl_averages_them_and_the_version_is_the_latest() -> None:
    metrics: Any = {"train": defaultdict(list), "eval": defaultdict(list)}
    trainer = SimpleNamespace(_metrics=metrics, model=SimpleNamespace(training=True))
    for number in (1, 2):
        _trl.record_metrics(trainer, {"s": float(number), "version": number}, latest=frozenset({"version"}))
    assert metrics == {"train": {"s": [1.0, 2.0], "version": [2]}, "eval": {}}
    trainer.model.training = False
    _trl.record_metrics(trainer, {"s": 9.0}, latest=frozenset())
    assert metrics["eval"] == {"s": [9.0]}


# The package


@pytest.mark.outside
def test_import_of_the_package_loads_neither_torch_nor_trl(run_python: Callable[..., str]) -> None:
    source = (
        "import sys, trl_lora_sync; print(sorted({'torch', 'trl', 'peft', 'transformers', 'httpx'} & set(sys.modules)))"
    )
    assert run_python(source).strip() == "[]"


def test_exported_names_are_these() -> None:
    assert trl_lora_sync.__all__ == [
        "DistillationConfig", "DistillationTrainer", "ExportedAdapter", "GRPOConfig", "GRPOTrainer", "LoRASyncConfig",
        "LoRASyncError", "LoRASyncTrainer", "RLOOConfig", "RLOOTrainer", "export_adapter",
    ]  # fmt: skip
    assert all(getattr(trl_lora_sync, name).__name__ == name for name in trl_lora_sync.__all__)
    assert set(trl_lora_sync.__all__) <= set(dir(trl_lora_sync))


def test_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'GRPOTrainr'"):
        _ = trl_lora_sync.GRPOTrainr


def test_signature_of_export_adapter_is_the_promised_one() -> None:
    assert list(inspect.signature(trl_lora_sync.export_adapter).parameters) == [
        "model", "directory", "dtype", "adapter_name"
    ]  # fmt: skip


def test_version_of_the_package_is_that_of_its_metadata() -> None:
    from importlib.metadata import version

    assert trl_lora_sync.__version__ == version("trl-lora-sync")


def test_a_package_that_the_asynchronous_trainer_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Python 3.10 the newest TRL is 1.14, whose asynchronous trainer imports aiohttp without requiring it."""

    def without_aiohttp(name: str) -> None:
        raise ModuleNotFoundError("No module named 'aiohttp'", name="aiohttp.client")

    monkeypatch.setattr(trl_checks, "import_module", without_aiohttp)
    with pytest.raises(UnsupportedTRLError, match=r"imports aiohttp for its .* Install it with: pip install aiohttp$"):
        trl_checks.check_async_exports()
