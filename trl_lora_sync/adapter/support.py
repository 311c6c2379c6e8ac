"""Which PEFT features can be served exactly, as an allow-list, and why the others cannot.

With adapters that the server applies at run time, a setting is accepted only if a plain LoRA adapter (`lora_A`,
`lora_B`, one scaling) reproduces what the trainer computes. With fused serving, which writes the served weights, it is
also accepted if these can be computed from the base and a few small tensors. Everything else is refused before a model
is loaded, because the engines accept much of it with HTTP 200 and then sample from another policy. Fields that a future
PEFT adds are refused as soon as they leave their default.

This module reads configurations only; `adapter.export` looks at the live model.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trl_lora_sync.errors import UnsupportedAdapterError

Serving = str
"""A value of the field `lora_sync_serving`, which lists them."""
_WHY_NO_EMBEDDINGS = (
    "the embedding and the output head are served by few architectures, and tied weights differ between the "
    "trainer and the server"
)
PACKED_LAYERS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Layers that the engines serve as one, by the name of that one. SGLang needs all of a group in an adapter, or none."""
_EMBEDDING_MODULES = frozenset({"embed_tokens", "lm_head", "wte", "wpe", "embed_in", "embed_out"})
WEIGHTS_WAY_OUT = (
    'or set vllm_sync_strategy="weights", which merges the adapter and sends every weight: that needs vLLM in the '
    'trainer\'s environment and, for vllm_mode="server", a vLLM server started with VLLM_SERVER_DEV_MODE=1 and '
    """--weight-transfer-config '{"backend": "nccl"}'"""
)
_ATTENTION = (*PACKED_LAYERS["qkv_proj"], "o_proj")

_DROPOUT_ADVICE = (
    "any value, but 0 is advised: dropout changes the trainer's log-probabilities in training mode and never the "
    "server's. TRL's command line defaults to 0.05"
)

# Fields whose value never changes the adapter that is served, or that the export resolves.
_ANY_VALUE = frozenset(
    {
        # what the config records about itself
        "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
        "inference_mode",
        # resolved by the export: real per-module scaling and ranks are read from the model
        "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern",
        # which modules exist is read from the model
        "exclude_modules", "layers_to_transform", "layers_pattern",
        # orientation of the base weight only, or where it is computed
        "fan_in_fan_out", "runtime_config",
        # changes what the trainer computes, which `active_dropout` finds in the live model
        "lora_dropout",
        # read by PEFT only beside a switch that is refused below, or an initialisation that is checked
        "qalora_group_size", "megatron_core", "eva_config", "corda_config", "lora_ga_config",
    }
)  # fmt: skip

# Inits that leave the base weights as the checkpoint has them, so that the server's base equals the trainer's.
# Source: peft/tuners/lora/layer.py `update_layer`, 0.21.2.
_PURE_INITS = (True, False, "gaussian", "eva", "orthogonal")
# Inits that take `scaling * lora_B @ lora_A` out of the base weights, as they are named in LoraConfig; PiSSA also takes
# a number of iterations. Source: the same `update_layer`, 0.18 to 0.21.
_SUBTRACTED_INITS = ("pissa", "pissa_niter_16", "olora", "corda", "lora_ga")
# PEFT takes "olora" and "gaussian" in any case, and the other names in lower case only (0.21).
_SUBTRACTED = re.compile(r"pissa|pissa_niter_\d+|(?i:olora)|corda|lora_ga")
_WHY_NO_LOFTQ = (
    "LoftQ replaces the base weights by rounded ones, which differ from the checkpoint's by more than an adapter holds"
)
_LOFTQ_FIX = (
    "Either keep a base in 4 bits (bitsandbytes) with init_lora_weights=True and call peft.replace_lora_weights_loftq, "
    "which leaves the base unchanged, or save the rounded base model, serve that one, and train a new adapter on it"
)

