"""What the metadata services of the large clouds say about a machine that is about to be taken away.

- AWS: "Spot Instance interruption notices" in the EC2 User Guide: two minutes; asked every 5 s; IMDSv2.
- Google Cloud: "Spot VMs" and "Query metadata server for maintenance event notices" of Compute Engine: 30 s.
- Azure: "Scheduled Events for Linux VMs": at least 30 s; asked every second.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import h11

from unisono.errors import Unreadable
from unisono.launch.settings import AUTO, Endpoint, NoticeSource
from unisono.received import parse_object, short, value_of

# Requests to a metadata service over HTTP, which may be cancelled at any moment.

LARGEST = 2**18
"""The most bytes of a reply: Azure lists the events of all machines of a group."""

TIMEOUT_S = 2.0
"""The service is on this machine's own link: one that does not answer within this time does not exist."""


@dataclass(frozen=True, slots=True)
class Query:
    """A request.

    Attributes:
        headers: the headers that the service requires, since a forged request (SSRF) would lack them.
        timeout_s: the seconds until the whole reply must have arrived.
    """

    target: str
    headers: Mapping[str, str] = field(default_factory=dict)
    method: str = "GET"
    body: bytes = b""
    timeout_s: float = TIMEOUT_S


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply; the names of its headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


async def ask(endpoint: Endpoint, query: Query) -> Reply:
    """Send a request on a connection of its own, and wait for the reply.

    The request uses no proxy, and follows no redirection.

    Raises:
        OSError: no reply has come in time.
        Unreadable: the reply is no HTTP, or too large.
    """
    async with asyncio.timeout(query.timeout_s):
        reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
        try:
            return await _exchange(endpoint, query, reader, writer)
        except h11.ProtocolError as error:
            raise Unreadable(f"the reply is no HTTP: {error}") from error
        finally:
            writer.close()


async def _exchange(
    endpoint: Endpoint, query: Query, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> Reply:
    connection = h11.Connection(h11.CLIENT)
    fixed = {
        "Host": f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host,
        "Connection": "close",
        "Content-Length": str(len(query.body)),
    }
    request = h11.Request(method=query.method, target=query.target, headers=list({**fixed, **query.headers}.items()))
    for part in (request, h11.Data(data=query.body), h11.EndOfMessage()):
        writer.write(connection.send(part) or b"")
    status, headers, body = 0, dict[str, str](), bytearray()
    while not isinstance(event := connection.next_event(), h11.EndOfMessage):
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(2**14))
        elif isinstance(event, h11.Response):
            status = event.status_code
            headers = {name.decode(): value.decode("latin-1") for name, value in event.headers}
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > LARGEST:
                raise Unreadable(f"the reply has more than {LARGEST} bytes")
        elif isinstance(event, h11.ConnectionClosed):
            raise ConnectionResetError("the connection was closed before the reply")
    return Reply(status, headers, bytes(body))


Ask = Callable[[Query], Awaitable[Reply]]
"""Sends a request to the service."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A cloud's announcement about this machine.

    Attributes:
        text: the announcement, for people.
        takes_away: whether the machine is about to be taken away; otherwise the notice is only shown.
        event: the id to approve the event with, so that the cloud may take the machine at once; empty if there is none.
    """

    text: str
    takes_away: bool = True
    event: str = ""


class Cloud:
    """The metadata service of a cloud. Its methods raise OSError and Unreadable, as requests do."""

    name: str
    pause_s: float

    async def is_here(self, ask: Ask) -> bool:
        """Whether this machine is one of this cloud."""
        raise NotImplementedError

    async def read_notices(self, ask: Ask) -> list[Notice]:
        """The notices that the service gives now."""
        raise NotImplementedError

    async def approve(self, ask: Ask, notice: Notice) -> None:
        """Tell the service that nothing of the job runs here any more. Most clouds have no request for it."""


class Aws(Cloud):
    """EC2. The token of IMDSv2 is renewed when the service refuses it."""

    name = "aws"
    pause_s = 5.0
    _DATA = "/latest/meta-data/"
    _VALID_S = 21600
    _token = ""

    async def is_here(self, ask: Ask) -> bool:
        """Whether the service hands out a token."""
        lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(self._VALID_S)}
        reply = await ask(Query("/latest/api/token", lifetime, method="PUT"))
        is_token = reply.status == 200 and re.fullmatch(rb"[\x21-\x7e]{8,1024}", reply.body.strip())
        self._token = reply.body.decode().strip() if is_token else ""
        return bool(self._token)

    async def read_notices(self, ask: Ask) -> list[Notice]:
        """An interruption, and a recommendation to leave."""
        if not self._token and not await self.is_here(ask):
            raise Unreadable("it hands out no token")
        notices = []
        if (action := await self._data(ask, "spot/instance-action")) is not None:
            members = members_of(action, {"action": str, "time": str}, "the instance action")
            if members["action"] not in ("terminate", "stop", "hibernate"):
                raise Unreadable(f"the instance action is {short(members['action'])}")
            notices.append(Notice(f"AWS takes this machine away ({members['action']}) at {short(members['time'])}"))
        if (advice := await self._data(ask, "events/recommendations/rebalance")) is not None:
            when = members_of(advice, {"noticeTime": str}, "the recommendation")["noticeTime"]
            notices.append(
                Notice(f"AWS may soon take this machine away (recommended at {short(when)})", takes_away=False)
            )
        return notices

    async def _data(self, ask: Ask, path: str) -> dict[str, Any] | None:
        reply = await ask(Query(self._DATA + path, {"X-aws-ec2-metadata-token": self._token}))
        if reply.status == 404:
            return None
        if reply.status == 401:
            self._token = ""
        return parse_object(contents(reply, path))


