"""The address at which other hosts reach this one, and probes whether two hosts connect: to the other one, and back.

Agents answer probes on the network that their workers use, at a port that the system chooses, as it does for workers.
Both ends prove that they have the job's token, without sending it.
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
_EXAMPLE_ADDRESS = "192.0.2.1"
"""An address that is reserved for examples: the route to it is the one to other networks. Nothing is sent there."""

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def data_address(coordinator: str, towards_it: str) -> str:
    """The address of the network interface ``GLOO_SOCKET_IFNAME``, or the one from which the coordinator is reached.

    Args:
        coordinator: the coordinator's host. Workers that reach it on loopback share a host.
        towards_it: this host's address on the connection to the coordinator; empty if it is not known.

    Raises:
        LaunchError: the address has no meaning on other hosts.
    """
    if coordinator in _LOOPBACK:
        return "127.0.0.1"
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    entries = psutil.net_if_addrs().get(interface, [])
    addresses = [entry.address for family in _FAMILIES for entry in entries if entry.family == family]
    usable = (address for address in addresses if "%" not in address)
    address = next(usable, None) or towards_it or _own_address(coordinator)
    if "%" in address or address.lower().startswith("fe80:"):
        raise LaunchError(
            f"this host is reached at {address}, which other hosts cannot call: it belongs to one interface. Reach the "
            f"coordinator at another address, or set GLOO_SOCKET_IFNAME to an interface that has one"
        )
    return address


def _own_address(coordinator: str) -> str:
    """This host's address towards the coordinator. On the coordinator's own host, its name may mean loopback."""
    address = _address_towards(coordinator)
    if not ipaddress.ip_address(address).is_loopback:
        return address
    try:
        return _address_towards(_EXAMPLE_ADDRESS)
    except LaunchError:  # this host has no route to other networks
        return address


def _address_towards(host: str) -> str:
    """The address from which this host would send to another one. Nothing is sent."""
    try:
        infos = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        family, _, _, _, destination = min(infos, key=lambda info: _FAMILIES.index(info[0]))
        with socket.socket(family, socket.SOCK_DGRAM) as datagrams:
            datagrams.connect(destination)
            return str(datagrams.getsockname()[0])
    except OSError as error:
        raise LaunchError(f"this host has no route to {host}: {error}") from error


# Probes.

PATIENCE_S = 10.0
"""The seconds after which a host counts as out of reach; less if the job's failure timeout is less."""

ATTEMPT_S = 4.0
"""The seconds that one attempt may take."""

BACK_S = 2.0
"""The part of these seconds in which the other host tries to connect back."""

PAUSE_S = 0.5

TIMED_OUT = "nobody answers"

MOST_CALLERS = 64
"""The most connections that are served at a time. One more closes the oldest of them."""

LONGEST_LINE = 8192

Nonce = Annotated[str, StringConstraints(pattern=r"\A[0-9a-f]{64}\z")]


class Challenge(Message):
    """The first message of a probe, from the agent that is called."""

    nonce: Nonce


class ProbeRequest(Message):
    """The answer of the agent that calls.

    Attributes:
        wanted: the id of the agent that it means to call.
        back: the address at which it answers probes itself; None if no connection back is to be tried.
    """

    nonce: Nonce
    wanted: Name
    back: Target | None
    proof: Nonce


