"""A stand-in for the metadata services of three clouds, on loopback, as their documentation describes them."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKEN = "AQAEAJ-a-token-of-IMDSv2=="  # noqa: S105
MACHINE = "worker-vm_3"
ACTION = {"action": "terminate", "time": "2026-11-24T14:22:00Z"}
PREEMPT = {
    "EventId": "602d9444-d2cd-49c7-8624-8643e7171297",
    "EventType": "Preempt",
    "ResourceType": "VirtualMachine",
    "Resources": [MACHINE],
    "EventStatus": "Scheduled",
    "NotBefore": "Tue, 24 Nov 2026 14:22:00 GMT",
    "Description": "",
    "EventSource": "Platform",
    "DurationInSeconds": -1,
}


class Metadata:
    """What a cloud says of this machine. A test changes it while it is asked.

    Attributes:
        cloud: the one whose machine this is; an empty one answers nothing.
        instance: documents by their paths, of AWS.
        preempted, maintenance: of Google Cloud.
        events, approved: of Azure.
        raw: bytes that stand in the place of any further answer.
        hangs: whether no answer comes at all; changed under ``changed``.
        asked: the method and path of each request.
    """

    def __init__(self, cloud: str) -> None:
        self.cloud = cloud
        self.instance: dict[str, Any] = {}
        self.preempted, self.maintenance, self._etag = "FALSE", "NONE", 1
        self.events: list[dict[str, Any]] = []
        self.approved: list[str] = []
        self.raw: bytes | None = None
        self.hangs = False
        self.token = TOKEN
        self.asked: list[tuple[str, str]] = []
        self.changed = threading.Condition()
        self.port = 0

    @property
    def variables(self) -> Any:
        """By which the clouds' libraries, and ours, find it."""
        where = f"127.0.0.1:{self.port}"
        return {
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{where}",
            "GCE_METADATA_HOST": where,
            "AZURE_POD_IDENTITY_AUTHORITY_HOST": f"http://{where}",
        }

    def hang(self, does: bool) -> None:
        """Answer nobody from now on, or again."""
        with self.changed:
            self.hangs = does
            self.changed.notify_all()

    def take_away(self) -> None:
        """Say that the machine is taken away."""
        with self.changed:
            self.instance["/latest/meta-data/spot/instance-action"] = ACTION
            self.preempted, self._etag = "TRUE", 2
            self.events = [PREEMPT]
            self.changed.notify_all()

    def answer(self, method: str, target: str, headers: Any, body: bytes) -> tuple[int, dict[str, str], str]:
        """Status, headers and content."""
        self.asked.append((method, target))
        parts = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        match self.cloud:
            case "aws":
                return self._aws(method, parts.path, headers)
            case "gcp" if headers.get("Metadata-Flavor") == "Google":
                return self._gcp(parts.path, query)
            case "azure" if headers.get("Metadata") == "true" and "api-version" in query:
                return self._azure(method, parts.path, body)
        return 404, {}, "not found"

    def _aws(self, method: str, path: str, headers: Any) -> tuple[int, dict[str, str], str]:
        if (method, path) == ("PUT", "/latest/api/token"):
            is_asked = 1 <= int(headers.get("X-aws-ec2-metadata-token-ttl-seconds", "0")) <= 21600
            return (200, {}, self.token) if is_asked else (400, {}, "")
        if headers.get("X-aws-ec2-metadata-token") != self.token:
            return 401, {}, ""
        return (200, {}, json.dumps(self.instance[path])) if path in self.instance else (404, {}, "")

    def _gcp(self, path: str, query: dict[str, str]) -> tuple[int, dict[str, str], str]:
        with self.changed:
            if query.get("wait_for_change") == "true" and query.get("last_etag", "0") == str(self._etag):
                self.changed.wait(float(query["timeout_sec"]))
            values = {"preempted": self.preempted, "maintenance-event": self.maintenance}
            found = values.get(path.removeprefix("/computeMetadata/v1/instance/"))
            return (404 if found is None else 200), {"Metadata-Flavor": "Google", "ETag": str(self._etag)}, found or ""

    def _azure(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, str], str]:
        if path == "/metadata/instance/compute/name":
            return 200, {}, MACHINE
        if method == "POST":
            self.approved += [each["EventId"] for each in json.loads(body)["StartRequests"]]
            return 200, {}, ""
        return 200, {}, json.dumps({"DocumentIncarnation": 1, "Events": self.events})


@contextmanager
def metadata_service(cloud: str) -> Iterator[Metadata]:
    """A service on loopback, at any port, until the context ends."""
    found = Metadata(cloud)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            status, headers, text = found.answer(self.command, self.path, self.headers, body)
            with found.changed:
                found.changed.wait_for(lambda: not found.hangs)
            if found.raw is not None:
                self.close_connection = True
                with suppress(ConnectionError):  # nobody has to read all of it
                    self.wfile.write(found.raw)
                return
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(text.encode()))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_PUT = do_POST = _serve  # noqa: N815 (as the library calls them)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield found
    finally:
        found.hang(False)
        found.take_away()  # whoever waits goes on
        server.shutdown()
        thread.join()
        server.server_close()
