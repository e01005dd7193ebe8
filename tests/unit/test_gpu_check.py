"""What the check on a GPU decides: which parts fit its budget, what fails it, and what it prints."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_check.checks import Checks
from benchmarks.gpu_check.operations import differing, missing
from benchmarks.gpu_check.parts import Deadline, Found, Part, Row, done, exit_code
from benchmarks.gpu_check.processes import Ended, Setting
from benchmarks.gpu_check.speed import ratios

pytestmark = pytest.mark.unit


class Clock:
    """It goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class Played(Setting):
    """Jobs and programs that have ended as the test says."""

    ends: Any = None

    def job(self, name: str, *words: str, **settings: Any) -> Ended:
        return Ended(*self.ends[name])

    def program(self, name: str, *words: str, **settings: Any) -> Ended:
        return Ended(*self.ends[name])


def ended(digest: str, device: str = "cuda:0") -> tuple[int, str]:
    return 0, f"[rank 0] computed on {device}\n[rank 0] weights sha256 {digest * 64}\n"


def checks(**ends: tuple[int | None, str]) -> Checks:
    known = {name.replace("_", "-"): end for name, end in ends.items()}
    return Checks(Played(None, False, Path("/nowhere"), known), models=("mlp",), workers=(1, 2))


def rows_of(name: str, found: Checks) -> tuple[list[Row], int]:
    [part] = [part for part in found.parts() if part.name == name]
    rows = list(done([part], 1000.0, Clock()))
    return rows, exit_code([part], rows)


def test_a_part_that_may_take_longer_than_the_budget_holds_is_skipped_by_name_and_shorter_ones_are_done() -> None:
    clock = Clock()

    def long(deadline: Deadline) -> Iterator[Found]:
        clock.now += 70
        yield "weights", "same", f"{deadline.left:.0f} s are left"

    parts = [Part("first", 80, True, long), Part("second", 80, True, long), Part("third", 30, False, lambda _: [])]
    parts.append(Part("fourth", 10, False, lambda deadline: [("", "ok", f"{deadline.left:.0f} s")]))
    assert list(done(parts, 100, clock)) == [
        Row("first", "weights", "same", "10 s are left"),
        Row("second", "", "skipped", "it may take 80 s, and 30 s are left"),
        Row("fourth", "", "ok", "10 s"),
    ]


def test_a_failure_ends_its_own_part_only() -> None:
    def failing(deadline: Deadline) -> Iterator[Found]:
        yield "one", "same", ""
        raise ValueError("boom")

    parts = [Part("a", 1, True, failing), Part("b", 1, False, failing), Part("c", 1, True, lambda _: [("", "ok", "")])]
    rows = list(done(parts, 10, Clock()))
    assert [(row.part, row.result, row.note) for row in rows] == [
        *(("a", "same", ""), ("a", "failed", "ValueError: boom")),
        *(("b", "same", ""), ("b", "failed", "ValueError: boom")),
        ("c", "ok", ""),
    ]
    assert exit_code(parts, rows) == 1
    assert exit_code(parts, [row for row in rows if row.part != "a"]) == 0  # a figure that is missing


@pytest.mark.parametrize(
    ("second", "result", "note", "code"),
    [
        (ended("a"), "same", "aaaaaaaaaaaa on cuda:0", 0),
        (ended("b"), "different", "aaaaaaaaaaaa bbbbbbbbbbbb", 1),
        ((1, "[rank 0] ValueError: boom\nunisono: it ended"), "failed", "[rank 0] ValueError: boom", 1),
        ((None, ""), "failed", "it did not end in time", 1),
    ],
)
def test_a_digest_that_differs_fails_the_check(
    second: tuple[int | None, str], result: str, note: str, code: int
) -> None:
    rows, found = rows_of("digests", checks(mlp_1=ended("a"), mlp_2=second))
    assert ([(row.result, row.note) for row in rows], found) == ([(result, note)], code)


def test_an_operation_that_differs_fails_the_check_and_one_that_cannot_be_computed_is_named() -> None:
    alike, other = (
        {"a sum": "1", "an LSTM": "fails: no such kernel"},
        {"a sum": "2", "an LSTM": "fails: no such kernel"},
    )
    assert differing([alike, dict(alike)]) == []
    assert differing([alike, alike, other]) == ["a sum"]
    assert missing(alike) == ["an LSTM"]
    said = '{"check": "at once", "differing": ["a sum"], "missing": [], "digests": {"a sum": "1"}}\n'
    rows, code = rows_of("operations", checks(operations=(0, said)))
    assert (rows, code) == ([Row("operations", "at once", "different", "a sum")], 1)


def test_a_check_that_finds_no_accelerator_fails_unless_the_cpu_is_named() -> None:
    said = '{"facts": {"device": "cpu"}}\n'
    rows, code = rows_of("operations", checks(operations=(0, said)))
    assert (rows, code) == ([Row("operations", "the device", "failed", "device cpu")], 1)
    named = Checks(Played("cpu", True, Path("/nowhere"), {"operations": (0, said)}))
    rows, code = rows_of("operations", named)
    assert (rows, code) == ([Row("operations", "the device", "ok", "device cpu")], 0)


def test_where_nccl_refuses_workers_that_share_a_device_the_row_says_so() -> None:
    refusal = "DistBackendError: NCCL error: ncclInvalidUsage. Last error: Duplicate GPU detected : rank 0 and rank 1"
    rows, code = rows_of("NCCL", checks(nccl_mlp=(1, f"Traceback\n{refusal}\nunisono: rank 0 ended with 1\n")))
    assert ([(row.result, row.note) for row in rows], code) == ([("skipped", refusal)], 1)
    rows, code = rows_of("NCCL", checks(nccl_mlp=(None, "")))
    assert ([(row.result, row.note) for row in rows], code) == ([("skipped", "it did not end in time")], 1)


def test_what_grows_and_who_waits_are_over_their_bounds_and_do_not_fail_the_check() -> None:
    line = '[rank {}] {{"live bytes at first": 100, "host waits": {}, "live bytes": {}}}\n'
    one, two = line.format(0, 5.5, 100), line.format(0, 5.5, 100) + line.format(1, 20.0, 104)
    rows, code = rows_of("waits and memory", checks(counted_1=(0, one), counted_2=(0, two)))
    assert [(row.check, row.result) for row in rows] == [
        *(("host waits per step, 1 worker", "ok"), ("live bytes, 1 worker", "ok")),
        *(("host waits per step, 2 workers", "over"), ("live bytes, 2 workers", "over")),
    ]
    assert code == 0


def test_speeds_are_compared_round_by_round() -> None:
    times = {"Unisono": [1.0, 4.0, 3.0], "deterministic torch": [1.0, 2.0, 3.0], "torch": [0.5, 1.0, 1.0]}
    assert ratios(times) == {"deterministic torch": 1.0, "torch": 3.0}
