"""The trace of a worker for people who check a run: digests of all values that could differ, and the used samples."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from unisono.data.sample_order import Order
from unisono.jsonl import open_lines
from unisono.plan.batches import Batches
from unisono.train.model.prepared import Prepared
from unisono.train.model.slices import slice_of, whole_gradient
from unisono.train.model.tensors import tensor_digest
from unisono.train.step.listeners import Counted, Listener
from unisono.train.step.step import Call, Step
from unisono.train.step.word import StepReport

DEEPEST = 8
"""The depth to which a batch is read: batches may hold objects that hold themselves."""


class Trace(Listener):
    """Appends to ``rank-N.jsonl``.

    A line of kind ``weights`` after ``prepare`` and after each step: every parameter's and buffer's digest. A line of
    kind ``call`` per call of ``step.run``: the parameters before it, what went into this worker's shards, and what
    each shard came to. A line of kind ``update`` per optimizer: the gradients and the settings it was given, and the
    parameters after it.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._place = {"step": 0, "call": 0}
        self._names: dict[tuple[int, torch.Size], str] = {}
        self._optimizers: list[Optimizer] = []
        self._handles: list[RemovableHandle] = []
        self._gradients: dict[str, str] = {}
        self._prepared: Prepared | None = None

    @classmethod
    def open(cls, folder: Path, rank: int) -> Trace:
        """A trace in ``folder``. A script's second run is appended to its first."""
        folder.mkdir(parents=True, exist_ok=True)
        return cls((folder / f"rank-{rank}.jsonl").open("a", encoding="utf-8"))

    def prepared(self, prepared: Prepared, step: int) -> None:
        """Write the weights with which the training begins."""
        self._prepared = prepared
        self.step(step, prepared.tensors())

    def step_ends(self, step: Step, after: int) -> None:
        """Write the weights after a step."""
        if self._prepared is not None:
            self.step(after, self._prepared.tensors())

    def step(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the weights after ``number`` steps, with the digest that ``run.finish`` prints for all of them."""
        self._names = {}
        for name, tensor in tensors.items():
            self._names.setdefault(_identity(slice_of(tensor)), name)
        whole = {name: tensor_digest(tensor) for name, tensor in tensors.items()}
        text = "".join(f"{name}:{digest}\n" for name, digest in whole.items())
        digests = {name: digest[:16] for name, digest in whole.items()}
        sha256 = hashlib.sha256(text.encode()).hexdigest()
        self._write({"kind": "weights", "step": number, "tensors": digests, "sha256": sha256})

    def call_worked_out(self, call: Call, shards: Sequence[int], report: StepReport) -> None:
        """Write the inputs of a call and the results of its shards, before the update."""
        self._place = {"step": call.step, "call": call.number}
        before: dict[str, str] = {}
        for optimizer in call.optimizers:
            self._listen(optimizer)
            before |= _digests(self._parameters(optimizer))
        self._write(
            {
                "kind": "call",
                **self._place,
                "before": before,
                "samples": [len(call.batch.shard(shard)) for shard in range(len(report.shards))],
                "inputs": {shard: content_digest(batch) for shard, batch in zip(shards, call.shards, strict=False)},
                "losses": [part.loss.hex() for part in report.shards],
                "shares": [part.weight.hex() for part in report.shards],
                "clip": {"clip_norm": call.clip.norm, "clip_value": call.clip.value},
            }
        )

    def close(self) -> None:
        """Stop listening, and close the file."""
        for handle in self._handles:
            handle.remove()
        self._file.close()

    def _listen(self, optimizer: Optimizer) -> None:
        """Write digests of an optimizer's gradients and of its parameters, whenever it updates."""
        if any(optimizer is known for known in self._optimizers):
            return
        number = len(self._optimizers)
        self._optimizers.append(optimizer)

        def begin(*_: Any) -> None:
            used = {
                name: parameter for name, parameter in self._parameters(optimizer).items() if parameter.grad is not None
            }
            self._gradients = _digests({name: whole_gradient(parameter) for name, parameter in used.items()})

        def end(*_: Any) -> None:
            self._write(
                {
                    "kind": "update",
                    **self._place,
                    "optimizer": number,
                    "gradients": self._gradients,
                    "options": _options(optimizer),
                    "after": _digests(self._parameters(optimizer)),
                }
            )

        self._handles += [optimizer.register_step_pre_hook(begin), optimizer.register_step_post_hook(end)]

    def _parameters(self, optimizer: Optimizer) -> dict[str, Tensor]:
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        return {
            self._names.get(_identity(tensor), f"optimizer parameter {number}"): tensor
            for number, tensor in enumerate(tensors)
        }

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def content_digest(batch: Any) -> str:
    """A short digest of a batch's contents: tensors, arrays, numbers, text, and collections and objects of them."""
    total = hashlib.sha256()
    for part in _parts(batch, DEEPEST):
        total.update(part.encode() + b"\n")
    return total.hexdigest()[:16]


def _parts(value: Any, depth: int) -> Iterable[str]:
    if isinstance(value, Tensor):
        yield tensor_digest(value if value.layout == torch.strided else value.to_dense())
    elif isinstance(value, np.ndarray):
        text = repr(value.tolist()).encode() if value.dtype.hasobject else value.tobytes()
        yield f"{value.dtype}{value.shape}{hashlib.sha256(text).hexdigest()}"
    elif value is None or isinstance(value, str | bytes | int | float | complex | np.generic):
        yield repr(value)
    elif isinstance(value, set | frozenset):
        yield from sorted("".join(_parts(item, depth - 1)) for item in value)
    else:
        yield from _nested(value, depth)


def _nested(value: Any, depth: int) -> Iterable[str]:
    # An object's repr may hold its address, which is another one in every process: only what it contains counts.
    yield type(value).__qualname__
    if depth <= 0:
        return
    if isinstance(value, list | tuple):
        for item in value:
            yield from _parts(item, depth - 1)
        return
    members = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    for key, item in members.items():
        yield str(key)
        yield from _parts(item, depth - 1)


def _identity(tensor: Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: tensor_digest(tensor)[:16] for name, tensor in tensors.items()}


def _options(optimizer: Optimizer) -> dict[str, Any]:
    groups = optimizer.param_groups
    return {
        name if len(groups) == 1 else f"{name} of parameter group {number}": _plain(value)
        for number, group in enumerate(groups)
        for name, value in group.items()
        if name != "params"
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else type(value).__qualname__


# Which samples each worker used in each step: written where somebody is going to check it.

SAMPLES = "samples"
"""In the run folder: one file per worker."""


class SampleLog(Listener):
    """Appends lines to ``samples/<worker>.jsonl``.

    ``computed`` before the reduction of a call of ``step.run``, ``committed`` after it. Each is written at once: a
    worker that is killed takes none with it.
    """

    def __init__(self, run_dir: Path, worker: str) -> None:
        path = run_dir / SAMPLES / f"{worker}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = open_lines(path)
        self._loop: tuple[int, Batches, Order] | None = None
        self._generation, self._computed = 0, set[tuple[int, int]]()

    def loop_begins(self, number: int, batches: Batches, order: Order) -> None:
        """Note that a loop over a data set begins."""
        self._loop = number, batches, order

    def call_begins(self, call: Call, shards: Sequence[int], generation: int) -> None:
        """Note that this worker is about to compute these shards of a step."""
        assert self._loop is not None, "a loop has begun"
        loop, batches, order = self._loop
        if generation != self._generation:
            self._generation, self._computed = generation, set()
        batch, place = call.batch, (call.step, call.number)
        if place in self._computed:  # again, since weights were mended; the others do it again as well
            return
        self._computed.add(place)
        cut = batches.of(batch.epoch)
        used = {shard: order.counted_at(batch.epoch, batch.shard(shard)).tolist() for shard in shards}
        line = {"computed": call.step, "call": call.number, "generation": generation, "loop": loop}
        about = {"samples": cut.samples, "per_epoch": cut.used, "epoch": batch.epoch, "cut": batch.shards}
        self._write({**line, **about, "shards": used})

    def call_counted(self, call: Call, counted: Counted) -> None:
        """Note that the step's update is done here."""
        self._write({"committed": call.step, "call": call.number, "generation": counted.generation})

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _write(self, line: dict[str, Any]) -> None:
        os.write(self._descriptor, json.dumps(line, separators=(",", ":")).encode() + b"\n")
