"""Unit tier: which batch is sampled ahead, and that looking at it changes nothing.

The trainer is TRL's with a real dataloader of accelerate; a function that records its arguments replaces the sampling
method.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from make_model import make_model
from support.models import lora
from support.trainers import grpo_trainer, mean_byte, prompts
from torch.utils.data import SequentialSampler

from trl_lora_sync import GRPOTrainer, _trl
from trl_lora_sync.generation.lookahead import LookAhead
from trl_lora_sync.generation.overlap import BatchFigures
from trl_lora_sync.generation.server import LoRASyncGeneration, TrainingBatch
from trl_lora_sync.run_log import RunLog

pytestmark = pytest.mark.outside

NINE = [f"{number}{number}" for number in range(9)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@dataclass
class Noted:
    """What the trainer requested, one entry for each batch that it trained on.

    Attributes:
        sampled: token ids of the rows.
        ahead: the token ids handed over for the batch after it.
        states: the random state of torch at that moment, as numbers.
        evaluated: the rows of evaluations.
    """

    sampled: list[list[list[int]]] = field(default_factory=list)
    ahead: list[list[list[int]] | None] = field(default_factory=list)
    states: list[list[int]] = field(default_factory=list)
    evaluated: list[list[list[int]]] = field(default_factory=list)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    """Lets generation objects record their arguments, and answer two tokens for each row."""
    found = Noted()

    def generate(self: Any, prompts: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        batch: TrainingBatch | None = self._batch
        (found.sampled if self.model.training else found.evaluated).append(prompts)
        if self.model.training:
            found.states.append(torch.get_rng_state().tolist())
        if batch is not None:
            found.ahead.append(batch.following)
            batch.figures = BatchFigures(version_lag=1, wait_s=0.0, generation_s=1.0)
        completions = [[65 + number % 20, 66] for number in range(len(prompts))]
        return prompts, completions, [[[-5.0], [-5.0]]] * len(prompts), None

    def init(self: Any) -> None:
        self.vllm_client = SimpleNamespace(
            get_server_info=lambda: {"model_config": {"logprobs_mode": "processed_logprobs"}}
        )

    monkeypatch.setattr(LoRASyncGeneration, "_init_vllm", init)
    monkeypatch.setattr(LoRASyncGeneration, "sync_weights", lambda self: None)
    monkeypatch.setattr(LoRASyncGeneration, "generate", generate)
    monkeypatch.setattr(RunLog, "on_train_begin", lambda *args, **kwargs: None)
    return found


def train(model: Path, folder: Path, *, resume: bool = False, **changes: Any) -> GRPOTrainer:
    fields = {"train_dataset": prompts(NINE), "max_completion_length": 4, "peft_config": lora(r=2)} | changes
    trainer = grpo_trainer("http://127.0.0.1:9", model, folder, reward_funcs=mean_byte, **fields)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


CUTS = {
    "plain": {},
    "accumulation of 2": {"gradient_accumulation_steps": 2},
    "accumulation of 4": {"gradient_accumulation_steps": 4},
    "two generations a step": {"gradient_accumulation_steps": 2, "steps_per_generation": 1},
    "a generation for two steps": {"steps_per_generation": 2},
    "neither divides the other": {"gradient_accumulation_steps": 2, "steps_per_generation": 3},
    "two iterations": {"num_iterations": 2, "gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("cut", CUTS)
def test_what_is_handed_over_is_the_next_batch_and_nothing_else_changes(
    cut: str, model: Path, noted: Noted, tmp_path: Path
) -> None:
    """Two and a bit epochs, so that their ends are met."""
    fields = CUTS[cut] | {"max_steps": 12 if "accumulation" in cut else 20}
    train(model, tmp_path / "plain", **fields)
    without = (noted.sampled.copy(), noted.states.copy())
    noted.sampled.clear()
    noted.states.clear()

    trainer = train(model, tmp_path / "overlap", lora_sync_overlap=1, **fields)

    assert (noted.sampled, noted.states) == without
    assert trainer.state.epoch > 1
    assert noted.ahead == [*noted.sampled[1:], None]


def test_the_end_of_an_epoch_is_cold_if_the_order_is_not_trl_s_own(
    model: Path, noted: Noted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GRPOTrainer, "_get_train_sampler", lambda self, *args: SequentialSampler(range(16)))
    train(model, tmp_path, lora_sync_overlap=1, max_steps=9, train_dataset=prompts(NINE + NINE))

    cold = [place for place, ahead in enumerate(noted.ahead) if ahead is None]
    assert cold == [3, 7, 8]
    assert [ahead for ahead in noted.ahead if ahead] == [
        noted.sampled[place + 1] for place in range(8) if place not in cold
    ]


def test_the_end_of_an_epoch_is_cold_for_a_stream(model: Path, noted: Noted, tmp_path: Path) -> None:
    """It has no sampler to read ahead from, and the training ended there with a TypeError."""
    train(model, tmp_path, lora_sync_overlap=1, max_steps=13, train_dataset=prompts(NINE).to_iterable_dataset())

    cold = [place for place, ahead in enumerate(noted.ahead) if ahead is None]
    assert cold == [8, 12]
    assert [ahead for ahead in noted.ahead if ahead] == [
        noted.sampled[place + 1] for place in range(12) if place not in cold
    ]


def test_a_resumed_run_hands_over_the_batch_that_it_will_ask_for(model: Path, noted: Noted, tmp_path: Path) -> None:
    seen = []
    for overlap in (0, 1):
        fields = {"lora_sync_overlap": overlap, "save_strategy": "steps", "save_steps": 3, "steps_per_generation": 2}
        folder = tmp_path / str(overlap)
        train(model, folder, max_steps=3, **fields)
        noted.sampled.clear()
        noted.ahead.clear()
        noted.states.clear()
        train(model, folder, resume=True, max_steps=8, **fields)
        seen.append((noted.sampled.copy(), noted.states.copy()))

    assert seen[0] == seen[1]
    assert noted.ahead == [*noted.sampled[1:], None]


def test_an_evaluation_between_two_steps_hands_nothing_over(model: Path, noted: Noted, tmp_path: Path) -> None:
    fields = {"eval_dataset": prompts(NINE[:2]), "eval_strategy": "steps", "eval_steps": 1, "max_steps": 4}
    trainer = train(model, tmp_path, lora_sync_overlap=1, per_device_eval_batch_size=4, **fields)

    assert len(noted.evaluated) >= 4
    assert len(noted.ahead) == 4
    assert noted.ahead == [*noted.sampled[1:], None]
    assert [log["lora_sync/version_lag"] for log in trainer.state.log_history if "lora_sync/version_lag" in log] == [
        1
    ] * 4


def test_the_share_of_masked_sequences_is_that_of_trl_s_ratios(model: Path, noted: Noted, tmp_path: Path) -> None:
    """The noted answers claim log-probabilities of -5, and the untrained model's are near -5.5 a token."""
    cases = (
        ("sequence_mask", 1e-9, 1.0),
        ("sequence_mask", 1e9, 0.0),
        ("token_mask", 1e-9, 1.0),
        ("token_truncate", 1e-9, 0.0),
    )
    for mode, clip_max, expected in cases:
        trainer = train(
            model,
            tmp_path / f"{mode}-{clip_max}",
            lora_sync_overlap=1,
            max_steps=1,
            vllm_importance_sampling_mode=mode,
            vllm_importance_sampling_clip_max=clip_max,
        )
        assert trainer.state.log_history[0]["lora_sync/overlap_masked"] == expected, mode


