"""Many seeds of one scenario, on all cores: ``python -m unisono_lab.simulation.seeds`` computes some of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from itertools import chain
from tempfile import TemporaryFile

from pydantic import TypeAdapter, ValidationError

from unisono.errors import JobError, UnisonoError
from unisono.host.parent_death import end_with_parent
from unisono_lab.simulation.market import MarketTrace
from unisono_lab.simulation.scenario import Scenario
from unisono_lab.simulation.simulated_run import SimulatedOutcome, simulate


@dataclass(frozen=True, slots=True)
class Request:
    """Scenarios to simulate, each with every seed.

    Attributes:
        scenarios: the scenarios.
        seeds: the seeds.
        until_s: the virtual seconds after which a job is given up.
    """

    scenarios: tuple[Scenario, ...]
    seeds: tuple[int, ...]
    until_s: float


@dataclass(frozen=True, slots=True)
class SeedOutcomes:
    """Outcomes of each scenario, in the order of seeds; or why there are none."""

    outcomes: tuple[tuple[SimulatedOutcome, ...], ...] = ()
    error: str = ""


SCENARIO: TypeAdapter[Scenario] = TypeAdapter(Scenario)
REQUEST: TypeAdapter[Request] = TypeAdapter(Request)
ANSWER: TypeAdapter[SeedOutcomes] = TypeAdapter(SeedOutcomes)


def outcomes(request: Request, processes: int) -> list[list[SimulatedOutcome]]:
    """What becomes of each scenario, seed by seed: the same whatever the number of processes is.

    Args:
        request: the scenarios and the seeds.
        processes: the number of processes that share the seeds out.

    Raises:
        JobError: a trace cannot be read, or a simulated job has failed.
    """
    shares = [request.seeds[place::processes] for place in range(processes) if request.seeds[place::processes]]
    if len(shares) == 1:
        return [list(found) for found in _computed(request)]
    answers = _in_processes([Request(request.scenarios, share, request.until_s) for share in shares])
    by_scenario = zip(*(answer.outcomes for answer in answers), strict=True)
    return [sorted(chain.from_iterable(each), key=lambda outcome: outcome.seed) for each in by_scenario]


class KnownOutcomes:
    """Outcomes of scenarios by seed, none of which is simulated twice.

    Args:
        first_seed: the first seed of each scenario.
        until_s: the virtual seconds after which a job is given up.
        processes: the number of processes that share the seeds out.
    """

    def __init__(self, first_seed: int, until_s: float, processes: int) -> None:
        self._first, self._until_s, self._processes = first_seed, until_s, processes
        self._known: dict[bytes, list[SimulatedOutcome]] = {}

    def of(self, scenarios: Sequence[Scenario], seeds: int) -> list[list[SimulatedOutcome]]:
        """What becomes of each scenario with the first seeds.

        Raises:
            JobError: a trace cannot be read, or a simulated job has failed.
        """
        keys = [SCENARIO.dump_json(scenario) for scenario in scenarios]
        lacking: dict[int, dict[bytes, Scenario]] = {}
        for key, scenario in zip(keys, scenarios, strict=True):
            if (have := len(self._known.setdefault(key, []))) < seeds:
                lacking.setdefault(have, {})[key] = scenario
        for have, each in lacking.items():
            numbers = tuple(range(self._first + have, self._first + seeds))
            request = Request(tuple(each.values()), numbers, self._until_s)
            for key, found in zip(each, outcomes(request, self._processes), strict=True):
                self._known[key] += found
        return [self._known[key][:seeds] for key in keys]


def _in_processes(requests: Sequence[Request]) -> list[SeedOutcomes]:
    command = [sys.executable, "-m", __name__, str(os.getpid())]
    running = []
    with ExitStack() as stack:
        for request in requests:
            given = stack.enter_context(TemporaryFile())
            given.write(REQUEST.dump_json(request))
            given.seek(0)
            # In a group of its own: Ctrl-C is for this process, which ends it.
            process = subprocess.Popen(command, stdin=given, stdout=subprocess.PIPE, close_fds=True, process_group=0)
            stack.enter_context(process)
            stack.callback(process.kill)
            running.append(process)
        return [_answer(process) for process in running]


def _answer(process: subprocess.Popen[bytes]) -> SeedOutcomes:
    assert process.stdout is not None
    try:
        answer = ANSWER.validate_json(process.stdout.read())
    except ValidationError as error:
        raise JobError(f"a process of the simulation ended with code {process.wait()}, without an answer") from error
    if answer.error:
        raise JobError(answer.error)
    return answer


def _computed(request: Request) -> tuple[tuple[SimulatedOutcome, ...], ...]:
    read = cache(MarketTrace.read)
    return tuple(
        tuple(simulate(scenario, seed, request.until_s, found) for seed in request.seeds)
        for scenario in request.scenarios
        for found in [{kind.name: read(kind.trace) for kind in scenario.hosts if kind.trace}]
    )


def main() -> None:
    """Read a request, and write the answer, unless the process that asks for it ends before."""
    end_with_parent(int(sys.argv[1]))
    try:
        answer = SeedOutcomes(_computed(REQUEST.validate_json(sys.stdin.buffer.read())))
    except UnisonoError as error:
        answer = SeedOutcomes(error=str(error))
    sys.stdout.buffer.write(ANSWER.dump_json(answer))


if __name__ == "__main__":
    main()
