"""Recovery when workers come and go: a worker hands its state over, writes it down, goes on, heals, or departs."""

from __future__ import annotations

import gc
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NoReturn

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unisono.checkpoint.codec import can_keep
from unisono.checkpoint.snapshot import Digests, Snapshot
from unisono.errors import PREEMPTED, Dismissed, JobMismatch
from unisono.failpoints import failpoint
from unisono.train.group.membership import Recovers, StateTransfer
from unisono.train.group.workers import Workers
from unisono.train.model.prepared import Prepared
from unisono.train.model.slices import forget_passes
from unisono.train.model.update import hyperparameters_of, replaced_hyperparameters
from unisono.train.recovery.integrity import Integrity
from unisono.train.state.registry import OWN, REGISTERED, Entry
from unisono.train.state.trained import RunProgress
from unisono.train.step.current import CurrentSteps
from unisono.train.step.run_base import RunBase


class Snapshots:
    """Takes the state, and writes checkpoints of it.

    ``steps`` knows whether the weights are whole. In its methods, ``verified`` are digests on which all workers
    have agreed, if they have compared the state.
    """

    def __init__(self, run: RunBase, steps: CurrentSteps) -> None:
        self._trained, self._checkpoints, self._membership = run.trained, run.checkpoints, run.membership
        self._listeners, self._steps, self._run = run.listeners, steps, run
        self._cut: RunProgress | None = None
        self._searched: Prepared | None = None  # what was last searched for schedulers

    def settle(self, *, is_end: bool = False) -> None:
        """Restore the rest of a checkpoint, once the script has reached the place where it was written."""
        progress, loops = self._trained.progress, self._trained.loops
        is_reached = loops > progress.loop or (loops == progress.loop and progress.reading is None)
        prepared = self._trained.prepared
        if prepared is not None:
            self._register_schedulers(prepared)
        if self._trained.restored is None or prepared is None or not (is_reached or is_end):
            return
        before = [hyperparameters_of(optimizer) for optimizer in prepared.optimizers]
        self._trained.settle()
        after = [hyperparameters_of(optimizer) for optimizer in prepared.optimizers]
        replaced = list(chain.from_iterable(map(replaced_hyperparameters, prepared.optimizers, before, after)))
        self._listeners.resumed(replaced)
        self._warn_of_scheduler()

    def take(self) -> Snapshot:
        """Return the state."""
        self.settle()
        self._warn_of_scheduler()
        return self._trained.capture()

    def save_if_due(self, verified: Digests | None) -> None:
        """Write a checkpoint, if one is due."""
        # None is written before the script reaches the place of the newest checkpoint, nor after a loop was cut short.
        if self._trained.restored is not None or self._is_cut():
            self._checkpoints.requested = False
        elif self._checkpoints.due(self._trained.progress.position.step) and not self._trained.is_doubted:
            self._save(verified)

    def save(self, verified: Digests | None) -> bool:
        """Write a checkpoint now, and wait for it. Return whether it is on disk."""
        return self._save(verified, wait=True)

    def save_cut(self, verified: Digests | None) -> None:
        """Write the last checkpoint of a loop that is cut short.

        What the script does from now on follows on steps that are left out. So the job goes on from this state, and
        later states are not written.
        """
        self.settle()
        if self._checkpoints.in_use:
            self._save(verified, wait=True)
            self._cut = self._trained.progress

    def save_last(self, verified: Digests | None) -> None:
        """Write a last checkpoint, if this run writes any, and finish what is being written."""
        if self._checkpoints.in_use and not self._is_cut():
            self._save(verified)
        self._checkpoints.close()

    def _save(self, verified: Digests | None, *, wait: bool = False) -> bool:
        snapshot, prepared = self.take(), self._trained.require_prepared()
        self._membership.checkpoint_begins()
        prepared.require_forms()
        if self._checkpoints.store is None:
            return self._checkpoints.save(snapshot, verified, wait=wait)
        return self._checkpoints.save(*self._run.placement.give(snapshot, verified), wait=wait)

    def _is_cut(self) -> bool:
        """Whether the run was cut short at its present place, and that state is on disk."""
        progress = self._trained.progress
        return self._cut == progress and self._checkpoints.holds(progress.position.step)

    def _register_schedulers(self, prepared: Prepared) -> None:
        """Register schedulers, once after each ``run.prepare``: the script makes its schedulers before its loop."""
        if self._trained.loops and self._searched is not prepared:
            self._searched = prepared
            registry = self._trained.registry
            for name, scheduler in unregistered_schedulers(prepared.optimizers, registry.objects):
                # A name may be taken by a scheduler of an optimizer that was prepared before.
                registry.put(Entry((*REGISTERED, OWN + name), scheduler, compare=True, optional=True))

    def _warn_of_scheduler(self) -> None:
        prepared = self._trained.prepared
        if prepared is not None and not holds_schedulers(self._trained.registry.objects):
            self._listeners.unregistered_scheduler(prepared)


