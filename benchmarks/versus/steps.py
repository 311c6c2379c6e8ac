"""Whole GRPO steps of TRL's own trainer, whose generation object is another arm's at each step."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback

from trl_lora_sync import _trl
from versus.arms import Arm
from versus.clock import Clock, OutOfTimeError
from versus.kinds import STEP_PROMPT_TOKENS
from versus.measure import Save, medians
from versus.workbench import Workbench


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One GRPO step.

    Attributes:
        completions: how many are sampled.
        tokens: the length of each.
        per_prompt: how many are sampled for one prompt.
        micro_batch: how many the trainer computes at a time.
    """

    completions: int
    tokens: int
    per_prompt: int = 8
    micro_batch: int = 8


@dataclass
class TakingTurns:
    """Stands where the trainer has its generation object, and passes each step on to the next arm's.

    Attributes:
        name: the arm whose step this is.
        sync_s, generate_s: seconds of this step.
    """

    generations: dict[str, Any]
    name: str = ""
    sync_s: float = 0.0
    generate_s: float = 0.0
    _order: Any = field(init=False)

    def __post_init__(self) -> None:
        self._order = cycle(self.generations)
        self.name = next(iter(self.generations))

    def sync_weights(self) -> None:
        self.name = next(self._order)
        start = time.perf_counter()
        self.generations[self.name].sync_weights()
        self.sync_s = time.perf_counter() - start

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return self.generations[self.name].generate(*args, **kwargs)
        finally:
            self.generate_s = time.perf_counter() - start

    def __getattr__(self, name: str) -> Any:
        return getattr(self.generations[self.name], name)


class _StepTimes(TrainerCallback):
    """Times each step, and stops when there is no time for another."""

    def __init__(self, turns: TakingTurns, bench: Workbench, warmup: int, clock: Clock, save: Save) -> None:
        self._turns = turns
        self._bench = bench
        self._warmup = warmup
        self._clock = clock
        self._save = save
        self._started = 0.0
        self._found: dict[str, dict[str, Any]] = {}

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._bench.settle()
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._bench.settle()
        step_s, turns = time.perf_counter() - self._started, self._turns
        train_s = step_s - turns.sync_s - turns.generate_s
        sample = {"step_s": step_s, "sync_s": turns.sync_s, "generate_s": turns.generate_s, "train_s": train_s}
        self._clock.say(f"step {state.global_step}, {turns.name}: {step_s:.2f} s")
        if state.global_step > self._warmup:
            of_arm = self._found.setdefault(turns.name, {"samples": []})
            of_arm["samples"].append(sample)
            of_arm["median"] = medians(of_arm["samples"])
            self._save(self._found)
        if self._clock.left_s() < 1.5 * step_s:
            control.should_training_stop = True


def measure_steps(
    arms: Sequence[Arm], bench: Workbench, batch: Batch, steps: int, work: Path, clock: Clock, save: Save
) -> None:
    """One step of each arm to warm up, and `steps` of each in turns; the numbers come as medians.

    Raises:
        OutOfTimeError: fewer steps were made, and what they took is kept.
    """
    from trl import GRPOConfig, GRPOTrainer

    generations = {arm.name: arm.generation for arm in arms if arm.generation is not None}
    if not generations:
        return
    turns = TakingTurns(generations)
    config = GRPOConfig(
        output_dir=str(work / "grpo"),
        use_vllm=True,
        vllm_mode="server",
        per_device_train_batch_size=batch.micro_batch,
        gradient_accumulation_steps=batch.completions // batch.micro_batch,
        num_generations=batch.per_prompt,
        max_completion_length=batch.tokens,
        generation_kwargs={"ignore_eos": True},
        max_steps=len(generations) * (1 + steps),
        learning_rate=1e-6,
        beta=0.0,
        bf16=bench.is_on_gpu,
        use_cpu=not bench.is_on_gpu,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )

    def adopt(**arguments: Any) -> TakingTurns:
        """The arms' generation objects with what the trainer would have made its own with."""
        for generation in generations.values():
            for name in ("model", "accelerator", "processing_class", "temperature", "top_p", "top_k", "min_p",
                         "repetition_penalty", "max_completion_length", "logprobs", "generation_kwargs"):  # fmt: skip
                setattr(generation, name, arguments[name])
        return turns

    with _trl.generation_class(GRPOTrainer, adopt):
        trainer = GRPOTrainer(
            model=bench.model,
            args=config,
            reward_funcs=_reward,
            train_dataset=_prompts(bench, max(2, batch.completions // batch.per_prompt)),
            processing_class=bench.tokenizer,
            callbacks=[_StepTimes(turns, bench, len(generations), clock, save)],
        )
    trainer.train()
    is_cut_short = trainer.state.global_step < config.max_steps
    del trainer
    bench.renew_accelerator()
    bench.give_back_memory()
    for arm in arms:
        arm.use(bench.model)
    if is_cut_short:
        raise OutOfTimeError("no time is left for another GRPO step")


def _reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Differs between any two completions, so that every step has a gradient."""
    return [sum(ids) % 997 / 997 for ids in completion_ids]


def _prompts(bench: Workbench, count: int) -> Dataset:
    """Prompts of one token per character."""
    texts = [
        "".join(chr(97 + token % 26) for token in group.prompt) for group in bench.prompts(count, STEP_PROMPT_TOKENS)
    ]
    return Dataset.from_dict({"prompt": texts})
