"""Pieces of generation and sync that need no server."""

import copy
import inspect
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from accelerate import Accelerator
from contract.served import sampling, soon
from hypothesis import given
from hypothesis import strategies as st
from make_model import make_model
from peft import get_peft_model
from peft.helpers import rescale_adapter_scale
from peft.tuners.lora import LoraLayer
from PIL import Image
from safetensors.torch import load_file
from support.interrupts import Interrupts
from support.models import base_weights, lora, merged_model, peft_model, randomize_adapter
from support.policies import distance, is_policy_of, sample, token_ids
from support.trainers import grpo_trainer, mean_byte, prompts
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl.generation.vllm_client import VLLMClient

from trl_lora_sync.adapter.base_drift import BaseDrift, change_from_checkpoint
from trl_lora_sync.checks.server import is_same_model
from trl_lora_sync.engines.base import PromptGroup
from trl_lora_sync.engines.images import data_url
from trl_lora_sync.errors import LoRASyncError, ServerSetupError, UnsupportedAdapterError, UnsupportedSettingError
from trl_lora_sync.generation.client import RolloutClient, openai_messages
from trl_lora_sync.generation.server import group_rows
from trl_lora_sync.testing import ModelPolicy, in_memory_engines

rows = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=2), max_size=30)


@given(rows, st.integers(1, 4))
def test_groups_in_order_are_the_rows_in_order(prompts: list[list[int]], most: int) -> None:
    groups = group_rows(prompts, [None] * len(prompts), most)
    assert [group.prompt for group in groups for _ in range(group.count)] == prompts


@given(rows, st.integers(1, 4))
def test_a_run_of_equal_prompts_is_split_at_the_number_of_generations_only(prompts: list[list[int]], most: int) -> None:
    groups = group_rows(prompts, [None] * len(prompts), most)
    assert all(group.count <= most for group in groups)
    assert all(left.prompt != right.prompt or left.count == most for left, right in pairwise(groups))


def test_repeated_prompt_is_sampled_several_times_in_one_request() -> None:
    groups = group_rows([[1], [1], [1], [2], [2], [1]], [None] * 6, 4)
    assert [(group.prompt, group.count) for group in groups] == [([1], 3), ([2], 2), ([1], 1)]


def test_equal_prompts_with_different_images_stay_apart() -> None:
    red, blue = (Image.new("RGB", (2, 2), color) for color in ("red", "blue"))
    groups = group_rows([[1]] * 5, [[red], [red.copy()], [blue], None, None], 2)
    assert [(group.count, group.images is None) for group in groups] == [(2, False), (1, False), (2, True)]


def test_rows_and_images_of_different_lengths_are_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        group_rows([[1], [2]], [None], 1)


# Which base model

SNAPSHOT = "/home/user/.cache/huggingface/hub/models--Qwen--Qwen3-8B/snapshots/b968826d9c46dd6066d109eabc6255188de91218"


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("Qwen/Qwen3-8B", ("Qwen/Qwen3-8B",)),
        ("Qwen/Qwen3-8B", ("policy", "/models/Qwen3-8B")),
        ("Qwen/Qwen3-8B", ("policy", "/models/Qwen3-8B/")),
        ("/data/qwen3-8b", ("Qwen/Qwen3-8B", "x")),
        ("Qwen/Qwen3-8B", ("policy", SNAPSHOT)),
        (SNAPSHOT, ("Qwen/Qwen3-8B",)),
        (SNAPSHOT, ("policy", "/other" + SNAPSHOT)),
    ],
)
def test_names_that_end_alike_probably_mean_the_same_checkpoint(ours: str, theirs: tuple[str, ...]) -> None:
    assert is_same_model(ours, theirs)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("Qwen/Qwen3-8B", ("Qwen/Qwen3-4B", "/models/Qwen3-4B")),
        ("Qwen/Qwen3-8B", ("Qwen/Qwen3-8B-Base",)),
        ("Qwen/Qwen3-8B", ("Qwen3-8B/other",)),
        ("Qwen/Qwen3-8B", ()),
    ],
)
def test_other_names_do_not(ours: str, theirs: tuple[str, ...]) -> None:
    assert not is_same_model(ours, theirs)


