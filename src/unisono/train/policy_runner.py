"""Asks policies between two steps, and carries out their decisions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.adapt.view import LOCAL, Decision, Policy, View
from unisono.errors import PolicyError
from unisono.plan.topology import Links
from unisono.train.group.collectives import CollectiveCalls
from unisono.train.group.workers import Workers
from unisono.train.record.metrics_line import MetricsLine
from unisono.train.state.policy_state import Hook, observed
from unisono.train.step.run_base import RunBase
from unisono.train.step.step import Step


class PolicyRunner:
    """Asks a run's policies at its step boundaries."""

    def __init__(self, run: RunBase, metrics: MetricsLine, collectives: CollectiveCalls) -> None:
        self._job, self._trained, self._policy_state = run.config.job, run.trained, run.trained.policy_state
        self._membership, self._checkpoints, self._folder = run.membership, run.checkpoints, run.folder
        self._metrics, self._collectives, self._listeners = metrics, collectives, run.listeners
        self._monitoring = run.config.execution.monitoring
        self._newest: list[dict[str, Any]] = []
        self._has_written = False

    @property
    def rates(self) -> dict[str, float]:
        """The figures of learning rates in the line of a step; empty where no policy may change them."""
        if self._policy_state.is_empty:
            return {}
        return {"learning_rate": self._learning_rate, "lr_factor": self._policy_state.rate}

    def begin(self) -> None:
        """Note that a loop begins. If it is the first one, training begins."""
        if not self._policy_state.has_begun:
            self._policy_state.has_begun = True
            self._ask(("before_train",), 0)

    def step_ends(self, step: Step) -> None:
        """Ask policies after a step. Their decisions take effect at once, between two steps."""
        self._ask(("after_step", "after_epoch") if step.is_last_in_epoch else ("after_step",), step.epoch)

    def links_are_due(self, steps: int) -> bool:
        """Whether to measure the connections between workers after ``steps`` committed steps."""
        is_due, self._policy_state.measures_links = self._policy_state.measures_links, False
        return is_due or self._monitoring.measures_links(steps)

    def measure_links(self) -> None:
        """Measure latency and bandwidth between each pair of workers. Collective."""
        measured = self._collectives.together(_measured_links)
        if measured is not None:
            self._trained.monitors.links = Links.from_json(measured)
            self._listeners.links_measured(measured)

    def end(self) -> None:
        """Ask policies after training. Their decisions have no effect."""
        self._write_missing()
        if not self._policy_state.is_empty:
            self._policy_state.ask("after_train", self._view(self._trained.progress.position.epoch))

    @property
    def _learning_rate(self) -> float:
        """The rate of the first parameter group, multiplied by the factor of policies."""
        groups = [
            group for optimizer in self._trained.require_prepared().optimizers for group in optimizer.param_groups
        ]
        rates = [group["lr"] for group in groups if "lr" in group]
        return float(rates[0]) * self._policy_state.rate if rates else 0.0

    def _view(self, epoch: int) -> View:
        position = self._trained.progress.position
        monitors = self._trained.monitors
        setting = monitors.setting
        return View(
            step=position.step,
            epoch=epoch,
            samples=position.samples,
            batch_size=self._policy_state.batch_size,
            base_batch_size=self._job.require_batch_size("policies"),
            shards=self._policy_state.shards,
            base_shards=self._job.shards,
            world_size=setting.world_size or self._membership.workers.world_size,
            learning_rate=self._learning_rate,
            metrics={name: value for name, value in self._metrics.latest.items() if name not in LOCAL},
            noise=monitors.noise.noise,
            norms=monitors.norms_of(position.step - 1),
            workers=monitors.timings,
            steady=monitors.steady,
            seconds=monitors.seconds,
            generation=setting.generation,
            departures=setting.departures,
            topology=setting.topology,
            strategy=str(self._policy_state.strategy),
            links=monitors.links,
            observed=dict(self._policy_state.observed),
        )

    def _ask(self, hooks: Sequence[Hook], epoch: int) -> None:
        if self._policy_state.is_empty:
            return
        self._write_missing()
        view = self._view(epoch)
        if due := self._policy_state.observers(view.step):
            self._observe(due, view)
            view = self._view(epoch)
        decisions = [decision for hook in hooks for decision in self._policy_state.ask(hook, view)]
        self._policy_state.take(decisions, view, self._trained.progress.loop)
        self._has_written = self._membership.workers.is_main
        for decision in decisions:
            self._carry_out(decision, view)
            self._newest.append(_journal_line(decision, view))
            if self._has_written:
                self._folder.journal("decided", **self._newest[-1])

    def _write_missing(self) -> None:
        """Write decisions that all workers made, if the main worker was lost before it wrote them."""
        if self._newest and not self._has_written and self._membership.workers.is_main:
            for line in self._newest:
                if not self._folder.has_event("decided", line):
                    self._folder.journal("decided", **line)
        self._newest = []

    def _observe(self, policies: Sequence[Policy], view: View) -> None:
        """Have the main worker observe the outside world, and tell all workers what it sees. Collective."""

        def look(workers: Workers) -> dict[str, Any]:
            report: dict[str, Any] = {"error": ""}
            if workers.is_main:
                try:
                    report |= {"figures": {policy.name: dict(observed(policy, view)) for policy in policies}}
                except PolicyError as error:
                    report["error"] = str(error)
            return dict(workers.broadcast(report))

        report = self._collectives.together(look)
        if report["error"]:
            raise PolicyError(report["error"])
        news = {
            name: figures
            for name, figures in report["figures"].items()
            if figures != self._policy_state.observed.get(name)
        }
        self._policy_state.observed |= news
        if self._membership.workers.is_main:
            for name, figures in news.items():
                self._folder.journal("observed", step=view.step, policy=name, figures=figures)

    def _carry_out(self, decision: Decision, view: View) -> None:
        reading = self._trained.progress.reading
        if (  # the number of samples of a stream is not known
            decision.verb == "set_batch_size"
            and reading is not None
            and 0 < reading.samples < self._policy_state.batch_size
        ):
            raise PolicyError(
                f"the policy {decision.policy} wants batches of {decision.value} samples, and the data set has "
                f"{reading.samples}: give it a limit"
            )
        match decision.verb:
            case "checkpoint":
                self._checkpoints.requested = True
            case "resize" if self._membership.is_elastic:
                self._membership.resize(int(decision.value or 1))
            case "replace" if self._membership.is_elastic:
                self._membership.replace(view.generation, int(decision.value or 0))
            case "set_topology":
                self._membership.workers.transport.use_topology(str(decision.value))


def _journal_line(decision: Decision, view: View) -> dict[str, Any]:
    entries = {"step": view.step, "policy": decision.policy, "verb": decision.verb, "value": decision.value}
    shards = {} if decision.shards is None else {"shards": decision.shards}
    return {**entries, **shards, "why": dict(decision.why)}


def _measured_links(workers: Workers) -> dict[str, Any] | None:
    links = workers.transport.measure_links()
    workers.barrier()  # where nothing was measured, the workers have not met yet
    return None if links is None else links.figures()
