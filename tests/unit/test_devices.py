"""How the devices of a worker distribute its shards, and speak for it with one voice."""

import json
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from unisono.job import Job
from unisono.membership.rendezvous import Generation
from unisono.plan.split import Split
from unisono.reduce.partial_sums import PRIME
from unisono.reduce.transport import Solo
from unisono.train.config.run_config import Execution
from unisono.train.group.workers import Devices, Mesh, Workers
from unisono.train.model.buffers import Buffers
from unisono.train.model.prepared import Prepared
from unisono.train.step.part import EngineBase
from unisono.train.step.pipeline import Pipeline
from unisono.train.step.placement import Placement, TensorParallel
from unisono.train.step.placements import placement_of
from unisono.train.step.shard_passes import Round
from unisono.train.step.sliced_gradients import Slicing
from unisono.train.step.word import Field, ReportExchange, ShardReport
from unisono.words import MODULUS

pytestmark = pytest.mark.unit

JOB = Job.create(batch_size=3, shards=3)
NO_BUFFERS = Buffers((), Split.even(3, 1), 0)


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


def workers_of(devices: Devices, shards: int = 3) -> Workers:
    return Workers(Generation(1, 0, Split.even(shards, 1)), Solo(shards), devices=devices)


def prepared() -> Prepared:
    model = nn.Linear(2, 1)
    return Prepared.of(model, [torch.optim.SGD(model.parameters(), lr=0.1)])


def test_one_device_computes_all_shards_of_its_worker() -> None:
    found = placement_of(prepared(), workers_of(Devices()))
    assert type(found) is Placement
    assert found.rounds(range(2, 4)) == [
        Round(range(shard, shard + 1), range(1), shard, counts=True) for shard in (2, 3)
    ]


def test_devices_take_turns_and_whoever_has_no_shard_left_computes_the_last_one_again() -> None:
    found = [placement_of(prepared(), workers_of(device(rank, 3 * [None]))) for rank in range(3)]
    assert {type(each) for each in found} == {Slicing}
    turns = [each.rounds(range(4, 9)) for each in found]
    assert [[turn.own for turn in each] for each in turns] == [[4, 7], [5, 8], [6, 8]]
    assert [[turn.counts for turn in each] for each in turns] == [[True, True], [True, True], [True, False]]
    assert {turn.shards for each in turns for turn in each} == {range(4, 7), range(7, 9)}


def test_devices_that_hold_stages_compute_each_shard_together_and_the_last_stage_tells_of_it() -> None:
    for rank in range(3):
        staging: Any = SimpleNamespace(places=SimpleNamespace(last=1))
        turns = Pipeline(prepared(), workers_of(device(rank, 3 * [None])), staging).rounds(range(4, 6))
        assert [(turn.shards, turn.own, turn.devices) for turn in turns] == [
            (range(4, 5), 4, range(1, 2)),
            (range(5, 6), 5, range(1, 2)),
        ]
        assert [turn.counts for turn in turns] == [rank == 1] * 2


def test_devices_in_tensor_parallel_compute_each_shard_together_and_the_first_one_tells_of_it() -> None:
    for rank in range(3):
        one = device(rank, 3 * [None])
        one.mesh.call = "run.parallelize"
        found = placement_of(prepared(), workers_of(one))
        assert type(found) is TensorParallel
        assert found.rounds(range(4, 5)) == [Round(range(4, 5), range(1), 4, counts=True)]


def alone(heard: list[Any], row: Any) -> Any:
    heard.append(row)
    return row[None]


def test_each_device_tells_the_reports_of_all_shards_in_their_order_and_one_value_of_each_field() -> None:
    fields = [
        Field("leave"),
        Field("digest", "Q", "each", "sum", MODULUS),
        Field("seconds", "d", "each"),
        Field("copies", "Q", "sum", modulus=PRIME),
    ]
    told = [
        (
            [False, MODULUS - 1, 3.0, PRIME - 7],
            [ShardReport(1.5, 4, {"a": 0.5}), ShardReport(float("nan"), 2, {"a": 1.0})],
            [True, False],
        ),
        ([True, 3, 0.0, 8], [ShardReport(2.5, 0), ShardReport(9.0, 9)], [False, False]),
    ]
    said = [[values, [asdict(each) for each in reports], used] for values, reports, used in told]
    for rank, (values, reports, used) in enumerate(told):
        one = device(rank, said)
        workers = workers_of(one)
        heard: list[Any] = []
        exchange = ReportExchange(workers, fields)
        workers.transport.all_gather = partial(alone, heard)  # type: ignore[method-assign]
        base = EngineBase(JOB, workers, trained := prepared(), torch.device("cpu"), Execution(), NO_BUFFERS, None)
        passes = placement_of(trained, workers).passes(base)
        report, by_field = exchange.send_and_receive(*passes.of_worker(fields, (values, reports, used)))
        assert [each.loss for each in report.shards[:2]] == [1.5, 0.0]  # the second one is empty
        assert (
            report.shards[2].loss != report.shards[2].loss
        )  # the second device's last one is the first device's again
        assert (report.shards[0].metrics, report.used) == ({"a": 0.5}, (True, False))
        assert [each for (each,) in by_field] == [True, 2, 3.0, 1]
