"""What a study's report says, and the files it is written into."""

import json
import re
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from called import unisono
from studies import MadeUp
from unisono.errors import JobError
from unisono_lab.report.charts import charts
from unisono_lab.report.document import Document, document
from unisono_lab.report.drawing import Drawing, drawn
from unisono_lab.report.report import page, require_reports, write_report
from unisono_lab.report.verdict import advice, correctness, explanations, threats, verdict
from unisono_lab.study.analysis import Analysis, Prices, ReportSettings, analyzed
from unisono_lab.study.estimate import NOTHING, duration, number, percent, shown
from unisono_lab.study.results import BatchCurve, Cell, Results, Tried, read_batch_curve

pytestmark = pytest.mark.unit

TABLE = Results(
    cells=tuple(
        Cell(workers=workers, samples=50000, seconds=seconds, epoch_s=seconds)
        for workers, seconds in ((1, 45.0), (2, 24.0), (4, 12.0))
    )
)
HOSTILE = "<script>alert('1')</script> & \"x\" $x^{ \\frac _\x07\n" + "long" * 100
VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """Checks that tags are closed in their order; keeps tags, texts and identifiers."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.texts.append(" ".join(data.split()))

    @property
    def text(self) -> str:
        return " ".join(text for text in self.texts if text)


def said(results: Results, **wanted: object) -> Analysis:
    return analyzed(results, ReportSettings(**wanted))  # type: ignore[arg-type]


def plain(words: Sequence[str]) -> str:
    return " | ".join(words).replace("\u00a0", " ")


def in_memory(found: Analysis) -> tuple[Document, str]:
    """A report as a value, and as a page."""
    pictures = charts(found)
    value = document(found, pictures)
    drawings = {chart.name: drawn(chart) for chart in pictures}
    return value, page(value, drawings)


# --- sentences


def test_the_verdict_says_what_workers_brought() -> None:
    assert plain(verdict(said(TABLE))) == (
        "4 workers train 3.75 times as fast as one: 4167 instead of 1111 samples/s, an epoch in 12.0 s instead of "
        "45.0 s, an efficiency of 94 %."
    )


def test_the_verdict_has_an_interval_where_there_are_repeats() -> None:
    words = plain(verdict(said(MadeUp().results())))

    assert re.search(r"times as fast as one \(95 % interval \d\.\d\d … \d\.\d\d\)", words)


def test_each_curve_has_its_verdict_by_name() -> None:
    found = said(MadeUp(labels=("a", "b"), modes=("strong", "weak")).results())

    assert [words.split(":")[0] for words in verdict(found)] == [
        "a, strong scaling",
        "b, strong scaling",
        "a, weak scaling",
        "b, weak scaling",
    ]


def test_workers_that_outnumber_cores_are_not_called_scaling() -> None:
    found = said(MadeUp(crowded=(2, 4)).results())

    assert plain(verdict(found)).startswith("small: This is no measurement of scaling: 2 or 4 workers were more than")
    assert "times as fast" not in plain([*verdict(found), *advice(found)])
    assert any(words.startswith("Oversubscription: 2 and 4 workers") for words in threats(found))
    table = document(found, ()).sections[0].blocks[1].table
    assert table is not None
    assert {row[table.head.index("speedup")].text for row in table.rows} == {"1.00", NOTHING}


def test_some_workers_that_outnumber_cores_are_left_out_and_said_to_be() -> None:
    words = plain(verdict(said(MadeUp(crowded=(4,)).results())))

    assert words.startswith("small: 2 workers train 1.7")
    assert words.endswith("Runs with 4 workers say nothing about scaling: there were not cores enough for them.")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (
            (12.0, 12.1),
            r"More workers do not pay: 2 workers reach 0\.83 times \(95 % interval 0\.8.*\) the throughput of",
        ),
        (
            (7.0, 12.0),
            r"No gain by more workers stands out of the noise: 2 workers reach 1\.\d\d times \(95 % interval 0",
        ),
    ],
)
def test_workers_that_bring_nothing_are_said_to(seconds: tuple[float, float], words: str) -> None:
    runs = [(1, 10.0), (1, 10.1), *((2, each) for each in seconds)]
    cells = [Cell(workers=w, repeat=n % 2, samples=100, seconds=s) for n, (w, s) in enumerate(runs)]

    found = said(Results(cells=tuple(cells)))

    assert re.match(words, plain(verdict(found)))
    assert "1 worker for the shortest time" in plain(advice(found))


@pytest.mark.parametrize(
    ("results", "words"),
    [
        (Results(), "No run succeeded"),
        (Results(cells=TABLE.cells[:1]), "Only 1 worker was measured"),
        (Results(cells=TABLE.cells[1:]), "4 workers trained 4167 samples/s; one worker was not measured"),
        (Results(cells=(Cell(workers=2, samples=0, seconds=0, exit_code=1),)), "No run succeeded"),
    ],
)
def test_what_cannot_be_said_is_said(results: Results, words: str) -> None:
    found = said(results)

    assert plain(verdict(found)).startswith(words)
    assert Page(in_memory(found)[1]).text


def test_workers_are_recommended_for_time_efficiency_and_cost() -> None:
    words = plain(advice(said(TABLE, prices=Prices(3.0))))

    assert words.startswith("Recommended, of the measured numbers: 4 workers for the shortest time; at most 4 for")
    assert "1 for the lowest cost (an epoch costs 0.0375 with 1, 0.04 with 4; a worker's hour at 3.00)" in words


def test_what_keeps_it_from_being_linear_is_named_with_its_time() -> None:
    words = plain(explanations(said(MadeUp(noise=0.0).results())))

    assert words == (
        "small: With 4 workers a step takes 121 ms, 44.5 ms more than with perfect scaling: exposed communication "
        "40.0 ms and update 4.50 ms."
    )


def test_the_same_digest_is_the_same_weights() -> None:
    (curve,) = said(MadeUp().results()).curves

    assert correctness(curve).startswith("All 15 runs with 1, 2 and 4 workers ended with the same weights, bit for bit")


def test_other_digests_and_other_losses_are_told() -> None:
    cells = [cell.model_copy(update={"digest": f"{cell.workers}" * 64}) for cell in MadeUp().results().cells]
    (curve,) = said(Results(cells=tuple(cells))).curves
    assert correctness(curve).startswith("Different numbers of workers ended with different weights. Losses")

    cells = [cell.model_copy(update={"digest": f"{cell.repeat}" * 64}) for cell in cells]
    (curve,) = said(Results(cells=tuple(cells))).curves
    assert "not deterministic" in correctness(curve)

    cells = [cell.model_copy(update={"digest": None, "loss": 2.0 + cell.workers}) for cell in cells]
    (curve,) = said(Results(cells=tuple(cells))).curves
    assert "differ by up to 50 %" in correctness(curve)


@pytest.mark.parametrize(
    ("study", "words"),
    [
        (MadeUp(repeats=3), "Intervals rest on 3 repeats"),
        (MadeUp(repeats=1), "single run"),
        (MadeUp(noise=0.2), "Noise: "),
        (MadeUp(plain=()), "plain single-process loop was not measured"),
        (MadeUp(workers=(2, 4)), "One worker was not measured"),
        (MadeUp(), "The fits rest on 3 numbers of workers"),
    ],
)
def test_threats_follow_from_what_was_measured(study: MadeUp, words: str) -> None:
    assert any(words in each for each in threats(said(study.results())))
    assert not any(words in each for each in threats(said(MadeUp(workers=(1, 2, 4, 8)).results())))


def test_failed_runs_are_a_threat() -> None:
    bad = Cell(workers=2, repeat=1, samples=0, seconds=0.0, exit_code=139)

    assert threats(said(Results(cells=(*TABLE.cells, bad))))[0] == (
        "1 of 4 runs failed and is in no figure: strong, 2 workers (exit code 139)."
    )


def test_figures_have_three_digits_that_count() -> None:
    assert [number(value) for value in (4166.7, 45.0, 1.875, 0.00312, 0.0)] == [
        "4167",
        "45.0",
        "1.88",
        "0.0031",
        "0.00",
    ]
    assert [percent(share) for share in (0.9375, 0.0192)] == ["94\u00a0%", "1.9\u00a0%"]
    assert [duration(s) for s in (0.0851, 12.0, 450.0, 7380.0)] == ["85.1 ms", "12.0 s", "7 min 30 s", "2 h 03 min"]
    assert shown(" a\nb\x07 ") == "a b"
    assert len(shown("x" * 100)) == 48


# --- the files


@pytest.fixture(scope="module")
def drawing() -> Drawing:
    """Of some chart: drawing takes longer than all else, and most tests are about what stands around it."""
    (chart, *_) = charts(said(MadeUp().results()))
    return drawn(chart)


@pytest.fixture
def undrawn(drawing: Drawing, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test that does not look at the plots: they all look alike."""
    monkeypatch.setattr("unisono_lab.report.report.drawn", lambda chart: drawing)


