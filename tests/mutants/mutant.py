"""A mistake, as data."""

from dataclasses import dataclass
from pathlib import Path

STATE = ("tests/unit/test_membership_state.py", "tests/unit/test_membership_simulation.py")
SERVICE = ("tests/unit/test_membership_service.py", *STATE)
STORE = ("tests/unit/test_membership_store.py", *SERVICE)
LINE = ("tests/unit/test_conversation.py", *STORE)
ACTS = ("tests/unit/test_collective_calls.py", "tests/unit/test_struck.py", "tests/unit/test_membership_simulation.py")
PUBLISHED = ("tests/unit/test_publisher.py", "tests/unit/test_membership_simulation.py")


@dataclass(frozen=True)
class Mutant:
    """One change of the sources that breaks something.

    Attributes:
        breaks: what goes wrong with it, in one sentence.
        file: below ``src/unisono``, or ``src`` for the lab.
        old: text that is there once.
        new: what stands there instead.
        tests: files of tests of which one fails with it, the quickest first.
    """

    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = STATE

    def path(self, root: Path) -> Path:
        """The file in a copy of the repository."""
        return root / "src" / ("" if self.file.startswith("unisono_lab/") else "unisono") / self.file

    def found(self, root: Path) -> int:
        """How often its text is there."""
        return self.path(root).read_text().count(self.old)

    def apply(self, root: Path) -> None:
        """Change a copy of the repository."""
        path = self.path(root)
        path.write_text(path.read_text().replace(self.old, self.new))
