"""Somebody who looks at the page of a job, as a browser does, but draws nothing: that is another machine's work."""

import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import psutil

from benchmarks.chromium import LINK
from benchmarks.elastic_job import Job, running
from benchmarks.report import Grid

SLEPT = ("-m", "benchmarks.programs.slept")
ENOUGH_STEPS = 100_000
WARM_UP_STEPS = 40
SETTLING_S = 5.0


@contextmanager
def looking(job: Job) -> Iterator[None]:
    """Until the context ends, all that a page sends is read."""
    printed = job.folder.with_name("output.txt")
    job.until(lambda: LINK.search(printed.read_text(errors="replace")) is not None, "the link of the page")
    found = LINK.search(printed.read_text(errors="replace"))
    assert found is not None
    where = urlsplit(found[0])
    connection = http.client.HTTPConnection(where.hostname or "", where.port)
    origin = {"Origin": f"http://{where.netloc}"}
    connection.request("POST", "/enter", json.dumps({"key": where.fragment}), origin)
    answer = connection.getresponse()
    cookie, page = answer.getheader("set-cookie", "").partition(";")[0], json.loads(answer.read())["page"]
    connection.request("GET", "/stream", headers={"Cookie": cookie, "X-Unisono-Page": page})
    stream = connection.getresponse()
    assert stream.status == 200, stream.read()
    reader = threading.Thread(target=_read, args=(stream,), daemon=True)
    reader.start()
    yield
    connection.close()


def _read(stream: http.client.HTTPResponse) -> None:
    try:
        while stream.read1(2**16):
            pass
    except (OSError, ValueError, AttributeError, http.client.HTTPException):  # it was closed, or the job has ended
        return


def processor_time(workers: int, step_ms: float, seconds: float) -> Grid:
    """What the page's process takes of a processor while a job trains: unlike a time, much the same on a busy machine.

    Args:
        workers: of the job, which sleep in place of computing: so a step takes as long as it is to take.
        step_ms: how long that is, in milliseconds.
        seconds: how long it is looked at.
    """
    options = ["-n", str(workers), "--max-restarts", "3", "--page"]
    with running(options, [*SLEPT, str(workers), str(step_ms), str(ENOUGH_STEPS)]) as job, looking(job):
        job.until(lambda: _steps(job) >= WARM_UP_STEPS, "the job trains")
        page = _page_of(job)
        time.sleep(SETTLING_S)  # what its start takes is over
        first, before, begun = _steps(job), sum(page.cpu_times()[:2]), time.monotonic()
        time.sleep(seconds)
        spent, took = sum(page.cpu_times()[:2]) - before, time.monotonic() - begun
        steps = _steps(job) - first
    row = (
        f"{1e6 * spent / steps:.0f} µs",
        f"{1000 * took / steps:.1f} ms",
        f"{100 * spent / took:.2f} %",
        str(psutil.cpu_count()),
    )
    return Grid(
        f"the page's process while somebody looks, for {seconds:g} s, and workers sleep {step_ms:g} ms in each step",
        ("processor time per step", "a step", "of one core", "cores"),
        [row],
        ("It has a low priority (nice 10): where workers need all cores, they get them first.",),
    )


def _steps(job: Job) -> int:
    path = job.folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _page_of(job: Job) -> psutil.Process:
    assert job.launcher is not None
    family = psutil.Process(job.launcher.pid).children(recursive=True)
    return next(one for one in family if "page" in one.cmdline())
