"""A Ray cluster of several virtual nodes on this machine, in namespaces of its own, which nobody else sees."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

TOOLS = ("ip", "unshare", "nsenter", "hostname", "mount")
NODES = Path(__file__).parent / "procs" / "scripts" / "ray_nodes.py"
HEAD = "10.80.0.1"
ADDRESSES = [f"10.80.0.{number}" for number in range(1, 9)]
PATIENCE_S = 240.0

# Nobody answers for names there: they are looked up in the file, or not found at once. The paths of sockets have to be
# short.
INSIDE = f"""
mount --bind hosts /etc/hosts && mount --bind resolv.conf /etc/resolv.conf && mount --bind session /mnt || exit 1
hostname head && ip link set lo up || exit 1
for address in {" ".join(ADDRESSES)}; do ip address add "$address" dev lo || exit 1; done
exec "$0" "$@"
"""

VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # or a file with a token is made in the person's home folder
    "RAY_DEDUP_LOGS": "0",
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_agent_register_timeout_ms": "120000",
    "RAY_metrics_report_interval_ms": "1000",
}


class NoCluster(Exception):
    """It cannot be made here; says why."""


class RayNodes:
    """A cluster that runs. Its nodes have addresses of their own, so that the coordinator speaks TLS.

    Args:
        folder: its files, among them the temporary ones of all nodes.
        process: starts and ends nodes.
    """

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self.folder, self._process = folder, process
        self.address = str(self._answer()["address"])
        (inside,) = psutil.Process(process.pid).children()
        self._pid = inside.pid

    def add(self, cpus: int = 1, cloud: str = "") -> str:
        """Add a node, of a cloud if one is named; its id."""
        return str(self._answer(do="add", cpus=cpus, cloud=cloud)["node"])

    def kill(self, node: str) -> None:
        """A node dies."""
        self._answer(do="kill", node=node)

    def drain(self, node: str) -> None:
        """A node is to be taken away in a while, as a spot market says."""
        self._answer(do="drain", node=node)

    def take_away(self, node: str) -> None:
        """The cloud of a node says that it takes it away."""
        self._answer(do="take away", node=node)

    def metrics(self) -> str:
        """What the head's node tells Prometheus."""
        return str(self._answer(do="metrics")["metrics"])

    def alive(self) -> int:
        """How many nodes there are."""
        return int(self._answer(do="alive")["alive"])

    def requested(self) -> int:
        """For how many bundles that wait the autoscaler is to add nodes."""
        return int(self._answer(do="requested")["requested"])

    def running(self) -> list[psutil.Process]:
        """All processes in its namespaces."""
        return list(psutil.Process(self._pid).children(recursive=True))

    def processes(self) -> list[str]:
        """Their command lines."""
        return [" ".join(words_of(process)) for process in self.running()]

    def start(self, *words: str, folder: Path, **variables: str) -> "subprocess.Popen[str]":
        """Start a command on the head's node."""
        enter = ["nsenter", f"--target={self._pid}", "--net", "--mount", "--uts", "--pid", f"--wd={folder}", "--"]
        with (folder / "output").open("a") as output:
            return subprocess.Popen(
                [*enter, *words], env=_environment(self.folder) | {"RAY_ADDRESS": self.address} | variables,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip

    def _answer(self, **asked: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if asked:
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, (self.folder / "nodes.log").read_text()[-3000:]
        found = json.loads(line)
        assert isinstance(found, dict)
        return found


def words_of(process: psutil.Process) -> list[str]:
    """The command line of a process; empty if it has just ended."""
    with suppress(psutil.NoSuchProcess):
        return list(process.cmdline())
    return []


def wait_for(is_so: Callable[[], bool], words: Callable[[], str]) -> None:
    """Wait until something is so."""
    begun = time.monotonic()
    while not is_so():
        assert time.monotonic() - begun < PATIENCE_S, f"it did not come: {words()}"
        time.sleep(0.1)


@contextmanager
def ray_nodes(head_cpus: int = 0, spare: int = 0) -> Iterator[RayNodes]:
    """As long as the context lasts; all of its processes end with it, or with this process.

    Args:
        head_cpus: the cores of the head's node.
        spare: how many nodes of one core Ray's autoscaler may add; without any there is no autoscaler.

    Raises:
        NoCluster: not root, Ray is not installed, or the kernel cannot do it.
    """
    _require_tools()
    with tempfile.TemporaryDirectory(prefix="ray-") as name:
        folder = Path(name)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{HEAD} head\n")
        (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")
        (folder / "session").mkdir()
        command = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with (folder / "nodes.log").open("wb") as log, subprocess.Popen(
            [*command, "sh", "-c", INSIDE, sys.executable, str(NODES), str(head_cpus), str(spare), *ADDRESSES],
            cwd=folder, env=_environment(folder), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
        ) as outside:  # fmt: skip
            assert outside.stdin is not None
            try:
                yield RayNodes(folder, outside)
            finally:
                with suppress(BrokenPipeError):
                    outside.stdin.close()  # the first process ends, and the kernel kills all others of its namespace
                with suppress(subprocess.TimeoutExpired):
                    outside.wait(10)
                outside.kill()


def _environment(folder: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"HOME": str(folder), "TMPDIR": str(folder)}  # what a killed node leaves behind goes with the cluster
    return {**os.environ, **VARIABLES, **own, "PATH": path, "RAY_TMPDIR": "/mnt"}


def _require_tools() -> None:
    if find_spec("ray") is None:
        raise NoCluster("ray is not installed: pip install -c constraints.txt -e '.[ray]'")
    if not sys.platform.startswith("linux"):
        raise NoCluster(f"namespaces are Linux's, and this is {sys.platform}")
    if os.geteuid() != 0:
        raise NoCluster("making namespaces needs root")
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise NoCluster(f"{', '.join(missing)} not installed")
