"""What workers did when: read with care, put on one clock, and explained in words that are true."""

import json
import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chrome_traces import require_sound
from unisono.errors import JobError, LaunchError
from unisono.spans import CLOCK_MARK, FOLDER, Spans
from unisono.train.record.step_timeline import HostClock, StepTimeline, is_kept
from unisono_lab.commands.timeline import chrome_trace
from unisono_lab.recorded.explanation import critical_path, explained, parts_of, shares
from unisono_lab.recorded.worker_spans import (
    Correction,
    Look,
    PlacedSpan,
    StepTimelines,
    WorkerRecord,
    WorkerStep,
    corrections,
    looks_by_exchanges,
    on_one_clock,
    read,
)

pytestmark = pytest.mark.unit

MS = 10**6
AHEAD_NS = 5 * 10**9


def span(
    kind: Any, begun: float, ended: float, *, main: bool = True, number: int = -1, ready: float = 0.0
) -> PlacedSpan:
    """Times in milliseconds."""
    return PlacedSpan(kind, round(begun * MS), round(ended * MS), main, number, round(ready * MS))


def taken(*spans: PlacedSpan, step: int = 1, rank: int = 0, workers: int = 2, generation: int = 1) -> WorkerStep:
    return WorkerStep(step, True, generation, rank, workers, spans)


def simple(computes: float, ends: float, rank: int = 0, step: int = 1, workers: int = 2, at: float = 0.0) -> WorkerStep:
    """Both passes of a shard, a bucket that is reduced when all are ready, the exchange, and 1 ms of update."""
    half = 1 + (computes - 1) / 2
    moments = (
        *(span("step", at, at + ends + 1), span("data", at, at + 1), span("compute", at + 1, at + computes)),
        *(span("forward", at + 1, at + half, number=rank), span("backward", at + half, at + computes, number=rank)),
        span("reduce", at + computes, at + ends - 1, number=0, ready=at + computes),
        *(span("exposed", at + computes, at + ends), span("exchange", at + ends - 1, at + ends)),
        span("update", at + ends, at + ends + 1),
    )
    return taken(*moments, step=step, rank=rank, workers=workers)


def path_of(*workers: WorkerStep) -> list[tuple[int, str, float, float]]:
    found = critical_path(dict(enumerate(workers)))
    return [(each.worker, each.part, each.begun / MS, each.ended / MS) for each in found]


# -- the critical path


def test_the_path_of_a_worker_alone_is_all_that_it_does() -> None:
    path = path_of(simple(5, 6, workers=1))

    assert path == [
        (0, "data", 0, 1),
        (0, "forward", 1, 3),
        (0, "backward", 3, 5),
        (0, "communication", 5, 6),
        (0, "update", 6, 7),
    ]


def test_where_others_wait_for_a_slow_worker_the_path_leads_through_that_one() -> None:
    path = path_of(simple(3, 10), simple(8, 10, rank=1))

    assert path == [
        *((1, "data", 0, 1), (1, "forward", 1, 4.5), (1, "backward", 4.5, 8)),
        *((0, "communication", 8, 10), (0, "update", 10, 11)),
    ]
    assert shares(critical_path({0: simple(3, 10), 1: simple(8, 10, rank=1)}))["communication"] == pytest.approx(2 / 11)


def test_a_reduction_that_a_computation_covers_is_not_on_the_path() -> None:
    covered = taken(
        *(span("step", 0, 9), span("compute", 0, 6), span("backward", 0, 6, number=0)),
        span("reduce", 1, 4, main=False, number=0, ready=1),
        *(span("exposed", 6, 7), span("exchange", 6, 7), span("update", 7, 9)),
        workers=1,
    )

    assert path_of(covered) == [(0, "backward", 0, 6), (0, "communication", 6, 7), (0, "update", 7, 9)]


def test_where_a_reducer_has_another_bucket_to_reduce_first_the_path_goes_through_both() -> None:
    def worker(rank: int) -> WorkerStep:
        return taken(
            *(span("step", 0, 12), span("compute", 0, 5), span("backward", 0, 5, number=rank)),
            span("reduce", 2, 7, main=False, number=0, ready=2),
            span("reduce", 7, 10, main=False, number=1, ready=5),
            *(span("exposed", 5, 11), span("exchange", 10, 11), span("update", 11, 12)),
            rank=rank,
        )

    assert path_of(worker(0), worker(1)) == [
        (0, "backward", 0, 2),
        (0, "communication", 2, 11),
        (0, "update", 11, 12),
    ]


