"""The iterables that replace loaders in Lightning's loops: steps, or batches that workers have evaluated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice, takewhile
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_unflatten
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from unisono.errors import ModelError, UnisonoError
from unisono.integrations.kept import BatchTrace, evaluate
from unisono.integrations.kit import Cut, like, refused
from unisono.integrations.lightning.framework import extract_batch_size, is_overridden
from unisono.integrations.lightning.logged import LogKind, log_result, recording
from unisono.integrations.lightning.metrics import Metrics
from unisono.reachable import is_script_class
from unisono.train.run import Run


@dataclass(eq=False)
class GlobalBatch:
    """Stands for a batch in the hooks around a step: each worker has a part of it.

    A hook that looks into it has it loaded as a whole, on this worker alone.

    Attributes:
        extent: a tensor of shape (samples, 0), by which Lightning finds the number of samples.
    """

    extent: Tensor
    _load = _whole = None  # no fields, by which Lightning would look into it

    @classmethod
    def of(cls, samples: int, load: Callable[[], Any] | None = None) -> GlobalBatch:
        """A batch of so many samples, and what loads them."""
        batch = cls(torch.empty(samples, 0))
        vars(batch).update(_load=load, _whole=None)
        return batch

    def whole(self) -> Any:
        """The batch itself.

        Raises:
            ModelError: there is none that could be loaded.
        """
        if self._load is None:
            raise ModelError(refused("lightning.distributed-batch"))
        if self._whole is None:
            batch = self._load()
            self._whole = batch, _versions(batch)
        return self._whole[0]

    def require_unchanged(self) -> None:
        """Refuse a batch that a hook has changed before the step: shards are loaded by themselves.

        Raises:
            ModelError: it is one.
        """
        if self._whole is not None and not _are_alike(self._whole[1], _versions(self._whole[0])):
            raise ModelError(refused("lightning.changed-batch"))

    def __deepcopy__(self, memo: Any) -> GlobalBatch:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copies and compares objects
            raise AttributeError(name)
        return getattr(self.whole(), name)

    def __getitem__(self, key: Any) -> Any:
        return self.whole()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        raise ModelError(refused("lightning.changed-batch"))

    def __contains__(self, key: Any) -> bool:
        return key in self.whole()

    def __len__(self) -> int:
        return len(self.whole())

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute with the batch where it is one tensor."""
        opened = tree_map(lambda leaf: leaf.whole() if isinstance(leaf, GlobalBatch) else leaf, (args, kwargs or {}))
        return function(*opened[0], **opened[1])


