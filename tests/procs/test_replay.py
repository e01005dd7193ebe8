"""A policy that looks at a recorded run decides what it decided in the run."""

import json
from pathlib import Path

import pytest

from commands import completed
from outcomes import struck_by
from unisono.jsonl import read_lines
from unisono_lab.faults.faults import Faults

pytestmark = [
    pytest.mark.procs,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("warm"),
    pytest.mark.slow,
]  # tests/unit/test_recorded.py has policies that see a run again

ROOT = Path(__file__).parents[2]
PATIENCE_S = 150.0

POLICIES = """
import unisono


class NoiseScalePolicy(unisono.NoiseScalePolicy):
    def __init__(self):
        super().__init__(largest=512, every=20, ramp=10)


class MoreWorkersForLargerBatches(unisono.Policy):
    asked_for = 1

    def after_step(self, view):
        wanted = max(1, min(4, view.batch_size // 64))
        if wanted != self.asked_for:
            self.asked_for = wanted
            self.resize(wanted, batch_size=view.batch_size)
"""
"""Those of the example, where a replay finds them."""


def called(*words: object, where: Path = ROOT) -> str:
    ended = completed(*words, cwd=where, timeout=PATIENCE_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_the_policies_of_a_run_decide_in_a_replay_what_they_decided_in_the_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(POLICIES)
    kills = Faults().kill(rank=0, at_step=12).kill(rank=1, at_step=35).kill(rank=0, at_step=70)
    options = ("-n", "1:3", "--max-restarts", 20, *struck_by(tmp_path / "run", kills))
    called("run", *options, "--run-dir", tmp_path / "run", ROOT / "examples" / "adaptive.py", "--epochs", 6)

    policies = ("--policy", "mine:NoiseScalePolicy", "--policy", "mine:MoreWorkersForLargerBatches")
    told = called("replay", tmp_path / "run", *policies, "--json", where=tmp_path)

    journal = read_lines(tmp_path / "run" / "journal.jsonl")
    names = ("step", "policy", "verb", "value", "why")
    decided = {json.dumps([line[name] for name in names]) for line in journal if line["event"] == "decided"}
    pairs = [json.loads(line) for line in told.splitlines()]
    replayed = {json.dumps([one["step"], one["policy"], one["verb"], *one["replay"].values()]) for one in pairs}
    assert {one["verb"] for one in pairs} == {"set_batch_size", "set_learning_rate", "resize"}
    assert {one["likeness"] for one in pairs} == {"alike"}
    assert replayed == decided
    assert sum(line["event"] == "lost" for line in journal) >= 2
