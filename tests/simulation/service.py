"""The coordinator, which is the real one, in a process that may be killed at any place."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simulation.checks import check
from unisono.membership import state as machine
from unisono.membership.coordinator import Coordinator
from unisono.membership.service import SHORTEST_WAIT_S
from unisono.membership.state_log import EntrySource, StateLog

if TYPE_CHECKING:
    from simulation.link import Link
    from simulation.world import World

AWAY_S = (0.1, 1.0, 5.0, 30.0)
"""How long a coordinator that was killed stays away."""


class Killed(BaseException):
    """The coordinator's process has ended, here and now."""


class FragileStateLog(StateLog):
    """The real one; but its process may be killed before, while and after a line is written."""

    def __init__(self, path: Path, all_entries: EntrySource, burn: Callable[[], None]) -> None:
        super().__init__(path, all_entries, small=2**15)
        self._file = path
        self._burn = burn

    def append(self, entry: Mapping[str, Any], *, durable: bool = False) -> bool:
        self._burn()
        try:
            self._burn()
        except Killed:
            with self._file.open("ab") as file:
                file.write(b'{"now": 1.0, "sta')
            raise
        kept = super().append(entry)  # nothing here ends a machine, so the disk is not waited for
        self._burn()
        return kept


class Service:
    """Where the coordinator runs: what comes for it waits while it is held up, and is lost while it is away."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world = world
        self.links: list[Link] = []
        self._folder = folder
        self._fuse: int | None = None
        self._held_until = 0.0
        self._waiting: deque[Callable[[], None]] = deque()
        self._lives = 0
        self._alarm = 0
        self.is_up = False
        self.coordinator: Coordinator
        self._state_log: StateLog
        self.start()

    @property
    def state(self) -> machine.State:
        return self.coordinator.state

    # -- its process

    def start(self) -> None:
        """Start, or start again, from what is in the folder."""
        try:
            self.coordinator = Coordinator(
                self._folder,
                self.world.settings,
                lambda: self.world.now,
                state_log=self._open_state_log,
                changed=self._changed,
            )
        except Killed:
            self._end()
            return
        self.is_up = True
        self._lives += 1
        self._set_alarm()

    def crash(self) -> None:
        """Be killed, and start again some time."""
        if not self.is_up:
            return
        self._held_until = 0.0
        self._waiting.clear()
        links, self.links = self.links, []
        for link in links:
            link.cut()
        self._end()

    def _end(self) -> None:
        self.is_up = False
        self._state_log.close()
        self._fuse = self.world.chance.randint(0, 7) if self.world.is_wicked() else None
        self.world.later(self.world.chance.choice(AWAY_S), self.start)

    def _open_state_log(self, path: Path, all_entries: EntrySource) -> StateLog:
        self._state_log = FragileStateLog(path, all_entries, self.burn)
        return self._state_log

    def crash_within(self) -> None:
        """Be killed in the middle of something."""
        if self.is_up:
            self._fuse = self.world.chance.randint(0, 7)

    def burn(self) -> None:
        """A place at which the process may be killed."""
        if self._fuse is not None:
            self._fuse -= 1
            if self._fuse < 0:
                raise Killed

    def hold_up(self, seconds: float) -> None:
        """Come to nothing for some seconds."""
        if self.is_up:
            self._held_until = max(self._held_until, self.world.now + seconds)

    # -- what happens to it

    def receive(self, link: Link, text: str) -> None:
        if not self.is_up:
            link.cut()
            return
        self._take(partial(self._receive, link, text))

    def disconnected(self, link: Link) -> None:
        if link in self.links:  # else it belonged to a process that has ended
            self.links.remove(link)
            if link.session is not None:
                self._take(link.session.close)

    def handle(self, event: machine.Event) -> None:
        self._take(partial(self._handle, event))

    def _receive(self, link: Link, text: str) -> None:
        if link.session is None:
            link.session = link.kind(self.coordinator, link)
        link.session.receive(text)

    def _handle(self, event: machine.Event) -> None:
        self.coordinator.handle(event)

    def _take(self, what: Callable[[], None]) -> None:
        """Everything waits, in order, while the coordinator is held up."""
        if not self.is_up:
            return
        if self.world.now >= self._held_until and not self._waiting:
            self._do(what)
            return
        self._waiting.append(what)
        if len(self._waiting) == 1:
            self.world.at(self._held_until, partial(self._catch_up, self._lives))

    def _catch_up(self, life: int) -> None:
        if self._lives == life and self.world.now < self._held_until:
            self.world.at(self._held_until, partial(self._catch_up, life))
        while self._lives == life and self.world.now >= self._held_until and self._waiting:
            self._do(self._waiting.popleft())

    def _do(self, what: Callable[[], None]) -> None:
        before = self.state
        try:
            what()
        except Killed:
            check(self.world, before, self.state)
            self.crash()
        else:
            check(self.world, before, self.state)

    # -- its clock

    def _changed(self) -> None:
        if self.is_up:  # a coordinator that starts looks at its state before anybody has it
            self._set_alarm()

    def _set_alarm(self) -> None:
        self._alarm += 1
        alarm, deadline = self._alarm, self.coordinator.next_deadline()
        if deadline is not None:
            wait_s = max(SHORTEST_WAIT_S, deadline - self.coordinator.now())
            self.world.later(wait_s, partial(self._ring, alarm))

    def _ring(self, alarm: int) -> None:
        if alarm == self._alarm:
            self._take(self._tick)

    def _tick(self) -> None:
        self.coordinator.tick()
