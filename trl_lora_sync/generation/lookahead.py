"""The batches of an epoch; a later batch can be read before it is taken.

The iterator is wrapped where the trainer takes batches from it, and not the dataloader: a resumed run builds another
dataloader, and the wrapper would be lost. What is looked at is taken later, in the same order, so nothing is drawn
twice and no random state moves.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any


class LookAhead:
    """Remembers what was taken for one update of the weights, and what was read beyond it.

    Args:
        is_at_end: whether the last batch of the epoch has been read. accelerate (1.15) does things at the end of its
            iterator, so that is never reached from here.
    """

    def __init__(self, is_at_end: Callable[[], bool]) -> None:
        self._is_at_end = is_at_end
        self._source: Iterator[Any] | None = None
        self._ahead: deque[Any] = deque()
        self._taken: list[Any] = []

    def over(self, source: Iterator[Any]) -> Iterator[Any]:
        """What to take the batches of the next update from, instead of `source`."""
        # Transformers makes one iterator per epoch and passes it for each update (`_run_epoch` in trainer.py, 5.24).
        if source is not self._source:  # another epoch
            self._source = source
            self._ahead.clear()
        self._taken = []
        return self._take(source)

    def _take(self, source: Iterator[Any]) -> Iterator[Any]:
        while True:
            try:
                batch = self._ahead.popleft() if self._ahead else next(source)
            # In a generator a StopIteration would become a RuntimeError (PEP 479).
            except StopIteration:
                return
            self._taken.append(batch)
            yield batch

    @property
    def taken(self) -> int:
        """How many batches the update that runs consists of."""
        return len(self._taken)

    @property
    def known(self) -> int:
        """How many batches are known, from the first one of the update that runs."""
        return len(self._taken) + len(self._ahead)

    def peek(self, place: int) -> Any | None:
        """A batch of this epoch, or None if it ends before.

        Args:
            place: counted from the first batch of the update that runs.
        """
        # With fewer steps per generation than accumulated batches, an update has the batch of the next generation too.
        if place < len(self._taken):
            return self._taken[place]
        beyond = place - len(self._taken)
        while len(self._ahead) <= beyond:
            if self._source is None or self._is_at_end():
                return None
            try:
                self._ahead.append(next(self._source))
            except StopIteration:
                return None
        return self._ahead[beyond]

    def forget(self) -> None:
        """Drop all batches."""
        self._source = None
        self._ahead.clear()
        self._taken = []
