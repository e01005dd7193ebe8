"""The page of a run in a real browser: what it shows, what its buttons do, and what it does not let in."""

import io
import json
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chromium import CHROMIUM, LINK, chromium
from browser import Viewer
from forks.commands import start
from training import PATIENCE_S, Training

pytestmark = [pytest.mark.procs, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: make browser")]

SHOWN = Path(__file__).parent / "scripts" / "shown.py"
Look = Callable[..., Viewer]


@pytest.fixture  # one for each test: its helpers come when they like, and have to be gone with it
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture
def look(browser: Any) -> Iterator[Look]:
    """Opens a link; whatever a page has complained of by the end of the test fails it."""
    viewers: list[Viewer] = []

    def opened(link: str, **context: Any) -> Viewer:
        viewers.append(Viewer(browser, link, **context))
        return viewers[-1]

    yield opened
    complaints = [one for viewer in viewers for one in viewer.complaints]
    for viewer in viewers:
        viewer.close()
    assert [one for one in complaints if "net::ERR" not in one and "401" not in one and "403" not in one] == []


@pytest.fixture
def job(started: list[Training], tmp_path: Path) -> Training:
    """A job with a page, that trains until it is told to hurry."""
    started.append(
        Training(tmp_path / "run", "-n", "2:3", "--here", "3", "--page", script=SHOWN, EPOCHS="100", PACE_S="0.05")
    )
    return started[-1]


def link_of(training: Training) -> str:
    training.until_so(lambda: LINK.search(training.output.read_text()) is not None, "the link")
    found = LINK.search(training.output.read_text())
    assert found is not None
    return found[0]


SEATED = """count => document.querySelectorAll('.worker .cell').length === 8
    && [...document.querySelectorAll('.worker')].filter((one) => one.querySelector('.cell')).length === count"""
RESTARTED = """() => [...document.querySelectorAll('#events li')]
    .some((one) => one.textContent.includes('coordinator restarted'))"""
STOP = """async () => (await fetch('/ask/stop', {
    method: 'POST', body: '{}', headers: { 'x-unisono-page': localStorage.getItem('unisono-page') },
})).status"""
LOST = """() => new Promise((resolve) => {
    const seen = () => document.querySelector('#events li[data-kind="lost"]') && resolve(Date.now());
    new MutationObserver(seen).observe(document.getElementById('events'), { childList: true, subtree: true });
    window.ready = true;
})"""


@pytest.mark.alone
def test_a_worker_that_is_killed_is_shown_as_lost_within_a_second(job: Training, look: Look) -> None:
    viewer = look(link_of(job))
    viewer.until("() => document.querySelectorAll('.worker .cell').length === 8")
    job.until_step(5)
    workers = viewer.page.eval_on_selector_all(".worker", "found => found.map(one => one.dataset.worker)")
    victim = job.pid_of(workers[-1])
    viewer.page.evaluate(f"() => {{ window.shown = ({LOST})(); }}")
    killed = time.time()
    os.kill(victim, signal.SIGKILL)
    assert viewer.page.evaluate("() => window.shown") / 1000 - killed < 1.0
    job.hurry()
    job.end()


@pytest.mark.slow
def test_what_is_pressed_is_done_and_who_comes_late_or_may_only_look_sees_it_all(job: Training, look: Look) -> None:
    viewer = look(link_of(job))
    viewer.until("() => document.querySelectorAll('.worker .cell').length === 8")
    assert "#" not in viewer.page.url
    before = len(job.journal("minted")[-1]["workers"])

    viewer.press("[data-ask=resize]")
    viewer.page.fill("#dialog input[type=number]", "3" if before == 2 else "2")
    viewer.press("#dialog-yes")
    job.until("resized", by="a person")
    wanted = 5 - before
    viewer.until(SEATED, wanted)
    step = job.steps[-1]
    job.until_so(lambda: job.steps[-1] > step + 2, "steps with the new number")
    assert len(job.journal("minted")[-1]["workers"]) == wanted

    viewer.press("[data-ask=checkpoint]")
    viewer.press("#dialog-yes")
    job.until("checkpoint")
    os.kill(job.coordinator, signal.SIGKILL)
    job.until("coordinator restarted")

    viewer.press("#share")
    late = look(viewer.until("() => document.getElementById('dialog-link').value"))
    viewer.page.keyboard.press("Escape")
    late.until(RESTARTED)
    assert late.text("#may") == "look only"
    assert not late.page.is_visible("[data-ask=stop]")
    assert late.page.evaluate(STOP) == 403
    kinds = set(late.page.eval_on_selector_all("#events li", "found => found.map(one => one.dataset.kind)"))
    assert {"run", "resize", "checkpoint"} <= kinds
    title = late.page.locator("[data-plot^='metric/'] h3")
    assert title.inner_text().startswith("<img src=x")
    assert "taken" not in late.page.title()
    assert late.page.locator("main img, main script").count() == 0
    assert len(job.journal("checkpoint")) == 1

    viewer.until("() => !document.getElementById('asks').hidden")
    viewer.press("[data-ask=stop]")
    viewer.press("#dialog-yes")
    viewer.until("() => document.getElementById('state').textContent === 'stopped'")
    assert job.process.wait(PATIENCE_S) == 75


# -- a run that is over, in a browser of each size


def line(second: float, event: str, **fields: Any) -> str:
    return json.dumps(
        {"time": f"2026-01-01T00:{int(second) // 60:02}:{second % 60:06.3f}+00:00", "event": event, **fields}
    )


@pytest.fixture
def over(tmp_path: Path) -> Path:
    """A run folder with all that a page can show."""
    folder = tmp_path / "over"
    folder.mkdir()
    journal = [
        line(0, "asked for", workers=["w1", "w2", "w3"], host="a", delay_s=0.0),
        line(1, "minted", generation=1, workers=["w1", "w2"], joined=["w1", "w2"], shards=[4, 4], seconds=0.0),
        line(1, "started", world_size=2, launcher="unisono", pid=1),
        line(8, "resized", workers=3, before=2, asked_for=3, by="a person"),
        line(9, "minted", generation=2, workers=["w1", "w2", "w3"], joined=["w3"], shards=[3, 3, 2], seconds=0.5),
        line(10, "formed", generation=2, seconds={"regroup": 0.5, "form": 0.25, "copy": 0.25}),
        line(11, "decided", step=300, policy="noise", verb="set_batch_size", value=64, why={"noise_scale": 99.0}),
        line(12, "decided", step=320, policy="p", verb="set_strategy", value="diloco", why={}),
        line(13, "decided", step=340, policy="p", verb="set_topology", value="ring", why={}),
        line(14, "checkpoint", step=400, bytes=1000, seconds=0.1),
        line(15, "healed", step=410, what="weights", ranks=[1], hosts=["a"]),
        *(
            line(16 + at, "observed", step=420 + at, policy="spot", figures={"price": 0.2 + at % 3, "notices": at // 9})
            for at in range(10)
        ),
        line(30, "lost", worker="w2", host="a", rank=1, why="it ended with signal 9"),
        line(30.1, "minted", generation=3, workers=["w1", "w3"], joined=[], lost=["w2"], shards=[4, 4], seconds=0.1),
        line(40, "left", worker="w3", host="a", reason="it was asked to leave"),
        line(50, "over", outcome="done", reason="", digest="d"),
    ]
    metrics = (
        {
            "time": 1767225601 + step / 20,
            "step": step,
            "epoch": step // 100,
            "loss": 2 * math.exp(-step / 200),
            "lr": 0.1,
            "batch_size": 32 + step // 10,
            "samples_per_s": 900 + step % 7,
            "noise_scale": 10 + step,
            "gradient_norm": 1 + math.sin(step / 30),
            "generation": 3,
            "world_size": 2,
            "shard_s": [0.01, 0.02],
            "seconds": {"data": 0.001, "compute": 0.02, "exposed_communication": 0.004, "update": 0.002, "total": 0.03},
            "accuracy": 1 - math.exp(-step / 100),
        }
        for step in range(1500)
    )
    (folder / "job.json").write_text(json.dumps({"shards": 8, "batch_size": 32}))
    (folder / "journal.jsonl").write_text("".join(f"{one}\n" for one in journal))
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in metrics))
    (folder / "result.json").write_text(json.dumps({"exit_code": 0, "error": None, "weights_sha256": "d" * 64}))
    return folder


@pytest.fixture
def link(over: Path, tmp_path: Path, look: Look) -> Iterator[str]:
    """That of a page of this run folder. It ends before those who look go, and says nothing of it."""
    output = tmp_path / "page.txt"
    with output.open("wb") as file:
        process = start("page", str(over), cwd=tmp_path, stdout=file, stderr=subprocess.STDOUT)
    begun = time.monotonic()
    while (found := LINK.search(output.read_text())) is None:
        assert time.monotonic() - begun < PATIENCE_S, output.read_text()
        time.sleep(0.02)
    yield found[0]
    process.send_signal(signal.SIGINT)
    process.wait(PATIENCE_S)
    assert len(output.read_text().splitlines()) == 1, output.read_text()


PLOTS = {
    *("loss", "metric/accuracy", "throughput", "seconds", "shards", "lr", "batch", "noise", "norm"),
    *("observed/price", "observed/notices"),
}
KINDS = {"lost", "join", "left", "resize", "decision", "strategy", "topology", "checkpoint", "healed", "notice", "run"}


def drawn(png: bytes, colour: str) -> int:
    """The pixels of about this colour, rgb(r, g, b)."""
    from PIL import Image

    wanted = [int(part) for part in colour[4:-1].split(",")]
    pixels = Image.open(io.BytesIO(png)).convert("RGB").tobytes()
    triples = zip(pixels[::3], pixels[1::3], pixels[2::3], strict=True)
    return sum(all(abs(a - b) < 40 for a, b in zip(one, wanted, strict=True)) for one in triples)


HUES = """() => [...Array(8).keys()].map((hue) => {
    const probe = document.body.appendChild(document.createElement('i'));
    probe.className = `hue-${hue}`;
    const found = getComputedStyle(probe).color;
    probe.remove();
    return found;
})"""
CONTRASTS = """() => [...Array(8).keys()].map((hue) => {
    const cells = document.body.appendChild(document.createElement('i'));
    cells.className = `cells hue-${hue}`;
    const cell = cells.appendChild(document.createElement('i'));
    cell.className = 'cell';
    const number = cell.appendChild(document.createElement('span'));
    const lights = [getComputedStyle(cell).backgroundColor, getComputedStyle(number).color].map((colour) =>
        colour.match(/\\d+/g).map((part) => part / 255)
            .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
            .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0.05));
    cells.remove();
    return Math.max(...lights) / Math.min(...lights);
})"""
"""Of the numbers on cells, as the Web Content Accessibility Guidelines reckon it."""
DASHES = "plot => [...plot.querySelectorAll('.legend line')].map((one) => one.getAttribute('stroke-dasharray'))"


@pytest.mark.slow
def test_every_plot_is_drawn_and_fits_each_screen_in_light_and_dark(link: str, look: Look) -> None:
    viewer = look(link)
    viewer.until("count => document.querySelectorAll('.plot canvas').length === count", len(PLOTS))
    viewer.until("() => document.querySelector('[data-plot=loss] .canvas').dataset.points === '750'")
    for scheme, width in (("light", 1280), ("dark", 390)):
        viewer.page.emulate_media(color_scheme=scheme)
        viewer.page.set_viewport_size({"width": width, "height": 900})
        viewer.until("scheme => document.documentElement.dataset.theme === scheme", scheme)
        check_drawing(viewer)
    marks = viewer.page.eval_on_selector_all(
        "#ribbon g.mark[class*=kind-]", "all => all.map(one => one.classList[1].slice(5))"
    )
    assert set(marks) == KINDS
    assert viewer.page.locator("#ribbon .stall").count() == 2
    assert viewer.text("#state") == "done"


def check_drawing(viewer: Viewer) -> None:
    plots = viewer.page.locator(".plot")
    assert {plot.get_attribute("data-plot") for plot in plots.all()} == PLOTS
    colours = viewer.page.evaluate(HUES)
    viewer.page.mouse.move(0, 0)
    assert min(viewer.page.evaluate(CONTRASTS)) > 4.5
    wide = "() => document.querySelector('[data-plot=loss] canvas').clientWidth <= document.body.clientWidth"
    viewer.until(wide)
    for plot in plots.all():
        shot = plot.locator(".canvas").screenshot()
        dashes = plot.evaluate(DASHES)
        assert len(set(dashes)) == len(dashes), "curves that nobody can tell apart without colours"
        several = plot.get_attribute("data-plot") in ("seconds", "shards")
        for colour in colours[: 2 if several else 1]:
            assert drawn(shot, colour) > 60, (plot.get_attribute("data-plot"), colour)
    assert viewer.page.evaluate("() => document.documentElement.scrollWidth - innerWidth") <= 0


@pytest.mark.slow
def test_all_is_reached_by_keyboard_and_a_link_opens_once(link: str, look: Look) -> None:
    viewer = look(link)
    viewer.until("() => document.querySelector('#ribbon .mark.kind-decision')")
    viewer.page.focus("#ribbon .mark.kind-decision[tabindex='0']")
    assert "noise_scale" in viewer.text("#tip")
    viewer.page.focus("#ribbon .mark.kind-lost[tabindex='0']")  # it names no step, and was 29 s after the first
    assert re.search(r"after step\s+5(79|80)\b", viewer.text("#tip")), viewer.text("#tip")
    viewer.page.focus("#ribbon [data-key='span-3']")
    viewer.page.keyboard.press("ArrowLeft")
    assert "stood still" in viewer.text("#tip")
    viewer.until("() => document.querySelector('[data-plot=loss] .canvas').dataset.points === '750'")
    viewer.page.focus("[data-plot=loss] .canvas")
    viewer.page.keyboard.press("Home")
    viewer.until("() => document.querySelector('[data-plot=loss] .value').textContent.includes('step 1')")
    viewer.page.keyboard.press("+")  # each of the first 750 steps has a point, and two of the others share one
    viewer.until("() => document.querySelector('[data-plot=loss] .canvas').dataset.points === '1125'")
    viewer.page.keyboard.press("Escape")
    viewer.until("() => document.querySelector('[data-plot=loss] .canvas').dataset.points === '750'")
    plot = viewer.page.locator("[data-plot=loss] .u-over")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    viewer.page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 50)
    viewer.page.mouse.down()
    viewer.page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 50)
    viewer.page.mouse.up()  # 150 steps, which had 75 points
    viewer.until("() => Math.abs(document.querySelector('[data-plot=loss] .canvas').dataset.points - 825) < 10")
    viewer.press("#whole")
    viewer.page.focus("[data-plot=shards] .legend button")
    colour = viewer.page.evaluate(HUES)[0]
    assert drawn(viewer.page.locator("[data-plot=shards] .canvas").screenshot(), colour) > 60
    viewer.page.keyboard.press("Enter")
    viewer.page.mouse.move(0, 0)
    assert drawn(viewer.page.locator("[data-plot=shards] .canvas").screenshot(), colour) == 0
    second = look(link)  # it has been opened
    second.until("() => document.getElementById('trouble').textContent.includes('been used')")
    assert second.page.locator(".plot").count() == 0


@pytest.mark.slow
def test_a_job_that_nobody_can_ask_says_why_it_has_no_buttons(over: Path, link: str, look: Look) -> None:
    viewer = look(link)
    said = "words => document.getElementById('workers-note').textContent.includes(words)"
    viewer.until("() => document.querySelector('#events li')")
    assert not viewer.page.evaluate(said, "no coordinator")
    (over / "result.json").unlink()
    journal = over / "journal.jsonl"
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:-1]))  # it is not over
    viewer.until(said, "no coordinator")
    assert viewer.page.is_hidden("#asks")