# Field -> why a value that is set cannot be served. Only an unset (falsy) value passes.
_REFUSED_WHEN_SET = {
    "use_dora": "DoRA rescales the merged weight by a magnitude vector, which vLLM rejects and SGLang cannot apply",
    # vLLM 0.31 takes the key for lora_B itself (vllm/lora/utils.py `parse_fine_tuned_lora_name`).
    "lora_bias": "the bias of lora_B is dropped or written over other weights by the servers",
    "modules_to_save": "fully trained modules are not part of a LoRA adapter, so the server would keep the base ones",
    "trainable_token_indices": "trained token embeddings are not part of a LoRA adapter and would be skipped silently",
    "alora_invocation_tokens": "activated LoRA switches on in the middle of a prompt, which the servers ignore",
    "layer_replication": "the server has no replicated layers to put the extra adapters on",
    "use_qalora": "QA-LoRA pools its input by quantisation group, which the servers do not",
    "use_bdlora": "block-diagonal LoRA has another layout than the one the servers load",
    "target_parameters": "adapters on fused expert parameters have a layout that differs between engine versions "
    "and is loaded silently wrong by some",
    "megatron_config": "Megatron layers are sharded and named differently from the served model",
    "arrow_config": "Arrow routes between several adapters at run time",
    "kasa_config": "KaSA rewrites the base weights and adds a diagonal between lora_A and lora_B",
    "velora_config": "VeLoRA replaces the plain LoRA forward",
    "monteclora_config": "MonteCLoRA samples its weights at run time",
    "loftq_config": _WHY_NO_LOFTQ,
    "ensure_weight_tying": "tied adapters on the embedding and the output head cannot be served",
}
# Of these, what fused serving computes on the server, and how.
_FUSED = {
    "use_dora": "scales each row of the merged weight to the trained magnitude. Not on embeddings",
    "lora_bias": "adds it to the bias of the layer, which must have one",
    "modules_to_save": "replaces their weights and biases; they are sent whole at each sync",
    "trainable_token_indices": "replaces the rows of these tokens, also in an output head that is tied to the "
    "embedding",
}
_EXPERTS = {
    "runtime": "only the experts of Qwen3-MoE, Mixtral and Qwen3-VL-MoE, and the router of Mixtral on vLLM; "
    "not with an initialisation that changes the base",
    "fused": "only the experts and the routers of Qwen3-MoE and Mixtral; not with an initialisation that changes the "
    "base",
}
FUSED_WAY_OUT = 'set lora_sync_serving="fused" with vllm_mode="server", with which vLLM computes it in its weights'


def refuse(what: str, why: str, fix: str) -> UnsupportedAdapterError:
    """The error for an adapter that cannot be served exactly.

    Args:
        fix: what else to do than to send all weights; no full stop.
    """
    return UnsupportedAdapterError(
        f'{what} cannot be used with vllm_sync_strategy="lora_adapter": {why}. {fix}, {WEIGHTS_WAY_OUT}.'
    )


def _check_bias(value: Any) -> None:
    if value != "none":
        raise refuse(
            f"LoraConfig(bias={value!r})",
            "trained biases of the base layers are not part of what a server loads",
            'Use bias="none"',
        )


def changes_base(init: Any) -> bool:
    """Whether an `init_lora_weights` takes the initial adapter out of the base weights, and does nothing else to them.

    The model is then served as the checkpoint's base and the difference to the initial adapter, at twice the rank.
    """
    return isinstance(init, str) and _SUBTRACTED.fullmatch(init) is not None


def _check_init(value: Any) -> None:
    if value == "loftq":
        raise refuse(f"LoraConfig(init_lora_weights={value!r})", _WHY_NO_LOFTQ, _LOFTQ_FIX)
    # By `is`, as 1 equals True.
    is_pure = any(value is pure or (isinstance(value, str) and value.lower() == pure) for pure in _PURE_INITS)
    if not is_pure and not changes_base(value):
        raise refuse(
            f"LoraConfig(init_lora_weights={value!r})",
            "it is not one of the initialisations known to leave the base weights untouched or to take the initial "
            "adapter out of them, so the server's base may differ from the trainer's",
            f"Use one of {', '.join(repr(known) for known in (*_PURE_INITS, *_SUBTRACTED_INITS))}",
        )


def _check_targets(value: Any, serving: Serving) -> None:
    names = [value] if isinstance(value, str) else list(value or ())
    for name in names:
        # A regular expression passes. The layers that it finds are checked in the model (`export._plain_layers`).
        if serving != "fused" and name.rpartition(".")[2] in _EMBEDDING_MODULES:
            raise refuse_module(name)


_CHECKED: dict[str, Callable[[Any], None]] = {
    "bias": _check_bias,
    "init_lora_weights": _check_init,
}


def refuse_module(name: str) -> UnsupportedAdapterError:
    """The error for an adapter on the embedding or the output head."""
    return refuse(
        f"A LoRA adapter on {name!r}", _WHY_NO_EMBEDDINGS, f"Leave it out of target_modules, or {FUSED_WAY_OUT}"
    )


