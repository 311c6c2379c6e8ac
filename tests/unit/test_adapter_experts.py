"""Unit tier: LoRA on experts and routers in the layouts of servers, against PEFT's own merge.

vLLM on a CPU has no kernels for adapters on experts at run time (0.31), so `benchmarks/moe_on_gpu.py` compares with a
server; `live/test_fused_experts.py` does for fused serving.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from trl_lora_sync.adapter.canonical import Form, widened
from trl_lora_sync.adapter.export import AdapterReader
from trl_lora_sync.adapter.groups import experts_note
from trl_lora_sync.adapter.store import write_tensors
from trl_lora_sync.adapter.support import check_model
from trl_lora_sync.errors import UnsupportedAdapterError
from trl_lora_sync.generation.scoring import computing_with, neutral_weights, trial_weights

EXPERTS, HIDDEN, INTERMEDIATE = 4, 32, 16
TEXT: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    "initializer_range": 0.3,
}  # fmt: skip
MOE = {"head_dim": 16, "moe_intermediate_size": INTERMEDIATE, "num_experts": EXPERTS, "num_experts_per_tok": 2}
VISION = {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": HIDDEN}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
PROMPT = torch.tensor([[1, 5, 9, 2, 30, 7]])
PREFIX = "base_model.model."
# Where a server has the experts of layer 0, and what it calls gate, up and down of each.
SERVED: dict[str, tuple[str, tuple[str, str, str] | None]] = {
    "qwen3": ("model.layers.0.mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("model.layers.0.block_sparse_moe.experts", ("w1", "w3", "w2")),
    "qwen3-vl": ("model.language_model.layers.0.mlp.experts", None),
}


def base_model(family: str) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if family == "qwen3":
            return Qwen3MoeForCausalLM(Qwen3MoeConfig(**TEXT, **MOE)).eval()
        if family == "mixtral":
            return MixtralForCausalLM(MixtralConfig(**TEXT, num_local_experts=EXPERTS)).eval()
        text = {**TEXT, **MOE, "decoder_sparse_step": 1}
        config = Qwen3VLMoeConfig(text_config=text, vision_config={**VISION, "deepstack_visual_indexes": [0]})
        return Qwen3VLMoeForConditionalGeneration(config).eval()


def trained(family: str, **lora: Any) -> Any:
    """A model with an adapter, all of whose matrices are random."""
    settings = {"r": 2, "lora_alpha": 3, "target_modules": ATTENTION, "target_parameters": BOTH, **lora}
    if family == "qwen3-vl":
        settings["exclude_modules"] = ".*(visual).*"
    model = get_peft_model(base_model(family), LoraConfig(**settings)).eval()
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.3)
    return model


def read(model: Any, **changes: Any) -> Any:
    reader = AdapterReader(proves_groups=True)
    reader.linears(model)
    return reader.read(model, dtype=torch.float32, **changes)


def experts_of_layer_0(model: Any) -> Any:
    return model.get_base_model().get_decoder().layers[0].mlp.experts


def merged(model: Any) -> dict[str, Tensor]:
    """What PEFT's own merge adds to the parameters of layer 0."""
    found, layer = {}, experts_of_layer_0(model)
    while hasattr(layer, "get_base_layer") and hasattr(layer, "parameter_name"):
        found[layer.parameter_name] = layer.get_delta_weight("default").detach()
        layer = layer.base_layer
    return found


def served(family: str, tensors: dict[str, Tensor], *, is_stacked: bool = False) -> dict[str, Tensor]:
    """What a server adds to them, by the way vLLM (0.26) reads its layout."""
    path, names = SERVED[family]
    path = f"{PREFIX}{path}"
    if names is not None and not is_stacked:
        gate, up, down = (
            torch.stack(
                [
                    tensors[f"{path}.{expert}.{name}.lora_B.weight"] @ tensors[f"{path}.{expert}.{name}.lora_A.weight"]
                    for expert in range(EXPERTS)
                ]
            )
            for name in names
        )
        return {"gate_up_proj": torch.cat([gate, up], dim=1), "down_proj": down}

    def product(module: str) -> Tensor:
        lora_A, lora_B = (tensors[f"{module}.lora_{kind}.weight"] for kind in "AB")
        by_expert = lora_A.reshape(EXPERTS, -1, lora_A.shape[1])
        return lora_B.reshape(lora_B.shape[0], -1, EXPERTS).permute(2, 0, 1) @ by_expert

    return {"gate_up_proj": product(f"{path}.base_layer"), "down_proj": product(path)}


LORAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "rank 1": {"r": 1},
    "twice the rank for one": {"rank_pattern": {r".*\.gate_up_proj": 4}, "alpha_pattern": {r".*\.gate_up_proj": 6}},
    "only one": {"target_parameters": ["experts.down_proj"]},
    "only the other": {"target_parameters": ["experts.gate_up_proj"]},
}


