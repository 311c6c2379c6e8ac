"""Unit tier: adapters that were taken out of the base weights are served exactly beside the checkpoint's base."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.config import CordaConfig
from torch import Tensor, nn

from trl_lora_sync import export_adapter
from trl_lora_sync.adapter.base_drift import change_from_checkpoint
from trl_lora_sync.adapter.export import AdapterReader, read_adapter, remember_initial_adapter
from trl_lora_sync.adapter.flat import FlatBuffer
from trl_lora_sync.adapter.saved import read_saved_adapter
from trl_lora_sync.adapter.support import check_model, check_peft_config, saved_rank
from trl_lora_sync.errors import UnsupportedAdapterError
from trl_lora_sync.generation.scoring import adapter_logprobs, base_logprobs, trial_logprobs, trial_weights
from unit.tiny import PROMPT, base_model, logits, reference_tensors

# PEFT has LoRA-GA, and CorDA on layers that keep their weight transposed, from 0.19 on.
LORA_GA = ["lora_ga"] if hasattr(peft, "LoraGAConfig") else []
CORDA_TRANSPOSED = ["corda"] if LORA_GA else []
INITS = ["pissa", "pissa_niter_4", "olora", "OLoRA", "corda", *LORA_GA]
IDS = PROMPT[0].tolist()
# Of float32 logits of size 1 to 10.
EXACT = {"atol": 2e-5, "rtol": 1e-5}


def new_model(init: str = "pissa", *, architecture: str = "qwen3", base: nn.Module | None = None, **lora: Any) -> Any:
    """A model with an adapter that has just been made, and is not copied yet."""
    base = base or base_model(architecture)
    fields = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    if init == "corda":
        fields["corda_config"] = CordaConfig(corda_method="kpm")
    if init == "lora_ga":
        fields["lora_ga_config"] = peft.LoraGAConfig()
    config = LoraConfig(**fields | {"init_lora_weights": init} | lora)
    if init == "corda":
        decompose(base, config)
    if init == "lora_ga":
        peft.tuners.lora.loraga.preprocess_loraga(base, config, lambda: base(PROMPT, labels=PROMPT).loss.backward())
    return get_peft_model(base, config).eval()


def decompose(base: nn.Module, config: LoraConfig) -> None:
    """What PEFT's `preprocess_corda` leaves, which imports a package that PEFT does not require: `attr`."""
    generator = torch.Generator().manual_seed(3)
    for name, module in base.named_modules():
        if name.rpartition(".")[2] not in config.target_modules:
            continue
        weight = module.weight.detach().float()
        weight = weight.T if config.fan_in_fan_out else weight
        inputs = torch.randn(4 * weight.shape[1], weight.shape[1], generator=generator)
        covariance = inputs.T @ inputs / len(inputs)
        U, S, Vh = torch.linalg.svd(weight @ covariance, full_matrices=False)
        V = (Vh @ torch.linalg.inv(covariance)).T
        module.eigens = SimpleNamespace(U_WC=U[:, : config.r], S_WC=S[: config.r], V_WC=V[:, : config.r])


def model_of_a_run(init: str = "pissa", **fields: Any) -> Any:
    """As a trainer has it after its construction."""
    model = new_model(init, **fields)
    remember_initial_adapter(model, is_new=True)
    return model


def train(model: PeftModel, *, steps: int = 3, rate: float = 0.02) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    for _ in range(steps):
        model(PROMPT, labels=PROMPT).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def served(folder: Path, architecture: str = "qwen3", *, dtype: torch.dtype = torch.float32) -> Any:
    """The checkpoint's base with the written adapter, as plain PEFT loads it."""
    return PeftModel.from_pretrained(base_model(architecture).to(dtype), folder).eval()


def assert_served_is_trained(model: PeftModel, folder: Path, architecture: str = "qwen3") -> None:
    exported = export_adapter(model, folder, dtype=torch.float32)
    torch.testing.assert_close(logits(served(exported.path, architecture)), logits(model), **EXACT)


@pytest.mark.parametrize("init", INITS)
def test_plain_peft_on_the_checkpoints_base_computes_what_the_trained_model_does(init: str, tmp_path: Path) -> None:
    model = model_of_a_run(init)
    checkpoint = logits(base_model())
    with model.disable_adapter():
        assert (logits(model) - checkpoint).abs().max() > 1e-2, "the base was not changed, so nothing is tested"
    torch.testing.assert_close(logits(model), checkpoint, **EXACT)
    assert_served_is_trained(model, tmp_path / "new")
    train(model)
    assert (logits(model) - checkpoint).abs().max() > 1e-2
    assert_served_is_trained(model, tmp_path / "trained")
    config = read_adapter(model, dtype=torch.float32).config()
    assert (config["r"], config["lora_alpha"], config["init_lora_weights"]) == (6, 6, True)


