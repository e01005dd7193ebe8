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

# A request to a metadata service, over HTTP; to be cancelled at any moment.

LARGEST = 2**18
"""Bytes of an answer: events of all machines of a group."""

ANSWERS_S = 2.0
"""The service is on this machine's own link: whoever does not answer by then is not there."""


@dataclass(frozen=True, slots=True)
class Query:
    """A request.

    Attributes:
        headers: the headers by which the service knows that nobody was tricked into the request.
        answers_s: the seconds until the whole answer has to be here.
    """

    target: str
    headers: Mapping[str, str] = field(default_factory=dict)
    method: str = "GET"
    body: bytes = b""
    answers_s: float = ANSWERS_S


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer; the names of its headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


async def ask(endpoint: Endpoint, query: Query) -> Reply:
    """Send a request on a connection of its own, and wait for the answer.

    No proxy is asked, and no other address is gone to, whatever the answer says.

    Raises:
        OSError: nobody answers, or not in time.
        Unreadable: the answer is no HTTP, or too large.
    """
    async with asyncio.timeout(query.answers_s):
        reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
        try:
            return await _converse(endpoint, query, reader, writer)
        except h11.ProtocolError as error:
            raise Unreadable(f"the answer is no HTTP: {error}") from error
        finally:
            writer.close()


