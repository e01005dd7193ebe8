"""How a run spreads a model over the devices of a worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from unisono.train.preparation import cut, parallelize, stage
from unisono.train.run_view import RunView

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
