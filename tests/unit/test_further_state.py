"""State outside of modules' buffers that loss functions change: combined by rule, kept, and handed on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unisono
from benchmarks.thread_crew import Trade, train
from unisono.errors import CheckpointError, JobError, ModelError
from unisono.job import Job

Start = Callable[..., unisono.Run]

INPUTS = torch.arange(33.0).sin().view(11, 3)


def of_one_worker(test: Any) -> Any:
    """A unit test of a run of a single worker."""
    return pytest.mark.unit(pytest.mark.usefixtures("one_worker")(test))


def of_several_workers(test: Any) -> Any:
    """A test of whole jobs on threads."""
    return pytest.mark.cluster(pytest.mark.usefixtures("torch_settings_restored")(test))


class Metric:
    """What is seen of a job, outside of its model."""

    def __init__(self) -> None:
        self.count, self.top, self.rows = torch.tensor(0), torch.full((3,), -torch.inf), torch.empty(0, 3)
        self.least, self.scores, self.targets = torch.full((3,), torch.inf), list[Tensor](), list[Tensor]()

    def update(self, inputs: Tensor) -> None:
        self.count = self.count + len(inputs)
        self.top = torch.maximum(self.top, inputs.amax(0))
        self.rows = torch.cat([self.rows, inputs])
        self.least = torch.minimum(self.least, inputs.amin(0))
        for half in inputs[:, 0].split(2):  # several times a shard
            self.scores.append(half)
        self.targets.append(inputs > 0)


RULES = {"count": "sum", "top": "max", "rows": "cat", "least": "min", "scores": "cat", "targets": "cat"}


class Centered(nn.Module):
    """Keeps a running mean in a frozen parameter, as some frameworks' layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.center = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.linear = nn.Linear(3, 2)
        with torch.no_grad():
            for parameter in self.linear.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.center.mul_(0.5).add_(inputs.mean(0), alpha=0.5)
        found: Tensor = self.linear(inputs - self.center)
        return found


def prepared(run: unisono.Run, model: nn.Module, state: Any) -> None:
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), state=state)


def trained(run: unisono.Run, epochs: int = 2) -> tuple[Any, ...]:
    model, metric, last = Centered(), Metric(), torch.zeros(3, dtype=torch.float64)
    state = {"metric": (metric, RULES), "center": model.center, "last": (last, "first")}
    run.prepare(model, torch.optim.SGD(model.linear.parameters(), lr=0.1, momentum=0.9), state=state)

    def loss_fn(model: Any, batch: Any) -> Tensor:
        metric.update(batch[0])
        last.copy_(batch[0][0])
        return F.cross_entropy(model(batch[0]), (batch[0][:, 0] > 0).long())

    for step in run.steps(TensorDataset(INPUTS), epochs=epochs, shuffle=False):
        step.run(loss_fn)
    tensors = (metric.count, metric.top, metric.rows, model.center, last, metric.least)
    lists = [torch.cat(listed).tolist() for listed in (metric.scores, metric.targets)]
    return run.finish(), *(tensor.tolist() for tensor in tensors), *lists


@of_one_worker
@pytest.mark.parametrize("shards", [1, 3])
def test_each_rule_comes_to_what_a_plain_loop_sees(start: Start, shards: int) -> None:
    digest, count, top, rows, center, last, least, scores, targets = trained(start(batch_size=4, shards=shards))
    assert count == 22
    assert top == INPUTS.amax(0).tolist()
    assert least == INPUTS.amin(0).tolist()
    assert scores == [*INPUTS[:, 0].tolist(), *INPUTS[:, 0].tolist()]
    assert targets == [*(INPUTS > 0).tolist(), *(INPUTS > 0).tolist()]
    assert rows == [*INPUTS.tolist(), *INPUTS.tolist()]
    assert last == INPUTS[8].double().tolist()
    assert any(center)
    assert len(digest) == 64


@of_several_workers
@pytest.mark.parametrize("workers", [2, 3, 5])
def test_the_bits_are_those_of_one_worker(workers: int, tmp_path: Path) -> None:
    job = Job.create(batch_size=8, shards=5)
    (serial,) = train(Trade(job, 1, tmp_path / "serial"), trained)
    assert train(Trade(job, workers, tmp_path / "run"), trained) == [serial] * workers


