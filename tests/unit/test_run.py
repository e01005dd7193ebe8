"""One worker in this process: what a run does, and what it refuses."""

import json
import math
import os
import random
import signal
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import unisono
from unisono.errors import (
    CheckpointError,
    DataError,
    Dismissed,
    JobError,
    JobMismatch,
    LossError,
    ModelError,
    NondeterministicOperation,
    NonFiniteLoss,
    UnisonoWarning,
)
from unisono.host.process import ScriptEnd
from unisono.integrations.kit import run_for
from unisono.plan.order import sample_order
from unisono.train.start import HOST_PROCESS, HostProcess
from unisono_lab.strategies.parameter_server import ParameterServer

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_worker")]

Start = Callable[..., unisono.Run]
Steps = Callable[..., Iterator[Any]]


def data(count: int = 70) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def cross_entropy(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def prepared(run: unisono.Run, model: Any = None) -> tuple[unisono.Run, Any]:
    model = model or net()
    run.prepare(model, sgd(model))
    return run, model


def go_through(run: unisono.Run, loss_fn: Any = cross_entropy, **looping: Any) -> None:
    for step in run.steps(data(), **looping):
        step.run(loss_fn)


def train(run: unisono.Run, loss_fn: Any = cross_entropy, **looping: Any) -> nn.Module:
    _, model = prepared(run)
    go_through(run, loss_fn, **looping)
    return model  # type: ignore[no-any-return]


def lines_of(run: unisono.Run, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.dir / name).read_text().splitlines()]


# -- the plain loop ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    ],
    ids=["sgd", "adam", "fused adamw"],
)
def test_one_worker_and_one_shard_are_the_plain_pytorch_loop_bit_for_bit(start: Start, make_optimizer: Any) -> None:
    run = start(shards=1, batch_size=33, seed=5)
    ours = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    theirs = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    theirs.load_state_dict(ours.state_dict())

    run.prepare(ours, make_optimizer(ours.parameters()))
    losses = [step.run(cross_entropy, clip_norm=1.0) for step in run.steps(data(), epochs=7)]

    optimizer = make_optimizer(theirs.parameters())
    inputs, labels = data().tensors
    expected = []
    for epoch in range(7):
        order = torch.from_numpy(sample_order(5, epoch, 70)(torch.arange(70).numpy()))
        for rows in order.split(33):
            optimizer.zero_grad()
            loss = F.cross_entropy(theirs(inputs[rows]), labels[rows])
            loss.backward()
            nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
            optimizer.step()
            expected.append(loss.item())

    assert len(losses) == 21
    assert losses == expected
    assert unisono.digest(ours) == unisono.digest(theirs)


# -- what a run tells -------------------------------------------------------------------------------------------------


def test_a_step_knows_where_it_stands(start: Start) -> None:
    run, _model = prepared(start())
    seen = []
    for step in run.steps(data(), epochs=2):
        step.run(cross_entropy)
        seen.append((step.number, step.epoch, step.position, step.size, step.is_last_in_epoch))
    assert seen == [
        (0, 0, 0, 32, False), (1, 0, 32, 32, False), (2, 0, 64, 6, True),
        (3, 1, 70, 32, False), (4, 1, 102, 32, False), (5, 1, 134, 6, True),
    ]  # fmt: skip


