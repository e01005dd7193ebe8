"""What an Accelerator on a run keeps of accelerate, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import DataLoaderConfiguration, FullyShardedDataParallelPlugin
from accelerate.data_loader import SeedableRandomSampler
from accelerate.tracking import GeneralTracker
from accelerate.utils import GradientAccumulationPlugin
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import unisono
from unisono.errors import DataError, JobError, LossError, ModelError, UnisonoWarning

pytestmark = [pytest.mark.unit, pytest.mark.filterwarnings("ignore")]

INPUTS = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
LABELS = INPUTS.sum(1, keepdim=True)


Made = Callable[..., Any]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    """An accelerator on a run, with model, optimizer, loader and scheduler."""
    runs: list[Any] = []

    def make(shards: int = 4, precision: Any = "float32", **settings: Any) -> Any:
        run = unisono.init(
            seed=0, shards=shards, arithmetic={"precision": precision}, run_dir=tmp_path / f"run-{len(runs)}"
        )
        runs.append(run)
        accelerator = unisono.accelerate.Accelerator(run=run, **settings)
        torch.manual_seed(0)
        model: Any = nn.Linear(4, 1)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        loader: Any = DataLoader(TensorDataset(INPUTS, LABELS), batch_size=8)
        return accelerator, *accelerator.prepare(model, optimizer, loader, scheduler)

    yield make
    for run in runs:
        run.close()


def train(accelerator: Any, model: Any, optimizer: Any, loader: Any, scheduler: Any) -> list[int]:
    """One epoch; the numbers of turns of its steps."""
    turns, found = 0, []
    model.train()
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.mse_loss(model(inputs), labels))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        turns += 1
        if accelerator.sync_gradients:
            found.append(turns)
            turns = 0
    return found


def by_hand(batch_size: int) -> torch.Tensor:
    """The weights after an epoch of a plain loop."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    for inputs, labels in zip(INPUTS.split(batch_size), LABELS.split(batch_size), strict=True):
        optimizer.zero_grad()
        F.mse_loss(model(inputs), labels).backward()
        optimizer.step()
        scheduler.step()
    return model.weight.detach()


@pytest.mark.parametrize(("shards", "accumulated", "turns"), [(1, 1, [1] * 5), (4, 1, [4] * 5), (4, 2, [4] * 3)])
def test_the_body_runs_once_for_each_shard_and_updates_once_for_each_step_as_a_plain_loop_does(
    shards: int, accumulated: int, turns: list[int], made: Made
) -> None:
    accelerator, model, optimizer, loader, scheduler = made(shards=shards, gradient_accumulation_steps=accumulated)
    assert train(accelerator, model, optimizer, loader, scheduler) == turns
    close: dict[str, Any] = {"rtol": 0, "atol": 0} if shards == 1 else {}  # with one shard the bits are the same
    torch.testing.assert_close(model.weight.detach(), by_hand(8 * accumulated), **close)
    assert scheduler.get_last_lr() == [pytest.approx(0.1 * 0.9 ** len(turns))]
    assert (accelerator.steps_done, len(loader)) == (len(turns), 5)


def test_what_only_the_optimizer_holds_is_carried_along(made: Made) -> None:
    accelerator, model, optimizer, loader, _ = made()
    optimizer.add_param_group({"params": [offset := torch.zeros(1, requires_grad=True)], "lr": 0.1})
    model.train()
    for inputs, labels in loader:
        accelerator.backward(F.mse_loss(model(inputs) + offset, labels))
        optimizer.step()
    held = accelerator.run.inside.trained.capture().model["optimizer.group1.0"]
    assert torch.equal(held, offset.detach())
    assert held.any()


def test_first_batches_are_skipped(made: Made) -> None:
    accelerator, model, optimizer, loader, scheduler = made()
    behind = accelerator.skip_first_batches(loader, 3)
    assert len(behind) == 2
    assert train(accelerator, model, optimizer, behind, scheduler) == [4] * 2