def test_the_page_is_whole_and_needs_nothing_else(drawing: Drawing) -> None:
    found = said(MadeUp(labels=("a", "b"), modes=("strong", "weak")).results(), title="Two models")
    pictures = charts(found)
    value = document(found, pictures)
    text = page(value, {chart.name: drawing for chart in pictures})

    read = Page(text)

    assert read.text.startswith("Two models Two models a, strong scaling: 4 workers train")
    assert [tag for tag, _ in read.tags].count("svg") == 10
    identifiers = [about["id"] for _, about in read.tags if about.get("id")]
    assert len(identifiers) == len(set(identifiers))
    assert not re.search(r"(src|href)=\"(?!#)", text.replace("xmlns:xlink", ""))
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in read.tags}
    assert "prefers-color-scheme: dark" in text
    assert "#1f2328" not in text.split("</style>")[1]  # a picture's ink is that of the page
    assert {"Plots: weak scaling", "Glossary"} < {section.title for section in value.sections}


def test_predictions_are_marked_as_predictions() -> None:
    value = document(said(MadeUp().results(), predict=(4, 32)), ())
    text = page(value, {})

    (table,) = (
        block.table
        for section in value.sections
        for block in section.blocks
        if block.table is not None and "step model" in block.table.head
    )
    assert [row[table.head.index("workers")].text for row in table.rows] == ["32 (prediction)"]  # 4 were measured
    assert "Predictions, not measurements" in text