def is_embedding_module(name: str) -> bool:
    """Whether a module path ends in the embedding or the output head, by the names Transformers gives them."""
    return name.rpartition(".")[2] in _EMBEDDING_MODULES


def check_peft_config(
    config: Any, *, is_of_model: bool = False, serving: Serving = "runtime", proves_groups: bool = False
) -> None:
    """Refuse a PEFT configuration that no server could serve exactly.

    Args:
        config: the `peft_config` given to the trainer, or the active one of a `PeftModel`; `None` if there is none.
        is_of_model: whether it is one of a `PeftModel`, into which PEFT writes what it has found in the model.
        serving: how the servers bring adapters to their model.
        proves_groups: whether a trial adapter proves each group of modules, so that experts may have an adapter.

    Raises:
        UnsupportedAdapterError: naming the PEFT type or the field, why it cannot be served, and what to do.
        UnsupportedPEFTError: the installed PEFT makes adapters in another form than is known here.

    Source: the feature table of both engines, vLLM 0.22-0.33 (`vllm/lora/peft_helper.py`) and SGLang 0.5.10-0.5.23
    (`sglang/srt/lora/lora.py`); PEFT 0.21.2 for the fields.
    """
    # Imported here, as commands check a saved configuration where PEFT is not installed.
    from peft import LoraConfig

    from trl_lora_sync.adapter.peft_checks import check_peft

    check_peft()
    if config is None:
        raise UnsupportedAdapterError(
            'vllm_sync_strategy="lora_adapter" needs a LoRA adapter, but there is no PEFT configuration. '
            "Pass peft_config=LoraConfig(...) to the trainer (--use_peft on the command line) or a PeftModel, "
            f"{WEIGHTS_WAY_OUT}."
        )
    # AdaLoraConfig and others derive from LoraConfig, so the type must match exactly.
    if type(config) is not LoraConfig:
        kind = getattr(config.peft_type, "value", config.peft_type) if hasattr(config, "peft_type") else None
        raise refuse(
            f"PEFT type {kind or type(config).__name__} ({type(config).__name__})",
            "vLLM and SGLang load plain LoRA adapters only",
            "Use peft.LoraConfig",
        )
    # Not a field of the dataclass, so the loop over the fields does not find it.
    if getattr(config, "_custom_modules", None):
        raise refuse(
            "LoraConfig with custom modules registered",
            "PEFT then adapts layers with classes of your own, which no server runs",
            "Remove the call of _register_custom_module",
        )
    # Before the fields: PEFT has filled this one itself where the names of modules led to experts, so the error names
    # the modules to set instead.
    if is_of_model and config.target_parameters and not serves_experts(serving, proves_groups=proves_groups):
        raise refuse_experts(config)
    _check_targets(config.target_modules, serving)
    for field in dataclasses.fields(config):
        if field.name != "target_parameters" or not serves_experts(serving, proves_groups=proves_groups):
            _check_field(field, getattr(config, field.name), serving)
    # The difference to an initial adapter is made for linear layers only, and experts would be sent whole.
    if config.target_parameters and changes_base(config.init_lora_weights):
        raise refuse_experts(config)
    # DoRA's magnitudes on an embedding are of its columns (peft/tuners/lora/dora.py, 0.18 to 0.21).
    targets = [config.target_modules] if isinstance(config.target_modules, str) else config.target_modules or ()
    if config.use_dora and any(is_embedding_module(name) and "lm_head" not in name for name in targets):
        raise refuse_scaled_embedding()


def serves_experts(serving: Serving, *, proves_groups: bool) -> bool:
    """Whether experts and routers may have an adapter: where a trial adapter proves them, or a server places them."""
    return proves_groups or serving == "fused"


def refuse_experts(config: Any, family: str = "") -> UnsupportedAdapterError:
    """For experts that Transformers keeps in one parameter. PEFT adapts these as `target_parameters`, also if they
    were named as modules, or by "all-linear".
    Source: peft/utils/transformers_weight_conversion.py `_convert_peft_config_moe`, 0.21.2.
    """
    chosen = config.target_modules or ()
    if isinstance(chosen, str):  # a regular expression finds modules only, so `target_parameters` names the experts
        fix = "Leave target_parameters out"
    else:
        fix = f"Set target_modules={sorted(name for name in chosen if '.' not in name) or list(_ATTENTION)!r}"
    return refuse(
        f"A LoRA adapter on the fused parameters of experts{f' of {family}' if family else ''} "
        f"({', '.join(sorted(config.target_parameters))})",
        f'{_REFUSED_WHEN_SET["target_parameters"]}. On this model, target_modules="all-linear" includes them, and so '
        "do the names of the experts' layers",
        fix,
    )


