"""Unisono, on any number of workers."""

import os
from contextlib import closing
from pathlib import Path

import unisono
from benchmarks.contenders.loop import Loop, Sample, fresh_model
from benchmarks.task import Task
from benchmarks.workloads import BATCHES
from unisono.settings.reading import TABLE, settings_by_path


def train(task: Task, folder: Path) -> Loop:
    """``task.options`` are settings by name; unless they say otherwise there are as many shards as workers."""
    shards = task.options.get("shards") or int(os.environ["WORLD_SIZE"])  # which an open run hides
    values = {"batch_size": task.batch_size, "threads": task.threads, "shards": shards}
    paths = {setting.name: path for path, setting in TABLE.items() if not path.startswith(("launch.", "special."))}
    settings = settings_by_path({paths[name]: value for name, value in {**values, **task.options}.items()})
    said = {name: value for name, value in settings.values.items() if name not in ("launch", "special")}
    with unisono.init(run_dir=folder, **said) as run:
        model = fresh_model(task)
        run.prepare(model, task.optimizer(model))
        epochs = -(-(task.warm_up + task.steps) // BATCHES)
        with closing(run.steps(task.data(), epochs, shuffle=False)) as steps:
            for step in steps:
                loss = step.run(task.loss)
                yield Sample(loss, run.metrics.get("seconds", {}))
