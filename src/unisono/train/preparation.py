"""The preparation of a training: every worker gets the same weights, and is ready to train them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from warnings import catch_warnings, filterwarnings, warn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from unisono.errors import JobError, ModelError, UnisonoWarning
from unisono.train.assembly import Inside
from unisono.train.group.workers import Devices
from unisono.train.model.prepared import Prepared, refuse_unset_memory, require_held
from unisono.train.model.shared_work import sharing_in
from unisono.train.model.slices import is_sliced, materialise, require_options, require_sliced, slice_modules, slice_of
from unisono.train.model.stages import Placement, Stages
from unisono.train.model.staging import Staging, move, staging_of
from unisono.train.model.ties import Ties, take


def cut(inside: Inside, modules: Sequence[nn.Module], options: Mapping[str, Any]) -> None:
    """Have each device of this worker keep its slices of modules; a worker of one device keeps all of them.

    Args:
        inside: the parts of the run.
        modules: the modules, which are gathered together.
        options: further arguments of torch's ``fully_shard``.

    Raises:
        ModelError: the modules cannot be cut, an option is none that means the same on any number of devices, or this
            torch is too old for workers that come and go.
    """
    membership = inside.membership
    devices = membership.workers.devices
    if not modules or not all(isinstance(each, nn.Module) for each in modules):
        kinds = ", ".join(type(each).__name__ for each in modules) or "an empty list"
        raise ModelError(
            f"run.fully_shard takes a module, or a list of modules that are gathered together, not {kinds}"
        )
    require_options(options)
    _require_one_way(devices, "run.fully_shard")
    take(modules)
    materialise(modules, inside.device)
    if devices.count > 1:
        from unisono.train.step.sliced_gradients import gathering_of  # loads FSDP, which takes seconds

        slice_modules(modules, devices.mesh.mesh, gathering_of(membership), **options)
        if membership.is_elastic and not hasattr(modules[0], "reset_iter_state"):
            raise ModelError(
                f"torch {torch.__version__} cannot break a pass through a model in slices off, as the loss of a worker "
                f"does: take torch 2.13, or workers that stay the same (-n N, without a range and --max-restarts)"
            )
    take(modules)


def _require_one_way(devices: Devices, call: str) -> None:
    """Refuse a second way to spread a model over devices."""
    ways = {"run.pipeline": devices.losses is not None, "run.parallelize": devices.is_parallel}
    if other := next((name for name, is_used in ways.items() if is_used and name != call), ""):
        raise JobError(
            f"{call} and {other} in one script: a worker's devices hold slices, stages or parts of layers. Use one of "
            f"these"
        )


def parallelize(inside: Inside, model: nn.Module, plan: Mapping[str, Any]) -> None:
    """Have the devices of this worker compute layers together; a worker of one device keeps all of them.

    Args:
        inside: the parts of the run.
        model: the model.
        plan: torch's styles of tensor parallelism, by the names of modules.

    Raises:
        JobError: workers come and go, or the model is spread otherwise already.
        ModelError: the plan names no module that is there.
    """
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
        filterwarnings("ignore", message="Parallelize plan key")  # told below, if it is all of them
        parallelize_module(model, devices.mesh.mesh, dict(plan))
    ties.restore()
    if not any(map(is_sliced, model.parameters())):
        raise ModelError(
            f"run.parallelize: no parameter lies in parts by the plan of {', '.join(plan) or 'nothing'}: its keys are "
            f"names of model.named_modules(), such as 'layers.*.up', and its values styles such as ColwiseParallel()"
        )
    devices.mesh.is_parallel = True


def stage(inside: Inside, model: nn.Module, cuts: Sequence[str], schedule: str) -> None:
    """Have each device of this worker keep its stages of a model; a worker of one device keeps all of it.

    Args:
        inside: the parts of the run.
        model: the model.
        cuts: the names of the modules before which a stage begins.
        schedule: the name of the schedule.
    """
    devices = inside.membership.workers.devices
    if staging_of([model]) is not None:
        raise ModelError("run.pipeline: this model lies in stages already. Name all cuts in one call")
    _require_one_way(devices, "run.pipeline")
    stages, config = Stages.of(model, cuts), inside.exact.config
    placement = Placement.of(
        config.settings.special.stage_schedule or schedule, stages.count, devices.count, devices.rank
    )
    if devices.count == 1:
        materialise([model], inside.device)
        return
    from torch.distributed.pipelining import PipelineStage  # takes seconds to load

    if not hasattr(PipelineStage, "_warmup_forward_vote"):
        raise JobError(f"run.pipeline: torch {torch.__version__} has other stages: take torch 2.13 for several devices")
    staging = Staging(model, stages, placement, devices.mesh.verbs.broadcast, inside.device)
    if config.settings.special.study and inside.membership.workers.rank == 0:
        staging.times = inside.folder.path / f"stages-{devices.rank}.jsonl"
    devices.mesh.losses = placement.last


def prepare(inside: Inside, model: Any, optimizer: Any, state: Mapping[str, Any] | None) -> None:
    """Take inventory, agree on it with the other workers, and share the weights. Collective.

    Args:
        inside: the parts of the run.
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
    devices = inside.membership.workers.devices
    require_whole_layers(optimizers, devices)
    prepared, trained = Prepared.of(model, optimizers, state), inside.trained
    for each in prepared.optimizers:
        _move_state(each)
    for place in prepared.buffers if state else ():
        place.move(inside.device)
    if inside.job.deterministic:
        refuse_unset_memory(prepared.optimizers)
    if inside.job.precision == "fp16" and (sharing := sharing_in(prepared.optimizers)):
        raise ModelError(
            f"precision='fp16': {type(sharing[0]).__name__} goes by the sizes of gradients, which the loss scale "
            "changes before they are seen: use 'bf16', which needs none"
        )
    if staging_of(prepared.modules) is not None:
        if state:
            raise ModelError(
                "run.prepare(state=…): a model in stages has no further state yet: leave it out, or keep it in buffers"
            )
    elif devices.is_parallel:
        _require_of(prepared)
    elif devices.count > 1:
        require_sliced(prepared.parameters, devices.count)
    require_held(prepared.modules, prepared.optimizers)
    is_in_loop = inside.steps.under_way is not None
    if trained.prepared is not None and is_in_loop and (inside.membership.is_elastic or inside.checkpoints.in_use):
        _warn_of_change(trained.prepared, prepared)
    inside.synchronisation.before_call()
    inside.collectives.agree("model", prepared.layout())
    is_first, trained.prepared = trained.prepared is None, prepared
    inside.collectives.change(partial(inside.first_weights.act, prepared, resumes=is_first))
    inside.collectives.together(inside.steps.make_together)
    inside.listeners.tell(lambda one: one.prepared(prepared, trained.progress.position.step))