def refuse_scaled_embedding() -> UnsupportedAdapterError:
    """For DoRA on an embedding. A regular expression that finds one is known in the model only (`adapter.extras`)."""
    return refuse(
        "LoraConfig(use_dora=True) with an embedding as a target",
        "PEFT scales the columns of its weight, and a server the rows",
        "Leave one of them out",
    )


def check_saved_config(saved: Mapping[str, Any], serving: Serving = "runtime", *, proves_groups: bool = False) -> None:
    """Refuse a saved `adapter_config.json` that no server could serve exactly; needs no PEFT.

    Fields that this version does not know are left to `check_peft_config`, which knows their defaults.

    Args:
        proves_groups: as for `check_peft_config`.

    Raises:
        UnsupportedAdapterError: as for `check_peft_config`.
    """
    if saved.get("peft_type") != "LORA":
        raise refuse(f"PEFT type {saved.get('peft_type')}", "vLLM and SGLang load plain LoRA adapters only", "Use LORA")
    _check_targets(saved.get("target_modules"), serving)
    for name, check in _CHECKED.items():
        if name in saved:
            check(saved[name])
    for name in _REFUSED_WHEN_SET:
        if name != "target_parameters" or not serves_experts(serving, proves_groups=proves_groups):
            _check_unset(name, saved.get(name), serving)


def _check_unset(name: str, value: Any, serving: Serving) -> None:
    if value and not (serving == "fused" and name in _FUSED):
        way_out = f", or {FUSED_WAY_OUT}" if name in _FUSED else ""
        raise refuse(f"LoraConfig({name}={value!r})", _REFUSED_WHEN_SET[name], f"Leave it unset{way_out}")


def is_plain(saved: Mapping[str, Any]) -> bool:
    """Whether a saved `adapter_config.json` trains nothing that fused serving alone can serve."""
    targets = saved.get("target_modules") or ()
    names = [targets] if isinstance(targets, str) else targets
    return not any(saved.get(name) for name in _FUSED) and not any(map(is_embedding_module, names))


def saved_rank(saved: Mapping[str, Any]) -> int:
    """The rank that the canonical form has of a model with a saved `adapter_config.json`.

    That is the largest rank in it, and twice that one if the initialisation changes the base.
    """
    # A pattern may match no module, so this can be too high. That costs the server memory, where too low a rank would
    # make it refuse the adapter.
    largest = max([int(saved["r"]), *map(int, (saved.get("rank_pattern") or {}).values())])
    return 2 * largest if changes_base(saved.get("init_lora_weights")) else largest


def _check_field(field: "dataclasses.Field[Any]", value: Any, serving: Serving) -> None:
    if field.name in _ANY_VALUE or field.name == "target_modules":
        return
    if field.name in _CHECKED:
        _CHECKED[field.name](value)
    elif field.name in _REFUSED_WHEN_SET:
        _check_unset(field.name, value, serving)
    # An unknown field is refused only where it is set, so a newer PEFT works until a new feature is used.
    elif value != _default_of(field):
        raise refuse(
            f"LoraConfig({field.name}={value!r})",
            "this version of trl-lora-sync does not know the field, nor whether a server would compute the same",
            "Leave it at its default",
        )


def _default_of(field: "dataclasses.Field[Any]") -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def check_active_adapters(active: Iterable[str]) -> str:
    """Return the one active adapter.

    Raises:
        UnsupportedAdapterError: when several adapters are active at once (their sum is not one LoRA adapter).
    """
    names = list(active)
    if len(names) != 1:
        raise UnsupportedAdapterError(
            f"{len(names)} active adapters ({', '.join(names) or 'none'}), but a server samples from exactly one. "
            f"Activate the one to train with model.set_adapter(name), {WEIGHTS_WAY_OUT}."
        )
    return names[0]


