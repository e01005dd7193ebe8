"""What the devices of a worker say becomes one worker's words, and what they decide they decide together."""

import pytest

from unisono.membership.messages import (
    Arrived,
    Finished,
    Formed,
    Leaving,
    Lost,
    Progress,
    Pulse,
    Ready,
    ResizeRequest,
    Unreached,
)
from unisono.train.group.device_messages import Agreed, MessageMerger, Outgoing, WorkedOut

pytestmark = pytest.mark.unit


def arrived(generation: int, acts: int = 4, address: str = "", *, at_boundary: bool = False) -> Arrived:
    return Arrived(generation=generation, acts=acts, loop=1, at_boundary=at_boundary, step=3, address=address)


def test_a_worker_is_ready_when_all_its_devices_are_and_tells_all_their_addresses() -> None:
    merger = MessageMerger(3)
    assert merger.merge(2, Ready(address="c")) == Outgoing()
    assert merger.merge(0, Ready(address="a")) == Outgoing()
    assert merger.merge(1, Ready(address="b")) == Outgoing((Ready(address="a,b,c"),))


def test_a_call_that_all_devices_have_worked_out_holds_for_all() -> None:
    merger, mine = MessageMerger(2), WorkedOut(generation=1, acts=7)
    assert merger.merge(1, mine) == Outgoing()
    both = Agreed(generation=1, acts=7, holds=True)
    assert merger.merge(0, mine) == Outgoing(inside=((0, both), (1, both)))
    assert merger.merge(0, WorkedOut(generation=1, acts=8)) == Outgoing()  # the next one needs all of them again


def test_a_call_in_which_one_device_has_lost_another_worker_holds_for_none() -> None:
    merger = MessageMerger(3)
    assert merger.merge(0, WorkedOut(generation=2, acts=5)) == Outgoing()
    told = merger.merge(1, arrived(2, address="b")).inside
    none = Agreed(generation=2, acts=5, holds=False)
    assert set(told) == {(0, none), (0, Lost(generation=2)), (2, Lost(generation=2))}
    assert merger.merge(2, WorkedOut(generation=2, acts=5)) == Outgoing(inside=((2, none),))  # too late
    assert merger.merge(2, arrived(2, address="c")) == Outgoing()
    (said,) = merger.merge(0, arrived(2, address="a")).outside
    assert said == arrived(2, address="a,b,c")
    assert (
        merger.merge(0, WorkedOut(generation=3, acts=5)) == Outgoing()
    )  # in the next generation they work it out again


def test_a_joiner_whose_device_has_lost_the_others_leaves_with_all_its_devices() -> None:
    merger = MessageMerger(2)
    merger.merge(0, WorkedOut(generation=4, acts=9))
    told = merger.merge(1, Ready(loop=1, generation=4)).inside
    assert [(device, type(each)) for device, each in told] == [(0, Agreed), (0, Lost)]


def test_a_worker_stands_at_a_boundary_if_all_its_devices_do_and_names_each_host_once() -> None:
    merger, host = MessageMerger(2), Unreached(agent="a", why="it is silent")
    merger.merge(0, arrived(1, at_boundary=True).model_copy(update={"unreached": (host,)}))
    (said,) = merger.merge(1, arrived(1).model_copy(update={"unreached": (host,)})).outside
    assert isinstance(said, Arrived)
    assert (said.at_boundary, said.unreached) == (False, (host,))


def test_devices_that_stand_at_different_places_are_no_worker() -> None:
    merger = MessageMerger(2)
    merger.merge(0, arrived(1, acts=4))
    with pytest.raises(AssertionError, match="different places"):
        merger.merge(1, arrived(1, acts=5))


def test_signs_of_life_are_those_of_the_device_for_which_the_others_wait() -> None:
    merger = MessageMerger(2)
    assert (
        merger.merge(0, Progress(acts=5, step=2, pulse=Pulse(doing="wait", still_s=9.0, longest_s=1.0))) == Outgoing()
    )
    (said,) = merger.merge(1, Progress(acts=4, step=2, pulse=Pulse(doing="call", still_s=3.0, shard_s=0.5))).outside
    assert said == Progress(acts=4, step=2, pulse=Pulse(doing="call", still_s=3.0, longest_s=1.0, shard_s=0.5))
    assert merger.merge(0, Progress(acts=6, step=2)) == Outgoing()  # as long as the other one says nothing


def test_what_is_said_once_is_said_once() -> None:
    merger = MessageMerger(2)
    assert merger.merge(1, Leaving()) == Outgoing((Leaving(),))
    assert merger.merge(0, Leaving()) == Outgoing()
    assert merger.merge(1, ResizeRequest(workers=3)) == Outgoing()
    assert merger.merge(0, ResizeRequest(workers=3)) == Outgoing((ResizeRequest(workers=3),))
    assert merger.merge(0, Formed(generation=1, seconds={"form": 1.0, "copy": 0.2})) == Outgoing()
    (formed,) = merger.merge(1, Formed(generation=1, seconds={"form": 0.5, "copy": 0.3})).outside
    assert formed == Formed(generation=1, seconds={"form": 1.0, "copy": 0.3})
    assert merger.merge(0, Finished(digest="d")) == Outgoing()
    assert merger.merge(1, Finished(digest="d")) == Outgoing((Finished(digest="d"),))
