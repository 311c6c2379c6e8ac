"""Which PEFT configurations are refused, and that every message names what was seen, why, and the way out."""

import dataclasses
import re
import warnings
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

from trl_lora_sync.adapter.export import AdapterReader
from trl_lora_sync.adapter.support import (
    check_active_adapters,
    check_model,
    check_peft_config,
    is_embedding_module,
    supported_features,
)
from trl_lora_sync.errors import UnsupportedAdapterError
from unit.tiny import base_model, lora_model

WAY_OUT = 'vllm_sync_strategy="weights"'
LORA_FIELDS = [field.name for field in dataclasses.fields(LoraConfig)]

# What a PEFT type needs before it can be constructed at all.
_MINIMAL_ARGUMENTS: dict[str, dict[str, Any]] = {"ADALORA": {"total_step": 10}, "CPT": {"task_type": "CAUSAL_LM"}}
NON_LORA_TYPES = sorted(kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING if kind.value != "LORA")


def make_config(kind: str) -> Any:
    config_class = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(kind)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return config_class(**_MINIMAL_ARGUMENTS.get(kind, {}))
        except ImportError:
            # It wants a package that is not installed (AdaMSS: scikit-learn). Its type is known without it.
            config = object.__new__(config_class)
            config.peft_type = peft.PeftType(kind)
            return config


def lora_config(**fields: Any) -> LoraConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return LoraConfig(**fields)


def with_field(name: str, value: Any) -> LoraConfig:
    """A config whose constructor would refuse or change the value, for instance for want of a package."""
    config = LoraConfig()
    setattr(config, name, value)
    return config


def test_every_type_of_the_installed_peft_is_in_the_table() -> None:
    assert {kind.value for kind in peft.PeftType} == {"LORA", *NON_LORA_TYPES}
    assert {"IA3", "PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING", "LOHA", "LOKR", "OFT", "VERA", "ADALORA"} <= set(
        NON_LORA_TYPES
    )


@pytest.mark.parametrize("kind", NON_LORA_TYPES)
def test_peft_type_other_than_lora_is_refused_by_name(kind: str) -> None:
    config = make_config(kind)
    with pytest.raises(UnsupportedAdapterError) as caught:
        check_peft_config(config)
    message = str(caught.value)
    assert message.startswith(f"PEFT type {kind} ({type(config).__name__}) cannot be used")
    assert "vLLM and SGLang load plain LoRA adapters only" in message
    assert "Use peft.LoraConfig" in message
    assert WAY_OUT in message


def part(name: str) -> Any:
    """A value for a field that holds a nested configuration; an older PEFT may lack its class."""
    return getattr(peft.tuners.lora.config, name, object)()


def refused(name: str, value: Any, reason: str) -> Any:
    return pytest.param(name, value, reason, id=f"{name}={value!r}"[:60])


