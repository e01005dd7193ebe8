"""The preparation of training: every worker gets the same weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from warnings import catch_warnings, filterwarnings

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils._pytree import tree_map_only

from unisono.errors import JobError, ModelError
from unisono.host.tracebacks import warn
from unisono.train.assembly import Inside
from unisono.train.group.workers import Devices
from unisono.train.model.prepared import Prepared, require_held
from unisono.train.model.shared_work import sharing_in
from unisono.train.model.slices import is_sliced, materialise, require_options, slice_modules
from unisono.train.model.stages import StagePlaces, Stages
from unisono.train.model.staging import Staging, move, staging_of
from unisono.train.model.ties import Ties, take
from unisono.train.step.placements import placement_of


def cut(inside: Inside, modules: Sequence[nn.Module], options: Mapping[str, Any]) -> None:
    """Have each device of this worker keep its slices of modules; a worker of one device keeps all of them.

    Args:
        inside: the objects of the run.
        modules: the modules, which are gathered together.
        options: further arguments of torch's ``fully_shard``.

    Raises:
        ModelError: the modules cannot be cut, an option would decide bits, or workers come and go and this torch is too
            old for that.
    """
    membership = inside.membership
    devices = membership.workers.devices
    if not modules or not all(isinstance(module, nn.Module) for module in modules):
        kinds = ", ".join(type(module).__name__ for module in modules) or "an empty list"
        raise ModelError(
            f"run.fully_shard takes a module, or a list of modules that are gathered together, not {kinds}"
        )
    require_options(options)
    _require_one_way(devices, "run.fully_shard")
    take(modules)
    materialise(modules, inside.device)
    if devices.count > 1:
        from unisono.train.step.sliced_gradients import Gathering  # loads FSDP, which takes seconds

        mesh = devices.mesh
        mesh.gathering = mesh.gathering or Gathering(lambda: membership.workers)
        slice_modules(modules, mesh.mesh, mesh.gathering, **options)
        if membership.is_elastic and not hasattr(modules[0], "reset_iter_state"):
            raise ModelError(
                f"torch {torch.__version__} cannot break a pass through a model in slices off, as the loss of a worker "
                f"does: take torch 2.13, or workers that stay the same (-n N, without a range and --max-restarts)"
            )
    take(modules)


def _require_module(model: Any, call: str) -> None:
    """Refuse to spread what is no module over devices."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"{call} takes a module, not {type(model).__name__}")


def _require_one_way(devices: Devices, call: str) -> None:
    """Refuse a second way to spread a model over devices."""
    if devices.count > 1 and (other := devices.mesh.call) not in ("", call):
        raise JobError(
            f"{call} and {other} in one script: a worker's devices hold slices, stages or parts of layers. Use one of "
            f"these"
        )


def parallelize(inside: Inside, model: nn.Module, plan: Mapping[str, Any]) -> None:
    """Have the devices of this worker compute layers together; a worker of one device keeps all of them.

    Args:
        inside: the objects of the run.
        model: the model.
        plan: torch's styles of tensor parallelism, by the names of modules.

    Raises:
        JobError: workers come and go, or the model is spread in another way already.
        ModelError: the plan names no module of the model.
    """
    _require_module(model, "run.parallelize")
    devices = inside.membership.workers.devices
    inside.first_weights.note("devices of run.parallelize", devices.count)
    ties = Ties([model])
    ties.require_same_parts(plan)
    materialise([model], inside.device)
    if devices.count == 1:
        return
    _require_one_way(devices, "run.parallelize")
    if inside.membership.is_elastic:
        raise JobError(
            "run.parallelize: the devices of a worker wait for each other inside of layers, where the loss of another "
            "worker cannot wake them: start workers that stay the same (-n N, without a range and --max-restarts), or "
            "cut the model into slices or stages"
        )
    if any(map(is_sliced, model.parameters())):
        raise JobError("run.parallelize: the model is spread over devices already: run.parallelize or run.fully_shard")
    from torch.distributed.tensor.parallel import parallelize_module  # takes seconds to load

    with catch_warnings():
        filterwarnings("ignore", message="Parallelize plan key")  # an error below says so if no key fits
        parallelize_module(model, devices.mesh.mesh, dict(plan))
    ties.restore()
    if not any(map(is_sliced, model.parameters())):
        raise ModelError(
            f"run.parallelize: no parameter lies in parts by the plan of {', '.join(plan) or 'nothing'}: its keys are "
            f"names of model.named_modules(), such as 'layers.*.up', and its values styles such as ColwiseParallel()"
        )
    devices.mesh.call = "run.parallelize"


def stage(inside: Inside, model: nn.Module, cuts: Sequence[str], schedule: str) -> None:
    """Have each device of this worker keep its stages of a model; a worker of one device keeps all of it.

    Args:
        inside: the objects of the run.
        model: the model.
        cuts: the names of the modules before which a stage begins.
        schedule: the name of the schedule.
    """
    _require_module(model, "run.pipeline")
    devices = inside.membership.workers.devices
    if staging_of([model]) is not None:
        raise ModelError("run.pipeline: this model lies in stages already. Name all cuts in one call")
    _require_one_way(devices, "run.pipeline")
    stages, special = Stages.of(model, cuts), inside.config.settings.special
    places = StagePlaces.of(special.stage_schedule or schedule, stages.count, devices.count, devices.rank)
    if devices.count == 1:
        materialise([model], inside.device)
        return
    from torch.distributed.pipelining import PipelineStage  # takes seconds to load

    if not hasattr(PipelineStage, "_warmup_forward_vote"):
        raise JobError(f"run.pipeline: torch {torch.__version__} has other stages: take torch 2.13 for several devices")
    staging = Staging(model, stages, places, devices.mesh.verbs.broadcast, inside.device)
    if special.study and inside.membership.workers.rank == 0:
        staging.times = inside.folder.path / f"stages-{devices.rank}.jsonl"
    devices.mesh.call = "run.pipeline"


