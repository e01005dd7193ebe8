"""How another host is reached over ssh, and what it means when that does not work."""

import re
import shlex
import socket
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unisono.errors import NOT_STARTED, JobError
from unisono.received import short

PROGRAM = "unisono.cli.over_ssh"
"""The module that a host runs."""

CONNECT_S = 20
FAILED = 255
"""The exit code of ssh where not the command on the host has failed, but ssh itself."""

NOT_FOUND = 127


@dataclass(frozen=True, slots=True)
class Ssh:
    """The command that runs Unisono on another host.

    Attributes:
        command: ssh, with options of the person's own, which go before ours.
        python: the interpreter on the hosts.
    """

    command: tuple[str, ...] = ("ssh",)
    python: str = sys.executable

    @classmethod
    def read(cls, command: str, python: str) -> "Ssh":
        """The two as the person gives them.

        Raises:
            JobError: one of them is empty, or the command is not to be read.
        """
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise JobError(f"--ssh {short(command)}: {error}") from error
        if not words:
            raise JobError("--ssh is empty: write a command, such as 'ssh -p 2222 -i key'")
        if not python or python.startswith("-"):
            raise JobError(f"--python {short(python)}: no name or path of an interpreter")
        return cls(tuple(words), python)

    def words(self, host: str, silence_s: float) -> list[str]:
        """The words of the command for a host. Nothing of the job stands in them: anybody can read them.

        Args:
            host: the name of the host.
            silence_s: the seconds of silence after which the host counts as lost.
        """
        options = {
            "BatchMode": "yes",  # nobody is there to be asked, or all would ask at once
            "ConnectTimeout": str(CONNECT_S),
            "ServerAliveInterval": str(max(1, round(silence_s / 3))),
            "ServerAliveCountMax": "3",
            "ControlPath": "none",  # a connection that outlives this command would keep the host's agent alive
            "ClearAllForwardings": "yes",
        }
        told = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        return [*self.command, *told, "-T", host, f"exec {shlex.quote(self.python)} -P -m {PROGRAM}"]

    def address(self, host: str) -> str:
        """The name or address that ssh calls for a host, by its configuration; the name itself if it does not say."""
        with suppress(OSError, subprocess.SubprocessError):
            asked = subprocess.run(
                [*self.command, "-G", host], capture_output=True, text=True, timeout=CONNECT_S, check=True
            )
            found = re.search(r"^hostname (\S+)$", asked.stdout, re.MULTILINE)
            return host if found is None else found[1]
        return host


def is_here(name: str) -> bool:
    """Whether a name or address, without a user, is that of this host: then no ssh is needed."""
    if "@" in name:
        return False
    if name in ("localhost", socket.gethostname()):
        return True
    with suppress(OSError, UnicodeError):
        family, _, _, _, where = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as asked:
            asked.bind(where)  # what is no address of this host cannot be bound
            return True
    return False


MEANINGS = Path(__file__).with_name("ssh_errors.toml")
"""What ssh writes, and Python there, and what it means."""


def explained(ssh: Ssh, host: str, code: int, said: Sequence[str]) -> str:
    """Why a host has no agent, for people, and what to do.

    Args:
        ssh: the command that was run.
        host: the name of the host.
        code: the exit code of that command.
        said: the last lines of its errors.
    """
    names = {"ssh": shlex.join(ssh.command), "host": host, "bare": host.rpartition("@")[2], "python": ssh.python}
    quoted = f" (it says: {short(said[-1].strip())})" if said else ""
    for row in tomllib.loads(MEANINGS.read_text("utf-8"))["ssh" if code == FAILED else "python"]:
        if any(re.search(row["pattern"], line.strip()) for line in said):
            return str(row["meaning"]).format(**names) + quoted
    if code in (NOT_FOUND, NOT_STARTED):
        return f"there is no {ssh.python} that runs there: name the interpreter of the hosts with --python{quoted}"
    if code == FAILED:
        return f"ssh has failed{quoted}"
    return f"its agent ended with exit code {code}{quoted}"
