"""What Lightning does on a run: as it does by itself, or refused with what to do."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torchmetrics
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

import unisono
from unisono.errors import DataError, JobError, ModelError, UnisonoWarning

Start = Callable[..., unisono.Run]

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_worker"), pytest.mark.filterwarnings("ignore")]

for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)

DRAWN = torch.Generator().manual_seed(1)
X, Y = torch.rand(88, 6, generator=DRAWN), torch.randint(0, 3, (88,), generator=DRAWN)
DATA = TensorDataset(X, Y)
OVERFLOWING = TensorDataset(X * torch.where(torch.arange(88) == 50, 1e4, 1.0)[:, None], Y)
"""In float16, in batch 2 of 20 samples."""


class Net(lightning.LightningModule):  # type: ignore[misc]  # Lightning is not looked into by mypy
    """Counts hooks; what it does beside comes from subclasses."""

    def __init__(self) -> None:
        super().__init__()
        first, last = nn.Linear(6, 8), nn.Linear(8, 3)
        with torch.no_grad():
            for one in (first, last):
                one.weight.copy_(torch.linspace(-1, 1, one.weight.numel()).view_as(one.weight))
                one.bias.zero_()
        self.layers = nn.Sequential(first, nn.BatchNorm1d(8), nn.ReLU(), last)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)
        self.hooks: list[str] = []

    def loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        outputs = self.layers(batch[0])
        return nn.functional.cross_entropy(outputs, batch[1]), outputs

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, outputs = self.loss(batch)
        self.accuracy(outputs, batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("train_accuracy", self.accuracy, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("val_loss", self.loss(batch)[0])

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        loss, outputs = self.loss(batch)
        self.accuracy(outputs, batch[1])
        self.log_dict({"test_loss": loss, "test_accuracy": self.accuracy})

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layers(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


QUIET = {
    "accelerator": "cpu",
    "max_epochs": 3,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def trainer_of(**options: Any) -> Any:
    return lightning.Trainer(**{**QUIET, **options})


def loader_of(size: int = 20, data: Any = DATA, **options: Any) -> Any:
    return DataLoader(data, batch_size=size, **options)


def fitted(module: Any = None, *, loader: Any = None, ckpt_path: Any = None, **options: Any) -> Any:
    """A trainer that has trained; without a strategy with Lightning alone."""
    trainer = trainer_of(**options)
    trainer.fit(module or Net(), loader_of() if loader is None else loader, loader_of(30), ckpt_path=ckpt_path)
    return trainer


def on(run: unisono.Run) -> dict[str, Any]:
    return {"strategy": unisono.lightning.Strategy(run)}


def half() -> Any:
    return lightning.pytorch.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))


def known(trainer: Any) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def same_weights(one: Any, other: Any) -> bool:
    pairs = zip(one.lightning_module.state_dict().values(), other.lightning_module.state_dict().values(), strict=True)
    return all(torch.equal(*pair) for pair in pairs)


class Offset(Net):
    """Trains what is no parameter of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.held = [torch.zeros(3, requires_grad=True)]

    def loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        outputs = self.layers(batch[0]) + self.held[0]
        return nn.functional.cross_entropy(outputs, batch[1]), outputs

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *self.held], 0.1, momentum=0.9)


def test_what_only_the_optimizer_holds_is_carried_along(start: Start) -> None:
    run, module = start(batch_size=20, shards=4), Offset()
    fitted(module, max_epochs=1, **on(run))
    (held,) = run.inside.trained.require_prepared().outside.values()
    assert held is module.held[0]
    assert held.any()
    assert any(torch.equal(value, held) for value in run.inside.trained.capture().model.values())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_clip_val": 0.3},
        {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 2},
        {"precision": "bf16-mixed"},
        {"max_epochs": -1, "max_steps": 7},
        {"limit_train_batches": 3, "limit_val_batches": 1},
        {"limit_train_batches": 0.5, "val_check_interval": 0.5},
        {"overfit_batches": 2},
        {"check_val_every_n_epoch": 2, "max_epochs": 4},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_with_one_shard_weights_and_logs_are_those_of_lightning_to_the_last_bit(
    start: Start, options: dict[str, Any]
) -> None:
    strategy = on(start(shards=1))  # it sets the number of threads, which decides bits
    alone, ours = fitted(**options), fitted(**strategy, **options)
    assert same_weights(ours, alone)
    assert known(ours) == known(alone)
    assert ours.global_step == alone.global_step


