"""Agents that join a job are killed, one after the other: the job goes on, and no bit changes."""

import subprocess
from pathlib import Path

import pytest

from forks.commands import start
from slurm_jobs import LONG, SCRIPT
from training import PATIENCE_S, Trained, Training, whole_lines

pytestmark = [pytest.mark.procs, pytest.mark.slow, pytest.mark.timeout(300)]

SOON = ("--failure-timeout-s", "5")
"""For so long a worker is waited for whose agent, and host, may only be out of reach."""

SCRIPTS = {
    "both": ("+a", "+b", "-a", "-b"),
    "one and its replacement": ("+a", "-a", "+b", "-b"),
    "one, its replacement, and another": ("+a", "+b", "-a", "+c", "-c", "-b"),
}
"""Agents that join (+) and are killed (-), by name; the next one when all that are there train."""


@pytest.mark.parametrize("acts", SCRIPTS.values(), ids=SCRIPTS)
def test_agents_are_killed_one_after_the_other_and_no_bit_changes(
    acts: tuple[str, ...],
    started: list[Training],
    tmp_path: Path,
    long_serial: Trained,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = ("-n", "1:3", "--here", "1", *SOON)
    started.append(Training(tmp_path / "run", *options, script=SCRIPT, PACE_S="0.3", **LONG))
    training, agents = started[0], {}

    def sizes() -> list[int]:
        return [one["world_size"] for one in whole_lines(training.run_dir / "metrics.jsonl") if "loss" in one]

    training.until_step(0)
    for name, value in {"PACE_S": "0.3", "HURRY": str(training.run_dir.with_suffix(".hurry")), **LONG}.items():
        monkeypatch.setenv(name, value)
    try:
        for act in acts:
            kind, name = act[0], act[1:]
            if kind == "+":
                words = ("join", "-n", "1", *SOON, "--run-dir", str(training.run_dir), str(SCRIPT))
                with (tmp_path / f"{name}.txt").open("wb") as output:
                    agents[name] = start(*words, stdout=output, stderr=subprocess.STDOUT)
            else:
                killed = agents.pop(name)
                killed.kill()
                killed.wait(PATIENCE_S)
            training.until_so(lambda: sizes()[-1] == 1 + len(agents), act)
        training.hurry()
        assert training.end() == long_serial.end()
    finally:
        for agent in agents.values():
            agent.kill()
            agent.wait(PATIENCE_S)
    assert training.steps == long_serial.steps
    assert len(training.journal("lost")) == sum(act[0] == "-" for act in acts)
