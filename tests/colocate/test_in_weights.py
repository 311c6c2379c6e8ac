"""Adapters in the weights that vLLM computes with, and one base for trainer and vLLM: what is sampled, what stays.

The tests of one way share a trainer. Each begins with its own adapter.
"""

import gc
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.colocate import (
    OTHER_POLICY,
    answered,
    base_distance,
    check_versions_after_inference_mode,
    colocate_trainer,
    is_exact,
    parts_left_of_a_dropped_trainer,
    samples_policy,
)
from support.interrupts import Interrupts
from support.models import base_weights, lora, randomize_adapter, same_tensors
from support.policies import distance, token_ids
from transformers import AutoModelForCausalLM

from trl_lora_sync.checks.verify import Scores
from trl_lora_sync.colocate import engine, in_weights
from trl_lora_sync.errors import UnsupportedSettingError, VerificationError

WAYS: dict[str, dict[str, str]] = {
    "fused": {"lora_sync_serving": "fused"},
    "fused, shared": {"lora_sync_serving": "fused", "vllm_colocate_base": "shared"},
    "runtime, shared": {"vllm_colocate_base": "shared"},
}
SEEDS = itertools.count(100)
# Longer than a block of the prefix cache.
ASKED = [token_ids(seed, length=40) for seed in (1, 2)]


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def shared(way: str, base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    trainer = colocate_trainer(base_model, tmp_path_factory.mktemp("weights"), max_steps=2, **WAYS[way])
    trainer.base_before = base_weights(trainer.model)
    trainer.model.eval()
    yield trainer
    trainer.vllm_generation.close()


@pytest.fixture
def trainer(shared: Any) -> Any:
    """The shared trainer with an adapter that no earlier test had, which is the active version."""
    change(shared)
    shared.vllm_generation.sync_weights()
    return shared


def change(trainer: Any) -> None:
    randomize_adapter(trainer.model, seed=next(SEEDS))


def base_is_as_before(trainer: Any) -> bool:
    return same_tensors(base_weights(trainer.model), trainer.base_before)


def test_each_version_is_sampled_from_and_none_is_mixed_with_the_one_before(trainer: Any) -> None:
    """The prompts are the same each time and longer than a block, so the prefix cache would show."""
    generation, before = trainer.vllm_generation, None
    for _ in range(4):
        rows = answered(generation.llm, ASKED)
        assert is_exact(trainer.model, rows)
        assert base_distance(trainer.model, rows) > OTHER_POLICY
        assert before is None or distance(trainer.model, before).mean() > OTHER_POLICY
        change(trainer)
        generation.sync_weights()
        before = rows


def test_prefix_cache_is_used_within_a_version(trainer: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[int] = []
    monkeypatch.setattr(in_weights.engine, "empty_prefix_cache", lambda llm: emptied.append(1))
    if "fused" in way:
        for _ in range(2):
            assert is_exact(trainer.model, answered(trainer.vllm_generation.llm, ASKED))
        assert len(emptied) <= 1
    else:
        assert samples_policy(trainer)
        assert not emptied


def test_adapter_that_has_changed_is_loaded_before_anything_is_sampled(trainer: Any) -> None:
    change(trainer)
    assert samples_policy(trainer)


def test_versions_follow_one_that_was_loaded_in_inference_mode(trainer: Any) -> None:
    """The next sync raised an error of torch, as it writes to memory of the first one."""
    check_versions_after_inference_mode(trainer, ASKED, change)


def test_flag_for_transposed_weights_changes_nothing_on_linear_layers(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT (0.21) leaves it in the configuration of a second adapter, and the base was merged transposed."""
    monkeypatch.setattr(trainer.model.peft_config["default"], "fan_in_fan_out", True)
    change(trainer)
    assert samples_policy(trainer)


def test_request_that_names_another_adapter_is_refused(trainer: Any) -> None:
    with pytest.raises(Exception, match=r"names the adapter 'other'|LoRA is not enabled"):  # ours, or vLLM's own
        answered(trainer.vllm_generation.llm, ASKED, lora_request=_request("other"))
    assert samples_policy(trainer)


def _request(name: str) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, 9, "/no/such/adapter")


def test_base_is_scored_without_the_adapter_and_the_policy_stays(trainer: Any) -> None:
    generation = trainer.vllm_generation
    prompt = tuple(ASKED[0])
    served = engine.prompt_logprobs(generation.llm, generation.gate, None, prompt)
    with trainer.model.disable_adapter():
        assert is_exact(trainer.model, [(list(prompt[:1]), list(prompt[1:]), torch.tensor(served))])
    assert samples_policy(trainer)


# Failed syncs


def contradicted(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> type[Exception]:
    generation, scores = trainer.vllm_generation, trainer.vllm_generation.scores

    def others(*args: Any) -> Scores:
        found = scores(*args)
        return replace(found, adapted=[value - 0.5 for value in found.adapted])

    monkeypatch.setattr(generation, "settings", replace(generation.settings, verify="every"))
    monkeypatch.setattr(generation, "scores", others)
    return VerificationError


def interrupted_write(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> type[Exception]:
    """Writing fails when a part of the layers is written, or a part of the copies is made."""
    generation, calls = trainer.vllm_generation, []

    def fails(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            raise torch.OutOfMemoryError("no memory left")
        return fuse(*args)

    def copies(*args: Any) -> None:
        raise torch.OutOfMemoryError("no memory left")

    fuse = in_weights.fuse_piece
    monkeypatch.setattr(in_weights, "fuse_piece", fails)
    if not isinstance(generation.holder, in_weights.MergedIntoOwnWeights):
        monkeypatch.setattr(torch, "_foreach_copy_", copies)
    return torch.OutOfMemoryError


@pytest.mark.parametrize("fault", [contradicted, interrupted_write])
def test_failed_sync_leaves_the_previous_version_in_force(
    fault: Callable[..., type[Exception]], trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = trainer.vllm_generation
    active = generation.active_name
    adapter = {name: value.clone() for name, value in trainer.model.state_dict().items() if "lora_" in name}
    change(trainer)
    with monkeypatch.context() as patch:
        error = fault(trainer, patch)
        with pytest.raises(error):
            generation.sync_weights()
    assert generation.active_name == active
    assert base_is_as_before(trainer)
    trainer.model.load_state_dict(adapter, strict=False)
    assert samples_policy(trainer)
    assert generation.active_name == active, "the previous version was loaded again"
    change(trainer)
    assert samples_policy(trainer)


def test_a_sync_that_was_interrupted_leaves_no_other_version_in_force_than_the_one_that_is_compared(
    trainer: Any,
) -> None:
    """The gate had the new version, and the adapter was compared with the one before, so nothing was loaded again."""
    generation = trainer.vllm_generation
    interrupts = Interrupts({type(generation.holder).__module__})
    while not interrupts.is_over:
        adapter = {name: value.clone() for name, value in trainer.model.state_dict().items() if "lora_" in name}
        change(trainer)
        interrupts.call(generation.sync_weights)
        trainer.model.load_state_dict(adapter, strict=False)
        assert is_exact(trainer.model, answered(generation.llm, ASKED))
    assert len(interrupts.kept) > 5
    assert base_is_as_before(trainer)


@pytest.mark.parametrize("is_refused", [False, True])
def test_no_more_versions_are_in_memory_than_are_needed(
    trainer: Any, way: str, monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    generation = trainer.vllm_generation
    for _ in range(2):
        change(trainer)
        generation.sync_weights()
        assert samples_policy(trainer)
    if is_refused:
        change(trainer)
        with monkeypatch.context() as patch, pytest.raises(contradicted(trainer, patch)):
            generation.sync_weights()
        generation.sync_weights()
    elements = sum(value.numel() for name, value in trainer.model.named_parameters() if "lora_" in name)
    count = _memories_of(elements)
    generation.close()
    # What it is read into; where it is not in slots, what is sampled from; with a second base, the next version too.
    assert count - _memories_of(elements) == {"fused": 3, "fused, shared": 2, "runtime, shared": 1}[way]
    assert samples_policy(trainer)


def _memories_of(elements: int) -> int:
    """How many pieces of memory of a size there are behind all tensors."""
    gc.collect()
    storages = [one.untyped_storage() for one in gc.get_objects() if type(one) is torch.Tensor]
    return len({one.data_ptr() for one in storages if one.nbytes() == elements * 4})


# Base weights


def test_fifty_versions_leave_the_base_bit_for_bit(trainer: Any, way: str) -> None:
    generation = trainer.vllm_generation
    for _ in range(50):
        change(trainer)
        generation.sync_weights()
        is_as_before = generation.gate.sample(lambda: base_is_as_before(trainer))
        assert is_as_before == (way != "fused, shared"), "folded while it samples, and only then"
        assert base_is_as_before(trainer)
    prompt = tuple(ASKED[1])
    served = engine.prompt_logprobs(generation.llm, generation.gate, None, prompt)
    with trainer.model.disable_adapter():
        assert is_exact(trainer.model, [(list(prompt[:1]), list(prompt[1:]), torch.tensor(served))])


def test_shared_weights_are_the_engines_own_memory(trainer: Any, way: str) -> None:
    served = engine.served_model(trainer.vllm_generation.llm)
    memory = {value.untyped_storage().data_ptr() for value in served.parameters()}
    ours = [value for name, value in trainer.model.named_parameters() if value.ndim > 1 and not value.requires_grad]
    assert len(ours) > 10
    assert all((value.untyped_storage().data_ptr() in memory) == ("shared" in way) for value in ours)


def broken() -> None:
    raise RuntimeError("the engine is broken")


def test_exception_while_sampling_leaves_the_base_as_it_was(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    generation = trainer.vllm_generation
    with monkeypatch.context() as patch:
        patch.setattr(generation.llm.llm_engine, "step", broken)
        with pytest.raises(RuntimeError, match="the engine is broken"):
            answered(generation.llm, ASKED)
    assert base_is_as_before(trainer)
    assert samples_policy(trainer)


def test_interrupt_while_sampling_leaves_the_base_as_it_was(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    generation = trainer.vllm_generation
    step, calls = generation.llm.llm_engine.step, []

    def interrupted() -> Any:
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(generation.llm.llm_engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            answered(generation.llm, ASKED)
    assert base_is_as_before(trainer)
    assert samples_policy(trainer)


def test_a_call_whose_end_was_interrupted_leaves_the_base_as_it_was_once_the_run_has_ended(trainer: Any) -> None:
    """The adapter stayed in the weights of the trainer until something was sampled again."""
    generation = trainer.vllm_generation

    def serve() -> None:
        with generation.holder.serving(generation.active):
            pass

    # A signal, which has to wait while the weights are written.
    interrupts = Interrupts({"contextlib"}, lambda: os.kill(os.getpid(), signal.SIGINT))
    while not interrupts.is_over:
        generation.sync_weights()
        interrupts.call(serve)
        generation.close()
        assert base_is_as_before(trainer)
    assert len(interrupts.kept) > 3
    assert is_exact(trainer.model, answered(generation.llm, ASKED))


def test_training_samples_the_policy_at_each_step_and_again_after_its_end(trainer: Any) -> None:
    trainer.train()
    steps = [row for row in trainer.state.log_history if "lora_sync/version" in row]
    assert len(steps) >= 2
    assert all(row["sampling/sampling_logp_difference/max"] < 1e-4 for row in steps)
    assert all(row["lora_sync/verified"] == 1 for row in steps)
    assert base_is_as_before(trainer)
    trainer.model.eval()
    change(trainer)
    assert samples_policy(trainer)


def test_evaluation_samples_the_policy_of_the_moment(trainer: Any) -> None:
    change(trainer)
    found = trainer.evaluate()
    assert found["eval_sampling/sampling_logp_difference/max"] < 1e-4
    trainer.model.eval()


def test_weights_that_do_not_start_from_the_checkpoint_are_refused(
    base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were compared with the base that they had been written over, which lacks the same."""
    base = in_weights.placing.base_weights

    def reduced(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
        return {name: torch.nn.Parameter(weight.detach() * 0.5) for name, weight in base(model).items()}

    monkeypatch.setattr(in_weights.placing, "base_weights", reduced)
    with pytest.raises(VerificationError, match="computes something else with trial"):
        colocate_trainer(base_model, tmp_path, lora_sync_serving="fused")


@pytest.mark.parametrize(
    ("way", "changed"),
    [
        ("runtime", "mlp.down_proj"),
        ("fused", "mlp.down_proj"),
        # All bits of matrices are compared where these are shared.
        ("runtime, shared", "norm"),
        ("fused, shared", "norm"),
    ],
)
def test_a_base_that_differs_from_the_checkpoint_beside_the_adapter_is_refused(
    way: str, changed: str, base_model: Path, tmp_path: Path
) -> None:
    """Completions came from the checkpoint's layers, and every check passed."""
    model = AutoModelForCausalLM.from_pretrained(base_model, dtype=torch.float32)
    for name, value in model.named_parameters():
        if changed in name:
            value.data *= 1 + 0.02 * torch.randn(value.shape, generator=torch.Generator().manual_seed(1))
    with pytest.raises(VerificationError, match=r"base weights differ .* vLLM has loaded the checkpoint"):
        colocate_trainer(
            model,
            tmp_path,
            trainer_kwargs={"peft_config": lora(target_modules=["q_proj", "v_proj"])},
            model_init_kwargs=None,
            **WAYS.get(way, {}),
        )


def test_a_model_with_more_tokens_than_the_checkpoint_is_refused(base_model: Path, tmp_path: Path) -> None:
    """Log-probabilities were off by what the new tokens take, and vLLM refuses prompts with them."""
    model = AutoModelForCausalLM.from_pretrained(base_model, dtype=torch.float32)
    tokens = model.config.vocab_size
    model.resize_token_embeddings(tokens + 12)
    with pytest.raises(VerificationError, match=rf"has {tokens + 12} tokens, and vLLM's {tokens}, .*resize_token_emb"):
        colocate_trainer(model, tmp_path, model_init_kwargs=None)


# What cannot be shared


def test_base_that_differs_from_the_checkpoint_is_not_shared(base_model: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base_model, dtype=torch.float32)
    with torch.no_grad():
        model.get_submodule("model.layers.1.mlp.up_proj").weight[3, 4] += 2**-12
    with pytest.raises(UnsupportedSettingError, match=r"'model.layers.1.mlp.up_proj' holds other values in vLLM"):
        colocate_trainer(model, tmp_path, vllm_colocate_base="shared")


def test_start_line_gives_the_reason_for_a_second_copy(
    base_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = colocate_trainer(base_model, tmp_path)
    assert "with a second copy of the base (sharing it saves GPU memory, and this is a CPU)" in capsys.readouterr().out
    trainer.vllm_generation.close()


def test_base_in_another_dtype_is_not_shared_and_the_error_names_the_right_one(
    base_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedSettingError, match=r'set model_init_kwargs=\{"dtype": "bfloat16"\}'):
        colocate_trainer(base_model, tmp_path, vllm_colocate_base="shared", lora_sync_dtype="bfloat16")


def test_fused_is_refused_for_weights_that_vllm_has_packed(
    base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU build packs linear weights into a special form, unless these tests prevent that."""
    monkeypatch.setattr(in_weights.placing, "find", _fails)
    with pytest.raises(UnsupportedSettingError, match=r'"fused" cannot be used with this model.*"runtime"'):
        colocate_trainer(base_model, tmp_path, lora_sync_serving="fused")


def _fails(*_: Any) -> Any:
    raise in_weights.PlacementError("'model.layers.0.self_attn.q_proj' is nothing that the served model can load")


# Last, as each garbage collection takes longer afterwards.
def test_trainer_that_is_dropped_is_freed(base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps two hooks of each model that vLLM compiles, and vLLM removes one at most."""
    assert parts_left_of_a_dropped_trainer(base_model, tmp_path, monkeypatch, **WAYS["fused"]) == []