def test_a_run_in_float16_is_refused_where_lightning_computes_in_another_precision(start: Start) -> None:
    with pytest.raises(JobError, match=r"has precision='fp16', and the trainer 'bf16-mixed'.*MixedPrecision"):
        fitted(precision="16-mixed", **on(start(shards=1, arithmetic={"precision": "fp16"})))  # it is made bf16 there


def test_uneven_shards_give_the_means_of_lightning(start: Start) -> None:
    strategy = on(start(shards=4))
    alone, ours = fitted(Plain()), fitted(Plain(), **strategy)
    assert known(ours) == pytest.approx(known(alone), rel=1e-5)
    assert ours.global_step == alone.global_step


class Plain(Net):
    """Without BatchNorm, whose statistics are over a shard."""

    def __init__(self) -> None:
        super().__init__()
        del self.layers[1]


HOOKS = ["on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward"]
HOOKS += ["on_before_optimizer_step", "on_train_batch_end"]


def test_hooks_are_called_once_per_step(start: Start) -> None:
    def noting(name: str) -> Callable[..., None]:
        return lambda self, *_: self.hooks.append(name)

    counted = type("Counted", (Net,), {name: noting(name) for name in HOOKS})
    trainer = fitted(counted(), **on(start(shards=4)), max_epochs=1)
    assert trainer.lightning_module.hooks == HOOKS * 5


def test_hooks_around_the_backward_pass_are_called_for_each_batch_that_is_accumulated(start: Start) -> None:
    def noting(name: str) -> Callable[..., None]:
        return lambda self, *_: self.hooks.append((name, float(self.layers[0].bias.grad.sum())))

    strategy = on(start(shards=1))
    kind = type("Counted", (Plain,), {name: noting(name) for name in ("on_after_backward", "on_before_optimizer_step")})
    ours, alone = (fitted(kind(), accumulate_grad_batches=2, **options) for options in (strategy, {}))
    assert ours.lightning_module.hooks == alone.lightning_module.hooks
    assert len(ours.lightning_module.hooks) == 3 * (5 + 3)


class Stepping(Plain):
    """Has an ``optimizer_step`` of its own."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.hooks.append(f"{epoch} {batch_idx}")
        optimizer.step(closure=optimizer_closure)


def test_optimizer_step_is_called_for_updates_alone(start: Start) -> None:
    strategy = on(start(shards=1))
    ours, alone = (fitted(Stepping(), accumulate_grad_batches=2, **options) for options in (strategy, {}))
    assert ours.lightning_module.hooks == alone.lightning_module.hooks
    assert same_weights(ours, alone)


class Backward(Plain):
    """Goes backward by itself."""

    def backward(self, loss: Tensor, *_: Any, **__: Any) -> None:
        self.hooks.append("backward")
        loss.backward()


def test_a_module_may_go_backward_by_itself(start: Start) -> None:
    usual, own = (fitted(kind(), **on(start(shards=4, run_dir=None))) for kind in (Plain, Backward))
    pairs = zip(usual.lightning_module.parameters(), own.lightning_module.parameters(), strict=True)
    assert all(torch.allclose(*pair, rtol=1e-4) for pair in pairs)
    assert len(own.lightning_module.hooks) == 3 * 5 * 4


class Extremes(Net):
    """Logs the largest and the smallest of what it has."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        loss = self.loss(batch)[0]
        self.log("largest", loss, reduce_fx="max", on_step=True, on_epoch=True)
        self.log("smallest", loss, reduce_fx=torch.min)
        self.log("least", loss, reduce_fx=min)


def test_evaluations_combine_batches_by_their_extremes(start: Start) -> None:
    strategy = on(start(shards=1))
    alone, ours = fitted(Extremes()), fitted(Extremes(), **strategy)
    assert known(ours) == known(alone)
    assert not ours.strategy.evaluating.is_whole


