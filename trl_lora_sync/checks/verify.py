"""Proof that a server samples from the adapter it was sent, from log-probabilities of one fixed prompt.

HTTP 200 on a load proves nothing: vLLM answers 200 and serves the base model when no tensor name matches. So the prompt
is scored with and without the adapter, there and here, and the served change must follow the trained one. Compares
numbers only, and computes none of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl_lora_sync.adapter.canonical import CanonicalAdapter, Form

# Reads the adapter, given whether q/k/v and gate/up must come complete.
ReadAdapter = Callable[["Form"], "CanonicalAdapter"]

# Small token ids, which every vocabulary has, in no order that a text would have.
# 37 and 200 have no common divisor, so no id occurs twice.
PROBE_PROMPT = tuple((37 * place + 11) % 200 for place in range(24))
# Rounding, quantisation of the served base and other kernels stay well below; another model does not.
# In spreads of the log-probabilities over the vocabulary; an unrelated policy is about 1.1 away (`generation.scoring`).
_SUSPICIOUS = 0.5
# How many times the base model's own gap the served change may be away from the trained one.
TOLERANCE = 3.0
# Of the change itself, which the served dtype rounds as well.
_ROUNDING_SHARE = 0.2
# Below this a log-probability is noise, in any dtype.
_FLOOR = 1e-3


@dataclass(frozen=True, kw_only=True)
class TrainedBase:
    """What is known of the base model that is trained. A run knows all of it; what `doctor` does not know is None.

    Attributes:
        name: the name or path that the trainer loaded.
        vocab_size: number of token ids it knows.
        scores: the log-probability of each token of `PROBE_PROMPT` after the first, and the spread (standard deviation)
            of the log-probabilities over the vocabulary, without any adapter.
        change: how its weights differ from the checkpoint that was loaded, and what to do; empty if they are the same,
            or if that is not known.
    """

    name: str | None = None
    vocab_size: int | None = None
    scores: tuple[Sequence[float], float] | None = None
    change: str = ""

    def gap(self, served: Sequence[float]) -> "BaseGap | None":
        """How far the served base's log-probabilities of `PROBE_PROMPT` are from these; None if that is not known."""
        if self.scores is None or not served:
            return None
        trained, spread = self.scores
        return BaseGap(mean=mean_distance(trained, served), spread=spread)


@dataclass(frozen=True, kw_only=True)
class ImageProbe:
    """A prompt with an image.

    Attributes:
        image: as PIL has it.
        image_token_id: what stands for the image in `prompt_ids`.
        scored: how many tokens at the end of the prompt are scored, all of them after the image.
        inputs: the arguments of the trainer's model, as tensors.
    """

    prompt_ids: list[int]
    image: Any
    image_token_id: int
    scored: int
    inputs: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A random adapter of large effect, which proves the path from the trainer to a server.

    An adapter in training may move log-probabilities by less than rounding does for hundreds of steps, so a server that
    ignores it is not noticed by what it computes.

    A server may apply some modules and ignore others, so each group of modules has a trial that is zero in all others.

    Attributes:
        group: of the modules that it changes, such as "attention".
        modules: their paths, with `*` for the number of a layer.
        read: makes it, in the shapes of the trained adapter and by the same export.
        scores: of `PROBE_PROMPT`, as the trainer's model computes them with it and without any adapter; None if they
            are not known.
        image: what the scores are of instead.
        advice: what to do if a server ignores these modules.
        is_current: whether `read` still makes what `scores` are of; another adapter of the model may be active by now.
    """

    group: str
    modules: Sequence[str]
    read: ReadAdapter
    scores: "Scores | None" = None
    image: ImageProbe | None = None
    advice: str = ""
    is_current: Callable[[], bool] = lambda: True

    def __str__(self) -> str:
        return f"the {self.group} modules ({', '.join(self.modules)})"


@dataclass(frozen=True, kw_only=True)
class BaseGap:
    """How far the served base is from the trained one.

    Attributes:
        mean: mean absolute difference of the log-probabilities.
        spread: of the trained model's log-probabilities over the vocabulary; the yardstick.
    """

    mean: float
    spread: float

    @property
    def is_suspicious(self) -> bool:
        return not self.mean <= _SUSPICIOUS * self.spread  # NaN is suspicious

    def __str__(self) -> str:
        return f"mean |served - trained| {self.mean:.3f}, against a spread of {self.spread:.3f} over the vocabulary"


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Log-probabilities of the tokens of `PROBE_PROMPT` after the first, of one model.

    Attributes:
        base: without an adapter.
        adapted: with it.
    """

    base: Sequence[float]
    adapted: Sequence[float]

    def change(self) -> list[float]:
        """What the adapter adds to each."""
        return [with_it - without for with_it, without in zip(self.adapted, self.base, strict=True)]


@dataclass(frozen=True, kw_only=True)
class VerificationResult:
    """What one comparison of a served adapter with the trained one shows; all figures are log-probabilities.

    Attributes:
        gap_mean: mean of |served - trained| under the adapter.
        gap_max: the largest of these.
        base_gap: mean of |served - trained| without it.
        trained_change: mean of |change by the adapter| in the trainer.
        served_change: the same on the server.
        deviation: mean of |served change - trained change|.
        tolerance: what rounding and the base model's own gap explain of the deviation.
    """

    gap_mean: float
    gap_max: float
    base_gap: float
    trained_change: float
    served_change: float
    deviation: float
    tolerance: float

    @property
    def is_mismatch(self) -> bool:
        """Whether the server applies something else than this adapter."""
        return not self.deviation <= self.tolerance  # NaN contradicts

    @property
    def confirms(self) -> bool:
        """Whether a server that ignored the adapter would have been found out."""
        # Such a server has a change of zero, so its deviation is the whole of `trained_change`.
        return not self.is_mismatch and self.trained_change > self.tolerance

    def __str__(self) -> str:
        return (
            f"the adapter changes the log-probabilities of a fixed prompt by {self.served_change:.4f} on the server "
            f"and by {self.trained_change:.4f} in the trainer (means); the two changes are {self.deviation:.4f} apart, "
            f"where {self.tolerance:.4f} is tolerated and the base models alone are {self.base_gap:.4f} apart"
        )


def compare(served: Scores, trained: Scores, *, tolerance: float = TOLERANCE) -> VerificationResult:
    """Judge a server by what it answers under an adapter.

    Args:
        tolerance: how many times the base model's own gap the deviation may be.
    """
    gap = mean_distance(served.base, trained.base)
    trained_change, served_change = trained.change(), served.change()
    gaps = [abs(there - here) for there, here in zip(served.adapted, trained.adapted, strict=True)]
    size = _mean_size(trained_change)
    return VerificationResult(
        gap_mean=sum(gaps) / len(gaps),
        gap_max=max(gaps),
        base_gap=gap,
        trained_change=size,
        served_change=_mean_size(served_change),
        deviation=mean_distance(served_change, trained_change),
        # A change is the difference of two rows, and both are off where the bases differ, so one gap is too little.
        tolerance=tolerance * gap + _ROUNDING_SHARE * size + _FLOOR,
    )


def mean_distance(left: Sequence[float], right: Sequence[float]) -> float:
    """Mean absolute difference of two rows of log-probabilities."""
    return _mean_size([a - b for a, b in zip(left, right, strict=True)])


def _mean_size(values: Sequence[float]) -> float:
    return sum(map(abs, values)) / len(values)
