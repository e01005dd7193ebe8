"""How workers are to be connected is refused before any of them waits for another."""

import sys

import pytest
import torch
import torch.distributed as dist

from unisono.errors import JobError
from unisono.job import Job
from unisono.membership.environment import Environment
from unisono.membership.rendezvous import Generation
from unisono.plan.split import Split
from unisono.settings.table import Communication
from unisono.train.config.run_config import Connection, RunConfig
from unisono.train.group.connect import connect, mesh_of, topology_over
from unisono.train.group.meeting import FixedRendezvous

pytestmark = pytest.mark.unit

THREE = Environment("unisono", 0, 3, 0, 3, "here")


class Alone(FixedRendezvous):
    """The rendezvous of a worker that nobody else has to find."""

    held: dist.Store | None = None

    def store(self) -> dist.Store:
        return self.held or dist.HashStore()


def refusal(transport: str = "auto", topology: str = "auto", reduction: str = "exact") -> str:
    job = Job.create(batch_size=64, shards=8, reduction=reduction)
    with pytest.raises(JobError) as error:
        generation = Generation(1, 0, Split.even(8, 3))
        how = Communication(transport=transport, topology=topology)  # type: ignore[arg-type]
        config = RunConfig(job, torch.device("cpu"), connection=Connection(how, timeout_s=1.0))
        connect(config, generation, Alone(THREE, 1.0))
    return str(error.value)


def test_workers_that_would_meet_elsewhere_are_told_so_before_anybody_waits() -> None:
    store, generation = dist.HashStore(), Generation(1, 1, Split.even(8, 2))
    store.set("place/board/first", b"cuda and transport='auto'".hex())
    second = Alone(Environment("unisono", 1, 2, 1, 2, "here"), 1.0)
    second.held = store
    with pytest.raises(
        JobError, match=r"rank 1 on host \S+ has cpu and transport='auto', and rank 0 .cuda and transport="
    ):
        connect(RunConfig(Job.create(batch_size=64, shards=8), torch.device("cpu")), generation, second)


def test_a_topology_and_shared_memory_exclude_each_other() -> None:
    said = refusal(transport="shared_memory", topology="ring")
    assert said.startswith("transport='shared_memory' cannot be used: topology='ring' is a way between hosts")


def test_a_native_reduction_has_no_topology_to_choose() -> None:
    assert "reduction='native' uses the backend's all-reduce" in refusal(topology="tree", reduction="native")


def test_nccl_goes_the_direct_way_only() -> None:
    job = Job.create(batch_size=64, shards=8)
    with pytest.raises(JobError, match="topology='star' needs CPUs"):
        topology_over("nccl", job, "star")
    assert topology_over("nccl", job, "direct") is None


def test_a_mesh_of_devices_leaves_errors_as_python_prints_them() -> None:
    """torch would begin each line with a rank, once more for every group that a run has had."""
    config = RunConfig(Job.create(batch_size=64), torch.device("cpu"), connection=Connection(timeout_s=10.0))
    mesh, before = mesh_of(config, Alone(Environment("unisono", 0, 1, 0, 1, "here"), 10.0)), sys.excepthook
    try:
        assert mesh.mesh.size() == 1
        assert sys.excepthook is before
    finally:
        mesh.close()
        sys.excepthook = before