def test_words_of_a_server_are_never_opened_as_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a path was opened")

    for name in ("stat", "exists", "resolve", "open"):
        monkeypatch.setattr(Path, name, refuse)
    monkeypatch.setattr("builtins.open", refuse)
    monkeypatch.setattr("os.stat", refuse)
    assert not is_same_model("Qwen/Qwen3-8B", ("/etc/passwd", "../../secret"))


# Messages of rollout functions


def test_chat_takes_the_arguments_of_trls_client_in_their_order() -> None:
    """A rollout function that limits its requests, as TRL's client lets it, failed with a TypeError within a step."""
    ours, trls = (list(inspect.signature(one.chat).parameters) for one in (RolloutClient, VLLMClient))
    assert ours[: len(trls)] == trls


@pytest.mark.parametrize("kind", ["image", "image_pil"])
def test_images_in_messages_become_data_urls(kind: str) -> None:
    image = Image.new("RGB", (2, 2), "red")
    conversation = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": kind, kind: image}, {"type": "text", "text": "what is it?"}]},
    ]
    assert openai_messages(conversation) == [
        {"role": "system", "content": "be brief"},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": data_url(image)}},
                {"type": "text", "text": "what is it?"},
            ],
        },
    ]
    assert conversation[1]["content"][0] == {"type": kind, kind: image}, "the caller's messages were changed"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "assistant", "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://host/x.png"}}]},
    ],
)
def test_other_messages_stay_as_they_are(message: dict) -> None:
    assert openai_messages([message]) == [message]


@pytest.mark.outside
def test_scaling_that_changes_for_a_while_is_published_and_so_is_its_return(tmp_path: Path) -> None:
    """The matrices stay the same, and completions came from a policy that the trainer did not have at the moment."""
    model, versions = make_model(tmp_path / "tiny"), []
    with in_memory_engines(model_path=model) as [engine]:
        trainer = grpo_trainer(engine.base_url, model, tmp_path, peft_config=lora(target_modules=["q_proj", "v_proj"]))
        trainer.model.eval()
        randomize_adapter(trainer.model, seed=1, std=0.3)

        def samples_policy() -> bool:
            rows = sample(trainer.vllm_generation, [token_ids(1)])
            versions.append(trainer.vllm_generation.active_name.rpartition("-")[2])
            return is_policy_of(trainer.model, rows)

        assert samples_policy()
        with rescale_adapter_scale(trainer.model, 0.5):
            assert samples_policy()
            assert samples_policy()
        assert samples_policy()
        assert versions == ["v1", "v2", "v2", "v3"]
        trainer.vllm_generation.close()


@pytest.mark.outside
def test_a_batch_whose_end_was_interrupted_pins_no_version(tmp_path: Path) -> None:
    """The next evaluations sampled from the version of the first one, after the weights had changed as well."""
    model, interrupts = make_model(tmp_path / "tiny"), Interrupts({"contextlib"})
    with in_memory_engines(model_path=model) as [engine]:
        trainer = grpo_trainer(engine.base_url, model, tmp_path, lora_sync_overlap=1)
        generation = trainer.vllm_generation
        trainer.model.eval()

        def begin_and_end() -> None:
            with generation.training_batch(None):
                pass

        while not interrupts.is_over:
            interrupts.call(begin_and_end)
            generation.close()
            for seed in (interrupts.place, interrupts.place + 1):
                randomize_adapter(trainer.model, seed=seed, std=0.3)
                assert is_policy_of(trainer.model, sample(generation, [token_ids(1)]))
        assert len(interrupts.kept) > 2
        generation.close()


