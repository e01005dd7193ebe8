"""A job for a Ray cluster: what a person asks for, and the commands that its actors run."""

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
    """``CPU=4,GPU=1``, the resources of one worker as Ray names them.

    Raises:
        JobError: it is nothing of this kind; quotes it.
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
        settings: the settings of the job; of the workers on this host it has none.
        resources: the resources of each worker, by Ray's names.
        folder: the working folder of scripts, where Ray has unpacked none for the job.
    """

    settings: ElasticSettings
    resources: Mapping[str, float]
    variables: Mapping[str, str]
    folder: str

    @classmethod
    def of_this_process(
        cls, settings: ElasticSettings, resources: Mapping[str, float] | None, environ: Mapping[str, str] = os.environ
    ) -> RayRequest:
        """The request of a person in this working folder, whose variables of Unisono hold for the job's processes.

        By default each worker gets a core for each of its threads.
        """
        ours = {
            name: value for name, value in environ.items() if name.startswith("UNISONO_") and name not in PER_WORKER
        }
        launch = settings.launch
        cores = launch.threads * launch.devices
        return cls(
            settings,
            dict(resources) if resources is not None else {"CPU": cores},
            ours | launch.extra_environment,
            str(Path.cwd()),
        )

    def check(self) -> None:
        """Refuse what cannot work, before anything is asked of Ray.

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
        """The words of the command that keeps the coordinator."""
        settings = self.settings
        host = f"[{address}]" if ":" in address else address
        return [
            *("run", "-n", str(settings.workers), "--here", "0", "--coordinator", f"{host}:0"),
            *("--run-dir", str(run_dir), "--max-restarts", str(settings.max_restarts)),
            *(["--restart-on-error"] if settings.restart_on_error else []),
            *settings.words(),
        ]

    def agent(self, run_dir: Path | None) -> list[str]:
        """What ``unisono join`` gets for a worker, but for the URL and what is trusted.

        The run folder is given if it is to be seen there; else a new one is made.
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
        words: why it ended, where the coordinator did not say it.
        interrupted: the signal that the driver got.
    """

    exit_code: int
    run_dir: str
    host: str
    result: dict[str, Any]
    words: str = ""
    interrupted: int | None = None
