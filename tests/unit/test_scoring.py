"""Unit tier: what the trainer's own model computes for a proof, and that it is left exactly as it was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.interrupts import Interrupts
from torch import Tensor

from trl_lora_sync.adapter.export import AdapterReader
from trl_lora_sync.adapter.fingerprint import fingerprint
from trl_lora_sync.adapter.flat import FlatBuffer
from trl_lora_sync.errors import UnsupportedAdapterError
from trl_lora_sync.generation.scoring import (
    adapter_logprobs,
    base_logprobs,
    strong_trial,
    trial_logprobs,
    trial_weights,
)
from unit.tiny import base_model, lora_model, randomize_adapters

IDS = [1, 5, 9, 2, 30, 7]


def trial_of(model: Any, strength: float = 0.5) -> dict[torch.nn.Module, Tensor]:
    return trial_weights(AdapterReader().linears(model), strength, torch.device("cpu"))


def base_of(model: Any, ids: list[int] = IDS) -> tuple[list[float], float]:
    """The base of a model whose adapter may have been trained."""
    return base_logprobs(model, ids, dict.fromkeys(AdapterReader().linears(model)[1::2]))


SCORES: dict[str, Callable[[Any], object]] = {
    "base": lambda model: base_of(model),
    "adapter": lambda model: adapter_logprobs(model, IDS),
    "trial": lambda model: trial_logprobs(model, trial_of(model), IDS),
}


def state_of(model: torch.nn.Module) -> dict[str, Any]:
    """Everything about a model that a forward pass must not change."""
    return {
        "trainable": {name: value.requires_grad for name, value in model.named_parameters()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "hooks": {name: len(module._forward_hooks) for name, module in model.named_modules()},
        "adapters": list(model.active_adapters),  # type: ignore[union-attr, arg-type]
        "disabled": {n: m.disable_adapters for n, m in model.named_modules() if hasattr(m, "disable_adapters")},
        "values": {name: value.clone() for name, value in model.state_dict().items()},
    }


def put_back(model: torch.nn.Module, state: dict[str, Any]) -> None:
    """The modes of all modules."""
    for name, module in model.named_modules():
        module.training = state["modes"][name]


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    values, others = left.pop("values"), right.pop("values")
    assert left == right
    assert values.keys() == others.keys()
    assert all(torch.equal(values[name], others[name]) for name in values)


def test_a_trial_has_the_same_numbers_for_an_adapter_that_was_widened_since() -> None:
    """Accelerate makes an adapter in bfloat16 that FSDP shards float32, after the trainer has computed its scores."""
    model = lora_model()
    narrow = list(trial_of(model.to(torch.bfloat16)).values())
    wide = list(trial_of(model.float()).values())
    assert {one.dtype for one in narrow} == {torch.bfloat16}
    for here, there in zip(narrow, wide, strict=True):
        torch.testing.assert_close(here.float(), there, rtol=2**-8, atol=0)


@pytest.mark.parametrize("score", SCORES)
def test_what_the_user_froze_stays_frozen(score: str) -> None:
    """LoRA-FA trains lora_B alone; PEFT's `disable_adapter()` would make lora_A trainable again."""
    model = lora_model()
    for name, value in model.named_parameters():
        value.requires_grad_("lora_B" in name)
    before = state_of(model)

    SCORES[score](model)

    assert_same(state_of(model), before)


@pytest.mark.parametrize("score", SCORES)
def test_each_module_keeps_its_own_mode(score: str) -> None:
    model = lora_model(lora_dropout=0.5).train()
    model.base_model.model.model.norm.eval()
    before = state_of(model)

    SCORES[score](model)

    assert_same(state_of(model), before)


def test_the_state_is_restored_after_a_forward_pass_that_fails() -> None:
    model = lora_model().train()
    before = state_of(model)
    with pytest.raises(IndexError):
        base_of(model, [10**6])
    with pytest.raises(IndexError):
        trial_logprobs(model, trial_of(model), [10**6])
    assert_same(state_of(model), before)


