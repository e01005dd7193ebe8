"""Jobs whose workers are forked from one process of their own, which has torch loaded."""

import json
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from forks.client import SHARED_FORK_SERVERS

LAUNCHES = Path(__file__).parent / "procs" / "scripts" / "launches.py"
PATIENCE_S = 240


class Launches:
    """Runs scripts to their ends, one after the other.

    Args:
        process: of ``scripts/launches.py``.
        variables: what each of them is told.
    """

    def __init__(self, process: subprocess.Popen[str], variables: Mapping[str, str]) -> None:
        self._process, self._variables = process, variables

    def __call__(self, workers: int, *command: str, folder: Path, **variables: str) -> str:
        """Run a script to its end on so many workers; returns what they printed."""
        told = {**self._variables, **variables}
        asked = {"workers": workers, "command": command, "folder": str(folder), "variables": told}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        assert select.select([self._process.stdout], [], [], PATIENCE_S)[0], f"{command} on {workers} does not end"
        done = json.loads(self._process.stdout.readline())
        assert done["code"] == 0, f"{command} on {workers} workers\n{done['out'][-3000:]}\n{done['err'][-5000:]}"
        return str(done["out"])


@contextmanager
def launches(environment: Mapping[str, str], **variables: str) -> Iterator[Launches]:
    """As long as the context lasts. They share torch with nothing else, a shared fork server neither.

    Args:
        environment: of all of them.
        variables: what each of them is told beside its own.
    """
    own = {name: value for name, value in environment.items() if name != SHARED_FORK_SERVERS}
    with subprocess.Popen(
        [sys.executable, str(LAUNCHES)], env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        found = Launches(process, variables)
        with tempfile.TemporaryDirectory() as folder:  # a first run, so that no test is blamed for a process it starts
            (nothing := Path(folder, "nothing.py")).touch()
            found(1, str(nothing), folder=Path(folder, "run"))
        yield found
