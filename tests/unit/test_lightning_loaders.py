"""Loaders that only iterate, steps without a loss, and hooks that look into batches: as with Lightning alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import unisono
from unisono.errors import DataError, ModelError
from unisono.train.state.registry import kept

Start = Callable[..., unisono.Run]

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_worker"), pytest.mark.filterwarnings("ignore")]

for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)

DRAWN = torch.Generator().manual_seed(1)
X, Y = torch.rand(50, 6, generator=DRAWN), torch.randint(0, 3, (50,), generator=DRAWN)
DATA = TensorDataset(X, Y)
WHOLE: Any = [DATA[:20], DATA[20:45]]


class Net(lightning.LightningModule):  # type: ignore[misc]  # Lightning is not looked into by mypy
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        with torch.no_grad():
            self.layer.weight.copy_(torch.linspace(-1, 1, 18).view(3, 6))
            self.layer.bias.zero_()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.layer(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def trained(loader: Any, module: Net | None = None, strategy: Any = "auto", **options: Any) -> Any:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(**{"accelerator": "cpu", "max_epochs": 3, **quiet, **options}, strategy=strategy)
    trainer.fit(module or Net(), loader, DataLoader(DATA, 20))
    return trainer


def are_alike(ours: Any, alone: Any) -> bool:
    pairs = zip(ours.lightning_module.parameters(), alone.lightning_module.parameters(), strict=True)
    same = all(torch.equal(*pair) for pair in pairs)
    counts = [(one.global_step, one.current_epoch, one.callback_metrics) for one in (ours, alone)]
    return same and counts[0] == counts[1] and ours.lightning_module.seen == alone.lightning_module.seen


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(DATA[number] for number in range(50))


class Batches:
    """No loader of torch's."""

    def __init__(self, count: int = 3) -> None:
        self._count = count

    def __iter__(self) -> Iterator[Any]:
        return iter([DATA[start : start + 15] for start in range(0, 15 * self._count, 15)])


@pytest.mark.parametrize(
    ("loader", "options"),
    [
        (DataLoader(Stream(), 20), {}),
        (DataLoader(Stream(), 20, drop_last=True), {}),
        (DataLoader(Stream(), 20), {"limit_train_batches": 2}),
        (DataLoader(Stream(), 20), {"limit_train_batches": 9}),
        (DataLoader(Stream(), 20), {"max_epochs": -1, "max_steps": 7, "val_check_interval": 2}),
        (DataLoader(Stream(), 20), {"accumulate_grad_batches": 2}),
        (DataLoader(Stream(), 20), {"fast_dev_run": True}),
        (DataLoader(Stream(), 20), {"overfit_batches": 2}),
        (DataLoader(WHOLE, batch_size=None), {}),
        (Batches(), {}),
    ],
)
def test_any_loader_gives_the_weights_of_lightning(start: Start, loader: Any, options: dict[str, Any]) -> None:
    strategy = unisono.lightning.Strategy(start(shards=1, batch_size=None))
    assert are_alike(trained(loader, strategy=strategy, **options), trained(loader, **options))


def test_a_combined_loader_may_be_read_by_several_fits(start: Start) -> None:
    loader, run = CombinedLoader(DataLoader(DATA, 20), "min_size"), start(shards=1, batch_size=None)
    alone = trained(DataLoader(DATA, 20))
    assert all(are_alike(trained(loader, strategy=unisono.lightning.Strategy(run)), alone) for _ in range(2))


