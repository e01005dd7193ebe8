"""State that nobody named is found out, and what decides nothing is passed over."""

import itertools
import random
import time
import warnings
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import unisono
from unisono.errors import UnisonoWarning, UnnamedState

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_worker")]

Start = Callable[..., unisono.Run]

INPUTS = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(0, 3, (64,), generator=torch.Generator().manual_seed(2))
DATA = TensorDataset(INPUTS, LABELS)


class Net(nn.Module):
    """A layer, and room for what a case keeps beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(x)
        return result


def loss_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
    loss: Tensor = F.cross_entropy(model(batch[0]), batch[1])
    return loss


def told(run: unisono.Run, model: nn.Module, loss_fn: Any, data: Any = DATA, **state: Any) -> list[str]:
    """Train for two epochs of two steps; the paths that were told of."""
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), **state)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in run.steps(data, epochs=2):
            step.run(loss_fn)
    run.finish()
    words = [str(warning.message) for warning in caught if issubclass(warning.category, UnisonoWarning)]
    return [text.rpartition('run.ignore("')[2].removesuffix('")') for text in words if "run.ignore(" in text]


# State that decides bits.


class Last(Net):
    """Adds a part of its last output."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.last is not None and self.last.shape == y.shape:
            y = y + 0.1 * self.last
        self.last = y.detach().clone()
        return y


class Counts(Net):
    """Goes by how often it was called."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) / self.calls


class Later(Counts):
    """Goes by it only after a hundred calls."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return Net.forward(self, x) * (2 if self.calls > 100 else 1)


class Remembers(Net):
    """Compares with what it has seen."""

    def __init__(self, seen: Any) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        for other in list(self.seen)[-2:]:
            y = y + 0.01 * other.mean()
        self.seen.append(y.detach())
        return y


class InArray(Net):
    """Keeps a moving average in an array."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = np.zeros(3, dtype=np.float32)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.mean *= 0.9
        self.mean += 0.1 * y.detach().mean(0).numpy()
        return y - torch.from_numpy(self.mean.copy())


class Draws(Net):
    """Draws from a generator of its own."""

    def __init__(self, generator: Any, draw: Callable[[Any], float]) -> None:
        super().__init__()
        self.random, self.draw = generator, draw

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.draw(self.random))


class Deep(Net):
    """Keeps its state in a layer, behind a list and an object."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Counts()])

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers[0](x)
        return result


class Box:
    """Anything."""

    def __init__(self) -> None:
        self.count = 0


class Boxed(Net):
    """Keeps its state in an object of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.boxes = [Box()]

    def forward(self, x: Tensor) -> Tensor:
        self.boxes[0].count += 1
        return super().forward(x) / self.boxes[0].count


def hooked() -> Net:
    model, kept = Net(), [torch.zeros(())]

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        kept[0] = 0.9 * kept[0] + output.detach().mean()
        return output + kept[0]

    model.register_forward_hook(hook)
    return model


class Normed(Net):
    """Takes its shift from the first batch that it sees."""

    shift: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.shift is None:
            self.shift = x.mean(0).detach()
        return super().forward(x - self.shift)


class Held:
    """A name for values of the whole script."""

    calls = 0


def drawn(generator: torch.Generator) -> float:
    Held.calls += 1
    return float(torch.rand((), generator=generator)) / Held.calls


OWN = torch.Generator().manual_seed(1)


class ByHelper(Net):
    """Calls a function that goes by global state."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * drawn(OWN)


class Metered(Net):
    """Goes by what looks like a record."""

    def __init__(self) -> None:
        super().__init__()
        self.losses = [1.0]

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) / (1 + abs(self.losses[-1]))
        self.losses.append(float(y.detach().mean()))
        return y


DECIDES: dict[str, tuple[Callable[[], Any], str]] = {
    "a tensor": (Last, "model.last"),
    "a number": (Counts, "model.calls"),
    "a number that decides later": (Later, "model.calls"),
    "a list of tensors": (lambda: Remembers([]), "model.seen"),
    "a deque of tensors": (lambda: Remembers(deque(maxlen=4)), "model.seen"),
    "an array": (InArray, "model.mean"),
    "a generator of NumPy": (lambda: Draws(np.random.default_rng(3), lambda g: float(g.random())), "model.random"),
    "an old one of NumPy": (lambda: Draws(np.random.RandomState(3), lambda g: float(g.rand())), "model.random"),
    "one of Python": (lambda: Draws(random.Random(3), lambda g: float(g.random())), "model.random"),
    "one of torch": (
        lambda: Draws(torch.Generator().manual_seed(3), lambda g: float(torch.rand((), generator=g))),
        "model.random",
    ),
    "an iterator": (lambda: Draws(itertools.count(), lambda numbers: 1 / (1 + next(numbers))), "model.random"),
    "a number in a layer": (Deep, "model.layers.0.calls"),
    "a number in an object of a list": (Boxed, "model.boxes[0].count"),
    "a number in a compiled model": (lambda: torch.compile(Counts(), backend="eager"), "model._orig_mod.calls"),
    "the first batch": (Normed, "model.shift"),
    "a list of numbers": (Metered, "model.losses"),
    "a list that a hook keeps": (hooked, "hook.kept"),
}