REFUSED_FIELDS = [
    refused("use_dora", True, "DoRA rescales the merged weight"),
    refused("bias", "all", "trained biases of the base layers"),
    refused("bias", "lora_only", "trained biases of the base layers"),
    refused("lora_bias", True, "the bias of lora_B is dropped"),
    refused("modules_to_save", ["classifier"], "fully trained modules are not part of a LoRA adapter"),
    refused("trainable_token_indices", [1, 2], "trained token embeddings are not part of a LoRA adapter"),
    refused("trainable_token_indices", {"embed_tokens": [1]}, "trained token embeddings are not part"),
    refused("alora_invocation_tokens", [7, 8], "activated LoRA switches on in the middle of a prompt"),
    refused("layer_replication", [(0, 2), (1, 2)], "the server has no replicated layers"),
    refused("use_qalora", True, "QA-LoRA pools its input"),
    refused("use_bdlora", part("BdLoraConfig"), "block-diagonal LoRA has another layout"),
    refused("target_parameters", ["mlp.experts.gate_up_proj"], "fused expert parameters have a layout"),
    refused("megatron_config", {"tensor_model_parallel_size": 1}, "Megatron layers are sharded"),
    refused("arrow_config", part("ArrowConfig"), "Arrow routes between several adapters"),
    refused("kasa_config", part("KasaConfig"), "KaSA rewrites the base weights"),
    refused("velora_config", part("VeloraConfig"), "VeLoRA replaces the plain LoRA forward"),
    refused("monteclora_config", part("MontecloraConfig"), "samples its weights at run time"),
    refused("loftq_config", {"loftq_bits": 4}, "LoftQ replaces the base weights by rounded ones"),
    refused("ensure_weight_tying", True, "tied adapters on the embedding and the output head"),
    *(
        refused("init_lora_weights", init, "known to leave the base weights untouched")
        for init in (
            "pissa_",
            "pissa_niter_",
            "PiSSA",
            "corda_2",
            "LoftQ",
            "mica",
            "a-new-one",
            None,
            1,
        )
    ),
]
# An older PEFT has neither the field nor what it does.
REFUSED_FIELDS = [case for case in REFUSED_FIELDS if case.values[0] in LORA_FIELDS]


@pytest.mark.parametrize(("name", "value", "reason"), REFUSED_FIELDS)
def test_field_that_no_server_serves_exactly_is_refused_with_its_reason(name: str, value: Any, reason: str) -> None:
    with pytest.raises(UnsupportedAdapterError) as caught:
        check_peft_config(with_field(name, value))
    message = str(caught.value)
    assert message.startswith(f"LoraConfig({name}={value!r}) cannot be used")
    assert reason in message
    assert WAY_OUT in message


@pytest.mark.parametrize(
    ("fields", "seen"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "all"}, "bias='all'"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]"),
        ({"init_lora_weights": "mica"}, "init_lora_weights='mica'"),
        ({"use_qalora": True}, "use_qalora=True"),
        ({"layer_replication": [(0, 4), (2, 5)]}, "layer_replication"),
        ({"alora_invocation_tokens": [1], "task_type": "CAUSAL_LM"}, "alora_invocation_tokens"),
    ],
)
def test_config_as_a_user_writes_it_is_refused(fields: dict[str, Any], seen: str) -> None:
    with pytest.raises(UnsupportedAdapterError, match=seen):
        check_peft_config(lora_config(**fields))


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head", "wte", "model.embed_tokens", r".*\.lm_head"])
@pytest.mark.parametrize("as_list", [True, False])
def test_adapter_on_the_embedding_or_the_output_head_is_refused(name: str, as_list: bool) -> None:
    targets = ["q_proj", name] if as_list else name
    with pytest.raises(UnsupportedAdapterError, match=r"A LoRA adapter on .*embedding and the output head") as caught:
        check_peft_config(LoraConfig(target_modules=targets))
    assert repr(name) in str(caught.value)
    assert "Leave it out of target_modules" in str(caught.value)
    assert WAY_OUT in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"r": 64, "lora_alpha": 7, "lora_dropout": 0.1},
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"v_proj": 32}},
        {"target_modules": ["q_proj", "embed_tokens_norm"]},
        {"target_modules": r".*layers\.[01]\..*(q|v)_proj"},
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj"], "exclude_modules": ["lm_head"]},
        {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": "layers"},
        {"init_lora_weights": False},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "Gaussian"},
        {"init_lora_weights": "eva"},
        {"init_lora_weights": "eva", "eva_config": peft.EvaConfig(rho=2.0)},
        {"init_lora_weights": "orthogonal"},
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "pissa_niter_16"},
        {"init_lora_weights": "olora"},
        {"init_lora_weights": "OLoRA"},
        {"init_lora_weights": "corda", "corda_config": part("CordaConfig")},
        {"init_lora_weights": "lora_ga", "lora_ga_config": part("LoraGAConfig")},
        {"fan_in_fan_out": True},
        {"task_type": "CAUSAL_LM", "inference_mode": True, "revision": "main"},
        {"runtime_config": peft.LoraRuntimeConfig(ephemeral_gpu_offload=True)},
        {"modules_to_save": [], "bias": "none", "target_parameters": []},
    ],
    ids=str,
)
def test_config_that_is_plain_lora_in_the_end_is_accepted(fields: dict[str, Any]) -> None:
    check_peft_config(lora_config(**{name: value for name, value in fields.items() if name in LORA_FIELDS}))


