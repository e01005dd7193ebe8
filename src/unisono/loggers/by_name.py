"""Loggers of our own, and how loggers are found by name, as scripts, the command line and the environment give them."""

from __future__ import annotations

import csv
import io
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from unisono.errors import JobError
from unisono.loggers.logger import OF_EVERY_STEP, LoggedRun, Logger, read_note, write_note
from unisono.named import load_named, require_named
from unisono.received import short, why_of

ENCODING, ERRORS = "utf-8", "backslashreplace"
"""How a table is written, whatever names a script gives its figures: halves of characters, too."""


class CSVLogger(Logger):
    """Writes a row per step, and a column per figure. A figure that is new gets a column of its own, on the right.

    Args:
        file: the file's name in the run folder.
    """

    def __init__(self, file: str = "metrics.csv") -> None:
        self._name = file
        self._path = Path()
        self._columns: list[str] = []
        self._file: IO[str] | None = None

    @property
    def name(self) -> str:
        """The file's name."""
        return self._name

    def open(self, run: LoggedRun) -> int:
        """Keep the rows of committed steps, and go on behind them."""
        self._path = run.folder / self._name
        rows = [] if run.steps == 0 else self._rows()
        kept = [row for row in rows if int(row["step"]) < run.steps]
        self._columns = list(rows[0]) if rows else ["step"]
        self._rewrite(kept)
        return int(kept[-1]["step"]) + 1 if kept else 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a row, whole or not at all."""
        if new := [name for name in values if name not in self._columns]:
            rows = self._rows()
            self._columns += new
            self._rewrite(rows)
        assert self._file is not None, "it is open"
        row = io.StringIO()
        csv.DictWriter(row, self._columns, lineterminator="\n").writerow({**values, "step": step})
        self._file.write(row.getvalue())
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _rows(self) -> list[dict[str, str]]:
        """The whole rows of the file, each with all columns; a torn last one is left out."""
        if not self._path.is_file():
            return []
        text, _, _ = self._path.read_text(ENCODING, ERRORS).rpartition("\n")
        return [row for row in csv.DictReader(io.StringIO(text)) if (row.get("step") or "").isdecimal()]

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        self.close()
        beside = self._path.with_name(f".{self._name}.new")
        with beside.open("w", encoding=ENCODING, errors=ERRORS, newline="") as file:
            writer = csv.DictWriter(file, self._columns, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        beside.replace(self._path)
        self._file = self._path.open("a", encoding=ENCODING, errors=ERRORS, newline="")


class TensorBoardLogger(Logger):
    """Writes scalars into event files: ``tensorboard --logdir runs`` shows them.

    Each process that goes on has a file of its own. It begins with the number of its first step, and TensorBoard drops
    what earlier files say of that step and later ones.

    Args:
        folder: the folder in the run folder.
    """

    packages = ("tensorboard",)
    extra = "tensorboard"

    def __init__(self, folder: str = "tensorboard") -> None:
        self._folder = folder
        self._writer: Any = None

    def open(self, run: LoggedRun) -> int:
        """Go on behind what was surely written."""
        self.close()
        from torch.utils.tensorboard import SummaryWriter  # takes a second to load

        first = min(run.logged, run.steps)
        folder = run.folder / self._folder
        if first == 0 and folder.is_dir():  # what is there nobody has noted: a step 0 cannot be dropped otherwise
            shutil.rmtree(folder)
        self._writer = SummaryWriter(str(folder), purge_step=first or None)
        return first

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a scalar per figure."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Write what waits in memory."""
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


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
        known = read_note(run.folder, "mlflow run")
        if isinstance(known, str) and run.steps:
            self._run = known
            history = self._client.get_metric_history(known, OF_EVERY_STEP)
            return max((metric.step for metric in history), default=-1) + 1
        self._run = self._begin(run)
        write_note(run.folder, "mlflow run", self._run)
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


BLOCK = 32768
"""Bytes of a block of a ``.wandb`` file, which is a log as LevelDB writes it: headers of 7 bytes lie in one block."""


