"""Live tier: with `lora_sync_overlap=1` each batch comes from one version, that of the batch before, or is cancelled.

The proxy records the model that each request names, and what the server answered.
"""

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from conftest import FUSED_KEY
from support.policies import NOISE_MEAN
from support.servers import Proxy, adapters_on, is_scoring, version_of
from support.trainers import grpo_trainer, mean_byte, prompts, steps_of, wait_for_unloads
from transformers import AutoTokenizer, TrainerCallback
from trl.chat_template_utils import qwen3_template
from vllm_server import VLLMServer

from live.test_generation import TOOL_TEMPLATE
from trl_lora_sync import GRPOTrainer
from trl_lora_sync.errors import LoRASyncError, ServerSetupError

Make = Callable[..., GRPOTrainer]
TWELVE = [f"{word} {number}" for number, word in enumerate(["one", "two", "sea", "rain", "bread", "old"] * 2)]
LAG, WAIT, HIDDEN, MASKED = (f"lora_sync/{name}" for name in ("version_lag", "overlap_wait_s", "overlap_hidden", "overlap_masked"))  # fmt: skip  # noqa: E501


def overlapping(**changes: Any) -> dict[str, Any]:
    return {"lora_sync_overlap": 1, "train_dataset": prompts(TWELVE), **changes}


def sampled_versions(proxy: Proxy, trainer: GRPOTrainer) -> list[tuple[str, int]]:
    """For each prompt that was sampled, in order of the requests: its text and the requested version."""
    return [
        (trainer.processing_class.decode(prompt, skip_special_tokens=True), version_of(request["model"]) or 0)
        for request in proxy.generations()
        for prompt in request["prompt"]
    ]


