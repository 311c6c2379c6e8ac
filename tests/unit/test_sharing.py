"""Sharing work out over servers, without any server."""

import threading
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_lora_sync.sharing import FULL_BATCH, Worker, share_out, shares

WAIT_S = 30.0


class LostError(Exception):
    pass


class Hand:
    """A worker that notes which places it was given."""

    def __init__(self, before: Callable[[list[int]], None] = lambda places: None, **fields: object) -> None:
        self.given: list[int] = []
        self._before = before
        plain: dict[str, object] = {
            "do": self._do,
            "is_loss": lambda error: isinstance(error, LostError),
            "recover": lambda halt: False,
        }
        self.worker: Worker[int] = Worker(**{**plain, **fields})  # type: ignore[arg-type]

    def _do(self, places: list[int], at_once: int) -> list[int]:
        self._before(places)
        self.given += places
        return [place * 10 for place in places]


def once(error: BaseException) -> Callable[[list[int]], None]:
    """Raise at the first call only."""
    left = [error]

    def act(places: list[int]) -> None:
        if left:
            raise left.pop()

    return act


def done(hands: list[Hand], samples: list[int]) -> list[int]:
    return share_out(samples, [hand.worker for hand in hands])


@settings(deadline=None, max_examples=40)  # it starts threads, which take their time on a busy machine
@given(st.lists(st.integers(1, 40), max_size=40), st.integers(1, 4))
def test_every_place_is_done_once_and_results_are_in_order(samples: list[int], workers: int) -> None:
    hands = [Hand() for _ in range(workers)]
    assert done(hands, samples) == [place * 10 for place in range(len(samples))]
    assert sorted(place for hand in hands for place in hand.given) == list(range(len(samples)))


def test_a_worker_alone_is_given_everything_at_once() -> None:
    calls: list[list[int]] = []
    done([Hand(calls.append)], [FULL_BATCH] * 10)
    assert calls == [list(range(10))]


def test_small_work_is_under_way_on_all_workers_at_once() -> None:
    """Nobody waits for a first answer before the second half of so little work is begun."""
    given_out, everything = [], threading.Event()

    def wait_for_the_rest(places: list[int]) -> None:
        given_out.extend(places)
        if len(given_out) == 16:
            everything.set()
        assert everything.wait(WAIT_S)

    hands = [Hand(wait_for_the_rest), Hand(wait_for_the_rest)]
    done(hands, [8] * 16)
    assert [len(hand.given) for hand in hands] == [8, 8]


def test_a_slow_worker_gets_less_of_large_work() -> None:
    others_are_done = threading.Event()
    begun: list[int] = []

    def tell(places: list[int]) -> None:
        begun.extend(places)
        if len(begun) == 24:  # all but half of the slow one's even share
            others_are_done.set()

    def wait_for_the_others(places: list[int]) -> None:
        assert others_are_done.wait(WAIT_S)

    slow, quick = Hand(wait_for_the_others), Hand(tell)
    done([slow, quick], [FULL_BATCH] * 32)
    assert [len(slow.given), len(quick.given)] == [8, 24]


def test_a_worker_that_was_slow_before_gets_less_of_small_work() -> None:
    given_out, everything = [], threading.Event()

    def wait_for_the_rest(places: list[int]) -> None:
        given_out.extend(places)
        if len(given_out) == 16:
            everything.set()
        assert everything.wait(WAIT_S)

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
def test_shares_follow_speed_and_half_of_a_large_one_is_held_back(
    samples: int, speeds: list[float | None], expected: list[float]
) -> None:
    assert shares(samples, speeds) == pytest.approx(expected)


# Losses


def test_work_of_a_lost_worker_is_done_by_the_others_in_order() -> None:
    def lose(places: list[int]) -> None:
        raise LostError

    lost, other = Hand(lose), Hand()
    assert done([lost, other], [4] * 9) == [place * 10 for place in range(9)]
    assert sorted(other.given) == list(range(9))


def test_a_worker_alone_that_recovers_does_all_of_it_again() -> None:
    recovered: list[bool] = []
    hand = Hand(once(LostError()), recover=lambda halt: recovered.append(True) or True)
    assert done([hand], [4] * 3) == [0, 10, 20]
    assert recovered == [True]


def test_a_worker_that_is_away_at_the_start_is_given_nothing_before_it_is_back() -> None:
    is_back = threading.Event()

    def recover(halt: threading.Event) -> bool:
        is_back.set()
        return True

    hand = Hand(lambda places: None if is_back.is_set() else pytest.fail("it was away"), recover=recover, is_away=True)
    assert done([hand], [1, 1]) == [0, 10]


def test_nobody_waits_for_a_recovery_that_has_become_needless() -> None:
    ended = threading.Event()

    def recover(halt: threading.Event) -> bool:
        halt.wait(WAIT_S)
        ended.set()
        return False

    assert done([Hand(recover=recover, is_away=True), Hand()], [1] * 4) == [0, 10, 20, 30]
    assert ended.wait(WAIT_S)


def test_the_loss_is_raised_once_nobody_is_left() -> None:
    def lose(places: list[int]) -> None:
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
    def recover(halt: threading.Event) -> bool:
        raise ValueError("another model came up")

    with pytest.raises(ValueError, match="another model"):
        done([Hand(once(LostError()), recover=recover)], [1])
