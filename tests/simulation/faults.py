"""What goes wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulation.settings import FAULTS_END_S, TIMEOUT_S
from unisono.membership import state as machine

if TYPE_CHECKING:
    from simulation.host import Host
    from simulation.process import Process
    from simulation.world import World


def add_host(world: World) -> None:
    world.add_host()


def kill_worker(world: World) -> None:
    if worker := some_worker(world):
        worker.die(-9)


def hang_worker(world: World) -> None:
    worker = some_worker(world)
    known = world.service.state.workers.get(worker.name) if worker else None
    if worker and known and known.phase != "asked":  # before, nobody can tell it from one that is slow to start
        worker.hung = True
        worker.main.leave_group(abruptly=None)


def stick_worker(world: World) -> None:
    if (worker := some_worker(world)) and worker.main.phase == "training" and not worker.main.is_still:
        worker.main.stuck_since = world.now


def fail_worker(world: World) -> None:
    if world.errors and (worker := some_worker(world)):
        worker.die(1, "ValueError: no")


def slow_worker(world: World) -> None:
    if worker := some_worker(world):
        worker.main.slowness = 15.0


def cut_worker(world: World) -> None:
    if (worker := some_worker(world)) and worker.link:
        worker.link.cut()


def cut_host(world: World) -> None:
    if (host := some_host(world)) and host.link:
        host.link.cut()


def kill_host(world: World) -> None:
    if host := some_host(world):
        host.die()


def retire_host(world: World) -> None:
    if host := some_host(world):
        host.leave()


def warn_worker(world: World) -> None:
    if worker := some_worker(world):
        worker.ask_to_leave()


def resize(world: World) -> None:
    world.service.handle(machine.ResizeRequested(world.chance.randint(1, 6)))


def send_away(world: World) -> None:
    world.service.handle(machine.LeaveRequested(str(world.chance.randint(0, 3))))


def stop(world: World) -> None:
    if world.chance.random() < 0.3:
        world.service.handle(machine.StopRequested())


def crash(world: World) -> None:
    world.service.crash()


def crash_within(world: World) -> None:
    world.service.crash_within()


def hold_up(world: World) -> None:
    world.service.hold_up(world.chance.uniform(1.0, 3 * TIMEOUT_S))


def part_hosts(world: World) -> None:
    """New connections between some hosts fail from now on, and perhaps those that stand break."""
    hosts = [host.name for host in world.agents if host.alive]
    if len(hosts) > 1:
        concerned = world.network.part(world.chance, hosts)
        world.later(world.chance.uniform(0.5, FAULTS_END_S), world.heal)
        if world.chance.random() < 0.5:
            for worker in list(world.workers.values()):
                if worker.alive and worker.host.name in concerned and worker.main.group is not None:
                    worker.main.notice(worker.main.group, abruptly=True)


def some_worker(world: World) -> Process | None:
    alive = [worker for worker in world.workers.values() if worker.alive]
    return world.chance.choice(alive) if alive else None


def some_host(world: World) -> Host | None:
    alive = [host for host in world.agents if host.alive]
    return world.chance.choice(alive) if alive else None


FAULTS = (
    *[kill_worker] * 10,
    *[cut_worker] * 3,
    *[cut_host] * 2,
    *[crash] * 2,
    *[crash_within] * 3,
    *[resize] * 3,
    *[add_host] * 2,
    *[part_hosts] * 5,
    hang_worker,
    *[stick_worker] * 2,
    fail_worker,
    slow_worker,
    kill_host,
    retire_host,
    warn_worker,
    send_away,
    stop,
    hold_up,
)
