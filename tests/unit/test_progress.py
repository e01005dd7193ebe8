"""The bar of a loop: on the main worker alone, whichever that is, and the same for plain loops and the trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import unisono
from unisono.host.status_line import VARIABLE, status_in
from unisono.train.record.progress import Display, EpochRecord, OfMainWorker, cell_bar, launcher_bar

Start = Callable[..., unisono.Run]

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_worker")]


class Noted(Display):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def begin(self, epoch: int, epochs: int, steps: int, done: int = 0) -> None:
        self.told.append(("begin", epoch, epochs, steps, done))

    def step(self, loss: float, samples_per_s: float, workers: int) -> None:
        self.told.append(("step", loss, workers))

    def close(self) -> None:
        self.told.append(("close",))


def test_another_main_worker_goes_on_with_the_bar_where_the_one_before_was_lost() -> None:
    shown, is_main = Noted(), False
    display = OfMainWorker(lambda: is_main, lambda: shown)
    display.begin(1, 3, 10)
    for _ in range(4):
        display.step(0.5, 1.0, 3)
    assert shown.told == []
    is_main = True
    display.step(0.25, 1.0, 2)
    display.step(0.125, 1.0, 2)
    display.begin(2, 3, 10)
    display.close()
    assert shown.told == [
        ("begin", 1, 3, 10, 4),
        ("step", 0.25, 2),
        ("step", 0.125, 2),
        ("begin", 2, 3, 10, 0),
        ("close",),
    ]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_bar_in_the_launchers_terminal_tells_all_and_is_drawn_some_times_a_second() -> None:
    said: list[str] = []
    clock = Clock()
    bar = launcher_bar(said.append, clock)
    bar.begin(0, 2, 200, 100)
    for _ in range(50):
        clock.now += 0.0625
        bar.step(0.5, 3200.0, 3)
    statuses = [status_in(line.rstrip("\n")) for line in said]
    assert len(statuses) == 1 + 12
    assert statuses[-1] == f"epoch 1/2 {'━' * 7}{'╌' * 3} 148/200 loss 0.5000 3200 samples/s 3 workers 0:00:03 left"
    bar.end(EpochRecord(0, 0.5, {}, {}, 2.0, 1000.0))
    bar.close()
    assert said[-2].endswith("epoch 1/2 loss 0.5000 1000 samples/s 2.0 s\n")
    assert status_in(said[-1].rstrip("\n")) == ""


def test_a_cell_has_one_bar_which_stays_and_needs_no_widgets(capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[tuple[str, str]] = []

    class Handle:
        def update(self, bundle: dict[str, str], *, raw: bool) -> None:
            assert raw
            shown.append(("updated", bundle["text/plain"]))

    def display(bundle: dict[str, str], *, raw: bool, display_id: bool) -> Handle:
        assert raw
        assert display_id
        shown.append(("made", bundle["text/plain"]))
        return Handle()

    bar = cell_bar(display, Clock())
    for epoch in range(2):
        bar.begin(epoch, 2, 1)
        bar.step(0.5, 3200.0, 3)
        bar.end(EpochRecord(epoch, 0.5, {}, {}, 2.0, 1000.0))
    bar.close()
    assert [how for how, _ in shown] == ["made", "updated", "updated", "updated"]
    assert shown[-1][1] == f"epoch 2/2 {'━' * 10} 1/1 loss 0.5000 3200 samples/s 3 workers 0:00:00 left"
    assert capsys.readouterr().out.count("samples/s 2.0 s") == 2


@pytest.fixture
def trained(start: Start) -> Callable[..., Iterator[unisono.Step]]:
    """The steps of a small training, each of which is computed."""
    import torch

    def steps(**settings: Any) -> Iterator[unisono.Step]:
        run = start(**settings)
        data = torch.utils.data.TensorDataset(torch.arange(40.0).unsqueeze(1))
        model: Any = torch.nn.Linear(1, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4))
        for step in run.progress(run.steps(data, epochs=2)):
            step.run(lambda model, batch: model(batch[0]).mean())
            yield step
        run.close()

    return steps


def test_a_plain_loop_has_a_bar_where_the_launcher_has_a_terminal(
    trained: Callable[..., Iterator[unisono.Step]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    assert [step.number for step in trained(batch_size=8)] == list(range(10))
    found = [status for line in capsys.readouterr().out.splitlines() if (status := status_in(line)) is not None]
    assert found[0] == f"epoch 1/2 {'╌' * 10} 0/5"
    assert f"epoch 2/2 {'━' * 10} 5/5 loss " in found[-2]
    assert found[-1] == ""


def test_elsewhere_nothing_is_written_and_a_loop_that_is_left_is_closed(
    trained: Callable[..., Iterator[unisono.Step]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    steps = trained(batch_size=8)
    assert next(steps).number == 0
    steps.close()  # type: ignore[attr-defined]
    assert capsys.readouterr().out == ""