def test_every_field_of_the_installed_lora_config_is_known() -> None:
    unknown = set(LORA_FIELDS) - set(supported_features())
    assert not unknown, f"decide about these LoraConfig fields of PEFT {peft.__version__}: {sorted(unknown)}"


@pytest.mark.parametrize("name", LORA_FIELDS)
def test_field_that_is_refused_is_refused_with_its_own_reason(name: str) -> None:
    """The catch-all for unknown fields must not be what refuses a known one."""
    treatment = supported_features()[name]
    config = with_field(name, object())
    if treatment.startswith("any value"):
        check_peft_config(config)
    elif name != "target_modules":
        with pytest.raises(UnsupportedAdapterError) as caught:
            check_peft_config(config)
        assert "does not know the field" not in str(caught.value)


def test_dropout_is_accepted_with_the_advice_to_leave_it_out() -> None:
    check_peft_config(LoraConfig(lora_dropout=0.1))
    treatment = supported_features()["lora_dropout"]
    assert treatment.startswith("any value, but 0 is advised")
    assert "never the server's" in treatment


@pytest.fixture
def future_field(monkeypatch: pytest.MonkeyPatch) -> dataclasses.Field:
    """`LoraConfig` as a future PEFT may have it: the same class with one more field."""
    future = dataclasses.make_dataclass(
        "Future",
        [
            ("warp_factor", float, dataclasses.field(default=1.0)),
            ("warps", list, dataclasses.field(default_factory=list)),
        ],
    )
    extra = {field.name: field for field in dataclasses.fields(future)}
    monkeypatch.setattr(LoraConfig, "__dataclass_fields__", LoraConfig.__dataclass_fields__ | extra)
    monkeypatch.setattr(LoraConfig, "warp_factor", 1.0, raising=False)
    monkeypatch.setattr(LoraConfig, "warps", [], raising=False)
    return extra["warp_factor"]


@pytest.mark.usefixtures("future_field")
def test_field_of_a_future_peft_passes_at_its_default() -> None:
    config = LoraConfig()
    assert "warp_factor" in {field.name for field in dataclasses.fields(config)}
    check_peft_config(config)


@pytest.mark.usefixtures("future_field")
@pytest.mark.parametrize(
    ("name", "value"), [("warp_factor", 9.0), ("warp_factor", 0.0), ("warp_factor", None), ("warps", [1])]
)
def test_field_of_a_future_peft_is_refused_as_soon_as_it_leaves_its_default(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedAdapterError) as caught:
        check_peft_config(with_field(name, value))
    assert f"LoraConfig({name}={value!r})" in str(caught.value)
    assert "does not know the field" in str(caught.value)
    assert WAY_OUT in str(caught.value)


def test_subclass_of_lora_config_is_refused_because_it_may_compute_something_else() -> None:
    class MyLoraConfig(LoraConfig):
        pass

    with pytest.raises(UnsupportedAdapterError, match=re.escape("PEFT type LORA (MyLoraConfig)")):
        check_peft_config(MyLoraConfig())


def test_object_that_is_no_peft_config_is_refused_by_its_type() -> None:
    with pytest.raises(UnsupportedAdapterError, match=r"PEFT type dict \(dict\)"):
        check_peft_config({"r": 8})


