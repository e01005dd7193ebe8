"""The notices in the terminal and in the run's journal, beside losses and metrics."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from traceback import walk_stack
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from unisono.checkpoint.folder import UNPROVEN, RunFolder
from unisono.data.sample_order import Order
from unisono.host.tracebacks import warn
from unisono.job import SAMPLES_PER_SHARD
from unisono.plan.audits import AuditResult
from unisono.plan.batches import Batches
from unisono.train.group.membership import Membership
from unisono.train.model.prepared import Prepared
from unisono.train.model.shared_work import sharing_in
from unisono.train.model.update import UpdateWatch
from unisono.train.state.trained import Doubt
from unisono.train.step.listeners import Counted, Listener
from unisono.train.step.step import Call, Step

LONG = frozenset(10**power for power in range(1, 10))
"""Numbers of steps skipped in a row that are warned of."""


class Notices(Listener):
    """Prints and warns about what happens in a run. Only the present main worker does so."""

    def __init__(self, folder: RunFolder, membership: Membership) -> None:
        self._folder, self._membership = folder, membership
        self._prepared: Prepared | None = None
        self._has_warned_of_scheduler = False
        self._skipped = 0
        self._unheld: set[str] = set()

    def prepared(self, prepared: Prepared, step: int) -> None:
        """Note the models for the checks of the next loop, and print the notices of their optimizers, once."""
        self._prepared = prepared
        self._report_unheld(prepared.unheld())
        for words in filter(None, [optimizer.notice() for optimizer in sharing_in(prepared.optimizers)]):
            self._warn(words)

    def loop_begins(self, number: int, batches: Batches, order: Order) -> None:
        """Report workers that have nothing to do, and warn once of BatchNorm over so few samples that it is noisy."""
        if batches.filled is not None and batches.filled < (workers := self._membership.workers.world_size):
            self._print(
                f"a batch of {batches.batch_size} samples has {batches.filled} shards of at least {SAMPLES_PER_SHARD}, "
                f"so {workers - batches.filled} of {workers} workers compute nothing: shards={workers} has all compute "
                f"(unisono.init, or unisono run --shards), with other bits"
            )
        prepared, self._prepared = self._prepared, None
        if prepared is None or not _batch_norm_in(prepared.modules):
            return
        if (per_shard := batches.batch_size // (batches.filled or batches.shards)) < SAMPLES_PER_SHARD:
            self._warn(
                f"BatchNorm with {per_shard} samples per shard: its statistics are taken over each shard, and "
                f"get noisy below {SAMPLES_PER_SHARD}, which costs accuracy. Use a larger batch_size, fewer shards "
                f"(shards={max(1, batches.batch_size // SAMPLES_PER_SHARD)}), or GroupNorm or LayerNorm"
            )

    def _report_unheld(self, names: Sequence[str]) -> None:
        """Report parameters that want a gradient and that no optimizer holds, each once."""
        if new := [name for name in names if name not in self._unheld]:
            what = f"{new[0]} and {len(new) - 1} more want" if new[1:] else f"{new[0]} wants"
            self._print(
                f"{what} a gradient, and no optimizer holds them: they stay as they are. Give them to an "
                f"optimizer, or freeze them (requires_grad_(False)), which spares their gradients"
            )
        self._unheld.update(names)

    def resumed(self, replaced: Sequence[str]) -> None:
        """Report settings of optimizers that differ in the checkpoint, each with the value that the script had set."""
        if replaced:
            self._print(
                f"the optimizers go on as in the checkpoint, not as in the script: {'; '.join(replaced)}. Set "
                f"in the loop's body what is to change"
            )

    def unregistered_scheduler(self, prepared: Prepared) -> None:
        """Warn once of a schedule that is not part of the checkpoints."""
        scheduled = any("initial_lr" in group for optimizer in prepared.optimizers for group in optimizer.param_groups)
        if self._membership.is_main and scheduled and not self._has_warned_of_scheduler:
            self._has_warned_of_scheduler = True
            self._warn(
                "a learning-rate scheduler is in use, but not part of the checkpoints: a run that resumes would start "
                'its schedule again. After making it, call run.register("scheduler", scheduler)'
            )

    def healed(self, step: int, name: str, ranks: Sequence[int], hosts: Sequence[str]) -> None:
        """Warn of workers that held another state than most, and have got the state of the others."""
        self._note("healed", step=step, what=name, ranks=list(ranks), hosts=list(hosts))
        listed = ", ".join(f"rank {rank} on host {host}" for rank, host in zip(ranks, hosts, strict=True))
        self._warn(
            f"step {step}: {listed} held another state ({name}) than most workers, {UNPROVEN}; it has been given theirs"
        )

    def repeated(self, step: int) -> None:
        """Warn of a partial sum with another bit than was written, on some worker or on the way to another."""
        self._note("computed again", step=step, reason="a partial sum had changed")
        self._warn(
            f"step {step}: what was read of partial sums was not what had been written, which a fault of a host's "
            f"memory would explain; the step is computed again"
        )

    def wrong_result(self, step: int, finding: AuditResult, host: str) -> None:
        """Warn of a worker that computed a shard otherwise than the others."""
        about = {"step": step, "shard": finding.shard, "rank": finding.wrong, "host": host}
        self._note("wrong result", **about, transient=finding.is_transient)
        once = "once; the step is computed again" if finding.is_transient else "every time"
        self._warn(
            f"step {step}: rank {finding.wrong} on host {host} computed shard {finding.shard} otherwise than it "
            f"should, {once}"
        )

    def went_back(self, reached: int, step: int, doubt: Doubt) -> None:
        """Say that the run has gone back to an older state, and computes the steps after it again."""
        about = {"why": doubt.why, "fault": doubt.is_fault, "proven": doubt.is_proven}
        self._note("rolled back", step=reached, to=step, **about)
        cause = f", {UNPROVEN}" if doubt.is_fault and not doubt.is_proven else ""
        self._warn(
            f"{doubt.why}{cause}: the run goes back to step {step}, where all workers held the same state, and "
            f"computes the {reached - step} steps after it again"
        )

    def topology_measured(self, about: Mapping[str, Any]) -> None:
        """Ways of the partial sums were measured."""
        self._note("topology", **about)

    def call_counted(self, call: Call, counted: Counted) -> None:
        """Print that a step is skipped, and warn after many skipped steps in a row."""
        self._skipped = 0 if counted.skipped is None else self._skipped + 1
        if (report := counted.skipped) is not None:
            shards = [shard for shard, part in enumerate(report.shards) if not math.isfinite(part.loss)]
            self._note("skipped", step=call.step, shards=shards, why=counted.why)
            self._print(f"step {call.step} skipped: {counted.why}")
            if self._skipped in LONG:
                self._warn(_nothing_trained(self._skipped, call.step))

    def part_skipped(self, step: int, why: str) -> None:
        """Note that a worker with weights of its own leaves out its part of a step."""
        self._note("skipped", step=step, shards=[], why=why)
        print(f"unisono: step {step} skipped on this worker: {why}", flush=True)  # noqa: T201

    def close(self) -> None:
        """Warn if the run ends while steps are skipped."""
        if self._skipped > 1:
            self._print(_nothing_trained(self._skipped, None))

    def _note(self, event: str, **about: Any) -> None:
        if self._membership.is_main:
            self._folder.journal(event, **about)

    def _print(self, words: str) -> None:
        if self._membership.is_main:
            print(f"unisono: {words}", flush=True)  # noqa: T201

    def _warn(self, words: str) -> None:
        if self._membership.is_main:
            warn(words)


def _nothing_trained(steps: int, last: int | None) -> str:
    until = "the run ends" if last is None else f"step {last}"
    return (
        f"{steps} steps in a row were skipped until {until}, and nothing was trained in them. If losses stay NaN or "
        f"infinite, go on from a checkpoint before them with a lower learning rate, or clip gradients"
    )


class AllSteps:
    """Reports the steps of all optimizers of this process.

    Its hook stays where it was registered: torch goes through its hooks whenever a thread updates, and fails if another
    thread adds or removes one meanwhile.
    """

    def __init__(self) -> None:
        self._reports: tuple[Callable[[Optimizer], None], ...] = ()  # another one after each change
        self._is_hooked = False
        self._lock = threading.Lock()

    def add(self, report: Callable[[Optimizer], None]) -> None:
        """Call a function before each step from now on."""
        with self._lock:
            if not self._is_hooked:
                register_optimizer_step_pre_hook(UpdateWatch(self._report))
                self._is_hooked = True
            self._reports += (report,)

    def remove(self, report: Callable[[Optimizer], None]) -> None:
        """Call a function no more."""
        with self._lock:
            self._reports = tuple(each for each in self._reports if each != report)

    @property
    def number(self) -> int:
        """The number of functions that are called."""
        return len(self._reports)

    def _report(self, optimizer: Optimizer) -> None:
        for report in self._reports:
            report(optimizer)


ALL_STEPS = AllSteps()

UPDATING = ("unisono.train.step.", "unisono.train.strategies.")
"""How names of modules begin that make the updates of ``step.run``."""


class LoneUpdates(Listener):
    """Watches the steps of all optimizers until the first step ends, so that none costs more while the run trains."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._prepared: Prepared | None = None
        self._stepped: str | None = None  # before anything was prepared
        self._has_warned = self._in_loop = False
        self._updated: set[int] = set()  # by step.run
        ALL_STEPS.add(self._steps)

    def prepared(self, prepared: Prepared, step: int) -> None:
        """Note the run's optimizers; an optimizer that stepped before has trained beforehand in the script."""
        self._prepared = prepared

    def loop_begins(self, number: int, batches: Batches, order: Order) -> None:
        """Note that the script trains by steps of the run."""
        self._in_loop = True

    def step_ends(self, step: Step, after: int) -> None:
        """Stop watching."""
        if self._in_loop:
            ALL_STEPS.remove(self._steps)
            self._in_loop = False

    def close(self) -> None:
        """Stop watching, and warn if the script has trained without the run."""
        ALL_STEPS.remove(self._steps)
        if self._prepared is None and self._stepped is not None:
            self._warn(f"this run ends without run.prepare, and {self._stepped}.step() was called by the script itself")

    def _steps(self, optimizer: Optimizer) -> None:
        if torch.compiler.is_compiling():  # of an update that the script compiles
            return
        if self._in_loop:
            self._steps_in_loop(optimizer)
            return
        is_among_others = self._membership.is_main and self._membership.workers.world_size > 1
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        if not is_among_others or all(parameter.grad is None for parameter in parameters):
            return
        name = type(optimizer).__name__
        if self._prepared is None:
            self._stepped = name
        elif any(optimizer is own for own in self._prepared.optimizers):
            self._warn(f"{name}.step() is called by the script itself")

    def _steps_in_loop(self, optimizer: Optimizer) -> None:
        callers = (str(frame.f_globals.get("__name__")) for frame, _ in walk_stack(sys._getframe(1)))
        if any(name.startswith(UPDATING) for name in callers):
            self._updated.add(id(optimizer))
        elif id(optimizer) in self._updated and self._membership.is_main:
            warn(
                f"{type(optimizer).__name__}.step() is called by the script, and step.run has made the optimizer's "
                f"update already: leave it out, or say in step.run(loss_fn, update=…) what the update is"
            )

    def _warn(self, message: str) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        warn(
            f"{message}: each of the {self._membership.workers.world_size} workers updates its own weights with its "
            f"own gradients, so that they train apart. Give model and optimizer to run.prepare, write the loop as "
            f"`for step in run.steps(dataset, epochs)`, and call step.run(loss_fn) in it, which goes backward and "
            f"updates",
        )


def _batch_norm_in(modules: Sequence[nn.Module]) -> bool:
    """Whether any layer computes statistics over the samples of a shard."""
    kinds = (torch.nn.modules.batchnorm._BatchNorm,)
    return any(isinstance(layer, kinds) for root in modules for layer in root.modules())
