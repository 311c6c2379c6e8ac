"""Trainings that end as soon as they have learned something: the steps after that prove nothing more."""

import statistics
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

Logged = list[dict[str, Any]]


class EndsOnce(TrainerCallback):
    """Ends a training as soon as it has learned something."""

    def __init__(self, has_learned: Callable[[Logged], bool]) -> None:
        self._has_learned = has_learned

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= self._has_learned(state.log_history)


def reward_rose_by(amount: float) -> Callable[[Logged], bool]:
    """Whether the mean reward of the last five steps is so much above that of the first five."""

    def has_risen(logged: Logged) -> bool:
        rewards = [entry["reward"] for entry in logged if "reward" in entry]
        return len(rewards) >= 10 and statistics.mean(rewards[-5:]) > statistics.mean(rewards[:5]) + amount

    return has_risen