class Gcp(Cloud):
    """Compute Engine. The service answers as soon as the machine is preempted, or after ``_WAITS_S``."""

    name = "gcp"
    pause_s = 0.2
    _WAITS_S = 10
    _INSTANCE = "/computeMetadata/v1/instance/"
    _HEADERS = {"Metadata-Flavor": "Google"}  # noqa: RUF012 (nobody changes it)
    _etag = ""

    async def is_here(self, ask: Ask) -> bool:
        """Whether the service calls itself Google's."""
        reply = await ask(Query(f"{self._INSTANCE}preempted", self._HEADERS))
        return self._is_googles(reply)

    async def read_notices(self, ask: Ask) -> list[Notice]:
        """A preemption, which it waits for, and maintenance."""
        kind = await self._value(ask, "maintenance-event")
        path = f"preempted?wait_for_change=true&timeout_sec={self._WAITS_S}&last_etag={self._etag or 0}"
        preempted = await self._value(ask, path)
        notices = []
        if preempted not in ("TRUE", "FALSE"):
            raise Unreadable(f"'preempted' is {short(preempted)}")
        if preempted == "TRUE":
            notices.append(Notice("Google Cloud takes this machine away (preempted)"))
        if kind in ("MIGRATE_ON_HOST_MAINTENANCE", "TERMINATE_ON_HOST_MAINTENANCE"):
            notices.append(Notice(f"Google Cloud announces maintenance of this machine ({kind})", takes_away=False))
        elif kind != "NONE":
            raise Unreadable(f"'maintenance-event' is {short(kind)}")
        return notices

    async def _value(self, ask: Ask, path: str) -> str:
        reply = await ask(Query(self._INSTANCE + path, self._HEADERS, timeout_s=self._WAITS_S + 5))
        if not self._is_googles(reply):
            raise Unreadable("it is not the service of Google Cloud")
        if "wait_for_change" in path and re.fullmatch(r"[0-9a-zA-Z]{1,64}", tag := reply.headers.get("etag", "")):
            self._etag = tag
        return contents(reply, path).decode("latin-1").strip()

    @staticmethod
    def _is_googles(reply: Reply) -> bool:
        return reply.headers.get("metadata-flavor") == "Google"


class Azure(Cloud):
    """Virtual machines. The service lists the events of all machines of a group on each of them."""

    name = "azure"
    pause_s = 1.0
    _EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
    _NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    _HEADERS = {"Metadata": "true"}  # noqa: RUF012 (nobody changes it)
    _timeout_s = 150.0
    """The first request switches events on, which takes up to two minutes."""

    async def is_here(self, ask: Ask) -> bool:
        """Whether the service knows the name of this machine."""
        return bool(await self._machine(ask))

    async def read_notices(self, ask: Ask) -> list[Notice]:
        """Events of this machine."""
        reply = await ask(Query(self._EVENTS, self._HEADERS, timeout_s=self._timeout_s))
        self._timeout_s = 10.0
        events = members_of(parse_object(contents(reply, "events")), {"Events": list[Any]}, "the reply")["Events"]
        if events and not (machine := await self._machine(ask)):
            raise Unreadable("it does not know this machine's name")
        return [notice for event in events if (notice := self._notice(event, machine)) is not None]

    async def approve(self, ask: Ask, notice: Notice) -> None:
        """Approve the event, so that Azure need not wait for its time."""
        if notice.event:
            body = json.dumps({"StartRequests": [{"EventId": notice.event}]}).encode()
            headers = {**self._HEADERS, "Content-Type": "application/json"}
            contents(await ask(Query(self._EVENTS, headers, method="POST", body=body)), "the approval")

    async def _machine(self, ask: Ask) -> str:
        reply = await ask(Query(self._NAME, self._HEADERS))
        is_name = reply.status == 200 and re.fullmatch(rb"[A-Za-z0-9._-]{1,128}", reply.body)
        return reply.body.decode() if is_name else ""

    def _notice(self, event: Any, machine: str) -> Notice | None:
        types = {"EventId": str, "EventType": str, "EventStatus": str, "NotBefore": str, "Resources": list[str]}
        members = members_of(event, types, "an event")
        kind, machines = members["EventType"], members["Resources"]
        if machine not in machines:
            return None
        when = f" at {short(members['NotBefore'])}" if members["NotBefore"] else ""
        if kind not in ("Preempt", "Terminate"):
            return Notice(f"Azure announces {short(kind)} of this machine{when}", takes_away=False)
        is_alone = len(machines) == 1 and members["EventStatus"] == "Scheduled"  # an approval holds for all of them
        return Notice(f"Azure takes this machine away ({kind}{when})", event=members["EventId"] if is_alone else "")