def trained_with_few(run: unisono.Run) -> list[float]:
    model, metric = Centered().linear, Metric()
    prepared(run, model, {"metric": (metric, {"scores": "cat"})})

    def loss_fn(model: Any, batch: Any) -> Tensor:
        if batch[0][0, 0] > 0:
            metric.scores.extend(batch[0][:, 0].unbind())  # numbers without a dimension
        found: Tensor = model(batch[0]).sum()
        return found

    for step in run.steps(TensorDataset(INPUTS), shuffle=False):
        step.run(loss_fn)
    run.finish()
    return [] if not metric.scores else torch.cat(metric.scores).tolist()


@of_several_workers
def test_a_list_may_get_something_of_some_shards_alone(tmp_path: Path) -> None:
    job = Job.create(batch_size=3, shards=3)  # the last batch has 2 samples
    expected = [value for value in INPUTS[:, 0].tolist() if value > 0]
    assert train(Trade(job, 3, tmp_path / "run"), trained_with_few) == [expected] * 3


@of_several_workers
@pytest.mark.parametrize("workers", [1, 2])
def test_a_list_of_unlike_tensors_is_refused_by_all_workers(workers: int, tmp_path: Path) -> None:
    def unlike(run: unisono.Run) -> None:
        model, metric = Centered().linear, Metric()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.prepare(model, optimizer, state={"metric": (metric, {"scores": "cat"})})

        def loss_fn(model: Any, batch: Any) -> Tensor:
            metric.scores.append(batch[0] if batch[0][0, 0] > 0 else batch[0][0])
            found: Tensor = model(batch[0]).sum()
            return found

        for step in run.steps(TensorDataset(INPUTS), shuffle=False):
            step.run(loss_fn)

    with pytest.raises(ModelError, match="added tensors of different dtype or shape to state metric.scores"):
        train(Trade(Job.create(batch_size=11, shards=4), workers, tmp_path / "run"), unlike)


@of_several_workers
def test_a_run_goes_on_with_it_on_another_number_of_workers(tmp_path: Path) -> None:
    job = Job.create(batch_size=4, shards=4)
    (serial,) = train(Trade(job, 1, tmp_path / "serial"), trained)
    train(Trade(job, 3, tmp_path / "run", checkpoint_every=2, stop_after=4), trained)
    assert train(Trade(job, 2, tmp_path / "run", checkpoint_every=2), trained) == [serial] * 2


@of_one_worker
def test_a_step_that_is_skipped_leaves_it_as_it_was(start: Start) -> None:
    run, metric = start(batch_size=11, arithmetic={"on_nan": "skip"}), Metric()
    model = nn.Linear(3, 2)
    prepared(run, model, {"metric": (metric, RULES)})

    def loss_fn(model: Any, batch: Any) -> Tensor:
        metric.update(batch[0])
        found: Tensor = model(batch[0]).sum() * (float("nan") if step.epoch else 1.0)
        return found

    for step in run.steps(TensorDataset(INPUTS), epochs=2):
        step.run(loss_fn)
    assert (int(metric.count), len(metric.rows)) == (11, 11)


@of_one_worker
@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"a": 3}, r"'a' is 3: give a tensor, \(tensor, rule\), or"),
        ({"a": (torch.zeros(2), "most")}, "'a' has the rule 'most': there are mean, first, last, sum, max, min, cat"),
        ({"a": torch.zeros(2, requires_grad=True)}, "'a' requires a gradient"),
        ({"a": (torch.tensor(1), "mean")}, r"'a' is of torch.int64, which has no mean"),
        ({"a": (torch.zeros(2), "cat")}, r"'a' is to grow .*give \(object, \{attribute: 'cat'\}\)"),
        ({"a": (Metric(), {"scores": "sum"})}, "'a.scores' is a list of tensors, to which shards append: its rule can"),
        ({"a": (Metric(), {"none": "sum"})}, "a Metric, has no attribute none that holds a tensor"),
        ({"a": (Metric(), {"rows": "cat"}), "a.rows": torch.zeros(2)}, "two entries have the same name"),
        ({"a": INPUTS, "b": INPUTS}, "state a and state b are the same tensor"),
        ([torch.zeros(1)], "give a dict"),
        ({"wide": torch.zeros(1).expand(4)}, "'wide' is sparse or expanded"),
        ({"thin": torch.eye(3).to_sparse()}, "'thin' is sparse or expanded"),
    ],
)
def test_what_cannot_be_combined_is_refused_in_clear_words(start: Start, state: Any, said: str) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ModelError, match=said):
        start().prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), state=state)


