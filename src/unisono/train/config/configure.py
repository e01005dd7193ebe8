"""Makes the configuration of a run from arguments and environment, with every check and before anything is opened."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from unisono.adapt.ada_scale import LinearScaling
from unisono.adapt.curvature_question import question_of
from unisono.adapt.named import policies_named
from unisono.adapt.norms import Monitoring
from unisono.adapt.view import Policy
from unisono.device import choose_device, is_accelerator
from unisono.errors import JobError
from unisono.job import Job, default_shards
from unisono.loggers.logger import Logger
from unisono.loggers.named import loggers_of
from unisono.membership.environment import recognise
from unisono.membership.messages import MOST_DEVICES
from unisono.received import LONGEST_S, short, whole_number
from unisono.settings.reading import require_none_gone, settings_from
from unisono.settings.table import SHORTEST_S, Settings
from unisono.settings.variables import Variables
from unisono.sync.named import strategy_of
from unisono.sync.strategy import AllReduce, Strategy
from unisono.train.config.run_config import (
    CHECKS,
    SHARED_FROM,
    Adaptation,
    Connection,
    CoordinatorAccess,
    Execution,
    Recording,
    RunConfig,
    StrategyConstraints,
)

KINDS: Mapping[str, Any] = {
    "device": str | int | torch.device | None,
    "strategy": Strategy | str | None,
    "policies": Sequence[Policy | str],
    "records.loggers": Sequence[Logger | str],
    "records.monitor": int | Monitoring,
}
"""The types of settings that only scripts have to know: of the table's room nothing above it is imported."""

BATCH = ("UNISONO_BATCH_SIZE", "UNISONO_BATCH_SCALE")
"""Variables that set the batch."""

BACKSTOP = 3.0
"""How many times ``faults.timeout_s`` workers of an elastic job wait for each other."""

BUCKET_MB = 4.0
"""Of buckets that are reduced on CPUs while the next ones are computed."""

BUCKET_MB_OF_DEVICES = 25.0
"""Of buckets for each of which a device is waited for, or that go over links which small messages do not fill."""


def configure(said: Mapping[str, Any], environ: Mapping[str, str], number: int = 1) -> RunConfig:
    """Work out how a run is carried out.

    Args:
        said: all arguments of :func:`unisono.init`, by name.
        environ: the variables of the environment.
        number: the number of the run in its process, from 1.

    Raises:
        JobError: an argument or a variable is out of range, or two of them exclude each other; says what to change.
    """
    require_none_gone(environ)
    settings = settings_from(said, environ, KINDS)
    connection, recording = _connection(settings, environ, number), _recording(settings, Variables(environ), number)
    device = choose_device(settings.device, connection.environment.local_rank)
    job = _job(settings, BUCKET_MB_OF_DEVICES if is_accelerator(device) else BUCKET_MB)
    adaptation = _adaptation(settings, job, recording)
    execution = _execution(settings, adaptation, recording)
    special = settings.special
    by = (
        "UNISONO_BATCH_SIZE" if special.batch_size else "UNISONO_BATCH_SCALE" if "batch_scale" in special.said else None
    )
    return RunConfig(job, device, settings, connection, execution, recording, adaptation, by)


def _job(settings: Settings, bucket_mb: float) -> Job:
    batch_size, shards = settings.special.batch_size or settings.batch_size, settings.shards
    factor = settings.special.batch_scale
    if factor > 1 and batch_size is not None:  # a shard has as many samples as before
        shards = default_shards(batch_size) if shards is None else shards
        batch_size, shards = batch_size * factor, shards * factor
    values = {name: value for name, value in settings.arithmetic.values.items() if value is not None}
    values.setdefault("bucket_mb", bucket_mb)
    return Job.create(batch_size=batch_size, shards=shards, seed=settings.seed, **values)


def _recording(settings: Settings, variables: Variables, number: int) -> Recording:
    special, records = settings.special, settings.records
    profile = _profile(records.profile)
    loggers = loggers_of(records.loggers, "loggers, UNISONO_LOG_TO")
    launched = variables.get("UNISONO_RUN_DIR")
    return Recording(
        _folder(settings, launched, number),
        None if launched is None else Path(launched),
        variables.count("UNISONO_TERM", "", 1) if "UNISONO_TERM" in variables else None,
        trace=None if special.trace is None else Path(special.trace),
        loggers=loggers if special.curvature is None else (),
        timeline=records.timeline or profile is not None,
        profile=profile,
        curvature=None if special.curvature is None else Path(special.curvature),
    )


def _profile(text: str | None) -> range | None:
    if text is None:
        return None
    first, _, last = text.partition(":")
    steps = whole_number(first), whole_number(last)
    if steps[0] is None or steps[1] is None or not 0 <= steps[0] < steps[1]:
        raise JobError(f"records.profile={short(text)}: use FIRST:LAST, such as 10:12 for the steps 10 and 11")
    return range(steps[0], steps[1])


def _folder(settings: Settings, launched: str | None, number: int) -> Path | None:
    # Under `unisono verify` and `unisono study` even a script that names its folder must leave that one alone.
    special, own = settings.special, settings.run_dir
    if own == "":
        raise JobError('run_dir="" names no folder: name one (the working folder is "."), or leave it out')
    if own is not None and not (special.trace or special.curvature or special.study):
        return Path(own)
    # A script that starts several runs has one folder from its launcher: the later ones go inside of it.
    return None if launched is None else Path(launched) if number == 1 else Path(launched) / f"run-{number}"