CLOUDS: Mapping[str, type[Cloud]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}


def members_of(value: Any, types: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Those members of a JSON object that ``types`` names. A service may add others.

    Raises:
        Unreadable: a member is missing, or of another type; the value is called ``name``.
    """
    if not isinstance(value, dict):
        raise Unreadable(f"{name} is {short(value)}, and no object")
    members: dict[str, Any] = value_of(types, {member: value[member] for member in types if member in value}, name)
    return members


def contents(reply: Reply, path: str) -> bytes:
    """The content of a reply.

    Raises:
        Unreadable: the service refuses.
    """
    if reply.status != 200:
        raise Unreadable(f"{path.partition('?')[0]}: the service refuses ({reply.status})")
    return reply.body


# Listens for notices of a cloud, beside the workers of a host. Training goes on whatever becomes of the listener.

AGAIN_S = 5.0
"""Seconds until a service that has failed is asked again."""


@asynccontextmanager
async def listening_to_cloud(
    source: NoticeSource | None, say: Callable[[str], None], on_notice: Callable[[Notice], None], pace: float = 1.0
) -> AsyncIterator[None]:
    """Until the context ends, call ``on_notice`` with each notice, and show with ``say`` whether notices can be read.

    ``pace`` is the factor of all pauses between two requests.
    """
    if source is None:
        yield
        return
    listener = NoticeListener(source, say, on_notice, pace)
    task = asyncio.create_task(listener.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await listener.approve()


class NoticeListener:
    """Asks a metadata service again and again. Arguments as of :func:`listening_to_cloud`."""

    def __init__(
        self, source: NoticeSource, say: Callable[[str], None], on_notice: Callable[[Notice], None], pace: float
    ) -> None:
        self._source, self._say, self._on_notice, self._pace = source, say, on_notice, pace
        self._cloud: Cloud | None = None
        self._final: Notice | None = None
        self._reported: set[str] = set()

    async def run(self) -> None:
        """Listen until the machine is taken away, or there is no cloud."""
        self._cloud = await self._find_cloud()
        if self._cloud is None:
            return
        obstacle = ""
        while self._final is None:
            before, obstacle = obstacle, await self._poll(self._cloud)
            if obstacle and not before:
                self._say(
                    f"notices from {self._cloud.name} cannot be read ({obstacle}); training goes on, and its metadata "
                    f"service is asked again every {AGAIN_S:g} s"
                )
            elif before and not obstacle:
                self._say(f"notices from {self._cloud.name} can be read again")
            await asyncio.sleep(self._pace * (AGAIN_S if obstacle else self._cloud.pause_s))

    async def approve(self) -> None:
        """Tell the cloud that nothing of the job runs here any more; a request that fails does no harm."""
        if self._cloud is not None and self._final is not None:
            with suppress(OSError, Unreadable):
                await self._cloud.approve(self._ask(self._cloud), self._final)

    async def _find_cloud(self) -> Cloud | None:
        """The cloud of this machine. All clouds are asked at the same time: each may take ``TIMEOUT_S``."""
        clouds = [CLOUDS[name]() for name in self._source.endpoints]
        if self._source.cloud != AUTO:
            return clouds[0]
        are_here = await asyncio.gather(*map(self._is_here, clouds))
        here = [cloud for cloud, is_here in zip(clouds, are_here, strict=True) if is_here]
        if here:
            self._say(f"this host listens for notices from {here[0].name}")
            return here[0]
        self._say(f"no metadata service of a cloud answers here ({', '.join(CLOUDS)}): there are no notices")
        return None

    async def _is_here(self, cloud: Cloud) -> bool:
        with suppress(OSError, Unreadable):
            return await cloud.is_here(self._ask(cloud))
        return False

    async def _poll(self, cloud: Cloud) -> str:
        """Ask once, and report what is new. Returns why the service could not be read; empty if it could."""
        try:
            notices = await cloud.read_notices(self._ask(cloud))
        except TimeoutError:
            return "no answer in time"
        except (OSError, Unreadable) as error:
            return str(error)
        for notice in notices:
            self._report(notice)
        return ""

    def _report(self, notice: Notice) -> None:
        if notice.text in self._reported:
            return
        self._reported.add(notice.text)
        if notice.takes_away:
            self._final = self._final or notice
        self._on_notice(notice)

    def _ask(self, cloud: Cloud) -> Ask:
        return partial(ask, self._source.endpoints[cloud.name])