class Several(Net):
    """Trains with batches of several loaders."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch["a"])[0] + self.loss(batch["b"][0])[0]


@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size"])
def test_training_loaders_are_read_together(start: Start, mode: str) -> None:
    def trained(**options: Any) -> Any:
        short = TensorDataset(X[:50], Y[:50])
        loaders = {"a": loader_of(drop_last=True), "b": [loader_of(data=short, drop_last=True)]}
        trainer = trainer_of(max_epochs=2, limit_train_batches=3, **options)
        trainer.fit(Several(), CombinedLoader(loaders, mode))
        return trainer

    strategy = on(start(shards=1))
    alone, ours = trained(), trained(**strategy)
    assert ours.global_step == alone.global_step == (6 if mode == "max_size_cycle" else 4)
    assert same_weights(alone, ours)


class Seeing(Net):
    """Has a hook of evaluated batches, which gets the batch and what came of it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, float]] = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"loss": self.loss(batch)[0]}

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append((len(batch[0]), float(outputs["loss"])))


def test_hooks_of_evaluated_batches_get_them(start: Start) -> None:
    strategy = on(start(shards=1))
    alone, ours = fitted(Seeing()), fitted(Seeing(), **strategy)
    assert ours.lightning_module.seen == alone.lightning_module.seen


class Paired(Net):
    """Evaluates batches with parts of two loaders."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("val_loss", self.loss(batch["a"])[0] - self.loss(batch["b"])[0])


def test_batches_of_several_loaders_are_evaluated_whole(start: Start) -> None:
    def found(**options: Any) -> Any:
        trainer = trainer_of(max_epochs=1, **options)
        pairs = CombinedLoader({"a": loader_of(30), "b": loader_of(7)}, "max_size_cycle")
        trainer.fit(Paired(), loader_of(), pairs)
        return known(trainer)

    strategy = on(start(shards=1))
    assert found(**strategy) == found()


def test_weights_are_averaged_with_the_statistics_of_the_averaged_ones(start: Start) -> None:
    def averaged(**options: Any) -> Any:
        averaging = callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1)
        return fitted(callbacks=[averaging], **options)

    strategy = on(start(shards=1))
    alone, ours = averaged(), averaged(**strategy)
    assert same_weights(ours, alone)
    assert known(ours) == known(alone)


class Failing(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 2:
            raise ValueError("once")
        return super().training_step(batch, batch_idx)


def test_a_script_may_catch_what_a_training_raises_and_train_again(start: Start) -> None:
    run, alone = start(shards=1), fitted()
    with pytest.raises(ValueError, match="once"):
        fitted(Failing(), **on(run))
    assert same_weights(fitted(**on(run)), alone)


def test_layers_are_unfrozen_between_two_trainings(start: Start) -> None:
    run, module = start(shards=1), Net()
    layer: Any = module.layers[0]
    first = layer.weight.clone()
    layer.requires_grad_(False)
    fitted(module, **on(run))
    assert torch.equal(layer.weight, first)
    layer.requires_grad_(True)
    fitted(module, **on(run))
    assert not torch.equal(layer.weight, first)


class Appending(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.hooks.append("shard")
        return super().training_step(batch, batch_idx)


def test_a_module_has_what_each_shard_has_added_to_a_list(start: Start) -> None:
    module = Appending()
    fitted(module, **on(start(shards=4)))
    assert module.hooks == ["shard"] * 3 * 5 * 4


class Keeping(Net):
    """Keeps what it has of batches, as many modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.outputs.append(self.loss(batch)[0])

    def on_validation_epoch_end(self) -> None:
        self.log("val_loss", torch.stack(self.outputs).mean())
        self.outputs.clear()


def test_a_module_that_keeps_outputs_of_its_own_has_all_of_them(start: Start) -> None:
    strategy = on(start(shards=1))
    alone, ours = fitted(Keeping()), fitted(Keeping(), **strategy)
    assert known(ours) == known(alone)
    assert ours.strategy.evaluating.is_whole