@pytest.mark.parametrize("score", SCORES)
def test_an_interrupt_at_any_point_leaves_the_model_computing_as_before(score: str) -> None:
    """Matrices of a trial could stay in the place of the adapter's, or parameters frozen, unnoticed by all checks."""
    model = lora_model(lora_dropout=0.5).train()
    model.base_model.model.model.norm.eval()
    given, weights = torch.tensor([IDS]), trial_of(model)
    scores = {**SCORES, "trial": lambda model: trial_logprobs(model, weights, IDS)}
    interrupts = Interrupts({"trl_lora_sync.generation.scoring", "contextlib"})
    while not interrupts.is_over:
        before, computed = state_of(model), model.eval()(given).logits
        put_back(model, before)
        interrupts.call(lambda: scores[score](model))
        after = state_of(model)
        del before["hooks"], after["hooks"]  # without effect
        assert_same(after, before)
        assert torch.equal(model.eval()(given).logits, computed)
        put_back(model, before)
    assert len(interrupts.kept) > 10


def test_base_and_adapter_are_what_peft_computes() -> None:
    model = lora_model()
    ids = torch.tensor([IDS])
    with torch.no_grad():
        adapted = model(ids).logits[0, :-1].log_softmax(-1)
        with model.disable_adapter():
            plain = model(ids).logits[0, :-1].log_softmax(-1)
    tokens = ids[0, 1:, None]
    assert adapter_logprobs(model, IDS) == pytest.approx(adapted.gather(-1, tokens)[:, 0].tolist())
    logprobs, spread = base_of(model)
    assert logprobs == pytest.approx(plain.gather(-1, tokens)[:, 0].tolist())
    assert spread == pytest.approx(float(plain.std(-1).mean()))


# The trial adapter


@pytest.mark.parametrize("lora", [{}, {"use_rslora": True, "lora_alpha": 7}, {"target_modules": "all-linear"}])
def test_the_exported_trial_adapter_is_what_the_trainer_computed_with(lora: dict[str, Any]) -> None:
    """Scaling included: exported by the reader, loaded unchanged into another model, and scored there."""
    model = lora_model(**lora)
    weights = trial_of(model)
    reader = AdapterReader()
    reader.linears(model)
    exported = reader.read_trial(model, weights, dtype=torch.float32)

    served = base_model()
    with torch.no_grad():
        for key, lora_A in exported.tensors.items():
            if ".lora_A." in key:
                path = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                lora_B = exported.tensors[key.replace(".lora_A.", ".lora_B.")]
                served.get_submodule(path).weight += lora_B @ lora_A  # type: ignore[operator]
        rows = served(torch.tensor([IDS])).logits[0, :-1].log_softmax(-1)
    expected = rows.gather(-1, torch.tensor(IDS)[1:, None])[:, 0].tolist()

    assert trial_logprobs(model, weights, IDS) == pytest.approx(expected, abs=1e-4)


def test_a_trial_adapter_moves_a_policy_far_whose_own_adapter_is_zero() -> None:
    model = lora_model()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.zero_()
    base, spread = base_of(model)

    def score(strength: float) -> list[float]:
        return trial_logprobs(model, trial_of(model, strength), IDS)

    strength, logprobs = strong_trial(score, base, spread)

    assert sum(abs(a - b) for a, b in zip(logprobs, base, strict=True)) / len(base) > 0.4 * spread
    assert logprobs == score(strength)


def test_the_strength_is_raised_until_the_effect_is_large_and_the_largest_one_is_taken() -> None:
    tried: list[float] = []

    def reacts(share: float) -> Callable[[float], list[float]]:
        def score(strength: float) -> list[float]:
            tried.append(strength)
            return [share * strength] * 3

        return score

    assert strong_trial(reacts(0.2), [0.0] * 3, 1.0) == (8.0, [1.6] * 3)
    assert tried == [0.5, 2.0, 8.0]
    assert strong_trial(reacts(0.001), [0.0] * 3, 1.0)[0] == 32.0
    overflowing = {0.5: [0.1] * 3, 2.0: [0.3] * 3, 8.0: [float("nan")] * 3, 32.0: [float("nan")] * 3}
    assert strong_trial(overflowing.__getitem__, [0.0] * 3, 1.0) == (2.0, [0.3] * 3)