def test_the_run_folder_tells_what_happened(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    run = start()
    train(run)
    weights = run.finish()
    folder = run.dir
    lines = lines_of(run, "metrics.jsonl")
    result = json.loads((folder / "result.json").read_text())
    events = [line["event"] for line in lines_of(run, "journal.jsonl")]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert [(line["batch_size"], line.get("ends_epoch")) for line in lines] == [(32, None), (32, None), (6, True)]
    assert not any({"learning_rate", "lr_factor"} & line.keys() for line in lines)  # nobody changes them
    assert all({"loss", "lr", "samples_per_s", "epoch", "seconds"} <= line.keys() for line in lines)
    assert (result["weights_sha256"], result["steps"], result["samples"]) == (weights, 3, 70)
    assert (result["epoch_samples"], result["dataset_samples"]) == (70, 70)
    assert (result["world_size"], result["exit_code"], result["error"]) == (1, 0, None)
    assert json.loads((folder / "job.json").read_text())["batch_size"] == 32
    assert events == ["started", "finished"]
    assert f"weights sha256 {weights}" in capsys.readouterr().out


def test_metrics_logged_in_the_loss_are_means_over_the_global_batch(start: Start) -> None:
    run, _model = prepared(start(batch_size=70, shards=7))

    def loss_fn(model: Any, batch: Any) -> Tensor:
        run.log("label", batch[1].float().mean())
        return cross_entropy(model, batch)

    for step in run.steps(data()):
        step.run(loss_fn)
        assert step.metrics["label"] == pytest.approx(data().tensors[1].float().mean().item())


def test_the_loss_is_the_weighted_mean_of_the_shards(start: Start) -> None:
    run, _model = prepared(start(batch_size=70, shards=2))

    def loss_fn(model: Any, batch: Any) -> unisono.Weighted:
        first = bool(batch[0][0, 0] == first_sample[0])
        return unisono.Weighted(model(batch[0]).sum() * 0 + (1.0 if first else 4.0), 3 if first else 1)

    for step in run.steps(data(), shuffle=False):
        first_sample = data().tensors[0][0]
        assert step.run(loss_fn) == pytest.approx((3 * 1 + 1 * 4) / 4)


def test_evaluation_and_prediction_cover_every_sample_once_and_in_order(start: Start) -> None:
    run = start()
    model = train(run)
    model.train()
    inputs, labels = data().tensors
    with torch.no_grad():
        expected = model(inputs)
    found = run.evaluate(data(), lambda model, batch: {"loss": cross_entropy(model, batch)})
    assert found["loss"] == pytest.approx(F.cross_entropy(expected, labels).item(), rel=1e-6)
    assert torch.allclose(run.predict(data()), expected)
    assert torch.equal(run.predict(data(), lambda model, batch: {"label": batch[1]})["label"], labels)
    assert model.training


def test_collective_verbs_of_a_single_worker_return_what_they_got(start: Start) -> None:
    run = start()
    assert [run.all_reduce(3, operation) for operation in ("sum", "max", "min", "mean")] == [3, 3, 3, 3.0]
    assert torch.equal(run.all_reduce(torch.tensor([1.0, 2.0])), torch.tensor([1.0, 2.0]))
    assert run.broadcast({"a": [1, "b"]}) == {"a": [1, "b"]}
    run.barrier()
    with pytest.raises(ValueError, match="'median'"):
        run.all_reduce(1, "median")  # type: ignore[arg-type]


# -- going on ---------------------------------------------------------------------------------------------------------


class CutOff(Exception):
    """As if the process had died there."""


def cut_off_after(run: unisono.Run, stop_at: int | None) -> Steps:
    """The steps of loops, until the body of one of them is through."""

    def steps(*feed: Any, **looping: Any) -> Iterator[Any]:
        for step in run.steps(*feed, **looping):
            yield step
            if step.number == stop_at:
                run.close()
                raise CutOff

    return steps


@pytest.fixture
def goes_on(start: Start, tmp_path: Path) -> Callable[..., bool]:
    """Whether a script that was cut off after a step comes to the bits of an undisturbed one when started again."""

    def compared(script: Callable[[unisono.Run, Steps], Any], stop_at: int, every: int = 1, **settings: Any) -> bool:
        undisturbed = start(run_dir=tmp_path / "undisturbed")
        script(undisturbed, undisturbed.steps)
        settings = {"checkpoints": {"every": every}, **settings}
        first = start(**settings)
        with pytest.raises(CutOff):
            script(first, cut_off_after(first, stop_at))
        again = start(**settings)
        script(again, again.steps)
        return again.finish() == undisturbed.finish()

    return compared


def two_loops(run: unisono.Run, steps: Steps) -> None:
    """And a scheduler."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run.prepare(model, optimizer)
    scheduler = run.register("scheduler", torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
    for _ in range(2):
        for step in steps(data(), epochs=2):
            step.run(cross_entropy)
            scheduler.step()


class Turned(nn.Module):
    """A model of complex numbers."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3, dtype=dtype)
        self.register_buffer("phase", torch.ones(3, dtype=dtype))

    def forward(self, inputs: Tensor) -> Tensor:
        turned: Tensor = self.layer(inputs.to(self.layer.weight.dtype)) * self.phase
        return turned.abs()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_a_model_of_complex_numbers_goes_on_to_the_same_bits(goes_on: Any, dtype: torch.dtype) -> None:
    def trains(run: unisono.Run, steps: Steps) -> None:
        torch.manual_seed(1)
        model = Turned(dtype)
        run.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
        for step in steps(data(), epochs=2):
            step.run(cross_entropy)

    assert goes_on(trains, stop_at=3, every=2)


@pytest.mark.parametrize("stop_at", [1, 2, 3, 6, 7, 8, 11])
def test_a_run_that_was_cut_off_goes_on_to_the_same_bits(goes_on: Any, stop_at: int) -> None:
    assert goes_on(two_loops, stop_at, every=2)


class AloneToo(ParameterServer):
    """As in an elastic job of which one worker is left."""

    def require(self, workers: int | None, **_: Any) -> None:
        """Any number will do."""


def optimizers_after_others(run: unisono.Run, steps: Steps) -> None:
    _, model = prepared(run)
    for step in steps(data()):
        step.run(cross_entropy)
    run.prepare(model, [torch.optim.Adam(model[number].parameters(), lr=0.01) for number in (0, 2)])
    for step in steps(data(), epochs=2):
        step.run(cross_entropy)


@pytest.mark.parametrize(
    ("script", "stop_at"), [*((two_loops, stop_at) for stop_at in (2, 5, 6, 10)), (optimizers_after_others, 6)]
)
def test_asynchronous_servers_go_on_with_what_the_optimizers_of_a_checkpoint_have_kept(
    goes_on: Any, script: Any, stop_at: int
) -> None:
    """Alone, as in an elastic job of which one worker is left, a worker does what the serial run does."""
    assert goes_on(script, stop_at, every=2, strategy=AloneToo(synchronous=False))


def test_asynchronous_servers_go_on_with_optimizers_that_were_made_after_others(start: Start, tmp_path: Path) -> None:
    def work(run: unisono.Run, stop_at: int | None = None) -> str | None:
        model: Any = net()
        run.prepare(model, sgd(model))
        for step in run.steps(data()):
            step.run(cross_entropy)
        run.prepare(model, [torch.optim.Adam(model[number].parameters(), lr=0.01) for number in (0, 2)])
        for step in run.steps(data(), epochs=2):
            step.run(cross_entropy)
            if step.number == stop_at:
                run.close()
                return None
        return run.finish()

    expected = work(start(run_dir=tmp_path / "undisturbed"))
    settings = {"checkpoints": {"every": 2}, "strategy": AloneToo(synchronous=False)}
    assert work(start(**settings), 6) is None
    assert work(start(**settings)) == expected


def test_a_checkpoint_asked_for_in_the_loop_holds_what_the_rest_of_the_body_does(start: Start) -> None:
    def work(run: unisono.Run, last: int) -> list[float]:
        model = net()
        optimizer = sgd(model)
        run.prepare(model, optimizer)
        scheduler = run.register("scheduler", torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
        rates = []
        for step in run.steps(data(), epochs=2):
            rates.append(optimizer.param_groups[0]["lr"])
            step.run(cross_entropy)
            if step.number == 1:
                run.checkpoint()
            scheduler.step()
            if step.number == last:
                break
        run.close()
        return rates

    assert work(start(), 2) == [0.1, 0.05, 0.025]
    assert work(start(), 5) == [0.025, 0.0125, 0.00625, 0.003125]


def test_weights_of_a_run_can_be_loaded_for_inference(start: Start) -> None:
    run = start(checkpoints={"every": 1})
    model = train(run)
    weights = run.finish()
    assert unisono.digest(unisono.load(net(), run.dir)) == weights == unisono.digest(model)
    with pytest.raises(CheckpointError, match="another model"):
        unisono.load(nn.Linear(2, 2), run.dir)


def test_a_finished_run_started_again_trains_nothing_and_has_the_same_weights(start: Start) -> None:
    run = start(checkpoints={"every": 1})
    train(run)
    weights = run.finish()
    again = start(checkpoints={"every": 1})
    train(again, loss_fn=None)
    assert again.finish() == weights


def unfreezes(run: unisono.Run, steps: Steps, *, later: bool = False) -> None:
    """Unfreezes a layer in the loop's body, in one step or from it on."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    optimizer = sgd(model)
    run.prepare(model, optimizer)
    for step in steps(data(), epochs=2):
        if step.number == 1 or (later and step.number > 1 and not model[0].weight.requires_grad):
            model[0].requires_grad_(True)
            run.prepare(model, optimizer)
        step.run(cross_entropy)


def test_a_run_that_resumes_does_not_train_other_parameters_than_before(goes_on: Any) -> None:
    words = "0.bias is frozen here, and was trained after step 3, where .*freeze and unfreeze between two loops"
    with (
        pytest.warns(UnisonoWarning, match="changes what is trained"),
        pytest.raises(CheckpointError, match=words),
    ):
        goes_on(unfreezes, stop_at=3)


def test_a_run_that_resumes_may_unfreeze_in_its_first_step(goes_on: Any) -> None:
    with pytest.warns(UnisonoWarning, match="changes what is trained"):
        assert goes_on(partial(unfreezes, later=True), stop_at=3)


def unfreezes_between_loops(run: unisono.Run, *, loops: int = 2) -> None:
    """Trains one layer in the first loop, and both in the second."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    optimizer = sgd(model)
    for number in range(loops):
        model[0].requires_grad_(number > 0)
        run.prepare(model, optimizer)
        go_through(run)


def test_a_run_that_resumes_at_the_end_of_a_loop_may_unfreeze_for_the_next_one(start: Start, tmp_path: Path) -> None:
    undisturbed = start(run_dir=tmp_path / "undisturbed")
    unfreezes_between_loops(undisturbed)
    stopped = start(checkpoints={"every": 1})
    unfreezes_between_loops(stopped, loops=1)
    stopped.close()
    resumed = start(checkpoints={"every": 1})
    unfreezes_between_loops(resumed)
    assert resumed.finish() == undisturbed.finish()


def test_a_model_can_be_prepared_again_after_a_change_without_going_back_to_a_checkpoint(start: Start) -> None:
    run, model = prepared(start(checkpoints={"every": 1}))
    go_through(run)
    trained = unisono.digest(model)
    model[0].requires_grad_(False)
    prepared(run, model)
    assert unisono.digest(model) == trained
    go_through(run)
    run.finish()
    assert [line["step"] for line in lines_of(run, "metrics.jsonl")] == [0, 1, 2, 3, 4, 5]


def anew(model: Any) -> None:
    model[2].reset_parameters()


def another_head(model: Any) -> None:
    model[2] = nn.Linear(16, 5)


@pytest.mark.parametrize("asks", ["never", "before", "after"])
@pytest.mark.parametrize("change", [anew, another_head])
@pytest.mark.parametrize("stop_at", [4, 6])
def test_a_run_goes_on_in_a_loop_before_which_its_script_changes_the_model(
    goes_on: Any, change: Any, stop_at: int, asks: str
) -> None:
    """Whether or not it asks for a checkpoint between the two loops."""

    def work(run: unisono.Run, steps: Steps) -> None:
        model = train(run)
        if asks == "before":
            run.checkpoint()
        change(model)
        run.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
        if asks == "after":
            run.checkpoint()
        for step in steps(data(), epochs=2):
            step.run(cross_entropy)

    assert goes_on(work, stop_at)


@pytest.mark.parametrize("stop_at", [4, 6])
@pytest.mark.parametrize("breaks", [False, True])
def test_a_run_that_skips_a_loop_draws_behind_it_what_an_undisturbed_one_draws(
    goes_on: Any, stop_at: int, breaks: bool
) -> None:
    def work(run: unisono.Run, steps: Steps) -> None:
        prepared(run)
        for step in steps(data()):
            step.run(cross_entropy)
            torch.rand(3)
            if breaks and step.number == 1:
                break
        chosen = torch.randperm(len(data()))[:60].tolist()
        random.shuffle(chosen)
        for step in steps(torch.utils.data.Subset(data(), chosen), epochs=3):
            step.run(cross_entropy)

    assert goes_on(work, stop_at)


def test_a_run_goes_on_with_the_layers_in_evaluation_mode_that_its_script_has_left_so(goes_on: Any) -> None:
    def work(run: unisono.Run, steps: Steps) -> None:
        _, model = prepared(run, nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3)))
        for step in steps(data(), epochs=3, drop_last=True):
            step.run(cross_entropy)
            if step.number == 1:
                model[1].eval()

    assert goes_on(work, stop_at=3)


