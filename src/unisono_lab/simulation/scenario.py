"""What is simulated, as a value: the work, what things take, the hosts, and how the job is run."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from unisono.adapt.step_time import StepTime
from unisono.errors import JobError, Unreadable
from unisono.received import open_file
from unisono_lab.analysis.results import problems

LARGEST_FILE = 2**20
"""Bytes of a scenario's file."""

MOST_HOSTS = 20_000

MOST_STEPS = 10**8
"""More would take minutes to simulate, each seed."""

Source = Literal["given", "measured", "fitted", "default"]
"""Where a figure is from: the scenario's file or the command line, a run, a fit to runs, or this module."""

Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


class _Part(BaseModel):
    """A table of the file: closed, and its numbers are numbers, neither texts nor true."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Workload(_Part):
    """The work to do.

    Attributes:
        samples: the samples to train on in all; in terms of the first batch, if policies change it.
        batch_size: samples in a global batch.
        shards: the job's number of shards: the most workers that can take part.
        noise_scale: the gradient noise scale in samples, by which larger batches are worth less; None if they are not.
    """

    samples: Annotated[int, Field(ge=1, le=2**53)]
    batch_size: Annotated[int, Field(ge=1, le=2**31)]
    shards: Annotated[int, Field(ge=1, le=65536)]
    noise_scale: Annotated[float, Field(gt=0, le=1e15)] | None = None

    @model_validator(mode="after")
    def _is_a_job(self) -> Workload:
        if self.shards > self.batch_size:
            raise ValueError(f"shards={self.shards} is more than batch_size={self.batch_size}")
        if (steps := self.samples / self.batch_size) > MOST_STEPS:
            raise ValueError(
                f"samples={self.samples} in batches of {self.batch_size} are {steps:.3g} steps: no more than "
                f"{MOST_STEPS:g} are simulated"
            )
        return self


class HostKind(_Part):
    """Hosts that are alike.

    Attributes:
        name: what they are called.
        count: the number of hosts to ask for.
        workers: the number of workers that each runs.
        price: the price of an hour of one host, in any one currency; prices of a trace go before it.
        speed: the speed of its workers, as a multiple of that of the measured ones.
        boot_s: seconds from the moment at which a host is there until its agent is connected.
        notice_s: seconds before a host is taken away at which it is told; 0 for no notice.
        between_losses_s: mean seconds between two moments at which the market takes hosts of a zone away; None if it
            never does.
        away_s: mean seconds until hosts that were taken away are there again.
        whole_zone: the share of such moments at which all hosts of the zone go at once.
        zones: the number of zones over which the hosts are spread.
        trace: a CSV file that says how many hosts there were, and at which price; in place of ``between_losses_s``.
        trace_from_s: seconds of the trace at which the job begins; None for another place with each seed.
    """

    name: Annotated[str, Field(min_length=1, max_length=60, pattern=r"\A[A-Za-z0-9._-]+\z")]
    count: Annotated[int, Field(ge=0, le=MOST_HOSTS)]
    workers: Annotated[int, Field(ge=1, le=4096)]
    price: Amount = 0.0
    speed: Annotated[float, Field(gt=0, le=1e3)] = 1.0
    boot_s: Seconds = 60.0
    notice_s: Seconds = 0.0
    between_losses_s: Annotated[float, Field(ge=1, le=1e12)] | None = None
    away_s: Seconds = 1200.0
    whole_zone: Share = 0.58  # of the drops in the traces of Wu et al. (SkyPilot), NSDI 2024
    zones: Annotated[int, Field(ge=1, le=1000)] = 1
    trace: Path | None = None
    trace_from_s: Seconds | None = None

    @property
    def is_spot(self) -> bool:
        """Whether hosts may be taken away."""
        return self.between_losses_s is not None or self.trace is not None

    def figures(self) -> dict[str, float]:
        """What may be a guess, and changes time or cost: how hosts begin, and how a market that is drawn takes them."""
        names = ["boot_s", *(["away_s", "whole_zone"] if self.between_losses_s is not None else [])]
        return {name: getattr(self, name) for name in names}

    def scaled(self, name: str, factor: float) -> HostKind:
        """The same with one of these multiplied; a share is 1 at most."""
        value = getattr(self, name) * factor
        return self.model_copy(update={name: min(1.0, value) if name == "whole_zone" else value})


class Durations(_Part):
    """What things take, in seconds.

    Attributes:
        start_s: from the moment at which the first workers of a host are asked for until one of them is ready.
        later_start_s: the same of later workers, which are forked from a process that has loaded everything.
        start_each_s: the seconds by which each further worker that a host starts at the same time is ready later.
        form_s: what it takes to form a generation, once all have arrived, and what its first steps take longer.
        form_each_s: what each of its workers adds to that.
        copy_s: what joiners add to that: the copy of the state.
        copy_each_s: what each worker of the generation adds to the copy.
        detect_s: from the end of the step that a loss breaks off until all have noticed.
        checkpoint_s: from the step at which a checkpoint is written until it is whole on disk.
        stall_s: what training stands still for a checkpoint.
        again_s: from the moment at which there is room again until a job that had ended is started again.
        jitter: the standard deviation of the logarithm of a worker's time for a step.
    """

    start_s: Seconds = 30.0
    later_start_s: Seconds = 5.0
    start_each_s: Seconds = 0.0
    form_s: Seconds = 0.5
    form_each_s: Seconds = 0.0
    copy_s: Seconds = 1.0
    copy_each_s: Seconds = 0.0
    detect_s: Seconds = 0.1
    checkpoint_s: Seconds = 2.0
    stall_s: Seconds = 0.1
    again_s: Seconds = 30.0
    jitter: Annotated[float, Field(ge=0, le=2)] = 0.03

    def forming(self, workers: int, *, joined: bool = False) -> float:
        """Seconds until a generation works.

        Args:
            workers: the number of its workers.
            joined: whether some of them lack the state.
        """
        copy_s = self.copy_s + workers * self.copy_each_s if joined else 0.0
        return self.form_s + workers * self.form_each_s + copy_s


class How(_Part):
    """How the job is run.

    Attributes:
        fewest: the fewest workers with which training begins.
        begin_with: the number of workers to begin with; None for as many as the hosts run.
        most: the most workers; None for as many as the hosts run, or there are shards.
        failure_timeout_s: ``--failure-timeout-s`` of the job.
        checkpoint_every: steps from one checkpoint to the next; 0 for none but those that policies ask for.
        policies: the policies, by their names; ``spot`` reads the simulated market.
        ask_every_s: virtual seconds from one question to the policies to the next; 0 for after each step, which takes
            longer to simulate.
        spot_budget: what the workers of the policy ``spot`` may cost together in an hour; None if it pays any price.
    """

    fewest: Annotated[int, Field(ge=1, le=65536)] = 1
    begin_with: Annotated[int, Field(ge=1, le=65536)] | None = None
    most: Annotated[int, Field(ge=1, le=65536)] | None = None
    failure_timeout_s: Annotated[float, Field(gt=0, le=1e6)] = 300.0
    checkpoint_every: Annotated[int, Field(ge=0, le=2**40)] = 0
    policies: Annotated[tuple[str, ...], Field(max_length=16)] = ()
    ask_every_s: Seconds = 30.0
    spot_budget: Annotated[float, Field(gt=0, le=1e12)] | None = None


class NamedNetwork(_Part):
    """A network between workers, by which reductions are forecast.

    Attributes:
        latency_s: seconds of a message without contents.
        bytes_per_s: what a worker sends and receives in a second while a reduction is under way.
        gradient_bytes: bytes that are reduced in a step.
        topology: the way of partial sums.
    """

    latency_s: Annotated[float, Field(ge=0, le=1e3)]
    bytes_per_s: Annotated[float, Field(gt=0, le=1e18)]
    gradient_bytes: Annotated[float, Field(ge=1, le=1e18)]
    topology: Literal["direct", "ring", "tree", "star"] = "direct"


class Incident(_Part):
    """Something that happens to the job at a given moment, in every seed.

    Attributes:
        at_s: seconds after the start of the job.
        kill: the rank of a worker whose process is killed.
        resize: the number of workers that somebody asks for.
    """

    at_s: Seconds
    kill: Annotated[int, Field(ge=0, le=65536)] | None = None
    resize: Annotated[int, Field(ge=1, le=65536)] | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Incident:
        if (self.kill is None) == (self.resize is None):
            raise ValueError("kill or resize, one of both")
        return self


class _File(_Part):
    """A scenario's file."""

    work: Workload
    hosts: Annotated[tuple[HostKind, ...], Field(max_length=64)]
    step: dict[str, float] = Field(default_factory=dict, max_length=5)
    seconds: Durations = Durations()
    network: dict[str, float | str] | None = None
    job: How = How()
    incidents: Annotated[tuple[Incident, ...], Field(max_length=10_000)] = ()


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is simulated.

    Attributes:
        work: the work to do.
        step: the time of a step on workers of speed 1.
        seconds: what things take.
        hosts: the kinds of hosts.
        job: the settings of the job.
        incidents: what happens in every seed.
        sources: the sources of the figures of ``step``, ``seconds``, ``network`` and hosts (``spot.boot_s``), by name.
        measured_to: the largest number of workers that was measured; 0 if none was. What is beyond is extrapolation.
        network: the network by which reductions are forecast; None if they take what the fitted step says.
    """

    work: Workload
    step: StepTime
    seconds: Durations
    hosts: Sequence[HostKind]
    job: How
    incidents: Sequence[Incident] = ()
    sources: Mapping[str, Source] = field(default_factory=dict)
    measured_to: int = 0
    network: NamedNetwork | None = None

    @property
    def room(self) -> int:
        """The number of workers that all hosts run, as far as the job uses them."""
        there = sum(kind.count * kind.workers for kind in self.hosts)
        return min(there, self.work.shards, self.job.most or there)

    def run_with(self, **job: object) -> Scenario:
        """The same with other settings of the job."""
        return replace(self, job=self.job.model_copy(update=job))

    def scaled(self, name: str, factor: float) -> Scenario:
        """The same with one of its figures multiplied, to see what a guess costs."""
        if name in LINK:
            assert self.network is not None
            return replace(self, network=self.network.model_copy(update={name: getattr(self.network, name) * factor}))
        if name in STEP:
            return replace(self, step=replace(self.step, **{name: getattr(self.step, name) * factor}))
        kind_name, _, of_kind = name.rpartition(".")
        if kind_name:
            kinds = [kind.scaled(of_kind, factor) if kind.name == kind_name else kind for kind in self.hosts]
            return replace(self, hosts=kinds)
        return replace(self, seconds=self.seconds.model_copy(update={name: getattr(self.seconds, name) * factor}))

    def figures(self) -> dict[str, float]:
        """All figures of ``step``, ``seconds`` and hosts, and of ``network`` if there is one, by name."""
        step, network = asdict(self.step), self.network
        if network is not None:
            step = {name: value for name, value in step.items() if name not in REDUCTION}
            step |= {name: getattr(network, name) for name in LINK}
        hosts = {f"{kind.name}.{name}": value for kind in self.hosts for name, value in kind.figures().items()}
        return {**step, **self.seconds.model_dump(), **hosts}


STEP = tuple(StepTime.__dataclass_fields__)
"""The figures of a step's time."""