async def _converse(
    endpoint: Endpoint, query: Query, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> Reply:
    line = h11.Connection(h11.CLIENT)
    fixed = {
        "Host": f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host,
        "Connection": "close",
        "Content-Length": str(len(query.body)),
    }
    headers = list({**fixed, **query.headers}.items())
    asked = (h11.Request(method=query.method, target=query.target, headers=headers), h11.Data(data=query.body))
    for part in (*asked, h11.EndOfMessage()):
        writer.write(line.send(part) or b"")
    status, named, body = 0, dict[str, str](), bytearray()
    while not isinstance(event := line.next_event(), h11.EndOfMessage):
        if event is h11.NEED_DATA:
            line.receive_data(await reader.read(2**14))
        elif isinstance(event, h11.Response):
            status = event.status_code
            named = {name.decode(): value.decode("latin-1") for name, value in event.headers}
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > LARGEST:
                raise Unreadable(f"the answer has more than {LARGEST} bytes")
        elif isinstance(event, h11.ConnectionClosed):
            raise ConnectionResetError("the connection was closed before the answer")
    return Reply(status, named, bytes(body))


Ask = Callable[[Query], Awaitable[Reply]]
"""Sends a request to the service."""


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that a cloud says about this machine.

    Attributes:
        takes_away: whether the machine is about to be taken away; else it is only told.
        event: the id by which the service is told that the machine may be taken now; empty if there is none.
    """

    words: str
    takes_away: bool = True
    event: str = ""


class Cloud:
    """The metadata service of a cloud. Its methods raise OSError and Unreadable, as requests do."""

    name: str
    pause_s: float

    async def is_here(self, ask: Ask) -> bool:
        """Whether this machine is one of this cloud."""
        raise NotImplementedError

    async def look(self, ask: Ask) -> list[Notice]:
        """What the service says now."""
        raise NotImplementedError

    async def left(self, ask: Ask, notice: Notice) -> None:
        """Nothing of the job runs here any more. Most clouds do not want to know."""


class Aws(Cloud):
    """EC2. The token of IMDSv2 is renewed when the service wants another one."""

    name = "aws"
    pause_s = 5.0
    _DATA = "/latest/meta-data/"
    _VALID_S = 21600
    _token = ""

    async def is_here(self, ask: Ask) -> bool:
        """Whether the service hands out a token."""
        wanted = {"X-aws-ec2-metadata-token-ttl-seconds": str(self._VALID_S)}
        reply = await ask(Query("/latest/api/token", wanted, method="PUT"))
        is_token = reply.status == 200 and re.fullmatch(rb"[\x21-\x7e]{8,1024}", reply.body.strip())
        self._token = reply.body.decode().strip() if is_token else ""
        return bool(self._token)

    async def look(self, ask: Ask) -> list[Notice]:
        """An interruption, and a recommendation to leave."""
        if not self._token and not await self.is_here(ask):
            raise Unreadable("it hands out no token")
        notices = []
        if (action := await self._data(ask, "spot/instance-action")) is not None:
            form = {"action": str, "time": str}
            what = chosen(form, action, "the instance action")
            if what["action"] not in ("terminate", "stop", "hibernate"):
                raise Unreadable(f"the instance action is {short(what['action'])}")
            notices.append(Notice(f"AWS takes this machine away ({what['action']}) at {short(what['time'])}"))
        if (advice := await self._data(ask, "events/recommendations/rebalance")) is not None:
            when = chosen({"noticeTime": str}, advice, "the recommendation")["noticeTime"]
            notices.append(
                Notice(f"AWS may soon take this machine away (recommended at {short(when)})", takes_away=False)
            )
        return notices

    async def _data(self, ask: Ask, what: str) -> dict[str, Any] | None:
        reply = await ask(Query(self._DATA + what, {"X-aws-ec2-metadata-token": self._token}))
        if reply.status == 404:
            return None
        if reply.status == 401:
            self._token = ""
        return parse_object(contents(reply, what))


class Gcp(Cloud):
    """Compute Engine. The service answers as soon as the machine is preempted, or after a while."""

    name = "gcp"
    pause_s = 0.2
    _WAITS_S = 10
    _INSTANCE = "/computeMetadata/v1/instance/"
    _ASKED = {"Metadata-Flavor": "Google"}  # noqa: RUF012 (nobody changes it)
    _seen = ""

    async def is_here(self, ask: Ask) -> bool:
        """Whether the service calls itself Google's."""
        reply = await ask(Query(f"{self._INSTANCE}preempted", self._ASKED))
        return self._is_googles(reply)

    async def look(self, ask: Ask) -> list[Notice]:
        """A preemption, which it waits for, and maintenance."""
        kind = await self._value(ask, "maintenance-event")
        waits = f"preempted?wait_for_change=true&timeout_sec={self._WAITS_S}&last_etag={self._seen or 0}"
        preempted = await self._value(ask, waits)
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

    async def _value(self, ask: Ask, what: str) -> str:
        reply = await ask(Query(self._INSTANCE + what, self._ASKED, answers_s=self._WAITS_S + 5))
        if not self._is_googles(reply):
            raise Unreadable("it is not the service of Google Cloud")
        if "wait_for_change" in what and re.fullmatch(r"[0-9a-zA-Z]{1,64}", tag := reply.headers.get("etag", "")):
            self._seen = tag
        return contents(reply, what).decode("latin-1").strip()

    @staticmethod
    def _is_googles(reply: Reply) -> bool:
        return reply.headers.get("metadata-flavor") == "Google"


class Azure(Cloud):
    """Virtual machines. Events of all machines of a group are told to each of them."""

    name = "azure"
    pause_s = 1.0
    _EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
    _NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    _ASKED = {"Metadata": "true"}  # noqa: RUF012 (nobody changes it)
    _patience_s = 150.0
    """Events are switched on by the first question, which takes up to two minutes."""

    async def is_here(self, ask: Ask) -> bool:
        """Whether the service knows the name of this machine."""
        return bool(await self._machine(ask))

    async def look(self, ask: Ask) -> list[Notice]:
        """Events of this machine."""
        reply = await ask(Query(self._EVENTS, self._ASKED, answers_s=self._patience_s))
        self._patience_s = 10.0
        form = {"Events": list[Any]}
        events = chosen(form, parse_object(contents(reply, "events")), "the answer")["Events"]
        if events and not (machine := await self._machine(ask)):
            raise Unreadable("it does not know this machine's name")
        return [notice for event in events if (notice := self._notice(event, machine)) is not None]

    async def left(self, ask: Ask, notice: Notice) -> None:
        """Azure need not wait until its time is over."""
        if notice.event:
            body = json.dumps({"StartRequests": [{"EventId": notice.event}]}).encode()
            headers = {**self._ASKED, "Content-Type": "application/json"}
            contents(await ask(Query(self._EVENTS, headers, method="POST", body=body)), "the approval")

    async def _machine(self, ask: Ask) -> str:
        reply = await ask(Query(self._NAME, self._ASKED))
        is_name = reply.status == 200 and re.fullmatch(rb"[A-Za-z0-9._-]{1,128}", reply.body)
        return reply.body.decode() if is_name else ""

    def _notice(self, event: Any, machine: str) -> Notice | None:
        form = {"EventId": str, "EventType": str, "EventStatus": str, "NotBefore": str, "Resources": list[str]}
        members = chosen(form, event, "an event")
        kind, machines = members["EventType"], members["Resources"]
        if machine not in machines:
            return None
        when = f" at {short(members['NotBefore'])}" if members["NotBefore"] else ""
        if kind not in ("Preempt", "Terminate"):
            return Notice(f"Azure announces {short(kind)} of this machine{when}", takes_away=False)
        is_alone = len(machines) == 1 and members["EventStatus"] == "Scheduled"  # an approval holds for all of them
        return Notice(f"Azure takes this machine away ({kind}{when})", event=members["EventId"] if is_alone else "")


CLOUDS: Mapping[str, type[Cloud]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}


def chosen(form: Mapping[str, Any], found: Any, what: str) -> dict[str, Any]:
    """Those members of a JSON object that are asked for. A service may add others.

    Raises:
        Unreadable: one is missing, or of another type.
    """
    if not isinstance(found, dict):
        raise Unreadable(f"{what} is {short(found)}, and no object")
    made: dict[str, Any] = value_of(form, {name: found[name] for name in form if name in found}, what)
    return made


def contents(reply: Reply, what: str) -> bytes:
    """The content of an answer.

    Raises:
        Unreadable: the service refuses.
    """
    if reply.status != 200:
        raise Unreadable(f"{what.partition('?')[0]}: the service refuses ({reply.status})")
    return reply.body


# Listens for notices of a cloud, beside the workers of a host. Whatever becomes of it, training goes on.

AGAIN_S = 5.0
"""Seconds until a service that has failed is asked again."""


@asynccontextmanager
async def listening_to_cloud(
    source: NoticeSource | None, say: Callable[[str], None], heard: Callable[[Notice], None], pace: float = 1.0
) -> AsyncIterator[None]:
    """Until the context ends, a notice is said to the person at the terminal, and a function is called with it.

    ``pace`` is the factor of all pauses between two questions.
    """
    if source is None:
        yield
        return
    listener = NoticeListener(source, say, heard, pace)
    task = asyncio.create_task(listener.keep())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await listener.left()


class NoticeListener:
    """Asks a metadata service again and again. Arguments as of :func:`listening_to_cloud`."""

    def __init__(
        self, source: NoticeSource, say: Callable[[str], None], heard: Callable[[Notice], None], pace: float
    ) -> None:
        self._source, self._say, self._heard, self._pace = source, say, heard, pace
        self._cloud: Cloud | None = None
        self._last: Notice | None = None
        self._told: set[str] = set()

    async def keep(self) -> None:
        """Listen until the machine is taken away, or there is no cloud."""
        self._cloud = await self._find()
        if self._cloud is None:
            return
        obstacle = ""
        while self._last is None:
            before, obstacle = obstacle, await self._look(self._cloud)
            if obstacle and not before:
                self._say(
                    f"no notices of {self._cloud.name} can be heard ({obstacle}); training goes on, and its metadata "
                    f"service is asked again every {AGAIN_S:g} s"
                )
            elif before and not obstacle:
                self._say(f"notices of {self._cloud.name} can be heard again")
            await asyncio.sleep(self._pace * (AGAIN_S if obstacle else self._cloud.pause_s))

    async def left(self) -> None:
        """Nothing of the job runs here any more. It is no matter if the cloud does not hear of it."""
        if self._cloud is not None and self._last is not None:
            with suppress(OSError, Unreadable):
                await self._cloud.left(self._ask(self._cloud), self._last)

    async def _find(self) -> Cloud | None:
        """The cloud of this machine: all are asked at the same time."""
        clouds = [CLOUDS[name]() for name in self._source.endpoints]
        if self._source.cloud != AUTO:
            return clouds[0]
        are_here = await asyncio.gather(*map(self._is_here, clouds))
        here = [cloud for cloud, is_here in zip(clouds, are_here, strict=True) if is_here]
        if here:
            self._say(f"notices of {here[0].name} are listened for")
            return here[0]
        self._say(f"no metadata service of a cloud answers here ({', '.join(CLOUDS)}): there are no notices")
        return None

    async def _is_here(self, cloud: Cloud) -> bool:
        with suppress(OSError, Unreadable):
            return await cloud.is_here(self._ask(cloud))
        return False

    async def _look(self, cloud: Cloud) -> str:
        """Ask once; what is in the way, if something is."""
        try:
            notices = await cloud.look(self._ask(cloud))
        except TimeoutError:
            return "no answer in time"
        except (OSError, Unreadable) as error:
            return str(error)
        for notice in notices:
            self._hear(notice)
        return ""

    def _hear(self, notice: Notice) -> None:
        if notice.words in self._told:
            return
        self._told.add(notice.words)
        if notice.takes_away:
            self._last = self._last or notice
        self._heard(notice)

    def _ask(self, cloud: Cloud) -> Ask:
        return partial(ask, self._source.endpoints[cloud.name])