def test_the_same_trial_adapter_is_made_again_without_touching_the_random_state() -> None:
    model = lora_model()
    state = torch.random.get_rng_state()
    first, again = trial_of(model), trial_of(model)
    assert all(torch.equal(first[module], again[module]) for module in first)
    assert torch.equal(torch.random.get_rng_state(), state)


# The fingerprint


def test_every_bit_and_every_place_shows_in_the_fingerprint() -> None:
    values = [torch.randn(64, 100), torch.randn(7), torch.randn(3, 5).bfloat16()]
    before = fingerprint(values)
    assert before == fingerprint([value.clone() for value in values])
    flipped = [value.clone() for value in values]
    flipped[0][:, ::2].neg_()
    swapped = [values[0].clone(), values[1].flip(0), values[2]]
    moved = [values[0].roll(1), *values[1:]]
    tiny = [values[0], values[1], values[2].clone()]
    tiny[2].view(torch.int16)[1, 1] ^= 1
    found = [before, *(fingerprint(one) for one in (flipped, swapped, moved, tiny))]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_sign_shows_in_the_fingerprint(dtype: torch.dtype) -> None:
    """It is the highest bit of a 64-bit word in some places, and vanished in sums that wrap around."""
    values = torch.randn(4, 1024).to(dtype)
    found = [fingerprint([values])]
    for place in range(values.numel()):
        changed = values.clone()
        changed.view(-1)[place].neg_()
        found.append(fingerprint([changed]))
    every_second = values.clone()
    every_second[:, 1::2].neg_()
    found.append(fingerprint([every_second]))
    assert len(set(found)) == len(found)


def test_words_that_change_places_show_in_the_fingerprint() -> None:
    """A word one row further and one column back counted as much as before."""
    words = torch.randn(8, 1024).view(torch.int64).view(-1)
    swapped = words.clone()
    swapped[[600, 600 + 511]] = words[[600 + 511, 600]]
    assert fingerprint([swapped]) != fingerprint([words])


def test_large_and_empty_tensors_have_fingerprints() -> None:
    large = torch.zeros(20_000_000)
    before = fingerprint([large, torch.empty(0), large])
    large[-1] = 1e-30
    assert fingerprint([large, torch.empty(0), large]) != before
    assert fingerprint([]) == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_the_fingerprint_of_a_shard_is_that_of_its_values_wherever_it_begins(dtype: torch.dtype) -> None:
    """A shard that began at an odd element of its storage failed every sync with a RuntimeError about alignment."""
    whole = torch.arange(10_001).to(dtype)
    assert fingerprint([whole[1:]]) == fingerprint([whole[1:].clone()])


# What the reader refuses


@pytest.mark.parametrize(("act", "words"), [("merge_adapter", "is merged"), ("disable_adapter_layers", "is disabled")])
def test_layers_that_compute_something_else_are_refused_at_the_moment_of_the_read(act: str, words: str) -> None:
    model = lora_model()
    reader = AdapterReader()
    reader.linears(model)
    getattr(model.base_model, act)()

    with pytest.raises(UnsupportedAdapterError, match=words):
        reader.check()
    with pytest.raises(UnsupportedAdapterError, match=words):
        reader.read(model, dtype=torch.float32)


def test_a_read_trial_leaves_the_read_adapter_alone() -> None:
    model = lora_model()
    randomize_adapters(model, seed=3)
    reader = AdapterReader()
    reader.linears(model)
    adapter = reader.read(model, dtype=torch.float32)
    reader.read_trial(model, trial_of(model), dtype=torch.float32)
    again = FlatBuffer().export(reader.modules(), dtype=torch.float32)
    assert all(torch.equal(adapter.tensors[key], again.tensors[key]) for key in again.tensors)
