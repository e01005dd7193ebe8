"""A campaign of flipped bits: at drawn places and moments of small trainings. None may end in other weights."""

from __future__ import annotations

import inspect
import io
import random
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from threading import Timer
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from benchmarks.thread_crew import Trade, train
from unisono.data.generators import generators_kept
from unisono.errors import UnisonoError, UnisonoWarning
from unisono.job import Job
from unisono.train.config.numerics import apply_numerics
from unisono.train.config.run_config import Execution
from unisono.train.run import Run
from unisono.train.step.step import Step
from unisono_lab.faults.injector import flip, flip_in_file, tensors_in

SHARDS, BATCH, STEPS = 4, 32, 9
CHECKPOINT_EVERY = 3
PLACES = ("partial_sum", "gradient", "weights", "buffers", "optimizer", "checkpoint", "shard_buffer", "last_moment")
MOMENTS = ("step_begins", "step_computed", "step_ends")
AT_REST = ("weights", "optimizer", "buffers")
"""What is struck at the last moment: a step is worked out, and its update is about to be made. And at any time."""

ANY_TIME = "any_time"
"""A place of its own: whatever lies at rest in one worker's memory, after a drawn share of a step's time."""

WRITES = {"partial_sum": 2, "gradient": 12, "shard_buffer": SHARDS}
"""Of a step, of which one is struck: gradients as small as here are added up together, shard by shard."""