@of_one_worker
def test_a_checkpoint_with_other_state_is_refused_by_name(start: Start) -> None:
    def run_with(state: Any) -> None:
        run, model = start(checkpoints={"every": 1}), nn.Linear(3, 2)
        prepared(run, model, state)
        for step in run.steps(TensorDataset(INPUTS)):
            step.run(lambda model, batch: model(batch[0]).sum())
        run.close()

    run_with({"a": torch.zeros(2)})
    with pytest.raises(CheckpointError, match="other transient buffers or further state: .*first state b"):
        run_with({"b": torch.zeros(2), "a": torch.zeros(2)})
    with pytest.raises(CheckpointError, match="first state a"):
        run_with({"a": torch.zeros(3)})


@of_several_workers
def test_workers_that_train_apart_refuse_it(tmp_path: Path) -> None:
    trade = Trade(Job.create(batch_size=8, shards=8), 2, tmp_path / "run", strategy="local-sgd:every=2")
    with pytest.raises(JobError, match=r"local-sgd.* nobody combines state metric.count\. .*strategy='all-reduce'"):
        train(trade, trained)


@of_one_worker
@pytest.mark.parametrize("now", [3.0, None])
@pytest.mark.parametrize("attribute", ["count", "rows", "listed"])
def test_what_is_no_tensor_any_more_is_named(start: Start, attribute: str, now: Any) -> None:
    run, metric = start(batch_size=4, shards=2), Metric()
    metric.listed = [torch.ones(2)]  # type: ignore[attr-defined]
    model = nn.Linear(3, 2)
    state = {"metric": (metric, {**RULES, "listed": "cat"})}
    prepared(run, model, state)

    def loss_fn(model: Any, batch: Any) -> Tensor:
        setattr(metric, attribute, now)
        found: Tensor = model(batch[0]).sum()
        return found

    step = next(steps := run.steps(TensorDataset(INPUTS), shuffle=False))
    with pytest.raises(ModelError, match=rf"step 0, shard 0, rank 0: the state metric.{attribute} is {now} now"):
        step.run(loss_fn)
    step.run(lambda model, batch: model(batch[0]).sum())  # nothing of it is left
    setattr(metric, attribute, now)
    with pytest.raises(ModelError, match=rf"the state metric.{attribute} is {now} now"):
        step.run(lambda model, batch: model(batch[0]).sum())
    steps.close()


class Buffered(nn.Module):
    """A layer with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.linear(inputs)
        return found


@of_one_worker
@pytest.mark.parametrize("when", ["before", "in a body", "in the last body"])
@pytest.mark.parametrize("name", ["metric.top", "metric.scores", "scale"])
def test_a_tensor_whose_writes_torch_does_not_count_is_refused(start: Start, name: str, when: str) -> None:
    run, metric, model = start(batch_size=4, shards=2), Metric(), Buffered()

    @torch.inference_mode()
    def assign() -> None:
        if name == "metric.scores":
            metric.scores = [torch.zeros(2), torch.zeros(2)]
        elif name == "scale":
            model.scale = torch.ones(2)
        else:
            metric.top = torch.zeros(3)

    def train() -> None:
        if when == "before":
            assign()
        prepared(run, model, {"metric": (metric, RULES)})
        for step in run.steps(TensorDataset(INPUTS)):
            step.run(lambda model, batch: model(batch[0]).sum())
            if when != "before" and step.number == (2 if when == "in the last body" else 0):
                assign()
        run.finish()

    with pytest.raises(ModelError, match=r"was made in torch\.inference_mode"):
        train()


@of_one_worker
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("name", ["metric.top", "scale", "linear.weight"])
def test_a_body_that_changes_a_form_is_refused_before_a_checkpoint_that_nobody_could_resume(
    start: Start, name: str, shards: int
) -> None:
    run, metric, model = start(batch_size=4, shards=shards, checkpoints={"every": 1}), Metric(), Buffered()
    prepared(run, model, {"metric": (metric, RULES)})

    def loss_fn(model: Any, batch: Any) -> Tensor:
        metric.update(batch[0])  # some of it grows, as it may
        found: Tensor = model(batch[0]).sum()
        return found

    def changed() -> None:
        if name == "linear.weight":
            model.linear.weight.data = torch.zeros(2, 4)
        elif name == "scale":
            model.scale = torch.zeros(5)
        else:
            metric.top = torch.zeros(5)

    def train() -> None:
        for step in run.steps(TensorDataset(INPUTS)):
            step.run(loss_fn)
            if step.number == 1:
                changed()

    with pytest.raises(ModelError, match=rf"{name} has the form .*, and had .* at run.prepare"):
        train()
    run.close()
    assert [path.name for path in sorted((run.dir / "checkpoints").iterdir())] == ["step-00000001"]
