"""What the launcher and a host tell each other over ssh before the host's agent begins: a line of JSON each."""

import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from unisono.errors import Unreadable
from unisono.launch.command import PER_WORKER
from unisono.launch.elastic.address import Address
from unisono.launch.elastic.coordinator_process import job_words
from unisono.launch.elastic.elastic import ElasticSettings
from unisono.launch.elastic.host_order import LONGEST, HostOrder
from unisono.launch.hosts.hostfile import HostSlots
from unisono.received import parse_json, short, value_of

MARK = "unisono-host "
"""How the hello of a host begins. What comes before it is a greeting of its shell."""


def version() -> str:
    """The version of Unisono on this host."""
    return str(sys.modules["unisono"].__version__)


@dataclass(frozen=True, slots=True)
class HostHello:
    """The first word of a host: whom the launcher reaches there.

    Attributes:
        version: its version of Unisono.
        python: its version of Python.
    """

    version: str
    python: str

    @classmethod
    def of_this_host(cls) -> "HostHello":
        """That of this process."""
        return cls(version(), platform.python_version())

    def to_line(self) -> str:
        """As it travels."""
        return MARK + json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> "HostHello | None":
        """The inverse of ``to_line``; None for any other line."""
        if not line.startswith(MARK):
            return None
        try:
            found: HostHello = value_of(cls, parse_json(line.removeprefix(MARK), LONGEST), "its hello")
        except Unreadable:
            return None
        return found

    def obstacle(self) -> str:
        """Why this host cannot work with that one; empty if it can."""
        if self.version == version():
            return ""
        return (
            f"it has Unisono {short(self.version)}, and this host {version()}: install the same version on "
            f"all hosts, or name another interpreter with --python"
        )


# What is in the order of a host.

HANDED_ON = re.compile(r"(UNISONO|OMP|MKL|NCCL)_.*|PYTHONPATH")
"""Variables that hosts get without being asked for."""

OF_THIS_HOST = frozenset({*PER_WORKER, "UNISONO_RUN_DIR", "UNISONO_LAUNCHER_PID"})


def handed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """Those among the variables of the launcher."""
    return {name: value for name, value in environ.items() if HANDED_ON.fullmatch(name) and name not in OF_THIS_HOST}


@dataclass(frozen=True, slots=True)
class Orders:
    """Makes the orders of the hosts of a job.

    Attributes:
        settings: the settings of the job.
        run_dir: its run folder.
        environment: the variables that hosts get.
    """

    settings: ElasticSettings
    run_dir: Path
    environment: Mapping[str, str]

    def __call__(self, host: HostSlots, agent: str, address: Address) -> HostOrder:
        """The order of a host."""
        return HostOrder(
            url=address.url,
            is_seen_from_there=not self.settings.entrance.host,
            token=address.token,
            certificate="" if address.certificate is None else address.certificate.read_text(encoding="ascii"),
            folder=os.getcwd(),  # noqa: PTH109 (as text)
            agent=agent,
            words=self.words(host),
            environment=self.environment,
        )

    def words(self, host: HostSlots) -> tuple[str, ...]:
        """What ``unisono join`` gets there, but for the URL and what is trusted."""
        return (
            *("-n", str(host.slots), "--run-dir", os.path.abspath(self.run_dir)),  # noqa: PTH100 (as for the run folder)
            *job_words(self.settings),
        )
