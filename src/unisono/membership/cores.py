"""How many cores this process may use."""

import math
import os

from unisono.membership.cgroup import read_limits


def usable_cores() -> int:
    """Those it may run on, and no more than its control groups allow; at least 1."""
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = read_limits().cpus
    return mine if limit is None else max(1, min(mine, math.floor(limit)))
