"""Engines start the agents of other hosts: over ssh, or in another way that a package brings."""

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from unisono.errors import NOT_STARTED, JobError
from unisono.named import load_named
from unisono.received import short, why_of

SSH = "ssh"
"""The command of ssh, unless the person names another one."""

PROGRAM = "unisono.cli.over_ssh"
"""The module that a host runs."""

CONNECT_S = 20
FAILED = 255
"""The exit code of ssh when ssh itself has failed, and not the command on the host."""

NOT_FOUND = 127

MEANINGS = Path(__file__).with_name("ssh_errors.toml")
"""Patterns of the errors of ssh, and of Python on the host, and what each means."""


class Engine:
    """Starts the agents of other hosts. A package brings an engine as an entry point of ``unisono.engines``.

    Args:
        python: the Python interpreter on the hosts.

    Attributes:
        agent: the command that becomes the agent of a host.
    """

    def __init__(self, python: str = sys.executable) -> None:
        if not python or python.startswith("-"):
            raise JobError(f"--python {short(python)}: no name or path of an interpreter")
        self.python = python
        self.agent = (python, "-P", "-m", PROGRAM)

    def command(self, host: str, silence_s: float) -> list[str]:
        """The command that runs :attr:`agent` on a host, and connects its standard streams with the agent's.

        The agent reads the job, with its token, from its standard input, and ends when that ends. The command has
        nothing of the job in it, since every user of this host can read it.

        Args:
            host: the name of the host.
            silence_s: the seconds of silence after which the host counts as lost.
        """
        raise JobError(f"{type(self).__name__} is no whole engine: it has no method command(host, silence_s)")

    def address(self, host: str) -> str:
        """The name or address at which this host reaches another one; by default its name."""
        return host

    def explain(self, host: str, code: int, lines: Sequence[str]) -> str:
        """Why a host has no agent, for people, and what to do.

        Args:
            host: the name of the host.
            code: the exit code of the command.
            lines: the last lines of the command's errors.
        """
        if meaning := _meaning("python", lines, {"python": self.python}):
            return meaning
        if code in (NOT_FOUND, NOT_STARTED):
            reason = f"there is no {self.python} that runs there: name the interpreter of the hosts with --python"
            return reason + _quoted(lines)
        return f"its agent ended with exit code {code}{_quoted(lines)}"


class Ssh(Engine):
    """Starts agents over ssh. The person's own options in ``command`` come before ours: ssh takes the first value.

    Raises:
        JobError: the command or the interpreter is empty, or the command cannot be split into words.
    """

    def __init__(self, command: str = SSH, python: str = sys.executable) -> None:
        super().__init__(python)
        try:
            self._ssh = shlex.split(command)
        except ValueError as error:
            raise JobError(f"--ssh {short(command)}: {error}") from error
        if not self._ssh:
            raise JobError("--ssh is empty: write a command, such as 'ssh -p 2222 -i key'")

    def command(self, host: str, silence_s: float) -> list[str]:
        """The command that runs the agent on a host, over ssh."""
        options = {
            "BatchMode": "yes",  # no question for a password: all hosts would ask at once
            "ConnectTimeout": str(CONNECT_S),
            "ServerAliveInterval": str(max(1, round(silence_s / 3))),
            "ServerAliveCountMax": "3",
            "ControlPath": "none",  # a shared connection would outlive this command and keep the host's agent alive
            "ClearAllForwardings": "yes",
        }
        option_words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        return [*self._ssh, *option_words, "-T", host, f"exec {shlex.join(self.agent)}"]

    def address(self, host: str) -> str:
        """The name or address to which ssh connects for a host, by its configuration; by default the host's name."""
        with suppress(OSError, subprocess.SubprocessError):
            result = subprocess.run(
                [*self._ssh, "-G", host], capture_output=True, text=True, timeout=CONNECT_S, check=True
            )
            line = re.search(r"^hostname (\S+)$", result.stdout, re.MULTILINE)
            return host if line is None else line[1]
        return host

    def explain(self, host: str, code: int, lines: Sequence[str]) -> str:
        """Why a host has no agent, by the errors of ssh or of Python on the host."""
        if code != FAILED:
            return super().explain(host, code, lines)
        names = {"ssh": shlex.join(self._ssh), "host": host, "bare": host.rpartition("@")[2], "python": self.python}
        return _meaning("ssh", lines, names) or f"ssh has failed{_quoted(lines)}"


def _meaning(program: str, lines: Sequence[str], names: Mapping[str, str]) -> str:
    """The meaning of errors that a program wrote; empty if none of them is known."""
    for row in tomllib.loads(MEANINGS.read_text("utf-8"))[program]:
        if any(re.search(row["pattern"], line.strip()) for line in lines):
            return str(row["meaning"]).format(**names) + _quoted(lines)
    return ""


def _quoted(lines: Sequence[str]) -> str:
    return f" (it says: {short(lines[-1].strip())})" if lines else ""


def reach(engine: Engine, host: str, silence_s: float) -> list[str]:
    """The command that starts the agent of a host.

    Raises:
        JobError: the engine, which may come from another package, fails, or returns no command.
    """
    command = _call(engine.command, host, silence_s)
    if not isinstance(command, list) or not command or not all(isinstance(word, str) for word in command):
        raise JobError(
            f"{type(engine).__name__}.command({host!r}) has returned {short(command)}: return a list of words"
        )
    return command


def address_of_host(engine: Engine, host: str) -> str:
    """The address at which this host reaches another one.

    Raises:
        JobError: the engine, which may come from another package, fails.
    """
    return str(_call(engine.address, host))


def explanation(engine: Engine, host: str, code: int, lines: Sequence[str]) -> str:
    """Why a host has no agent; if the engine fails to explain it, that error."""
    try:
        return str(_call(engine.explain, host, code, lines))
    except JobError as error:
        return str(error)


def _call(function: Callable[..., Any], *arguments: object) -> Any:
    try:
        return function(*arguments)
    except JobError:
        raise
    except Exception as error:
        call = f"{function.__qualname__}({', '.join(map(repr, arguments))})"
        raise JobError(f"the engine fails: {call}: {why_of(error)}") from error


def engine_named(name: str | None, ssh: str, python: str) -> Engine:
    """The engine of this name; ssh for None.

    Raises:
        JobError: there is no such engine, or an argument cannot be right.
    """
    if name is None:
        return Ssh(ssh, python)
    if ssh != SSH:
        raise JobError(f"--ssh with --on {name}: the engine reaches the hosts instead of ssh; leave one of them out")
    engine = load_named(name, {"ray": None}, "engine", "--on")
    if not (isinstance(engine, type) and issubclass(engine, Engine)):
        raise JobError(f"--on {name}: {short(repr(engine))} is no subclass of unisono.Engine")
    result: Engine = _call(engine, python)
    return result
