import math
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unisono
from unisono.checkpoint.codec import flatten, unflatten
from unisono.checkpoint.snapshot import Snapshot
from unisono.errors import JobError
from unisono.train.record.progress import Bar, EpochRecord, History, Lines, summary
from unisono.train.state.registry import Attribute, Registry
from unisono.train.trainer import EpochSums

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_worker")]

Start = Callable[..., unisono.Run]


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(70, 6, generator=generator), torch.randint(0, 3, (70,), generator=generator))


def loss_fn(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def trainer_for(run: unisono.Run, **settings: Any) -> unisono.Trainer:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    return unisono.Trainer(model, optimizer, loss_fn, run=run, scheduler=scheduler, progress=False, **settings)


def test_fit_is_the_loop_bit_for_bit(start: Start, tmp_path: Path) -> None:
    run = start()
    trainer = trainer_for(run, clip_norm=0.5)
    history = trainer.fit(data(), epochs=3)
    by_trainer = trainer.finish()

    by_hand = start(run_dir=tmp_path / "by hand")
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    by_hand.prepare(model, optimizer)
    losses = []
    for step in by_hand.steps(data(), epochs=3):
        losses.append((step.run(loss_fn, clip_norm=0.5), step.size))
        if step.is_last_in_epoch:
            scheduler.step()
    assert by_hand.finish() == by_trainer
    first = losses[:3]
    assert history.losses[0] == pytest.approx(sum(loss * size for loss, size in first) / 70)
    assert len(history.epochs) == 3


class Diary(unisono.Callback):
    def __init__(self, stop_after: int | None = None) -> None:
        self.lines: list[str] = []
        self._stop_after = stop_after

    def on_fit_begin(self, trainer: unisono.Trainer) -> None:
        self.lines.append("fit begins")

    def on_epoch_begin(self, trainer: unisono.Trainer, epoch: int) -> None:
        self.lines.append(f"epoch {epoch} begins")

    def on_step_end(self, trainer: unisono.Trainer, step: unisono.Step, loss: float) -> None:
        self.lines.append(f"step {step.number}")

    def on_epoch_end(self, trainer: unisono.Trainer, record: EpochRecord) -> None:
        self.lines.append(f"epoch {record.epoch} ends")
        if record.epoch == self._stop_after:
            trainer.stop()

    def on_fit_end(self, trainer: unisono.Trainer, history: History) -> None:
        self.lines.append(f"fit ends after {len(history.epochs)}")


def test_callbacks_are_called_in_order_and_can_stop_the_training(start: Start) -> None:
    diary = Diary(stop_after=0)
    trainer_for(start(batch_size=35), callbacks=[diary]).fit(data(), epochs=5)
    assert diary.lines == ["fit begins", "epoch 0 begins", "step 0", "step 1", "epoch 0 ends", "fit ends after 1"]


def test_validation_is_in_the_history_under_its_own_names(start: Start) -> None:
    trainer = trainer_for(
        start(), metrics=lambda model, batch: {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float().mean()}
    )
    history = trainer.fit(data(), epochs=2, validation=data())
    assert history.validation("validation accuracy")[-1] == trainer.evaluate(data())["accuracy"]
    assert trainer.predict(data()).shape == (70, 3)


def test_a_trainer_can_start_its_own_run_and_needs_a_batch_size_for_it(tmp_path: Path) -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(JobError, match="batch_size="):
        unisono.Trainer(model, optimizer, loss_fn)
    trainer = unisono.Trainer(
        model, optimizer, loss_fn, batch_size=32, seed=3, run_dir=tmp_path / "own", progress=False
    )
    trainer.fit(data())
    trainer.finish()
    assert (tmp_path / "own" / "result.json").exists()


def test_a_scheduler_that_watches_the_loss_is_told_it_after_each_epoch(start: Start) -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watcher = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0, threshold_mode="abs")
    trainer = unisono.Trainer(model, optimizer, loss_fn, run=start(), scheduler=watcher, progress=False)
    trainer.fit(data(), epochs=3, validation=data())
    assert watcher.best == trainer.history.validation("validation loss")[0]
    assert watcher.last_epoch == 3


def test_skipped_steps_are_counted_and_an_epoch_of_them_alone_has_no_loss(start: Start) -> None:
    trainer = trainer_for(start(batch_size=35, arithmetic={"on_nan": "skip"}))
    odd = {0, 2, 3}
    trainer._loss_fn = lambda model, batch: loss_fn(model, batch) * (math.nan if step[0] in odd else 1.0)
    step = [0]

    class Counts(unisono.Callback):
        def on_step_end(self, trainer: unisono.Trainer, _: unisono.Step, loss: float) -> None:
            step[0] += 1

    trainer.callbacks.append(Counts())
    first, second = trainer.fit(data(), epochs=2).epochs
    assert math.isfinite(first.loss)
    assert first.skipped == 1
    assert math.isnan(second.loss)
    assert second.skipped == 2
    assert second.samples_per_s > 0
    assert trainer.history.skipped == 3
    assert summary(second, 2).startswith("epoch 2/2 loss nan ")
    assert summary(second, 2).endswith(", 2 steps skipped")


def test_a_checkpoint_of_a_script_without_a_trainer_is_gone_on_from_with_one_and_the_other_way_round() -> None:
    class Sums:
        def __init__(self, sums: EpochSums) -> None:
            self.sums = sums

    def add(registry: Registry, sums: Sums) -> None:
        registry.add_own("trainer", Attribute(sums, "sums", EpochSums))

    mine, theirs, again = Registry(), Registry(), Registry()
    sums, restored = EpochSums((0, 1), 3, 0, 1.5, {"accuracy": 2.0}), Sums(EpochSums())
    add(mine, Sums(sums))
    add(mine, Sums(EpochSums()))
    state = capture_of(mine)
    theirs.restore(state, "script")
    mine.restore(capture_of(theirs), "script")
    assert sums.samples == 3
    add(again, restored)
    again.restore(state, "script")
    assert restored.sums == sums


def capture_of(registry: Registry) -> Snapshot:
    states = {name: thing.state_dict() for name, thing in registry.objects.items()}
    text, tensors = flatten({"registered": states})
    return Snapshot(3, {}, [], unflatten(text, tensors))


def test_an_unknown_pace_of_the_scheduler_is_refused(start: Start) -> None:
    with pytest.raises(JobError, match="'fortnight'"):
        trainer_for(start(), scheduler_every="fortnight")


RECORD = EpochRecord(1, 0.25, {"accuracy": 0.5}, {"validation loss": 0.75}, 2.0, 1000.0)


def test_plain_lines_tell_the_epoch() -> None:
    output = StringIO()
    lines = Lines(output)
    lines.begin(1, 3, 10)
    lines.step(0.5, 100.0, 2)
    lines.end(RECORD)
    lines.close()
    assert output.getvalue() == ("epoch 2/3 loss 0.2500 accuracy 0.5000 validation loss 0.7500 1000 samples/s 2.0 s\n")


def test_a_bar_is_drawn_in_a_terminal_and_becomes_a_line() -> None:
    output = StringIO()
    bar = Bar(Console(file=output, force_terminal=True, width=120))
    bar.begin(1, 3, 2)
    bar.step(0.5, 100.0, 2)
    bar.end(RECORD)
    bar.close()
    assert "epoch 2/3" in output.getvalue()
    assert "validation loss 0.7500" in output.getvalue()
