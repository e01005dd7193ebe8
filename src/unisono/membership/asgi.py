"""What an outermost layer takes of a request before anything else sees it: one header, the whole body, or nothing."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class NotAdmitted(Exception):
    """Why somebody does not get in.

    Args:
        status: the status of the answer.
        reason: the reason, for people.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


def header(scope: Scope, name: bytes) -> bytes:
    """The value of a header that is there exactly once; otherwise empty."""
    values = [value for key, value in scope["headers"] if key.lower() == name]
    return values[0] if len(values) == 1 else b""


async def body_of(receive: Receive, most: int, within_s: float) -> bytes:
    """The whole body of a request; what comes of it when the client goes away does not matter any more.

    Args:
        receive: the function that gives its pieces.
        most: the largest number of bytes.
        within_s: the seconds within which all of it has to arrive.

    Raises:
        NotAdmitted: it is larger, or takes longer.
    """
    body, more = b"", True
    try:
        async with asyncio.timeout(within_s):
            while more:
                message = await receive()
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > most:
                    raise NotAdmitted(413, f"a request has at most {most} bytes")
    except TimeoutError:
        raise NotAdmitted(408, "the request took too long") from None
    return body


def read_already(body: bytes, receive: Receive) -> Receive:
    """A function that gives a body in one piece, and then what comes behind it."""
    bodies = [body]

    async def read() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": bodies.pop(), "more_body": False} if bodies else await receive()

    return read
