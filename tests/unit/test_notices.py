"""Notices of clouds: what is heard of their metadata services, and what is not taken from them."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any

import pytest

from metadata_service import ACTION, MACHINE, PREEMPT, Metadata, metadata_service
from unisono.errors import JobError
from unisono.launch.cloud_notices import LARGEST, Notice, Query, ask, listening_to_cloud
from unisono.launch.settings import LINK_LOCAL, VARIABLES, Endpoint, NoticeSource

pytestmark = pytest.mark.unit

CLOUDS = list(VARIABLES)
PATIENCE_S = 30.0


class Ear:
    """What a listener has said, and heard."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.heard: list[Notice] = []
        self._changed = asyncio.Event()

    def say(self, words: str) -> None:
        self.said.append(words)
        self._changed.set()

    def hear(self, notice: Notice) -> None:
        self.heard.append(notice)
        self._changed.set()

    async def until(self, is_so: Callable[[], Any]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not is_so():
                await self._changed.wait()
                self._changed.clear()


@pytest.fixture
def service(request: pytest.FixtureRequest) -> Iterator[Metadata]:
    """That of the cloud which the test is about."""
    with metadata_service(request.param) as found:
        yield found


def of_cloud(*clouds: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("service", clouds, indirect=True)


def listened(service: Metadata, test: Callable[[Ear], Coroutine[Any, Any, None]], cloud: str | None = None) -> Ear:
    """Run a test while somebody listens to a service."""

    async def go() -> Ear:
        ear = Ear()
        source = NoticeSource.of_environment(cloud or service.cloud, service.variables)
        async with listening_to_cloud(source, ear.say, ear.hear, pace=0.01):
            await test(ear)
        return ear

    return asyncio.run(go())


async def asked_twice(service: Metadata, what: str) -> None:
    """Until the service has been asked about something, and then once more."""
    async with asyncio.timeout(PATIENCE_S):
        while sum(what in target for _, target in list(service.asked)) < 2:
            await asyncio.sleep(0.001)


ASKED = {"aws": "instance-action", "gcp": "maintenance-event", "azure": "scheduledevents"}


@pytest.mark.parametrize("how", ["by name", "auto"])
@of_cloud(*CLOUDS)
def test_a_notice_is_heard_once_and_nothing_before_it(service: Metadata, how: str) -> None:
    async def test(ear: Ear) -> None:
        if service.cloud != "gcp":  # which answers when something has changed
            await asked_twice(service, ASKED[service.cloud])
        assert ear.heard == []
        service.take_away()
        await ear.until(lambda: ear.heard)

    ear = listened(service, test, "auto" if how == "auto" else None)
    (notice,) = ear.heard
    assert notice.takes_away
    assert "takes this machine away" in notice.text
    assert ear.said == ([f"this host listens for notices from {service.cloud}"] if how == "auto" else [])


@of_cloud("")
def test_without_a_metadata_service_a_line_says_so_and_nobody_listens_any_more(service: Metadata) -> None:
    async def test(ear: Ear) -> None:
        await ear.until(lambda: ear.said)

    ear = listened(service, test, "auto")
    assert ear.said == ["no metadata service of a cloud answers here (aws, gcp, azure): there are no notices"]
    assert len(service.asked) == 3


def test_a_port_at_which_nobody_listens_is_no_cloud() -> None:
    with metadata_service("aws") as gone:
        pass
    ear = listened(gone, lambda ear: ear.until(lambda: ear.said), "aws")
    assert "notices from aws cannot be read" in ear.said[0]


GARBAGE = {
    "too much": b"HTTP/1.1 200 OK\r\nContent-Length: 300000\r\nMetadata-Flavor: Google\r\n\r\n" + b"x" * (LARGEST + 1),
    "no end": b"HTTP/1.1 200 OK\r\nX: " + b"y" * 200_000,
    "no HTTP": b"\x00\xff" * 500,
    "nothing": b"",
    "half": b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{",
    "no JSON": b"HTTP/1.1 200 OK\r\nMetadata-Flavor: Google\r\nContent-Length: 4\r\n\r\nTRUE",
    "another type": b'HTTP/1.1 200 OK\r\nContent-Length: 30\r\n\r\n{"action": ["x"], "Events": {}}',
    "deep": b"HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n" + b"[" * 200_000,
    "elsewhere": b"HTTP/1.1 302 Found\r\nLocation: http://192.0.2.1/\r\nContent-Length: 0\r\n\r\n",
    "an error": b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n",
}


@pytest.mark.parametrize("what", GARBAGE)
@of_cloud(*CLOUDS)
def test_garbage_is_said_once_and_the_next_notice_is_heard_all_the_same(service: Metadata, what: str) -> None:
    service.raw = GARBAGE[what]

    async def test(ear: Ear) -> None:
        await ear.until(lambda: ear.said)
        assert ear.heard == []
        service.raw = None
        service.take_away()
        await ear.until(lambda: ear.heard)

    ear = listened(service, test)
    assert f"notices from {service.cloud} cannot be read" in ear.said[0]
    assert "training goes on" in ear.said[0]
    assert ear.said[1:] in ([], [f"notices from {service.cloud} can be read again"])
    assert len(ear.said[0]) < 600


@of_cloud("aws")
@pytest.mark.parametrize(
    "action", [{"action": "melt", "time": "now"}, {"action": "stop"}, {"action": 1, "time": "now"}, ["stop"], None]
)
def test_an_action_that_nobody_knows_is_no_notice(service: Metadata, action: Any) -> None:
    service.instance["/latest/meta-data/spot/instance-action"] = action
    ear = listened(service, lambda ear: ear.until(lambda: ear.said))
    assert ear.heard == []
    assert "training goes on" in ear.said[0]


@of_cloud("aws")
def test_a_recommendation_is_only_told(service: Metadata) -> None:
    service.instance["/latest/meta-data/events/recommendations/rebalance"] = {"noticeTime": "2026-11-24T14:20:00Z"}
    ear = listened(service, lambda ear: ear.until(lambda: ear.heard))
    assert [notice.takes_away for notice in ear.heard] == [False]


@of_cloud("aws")
def test_a_token_that_is_not_taken_any_more_is_renewed(service: Metadata) -> None:
    async def test(ear: Ear) -> None:
        await asked_twice(service, "instance-action")
        service.token = "another-token-of-IMDSv2"  # noqa: S105
        service.instance["/latest/meta-data/spot/instance-action"] = ACTION
        await ear.until(lambda: ear.heard)

    assert len(listened(service, test).heard) == 1
    assert sum(method == "PUT" for method, _ in service.asked) == 2


@of_cloud("gcp")
def test_maintenance_is_only_told_and_the_service_is_asked_to_wait_from_what_was_seen(service: Metadata) -> None:
    service.maintenance = "TERMINATE_ON_HOST_MAINTENANCE"

    async def test(ear: Ear) -> None:
        await ear.until(lambda: ear.heard)
        service.take_away()
        await ear.until(lambda: len(ear.heard) == 2)

    assert [notice.takes_away for notice in listened(service, test).heard] == [False, True]
    assert any("wait_for_change=true" in target and target.endswith("last_etag=1") for _, target in service.asked)


@of_cloud("azure")
@pytest.mark.parametrize(
    ("change", "heard", "approved"),
    [
        ({}, [True], [PREEMPT["EventId"]]),
        ({"Resources": [MACHINE, "worker-vm_4"]}, [True], []),  # an approval would hold for the other one, too
        ({"EventStatus": "Started"}, [True], []),
        ({"EventType": "Freeze"}, [False], []),
    ],
)
def test_an_event_is_approved_when_the_job_has_left_if_it_is_about_this_machine_alone(
    service: Metadata, change: dict[str, Any], heard: list[bool], approved: list[str]
) -> None:
    service.events = [{**PREEMPT, "Resources": ["worker-vm_4"]}, {**PREEMPT, **change}]

    async def test(ear: Ear) -> None:
        await ear.until(lambda: ear.heard)
        assert service.approved == []

    assert [notice.takes_away for notice in listened(service, test).heard] == heard
    assert service.approved == approved


@of_cloud("azure")
@pytest.mark.parametrize("event", [{}, [], 3, {**PREEMPT, "Resources": "vm"}, {**PREEMPT, "EventType": None}])
def test_an_event_of_another_form_is_no_notice(service: Metadata, event: Any) -> None:
    service.events = [event]
    ear = listened(service, lambda ear: ear.until(lambda: ear.said))
    assert (ear.heard, len(ear.said)) == ([], 1)


async def _drip(writer: asyncio.StreamWriter) -> None:
    """An answer that always goes on, and never ends."""
    writer.write(b"HTTP/1.1 200 OK\r\nX: ")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("drips", [False, True])
def test_a_service_that_never_answers_or_never_to_the_end_is_not_waited_for(drips: bool) -> None:
    async def go() -> None:
        hold, is_closed = asyncio.Event(), asyncio.Event()

        async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(ConnectionError):
                await (_drip(writer) if drips else hold.wait())
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            is_closed.set()

        async with await asyncio.start_server(slow, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(TimeoutError):
                await ask(Endpoint("127.0.0.1", port), Query("/", timeout_s=0.05))
            hold.set()
            await is_closed.wait()

    asyncio.run(go())


def test_without_variables_the_address_is_that_of_the_link_and_a_wrong_one_is_refused() -> None:
    assert set(NoticeSource.of_environment("auto", {}).endpoints.values()) == {LINK_LOCAL}
    assert NoticeSource.of_environment("gcp", {"GCE_METADATA_HOST": "meta:8080"}).endpoints == {
        "gcp": Endpoint("meta", 8080)
    }
    for wrong in ("https://meta", "http://", "http://meta:x", "file:///etc/passwd", "http://" + "x" * 64, "a..b"):
        with pytest.raises(JobError, match="GCE_METADATA_HOST"):
            NoticeSource.of_environment("gcp", {"GCE_METADATA_HOST": wrong})
    with pytest.raises(JobError, match="aws, gcp, azure"):
        NoticeSource.of_environment("ibm", {})
