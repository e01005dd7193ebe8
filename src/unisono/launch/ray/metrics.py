"""The figures of a job in Ray's own metrics: those of the coordinator's ``/metrics``, under the same names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray.util.metrics import Counter, Gauge

from unisono.errors import JobError, LaunchError
from unisono.launch.elastic.address import Control

RUN = "run"
"""The tag that tells jobs apart; ``job`` is Prometheus' own."""


class RayMetrics:
    """Passes on what the coordinator tells. Ray puts ``ray_`` before each name, and tags of its own beside ours.

    Args:
        run: the value of our tag: the name of the run folder.
        say: a function that shows a line to the person at the terminal.
    """

    def __init__(self, run: str, say: Callable[[str], None]) -> None:
        self._run, self._say = run, say
        self._made: dict[str, Any] = {}
        self._counted: dict[str, float] = {}
        self._obstacle = ""

    def show(self, control: Control) -> None:
        """Ask the coordinator, and pass it on; a coordinator that does not answer just now is asked again later."""
        try:
            text = control.metrics()
        except LaunchError:
            return
        except JobError as error:
            if str(error) != self._obstacle:
                self._say(f"Ray's metrics have no figures of this job: {error}")
            self._obstacle = str(error)
            return
        from prometheus_client.parser import text_string_to_metric_families

        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._pass_on(family, sample)

    def _pass_on(self, family: Any, sample: Any) -> None:
        kind = Counter if family.type == "counter" else Gauge
        if family.name not in self._made:
            self._made[family.name] = kind(family.name, family.documentation, tag_keys=(RUN, *sample.labels))
        made, tags = self._made[family.name], {RUN: self._run, **sample.labels}
        if kind is Gauge:
            made.set(sample.value, tags)
            return
        more = sample.value - self._counted.get(family.name, 0)  # our counters have no labels
        self._counted[family.name] = sample.value
        if more > 0:
            made.inc(more, tags)