def check_other_adapters(configs: Mapping[str, Any], active: str) -> None:
    """Refuse an adapter beside the active one if it has changed the base.

    Raises:
        UnsupportedAdapterError: the base is not the checkpoint's, whatever the active adapter is.
    """
    for name, config in configs.items():
        init = getattr(config, "init_lora_weights", None)
        # Whether or not it is active, PEFT has written to the base weights when the adapter was added.
        if name != active and (init == "loftq" or changes_base(init)):
            raise refuse(
                f"The adapter {name!r} with init_lora_weights={init!r}, which is not the active one,",
                "as it was added it changed the base weights that the active one is computed with, so the server's "
                "base differs from the trainer's",
                'Leave it out. TRL adds "ref" to a PeftModel unless beta=0; give the trainer the base model and '
                "peft_config instead, or set beta=0",
            )
        # These stay in the base as well: `set_adapter` takes neither trained biases nor replicated layers out of it.
        for field in ("bias", "layer_replication"):
            value = getattr(config, field, None)
            if name != active and value not in (None, "none", []):
                raise refuse(
                    f"The adapter {name!r} with {field}={value!r}, which is not the active one,",
                    "PEFT keeps that in the base layers that the active one is computed with, so the server's base "
                    "differs from the trainer's",
                    "Merge it into the base model, save that and serve it, and train a new adapter on it",
                )


def check_other_parameters(trained: Iterable[str]) -> None:
    """Refuse a model that trains something beside its adapters.

    Args:
        trained: the names of all parameters that are trained.

    Raises:
        UnsupportedAdapterError: a parameter of the base model is among them.
    """
    others = [name for name in trained if not any(map(_is_of_adapter, name.split(".")))]
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise refuse(
            f"A model that trains {others[0]!r}{more} beside the adapter",
            "the server keeps the checkpoint's base, and after the first step it would sample from another policy",
            "Freeze all but the adapter, with requires_grad_(False)",
        )


def _is_of_adapter(part: str) -> bool:
    """Whether a part of a parameter's name is of an adapter of PEFT, or of FSDP1, which joins parameters of a kind."""
    return part.startswith("lora_") or part in ("modules_to_save", "trainable_tokens_delta", "_flat_param")


def check_model(model: Any, peft_config: Any, serving: Serving = "runtime", *, proves_groups: bool = False) -> None:
    """Refuse what the trainer was given, a model or its name and a PEFT configuration, before anything is loaded.

    Raises:
        UnsupportedAdapterError: as for `check_peft_config`, `check_active_adapters`, `check_other_adapters` and
            `check_planned_modules`.
    """
    from trl_lora_sync.adapter.modalities import check_planned_modules

    if hasattr(model, "peft_config"):
        # Of a model that PEFT has changed in place, TRL would wrap the changed layers, and its adapter is not trained.
        if not hasattr(model, "get_base_model"):
            raise refuse(
                f"A model ({type(model).__name__}) with adapters but without a PeftModel around it",
                "its adapters, as inject_adapter_in_model puts them there, are neither in the server's base nor in the "
                "adapter that is trained",
                "Give the trainer a PeftModel, as from PeftModel.from_pretrained(base, folder, is_trainable=True), or "
                "the base model and peft_config",
            )
        # Where the adapter sits is checked when it is read, before the first step.
        active = check_active_adapters(model.active_adapters)
        check_peft_config(model.peft_config[active], is_of_model=True, serving=serving, proves_groups=proves_groups)
        check_other_adapters(model.peft_config, active)
    else:
        check_peft_config(peft_config, serving=serving, proves_groups=proves_groups)
        check_planned_modules(model, peft_config, proves_groups=proves_groups)


def supported_features(serving: Serving = "runtime") -> dict[str, str]:
    """Every `LoraConfig` field this version knows, with how it is treated; the support table is made from it."""
    table = dict.fromkeys(sorted(_ANY_VALUE), "any value")
    table["lora_dropout"] = _DROPOUT_ADVICE
    table |= {"bias": 'only "none"', "target_modules": "any, but not the embedding or the output head"}
    table["init_lora_weights"] = (
        "only " + ", ".join(repr(pure) for pure in _PURE_INITS) + "; and "
        f"{', '.join(repr(one) for one in _SUBTRACTED_INITS)} on a base that is not quantised, served as the "
        "difference to the initial adapter at twice the rank"
    )
    table |= {name: f"refused: {why}" for name, why in _REFUSED_WHEN_SET.items()}
    table["target_parameters"] = _EXPERTS[serving]
    if serving == "fused":
        table |= _FUSED
        table["fan_in_fan_out"] = "not on Conv1D layers, such as GPT-2's"
        table["target_modules"] = "any; the embedding and the output head only if they are not tied"
    return table
