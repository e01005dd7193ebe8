"""At which address others reach a host, and probes of whether two hosts connect: from one to the other, and back.

Agents answer probes at a port that the system chooses, as workers do with theirs, and on the same network. Both ends
show that they have the job's token, without sending it.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import socket
from asyncio import StreamReader, StreamWriter
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, TypeVar

import psutil
from pydantic import StringConstraints, TypeAdapter

from unisono.errors import LaunchError, Unreadable
from unisono.membership.messages import Message, Name, Target, Text, Unreached, parse

_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_ELSEWHERE = "192.0.2.1"
"""An address for examples. Nothing is sent there."""

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def data_address(coordinator: str, towards_it: str) -> str:
    """The address of the network interface ``GLOO_SOCKET_IFNAME``, or the one from which the coordinator is reached.

    Args:
        coordinator: its host. Workers that reach it on loopback share a host.
        towards_it: this host's address on that connection; empty if it is not known.

    Raises:
        LaunchError: it is an address that has no meaning on other hosts.
    """
    if coordinator in _LOOPBACK:
        return "127.0.0.1"
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    known = psutil.net_if_addrs().get(interface, [])
    given = [own.address for family in _FAMILIES for own in known if own.family == family]
    usable = (own for own in given if "%" not in own)
    address = next(usable, None) or towards_it or _own(coordinator)
    if "%" in address or address.lower().startswith("fe80:"):
        raise LaunchError(
            f"this host is reached at {address}, which other hosts cannot call: it belongs to one interface. Reach the "
            f"coordinator at another address, or set GLOO_SOCKET_IFNAME to an interface that has one"
        )
    return address


def _own(coordinator: str) -> str:
    """This host's, towards the coordinator: a host that is the coordinator itself may know its name as loopback."""
    address = _towards(coordinator)
    if not ipaddress.ip_address(address).is_loopback:
        return address
    try:
        return _towards(_ELSEWHERE)
    except LaunchError:  # this host knows no other
        return address


def _towards(host: str) -> str:
    """The address from which this host would send to another one: nothing is sent."""
    try:
        infos = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        family, _, _, _, where = min(infos, key=lambda info: _FAMILIES.index(info[0]))
        with socket.socket(family, socket.SOCK_DGRAM) as probing:
            probing.connect(where)
            return str(probing.getsockname()[0])
    except OSError as error:
        raise LaunchError(f"this host finds no way to {host}: {error}") from error


# Probes.

PATIENCE_S = 10.0
"""Seconds after which a host counts as out of reach; less where the job's failure timeout is."""

ATTEMPT_S = 4.0
"""Seconds that one attempt may take."""

BACK_S = 2.0
"""Seconds of them in which the other host tries to connect back."""

PAUSE_S = 0.5

TIMED_OUT = "nobody answers"

MOST_CALLERS = 64
"""Connections that are served at a time. With one more, the one that has taken longest is closed."""

LONGEST_LINE = 8192

Nonce = Annotated[str, StringConstraints(pattern=r"\A[0-9a-f]{64}\z")]


class Challenge(Message):
    """The first message of a probe, by the agent that is called."""

    nonce: Nonce


class ProbeRequest(Message):
    """The message of the agent that calls.

    Attributes:
        back: the address at which it answers probes itself; none if nobody is to connect back.
    """

    nonce: Nonce
    wanted: Name
    back: Target | None
    proof: Nonce


class Answer(Message):
    """The result of a probe, as the agent that was called tells it.

    Attributes:
        why: the reason for which there is no connection back; empty if there is one, or none was wanted.
    """

    why: Text
    proof: Nonce


_challenge: TypeAdapter[Challenge] = TypeAdapter(Challenge)
_request: TypeAdapter[ProbeRequest] = TypeAdapter(ProbeRequest)
_answer: TypeAdapter[Answer] = TypeAdapter(Answer)

M = TypeVar("M")


class _Failed(Exception):
    """The probe has failed; says why."""


async def probe(targets: Sequence[Target], token: str, patience_s: float, back: Target | None = None) -> dict[str, str]:
    """Try to reach hosts, all at once, each again and again until it answers or the seconds are over.

    Of each agent this tells why it is not reached; empty if it is. They are to connect back to ``back``, unless it is
    None.
    """
    tries = (_insist(target, token, patience_s, back) for target in targets)
    reasons = await asyncio.gather(*tries)
    return {target.agent: why for target, why in zip(targets, reasons, strict=True)}


def unreached(reasons: dict[str, str]) -> tuple[Unreached, ...]:
    """Those of them that are not reached."""
    return tuple(Unreached(agent=agent, why=why[:1000]) for agent, why in reasons.items() if why)