@pytest.mark.parametrize("takes_stacked", [False, True])
@pytest.mark.parametrize("family", SERVED)
@pytest.mark.parametrize("lora", LORAS)
def test_a_server_adds_to_each_expert_what_peft_merges_into_it(family: str, lora: str, takes_stacked: bool) -> None:
    model = trained(family, **LORAS[lora])
    adapter = read(model, form=Form(stacked_experts=takes_stacked))
    assert adapter.has_stacked_experts == (takes_stacked or family == "qwen3-vl")
    expected, found = merged(model), served(family, adapter.tensors, is_stacked=takes_stacked)
    for name, change in found.items():
        wanted = expected.get(name, torch.zeros_like(change))
        assert (change - wanted).abs().max() < 1e-6
    assert any(change.abs().max() > 0.1 for change in expected.values())
    ranks = {tensor.shape[0] for key, tensor in adapter.tensors.items() if "self_attn" in key and "lora_A" in key}
    assert ranks == {adapter.rank}


@pytest.mark.parametrize("takes_stacked", [False, True])
@pytest.mark.parametrize("family", SERVED)
def test_an_adapter_in_bfloat16_is_the_rounded_one_at_every_read(
    family: str, takes_stacked: bool, tmp_path: Path
) -> None:
    model = trained(family, rank_pattern={r".*\.gate_up_proj": 4})
    reader = AdapterReader(proves_groups=True)
    reader.linears(model)
    form = Form(stacked_experts=takes_stacked)
    exact = reader.read(model, dtype=torch.float32, form=form).on_host()
    for number in range(2):
        adapter = reader.read(model, dtype=torch.bfloat16, form=form)
        write_tensors(tmp_path / f"{number}.safetensors", adapter)
        written = load_file(tmp_path / f"{number}.safetensors")
        assert written.keys() == adapter.tensors.keys() == exact.tensors.keys()
        assert all(torch.equal(written[key], tensor.bfloat16()) for key, tensor in exact.tensors.items())
        assert torch.equal(torch.cat([one.reshape(-1) for one in adapter.tensors.values()]), adapter.flat)


def test_the_router_of_a_mixtral_is_served_under_its_name() -> None:
    model = trained("mixtral", target_modules="all-linear", target_parameters=None)
    adapter = read(model)
    module = f"{PREFIX}model.layers.0.block_sparse_moe.gate"
    found = adapter.tensors[f"{module}.lora_B.weight"] @ adapter.tensors[f"{module}.lora_A.weight"]
    router = model.get_base_model().get_decoder().layers[0].mlp.gate
    assert (found - router.get_delta_weight("default").reshape(found.shape)).abs().max() < 1e-6
    assert not any(".mlp." in key for key in adapter.tensors)


def test_a_router_that_vllm_ignores_is_refused_with_what_to_set() -> None:
    model = trained("qwen3", target_modules="all-linear", target_parameters=None)
    words = (
        r"router \(model\.layers\.\*\.mlp\.gate\).*Set target_modules=\['k_proj', 'o_proj', 'q_proj', 'v_proj'\] and "
        r"target_parameters=\['down_proj', 'gate_up_proj'\]"
    )
    with pytest.raises(UnsupportedAdapterError, match=words):
        read(model)
    suggested = trained("qwen3", target_parameters=["down_proj", "gate_up_proj"])
    assert any(".experts.3.up_proj." in key for key in read(suggested).tensors)


@pytest.mark.parametrize("family", SERVED)
def test_neutral_matrices_are_the_base_and_a_trial_of_the_experts_changes_it(family: str) -> None:
    model, device = trained(family), torch.device("cpu")
    reader = AdapterReader(proves_groups=True)
    linears = reader.linears(model)
    groups = reader.groups()
    assert set(groups) == {"attention", "experts"}
    assert reader.reads_parameters
    before = {name: one.clone() for name, one in model.state_dict().items()}
    with torch.no_grad():
        base = base_model(family)(PROMPT).logits
        neutral = neutral_weights(linears, {}, device)
        unchanged = computing_with(neutral, lambda: model(PROMPT).logits)
        assert (unchanged - base).abs().max() < 1e-4
        changed = [matrix for pair in groups["experts"].values() for matrix in pair]
        trial = neutral | trial_weights(changed, 2.0, device)
        moved, expected = computing_with(trial, lambda: (model(PROMPT).logits, merged(model)))
        assert (moved - base).abs().max() > 0.05
    adapter = reader.read_trial(model, trial, dtype=torch.float32)
    found = served(family, adapter.tensors)
    assert all((found[name] - expected[name]).abs().max() < 1e-5 for name in found)
    assert not any(tensor.any() for key, tensor in adapter.tensors.items() if "self_attn" in key and "lora_B" in key)
    assert all(torch.equal(one, model.state_dict()[name]) for name, one in before.items())