@given(st.lists(st.tuples(st.floats(1.5, 50), st.floats(0, 5)), min_size=1, max_size=5))
def test_a_path_has_no_gap_and_ends_with_the_step(workers: list[tuple[float, float]]) -> None:
    ends = max(computes for computes, _ in workers) + 2
    step = {
        place: simple(computes, ends + late, rank=place, workers=len(workers))
        for place, (computes, late) in enumerate(workers)
    }

    path = critical_path(step)

    assert path[-1].ended == max(each.ended for each in step.values())
    assert path[0].begun == 0
    assert all(before.ended == after.begun for before, after in pairwise(path))
    assert sum(shares(path).values()) == pytest.approx(1)


def test_a_path_comes_to_an_end_whatever_the_spans_say() -> None:
    odd = taken(span("reduce", 5, 5, number=0, ready=9), span("exchange", 5, 5), span("exposed", 0, 5))
    assert critical_path({0: odd, 1: taken(span("exposed", 0, 5), span("exchange", 9, 9), rank=1)})


# -- words


def timelines(*steps: Mapping[str, Any] | list[WorkerStep], hosts: str = "ab") -> StepTimelines:
    """Of each worker, its steps; every worker of a host of its own."""
    records = [
        WorkerRecord(f"rank-{rank}", host, rank, "one clock", (0, 0.0), list(own))  # type: ignore[arg-type]
        for rank, (host, own) in enumerate(zip(hosts, steps, strict=False))
    ]
    return on_one_clock(records)


def same(count: int, computes: tuple[float, ...], ends: float) -> StepTimelines:
    each = [
        [simple(own, ends, rank, step=step, workers=len(computes), at=100.0 * step) for step in range(count)]
        for rank, own in enumerate(computes)
    ]
    return timelines(*each, hosts="abcde")


def test_the_slow_worker_is_named_with_its_host_and_how_much_slower_it_is() -> None:
    words = explained(same(9, (6, 6, 8), 10)).words

    assert words[0] == "Step 4, the median of 8, takes 11 ms with 3 workers."
    assert words[1].startswith("30 % of the step is exposed communication")
    assert words[3] == "Worker 2 on host c is 1.4 times slower in compute than the others (7 ms for a shard)."
    assert len(words) == 4


def test_nobody_is_called_slow_who_is_not() -> None:
    assert not any("slower" in each for each in explained(same(9, (6, 6.5), 10)).words)
    assert not any("slower" in each for each in explained(same(9, (6,), 10)).words)


def test_who_computes_more_shards_is_not_called_slow() -> None:
    def worker(rank: int, shards: int, step: int) -> WorkerStep:
        passes = [span("forward", number, number + 1, number=number) for number in range(shards)]
        common = span("compute", 0, shards), span("exposed", shards, 4), span("exchange", 3, 4), span("step", 0, 4)
        return taken(*passes, *common, rank=rank, step=step)

    found = explained(timelines([worker(0, 3, step) for step in (1, 2)], [worker(1, 1, step) for step in (1, 2)]))

    assert found.words[-1] == "1 of 2 workers compute 3 shards; others compute 1, and wait."
    assert not any("slower" in each for each in found.words)


def test_the_median_step_is_one_that_all_workers_took_in_one_generation() -> None:
    lonely = [simple(2, 3, step=9, at=900)]
    both = [simple(4, 6, step=step, at=100.0 * step) for step in (1, 2, 3)]
    others = [simple(4, 6, rank=1, step=step, at=100.0 * step) for step in (1, 2, 3)]

    found = explained(timelines([*both, *lonely], others))

    assert (found.step, found.of) == (2, 2)  # the first one makes what the others use again


def test_steps_of_which_workers_are_missing_are_no_ground_to_say_anything() -> None:
    with pytest.raises(JobError, match="name all"):
        explained(timelines([simple(2, 3)]))


def test_the_parts_of_a_step_add_up_to_it() -> None:
    step = simple(5, 7)
    assert sum(parts_of(step).values()) == pytest.approx(step.seconds("step"))


# -- clocks


