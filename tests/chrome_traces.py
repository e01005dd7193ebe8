"""What holds for every Chrome trace, as its format says: what a viewer needs of each event, and that spans nest."""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

NEEDED: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "X": {"name": (str,), "cat": (str,), "pid": (int,), "tid": (int,), "ts": (int, float), "dur": (int, float)},
    "M": {"name": (str,), "pid": (int,), "args": (dict,)},
}
"""Of each kind of event that a timeline has, by its ``ph``."""

NEAR_US = 1e-3
"""A nanosecond: what is lost when microseconds are added up."""


def require_sound(trace: Mapping[str, Any]) -> None:
    """Fail unless a viewer can show it."""
    threads: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    named = set[int]()
    for event in trace["traceEvents"]:
        needed = NEEDED[event["ph"]]
        assert all(type(event[name]) in kinds for name, kinds in needed.items()), event
        if event["ph"] == "X":
            assert math.isfinite(event["ts"] + event["dur"]), event
            assert event["ts"] >= 0 <= event["dur"], event
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["name"] == "process_name":
            named.add(event["pid"])
    assert named == {process for process, _ in threads}, "every process has a name, and something to show"
    for spans in threads.values():
        require_nested(spans)


def require_nested(spans: list[tuple[float, float]]) -> None:
    """Fail if one begins in another and ends behind it."""
    around: list[tuple[float, float]] = []
    for begun, ended in sorted(spans, key=lambda span: (span[0], -span[1])):
        while around and around[-1][1] <= begun + NEAR_US:
            around.pop()
        assert not around or ended <= around[-1][1] + NEAR_US, (around[-1], (begun, ended))
        around.append((begun, ended))