def test_validate_test_and_predict_give_what_lightning_gives(start: Start) -> None:
    strategy = on(start(shards=1))
    alone, ours = fitted(), fitted(**strategy)
    loaders = [loader_of(30), loader_of(7)]

    def found(trainer: Any) -> Any:
        module = trainer.lightning_module
        return trainer.validate(module, loaders), trainer.test(module, loaders)

    assert found(ours) == found(alone)
    assert ours.strategy.run.finish()
    rows = [one.predict(one.lightning_module, loader_of(9)) for one in (ours, alone)]
    assert all(map(torch.equal, *rows))


def test_a_fresh_module_is_evaluated_without_training(start: Start) -> None:
    strategy = on(start())
    assert trainer_of(**strategy).test(Net(), loader_of(30)) == trainer_of().test(Net(), loader_of(30))


@pytest.mark.slow
def test_checkpoints_are_lightnings_own_in_both_directions(start: Start, tmp_path: Path) -> None:
    def saving(name: str) -> dict[str, Any]:
        return {"callbacks": [callbacks.ModelCheckpoint(tmp_path / name)], "enable_checkpointing": True}

    run = start(shards=1)
    for first, second in ((on(run), {}), ({}, on(run))):
        path = fitted(max_epochs=2, **first, **saving(str(bool(first)))).checkpoint_callback.best_model_path
        assert same_weights(fitted(ckpt_path=path, **second), fitted(ckpt_path=path))


class Drops(Net):
    """Draws in each step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step([nn.functional.dropout(batch[0], 0.3), batch[1]], batch_idx)


def test_several_trainings_share_one_run(start: Start) -> None:
    run, module = start(shards=1), Net()
    alone = Net()
    for options in ({"max_epochs": 1}, {"max_epochs": 2}):
        fitted(module, **on(run), **options)
        fitted(alone, **options)
    assert all(map(torch.equal, module.state_dict().values(), alone.state_dict().values()))


def test_a_strategy_without_a_run_begins_one_with_the_settings_that_it_is_given(torch_settings_restored: None) -> None:
    strategy = unisono.lightning.Strategy(shards=2, seed=4)
    with strategy.run:
        assert (strategy.run.job.shards, strategy.run.job.seed) == (2, 4)
        assert fitted(strategy=strategy).global_step == 15


def test_logs_of_the_main_worker_are_those_of_lightning(start: Start, tmp_path: Path) -> None:
    def rows(name: str, **options: Any) -> str:
        logger = CSVLogger(tmp_path, name=name)
        fitted(logger=logger, log_every_n_steps=1, callbacks=[callbacks.LearningRateMonitor()], **options)
        return (Path(logger.log_dir) / "metrics.csv").read_text()

    strategy = on(start(shards=1))
    assert rows("ours", **strategy) == rows("alone")


class Asked(callbacks.Callback):  # type: ignore[misc]  # Lightning is not looked into by mypy
    """Asks its own process to leave."""

    def __init__(self, number: int) -> None:
        self._number = number

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            os.kill(os.getpid(), self._number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_sigterm_and_ctrl_c_have_one_way_out(start: Start, number: int) -> None:
    run = start()
    with pytest.raises(SystemExit) as left:
        fitted(**on(run), callbacks=[Asked(number)])
    assert left.value.code == 75
    assert (run.dir / "checkpoints").is_dir()


class Asking(Net):
    """Asks for results, and for what others have, in a training step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, outputs = self.loss(batch)
        self.accuracy.update(outputs, batch[1])
        self.log("accuracy", self.accuracy.compute())
        self.log("gathered", self.all_gather(loss).mean())
        return loss


@pytest.mark.filterwarnings("default")
def test_what_has_one_shard_alone_is_told_with_what_to_do(start: Start) -> None:
    words = r"accuracy\.compute\(\) in training_step is that of one shard[^~]*Log the metric itself: self\.log"
    with pytest.warns(UnisonoWarning, match=words), pytest.warns(UnisonoWarning, match="all_gather in training_step"):
        fitted(Asking(), **on(start(shards=4)))


