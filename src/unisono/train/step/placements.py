"""Chooses the placement of a model."""

from __future__ import annotations

from unisono.train.group.workers import Workers
from unisono.train.model.prepared import Prepared
from unisono.train.model.staging import staging_of
from unisono.train.step.placement import Placement


def placement_of(prepared: Prepared, workers: Workers) -> Placement:
    """The placement of a model on the devices of this worker. Only this function asks how many devices there are."""
    if workers.devices.count == 1:
        return Placement(prepared, workers)
    if (staging := staging_of(prepared.modules)) is not None:
        from unisono.train.step.pipeline import Pipeline  # loads torch's pipelining, which takes seconds

        return Pipeline(prepared, workers, staging)
    if workers.devices.mesh.call == "run.parallelize":
        from unisono.train.step.placement import TensorParallel

        return TensorParallel(prepared, workers)
    from unisono.train.step.sliced_gradients import Slicing  # loads FSDP, which takes seconds

    return Slicing(prepared, workers)
