"""The part of a run that tells of itself, and spreads a model over the devices of a worker."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from unisono.train.assembly import Inside
from unisono.train.preparation import cut, parallelize, stage
from unisono.train.record.progress import Display, display_of, with_display
from unisono.train.step.step import Step


class RunView:
    """A run as one of its workers sees it.

    Attributes:
        job: the job to train.
        device: the device on which this worker computes.
        inside: the objects of the run; scripts leave them alone.
    """

    def __init__(self, inside: Inside) -> None:
        self.job = inside.job
        self.device = inside.device
        self.inside = inside

    # -- who and where ---------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's number among the workers, 0 … world_size-1; -1 until it has joined the others."""
        return -1 if self.inside.membership.joins else self.inside.membership.workers.rank

    @property
    def world_size(self) -> int:
        """The number of workers; 0 until this one has joined them."""
        return 0 if self.inside.membership.joins else self.inside.membership.workers.world_size

    @property
    def is_main(self) -> bool:
        """Whether this is the worker that prints and writes files (rank 0; of several devices, the first)."""
        return self.inside.membership.is_main

    @property
    def generation(self) -> int:
        """The number of the generation, from 1; 0 until this worker has joined."""
        return self.inside.membership.workers.generation.number

    @property
    def dir(self) -> Path:
        """The run folder."""
        return self.inside.folder.path

    @property
    def metrics(self) -> Mapping[str, Any]:
        """The newest line of ``metrics.jsonl``."""
        return self.inside.metrics.latest

    @property
    def strategy(self) -> str:
        """The strategy with which the workers synchronise now, as text."""
        return str(self.inside.steps.strategy)

    def print(self, *values: Any, **options: Any) -> None:
        """Print on the main worker alone."""
        if self.is_main:
            print(*values, **{"flush": True, **options})  # noqa: T201  this is the verb for it

    def progress(self, steps: Iterable[Step]) -> Generator[Step, None, None]:
        """Yield the steps, with a bar on the main worker: ``for step in run.progress(run.steps(dataset, epochs=5))``.

        It shows epoch, step, loss, samples per second, workers and the time left, in a terminal, a notebook, or the
        terminal of ``unisono run``; nothing is written to logs.

        Args:
            steps: the steps that :meth:`steps` has returned.
        """
        display = display_of(lambda: self.is_main, Display)
        return with_display(steps, display, self.inside.loop.place_of, lambda: self.world_size)


N = TypeVar("N", bound=nn.Module)
L = TypeVar("L", bound=nn.Module | Sequence[nn.Module])


class RunOnDevices(RunView):
    """A run whose workers may have several devices each."""

    def fully_shard(self, module: L, **options: Any) -> L:
        """Cut a module's parameters into slices, one for each device of a worker, by torch's ``fully_shard`` (FSDP2).

        Call it for each layer, from the inside out, and for the model last; then make the optimizer, and prepare both.
        On a worker of one device the module stays whole, so the same script runs there.

        Args:
            module: a module, or a list of modules that are gathered together, as those with tied weights have to be.
                On the meta device it gets memory here, and values by its layers' ``reset_parameters``.
            options: further arguments of torch's ``fully_shard`` that decide no bit: ``reshard_after_forward``, and
                ``ignored_params`` for frozen ones.

        Returns:
            the module, or the list.

        Raises:
            JobError: the script has made torch's default process group.
            ModelError: a layer cannot set its first values, a parameter has no dimension to cut or belongs to another
                call as well, or an option would decide bits.
        """
        modules: Sequence[Any] = module if isinstance(module, list | tuple) else [module]
        cut(self.inside, modules, options)
        return module

    def parallelize(self, model: N, plan: Mapping[str, Any]) -> N:
        """Have the devices of a worker compute layers together, by torch's ``parallelize_module``.

        Call it before the optimizer is made. The number of devices decides bits, and belongs to the job; the number of
        workers does not. On a worker of one device the model stays whole.

        Args:
            model: a module.
            plan: torch's styles of tensor parallelism, such as ``ColwiseParallel()``, by the names of modules.

        Returns:
            the model.

        Raises:
            JobError: workers come and go, or the model is spread over the devices in another way already.
            ModelError: the plan names no module that is there.
        """
        parallelize(self.inside, model, plan)
        return model

    def pipeline(self, model: N, cuts: Sequence[str], *, schedule: str = "1f1b") -> N:
        """Cut a model into stages, which the devices of a worker hold, by torch's ``pipelining``.

        Call it before the optimizer is made. Shards are the micro-batches. On a worker of one device the model stays
        whole, so the same script runs there, with the same result.

        Args:
            model: a module whose submodules are called one after the other, in the order in which they are registered.
            cuts: the names of the submodules before which a stage begins, such as ``["layers.2", "layers.4"]``.
            schedule: the order in which devices compute stages and shards: ``"gpipe"``, ``"1f1b"``,
                ``"interleaved-1f1b"``, ``"looped-bfs"`` or ``"interleaved-zero-bubble"``. It decides no bit.

        Returns:
            the model. What other devices hold of it is on the meta device here.

        Raises:
            JobError: an unknown schedule, or more devices than stages.
            ModelError: there is no such submodule, or stages share parameters; says what to do.
        """
        stage(self.inside, model, cuts, schedule)
        return model