def _move_state(optimizer: Optimizer) -> None:
    """Have the state that an optimizer has already lie where its parameters lie now.

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
    """Say so where a loop's body has other parameters trained from now on."""
    kinds = [[type(optimizer) for optimizer in each.optimizers] for each in (before, after)]
    changed = list(dict.fromkeys([*after.parameters, *before.parameters]))
    changed = [name for name in changed if not (name in before.parameters and name in after.parameters)]
    if changed or kinds[0] != kinds[1]:
        what = f"{changed[0]} and {len(changed) - 1} more" if changed[1:] else (*changed, "another optimizer")[0]
        warn(
            f"run.prepare in a loop's body changes what is trained ({what}): whoever joins or resumes in the middle of "
            f"this loop has not run the body of the steps before, and ends in an error. Write one loop for each phase: "
            f"run.steps to the end of the first one, then the change and run.prepare, then run.steps for the next one",
            UnisonoWarning,
            stacklevel=4,
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


def _require_of(prepared: Prepared) -> None:
    """Refuse to train what belongs to no module: an optimizer that was made before ``run.parallelize``."""
    members = {id(slice_of(each)) for module in prepared.modules for each in module.parameters()}
    if odd := next((name for name, each in prepared.parameters.items() if id(each) not in members), ""):
        raise ModelError(
            f"{odd} belongs to no module: make the optimizer after run.parallelize, which puts other parameters into "
            f"the layers"
        )
