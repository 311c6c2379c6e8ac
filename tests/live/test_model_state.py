"""Live tier: the trainer's model stays as the user made it, and what it computes with is what the server samples."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.models import peft_model, randomize_adapter
from support.policies import is_policy_of, sample, token_ids
from support.servers import Proxy, adapters_on, version_of
from support.trainers import prompts
from vllm_server import VLLMServer

from trl_lora_sync import GRPOTrainer
from trl_lora_sync.errors import UnsupportedAdapterError

Make = Callable[..., GRPOTrainer]
GAP = "sampling/sampling_logp_difference/mean"


def loads(proxy: Proxy) -> list[int]:
    """The versions in the load requests to the server, without trials."""
    bodies = proxy.requests("/v1/load_lora_adapter")
    return [version for body in bodies if (version := version_of(body["lora_name"]))]


def test_matrices_that_the_user_froze_are_not_trained(
    make_trainer: Make, clean_server: VLLMServer, base_model: Path
) -> None:
    """LoRA-FA trains lora_B alone."""
    model = peft_model(base_model)
    for name, value in model.named_parameters():
        value.requires_grad_("lora_B" in name)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    trainer = make_trainer(clean_server.base_url, model, peft_config=None, max_steps=2)
    assert {name for name, value in model.named_parameters() if value.requires_grad} == {
        name for name in before if "lora_B" in name
    }

    trainer.train()

    changed = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if "lora_B" in name}


@pytest.mark.parametrize(("act", "undo"), [("merge_adapter", "unmerge_adapter"), ("disable", "enable")])
def test_an_adapter_that_the_trainer_does_not_compute_with_is_not_sampled(
    act: str, undo: str, make_trainer: Make, clean_server: VLLMServer, base_model: Path
) -> None:
    trainer = make_trainer(clean_server.base_url, base_model)
    model, generation = trainer.model, trainer.vllm_generation
    randomize_adapter(model, seed=1)
    generation.sync_weights()
    name = generation.active_name
    acts = {"disable": model.base_model.disable_adapter_layers, "enable": model.base_model.enable_adapter_layers}

    acts.get(act, getattr(model, act, None))()
    for attempt in (generation.sync_weights, lambda: sample(generation, [token_ids(1)])):
        with pytest.raises(UnsupportedAdapterError, match=rf"at the moment \(call model\.{undo}"):
            attempt()
    assert generation.active_name == name

    acts.get(undo, getattr(model, undo, None))()
    assert is_policy_of(model, sample(generation, [token_ids(1)]))


def test_weights_that_change_at_one_global_step_are_published_before_the_next_completion(
    make_trainer: Make, proxy: Proxy, base_model: Path
) -> None:
    """TRL calls for a sync only when `global_step` has changed."""
    trainer = make_trainer(proxy.base_url, base_model, eval_dataset=prompts(), max_steps=1)
    trainer.evaluate()
    randomize_adapter(trainer.model, seed=1)

    again = trainer.evaluate()

    assert loads(proxy) == [1, 2]
    assert again[f"eval_{GAP}"] < 0.03  # rounding; the version before is ten times as far
    trainer.evaluate()
    assert loads(proxy) == [1, 2]
    randomize_adapter(trainer.model, seed=2)
    trainer.train()
    gaps = [entry[GAP] for entry in trainer.state.log_history if GAP in entry]
    assert gaps
    assert max(gaps) < 0.03


def test_what_samples_through_the_client_alone_sees_changed_weights_too(
    make_trainer: Make, proxy: Proxy, base_model: Path
) -> None:
    trainer = make_trainer(proxy.base_url, base_model)
    trainer.vllm_generation.sync_weights()
    randomize_adapter(trainer.model, seed=1)

    trainer.vllm_generation.vllm_client.generate([token_ids(1)])
    trainer.vllm_generation.vllm_client.generate([token_ids(1)])

    assert loads(proxy) == [1, 2]


def test_a_layer_that_was_replaced_is_published_and_what_was_read_before_the_look_is_withdrawn(
    make_trainer: Make, proxy: Proxy, base_model: Path
) -> None:
    trainer = make_trainer(proxy.base_url, base_model)
    model, generation = trainer.model, trainer.vllm_generation
    for seed in range(2):  # the second one reads without a look
        randomize_adapter(model, seed=seed)
        generation.sync_weights()
    linear = next(module for name, module in model.named_modules() if name.endswith("lora_B.default"))
    linear.weight = torch.nn.Parameter(torch.full_like(linear.weight, 0.05))

    generation.sync_weights()

    assert loads(proxy) == [1, 2, 3, 4]
    assert not [name for name in adapters_on(proxy.base_url) if version_of(name) == 3]
    assert version_of(generation.active_name) == 4
    assert is_policy_of(model, sample(generation, [token_ids(1)]))


def test_a_change_between_a_sample_and_a_sync_is_seen_by_the_next_sample(
    make_trainer: Make, proxy: Proxy, base_model: Path
) -> None:
    """After the look of a sample, a sync leaves its own look to the sample that follows."""
    trainer = make_trainer(proxy.base_url, base_model)
    model, generation = trainer.model, trainer.vllm_generation
    for seed in range(2):
        randomize_adapter(model, seed=seed)
        generation.sync_weights()
    sample(generation, [token_ids(1)])
    linear = next(module for name, module in model.named_modules() if name.endswith("lora_B.default"))
    linear.weight = torch.nn.Parameter(torch.full_like(linear.weight, 0.05))
    generation.sync_weights()
    assert loads(proxy) == [1, 2, 3]
    assert is_policy_of(model, sample(generation, [token_ids(1)]))
    assert loads(proxy) == [1, 2, 3, 4]

    layer = next(layer for layer in model.modules() if hasattr(layer, "lora_A"))
    layer.scaling["default"] *= 3
    generation.sync_weights()
    assert is_policy_of(model, sample(generation, [token_ids(1)]))
    assert loads(proxy) == [1, 2, 3, 4, 5, 6]

    model.merge_adapter()
    generation.sync_weights()
    with pytest.raises(UnsupportedAdapterError, match=r"at the moment \(call model\.unmerge"):
        sample(generation, [token_ids(1)])
    with pytest.raises(UnsupportedAdapterError, match=r"at the moment \(call model\.unmerge"):
        generation.sync_weights()  # no sample was drawn since the last one
    model.unmerge_adapter()
    assert is_policy_of(model, sample(generation, [token_ids(1)]))