def _versions(batch: Any) -> list[tuple[Tensor, int]]:
    return [(leaf, leaf._version) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def _are_alike(before: list[tuple[Tensor, int]], now: list[tuple[Tensor, int]]) -> bool:
    return [(id(one), version) for one, version in before] == [(id(one), version) for one, version in now]


def let_pass(module: Any) -> Callable[[], None]:
    """Have batches that are distributed pass a module's hook for batches before they move to the device.

    The returned function lets go of it again.
    """
    usual = module._on_before_batch_transfer

    def pass_on(batch: Any, dataloader_idx: int = 0) -> Any:
        return batch if isinstance(batch, GlobalBatch) else usual(batch, dataloader_idx=dataloader_idx)

    vars(module)["_on_before_batch_transfer"] = pass_on
    return lambda: vars(module).pop("_on_before_batch_transfer", None)


class TrainingLoader:
    """Gives a batch for each step of the run's loop, which goes on from epoch to epoch. Else it is like the loader.

    Attributes:
        has_ended: whether the loader has no length, and the newest step was the last one of an epoch.
    """

    def __init__(self, loader: Any, next_step: Callable[[TrainingLoader], GlobalBatch]) -> None:
        self.loader, self.next_step, self.has_ended = loader, next_step, False

    def __len__(self) -> int:
        """The number of batches of an epoch."""
        return len(self.loader)

    def __iter__(self) -> TrainingLoader:
        self.has_ended = False
        return self

    def __next__(self) -> GlobalBatch:
        if self.has_ended:
            raise StopIteration
        return self.next_step(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


def limited(loader: Any, batches: int) -> Any:
    """A loader whose epochs end after so many batches."""
    if batches >= len(loader):
        return loader
    if type(loader.batch_sampler) is not BatchSampler:
        return like(loader, batch_sampler=Cut(loader.batch_sampler, stop=batches))
    batched = loader.batch_sampler  # a script may have made it, and then the loader itself knows no batch_size
    sampler = Cut(batched.sampler, stop=batches * batched.batch_size)
    return like(loader, batch_size=batched.batch_size, sampler=sampler, drop_last=batched.drop_last)


class EvaluatedBatch(GlobalBatch):
    """Stands for a batch that one of the workers has evaluated."""

    row: dict[str, Any]

    @classmethod
    def made(cls, row: dict[str, Any]) -> EvaluatedBatch:
        """The batch of which this came."""
        batch = cls(torch.empty(row["samples"], 0))
        vars(batch)["row"] = row
        return batch


class EvaluationLoader:
    """A loader as Lightning's evaluation loops see it."""

    def __init__(self, loader: Any, evaluating: Evaluating) -> None:
        self.loader, self._evaluating = loader, evaluating

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return self._evaluating.batches(self, self.loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


def own_loaders(combined: Any) -> Any:
    """The script's loaders, in its own structure, of a ``CombinedLoader`` that has others in their places.

    A script that asks the trainer for its loaders gets these, and may iterate over them as it likes.
    """
    return tree_unflatten([place.loader for place in combined.flattened], combined._spec)


def _sees_batches(trainer: Any) -> bool:
    """Whether a hook around evaluated batches is the script's own: it gets the batch and what came of it."""
    kind = "test" if trainer.testing else "validation"
    seeing = [trainer.lightning_module]
    for callback in trainer.callbacks:
        own: type = type(callback)
        seeing += [callback] if is_script_class(own) else []
    return any(is_overridden(f"on_{kind}_batch_{time}", other) for time in ("start", "end") for other in seeing)


class Evaluating:
    """Shares the batches of an evaluation out among the workers of a run.

    Lightning's loop goes through all of them on every worker, and in the place of its step it hears what came of the
    batch: what was logged, and what metrics have added up. So results are those of one worker.

    Attributes:
        is_whole: whether each worker evaluates all batches, since the module keeps of them what cannot be distributed.
    """

    def __init__(self, run: Run, strategy: Any) -> None:
        self.is_whole = self.is_under_way = self._is_broken = False
        self._run, self._strategy = run, strategy

    def batches(self, place: EvaluationLoader, loader: Any) -> Iterator[Any]:
        """The batches of a loader: evaluated ones, or the loader's own where each worker evaluates them all."""
        trainer = self._strategy.lightning_module.trainer
        if not (trainer.evaluating or trainer.sanity_checking):  # the script reads it, outside of Lightning's loops
            yield from loader
            return
        combined = trainer._evaluation_loop._combined_loader
        combined._iterables = own_loaders(combined)
        rows = self._rows(place, loader) if self._is_shared(loader) else None
        if rows is None:
            yield from loader
            return
        for number, row in enumerate(rows):
            if row.get("has_raised"):  # as it does in Lightning's loop, too, on each worker
                yield from islice(loader, number, None)
                return
            yield EvaluatedBatch.made(row)

    def receive(self, batch: EvaluatedBatch) -> None:
        """Add the results of a batch to Lightning's results and the module's metrics."""
        trainer, module = self._strategy.lightning_module.trainer, self._strategy.lightning_module
        Metrics(module).add(batch.row["metrics"])
        for kind, value, samples in batch.row["logs"]:
            logged = LogKind(**kind)
            log_result(trainer, logged, module.get_submodule(logged.attribute) if logged.attribute else value, samples)

    def _is_shared(self, loader: Any) -> bool:
        inside, trainer = self._run.inside, self._strategy.lightning_module.trainer
        can = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        can = can and trainer._evaluation_loop._is_sequential  # else a batch has parts of several loaders
        is_ready = not inside.ending.is_closed and inside.trained.prepared is not None
        return can and is_ready and not self.is_whole and not trainer.sanity_checking and not _sees_batches(trainer)

    def _rows(self, place: EvaluationLoader, loader: Any) -> list[dict[str, Any]] | None:
        loop = self._strategy.lightning_module.trainer._evaluation_loop
        number = next(index for index, other in enumerate(loop._combined_loader.flattened) if other is place)
        act = partial(self._row, loop, number)
        most = loop.max_batches[number]
        self._strategy.refresh()
        self.is_under_way, self._is_broken = True, False
        try:
            rows = evaluate(
                self._run, lambda evaluation: evaluation.values(act, None if most == inf else int(most)), loader
            )
        finally:
            self.is_under_way = False
        right = takewhile(lambda row: not row.get("has_raised"), rows)
        self.is_whole = not all(row["is_shared"] for row in right)
        return None if self.is_whole else rows

    def _row(self, loop: Any, loader: int, number: int, batch: Any) -> dict[str, Any]:
        """Evaluate a batch, and return its results; the module is as before afterwards."""
        if self._is_broken:  # each worker will evaluate all batches
            return {"is_shared": False}
        strategy, module = self._strategy, self._strategy.lightning_module
        hook = "test_step" if module.trainer.testing else "validation_step"
        batch = strategy.shard_to_device(batch, loader)
        is_one_of_several = loop._is_sequential and loop.num_dataloaders > 1
        values = loop._build_kwargs(batch, number, loader if is_one_of_several else None)
        step = getattr(super(type(strategy), strategy), hook)
        fx, module._current_fx_name = module._current_fx_name, hook
        metrics = Metrics(module)
        trace = BatchTrace(self._run, [module], metrics.by_name.values())
        try:
            with metrics.of_batch() as made, recording(module.trainer, loop) as recorded:
                step(*loop._build_step_args_from_hook_kwargs(values, hook))
        except UnisonoError:
            raise
        except Exception:  # noqa: BLE001 (each worker evaluates this batch again, and raises it)
            trace.is_clean()  # puts back what has changed
            self._is_broken = True
            return {"is_shared": False, "has_raised": True}
        finally:
            module._current_fx_name = fx
        samples = extract_batch_size(batch)
        logs = [[asdict(call.kind), call.value, call.batch_size or samples] for call in recorded.calls]
        self._is_broken = not (trace.is_clean() and made.is_shared)
        return {"samples": samples, "logs": logs, "metrics": made.states, "is_shared": not self._is_broken}