def test_missing_peft_config_is_refused_with_the_argument_to_pass() -> None:
    with pytest.raises(UnsupportedAdapterError, match=r"Pass peft_config=LoraConfig\(\.\.\.\)") as caught:
        check_model("some/model", None)
    assert WAY_OUT in str(caught.value)


def test_peft_model_is_judged_by_its_own_active_config() -> None:
    check_model(lora_model(), None)
    with pytest.raises(UnsupportedAdapterError, match="use_dora=True"):
        check_model(lora_model(use_dora=True), None)


def test_frozen_reference_adapter_beside_the_active_one_is_not_judged() -> None:
    """GRPO adds an adapter "ref" to a PeftModel when beta > 0; only the active one is served."""
    model = lora_model()
    model.add_adapter("ref", LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))
    check_model(model, None)


@pytest.mark.parametrize("field", [{"bias": "lora_only"}, {"bias": "all"}, {"layer_replication": [(0, 2), (1, 2)]}])
def test_adapter_beside_the_active_one_that_left_its_change_in_the_base_is_refused(field: dict[str, Any]) -> None:
    """Trained biases stay in the base layers when another adapter is activated, and the server samples without them."""
    model = lora_model(**field)
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    model.set_adapter("second")
    name = next(iter(field))
    for check in (lambda: check_model(model, None), lambda: AdapterReader().linears(model)):
        with pytest.raises(UnsupportedAdapterError, match=f"The adapter 'default' with {name}=.* Merge it"):
            check()


def test_two_active_adapters_are_refused_by_name() -> None:
    model = lora_model()
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(UnsupportedAdapterError, match=r"2 active adapters \(default, second\)") as caught:
        check_model(model, None)
    assert "model.set_adapter(name)" in str(caught.value)
    assert WAY_OUT in str(caught.value)


def test_no_active_adapter_is_refused() -> None:
    with pytest.raises(UnsupportedAdapterError, match=r"0 active adapters \(none\)"):
        check_active_adapters([])


@pytest.mark.parametrize(
    ("path", "expected"),
    [("model.embed_tokens", True), ("lm_head", True), ("transformer.wte", True), ("model.layers.0.q_proj", False)],
)
def test_embedding_modules_are_told_by_the_end_of_their_path(path: str, expected: bool) -> None:
    assert is_embedding_module(path) is expected


def test_known_inits_leave_the_base_weights_as_the_checkpoint_has_them() -> None:
    """Proof for the list of accepted inits, on the installed PEFT."""
    before = {name: value.clone() for name, value in base_model().state_dict().items()}
    for init in (True, False, "gaussian", "eva", "orthogonal"):
        model: PeftModel = get_peft_model(
            base_model(), lora_config(r=2, target_modules=["q_proj"], init_lora_weights=init)
        )
        after = {name.replace(".base_layer", ""): value for name, value in model.get_base_model().state_dict().items()}
        assert all(torch.equal(value, after[name]) for name, value in before.items()), init


def test_an_init_that_rewrites_the_base_weights_does_so() -> None:
    """Shows that the proof above can fail."""
    before = base_model().state_dict()["model.layers.0.self_attn.q_proj.weight"]
    model = get_peft_model(base_model(), lora_config(r=2, target_modules=["q_proj"], init_lora_weights="pissa"))
    after = model.get_base_model().state_dict()["model.layers.0.self_attn.q_proj.base_layer.weight"]
    assert not torch.equal(before, after)


@pytest.mark.parametrize("peft_config", [None, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")])
def test_model_with_an_injected_adapter_is_refused(peft_config: Any) -> None:
    """It has a `peft_config` as a PeftModel has one, and its `active_adapters` is a method, which was a TypeError."""
    model = base_model()
    peft.inject_adapter_in_model(LoraConfig(target_modules=["q_proj"]), model)
    with pytest.raises(
        UnsupportedAdapterError, match=r"\(Qwen3ForCausalLM\) with adapters.*PeftModel\.from_pretrained"
    ):
        check_model(model, peft_config)