REDUCTION = ("a_r", "b_r")
"""Those of a reduction, in place of which a network may be named."""

LINK = ("latency_s", "bytes_per_s", "gradient_bytes")
"""The figures of a network."""

LATENCY_S = 1e-4
"""Of a network of which nobody says it: as much as in a data centre, and too little between two."""


@dataclass(frozen=True, slots=True)
class MeasuredFigures:
    """What studies and runs say.

    Attributes:
        step: the fitted time of a step; None if nothing was measured of it.
        seconds: measured durations, by name.
        measured_to: the largest number of workers among them.
        guessed: the figures of the step that what was measured does not tell.
        link: measured figures of the network, by name.
        damaged: the lines of records that could not be read and are left out, for people.
    """

    step: StepTime | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    measured_to: int = 0
    guessed: Collection[str] = ()
    link: Mapping[str, float] = field(default_factory=dict)
    damaged: Sequence[str] = ()


def read_scenario(path: Path, measured: MeasuredFigures | None = None) -> Scenario:
    """Read a scenario from a TOML file. What it does not say is what was measured, or else a default.

    Args:
        path: the file.
        measured: what studies and runs say; what the file says goes before it.

    Raises:
        JobError: it cannot be read, or holds what makes no sense; names the place.
    """
    found, measured = _file(path), measured or MeasuredFigures()
    known = {} if measured.step is None else asdict(measured.step)
    _require_step(path, found.step, known)
    step = StepTime(**{"a_r": 0.0, "b_r": 0.0, "gamma": 1.0, "b_c": 0.0, **known, **found.step})
    if not step.a_c + step.b_c > 0:
        raise JobError(f"{path}: a step takes no time: step.a_c and step.b_c are 0")
    fitted = known.keys() - {*measured.guessed}
    sources = {name: _source(name, found.step, fitted, "fitted") for name in STEP}
    given = found.seconds.model_dump(exclude_unset=True)
    seconds = Durations.model_validate({**measured.seconds, **given})
    sources |= {name: _source(name, given, measured.seconds) for name in Durations.model_fields}
    network = None if found.network is None else _network(path, found.network, measured.link, sources)
    hosts = [_with_trace_beside(kind, path.parent) for kind in found.hosts]
    sources |= {
        f"{kind.name}.{name}": _source(name, kind.model_fields_set) for kind in hosts for name in kind.figures()
    }
    known_to = measured.measured_to
    scenario = Scenario(found.work, step, seconds, hosts, found.job, found.incidents, sources, known_to, network)
    _require_room(path, scenario)
    return scenario