def prepare(inside: Inside, model: Any, optimizer: Any, state: Mapping[str, Any] | None) -> None:
    """Take inventory, compare it with the other workers, and share the weights. Collective.

    Args:
        inside: the objects of the run.
        model: a module, or a list of them; moved to the run's device.
        optimizer: an optimizer, or a list of them.
        state: further tensors that loss functions change, by name; moved there as well.

    Raises:
        ModelError: nothing to train, or something that is no module, optimizer or state.
        JobMismatch: the workers hold different models; names the first difference.
        CheckpointError: the run folder's checkpoint holds another model.
    """
    modules: Sequence[Any] = model if isinstance(model, list | tuple) else [model]
    for module in modules:
        if isinstance(module, nn.Module):
            move(module, inside.device)
    optimizers: Sequence[Any] = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    require_whole_layers(optimizers, inside.membership.workers.devices)
    prepared, trained = Prepared.of(model, optimizers, state), inside.trained
    for prepared_optimizer in prepared.optimizers:
        _move_state(prepared_optimizer)
    for buffer in prepared.buffers if state else ():
        buffer.move(inside.device)
    if inside.job.deterministic:
        _refuse_unset_memory(prepared.optimizers)
    if inside.job.precision == "fp16" and (sharing := sharing_in(prepared.optimizers)):
        raise ModelError(
            f"precision='fp16': {type(sharing[0]).__name__} goes by the sizes of gradients, which the loss scale "
            "changes before they are seen: use 'bf16', which needs none"
        )
    placement = placement_of(prepared, inside.membership.workers)
    placement.require(state)
    require_held(prepared.modules, prepared.optimizers)
    is_in_loop = inside.steps.under_way is not None
    if trained.prepared is not None and is_in_loop and (inside.membership.is_elastic or inside.checkpoints.in_use):
        _warn_of_change(trained.prepared, prepared)
    inside.synchronisation.before_call()
    inside.collectives.agree("model", prepared.layout() | inside.exact.described_parts())
    is_first, trained.prepared = trained.prepared is None, prepared
    inside.collectives.change(partial(inside.first_weights.act, prepared, placement.take, resumes=is_first))
    inside.collectives.together(inside.steps.make_together)
    inside.listeners.prepared(prepared, trained.progress.position.step)


def _move_state(optimizer: Optimizer) -> None:
    """Move the state that an optimizer already has to the devices of its parameters.

    Counters of steps stay on the CPU, where torch reads them, unless its kernels do.
    """
    for group in optimizer.param_groups:
        stays = () if group.get("capturable") or group.get("fused") else ("step",)
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if name not in stays and not parameter.is_meta:
                    state[name] = tree_map_only(Tensor, lambda tensor: tensor.to(parameter.device), value)  # noqa: B023


def _warn_of_change(before: Prepared, after: Prepared) -> None:
    """Warn that a loop's body has other parameters trained from now on."""
    kinds = [[type(optimizer) for optimizer in prepared.optimizers] for prepared in (before, after)]
    changed = list(dict.fromkeys([*after.parameters, *before.parameters]))
    changed = [name for name in changed if not (name in before.parameters and name in after.parameters)]
    if changed or kinds[0] != kinds[1]:
        change = f"{changed[0]} and {len(changed) - 1} more" if changed[1:] else (*changed, "another optimizer")[0]
        warn(
            f"run.prepare in a loop's body changes what is trained ({change}): a worker that joins or resumes in "
            f"the middle of this loop has not run the body of the steps before, and ends in an error. Write one loop "
            f"for each phase: run.steps to the end of the first one, then the change and run.prepare, then run.steps "
            f"for the next one",
        )


def require_whole_layers(optimizers: Sequence[Any], devices: Devices) -> None:
    """Refuse statistics of layers that are spread over devices.

    Raises:
        ModelError: an optimizer has some, and workers have several devices.
    """
    if devices.count > 1 and (sharing := sharing_in(optimizers)):
        raise ModelError(
            f"{type(sharing[0]).__name__} needs whole layers, and each worker has {devices.count} devices, which hold "
            f"parts of them: use one device per worker, or another optimizer"
        )


def _refuse_unset_memory(optimizers: Sequence[Optimizer]) -> None:
    """Refuse the one optimizer of torch whose result depends on what happened to be in memory.

    The fused SGD on the CPU reads its momentum before setting it, for 16-bit parameters whose size is no multiple of
    the vector width (seen with torch 2.13).

    Raises:
        ModelError: says what to use instead.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            narrow = any(tensor.dtype.itemsize == 2 and tensor.device.type == "cpu" for tensor in group["params"])
            if isinstance(optimizer, SGD) and group.get("fused") and group.get("momentum") and narrow:
                raise ModelError(
                    "torch's SGD(fused=True, momentum=…) gives other bits for 16-bit parameters depending on what was "
                    "in memory before: use foreach=True, or accept it with unisono.init(arithmetic={'deterministic': "
                    "False})"
                )
