"""How workers and agents call the coordinator, and what is written down of it: nothing."""

import logging
import ssl
from urllib.parse import urlsplit, urlunsplit

from websockets.asyncio.client import connect

SILENT = logging.Logger("unisono", logging.CRITICAL + 1)
"""For libraries that would log a connection's headers, and so the token. It has no parent and nobody finds it by name:
whatever a script sets for its own loggers, this one stays silent."""


def call(
    url: str,
    route: str,
    token: str,
    tls: ssl.SSLContext | None,
    *,
    open_s: float,
    ping_s: float,
    close_s: float,
    most: int,
) -> connect:
    """A connection to the coordinator, to be awaited or entered.

    Args:
        url: of the coordinator, ``http://…`` or ``https://…``.
        route: behind it.
        token: of the job.
        tls: what is trusted; None without TLS.
        open_s: seconds in which it opens.
        ping_s: between two looks at whether the other side is still there, and how long one takes.
        close_s: seconds in which it closes.
        most: bytes of a message.
    """
    scheme, *rest = urlsplit(url)
    address = urlunsplit(("wss" if scheme == "https" else "ws", *rest))
    return connect(
        address.rstrip("/") + route,
        additional_headers={"Authorization": f"Bearer {token}"},
        ssl=tls,
        proxy=None,  # the job's own business, whatever the environment says about the web
        compression=None,
        open_timeout=open_s,
        ping_interval=ping_s,
        ping_timeout=ping_s,
        close_timeout=close_s,
        max_size=most,
        logger=SILENT,
    )
