"""Unit tier: which trained modules a server is proved to serve together."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from trl_lora_sync.adapter.canonical import PLAIN, CanonicalAdapter
from trl_lora_sync.adapter.export import AdapterReader, remember_initial_adapter
from trl_lora_sync.adapter.groups import group_of, without_numbers
from trl_lora_sync.checks.verify import PROBE_PROMPT, TrainedBase, Trial
from trl_lora_sync.generation.base import AdapterGeneration
from trl_lora_sync.generation.scoring import adapter_logprobs, base_logprobs, neutral_weights, trial_logprobs
from unit.tiny import VOCABULARY, base_model, lora_model

IDS = [1, 5, 9, 2, 30, 7]


@pytest.mark.parametrize(
    ("path", "group"),
    [
        ("model.layers.0.self_attn.q_proj", "attention"),
        ("model.language_model.layers.1.self_attn.o_proj", "attention"),
        ("model.layers.3.linear_attn.in_proj_qkvz", "attention"),
        ("transformer.h.0.attn.c_attn", "attention"),
        ("transformer.h.0.self_attention.query_key_value", "attention"),
        ("model.layers.0.mlp.gate_proj", "MLP"),
        ("model.layers.0.mlp.down_proj", "MLP"),
        ("model.layers.0.mlp.experts.7.gate_proj", "experts"),
        ("model.layers.0.block_sparse_moe.experts.7.w1", "experts"),
        ("model.layers.0.mlp.shared_expert.up_proj", "experts"),
        ("model.layers.0.mlp.shared_experts.up_proj", "experts"),
        ("model.layers.0.mlp.gate", "router"),
        ("model.layers.0.block_sparse_moe.gate", "router"),
        ("model.layers.0.mlp.shared_expert_gate", "router"),
        ("model.visual.blocks.0.attn.qkv", "vision tower"),
        ("model.visual.blocks.0.mlp.linear_fc1", "vision tower"),
        ("model.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj", "vision tower"),
        ("model.visual.merger.mlp.0", "vision connector"),
        ("model.visual.deepstack_merger_list.0.linear_fc1", "vision connector"),
        ("model.embed_tokens", "embeddings"),
        ("lm_head", "embeddings"),
        ("backbone.layers.0.mixer.in_proj", "other"),
    ],
)
def test_a_module_belongs_to_the_group_that_servers_apply_or_ignore_together(path: str, group: str) -> None:
    assert group_of(path) == group


def test_layers_that_differ_by_their_number_are_named_once() -> None:
    paths = [f"model.layers.{layer}.mlp.{name}" for layer in range(3) for name in ("up_proj", "down_proj")]
    assert without_numbers(paths) == ["model.layers.*.mlp.up_proj", "model.layers.*.mlp.down_proj"]


def test_the_groups_of_a_model_hold_each_matrix_once() -> None:
    model, reader = lora_model(target_modules="all-linear"), AdapterReader()
    linears = reader.linears(model)
    groups = reader.groups()
    assert list(groups) == ["attention", "MLP"]
    found = [matrix for group in groups.values() for pair in group.values() for matrix in pair]
    assert len(found) == len(linears)
    assert set(found) == set(linears)


def test_neutral_matrices_change_nothing_in_a_model_with_a_trained_adapter() -> None:
    model, reader = lora_model(target_modules="all-linear"), AdapterReader()
    weights = neutral_weights(reader.linears(model), {}, torch.device("cpu"))
    with model.disable_adapter():
        expected = adapter_logprobs(model, IDS)
    assert trial_logprobs(model, weights, IDS) == pytest.approx(expected, abs=1e-6)


# The trial adapters of a trainer

PROBE = [token % VOCABULARY for token in PROBE_PROMPT]


def trials_of(model: Any, monkeypatch: pytest.MonkeyPatch, *, is_whole: bool = False) -> tuple[Trial, ...]:
    """As a trainer of one process makes them; the probe is cut to the vocabulary of the tiny model."""
    monkeypatch.setattr("trl_lora_sync.generation.base.PROBE_PROMPT", PROBE)
    initial = remember_initial_adapter(model, is_new=True)
    generation: Any = SimpleNamespace(
        settings=SimpleNamespace(verify="first"),
        reader=AdapterReader(),
        dtype_in=lambda form: torch.float32,
        _initial=initial,
        _is_sharded=lambda: False,
        model=model,
        accelerator=SimpleNamespace(device=torch.device("cpu")),
    )
    neutral = initial or dict.fromkeys(generation.reader.linears(model)[1::2])
    base = TrainedBase(vocab_size=VOCABULARY, scores=base_logprobs(model, PROBE, neutral))
    return AdapterGeneration.trials(generation, base, is_whole=is_whole)()


def pissa_model() -> Any:
    config = LoraConfig(r=2, lora_alpha=3, target_modules="all-linear", init_lora_weights="pissa")
    return get_peft_model(base_model(), config).eval()


def changes_by(adapter: CanonicalAdapter) -> dict[str, torch.Tensor]:
    """What a server adds to the weight of each layer."""
    found = {}
    for key, lora_A in adapter.tensors.items():
        if ".lora_A." in key:
            path = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            found[path] = adapter.tensors[key.replace(".lora_A.", ".lora_B.")] @ lora_A
    return found


def served_logprobs(changes: dict[str, torch.Tensor]) -> list[float]:
    served = base_model()
    with torch.no_grad():
        for path, change in changes.items():
            served.get_submodule(path).weight += change  # type: ignore[operator]
        rows = served(torch.tensor([PROBE])).logits[0, :-1].log_softmax(-1)
    picked: list[float] = rows.gather(-1, torch.tensor(PROBE)[1:, None])[:, 0].tolist()
    return picked


@pytest.mark.parametrize("make", [lambda: lora_model(target_modules="all-linear"), pissa_model], ids=["lora", "pissa"])
def test_each_trial_adapter_changes_one_group_of_modules_as_the_trainer_computes_it(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    trials = trials_of(model, monkeypatch)
    assert [trial.group for trial in trials] == ["attention", "MLP"]
    untouched = served_logprobs({})
    for trial in trials:
        changes = changes_by(trial.read(PLAIN))
        for path, change in changes.items():
            assert (change.abs().max() > 0.01) == (group_of(path) == trial.group), path
        served = served_logprobs(changes)
        assert served == pytest.approx(trial.scores.adapted, abs=1e-4)
        moved = sum(abs(a - b) for a, b in zip(served, untouched, strict=True)) / len(served)
        assert moved > 0.2


def test_a_trial_adapter_names_its_modules_without_the_numbers_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    _, mlp = trials_of(lora_model(target_modules="all-linear"), monkeypatch)
    names = ", ".join(f"model.layers.*.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
    assert str(mlp) == f"the MLP modules ({names})"


def test_an_adapter_on_one_group_has_one_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    (trial,) = trials_of(lora_model(), monkeypatch)
    assert trial.group == "attention"


def test_a_whole_trial_changes_all_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    (trial,) = trials_of(lora_model(target_modules="all-linear"), monkeypatch, is_whole=True)
    changes = changes_by(trial.read(PLAIN))
    assert all(change.abs().max() > 0.01 for change in changes.values())
    assert {group_of(path) for path in changes} == {"attention", "MLP"}
    assert served_logprobs(changes) == pytest.approx(trial.scores.adapted, abs=1e-4)
