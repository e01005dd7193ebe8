"""What a launcher asks of a nursery: a template, such as the launcher would have started itself."""

import json
import signal
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace

from unisono.errors import Unreadable
from unisono.received import is_text, parse_json

OURS = "UNISONO_"
"""What such variables say is read when a worker begins, and not before."""

SHELLS = {"PWD", "OLDPWD", "SHLVL", "_", "COLUMNS", "LINES"}
"""Shells and terminals set these anew for whatever they start."""

NEVER_IGNORED = {signal.SIGPIPE, signal.SIGXFSZ}
"""Python ignores them for itself, and starts programs with what the system does."""


@dataclass(frozen=True, slots=True)
class Wish:
    """A template that is asked for. The descriptor of its log travels beside it.

    Attributes:
        environment: of its workers, without what each has for itself.
        circumstances: of the launcher; a program that it starts would have the same.
        cwd: its working folder.
        ignored: the signals that the launcher ignores, and so would what it starts.
    """

    environment: Mapping[str, str]
    circumstances: Mapping[str, str]
    cwd: str = "/"
    ignored: tuple[int, ...] = ()

    def to_json(self) -> bytes:
        """As it travels."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "Wish":
        """The inverse of ``to_json``.

        Raises:
            Unreadable: it is none.
        """
        match parse_json(data):
            case {"environment": environment, "circumstances": about, "cwd": str(cwd), "ignored": [*ignored]}:
                if is_text(environment) and is_text(about) and all(type(each) is int for each in ignored):
                    return cls(environment, about, cwd, tuple(ignored))
        raise Unreadable("it is no wish for a template")

    def with_variables(self, further: Mapping[str, str]) -> "Wish":
        """The same with more variables, unless it has them."""
        return replace(self, environment={**further, **self.environment})

    def obstacle(self, found: "Wish", varying: Collection[str] = ()) -> str:
        """Why a fork of a process would not be what is wished for; empty if it would.

        Args:
            found: what that process is, as a wish that it fulfils.
            varying: variables that were not read when it loaded what it has loaded, other than ours and the shell's.
        """
        for name in sorted(self.circumstances.keys() | found.circumstances.keys()):
            if self.circumstances.get(name) != found.circumstances.get(name):
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
