"""The scenario of a simulation, as a value: the work, durations, hosts, and the settings of the job."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from unisono.adapt.layouts import StepTime
from unisono.errors import JobError, Unreadable
from unisono.received import open_file
from unisono_lab.recorded.record import problems

LARGEST_FILE = 2**20
"""The most bytes of a scenario's file."""

MOST_HOSTS = 20_000

MOST_STEPS = 10**8
"""The most steps of a job; more would take minutes to simulate for each seed."""

Source = Literal["given", "measured", "fitted", "default"]
"""The source of a figure: the scenario's file or the command line, a run, a fit to runs, or this module."""

Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


class _Part(BaseModel):
    """A table of the file. Unknown fields are refused, and so are texts and booleans in the place of numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Workload(_Part):
    """The work to do.

    Attributes:
        samples: the number of samples to train on; if policies change the batch, in terms of the first one.
        batch_size: samples in a global batch.
        shards: the job's number of shards: the most workers that can take part.
        noise_scale: the noise scale in samples, by which samples of larger batches count less; None if all count alike.
    """

    samples: Annotated[int, Field(ge=1, le=2**53)]
    batch_size: Annotated[int, Field(ge=1, le=2**31)]
    shards: Annotated[int, Field(ge=1, le=65536)]
    noise_scale: Annotated[float, Field(gt=0, le=1e15)] | None = None

    @model_validator(mode="after")
    def _require_possible_job(self) -> Workload:
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
        count: the number of hosts to ask for.
        price: the price of an hour of one host, in any one currency; the prices of a trace take precedence.
        speed: the speed of the workers, as a multiple of that of the measured workers.
        boot_s: seconds from the moment at which a host is available until its agent is connected.
        notice_s: seconds between the notice and the moment at which a host is taken away; 0 for no notice.
        between_losses_s: mean seconds between two moments at which the market takes hosts of a zone away; None if it
            never does.
        away_s: mean seconds until hosts that were taken away are available again.
        whole_zone: the share of such moments at which all hosts of the zone go at once.
        zones: the number of zones over which the hosts are spread.
        trace: a CSV file with the numbers of available hosts and their prices, instead of ``between_losses_s``.
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
        """The figures that may be guesses: the time to boot, and those of a market that is drawn."""
        names = ["boot_s", *(["away_s", "whole_zone"] if self.between_losses_s is not None else [])]
        return {name: getattr(self, name) for name in names}

    def scaled(self, name: str, factor: float) -> HostKind:
        """The same kind with one of these figures multiplied; a share is at most 1."""
        value = getattr(self, name) * factor
        return self.model_copy(update={name: min(1.0, value) if name == "whole_zone" else value})


class Durations(_Part):
    """The durations of a job's events, in seconds.

    Attributes:
        start_s: from the moment at which the first workers of a host are asked for until one of them is ready.
        later_start_s: the same time for later workers, which are forked from a process that has loaded everything.
        start_each_s: the additional time for each further worker that a host starts at the same time.
        form_s: the time to form a generation once all workers have arrived, and the additional time of its first steps.
        form_each_s: the additional time for each worker of the generation.
        copy_s: the additional time if there are joiners, to which the state is copied.
        copy_each_s: the additional time of that copy for each worker of the generation.
        detect_s: from the end of the step that a loss breaks off until all workers have noticed the loss.
        checkpoint_s: from the step at which a checkpoint is written until it is complete on disk.
        stall_s: the time for which training pauses for a checkpoint.
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
        """The seconds until a generation trains."""
        copy_s = self.copy_s + workers * self.copy_each_s if joined else 0.0
        return self.form_s + workers * self.form_each_s + copy_s


class JobSpec(_Part):
    """The settings of the job.

    Attributes:
        fewest: the fewest workers with which training begins.
        begin_with: the number of workers to begin with; None for as many as the hosts have room for.
        most: the most workers; None for as many as the hosts have room for, or there are shards.
        checkpoint_every: steps from one checkpoint to the next; 0 for none but those that policies ask for.
        policies: the names of the policies; ``spot`` reads the simulated market.
        ask_every_s: virtual seconds between two questions to the policies; 0 to ask after each step, which takes
            longer to simulate.
        spot_budget: the most that all workers of the policy ``spot`` may cost in an hour; None for any price.
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
        bytes_per_s: the bandwidth of a worker in each direction during a reduction.
        gradient_bytes: the bytes of gradients that a step reduces.
        topology: the way of partial sums.
    """

    latency_s: Annotated[float, Field(ge=0, le=1e3)]
    bytes_per_s: Annotated[float, Field(gt=0, le=1e18)]
    gradient_bytes: Annotated[float, Field(ge=1, le=1e18)]
    topology: Literal["direct", "ring", "tree", "star"] = "direct"