@given(st.integers(-(10**12), 10**12), st.lists(st.integers(1, 10**6), min_size=2, max_size=20), st.integers(-50, 50))
def test_a_clock_that_goes_wrong_evenly_is_put_right(ahead: int, gaps: list[int], drift_ppm: int) -> None:
    moments = [sum(gaps[: each + 1]) * 1000 for each in range(len(gaps))]
    true = {at: at + ahead + at * drift_ppm // 10**6 for at in moments}

    correct = Correction.of([Look(at, right - at, 10) for at, right in true.items()])

    assert [correct(at) for at in moments] == list(true.values())
    assert correct.within == 10
    middle = (moments[0] + moments[-1]) // 2
    assert abs(correct(middle) - (middle + ahead + middle * drift_ppm // 10**6)) <= 2


def test_without_a_coordinator_exchanges_tell_the_clocks_apart() -> None:
    """Whoever leaves an exchange has left it after all have come: each pair bounds what the clocks differ by."""
    own = {(step, 1): (1000 * step + 100, 1000 * step + 210) for step in range(200)}
    others = {
        (step, 1): (1000 * step + AHEAD_NS + 190, 1000 * step + AHEAD_NS + 200) for step in range(200)
    }  # it comes last, and the other one leaves 20 ns later

    looks = looks_by_exchanges(own, others)

    assert len(looks) == 4
    assert all(abs(look.ahead - AHEAD_NS) <= look.within <= 60 for look in looks)


def test_hosts_with_one_clock_need_no_correction_and_an_unknown_clock_is_told_of() -> None:
    assert corrections({"a": [Look(0, 99, 1)]}, {}) == {"a": Correction()}
    assert corrections({"a": [], "b": []}, {"a": {}, "b": {}}) == {"a": Correction(), "b": None}


class Coordinated:
    """A worker's membership in a job with a coordinator, whose clock is true."""

    is_elastic = True

    def __init__(self, rank: int, true: Mock, answers: Mock) -> None:
        self.workers = Mock(rank=rank, world_size=2)
        self.workers.generation.number = 1
        self._true, self._answers = true, answers

    def clock(self) -> float:
        self._answers()
        return float(self._true.now)


def recorded(folder: Path, rank: int, true: Mock, offset: float, answers: Mock) -> None:
    """A worker whose clock is wrong by some seconds, in a step from the true time 100 s on."""
    spans, answered = Spans(), Mock(side_effect=answers)
    place: Any = Coordinated(rank, true, answered)
    true.now = 100.0
    clock = HostClock(f"clock {rank}", lambda: float(true.now) + offset)
    listener = StepTimeline(folder, f"w{rank}", f"host-{rank}", spans, place, clock)
    listener.step_begins(Mock(number=7))
    for kind, begun, ended in (("compute", 100.0, 100.5), ("exchange", 100.5, 101.0), ("exposed", 100.5, 101.0)):
        spans.add(kind, begun + offset, ended + offset)  # type: ignore[arg-type]
    true.now = 101.0
    listener.step_ends(Mock(number=7), 8)
    listener.close()


def test_workers_whose_clocks_differ_by_hours_are_shown_at_the_same_time(tmp_path: Path) -> None:
    true = Mock()
    recorded(tmp_path / "a", 0, true, 0.0, Mock())
    recorded(tmp_path / "b", 1, true, 7200.0, Mock())

    found = read([tmp_path / "a", tmp_path / "b"])

    begun = [worker.steps[0].all("exchange")[0].begun for worker in found.workers]
    assert begun == [round(100.5e9)] * 2
    assert all(each is not None and each.looks for each in found.corrections.values())


def test_a_coordinator_that_does_not_answer_leaves_the_clocks_to_the_exchanges(tmp_path: Path) -> None:
    true, silent = Mock(), Mock(side_effect=LaunchError("it is gone"))
    recorded(tmp_path / "a", 0, true, 0.0, silent)
    recorded(tmp_path / "b", 1, true, -30.0, silent)

    found = read([tmp_path / "a", tmp_path / "b"])

    assert [worker.steps[0].all("exchange")[0].begun for worker in found.workers] == [round(100.5e9)] * 2


# -- files


def test_a_long_run_keeps_each_of_the_first_steps_and_ever_fewer_of_the_later_ones() -> None:
    assert all(map(is_kept, range(1000)))
    assert [step for step in range(1000, 1040) if is_kept(step)] == [1000, 1010, 1020, 1030]
    assert sum(map(is_kept, range(10**6))) == 3700


HEADER = {"worker": "w1", "host": "a", "pid": 1, "clock": "c", "now": 5, "time": 1.0}
STEP: Any = {"step": 0, "done": True, "generation": 1, "rank": 0, "workers": 1, "at": 7}
ROW = ["step", 0, 10, 1, -1]

ROWS: list[Any] = [[], [[]], [ROW[:4]], [["unheard of", *ROW[1:]]], [["step", 10, 0, 1, -1]]]

WRONG: list[Any] = [
    *([], 3, None, {"worker": "w1"}, {**HEADER, "worker": "x" * 300}, {**HEADER, "host": "a\n"}),
    *(
        {**HEADER, "now": -1},
        {**HEADER, "time": math.nan},
        {"clock_at": 1},
        {"clock_at": -1, "coordinator": 1, "within": 1},
    ),
    *({**STEP, "spans": rows} for rows in ROWS),
    *({**STEP, "spans": [["step", 0, 10**30, 1, -1]]}, {**STEP, "spans": [["step", 0, 1.5, 1, -1]]}),
    *({**STEP, "spans": [ROW], "rank": 1}, {**STEP, "spans": [ROW], "at": -1}, {**STEP, "spans": [ROW], "more": 1}),
    {**STEP, "spans": [["step", 0, 10, 7, -1]]},
    {**STEP, "spans": [ROW], "workers": 2**40},  # of which no ranks could be counted
]


def written(folder: Path, *lines: Any) -> Path:
    file = folder / FOLDER / "w1.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


@pytest.mark.parametrize("line", WRONG, ids=range(len(WRONG)))
def test_a_line_that_is_none_is_left_out_and_counted(line: Any, tmp_path: Path) -> None:
    found = read([written(tmp_path, HEADER, line, {**STEP, "spans": [ROW]})])

    assert [each.spans for each in found.workers[0].steps] == [(PlacedSpan("step", 7, 17, True, -1, 0),)]
    assert found.left_out == [f"{tmp_path / FOLDER / 'w1.jsonl'}: 1 lines cannot be read and are left out"]


def test_steps_that_took_no_time_are_not_explained_by_it(tmp_path: Path) -> None:
    timeless = [
        {**STEP, "step": number, "spans": [["step", 5, 5, 1, -1], ["compute", 5, 5, 1, -1]]} for number in range(3)
    ]
    with pytest.raises(JobError, match="no step is recorded"):
        explained(read([written(tmp_path, HEADER, *timeless, {**STEP, "step": 3, "spans": [["data", 0, 9, 1, -1]]})]))
    assert explained(read([written(tmp_path, HEADER, *timeless, {**STEP, "step": 4, "spans": [ROW]})])).step == 4


def test_a_worker_is_not_compared_with_others_that_took_no_time() -> None:
    slow, fast = simple(40.0, 60.0), taken(span("step", 0, 60), span("forward", 1, 1, number=1), rank=1)
    workers = [WorkerRecord(f"w{place}", "a", 1, "a", (0, 0.0), [each]) for place, each in enumerate((slow, fast))]
    assert "slower" not in " ".join(explained(on_one_clock(workers)).words)


def test_a_line_that_is_just_being_written_is_not_looked_at(tmp_path: Path) -> None:
    file = written(tmp_path, HEADER, {**STEP, "spans": [ROW]}) / FOLDER / "w1.jsonl"
    file.write_bytes(file.read_bytes() + b'{"step":1,"do')

    found = read([tmp_path])

    assert (len(found.workers[0].steps), found.left_out) == (1, [])


def test_a_folder_without_a_timeline_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="--timeline"):
        read([tmp_path])
    with pytest.raises(JobError, match="nothing to show"):
        read([written(tmp_path, HEADER)])


def test_a_job_that_is_started_again_goes_on_in_the_same_file(tmp_path: Path) -> None:
    again = {**HEADER, "pid": 2}
    found = read([written(tmp_path, HEADER, {**STEP, "spans": [ROW]}, again, {**STEP, "spans": [ROW], "step": 1})])

    assert [(each.pid, each.steps[0].step) for each in found.workers] == [(1, 0), (2, 1)]


# -- Chrome's format


def test_a_trace_has_all_that_a_viewer_needs() -> None:
    trace = chrome_trace(same(5, (6, 6, 8), 10))

    require_sound(trace)
    json.dumps(trace, allow_nan=False)
    names = {event["name"] for event in trace["traceEvents"]}
    assert {"step 3", "forward, shard 1", "reduce bucket 0", "exposed communication", "update"} <= names


def profile_of(*events: Any) -> dict[str, Any]:
    mark = {"ph": "X", "name": f"{CLOCK_MARK}{2 * MS}", "ts": 500.0, "dur": 1.0, "pid": 1, "tid": 1}
    return {"traceEvents": [*events, mark]}


def with_profile(folder: Path, found: Any) -> StepTimelines:
    own = written(folder, HEADER, {**STEP, "spans": [ROW]})
    (own / FOLDER / "w1.torch.json").write_text(found if isinstance(found, str) else json.dumps(found))
    return read([own])


def test_events_of_torchs_profiler_stand_where_their_clock_says(tmp_path: Path) -> None:
    event = {"ph": "X", "name": "aten::mm", "ts": 510.0, "dur": 2.5, "pid": 1, "tid": 1, "args": {"x": [1]}}
    odd = [{**event, **each} for each in ({"ts": "1"}, {"dur": -1}, {"ts": math.inf}, {"name": 3}, {"ph": "i"})]

    trace = chrome_trace(with_profile(tmp_path, profile_of(event, *odd, 7)))

    require_sound(trace)
    [found] = [each for each in trace["traceEvents"] if each["name"] == "aten::mm"]
    assert (found["ts"], found["dur"]) == ((2 * MS + 10_000 - 7) / 1e3, 2.5)  # the earliest span is at 7 ns


@pytest.mark.parametrize("found", ["[1", '{"traceEvents": 3}', '{"traceEvents": []}', "[]"])
def test_what_is_no_profile_is_refused_by_its_name(found: str, tmp_path: Path) -> None:
    with pytest.raises(JobError, match="w1.torch.json"):
        chrome_trace(with_profile(tmp_path, found))