FEATURES: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True},
    "rank_pattern": {"rank_pattern": {"q_proj": 5}},
    "alpha_pattern": {"alpha_pattern": {"v_proj": 17}},
    "all three": {"use_rslora": True, "rank_pattern": {"q_proj": 5}, "alpha_pattern": {"v_proj": 17}},
    "all-linear": {"target_modules": "all-linear"},
}


@pytest.mark.parametrize("init", ["pissa", "olora"])
@pytest.mark.parametrize("feature", FEATURES)
def test_scalings_and_ranks_of_all_kinds_are_served_exactly(feature: str, init: str, tmp_path: Path) -> None:
    model = model_of_a_run(init, **FEATURES[feature])
    train(model)
    assert_served_is_trained(model, tmp_path / "adapter")
    largest = 5 if "rank_pattern" in FEATURES[feature] else 3
    assert read_adapter(model, dtype=torch.float32).rank == 2 * largest


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", *CORDA_TRANSPOSED, *LORA_GA])
def test_layers_that_keep_their_weight_transposed_are_served_exactly(init: str, tmp_path: Path) -> None:
    model = model_of_a_run(
        init, architecture="gpt2", target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, use_rslora=True
    )
    train(model)
    assert_served_is_trained(model, tmp_path / "adapter", "gpt2")


def test_a_scaling_that_was_changed_later_is_served_exactly(tmp_path: Path) -> None:
    model = model_of_a_run()
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 0.5)
    assert_served_is_trained(model, tmp_path / "adapter")


def test_siblings_are_completed_beside_the_difference() -> None:
    adapter = read_adapter(model_of_a_run(), dtype=torch.float32, packed_modules=True)
    assert {key.split(".")[-3] for key in adapter.tensors} == {"q_proj", "k_proj", "v_proj", "down_proj"}
    assert {t.shape[0] for key, t in adapter.tensors.items() if "lora_A" in key} == {6}


def test_the_export_is_the_difference_bit_for_bit() -> None:
    model = model_of_a_run(rank_pattern={"q_proj": 5})
    train(model)
    reader = AdapterReader()
    reader.linears(model)
    modules = reader.modules()
    for dtype in (torch.float32, torch.bfloat16):
        flat, expected = FlatBuffer().export(modules, dtype=dtype), reference_tensors(modules, dtype)
        assert flat.tensors.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[key]) for key, tensor in flat.tensors.items())


# Precision


def mean_distance(left: Tensor, right: Tensor) -> float:
    return float((left.float().log_softmax(-1) - right.float().log_softmax(-1)).abs().mean())


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_in_bfloat16_the_distance_is_less_than_that_of_bfloat16_itself(init: str, tmp_path: Path) -> None:
    """PEFT rounds what is left of the base; computed in float32, so that nothing else is rounded."""
    base = base_model().to(torch.bfloat16)
    noise = mean_distance(logits(base), logits(base_model().to(torch.bfloat16).float()))
    model = model_of_a_run(init, base=base)
    optimizer_copy = model.float()
    train(optimizer_copy)
    export_adapter(model, tmp_path / "adapter", dtype=torch.bfloat16)
    there = PeftModel.from_pretrained(base_model().to(torch.bfloat16).float(), tmp_path / "adapter").eval()
    distance = mean_distance(logits(there), logits(model))
    assert 0 < distance < noise, (distance, noise)


def test_a_small_step_survives_bfloat16(tmp_path: Path) -> None:
    """Of B A beside -B0 A0, in bfloat16, nothing would be left of a change by less than the last place of B."""
    model = model_of_a_run()
    before = logits(model)
    with torch.no_grad():
        for linear in AdapterReader().linears(model):
            linear.weight.mul_(1 + 2**-12)
    change = logits(model) - before
    export_adapter(model, tmp_path / "adapter", dtype=torch.bfloat16)
    gained = logits(served(tmp_path / "adapter")) - logits(base_model())
    assert (gained - change).norm() < 0.02 * change.norm()


