"""The coordinator's process: ``python -m unisono.membership.server --run-dir D``. It needs no torch.

It listens on loopback by default, writes its address into the run folder's ``coordinator.json``, and ends by itself
when the job is over, or when nobody has been connected for long; it can be started again at any time.

Exit codes: 0 the job is over · 2 an argument or the run folder cannot be used · any other: start it again.
"""

import argparse
import asyncio
import json
import os
import signal
import ssl
import sys
from asyncio.sslproto import SSLProtocol
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette

from unisono.errors import FIRST_SIGNAL, PREEMPTED, USAGE, JobError, UnisonoError
from unisono.host.process import allow_open_files, ignore_notices
from unisono.membership import reception
from unisono.membership import state as machine
from unisono.membership.coordinator import Coordinator
from unisono.membership.messages import LONGEST_MESSAGE
from unisono.membership.reception import AuthMiddleware, NotAdmitted, RequestLimits
from unisono.membership.service import Service, not_admitted_response
from unisono.membership.token import make_token

LONELY_S = 60.0
"""A coordinator without connections ends after so many seconds and twice the job's ``failure_timeout_s``."""

PING_S = 20.0
"""The seconds between two pings on a connection, and the longest wait for a pong; less if the job's
``failure_timeout_s`` is short."""

TLS_BUFFER = 2**14
"""The bytes of asyncio's buffer for reading from a connection: the length of a TLS record. Asyncio's own 256 KiB would
be a quarter of a GiB for a thousand workers, each of which sends some hundred bytes a second."""


class Server(uvicorn.Server):
    """Serves a coordinator, with its authentication and its clock, until the job is over or a signal comes.

    Args:
        changed: an event that is set whenever the coordinator's next deadline may have changed.
        names: each ``name:port`` under which clients know this address.
    """

    error: BaseException | None = None

    def __init__(
        self,
        coordinator: Coordinator,
        changed: asyncio.Event,
        token: str,
        names: frozenset[str],
        tls: dict[str, Any],
        limits: RequestLimits | None = None,
    ) -> None:
        self._coordinator, self._changed = coordinator, changed
        self._limits = limits or RequestLimits()
        protocols: dict[str, Any] = {
            "http": partial(reception.HttpProtocol, request_line_s=self._limits.request_line_s),
            "ws": partial(reception.WebSocketProtocol, stuck_s=self._limits.stuck_s),
        }
        ping_s = min(PING_S, coordinator.state.settings.failure_timeout_s / 4)
        app = AuthMiddleware(
            Starlette(lifespan=self._running, exception_handlers={NotAdmitted: not_admitted_response}),
            token,
            names,
            self._limits,
        )
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="on",
                interface="asgi3",
                loop="asyncio",
                ws_max_size=LONGEST_MESSAGE,
                ws_per_message_deflate=False,
                ws_ping_interval=ping_s,
                ws_ping_timeout=ping_s,
                timeout_graceful_shutdown=2,
                limit_concurrency=2 * self._limits.connections,
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                **protocols,
                **tls,
            )
        )

    def end(self) -> None:
        """End once the requests under way are served. May be called from any thread."""
        self.should_exit = True

    @asynccontextmanager
    async def _running(self, app: Starlette) -> AsyncIterator[None]:
        asyncio.get_running_loop().set_exception_handler(reception.DescriptorErrors(sys.stderr.write))
        service = Service(self._coordinator, self._limits, self.end, self._changed)
        app.router.routes.extend(service.routes())
        lonely_s = LONELY_S + 2 * self._coordinator.state.settings.failure_timeout_s
        clocks = [asyncio.create_task(service.keep_time()), asyncio.create_task(service.end_in_time(lonely_s))]
        for clock in clocks:
            clock.add_done_callback(self._end_on_error)
        yield
        for clock in clocks:
            clock.cancel()
        await asyncio.gather(*clocks, return_exceptions=True)

    def _end_on_error(self, clock: "asyncio.Task[None]") -> None:
        # A coordinator whose clock has failed misses deadlines: it ends, and is started again.
        if not clock.cancelled() and (error := clock.exception()) is not None:
            self.error = error
            self.end()


