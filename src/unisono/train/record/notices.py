"""The notices in the terminal and in the run's journal, beside losses and metrics."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from unisono.checkpoint.folder import UNPROVEN, RunFolder
from unisono.data.order import Order
from unisono.errors import UnisonoWarning
from unisono.job import SAMPLES_PER_SHARD
from unisono.plan.audits import AuditResult
from unisono.plan.batches import Batches
from unisono.train.group.membership import Membership
from unisono.train.model.prepared import Prepared, batch_norm_in
from unisono.train.model.shared_work import sharing_in
from unisono.train.model.update import UpdateWatch
from unisono.train.state.trained import Doubt
from unisono.train.step.listeners import Counted, Listener
from unisono.train.step.step import Call

LONG = frozenset(10**power for power in range(1, 10))
"""Numbers of steps skipped in a row that are warned of."""


class Notices(Listener):
    """Tells people what happens in a run. Only the main worker speaks, whichever worker that is at the moment.

    Args:
        folder: the run folder, with the journal.
        membership: the members of the job.
    """

    def __init__(self, folder: RunFolder, membership: Membership) -> None:
        self._folder, self._membership = folder, membership
        self._prepared: Prepared | None = None
        self._told_of_scheduler = False
        self._skipped = 0
        self._unheld: set[str] = set()

    def prepared(self, prepared: Prepared, step: int) -> None:
        """The models whose layers the next loop is told of; and what their optimizers have to say, once."""
        self._prepared = prepared
        self._tell_unheld(prepared.unheld())
        for told in filter(None, [one.notice() for one in sharing_in(prepared.optimizers)]):
            if self._membership.is_main:
                _warn(told)

    def loop_begins(self, number: int, batches: Batches, order: Order) -> None:
        """BatchNorm over shards so small that its statistics are noisy; once."""
        prepared, self._prepared = self._prepared, None
        if prepared is None or not self._membership.is_main or not batch_norm_in(prepared.modules):
            return
        if (per_shard := batches.batch_size // batches.shards) < SAMPLES_PER_SHARD:
            _warn(
                f"BatchNorm with {per_shard} samples per shard: its statistics are taken over each shard, and "
                f"get noisy below {SAMPLES_PER_SHARD}, which costs accuracy. Use a larger batch_size, fewer shards "
                f"(shards={max(1, batches.batch_size // SAMPLES_PER_SHARD)}), or GroupNorm or LayerNorm"
            )

    def _tell_unheld(self, names: Sequence[str]) -> None:
        """Parameters that want a gradient, and that no optimizer holds; each once."""
        if (new := [name for name in names if name not in self._unheld]) and self._membership.is_main:
            what = f"{new[0]} and {len(new) - 1} more want" if new[1:] else f"{new[0]} wants"
            print(  # noqa: T201
                f"unisono: {what} a gradient, and no optimizer holds them: they stay as they are. Give them to an "
                f"optimizer, or freeze them (requires_grad_(False)), which spares their gradients",
                flush=True,
            )
        self._unheld.update(names)

    def resumed(self, replaced: Sequence[str]) -> None:
        """Settings of optimizers that are others in the checkpoint.

        Args:
            replaced: each with what the script had set.
        """
        if replaced and self._membership.is_main:
            print(  # noqa: T201
                f"unisono: the optimizers go on as in the checkpoint, not as in the script: {'; '.join(replaced)}. Set "
                f"in the loop's body what is to change",
                flush=True,
            )

    def unregistered_scheduler(self, prepared: Prepared) -> None:
        """A schedule that checkpoints do not have; once."""
        scheduled = any("initial_lr" in group for one in prepared.optimizers for group in one.param_groups)
        if self._membership.is_main and scheduled and not self._told_of_scheduler:
            self._told_of_scheduler = True
            _warn(
                "a learning-rate scheduler is in use, but not part of the checkpoints: a run that resumes would start "
                'its schedule again. After making it, call run.register("scheduler", scheduler)'
            )

    def healed(self, step: int, what: str, ranks: Sequence[int], hosts: Sequence[str]) -> None:
        """Workers that held another state than most have been given theirs.

        Args:
            step: steps that were committed.
            what: they held a wrong one of.
            ranks: theirs.
            hosts: theirs.
        """
        if not self._membership.is_main:
            return
        self._folder.journal("healed", step=step, what=what, ranks=list(ranks), hosts=list(hosts))
        listed = ", ".join(f"rank {rank} on host {host}" for rank, host in zip(ranks, hosts, strict=True))
        _warn(
            f"step {step}: {listed} held another state ({what}) than most workers, {UNPROVEN}; it has been given theirs"
        )

    def repeated(self, step: int) -> None:
        """A bit of a partial sum was another one than had been written, on some worker or on the way to another."""
        if not self._membership.is_main:
            return
        self._folder.journal("computed again", step=step, reason="a partial sum had changed")
        _warn(
            f"step {step}: what was read of partial sums was not what had been written, which a fault of a host's "
            f"memory would explain; the step is computed again"
        )

    def wrong_result(self, step: int, finding: AuditResult, host: str) -> None:
        """A worker computed a shard otherwise than the others."""
        if not self._membership.is_main:
            return
        about = {"step": step, "shard": finding.shard, "rank": finding.wrong, "host": host}
        self._folder.journal("wrong result", **about, transient=finding.is_transient)
        once = "once; the step is computed again" if finding.is_transient else "every time"
        _warn(
            f"step {step}: rank {finding.wrong} on host {host} computed shard {finding.shard} otherwise than it "
            f"should, {once}"
        )

    def went_back(self, reached: int, step: int, doubt: Doubt) -> None:
        """The run has gone back to an older state, and computes the steps after it again.

        Args:
            reached: steps that were committed before.
            step: steps that are committed now.
            doubt: why.
        """
        if not self._membership.is_main:
            return
        about = {"why": doubt.why, "fault": doubt.is_fault, "proven": doubt.is_proven}
        self._folder.journal("rolled back", step=reached, to=step, **about)
        cause = f", {UNPROVEN}" if doubt.is_fault and not doubt.is_proven else ""
        _warn(
            f"{doubt.why}{cause}: the run goes back to step {step}, where all workers held the same state, and "
            f"computes the {reached - step} steps after it again"
        )

    def topology_measured(self, about: Mapping[str, Any]) -> None:
        """Ways of the partial sums were measured."""
        if self._membership.is_main:
            self._folder.journal("topology", **about)

    def call_counted(self, call: Call, counted: Counted) -> None:
        """A step is left out."""
        self._skipped = 0 if counted.skipped is None else self._skipped + 1
        if not self._membership.is_main:
            return
        if (report := counted.skipped) is not None:
            shards = [shard for shard, part in enumerate(report.shards) if not math.isfinite(part.loss)]
            self._folder.journal("skipped", step=call.step, shards=shards, why=counted.why)
            print(f"unisono: step {call.step} skipped: {counted.why}", flush=True)  # noqa: T201
            if self._skipped in LONG:
                _warn(_nothing_trained(self._skipped, call.step))

    def part_skipped(self, step: int, why: str) -> None:
        """What one worker leaves out, where each updates weights of its own."""
        if self._membership.is_main:
            self._folder.journal("skipped", step=step, shards=[], why=why)
        print(f"unisono: step {step} skipped on this worker: {why}", flush=True)  # noqa: T201

    def close(self) -> None:
        """The run ends while steps are skipped."""
        if self._skipped > 1 and self._membership.is_main:
            print(f"unisono: {_nothing_trained(self._skipped, None)}", flush=True)  # noqa: T201


def _nothing_trained(steps: int, last: int | None) -> str:
    until = "the run ends" if last is None else f"step {last}"
    return (
        f"{steps} steps in a row were skipped until {until}, and nothing was trained in them. If losses stay NaN or "
        f"infinite, go on from a checkpoint before them with a lower learning rate, or clip gradients"
    )


def _warn(words: str) -> None:
    warnings.warn(words, UnisonoWarning, stacklevel=4)  # where the listener is told from


class LoneUpdates(Listener):
    """Watches the steps of all optimizers until the first loop begins, so that none costs more while the run trains.

    Args:
        membership: the members of the job.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._prepared: Prepared | None = None
        self._stepped: str | None = None  # before anything was prepared
        self._is_told = False
        self._hook = register_optimizer_step_pre_hook(UpdateWatch(self._steps))

    def prepared(self, prepared: Prepared, step: int) -> None:
        """These optimizers are the run's; what was stepped before, the script has trained beforehand."""
        self._prepared = prepared

    def loop_begins(self, number: int, batches: Batches, order: Order) -> None:
        """The script knows how to train."""
        self._hook.remove()

    def close(self) -> None:
        """The run ends: it may have trained nothing at all."""
        self._hook.remove()
        if self._prepared is None and self._stepped is not None:
            self._tell(f"this run ends without run.prepare, and {self._stepped}.step() was called by the script itself")

    def _steps(self, optimizer: Optimizer) -> None:
        if not self._is_among_others() or not _has_gradients(optimizer):
            return
        name = type(optimizer).__name__
        if self._prepared is None:
            self._stepped = name
        elif any(optimizer is one for one in self._prepared.optimizers):
            self._tell(f"{name}.step() is called by the script itself")

    def _is_among_others(self) -> bool:
        return self._membership.is_main and self._membership.workers.world_size > 1

    def _tell(self, what: str) -> None:
        if self._is_told:
            return
        self._is_told = True
        warnings.warn(
            f"{what}: each of the {self._membership.workers.world_size} workers updates its own weights with its own "
            f"gradients, so that they train apart. Give model and optimizer to run.prepare, write the loop as "
            f"`for step in run.steps(dataset, epochs)`, and call step.run(loss_fn) in it, which goes backward and "
            f"updates",
            UnisonoWarning,
            stacklevel=5,  # the line with the step: this, two of ours, and torch's before it
        )


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])