def _source(name: str, given: Collection[str], measured: Collection[str] = (), words: Source = "measured") -> Source:
    return "given" if name in given else words if name in measured else "default"


def _network(
    path: Path, given: Mapping[str, float | str], measured: Mapping[str, float], sources: dict[str, Source]
) -> NamedNetwork:
    """What the file says, or else was measured. The figures of a reduction that it replaces are none any more."""
    for name in REDUCTION:
        sources.pop(name, None)
    sources |= {name: _source(name, given, measured) for name in LINK}
    try:
        return NamedNetwork.model_validate({"latency_s": LATENCY_S, **measured, **given})
    except ValidationError as error:
        hint = "what it leaves out is known of a study of two workers or more (--from with its folder)"
        raise JobError(f"{path}: network.{problems(error)}; {hint}") from error


def _file(path: Path) -> _File:
    try:
        with open_file(path) as file:
            text = file.read(LARGEST_FILE + 1)
        if len(text) > LARGEST_FILE:
            raise JobError(f"{path} is larger than {LARGEST_FILE} bytes: a scenario is a short text")
        found = tomllib.loads(text.decode("utf-8-sig").replace("\r\n", "\n"), parse_float=_number)
        # As JSON, in which lists and paths are what they are in TOML.
        return _File.model_validate_json(json.dumps(found, default=str))
    except (OSError, Unreadable, UnicodeDecodeError) as error:
        raise JobError(f"the scenario {path} cannot be read: {error}") from error
    except RecursionError:
        raise JobError(f"{path} is nested too deep for a scenario") from None
    except ValidationError as error:
        raise JobError(f"{path}: {problems(error)}") from error
    except ValueError as error:  # a number of thousands of digits, too
        raise JobError(f"{path} is no TOML: {error}") from error