def test_a_run_folder_of_another_job_is_refused_with_the_differences(start: Start) -> None:
    with start(checkpoints={"every": 1}) as run:
        train(run)
    with pytest.raises(JobMismatch, match=r"(?s)seed: 7 here, 0 there.*--allow-job-change"):
        start(seed=7)
    start(seed=7, checkpoints={"allow_job_change": True})


def test_what_was_registered_must_be_registered_again(start: Start) -> None:
    run = start(checkpoints={"every": 1})
    run.register("scheduler", torch.optim.lr_scheduler.StepLR(sgd(net()), 1))
    train(run)
    run.close()
    with pytest.raises(CheckpointError, match=r"only in the checkpoint \['scheduler'\]"):
        train(start(), epochs=2)


# -- leaving a loop ---------------------------------------------------------------------------------------------------


def steps_of(run: unisono.Run) -> int:
    run.finish()
    return int(json.loads((run.dir / "result.json").read_text())["steps"])


def test_another_loop_may_follow_one_that_was_left_by_a_break(start: Start) -> None:
    run, _ = prepared(start())
    for step in run.steps(data(), epochs=2):
        step.run(cross_entropy)
        if step.number == 2:
            break
    numbers = []
    for step in run.steps(data(20)):
        step.run(cross_entropy)
        numbers.append(step.number)
    assert numbers[0] == 3
    assert steps_of(run) == numbers[-1] + 1


