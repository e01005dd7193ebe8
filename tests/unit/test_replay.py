"""A run's timeline, policies that look at a recorded run, and the command that shows both."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from called import unisono
from unisono.adapt.batch_policies import NoiseScalePolicy
from unisono.adapt.view import Decision, Policy, View
from unisono.errors import JobError, PolicyError
from unisono.job import Job
from unisono.jsonl import damaged_lines
from unisono_lab.commands.replay import comparison_table, timeline_table
from unisono_lab.recorded.policy_replay import replay
from unisono_lab.recorded.record import Record, compared, figure, folded, timeline, valid_decisions

pytestmark = pytest.mark.unit

JOB = Job.create(batch_size=64, shards=8)
STEPS = 12
DECIDED: Sequence[Mapping[str, Any]] = (
    {"step": 4, "policy": "noise-scale", "verb": "set_batch_size", "value": 128, "why": {"noise_scale": 145.791575}},
    {"step": 5, "policy": "noise-scale", "verb": "set_learning_rate", "value": 0.15, "why": {"steps_left": 1}},
    {"step": 5, "policy": "grow", "verb": "resize", "value": 3, "why": {"batch_size": 128}},
    {"step": 6, "policy": "noise-scale", "verb": "set_learning_rate", "value": 0.2, "why": {"steps_left": 0}},
)


def event(name: str, second: float, **fields: Any) -> dict[str, Any]:
    return {"time": f"2026-01-01T10:00:{second:06.3f}+00:00", "event": name, **fields}


JOURNAL = [
    event("agent joined", 0, agent="a1", host="north", workers=3),
    event("minted", 1.25, generation=1, workers=["w1", "w2"], joined=["w1", "w2"], lost=[], shards=[4, 4]),
    event("started", 1.5, world_size=2, launcher="single", pid=4711),
    *(event("decided", 2 + number, **fields) for number, fields in enumerate(DECIDED)),
    event("lost", 7.5, worker="w2", host="north", rank=1, why="it ended with signal 9"),
    event("resized", 8, workers=3, before=2, asked_for=4, by="w1"),
    event("topology", 8.5, bytes=5000, fastest="ring", seconds={"ring": 0.0025, "star": 0.01}),
    event("checkpoint", 9, step=10, bytes=123456),
    event("finished", 9.75, step=12, weights_sha256="ab" * 32),
]
NOISE = {"gradient_variance": 130.0, "gradient_signal": 1.0, "noise_scale": 130.0}


def metrics(**changes: Any) -> list[dict[str, Any]]:
    return [
        {"step": step, "epoch": step // 4, "position": 64 * step, "batch_size": 64, "loss": 2.0 / (step + 1), "lr": 0.1}
        | {"generation": 1, "world_size": 2, "seconds": {"total": 0.1}, "samples_per_s": 640.0}
        | ({"ends_epoch": True} if step % 4 == 3 else {})
        | changes
        for step in range(STEPS)
    ]


def write(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of twelve steps whose gradients were watched."""
    path = tmp_path / "run"
    path.mkdir()
    (path / "job.json").write_text(json.dumps(asdict(JOB)))
    write(path / "journal.jsonl", JOURNAL)
    write(path / "metrics.jsonl", metrics(**NOISE))
    return path


# --- the timeline


def test_decisions_behind_a_checkpoint_are_those_of_the_run_that_went_on_from_it() -> None:
    first, again = {**DECIDED[0], "value": 100}, DECIDED[0]
    early = {**DECIDED[0], "step": 1}
    journal = [
        event("started", 0),
        event("decided", 1, **early),
        event("decided", 2, **first),
        event("started", 3),
        event("resumed", 4, step=3),
        event("decided", 5, **again),
        event("decided", 6, **again),  # by the main worker that took over
    ]
    assert [(step, one.value) for step, one in valid_decisions(journal)] == [(1, 128), (4, 128)]
    anew = [*journal, event("started", 7), event("decided", 8, **early)]
    assert [(step, one.value) for step, one in valid_decisions(anew)] == [(1, 128)]


