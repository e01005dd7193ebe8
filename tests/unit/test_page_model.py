"""What the page knows of a run: thinned curves, the story of the journal, and files that are followed."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.train.record.metrics_line import RESERVED
from unisono_lab.page.curves import (
    LONGEST_LINE,
    MOST,
    MOST_CURVES,
    OWN,
    PART,
    PARTS,
    Curves,
    CurveTable,
    Entry,
    FolderSource,
    Follower,
    Mark,
    NewLines,
    Stretches,
    Thinned,
)
from unisono_lab.page.hub import Hub
from unisono_lab.page.run_model import KINDS, MOST_HOSTS, MOST_WORKERS, RunModel, Story, Viewed

pytestmark = pytest.mark.unit


# -- thinned rows


def joined(one: list[int], other: list[int]) -> list[int]:
    return [*one, *other]


@given(st.integers(0, 3000), st.sampled_from([2, 8, 64]))
def test_a_thinned_row_keeps_every_item_in_order_in_few_groups(count: int, most: int) -> None:
    row = Thinned(joined, most)
    for item in range(count):
        row.add([item])
    assert [item for group in row.groups for item in group] == list(range(count))
    assert len(row.groups) <= most
    assert {len(group) for group in row.groups[:-1]} <= {row.stride}


@given(st.lists(st.integers(0, 40), max_size=30))
def test_a_viewer_who_is_told_what_is_new_has_all_of_it(pauses: list[int]) -> None:
    row, seen, copy, number = Thinned(joined, 16), Mark(), list[list[int]](), 0
    for pause in pauses:
        for _ in range(pause):
            row.add([number])
            number += 1
        first = row.since(seen)
        copy[first:] = row.groups[first:]
        seen = row.mark
        assert copy == row.groups


# -- curves


def points(told: dict[str, Any]) -> dict[str, list[list[float | None]]]:
    """The points of each curve as a browser has them: step, time, smallest and largest value, mean."""
    return {
        name: [
            [step, time, *(value if isinstance(value, list) else [value] * 3)]
            for step, time, value in zip(told["steps"], told["times"], values, strict=True)
            if value is not None
        ]
        for name, values in told.get("values", {}).items()
    }


def drawn(table: CurveTable) -> dict[str, list[list[float | None]]]:
    """All that a table has."""
    return points(table.since(Mark()))


def test_a_late_viewer_is_told_as_much_of_a_long_run_as_of_a_short_one() -> None:
    model = RunModel()
    lines = [{"step": step, "loss": 1.0, "seconds": {"total": 0.03}, "acc": 0.5} for step in range(10_000)]
    model.take_metrics(NewLines(lines))
    assert len(json.dumps(model.news_for(Viewed()))) < 600_000
    assert all(len(one["steps"]) <= MOST for one in model.news_for(Viewed())["curves"].values())


LOGGED = st.lists(
    st.tuples(st.integers(0, 2), st.dictionaries(st.sampled_from("abc"), st.floats(-1e6, 1e6) | st.none(), max_size=3)),
    max_size=60,
)


@pytest.mark.slow
@given(LOGGED, st.integers(1, 60), st.integers(0, 4))
def test_a_table_is_the_same_however_its_entries_come_and_a_viewer_who_is_told_what_is_new_has_it(
    logged: list[tuple[int, dict[str, Any]]], part: int, long: int
) -> None:
    lines, step = list[Entry](), 0
    for more, figures in logged * 10**long if long < 3 else logged * 80:
        step += more
        lines.append(Entry(step, float(step), figures))
    at_once, in_parts = CurveTable(), CurveTable()
    at_once.add(lines)
    copy: dict[str, Any] = {"steps": [], "times": [], "values": {}}
    seen = Mark()
    for first in range(0, len(lines), part):
        in_parts.add(lines[first : first + part])
        if not (news := in_parts.since(seen)):
            continue
        seen, since = in_parts.mark, news["first"]
        for name in ("steps", "times"):
            copy[name][since:] = news[name]
        for name in {*copy["values"], *news["values"]}:
            known = copy["values"].setdefault(name, [None] * since)
            known[since:] = news["values"].get(name, [None] * len(news["steps"]))
    assert in_parts.stride == at_once.stride
    assert points(copy).keys() == drawn(at_once).keys()
    for name, rows in drawn(at_once).items():
        for one, other in zip(points(copy)[name], rows, strict=True):
            assert one[:4] == other[:4]
            assert one[4] == pytest.approx(other[4], rel=1e-4, abs=1e-4)  # sums are added in another order
    assert not in_parts.since(seen)


def test_groups_have_the_smallest_the_largest_and_the_mean_value_of_their_steps() -> None:
    table = CurveTable()
    table.add([Entry(step, None, {"a": float(step)} | ({"b": 7.0} if step == 1500 else {})) for step in range(1600)])
    rows = drawn(table)
    assert table.stride == 2
    assert rows["a"][3] == [7, None, 6, 7, 6.5]
    assert rows["b"] == [[1501, None, 7, 7, 7]]
    table.add([Entry(1599, None, {"b": 3.0}), Entry(1600, None, {"a": 1.0})])
    assert drawn(table)["b"][1:] == [[1599, None, 3, 3, 3]]
    assert drawn(table)["a"][-2:] == [[1599, None, 1598, 1599, 1598.5], [1600, None, 1, 1, 1]]


@pytest.mark.parametrize("value", [0.0, 1.0, -1e-9, 123456.5, 1e289, -1e289, 1e-300, 5e-324])
def test_what_is_sent_has_at_least_six_digits_of_what_was_logged(value: float) -> None:
    table = CurveTable()
    table.add([Entry(step, None, {"a": value}) for step in range(3000)])
    for row in drawn(table)["a"]:
        assert row[2:] == [pytest.approx(value, rel=1e-5)] * 3


STEPS = 5000


@pytest.fixture
def long(tmp_path: Path) -> Hub:
    """A long run that has been read, in part while it went on."""
    hub = Hub(FolderSource(tmp_path))

    async def read() -> None:
        for part in range(0, STEPS, STEPS // 4):
            with (tmp_path / "metrics.jsonl").open("a") as file:
                for step in range(part, part + STEPS // 4):
                    line = {"step": step, "time": 1e9 + step / 4, "loss": float(step), "padding": "x" * 80}
                    file.write(json.dumps(line) + "\n")
            hub._measured_at = -1e9
            while await hub.look():
                pass

    asyncio.run(read())
    return hub


def finer(hub: Hub, axis: Any, low: float, high: float, left: int = 10**9) -> Any:
    """The steps and largest values of the loss in a range, for somebody who is gone after so many parts."""
    left_parts = iter(range(left))

    async def is_gone() -> bool:
        return next(left_parts, None) is None

    rows: Any = points(asyncio.run(hub.finer(axis, low, high, is_gone))).get("loss", [])
    return [(row[0], row[3]) for row in rows]


@pytest.mark.parametrize(("axis", "first", "per_step"), [("step", 0, 1), ("time", 1e9, 0.25)])
def test_a_range_of_a_long_run_has_points_that_the_whole_run_does_not(
    long: Hub, axis: str, first: float, per_step: float
) -> None:
    assert long.model.curves.table.stride == 8
    low, high = first + per_step * 2990, first + per_step * 3500
    assert finer(long, axis, low, high) == [(step, step) for step in range(2990, 3501)]


def test_a_range_is_thinned_too_where_it_is_long_and_reaches_what_is_newest(long: Hub) -> None:
    found = finer(long, "step", 1000, 1e15)
    assert len(found) <= MOST
    assert found[0] == (1003, 1003)
    assert found[-1] == (STEPS - 1, STEPS - 1)


def test_a_range_without_steps_or_whose_file_is_another_one_by_now_has_no_points(long: Hub, tmp_path: Path) -> None:
    assert finer(long, "step", 1e6, 1e7) == []
    assert finer(long, "step", 20, 10) == []
    assert finer(long, "step", 0, 100, left=0) == []
    (tmp_path / "metrics.jsonl").write_text("other\n")
    assert finer(long, "step", 2000, 3000) == []


def test_a_range_of_far_too_many_bytes_is_not_read() -> None:
    stretches = Stretches(most=1000)
    for part in range(20):
        stretches.add(NewLines([{"step": part, "time": 1e9 + part}], first=100 * part, end=100 * part + 100))
    assert stretches.of("step", 3, 5) == (300, 600)
    assert stretches.of("step", 0, 9) == (0, 1000)
    assert stretches.of("step", 0, 10) == (0, 0)


def test_fields_that_no_script_logs_are_no_metrics() -> None:
    assert RESERVED <= OWN


def test_curvature_is_no_metric_of_a_script_and_layers_are_drawn_as_one_with_their_range() -> None:
    curves = Curves()
    layers = {f"confidence/{number}": number / 200 for number in range(200)}
    curves.take([{"step": 3, "loss": 1.0, "critical_sharpness": 5.0, **layers, "acc": 0.5}])
    assert drawn(curves.table).keys() == {"loss", "critical_sharpness", "confidence", "metric/acc"}
    assert drawn(curves.table)["confidence"] == [[3, None, 0.0, 0.995, 0.4975]]
    assert not curves.table.left_out


@pytest.mark.parametrize("value", [None, True, "7", [1], {}, float("nan"), float("inf"), 1e301, 10**400])
def test_what_is_no_finite_number_is_not_drawn(value: Any) -> None:
    curves = Curves()
    curves.take([{"step": 1, "loss": value, "acc": value}])
    assert not curves.table.names
    curves.take([{"step": 2, "loss": 1.0, "acc": 1.0}, {"step": 3, "loss": value, "acc": value}])
    assert drawn(curves.table) == {name: [[2, None, 1, 1, 1]] for name in ("loss", "metric/acc")}


def test_steps_that_are_none_and_names_without_end_are_left_out() -> None:
    curves = Curves()
    curves.take([{"step": step, "loss": 1.0} for step in (-1, 2**53, 1.5, None, True)])
    assert not curves.table.names
    curves.take([{"step": 1, **{f"name {number}": 1.0 for number in range(1000)}}])
    assert len(curves.table.names) == MOST_CURVES
    assert curves.table.left_out


# -- the story


def at(second: float, event: str, **fields: Any) -> dict[str, Any]:
    return {"time": f"2026-01-01T00:00:{second:06.3f}+00:00", "event": event, **fields}


def minted(second: float, generation: int, workers: list[str], shards: list[int], **more: Any) -> dict[str, Any]:
    return at(second, "minted", generation=generation, workers=workers, shards=shards, seconds=0.5, **more)


def told(*lines: dict[str, Any]) -> Story:
    story = Story(shards=8)
    for line in lines:
        story.add(line)
    return story


def test_workers_keep_their_colours_and_shards_move() -> None:
    story = told(
        at(0, "asked for", workers=["w1", "w2"], host="a"),
        minted(1, 1, ["w1", "w2"], [4, 4], joined=["w1", "w2"]),
        minted(2, 2, ["w2", "w3"], [3, 5], joined=["w3"]),
    )
    assert [(seat.id, seat.shards, seat.colour, seat.host) for seat in story.seats] == [
        ("w2", 3, 1, "a"),
        ("w3", 5, 0, ""),
    ]


def test_the_stall_of_a_generation_is_that_of_all_its_parts() -> None:
    story = told(
        minted(1, 1, ["w1"], [8]),
        minted(2, 2, ["w1", "w2"], [4, 4], joined=["w2"]),
        at(3, "formed", generation=2, seconds={"regroup": 0.25, "form": 0.5, "copy": 1.0}),
    )
    assert [(span.number, span.workers, span.stall_s) for span in story.spans.groups] == [(1, 1, 0.5), (2, 2, 1.75)]


def test_a_job_without_a_coordinator_has_ranks_and_an_even_split() -> None:
    story = told(at(0, "started", world_size=3, launcher="unisono", pid=1))
    assert [(seat.id, seat.shards) for seat in story.seats] == [("rank 0", 3), ("rank 1", 3), ("rank 2", 2)]


def test_decisions_without_end_stay_few_and_the_newest_is_told() -> None:
    story = Story()
    for number in range(5000):
        story.add(
            at(number % 60, "decided", step=number, policy="p", verb="set_learning_rate", value=0.1, why={"x": 1})
        )
    marks = story.marks["decision"].groups
    assert len(marks) <= 160
    assert sum(mark.many for mark in marks) == 5000
    assert marks[-1].step == 4999


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (at(1, "lost", worker="w1", host="a", rank=0, why="signal 9"), "lost"),
        (at(1, "minted", generation=2, workers=["w1"], shards=[8], joined=["w1"]), "join"),
        (at(1, "left", worker="w1", host="a", reason="asked"), "left"),
        (at(1, "resized", workers=3, before=2, asked_for=3, by="a person"), "resize"),
        (at(1, "decided", step=1, policy="p", verb="set_batch_size", value=64, why={}), "decision"),
        (at(1, "decided", step=1, policy="p", verb="set_strategy", value="diloco", why={}), "strategy"),
        (at(1, "decided", step=1, policy="p", verb="set_topology", value="ring", why={}), "topology"),
        (at(1, "checkpoint", step=1, bytes=1, seconds=0.1), "checkpoint"),
        (at(1, "healed", step=1, what="weights", ranks=[1], hosts=["a"]), "healed"),
        (at(1, "observed", step=1, policy="spot", figures={"price": 0.5, "notices": 1}), "notice"),
        (at(1, "over", outcome="done", reason="", digest="d"), "run"),
    ],
)
def test_each_kind_of_event_has_its_mark(line: dict[str, Any], kind: str) -> None:
    story = told(line)
    assert [one for one in KINDS if story.marks[one].groups] == [kind]
    assert story.marks[kind].groups[0].title


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    ["step", "workers", "shards", "generation", "joined", "seconds", "world_size", "figures", "loss", "time", "policy"]
)
EVENTS = st.sampled_from(["minted", "formed", "started", "observed", "decided", "asked for", "lost", "over", "resized"])


@given(EVENTS, st.dictionaries(FIELDS, JSON, max_size=8))
def test_no_line_whatever_is_in_it_ends_the_page(event: str, fields: dict[str, Any]) -> None:
    model = RunModel()
    sound = minted(1, 1, ["w1"], [8])
    model.take_journal([sound, {"time": "2026-01-01T00:00:02+00:00", **fields, "event": event}], anew=False)
    model.take_metrics(NewLines([fields, {**fields, "step": 1, "loss": 0.5}]))
    json.dumps(model.news_for(Viewed()), allow_nan=False)


@pytest.mark.parametrize("deep", ["[" * 900 + "1" + "]" * 900, '{"a":' * 900 + "1" + "}" * 900], ids=["list", "object"])
def test_values_that_are_nested_deep_neither_end_the_page_nor_fill_it(deep: str) -> None:
    value, model = json.loads(deep), RunModel()
    for event in ("lost", "over", "checkpoint failed", "asked for", "decided"):
        model.take_journal([at(1, event, why=value, worker=value, error=value, value=value, workers=value)], anew=False)
    model.take_metrics(NewLines([{"step": 1, "loss": 1.0, "seconds": value, "acc": value}]))
    model.job, model.result = {"seed": value}, {"exit_code": 1, "error": {"message": value}, "weights_sha256": value}
    assert len(json.dumps(model.news_for(Viewed()), allow_nan=False)) < 10_000


def test_a_job_of_numbers_that_are_none_is_shown_without_them() -> None:
    model = RunModel()
    model.job = {"seed": math.nan, "shards": 8, "batch_size": math.inf, "precision": "bf16", "threads": [1] * 10_000}
    told = json.loads(json.dumps(model.news_for(Viewed()), allow_nan=False))["head"]["job"]
    assert {name: value for name, value in told.items() if value is not None} == {"shards": 8, "precision": "bf16"}


def test_seconds_with_names_without_end_are_not_sent_with_every_message() -> None:
    model = RunModel()
    seconds = {"total": 0.5, **{f"part {number}": 1.0 for number in range(10_000)}}
    model.take_metrics(NewLines([{"step": 1, "loss": 1.0, "seconds": seconds}]))
    assert model.head()["seconds"]["total"] == 0.5
    assert len(model.head()["seconds"]) <= len(PARTS)


def test_hosts_of_workers_without_end_are_forgotten_in_time() -> None:
    many = [f"w{number}" for number in range(MOST_WORKERS)]
    story = told(at(0, "asked for", workers=[f"v{number}" for number in range(MOST_HOSTS)], host="old"))
    story.add(at(1, "asked for", workers=many, host="a"))
    story.add(minted(2, 1, many, [1] * len(many)))  # in no more time than it takes to look at each once
    assert {seat.host for seat in story.seats} == {"a"}
    story.add(minted(3, 2, ["v0"], [8]))
    assert story.seats[0].host == ""


def test_a_page_that_stands_still_says_why_and_goes_on() -> None:
    class Faulty:
        name, poll_s = "faulty", 0.01

        def stamp(self, name: str) -> None:
            return None

        def read(self, name: str, first: int, most: int) -> bytes:
            raise ZeroDivisionError("of a disk that nobody thought of")

        def control(self) -> None:
            return None

    async def seen() -> dict[str, Any]:
        hub = Hub(Faulty())  # type: ignore[arg-type]  # it is read like one
        following = asyncio.create_task(hub.follow())
        try:
            with hub.watched():
                return await anext(one async for one in hub.news() if one["head"]["trouble"])
        finally:
            assert not following.done()
            following.cancel()

    assert "nobody thought of" in asyncio.run(seen())["head"]["trouble"]


def test_a_file_that_has_not_changed_is_not_read_again(tmp_path: Path) -> None:
    class Counting(FolderSource):
        reads: ClassVar[list[str]] = []

        def read(self, name: str, first: int, most: int) -> bytes:
            self.reads.append(name)
            return super().read(name, first, most)

    (tmp_path / "job.json").write_text('{"shards": 4}')
    journal = tmp_path / "journal.jsonl"
    journal.write_text(json.dumps(at(0, "started", world_size=1)) + "\n")

    async def looked() -> None:
        hub = Hub(Counting(tmp_path))
        for _ in range(5):
            await hub.look()
        assert Counting.reads.count("journal.jsonl") == 1
        journal.write_text(json.dumps(at(0, "started", world_size=3)) + "\n")  # another file, as long as the first
        while len(hub.model.story.seats) != 3:
            await hub.look()

    asyncio.run(asyncio.wait_for(looked(), 30))


# -- files


def lines_of(follower: Follower, source: FolderSource) -> tuple[list[dict[str, Any]], bool]:
    found, anew = list[dict[str, Any]](), False
    while True:
        news = follower.news(source.read)
        found, anew = ([] if news.anew else found) + news.lines, anew or news.anew
        if not news.more:
            return found, anew


def test_a_file_is_followed_line_by_line_and_read_anew_when_it_is_another_one(tmp_path: Path) -> None:
    path, source, follower = tmp_path / "metrics.jsonl", FolderSource(tmp_path), Follower("metrics.jsonl")
    assert lines_of(follower, source) == ([], False)
    path.write_text('{"step": 0}\n{"step": 1}\nno JSON\n{"st')
    assert lines_of(follower, source) == ([{"step": 0}, {"step": 1}], False)
    with path.open("a") as file:
        file.write('ep": 2}\n')
    assert lines_of(follower, source) == ([{"step": 2}], False)
    path.write_text('{"step": 0}\n{"step": 1}\n')  # a run went on from its checkpoint
    assert lines_of(follower, source) == ([{"step": 0}, {"step": 1}], True)
    path.with_suffix(".new").write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n')
    path.with_suffix(".new").replace(path)  # the same lines in another file: a main worker took over
    assert lines_of(follower, source) == ([{"step": 2}], False)


def test_long_lines_are_read_and_those_without_end_passed_over(tmp_path: Path) -> None:
    path, source = tmp_path / "metrics.jsonl", FolderSource(tmp_path)
    long = json.dumps({"step": 1, "x": "x" * (3 * PART)})
    path.write_text(f"{long}\n" + "y" * (LONGEST_LINE + PART) + '\n{"step": 2}\n')
    found, _ = lines_of(Follower("metrics.jsonl"), source)
    assert [line["step"] for line in found] == [1, 2]


@pytest.mark.parametrize("most", [LONGEST_LINE, LONGEST_LINE + PART])
def test_a_file_that_ended_in_a_line_without_end_is_read_anew_when_it_is_another_one(tmp_path: Path, most: int) -> None:
    path, source, follower = tmp_path / "metrics.jsonl", FolderSource(tmp_path), Follower("metrics.jsonl")
    path.write_text("y" * most)
    assert lines_of(follower, source) == ([], False)
    path.write_text('{"step": 0}\n')
    assert lines_of(follower, source) == ([{"step": 0}], True)


def test_a_long_line_is_not_read_again_and_again(tmp_path: Path) -> None:
    follower = Follower("metrics.jsonl")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "x": "x" * (8 * PART)}) + "\n")
    assert lines_of(follower, FolderSource(tmp_path))[0][0]["step"] == 1
    asked = list[int]()

    def read(name: str, first: int, most: int) -> bytes:
        asked.append(most)
        return b""

    follower.news(read)
    assert asked == [2 * PART]