def test_a_loop_that_was_interrupted_in_a_step_goes_on_there(start: Start, tmp_path: Path) -> None:
    def interrupted_once(model: Any, batch: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return cross_entropy(model, batch)

    with start(run_dir=tmp_path / "other") as undisturbed:
        expected = unisono.digest(train(undisturbed))
    calls: list[int] = []
    run, _ = prepared(start(checkpoints={"every": 1}))
    with pytest.raises(KeyboardInterrupt):
        for step in run.steps(data()):
            step.run(interrupted_once)
    assert steps_of(run) == 1
    again = start(checkpoints={"every": 1})
    assert unisono.digest(train(again)) == expected


def test_ctrl_c_in_a_loop_leaves_a_checkpoint_and_the_run_goes_on_from_there_to_the_same_bits(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with start(run_dir=tmp_path / "other") as undisturbed:
        expected = unisono.digest(train(undisturbed))
    run, _ = prepared(start())
    with pytest.raises(SystemExit) as left:
        for step in run.steps(data()):
            step.run(cross_entropy)
            os.kill(os.getpid(), signal.SIGINT)
    assert left.value.code == 75
    assert [path.name for path in (run.dir / "checkpoints").iterdir()] == ["step-00000002"]
    # The second where the process runs no file, as a kernel of a notebook; and those of pytest that share its tests.
    ways = f"UNISONO_RUN_DIR={run.dir} ", f"unisono.init(run_dir='{run.dir}') goes on"
    words = capsys.readouterr().out
    assert any(way in words for way in ways)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert unisono.digest(train(start())) == expected


def test_a_loop_whose_generator_is_kept_is_ended_by_finish(start: Start) -> None:
    run, _ = prepared(start())
    steps = run.steps(data())
    for step in steps:
        step.run(cross_entropy)
        break
    assert steps_of(run) == 1


def test_a_step_can_only_be_run_in_the_body_it_belongs_to(start: Start) -> None:
    run, _ = prepared(start())
    first, *_ = list(run.steps(data()))
    with pytest.raises(JobError, match="this step is over"):
        first.run(cross_entropy)


def test_a_run_that_has_ended_says_so(start: Start) -> None:
    run = start()
    train(run)
    run.finish()
    for verb in (run.finish, run.barrier, lambda: run.predict(data()), lambda: run.steps(data())):
        with pytest.raises(JobError, match="run.finish was called before: leave this call out.* This run has ended"):
            verb()


def test_a_run_whose_steps_never_called_step_run_warns_once_at_the_line_that_ends_it(start: Start) -> None:
    run, model = prepared(start())
    for _ in run.steps(data()):
        pass
    with pytest.warns(UnisonoWarning, match=r"nothing was trained: step\.run\(loss_fn\) was called in no step") as seen:
        run.finish(model)
    assert [Path(each.filename).name for each in seen] == ["test_run.py"]


def test_a_run_that_took_no_step_or_skipped_all_or_goes_on_at_its_end_is_not_warned_of(
    start: Start, tmp_path: Path
) -> None:
    skip = {"arithmetic": {"on_nan": "skip"}, "run_dir": tmp_path / "skip"}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnisonoWarning)
        for settings in ({"checkpoints": {"every": 1}}, {"checkpoints": {"every": 1}}, skip):
            run = start(**settings)
            train(
                run,
                cross_entropy if settings is not skip else lambda model, batch: cross_entropy(model, batch) * math.nan,
            )
            run.finish()
        run = start(run_dir=tmp_path / "none")
        prepared(run)
        run.finish()


@pytest.fixture
def script_end() -> Iterator[ScriptEnd]:
    """The end of a script, which a test brings about."""
    end = ScriptEnd(is_told=True)
    token = HOST_PROCESS.set(HostProcess(end))
    yield end
    HOST_PROCESS.reset(token)


WITHOUT_FINISH = "unisono: the script ended without run.finish(model): the workers' weights were not compared, and no"


@pytest.mark.parametrize(
    ("way", "times"),
    [("trained", 1), ("untrained", 0), ("finished", 0), ("closed", 0), ("UNISONO_STOP_AFTER", 0), ("UNISONO_STUDY", 0)],
)
def test_a_script_that_trained_and_ends_without_finish_says_so_unless_it_was_cut_short(
    way: str,
    times: int,
    start: Start,
    script_end: ScriptEnd,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if way.isupper():
        monkeypatch.setenv(way, "1")
    run = start()
    prepared(run) if way == "untrained" else train(run)
    if way in ("finished", "closed"):
        run.finish() if way == "finished" else run.close()
    script_end.reached()
    assert capsys.readouterr().err.count(WITHOUT_FINISH) == times


def test_a_guest_finishes_its_run_at_the_end_of_the_script_and_nothing_is_said(
    tmp_path: Path, script_end: ScriptEnd, capsys: pytest.CaptureFixture[str]
) -> None:
    train(run_for("Guest", None, {"batch_size": 32, "run_dir": tmp_path / "run"}))
    script_end.reached()
    said = capsys.readouterr()
    assert "weights sha256" in said.out
    assert WITHOUT_FINISH not in said.err


def test_finish_takes_modules_only_and_says_what_to_write(start: Start) -> None:
    run = start()
    model = train(run)
    for wrong in ((model, sgd(model)), 5, "model", [model, None]):
        with pytest.raises(
            ModelError, match=r"needs a module, or a list of modules, .* model, optimizer = run\.prepare"
        ):
            run.finish(wrong)  # type: ignore[arg-type]
    assert run.finish([model])


def test_prepare_says_the_order_of_its_arguments_and_where_loaders_go(start: Start) -> None:
    run, model = start(), net()
    with pytest.raises(ModelError, match=r"got SGD: write run\.prepare\(model, optimizer\), in this order"):
        run.prepare(sgd(model), model)
    with pytest.raises(JobError, match="also got TensorDataset: data sets go to run.steps"):
        run.prepare(model, sgd(model), data())


def test_what_is_on_the_meta_device_is_refused_by_name_and_is_to_be_materialised_first(start: Start) -> None:
    run, empty, model = start(), nn.Linear(2, 2, device="meta"), net()
    with pytest.raises(ModelError, match="weight is on the meta device, .*: materialise it first"):
        run.prepare(empty, sgd(empty))
    with pytest.raises(ModelError, match="'a' is on the meta device"):
        run.prepare(model, sgd(model), state={"a": torch.zeros(2, device="meta")})
    outside = nn.Parameter(torch.zeros(2, device="meta"))
    with pytest.raises(ModelError, match="group0.4 is on the meta device"):
        run.prepare(model, torch.optim.SGD([*model.parameters(), outside], lr=0.1))


def test_what_is_no_module_cannot_be_spread_over_devices(start: Start) -> None:
    run: Any = start()
    for call in ("parallelize", "pipeline"):
        with pytest.raises(ModelError, match=f"run.{call} takes a module, not int"):
            getattr(run, call)(5, {})


@pytest.mark.parametrize(
    "change", [lambda model: model.double(), lambda model: setattr(model[2].weight, "data", torch.zeros(3, 5))]
)
def test_a_parameter_of_another_dtype_or_shape_than_at_prepare_is_a_changed_model(change: Any, start: Start) -> None:
    run, model = prepared(start())
    steps = run.steps(data(), epochs=2)
    next(steps).run(cross_entropy)
    change(model)
    with pytest.raises(ModelError, match=r"the model changed after run\.prepare: [02]\.weight was float32\["):
        next(steps).run(cross_entropy)


@pytest.mark.parametrize("wrong", [torch.tensor(1.0), None, lambda batch: batch])
def test_a_function_that_cannot_be_called_with_model_and_batch_is_refused(wrong: Any, start: Start) -> None:
    needs = r"a function {}\(model, batch\).*(is no function|takes 1 positional argument)"
    run, _model = prepared(start())
    if wrong is not None:
        with pytest.raises(JobError, match=needs.format("predict_fn")):
            run.predict(data(), wrong)
    for metrics in (wrong, {"loss": wrong}):
        with pytest.raises(JobError, match=needs.format("metrics")):
            run.evaluate(data(), metrics)
    for step in run.steps(data()):
        with pytest.raises(JobError, match=needs.format("loss_fn")):
            step.run(wrong)
        break


def test_a_type_error_of_the_loss_functions_own_stays_as_it_is(start: Start) -> None:
    def wrong(model: Any, batch: Any) -> Any:
        return len(5)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="has no len"):
        train(start(), wrong)


@pytest.mark.parametrize("wrong", [5, [], [5], "all"])
def test_what_is_no_optimizer_is_refused_in_a_step(wrong: Any, start: Start) -> None:
    run, _model = prepared(start())
    for step in run.steps(data()):
        with pytest.raises(JobError, match=r"step\.run\(optimizer=.*(needs an optimizer|name at least one)"):
            step.run(cross_entropy, optimizer=wrong)
        break


@pytest.mark.parametrize(
    "wrong", ["folder", b"folder", (torch.zeros(9, 6), torch.zeros(9)), {"x": np.zeros((9, 6)), "y": np.zeros(9)}]
)
def test_text_and_arrays_that_nobody_has_put_together_are_no_data_set(wrong: Any, start: Start) -> None:
    run, _model = prepared(start())
    for call in (run.steps, run.predict):
        with pytest.raises(DataError, match=r"no data set.*TensorDataset\(X, Y\)"):
            call(wrong)


@pytest.mark.parametrize("name", ["begin", "epochs", "max_steps", "batch_size"])
def test_numbers_that_nobody_counts_to_are_refused_by_steps(name: str, start: Start) -> None:
    run: Any = start()
    model = net()
    run.prepare(model, sgd(model))
    with pytest.raises(JobError, match=rf"run\.steps\({name}={2**70}\): .* at most {2**63 - 1}"):
        run.steps(data(), **{name: 2**70})
    with pytest.raises(JobError, match=f"loader_workers={2**70}: .* at most 4096"):
        run.steps(data(), loader_workers=2**70)


def test_a_rank_that_no_worker_has_and_what_is_no_number_are_refused_also_with_one_worker(start: Start) -> None:
    run: Any = start()
    for source in (7, -1, "x", True, None):
        with pytest.raises(JobError, match=r"broadcast\(…, .*\): needs the rank of a worker, 0 to 0"):
            run.broadcast(torch.ones(2), source)
    for value in ("x", None, [1, 2], 1j, 2**70):
        with pytest.raises(JobError, match="all_reduce.*: needs a number of 64 bits, or a tensor"):
            run.all_reduce(value, "sum")
    for operation in ("avg", 5, None):
        with pytest.raises(JobError, match="use 'mean', 'sum', 'max' or 'min'"):
            run.all_reduce(1, operation)
    with pytest.raises(JobError, match="function=5: needs a function"):
        run.together(5)


@pytest.mark.parametrize(("name", "words"), [("", "names no folder"), ("a\0b", "a folder's name has no zero byte")])
def test_a_run_folder_without_a_sound_name_is_refused(
    name: str, words: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(JobError, match=words):
        start(run_dir=name)
    assert not list(tmp_path.iterdir())


def test_a_run_that_was_closed_without_finish_says_nothing_of_it(start: Start) -> None:
    run = start()
    train(run)
    run.close()
    with pytest.raises(JobError, match="^This run has ended"):
        run.finish()


def test_what_a_registered_object_cannot_keep_is_named_with_the_name_of_the_object(start: Start) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"inner": object()}

        def load_state_dict(self, state: Any) -> None:
            """Nothing."""

    for checkpoints in ({}, {"every": 1}):
        run = start(checkpoints=checkpoints)
        run.register("myobj", Odd())
        with pytest.raises(CheckpointError, match=r"myobj\.inner is a builtins\.object, which cannot be kept"):
            train(run)
        run.close()


def test_a_scheduler_that_is_not_part_of_the_checkpoints_is_warned_of(start: Start) -> None:
    run = start(checkpoints={"every": 1})
    model = net()
    optimizer = sgd(model)
    run.prepare(model, optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    run.register("the best weights", net())  # which is no schedule
    for step in run.steps(data()):
        step.run(cross_entropy)
        break
    with pytest.warns(UnisonoWarning, match="run.register"):
        run.finish()


# -- gradients that nobody wants ------------------------------------------------------------------------------------


def test_what_is_frozen_between_two_loops_does_not_go_on_with_its_last_gradient(start: Start) -> None:
    run = start()
    model = net()
    optimizer = sgd(model)
    run.prepare(model, optimizer)
    go_through(run)
    bias = model.get_parameter("2.bias").requires_grad_(False)
    before = bias.clone()
    run.prepare(model, optimizer)
    go_through(run)
    assert torch.equal(bias, before)


def test_nesterov_momentum_gives_the_same_bits_where_torch_keeps_it_in_the_gradients(
    start: Start, tmp_path: Path
) -> None:
    digests = set()
    for foreach in (False, True):
        with start(run_dir=tmp_path / str(foreach)) as run:
            model = net()
            run.prepare(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True, foreach=foreach))
            go_through(run)
            digests.add(run.finish())
    assert len(digests) == 1


def test_a_part_of_the_loss_may_be_logged_as_it_is(start: Start) -> None:
    run = start()

    def loss_of(model: Any, batch: Any) -> Tensor:
        loss = cross_entropy(model, batch)
        run.log("part", loss)  # torch warns of a number made from what needs a gradient, and warnings fail the suite
        return loss

    train(run, loss_of)


# -- small print ------------------------------------------------------------------------------------------------------


def test_numbers_drawn_in_a_loss_leave_no_trace_in_the_script(start: Start, tmp_path: Path) -> None:
    def drawn(extra: int) -> list[float]:
        with start(run_dir=tmp_path / "other") as run:
            prepared(run)

            def loss_fn(model: Any, batch: Any) -> Tensor:
                np.random.randn(extra)  # NumPy makes normal numbers in pairs, and keeps the second
                return cross_entropy(model, batch)

            numbers = []
            for step in run.steps(data()):
                step.run(loss_fn)
                numbers.append(float(np.random.randn()))
            return numbers

    assert drawn(1) == drawn(2)


def test_with_one_shard_a_weight_changes_nothing(start: Start, tmp_path: Path) -> None:
    weighted = start(shards=1, run_dir=tmp_path / "weighted")
    by_weight = train(weighted, lambda model, batch: unisono.Weighted(cross_entropy(model, batch), 0.25))
    weighted.close()
    assert unisono.digest(train(start(shards=1))) == unisono.digest(by_weight)


def test_a_shard_of_nothing_but_padding_may_return_a_constant(start: Start) -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        if bool(batch[0][0, 0] > 0):
            return unisono.Weighted(torch.zeros(()), 0)
        return unisono.Weighted(cross_entropy(model, batch), 3)

    train(start(batch_size=70, shards=7), loss_fn)


def test_a_gradient_that_is_not_finite_is_named_before_it_is_clipped(start: Start) -> None:
    def loss_fn(model: Any, batch: Any) -> Tensor:
        loss: Tensor = (model(batch[0]) * 0).sum().abs().sqrt()  # 0, with an infinite slope
        return loss

    run, model = prepared(start())
    before = unisono.digest(model)
    with pytest.raises(NonFiniteLoss, match="step 0: the gradient of .* is nan in shard 0"):
        for step in run.steps(data()):
            step.run(loss_fn, clip_norm=1.0)
    assert unisono.digest(model) == before


def test_a_reduced_tensor_is_a_new_one(start: Start) -> None:
    run = start()
    mine = torch.ones(3)
    found = run.all_reduce(mine, "sum")
    mine.zero_()
    assert found.tolist() == [1.0, 1.0, 1.0]
    assert run.all_reduce(np.float32(0.5), "sum") == 0.5
    with pytest.raises(ValueError, match="bool"):
        run.all_reduce(torch.tensor([True]), "sum")


def test_an_evaluation_draws_the_same_numbers_however_often_it_is_asked(start: Start) -> None:
    run, _model = prepared(start(), nn.Linear(6, 3))
    draws = [run.evaluate(data(), lambda model, batch: {"x": torch.randn(())}) for _ in range(2)]
    assert draws[0] == draws[1]


class Counting(nn.Module):
    """Changes its buffers whenever it is called: one in place, one by another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.calls: Tensor
        self.mean: Tensor
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.linear(inputs) + self.mean + self.calls
        self.calls += 1
        self.mean = self.mean + found.detach().mean(0)
        return found


def test_an_evaluation_leaves_no_trace_in_buffers_and_no_block_sees_what_another_one_has_changed(start: Start) -> None:
    run, model = prepared(start(), Counting())
    calls, mean = model.calls, model.mean
    outputs = run.predict(data())
    inputs = data().tensors[0]
    assert torch.allclose(outputs, model.linear(inputs))
    run.evaluate(data(), {"loss": cross_entropy})
    assert (model.calls is calls, model.mean is mean) == (True, True)
    assert (float(calls), mean.tolist()) == (0.0, [0.0] * 3)


def test_what_a_loss_logs_while_it_is_evaluated_is_not_a_line_of_the_metrics(start: Start) -> None:
    run, _ = prepared(start())

    def loss_fn(model: Any, batch: Any) -> Tensor:
        run.log("label", batch[1].float().mean())
        return cross_entropy(model, batch)

    run.evaluate(data(), {"loss": loss_fn})
    assert run.metrics == {}


@pytest.mark.parametrize("name", ["loss", "step", "seconds"])
def test_names_that_the_metrics_file_needs_for_itself_are_refused(start: Start, name: str) -> None:
    with pytest.raises(JobError, match=name):
        start().log(name, 1.0)


def test_a_learning_rate_may_be_a_tensor(start: Start) -> None:
    run = start()
    model = net()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1)))
    go_through(run)
    assert run.metrics["lr"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("predict", "message"),
    [
        (lambda model, batch: torch.tensor(1.0), "single number"),
        (lambda model, batch: torch.ones(3), "one row per sample"),
        (lambda model, batch: {1: batch[1]}, "name outputs by text"),
        (lambda model, batch: "yes", "returned a str"),
    ],
)
def test_predictions_that_cannot_be_put_together_are_refused(start: Start, predict: Any, message: str) -> None:
    run, _ = prepared(start())
    with pytest.raises(DataError, match=message):
        run.predict(data(), predict)


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("UNISONO_STRATEGY", "gossip", "there is no such strategy"),
        ("UNISONO_STRATEGY", "pair-averaging", "nobody to synchronise with"),
        ("UNISONO_POLICIES", "greedy", "there is no policy 'greedy': choose of noise-scale"),
    ],
)
def test_what_the_launcher_tells_and_cannot_be_is_refused_before_anything_is_trained(
    variable: str, value: str, words: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(JobError, match=words):
        train(start(), epochs=1)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_more_workers_than_shards_are_refused_before_anything_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "6", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(JobError, match=r"only 4 shards.* set shards=8 .*--shards 8\), or start at most 4 workers\."):
        unisono.init(batch_size=64)
    with pytest.raises(JobError, match=r"only 1 shard, .* set shards=6 .*, or start at most 1 worker\."):
        unisono.init(batch_size=7)
    with pytest.raises(JobError, match="a batch of 4 samples: start at most 4 workers"):
        unisono.init(batch_size=4)
    with pytest.raises(JobError, match="a batch of 1 sample: start at most 1 worker,"):
        unisono.init(batch_size=1)


@pytest.mark.parametrize(
    ("batch_size", "shards"), [(1, 1), (16, 1), (31, 1), (32, 2), (64, 4), (128, 8), (1000, 8), (10**6, 8)]
)
def test_shards_follow_from_the_batch_size(batch_size: int, shards: int, start: Start) -> None:
    assert start(batch_size=batch_size, shards=None).job.shards == shards


def test_the_environment_sets_what_the_script_leaves_open(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_SHARDS", "4")
    monkeypatch.setenv("UNISONO_THREADS", "2")
    assert (start(shards=None).job.shards, start(shards=None).job.threads) == (4, 2)
    inner = start(run_dir=start(shards=None).dir / "inner", shards=2, arithmetic={"threads": 1})
    assert (inner.job.shards, inner.job.threads) == (2, 1)
    monkeypatch.setenv("UNISONO_SHARDS", "many")
    with pytest.raises(JobError, match="UNISONO_SHARDS='many'"):
        start()


def test_small_shards_with_batch_norm_are_warned_of(start: Start) -> None:
    run, _ = prepared(start(batch_size=32, shards=4), nn.BatchNorm1d(6))
    with pytest.warns(UnisonoWarning, match=r"BatchNorm with 8 samples per shard.*shards=2"):
        next(run.steps(TensorDataset(torch.ones(32, 6))))


class Endless(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class Ragged(Dataset[Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(6 if index != 17 else 5)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (TensorDataset(torch.zeros(0, 6)), "is empty"),
        (Endless(), "has no length"),
        (Ragged(), r"Sample 17 is Tensor\[5\] float32, sample 0 is Tensor\[6\] float32"),
    ],
    ids=["empty", "endless", "ragged"],
)
def test_data_sets_that_cannot_be_used_say_what_to_use(start: Start, dataset: Any, message: str) -> None:
    run, _model = prepared(start(batch_size=40, shards=1))
    with pytest.raises(DataError, match=message):
        next(iter(run.steps(dataset, shuffle=False)))


@pytest.mark.parametrize(
    ("loss_fn", "error", "message"),
    [
        (lambda model, batch: model(batch[0]), LossError, r"step 0, shard 0, rank 0: .*shape \[16, 3\]"),
        (lambda model, batch: None, LossError, "returned nothing"),
        (lambda model, batch: 3.0, LossError, "returned a float"),
        (lambda model, batch: model(batch[0]).sum().detach(), LossError, "depends on no parameter"),
        (
            lambda model, batch: unisono.Weighted(model(batch[0]).sum(), 0),
            LossError,
            "all shards returned the weight 0",
        ),
        (
            lambda model, batch: model(batch[0]).sum() * math.nan,
            NonFiniteLoss,
            r"step 0: the loss is nan in shard 0 \(rank 0\)",
        ),
    ],
)
def test_losses_that_cannot_be_used_name_step_shard_and_rank(
    start: Start, loss_fn: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        train(start(), loss_fn)


def test_batch_norm_on_a_shard_of_one_sample_says_what_to_do(start: Start) -> None:
    run, _model = prepared(
        start(batch_size=34, shards=2), nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    )  # 70 samples: the last batch has 2
    with pytest.raises(ModelError, match=r"step 2, shard 0, rank 0: BatchNorm .*drop_last=True"):
        go_through(run)


def test_a_run_that_goes_on_from_a_checkpoint_leaves_one_at_its_end(start: Start) -> None:
    run, _ = prepared(start())
    for step in run.steps(data()):
        step.run(cross_entropy)
        if step.number == 0:
            run.checkpoint()
        if step.number == 1:
            run.close()
            break
    again = start()
    weights = unisono.digest(train(again))
    again.finish()
    assert unisono.digest(unisono.load(net(), again.dir)) == weights


def test_a_sparse_gradient_is_refused_by_name(start: Start) -> None:
    run, _model = prepared(start(), nn.Embedding(10, 3, sparse=True))
    with pytest.raises(ModelError, match="gradient of weight is sparse"):
        for step in run.steps(data()):
            step.run(lambda model, batch: model(batch[1]).sum())


def test_a_model_changed_after_prepare_is_noticed(start: Start) -> None:
    run, model = prepared(start(), nn.Sequential(nn.Linear(6, 3)))
    with pytest.raises(ModelError, match="changed after run.prepare"):
        for step in run.steps(data()):
            model.append(nn.Linear(3, 3))
            step.run(cross_entropy)


@pytest.mark.parametrize(
    "change",
    [
        lambda model, optimizer: model[0].requires_grad_(True),
        lambda model, optimizer: model[2].requires_grad_(False),
        lambda model, optimizer: optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()}),
        lambda model, optimizer: model[2].register_buffer("seen", torch.zeros(1)),
    ],
    ids=["unfrozen", "frozen", "added to the optimizer", "a new buffer"],
)
def test_a_change_of_what_is_trained_is_noticed(start: Start, change: Any) -> None:
    run = start()
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    optimizer = sgd(model)
    run.prepare(model, optimizer)
    with pytest.raises(ModelError, match=r"changed after run\.prepare"):
        for step in run.steps(data()):
            step.run(cross_entropy)
            change(model, optimizer)


def test_models_and_optimizers_that_cannot_be_trained_in_parts_are_refused(start: Start) -> None:
    run = start()
    lazy, model = nn.LazyLinear(3), net()
    with pytest.raises(ModelError, match="run one batch through it first"):
        run.prepare(lazy, sgd(model))
    with pytest.raises(ModelError, match="LBFGS wants to compute the loss itself"):
        run.prepare(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ModelError, match="nothing to train"):
        run.prepare(model.requires_grad_(False), sgd(model))
    with pytest.raises(ModelError, match="needs torch modules, got str"):
        run.prepare("model", sgd(model))


def test_the_fused_sgd_that_reads_unset_memory_is_refused(start: Start) -> None:
    model = net().to(torch.bfloat16)
    fused = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    with pytest.raises(ModelError, match="use foreach=True"):
        start().prepare(model, fused)
    start(arithmetic={"deterministic": False}, checkpoints={"allow_job_change": True}).prepare(model, fused)


def test_an_operation_without_a_deterministic_version_is_named(start: Start) -> None:
    def loss_fn(model: Any, batch: Any) -> Tensor:
        torch.zeros(3).put_(torch.tensor([0]), torch.tensor([1.0]))
        return cross_entropy(model, batch)

    with pytest.raises(
        NondeterministicOperation, match=r"^put_ has no .*unisono\.init\(arithmetic={'deterministic': False}\)"
    ):
        train(start(), loss_fn)
    train(start(arithmetic={"deterministic": False}, checkpoints={"allow_job_change": True}), loss_fn)


def test_steps_without_prepare_and_loops_inside_of_loops_are_refused(start: Start) -> None:
    run = start()
    with pytest.raises(ModelError, match=r"call model, optimizer = run.prepare"):
        next(iter(run.steps(data())))
    model = net()
    run.prepare(model, sgd(model))
    with pytest.raises(JobError, match="one loop at a time"):
        for _ in run.steps(data()):
            next(iter(run.steps(data())))


def test_a_batch_larger_than_the_data_set_cannot_be_dropped(start: Start) -> None:
    run, _model = prepared(start(batch_size=100))
    with pytest.raises(DataError, match="drop_last leaves nothing of 70 samples"):
        next(iter(run.steps(data(), drop_last=True)))


def test_an_optimizer_that_was_not_prepared_is_refused(start: Start) -> None:
    run, model = prepared(start())
    with pytest.raises(ModelError, match="give it to run.prepare first"):
        for step in run.steps(data()):
            step.run(cross_entropy, optimizer=sgd(model))


def test_a_script_that_caught_its_dismissal_is_told_again_at_its_next_call(start: Start) -> None:
    run = start()
    prepared(run)
    calls: list[Callable[[], Any]] = [
        lambda: run.inside.recovery.depart(Dismissed("fewer workers")),
        run.barrier,
        lambda: run.evaluate(data(), {"loss": cross_entropy}),
        lambda: run.steps(data()),
        run.finish,
    ]
    for call in calls:
        with pytest.raises(SystemExit) as left:
            call()
        assert left.value.code == 0


def test_a_worker_of_a_job_that_goes_on_later_leaves_a_checkpoint_and_says_so_with_code_75(start: Start) -> None:
    run = start()
    train(run)
    asked = Dismissed("all were asked to leave", preempted=True)
    for call in (lambda: run.inside.recovery.depart(asked), run.barrier):
        with pytest.raises(SystemExit) as left:
            call()
        assert left.value.code == 75
    assert json.loads((run.dir / "result.json").read_text())["exit_code"] == 75
    assert list((run.dir / "checkpoints").iterdir())


class Growing(nn.Module):
    """Its buffer gets its shape from the first batch."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        if not self.seen.numel():
            self.seen = x.detach().mean(0)
        found: Tensor = self.layer(x)
        return found


def test_a_buffer_that_gets_another_shape_in_a_shard_is_named(start: Start) -> None:
    run, _model = prepared(start(), Growing())
    steps = run.steps(data())
    step = next(steps)
    with pytest.raises(ModelError, match=r"the buffer seen had the form \['float32', \[0\]\].*Run one batch through"):
        step.run(cross_entropy)
    run.close()


def test_a_buffer_whose_elements_share_memory_is_named(start: Start) -> None:
    model = net()
    model.register_buffer("wide", torch.zeros(1).expand(5))
    with start() as run, pytest.raises(ModelError, match=r"wide is an expanded tensor.*\.clone\(\)"):
        run.prepare(model, sgd(model))


@pytest.mark.parametrize("wrapper", [nn.parallel.DistributedDataParallel, nn.DataParallel])
def test_a_module_that_averages_gradients_itself_is_refused(
    start: Callable[..., unisono.Run], wrapper: type[nn.Module]
) -> None:
    wrapped = wrapper.__new__(wrapper)  # without a process group, and without devices
    nn.Module.__init__(wrapped)
    wrapped.module, wrapped.device_ids = nn.Linear(2, 1), [0, 1]  # type: ignore[assignment]
    with (
        start() as run,
        pytest.raises(ModelError, match=r"averages gradients itself.*the module inside it \(.module\)"),
    ):
        run.prepare(wrapped, sgd(wrapped))


def test_an_optimizer_with_its_parameters_in_another_order_is_not_resumed(start: Start) -> None:
    def work(run: unisono.Run, turned: bool) -> None:
        model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False), nn.Linear(6, 3))
        parameters = list(model.parameters())
        order = [1, 0, 2, 3] if turned else [0, 1, 2, 3]
        run.prepare(model, torch.optim.Adam([parameters[each] for each in order]))
        for step in run.steps(data(), epochs=2):
            step.run(cross_entropy)
            if step.number == 1:
                run.close()
                return

    work(start(checkpoints={"every": 1}), turned=False)
    with (
        start(checkpoints={"every": 1}) as run,
        pytest.raises(CheckpointError, match=r"0\.weight is where .* 1\.weight.*no set"),
    ):
        work(run, turned=True)


def test_a_job_that_does_not_know_its_batch_has_shards_of_sixteen_samples_or_more(start: Start) -> None:
    data = TensorDataset(torch.randn(80, 4, generator=torch.Generator().manual_seed(0)), torch.ones(80, 1))

    def trained(**settings: Any) -> tuple[list[int], list[Tensor]]:
        run, sizes = start(batch_size=None, run_dir=None, **settings), list[int]()
        model = nn.Linear(4, 1)
        nn.init.constant_(model.weight, 0.1)
        nn.init.zeros_(model.bias)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def loss_fn(model: nn.Module, batch: Any) -> Tensor:
            sizes.append(len(batch[0]))
            return nn.functional.mse_loss(model(batch[0]), batch[1])

        for step in run.steps(DataLoader(data, batch_size=40)):
            step.run(loss_fn)
        run.finish()
        return sizes, [parameter.detach() for parameter in model.parameters()]

    (sizes, weights), (same_sizes, same_weights) = trained(shards=None), trained(shards=2)
    assert sizes == same_sizes == [20] * 4
    assert all(map(torch.equal, weights, same_weights))
