"""Recovery when workers come and go: a worker hands its state over, writes it down, renews, heals, or departs."""

from __future__ import annotations

import platform
from collections.abc import Callable
from itertools import chain
from typing import Any, NoReturn

from unisono.checkpoint.snapshot import Digests
from unisono.checkpoint.store import Snapshot
from unisono.errors import PREEMPTED, Dismissed, JobMismatch
from unisono.failpoints import failpoint
from unisono.received import value_of
from unisono.train.group.collectives import Recovers
from unisono.train.group.membership import StateTransfer
from unisono.train.group.workers import Workers
from unisono.train.model.prepared import Prepared
from unisono.train.model.slices import forget_passes
from unisono.train.model.update import hyperparameters_of, replaced_hyperparameters
from unisono.train.recovery.integrity import Integrity
from unisono.train.state.registered import OWN, holds_schedulers, unregistered_schedulers
from unisono.train.state.sliced_state import share_of
from unisono.train.state.state import RunProgress
from unisono.train.step.current import CurrentSteps
from unisono.train.step.run_base import RunBase


class Snapshots:
    """Takes the state, and writes checkpoints of it.

    Args:
        run: the base of the run.
        steps: the present step computer, which knows whether the weights are whole.
    """

    def __init__(self, run: RunBase, steps: CurrentSteps) -> None:
        self._trained, self._checkpoints, self._membership = run.trained, run.checkpoints, run.membership
        self._listeners, self._steps = run.listeners, steps
        self._cut: RunProgress | None = None
        self._searched: Prepared | None = None  # for schedulers

    def settle(self, *, is_end: bool = False) -> None:
        """Restore the rest of a checkpoint, once the script has come to where it was written."""
        at, loops = self._trained.progress, self._trained.loops
        is_there = loops > at.loop or (loops == at.loop and at.reading is None)
        prepared = self._trained.prepared
        if prepared is not None:
            self._register_schedulers(prepared)
        if self._trained.restored is None or prepared is None or not (is_there or is_end):
            return
        before = [hyperparameters_of(one) for one in prepared.optimizers]
        self._trained.settle()
        after = [hyperparameters_of(one) for one in prepared.optimizers]
        replaced = list(chain.from_iterable(map(replaced_hyperparameters, prepared.optimizers, before, after)))
        self._listeners.tell(lambda one: one.resumed(replaced))
        self._tell_of_scheduler()

    def take(self) -> Snapshot:
        """The state."""
        self.settle()
        self._tell_of_scheduler()
        return self._trained.capture()

    def save_if_due(self, verified: Digests | None) -> None:
        """Write a checkpoint, if one is due.

        Args:
            verified: digests on which all workers have agreed, if they have compared the state.
        """
        # The script has not come to where the newest one was written; or it has, and goes on behind that.
        if self._trained.restored is not None or self._is_cut():
            self._checkpoints.requested = False
        elif self._checkpoints.due(self._trained.progress.position.step) and not self._trained.is_doubted:
            self._save(verified)

    def save(self, verified: Digests | None) -> bool:
        """Write a checkpoint now, and wait for it.

        Returns:
            whether it is on disk.
        """
        return self._save(verified, wait=True)

    def save_cut(self, verified: Digests | None) -> None:
        """The loop is over before its end: what the script does from now on follows on steps that are left out.

        So this is the state to go on from, and none of a later moment is written.

        Args:
            verified: digests on which all workers have agreed, if they have compared the state.
        """
        self.settle()
        if self._checkpoints.in_use:
            self._save(verified, wait=True)
            self._cut = self._trained.progress

    def save_last(self, verified: Digests | None) -> None:
        """The run ends: write one if this run writes any, and finish what is being written."""
        if self._checkpoints.in_use and not self._is_cut():
            self._save(verified)
        self._checkpoints.close()

    def _save(self, verified: Digests | None, *, wait: bool = False) -> bool:
        found, prepared = self.take(), self._trained.require_prepared()
        self._membership.checkpoint_begins()
        prepared.require_forms()
        devices = self._membership.workers.devices
        if devices.count == 1 or self._checkpoints.store is None:
            return self._checkpoints.save(found, verified, wait=wait)
        whole, share = share_of(prepared, found, devices)
        return self._checkpoints.save(whole, None, share, wait=wait)  # the workers have agreed on slices

    def _is_cut(self) -> bool:
        """Whether the run was cut short where it stands, and that state is on disk."""
        at = self._trained.progress
        return self._cut == at and self._checkpoints.holds(at.position.step)

    def _register_schedulers(self, prepared: Prepared) -> None:
        """Once for what was prepared: the script makes its schedulers before its loop."""
        if self._trained.loops and self._searched is not prepared:
            self._searched = prepared
            for name, scheduler in unregistered_schedulers(prepared.optimizers, self._trained.registered):
                self._trained.registered[OWN + name] = scheduler

    def _tell_of_scheduler(self) -> None:
        prepared, registered = self._trained.prepared, self._trained.registered
        if prepared is not None and not holds_schedulers(registered):
            self._listeners.tell(lambda one: one.unregistered_scheduler(prepared))