# The schedulers of a script.


def holds_schedulers(registered: Mapping[str, Any]) -> bool:
    """Whether a scheduler is registered, or a framework's registered loop says that it holds its own."""
    return any(
        isinstance(thing, LRScheduler) or getattr(thing, "has_schedulers", False) for thing in registered.values()
    )


def unregistered_schedulers(
    optimizers: Sequence[Optimizer], registered: Mapping[str, Any]
) -> list[tuple[str, LRScheduler]]:
    """Return unregistered schedulers of some optimizers, with names that are the same in each start of a script.

    Left out are schedulers that are part of another one or have no state that a checkpoint can keep, and several of one
    kind for one optimizer, as nobody can tell them apart. If a framework holds its own, there are none.
    """
    if any(getattr(thing, "has_schedulers", False) for thing in registered.values()):
        return []
    numbers = {id(optimizer): number for number, optimizer in enumerate(optimizers)}
    schedulers = [each for each in _schedulers(optimizers) if id(getattr(each, "optimizer", None)) in numbers]
    parts = {id(part) for scheduler in schedulers for part in getattr(scheduler, "_schedulers", ())}
    named = [
        (f"{type(scheduler).__name__} of optimizer {numbers[id(scheduler.optimizer)]}", scheduler)
        for scheduler in schedulers
        if id(scheduler) not in parts and can_keep(scheduler.state_dict())
    ]
    counts, known = Counter(name for name, _ in named), set(map(id, registered.values()))
    alone = ((name, scheduler) for name, scheduler in named if counts[name] == 1 and id(scheduler) not in known)
    return sorted(alone, key=lambda pair: pair[0])


def _schedulers(optimizers: Sequence[Optimizer]) -> list[LRScheduler]:
    # An optimizer does not know its schedulers. They refer to it directly, or through the dict of their attributes.
    things = gc.get_referrers(*optimizers)
    if attributes := [
        thing for thing in things if type(thing) is dict and "optimizer" in thing and "__name__" not in thing
    ]:
        things += gc.get_referrers(*attributes)
    # By type: isinstance would read ``__class__``, and a lazy object may load something to answer that.
    return [thing for thing in things if issubclass(type(thing), LRScheduler)]


# What a worker does when others come, go or differ.


