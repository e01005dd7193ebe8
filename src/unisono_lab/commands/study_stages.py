"""``unisono study --stages``: which schedule is the fastest for a model in stages."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from unisono.cli.tables import show_table
from unisono.errors import JobError
from unisono.host.cgroup import usable_cores
from unisono.launch.settings import Script


def study_stages(script: Script, devices: int, place: Path, **options: Any) -> int:
    """Measure all schedules, print them as a table, and name the best.

    Args:
        script: the script, which calls ``run.pipeline``.
        devices: the number of devices that hold the stages.
        place: the study's folder, which must be new.
        options: those of ``ScheduleStudy``; None for its default.

    Returns:
        the exit code: 0 if there are figures of every schedule, 1 if not.

    Raises:
        JobError: it cannot be measured, or the folder has something in it.
    """
    from unisono_lab.measure.schedules import ScheduleStudy, measure_schedules, table_of  # which load torch

    wanted = ScheduleStudy(script, devices, **{name: value for name, value in options.items() if value is not None})
    wanted.check()
    if place.exists() and any(place.iterdir()):
        raise JobError(f"{place} has something in it already: name another folder with --out")
    err, out = Console(stderr=True, highlight=False, emoji=False), Console(highlight=False, emoji=False)
    cores = usable_cores()
    if wanted.devices * (wanted.threads or 1) > cores:
        words = f"unisono: {wanted.devices} devices are too many for {cores} cores, unless they are GPUs: they wait for"
        err.print(Text(f"{words} cores, and not for each other", "red"), soft_wrap=True)
    figures = measure_schedules(wanted, place, lambda words: err.print(Text(f"unisono: {words}"), soft_wrap=True))
    head, *rows = table_of(figures)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for number, name in enumerate(head):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    show_table(table, out)
    for one in figures:
        if one.trouble:
            out.print(Text(f"{one.schedule}: {one.trouble}", "red"), soft_wrap=True)
    best = figures[0]
    if best.step_s:
        words = f'take run.pipeline(…, schedule="{best.schedule}"): {1000 * median(best.step_s):.1f} ms a step'
        out.print(Text(f"{words}. It changes no bit; more shards, which do, make the idle share smaller", "bold"))
    return int(any(one.trouble for one in figures))