# What is refused.


class Twofold(Net):
    """Logs one value in two ways."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("twice", 1.0)
        self.log("twice", 1.0, prog_bar=True)
        return self.loss(batch)[0]


def test_what_lightning_refuses_to_log_is_refused_alike(start: Start) -> None:
    for options in (on(start()), {}):
        with pytest.raises(MisconfigurationException, match=r"self.log\(twice, ...\)` twice in `training_step`"):
            fitted(Twofold(), **options)


class Reading(Net):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return self.loss(next(dataloader_iter)[0])[0]


class Correlating(Net):
    def __init__(self) -> None:
        super().__init__()
        self.correlation = torchmetrics.PearsonCorrCoef()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.correlation.update(batch[0][:, 0], batch[0][:, 1])
        return self.loss(batch)[0]


class Thawing(callbacks.BaseFinetuning):  # type: ignore[misc]  # Lightning is not looked into by mypy
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.layers[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.layers[0], optimizer)


class Windowed(Net):
    """Has a metric of the newest batches."""

    def __init__(self) -> None:
        super().__init__()
        self.newest = torchmetrics.wrappers.Running(torchmetrics.MeanMetric(), window=2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)[0]
        self.newest(loss.detach())
        return loss


class Averaging(Net):
    """Has weights that training_step itself moves."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(6, 8).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.teacher.weight.data.mul_(0.9)
        return self.loss(batch)[0]


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([])


class Twice(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ({"module": Reading()}, ModelError, r"write training_step\(self, batch, batch_idx\)"),
        ({"module": Correlating()}, ModelError, "keep sums in it"),
        ({"module": Windowed()}, ModelError, r"the metric newest \(Running\)"),
        ({"module": Twice()}, ModelError, "LBFGS"),
        ({"module": Averaging()}, ModelError, "Change weights in on_train_batch_end"),
        ({"sync_batchnorm": True}, JobError, "statistics are over a shard"),
        ({"reload_dataloaders_every_n_epochs": 1}, JobError, "call fit once for each loader"),
        ({"callbacks": [callbacks.BatchSizeFinder()]}, JobError, "search with a Trainer without this strategy"),
        ({"callbacks": [Thawing()]}, ModelError, "before a training of its own"),
        ({"loader": DataLoader(Endless(), batch_size=20)}, DataError, "over a Endless has no batches"),
        ({"loader": {"a": loader_of(), "b": loader_of(30)}}, DataError, "batches of 20 and 30 samples"),
        ({"loader": {"a": loader_of(), "b": loader_of(99, drop_last=True)}}, DataError, "has no batches"),
        ({"loader": {"a": loader_of(), "b": DataLoader(Endless(), 20)}}, DataError, "has no batches"),
        ({"loader": loader_of(sampler=DistributedSampler(DATA, 2, 0))}, DataError, "leave the sampler out"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_kept_is_refused_with_what_to_do(
    start: Start, what: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        fitted(**on(start(shards=4)), **what)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"plugins": [half()]}, "say arithmetic={'precision': 'fp16'} where it begins"),
        ({"precision": "16-true"}, "small updates are lost"),
    ],
)
def test_float16_that_nobody_scales_is_refused(start: Start, options: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=words):
        fitted(**on(start(shards=4)), **options)


@pytest.mark.parametrize("kind", [Plain, Backward])
def test_float16_is_that_of_lightning_to_the_last_bit(start: Start, kind: type[Net]) -> None:
    strategy, loader = on(start(shards=1, arithmetic={"precision": "fp16"})), loader_of(data=OVERFLOWING)
    alone = fitted(kind(), loader=loader, plugins=[half()], gradient_clip_val=0.05)
    ours = fitted(kind(), loader=loader, plugins=[half()], gradient_clip_val=0.05, **strategy)
    assert same_weights(ours, alone)
    assert ours.scaler.state_dict() == alone.scaler.state_dict() != half().scaler.state_dict()
    assert ours.global_step == alone.global_step
    assert known(ours)["train_loss_step"] == known(alone)["train_loss_step"]


