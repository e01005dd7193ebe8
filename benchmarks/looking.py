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
from benchmarks.elastic_job import PROGRAM, Job, running
from benchmarks.report import Grid
from benchmarks.side_by_side import await_steps, names


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


def processor_time(model: str, workers: int, batch: int, seconds: float) -> Grid:
    """What the page's process takes of a processor while a job trains: unlike a time, much the same on a busy machine.

    Args:
        model: a name in ``WORKLOADS``.
        workers: of the job.
        batch: of the job, in samples.
        seconds: how long it is looked at.
    """
    options = ["-n", str(workers), "--max-restarts", "3", "--page"]
    with running(options, [*PROGRAM, model, str(2 * workers), "sgd", str(batch)]) as job:
        job.until(lambda: len(names(job)) == workers, "all workers train")
        with looking(job):
            await_steps(job, 40)  # what its start takes is over
            time.sleep(2.0)
            page, first, begun = _page_of(job), len(job.commits(names(job)[0])), time.monotonic()
            before = sum(page.cpu_times()[:2])
            time.sleep(seconds)
            spent, took = sum(page.cpu_times()[:2]) - before, time.monotonic() - begun
            steps = len(job.commits(names(job)[0])) - first
    share = spent / took
    row = (
        f"{1e6 * spent / steps:.0f} µs",
        f"{1000 * took / steps:.1f} ms",
        f"{100 * share:.2f} %",
        str(psutil.cpu_count()),
    )
    return Grid(
        f"the page's process while somebody looks, for {seconds:g} s",
        ("processor time per step", "a step", "of one core", "cores"),
        [row],
        ("It has a low priority (nice 10): where workers need all cores, they get them first.",),
    )


def _page_of(job: Job) -> psutil.Process:
    assert job.launcher is not None
    family = psutil.Process(job.launcher.pid).children(recursive=True)
    return next(one for one in family if "unisono.dashboard.serve" in one.cmdline())
