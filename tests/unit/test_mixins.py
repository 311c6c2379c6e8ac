"""Unit tier: the two mixins, with TRL's own classes and with trainers that adapter sync is not for."""

import copy
import dataclasses
import inspect
import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trl
from datasets import Dataset
from make_model import make_model, make_tokenizer
from peft import LoraConfig, get_peft_model

import trl_lora_sync
from trl_lora_sync import GRPOTrainer, LoRASyncConfig, LoRASyncTrainer, _trl
from trl_lora_sync.config import check_reference
from trl_lora_sync.errors import LoRASyncError, UnsupportedAdapterError, UnsupportedSettingError
from trl_lora_sync.trl_checks import GENERATION_CLASS
from unit.tiny import base_model

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from trl.experimental.gold import GOLDConfig
from trl.experimental.iw_opd import IWOPDConfig
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl.experimental.sdft import SDFTConfig, SDFTTrainer
from trl.experimental.server_distillation import ServerDistillationConfig
from trl.experimental.tpo import TPOConfig, TPOTrainer

ON_CPU: dict[str, Any] = {"use_cpu": True, "bf16": False, "report_to": "none"}
SYNC: dict[str, Any] = {
    "use_vllm": True, "vllm_mode": "server", "vllm_sync_strategy": "lora_adapter",
    "vllm_server_base_url": "http://localhost:8000,http://gpu7:8000",
}  # fmt: skip
PAIRS = [
    (trl_lora_sync.GRPOConfig, trl_lora_sync.GRPOTrainer),
    (trl_lora_sync.RLOOConfig, trl_lora_sync.RLOOTrainer),
    (trl_lora_sync.DistillationConfig, trl_lora_sync.DistillationTrainer),
]


@dataclass
class GMPOSyncConfig(LoRASyncConfig, GMPOConfig):  # type: ignore[misc]
    """As a user makes it."""


class GMPOSyncTrainer(LoRASyncTrainer, GMPOTrainer):  # type: ignore[misc]
    """As a user makes it."""


@dataclass
class GOLDSyncConfig(LoRASyncConfig, GOLDConfig):  # type: ignore[misc]
    """With a setting of how often it syncs."""


@dataclass
class SDFTSyncConfig(LoRASyncConfig, SDFTConfig):  # type: ignore[misc]
    """With a teacher that may be the server itself."""


class SDFTSyncTrainer(LoRASyncTrainer, SDFTTrainer):  # type: ignore[misc]
    """Imports its generation class inside a function."""


@dataclass
class IWOPDSyncConfig(LoRASyncConfig, IWOPDConfig):  # type: ignore[misc]
    """With a teacher that may be at a URL."""


@dataclass
class ServerDistillationSyncConfig(LoRASyncConfig, ServerDistillationConfig):  # type: ignore[misc]
    """With a teacher that is at a URL."""


@dataclass
class OnlineDPOSyncConfig(LoRASyncConfig, OnlineDPOConfig):  # type: ignore[misc]
    """Does not fit."""


class OnlineDPOSyncTrainer(LoRASyncTrainer, OnlineDPOTrainer):  # type: ignore[misc]
    """Does not fit."""


@dataclass
class TPOSyncConfig(LoRASyncConfig, TPOConfig):  # type: ignore[misc]
    """Does not sample at all."""


class TPOSyncTrainer(LoRASyncTrainer, TPOTrainer):  # type: ignore[misc]
    """Does not sample at all."""


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "out")


# The fields


@pytest.mark.parametrize("config", [pair[0] for pair in PAIRS] + [GMPOSyncConfig])
def test_configuration_has_trls_fields_in_their_order_and_then_the_same_ones(config: type[Any]) -> None:
    trls = config.__mro__[2]
    names = [field.name for field in dataclasses.fields(config)]
    assert names == [field.name for field in dataclasses.fields(trls)] + [
        field.name for field in dataclasses.fields(LoRASyncConfig)
    ]
    assert trls.__module__.startswith("trl.")


