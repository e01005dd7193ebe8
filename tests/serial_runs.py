"""Serial runs that tests compare with: each is made once for a whole run of the suite, and kept."""

import fcntl
import hashlib
import json
import secrets
from collections.abc import Callable
from pathlib import Path

from launches import Launches
from training import Trained


class SerialRuns:
    """Runs scripts on one worker.

    Args:
        kept: a folder that all processes that run tests share.
        launches: starts the process whose forks they are. They have another hash seed than tests' other jobs, so they
            go through sets of words in another order than what is compared with them.
    """

    def __init__(self, kept: Path, launches: Callable[[], Launches]) -> None:
        self._kept, self._launches = kept, launches

    def __call__(self, script: Path, *arguments: str, **settings: str) -> Trained:
        """What the undisturbed run leaves; made only if no test has asked for it yet.

        Args:
            script: what trains.
            arguments: its own.
            settings: environment variables that it reads.
        """
        what = json.dumps([str(script), arguments, sorted(settings.items())])
        folder = self._kept / f"{script.stem}-{hashlib.sha256(what.encode()).hexdigest()[:12]}"
        folder.mkdir(parents=True, exist_ok=True)
        done = folder / "done"
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                trained = Trained(folder / f"run-{secrets.token_hex(4)}")
                output = self._launches()(1, str(script), *arguments, folder=trained.run_dir, **settings)
                trained.output.write_text(output)
                done.write_text(trained.run_dir.name)
        return Trained(folder / done.read_text())
