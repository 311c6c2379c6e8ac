"""Dispatch of work to servers, without any server."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_lora_sync.runtime import run
from trl_lora_sync.servers.dispatch import FULL_BATCH, Worker, dispatch, quotas

WAIT_S = 30.0
Before = Callable[[list[int]], Awaitable[None]]


async def begin(indices: list[int]) -> None:
    """Work that nothing is to happen before."""


async def never() -> bool:
    return False


class LostError(Exception):
    pass


class Hand:
    """A worker that notes which indices it was given."""

    def __init__(self, before: Before = begin, **fields: object) -> None:
        self.given: list[int] = []
        self._before = before
        plain: dict[str, object] = {
            "do": self._do,
            "is_loss": lambda error: isinstance(error, LostError),
            "recover": never,
        }
        self.worker: Worker[int] = Worker(**{**plain, **fields})  # type: ignore[arg-type]

    async def _do(self, indices: list[int], at_once: int) -> list[int]:
        await self._before(indices)
        self.given += indices
        return [index * 10 for index in indices]


def once(error: BaseException) -> Before:
    """Raise at the first call only."""
    left = [error]

    async def act(indices: list[int]) -> None:
        if left:
            raise left.pop()

    return act


def done(hands: list[Hand], samples: list[int]) -> list[int]:
    return run(dispatch(samples, [hand.worker for hand in hands]))


@settings(deadline=None, max_examples=40)  # the loop takes its time on a busy machine
@given(st.lists(st.integers(1, 40), max_size=40), st.integers(1, 4))
def test_every_index_is_done_once_and_results_are_in_order(samples: list[int], workers: int) -> None:
    hands = [Hand() for _ in range(workers)]
    assert done(hands, samples) == [index * 10 for index in range(len(samples))]
    assert sorted(index for hand in hands for index in hand.given) == list(range(len(samples)))


def test_a_worker_alone_is_given_everything_at_once() -> None:
    calls: list[list[int]] = []

    async def note(indices: list[int]) -> None:
        calls.append(indices)

    done([Hand(note)], [FULL_BATCH] * 10)
    assert calls == [list(range(10))]


def test_small_work_is_under_way_on_all_workers_at_once() -> None:
    """The second half of so little work begins without waiting for a first answer."""
    given_out, everything = [], asyncio.Event()

    async def wait_for_the_rest(indices: list[int]) -> None:
        given_out.extend(indices)
        if len(given_out) == 16:
            everything.set()
        await asyncio.wait_for(everything.wait(), WAIT_S)

    hands = [Hand(wait_for_the_rest), Hand(wait_for_the_rest)]
    done(hands, [8] * 16)
    assert [len(hand.given) for hand in hands] == [8, 8]


def test_a_slow_worker_gets_less_of_large_work() -> None:
    others_are_done = asyncio.Event()
    begun: list[int] = []

    async def tell(indices: list[int]) -> None:
        begun.extend(indices)
        if len(begun) == 24:  # all but half of the slow one's even share
            others_are_done.set()

    async def wait_for_the_others(indices: list[int]) -> None:
        await asyncio.wait_for(others_are_done.wait(), WAIT_S)

    slow, quick = Hand(wait_for_the_others), Hand(tell)
    done([slow, quick], [FULL_BATCH] * 32)
    assert [len(slow.given), len(quick.given)] == [8, 24]


def test_a_worker_that_was_slow_before_gets_less_of_small_work() -> None:
    given_out, everything = [], asyncio.Event()

    async def wait_for_the_rest(indices: list[int]) -> None:
        given_out.extend(indices)
        if len(given_out) == 16:
            everything.set()
        await asyncio.wait_for(everything.wait(), WAIT_S)

    hands = [Hand(wait_for_the_rest, speed=1.0), Hand(wait_for_the_rest, speed=3.0)]
    done(hands, [4] * 16)
    assert [len(hand.given) for hand in hands] == [4, 12]


def test_speed_is_measured_for_the_next_time() -> None:
    hand, idle = Hand(), Hand()
    done([hand, idle], [4])
    assert hand.worker.speed is not None
    assert hand.worker.speed > 0
    assert idle.worker.speed is None


@pytest.mark.parametrize(
    ("samples", "speeds", "expected"),
    [
        (100, [None], [100]),
        (40, [None, None], [20, 20]),
        (40, [1.0, 3.0], [10, 30]),
        (60, [2.0, None, 4.0], [20 / 1.5, 20, 40 / 1.5]),
        (1000, [None, None], [250, 250]),
        (200, [None, None], [FULL_BATCH, FULL_BATCH]),
        (1000, [2.0], [1000]),
    ],
)
def test_quotas_follow_speed_and_half_of_a_large_one_is_held_back(
    samples: int, speeds: list[float | None], expected: list[float]
) -> None:
    assert quotas(samples, speeds) == pytest.approx(expected)


# Losses


def test_work_of_a_lost_worker_is_done_by_the_others_in_order() -> None:
    async def lose(indices: list[int]) -> None:
        raise LostError

    lost, other = Hand(lose), Hand()
    assert done([lost, other], [4] * 9) == [index * 10 for index in range(9)]
    assert sorted(other.given) == list(range(9))


def test_a_worker_alone_that_recovers_does_all_of_it_again() -> None:
    recovered: list[bool] = []

    async def recover() -> bool:
        recovered.append(True)
        return True

    hand = Hand(once(LostError()), recover=recover)
    assert done([hand], [4] * 3) == [0, 10, 20]
    assert recovered == [True]


def test_a_worker_that_is_away_at_the_start_is_given_nothing_before_it_is_back() -> None:
    is_back = asyncio.Event()

    async def recover() -> bool:
        is_back.set()
        return True

    async def check(indices: list[int]) -> None:
        assert is_back.is_set(), "it was away"

    hand = Hand(check, recover=recover, is_lost=True)
    assert done([hand], [1, 1]) == [0, 10]


def test_nobody_waits_for_a_recovery_that_has_become_needless() -> None:
    ended: list[type[BaseException]] = []

    async def recover() -> bool:
        try:
            await asyncio.sleep(WAIT_S)
        except BaseException as error:
            ended.append(type(error))
            raise
        return False

    assert done([Hand(recover=recover, is_lost=True), Hand()], [1] * 4) == [0, 10, 20, 30]
    assert ended == [asyncio.CancelledError]


def test_the_loss_is_raised_once_nobody_is_left() -> None:
    async def lose(indices: list[int]) -> None:
        raise LostError

    hands = [Hand(lose), Hand(lose)]
    with pytest.raises(LostError):
        done(hands, [1] * 4)


def test_an_error_that_is_no_loss_is_raised_and_not_tried_elsewhere() -> None:
    broken, other = Hand(once(ValueError("a bad prompt"))), Hand()
    with pytest.raises(ValueError, match="a bad prompt"):
        done([broken, other], [1] * 4)
    assert len(other.given) <= 2


def test_an_error_of_a_recovery_is_raised() -> None:
    async def recover() -> bool:
        raise ValueError("another model came up")

    with pytest.raises(ValueError, match="another model"):
        done([Hand(once(LostError()), recover=recover)], [1])
