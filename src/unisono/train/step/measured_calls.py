"""Calls that only measure: their losses and gradients, without an update."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from unisono.plan.tree import Node, SummationTree
from unisono.train.model.prepared import Prepared
from unisono.train.step.call import Call
from unisono.train.step.engine import StepEngine


class MeasuredCalls:
    """Computes calls as steps are, along the summation tree. All of it is collective; no weight or buffer changes.

    Args:
        engine: the engine of this generation.
        prepared: models and optimizers.
    """

    def __init__(self, engine: StepEngine, prepared: Prepared) -> None:
        self._engine, self._prepared = engine, prepared
        self.figures = engine.passes.figures
        self.begin, self.end = engine.update.watch.call_begins, engine.update.watch.measured

    @torch.no_grad()
    def mean_gradient(self, call: Call) -> tuple[float, list[Tensor]]:
        """The mean loss of a call, and its gradient for each parameter; zero where no shard used one.

        Raises:
            NonFiniteLoss: names step, shard and rank.
        """
        with torch.enable_grad():
            attempt = self._engine.attempt(call)
        self._engine.discard()
        self._engine.update.require_finite(call, attempt)
        gradients, report = attempt.gradients, attempt.report
        gradients.assign(attempt.totals, report.weight, report.used[: len(gradients.names)], writable=True)
        trained = self._prepared.trained_by(call.optimizers).values()
        found = [torch.zeros_like(one) if one.grad is None else one.grad.clone() for one in trained]
        self._prepared.clear_gradients()
        return report.loss, found

    def mean_loss(self, call: Call, elsewhere: Callable[[], AbstractContextManager[None]] = nullcontext) -> float:
        """The mean loss of a call, by forward passes alone.

        Args:
            call: the call.
            elsewhere: a function that returns a context in which the shards' losses are computed.
        """
        rows = self.figures(call, elsewhere)
        tree = SummationTree(call.batch.shards)
        parts = [loss * weight for loss, weight in rows], [weight for _, weight in rows]
        loss, weight = (
            tree.finish({Node(n, n + 1): part for n, part in enumerate(each)}, lambda one, other: one + other)
            for each in parts
        )
        return float(loss / weight) if weight else math.nan