@pytest.mark.outside
def test_a_sampling_field_that_is_changed_in_place_counts_for_the_batch_that_is_sampled_ahead(tmp_path: Path) -> None:
    """That batch was sampled with the old value, or partly with the new one, and trained on without a warning."""
    model, seen = make_model(tmp_path / "tiny"), []

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        seen.append(completions)
        return mean_byte(completions)

    class IsGreedyAfterwards(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            trainer.vllm_generation.generation_kwargs["top_k"] = 1

    with in_memory_engines(model_path=model) as [engine]:
        fields = {"lora_sync_overlap": 1, "generation_kwargs": {"top_k": 100}}
        trainer = grpo_trainer(engine.base_url, model, tmp_path, reward_funcs=reward, max_steps=3, **fields)
        trainer.add_callback(IsGreedyAfterwards())
        trainer.train()
    assert [len(set(completions)) > 1 for completions in seen] == [True, False, False]
    logged = [entry["lora_sync/version_lag"] for entry in trainer.state.log_history if "lora_sync/version_lag" in entry]
    assert logged == [0, 0, 1]


def check_served_after(change: Callable[[Any], object], model: Any, folder: Path) -> None:
    """Train, change the adapters of the model, and train again, for which the server is checked again."""
    with in_memory_engines(model_path=folder / "model") as [engine]:
        trainer = grpo_trainer(engine.base_url, model, folder, peft_config=None)
        trainer.train()
        change(trainer.model)
        trainer.optimizer = trainer.lr_scheduler = None  # which belong to the adapter of before
        trainer.train()
        trainer.model.eval()
        assert is_policy_of(trainer.model, sample(trainer.vllm_generation, [token_ids(1)]))
        trainer.vllm_generation.close()


@pytest.mark.outside
@pytest.mark.parametrize(
    ("kept", "chosen", "expected"),
    [
        ([torch.bfloat16, torch.bfloat16], "auto", torch.bfloat16),
        ([torch.float16, torch.bfloat16], "auto", torch.float32),
        ([None, torch.bfloat16], "auto", torch.float32),
        ([torch.bfloat16, torch.bfloat16], "float16", torch.float16),
    ],
    ids=str,
)
def test_versions_are_written_in_the_dtype_that_all_servers_keep_unless_one_is_chosen(
    kept: list[torch.dtype | None], chosen: str, expected: torch.dtype, tmp_path: Path
) -> None:
    """The base is in float32, and a server that keeps adapters in another dtype would cast each version."""
    model = make_model(tmp_path / "model")
    with in_memory_engines(2, model_path=model) as engines:
        for engine, dtype in zip(engines, kept, strict=True):
            known = replace(engine.capabilities, lora_dtype=dtype)
            engine.__class__ = type("Telling", (type(engine),), {"capabilities": known})
        urls = ",".join(engine.base_url for engine in engines)
        trainer = grpo_trainer(urls, model, tmp_path, lora_sync_dtype=chosen)
        generation = trainer.vllm_generation
        generation.sync_weights()
        written = load_file(generation.sync.active.path / "adapter_model.safetensors")
        assert {tensor.dtype for tensor in written.values()} == {expected}
        generation.close()


@pytest.mark.outside
@pytest.mark.parametrize("fields", [{"lora_alpha": 32}, {"r": 16}, {"target_modules": ["down_proj"]}], ids=str)
def test_a_server_is_checked_again_after_another_adapter_was_activated(fields: dict[str, Any], tmp_path: Path) -> None:
    """Its trial had the shapes and scalings of the new adapter, and the expected scores of the first."""
    model = peft_model(make_model(tmp_path / "model"))
    model.add_adapter("other", lora(**fields))
    check_served_after(lambda model: model.set_adapter("other"), model, tmp_path)


@pytest.mark.outside
def test_a_server_is_checked_again_after_the_adapter_was_made_again_with_another_rank(tmp_path: Path) -> None:
    """With the same scaling. The trial had the new shapes, and the expected scores were of the first adapter."""

    def change(model: Any) -> None:
        scaling = model.peft_config["default"].lora_alpha / model.peft_config["default"].r
        model.delete_adapter("default")
        model.add_adapter("default", lora(r=16, lora_alpha=int(16 * scaling)))
        model.set_adapter("default")

    check_served_after(change, peft_model(make_model(tmp_path / "model")), tmp_path)


@pytest.mark.outside
def test_threads_that_sample_a_changed_adapter_share_one_sync(tmp_path: Path) -> None:
    """Each thread saw the change, and each published it."""
    model, threads = make_model(tmp_path / "tiny"), 4
    with in_memory_engines(model_path=model) as [engine]:
        trainer = grpo_trainer(engine.base_url, model, tmp_path, peft_config=lora(target_modules=["q_proj", "v_proj"]))
        generation, together = trainer.vllm_generation, threading.Barrier(threads)
        generation.sync_weights()
        randomize_adapter(trainer.model, seed=1, std=0.3)

        def sample_in_thread() -> None:
            together.wait(10)
            generation.vllm_client.generate([[1, 2, 3]])

        with ThreadPoolExecutor(threads) as pool:
            for running in [pool.submit(sample_in_thread) for _ in range(threads)]:
                running.result(30)
        versions = [name.rpartition("-")[2] for method, name in engine.calls if method == "load"]
        assert [version for version in versions if version[1:].isdigit()] == ["v1", "v2"]
        generation.close()


@pytest.mark.outside
@pytest.mark.parametrize("end", ["an interrupt", "an early end"])
def test_a_training_after_one_that_ended_within_a_batch_begins_with_samples_of_its_own_policy(
    end: str, tmp_path: Path
) -> None:
    """It went on with the samples of the policy before, also from another checkpoint, and was out of step since."""

    class End(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if end == "an interrupt":
                raise KeyboardInterrupt
            control.should_training_stop = True

    sampled_at: list[int] = []

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        sampled_at.append(trainer.state.global_step)
        return mean_byte(completions)

    model = make_model(tmp_path / "tiny")
    with in_memory_engines(model_path=model) as [engine]:
        trainer = grpo_trainer(
            engine.base_url,
            model,
            tmp_path,
            peft_config=lora(target_modules=["q_proj", "v_proj"]),
            reward_funcs=reward,
            steps_per_generation=2,
            trainer_kwargs={"callbacks": [End()]},
        )
        with suppress(KeyboardInterrupt):
            trainer.train()
        trainer.remove_callback(End)

        trainer.train()

    assert sampled_at == [0, 0, 2]


def put_another_adapter(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    model.load_adapter(folder, "other", is_trainable=True)
    model.set_adapter("other")


def put_the_adapter_again(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    model.delete_adapter("default")
    model.load_adapter(folder, "default", is_trainable=True)
    model.set_adapter("default")


@pytest.mark.outside
@pytest.mark.parametrize("when", ["between two trainings", "in a training"])
@pytest.mark.parametrize("change", [put_another_adapter, put_the_adapter_again])
def test_an_adapter_that_the_optimizer_lacks_is_not_sampled_as_if_it_were_trained(
    change: Callable[[Any, Path], None], when: str, tmp_path: Path
) -> None:
    """Versions, gradients and rewards looked right, while no weight changed."""

    class Change(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            change(trainer.model, tmp_path / "adapter")

    model = make_model(tmp_path / "tiny")
    with in_memory_engines(model_path=model) as [engine]:
        trainer = grpo_trainer(
            engine.base_url, model, tmp_path, peft_config=lora(target_modules=["q_proj", "v_proj"]), max_steps=2
        )
        if when == "in a training":
            trainer.add_callback(Change())
        else:
            trainer.train()
            change(trainer.model, tmp_path / "adapter")

        with pytest.raises(UnsupportedSettingError, match="would be sampled and never trained"):
            trainer.train()


@pytest.mark.outside
def test_weights_that_are_loaded_into_the_trained_adapter_are_trained_on(tmp_path: Path) -> None:
    model = make_model(tmp_path / "tiny")
    with in_memory_engines(model_path=model) as [engine]:
        trainer = grpo_trainer(
            engine.base_url, model, tmp_path, peft_config=lora(target_modules=["q_proj", "v_proj"]), max_steps=1
        )
        trainer.train()
        trainer.model.save_pretrained(tmp_path / "adapter")
        trainer.model.load_adapter(tmp_path / "adapter", "default", is_trainable=True)
        before = {name: value.clone() for name, value in trainer.model.named_parameters() if "lora_B" in name}

        trainer.train()

        after = dict(trainer.model.named_parameters())
    assert all(not torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.outside
def test_a_loop_that_a_user_has_written_needs_no_optimizer_of_the_trainer(tmp_path: Path) -> None:
    model = make_model(tmp_path / "tiny")
    with in_memory_engines(model_path=model) as [engine]:
        trainer = grpo_trainer(
            engine.base_url, model, tmp_path, peft_config=lora(target_modules=["q_proj", "v_proj"]), max_steps=1
        )
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        batch = next(iter(trainer.get_train_dataloader()))
        assert trainer.training_step(trainer.model, batch, num_items_in_batch=None).isfinite()
        trainer.vllm_generation.close()


@pytest.mark.outside
def test_a_server_that_restarts_is_checked_while_trl_computes_without_the_adapter(tmp_path: Path) -> None:
    """What was sampled ahead failed if its server restarted beside the reference model's log-probabilities."""
    policy = ModelPolicy(make_model(tmp_path / "tiny"))
    with in_memory_engines(1, tmp_path / "tiny", policy=policy, shapes=policy.shapes) as [engine]:
        trainer = grpo_trainer(
            engine.base_url, tmp_path / "tiny", tmp_path, peft_config=lora(target_modules=["q_proj", "v_proj"])
        )
        generation = trainer.vllm_generation
        generation.sync_weights()
        engine.restart()
        with trainer.model.disable_adapter():
            groups = [PromptGroup(prompt=[1, 2, 3], count=1)]
            [[found]] = generation.sync.generate(generation.active_name, groups, sampling(), soon())
        assert found.prompt_ids == [1, 2, 3]
        assert [name for method, name in engine.calls if method == "load"][-1] == generation.active_name
        generation.close()


# What is trained beside the adapter


def unfreeze_norms(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.requires_grad_(True)


@pytest.mark.outside
def test_base_weights_that_are_trained_beside_the_adapter_are_refused(tmp_path: Path) -> None:
    """The servers kept the checkpoint's norms, and every sync was reported as verified."""
    model = peft_model(make_model(tmp_path / "model"))
    refused = pytest.raises(UnsupportedAdapterError, match=r"that trains 'model.*norm.weight' and \d+ more.*Freeze all")
    with in_memory_engines(model_path=tmp_path / "model") as [engine]:
        trainer = grpo_trainer(engine.base_url, model, tmp_path, peft_config=None)
        # After the checks of the start, but the optimizer takes them as well.
        unfreeze_norms(trainer.model)
        with refused:
            trainer.train()
        with refused:
            grpo_trainer(engine.base_url, model, tmp_path, peft_config=None)


@pytest.mark.outside
def test_base_weights_that_are_unfrozen_in_the_middle_of_a_training_are_refused(tmp_path: Path) -> None:
    """With an optimizer of all parameters they were trained from then on, and the servers kept the checkpoint's."""
    model = peft_model(make_model(tmp_path / "model"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    class Unfreeze(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                unfreeze_norms(model)

    optimizers = (optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0))
    with in_memory_engines(model_path=tmp_path / "model") as [engine]:
        given = {"optimizers": optimizers, "callbacks": [Unfreeze()]}
        trainer = grpo_trainer(engine.base_url, model, tmp_path, peft_config=None, trainer_kwargs=given)
        with pytest.raises(UnsupportedAdapterError, match=r"that trains 'model.*norm.weight' and \d+ more"):
            trainer.train()
        assert trainer.state.global_step == 1


@pytest.mark.outside
@pytest.mark.parametrize("act", ["train", "evaluate"])
def test_a_model_that_is_put_into_a_built_trainer_is_refused(act: str, tmp_path: Path) -> None:
    """With TRL 1.11 to 1.14 the new model was trained, and completions came from the old one's adapter."""
    model = make_model(tmp_path / "model")
    with in_memory_engines(model_path=model) as [engine]:
        trainer = grpo_trainer(engine.base_url, model, tmp_path, eval_dataset=prompts())
        trainer.model = trainer.model_wrapped = peft_model(model)
        with pytest.raises(UnsupportedSettingError, match=r"trainer\.model was replaced .*load_adapter"):
            getattr(trainer, act)()


@pytest.mark.outside
@pytest.mark.parametrize("shard", ["50GB", "50KB"], ids=["one file", "several files"])
def test_a_base_that_an_adapter_was_merged_into_is_refused_where_the_checkpoint_is_served(
    shard: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Log-probabilities differ too little to show it. TRL's own sync sends the merged base."""
    model = make_model(tmp_path / "model")
    whole = AutoModelForCausalLM.from_pretrained(model)
    (model / "model.safetensors").unlink()
    whole.save_pretrained(model, max_shard_size=shard)
    assert (model / "model.safetensors.index.json").exists() == (shard == "50KB")
    with in_memory_engines(model_path=model) as [engine]:
        with pytest.raises(
            ServerSetupError, match=r"base weights differ from the checkpoint .* by 0\.0\d+ of .*FOLDER"
        ):
            grpo_trainer(engine.base_url, merged_model(model, 0.02), tmp_path)
        grpo_trainer(engine.base_url, merged_model(model, 0.02), tmp_path, lora_sync_verify="off")
        assert "base weights differ from the checkpoint" in caplog.text
        # What rounding leaves, as of a model that was in bfloat16 for a while.
        rounded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).float()
        for base in (merged_model(model, 0.0), merged_model(model, 0.001), rounded):
            grpo_trainer(engine.base_url, base, tmp_path)


@pytest.mark.parametrize(
    "name", ["model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj", "lm_head", "model.norm"]
)
def test_any_weight_that_is_not_the_one_of_the_checkpoint_is_noticed(name: str, tmp_path: Path) -> None:
    """Only the weights below the adapter were compared, as if an earlier stage had trained the same modules."""
    base = AutoModelForCausalLM.from_pretrained(make_model(tmp_path / "model"), dtype=torch.float32)
    module = base.get_submodule(name)
    model = get_peft_model(base, lora(target_modules=["q_proj"]))
    layers = [one for one in model.modules() if isinstance(one, LoraLayer)]
    assert change_from_checkpoint(model) == ""
    module.weight.data *= 1.02
    assert "base weights differ" in change_from_checkpoint(model)
    # What the layers have that are served as the trainer has them does not matter.
    assert ("base weights differ" in change_from_checkpoint(model, layers)) == (not name.endswith("q_proj"))


@pytest.mark.outside
def test_settings_that_the_checkpoint_lacks_are_named_with_how_servers_get_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model(tmp_path / "model")
    with in_memory_engines(model_path=model) as [engine]:
        grpo_trainer(engine.base_url, model, tmp_path, model_init_kwargs={"dtype": "float32", "use_cache": False})
        assert "--hf-overrides" not in caplog.text
        grpo_trainer(engine.base_url, model, tmp_path, model_init_kwargs={"dtype": "float32", "sliding_window": 64})
        assert """--hf-overrides '{"sliding_window": 64}' (vLLM)""" in caplog.text


@pytest.mark.outside
@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_a_merged_base_is_refused_also_where_an_initialisation_has_changed_it_since(init: str, tmp_path: Path) -> None:
    """The weights below the adapter were not compared, as they lack the initial adapter."""
    model, peft_config = make_model(tmp_path / "model"), lora(init_lora_weights=init)
    with in_memory_engines(model_path=model) as [engine]:
        for dtype in (torch.float32, torch.bfloat16):
            base = merged_model(model, 0.0).to(dtype)
            grpo_trainer(engine.base_url, base, tmp_path, peft_config=peft_config).vllm_generation.close()
            with pytest.raises(ServerSetupError, match="base weights differ from the checkpoint"):
                grpo_trainer(engine.base_url, merged_model(model, 0.05).to(dtype), tmp_path, peft_config=peft_config)


@pytest.mark.outside
def test_files_that_lie_beside_those_of_a_checkpoint_are_not_compared_with_the_base(tmp_path: Path) -> None:
    """As a download into a folder leaves them, once a repository has new weights in fewer files."""
    model, earlier = make_model(tmp_path / "model"), tmp_path / "earlier"
    merged_model(model, 0.02).save_pretrained(earlier)
    whole = AutoModelForCausalLM.from_pretrained(model)
    (model / "model.safetensors").unlink()
    whole.save_pretrained(model, max_shard_size="50KB")
    shutil.copy(earlier / "model.safetensors", model / "model-00099-of-00099.safetensors")
    base = AutoModelForCausalLM.from_pretrained(model)
    with in_memory_engines(model_path=model) as [engine]:
        grpo_trainer(engine.base_url, base, tmp_path).vllm_generation.close()


@pytest.mark.outside
def test_a_model_in_another_dtype_than_its_checkpoint_is_not_taken_for_a_changed_base(tmp_path: Path) -> None:
    """In float16, numbers below 6e-5 lose bits that they have in bfloat16, and a row of such numbers counts too."""
    model = make_model(tmp_path / "model")
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    whole.model.layers[0].self_attn.q_proj.weight.data[0] *= 1e-5
    whole.save_pretrained(model)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float16)
    with in_memory_engines(model_path=model) as [engine]:
        grpo_trainer(engine.base_url, base, tmp_path).vllm_generation.close()


class FP8Linear(nn.Linear):
    """As in a checkpoint in FP8, whose backward pass Transformers (5.24) has for adapters."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__(whole.in_features, whole.out_features, bias=False)
        self.scale = float(whole.weight.detach().abs().max()) / torch.finfo(torch.float8_e4m3fn).max
        self.weight = nn.Parameter((whole.weight.detach() / self.scale).to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden, self.weight.to(hidden.dtype) * self.scale)


@pytest.mark.outside
def test_a_base_of_which_some_layers_are_in_fp8_is_trained(tmp_path: Path) -> None:
    """The comparison with the base of the start ended the run with an error of torch about their dtypes."""
    model = make_model(tmp_path / "model")
    base = AutoModelForCausalLM.from_pretrained(model)
    for layer in base.model.layers:
        layer.self_attn.q_proj = FP8Linear(layer.self_attn.q_proj)
    with in_memory_engines(model_path=model) as [engine]:
        trainer = grpo_trainer(engine.base_url, base, tmp_path, lora_sync_verify="off")
        trainer.train()
        trainer.vllm_generation.close()


@pytest.mark.outside
def test_a_changed_base_that_is_served_from_its_own_folder_under_the_name_of_the_checkpoint_is_taken_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was refused with the claim that the server has the checkpoint."""
    model, merged = make_model(tmp_path / "model"), tmp_path / "merged"
    base = merged_model(model, 0.02)
    base.save_pretrained(merged)
    AutoTokenizer.from_pretrained(model).save_pretrained(merged)
    with in_memory_engines(model_path=merged, served_model_name=str(model)) as [engine]:
        trainer = grpo_trainer(engine.base_url, base, tmp_path)
        assert f"serves {str(model)!r} ({merged})" in caplog.text
        trainer.train()
        trainer.model.eval()
        assert is_policy_of(trainer.model, sample(trainer.vllm_generation, [token_ids(1)]))
        trainer.vllm_generation.close()


@pytest.mark.outside
def test_a_checkpoint_of_the_hub_is_compared_as_it_was_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, downloads = make_model(tmp_path / "model"), tmp_path / "hub" / "models--org--model"
    shutil.copytree(model, downloads / "snapshots" / "0123")
    (downloads / "refs").mkdir()
    (downloads / "refs" / "main").write_text("0123")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    base, tokenizer = merged_model(model, 0.02), AutoTokenizer.from_pretrained(model)
    with in_memory_engines(model_path=model) as [engine]:
        base.name_or_path = base.config.name_or_path = "org/absent/model"
        grpo_trainer(engine.base_url, base, tmp_path, trainer_kwargs={"processing_class": tokenizer})
        base = merged_model(model, 0.02)
        base.name_or_path = base.config.name_or_path = "org/model"
        with pytest.raises(ServerSetupError, match="base weights differ from the checkpoint 'org/model'"):
            grpo_trainer(engine.base_url, base, tmp_path, trainer_kwargs={"processing_class": tokenizer})


def merge_for_good(model: Any) -> None:
    """As ReLoRA does between two of its stages."""
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            layer.merge()
            layer.merged_adapters.clear()
            layer.reset_lora_parameters("default", True)


def put_other_base_layers(model: Any) -> None:
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            layer.base_layer = copy.deepcopy(layer.get_base_layer())
            layer.base_layer.weight.data += 0.1


def put_other_base_weights(model: Any) -> None:
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            base_layer = layer.get_base_layer()
            base_layer.weight = nn.Parameter(base_layer.weight.detach() + 0.1, requires_grad=False)


@pytest.mark.outside
@pytest.mark.parametrize("change", [merge_for_good, put_other_base_layers, put_other_base_weights])
def test_a_base_that_was_changed_for_good_is_refused_until_it_is_back(
    change: Callable[[Any], None], tmp_path: Path
) -> None:
    """The servers kept the checkpoint's base, and completions came from the policy of before the merges."""
    model = make_model(tmp_path / "model")
    with in_memory_engines(model_path=model) as [engine]:
        trainer = grpo_trainer(engine.base_url, model, tmp_path)
        randomize_adapter(trainer.model, seed=1)
        trainer.train()
        before = base_weights(trainer.model)
        change(trainer.model)
        for _ in range(2):
            with pytest.raises(UnsupportedAdapterError, match=r"base weights .*have changed .*Merge a copy"):
                trainer.train()
        trainer.model.load_state_dict(before, strict=False)
        trainer.train()


@pytest.mark.outside
def test_what_undone_merges_leave_is_served_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model(tmp_path / "model")
    with in_memory_engines(model_path=model) as [engine]:
        trainer = grpo_trainer(engine.base_url, model, tmp_path)
        randomize_adapter(trainer.model, seed=1)
        trainer.train()
        assert "base weights" not in caplog.text
        trainer.model.merge_adapter()
        trainer.model.unmerge_adapter()
        trainer.train()
        assert caplog.text.count("base weights below the adapter have changed") == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_many_undone_merges_leave_adds_up_and_a_change_for_good_is_seen_after_them(dtype: torch.dtype) -> None:
    """A run that trains an adapter and undoes a merge of it at each step ended after 45 of them."""
    random = torch.Generator().manual_seed(0)
    layer, drift = nn.Linear(2048, 2, bias=False, dtype=dtype), BaseDrift()
    weight = layer.weight.data
    adapter = torch.zeros_like(weight, dtype=torch.float32)
    drift.has_moved([layer])
    for _ in range(400):
        adapter += 1e-3 * torch.randn(adapter.shape, generator=random) * weight.float().std()
        adapter_now = 0.1 * torch.randn(adapter.shape, generator=random) * weight.float().std() + adapter
        weight += adapter_now.to(dtype)
        weight -= adapter_now.to(dtype)
        drift.has_moved([layer])
        assert drift.is_rounding
    weight += (0.1 * weight.float().std()).to(dtype)
    for _ in range(2):
        drift.has_moved([layer])
        assert not drift.is_rounding


@pytest.mark.parametrize("kind", ["4 bits", "4 bits, scales quantised", "8 bits"])
def test_a_quantised_base_that_was_merged_into_has_other_scales(kind: str) -> None:
    """Stand-ins for the weights of bitsandbytes. Nothing was compared, and a merge for good went unnoticed."""

    def quantised(scales: torch.Tensor) -> nn.Module:
        layer = nn.Module()
        layer.weight = nn.Parameter(torch.zeros(64, 1, dtype=torch.uint8), requires_grad=False)
        if kind == "8 bits":
            layer.weight.SCB = scales
        else:
            own = SimpleNamespace(nested=False, absmax=scales)
            codes = torch.zeros(len(scales), dtype=torch.uint8)
            is_nested = kind != "4 bits"
            layer.weight.quant_state = SimpleNamespace(nested=True, absmax=codes, state2=own) if is_nested else own
        return layer

    drift, scales = BaseDrift(), torch.rand(500) + 0.5
    assert not drift.has_moved([quantised(scales)])
    assert not drift.has_moved([quantised(scales.clone())])
    assert drift.has_moved([quantised(scales + 1e-4)])
    assert drift.is_rounding
    assert drift.has_moved([quantised(1.01 * scales)])
    assert not drift.is_rounding


# Servers that are asleep


@pytest.mark.outside  # the configuration checks if the server's address is on this host
@pytest.mark.parametrize("keeps_adapters", [True, False])
def test_what_a_client_samples_wakes_the_servers(
    keeps_adapters: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollout function or a callback sampled from a server without a KV cache, and the run ended."""
    policy = ModelPolicy(make_model(tmp_path / "model"))
    with in_memory_engines(1, tmp_path / "model", policy=policy, shapes=policy.shapes) as [engine]:
        trainer = grpo_trainer(
            engine.base_url, tmp_path / "model", tmp_path, vllm_server_sleep="kv_cache", lora_sync_verify="off"
        )
        generation, restore = trainer.vllm_generation, engine.restore_kv_cache

        async def restored(deadline: Any) -> bool:
            if not keeps_adapters:
                engine.restart()
            await restore(deadline)
            return keeps_adapters

        monkeypatch.setattr(engine, "restore_kv_cache", restored)
        generation.sync_weights()
        name = generation.active_name

        def is_policy() -> bool:
            found = generation.vllm_client.generate([[1, 2, 3]], max_tokens=6)
            logprobs = torch.tensor([place[0] for place in found["logprobs"][0]])
            return bool(distance(trainer.model, [([1, 2, 3], found["completion_ids"][0], logprobs)]).max() < 1e-3)

        generation.sleep()
        if not keeps_adapters:
            with monkeypatch.context() as patch:
                patch.setattr(Accelerator, "num_processes", 2)
                for _ in range(2):  # the second finds the server awake
                    with pytest.raises(LoRASyncError, match=r"KV cache.*sync_weights\(\) on every process"):
                        is_policy()
        assert is_policy()
        assert (generation.active_name == name) == keeps_adapters
        assert is_policy()
        generation.close()