class Answer(Message):
    """The result of a probe, from the agent that was called.

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
    """The reason why a probe has failed."""


async def probe(targets: Sequence[Target], token: str, patience_s: float, back: Target | None = None) -> dict[str, str]:
    """Try to reach hosts, all at once, each again and again until it answers or the seconds are over.

    Unless ``back`` is None, the hosts are also to connect back to it.

    Returns:
        the reason why each agent is not reached; empty if it is.
    """
    reasons = await asyncio.gather(*(_probe_until(target, token, patience_s, back) for target in targets))
    return {target.agent: why for target, why in zip(targets, reasons, strict=True)}


def unreached(reasons: dict[str, str]) -> tuple[Unreached, ...]:
    """The agents that are not reached, from the result of :func:`probe`."""
    return tuple(Unreached(agent=agent, why=why[:1000]) for agent, why in reasons.items() if why)


class ProbeListener:
    """A listener that answers probes."""

    def __init__(self, agent: str, token: str) -> None:
        self._agent, self._token = agent, token
        self._host = ""
        self._server: asyncio.Server | None = None
        self._callers: dict[asyncio.Task[None], StreamWriter] = {}  # the oldest first

    @property
    def address(self) -> str:
        """The address at which it listens, as ``HOST:PORT``; empty if it does not."""
        if self._server is None:
            return ""
        host, port, *_ = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    async def listen(self, host: str) -> None:
        """Listen at an address of this host, unless it does already. If that fails, it listens nowhere."""
        if self._server is not None and host == self._host:
            return
        await self.close()
        with suppress(OSError):
            self._server = await asyncio.start_server(self._accept, host, 0, limit=LONGEST_LINE)
            self._host = host

    async def close(self) -> None:
        """Close all connections, and stop listening."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            await server.wait_closed()
        callers = list(self._callers)
        for caller in callers:
            self._callers[caller].transport.abort()
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)

    def _accept(self, reader: StreamReader, writer: StreamWriter) -> None:
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
                await self._answer_probe(reader, writer)
        except (OSError, EOFError, _Failed):  # the caller is not told why: it may be a stranger
            pass
        finally:
            writer.close()

    async def _answer_probe(self, reader: StreamReader, writer: StreamWriter) -> None:
        challenge = Challenge(nonce=secrets.token_hex(32))
        await _send(writer, challenge)
        request = await _receive(reader, _request)
        _check(request.proof, _proof(self._token, "call", challenge, request))
        if request.wanted != self._agent:
            raise _Failed("the probe is for another agent")
        why = "" if request.back is None else await _probe_once(request.back, self._token, BACK_S)
        await _send(writer, Answer(why=why, proof=_proof(self._token, "answer", challenge, request, why)))


async def _probe_until(target: Target, token: str, patience_s: float, back: Target | None) -> str:
    """The reason why a host is not reached; empty if it is."""
    loop = asyncio.get_running_loop()
    end, why = loop.time() + patience_s, ""
    while (left := end - loop.time()) > 0:
        newest = await _probe_once(target, token, min(ATTEMPT_S, left), back)
        if not newest:
            return ""
        why = newest if newest != TIMED_OUT or not why else why  # a timeout says less than an earlier reason
        await asyncio.sleep(min(PAUSE_S, max(0.0, end - loop.time())))
    return why


async def _probe_once(target: Target, token: str, seconds: float, back: Target | None = None) -> str:
    """The reason why one attempt does not reach a host; empty if it does."""
    try:
        async with asyncio.timeout(seconds):
            return await _connect_and_ask(target, token, back)
    except TimeoutError:
        return TIMED_OUT
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    except (EOFError, ValueError) as error:
        return f"what listens there hangs up ({type(error).__name__})"
    except _Failed as error:
        return str(error)


async def _connect_and_ask(target: Target, token: str, back: Target | None) -> str:
    """The reason why there is no connection back; empty if there is one."""
    host, _, port = target.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=LONGEST_LINE)
    try:
        challenge = await _receive(reader, _challenge)
        unsigned = ProbeRequest(nonce=secrets.token_hex(32), wanted=target.agent, back=back, proof="0" * 64)
        request = unsigned.model_copy(update={"proof": _proof(token, "call", challenge, unsigned)})
        await _send(writer, request)
        answer = await _receive(reader, _answer)
        _check(answer.proof, _proof(token, "answer", challenge, request, answer.why))
    finally:
        writer.transport.abort()
    if answer.why and back is not None:
        return f"it does not connect back to {back.address}: {answer.why}"
    return answer.why


async def _send(writer: StreamWriter, message: Message) -> None:
    writer.write(message.model_dump_json().encode() + b"\n")
    await writer.drain()


async def _receive(reader: StreamReader, adapter: TypeAdapter[M]) -> M:
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
