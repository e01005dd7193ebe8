"""Measures curvature on the batches of steps: at a call of the script, before some updates, or instead of training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from unisono.adapt.norms import CurvatureQuestion, question_of
from unisono.checkpoint.folder import CURVATURE_REQUEST, CURVATURE_RESULT
from unisono.data.shards import Source
from unisono.errors import JobError
from unisono.jsonl import to_json
from unisono.received import read_object
from unisono.train.group.collectives import CollectiveCalls
from unisono.train.model.shared_work import sharing_in
from unisono.train.step.current import CurrentSteps, StepCall
from unisono.train.step.run_base import RunBase
from unisono.train.step.step import Call, Clip, LossFunction, Step
from unisono.train.step.step_engine import StepEngine
from unisono_lab.second_order.curvature_probe import Curvature, CurvatureProbe


class CurvatureMeter:
    """Measures curvature with all workers, and leaves the training unchanged."""

    def __init__(self, run: RunBase, collectives: CollectiveCalls, steps: CurrentSteps) -> None:
        self._trained, self._membership, self._ending = run.trained, run.membership, run.ending
        self._collectives, self._steps, self._seed = collectives, steps, run.config.job.seed
        self._request, self._monitoring = run.config.recording.curvature, run.config.execution.monitoring

    def is_due(self, step: Step) -> bool:
        """Whether curvature is measured before the update of the next call of a step."""
        return self._request is not None or self._monitoring.measures_curvature(step.number, step.calls)

    def before(self, call: StepCall) -> None:
        """Measure before the update of a call. Collective."""
        if self._request is not None:
            self._end_with_figures(call, self._request)
        question = question_of({"start": self._trained.monitors.critical_step, **self._monitoring.curvature})
        call.step.curvature |= self._measured(call, question).figures

    def _end_with_figures(self, call: StepCall, folder: Path) -> NoReturn:
        """Measure by the settings of ``unisono curvature`` in a folder, and end the script before any update."""
        settings = {**read_object(folder / CURVATURE_REQUEST), "critical": not sharing_in(call.optimizers)}
        curvature = self._measured(call, question_of(settings))
        if self._membership.is_main:
            (folder / CURVATURE_RESULT).write_bytes(to_json({"samples": call.step.size, **asdict(curvature)}))
        self._collectives.together(lambda workers: workers.barrier())
        raise SystemExit(0)

    def measure(self, loss_fn: LossFunction, settings: Mapping[str, Any], source: Source | None) -> Curvature:
        """Measure curvature on the batch of the step under way; see :meth:`Run.curvature`. Collective."""
        question = question_of(settings)
        self._ending.require_open()
        step, prepared = self._steps.under_way, self._trained.prepared
        if step is None or prepared is None or source is None:
            raise JobError(
                "run.curvature measures on the batch of a step: call it in the body of a loop over run.steps"
            )
        if self._trained.is_doubted:
            return Curvature()
        prepared.check_unchanged()
        call = StepCall(step, loss_fn, prepared.optimizers, Clip(), None, source)
        curvature = self._measured(call, question)
        step.curvature |= curvature.figures
        return curvature

    def _measured(self, call: StepCall, question: CurvatureQuestion) -> Curvature:
        prepared = self._trained.require_prepared()

        def measured(engine: StepEngine, made: Call) -> dict[str, Any]:
            return asdict(CurvatureProbe(engine, prepared, made, self._seed).measure(question))

        return Curvature(**self._steps.computer.measure(call, measured, self._collectives))
