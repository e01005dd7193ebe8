"""A request to the metadata service of a cloud, over HTTP; to be cancelled at any moment."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import h11

from unisono.errors import Unreadable
from unisono.launch.notices.source import Endpoint

LARGEST = 2**18
"""Bytes of an answer: events of all machines of a group."""

ANSWERS_S = 2.0
"""The service is on this machine's own link: whoever does not answer by then is not there."""


@dataclass(frozen=True, slots=True)
class Query:
    """A request.

    Attributes:
        target: the path, and what follows it.
        headers: the headers by which the service knows that nobody was tricked into the request.
        method: the verb of HTTP.
        body: the content to send.
        answers_s: the seconds until the whole answer has to be here.
    """

    target: str
    headers: Mapping[str, str] = field(default_factory=dict)
    method: str = "GET"
    body: bytes = b""
    answers_s: float = ANSWERS_S


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer.

    Attributes:
        status: the code of HTTP.
        headers: the headers; names in lower case.
        body: the content.
    """

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
