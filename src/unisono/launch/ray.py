"""The driver of a job on a Ray cluster: it gives the job to the cluster, and waits for its end.

On the cluster, one actor runs the coordinator, and an actor on each bundle runs an agent.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from unisono.errors import PREEMPTED, JobError, LaunchError, UnisonoError
from unisono.launch.elastic.elastic_settings import FAILURE_TIMEOUT_S, MAX_RESTARTS, ElasticSettings, Range
from unisono.launch.ray_request import RayEnd, RayRequest
from unisono.launch.settings import LaunchSettings, Script
from unisono.settings.reading import settings_by_path

__all__ = ["run"]

WAIT_S = 0.5
"""Seconds for which the driver waits at a time: Python handles signals in between."""


def run(
    script: str,
    args: Sequence[str] = (),
    *,
    workers: int | tuple[int, int] = 1,
    resources_per_worker: Mapping[str, float] | None = None,
    run_dir: str | Path | None = None,
    module: bool = False,
    checkpoint_every: int | None = None,
    max_restarts: int = MAX_RESTARTS,
    failure_timeout_s: float = FAILURE_TIMEOUT_S,
    variables: Mapping[str, str] | None = None,
) -> RayEnd:
    """Train on the nodes of a Ray cluster, and wait for the end.

    The cluster is the one that ``ray.init`` has connected this process to, or else the one that ``ray.init()`` finds.

    Args:
        script: the script; a module's name with ``module``.
        args: the script's arguments.
        workers: the number of workers, or the smallest and the largest.
        resources_per_worker: the resources of each worker, by Ray's names; by default a core for each of its threads.
        run_dir: the run folder; by default a new one below ``runs``. If all nodes see it, training goes on from
            its checkpoints on whatever nodes.
        module: whether ``script`` is a module's name.
        checkpoint_every: steps between checkpoints, for scripts that do not set them.
        max_restarts: the number of new workers that each place of the job may get, on average.
        failure_timeout_s: the seconds of silence after which a worker or a node counts as lost.
        variables: environment variables for the job's processes, besides those of Unisono in this one.

    Returns:
        the end of the job: ``exit_code`` (0, or 75 if it has left with a checkpoint), ``run_dir``, ``host`` and
        ``result``, which is what ``result.json`` says.

    Raises:
        JobError: an argument is wrong, or Ray is not installed.
        LaunchError: the job has failed; Ray's logs and the run folder say more.
    """
    sizes = Range(workers, workers) if isinstance(workers, int) else Range(*workers)
    launch = LaunchSettings(
        Script(script, tuple(args), is_module=module),
        workers=0,
        run_dir=None if run_dir is None else Path(run_dir),
        options=settings_by_path({"checkpoints.every": checkpoint_every}),
        extra_environment=dict(variables or {}),
    )
    settings = ElasticSettings(launch, sizes, max_restarts=max_restarts, failure_timeout_s=failure_timeout_s)
    end = train(RayRequest.of_this_process(settings, resources_per_worker))
    if end.exit_code not in (0, PREEMPTED):
        error = end.result.get("error")
        reason = end.words or (error.get("message") if isinstance(error, dict) else "") or "see Ray's logs"
        raise LaunchError(f"the job has failed (exit code {end.exit_code}, {end.run_dir} on {end.host}): {reason}")
    return end


def train(request: RayRequest) -> RayEnd:
    """Train on the nodes of a Ray cluster, and wait for the end. SIGINT and SIGTERM have all workers leave.

    Raises:
        JobError: the request cannot work, or Ray is not installed.
        LaunchError: Ray has lost the coordinator's actor, or cannot be reached.
    """
    request.check()
    signals: list[int] = []
    with connection():
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

        from unisono.launch.ray_actors import CoordinatorActor, beside_driver

        coordinator = beside_driver(CoordinatorActor, request)
        try:
            with _noting_signals(signals, coordinator.leave.remote):
                reference = coordinator.run.remote()
                while True:
                    with suppress(GetTimeoutError):
                        end: RayEnd = ray.get(reference, timeout=WAIT_S)
                        return replace(end, interrupted=signals[0] if signals else None)
        except RayTaskError as error:
            cause = error.cause
            raise (cause if isinstance(cause, UnisonoError | OSError) else LaunchError(str(error))) from error
        except RayActorError as error:
            raise LaunchError(f"the coordinator's actor is lost, and its agents end, too: {error}") from error
        finally:
            ray.kill(coordinator)


@contextmanager
def connection(*, shows_output: bool = True) -> Iterator[None]:
    """Within the context there is a connection to the cluster: that of the program, or a new one.

    Raises:
        JobError: Ray is not installed.
        LaunchError: the cluster cannot be reached.
    """
    if find_spec("ray") is None:
        raise JobError("training needs ray, in the cluster's version: pip install '.[ray]' in a clone of Unisono")
    import ray

    if ray.is_initialized():
        yield
        return
    try:
        ray.init(log_to_driver=shows_output)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise LaunchError(f"there is no way to the Ray cluster: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _noting_signals(signals: list[int], leave: Callable[[], object]) -> Iterator[None]:
    """Until the context ends, SIGINT and SIGTERM are noted and call ``leave``; in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        leave()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
