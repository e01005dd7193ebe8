"""Validation and tests: each worker evaluates some of the batches, and Lightning's loops hear of all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from unisono.integrations.lightning.framework import part
from unisono.integrations.lightning.loader import GlobalBatch
from unisono.integrations.lightning.logged import LogKind, heard, tell
from unisono.integrations.lightning.metrics import Metrics
from unisono.train.run import Run

_extract_batch_size = part("utilities.data").extract_batch_size


class EvaluatedBatch(GlobalBatch):
    """Stands for a batch that one of the workers has evaluated.

    Attributes:
        row: what came of it.
    """

    row: dict[str, Any]

    @classmethod
    def made(cls, row: dict[str, Any]) -> EvaluatedBatch:
        """The batch of which this came."""
        batch = cls(torch.empty(row["samples"], 0))
        vars(batch)["row"] = row
        return batch


class EvaluationLoader:
    """A loader as Lightning's evaluation loops see it.

    Args:
        loader: the script's loader.
        evaluating: what distributes the batches.
    """

    def __init__(self, loader: Any, evaluating: Evaluating) -> None:
        self._loader, self._evaluating = loader, evaluating

    def __len__(self) -> int:
        """The number of batches."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self._evaluating.batches(self, self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)


class Evaluating:
    """Shares the batches of an evaluation out among the workers of a run.

    Lightning's loop goes through all of them on every worker, and in the place of its step it hears what came of the
    batch: what was logged, and what metrics have added up. So results are those of one worker.

    Args:
        run: the run.
        strategy: the strategy.

    Attributes:
        is_whole: whether each worker evaluates all batches, since the module keeps of them what cannot be distributed.
        is_under_way: whether batches are being evaluated.
    """

    def __init__(self, run: Run, strategy: Any) -> None:
        self.is_whole = self.is_under_way = False
        self._run, self._strategy = run, strategy

    def batches(self, place: EvaluationLoader, loader: Any) -> Iterator[Any]:
        """The batches of a loader: evaluated ones, or the loader's own where each worker evaluates them all."""
        rows = self._rows(place, loader) if self._is_shared(loader) else None
        if rows is None:
            yield from loader
            return
        for row in rows:
            yield EvaluatedBatch.made(row)

    def hear(self, batch: EvaluatedBatch) -> None:
        """Lightning's results and the module's metrics hear what came of a batch."""
        trainer, module = self._strategy.lightning_module.trainer, self._strategy.lightning_module
        Metrics(module).add(batch.row["metrics"])
        for kind, value, samples in batch.row["logs"]:
            said = LogKind(**kind)
            tell(trainer, said, module.get_submodule(said.attribute) if said.attribute else value, samples)

    def _is_shared(self, loader: Any) -> bool:
        inside, trainer = self._run.inside, self._strategy.lightning_module.trainer
        can = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        can = can and trainer._evaluation_loop._is_sequential  # else a batch has parts of several loaders
        is_ready = not inside.ending.is_closed and inside.trained.prepared is not None
        return can and is_ready and not self.is_whole and not trainer.sanity_checking

    def _rows(self, place: EvaluationLoader, loader: Any) -> list[dict[str, Any]] | None:
        loop, inside = self._strategy.lightning_module.trainer._evaluation_loop, self._run.inside
        number = next(index for index, one in enumerate(loop._combined_loader.flattened) if one is place)
        act = partial(self._row, loop, number)
        most = loop.max_batches[number]
        inside.synchronisation.before_call()
        self.is_under_way = True
        try:
            rows = inside.evaluator.carry_out(
                lambda one: one.values(act, None if most == float("inf") else int(most)), loader, None, None
            )
        finally:
            self.is_under_way = False
        self.is_whole = not all(row["is_shared"] for row in rows)
        return None if self.is_whole else rows

    def _row(self, loop: Any, loader: int, number: int, batch: Any) -> dict[str, Any]:
        """What comes of a batch; the module is as it was afterwards."""
        strategy, module = self._strategy, self._strategy.lightning_module
        hook = "test_step" if module.trainer.testing else "validation_step"
        batch = strategy.shard_to_device(batch, loader)
        is_one_of_several = loop._is_sequential and loop.num_dataloaders > 1
        values = loop._build_kwargs(batch, number, loader if is_one_of_several else None)
        step = getattr(super(type(strategy), strategy), hook)
        fx, module._current_fx_name = module._current_fx_name, hook
        kept, metrics = _Kept(module), Metrics(module)
        with metrics.of_batch() as made, heard(module.trainer, loop, of_shards=False) as ears:
            step(*loop._build_step_args_from_hook_kwargs(values, hook))
        module._current_fx_name = fx
        samples = _extract_batch_size(batch)
        logs = [[asdict(call.kind), call.value, call.batch_size or samples] for call in ears.calls]
        is_shared = kept.is_unchanged() and made.is_shared
        return {"samples": samples, "logs": logs, "metrics": made.states, "is_shared": is_shared}


class _Kept:
    """The lists and dicts in a module's attributes: what a step adds to them stays on one worker."""

    def __init__(self, module: Any) -> None:
        named = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        self._before = [(one, type(one)(one)) for one in named.values() if type(one) in (list, dict)]

    def is_unchanged(self) -> bool:
        """Whether nothing was added; else it is taken away again."""
        changed = [(one, before) for one, before in self._before if len(one) != len(before)]
        for one, before in changed:
            one.clear()
            one.extend(before) if isinstance(one, list) else one.update(before)
        return not changed