class Incident(_Part):
    """An event at a given moment, in every seed.

    Attributes:
        at_s: seconds after the start of the job.
        kill: the rank of a worker whose process is killed.
        resize: the number of workers to which the job is asked to change.
    """

    at_s: Seconds
    kill: Annotated[int, Field(ge=0, le=65536)] | None = None
    resize: Annotated[int, Field(ge=1, le=65536)] | None = None

    @model_validator(mode="after")
    def _require_one_kind(self) -> Incident:
        if (self.kill is None) == (self.resize is None):
            raise ValueError("needs either kill or resize")
        return self


class _File(_Part):
    work: Workload
    hosts: Annotated[tuple[HostKind, ...], Field(max_length=64)]
    step: dict[str, float] = Field(default_factory=dict, max_length=5)
    seconds: Durations = Durations()
    network: dict[str, float | str] | None = None
    job: JobSpec = JobSpec()
    incidents: Annotated[tuple[Incident, ...], Field(max_length=10_000)] = ()


@dataclass(frozen=True, slots=True)
class Scenario:
    """The scenario of a simulation.

    Attributes:
        step: the time of a step on workers of speed 1.
        incidents: the events of every seed.
        sources: the sources of the figures of ``step``, ``seconds``, ``network`` and hosts (``spot.boot_s``), by name.
        measured_to: the largest measured number of workers; 0 if none was measured. Larger ones are extrapolation.
        network: the network by which reductions are forecast; None to take their time from the fitted step.
    """

    work: Workload
    step: StepTime
    seconds: Durations
    hosts: Sequence[HostKind]
    job: JobSpec
    incidents: Sequence[Incident] = ()
    sources: Mapping[str, Source] = field(default_factory=dict)
    measured_to: int = 0
    network: NamedNetwork | None = None

    @property
    def room(self) -> int:
        """The number of workers for which the hosts have room, and which the job uses."""
        places = sum(kind.count * kind.workers for kind in self.hosts)
        return min(places, self.work.shards, self.job.most or places)

    def run_with(self, **job: object) -> Scenario:
        """The same scenario with other settings of the job."""
        return replace(self, job=self.job.model_copy(update=job))

    def scaled(self, name: str, factor: float) -> Scenario:
        """The same scenario with one figure multiplied, to see how much a guess matters."""
        if name in LINK:
            assert self.network is not None
            return replace(self, network=self.network.model_copy(update={name: getattr(self.network, name) * factor}))
        if name in STEP:
            return replace(self, step=replace(self.step, **{name: getattr(self.step, name) * factor}))
        kind_name, _, figure = name.rpartition(".")
        if kind_name:
            kinds = [kind.scaled(figure, factor) if kind.name == kind_name else kind for kind in self.hosts]
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
"""The figures of a reduction, which the figures of a network replace."""

LINK = ("latency_s", "bytes_per_s", "gradient_bytes")
"""The figures of a network."""

LATENCY_S = 1e-4
"""The default latency of a network: as in a data centre; between two of them it is too small."""


@dataclass(frozen=True, slots=True)
class MeasuredFigures:
    """The figures of studies and runs.

    Attributes:
        step: the fitted time of a step; None if no step was measured.
        measured_to: the largest measured number of workers.
        guessed: the names of the step's figures that the measurements do not determine.
        damaged: sentences about lines of records that could not be read, and are left out.
    """

    step: StepTime | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    measured_to: int = 0
    guessed: Collection[str] = ()
    link: Mapping[str, float] = field(default_factory=dict)
    damaged: Sequence[str] = ()


