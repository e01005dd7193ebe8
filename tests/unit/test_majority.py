import pytest

from unisono.train.group.membership import StateTransfer, Verdict, healing, trusted, verdict
from unisono.train.recovery.integrity import HeldStates, judged

pytestmark = pytest.mark.unit


def test_the_majority_gives_its_state_to_the_others() -> None:
    transfer = healing([7, 5, 5])
    assert transfer is not None
    assert (transfer.source, transfer.behind) == (1, frozenset({0}))
    assert not transfer.joiners
    assert (other := healing([5, 7, 5, 5, 9])) is not None
    assert other.behind == {1, 4}


@pytest.mark.parametrize("held", [[5, 7], [5, 7, 9], [5, 5, 7, 7]])
def test_without_a_majority_nobody_can_say_which_state_is_right(held: list[int]) -> None:
    assert healing(held) is None
    assert verdict(held) is Verdict.WRONG


def test_a_worker_that_finds_a_flipped_bit_by_itself_outweighs_equal_digests() -> None:
    assert judged(HeldStates([5, 5], [False, False], [0, 0])) is Verdict.RIGHT
    assert judged(HeldStates([5, 5], [False, True], [0, 0])) is Verdict.WRONG
    assert judged(HeldStates([5, 5, 6], [False] * 3, [0] * 3)) is Verdict.HEALING


def test_of_those_who_have_come_furthest_one_of_most_gives_its_state() -> None:
    transfer = StateTransfer(source=0, acts=[4, 4, 3, 4, 0], joiners=frozenset({4}), seconds={})
    assert trusted(transfer, {}) == transfer
    assert trusted(transfer, {0: 5, 1: 5, 3: 5}) == transfer
    found = trusted(transfer, {0: 7, 1: 5, 3: 5})
    assert found is not None
    assert (found.source, found.behind) == (1, frozenset({0, 2, 4}))
    assert trusted(transfer, {0: 7, 1: 5}) is None
    assert trusted(transfer, {0: 7, 1: 5, 3: 6}) is None
