"""Parts of a step that a script adds: alike on any number of workers, and named when they cannot be used."""

import re
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
from unisono.errors import JobError, UpdateRefused
from unisono.job import Job

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_worker")]

Script = Callable[[unisono.Run], Any]


def loss_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
    loss: Tensor = F.cross_entropy(model(batch[0]), batch[1])
    return loss


def script(part: Callable[[nn.Module, torch.optim.Optimizer], unisono.Part], clip_norm: float | None = None) -> Script:
    """A training with a part; returns the digest of its weights and the newest figures of its own."""

    def trains(run: unisono.Run) -> tuple[str, Any]:
        generator = torch.Generator().manual_seed(5)
        data = TensorDataset(torch.randn(60, 6, generator=generator), torch.randint(0, 3, (60,), generator=generator))
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.copy_(torch.linspace(-0.5, 0.5 + number / 10, parameter.numel()).view_as(parameter))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        run.add_part(part(model, optimizer))
        run.prepare(model, optimizer)
        for step in run.steps(data, epochs=2):
            step.run(loss_of, clip_norm=clip_norm)
        return run.finish(model), run.metrics.get("norm")

    return trains


def results(
    folder: Path, part: Callable[[nn.Module, torch.optim.Optimizer], unisono.Part], workers: int, **options: Any
) -> list[Any]:
    job = Job.create(batch_size=20, shards=5, seed=1, on_nan=options.pop("on_nan", "stop"))
    return train(Trade(job, workers, folder / f"{workers}"), script(part, **options))


class Halves(unisono.Part):
    """Halves the gradient."""

    writes_gradient = True

    def gradient(self, attempt: Any) -> None:
        for parameter in attempt.gradients.trained:
            parameter.grad.mul_(0.5)


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_a_part_may_write_the_gradient_and_the_bits_do_not_depend_on_the_number_of_workers(
    tmp_path: Path, clip_norm: float | None
) -> None:
    [alone] = results(tmp_path, lambda *_: Halves(), 1, clip_norm=clip_norm)
    [without] = results(tmp_path / "without", lambda *_: unisono.Part(), 1, clip_norm=clip_norm)
    assert alone != without
    for workers in (2, 3, 5):
        assert results(tmp_path, lambda *_: Halves(), workers, clip_norm=clip_norm) == [alone] * workers


class Lars(unisono.Part):
    """A learning rate from the norm of the weights, of which each worker hears the others'."""

    fields = (unisono.Field("norm", "d", "each"), unisono.Field("any"), unisono.Field("count", "Q", "sum"))

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def tell(self, attempt: Any) -> tuple[Any, ...]:
        return next(self.model.parameters()).detach().norm(), 1, torch.tensor(3)

    def hear(self, attempt: Any, norms: tuple[float, ...], is_any: bool, count: int) -> None:
        assert (is_any, type(norms[0]), count) == (True, float, 3 * len(norms))
        self.rate = (norms[0] / 3 - 0.19) ** 3 + 0.05

    def apply(self, attempt: Any) -> None:
        self.optimizer.param_groups[0]["lr"] = self.rate
        attempt.figures["norm"] = torch.tensor(self.rate)


def test_one_worker_hears_values_in_the_form_in_which_several_hear_them(tmp_path: Path) -> None:
    [alone] = results(tmp_path, Lars, 1)
    assert isinstance(alone[1], float)
    for workers in (2, 3, 5):
        assert results(tmp_path, Lars, workers) == [alone] * workers


def part(fields: Any = (), **methods: Any) -> Callable[[Any, Any], unisono.Part]:
    made = type("Mine", (unisono.Part,), {"fields": fields, **methods})
    return lambda *_: made()


def doubles(self: Any, attempt: Any) -> None:
    for parameter in attempt.gradients.trained:
        parameter.grad.mul_(2)


ONE = (unisono.Field("one", "Q"),)
WRONG: dict[str, tuple[Callable[[Any, Any], unisono.Part], str]] = {
    "gradient": (part(gradient=doubles), "step 0: Mine.gradient has changed the gradient: set writes_gradient = True"),
    "work_out": (part(work_out=doubles, writes_gradient=True), "step 0: Mine.work_out has changed the gradient"),
    "judge": (part(judge=lambda self, attempt: 5), "step 0: Mine.judge has returned 5: return None, or a Hearing"),
    "hear": (part(ONE, tell=lambda self, _: (1,), hear=lambda self, _, one: 5), "step 0: Mine.hear has returned 5"),
    "none": (part(ONE), "Mine has fields: write a method tell"),
    "short": (part(ONE, tell=lambda self, attempt: ()), "step 0: Mine.tell has .*a value for each of 1 fields"),
    "long": (part(ONE, tell=lambda self, attempt: (1, 2)), "step 0: Mine.tell has returned"),
    "half": (part(ONE, tell=lambda self, attempt: (1.5,)), "step 0: Mine.tell: field one is 1.5: its form 'Q'"),
    "less": (part(ONE, tell=lambda self, attempt: (-1,)), "step 0: Mine.tell: field one is -1"),
    "text": (part(ONE, tell=lambda self, attempt: ("x",)), "step 0: Mine.tell: field one is 'x'"),
    "fields": (part(["one"]), "Mine.fields is .*: make it a list of unisono.Field"),
    "figure": (
        part(done=lambda self, attempt: attempt.figures.update(x=torch.zeros(2))),
        r"attempt.figures\('x', .*\): needs a number, or a tensor with one element",
    ),
    "taken": (
        part(done=lambda self, attempt: attempt.figures.update(loss=7.0)),
        "step 0: Mine.done: attempt.figures\\('loss'\\): metrics.jsonl uses this name for itself",
    ),
}  # fmt: skip


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", WRONG)
def test_a_part_that_cannot_be_used_is_named_with_its_method(tmp_path: Path, kind: str, workers: int) -> None:
    makes, words = WRONG[kind]
    with pytest.raises(JobError, match=words):
        results(tmp_path, makes, workers)


@pytest.mark.parametrize("field", [{"combine": "max"}, {"form": "z"}, {"form": "d", "devices": "max"}])
def test_a_field_of_another_form_or_combination_is_refused(field: dict[str, Any]) -> None:
    with pytest.raises(JobError, match="a form is one of"):
        unisono.Field("x", **field)


def refuses(self: Any, attempt: Any) -> str:
    return "the second step is bad" if attempt.call.step == 1 else ""


@pytest.mark.parametrize("workers", [1, 3])
def test_an_update_that_a_part_refuses_ends_the_job_with_its_reason_or_is_skipped(tmp_path: Path, workers: int) -> None:
    with pytest.raises(UpdateRefused, match=re.escape("step 1: Mine: the second step is bad; nothing was updated")):
        results(tmp_path / "stop", part(refuse=refuses), workers)
    whole = results(tmp_path, part(), workers)
    assert results(tmp_path / "skip", part(refuse=refuses), workers, on_nan="skip") != whole
