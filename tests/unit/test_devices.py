"""How the devices of a worker distribute its shards, and speak for it with one voice."""

import json
from typing import Any, cast

import pytest

from unisono.adapt.view import Timings
from unisono.reduce.tally import PRIME
from unisono.train.group.control import Balance, Flags, ShardReport
from unisono.train.group.workers import Devices, Mesh, Round
from unisono.train.step.shard_passes import shared_report, told_of
from unisono.words import MODULUS

pytestmark = pytest.mark.unit


class Inside:
    """Workers among devices of which the others have said what they say."""

    def __init__(self, rank: int, said: list[Any]) -> None:
        self.rank, self.world_size, self._said = rank, len(said), said

    def gather_json(self, value: Any) -> list[Any]:
        said = json.loads(json.dumps(self._said))
        return [*said[: self.rank], json.loads(json.dumps(value)), *said[self.rank + 1 :]]


def device(rank: int, said: list[Any]) -> Devices:
    return Devices(rank, len(said), Mesh(unreached, unreached, unreached), cast("Any", Inside(rank, said)))


def unreached(*about: Any) -> Any:
    raise AssertionError("nothing is said between calls")


def test_one_device_computes_all_shards_of_its_worker() -> None:
    assert Devices().rounds(range(2, 4)) == [
        Round(range(shard, shard + 1), range(1), shard, counts=True) for shard in (2, 3)
    ]


def test_devices_take_turns_and_whoever_has_no_shard_left_computes_the_last_one_again() -> None:
    turns = [device(rank, 3 * [None]).rounds(range(4, 9)) for rank in range(3)]
    assert [[turn.own for turn in each] for each in turns] == [[4, 7], [5, 8], [6, 8]]
    assert [[turn.counts for turn in each] for each in turns] == [[True, True], [True, True], [True, False]]
    assert {turn.shards for each in turns for turn in each} == {range(4, 7), range(7, 9)}


def test_devices_that_hold_stages_compute_each_shard_together_and_the_last_stage_tells_of_it() -> None:
    for rank in range(3):
        one = device(rank, 3 * [None])
        one.mesh.losses = 1
        turns = one.rounds(range(4, 6))
        assert [(turn.shards, turn.own, turn.devices) for turn in turns] == [
            (range(4, 5), 4, range(1, 2)),
            (range(5, 6), 5, range(1, 2)),
        ]
        assert [turn.counts for turn in turns] == [rank == 1] * 2


def test_each_device_tells_the_reports_of_all_shards_in_their_order_and_one_set_of_flags() -> None:
    told = [
        (
            [ShardReport(1.5, 4, {"a": 0.5}), ShardReport(float("nan"), 2)],
            [True, False],
            Flags(digest=MODULUS - 1, timings=Timings(shard_s=3.0), balance=Balance(-7, 2)),
        ),
        (
            [ShardReport(2.5, 0), ShardReport(9.0, 9)],
            [False, False],
            Flags(leave=True, flipped=True, digest=3, balance=Balance(8, 1 - 7 * PRIME)),  # whatever was counted
        ),
    ]
    said = [told_of(*each) for each in told]
    for rank, (reports, used, flags) in enumerate(told):
        one = device(rank, said)
        found, is_used, merged = shared_report(one, one.rounds(range(3)), reports, used, flags)
        assert [report.loss for report in found[:2]] == [1.5, 2.5]
        assert str(found[2].loss) == "nan"  # the second device's last one is the first device's again
        assert (found[0].metrics, list(is_used)) == ({"a": 0.5}, [True, False])
        assert merged == Flags(
            leave=True,
            flipped=True,
            digest=2,
            timings=Timings(shard_s=3.0),
            balance=Balance(MODULUS + 1, 3),
        )
