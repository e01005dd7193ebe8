"""The variables of the environment that are ours, and what is probably meant by one that is not."""

from collections.abc import Iterable, Iterator
from difflib import get_close_matches

OURS = "UNISONO_"
KNOWN = frozenset(
    OURS + name
    for name in (
        # for people
        *("RUN_DIR", "SHARDS", "THREADS", "ALLOW_JOB_CHANGE", "NUMERICS", "CHECKPOINT_EVERY", "DEVICES_PER_WORKER"),
        *("TRANSPORT", "INSECURE_DATA", "DATA_KEYS", "TOPOLOGY", "OVERLAP", "PIN", "TUNING", "STOP_AFTER"),
        *("STOP_AFTER_EPOCHS", "BATCH_SCALE", "BATCH_SCALE_WARMUP", "BATCH_SIZE", "STAGE_SCHEDULE", "VERIFY_EVERY"),
        *("CHECKS", "AUDIT", "MONITOR_EVERY", "POLICIES", "STRATEGY", "LOG_TO", "LOG_EVERY_S", "PLUGINS", "TIMELINE"),
        *("PROFILE", "SAMPLES"),
        # of commands, for the workers that they start
        *("STUDY", "CHAOS", "CURVATURE", "TRACE", "FAULTS"),
        # of launchers, for each worker
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "COORDINATOR", "TOKEN_FILE", "CERTIFICATE", "WORKER"),
        *("STORE", "STORE_FD", "LAUNCHER_PID", "AGENT_PID", "CORES", "TERM", "TERMINAL", "FAILURE_TIMEOUT_S"),
    )
)
"""Each is described in docs/guide/settings.md. Arguments that are gone are refused elsewhere."""


def unknown_variables(names: Iterable[str]) -> Iterator[str]:
    """A sentence for each variable that begins as ours do, and is none of ours.

    Args:
        names: the names of all variables of the environment.
    """
    for name in sorted(name for name in names if name.startswith(OURS) and name not in KNOWN):
        near = get_close_matches(name.removeprefix(OURS), [known.removeprefix(OURS) for known in KNOWN], 1, cutoff=0.7)
        meant = f": did you mean {OURS}{near[0]}?" if near else "; docs/guide/settings.md lists those that there are"
        yield f"{name} is set in the environment, and Unisono has no such variable{meant}"
