"""What the coordinator knows of a job, in Prometheus' text format."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from unisono.errors import JobError, Unreadable
from unisono.membership import state as machine
from unisono.received import open_file, parse_json

END = 2**18
"""Bytes at the end of ``metrics.jsonl`` among which the newest step's line is looked for."""

MOST_LOGGED = 64
LONGEST_NAME = 128
"""Figures of the script, and characters of a name: more are left out, since each is a time series in Prometheus."""

LARGEST = 2**62
"""Of whole numbers: larger ones are no numbers of Prometheus."""

PHASES = ("forming", "training", "regrouping", "stopping", "over")
OF_LINES = {
    "loss": ("unisono_loss", "Mean loss over the newest global batch."),
    "epoch": ("unisono_epoch", "Epoch of the newest step, from 0."),
    "lr": ("unisono_learning_rate", "Learning rate of the first parameter group in the newest step."),
    "batch_size": ("unisono_batch_size", "Samples in the newest global batch."),
}
OURS = frozenset(
    (*OF_LINES, "step", "time", "position", "generation", "world_size", "samples_per_s", "shards", "lr_factor")
)
"""Numbers in lines that are no figures of the script, or have metrics of their own."""


def exposition(state: machine.State, line: Mapping[str, Any] | None, version: str) -> bytes:
    """The job as Prometheus scrapes it.

    Args:
        state: the coordinator's state.
        line: the newest step's line of ``metrics.jsonl``; None if there is none, or it is not of this job's host.
        version: the version of Unisono.

    Raises:
        JobError: the package that writes the format is not installed; says how to install it.
    """
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ImportError:
        raise JobError(
            "/metrics needs prometheus-client, which is not installed where the coordinator runs: pip install "
            "'unisono[prometheus]' (in a clone of Unisono: pip install -c constraints.txt '.[prometheus]')"
        ) from None
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(state, line, version))
    return bytes(generate_latest(registry))


class _Families:
    """The metrics, made when they are asked for."""

    def __init__(self, state: machine.State, line: Mapping[str, Any] | None, version: str) -> None:
        self._state, self._line, self._version = state, line, version

    def collect(self) -> Iterator[Any]:
        """All of them."""
        from prometheus_client.core import InfoMetricFamily

        yield InfoMetricFamily("unisono", "The version of Unisono.", {"version": self._version})
        yield from self._of_job()
        yield from self._of_workers()
        if self._line is not None and int(self._line["step"]) + 1 >= _step(self._state):
            yield from self._of_step(self._line)

    def _of_job(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily

        state = self._state
        phase = machine.status(state)["phase"]
        yield _gauges("unisono_job_phase", "1 for what the job does now.", "phase", {p: p == phase for p in PHASES})
        yield _gauge("unisono_generation", "Number of the newest generation of workers.", state.generation)
        yield _gauge("unisono_step", "Committed steps. Goes back where a job resumes.", _step(state))
        rate = max((worker.signs.samples_per_s for worker in state.members), default=0.0)
        yield _gauge("unisono_samples_per_second", "Samples of all workers together in a second.", rate)
        yield _gauge("unisono_workers_wanted", "Workers that are to train.", state.size)
        yield _gauge("unisono_workers_smallest", "The fewest workers that can be asked for.", state.limits[0])
        yield _gauge("unisono_workers_largest", "The most workers that can be asked for.", state.limits[1])
        connected = sum(agent.signs.connected for agent in state.agents.values())
        yield _gauge("unisono_agents", "Agents that are connected.", connected)
        about = "Members that were lost, or left on notice."
        yield CounterMetricFamily("unisono_departures", about, value=state.departures)
        yield CounterMetricFamily("unisono_restarts", "Lost workers that were replaced.", value=state.restarts)
        about = "Seconds that the newest generation took to form on its slowest member, by part."
        yield _gauges("unisono_regroup_duration_seconds", about, "part", state.seconds)

    def _of_workers(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        phases = Counter(map(self._state.phase_of, self._state.workers.values()))
        yield _gauges("unisono_workers", "Workers by what they do; those that train are working.", "phase", phases)
        about = "Seconds since a member's main thread made progress, by its own measure."
        still = GaugeMetricFamily("unisono_worker_still_seconds", about, labels=["worker", "host"])
        for worker in self._state.members:
            still.add_metric([worker.id, worker.host], worker.signs.pulse.still_s)
        yield still

    def _of_step(self, line: Mapping[str, Any]) -> Iterator[Any]:
        for field, (name, about) in OF_LINES.items():
            if _is_number(line.get(field)):
                yield _gauge(name, about, line[field])
        seconds = line.get("seconds")
        parts = _bounded(seconds) if type(seconds) is dict else {}
        yield _gauges("unisono_step_duration_seconds", "Seconds of the newest step, by part.", "part", parts)
        logged = _bounded({name: value for name, value in line.items() if name not in OURS})
        yield _gauges("unisono_logged", "What the script logged in the newest step, by name.", "name", logged)


def newest_line(folder: Path) -> Mapping[str, Any] | None:
    """The line of the newest step in a run folder's ``metrics.jsonl``; None if there is none that can be read."""
    with suppress(OSError, Unreadable), open_file(folder / "metrics.jsonl") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - END))
        for text in reversed(file.read(END).split(b"\n")):
            with suppress(Unreadable):
                found = parse_json(text) if b'"loss"' in text else None
                if isinstance(found, dict) and type(found.get("step")) is int:
                    return found
    return None


def _gauge(name: str, about: str, value: float) -> Any:
    from prometheus_client.core import GaugeMetricFamily

    return GaugeMetricFamily(name, about, value=value)


def _gauges(name: str, about: str, label: str, values: Mapping[Any, float]) -> Any:
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(name, about, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _step(state: machine.State) -> int:
    return max((worker.signs.step for worker in state.workers.values()), default=0)


def _bounded(figures: Mapping[str, Any]) -> Mapping[str, float]:
    """Those that are numbers and whose names can be told: a few, since each is a time series."""
    names = [name for name, value in figures.items() if _is_name(name) and _is_number(value)]
    return {name: figures[name] for name in names[:MOST_LOGGED]}


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < LARGEST)


def _is_name(text: str) -> bool:
    return len(text) <= LONGEST_NAME and text.isprintable()