@dataclass(frozen=True, slots=True)
class Flip:
    """One flipped bit, and the training that it strikes.

    Attributes:
        model: ``digits`` or ``char_lm``.
        workers: how many.
        is_elastic: whether workers may be replaced.
        place: what is struck.
        rank: on which worker.
        step: in which step.
        moment: in which part of it; for partial sums and gradients the number of the write after which it strikes.
        draw: decides tensor, element and bit.
        verify_every: of the training.
    """

    model: str
    workers: int
    is_elastic: bool
    place: str
    rank: int
    step: int
    moment: int
    draw: int
    verify_every: int


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a flip.

    Attributes:
        flip: that struck.
        verdict: ``right``: the weights of the undisturbed training; ``error``; ``missed``: nothing was there to strike;
            or ``wrong``.
        words: of the error.
    """

    flip: Flip
    verdict: str
    words: str = ""


def drawn(seed: int, count: int, *, any_time: bool = False) -> list[Flip]:
    """So many flips, the same for the same seed.

    Args:
        seed: of what is drawn.
        count: how many.
        any_time: whether they strike one worker at moments that are drawn in time.
    """
    draw = random.Random(seed)  # noqa: S311  nothing secret
    found = [_drawn(draw) for _ in range(count)]
    at_once = {"workers": 1, "rank": 0, "place": ANY_TIME}
    return [replace(one, **at_once) for one in found] if any_time else found  # type: ignore[arg-type]


def _drawn(draw: random.Random) -> Flip:
    workers = draw.randint(1, 3)
    model, place = draw.choice(("digits", "char_lm")), draw.choice(PLACES)
    if place in ("buffers", "shard_buffer"):
        model = "digits"  # the other has none
    return Flip(
        model=model,
        workers=workers,
        is_elastic=draw.random() < 1 / 2,
        place=place,
        rank=draw.randrange(workers),
        step=draw.randrange(STEPS),
        moment=draw.randrange(12),
        draw=draw.getrandbits(60),
        verify_every=draw.choice((2, 100)),
    )


def campaign(flips: Sequence[Flip], told: Callable[[Result], None] = lambda result: None) -> list[Result]:
    """Strike one training with each, and compare with the undisturbed ones."""
    found = []
    with _quiet(), generators_kept(), tempfile.TemporaryDirectory(prefix="unisono-flips-") as folder:
        serial = {model: _digest(_trade(model, Path(folder) / f"serial-{model}"), model) for model in MODELS}
        for number, one in enumerate(flips):
            found.append(struck(one, serial[one.model], Path(folder) / str(number)))
            told(found[-1])
    return found


def counts(results: Sequence[Result]) -> Mapping[tuple[str, str], int]:
    """How many flips there were, by place and verdict."""
    return Counter((result.flip.place, result.verdict) for result in results)


def struck(one: Flip, serial: str, folder: Path) -> Result:
    """Strike a training, and say what came of it."""
    base = _trade(one.model, folder)
    trade = replace(
        base,
        workers=one.workers,
        verify_every=one.verify_every,
        is_elastic=one.is_elastic,
        checkpoint_every=CHECKPOINT_EVERY if one.place == "checkpoint" else None,
    )
    striker = _Striker(one)
    try:
        if one.place == "checkpoint":
            _digest(replace(trade, stop_after=max(one.step, CHECKPOINT_EVERY)), one.model)
            striker.strike_file(folder)
        found = _digest(trade, one.model, striker)
    except UnisonoError as error:
        return Result(one, "error" if striker.done else "wrong", f"{type(error).__name__}: {error}")
    finally:
        striker.close()
    if found != serial:
        return Result(one, "wrong", f"the weights are {found[:8]}… instead of {serial[:8]}…")
    return Result(one, "right" if striker.done else "missed")


class _Striker:
    """Flips one bit of one worker, once."""

    def __init__(self, one: Flip) -> None:
        self.done = False
        self._begun, self._timer = 0.0, Timer(0, lambda: None)
        self._flip, self._draw, self._writes = one, random.Random(one.draw), 0  # noqa: S311  nothing secret
        self._run: Run | None = None

    def attach(self, run: Run) -> None:
        """Listen to the run of the worker that is to be struck."""
        if run.rank != self._flip.rank or self._flip.place == "checkpoint":
            return
        self._run = run if self._flip.place == "last_moment" else None
        if self._flip.place == ANY_TIME:
            run.on("step_begins", self._set_timer)
        elif self._flip.place in ("partial_sum", "gradient", "shard_buffer", "last_moment"):
            run.on("step_begins", self._arm)
        else:
            run.on(MOMENTS[self._flip.moment % len(MOMENTS)], self._strike)  # type: ignore[arg-type]

    def close(self) -> None:
        """The training is over."""
        self._timer.cancel()

    def strike_file(self, folder: Path) -> None:
        """Flip a bit of a file of the newest checkpoint."""
        newest = max((folder / "checkpoints").glob("step-*"))
        path = self._draw.choice(sorted(path for path in newest.iterdir() if path.stat().st_size))
        flip_in_file(path, self._draw.randrange(8 * path.stat().st_size))
        self.done = True

    def _strike(self, run: Run, step: Step) -> None:
        if self.done or step.number < self._flip.step:
            return
        self._hit_one(run, self._flip.place)

    def _hit_one(self, run: Run, place: str) -> None:
        tensors = [one for one in tensors_in(run, place) if one.numel()]  # type: ignore[arg-type]
        if tensors:
            self._hit(self._draw.choice(tensors))

    def _set_timer(self, run: Run, step: Step) -> None:
        """A step takes about as long as the one before. The first ones take longer."""
        before, self._begun = self._begun, perf_counter()
        if not self.done and step.number == max(2, self._flip.step):
            self._timer = Timer(self._draw.random() * (self._begun - before), self._hit_any, (run,))
            self._timer.start()

    def _hit_any(self, run: Run) -> None:
        """Strike memory that is at rest: the more of it there is, the more often."""
        tensors = [one for place in AT_REST for one in tensors_in(run, place)]  # type: ignore[arg-type]
        self._hit(self._draw.choices(tensors, [one.nbytes for one in tensors])[0])

    def _arm(self, run: Run, step: Step) -> None:
        if not self.done and step.number >= self._flip.step:
            self._writes = 0
            run.inside.exact.require_engine().witness = self._witness

    def _witness(self, place: str, values: Tensor) -> None:
        if self.done or place != ("gradient" if self._flip.place == "last_moment" else self._flip.place):
            return
        if self._run is not None:
            self._hit_one(self._run, AT_REST[self._flip.moment % len(AT_REST)])
            return
        self._writes += 1
        if place == "gradient" or self._writes > self._flip.moment % WRITES[place]:
            self._hit(values)

    def _hit(self, tensor: Tensor) -> None:
        self.done = True
        flip(tensor, self._draw.randrange(tensor.numel()), self._draw.randrange(8 * tensor.itemsize))


# -- what is trained


def _digest(trade: Trade, model: str, striker: _Striker | None = None) -> str:
    digests = {one for one in train(trade, partial(_script, model, striker)) if one is not None}
    return digests.pop() if len(digests) == 1 else "different on each worker"


def _script(model: str, striker: _Striker | None, run: Run) -> str:
    make, data, loss_fn = MODELS[model]
    net = make()
    net.load_state_dict(_initial(model))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    run.prepare(net, optimizer)
    if striker is not None:
        striker.attach(run)
    for step in run.steps(data(), epochs=1):
        step.run(loss_fn)
    return run.finish()


def _trade(model: str, folder: Path) -> Trade:
    return Trade(Job.create(batch_size=BATCH, shards=SHARDS), 1, folder, Execution(overlap=False, looks=True))


@cache
def _initial(model: str) -> Mapping[str, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MODELS[model][0]().state_dict()


def _conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(8 * 4 * 4, 10),
    )  # fmt: skip


@cache
def _digits() -> Dataset[Any]:
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images[: BATCH * STEPS], dtype=torch.float32).unsqueeze(1) / 16
    return TensorDataset(images, torch.tensor(found.target[: BATCH * STEPS]))


class _Bytes(nn.Module):
    """Reads bytes, and says which comes next."""

    def __init__(self, width: int = 16, context: int = 24) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(128, width), nn.Embedding(context, width)
        self.mixed, self.inner, self.outer = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )
        self.head = nn.Linear(width, 128)

    def forward(self, text: Tensor) -> Tensor:
        """(samples, context) → (samples, context, 128)."""
        seen = self.mixed(self.bytes(text) + self.places.weight)
        seen = seen + F.scaled_dot_product_attention(seen, seen, seen, is_causal=True)
        found: Tensor = self.head(seen + self.outer(F.gelu(self.inner(seen))))
        return found


@cache
def _text() -> Dataset[Any]:
    letters = torch.tensor(list(inspect.getsource(inspect.getmodule(_text) or inspect).encode("ascii", "replace")))
    count = BATCH * STEPS
    starts = torch.arange(count) * ((len(letters) - 25) // count)
    rows = torch.stack([letters[start : start + 25] for start in starts.tolist()])
    return TensorDataset(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())


def _digits_loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _text_loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Dataset[Any]], Callable[[Any, Any], Tensor]]] = {
    "digits": (_conv_net, _digits, _digits_loss),
    "char_lm": (_Bytes, _text, _text_loss),
}


@contextmanager
def _quiet() -> Iterator[None]:
    """What is found is warned of by every training; and torch is set up for all of them at once."""
    before = apply_numerics(Job.create(batch_size=BATCH, shards=SHARDS), torch.device("cpu"))
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore", UnisonoWarning)
            yield
    finally:
        before.apply()