def main() -> None:
    """Run a coordinator in this process until its job is over."""
    options = _arguments(sys.argv[1:])
    try:
        sys.exit(_run(options))
    except UnisonoError as error:
        sys.stderr.write(f"unisono: {error}\n")
        sys.exit(USAGE)


def _run(options: argparse.Namespace) -> int:
    folder: Path = options.run_dir
    tls = _tls(options)
    address = reception.ListenAddress(options.host, options.port, options.fd, tuple(options.name))
    listening = reception.listen(address, tls=bool(tls))
    if not folder.is_dir():
        raise JobError(f"{folder} is no run folder")
    changed = asyncio.Event()
    settings = machine.ElasticConfig(
        **{field.name: getattr(options, field.name) for field in fields(machine.ElasticConfig)}
    )
    coordinator = Coordinator(folder, settings, fresh=options.fresh, changed=changed.set)
    allow_open_files(4 * RequestLimits().connections)  # as far as the system lets it
    SSLProtocol.max_size = TLS_BUFFER
    address_file = folder / "coordinator.json"
    try:
        token = make_token(folder)
        _write_address(address_file, reception.url(listening, address, tls=bool(tls)))
        server = Server(coordinator, changed, token, reception.hosts(listening, address), tls)
        ignore_notices()
        # Uvicorn handles the signal first: it ends, and then raises the signal again.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(FIRST_SIGNAL + number))
        server.run([listening])
        if server.error is not None:
            raise server.error
    finally:
        coordinator.close()
        address_file.unlink(missing_ok=True)
    return 0 if coordinator.state.over is not None else PREEMPTED


def _arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("unisono.membership.server", description=__doc__, allow_abbrev=False)
    parser.add_argument("--run-dir", type=Path, required=True, help="the run folder")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen; other than loopback needs TLS")
    parser.add_argument("--port", type=int, default=0, help="0: any that is free")
    parser.add_argument("--fd", type=int, help="a listening socket that this process inherits, instead of both")
    parser.add_argument("--name", action="append", default=[], help="a further name by which clients know this host")
    parser.add_argument("--tls-cert", type=Path, help="a certificate chain, PEM")
    parser.add_argument("--tls-key", type=Path, help="its private key, PEM")
    parser.add_argument("--smallest", type=int, default=1, help="the fewest workers that train")
    parser.add_argument("--largest", type=int, default=1, help="the most workers that train")
    parser.add_argument("--wanted", type=int, help="the number of workers at first; otherwise as many as there is room")
    parser.add_argument("--max-restarts", type=int, default=0, help="how often each worker is replaced")
    parser.add_argument("--restart-on-error", action="store_true", help="also after an exception of the script")
    parser.add_argument(
        "--failure-timeout",
        dest="failure_timeout_s",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="a worker or agent counts as lost after so many seconds without a sign of life",
    )
    parser.add_argument("--devices", type=int, default=1, help="the number of devices of each worker")
    parser.add_argument("--fresh", action="store_true", help="begin anew, whatever an earlier coordinator left here")
    return parser.parse_args(arguments)


def _tls(options: argparse.Namespace) -> dict[str, Any]:
    if (options.tls_cert is None) != (options.tls_key is None):
        raise JobError("--tls-cert and --tls-key belong together: give both, or none")
    if options.tls_cert is None:
        return {}
    for path in (options.tls_cert, options.tls_key):
        if not path.is_file():
            raise JobError(f"{path} is no file")
    try:
        # A key with a passphrase is refused: no person can be asked for it.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.tls_cert, options.tls_key, password=str)
    except OSError as error:  # ssl.SSLError is one, too
        raise JobError(
            f"the certificate {options.tls_cert} and the key {options.tls_key} cannot be used together: {error}"
        ) from error
    return {"ssl_certfile": str(options.tls_cert), "ssl_keyfile": str(options.tls_key)}


def _write_address(path: Path, address: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump({"url": address, "pid": os.getpid()}, file)
    temporary.replace(path)


if __name__ == "__main__":
    main()
