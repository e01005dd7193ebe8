"""What one worker gives another arrives as it was sent, or not at all."""

from typing import Any, cast

import pytest
import torch

from unisono.errors import JobMismatch, Unreadable
from unisono.membership.rendezvous import Generation
from unisono.plan.split import Split
from unisono.reduce.transport import Transport
from unisono.train.group.workers import Workers

pytestmark = pytest.mark.unit


class Wire:
    """Takes what rank 0 broadcasts, and gives it to rank 1; on the way a bit may flip."""

    def __init__(self, flips: bool) -> None:
        self.flips = flips
        self.words: list[Any] = []
        self.sent: list[torch.Tensor] = []

    def broadcast(self, data: torch.Tensor, source: int) -> None:
        """The source comes first."""
        if not self.sent:
            self.sent.append(data.clone())
            return
        data.copy_(self.sent[0])
        if self.flips:
            data[3] ^= 1


class OneAfterTheOther(Workers):
    """A worker that finds what the one before has said."""

    def gather_json(self, value: Any) -> list[Any]:
        wire = cast("Wire", self.transport)
        wire.words.append(value)
        return wire.words


def given(flips: bool) -> Any:
    wire = Wire(flips)
    first, second = (
        OneAfterTheOther(Generation(1, rank, Split.even(2, 2)), cast("Transport", wire)) for rank in range(2)
    )
    value = {"weights": torch.tensor([1.0, 2.0]), "step": 7}
    first.broadcast(value)
    return second.broadcast(None)


def test_what_was_given_is_what_was_sent() -> None:
    value = given(flips=False)
    assert torch.equal(value["weights"], torch.tensor([1.0, 2.0]))
    assert value["step"] == 7


def test_a_bit_that_flips_on_the_way_is_found_before_anything_is_used() -> None:
    with pytest.raises(JobMismatch, match="other bits"):
        given(flips=True)


def test_a_worker_that_makes_another_call_is_named() -> None:
    wire = Wire(flips=False)
    wire.words.append(["what", "another", "call", "tells"])
    worker = OneAfterTheOther(Generation(1, 1, Split.even(2, 2)), cast("Transport", wire))
    with pytest.raises(JobMismatch, match="rank 0 makes another call than this worker, which compares its data set"):
        worker.require_same("data set", {"number of samples": 3})


class Mean:
    """Lets rank 1 say a number of another call."""

    def all_gather(self, data: torch.Tensor) -> torch.Tensor:
        return torch.stack([data, torch.tensor([1.0], dtype=torch.float64).view(torch.int64)])


def test_a_worker_that_is_in_another_call_is_named() -> None:
    worker = Workers(Generation(1, 0, Split.even(2, 2)), cast("Transport", Mean()))
    with pytest.raises(Unreadable, match=r"rank 1 announces .* in another call than this worker: all make the same"):
        worker.gather_json(7)