@pytest.mark.parametrize("config", [pair[0] for pair in PAIRS] + [GMPOSyncConfig])
def test_configuration_pickles_and_checks_the_same(config: type[Any], folder: str) -> None:
    made = config(output_dir=folder, **ON_CPU, **SYNC, lora_sync_keep=3)
    assert pickle.loads(pickle.dumps(made)).lora_sync_keep == 3
    with pytest.raises(UnsupportedSettingError, match="lora_sync_keep=0"):
        config(output_dir=folder, **ON_CPU, **SYNC, lora_sync_keep=0)
    with pytest.raises(UnsupportedSettingError, match=r'lora_sync_pause=.* cannot be used with vllm_mode="colocate"'):
        config(output_dir=folder, **ON_CPU, **{**SYNC, "vllm_mode": "colocate"}, lora_sync_pause="drain")


@pytest.mark.parametrize("frequency", ["2", None, 1.5])
def test_frequency_of_syncs_that_is_not_a_number_is_refused(frequency: Any, folder: str) -> None:
    with pytest.raises(UnsupportedSettingError, match=f"vllm_sync_frequency must be a whole number, got {frequency!r}"):
        GOLDSyncConfig(output_dir=folder, **ON_CPU, **SYNC, vllm_sync_frequency=frequency)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[1].__name__)
def test_trainer_takes_what_trls_takes(pair: tuple[Any, Any]) -> None:
    trls = getattr(trl, pair[1].__name__)
    assert issubclass(pair[1], trls)
    assert issubclass(pair[0], getattr(trl, pair[0].__name__))
    assert list(inspect.signature(pair[1].__init__).parameters)[1:] == ["args", "kwargs"]


# What comes before a model is loaded


@pytest.mark.outside
@pytest.mark.parametrize(
    ("config", "trainer", "others"),
    [
        (*PAIRS[0], {"reward_funcs": len}),
        (*PAIRS[1], {"reward_funcs": len}),
        (*PAIRS[2], {"teacher_model": "no/such/teacher"}),
        (GMPOSyncConfig, GMPOSyncTrainer, {"reward_funcs": len}),
        (SDFTSyncConfig, SDFTSyncTrainer, {}),
    ],
)
def test_each_trainer_checks_the_adapter_before_it_loads_a_model(
    config: Any, trainer: Any, others: dict[str, Any], folder: str
) -> None:
    given = {"args": config(output_dir=folder, **ON_CPU, **SYNC), "train_dataset": Dataset.from_list([{"prompt": "a"}])}
    with pytest.raises(UnsupportedAdapterError, match="use_dora=True"):
        trainer("no/such/model", **given, **others, peft_config=LoraConfig(use_dora=True))
    with pytest.raises(Exception, match="no/such/model") as caught:
        trainer("no/such/model", **given, **others, peft_config=LoraConfig())
    assert not isinstance(caught.value, LoRASyncError)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("OnlineDPO", "it talks to the server through a separate client, and merges the adapter"),
        ("AsyncGRPO", "it samples in the background through a separate client, and has another sync. Take AsyncGRPO"),
        ("AsyncDistillation", "it samples in the background through a separate client"),
    ],
)
def test_trainer_that_does_not_fit_is_refused_by_name_with_the_reason(name: str, words: str) -> None:
    from trl_lora_sync.trl_checks import check_trainer, refuse_others

    for what in ("Config", "Trainer"):
        trls = type(f"{name}{what}", (), {"__module__": f"trl.experimental.{name.lower()}"})
        users = type("Mine", (trls,), {})
        with pytest.raises(UnsupportedSettingError) as caught:
            (refuse_others if what == "Config" else check_trainer)(users)
        assert str(caught.value).startswith(f'{name}{what} cannot be used with vllm_sync_strategy="lora_adapter": ')
        assert words in str(caught.value)
        assert 'Set vllm_sync_strategy="weights".' in str(caught.value)


def test_online_dpo_is_refused_with_the_mixins_on_trls_own_classes(folder: str) -> None:
    with pytest.raises(UnsupportedSettingError, match="OnlineDPOConfig cannot be used"):
        OnlineDPOSyncConfig(output_dir=folder, **ON_CPU, **SYNC)
    config = OnlineDPOSyncConfig(output_dir=folder, **ON_CPU)
    config.vllm_sync_strategy = "lora_adapter"
    with pytest.raises(UnsupportedSettingError, match="OnlineDPOTrainer cannot be used"):
        OnlineDPOSyncTrainer(model="no/such/model", args=config)