def test_only_what_is_alike_at_steps_in_a_row_is_folded() -> None:
    items = [("a", 1), ("b", 1), ("a", 2), ("b", 3), ("a", 3), ("a", 5)]
    found = folded(items, kind=lambda item: item[0], step=lambda item: item[1])
    assert found == [[("a", 1), ("a", 2), ("a", 3)], [("b", 1)], [("b", 3)], [("a", 5)]]


def shown(table: Any, width: int) -> str:
    console = Console(width=width, highlight=False, emoji=False)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def numbers(value: Any) -> Iterator[str]:
    """All numbers in a value, as tables show them."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from re.findall(r"\d[\d.]*", name)
            yield from numbers(part)
    elif isinstance(value, list):
        for part in value:
            yield from numbers(part)
    else:
        yield from re.findall(r"\d[\d.]*", figure(value))


@pytest.mark.parametrize("unfolded", [True, False])
def test_every_number_of_the_table_is_the_journals(unfolded: bool) -> None:
    happenings = timeline(JOURNAL)
    text = shown(timeline_table(happenings, unfolded=unfolded), 200)
    seconds = {f"{one.seconds:.3f}" for one in happenings}
    known = seconds | {number for line in JOURNAL for number in numbers({**line, "time": None})}
    found = set(re.findall(r"\d[\d.]*", text))
    assert found <= known
    assert {"145.792", "128", "0.15", "0.2", "123456", "5000", "9.750"} <= found


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_and_lose_nothing(width: int, folder: Path) -> None:
    record = Record.read(folder)
    pairs = compared(valid_decisions(record.journal), replay(record, [NoiseScalePolicy(512, every=2)]).decisions)
    for table in (timeline_table(timeline(JOURNAL), unfolded=False), comparison_table(pairs, unfolded=False)):
        text = shown(table, width)
        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text.replace(" … ", "").replace(" …", "")
    text = re.sub(r"\s+", "", shown(timeline_table(timeline(JOURNAL), unfolded=False), width))
    assert "ab" * 32 in text
    assert "set_learning_rate(0.15…0.2)" in text


# --- policies on a recorded run


class Sees(Policy):
    """Remembers when it was asked what."""

    def __init__(self) -> None:
        self._asked: list[tuple[str, int]] = []

    def before_train(self, view: View) -> None:
        self._asked.append(("before_train", view.step))

    def after_step(self, view: View) -> None:
        self._asked.append(("after_step", view.step))

    def after_epoch(self, view: View) -> None:
        self._asked.append(("after_epoch", view.step))

    def after_train(self, view: View) -> None:
        self._asked.append(("after_train", view.step))
        self.stop()


def test_a_policy_is_asked_in_the_order_of_a_run(folder: Path) -> None:
    policy = Sees()
    replayed = replay(Record.read(folder), [policy])
    steps = [("after_step", step) for step in range(1, STEPS + 1)]
    for step in (12, 8, 4):
        steps.insert(step, ("after_epoch", step))
    assert policy._asked == [("before_train", 0), *steps, ("after_train", 12)]
    assert replayed.decisions == []  # after the training verbs do nothing


def test_batch_and_rate_follow_the_replays_own_decisions(folder: Path) -> None:
    replayed = replay(Record.read(folder), [NoiseScalePolicy(largest=512, every=2, ramp=2)])
    assert [(step, one.verb, one.value) for step, one in replayed.decisions] == [
        (2, "set_batch_size", 128),
        (3, "set_learning_rate", pytest.approx(0.1 * 2**0.5)),
        (4, "set_learning_rate", pytest.approx(0.2)),
    ]
    assert [batch for _, batch, _ in replayed.settings] == [64] * 3 + [128] * 10
    assert replayed.settings[-1][2] == pytest.approx(0.2)


def test_decisions_are_compared_by_step_policy_and_verb(folder: Path) -> None:
    run = valid_decisions(JOURNAL)
    other = [(4, run[0][1]), (5, Decision("noise-scale", "set_learning_rate", 0.16)), (7, Decision("grow", "stop"))]
    found = [(pair.step, pair.policy, pair.verb, pair.likeness) for pair in compared(run, other)]
    assert found == [
        (4, "noise-scale", "set_batch_size", "alike"),
        (5, "noise-scale", "set_learning_rate", "different"),
        (5, "grow", "resize", "in the run alone"),
        (6, "noise-scale", "set_learning_rate", "in the run alone"),
        (7, "grow", "stop", "in the replay alone"),
    ]


def test_what_is_not_recorded_is_said_with_how_to_record_it(folder: Path) -> None:
    policy = NoiseScalePolicy(largest=512)
    write(folder / "metrics.jsonl", metrics())
    with pytest.raises(JobError, match=r"noise-scale: reads the gradients' noise.*does not record.*'monitor': 1"):
        replay(Record.read(folder), [policy])
    (folder / "job.json").write_text(json.dumps(asdict(Job.create(batch_size=64, shards=1))))
    with pytest.raises(JobError, match="one shard cannot measure; train with at least 2 shards"):
        replay(Record.read(folder), [policy])
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(JobError, match=r"metrics\.jsonl holds no step"):
        replay(Record.read(folder), [Sees()])


def test_figures_that_are_not_recorded_in_every_step_are_counted(folder: Path) -> None:
    lines = metrics(**NOISE, gradient_norm=1.0)
    write(folder / "metrics.jsonl", [{**line, "workers": []} if line["step"] % 3 else line for line in lines])
    found = replay(Record.read(folder), [Sees()])
    assert (found.unwatched, found.untimed) == (0, 4)
    write(folder / "metrics.jsonl", [*metrics()[:5], *lines[5:]])
    assert replay(Record.read(folder), [NoiseScalePolicy(largest=512)]).unwatched == 5


def test_a_policy_that_fails_for_want_of_times_hears_how_to_record_them(folder: Path) -> None:
    class Slowest(Policy):
        def after_step(self, view: View) -> None:
            max(worker.shard_s for worker in view.workers)

    with pytest.raises(PolicyError, match=r"slowest failed in after_step.*had not recorded.*'monitor': 1"):
        replay(Record.read(folder), [Slowest()])


class Fails(Policy):
    def after_step(self, view: View) -> None:
        if view.step == 3:
            raise ZeroDivisionError("no")


def test_a_policy_that_fails_is_named_with_the_step(folder: Path) -> None:
    with pytest.raises(PolicyError, match="after step 3 of the recorded run: the policy fails failed in after_step"):
        replay(Record.read(folder), [Fails()])


# --- reading


def test_damaged_lines_are_named_and_a_last_one_that_is_being_written_is_not(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    whole = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*whole[:3], '{"step": 3, "lo\n', "[1]\n", *whole[5:], '{"step": 12, "lo']))
    assert damaged_lines(path) == [4, 5]
    record = Record.read(folder)
    assert record.damaged == [f"{path}: lines 4, 5 cannot be read and are left out"]
    assert replay(record, [Sees()]).gaps == [3, 4]


# --- the command


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_the_command_shows_the_timeline(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert unisono("replay", folder) == 0
    text = capsys.readouterr().out
    assert re.search(r"4 +2\.000 s +decided +noise-scale: set_batch_size\(128\)", text)
    assert re.search(r"5-6 +3\.000 s +decided +noise-scale: set_learning_rate\(0\.15 … 0\.2\)", text)
    assert "w2 (rank 1) on north is lost: it ended with signal 9" in text
    assert "agent joined" not in text
    assert unisono("replay", folder, "--all") == 0
    text = capsys.readouterr().out
    assert "agent joined" in text
    assert "5-6" not in text


def test_the_command_prints_lines_for_programs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert unisono("replay", folder, "--all", "--json") == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [{name: value for name, value in line.items() if name != "after_s"} for line in found] == JOURNAL
    assert [line["after_s"] for line in found][:3] == [0.0, 1.25, 1.5]
    assert unisono("replay", folder, "--json", "--policy", "noise-scale") == 0
    captured = capsys.readouterr()
    found = [json.loads(line) for line in captured.out.splitlines()]
    assert [(line["step"], line["likeness"], line["replay"]) for line in found] == [
        (line["step"], "in the run alone", None) for line in DECIDED
    ]
    assert "which do not react to their decisions" in captured.err


def test_the_command_shows_what_a_policy_of_a_users_module_would_have_done(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "import unisono\n\nclass MyPolicy(unisono.Policy):\n    def after_step(self, view):\n        "
    Path("my_module_of_policies.py").write_text(
        source + "if view.step == 7:\n            self.checkpoint(loss=view.metrics['loss'])\n"
    )
    assert unisono("replay", folder, "--policy", "my_module_of_policies:MyPolicy") == 0
    text = capsys.readouterr().out
    assert re.search(r"7 +my +checkpoint\(\)", text)
    assert "loss 0.285714" in text
    assert "Decisions: 1 in the replay alone, 4 in the run alone." in text
    assert "do not react to their decisions; only batch size and learning rate follow" in text.replace("\n", " ")


def test_a_run_without_decisions_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder / "journal.jsonl", [line for line in JOURNAL if line["event"] != "decided"])
    assert unisono("replay", folder) == 0
    assert "No policy decided anything in this run." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nowhere"], "there is no run folder"),
        (["."], "is no run folder: it has no job.json; did you mean"),
        (["run", "--policy", "greedy"], "there is no policy 'greedy'"),
        (["run", "--plot", "run.gif"], "--plot run.gif: end its name with .png, .svg or .pdf"),
        (["run", "--plot", "nowhere/run.png"], "--plot nowhere/run.png: there is no folder"),
        (["empty"], "holds no records"),
        (["other"], "is no job of this version"),
    ],
)
def test_what_cannot_be_replayed_is_one_clear_line_and_exit_code_2(
    folder: Path, capsys: pytest.CaptureFixture[str], args: list[str], words: str
) -> None:
    for name, job in {"empty": json.dumps(asdict(JOB)), "other": '{"batch_size": "many"}'}.items():
        (folder.parent / name).mkdir()
        (folder.parent / name / "job.json").write_text(job)
    if "run.gif" not in args and "nowhere/run.png" not in args:
        assert unisono("replay", *args) == 2
    else:
        assert unisono("replay", *args) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(said) == 1
    assert words in said[0]


def test_the_timeline_needs_no_torch(folder: Path) -> None:
    program = (
        f"import sys; sys.argv = ['unisono', 'replay', {str(folder)!r}]\nfrom unisono.cli.app import main\n"
        "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, capture_output=True).returncode == 0


# --- the picture


@pytest.mark.parametrize(
    ("suffix", "begin", "end"),
    [("svg", b"<?xml", b"</svg>"), ("pdf", b"%PDF", b"%%EOF"), ("png", b"\x89PNG", b"IEND\xaeB`\x82")],
)
def test_the_picture_of_a_replay_is_one(suffix: str, begin: bytes, end: bytes, folder: Path) -> None:
    assert unisono("replay", folder, "--policy", "noise-scale", "--plot", f"run.{suffix}") == 0
    data = Path(f"run.{suffix}").read_bytes()
    assert data.startswith(begin)
    assert data.rstrip(b"\n").endswith(end)


def test_the_picture_shows_what_was_measured_and_where_something_was_decided(folder: Path) -> None:
    from unisono_lab.commands.replay import Picture, drawn

    record = Record.read(folder)
    figure = drawn(Picture(record, replay(record, [NoiseScalePolicy(512, every=2)])))
    lanes, *panels = figure.axes
    assert [axis.get_ylabel() for axis in panels] == ["loss", "samples", "learning rate", "workers", "samples / s"]
    assert [text.get_text() for text in lanes.texts] == ["noise-scale", "grow", "noise-scale (replay)"]
    marks = {line.get_label(): sorted(line.get_xdata()) for line in lanes.lines}
    assert marks["resize"] == [5]
    assert marks["set_batch_size"] == [2, 4]
    assert list(panels[0].lines[0].get_xdata()) == list(range(1, STEPS + 1))
    assert list(panels[0].lines[0].get_ydata()) == [line["loss"] for line in record.steps]
