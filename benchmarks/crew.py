"""The workers of one run: fresh processes, started alike whoever they are."""

import os
import platform
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import psutil
from pydantic import BaseModel

from unisono.launch.tuning import tune

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 900.0
LOOK_S = 1.0
"""How often to look whether a worker has failed while others go on."""

LAST_LINES = 12

Allocator = Literal["tuned", "default"]
FOREIGN = (
    "UNISONO_", "TORCHELASTIC_", "SLURM_", "MALLOC_", "GLIBC_TUNABLES", "OMP_", "MKL_", "KMP_", "GLOO_", "ACCELERATE_"
)  # fmt: skip
"""Variables that would make this crew another one."""

R = TypeVar("R", bound=BaseModel)


class CrewFailed(Exception):
    """A worker ended with an error, or did not end; holds its last lines."""


@dataclass(frozen=True, slots=True)
class Host:
    """Where a worker runs.

    Attributes:
        address: under which the others reach it.
        interface: the network interface with that address.
        enter: what goes before its command.
    """

    address: str = "127.0.0.1"
    interface: str = "lo"
    enter: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Crew:
    """How workers are started.

    Attributes:
        hosts: of each worker, by rank.
        threads: of each worker.
        allocator: ``tuned`` as ``unisono run`` sets it, whoever is measured; ``default`` is the C library's choice.
    """

    hosts: tuple[Host, ...]
    threads: int = 1
    allocator: Allocator = "tuned"

    @classmethod
    def here(cls, workers: int, threads: int = 1, allocator: Allocator = "tuned") -> "Crew":
        """All of them on this machine."""
        return cls((Host(),) * workers, threads, allocator)

    @property
    def ranks(self) -> range:
        """Of the workers."""
        return range(len(self.hosts))

    def variables(self, rank: int, port: int) -> dict[str, str]:
        """What a worker gets on top of the environment: where it stands, as ``torchrun`` would say it."""
        host = self.hosts[rank]
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(self.hosts)),
            "LOCAL_RANK": str(self.hosts[:rank].count(host)),
            "LOCAL_WORLD_SIZE": str(self.hosts.count(host)),
            "MASTER_ADDR": self.hosts[0].address,
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": host.interface,
            **self.settings,
        }

    @property
    def settings(self) -> dict[str, str]:
        """Variables for threads and allocator."""
        return {
            "OMP_NUM_THREADS": str(self.threads),
            "MKL_NUM_THREADS": str(self.threads),
            **tune({}, platform.libc_ver()[0], wanted=self.allocator == "tuned").variables,
        }

    def run(self, program: str, task: BaseModel, found: type[R]) -> list[R]:
        """Run a program on all workers to its end.

        Args:
            program: a module of ``benchmarks.programs``.
            task: what it is told.
            found: what it tells.

        Returns:
            what each worker found, by rank.

        Raises:
            CrewFailed: a worker failed; the others are ended.
        """
        with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
            folder = Path(name)
            (folder / "task.json").write_text(task.model_dump_json())
            self._finish(program, folder)
            texts = [(folder / f"found-{rank}.json").read_text() for rank in self.ranks]
        return [found.model_validate_json(text) for text in texts]

    def _finish(self, program: str, folder: Path) -> None:
        port = free_port()
        with ExitStack() as started:
            workers = [started.enter_context(self._worker(rank, port, program, folder)) for rank in self.ranks]
            running, waited = list(workers), 0.0
            while running:
                _, running = psutil.wait_procs(running, timeout=LOOK_S)
                waited += LOOK_S
                failed = [rank for rank, worker in enumerate(workers) if worker.poll()]
                if failed or waited > TIMEOUT_S:
                    raise CrewFailed(_last_words(folder, failed or list(self.ranks)))

    @contextmanager
    def _worker(self, rank: int, port: int, program: str, folder: Path) -> Iterator[psutil.Popen]:
        command = [*self.hosts[rank].enter, sys.executable, "-m", f"benchmarks.programs.{program}", str(folder)]
        environment = cleaned(os.environ) | self.variables(rank, port)
        with said_by(rank, folder).open("wb") as said:
            worker = psutil.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said
            )
        try:
            yield worker
        finally:
            if worker.poll() is None:
                worker.kill()
            worker.wait()


def cleaned(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what would tell a worker that it is somebody else's."""
    return {name: value for name, value in environ.items() if not name.startswith(FOREIGN)}


def free_port() -> int:
    """A port of loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def said_by(rank: int, folder: Path) -> Path:
    """Where a worker's output goes."""
    return folder / f"said-{rank}.txt"


def _last_words(folder: Path, ranks: Sequence[int]) -> str:
    words = []
    for rank in ranks:
        lines = said_by(rank, folder).read_text(errors="replace").splitlines()
        words += [f"rank {rank}: {line}" for line in lines[-LAST_LINES:]] or [f"rank {rank} said nothing"]
    return "\n".join(words)