def test_trainer_that_does_not_sample_with_vllm_is_refused(folder: str) -> None:
    with pytest.raises(UnsupportedSettingError, match=r"TPOSyncConfig cannot be used.* it has no use_vllm, vllm_mode"):
        TPOSyncConfig(output_dir=folder, **ON_CPU, vllm_sync_strategy="lora_adapter")
    config = TPOSyncConfig(output_dir=folder, **ON_CPU)
    config.vllm_sync_strategy = "lora_adapter"
    with pytest.raises(UnsupportedSettingError, match=r"TPOTrainer cannot be used.* with TRL's VLLMGeneration"):
        TPOSyncTrainer(model="no/such/model", args=config)


@pytest.mark.parametrize(("mixin", "trls"), [(LoRASyncTrainer, GMPOTrainer), (LoRASyncConfig, GMPOConfig)])
def test_mixin_behind_the_class_of_trl_is_refused_with_the_order_that_counts(mixin: Any, trls: Any) -> None:
    """TRL's classes never called it, and the setting was silently ignored."""
    with pytest.raises(UnsupportedSettingError, match=rf"class Late\({mixin.__name__}, {trls.__name__}\)"):
        type("Late", (trls, mixin), {})
    assert type("Early", (mixin, trls), {})


def test_class_of_trl_before_one_of_this_package_still_reaches_the_mixin() -> None:
    both = type("Both", (GMPOTrainer, GRPOTrainer), {})
    assert both.__mro__.index(LoRASyncTrainer) < both.__mro__.index(trl.GRPOTrainer)


def test_mixin_without_a_trainer_of_trl_is_refused_with_what_to_derive_from() -> None:
    """It ended in a StopIteration without a message."""
    mine = type("Mine", (LoRASyncTrainer,), {})
    with pytest.raises(UnsupportedSettingError, match=r"Mine derives from no trainer of TRL.*LoRASyncTrainer, trl\."):
        mine(model="no/such/model")


# Our configuration in a trainer of TRL


class Derived(trl.GRPOTrainer):  # type: ignore[misc]
    """Derives from TRL's trainer, as before a move to adapter sync."""


class ReadsItsLogLevel:
    """Configures logging before TRL's trainer is built, as many scripts do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["args"].get_process_log_level()
        super().__init__(*args, **kwargs)


class ReadsItsLogLevelSyncTrainer(ReadsItsLogLevel, LoRASyncTrainer, trl.GRPOTrainer):  # type: ignore[misc]
    """As a user makes it."""


def small(trainer: Any, args: Any, folder: Path) -> Any:
    """A trainer of a tiny model."""
    make_model(folder, num_hidden_layers=1, hidden_size=16, intermediate_size=16, head_dim=8)
    return trainer(
        model=str(folder), args=args, reward_funcs=len, processing_class=make_tokenizer(),
        train_dataset=Dataset.from_list([{"prompt": "abc"}] * 4),
        peft_config=LoraConfig(r=2, target_modules=["q_proj"]),
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["server", "colocate"])
@pytest.mark.parametrize(
    ("config", "trainer", "instead"),
    [
        (trl_lora_sync.GRPOConfig, trl.GRPOTrainer, "from trl_lora_sync import GRPOTrainer."),
        (trl_lora_sync.RLOOConfig, trl.RLOOTrainer, "from trl_lora_sync import RLOOTrainer."),
        (trl_lora_sync.GRPOConfig, Derived, "class Trainer(LoRASyncTrainer, Derived), after: from trl_lora_sync"),
        (GMPOSyncConfig, GMPOTrainer, "class Trainer(LoRASyncTrainer, GMPOTrainer), after: from trl_lora_sync"),
    ],
)
def test_trainer_without_the_mixin_refuses_a_configuration_that_chooses_adapter_sync(
    config: Any, trainer: Any, instead: str, mode: str, folder: str, tmp_path: Path
) -> None:
    """Only the import of the configuration was changed: TRL then set up its sync of merged weights, silently."""
    args = config(output_dir=folder, **ON_CPU, **SYNC | {"vllm_mode": mode})
    with pytest.raises(UnsupportedSettingError) as caught:
        small(trainer, args, tmp_path / "model")
    assert f"was given to {trainer.__name__}, which does not read it" in str(caught.value)
    assert instead in str(caught.value)


def test_trainer_without_the_mixin_takes_a_configuration_with_weights(folder: str, tmp_path: Path) -> None:
    args = trl_lora_sync.GRPOConfig(output_dir=folder, num_generations=4, per_device_train_batch_size=4, **ON_CPU)
    assert type(small(trl.GRPOTrainer, args, tmp_path / "model")) is trl.GRPOTrainer


def test_configuration_without_a_trainer_is_used_freely(folder: str) -> None:
    args = trl_lora_sync.GRPOConfig(output_dir=folder, **ON_CPU, **SYNC)
    for one in (args, copy.deepcopy(args), pickle.loads(pickle.dumps(args))):
        assert "lora_adapter" in repr(one)
        assert "lora_adapter" in one.to_json_string()
        assert one.get_process_log_level() == trl.GRPOConfig(output_dir=folder, **ON_CPU).get_process_log_level()


@dataclass
class OverridingConfig(trl_lora_sync.GRPOConfig):  # type: ignore[misc]
    """Reads its log level in a method of its class, as a user makes it."""

    def get_process_log_level(self) -> int:
        return int(super().get_process_log_level())


class ReadsLogLevelAtStart(trl.LogCompletionsCallback):  # type: ignore[misc]
    """A class of TRL that is not a trainer."""

    def __init__(self) -> None:
        self.seen: int | None = None

    def on_train_begin(self, args: Any, *_: Any, **__: Any) -> None:
        self.seen = args.get_process_log_level()


@pytest.mark.outside
def test_a_configuration_and_a_callback_of_trl_are_not_taken_for_a_trainer(folder: str, tmp_path: Path) -> None:
    """Each was refused for its lack of the trainer's mixin, which is for trainers."""
    args, callback = OverridingConfig(output_dir=folder, **ON_CPU, **SYNC), ReadsLogLevelAtStart()
    callback.on_train_begin(args)
    assert args.get_process_log_level() == callback.seen is not None
    with pytest.raises(UnsupportedSettingError, match="was given to GRPOTrainer, which does not read it"):
        small(trl.GRPOTrainer, args, tmp_path / "model")


