"""Somebody who looks at the page of a job, as a browser does, but draws nothing: that is another machine's work."""

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from benchmarks.chromium import LINK
from benchmarks.elastic_job import Job


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
