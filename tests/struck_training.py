"""Training small enough for thousands of runs: real acts, a real state and hand-over, and an engine of a few lines."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from one_at_a_time import Blow, SimulatedMembership, World
from unisono.checkpoint.codec import unflatten
from unisono.checkpoint.snapshot import Digests, FrozenSnapshot, Snapshot
from unisono.plan.batches import Position
from unisono.plan.tree import Node
from unisono.train.group.collectives import Change, CollectiveCalls
from unisono.train.group.membership import Recovers
from unisono.train.group.workers import Workers
from unisono.train.model.prepared import Prepared
from unisono.train.model.tensors import digest_tensors, set_all
from unisono.train.state.checkpoints import RunCheckpoints, shared_weights
from unisono.train.state.policy_state import PolicyState
from unisono.train.state.trained import Trained

STEPS = 2
SHARDS = World.shards
INPUTS = torch.linspace(-1, 1, 2 * SHARDS).view(SHARDS, 2)


class Memory:
    """RunCheckpoints that outlive all workers, as those on a disk do."""

    seconds = 0.0

    def __init__(self) -> None:
        self.kept: list[tuple[int, Any]] = []

    def save(self, snapshot: Snapshot, verified: Digests | None = None, share: object = None) -> None:
        self.kept.append((snapshot.step, FrozenSnapshot.of(snapshot)))

    def newest(self, read: object) -> tuple[str, Snapshot] | None:
        if not self.kept:
            return None
        step, frozen = self.kept[-1]
        tensors = {
            part: {name: value.clone() for name, value in frozen.tensors[part].items()} for part in frozen.tensors
        }
        parts = {part: unflatten(frozen.text[part], tensors[part]) for part in ("model", "optimizer", "state")}
        return "memory", Snapshot(step, **parts)


@dataclass
class Outcome:
    """What became of a job.

    Attributes:
        world: in which it ran.
        digests: of each worker that came to its end, by name: weights and what the optimizer keeps.
        losses: of each of them: what its steps returned, by step.
    """

    world: World
    digests: dict[str, str] = field(default_factory=dict)
    losses: dict[str, dict[int, float]] = field(default_factory=dict)


class Training(Recovers):
    """One worker's script, and what a run does around it."""

    def __init__(
        self, membership: SimulatedMembership, memory: Memory, acts: type[CollectiveCalls] = CollectiveCalls
    ) -> None:
        self.membership, self.acts = membership, acts(membership, self)
        self.trained = Trained({}, PolicyState((), SHARDS, SHARDS))
        self.checkpoints = RunCheckpoints(lambda: memory)  # type: ignore[arg-type,return-value]
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.losses: dict[int, float] = {}
        self.regroups = False
        with torch.no_grad():
            self.model.weight.copy_(torch.tensor([[0.3, -0.7]]))
            self.model.bias.zero_()

    def run(self) -> str:
        self.trained.prepared = Prepared.of(self.model, [self.optimizer])
        if not self.membership.joins and self.membership.workers.rank == 0:
            self.checkpoints.begin_writing()
        self.acts.change(self.first_weights)
        if not self.membership.joins:
            self.set_up()
        if self.acts.enter(0):
            self.loop()
            self.acts.leave(0)
        if self.membership.joins:
            self.membership.await_end()
        self.acts.agree("weights", {"sha256": self.digest()})
        return self.digest()

    def set_up(self) -> None:
        """What a script does after ``run.prepare``: it has a checkpoint written, and sets another learning rate."""
        self.trained.settle()
        self.optimizer.param_groups[0]["lr"] = 0.05
        self.acts.agree("data set", {"samples": 3})

    def loop(self) -> None:
        self.trained.settle()
        self.trained.go_on()
        while (step := self.trained.progress.position.step) < STEPS:
            self.losses[step] = self.acts.change(self.one_step)
            self.body_goes_on()
            self.trained.progress = replace(self.trained.progress, position=Position(step=step + 1))
            self.acts.step = step + 1
            if self.checkpoints.store is not None:
                self.checkpoints.save(self.trained.capture())
            if self.regroups:
                self.acts.regroup(None, at_boundary=True)

    def body_goes_on(self) -> None:
        """What else the script does in a step."""

    def first_weights(self, workers: Workers) -> Change[None]:
        assert self.trained.prepared is not None
        shared = shared_weights(workers, self.trained.prepared)
        found = self.checkpoints.newest(workers)

        def make() -> None:
            set_all(shared)
            if found is not None:
                self.trained.resume_from(found)

        return Change(make)

    def one_step(self, workers: Workers) -> Change[float]:
        mine, tree = workers.split(SHARDS).of(workers.rank), workers.transport.tree
        leaves = {Node(shard, shard + 1): self.gradient(shard) for shard in mine}
        partials = [tree.finish(leaves, torch.add, node) for node in tree.cover(mine.start, mine.stop)]
        total = workers.transport.reduce("gradients", partials)
        told = workers.gather_json(self.membership.is_due)

        def make() -> float:
            self.model.weight.grad, self.model.bias.grad = total[:2].view(1, 2), total[2:]
            self.optimizer.step()
            self.trained.monitors.seconds += 1
            return float(total.sum())

        return Change(make, lambda: self.leave_if(any(told)))

    def gradient(self, shard: int) -> Tensor:
        """It follows from weights and shard alone, so an update too many is in all that come after it."""
        x = INPUTS[shard] + 0.1 * self.trained.progress.position.step
        error = (self.model.weight.detach() @ x + self.model.bias.detach()) - x.sum()
        return torch.cat([error * x, error])

    def leave_if(self, due: bool) -> None:
        self.regroups = self.regroups or due

    def give(self) -> Any:
        return self.trained.give()

    def go_on(self) -> None:
        self.trained.go_on()

    def take(self, given: Any, *, joins: bool, follow: Callable[[], None] | None = None) -> None:
        self.trained.take(given, joins=joins, follow=follow)
        if joins:
            self.trained.settle()

    def renew(self) -> None:
        self.regroups = False
        self.membership.workers.barrier()
        if self.membership.workers.rank == 0:
            self.checkpoints.begin_writing()

    def digest(self) -> str:
        tensors = dict(self.model.state_dict())
        for number, state in self.optimizer.state_dict()["state"].items():
            tensors[f"momentum {number}"] = state["momentum_buffer"]
        return f"{digest_tensors(tensors)} {self.trained.monitors.seconds}"


def train(
    pool: ThreadPoolExecutor,
    workers: int,
    joiners: int = 0,
    *blows: Blow,
    memory: Memory | None = None,
    acts: type[CollectiveCalls] = CollectiveCalls,
    kind: type[Training] = Training,
) -> Outcome:
    """Run a job to its end, from the newest checkpoint in a memory on, if there is one."""
    memory, found = memory or Memory(), {}
    losses: dict[str, dict[int, float]] = {}

    def script(membership: SimulatedMembership) -> None:
        training = kind(membership, memory, acts)
        found[membership.worker.name] = training.run()
        losses[membership.worker.name] = training.losses

    world = World(script, workers, joiners, blows).run(pool)
    return Outcome(world, found, losses)
