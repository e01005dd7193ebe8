"""Pictures of the page, of a job in which workers come, go and die."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from benchmarks.chromium import LINK, chromium
from benchmarks.elastic_job import Job, running

STEPS = 1200
SCREENS = {"desktop": (1280, 1130), "phone": (390, 1240)}


def take(folder: Path) -> None:
    """Train, disturb, and take a picture of each size, in light and dark."""
    folder.mkdir(parents=True, exist_ok=True)
    options = ["-n", "1:4", "--here", "4", "--policy", "straggler", "--page"]
    with running(options, ["-m", "benchmarks.programs.shown"]) as job, chromium() as browser:
        page = browser.new_page(device_scale_factor=1, reduced_motion="reduce")
        _await(job, lambda: LINK.search(job.folder.with_name("output.txt").read_text()), "the link")
        found = LINK.search(job.folder.with_name("output.txt").read_text())
        assert found is not None
        page.goto(found[0])
        _disturb(job)
        for scheme in ("light", "dark"):
            for name, (width, height) in SCREENS.items():
                page.emulate_media(color_scheme=scheme)
                page.set_viewport_size({"width": width, "height": height})
                time.sleep(1)  # until all is laid out anew
                page.screenshot(path=folder / f"page-{name}-{scheme}.png")


def _disturb(job: Job) -> None:
    """Resize, kill, and have one leave, with some steps between."""
    _await_step(job, 150)
    job.control.resize(3)
    _await(job, lambda: len(job.roster()) == 3, "three workers")
    _await_step(job, 450)
    os.kill(job.pid(job.roster()[-1]), signal.SIGKILL)
    _await_step(job, 700)
    job.control.resize(4)
    _await(job, lambda: len(job.roster()) == 4, "four workers")
    _await_step(job, 950)
    job.control.leave(job.roster()[0])
    _await_step(job, STEPS)


def _await_step(job: Job, step: int) -> None:
    _await(job, lambda: (job.status().get("members") or [{"step": 0}])[0]["step"] >= step, f"step {step}")


def _await(job: Job, is_so: Any, words: str) -> None:
    job.until(lambda: bool(is_so()), words)