def test_a_weight_says_what_a_loss_is_the_mean_of(made: Made) -> None:
    accelerator, model, optimizer, loader, _ = made(shards=2)
    model.train()
    for inputs, labels in loader:
        weight = (labels > 0).sum()
        loss = (F.mse_loss(model(inputs), labels, reduction="none") * (labels > 0)).sum() / weight.clamp(min=1)
        accelerator.backward(loss, weight=weight)
        optimizer.step()
        if accelerator.sync_gradients:
            break
    torch.manual_seed(0)
    one = nn.Linear(4, 1)
    wanted = LABELS[:8] > 0
    expected = F.mse_loss(one(INPUTS[:8])[wanted], LABELS[:8][wanted])
    assert accelerator.mean_loss == pytest.approx(float(expected))


def test_a_saved_state_is_loaded_by_another_run(made: Made, tmp_path: Path) -> None:
    accelerator, model, optimizer, loader, scheduler = made()
    train(accelerator, model, optimizer, loader, scheduler)
    accelerator.save_state(str(tmp_path / "state"))
    accelerator.save_model(model, str(tmp_path / "model"))
    assert list((tmp_path / "model").iterdir())
    accelerator.run.finish()
    another, again, _, _, schedule = made()
    another.load_state(str(tmp_path / "state"))
    assert torch.equal(again.weight, model.weight)
    assert schedule.get_last_lr() == scheduler.get_last_lr()


def test_an_evaluation_in_the_body_ends_the_update_before_it(made: Made) -> None:
    accelerator, model, optimizer, loader, _ = made()
    model.train()
    seen = []
    for inputs, labels in loader:
        accelerator.backward(F.mse_loss(model(inputs), labels))
        optimizer.step()
        if accelerator.sync_gradients:
            model.eval()
            seen.append(sum(len(accelerator.gather_for_metrics(one)) for one, _ in loader))
            model.train()
    assert seen == [40] * 5


def test_a_loop_that_gathers_twice_or_reduces_has_all_batches(made: Made) -> None:
    accelerator, model, _, loader, _ = made()
    model.eval()
    rows = [(accelerator.gather(inputs), accelerator.gather(labels)) for inputs, labels in loader]
    assert torch.equal(torch.cat([labels for _, labels in rows]), LABELS)
    sums = [float(accelerator.reduce(labels.sum())) for _, labels in loader]
    assert len(sums) == 5
    assert accelerator.gather_for_metrics(["a", 1]) == ["a", 1]


class Kept(GeneralTracker):  # type: ignore[misc]
    """Keeps what it is told."""

    name = "kept"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    @property
    def tracker(self) -> Any:
        return self.told

    def store_init_configuration(self, values: Any) -> None:
        self.told.append(values)

    def log(self, values: Any, step: Any = None, **_: Any) -> None:
        self.told.append((step, values))


def test_trackers_log_once_for_each_step(made: Made) -> None:
    tracker = Kept()
    accelerator, model, optimizer, loader, _ = made(log_with=tracker)
    accelerator.init_trackers("project", {"lr": 0.1})
    model.train()
    for inputs, labels in loader:
        accelerator.backward(F.mse_loss(model(inputs), labels))
        optimizer.step()
        accelerator.log({"loss": accelerator.mean_loss}, step=accelerator.steps_done)
    assert tracker.told[0] == {"lr": 0.1}
    assert [step for step, _ in tracker.told[1:]] == [1, 2, 3, 4, 5]


STATEFUL = DataLoaderConfiguration()
STATEFUL.use_stateful_dataloader = True  # which is refused without torchdata