@pytest.mark.parametrize(
    ("family", "lora", "words"),
    [
        ("qwen3", {}, r"attention \(k_proj, .*v_proj\), experts \(down_proj, gate_up_proj\)\. Not trained: router"),
        ("qwen3", {"target_parameters": None}, r"v_proj\)\. Not trained: experts, router\.$"),
        ("mixtral", {"target_modules": "all-linear", "target_parameters": None}, r"router \(gate\).*gate_up_proj\)\.$"),
    ],
)  # fmt: skip
def test_the_start_says_what_is_trained(family: str, lora: dict[str, Any], words: str) -> None:
    model, reader = trained(family, **lora), AdapterReader(proves_groups=True)
    reader.linears(model)
    note = experts_note((path for path, _ in model.named_modules()), reader.groups())
    assert note is not None
    assert re.search(words, note), note


def test_nothing_is_said_of_a_model_without_experts() -> None:
    assert experts_note(["model.layers.0.mlp.gate_proj"], {"MLP": ["model.layers.0.mlp.gate_proj"]}) is None


@pytest.mark.parametrize(("family", "up"), [("qwen3", "up_proj"), ("mixtral", "w3"), ("qwen3-vl", "up_proj")])
def test_sglang_gets_each_expert_in_a_tensor_even_where_vllm_takes_all_in_one(family: str, up: str) -> None:
    keys = read(trained(family), form=Form(packed_modules=True)).tensors
    assert any(f".{SERVED[family][0]}.3.{up}." in key for key in keys)


@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_fused_serving_gets_experts_one_by_one_and_any_router(family: str) -> None:
    model = trained(family, target_modules="all-linear", target_parameters=None)
    reader = AdapterReader("fused")
    reader.linears(model)
    adapter = reader.read(model, dtype=torch.float32)
    change, expected = served(family, adapter.tensors), merged(model)
    assert all((change[name] - expected[name]).abs().max() < 1e-6 for name in change)
    moe = SERVED[family][0].removesuffix(".experts")
    assert f"{PREFIX}{moe}.gate.lora_B.weight" in adapter.tensors


def test_fused_serving_refuses_a_family_whose_checkpoints_have_all_experts_in_one_tensor() -> None:
    reader = AdapterReader("fused")
    with pytest.raises(UnsupportedAdapterError, match="experts of qwen3_vl_moe"):
        reader.linears(trained("qwen3-vl"))


@pytest.mark.parametrize("serving", ["runtime", "fused"])
def test_an_adapter_on_experts_alone_is_refused_with_what_to_add(serving: Any) -> None:
    """Its first read ended in an IndexError without a message."""
    reader = AdapterReader(serving, proves_groups=serving == "runtime")
    with pytest.raises(UnsupportedAdapterError, match=r"on no linear layer.*target_modules.*One linear layer is"):
        reader.linears(trained("qwen3", target_modules=[]))


def test_an_adapter_that_fits_no_base_has_both_matrices_of_one_expert() -> None:
    """Experts have every lora_A before every lora_B, and it was made of the lora_A of two of them."""
    model = trained("qwen3", target_modules=[], target_parameters=["gate.weight", *BOTH])
    reader = AdapterReader("fused")
    reader.linears(model)
    misfit = widened(reader.read(model, dtype=torch.float32)).tensors
    expert = f"{PREFIX}{SERVED['qwen3'][0]}.0.gate_proj"
    assert {key: tuple(tensor.shape) for key, tensor in misfit.items()} == {
        f"{expert}.lora_A.weight": (2, HIDDEN + 1),
        f"{expert}.lora_B.weight": (INTERMEDIATE, 2),
    }


def test_experts_that_compute_with_another_adapter_as_well_are_refused() -> None:
    """The server got one of the two, as only layers of other modules were checked for that."""
    model, reader = trained("qwen3"), AdapterReader(proves_groups=True)
    model.add_adapter("other", LoraConfig(r=3, target_modules=ATTENTION, target_parameters=BOTH))
    model.set_adapter("default")
    reader.linears(model)
    reader.check()
    experts = experts_of_layer_0(model)
    for active in (["default", "other"], "other"):
        experts.set_adapter(active)
        for refused in (reader.check, lambda: read(model)):
            with pytest.raises(UnsupportedAdapterError, match=r"experts\.\w+' .* has other active adapters"):
                refused()
    model.set_adapter("default")
    read(model)


def test_an_initialisation_that_changes_the_base_is_refused_for_experts() -> None:
    fields: dict[str, Any] = {"target_modules": ATTENTION, "target_parameters": BOTH}
    check_model(base_model("qwen3"), LoraConfig(**fields), proves_groups=True)
    with pytest.raises(UnsupportedAdapterError, match="fused parameters of experts"):
        check_model(base_model("qwen3"), LoraConfig(**fields, init_lora_weights="olora"), proves_groups=True)


def test_a_family_whose_names_are_not_known_is_refused() -> None:
    model = trained("qwen3")
    model.config.model_type = "another_moe"
    for serving in ("runtime", "fused"):
        reader = AdapterReader(serving, proves_groups=serving == "runtime")
        with pytest.raises(UnsupportedAdapterError, match="fused parameters of experts of another_moe"):
            reader.linears(model)