class Seen:
    """A reward function that notes the prompts of each batch, and the random state they were scored at."""

    __name__ = "seen"

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.random_states: list[int] = []

    def __call__(self, prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        self.batches.append(list(prompts))
        self.random_states.append(hash(bytes(torch.get_rng_state().tolist())))
        return mean_byte(completions)


def test_each_batch_is_sampled_from_the_version_that_was_newest_when_the_one_before_was_taken(
    make_trainer: Make, proxy: Proxy, base_model: Path
) -> None:
    seen = Seen()
    trainer = make_trainer(proxy.base_url, base_model, max_steps=6, reward_funcs=seen, **overlapping())

    trainer.train()

    order = [batch[0] for batch in seen.batches]
    assert sampled_versions(proxy, trainer) == list(zip(order, [1, 1, 2, 3, 4, 5], strict=True))
    steps = steps_of(trainer)
    assert [step["lora_sync/version"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert [step[LAG] for step in steps] == [0, 1, 1, 1, 1, 1]
    assert steps[0][HIDDEN] == 0
    assert all(0 <= step[HIDDEN] <= 1 and step[WAIT] >= 0 and 0 <= step[MASKED] <= 1 for step in steps)
    # The trainer's own log-probabilities are of the newer weights, so they are further from the sampled ones.
    gaps = [step["sampling/sampling_logp_difference/mean"] for step in steps]
    assert gaps[0] < NOISE_MEAN < max(gaps[1:])


@pytest.mark.parametrize(
    ("changes", "versions"),
    [
        ({"gradient_accumulation_steps": 2}, [1, 1, 2, 3]),
        # Two generations in each step.
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 1}, [1, 1, 1, 2, 2, 3, 3, 4]),
        ({"num_iterations": 2}, [1, 1]),
    ],
    ids=["accumulation", "two generations a step", "two iterations"],
)
def test_the_next_batch_is_found_however_steps_and_generations_are_cut(
    changes: dict[str, Any], versions: list[int], make_trainer: Make, proxy: Proxy, base_model: Path
) -> None:
    seen = Seen()
    trainer = make_trainer(proxy.base_url, base_model, max_steps=4, reward_funcs=seen, **overlapping(**changes))

    trainer.train()

    order = [dict.fromkeys(batch) for batch in seen.batches]
    asked = iter(sampled_versions(proxy, trainer))
    for version, batch in zip(versions, order, strict=True):
        # The requests of one batch are sent at the same time.
        assert sorted(islice(asked, len(batch))) == sorted((text, version) for text in batch)
    assert not list(asked)


def test_a_resumed_run_goes_on_with_the_prompts_that_it_would_have_had_without_overlap(
    make_trainer: Make, clean_server: VLLMServer, base_model: Path, tmp_path: Path
) -> None:
    found = []
    for overlap in (0, 1):
        folder, batches = tmp_path / str(overlap), []
        for resume in (False, True):
            seen = Seen()
            trainer = make_trainer(
                clean_server.base_url,
                base_model,
                folder,
                reward_funcs=seen,
                train_dataset=prompts(TWELVE),
                lora_sync_overlap=overlap,
                max_steps=6 if resume else 3,
                save_strategy="steps",
                save_steps=3,
                max_completion_length=4,
            )
            trainer.train(resume_from_checkpoint=resume)
            batches.append((seen.batches, seen.random_states))
        found.append(batches)

    assert found[0] == found[1]
    assert [step[LAG] for step in steps_of(trainer)[-3:]] == [0, 1, 1]


def test_an_evaluation_neither_takes_nor_cancels_the_batch_that_is_sampled_ahead(
    make_trainer: Make, proxy: Proxy, base_model: Path
) -> None:
    """It has the prompts of the training, and a separate sync at each step, so versions are retired meanwhile."""
    seen = Seen()
    trainer = make_trainer(
        proxy.base_url,
        base_model,
        max_steps=4,
        reward_funcs=seen,
        eval_dataset=prompts(TWELVE[:3]),
        per_device_eval_batch_size=4,
        eval_strategy="steps",
        eval_steps=1,
        gradient_accumulation_steps=2,
        steps_per_generation=4,  # a batch for two steps, so that two syncs of evaluations come while it is ahead
        **overlapping(),
    )

    trainer.train()

    assert [entry[LAG] for entry in trainer.state.log_history if LAG in entry] == [0, 1]
    asked = sampled_versions(proxy, trainer)
    texts = [text for batch in seen.batches for text in dict.fromkeys(batch)]
    # Each evaluation samples its prompts once, and each training batch its own once.
    assert sorted(text for text, _ in asked) == sorted(texts)


def test_a_version_that_is_sampled_from_outlasts_lora_sync_keep_and_is_retired_afterwards(
    make_trainer: Make, proxy: Proxy, base_model: Path
) -> None:
    """Three syncs come while a batch is held up on the server, on which only two versions are to stay."""
    held, released = threading.Event(), threading.Event()
    trainer = make_trainer(proxy.base_url, base_model, max_steps=3, **overlapping())
    generation = trainer.vllm_generation

    def hold(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/v1/completions" and body["prompt"] == [[8, 9]]:
            held.set()
            assert released.wait(60)
        return body

    proxy.before = hold
    generation.sync_weights()
    with generation.training_batch([[5, 6, 7]] * 4):
        generation.generate([[1, 2, 3]] * 4, None, num_generations=4)
    with generation.training_batch([[8, 9]] * 4) as batch:
        generation.generate([[5, 6, 7]] * 4, None, num_generations=4)
    assert batch.figures.version_lag == 1
    assert held.wait(60)
    for _ in range(3):
        generation.sync_weights()
    wait_for_unloads(trainer)

    assert {version_of(name) for name in adapters_on(proxy.base_url)} == {1, 3, 4}
    folders = {version_of(path.name) for path in Path(trainer.args.lora_sync_dir).glob("*/*-v*")}
    assert {1, 3, 4} <= folders
    released.set()
    with generation.training_batch(None) as batch:
        rows = generation.generate([[8, 9]] * 4, None, num_generations=4)
    assert [len(ids) > 0 for ids in rows[1]] == [True] * 4
    assert batch.figures.version_lag == 1
    generation.sync_weights()
    wait_for_unloads(trainer)
    assert {version_of(name) for name in adapters_on(proxy.base_url)} == {4, 5}


# How it ends


def test_the_last_step_asks_for_no_batch_that_nothing_will_train_on(
    make_trainer: Make, proxy: Proxy, base_model: Path
) -> None:
    trainer = make_trainer(proxy.base_url, base_model, max_steps=2, **overlapping())

    trainer.train()

    assert len(proxy.generations()) == 2


class Ends(TrainerCallback):
    """Ends the training in the second step, while a batch is sampled ahead that would take a minute."""

    def __init__(self, how: str, is_held: threading.Event) -> None:
        self.how = how
        self.is_held = is_held
        self.ended_at = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step < 2:
            return
        assert self.is_held.wait(60), "no batch is sampled ahead"
        self.ended_at = time.monotonic()
        if self.how == "early stop":
            control.should_training_stop = True
        else:
            raise {"ctrl-C": KeyboardInterrupt, "error": ZeroDivisionError}[self.how]


@pytest.mark.parametrize("how", ["early stop", "ctrl-C", "error"])
def test_what_is_sampled_ahead_is_cancelled_within_two_seconds(
    how: str, make_trainer: Make, proxy: Proxy, base_model: Path
) -> None:
    is_held, is_over = threading.Event(), threading.Event()

    def hold(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/v1/completions" and not is_scoring(body) and version_of(body["model"]) == 2:
            is_held.set()
            is_over.wait(60)
            raise ConnectionAbortedError
        return body

    proxy.before = hold
    ends = Ends(how, is_held)
    trainer = make_trainer(
        proxy.base_url, base_model, max_steps=8, trainer_kwargs={"callbacks": [ends]}, **overlapping()
    )
    try:
        if how == "early stop":
            trainer.train()
        else:
            with pytest.raises((KeyboardInterrupt, ZeroDivisionError)):
                trainer.train()
        took_s = time.monotonic() - ends.ended_at
    finally:
        is_over.set()

    assert took_s < 20  # the held answer would have been waited for
    assert adapters_on(proxy.base_url) == {}
    assert not list(Path(trainer.args.lora_sync_dir).glob("*"))
    assert not [thread for thread in threading.enumerate() if thread.name == "lora-sync-task"]


def test_a_second_train_begins_with_a_batch_of_the_newest_version(
    make_trainer: Make, proxy: Proxy, base_model: Path
) -> None:
    stop = Ends("early stop", threading.Event())
    stop.is_held.set()
    trainer = make_trainer(
        proxy.base_url, base_model, max_steps=8, trainer_kwargs={"callbacks": [stop]}, **overlapping()
    )
    trainer.train()
    first = len(proxy.generations())
    trainer.remove_callback(stop)

    trainer.train()

    steps = steps_of(trainer)
    assert [step[LAG] for step in steps] == [0, *[1] * 7]
    assert proxy.generations()[first]["model"] == proxy.loads()[2]["lora_name"]


# What goes wrong


def test_an_error_of_sampling_ahead_is_raised_at_the_step_that_needs_the_batch(
    make_trainer: Make, proxy: Proxy, base_model: Path
) -> None:
    def refuse(path: str, status: int, answer: bytes) -> tuple[int, bytes]:
        if path == "/v1/completions" and b"-v2" in answer and len(json.loads(answer)["choices"]) == 4:
            return 400, b'{"error": {"message": "this batch is not to be"}}'
        return status, answer

    proxy.after = refuse
    trainer = make_trainer(proxy.base_url, base_model, max_steps=6, **overlapping())

    with pytest.raises(LoRASyncError, match="this batch is not to be"):
        trainer.train()

    assert [step["lora_sync/version"] for step in steps_of(trainer)] == [1, 2]
    assert adapters_on(proxy.base_url) == {}


def test_a_server_that_forgets_everything_is_given_the_version_that_is_sampled_ahead_as_well(
    make_trainer: Make, proxy: Proxy, base_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a restart does it: after the load of version 3, the batch of version 2 is requested from an empty server."""
    caplog.set_level(logging.WARNING)
    loaded, done = threading.Event(), threading.Event()

    def restart(path: str, body: dict[str, Any]) -> dict[str, Any]:
        is_ahead = path == "/v1/completions" and not is_scoring(body) and version_of(str(body["model"])) == 2
        if is_ahead and not done.is_set():
            assert loaded.wait(60)
            done.set()
            for name in adapters_on(proxy.target):
                httpx.post(f"{proxy.target}/v1/unload_lora_adapter", json={"lora_name": name}, timeout=30, trust_env=False)  # fmt: skip  # noqa: E501
        return body

    def note(path: str, status: int, answer: bytes) -> tuple[int, bytes]:
        if path == "/v1/load_lora_adapter" and b"-v3" in answer:
            loaded.set()
        return status, answer

    proxy.before, proxy.after = restart, note
    trainer = make_trainer(proxy.base_url, base_model, max_steps=5, **overlapping())

    trainer.train()

    assert done.is_set()
    assert [step[LAG] for step in steps_of(trainer)] == [0, 1, 1, 1, 1]
    given_again = [record.getMessage() for record in caplog.records if "was given it again" in record.getMessage()]
    assert {message.partition(" had lost ")[2].partition(";")[0][-3:] for message in given_again} >= {"-v2"}
    assert {version for _, version in sampled_versions(proxy, trainer)} == {1, 2, 3, 4}


def test_a_failed_sync_ends_the_batch_that_is_sampled_ahead_and_the_next_run_works(
    make_trainer: Make, proxy: Proxy, base_model: Path
) -> None:
    def refuse(path: str, status: int, answer: bytes) -> tuple[int, bytes]:
        if path == "/v1/load_lora_adapter" and b"-v3" in answer:
            return 400, b'{"error": {"message": "no room"}}'
        return status, answer

    proxy.after = refuse
    trainer = make_trainer(proxy.base_url, base_model, max_steps=4, **overlapping())
    with pytest.raises(LoRASyncError, match="no room"):
        trainer.train()
    assert adapters_on(proxy.base_url) == {}
    proxy.after = lambda path, status, answer: (status, answer)

    trainer.train()

    assert [step[LAG] for step in steps_of(trainer)][-4:] == [0, 1, 1, 1]


def test_other_prompts_than_were_sampled_ahead_are_sampled_now_with_a_warning(
    make_trainer: Make, proxy: Proxy, base_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(proxy.base_url, base_model, **overlapping())
    generation = trainer.vllm_generation
    generation.sync_weights()
    with generation.training_batch([[5, 6, 7]] * 4):
        generation.generate([[1, 2, 3]] * 4, None, num_generations=4)
    with generation.training_batch(None) as batch:
        prompt_ids, *_ = generation.generate([[4, 4, 4]] * 4, None, num_generations=4)

    assert prompt_ids == [[4, 4, 4]] * 4
    assert batch.figures.version_lag == 0
    assert "Other prompts or sampling settings are due" in caplog.text
    assert generation.sync.ledger.leased == []


# Set-ups


def test_all_turns_of_a_batch_with_tools_are_of_the_version_of_its_first_turn(
    make_trainer: Make, proxy: Proxy, base_model: Path
) -> None:
    called: list[int] = []

    def weather(city: str) -> str:
        """Tell the weather.

        Args:
            city: where.
        """
        return f"sun in {city}"

    def reward(completions: list[Any], **kwargs: Any) -> list[float]:
        called.append(sum(any(message["role"] == "tool" for message in messages) for messages in completions))
        return mean_byte(completions)

    tokenizer = AutoTokenizer.from_pretrained(base_model)
    tokenizer.chat_template = TOOL_TEMPLATE
    tokenizer.response_template = qwen3_template
    trainer = make_trainer(
        proxy.base_url,
        base_model,
        reward_funcs=reward,
        trainer_kwargs={"tools": [weather], "processing_class": tokenizer},
        max_completion_length=200,
        max_tool_calling_iterations=1,
        per_device_train_batch_size=8,
        max_steps=4,
        vllm_structured_outputs_regex=(
            r'<tool_call>\n\{"name": "weather", "arguments": \{"city": "[A-Z][a-z]{1,6}"\}\}\n</tool_call>|=[a-z]{3,9}'
        ),
        **overlapping(train_dataset=prompts(["Rome?", "Oslo?", "Bern?", "Kyiv?"] * 3, conversational=True)),
    )

    trainer.train()

    turns = [
        (version_of(request["model"]), "<|im_start|>tool" in tokenizer.decode(prompt))
        for request in proxy.generations()
        for prompt in request["prompt"]
        for _ in range(request["n"])
    ]
    assert [version for version, is_later in turns if not is_later] == [1] * 16 + [2] * 8 + [3] * 8
    versions = [1, 1, 2, 3]
    assert Counter(version for version, is_later in turns if is_later) == +Counter(
        {version: sum(n for n, of in zip(called, versions, strict=True) if of == version) for version in (1, 2, 3)}
    )
    assert sum(called) > 0
    assert [step[LAG] for step in steps_of(trainer)] == [0, 1, 1, 1]


def test_fused_serving_loads_only_between_batches(
    fused_server: VLLMServer, base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", FUSED_KEY)
    trainer = grpo_trainer(
        fused_server.base_url, base_model, tmp_path, max_steps=5, lora_sync_serving="fused", **overlapping()
    )
    generation = trainer.vllm_generation
    load, under_way = generation.fleet.load, []

    async def watched(*args: Any) -> Any:
        ahead = generation.overlap.ahead
        under_way.append(ahead is not None and not ahead.task.done())
        return await load(*args)

    monkeypatch.setattr(generation.fleet, "load", watched)

    trainer.train()

    assert under_way == [False] * 5
    steps = steps_of(trainer)
    assert [step[LAG] for step in steps] == [0, 1, 1, 1, 1]
    assert [step["lora_sync/version"] for step in steps] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("pause", ["drain"])
def test_a_load_that_drains_the_server_waits_for_the_batch_first(
    pause: str, base_model: Path, make_trainer: Make, clean_server: VLLMServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shared server does not offer pauses, so the requests for pauses are recorded."""
    trainer = make_trainer(clean_server.base_url, base_model, max_steps=3, **overlapping())
    generation, order = trainer.vllm_generation, []
    settings = replace(generation.settings, pause=pause)
    monkeypatch.setattr(generation, "settings", settings)
    settle = generation.overlap.settle
    monkeypatch.setattr(generation.overlap, "settle", lambda: (order.append("settle"), settle()))
    sync, publish = generation.sync, generation.sync.publish
    monkeypatch.setattr(sync, "publish", lambda *args: (order.append("publish"), publish(*args))[1])

    trainer.train()

    assert order == ["settle", "publish"] * 3


def test_verifying_each_version_works_beside_the_batch_that_is_sampled_ahead(
    make_trainer: Make, proxy: Proxy, base_model: Path
) -> None:
    trainer = make_trainer(
        proxy.base_url,
        base_model,
        max_steps=5,
        lora_sync_verify="every",
        max_completion_length=200,
        generation_kwargs={"ignore_eos": True},
        **overlapping(),
    )

    trainer.train()

    steps = steps_of(trainer)
    assert [step["lora_sync/verified"] for step in steps] == [1] * 5
    assert all(step["lora_sync/verify_gap"] < NOISE_MEAN for step in steps)


def test_the_start_says_what_the_masking_of_whole_sequences_costs(
    make_trainer: Make, clean_server: VLLMServer, base_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_trainer(clean_server.base_url, base_model, **overlapping())

    out = capsys.readouterr().out
    assert out.count("one generation batch earlier") == 1
    assert '"sequence_mask"' in out
    assert '"token_truncate"' in out


def test_a_server_with_room_for_one_adapter_is_refused_with_the_flag(
    make_trainer: Make, proxy: Proxy, base_model: Path
) -> None:
    """As vLLM's default is, which the page of the metrics shows."""

    def one_slot(path: str, status: int, answer: bytes) -> tuple[int, bytes]:
        return status, answer.replace(b'max_lora="2"', b'max_lora="1"') if path == "/metrics" else answer

    proxy.after = one_slot
    with pytest.raises(ServerSetupError, match=r"--max-loras 1.*-- --max-loras 2"):
        make_trainer(proxy.base_url, base_model, **overlapping())