REFUSED: dict[str, dict[str, Any]] = {
    "mixed_precision='fp8'": {"mixed_precision": "fp8"},
    "say arithmetic={'precision': 'fp16'} where it begins": {"mixed_precision": "fp16"},
    "use_stateful_dataloader": {"dataloader_config": STATEFUL},
    "dynamo_backend": {"dynamo_backend": "inductor"},
    "step_scheduler_with_optimizer": {"step_scheduler_with_optimizer": False},
    "dispatch_batches": {"dataloader_config": DataLoaderConfiguration(dispatch_batches=True)},
    "over the end of an epoch": {
        "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    },
    "FSDP": {"fsdp_plugin": object.__new__(FullyShardedDataParallelPlugin)},
    "DeepSpeed": {"deepspeed_plugin": object()},
}


@pytest.mark.parametrize("said", REFUSED)
def test_settings_that_cannot_be_kept_are_refused_with_the_cure(said: str, made: Made) -> None:
    with pytest.raises(JobError, match=re.escape(said)):
        made(**REFUSED[said])


def test_variables_of_its_launcher_are_refused_likewise(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(JobError, match="FSDP distributes a model"):
        made()


Body = Callable[[Any, Any, Any, Any], Any]

BODIES: dict[str, tuple[type[Exception], str, Body]] = {
    "no backward": (JobError, "without accelerator.backward", lambda a, loss, m, o: None),
    "gather": (JobError, "accelerator.mean_loss", lambda a, loss, m, o: a.gather(loss)),
    "retain": (ModelError, "retain_graph", lambda a, loss, m, o: a.backward(loss, retain_graph=True)),
    "closure": (ModelError, "closure", lambda a, loss, m, o: (a.backward(loss), o.step(lambda: loss))),
    "no_sync": (JobError, "gradient_accumulation_steps", lambda a, loss, m, o: a.no_sync(m)),
    "no gradient": (
        LossError,
        "step 0, shard 0, rank 0: the loss depends on no parameter",
        lambda a, loss, m, o: a.backward(loss.detach()),
    ),
    "a rate of each turn": (
        JobError,
        r"changed lr of an optimizer in two turns.* give the scheduler to accelerator",
        lambda a, loss, m, o: (a.backward(loss), o.step(), o.param_groups[0].update(lr=loss.item())),
    ),
}


@pytest.mark.parametrize("body", BODIES)
def test_bodies_that_cannot_be_shared_out_are_refused_with_the_cure(body: str, made: Made) -> None:
    kind, says, act = BODIES[body]
    accelerator, model, optimizer, loader, _ = made()
    model.train()
    with pytest.raises(kind, match=says):
        for inputs, labels in loader:
            act(accelerator, F.mse_loss(model(inputs), labels), model, optimizer)


def test_a_pass_in_which_no_optimizer_makes_a_step_is_told(made: Made) -> None:
    accelerator, model, _, loader, _ = made()
    model.train()

    def train() -> None:
        for inputs, labels in loader:
            accelerator.backward(F.mse_loss(model(inputs), labels))

    with pytest.warns(UnisonoWarning, match=r"optimizer.step\(\) was never called"):
        train()


def test_settings_may_be_changed_once_for_each_step(made: Made) -> None:
    accelerator, model, optimizer, loader, _ = made()
    model.train()
    for inputs, labels in loader:
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + accelerator.steps_done)
        accelerator.backward(F.mse_loss(model(inputs), labels))
        optimizer.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.02)


def test_an_evaluation_that_is_shared_out_is_not_left_early(made: Made) -> None:
    accelerator, model, _, loader, _ = made()
    model.eval()
    for number, (inputs, _labels) in enumerate(loader):
        accelerator.gather_for_metrics(inputs)
        if number == 2:
            break
    with pytest.raises(JobError, match=r"left before its end.*Subset"):
        accelerator.print("found")


def test_a_trigger_is_seen_in_the_last_turn_of_a_step_and_once(made: Made) -> None:
    accelerator, model, optimizer, loader, _ = made()
    model.train()
    seen = list[tuple[int, bool]]()
    for inputs, labels in loader:
        accelerator.backward(nn.functional.mse_loss(model(inputs), labels))
        optimizer.step()
        if len(seen) == 1:  # the second of four turns
            accelerator.set_trigger()
        seen.append((accelerator.steps_done, accelerator.check_trigger()))
    assert [number for number, (_, is_set) in enumerate(seen) if is_set] == [3]
    assert seen[3] == (1, True)
    assert not accelerator.check_trigger()


