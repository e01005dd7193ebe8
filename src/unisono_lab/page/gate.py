"""The outermost layer of a page: who gets in, and how far."""

import asyncio
import hmac
import secrets
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from time import monotonic
from typing import Any, Literal

from starlette.requests import cookie_parser
from starlette.responses import JSONResponse

from unisono.membership.asgi import App, NotAdmitted, Receive, Scope, Send, body_of, header, read_already
from unisono.membership.auth import Rate
from unisono.membership.token import is_loopback

May = Literal["act", "look"]
MAY: tuple[May, May] = ("look", "act")
"""By whether a key is the one to act."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]
PAGE_HEADER = b"x-unisono-page"
"""What only scripts of this very page can send, and only with what they alone know."""

LARGEST_BODY = 4096
BODY_S, TAKE_S = 10.0, 20.0
REQUESTS_PER_S = 50.0
MOST_SESSIONS = 64
FRESH_S = 3600.0
"""Seconds for which a link that nobody has used opens: it may stand in a log."""


@dataclass(frozen=True, slots=True)
class BrowserSession:
    """A browser that was let in.

    Attributes:
        page: the word that its page sends with each request, besides the cookie.
        may: the right to act, or to look only.
    """

    page: str
    may: May


class Keys:
    """The keys of one page, and the sessions that they have opened.

    Args:
        clock: a clock in seconds.

    Attributes:
        act: the key to press buttons; it opens once, and within an hour.
        look: the key to look, as often as anybody likes.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.act, self.look = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        self._clock, self._until = clock, clock() + FRESH_S
        self._sessions: dict[str, BrowserSession] = {}

    def enter(self, key: str) -> tuple[str, BrowserSession] | None:
        """A new session, and the cookie that stands for it; None for a key that does not open."""
        is_act = hmac.compare_digest(key.encode(), self.act.encode()) and self._clock() <= self._until
        if not is_act and not hmac.compare_digest(key.encode(), self.look.encode()):
            return None
        if is_act:
            self._until = float("-inf")
        self._forget_one()
        cookie, session = secrets.token_urlsafe(32), BrowserSession(secrets.token_urlsafe(32), MAY[is_act])
        self._sessions[cookie] = session
        return cookie, session

    def session(self, cookie: str, page: str) -> BrowserSession | None:
        """The session of a cookie, if the page is the one to which it was given."""
        found = self._sessions.get(cookie)
        return found if found is not None and hmac.compare_digest(found.page.encode(), page.encode()) else None

    def _forget_one(self) -> None:
        """Of many who look, the oldest has to enter again; who may act never has."""
        if len(self._sessions) >= MOST_SESSIONS:
            del self._sessions[next(cookie for cookie, one in self._sessions.items() if one.may == "look")]


class Gate:
    """Lets a request in if it comes from this very page, holds what its session was given, and is within limits.

    Args:
        app: the application that serves admitted requests. It finds ``may`` in their scope.
        keys: the keys and sessions.
        cookie: the name of the cookie.
        is_open: a function that says whether a method and path need no session.
        body_s: the seconds within which the whole of a request has to come.
        take_s: the seconds within which each part of an answer has to be taken.
    """

    def __init__(
        self,
        app: App,
        keys: Keys,
        cookie: str,
        is_open: Callable[[str, str], bool],
        body_s: float = BODY_S,
        take_s: float = TAKE_S,
    ) -> None:
        self._app, self._keys, self._cookie, self._is_open = app, keys, cookie, is_open
        self._body_s, self._take_s = body_s, take_s
        self._rate = Rate(REQUESTS_PER_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let one request through, or answer it here."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
            body = await body_of(receive, LARGEST_BODY, self._body_s)
        except NotAdmitted as turned:
            answer = JSONResponse({"error": turned.reason}, status_code=turned.status)
            if scope["type"] != "http":
                await send({"type": "websocket.close"})
            else:
                await answer(scope, receive, _with_headers(send, self._take_s))
            return
        await self._app(scope, read_already(body, receive), _with_headers(send, self._take_s))

    def _check(self, scope: Scope) -> None:
        if scope["type"] != "http":
            raise NotAdmitted(400, "a page has no such connections")
        host = _one(scope, b"host")
        if not _is_ours(host):
            raise NotAdmitted(403, "this is not the address of a page")  # a name that somebody pointed here
        origins = [value for name, value in scope["headers"] if name == b"origin"]
        own = f"http://{host}".encode()
        if any(origin.lower() != own.lower() for origin in origins) or (scope["method"] != "GET" and not origins):
            raise NotAdmitted(403, "other pages have no access")
        cookies = cookie_parser(_one(scope, b"cookie"))
        session = self._keys.session(cookies.get(self._cookie, ""), _one(scope, PAGE_HEADER))
        if session is not None:
            if _one(scope, b"sec-fetch-site") not in ("", "same-origin", "none"):
                raise NotAdmitted(403, "other pages have no access")
            scope["may"] = session.may
            return
        if self._rate.take():
            raise NotAdmitted(429, "too many requests")
        if not self._is_open(scope["method"], scope["path"]):
            raise NotAdmitted(401, "open the page with the link that was printed for it")


def _is_ours(host: str) -> bool:
    """Whether a ``name:port`` is this host's. The port may be another one's: a tunnel's, say."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    return is_loopback(name.removeprefix("[").removesuffix("]").lower())


def _with_headers(send: Send, take_s: float) -> Send:
    """What is sent has the headers that confine the page, and whoever does not take it is hung up on."""

    async def sent(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *HEADERS]
        async with asyncio.timeout(take_s):
            await send(message)

    return sent


def _one(scope: Scope, name: bytes) -> str:
    return header(scope, name).decode("latin-1")
