"""Pictures of single steps in a study's report."""

from __future__ import annotations

from collections.abc import Sequence

from unisono_lab.analysis.timed_steps import TimedStep
from unisono_lab.report.charts import Chart
from unisono_lab.timeline.picture import drawn


def step_charts(steps: Sequence[TimedStep]) -> list[Chart]:
    """What each worker did when, in the median step of a run on the most workers."""
    found = []
    for place, step in enumerate(steps, start=1):
        label = f"{step.label}: " if step.label else ""
        title = f"{label}one step of {step.workers} worker{'s' if step.workers > 1 else ''}, {step.mode} scaling"
        words = " ".join(step.explanation.words)
        found.append(Chart(f"step-{place}", title, words, drawn(step.timelines, step.explanation)))
    return found