def test_a_hostile_label_is_text_and_nothing_else() -> None:
    results = MadeUp(labels=(HOSTILE, "_hidden"), modes=("strong",)).results()
    evil = results.model_copy(update={"commands": (HOSTILE,), "settings": {HOSTILE: HOSTILE * 5}, "notes": (HOSTILE,)})

    _, text = in_memory(analyzed(evil, ReportSettings(title=HOSTILE), {HOSTILE: BATCHES}))

    read = Page(text)
    assert not {"script"} & {tag for tag, _ in read.tags}
    assert "<script>alert('1')</script>" in read.text
    assert "_hidden" in read.text


BATCHES = BatchCurve(
    rows=(
        *(Tried(batch=2**n, samples_per_s=100.0 + n, peak_mib=50.0 * n, fits=True) for n in range(2, 8)),
        Tried(batch=256, fits=False),
    ),
    largest=128,
    best=64,
)


@pytest.mark.slow
def test_the_files_of_a_report_are_all_there(tmp_path: Path) -> None:
    write_report(MadeUp().results(), tmp_path, ReportSettings(), {"small": BATCHES})

    names = {
        "epoch-time-strong",
        "throughput-strong",
        "speedup-strong",
        "efficiency-strong",
        "breakdown-strong",
        "batch-size",
    }
    assert {path.name for path in tmp_path.iterdir()} == {
        *("report.html", "results.csv", "results.json", "plots"),
    }
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {f"{n}.{s}" for n in names for s in ("png", "svg")}
    for path in (tmp_path / "plots").glob("*.svg"):
        assert ElementTree.parse(path).getroot().tag.endswith("svg")  # noqa: S314 (our own)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (tmp_path / "plots").glob("*.png"))
    text = Page((tmp_path / "report.html").read_text()).text
    assert "the largest batch that fits has 128 samples per worker; throughput is best with 64." in text


