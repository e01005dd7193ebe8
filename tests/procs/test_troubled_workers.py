"""Workers hang or are slow; the weights are those of the undisturbed serial run, bit for bit.

Workers that hold a wrong bit, or ask for others: ``tests/unit/test_scripts_of_clusters.py`` and ``test_faults.py``.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from commands import completed
from serial_runs import SerialRuns

pytestmark = [
    pytest.mark.procs,
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("warm"),
]

SCRIPT = Path(__file__).parent / "scripts" / "troubled.py"
PATIENCE_S = 120.0


class Ended:
    """A job that has ended."""

    def __init__(self, folder: Path, code: int, output: str) -> None:
        self.folder, self.code, self.output = folder, code, output

    @property
    def digest(self) -> str:
        assert self.code == 0, self.output
        return str(json.loads((self.folder / "result.json").read_text())["weights_sha256"])

    def journal(self, event: str) -> list[dict[str, Any]]:
        lines = map(json.loads, (self.folder / "journal.jsonl").read_text().splitlines())
        return [line for line in lines if line["event"] == event]


Train = Callable[..., Ended]


@pytest.fixture
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    def run(*options: str, trouble: Sequence[Mapping[str, Any]] = (), **settings: str) -> Ended:
        folder = tmp_path_factory.mktemp("troubled") / "run"
        environment = {**os.environ, "TROUBLE": json.dumps(list(trouble)), **settings}
        words = ("run", *options, "--run-dir", folder, SCRIPT)
        done = completed(*words, env=environment, timeout=PATIENCE_S, is_merged=True)
        return Ended(folder, done.returncode, done.stdout)

    return run


@pytest.fixture(scope="session")
def serial(serial_runs: SerialRuns) -> str:
    """The digest of the undisturbed run of one worker."""
    return serial_runs(SCRIPT, PACE_S="0").end()


@pytest.mark.parametrize("where", ["hang in a step", pytest.param("hang between steps", marks=pytest.mark.slow)])
def test_a_worker_that_hangs_says_where_and_is_replaced(where: str, train: Train, serial: str) -> None:
    trouble = [{"what": where, "rank": 1, "step": 7}]
    options = ("-n", "3", "--max-restarts", "2", "--failure-timeout-s", "3")
    ended = train(*options, trouble=trouble, TIMEOUT_S="3")
    assert ended.digest == serial
    (lost,) = ended.journal("lost")
    assert "it hangs: no progress for" in lost["why"]
    assert "hang_for_good" in (ended.folder / "logs" / f"{lost['worker']}.log").read_text()


@pytest.mark.slow  # tests/procs/test_straggler.py has a policy that asks for it
def test_a_slow_worker_gets_fewer_shards(train: Train, serial: str) -> None:
    ended = train("-n", "3", "--max-restarts", "2", SLOW="w2", PACE_S="0.03")
    assert ended.digest == serial
    first, second = ended.journal("minted")[:2]
    assert first["shards"] == [3, 3, 2]
    slow = second["workers"].index("w2")
    assert second["shards"][slow] == 1
    assert second["lost"] == []


@pytest.mark.slow
def test_workers_that_stay_the_same_cannot_be_resized_and_say_what_to_do(train: Train) -> None:
    ended = train("-n", "1", trouble=[{"what": "resize", "rank": 0, "step": 2, "to": 3}])
    assert ended.code == 2
    assert "unisono run -n 1:3" in ended.output