def test_an_untrained_adapter_is_zero_in_every_dtype(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        adapter = FlatBuffer().export(list_of_modules(model_of_a_run()), dtype=dtype)
        keys = list(adapter.tensors)
        for key_A, key_B in zip(keys[::2], keys[1::2], strict=True):
            assert not (adapter.tensors[key_B].float() @ adapter.tensors[key_A].float()).any()


def list_of_modules(model: Any) -> Any:
    reader = AdapterReader()
    reader.linears(model)
    return reader.modules()


# What verification compares


def test_the_base_that_is_verified_is_the_checkpoints_also_after_training() -> None:
    model = new_model()
    initial = remember_initial_adapter(model, is_new=True)
    expected, spread = base_logprobs(base_model(), IDS, {})
    without, _ = base_logprobs(model, IDS, dict.fromkeys(AdapterReader().linears(model)[1::2]))
    assert (Tensor(without) - Tensor(expected)).abs().mean() > 0.01
    for _ in range(2):
        found, found_spread = base_logprobs(model, IDS, initial)
        torch.testing.assert_close(Tensor(found), Tensor(expected), **EXACT)
        assert found_spread == pytest.approx(spread, rel=1e-4)
        train(model)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_trial_adapter_is_served_as_the_trainer_computes_it(tmp_path: Path) -> None:
    model = model_of_a_run()
    reader = AdapterReader()
    weights = trial_weights(reader.linears(model), 2.0, torch.device("cpu"))
    expected = trial_logprobs(model, weights, IDS)
    trial = reader.read_trial(model, weights, dtype=torch.float32)
    plain = get_peft_model(
        base_model(), LoraConfig(r=6, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"])
    )
    plain.load_state_dict({k.replace(".weight", ".default.weight"): v for k, v in trial.tensors.items()}, strict=False)
    torch.testing.assert_close(Tensor(adapter_logprobs(plain, IDS)), Tensor(expected), **EXACT)


# Where the initial adapter comes from


def test_a_second_trainer_of_the_same_model_keeps_the_first_copies(tmp_path: Path) -> None:
    model = model_of_a_run()
    train(model)
    remember_initial_adapter(model, is_new=False)
    assert_served_is_trained(model, tmp_path / "adapter")


def test_a_checkpoint_that_is_loaded_into_a_new_model_is_served_exactly(tmp_path: Path) -> None:
    first = model_of_a_run("pissa_niter_4")
    train(first)
    first.save_pretrained(tmp_path / "checkpoint")
    torch.manual_seed(77)  # PEFT takes something else out of the base then
    second = model_of_a_run("pissa_niter_4")
    second.load_adapter(tmp_path / "checkpoint", "default", is_trainable=True)  # as Transformers resumes
    assert_served_is_trained(second, tmp_path / "adapter")


def test_a_model_that_nothing_was_copied_of_is_refused_with_the_way_to_train_it() -> None:
    with pytest.raises(UnsupportedAdapterError) as caught:
        read_adapter(new_model(), dtype=torch.float32)
    assert "was not copied before the training" in str(caught.value)
    assert "peft_config=LoraConfig(...)" in str(caught.value)
    assert "resume_from_checkpoint" in str(caught.value)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    base_model().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def loaded(checkpoint: Path, *, dtype: torch.dtype = torch.float32, **fields: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return new_model(base=AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype), **fields)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("init", INITS)
def test_a_new_model_that_the_user_made_is_recognised_by_its_checkpoint(
    init: str, dtype: torch.dtype, checkpoint: Path
) -> None:
    model = loaded(checkpoint, init=init, dtype=dtype)
    assert len(remember_initial_adapter(model, is_new=False)) == len(AdapterReader().linears(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("init", INITS)
def test_a_base_that_lacks_more_than_the_initial_adapter_is_noticed(
    init: str, dtype: torch.dtype, checkpoint: Path
) -> None:
    """A base that an earlier adapter was merged into was taken for the checkpoint's, as its layers were left out."""
    model, reader = loaded(checkpoint, init=init, dtype=dtype, use_rslora=True), AdapterReader()
    remember_initial_adapter(model, is_new=True)
    reader.linears(model)
    assert change_from_checkpoint(model, (), reader.initial()) == ""
    train(model)
    assert change_from_checkpoint(model, (), reader.initial()) == ""
    model.get_base_model().model.layers[1].self_attn.q_proj.get_base_layer().weight.data *= 1.1
    assert "base weights differ from the checkpoint" in change_from_checkpoint(model, (), reader.initial())


@pytest.mark.parametrize("init", ["pissa", *CORDA_TRANSPOSED, *LORA_GA])
def test_a_base_that_keeps_its_weights_transposed_is_compared_as_it_is(init: str, tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    base_model("gpt2").save_pretrained(tmp_path)
    base = GPT2LMHeadModel.from_pretrained(tmp_path)
    model, reader = new_model(init, base=base, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True), AdapterReader()
    remember_initial_adapter(model, is_new=True)
    reader.linears(model)
    assert change_from_checkpoint(model, (), reader.initial()) == ""
    model.get_base_model().transformer.h[1].attn.c_attn.get_base_layer().weight.data *= 1.1
    assert "base weights differ from the checkpoint" in change_from_checkpoint(model, (), reader.initial())


def test_a_model_that_was_trained_elsewhere_is_refused(checkpoint: Path) -> None:
    model = loaded(checkpoint)
    train(model, steps=1, rate=1e-4)
    with pytest.raises(UnsupportedAdapterError, match=r"are not the weight in .* any more.*peft_config"):
        remember_initial_adapter(model, is_new=False)


def test_an_adapter_that_was_loaded_from_a_file_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = loaded(checkpoint)
    train(model)
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(checkpoint), tmp_path / "adapter", is_trainable=True
    )
    with pytest.raises(UnsupportedAdapterError, match="has been trained or loaded"):
        remember_initial_adapter(again, is_new=False)


def test_a_model_whose_checkpoint_is_not_there_is_refused() -> None:
    with pytest.raises(UnsupportedAdapterError, match=r"cannot be read .*does not record where it was loaded from"):
        remember_initial_adapter(new_model(), is_new=False)


@pytest.mark.parametrize("init", ["pissa", "loftq"])
def test_an_adapter_beside_the_active_one_that_changed_the_base_is_refused(init: str) -> None:
    """As TRL's "ref", which it adds to a PeftModel with the same configuration unless beta is 0."""
    model = new_model()
    model.add_adapter("ref", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa"))
    model.peft_config["ref"].init_lora_weights = init
    for check in (lambda: check_model(model, None), lambda: remember_initial_adapter(model, is_new=True)):
        with pytest.raises(UnsupportedAdapterError, match=r"The adapter 'ref' .*set beta=0"):
            check()


class FourBit(nn.Parameter):
    quant_type = "nf4"


@pytest.mark.parametrize("weight", [FourBit(torch.zeros(1)), nn.Parameter(torch.zeros(1, dtype=torch.int8), False)])
def test_a_quantised_base_is_refused_because_it_is_quantised_again(weight: nn.Parameter) -> None:
    model = new_model("olora")
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    layer.get_base_layer().weight = weight
    with pytest.raises(UnsupportedAdapterError, match=r"quantised base layer 'model.layers.0.self_attn.q_proj'"):
        remember_initial_adapter(model, is_new=True)


def test_plain_initialisations_are_not_copied() -> None:
    model = get_peft_model(base_model(), LoraConfig(target_modules=["q_proj"]))
    assert remember_initial_adapter(model, is_new=True) == {}
    assert read_adapter(model, dtype=torch.float32).rank == 8


# LoftQ


def test_loftq_is_refused_with_what_can_be_served_instead() -> None:
    config = LoraConfig()
    config.init_lora_weights = "loftq"
    with pytest.raises(UnsupportedAdapterError, match=r"LoftQ replaces the base weights.*replace_lora_weights_loftq"):
        check_peft_config(config)


# Files


def test_a_saved_adapter_is_refused_and_its_conversion_by_peft_is_served_exactly(tmp_path: Path) -> None:
    model = new_model()
    model.save_pretrained(tmp_path / "initial")
    remember_initial_adapter(model, is_new=True)
    train(model)
    model.save_pretrained(tmp_path / "trained")
    with pytest.raises(UnsupportedAdapterError, match=r"init_lora_weights='pissa'.*path_initial_model_for_weight"):
        read_saved_adapter(tmp_path / "trained")
    model.save_pretrained(tmp_path / "converted", path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    converted, live = read_saved_adapter(tmp_path / "converted").canonical(), read_adapter(model, dtype=torch.float32)
    assert converted.rank == live.rank == 6
    for key in live.tensors:
        if "lora_A" in key:
            other = key.replace("lora_A", "lora_B")
            torch.testing.assert_close(
                converted.tensors[other] @ converted.tensors[key], live.tensors[other] @ live.tensors[key], **EXACT
            )


@pytest.mark.parametrize(("init", "rank"), [("pissa_niter_2", 48), ("olora", 48), (True, 24), ("gaussian", 24)])
def test_a_server_is_sized_for_twice_the_rank(init: Any, rank: int) -> None:
    assert saved_rank({"r": 8, "rank_pattern": {"q_proj": 24}, "init_lora_weights": init}) == rank