@pytest.mark.outside
def test_trainer_with_the_mixin_may_read_the_log_level_before_it_is_built(folder: str) -> None:
    args = trl_lora_sync.GRPOConfig(output_dir=folder, **ON_CPU, **SYNC)
    with pytest.raises(Exception, match="no/such/model") as caught:
        ReadsItsLogLevelSyncTrainer(model="no/such/model", reward_funcs=len, args=args, peft_config=LoraConfig())
    assert not isinstance(caught.value, LoRASyncError)


class Bonus:
    """Has another argument, for any trainer."""

    def __init__(self, *args: Any, bonus: float = 0.0, **kwargs: Any) -> None:
        self.bonus = bonus
        super().__init__(*args, **kwargs)


class Named(trl.GRPOTrainer):  # type: ignore[misc]
    """Has another argument before TRL's, and one among the others."""

    def __init__(self, bonus: float, model: Any, *args: Any, **kwargs: Any) -> None:
        self.bonus, self.malus = bonus, kwargs.pop("malus", 0.0)
        super().__init__(model, *args, **kwargs)


class OfItsOwn(trl.GRPOTrainer):  # type: ignore[misc]
    """Chooses the model, and the configuration if it is given none."""

    def __init__(self, model_of_mine: Any, args: Any = None, folder: str = "", **kwargs: Any) -> None:
        args = args or trl_lora_sync.GRPOConfig(output_dir=folder, **ON_CPU)
        super().__init__(model=model_of_mine, reward_funcs=len, args=args, **kwargs)
        # As if it had been made so. TRL would then start its sync, which needs vLLM.
        self.args.vllm_sync_strategy = "lora_adapter"


class BonusSyncTrainer(LoRASyncTrainer, Bonus, trl.GRPOTrainer):  # type: ignore[misc]
    """As a user makes it."""


class NamedSyncTrainer(LoRASyncTrainer, Named):
    """As a user makes it."""


class OfItsOwnSyncTrainer(LoRASyncTrainer, OfItsOwn):
    """The mixin does not see the model."""


class OfItsOwnFirstSyncTrainer(OfItsOwn, LoRASyncTrainer, trl.GRPOTrainer):
    """The mixin sees what TRL's trainer is given."""


