"""The options of ``unisono run`` for hosts that it reaches over ssh."""

import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from unisono.checkpoint.folder import RunFolder
from unisono.cli.options import opt
from unisono.errors import JobError
from unisono.host.open_files import allow_open_files
from unisono.launch.elastic.elastic import ElasticSettings, Range
from unisono.launch.hosts.hostfile import HostPlan, read_hosts
from unisono.launch.hosts.ssh import Ssh, is_here
from unisono.launch.terminal.terminal import Terminal
from unisono.received import short
from unisono.settings.table import SEVERAL_HOSTS

if TYPE_CHECKING:  # it loads what only elastic jobs need
    from unisono.launch.elastic.agent import StartedAgents

FILES_OF_HOST = 4
"""Open files that a host takes here: the pipes of its ssh, and the pipe from which one of them is made."""

FILES_OF_JOB = 256


@dataclass(frozen=True, slots=True)
class HostOptions:
    """The options of a job whose hosts are reached over ssh."""

    hosts: Annotated[str | None, opt(metavar="A:4,B:4|FILE", panel=SEVERAL_HOSTS)] = None
    """Start workers on these hosts, over ssh: names with room for so many, or a hostfile (a slots=4)."""
    ssh: Annotated[str, opt(panel=SEVERAL_HOSTS)] = "ssh"
    """With --hosts: ssh, with options of yours."""
    python: Annotated[str, opt(panel=SEVERAL_HOSTS)] = sys.executable
    """With --hosts: their Python interpreter; by default that of this command."""
    env: Annotated[list[str] | None, opt(metavar="NAME[=VALUE]", panel=SEVERAL_HOSTS)] = None
    """An environment variable for the workers of all hosts; repeat for more."""

    def placement(self, workers: Range | None) -> HostPlan | None:
        """Where workers run; None without ``--hosts``.

        Args:
            workers: the numbers of workers that the person wants; None for as many as there is room for.

        Raises:
            JobError: the hosts cannot be read, or have no room for them.
        """
        if self.hosts is None:
            return None
        found = HostPlan.of(read_hosts(self.hosts), is_here)
        if workers is None:
            return found
        if found.room < workers.largest:
            raise JobError(
                f"--workers {workers}: the hosts of --hosts have room for {found.room}; give them more slots"
            )
        return found.first(workers.largest) if workers.is_fixed else found

    def variables(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """The variables that are named for all workers.

        Args:
            environ: the variables of this process.

        Raises:
            JobError: one is no name, or is not set.
        """
        found = {}
        for word in self.env or ():
            name, equals, value = word.partition("=")
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise JobError(f"--env {short(word)}: write NAME, or NAME=value")
            if not equals and name not in environ:
                raise JobError(f"--env {short(word)}: there is no such variable here; write NAME=value to set it")
            found[name] = value if equals else environ[name]
        return found

    def towards(self, placement: HostPlan | None) -> str:
        """The address of the first of the other hosts; empty without one."""
        if placement is None or not placement.elsewhere:
            return ""
        return Ssh.read(self.ssh, self.python).address(placement.elsewhere[0].name)

    def lines(self, placement: HostPlan, settings: ElasticSettings, run_dir: Path) -> Iterator[str]:
        """What would be run for each host, for a person to read."""
        from unisono.launch.hosts.order import Orders

        orders, ssh = Orders(settings, run_dir, {}), Ssh.read(self.ssh, self.python)
        for host in placement.elsewhere:
            yield f"# host {host.name}, which joins with: unisono join URL {shlex.join(orders.words(host))}"
            yield shlex.join(ssh.words(host.name, settings.failure_timeout_s))

    def agents(
        self, placement: HostPlan, settings: ElasticSettings, folder: RunFolder, terminal: Terminal
    ) -> "StartedAgents | None":
        """What starts and ends the agents of the other hosts; None if there are none.

        Raises:
            JobError: an option cannot be what it is.
        """
        from unisono.launch.hosts.host_agents import HostAgents
        from unisono.launch.hosts.order import Orders, handed_on

        if not placement.elsewhere:
            return None
        needed = FILES_OF_HOST * len(placement.elsewhere) + FILES_OF_JOB
        if (allowed := allow_open_files(needed)) < needed:
            raise JobError(
                f"--hosts: {len(placement.elsewhere)} hosts take {needed} open files here, and the system allows "
                f"{allowed}: raise the limit (ulimit -n), or name fewer hosts and start the others with unisono join"
            )
        return HostAgents(
            placement.elsewhere,
            Ssh.read(self.ssh, self.python),
            Orders(settings, folder.path, handed_on(os.environ) | self.variables()),
            smallest=settings.workers.smallest,
            here=placement.here,
            silence_s=settings.failure_timeout_s,
            terminal=terminal,
        )