def _number(text: str) -> float:
    """``1e9`` is a whole number, too."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 2**63 else value


def _require_step(path: Path, given: Mapping[str, float], known: Mapping[str, float]) -> None:
    for name, value in given.items():
        if name not in STEP or not (1.0 if name == "gamma" else 0.0) <= value <= 1e9:
            raise JobError(f"{path}: step.{name} = {value}: {', '.join(STEP)}, in seconds from 0; gamma from 1")
    if "a_c" not in given and "a_c" not in known:
        raise JobError(
            f"{path} does not say what a step takes, and nothing was measured: --from with the folder of a study or a "
            f"run, or a table [step] with a_c (seconds of a shard) and so on"
        )


def _with_trace_beside(kind: HostKind, folder: Path) -> HostKind:
    if kind.trace is None:
        return kind
    if kind.between_losses_s is not None:
        raise JobError(f"hosts {kind.name}: trace and between_losses_s are two ways to say the same; leave one out")
    return kind.model_copy(update={"trace": folder / kind.trace})


def _require_room(path: Path, scenario: Scenario) -> None:
    names = [kind.name for kind in scenario.hosts]
    if len(set(names)) < len(names):
        raise JobError(f"{path}: two kinds of hosts have one name: {', '.join(names)}")
    if scenario.room < scenario.job.fewest:
        raise JobError(
            f"{path}: job.fewest is {scenario.job.fewest}, and all hosts together have room for {scenario.room} "
            f"workers of a job with {scenario.work.shards} shards"
        )