@pytest.mark.outside
@pytest.mark.parametrize("strategy", ["lora_adapter", "weights"])
@pytest.mark.parametrize(
    ("trainer", "first", "others"),
    [
        (BonusSyncTrainer, ("no/such/model",), {"bonus": 1.0}),
        (NamedSyncTrainer, (1.0, "no/such/model"), {"malus": 2.0}),
        (OfItsOwnFirstSyncTrainer, ("no/such/model",), {}),
    ],
)
def test_trainer_of_yours_may_have_arguments_of_its_own(
    trainer: Any, first: tuple[Any, ...], others: dict[str, Any], strategy: str, folder: str
) -> None:
    """TRL does not know them, so they were refused, also with "weights"."""
    args = trl_lora_sync.GRPOConfig(output_dir=folder, **ON_CPU, **SYNC | {"vllm_sync_strategy": strategy})
    rewards = () if trainer is OfItsOwnFirstSyncTrainer else (len,)
    refused = {"args": args, "peft_config": LoraConfig(use_dora=True)}
    if strategy == "lora_adapter":  # the arguments of TRL are found among the others
        with pytest.raises(UnsupportedAdapterError, match="use_dora=True"):
            trainer(*first, *rewards, **refused, **others)
    with pytest.raises(Exception, match="no/such/model") as caught:
        trainer(*first, *rewards, args=args, peft_config=LoraConfig(), **others)
    assert not isinstance(caught.value, LoRASyncError)


def test_trainer_that_hides_its_model_or_configuration_is_refused_with_the_order_that_shows_them(
    folder: str, tmp_path: Path
) -> None:
    """With a hidden configuration, TRL would sync in its way, and the setting would have no effect."""
    args = trl_lora_sync.GRPOConfig(output_dir=folder, **ON_CPU, **SYNC)
    order = r"class OfItsOwnSyncTrainer\(YourTrainer, LoRASyncTrainer, GRPOTrainer\)"
    with pytest.raises(UnsupportedSettingError, match=rf"'model'.*{order}"):
        OfItsOwnSyncTrainer("no/such/model", args, peft_config=LoraConfig())
    make_model(tmp_path / "model", num_hidden_layers=1, hidden_size=16, intermediate_size=16, head_dim=8)
    with pytest.raises(UnsupportedSettingError, match=rf"'args'.*{order}"):
        OfItsOwnSyncTrainer(
            str(tmp_path / "model"), folder=folder, peft_config=LoraConfig(r=2, target_modules=["q_proj"]),
            processing_class=make_tokenizer(), train_dataset=Dataset.from_list([{"prompt": "abc"}] * 4),
        )  # fmt: skip


# A teacher on a server


@pytest.mark.outside
@pytest.mark.parametrize(
    "url",
    ["http://localhost:8000", "http://127.0.0.1:8000/", "http://GPU7:8000/v1"],
    ids=["the same", "by address", "another"],
)
@pytest.mark.parametrize(
    ("config", "fields"),
    [(ServerDistillationSyncConfig, {}), (IWOPDSyncConfig, {"use_teacher_server": True})],
    ids=["ServerDistillation", "IW-OPD"],
)
def test_teacher_on_a_server_that_is_sampled_is_refused(
    config: Any, fields: dict[str, Any], url: str, folder: str
) -> None:
    with pytest.raises(UnsupportedSettingError) as caught:
        config(output_dir=folder, **ON_CPU, **SYNC, **fields, teacher_model_server_url=url)
    assert f"teacher_model_server_url={url!r} cannot be used" in str(caught.value)
    assert "without the adapter that is trained" in str(caught.value)


def test_teacher_at_the_default_url_is_not_refused_where_no_server_is_sampled(folder: str) -> None:
    colocate = {**SYNC, "vllm_mode": "colocate"}
    url = "http://localhost:8000"
    ServerDistillationSyncConfig(output_dir=folder, **ON_CPU, **colocate, teacher_model_server_url=url)


@pytest.mark.parametrize("url", ["http://localhost:8001", "http://gpu8:8000"])
def test_teacher_on_another_server_is_not_refused(url: str, folder: str) -> None:
    ServerDistillationSyncConfig(output_dir=folder, **ON_CPU, **SYNC, teacher_model_server_url=url)