def _connection(settings: Settings, environ: Mapping[str, str], number: int) -> Connection:
    coordinator = CoordinatorAccess.from_environ(environ)
    if number > 1 and coordinator is not None:
        raise JobError(
            "a script whose workers may change has one run: this is its second unisono.init. Start the second run in a "
            "script of its own, or both with unisono run -n N, without a range and without --max-restarts"
        )
    _require_devices(settings, environ, coordinator)
    timeout_s, variables = settings.faults.timeout_s, Variables(environ)
    told = variables.number("UNISONO_FAILURE_TIMEOUT_S", SHORTEST_S, LONGEST_S)
    keys = settings.special.data_keys
    return Connection(
        settings.communication,
        # Who hangs is found by the coordinator. That workers wait for each other in vain is for when it does not.
        timeout_s if coordinator is None else BACKSTOP * timeout_s,
        min(timeout_s, told or math.inf) / 2,
        recognise(environ),
        coordinator,
        None if keys is None else Path(keys),
    )


def _require_devices(settings: Settings, environ: Mapping[str, str], coordinator: CoordinatorAccess | None) -> None:
    """Refuse several devices of a worker where they cannot be.

    Raises:
        JobError: something is asked for that a worker of several devices cannot do; names it.
    """
    count = settings.communication.devices_per_worker
    environment = recognise(environ)
    if coordinator is not None and (count > MOST_DEVICES or count != environment.world_size):
        raise JobError(
            f"devices_per_worker={count}: the launcher has started {environment.world_size} for each worker of this "
            f"elastic job, and at most {MOST_DEVICES} are possible: say it with unisono run --devices-per-worker, "
            f"and leave it out of the script"
        )
    asked = {
        "policies": bool(settings.policies),
        "monitor": bool(settings.records.monitor),
        "audit": bool(settings.faults.audit),
        "strategy": settings.strategy is not None,
        "precision='fp16'": settings.arithmetic.precision == "fp16",
    }
    if (refused := [name for name, is_asked in asked.items() if is_asked]) and count > 1:
        raise JobError(
            f"devices_per_worker={count}: workers of several devices do not go together with {', '.join(refused)} yet. "
            f"Leave it out, or use one device per worker"
        )


def _adaptation(settings: Settings, job: Job, recording: Recording) -> Adaptation:
    made = _policies(settings, job)
    policies = (*made, *_scaling(settings, job, made))
    if policies:
        job.require_batch_size(f"policies={', '.join(policy.name for policy in policies)}")
    compares = recording.trace is not None or settings.special.samples
    return Adaptation(
        policies,
        strategy_of(AllReduce() if settings.strategy is None else settings.strategy),
        StrategyConstraints(job.reduction, compares, job.precision == "fp16"),
    )


def _policies(settings: Settings, job: Job) -> list[Policy]:
    """Those that the script makes, and those that are named."""
    names = [each for each in settings.policies if isinstance(each, str)]
    batch_size = job.require_batch_size(f"policies={','.join(names)}") if names else 0
    made = iter(policies_named(names, batch_size, "policies, UNISONO_POLICIES"))
    return [next(made) if isinstance(each, str) else each for each in settings.policies]


def _scaling(settings: Settings, job: Job, others: Sequence[Policy]) -> list[Policy]:
    """For a multiple of the script's batch, the policy that multiplies the learning rate.

    It grows from the script's to so many times that: Goyal et al., arXiv 1706.02677.
    """
    factor = settings.special.batch_scale
    if factor == 1:
        return []
    if any(isinstance(policy, LinearScaling) for policy in others):
        raise JobError(
            f"UNISONO_BATCH_SCALE={factor} multiplies the learning rate, and so does the LinearScaling among "
            f"this run's policies: leave one of the two out"
        )
    own = job.require_batch_size(f"UNISONO_BATCH_SCALE={factor}") // factor
    return [LinearScaling(factor, settings.special.batch_scale_warmup * own)]


def _execution(settings: Settings, adaptation: Adaptation, recording: Recording) -> Execution:
    return Execution(
        settings.communication.overlap,
        _monitoring(settings, adaptation),
        CHECKS[settings.faults.checks],
        settings.faults.audit,
        looks=settings.faults.verify_every > 0,
        # Whoever watches the optimizers of `unisono verify` wants to see them update all that they have.
        shared_from=SHARED_FROM if recording.trace is None else math.inf,
    )


def _monitoring(settings: Settings, adaptation: Adaptation) -> Monitoring:
    monitoring = settings.records.monitor
    if not isinstance(monitoring, Monitoring):
        monitoring = Monitoring(monitoring or int(any(policy.needs_monitor for policy in adaptation.policies)))
    if not monitoring.curvature_every:
        asked = [policy.curvature_every for policy in adaptation.policies if policy.curvature_every]
        monitoring = replace(monitoring, curvature_every=min(asked, default=0))
    if monitoring.curvature_every:
        question_of(monitoring.curvature)
        if not adaptation.strategy.is_exact:
            raise JobError(
                f"Monitoring(curvature_every={monitoring.curvature_every}): with the strategy {adaptation.strategy} "
                f"workers have weights of their own: leave it out, or use strategy='all-reduce'"
            )
    return monitoring
