"""Makes the configuration of a run from arguments and environment, with every check and before anything is opened."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from unisono.adapt.ada_scale import LinearScaling
from unisono.adapt.curvature_question import question_of
from unisono.adapt.named import policies_named
from unisono.adapt.norms import Monitoring
from unisono.adapt.policy import Policy
from unisono.arguments import require_none_gone
from unisono.device import choose_device, is_accelerator
from unisono.errors import JobError
from unisono.host.processor_paths import LEVEL
from unisono.job import Job, default_shards
from unisono.loggers.named import loggers_of
from unisono.membership.environment import recognise
from unisono.membership.messages import MOST_DEVICES
from unisono.membership.variables import Variables
from unisono.received import LONGEST_S, short, whole_number
from unisono.sync.named import strategy_of
from unisono.sync.strategy import AllReduce
from unisono.train.config.run_config import (
    CHECKS,
    SHARED_FROM,
    Adaptation,
    Communication,
    CoordinatorAccess,
    Execution,
    FaultTolerance,
    Recording,
    RunConfig,
    StrategyConstraints,
)

SHORTEST_S = 1e-6
"""Seconds that a launcher may give a silent worker: a microsecond."""

BACKSTOP = 3.0
"""How many times ``failure_timeout_s`` workers of an elastic job wait for each other."""

VERIFY_EVERY = 100

LOG_EVERY_S = 1.0
"""Seconds after which loggers get what is new."""

WARMUP_STEPS = 100
"""Steps, with the script's own batch, over whose samples the learning rate grows."""

BATCH = ("UNISONO_BATCH_SIZE", "UNISONO_BATCH_SCALE")
"""Variables that set the batch."""

IN_JOB = ("seed", "reduction", "precision", "compression", "deterministic", "on_nan")
"""Arguments that go into the job as they are."""

BUCKET_MB = 4.0
"""Of buckets that are reduced on CPUs while the next ones are computed."""

BUCKET_MB_OF_DEVICES = 25.0
"""Of buckets for each of which a device is waited for, or that go over links which small messages do not fill."""

G = TypeVar("G")


def configure(said: Mapping[str, Any], environ: Mapping[str, str], number: int = 1) -> RunConfig:
    """Work out how a run is carried out: an argument goes before the environment, the environment before the default.

    Except ``UNISONO_BATCH_SIZE``, ``UNISONO_BATCH_SCALE`` and ``UNISONO_STAGE_SCHEDULE``, which are there to change
    what every script says.

    Args:
        said: all arguments of :func:`unisono.init`, by name, of the types that it says.
        environ: the variables of the environment.
        number: the number of the run in its process, from 1.

    Raises:
        JobError: an argument or a variable is out of range, or two of them exclude each other; says what to change.
    """
    told = _Told(environ)
    require_none_gone(told)
    recording, tolerance = _recording(said, told, number), _fault_tolerance(said, told)
    communication = _communication(said, told, tolerance, number)
    device = choose_device(said["device"], communication.environment.local_rank)
    job = _job(said, told, BUCKET_MB_OF_DEVICES if is_accelerator(device) else BUCKET_MB)
    adaptation = _adaptation(said, told, job, recording)
    return RunConfig(
        job,
        device,
        communication,
        tolerance,
        _execution(said, told, tolerance, adaptation, recording),
        recording,
        adaptation,
        stop_after=told.whole("UNISONO_STOP_AFTER"),
        stop_after_epochs=told.whole("UNISONO_STOP_AFTER_EPOCHS"),
        plugins=told.names("UNISONO_PLUGINS"),
        batch_set_by=next((name for name in BATCH if told.whole(name) is not None), None),
        script_batch_size=said["batch_size"],
        stage_schedule=told.get("UNISONO_STAGE_SCHEDULE") or "",
    )