class Answering:
    """A listener that answers probes."""

    def __init__(self, agent: str, token: str) -> None:
        self._agent, self._token = agent, token
        self._host = ""
        self._server: asyncio.Server | None = None
        self._callers: dict[asyncio.Task[None], StreamWriter] = {}  # the oldest first

    @property
    def address(self) -> str:
        """Where it listens, as ``HOST:PORT``; empty if it does not."""
        if self._server is None:
            return ""
        host, port, *_ = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    async def listen(self, host: str) -> None:
        """Listen at an address of this host, unless it does. If that cannot be, it listens nowhere."""
        if self._server is not None and host == self._host:
            return
        await self.close()
        with suppress(OSError):
            self._server = await asyncio.start_server(self._welcome, host, 0, limit=LONGEST_LINE)
            self._host = host

    async def close(self) -> None:
        """Hang up, and listen no more."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            await server.wait_closed()
        callers = list(self._callers)
        for caller in callers:
            self._callers[caller].transport.abort()
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)

    def _welcome(self, reader: StreamReader, writer: StreamWriter) -> None:
        if len(self._callers) >= MOST_CALLERS:
            oldest = next(iter(self._callers))
            self._callers.pop(oldest).transport.abort()
            oldest.cancel()
        caller = asyncio.create_task(self._serve(reader, writer))
        self._callers[caller] = writer
        caller.add_done_callback(lambda done: self._callers.pop(done, None))

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            async with asyncio.timeout(ATTEMPT_S):
                await self._converse(reader, writer)
        except (OSError, EOFError, _Failed):  # whoever it was learns nothing
            pass
        finally:
            writer.close()

    async def _converse(self, reader: StreamReader, writer: StreamWriter) -> None:
        challenge = Challenge(nonce=secrets.token_hex(32))
        await _say(writer, challenge)
        request = await _hear(reader, _request)
        _check(request.proof, _proof(self._token, "call", challenge, request))
        if request.wanted != self._agent:
            raise _Failed("another agent was meant")
        why = "" if request.back is None else await _try(request.back, self._token, BACK_S)
        await _say(writer, Answer(why=why, proof=_proof(self._token, "answer", challenge, request, why)))


async def _insist(target: Target, token: str, patience_s: float, back: Target | None) -> str:
    """Why a host is not reached; empty if it is."""
    loop = asyncio.get_running_loop()
    end, why = loop.time() + patience_s, ""
    while (left := end - loop.time()) > 0:
        newest = await _try(target, token, min(ATTEMPT_S, left), back)
        if not newest:
            return ""
        why = newest if newest != TIMED_OUT or not why else why  # an attempt cut short says less than one before
        await asyncio.sleep(min(PAUSE_S, max(0.0, end - loop.time())))
    return why


async def _try(target: Target, token: str, seconds: float, back: Target | None = None) -> str:
    """Why one attempt does not reach a host; empty if it does."""
    try:
        async with asyncio.timeout(seconds):
            return await _attempt(target, token, back)
    except TimeoutError:
        return TIMED_OUT
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    except (EOFError, ValueError) as error:
        return f"what listens there hangs up ({type(error).__name__})"
    except _Failed as error:
        return str(error)


async def _attempt(target: Target, token: str, back: Target | None) -> str:
    """Why there is no connection back; empty if there is."""
    host, _, port = target.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=LONGEST_LINE)
    try:
        challenge = await _hear(reader, _challenge)
        unsigned = ProbeRequest(nonce=secrets.token_hex(32), wanted=target.agent, back=back, proof="0" * 64)
        request = unsigned.model_copy(update={"proof": _proof(token, "call", challenge, unsigned)})
        await _say(writer, request)
        answer = await _hear(reader, _answer)
        _check(answer.proof, _proof(token, "answer", challenge, request, answer.why))
    finally:
        writer.transport.abort()
    if answer.why and back is not None:
        return f"it does not connect back to {back.address}: {answer.why}"
    return answer.why


async def _say(writer: StreamWriter, message: Message) -> None:
    writer.write(message.model_dump_json().encode() + b"\n")
    await writer.drain()


async def _hear(reader: StreamReader, adapter: TypeAdapter[M]) -> M:
    try:
        return parse(adapter, await reader.readuntil(b"\n"))
    except (asyncio.LimitOverrunError, Unreadable) as error:
        raise _Failed("something else answers there") from error


def _check(shown: str, expected: str) -> None:
    if not hmac.compare_digest(shown, expected):
        raise _Failed("whoever answers there is of another job")


def _proof(token: str, role: str, challenge: Challenge, request: ProbeRequest, why: str = "") -> str:
    back = None if request.back is None else [request.back.agent, request.back.address]
    about = json.dumps(["unisono probe", role, challenge.nonce, request.nonce, request.wanted, back, why])
    return hmac.new(token.encode(), about.encode(), hashlib.sha256).hexdigest()
