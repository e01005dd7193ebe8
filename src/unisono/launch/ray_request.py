"""A job for a Ray cluster: the request of a person, and the commands that its actors run."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.errors import JobError
from unisono.launch.command import PER_WORKER
from unisono.launch.elastic.elastic_settings import ElasticSettings

RESOURCE = re.compile(r"([A-Za-z_][\w.:/-]{0,127})=([0-9.]{1,16})", re.ASCII)


def read_resources(text: str) -> dict[str, float]:
    """The resources of one worker by Ray's names, from a text such as ``CPU=4,GPU=1``.

    Raises:
        JobError: the text has another form; quotes it.
    """
    words = [word.strip() for word in text.split(",")]
    parts = [RESOURCE.fullmatch(word) for word in words]
    try:
        resources = {part[1]: float(part[2]) for part in parts if part is not None}
    except ValueError:  # 1.2.3
        resources = {}
    if None in parts or len(resources) < len(words):
        raise JobError(f"--resources-per-worker {text}: write NAME=NUMBER, such as CPU=4 or CPU=4,GPU=1")
    return resources


@dataclass(frozen=True, slots=True)
class RayRequest:
    """A job for a Ray cluster.

    Attributes:
        settings: the settings of the job, with no worker on this host.
        resources: the resources of each worker, by Ray's names.
        folder: the working folder of scripts, unless Ray has unpacked one for the job.
    """

    settings: ElasticSettings
    resources: Mapping[str, float]
    variables: Mapping[str, str]
    folder: str

    @classmethod
    def of_this_process(
        cls, settings: ElasticSettings, resources: Mapping[str, float] | None, environ: Mapping[str, str] = os.environ
    ) -> RayRequest:
        """A request from this process, whose working folder and variables of Unisono the job's processes get, too.

        By default each worker gets a core for each of its threads.
        """
        inherited = {
            name: value for name, value in environ.items() if name.startswith("UNISONO_") and name not in PER_WORKER
        }
        launch = settings.launch
        cores = launch.threads * launch.devices
        return cls(
            settings,
            dict(resources) if resources is not None else {"CPU": cores},
            inherited | launch.extra_environment,
            str(Path.cwd()),
        )

    def check(self) -> None:
        """Refuse a job that cannot work, before Ray is asked for anything.

        Raises:
            JobError: a number is out of range, or a resource is none.
        """
        self.settings.check()
        for name, amount in self.resources.items():
            if not (math.isfinite(amount) and amount >= 0):
                raise JobError(f"{name}={amount:g}: a resource of each worker is a number from 0")
        if not any(self.resources.values()):
            raise JobError("each worker needs a resource of the cluster: CPU=1, say, or GPU=1")

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of a worker, as a bundle of a placement group."""
        return {name: amount for name, amount in self.resources.items() if amount}

    def coordinator(self, address: str, run_dir: Path) -> list[str]:
        """The words of the command that runs the coordinator."""
        settings = self.settings
        host = f"[{address}]" if ":" in address else address
        return [
            *("run", "-n", str(settings.workers), "--here", "0", "--coordinator", f"{host}:0"),
            *("--run-dir", str(run_dir), "--max-restarts", str(settings.max_restarts)),
            *(["--restart-on-error"] if settings.restart_on_error else []),
            *settings.words(),
        ]

    def agent(self, run_dir: Path | None) -> list[str]:
        """The options of ``unisono join`` for a worker, except the URL, token and certificate.

        ``run_dir`` is the run folder, if the worker's node sees it; without it a new one is made there.
        """
        return [
            *([] if run_dir is None else ["--run-dir", str(run_dir)]),
            *self.settings.devices_words,
            *self.settings.words(),
        ]


@dataclass(frozen=True, slots=True)
class RayEnd:
    """The end of a job on Ray.

    Attributes:
        exit_code: 0 for a training that is complete, 75 for one that has left with a checkpoint.
        run_dir: the run folder.
        host: the host of the coordinator's node, on which the run folder is.
        result: what ``result.json`` says there.
        words: why it ended, if the coordinator has given no reason.
        interrupted: the signal that the driver got.
    """

    exit_code: int
    run_dir: str
    host: str
    result: dict[str, Any]
    words: str = ""
    interrupted: int | None = None
