import pytest
import torch

from unisono.errors import JobMismatch
from unisono.train.majority import healing, weights_digest

pytestmark = pytest.mark.unit


def test_a_digest_survives_the_way_through_a_float64_and_tells_a_single_bit() -> None:
    weights = {"weight": torch.arange(12.0).reshape(3, 4)}
    digest = weights_digest(weights)
    assert int(float(digest)) == digest > 0
    weights["weight"].view(torch.int32)[1, 2] ^= 1
    assert weights_digest(weights) != digest


def test_the_majority_gives_its_weights_to_the_others() -> None:
    arrival = healing([7, 5, 5], step=3)
    assert (arrival.source, arrival.behind) == (1, frozenset({0}))
    assert not arrival.joiners
    assert healing([5, 7, 5, 5, 9], step=3).behind == {1, 4}


@pytest.mark.parametrize("digests", [[5, 7], [5, 7, 9], [5, 5, 7, 7]])
def test_without_a_majority_nobody_can_say_which_weights_are_right(digests: list[int]) -> None:
    with pytest.raises(JobMismatch, match="step 3: the workers hold different weights .*rank 1"):
        healing(digests, step=3)
