"""What is asked of a shared fork server: a program, such as whoever asks would have started itself."""

import json
import os
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import get_type_hints

import unisono
from unisono.errors import Unreadable
from unisono.launch.worker_start import FORK_SERVER
from unisono.received import parse_json, value_of

COORDINATOR = "unisono.membership.server"


def socket_of(module: str) -> str:
    """The name of the socket at which a shared fork server listens that has loaded this module."""
    return "torch" if module == FORK_SERVER else "commands"


def cold_command(command: Sequence[str]) -> list[str]:
    """What runs a module with its arguments as a program of its own. No module of the working folder is in its way."""
    flags = ["-P", "-u"] if command[0] == FORK_SERVER else ["-P"]
    return [sys.executable, *flags, "-m", *command]


OURS = "UNISONO_"
"""What such variables say is read when a worker begins, and not before."""

SHELLS = {"PWD", "OLDPWD", "SHLVL", "_", "COLUMNS", "LINES"}
"""Shells and terminals set these anew for whatever they start."""

NEVER_IGNORED = {signal.SIGPIPE, signal.SIGXFSZ}
"""Python ignores them for itself, and starts programs with what the system does."""


MOST_DESCRIPTORS = 512
"""No program is given one of a higher number."""


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """A request to fork ``python -m MODULE ARGUMENTS``. The descriptors of the program travel beside it.

    Attributes:
        environment: the program's environment.
        process_attributes: the requester's process attributes; a program that it started would have the same.
        command: the module, and its arguments.
        descriptors: the numbers that the descriptors beside the request get in the program.
        cwd: its working folder.
        ignored: the signals that the requester ignores, as would a program that it started.
    """

    environment: Mapping[str, str]
    process_attributes: Mapping[str, str]
    command: tuple[str, ...] = ()
    descriptors: tuple[int, ...] = ()
    cwd: str = "/"
    ignored: tuple[int, ...] = ()

    def to_json(self) -> bytes:
        """As it travels."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "ForkRequest":
        """The inverse of ``to_json``.

        Raises:
            Unreadable: it is none.
        """
        found = cls(**value_of(get_type_hints(cls), parse_json(data), "the request"))
        numbers = (*found.descriptors, *found.ignored)
        if not found.command or not all(0 <= each < MOST_DESCRIPTORS for each in numbers):
            raise Unreadable("a request names a module, and numbers of descriptors and signals that there are")
        return found

    def with_variables(self, further: Mapping[str, str]) -> "ForkRequest":
        """The same with more variables, unless it has them."""
        return replace(self, environment={**further, **self.environment})

    def obstacle(self, found: "ForkRequest", varying: Collection[str] = ()) -> str:
        """Why a fork of a process would not be what is asked for; empty if it would.

        Args:
            found: what that process is, as a request that it fulfils.
            varying: variables that were not read when it loaded what it has loaded, other than ours and the shell's.
        """
        for name in sorted(self.process_attributes.keys() | found.process_attributes.keys()):
            if self.process_attributes.get(name) != found.process_attributes.get(name):
                return f"{name} differs"
        for name in sorted(self.environment.keys() | found.environment.keys()):
            is_free = name.startswith(OURS) or name in SHELLS or name in varying
            if not is_free and self.environment.get(name) != found.environment.get(name):
                return f"the variable {name} differs"
        return ""


def ignored_signals() -> tuple[int, ...]:
    """Those that a program started by this process would ignore."""
    numbers = signal.valid_signals() - NEVER_IGNORED
    return tuple(sorted(int(each) for each in numbers if signal.getsignal(each) is signal.SIG_IGN))


# What a process has from the one that forked it, and that nobody can give it later. Linux only.

STATUS = (
    *("Umask", "Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp", "Cpus_allowed", "Mems_allowed"),
    *("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"),
)
"""Lines of ``/proc/self/status``: rights, and where it may run."""


def process_attributes(environment: Mapping[str, str], cwd: str) -> dict[str, str]:
    """This process's attributes by name. A fork replaces a program of its own only where all of them are the same.

    Args:
        environment: the program's environment.
        cwd: its working folder, on which its ``PYTHONPATH`` may depend.
    """
    itself = Path("/proc/self")
    status = dict(line.split(":\t", 1) for line in (itself / "status").read_text().splitlines() if ":\t" in line)
    return {
        "Python": sys.executable,
        "Unisono": str(Path(unisono.__file__).resolve()),
        "module path": _module_path(environment.get("PYTHONPATH", ""), cwd),
        **{name: status.get(name, "") for name in STATUS},
        "limits": (itself / "limits").read_text(),
        "control group": (itself / "cgroup").read_text(),
        "namespaces": " ".join(sorted(os.readlink(entry) for entry in (itself / "ns").iterdir())),  # noqa: PTH115 (not paths)
        "root": os.readlink(itself / "root"),  # noqa: PTH115 (as text)
        "priority": f"{os.getpriority(os.PRIO_PROCESS, 0)} {os.sched_getscheduler(0)}",
        "memory": (itself / "oom_score_adj").read_text(),
    }


def _module_path(given: str, cwd: str) -> str:
    """What is set, from wherever it is read; an empty entry is the working folder."""
    entries = given.split(os.pathsep) if given else []
    return os.pathsep.join(os.path.normpath(os.path.join(cwd, entry)) for entry in entries)  # noqa: PTH118 (as text)


def environment_at_start() -> dict[str, str]:
    """The environment that this process was started in, whatever has been changed since."""
    variables = Path("/proc/self/environ").read_bytes().split(b"\0")
    return dict(os.fsdecode(each).split("=", 1) for each in variables if b"=" in each)
