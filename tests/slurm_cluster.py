"""A Slurm of three nodes on this machine: the real one, in namespaces of its own, which nobody else sees."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

TOOLS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged", "ip", "unshare", "nsenter", "hostname", "mount")

NODES = ("n1", "n2", "n3")
LOGIN = "login"
"""The host on which people work, and the controller."""

ADDRESSES = {name: f"10.79.0.{number}" for number, name in enumerate((*NODES, LOGIN), 1)}

START_S = 30.0
PATIENCE_S = 240.0

INSIDE = f"""
mount --bind hosts /etc/hosts && hostname {LOGIN} && ip link set lo up || exit 1
for address in {" ".join(ADDRESSES.values())}; do ip address add "$address" dev lo || exit 1; done
munged --force --key-file="$PWD/munge.key" --socket="$PWD/munge.socket" --pid-file="$PWD/munge.pid" \\
    --seed-file="$PWD/munge.seed" --log-file="$PWD/munge.log" || exit 1
slurmctld -D &
for node in {" ".join(NODES)}; do unshare --uts sh -c 'hostname "$1" && exec slurmd -D -N "$1"' sh "$node" & done
echo there
cat
"""
"""The first process: it waits for those that lose their parents, and all others end with it."""

# A job waits for as long as credentials last before it starts again, and Slurm's usual two minutes are long.
# The kernel's process table is what tells which processes are a job's: there are no control groups here.
CONFIGURATION = """
ClusterName=tests
SlurmctldHost={login}
SlurmctldPort=6817
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=6
KillWait=30
InactiveLimit=0
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=usual Nodes=ALL Default=YES PriorityTier=1 GraceTime=30 State=UP
PartitionName=urgent Nodes=ALL PriorityTier=9 State=UP
"""


class NoCluster(Exception):
    """It cannot be made here; says why."""


class Cluster:
    """The commands of a cluster that runs.

    Args:
        folder: its files.
        pid: of the first process in its namespaces.
    """

    def __init__(self, folder: Path, pid: int) -> None:
        self._folder, self._pid = folder, pid

    def command(self, *words: str, folder: Path) -> list[str]:
        """A command on the host where people work, in a folder."""
        enter = ["nsenter", f"--target={self._pid}", "--net", "--mount", "--uts", "--pid", f"--wd={folder}"]
        return [*enter, "--", "env", f"SLURM_CONF={self._folder}/slurm.conf", *words]

    def run(self, *words: str, folder: Path, **variables: str) -> str:
        """Run a command there to its end; what it has printed.

        Raises:
            AssertionError: it has failed, or takes too long.
        """
        done = subprocess.run(
            self.command(*words, folder=folder), env={**os.environ, **variables}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def slurm(self, *words: str) -> str:
        """One of Slurm's own commands."""
        return self.run(*words, folder=self._folder)

    def show(self, job: str) -> dict[str, str]:
        """What ``scontrol show job`` knows: ``JobState``, ``ExitCode``, ``Restarts`` and more."""
        return dict(re.findall(r"(\w+)=(\S*)", self.slurm("scontrol", "show", "job", "--oneliner", job)))

    def until(self, job: str, state: str) -> dict[str, str]:
        """Wait until a job is in a state; what is known of it then. One that has ended stays as it is."""
        found: dict[str, str] = {}

        def is_so() -> bool:
            found.update(self.show(job))
            assert found["JobState"] not in ENDS - {state}, f"{state} was expected\n{found}\n{self.output(found)}"
            return found["JobState"] == state

        self.wait_for(is_so, lambda: f"{state}\n{found}\n{self.output(found)}")
        return found

    def output(self, found: Mapping[str, str]) -> str:
        """What a job has printed, for people."""
        path = Path(found.get("StdOut", ""))
        return path.read_text(errors="replace")[-6000:] if path.is_file() else ""

    def wait_for(self, is_so: Callable[[], bool], words: Callable[[], str]) -> None:
        """Wait until something is so."""
        begun = time.monotonic()
        while not is_so():
            assert time.monotonic() - begun < PATIENCE_S, f"it did not come: {words()}"
            time.sleep(0.1)

    def requeue(self, job: str) -> None:
        """Have Slurm end a job and start it again."""
        self.slurm("scontrol", "requeue", job)

    def kill(self, node: str) -> None:
        """A node dies, with all that runs on it, for good."""
        name = os.readlink(f"/proc/{self._slurmd(node)}/ns/uts")  # noqa: PTH115 (as text)
        for process in psutil.Process(self._pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess, FileNotFoundError):
                if os.readlink(f"/proc/{process.pid}/ns/uts") == name:  # noqa: PTH115 (as text)
                    process.kill()

    def _slurmd(self, node: str) -> int:
        for process in psutil.Process(self._pid).children():
            with suppress(psutil.NoSuchProcess):
                if process.cmdline()[:1] == ["slurmd"] and process.cmdline()[-1] == node:
                    return int(process.pid)
        raise AssertionError(f"{node} is not up")

    def until_idle(self) -> None:
        """Wait until all nodes are free."""
        command = ["sinfo", "--noheader", "--Node", "--partition=urgent", "--format=%T"]
        self.wait_for(lambda: self.slurm(*command).split() == ["idle"] * len(NODES), lambda: self.slurm("sinfo"))

    def clear(self) -> None:
        """End all jobs, and use all nodes again."""
        self.slurm("scancel", "--state=PENDING", "--user=root")
        self.slurm("scancel", "--signal=KILL", "--full", "--user=root")
        self.slurm("scancel", "--user=root")
        for node in self.slurm(
            "sinfo", "--noheader", "--Node", "--partition=urgent", "--states=drain", "--format=%N"
        ).split():
            self.slurm("scontrol", "update", f"NodeName={node}", "State=RESUME")
        self.until_idle()