class Noting(callbacks.Callback):  # type: ignore[misc]  # Lightning is not looked into by mypy
    """Notes which batches change the weights."""

    def __init__(self) -> None:
        self.changed: list[bool] = []

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        self.before = module.layers[0].weight.detach().clone()

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.changed.append(not torch.equal(self.before, module.layers[0].weight))


def test_a_batch_that_overflows_takes_those_along_that_it_is_accumulated_with(start: Start) -> None:
    noting = Noting()
    strategy = on(start(shards=4, arithmetic={"precision": "fp16"}))
    options = {"accumulate_grad_batches": 2, "callbacks": [noting], "max_epochs": 2}
    fitted(Plain(), loader=loader_of(data=OVERFLOWING), plugins=[half()], **strategy, **options)
    assert noting.changed == [False, False, False, False, True, False, True, False, False, True]


@pytest.mark.parametrize("precision", ["float32", pytest.param("fp16", marks=pytest.mark.slow)])
def test_a_training_goes_on_from_lightnings_checkpoints_as_if_it_had_not_been_stopped(
    start: Start, tmp_path: Path, precision: str
) -> None:
    saving = callbacks.ModelCheckpoint(tmp_path / "saved", every_n_train_steps=2, save_top_k=-1)
    loader = loader_of(shuffle=True)

    def trained(**options: Any) -> Any:
        plugins = [half()] if precision == "fp16" else None
        return fitted(Drops(), loader=loader, plugins=plugins, **options)

    usual: dict[str, Any] = {"shards": 4, "arithmetic": {"precision": precision}}
    whole = trained(**on(start(**usual)), callbacks=[saving], enable_checkpointing=True)
    for number, path in enumerate(sorted((tmp_path / "saved").iterdir())):
        ours = trained(**on(start(**usual, run_dir=tmp_path / str(number))), ckpt_path=path)
        assert same_weights(ours, whole), path.name
        assert known(ours)["val_loss"] == known(whole)["val_loss"]
    assert number > 4


def test_a_batch_sampler_decides_the_batches(start: Start) -> None:
    def loader() -> Any:
        return DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 30, drop_last=True))

    run = start(shards=1, batch_size=None)
    for options in ({}, {"limit_train_batches": 1}):
        assert same_weights(fitted(loader=loader(), **options), fitted(loader=loader(), **on(run), **options))


class Clearing(Plain):
    """Has a teacher that follows it behind each training step, and fails where it is told to."""

    def __init__(self, fails_at: int = -1) -> None:
        super().__init__()
        self.teacher = nn.Linear(6, 3).requires_grad_(False)
        nn.init.zeros_(self.teacher.weight)
        nn.init.zeros_(self.teacher.bias)
        self.fails_at = fails_at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == self.fails_at:
            raise ValueError("once")
        return self.loss(batch)[0] + (self.layers(batch[0]) - self.teacher(batch[0])).square().mean()

    def on_before_zero_grad(self, optimizer: Any) -> None:
        first: Any = self.layers[0]
        gradient = first.bias.grad
        self.hooks.append("none" if gradient is None else str(float(gradient.sum())))
        last: Any = self.layers[2]
        with torch.no_grad():
            self.teacher.bias.add_(last.bias).mul_(0.5)


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}])
def test_gradients_are_cleared_behind_the_training_step(start: Start, options: dict[str, Any]) -> None:
    strategy = on(start(shards=1))
    ours, alone = fitted(Clearing(), **strategy, **options), fitted(Clearing(), **options)
    assert same_weights(ours, alone)
    assert ours.lightning_module.hooks == alone.lightning_module.hooks


def test_a_step_that_fails_clears_nothing(start: Start) -> None:
    strategy = on(start(shards=1))
    modules = Clearing(7), Clearing(7)
    for module, options in zip(modules, (strategy, {}), strict=True):
        with pytest.raises(ValueError, match="once"):
            fitted(module, **options)
    assert len(modules[0].hooks) == len(modules[1].hooks) == 7


