"""What a process has from the one that forked it, and that nobody can give it later. Linux only."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

STATUS = (
    *("Umask", "Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp", "Cpus_allowed", "Mems_allowed"),
    *("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"),
)
"""Lines of ``/proc/self/status``: rights, and where it may run."""


def circumstances(environment: Mapping[str, str]) -> dict[str, str]:
    """Those of this process: the name of each, and what it is. A fork stands in for a program where all are the same.

    Args:
        environment: of the program; its ``PYTHONPATH`` may depend on the working folder.
    """
    itself = Path("/proc/self")
    status = dict(line.split(":\t", 1) for line in (itself / "status").read_text().splitlines() if ":\t" in line)
    return {
        "Python": sys.executable,
        "Unisono": str(Path(__file__).resolve().parent),
        "module path": _module_path(environment.get("PYTHONPATH", "")),
        **{name: status.get(name, "") for name in STATUS},
        "limits": (itself / "limits").read_text(),
        "control group": (itself / "cgroup").read_text(),
        "namespaces": " ".join(sorted(os.readlink(entry) for entry in (itself / "ns").iterdir())),  # noqa: PTH115 (not paths)
        "root": os.readlink(itself / "root"),  # noqa: PTH115 (as text)
        "priority": f"{os.getpriority(os.PRIO_PROCESS, 0)} {os.sched_getscheduler(0)}",
        "memory": (itself / "oom_score_adj").read_text(),
    }


def _module_path(given: str) -> str:
    """What is set, from wherever it is read; an empty entry is the working folder."""
    return os.pathsep.join(map(os.path.abspath, given.split(os.pathsep))) if given else ""


def environment_at_start() -> dict[str, str]:
    """The environment that this process was started in, whatever has been changed since."""
    variables = Path("/proc/self/environ").read_bytes().split(b"\0")
    return dict(os.fsdecode(each).split("=", 1) for each in variables if b"=" in each)