@pytest.mark.parametrize(("build", "path"), DECIDES.values(), ids=DECIDES)
def test_what_shards_change_and_nothing_keeps_is_told_once(start: Start, build: Any, path: str) -> None:
    run = start()
    assert told(run, build(), loss_of) == [path]


def test_so_is_what_functions_name_that_a_model_calls(start: Start) -> None:
    OWN.manual_seed(1)
    assert set(told(start(), ByHelper(), loss_of)) >= {"Held.calls"}


def scaled(model: nn.Module, batch: list[Tensor], kept: dict[str, float]) -> Tensor:
    kept["calls"] += 1
    return loss_of(model, batch) / kept["calls"]


def test_so_is_what_a_partial_function_holds(start: Start) -> None:
    assert told(start(), Net(), partial(scaled, kept={"calls": 0.0})) == ["loss_fn.kept"]


CALLS = [0]


def test_so_are_variables_of_the_loss_function(start: Start) -> None:
    calls = 0

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        nonlocal calls
        calls += 1
        CALLS[0] += 1
        loss_fn.calls = getattr(loss_fn, "calls", 0) + 1  # type: ignore[attr-defined]
        return loss_of(model, batch) / (calls + CALLS[0] + loss_fn.calls)  # type: ignore[attr-defined, no-any-return]

    name = f"{__name__}.CALLS"
    assert {"loss_fn.calls", name} <= set(told(start(), Net(), loss_fn))


def test_a_strict_run_ends_and_names_the_path(start: Start) -> None:
    run, model = start(strict=True), Counts()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UnnamedState, match=r"model\.calls changes while shards are computed"):
        for step in run.steps(DATA):
            step.run(loss_of)


class Hostile:
    """Fails when it is looked at."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise OSError("nobody may look")


def test_an_object_that_cannot_be_looked_at_ends_no_job(start: Start) -> None:
    model, run = Counts(), start()
    vars(model)["hostile"] = Hostile()
    assert told(run, model, loss_of) == []
    assert "OSError: nobody may look" in (run.dir / "journal.jsonl").read_text()


# What decides nothing.


class Shows(Net):
    """Keeps what somebody may look at."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: Tensor | None = None
        self.features: dict[str, Tensor] = {}
        self.elapsed, self.last_time, self.losses = 0.0, time.time(), list[float]()
        self.positions: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        begun = time.perf_counter()
        if len(x) not in self.positions:
            self.positions[len(x)] = torch.arange(len(x))
        y = super().forward(x) + 0 * self.positions[len(x)][:, None]
        self.shown, self.features["out"] = y.detach(), y.detach()
        self.losses.append(float(y.mean()))
        self.elapsed += time.perf_counter() - begun
        self.last_time = time.time()
        return y


class AverageMeter:
    """As thousands of scripts have it."""

    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: float) -> None:
        self.sum, self.count = self.sum + value, self.count + 1


def test_what_decides_nothing_is_passed_over(start: Start) -> None:
    meter, history = AverageMeter(), list[float]()

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        loss = loss_of(model, batch)
        meter.update(loss.item())
        history.append(loss.item())
        return loss

    model = nn.Sequential(Shows(), nn.BatchNorm1d(3), nn.Dropout(0.1))
    assert told(start(), model, loss_fn) == []


