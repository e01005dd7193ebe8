"""Unisono, on any number of workers."""

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import unisono
from benchmarks.contenders.loop import Loop, Sample, fresh_model
from benchmarks.task import Task
from benchmarks.workloads import BATCHES


def train(task: Task, folder: Path) -> Loop:
    """``task.options`` go to ``unisono.init``; unless they say otherwise there are as many shards as workers."""
    options: dict[str, Any] = {"shards": int(os.environ["WORLD_SIZE"]), **task.options}
    with unisono.init(batch_size=task.batch_size, threads=task.threads, run_dir=folder, **options) as run:
        model = fresh_model(task)
        run.prepare(model, task.optimizer(model))
        epochs = -(-(task.warm_up + task.steps) // BATCHES)
        with closing(run.steps(task.data(), epochs, shuffle=False)) as steps:
            for step in steps:
                loss = step.run(task.loss)
                yield Sample(loss, run.metrics.get("seconds", {}))