GIVEN = tuple[list[Any], dict[str, Any], bool, bool, bool]
"""The form of what is handed over: the state, what is known of older ones, whether the workers are to leave, whether
they have been asked for a checkpoint, and whether they are to compare the state at the next boundary."""


class Recovery(Recovers):
    """The recovery of a run's collective calls when workers come, go or differ.

    Args:
        run: the base of the run.
        steps: the present step computer.
        integrity: the record of verified states.
        snapshots: the writer of the last checkpoint of a worker that departs.
        again: the way to go on with a job that has left, for people.
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
        """The generation is over."""
        self._steps.drop()
        if self._trained.prepared is not None:
            forget_passes(self._trained.prepared.modules)

    def give(self) -> list[Any]:
        """The state, for a worker that lacks it, and all else that decides what comes next."""
        requests = self._requests
        wanted = [requests.leave, requests.checkpoint, requests.compare]
        return [self._trained.give(), self._integrity.known.tree(), *wanted]

    def digests(self) -> list[int] | None:
        """Of what an update changes, where all who have made the same updates hold the same."""
        trained = self._trained
        is_alike = trained.has_weights and self._steps.strategy.is_exact and not trained.is_doubted
        own = list(trained.capture().digests().values()) if is_alike and self._integrity.is_on else None
        return None if own is None else self._membership.workers.devices.joined(own)

    def gives_alone(self) -> None:
        """Nobody can compare the state with its own."""
        if self.digests() is not None:
            step, own = self._trained.progress.position.step, list(self._trained.capture().digests().values())
            is_agreed = self._membership.workers.devices.all(self._integrity.has_agreed(step, own))
            self._integrity.suspect(step, is_agreed=is_agreed)

    def gives_result(self) -> None:
        """Members get what came of an update. Where states are compared, a wrong one is found."""
        if self._steps.was_written and not self._integrity.is_on:
            raise JobMismatch(
                f"step {self._trained.progress.position.step}: the loop's body has changed weights, and a worker that "
                f"lacks the update before that cannot get it without that change: start the job again, it goes on from "
                f"its newest checkpoint. With faults.verify_every above 0 a run goes back by itself"
            )

    def take(self, given: Any, *, joins: bool, follow: Callable[[], None] | None = None) -> None:
        """Set the state that another worker has given."""
        state, known, leave, checkpoint, compare = value_of(GIVEN, given, "what another worker gave")
        self._requests.leave, self._requests.checkpoint, self._requests.compare = leave, checkpoint, compare
        self._steps.forget()
        self._trained.take(state, joins=joins, follow=follow)
        self._integrity.take(known)
        self._trained.has_weights = True

    def renew(self) -> None:
        """A new generation, in which everybody has the same state. Collective."""
        self._requests.regroup = False
        self._integrity.known.cleared = []  # ranks mean other workers from now on
        self._steps.make()
        if self._membership.workers.rank == 0:
            self._checkpoints.begin_writing()
        self._listeners.tell(lambda one: one.renewed())

    def go_on(self) -> None:
        """A collective call is complete."""
        self._trained.go_on()

    def heal(self, workers: Workers, transfer: StateTransfer, what: str) -> None:
        """Some workers hold another state than most: they get the right one. Collective."""
        failpoint("heal begins")
        self._steps.drop()  # before weights are set, which is no write of the script
        hosts = workers.gather_json(platform.node())
        odd, step = sorted(transfer.behind), self._trained.progress.position.step
        self._listeners.tell(lambda one: one.healed(step, what, odd, [hosts[rank] for rank in odd]))
        given = workers.broadcast(self.give() if workers.rank == transfer.source else None, transfer.source)
        if workers.rank in odd:
            self.take(given, joins=False)
        failpoint("healed")
        self._steps.make()

    def depart(self, dismissed: Dismissed) -> NoReturn:
        """The others go on without this worker, or the job does later."""
        if dismissed.preempted:  # at a boundary, where all has just been compared
            self.depart_together(self._integrity.known.agreed(self._trained.progress.position.step))
        self._ending.leave(dismissed)

    def depart_together(self, verified: Digests | None) -> NoReturn:
        """All workers leave at a boundary, and the job goes on when it is started again.

        Args:
            verified: digests of the state on which they have agreed.
        """
        step, is_main = self._trained.progress.position.step, self._membership.workers.is_main
        is_written = self._snapshots.save(verified)
        self._listeners.tell(lambda one: one.preempted())
        if is_main:
            kept = f"checkpoint after step {step}" if is_written else f"NO checkpoint of step {step} could be written"
            print(f"unisono: asked to leave: {kept} in {self._folder.path}; {self._again}", flush=True)  # noqa: T201
        self._ending.leave(Dismissed("asked to leave", preempted=True, code=PREEMPTED))
