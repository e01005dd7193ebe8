"""Figures for MLflow: a database in the run folder, or a tracking server."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from typing import Any

from unisono.loggers.logger import OF_EVERY_STEP, Book, LoggedRun, Logger

IN_ONE = 1000
"""Figures of one call: the most that MLflow takes."""

FORBIDDEN = re.compile(r"[^\w\-. :/]")
"""In names of metrics."""


class MLflowLogger(Logger):
    """Logs into one MLflow run, and goes on with it where the job does.

    Args:
        tracking_uri: the server or database; by default ``MLFLOW_TRACKING_URI``, and without that ``mlflow.db`` in the
            run folder (``mlflow ui --backend-store-uri sqlite:///…/mlflow.db`` shows it).
        experiment: the name of the experiment, which is made if there is none.
    """

    packages = ("mlflow", "sqlalchemy", "alembic")
    extra = "mlflow"

    def __init__(self, tracking_uri: str | None = None, experiment: str = "unisono") -> None:
        self._uri, self._experiment = tracking_uri, experiment
        self._client: Any = None
        self._run = ""
        self._waiting: list[Any] = []

    def open(self, run: LoggedRun) -> int:
        """Go on behind the newest step that MLflow has of this run; a job that begins has a new run."""
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_BACKOFF_JITTER", "0")  # draws from the script's random numbers
        from mlflow.tracking import MlflowClient  # takes seconds to load

        local = f"sqlite:///{run.folder / 'mlflow.db'}"
        self._client = MlflowClient(self._uri or os.environ.get("MLFLOW_TRACKING_URI") or local)
        book = Book(run.folder)
        known = book.read("mlflow run")
        if isinstance(known, str) and run.steps:
            self._run = known
            history = self._client.get_metric_history(known, OF_EVERY_STEP)
            return max((one.step for one in history), default=-1) + 1
        self._run = self._begin(run)
        book.write("mlflow run", self._run)
        return 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Keep the step's figures for the next call; all of a step are in one."""
        from mlflow.entities import Metric

        if len(self._waiting) + len(values) > IN_ONE:
            self.flush()
        now = int(time.time() * 1000)
        self._waiting += [Metric(FORBIDDEN.sub("_", name), value, now, step) for name, value in values.items()]

    def flush(self) -> None:
        """Send what waits."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._client.log_batch(self._run, metrics=waiting)

    def close(self) -> None:
        """The run is done, as far as this process knows."""
        if self._client is not None:
            self._client.set_terminated(self._run)
            self._client = None

    def _begin(self, run: LoggedRun) -> str:
        from mlflow.entities import Param

        known = self._client.get_experiment_by_name(self._experiment)
        folder = (run.folder / "mlflow").as_uri()
        where = known.experiment_id if known else self._client.create_experiment(self._experiment, folder)
        begun = self._client.create_run(where, run_name=run.folder.name)
        job = [Param(name, str(value)) for name, value in run.job.items()]
        self._client.log_batch(begun.info.run_id, params=job)
        return str(begun.info.run_id)