class Recovery(Recovers):
    """The recovery of a run's collective calls when workers come, go or differ.

    ``again`` is the advice on how to go on with a job that has left, in words.
    """

    def __init__(
        self, run: RunBase, steps: CurrentSteps, integrity: Integrity, snapshots: Snapshots, again: str
    ) -> None:
        self._trained, self._checkpoints, self._membership = run.trained, run.checkpoints, run.membership
        self._requests, self._folder, self._listeners, self._ending = (
            run.requests,
            run.folder,
            run.listeners,
            run.ending,
        )
        self._steps, self._integrity, self._snapshots, self._again = steps, integrity, snapshots, again

    def leave(self) -> None:
        """End the generation."""
        self._steps.drop()
        if self._trained.prepared is not None:
            forget_passes(self._trained.prepared.modules)

    def give(self) -> list[Any]:
        """Return the state, and all else that decides what comes next, for a worker that lacks them."""
        return self._trained.give()

    def digests(self) -> list[int] | None:
        """Return digests of what an update changes, where all workers with the same updates hold the same."""
        trained = self._trained
        is_same = trained.has_weights and self._steps.strategy.is_exact and not trained.is_doubted
        own_digests = list(trained.capture().digests().values()) if is_same and self._integrity.is_on else None
        return None if own_digests is None else self._membership.workers.devices.joined(own_digests)

    def suspect_only_copy(self) -> None:
        """Suspect the state, unless workers have compared it before: nobody else has it."""
        if self.digests() is not None:
            step, own_digests = self._trained.progress.position.step, list(self._trained.capture().digests().values())
            is_agreed = self._membership.workers.devices.all(self._integrity.has_agreed(step, own_digests))
            self._integrity.suspect(step, is_agreed=is_agreed)

    def require_same_result(self) -> None:
        """Refuse to give the result of an update if the script has changed it and no comparison would notice."""
        if self._steps.was_written and not self._integrity.is_on:
            raise JobMismatch(
                f"step {self._trained.progress.position.step}: the loop's body has changed weights, and a worker that "
                f"lacks the update before that cannot get it without that change: start the job again, it goes on from "
                f"its newest checkpoint. With faults.verify_every above 0 a run goes back by itself"
            )

    def take(self, state: Any, *, joins: bool, follow: Callable[[], None] | None = None) -> None:
        """Set the state that another worker has given."""
        self._steps.forget()
        self._trained.take(state, joins=joins, follow=follow)
        self._trained.has_weights = True

    def renew(self) -> None:
        """Begin in a new generation, in which all workers have the same state. Collective."""
        self._requests.regroup = False
        self._integrity.known.cleared = []  # ranks are other workers from now on
        self._steps.make()
        if self._membership.workers.rank == 0:
            self._checkpoints.begin_writing()
        self._listeners.renewed()

    def go_on(self) -> None:
        """Note that a collective call is complete."""
        self._trained.go_on()

    def heal(self, workers: Workers, transfer: StateTransfer, name: str) -> None:
        """Give the right state to the workers that hold another one than most. Collective."""
        failpoint("heal begins")
        self._steps.drop()  # first, or setting the weights would look like a write of the script
        hosts = workers.gather_json(platform.node())
        wrong, step = sorted(transfer.behind), self._trained.progress.position.step
        self._listeners.healed(step, name, wrong, [hosts[rank] for rank in wrong])
        state = workers.broadcast(self.give() if workers.rank == transfer.source else None, transfer.source)
        if workers.rank in wrong:
            self.take(state, joins=False)
        failpoint("healed")
        self._steps.make()

    def depart(self, dismissed: Dismissed) -> NoReturn:
        """End this worker: the others go on without it, or the job goes on later."""
        if dismissed.preempted:  # at a boundary, where all workers have just compared the state
            self.depart_together(self._integrity.known.agreed(self._trained.progress.position.step))
        self._ending.leave(dismissed)

    def depart_together(self, verified: Digests | None) -> NoReturn:
        """Have all workers leave at a boundary. The job goes on when it is started again."""
        step, is_main = self._trained.progress.position.step, self._membership.workers.is_main
        is_written = self._snapshots.save(verified)
        self._listeners.preempted()
        if is_main:
            outcome = (
                f"checkpoint after step {step}" if is_written else f"NO checkpoint of step {step} could be written"
            )
            print(f"unisono: asked to leave: {outcome} in {self._folder.path}; {self._again}", flush=True)  # noqa: T201
        self._ending.leave(Dismissed("asked to leave", preempted=True, code=PREEMPTED))