class Overwrites(Net):
    """Writes numbers before it reads them, counts, and keeps what cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.length, self.total, self.generator = 0, 0, torch.Generator()
        self.token = nn.Parameter(torch.zeros(1, 3))
        self.outputs: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.length, self.total = len(x), self.total + len(x)
        self.generator.manual_seed(3)
        noise = torch.rand(3, generator=self.generator)
        self.tokens = self.token.expand(len(x), -1)
        self.fixed = np.broadcast_to(np.zeros(3), (self.length, 3))
        self.sparse = torch.eye(3).to_sparse()
        self.outputs = Sealed(out=x)
        return super().forward(x) + noise + self.tokens.sum() * self.length


class Indexes(Net):
    """Counts by what it looks up, and fails far beyond."""

    def __init__(self) -> None:
        super().__init__()
        self.at, self.factors = 0, [1.0, 0.5] * 64

    def forward(self, x: Tensor) -> Tensor:
        self.at += 1
        return super().forward(x) * self.factors[self.at]


def test_a_script_that_fails_with_other_values_goes_by_them_and_trains_on_as_before(start: Start) -> None:
    def trained(model: nn.Module, *ignored: str) -> list[Tensor]:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.1)
        run = start(run_dir=None)
        if ignored:
            run.ignore(*ignored)
        assert told(run, model, loss_of) == ([] if ignored else ["model.at"])
        return [parameter.detach().clone() for parameter in model.parameters()]

    pairs = zip(trained(Indexes()), trained(Indexes(), "model"), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


class Sealed(dict[str, Any]):
    """Refuses to be changed."""

    def clear(self) -> None:
        raise TypeError("sealed")

    update = clear  # type: ignore[assignment]


def test_what_is_written_before_it_is_read_is_passed_over_and_may_be_of_any_kind(start: Start) -> None:
    assert told(start(), Overwrites(), loss_of) == []


def test_meters_and_records_know_nothing_of_shards_that_were_computed_again(start: Start) -> None:
    meter, history, shown = AverageMeter(), list[float](), dict[str, Tensor]()

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        outputs = model(batch[0])
        shown["last"] = outputs.detach()
        loss: Tensor = F.cross_entropy(outputs, batch[1])
        meter.update(loss.item())
        history.append(loss.item())
        return loss

    assert told(start(), Net(), loss_fn) == []
    assert meter.count == len(history) == 2 * 2 * 2  # epochs, steps, shards


def test_what_is_kept_is_passed_over(start: Start) -> None:
    class Seen(Net):
        def __init__(self) -> None:
            super().__init__()
            self.right = torch.tensor(0.0)

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x) + self.right / 100
            self.right = self.right + y.detach().sum()
            return y

    model = Seen()
    assert told(start(), model, loss_of, state={"seen": (model, {"right": "first"})}) == []


def test_what_the_script_says_to_decide_nothing_is_passed_over_with_all_below_it(start: Start) -> None:
    run = start(strict=True)
    run.ignore("model.layers")
    assert told(run, Deep(), loss_of) == []


# Buffers.


class Queue(nn.Module):
    """Keys in a buffer."""

    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3)
        self.register_buffer("queue", torch.zeros(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        self.queue = torch.cat([self.queue, y.detach()])[-8:]
        return y


def test_a_buffer_that_is_averaged_and_no_statistic_is_told_with_its_rule(start: Start) -> None:
    assert told(start(), Queue(), loss_of) == ["queue"]


@pytest.mark.parametrize("rule", ["first", "last", "mean"])
def test_it_is_not_where_the_script_chooses_the_rule(start: Start, rule: str) -> None:
    model = Queue()
    assert told(start(), model, loss_of, state={"queue": (model, {"queue": rule})}) == []


def test_the_last_shard_that_has_samples_decides_by_its_rule(start: Start) -> None:
    model, run = Queue(), start(batch_size=3, shards=2)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), state={"queue": (model, {"queue": "last"})})
    for step in run.steps(TensorDataset(INPUTS[:4], LABELS[:4]), shuffle=False):  # the last step has one sample
        step.run(loss_of)
    with torch.no_grad():
        outputs = model.net(INPUTS[:4])
    torch.testing.assert_close(model.queue[-2:], outputs[2:])
    run.finish()


# Data.


class OwnGenerator(Dataset[Any]):
    """Draws, seldom, from a generator of its own."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(42)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return (INPUTS[index] if self.random.random() < 0.999 else -INPUTS[index]), LABELS[index]


class Tired(OwnGenerator):
    """Counts what it has given."""

    given = 0

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.given += 1
        return INPUTS[index] * (1 if self.given < 10**6 else 2), LABELS[index]


class Reseeded(OwnGenerator):
    """Seeds a generator of its own for each sample, and counts what it gives."""

    given = 0

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.random = np.random.default_rng(index)
        self.given += 1
        return INPUTS[index] + float(self.random.random()), LABELS[index]


class Mix:
    """Collates, and draws from a generator of its own."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(3)

    def __call__(self, samples: list[Any]) -> list[Tensor]:
        return [
            torch.stack([row[0] for row in samples]) * self.random.random(),
            torch.stack([row[1] for row in samples]),
        ]


def test_a_generator_that_each_sample_seeds_is_passed_over_and_one_of_collating_is_told(start: Start) -> None:
    assert told(start(), Net(), loss_of, Reseeded()) == []
    loader = DataLoader(DATA, 32, collate_fn=Mix())
    assert told(start(run_dir=None), Net(), loss_of, loader) == ["collate_fn.random"]


class Changing(OwnGenerator):
    """Goes by what it cannot be seen to go by."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return INPUTS[index] + random.SystemRandom().random(), LABELS[index]


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize(("kind", "path"), [(OwnGenerator, "random"), (Tired, "given"), (Changing, "")], ids=str)
def test_a_data_set_that_is_no_function_of_its_index_is_told_as_the_loop_begins(
    start: Start, kind: Callable[[], Dataset[Any]], path: str, processes: int
) -> None:
    for number, data in enumerate((kind(), Subset(kind(), range(64)))):
        prefix = "dataset.dataset" if number and path else "dataset"
        loader = DataLoader(data, 32, num_workers=processes)
        found = told(start(run_dir=None) if number else start(), Net(), loss_of, loader)
        assert found == [f"{prefix}.{path}".rstrip(".")]


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs without a folder of their own write into the test's."""
    monkeypatch.chdir(tmp_path)