def read_scenario(path: Path, measured: MeasuredFigures | None = None) -> Scenario:
    """Read a scenario from a TOML file. Figures that it does not have are the measured ones, or else defaults.

    Raises:
        JobError: the file cannot be read, or makes no sense; the message names the place.
    """
    file, measured = _file(path), measured or MeasuredFigures()
    fitted_figures = {} if measured.step is None else asdict(measured.step)
    _require_step(path, file.step, fitted_figures)
    step = StepTime(**{"a_r": 0.0, "b_r": 0.0, "gamma": 1.0, "b_c": 0.0, **fitted_figures, **file.step})
    if not step.a_c + step.b_c > 0:
        raise JobError(f"{path}: a step takes no time: step.a_c and step.b_c are 0")
    fitted = fitted_figures.keys() - {*measured.guessed}
    sources = {name: _source(name, file.step, fitted, "fitted") for name in STEP}
    file_seconds = file.seconds.model_dump(exclude_unset=True)
    seconds = Durations.model_validate({**measured.seconds, **file_seconds})
    sources |= {name: _source(name, file_seconds, measured.seconds) for name in Durations.model_fields}
    network = None if file.network is None else _network(path, file.network, measured.link, sources)
    hosts = [_with_trace_beside(kind, path.parent) for kind in file.hosts]
    sources |= {
        f"{kind.name}.{name}": _source(name, kind.model_fields_set) for kind in hosts for name in kind.figures()
    }
    measured_to = measured.measured_to
    scenario = Scenario(file.work, step, seconds, hosts, file.job, file.incidents, sources, measured_to, network)
    _require_room(path, scenario)
    return scenario


def _source(name: str, specified: Collection[str], measured: Collection[str] = (), kind: Source = "measured") -> Source:
    return "given" if name in specified else kind if name in measured else "default"


def _network(
    path: Path, specified: Mapping[str, float | str], measured: Mapping[str, float], sources: dict[str, Source]
) -> NamedNetwork:
    """The network with the file's figures, or else measured ones. The figures of a reduction lose their sources."""
    for name in REDUCTION:
        sources.pop(name, None)
    sources |= {name: _source(name, specified, measured) for name in LINK}
    try:
        return NamedNetwork.model_validate({"latency_s": LATENCY_S, **measured, **specified})
    except ValidationError as error:
        hint = "a study of two workers or more has the missing figures (--from with its folder)"
        raise JobError(f"{path}: network.{problems(error)}; {hint}") from error


def _file(path: Path) -> _File:
    try:
        with open_file(path) as file:
            text = file.read(LARGEST_FILE + 1)
        if len(text) > LARGEST_FILE:
            raise JobError(f"{path} is larger than {LARGEST_FILE} bytes: a scenario is a short text")
        document = tomllib.loads(text.decode("utf-8-sig").replace("\r\n", "\n"), parse_float=_number)
        # By way of JSON: strict validation takes lists and texts for tuples and paths from JSON alone.
        return _File.model_validate_json(json.dumps(document, default=str))
    except (OSError, Unreadable, UnicodeDecodeError) as error:
        raise JobError(f"the scenario {path} cannot be read: {error}") from error
    except RecursionError:
        raise JobError(f"{path} is nested too deep for a scenario") from None
    except ValidationError as error:
        raise JobError(f"{path}: {problems(error)}") from error
    except ValueError as error:  # also a number of thousands of digits
        raise JobError(f"{path} is no TOML: {error}") from error


def _number(text: str) -> float:
    """The number of a text; a whole one such as ``1e9`` becomes an int."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 2**63 else value


def _require_step(path: Path, specified: Mapping[str, float], fitted: Mapping[str, float]) -> None:
    for name, value in specified.items():
        if name not in STEP or not (1.0 if name == "gamma" else 0.0) <= value <= 1e9:
            raise JobError(f"{path}: step.{name} = {value}: {', '.join(STEP)}, in seconds from 0; gamma from 1")
    if "a_c" not in specified and "a_c" not in fitted:
        raise JobError(
            f"{path} does not give the time of a step, and nothing was measured: use --from with the folder of a study "
            f"or a run, or write a table [step] with a_c (seconds of a shard) and the like"
        )


def _with_trace_beside(kind: HostKind, folder: Path) -> HostKind:
    if kind.trace is None:
        return kind
    if kind.between_losses_s is not None:
        raise JobError(f"hosts {kind.name}: trace and between_losses_s exclude each other: leave one out")
    return kind.model_copy(update={"trace": folder / kind.trace})


def _require_room(path: Path, scenario: Scenario) -> None:
    names = [kind.name for kind in scenario.hosts]
    if len(set(names)) < len(names):
        raise JobError(f"{path}: two kinds of hosts have the same name: {', '.join(names)}")
    if scenario.room < scenario.job.fewest:
        raise JobError(
            f"{path}: job.fewest is {scenario.job.fewest}, but all hosts together have room for {scenario.room} "
            f"workers of a job with {scenario.work.shards} shards"
        )
