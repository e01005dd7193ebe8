"""Strangers that call whatever listens on some hosts, in every way that leads nowhere; told so by lines of JSON.

The first line names the hosts: ``{"listening": {ADDRESS: PID}, "interface": NAME}``, with a process in the network of
each, and the interface on which the strangers overhear whoever calls. Then each line is answered by another one:
``{"calls": 1000, "over_s": 2.0}`` calls so often, spread over that time, and holds what is taken; ``{"hang_up": true}``
lets go of all of it. This program ends with its input.
"""

import asyncio
import json
import os
import resource
import secrets
import socket
import ssl
import struct
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

LISTENS = "0A"
"""A socket's state in the kernel's table."""

MARK = b"unisono2"
CALL, ANSWER = 44, 64
"""Bytes of a worker's first words, and of what it is told then."""

ENOUGH = CALL + 32 + 300
"""Bytes of a conversation that is overheard: up to the middle of TLS."""

AT_ONCE = 20
"""Rounds of strangers for whoever begins to listen: they repeat what was overheard, then come in every way."""

MOST_AT_ONCE = 256
LOOK_S = 0.003
CONNECT_S = 5.0

Address = tuple[str, int]
Way = Callable[[socket.socket], Awaitable[None]]


class Overheard:
    """What workers have said that called others, packet by packet, until one has said enough.

    Args:
        interface: the interface on which to listen; needs root.
    """

    def __init__(self, interface: str) -> None:
        self.said = b""
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        self._socket.bind((interface, 0))
        threading.Thread(target=self._hear, daemon=True).start()

    def _hear(self) -> None:
        callers: dict[bytes, bytes] = {}
        while not self.said:
            packet = self._socket.recv(2**16)
            if packet[12:14] != b"\x08\x00" or packet[23] != socket.IPPROTO_TCP:
                continue
            begin = 14 + 4 * (packet[14] & 15)
            end = 14 + int.from_bytes(packet[16:18])
            data = packet[begin + 4 * (packet[begin + 12] >> 4) : end]
            caller = packet[26:34] + packet[begin : begin + 4]
            if data.startswith(MARK):
                callers[caller] = data
            elif caller in callers and data not in callers[caller]:
                callers[caller] += data
                if len(callers[caller]) >= ENOUGH:
                    self.said = callers[caller][:ENOUGH]
        self._socket.close()


class Strangers:
    """All of them.

    Args:
        listening: by address, a process in that host's network.
        overheard: what workers have said.
    """

    def __init__(self, listening: dict[str, int], overheard: Overheard) -> None:
        self._hosts, self._overheard = listening, overheard
        self._loop = asyncio.get_running_loop()
        self._known: set[Address] = set()
        self._held: list[socket.socket] = []
        self._ways: list[Way] = [self._silent, self._garbage, self._half, self._a_hello_of_tls]
        self._ways += [self._first_words, self._replayed, self._goodbye]
        self._replayed_at: Counter[str] = Counter()

    async def call(self, calls: int, over_s: float) -> dict[str, Any]:
        """Call; says how many were taken, and how many of them could repeat what a worker has said, by port.

        Whoever begins to listen is called at once, so often that there are more strangers than it keeps.
        """
        taken: Counter[str] = Counter()
        limit, begun, number = asyncio.Semaphore(MOST_AT_ONCE), self._loop.time(), 0
        self._replayed_at.clear()
        async with asyncio.TaskGroup() as group:
            while number < calls:
                is_due = number < calls * (self._loop.time() - begun) / over_s
                for address in list(self._listening()):
                    ways = self._ways if is_due else []
                    if address not in self._known:
                        self._known.add(address)
                        ways = AT_ONCE * [self._replayed] + AT_ONCE * self._ways
                    for way in ways:
                        await limit.acquire()
                        done = group.create_task(self._one(address, way, taken))
                        done.add_done_callback(lambda done: limit.release())
                        number += 1
                await asyncio.sleep(LOOK_S)
        return {"calls": number, "taken": taken, "replayed": self._replayed_at, "held": len(self._held)}

    def hang_up(self) -> None:
        """Let go of all connections."""
        for held in self._held:
            held.close()
        self._held.clear()

    def _listening(self) -> Iterator[Address]:
        for address, pid in self._hosts.items():
            with Path(f"/proc/{pid}/net/tcp").open() as table:  # where those that listen come first
                next(table)
                for line in table:
                    _, where, _, state, *_ = line.split()
                    if state != LISTENS:
                        break
                    yield address, int(where.partition(":")[2], 16)

    async def _one(self, address: Address, way: Way, taken: Counter[str]) -> None:
        stranger = socket.socket()
        stranger.setblocking(False)
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._loop.sock_connect(stranger, address)
                taken[f"{address[0]}:{address[1]}"] += 1
                self._held.append(stranger)
                await way(stranger)
        except (OSError, EOFError):  # it is hung up on, or nobody listens any more
            if stranger not in self._held:
                stranger.close()

    # -- what they say

    async def _silent(self, stranger: socket.socket) -> None:
        pass

    async def _garbage(self, stranger: socket.socket) -> None:
        await self._loop.sock_sendall(stranger, secrets.token_bytes(3000))

    async def _half(self, stranger: socket.socket) -> None:
        await self._loop.sock_sendall(stranger, struct.pack("<8si", MARK, 1))

    async def _first_words(self, stranger: socket.socket) -> None:
        await self._loop.sock_sendall(stranger, struct.pack("<8si32s", MARK, 1, bytes(32)) + bytes(32))

    async def _a_hello_of_tls(self, stranger: socket.socket) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        out = ssl.MemoryBIO()
        with suppress(ssl.SSLWantReadError):
            context.wrap_bio(ssl.MemoryBIO(), out).do_handshake()
        await self._loop.sock_sendall(stranger, out.read())

    async def _replayed(self, stranger: socket.socket) -> None:
        said = self._overheard.said
        await self._loop.sock_sendall(stranger, said[:CALL])
        answer = b""
        while said and len(answer) < ANSWER:
            if not (heard := await self._loop.sock_recv(stranger, ANSWER)):
                raise EOFError
            answer += heard
        self._replayed_at["{}:{}".format(*stranger.getpeername())] += bool(said)
        await self._loop.sock_sendall(stranger, said[CALL:])

    async def _goodbye(self, stranger: socket.socket) -> None:
        stranger.close()


async def main() -> None:
    """Answer, until nobody asks any more."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    loop = asyncio.get_running_loop()
    told = json.loads(sys.stdin.readline())
    strangers = Strangers(told["listening"], overheard := Overheard(told["interface"]))
    print(json.dumps({}), flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        asked = json.loads(line)
        answer: dict[str, Any] = {"overheard": len(overheard.said)}
        if "calls" in asked:
            answer |= await strangers.call(asked["calls"], asked["over_s"])
        if asked.get("hang_up"):
            strangers.hang_up()
        print(json.dumps(answer), flush=True)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main())
