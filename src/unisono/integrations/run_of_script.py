"""The run that a guest trains on: the one it was given, the one that is open, or one that lasts as long as the script."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any
from warnings import warn

from torch import nn

from unisono.errors import JobError, UnisonoWarning
from unisono.train.model.tensors import digest
from unisono.train.run import Run
from unisono.train.start import HOST_PROCESS, init


def run_for(guest: str, run: Run | None, settings: Mapping[str, Any]) -> Run:
    """The run that a guest trains on.

    Args:
        guest: the call of the script, for messages.
        run: the run that the script gives; None for the one that is open, or for a new one, which is finished when the
            script ends well.
        settings: arguments of :func:`unisono.init` for a new one.

    Raises:
        JobError: there are settings, and a run already; or a setting is out of range.
    """
    process = HOST_PROCESS.get()
    newest = process.newest if run is None else run
    if newest is not None and not newest.inside.ending.is_closed:
        if settings:
            raise JobError(f"{guest}({', '.join(settings)}=…) beside a run that is open: say it where that begins")
        return newest
    found = init(**settings) if run is None else run
    if run is None:
        found.inside.ending.also(process.script_end.then(partial(_finish, found)))
    return found


def _finish(run: Run) -> None:
    if run.inside.ending.is_closed:
        return
    if run.inside.trained.prepared is None:  # nothing was trained or evaluated
        run.close()
    else:
        run.finish()


def compare_first_weights(run: Run, model: nn.Module, cure: str) -> None:
    """Warn if the workers have built a model with different weights: all begin with the main worker's. Collective.

    Args:
        run: the run, which has not prepared the model yet.
        model: the model, as this worker has built it.
        cure: what to do about it.
    """
    own = digest(model)
    found = run.together(lambda workers: workers.gather_json(own))
    if len(set(found)) > 1 and run.is_main:
        warn(
            f"the workers have built the model with different weights, and all go on with those of the main worker. "
            f"Another start of the script begins with others: {cure}",
            UnisonoWarning,
            stacklevel=2,
        )
