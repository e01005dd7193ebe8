"""Workers hang, are slow, or hold a wrong bit; the weights are those of the undisturbed serial run, bit for bit."""

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


@pytest.mark.parametrize("where", ["hang in a step", "hang between steps"])
def test_a_worker_that_hangs_says_where_and_is_replaced(where: str, train: Train, serial: str) -> None:
    trouble = [{"what": where, "rank": 1, "step": 7}]
    options = ("-n", "3", "--max-restarts", "2", "--failure-timeout-s", "3")
    ended = train(*options, trouble=trouble, TIMEOUT_S="3")
    assert ended.digest == serial
    (lost,) = ended.journal("lost")
    assert "it hangs: no progress for" in lost["why"]
    assert "hang_for_good" in (ended.folder / "logs" / f"{lost['worker']}.log").read_text()


def test_a_slow_worker_gets_fewer_shards(train: Train, serial: str) -> None:
    ended = train("-n", "3", "--max-restarts", "2", SLOW="w2", PACE_S="0.03")
    assert ended.digest == serial
    first, second = ended.journal("minted")[:2]
    assert first["shards"] == [3, 3, 2]
    slow = second["workers"].index("w2")
    assert second["shards"][slow] == 1
    assert second["lost"] == []


@pytest.mark.parametrize("options", [("-n", "3"), ("-n", "5", "--max-restarts", "1")])
def test_a_worker_with_a_wrong_bit_is_named_and_healed_before_it_does_harm(
    options: tuple[str, ...], train: Train, serial: str
) -> None:
    trouble = [{"what": "bit flip", "rank": 1, "step": 7}, {"what": "bit flip", "rank": 0, "step": 12}]
    ended = train(*options, trouble=trouble)
    assert ended.digest == serial
    healed = [(line["step"], line["ranks"]) for line in ended.journal("healed")]
    assert healed == [(7, [1]), (12, [0])]
    assert "rank 1 on host" in ended.output


def test_two_workers_that_cannot_tell_who_is_wrong_go_back_and_end_in_the_right_bits(train: Train, serial: str) -> None:
    ended = train("-n", "2", trouble=[{"what": "bit flip", "rank": 1, "step": 7}], UNISONO_VERIFY_EVERY="3")
    assert ended.digest == serial
    assert [(line["step"], line["to"]) for line in ended.journal("rolled back")] == [(7, 6)]
    assert "step 7: the workers hold different weights" in ended.output
    assert "no majority says which are right" in ended.output


def test_a_script_asks_for_another_size(train: Train, serial: str) -> None:
    trouble = [{"what": "resize", "rank": 0, "step": 2, "to": 3}, {"what": "resize", "rank": 0, "step": 20, "to": 1}]
    ended = train("-n", "1:3", trouble=trouble, PACE_S="0.02")
    assert ended.digest == serial
    assert [(line["workers"], line["asked_for"]) for line in ended.journal("resized")] == [(3, 3), (1, 1)]
    assert {len(line["workers"]) for line in ended.journal("minted")} >= {3, 1}


@pytest.fixture(scope="session")
def measured(serial_runs: SerialRuns) -> Path:
    """The run folder of the undisturbed run that measures its gradients."""
    return serial_runs(SCRIPT, PACE_S="0", UNISONO_MONITOR_EVERY="1").run_dir


def test_what_is_measured_of_the_gradients_goes_over_to_those_who_come(train: Train, measured: Path) -> None:
    names = ("step", "loss", "gradient_norm", "gradient_variance", "noise_scale", "ada_scale_gain", "loss_variance")

    def figures(folder: Path) -> list[list[Any]]:
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        return [[line.get(name) for name in names] for line in lines]

    trouble = [
        {"what": "resize", "rank": 0, "step": 2, "to": 3},
        {"what": "kill", "rank": 0, "step": 20},
        {"what": "kill", "rank": 0, "step": 24},
    ]
    ended = train("-n", "1:3", trouble=trouble, PACE_S="0.02", UNISONO_MONITOR_EVERY="1")
    assert ended.code == 0, ended.output
    assert figures(ended.folder) == figures(measured)
    assert any("noise_scale" in line for line in (ended.folder / "metrics.jsonl").read_text().splitlines())
    assert len(ended.journal("lost")) == 2


def test_workers_that_stay_the_same_cannot_be_resized_and_say_what_to_do(train: Train) -> None:
    ended = train("-n", "1", trouble=[{"what": "resize", "rank": 0, "step": 2, "to": 3}])
    assert ended.code == 2
    assert "unisono run -n 1:3" in ended.output