class WandbLogger(Logger):
    """Logs into one run of Weights & Biases, and goes on with it where the job does; ``step`` is the axis of all plots.

    Offline by default: ``wandb sync runs/…/wandb/offline-run-*`` sends the files, in the order of their names, with
    ``--append`` if there are several.

    Args:
        project: the name of the project; by default ``WANDB_PROJECT``, and without that ``unisono``.
        mode: ``offline`` or ``online``; by default ``WANDB_MODE``, and without that offline.
    """

    packages = ("wandb",)
    extra = "wandb"

    def __init__(self, project: str | None = None, mode: str | None = None) -> None:
        self._project, self._mode = project, mode
        self._run: Any = None

    def open(self, run: LoggedRun) -> int:
        """Go on behind the newest step that the files have; a job that begins has a new run."""
        self.close()
        import wandb  # takes a second to load

        folder, known = run.folder / "wandb", read_note(run.folder, "wandb run")
        first = newest_step(folder, known) + 1 if isinstance(known, str) else 0
        if not isinstance(known, str) or (run.steps == 0 and first > 0):
            known, first = secrets.token_hex(4), 0
            write_note(run.folder, "wandb run", known)
        folder.mkdir(exist_ok=True)
        self._run = wandb.init(
            project=self._project or os.environ.get("WANDB_PROJECT") or "unisono",
            mode=self._mode or os.environ.get("WANDB_MODE") or "offline",  # type: ignore[arg-type]
            id=known,
            name=run.folder.name,
            dir=run.folder,
            config=dict(run.job),
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return first

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send a step's figures to the process that writes them."""
        self._run.log({**values, "step": step})

    def close(self) -> None:
        """Wait until all is written, or sent."""
        if self._run is not None:
            self._run.finish()
            self._run = None


def newest_step(folder: Path, run: str) -> int:
    """The newest step of a run that its files have whole; -1 if there is none."""
    steps = (step for path in folder.glob(f"*run-*-{run}/run-{run}.wandb") for step in history(path))
    return max((step for step, values in steps if OF_EVERY_STEP in values), default=-1)


def history(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """The steps that a ``.wandb`` file has whole, with their figures; a torn end is left out."""
    from wandb.proto.wandb_internal_pb2 import Record

    for data in _records(path.read_bytes()):
        items = {
            item.key or "/".join(item.nested_key): item.value_json for item in Record.FromString(data).history.item
        }
        if "step" in items:
            own = {name: float(text) for name, text in items.items() if not name.startswith("_") and name != "step"}
            yield int(items["step"]), own


def _records(data: bytes) -> Iterator[bytes]:
    place, record = 7, b""
    while place + 7 <= len(data):
        if (left := BLOCK - place % BLOCK) < 7:
            place += left
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        part = data[place + 7 : place + 7 + size]
        if len(part) < size:
            return
        place += 7 + size
        record = part if kind in (1, 2) else record + part
        if kind in (1, 4):
            yield record


NAMED: dict[str, Callable[[], Logger]] = {
    "tensorboard": TensorBoardLogger,
    "csv": CSVLogger,
    "mlflow": MLflowLogger,
    "wandb": WandbLogger,
}


def loggers_of(given: Sequence[Logger | str], where: str = "loggers") -> tuple[Logger, ...]:
    """Make loggers, and see whether they can work.

    Args:
        given: loggers, names of our own, of those that packages bring, or ``module:Class``, which are called
            without arguments.
        where: the argument, variable or option that they stand in, for errors.

    Raises:
        JobError: there is no such logger, two are alike, or a package is missing; says what to do.
    """
    loggers = tuple(_made(logger, where) if isinstance(logger, str) else logger for logger in given)
    for logger in loggers:
        logger.require_packages()
    names = [logger.name for logger in loggers]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise JobError(f"{where}: {short(twice)} is there twice: leave one of them out, or give it another name")
    return loggers


def require_loggers(names: Sequence[str], where: str) -> None:
    """Refuse names of no logger, as :func:`~unisono.named.require_named` does."""
    require_named(names, NAMED, "logger", where)


def _made(name: str, where: str) -> Logger:
    make = load_named(name, NAMED, "logger", where)
    try:
        logger = make()
    except JobError:
        raise
    except Exception as error:  # noqa: BLE001 (whatever a class of the user does)
        raise JobError(f"{where}={short(name)}: the logger cannot be made: {why_of(error)}") from None
    if not isinstance(logger, Logger):
        raise JobError(f"{where}={short(name)}: it makes a {type(logger).__name__}, and no unisono.Logger")
    return logger