class Interrupted(Plain):
    """Fails in the middle of a validation, as long as it is told to; notes what comes after."""

    fails = True

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        if self.fails and self.current_epoch == 2 and batch_idx == 1:
            raise ValueError("once")
        super().validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.hooks.append(f"validated {self.trainer.global_step}")

    def on_train_epoch_end(self) -> None:
        self.hooks.append(f"epoch {self.current_epoch}")

    def on_train_end(self) -> None:
        self.hooks.append("end")


@pytest.mark.parametrize("options", [{}, {"val_check_interval": 3}])
def test_a_validation_fails_where_it_does_in_lightning_and_goes_on_from_a_checkpoint(
    start: Start, tmp_path: Path, options: dict[str, Any]
) -> None:
    def found(name: str, strategy: Any) -> tuple[list[str], Any, dict[str, float], Any]:
        saving = callbacks.OnExceptionCheckpoint(tmp_path / name)
        module = Interrupted()
        with pytest.raises(ValueError, match="once"):
            fitted(module, callbacks=[saving], enable_checkpointing=True, strategy=strategy("first"), **options)
        again = Interrupted()
        again.fails = False
        trainer = fitted(again, ckpt_path=saving.ckpt_path, strategy=strategy("second"), **options)
        kept = torch.load(saving.ckpt_path, weights_only=True)["loops"]
        return module.hooks + again.hooks, trainer, known(trainer), kept

    def on_new(name: str) -> Any:
        return unisono.lightning.Strategy(start(shards=1, run_dir=tmp_path / f"run {name}"))

    ours, alone = found("ours", on_new), found("alone", lambda _: "auto")
    assert ours[0] == alone[0]
    assert "end" in ours[0]
    assert same_weights(ours[1], fitted(Plain(), **options))  # Lightning alone begins an epoch's data anew
    assert ours[3]["fit_loop"] == alone[3]["fit_loop"]
    assert options or ours[2] == alone[2]


def test_a_script_may_step_by_itself_behind_a_fit(start: Start) -> None:
    def stepped(**options: Any) -> Any:
        trainer = fitted(Plain(), max_epochs=1, **options)
        trainer.training = True
        arguments = {"batch": next(iter(loader_of())), "batch_idx": 0}
        trainer.fit_loop.epoch_loop.automatic_optimization.run(trainer.optimizers[0], 0, arguments)
        return trainer

    strategy = on(start(shards=1))
    assert same_weights(stepped(**strategy), stepped())


class Forgetful(Plain):
    """Steps without what computes the loss."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step()


def test_an_optimizer_step_without_its_closure_is_refused_as_by_lightning(start: Start) -> None:
    with pytest.raises(MisconfigurationException, match="closure hasn't been executed"):
        fitted(Forgetful(), **on(start(shards=4)))


class Skipping(Plain):
    """Leaves out the rest of each epoch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == max(1, 3 - self.current_epoch) else None

    def on_train_epoch_end(self) -> None:
        self.hooks.append(f"{self.current_epoch} {self.global_step}")


def test_batches_that_were_accumulated_before_others_were_left_out_do_not_count(start: Start) -> None:
    strategy = on(start(shards=1))
    ours, alone = (fitted(Skipping(), accumulate_grad_batches=2, **options) for options in (strategy, {}))
    assert same_weights(ours, alone)


def test_the_rest_of_an_epoch_is_left_out_as_by_lightning(start: Start, tmp_path: Path) -> None:
    def trained(name: str, **options: Any) -> Any:
        saving = callbacks.ModelCheckpoint(tmp_path / name, save_on_train_epoch_end=True)
        return fitted(Skipping(), callbacks=[saving], enable_checkpointing=True, **options)

    run = start(shards=1)
    ours, alone = trained("ours", **on(run)), trained("alone")
    assert same_weights(ours, alone)
    assert ours.lightning_module.hooks == alone.lightning_module.hooks == ["0 3", "1 5", "2 6"]
    path = ours.checkpoint_callback.best_model_path
    again, alone = (trained(name, ckpt_path=path, max_epochs=4, **one) for name, one in (("2", on(run)), ("3", {})))
    assert same_weights(again, alone)
    assert again.lightning_module.hooks == alone.lightning_module.hooks == ["3 7"]