def timed_study(folder: Path) -> Path:
    """A study whose runs have timelines, but for one that took no step; its two workers take 3 and 1 ms for a shard."""
    for cell in ("strong-1-0", "strong-2-0", "strong-2-1", "weak-4-0", "elsewhere"):
        place = folder / "cells" / cell / "run" / "timeline"
        place.mkdir(parents=True)
        for rank in range(2 if cell == "strong-2-0" else 0):
            header = {"worker": f"rank-{rank}", "host": "h", "pid": 1, "clock": "c", "now": 0, "time": 1.0}
            ends = 1_000_000 + rank * 2_000_000
            spans = [
                *(["step", 0, 4_000_000, 1, -1], ["forward", 0, ends, 1, rank], ["compute", 0, ends, 1, -1]),
                *(["exchange", ends, 4_000_000, 1, -1], ["exposed", ends, 4_000_000, 1, -1]),
            ]
            about = {"done": True, "generation": 1, "rank": rank, "workers": 2, "spans": spans}
            steps = [{"step": step, "at": 5_000_000 * step, **about} for step in range(3)]
            lines = "".join(f"{json.dumps(line)}\n" for line in (header, *steps))
            (place / f"rank-{rank}.jsonl").write_text(lines)
    return folder


@pytest.mark.slow
def test_a_report_shows_a_step_of_the_run_on_the_most_workers(tmp_path: Path) -> None:
    write_report(TABLE, tmp_path / "report", ReportSettings(), sources=[timed_study(tmp_path / "study")])

    text = Page((tmp_path / "report" / "report.html").read_text()).text
    assert "one step of 2 workers, strong scaling: Step 1, the median of 2, takes 4 ms with 2 workers." in text
    assert "Worker 1 on host h is 3.0 times slower in compute than the others (3 ms for a shard)." in text
    assert [path.name for path in (tmp_path / "report" / "plots").glob("step-*.svg")] == ["step-1.svg"]


@pytest.mark.slow
def test_the_same_figures_make_the_same_report(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_report(TABLE, tmp_path / name, ReportSettings())

    for path in (tmp_path / "a").rglob("*.*"):
        assert path.read_bytes() == (tmp_path / "b" / path.relative_to(tmp_path / "a")).read_bytes(), path.name


def test_what_is_missing_for_a_report_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)

    with pytest.raises(JobError, match=r"a report needs jinja2: pip install '\.\[study\]'"):
        require_reports()


def test_a_file_of_batches_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    assert read_batch_curve(tmp_path) is None
    (tmp_path / "batch-size.json").write_text('{"rows": [{"batch": 0, "fits": true}]}')

    with pytest.raises(JobError, match=r"batch-size\.json cannot be read"):
        read_batch_curve(tmp_path)


# --- the commands


@pytest.mark.usefixtures("undrawn")
def test_a_table_becomes_a_report_by_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "published.csv"
    path.write_text("workers,epoch_s,images\n1,45,50000\n2,24,50000\n4,12,50000\n")

    assert unisono("study", "--from", str(path)) == 0

    printed = capsys.readouterr().out
    assert all(word in printed for word in ("1111", "2083", "4167", "1.88", "3.75"))
    text = Page((tmp_path / "published-report" / "report.html").read_text()).text
    assert all(word in text for word in ("1111", "2083", "4167", "1.88", "3.75"))
    assert len(json.loads((tmp_path / "published-report" / "results.json").read_text())["cells"]) == 3


@pytest.mark.usefixtures("undrawn")
def test_two_studies_become_one_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, labels in (("north", ("",)), ("south", ("",))):
        MadeUp(labels=labels).results().write(tmp_path / name)
    (tmp_path / "north" / "batch-size.json").write_text(BATCHES.model_dump_json())

    folders = [str(tmp_path / name) for name in ("north", "south")]
    assert unisono("study", "compare", *folders, "--out", str(tmp_path / "both")) == 0

    printed = capsys.readouterr().out
    assert "north: 4 workers train" in printed
    assert "south: 4 workers train" in printed
    assert "north: the largest batch" in Page((tmp_path / "both" / "report.html").read_text()).text


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["study", "compare", "a"], "name two studies"),
        (["study", "--from", "nope.csv"], "nope.csv cannot be read"),
        (["study", "--from", "results.csv", "--out", "."], "would replace"),
        (["study", "--from", "results.csv", "--efficiency", "80"], "--efficiency 80"),
        (["study", "--from", "results.csv", "--predict", "8,x"], "--predict '8,x'"),
        (["study", "--from", "results.csv", "--price", "-1"], "--price -1"),
    ],
)
def test_what_cannot_be_reported_is_one_line(
    args: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results.csv").write_text("workers,seconds,samples\n1,1,1\n")

    assert unisono(*args) == 2
    assert words in capsys.readouterr().err