ENDS = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"}
"""States that a job does not leave by itself."""


@contextmanager
def slurm_cluster() -> Iterator[Cluster]:
    """As long as the context lasts; all of its processes end with it, or with this process.

    Raises:
        NoCluster: not root, Slurm is not installed, or the kernel cannot do it.
    """
    _require_tools()
    with tempfile.TemporaryDirectory(prefix="slurm-") as name:
        folder = Path(name)
        _write(folder)
        command = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with (folder / "daemons.log").open("wb") as log, subprocess.Popen(
            [*command, "sh", "-c", INSIDE], cwd=folder, env={**os.environ, "SLURM_CONF": f"{folder}/slurm.conf"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
        ) as outside:  # fmt: skip
            assert outside.stdin is not None
            assert outside.stdout is not None
            try:
                if not outside.stdout.readline():
                    raise NoCluster(f"it does not start: {(folder / 'daemons.log').read_text()[-500:]}")
                (inside,) = psutil.Process(outside.pid).children()
                cluster = Cluster(folder, inside.pid)
                cluster.until_idle()
                yield cluster
            finally:
                outside.stdin.close()  # the first process ends, and the kernel kills all others of its namespace
                with suppress(subprocess.TimeoutExpired):
                    outside.wait(START_S)
                outside.kill()


def _require_tools() -> None:
    if not sys.platform.startswith("linux"):
        raise NoCluster(f"namespaces are Linux's, and this is {sys.platform}")
    if os.geteuid() != 0:
        raise NoCluster("making namespaces needs root")
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise NoCluster(f"{', '.join(missing)} not installed: 'make slurm' installs it on Debian")


def _write(folder: Path) -> None:
    key = folder / "munge.key"
    key.touch(mode=0o400)
    key.write_bytes(os.urandom(128))
    addresses = {"localhost": "127.0.0.1", **ADDRESSES}
    (folder / "hosts").write_text("".join(f"{address} {name}\n" for name, address in addresses.items()))
    nodes = [
        f"NodeName={name} NodeHostname={name} NodeAddr={ADDRESSES[name]} Port={10000 + number} CPUs=4 RealMemory=1000"
        for number, name in enumerate(NODES)
    ]
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder, login=LOGIN, nodes="\n".join(nodes)))
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