def test_a_sequence_without_any_token_to_train_on_does_not_count_as_masked_by_the_correction() -> None:
    """TRL empties the mask of truncated completions, whose ratio stays 1, and each of them was counted."""
    batch = {
        "completion_mask": torch.tensor([[0, 0], [1, 1], [1, 0], [1, 1]]),
        "importance_sampling_ratio": torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.0, 1.0], [0.0, 1.0]]),
    }
    trainer = SimpleNamespace(_buffered_inputs=[batch], accelerator=SimpleNamespace(gather=lambda values: values))
    assert _trl.masked_share(trainer) == 0.5


@pytest.mark.parametrize(
    ("row", "images", "expected"),
    [
        ({"prompt": "a"}, None, [[7]]),
        ({"prompt": "a", "image": object()}, None, None),
        ({"prompt": "a", "images": []}, None, None),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, [["an image"]], None),
    ],
    ids=["text", "image column", "images column", "image in a message"],
)
def test_prompts_with_images_are_not_handed_over(row: dict[str, Any], images: Any, expected: Any) -> None:
    trainer = SimpleNamespace(_tokenize_prompts=lambda prompts: ([[7]], images, {}))
    assert _trl.tokenized(trainer, [row]) == expected


def test_batches_with_images_are_sampled_when_they_are_needed_with_one_warning(
    model: Path, noted: Noted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_trl, "tokenized", lambda trainer, batch: None)
    train(model, tmp_path, lora_sync_overlap=1, max_steps=3)

    assert noted.ahead == [None] * 3
    assert caplog.text.count("A batch with images is not sampled ahead") == 1


def test_looking_ahead_leaves_the_prompts_of_the_dataset_as_they_are() -> None:
    def tokenize(prompts: list[Any]) -> Any:
        prompts[0].append("changed")
        return [[1]], None, {}

    rows = [{"prompt": ["message"]}]
    _trl.tokenized(SimpleNamespace(_tokenize_prompts=tokenize), rows)
    assert rows == [{"prompt": ["message"]}]


# The iterator alone


@contextmanager
def counted(batches: int) -> Iterator[tuple[Iterator[int], Callable[[], bool], list[int]]]:
    read: list[int] = []

    def source() -> Iterator[int]:
        for number in range(batches):
            read.append(number)
            yield number
        raise AssertionError("the end was reached, where accelerate does things")

    yield source(), lambda: len(read) == batches, read


def test_what_is_looked_at_is_taken_later_in_order() -> None:
    with counted(7) as (source, is_at_end, read):
        look = LookAhead(is_at_end)
        assert [next(batches) for batches in [look.over(source)] for _ in range(2)] == [0, 1]
        assert (look.taken, look.peek(1), look.peek(4), read) == (2, 1, 4, [0, 1, 2, 3, 4])
        assert [next(batches) for batches in [look.over(source)] for _ in range(4)] == [2, 3, 4, 5]
        assert (look.peek(0), look.peek(4), look.peek(5), look.peek(9)) == (2, 6, None, None)


def test_batches_of_the_epoch_before_are_not_taken_in_the_next() -> None:
    look = LookAhead(lambda: False)
    first, second = iter([1, 2, 3]), iter([4, 5])
    next(look.over(first))
    assert look.peek(1) == 2
    assert list(look.over(second)) == [4, 5]
    assert look.peek(2) is None