class Read(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(TensorDataset(INPUTS, LABELS))


def test_an_evaluation_of_a_stream_has_all_of_it(made: Made) -> None:
    accelerator, model, *_ = made()
    model.eval()
    rows = list[Any]()
    for inputs, _ in accelerator.prepare(DataLoader(Read(), batch_size=3)):
        rows += accelerator.gather_for_metrics(inputs).tolist()
    assert rows == INPUTS.tolist()


def test_an_evaluation_that_gathers_nothing_may_be_left(made: Made) -> None:
    accelerator, model, _, loader, _ = made()
    model.eval()
    first, _labels = next(iter(loader))
    assert torch.equal(accelerator.gather(first), INPUTS[:8])
    for number, _batch in enumerate(loader):
        if number == 2:
            break
    accelerator.print("found")


def test_training_loops_side_by_side_are_refused(made: Made) -> None:
    _, model, _, loader, _ = made()
    model.train()
    with pytest.raises(JobError, match=r"one at a time.*StackDataset"):
        next(zip(loader, loader, strict=True))


def by_hand_with(model: Any, loss: torch.Tensor) -> None:
    """A step with an optimizer that is not prepared."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("train_with", [lambda a, m, loss: a.backward(loss), lambda a, m, loss: by_hand_with(m, loss)])
def test_a_script_is_told_what_it_has_to_prepare(train_with: Callable[..., None], made: Made) -> None:
    accelerator, model, _, loader, _ = made()
    accelerator.free_memory()
    accelerator.prepare(model)
    with pytest.raises(ModelError, match=r"model, optimizer, loader = accelerator\.prepare"):
        for inputs, labels in loader:
            train_with(accelerator, model, F.mse_loss(model(inputs), labels))


def test_a_model_without_optimizer_is_evaluated_in_training_mode(made: Made) -> None:
    accelerator, model, _, loader, _ = made()
    accelerator.free_memory()
    model = accelerator.prepare(model)
    assert model.training
    rows = [accelerator.gather_for_metrics((model(inputs), labels))[1] for inputs, labels in loader]
    assert torch.equal(torch.cat(rows), LABELS)


def read_by(seed: int | None, made: Made) -> list[list[float]]:
    """The samples of two passes over a loader that shuffles."""
    config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=seed)
    accelerator, model, optimizer, _, _ = made(shards=1, dataloader_config=config)
    torch.manual_seed(5)
    loader = accelerator.prepare(DataLoader(TensorDataset(INPUTS, LABELS), batch_size=8, shuffle=True))
    passes = []
    for _ in range(2):
        passes.append(list[float]())
        for inputs, labels in loader:
            passes[-1] += labels.flatten().tolist()
            accelerator.backward(F.mse_loss(model(inputs), labels))
            optimizer.step()
    accelerator.run.close()
    return passes


def test_a_seedable_sampler_shuffles_as_that_of_accelerate_alone(made: Made) -> None:
    torch.manual_seed(5)
    alone = SeedableRandomSampler(INPUTS, data_seed=3)
    passes = [LABELS[list(alone)].flatten().tolist() for _ in range(2)]
    assert read_by(3, made) == passes
    assert read_by(5, made) == read_by(None, made) != passes


def test_the_state_of_gradients_knows_which_loader_is_read_and_where_it_ends(made: Made) -> None:
    accelerator, model, optimizer, loader, _ = made()
    evaluation = accelerator.prepare(DataLoader(TensorDataset(INPUTS[:20]), batch_size=8))
    state, ends = accelerator.gradient_state, list[Any]()
    assert (evaluation.remainder, evaluation.total_batch_size, evaluation.total_dataset_length) == (4, 8, 20)
    assert (state.active_dataloader, state.end_of_dataloader, state.remainder) == (None, False, -1)
    for inputs, labels in loader:
        assert state.active_dataloader is loader
        accelerator.backward(F.mse_loss(model(inputs), labels))
        optimizer.step()
        if accelerator.sync_gradients:
            model.eval()
            inner = [(state.active_dataloader is evaluation, state.end_of_dataloader) for _ in evaluation]
            assert inner == [(True, False), (True, False), (True, True)]
            model.train()
        ends.append(state.end_of_dataloader)
    assert ends == [False] * 16 + [True] * 4
    assert not state.in_dataloader


def test_a_stateful_loader_that_is_asked_for_later_is_refused(made: Made) -> None:
    accelerator, *_ = made()
    accelerator.dataloader_config = STATEFUL
    with pytest.raises(JobError, match="use_stateful_dataloader"):
        accelerator.prepare(DataLoader(TensorDataset(INPUTS)))


def test_layers_are_unfrozen_between_two_loops(made: Made) -> None:
    accelerator, model, *others = made()
    model.weight.requires_grad_(False)
    frozen = model.weight.clone()
    train(accelerator, model, *others)
    assert torch.equal(model.weight, frozen)
    model.weight.requires_grad_(True)
    train(accelerator, model, *others)
    assert not torch.equal(model.weight, frozen)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_precision_belongs_to_the_job(precision: str, tmp_path: Path) -> None:
    accelerator = unisono.accelerate.Accelerator(mixed_precision=precision, run_dir=tmp_path / "run")
    assert accelerator.run.job.precision == precision
    assert (accelerator.scaler is not None) == (precision == "fp16")
    accelerator.run.close()


def test_float16_of_the_run_is_that_of_the_accelerator_whose_files_know_the_scale(made: Made, tmp_path: Path) -> None:
    accelerator, model, *others = made(precision="fp16")
    train(accelerator, model, *others)
    assert accelerator.scaler.state_dict() != torch.amp.GradScaler("cpu").state_dict()
    accelerator.save_state(str(tmp_path / "state"))
    with accelerator.autocast():
        assert (model.weight @ model.weight.T).dtype == torch.float16
    accelerator.run.finish()
    another, *_ = made(precision="fp16")
    another.load_state(str(tmp_path / "state"))
    assert another.scaler.state_dict() == accelerator.scaler.state_dict()


class Stream(IterableDataset[Any]):
    """The samples one after the other."""

    def __iter__(self) -> Iterator[Any]:
        return iter(zip(INPUTS, LABELS, strict=True))

    def __len__(self) -> int:
        return len(INPUTS)


def test_batches_of_streams_are_accumulated_and_not_skipped(made: Made) -> None:
    accelerator, model, optimizer, _, scheduler = made(shards=1, gradient_accumulation_steps=2)
    loader = accelerator.prepare(DataLoader(Stream(), batch_size=8))
    assert train(accelerator, model, optimizer, loader, scheduler) == [1] * 3
    assert torch.equal(model.weight, by_hand(16))
    with pytest.raises(DataError, match="skip_first_batches of an IterableDataset"):
        accelerator.skip_first_batches(loader, 1)


@pytest.mark.parametrize(("is_main", "order"), [(True, ["work", "wait"]), (False, ["wait", "work"])])
def test_the_main_worker_goes_first(*, is_main: bool, order: list[str]) -> None:
    told: list[str] = []

    class Told(unisono.accelerate.Accelerator):
        is_main_process = is_main

        def __init__(self) -> None:
            """It has no run."""

        def wait_for_everyone(self) -> None:
            told.append("wait")

    with Told().main_process_first():
        told.append("work")
    assert told == order


def test_states_are_not_saved_among_the_checkpoints_of_the_run(made: Made, tmp_path: Path) -> None:
    with pytest.raises(JobError, match="project_dir is the run folder"):
        made(project_dir=tmp_path / "run-0")


def test_a_loop_that_is_left_before_its_update_is_told_at_the_next_call(made: Made) -> None:
    accelerator, model, optimizer, loader, scheduler = made()
    model.train()
    for _ in loader:
        break
    with pytest.raises(JobError, match="left in the middle of a step"):
        train(accelerator, model, optimizer, loader, scheduler)


def test_outside_of_training_loops_nothing_is_trained(made: Made) -> None:
    accelerator, _, optimizer, _, _ = made()
    with pytest.raises(JobError, match="outside of a training loop"):
        accelerator.backward(torch.zeros((), requires_grad=True))
    with pytest.raises(JobError, match="outside of a training loop"):
        optimizer.step()
