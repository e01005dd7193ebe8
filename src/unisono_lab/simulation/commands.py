"""The commands that start a job as it was simulated, and what they leave to others."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from unisono_lab.simulation.coordination import MOST_RESTARTS
from unisono_lab.simulation.scenario import HostKind, Scenario

PORT = 7777
"""Of the coordinator, as the commands have it."""


@dataclass(frozen=True, slots=True)
class HostCommand:
    """What is run on some hosts.

    Attributes:
        hosts: the hosts, for people: ``each of 3 spot hosts``.
        words: the command.
    """

    hosts: str
    words: str


def commands(scenario: Scenario) -> list[HostCommand]:
    """Of the first host, on which the coordinator is, and of all others, by kind. A host that stays comes first."""
    kinds = sorted((kind for kind in scenario.hosts if kind.count), key=lambda kind: kind.is_spot)
    if not kinds:
        return []
    first, *others = kinds
    more = [(first, first.count - 1, "other "), *((kind, kind.count, "") for kind in others)]
    joins = [HostCommand(_hosts(kind, count, word), _join(scenario, kind)) for kind, count, word in more if count]
    return [HostCommand(f"one {first.name} host", _run(scenario, first, alone=not joins)), *joins]


def left_out(scenario: Scenario) -> list[str]:
    """What was simulated, and is not in the commands."""
    spot = [kind for kind in scenario.hosts if kind.count and kind.is_spot]
    found = []
    if spot:
        names = " or ".join(kind.name for kind in spot)
        found.append(f"A {names} host that comes back runs its command again as it starts: what rents it sees to that.")
    if spot and len(spot) == sum(kind.count > 0 for kind in scenario.hosts):
        found.append(
            "All hosts may be taken away. The simulation loses no coordinator, and starts a job that all have left "
            "again: run the coordinator with --here 0 on a host that stays, and unisono run again when it has ended."
        )
    if (begin := scenario.job.begin_with) is not None and begin < scenario.room:
        found.append(f"The simulated job begins with {begin} workers: ask for them with unisono resize {begin}.")
    if "spot" in scenario.job.policies:
        found.append("The commands have no policy spot: unisono.SpotPolicy needs a market, which the script gives it.")
    return found


def _hosts(kind: HostKind, count: int, word: str) -> str:
    return f"the {word}{kind.name} host" if count == 1 else f"each of {count} {word}{kind.name} hosts"


def _run(scenario: Scenario, kind: HostKind, *, alone: bool) -> str:
    words = ["unisono", "run", "-n", f"{scenario.job.fewest}:{scenario.room}"]
    if not alone:
        words += ["--here", str(kind.workers), "--coordinator", f":{PORT}"]
    return shlex.join([*words, "--max-restarts", str(MOST_RESTARTS), *_alike(scenario, kind), "train.py"])


def _join(scenario: Scenario, kind: HostKind) -> str:
    words = ["unisono", "join", f"https://HOST:{PORT}", "-n", str(kind.workers)]
    words += ["--token-file", "token", "--certificate", "certificate.pem"]
    return shlex.join([*words, *_alike(scenario, kind), "train.py"])


def _alike(scenario: Scenario, kind: HostKind) -> Sequence[str]:
    """Options of both: what all workers have in common, and the notices of these hosts."""
    job = scenario.job
    words = ["--failure-timeout-s", f"{job.failure_timeout_s:g}", "--shards", str(scenario.work.shards)]
    words += ["--checkpoint-every", str(job.checkpoint_every)] if job.checkpoint_every else []
    words += [word for name in job.policies if name != "spot" for word in ("--policy", name)]
    return [*words, *(["--notices", "auto"] if kind.is_spot and kind.notice_s else [])]