class Pairs(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return super().training_step(next(part for part in batch if part is not None), batch_idx)


@pytest.mark.parametrize("mode", ["max_size", "max_size_cycle", "min_size"])
def test_streams_are_read_together(start: Start, mode: str) -> None:
    def loader() -> Any:
        return CombinedLoader([DataLoader(Stream(), 10), DataLoader(DATA, 10, drop_last=True)], mode)

    strategy = unisono.lightning.Strategy(start(shards=1, batch_size=None))
    assert are_alike(trained(loader(), Pairs(), strategy), trained(loader(), Pairs()))


def test_a_stream_without_batches_is_refused(start: Start) -> None:
    with pytest.raises(DataError, match="has no batches"):
        trained(Batches(0), strategy=unisono.lightning.Strategy(start()))


class Silent(Net):
    """Has no loss for some batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if batch_idx == 1:
            return None
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 2 else loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(sorted(outputs))


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}])
def test_a_step_without_a_loss_changes_nothing(start: Start, options: dict[str, Any]) -> None:
    strategy = unisono.lightning.Strategy(start(shards=1))
    loader = DataLoader(DATA, 20)
    assert are_alike(trained(loader, Silent(), strategy, **options), trained(loader, Silent(), **options))


class PartlySilent(Net):
    """Has a loss for shards alone whose first input is large."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        chosen = batch[0][:, 0] > 0.5
        loss = super().training_step([part[chosen] if chosen.any() else part for part in batch], batch_idx)
        return loss if chosen.any() else None


def test_samples_without_a_loss_do_not_count(start: Start) -> None:
    large = X[:, 0] > 0.5
    all_of_them = trained(DataLoader(TensorDataset(X[large], Y[large]), 50), Net(), max_epochs=1)
    one_by_one = unisono.lightning.Strategy(start(shards=64, batch_size=None))
    ours = trained(DataLoader(DATA, 50), PartlySilent(), one_by_one, max_epochs=1)
    pairs = zip(ours.lightning_module.parameters(), all_of_them.lightning_module.parameters(), strict=True)
    assert all(torch.allclose(*pair, rtol=1e-4) for pair in pairs)


class Looking(Net):
    """Has hooks that look into batches."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        inputs, labels = batch
        self.seen.append((len(batch), float(inputs.sum()), labels.tolist()))

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 2, batch[1]]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(batch[0].mean()))


@pytest.mark.parametrize("loader", [DataLoader(DATA, 20), DataLoader(Stream(), 20)])
@pytest.mark.parametrize("shards", [1, 4])
def test_hooks_around_a_step_have_the_whole_batch(start: Start, loader: Any, shards: int) -> None:
    strategy, module = unisono.lightning.Strategy(start(shards=shards, batch_size=None)), Looking()
    trained(loader, module, strategy)
    assert module.seen == trained(loader, Looking()).lightning_module.seen


class Changing(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batch[0].mul_(2)


def test_a_hook_that_changes_the_batch_is_refused(start: Start) -> None:
    with pytest.raises(ModelError, match="change them in on_after_batch_transfer"):
        trained(DataLoader(DATA, 20), Changing(), unisono.lightning.Strategy(start(batch_size=None)))


class Asking(Net):
    """Iterates over the trainer's loaders by itself, and looks for Lightning's own parts of a checkpoint."""

    def on_train_epoch_start(self) -> None:
        self.seen.append(next(iter(self.trainer.train_dataloader))[1].tolist())

    def on_validation_epoch_end(self) -> None:
        self.seen += [len(batch[1]) for batch in self.trainer.val_dataloaders]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["names"] = sorted(checkpoint["state_dict"])
        checkpoint["counts"] = [scheduler["last_epoch"] for scheduler in checkpoint["lr_schedulers"]]


@pytest.mark.parametrize("loader", [DataLoader(DATA, 20), [DataLoader(DATA, 20)], DataLoader(Stream(), 20)])
def test_hooks_may_ask_for_loaders_and_parts_of_checkpoints(start: Start, loader: Any) -> None:
    class Listed(Asking):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            return super().training_step(batch[0] if len(batch) == 1 else batch, batch_idx)

        def on_train_epoch_start(self) -> None:
            loaders = self.trainer.train_dataloader
            self.seen.append(next(iter(loaders[0] if isinstance(loaders, list) else loaders))[1].tolist())

    run = start(shards=1, batch_size=None, checkpoints={"every": 1})
    ours = trained(loader, Listed(), unisono.lightning.Strategy(run))
    assert are_alike(ours, trained(loader, Listed()))
    state = kept(run.inside.trained.capture(), "registered")["lightning"]["fits"][0]["module"]
    assert state == {"names": ["layer.bias", "layer.weight"], "counts": []}


class Ending(Net):
    def on_validation_epoch_end(self) -> None:
        self.seen.append("validated")

    def on_fit_end(self) -> None:
        self.seen.append("ended")


@pytest.mark.parametrize("options", [{"limit_train_batches": 0}, {"max_steps": 0}])
def test_a_fit_that_trains_nothing_checks_the_validation_all_the_same(start: Start, options: dict[str, Any]) -> None:
    loader, strategy = DataLoader(DATA, 20), unisono.lightning.Strategy(start(shards=1, batch_size=None))
    assert are_alike(trained(loader, Ending(), strategy, **options), trained(loader, Ending(), **options))


@pytest.mark.parametrize("options", [{}, {"use_global_unstructured": False}, {"make_pruning_permanent": True}])
def test_weights_are_pruned_as_by_lightning(start: Start, options: dict[str, Any]) -> None:
    def pruned(strategy: Any) -> Any:
        how = {"make_pruning_permanent": False, **options}
        pruning = callbacks.ModelPruning("l1_unstructured", parameter_names=["weight"], amount=0.3, **how)
        return trained(DataLoader(DATA, 20), strategy=strategy, callbacks=[pruning])

    run = start(shards=1, batch_size=None)
    ours, alone = pruned(unisono.lightning.Strategy(run)), pruned("auto")
    assert run.finish(ours.lightning_module)
    assert ours.lightning_module.layer.weight.count_nonzero() < 18
    states = ours.lightning_module.state_dict(), alone.lightning_module.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(state, states[1][name]) for name, state in states[0].items())
