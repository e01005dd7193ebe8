"""The run that a guest trains on: one that it was given, the one that is open, or one that ends with the script."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from inspect import signature
from typing import Any

from unisono.data.streams import generators_kept
from unisono.errors import JobError
from unisono.integrations.refused import refused
from unisono.settings.reading import require_names_of_today, with_defaults
from unisono.train.run import Run
from unisono.train.start import HOST_PROCESS, init

NO_DEFAULTS: Mapping[str, Any] = {}


def run_for(guest: str, run: Run | None, settings: Mapping[str, Any], defaults: Mapping[str, Any] = NO_DEFAULTS) -> Run:
    """The run that a guest trains on. The script's random generators are as before.

    Args:
        guest: the call of the script, for messages.
        run: the run that the script gives; None for the one that is open, or for a new one, which is finished when the
            script ends well.
        settings: arguments of :func:`unisono.init` for a new one, as the script says them.
        defaults: defaults for a new one by path (``arithmetic.precision``); one that is given or open has its own.

    Raises:
        JobError: there are settings, and a run already; or a setting is unknown or out of range.
    """
    require_names_of_today(settings)
    process = HOST_PROCESS.get()
    newest = process.newest if run is None else run
    if newest is not None and not newest.inside.ending.is_closed:
        if settings:
            raise JobError(f"{guest}({', '.join(settings)}=…) beside a run that is open: say it where that begins")
        return newest
    if unknown := settings.keys() - signature(init).parameters.keys():
        raise JobError(refused("run.unknown-settings", guest=guest, names=", ".join(sorted(unknown))))
    if run is not None:
        return run
    with generators_kept():  # the script's own seed holds: one line makes no other first weights
        found = init(**with_defaults(settings, defaults, process.variables.all()))
    found.inside.ending.also(process.script_end.then(partial(_finish, found)))
    return found


def _finish(run: Run) -> None:
    if run.inside.ending.is_closed:
        return
    if run.inside.trained.prepared is None:  # nothing was trained or evaluated
        run.close()
    else:
        run.finish()