class _Told(Variables):
    """The launcher's ``UNISONO_*`` variables; None for one that is not set."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        super().__init__(environ)
        self.environ = environ

    def path(self, name: str) -> Path | None:
        text = self.get(name)
        return Path(text) if text else None

    def names(self, name: str) -> tuple[str, ...]:
        return tuple(word.strip() for word in (self.get(name) or "").split(",") if word.strip())

    def whole(self, name: str, least: int = 1) -> int | None:
        return self.count(name, "", least) if name in self else None


def _first(*given: G | None) -> G | None:
    return next((value for value in given if value is not None), None)


def _job(said: Mapping[str, Any], told: _Told, bucket_mb: float) -> Job:
    batch_size: Any = _first(told.whole("UNISONO_BATCH_SIZE"), said["batch_size"])
    shards: Any = _first(said["shards"], told.whole("UNISONO_SHARDS"))
    factor = told.whole("UNISONO_BATCH_SCALE") or 1
    if factor > 1 and isinstance(batch_size, int) and batch_size >= 1:  # a shard has as many samples as before
        shards = default_shards(batch_size) if shards is None else shards
        batch_size, shards = batch_size * factor, shards * factor
    threads: Any = _first(said["threads"], told.whole("UNISONO_THREADS"), 1)
    numerics = said["numerics"] or told.get(LEVEL) or "native"
    unchanged = {name: said[name] for name in IN_JOB}
    bucket_mb = bucket_mb if said["bucket_mb"] is None else said["bucket_mb"]
    return Job.create(
        batch_size=batch_size, shards=shards, threads=threads, numerics=numerics, bucket_mb=bucket_mb, **unchanged
    )


def _recording(said: Mapping[str, Any], told: _Told, number: int) -> Recording:
    every = _first(said["checkpoint_every"], told.whole("UNISONO_CHECKPOINT_EVERY"))
    for name, value in {"checkpoint_every": every, "keep": said["keep"]}.items():
        if value is not None and value < 1:
            raise JobError(f"{name}={short(value)}: needs to be a positive whole number")
    profile, curvature = _profile(told), told.path("UNISONO_CURVATURE")
    loggers = loggers_of((*said["loggers"], *told.names("UNISONO_LOG_TO")), "loggers, UNISONO_LOG_TO")
    return Recording(
        _folder(said["run_dir"], told, number),
        told.path("UNISONO_RUN_DIR"),
        told.whole("UNISONO_TERM"),
        every,
        said["keep"],
        allow_job_change=said["allow_job_change"] or told.switch("UNISONO_ALLOW_JOB_CHANGE") is True,
        trace=told.path("UNISONO_TRACE"),
        samples=told.switch("UNISONO_SAMPLES") is True,
        measures=told.switch("UNISONO_STUDY") is True,
        loggers=loggers if curvature is None else (),
        log_every_s=told.number("UNISONO_LOG_EVERY_S", SHORTEST_S, LONGEST_S) or LOG_EVERY_S,
        timeline=said["timeline"] or told.switch("UNISONO_TIMELINE") is True or profile is not None,
        profile=profile,
        curvature=curvature,
    )


def _profile(told: _Told) -> range | None:
    if (text := told.get("UNISONO_PROFILE")) is None:
        return None
    first, _, last = text.partition(":")
    steps = whole_number(first), whole_number(last)
    if steps[0] is None or steps[1] is None or not 0 <= steps[0] < steps[1]:
        raise told.refusal("UNISONO_PROFILE", "use FIRST:LAST, such as 10:12 for the steps 10 and 11")
    return range(steps[0], steps[1])


def _folder(argument: str | os.PathLike[str] | None, told: _Told, number: int) -> Path | None:
    # Under `unisono verify` and `unisono study` even a script that names its folder must leave that one alone.
    if argument == "":
        raise JobError('run_dir="" names no folder: name one (the working folder is "."), or leave it out')
    is_ours = told.path("UNISONO_TRACE") or told.path("UNISONO_CURVATURE") or told.switch("UNISONO_STUDY")
    if argument is not None and not is_ours:
        return Path(argument)
    # A script that starts several runs has one folder from its launcher: the later ones go inside of it.
    launched = told.path("UNISONO_RUN_DIR")
    return launched if launched is None or number == 1 else launched / f"run-{number}"


def _fault_tolerance(said: Mapping[str, Any], told: _Told) -> FaultTolerance:
    timeout_s, every = said["failure_timeout_s"], _first(said["verify_every"], told.whole("UNISONO_VERIFY_EVERY", 0))
    if not 0 < timeout_s <= LONGEST_S:
        raise JobError(f"failure_timeout_s={short(timeout_s)}: needs to be positive, and at most {LONGEST_S:g}")
    every = VERIFY_EVERY if every is None else every
    if every < 0:
        raise JobError(f"verify_every={short(every)}: use a number of steps, or 0 for never")
    return FaultTolerance(timeout_s, every or None)


def _communication(said: Mapping[str, Any], told: _Told, tolerance: FaultTolerance, number: int) -> Communication:
    coordinator = CoordinatorAccess.from_environ(told.environ)
    if number > 1 and coordinator is not None:
        raise JobError(
            "a script whose workers may change has one run: this is its second unisono.init. Start the second run in a "
            "script of its own, or both with unisono run -n N, without a range and without --max-restarts"
        )
    timeout_s, told_s = tolerance.failure_timeout_s, told.number("UNISONO_FAILURE_TIMEOUT_S", SHORTEST_S, LONGEST_S)
    return Communication(
        said["transport"] or told.get("UNISONO_TRANSPORT") or "auto",
        said["topology"] or told.get("UNISONO_TOPOLOGY") or "auto",
        # Who hangs is found by the coordinator. That workers wait for each other in vain is for when it does not.
        timeout_s if coordinator is None else BACKSTOP * timeout_s,
        min(timeout_s, told_s or math.inf) / 2,
        recognise(told.environ),
        coordinator,
        _devices(said, told, coordinator),
        insecure_data=said["insecure_data"] or told.switch("UNISONO_INSECURE_DATA") is True,
        data_keys=told.path("UNISONO_DATA_KEYS"),
    )


def _devices(said: Mapping[str, Any], told: _Told, coordinator: CoordinatorAccess | None) -> int:
    """The number of devices of a worker.

    Raises:
        JobError: it is none, or something is asked for that a worker of several devices cannot do.
    """
    wanted: int | None = _first(said["devices_per_worker"], told.whole("UNISONO_DEVICES_PER_WORKER"))
    count = 1 if wanted is None else wanted
    if count < 1:
        raise JobError(f"devices_per_worker={short(count)}: needs a number of devices, at least 1")
    environment = recognise(told.environ)
    if coordinator is not None and (count > MOST_DEVICES or count != environment.world_size):
        raise JobError(
            f"devices_per_worker={count}: the launcher has started {environment.world_size} for each worker of this "
            f"elastic job, and at most {MOST_DEVICES} are possible: say it with unisono run --devices-per-worker, "
            f"and leave it out of the script"
        )
    if count == 1:
        return 1
    asked = {
        "policies": bool(said["policies"]) or "UNISONO_POLICIES" in told,
        "monitor": bool(said["monitor"]) or "UNISONO_MONITOR_EVERY" in told,
        "audit": bool(_first(said["audit"], told.number("UNISONO_AUDIT", 0, 1), 0.0)),
        "strategy": bool(said["strategy"] or told.get("UNISONO_STRATEGY")),
        "precision='fp16'": said["precision"] == "fp16",
    }
    if refused := [name for name, is_asked in asked.items() if is_asked]:
        raise JobError(
            f"devices_per_worker={count}: workers of several devices do not go together with {', '.join(refused)} yet. "
            f"Leave it out, or use one device per worker"
        )
    return count


def _adaptation(said: Mapping[str, Any], told: _Told, job: Job, recording: Recording) -> Adaptation:
    policies = (*said["policies"], *_policies_from_outside(said, told, job))
    if policies:
        job.require_batch_size(f"policies={', '.join(policy.name for policy in policies)}")
    compares = recording.trace is not None or recording.samples
    return Adaptation(
        policies,
        strategy_of(said["strategy"] or told.get("UNISONO_STRATEGY") or AllReduce()),
        StrategyConstraints(job.reduction, compares, job.precision == "fp16"),
        said["balance"] == "speed",
    )


def _policies_from_outside(said: Mapping[str, Any], told: _Told, job: Job) -> list[Policy]:
    """Those that are named, and for a multiple of the script's batch the one that multiplies the learning rate.

    It grows from the script's to so many times that: Goyal et al., arXiv 1706.02677.
    """
    names = told.names("UNISONO_POLICIES")
    batch_size = job.require_batch_size(f"UNISONO_POLICIES={','.join(names)}") if names else 0
    named = policies_named(names, batch_size, "UNISONO_POLICIES")
    factor, warmup = told.whole("UNISONO_BATCH_SCALE") or 1, told.whole("UNISONO_BATCH_SCALE_WARMUP") or WARMUP_STEPS
    if factor == 1:
        return named
    if any(isinstance(one, LinearScaling) for one in (*said["policies"], *named)):
        raise JobError(
            f"UNISONO_BATCH_SCALE={factor} multiplies the learning rate, and so does the LinearScaling among "
            f"this run's policies: leave one of the two out"
        )
    own = job.require_batch_size(f"UNISONO_BATCH_SCALE={factor}") // factor
    return [*named, LinearScaling(factor, warmup * own)]


def _execution(
    said: Mapping[str, Any],
    told: _Told,
    tolerance: FaultTolerance,
    adaptation: Adaptation,
    recording: Recording,
) -> Execution:
    overlap, every = told.switch("UNISONO_OVERLAP"), told.whole("UNISONO_MONITOR_EVERY")
    monitoring = said["monitor"]
    if not isinstance(monitoring, Monitoring):
        needed = any(policy.needs_monitor for policy in adaptation.policies)
        monitoring = Monitoring(monitoring or every or int(needed))
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
    checks = said["checks"] or told.get("UNISONO_CHECKS") or "some"
    audit: Any = _first(said["audit"], told.number("UNISONO_AUDIT", 0, 1), 0.0)
    if checks not in CHECKS:
        raise JobError(f"checks={short(checks)}: use {', '.join(map(repr, CHECKS))}")
    if not 0 <= audit <= 1:
        raise JobError(f"audit={short(audit)}: use a share between 0 and 1, such as 0.01")
    return Execution(
        _first(said["overlap"], overlap),
        monitoring,
        CHECKS[checks],
        audit,
        looks=tolerance.verify_every is not None,
        # Whoever watches the optimizers of `unisono verify` wants to see them update all that they have.
        shared_from=SHARED_FROM if recording.trace is None else math.inf,
    )
