"""The metrics of a job, as the coordinator knows them, in Prometheus' text format."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from unisono.errors import JobError, Unreadable
from unisono.membership import state as machine
from unisono.received import open_file, parse_json

END = 2**18
"""The number of bytes at the end of ``metrics.jsonl`` in which the line of the newest step is looked for."""

MOST_LOGGED = 64
LONGEST_NAME = 128
"""The most figures of the script, and characters of a name. Each figure is a time series in Prometheus."""

LARGEST = 2**62
"""The limit of whole numbers, beyond which they are left out."""

PHASES = ("forming", "training", "regrouping", "stopping", "over")
OF_LINES = {
    "loss": ("loss", "Mean loss over the newest global batch."),
    "epoch": ("epoch", "Epoch of the newest step, from 0."),
    "lr": ("learning_rate", "Learning rate of the first parameter group in the newest step."),
    "batch_size": ("batch_size", "Samples in the newest global batch."),
}
OURS = frozenset(
    (*OF_LINES, "step", "time", "position", "generation", "world_size", "samples_per_s", "shards", "lr_factor")
)
"""The numbers in a line that are no figures of the script, or have metrics of their own."""


def exposition(state: machine.State, line: Mapping[str, Any] | None, version: str) -> bytes:
    """The text that Prometheus scrapes, with the newest line of ``metrics.jsonl`` if this host has one.

    Raises:
        JobError: the package that writes the format is not installed; says how to install it.
    """
    try:
        from prometheus_client import generate_latest
    except ImportError:
        raise JobError(
            "/metrics needs prometheus-client, which is not installed where the coordinator runs: pip install "
            "'unisono[prometheus]' (in a clone of Unisono: pip install -c constraints.txt '.[prometheus]')"
        ) from None
    if line is not None and int(line["step"]) + 1 < _step(state):
        line = None
    collector: Any = SimpleNamespace(collect=lambda: _families(state, line or {}, version))
    return bytes(generate_latest(collector))


def _families(state: machine.State, line: Mapping[str, Any], version: str) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

    yield InfoMetricFamily("unisono", "The version of Unisono.", {"version": version})
    yield CounterMetricFamily(
        "unisono_departures", "Members that were lost, or left on notice.", value=state.departures
    )
    yield CounterMetricFamily("unisono_restarts", "Lost workers that were replaced.", value=state.restarts)
    for name, about, value in (*_figures(state), *_figures_of_step(line)):
        yield GaugeMetricFamily(f"unisono_{name}", about, value=value)
    for name, about, labels, values in (*_labelled(state), *_labelled_of_step(line)):
        family = GaugeMetricFamily(f"unisono_{name}", about, labels=labels)
        for key, value in values.items():
            family.add_metric([key] if isinstance(key, str) else key, value)
        yield family


def _figures(state: machine.State) -> Iterator[tuple[str, str, float]]:
    yield "generation", "Number of the newest generation of workers.", state.generation
    yield "step", "Committed steps. Goes back where a job resumes.", _step(state)
    rate = max((worker.signs.samples_per_s for worker in state.members), default=0.0)
    yield "samples_per_second", "Samples of all workers together in a second.", rate
    yield "workers_wanted", "Workers that are to train.", state.size
    yield "workers_smallest", "The fewest workers that can be asked for.", state.limits[0]
    yield "workers_largest", "The most workers that can be asked for.", state.limits[1]
    yield "agents", "Agents that are connected.", sum(agent.signs.connected for agent in state.agents.values())


def _figures_of_step(line: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    for field, (name, about) in OF_LINES.items():
        if _is_number(line.get(field)):
            yield name, about, line[field]


Labelled = tuple[str, str, list[str], Mapping[Any, float]]
"""A family of gauges: its name, its description, its labels, and a number for each value of them."""


def _labelled(state: machine.State) -> Iterator[Labelled]:
    phase = machine.status(state)["phase"]
    yield "job_phase", "1 for what the job does now.", ["phase"], {other: other == phase for other in PHASES}
    about = "Seconds that the newest generation took to form on its slowest member, by part."
    yield "regroup_duration_seconds", about, ["part"], state.seconds
    phases = Counter(map(state.phase_of, state.workers.values()))
    yield "workers", "Workers by what they do; those that train are working.", ["phase"], phases
    about = "Seconds since a member's main thread made progress, by its own measure."
    seconds = {(worker.id, worker.host): worker.signs.pulse.still_s for worker in state.members}
    yield "worker_still_seconds", about, ["worker", "host"], seconds


def _labelled_of_step(line: Mapping[str, Any]) -> Iterator[Labelled]:
    if line:
        seconds = line.get("seconds")
        parts = _bounded(seconds) if type(seconds) is dict else {}
        yield "step_duration_seconds", "Seconds of the newest step, by part.", ["part"], parts
        logged = _bounded({name: value for name, value in line.items() if name not in OURS})
        yield "logged", "What the script logged in the newest step, by name.", ["name"], logged


def newest_line(folder: Path) -> Mapping[str, Any] | None:
    """The line of the newest step in a run folder's ``metrics.jsonl``; None if there is none that can be read."""
    with suppress(OSError, Unreadable), open_file(folder / "metrics.jsonl") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - END))
        for text in reversed(file.read(END).split(b"\n")):
            with suppress(Unreadable):
                line = parse_json(text) if b'"loss"' in text else None
                if isinstance(line, dict) and type(line.get("step")) is int:
                    return line
    return None


def _step(state: machine.State) -> int:
    return max((worker.signs.step for worker in state.workers.values()), default=0)


def _bounded(figures: Mapping[str, Any]) -> Mapping[str, float]:
    names = [name for name, value in figures.items() if _is_name(name) and _is_number(value)]
    return {name: figures[name] for name in names[:MOST_LOGGED]}


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < LARGEST)


def _is_name(text: str) -> bool:
    return len(text) <= LONGEST_NAME and text.isprintable()