def test_server_that_is_asked_to_be_its_own_teacher_is_refused(folder: str) -> None:
    with pytest.raises(
        UnsupportedSettingError, match=r"use_teacher_server=True cannot be used.*Set use_teacher_server=False"
    ):
        SDFTSyncConfig(output_dir=folder, **ON_CPU, **SYNC, use_teacher_server=True, distillation_mode="topk_logits")
    SDFTSyncConfig(output_dir=folder, **ON_CPU, **SYNC)


@pytest.mark.outside
@pytest.mark.parametrize("kind", ["base", "ema"])
def test_teacher_whose_base_an_initialisation_has_changed_is_refused(kind: str, folder: str) -> None:
    """TRL disables the adapter for it, or adds another that changes the base again, and the run learned from that."""
    args = SDFTSyncConfig(output_dir=folder, **ON_CPU, **SYNC, teacher_model_kind=kind)
    adapter = LoraConfig(init_lora_weights="pissa", r=2, target_modules=["q_proj"])
    model = get_peft_model(base_model(), adapter)
    for given in ({"model": "no/such/model", "peft_config": adapter}, {"model": model}):
        with pytest.raises(UnsupportedSettingError, match=rf"teacher_model_kind='{kind}' .*'pissa'.* Set teacher_mod"):
            SDFTSyncTrainer(**given, args=args)
    check_reference(args, LoraConfig())
    args.teacher_model_kind = "live"
    check_reference(args, adapter, model)


# Where the generation class is put


def test_generation_class_is_replaced_where_each_trainer_looks_for_it() -> None:
    import sys

    def factory(**_: Any) -> Any:
        return None

    homes = {
        GRPOTrainer: "trl.trainer.grpo_trainer",
        GMPOSyncTrainer: "trl.trainer.grpo_trainer",
        trl_lora_sync.RLOOTrainer: "trl.trainer.rloo_trainer",
        SDFTSyncTrainer: "trl.generation.vllm_generation",  # imported when it is needed
    }
    for trainer, home in homes.items():
        original = getattr(sys.modules[home], GENERATION_CLASS)
        with _trl.generation_class(trainer, factory):
            assert getattr(sys.modules[home], GENERATION_CLASS) is factory
        assert getattr(sys.modules[home], GENERATION_CLASS) is original is not factory


def test_trainer_that_asks_for_vllm_first_finds_it_while_it_is_built_only() -> None:
    from trl.trainer import distillation_trainer

    assert not distillation_trainer.is_vllm_available()
    with _trl.generation_class(trl_lora_sync.DistillationTrainer, lambda **_: None):
        assert distillation_trainer.is_vllm_available()
    assert not distillation_trainer.is_vllm_available()


def test_weights_is_trls_own_with_the_mixin(tmp_path: Path) -> None:
    make_model(tmp_path / "model", num_hidden_layers=1, hidden_size=16, intermediate_size=16, head_dim=8)
    trainer = GMPOSyncTrainer(
        str(tmp_path / "model"),
        lambda completions, **_: [float(len(set(text))) for text in completions],
        GMPOSyncConfig(
            output_dir=str(tmp_path / "out"), max_steps=1, num_generations=2, per_device_train_batch_size=2,
            max_completion_length=4, save_strategy="no", **ON_CPU,
        ),
        processing_class=make_tokenizer(),
        train_dataset=Dataset.from_list([{"prompt": "abc"}] * 4),
        peft_config=LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    )  # fmt: skip
    trainer.train()
    assert not any("lora_sync" in name for entry in trainer.state.log_history for name in entry)


def test_what_a_run_forgets_is_right_for_each_way_of_counting() -> None:
    """GOLD syncs at the first step that is `vllm_sync_frequency` after the last one; the others at any other step."""
    gold = SimpleNamespace(_last_vllm_sync_step=7, vllm_sync_frequency=4)
    grpo = SimpleNamespace(_last_loaded_step=7)
    _trl.forget_last_sync(gold)
    _trl.forget_last_sync(grpo)
    for step in (0, 7):
        assert step >= gold._last_vllm_sync_step + gold.vllm_sync_frequency
        assert step not in (gold._last_vllm_sync_step, grpo._last_loaded_step)
    assert vars(grpo).keys() == {"_last_loaded_step"}
