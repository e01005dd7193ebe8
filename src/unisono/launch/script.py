"""What the workers run: the user's script or module, with its own arguments."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from unisono.errors import JobError


@dataclass(frozen=True, slots=True)
class Script:
    """A script by its path, or a module by its name, and the arguments that are its own.

    Attributes:
        target: the path as the user gave it, or a module's dotted name.
        args: what follows it, untouched.
        is_module: whether ``target`` names a module.
    """

    target: str
    args: tuple[str, ...] = ()
    is_module: bool = False

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> "Script":
        """The inverse of ``argv``."""
        if argv[0] == "-m":
            return cls(argv[1], tuple(argv[2:]), is_module=True)
        return cls(argv[0], tuple(argv[1:]))

    @property
    def argv(self) -> list[str]:
        """The script as arguments, the way Python itself takes them."""
        return [*(["-m"] if self.is_module else []), self.target, *self.args]

    @property
    def stem(self) -> str:
        """A short name for folders: ``train`` for ``scripts/train.py`` and for ``package.train``."""
        return self.target.rpartition(".")[2] if self.is_module else Path(self.target).resolve().stem

    def require_readable(self) -> None:
        """Refuse what Python could not run, before any worker starts.

        Raises:
            JobError: there is no such script or module, or it cannot be read; names it.
        """
        if self.is_module:
            _require_module(self.target)
        else:
            _require_file(Path(self.target))


def _require_file(path: Path) -> None:
    try:
        if path.is_dir():
            if not (path / "__main__.py").is_file():
                raise JobError(f"{path} is a folder without a __main__.py: name the script in it that trains")
            return
        path.open("rb").close()
    except FileNotFoundError:
        raise JobError(f"there is no script {path} (looked from {Path.cwd()})") from None
    except OSError as error:
        raise JobError(f"the script {path} cannot be read: {error.strerror}") from error


def _require_module(name: str) -> None:
    # Only the outermost package is looked for: finding what is inside it would import it here.
    outermost = name.partition(".")[0]
    found = outermost in sys.builtin_module_names or PathFinder.find_spec(outermost, [os.getcwd(), *sys.path])  # noqa: PTH109
    if not found:
        raise JobError(f"there is no module {name} (looked in {Path.cwd()} and the installed packages)")
