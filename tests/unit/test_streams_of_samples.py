"""What readers of a stream give, and what of a stream is refused."""

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import unisono
from unisono.adapt.view import BatchShape
from unisono.data.feeds import StreamFeed
from unisono.data.generators import generators_kept
from unisono.data.sample_order import LoopKey
from unisono.data.shards import alike
from unisono.data.stream_reader import Reader, ReaderKey, ReaderState
from unisono.data.stream_readers import OpenReaders, Wish
from unisono.errors import CheckpointError, DataError, JobError, PolicyError, UnisonoWarning
from unisono.plan.batches import Position
from unisono.train.loop.course import StreamCourse
from unisono.train.loop.loop_data import require_strategy
from unisono.train.state.trained import RunProgress

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_worker")]

Start = Callable[..., unisono.Run]


class Numbers(IterableDataset[Any]):
    """Numbers, split among workers if it is told to."""

    def __init__(self, *, splits: bool = False, draws: bool = False, count: int = 20) -> None:
        self.splits, self.draws, self.count, self.epoch = splits, draws, count, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        info, numbers = get_worker_info() if self.splits else None, list(range(self.count))
        random.shuffle(numbers)
        for number in numbers if info is None else numbers[info.id :: info.num_workers]:
            yield (number, self.epoch, torch.rand(2).sum().item() + float(np.random.rand())) if self.draws else number


class Eager(Numbers):
    """Shuffles before it returns an iterator, and not when that is asked."""

    def __iter__(self) -> Iterator[Any]:
        numbers = torch.randperm(20).tolist()
        random.shuffle(numbers)
        return iter(numbers)


class Own(Numbers):
    """Opens its readers itself; they go on where they are told to."""

    opened = 0

    def open_reader(self, number: int, readers: int) -> Any:
        Own.opened += 1
        return Going(range(number, 20, readers))


class Going:
    def __init__(self, numbers: range) -> None:
        self.numbers, self.place, self.read = numbers, 0, 0

    def __next__(self) -> int:
        if self.place == len(self.numbers):
            raise StopIteration
        self.place, self.read = self.place + 1, self.read + 1
        return self.numbers[self.place - 1]

    def state_dict(self) -> Any:
        return {"place": (self.place,)}

    def load_state_dict(self, state: Any) -> None:
        (self.place,) = state["place"]


@pytest.fixture(autouse=True)
def generators_as_they_were() -> Iterator[None]:
    with generators_kept():
        yield


def reader(stream: Any, number: int, at: ReaderState = ReaderState(), epoch: int = 0, readers: int = 3) -> Reader:  # noqa: B008
    return Reader(stream, ReaderKey(5, 0, 0, epoch, number, readers), at)


STREAMS = [Numbers(), Numbers(draws=True), Numbers(splits=True), Numbers(splits=True, draws=True), Own(), Eager()]
NAMES = ["whole", "whole and drawing", "split", "split and drawing", "its own", "eager"]


# -- readers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", STREAMS, ids=NAMES)
def test_readers_share_the_samples_out_and_know_when_they_have_come_to_the_end(stream: Any) -> None:
    readers = [reader(stream, number) for number in range(3)]
    found: list[Any] = []
    for each, count in zip(readers, (7, 7, 6), strict=True):
        found += each.take(count - 1)
        assert not each.is_over
        found += each.take(5)
        assert each.is_over
        assert each.take(5) == []
        assert each.at.samples == count
    assert sorted(one[0] if isinstance(one, tuple) else one for one in found) == list(range(20))


@pytest.mark.parametrize("stream", STREAMS, ids=NAMES)
@pytest.mark.parametrize("before", [0, 1, 4, 7])
def test_a_reader_goes_on_behind_any_sample_as_if_it_had_read_those_before(stream: Any, before: int) -> None:
    whole, cut = reader(stream, 0).take(7), reader(stream, 0)
    torch.rand(3)
    cut.take(before)
    torch.rand(5)
    assert reader(stream, 0, cut.at).take(9) == whole[before:]
    assert cut.take(9) == whole[before:]


@pytest.mark.parametrize("stream", STREAMS[:4], ids=NAMES[:4])
def test_a_stream_that_takes_no_state_is_read_again_behind_one(stream: Any) -> None:
    whole = reader(stream, 0).take(7)
    assert reader(stream, 0, ReaderState(3, {"place": [3]})).take(9) == whole[3:]


@pytest.mark.parametrize("readers", [(), (ReaderState(2), ReaderState(4), ReaderState(0))])
def test_readers_that_have_given_other_samples_than_the_loop_has_used_are_damage(
    readers: tuple[ReaderState, ...],
) -> None:
    course = StreamCourse(cast("Any", None), 3, cast("Any", None), None)
    progress = RunProgress(Position(step=1, samples=5, epoch=0, offset=5), readers=readers)
    with pytest.raises(CheckpointError, match=rf"after 5 samples of epoch 0, .* have given {6 if readers else 0}"):
        course.ahead(progress, 1, BatchShape(8, 3))


def test_a_reader_of_its_own_does_not_read_again_what_it_has_given() -> None:
    at = reader(Own(), 1)
    at.take(3)
    assert at.at == ReaderState(3, {"place": [3]})
    again = reader(Own(), 1, at.at)
    assert again.take(2) == [10, 13]
    assert again._iterator.read == 3  # with the one that it looks ahead


def test_samples_of_other_readers_and_epochs_draw_other_numbers() -> None:
    found = [
        reader(Numbers(splits=True, draws=True), number, epoch=epoch).take(4) for number in (0, 1) for epoch in (0, 1)
    ]
    drawn = [draw for samples in found for _, _, draw in samples[1:]]
    assert len(set(drawn)) == len(drawn)


def test_a_stream_is_told_the_epoch_and_is_not_touched_itself() -> None:
    stream = Numbers(draws=True)
    assert {epoch for _, epoch, _ in reader(stream, 0, epoch=4).take(5)} == {4}
    assert stream.epoch == 0


def test_the_script_is_in_no_worker_of_torch_behind_a_reader() -> None:
    reader(Numbers(splits=True), 1).take(2)
    assert get_worker_info() is None


def test_what_was_read_for_a_step_is_given_again_and_read_again_elsewhere() -> None:
    here, there = (OpenReaders(Numbers(draws=True), LoopKey(5, 0), 3, list) for _ in range(2))
    begin = Wish(0, 1, ReaderState(), 4)
    first, samples = here.give(begin), here.batch(begin)
    behind = begin._replace(at=first.after)
    second, next_samples = here.give(behind), here.batch(behind)
    assert here.give(behind) is second
    assert here.batch(begin) == samples
    assert there.batch(behind) == next_samples


# -- training ---------------------------------------------------------------------------------------------------------


class Pairs(IterableDataset[Any]):
    def __init__(self, count: int = 70, promised: int | None = None) -> None:
        self.count, self.promised = count, promised

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(0)
        for number in range(self.count):
            yield torch.randn(6, generator=generator), number % 3


class Promising(Pairs):
    def __len__(self) -> int:
        return 80


def loss_of(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def prepared(run: unisono.Run) -> tuple[unisono.Run, nn.Module]:
    model = nn.Linear(6, 3)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return run, model


def test_steps_of_a_stream_know_where_they_stand(start: Start) -> None:
    run, _ = prepared(start())
    seen = []
    for step in run.steps(Pairs(), epochs=2):
        step.run(loss_of)
        seen.append((step.epoch, step.position, step.size, step.is_last_in_epoch, step.is_last))
    assert seen == [
        (0, 0, 32, False, False), (0, 32, 32, False, False), (0, 64, 6, True, False),
        (1, 70, 32, False, False), (1, 102, 32, False, False), (1, 134, 6, True, True),
    ]  # fmt: skip


def test_a_loader_over_a_stream_and_the_trainer_take_it_as_well(start: Start, tmp_path: Any) -> None:
    digests = []
    for number, stream in enumerate((Pairs(), DataLoader(Pairs(), 32))):
        run = start(run_dir=tmp_path / f"{number}")
        model = nn.Linear(6, 3)
        trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of, run=run)
        trainer.fit(stream, 2)
        digests.append(trainer.finish())
    assert digests[0] == digests[1]


def test_a_stream_with_another_number_of_samples_than_it_promises_is_warned_of(start: Start) -> None:
    run, _ = prepared(start())
    with pytest.warns(UnisonoWarning, match="epoch 0 of the stream has 70 samples, and its __len__ says 80"):
        assert sum(step.size for step in run.steps(Promising()) if step.run(loss_of)) == 70


class Few(Pairs):
    """One file, for whichever reader comes first."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        return super().__iter__() if info is None or info.id == 0 else iter(())


def test_readers_that_have_nothing_are_warned_of(start: Start) -> None:
    run, _ = prepared(start())
    with pytest.warns(UnisonoWarning, match="1 of the 2 readers of the stream have nothing to read, number 1 among"):
        assert [step.size for step in run.steps(Few(40)) if step.run(loss_of)] == [16, 16, 8]


class Resizes(unisono.Policy):
    def after_step(self, view: unisono.View) -> None:
        self.set_batch_size(16 if view.step == 1 else 64, shards=2 if view.step == 1 else 4)


def test_a_policy_may_change_the_batch_of_a_stream_and_not_the_number_of_its_readers(start: Start) -> None:
    run, _ = prepared(start(policies=[Resizes()]))
    sizes = []
    with pytest.raises(PolicyError, match="4 shards, and the stream has 2 readers"):
        for step in run.steps(Pairs()):
            step.run(loss_of)
            sizes.append(step.size)
    assert sizes == [32, 16]


# -- what is refused --------------------------------------------------------------------------------------------------


class ByChance(Pairs):
    def __iter__(self) -> Iterator[Any]:
        chance = random.SystemRandom()
        for inputs, label in super().__iter__():
            yield inputs + chance.random(), label


class Shorter(Numbers):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


class Ragged(Pairs):
    def __iter__(self) -> Iterator[Any]:
        for place, (inputs, label) in enumerate(super().__iter__()):
            yield torch.zeros(7) if place == 10 else inputs, label


class Torn(Pairs):
    def __iter__(self) -> Iterator[Any]:
        yield from zip(range(7), range(7), strict=True)
        raise OSError("the file is torn")


class Locked(Pairs):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Telling(Own):
    def open_reader(self, number: int, readers: int) -> Any:
        found = Going(range(9))
        found.state_dict = lambda: {"place": object()}  # type: ignore[method-assign]
        return found


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (ByChance(), "ByChance gave other samples when it was read a second time"),
        (Locked(), "Locked cannot be copied"),
        (Telling(), r"Going.state_dict\(\) returned what is no JSON"),
        (Pairs(0), "the stream is empty"),
        (
            Ragged(),
            r"samples 0 … 15 of reader 0 of Ragged in epoch 0 cannot .* Sample 5 is \(Tensor\[7\] float32, int\)",
        ),
        (
            (one for one in Pairs()),
            "generator can only be read from front to back.*IterableDataset, whose __iter__",
        ),
    ],
    ids=["by chance", "locked", "no JSON", "empty", "ragged", "used up"],
)
def test_streams_that_cannot_be_kept_say_why(start: Start, stream: Any, message: str) -> None:
    run, _ = prepared(start())
    with pytest.raises(DataError, match=message):
        next(run.steps(stream))


@pytest.mark.parametrize("processes", [0, 1])
def test_an_error_in_a_stream_says_which_reader_was_asked_for_what(start: Start, processes: int) -> None:
    run, _ = prepared(start())
    with pytest.raises((OSError, DataError), match="the file is torn") as caught:
        next(run.steps(Torn(), loader_workers=processes))
    told = "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "(while reader 0 of Torn was asked for number 7 of what it reads in epoch 0)" in told


def test_a_stream_that_has_become_shorter_says_so() -> None:
    with pytest.raises(DataError, match="has come to its end after 3 samples of epoch 0, and it has given 5 before"):
        reader(Shorter(), 0, ReaderState(5))


@pytest.mark.parametrize(
    ("make", "how", "message"),
    [
        (Pairs, {"shuffle": True}, "shuffle=True: a stream has its own order"),
        (Pairs, {"drop_last": True}, "drop_last=True: which batch of a stream is the last whole one"),
        (Pairs, {"loader_workers": -2}, "loader_workers=-2: use 0"),
        (lambda: DataLoader(Pairs(), 16), {}, "the loader has batch_size=16, the job has batch_size=32"),
        (lambda: DataLoader(Pairs(), 32), {"shuffle": False}, "shuffle=False beside a DataLoader"),
    ],
)
def test_what_a_stream_cannot_give_is_refused(start: Start, make: Any, how: Any, message: str) -> None:
    run, _ = prepared(start())
    with pytest.raises(JobError, match=message):
        run.steps(make(), **how)


def test_streams_need_steps_that_all_workers_make_together() -> None:
    feed = StreamFeed(Pairs(), LoopKey(5, 0))
    require_strategy(feed, "all-reduce", has_own_weights=False)
    with pytest.raises(JobError, match="strategy='local-sgd': streams are read for steps that all workers"):
        require_strategy(feed, "local-sgd", has_own_weights=True)


class Indexed(Pairs):
    """Can be read from front to back, and by index, as MosaicML's streams can."""

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError

    def __len__(self) -> int:
        return 70

    def __getitem__(self, index: int) -> Any:
        return torch.arange(6.0).sin() * index, index % 3


def test_a_stream_with_an_index_is_a_data_set(start: Start) -> None:
    run, _ = prepared(start())
    assert [step.size for step in run.steps(Indexed(), shuffle=unisono.BlockShuffle(8)) if step.run(loss_of)] == [
        32,
        32,
        6,
    ]
    with pytest.raises(DataError, match="the loader reads Indexed, a stream"):
        run.steps(DataLoader(Indexed(), 32))


def test_a_stream_is_evaluated_like_a_data_set_of_the_same_samples(start: Start) -> None:
    run, model = prepared(start())
    inputs, labels = (torch.stack([torch.as_tensor(one[part]) for one in Pairs()]) for part in (0, 1))
    expected = F.cross_entropy(model(inputs), labels).item()
    assert run.evaluate(Pairs(), {"loss": loss_of})["loss"] == pytest.approx(expected)
    assert torch.allclose(run.predict(DataLoader(Pairs(), 9)), model(inputs))


@pytest.mark.parametrize("verb", ["evaluate", "predict"])
def test_an_empty_stream_is_not_evaluated(start: Start, verb: str) -> None:
    run, _ = prepared(start())
    with pytest.raises(DataError, match="the stream is empty"):
        getattr(run, verb)(Pairs(0), lambda model, batch: {"loss": loss_of(model, batch)})


def test_an_evaluated_stream_with_another_number_of_samples_than_it_promises_is_warned_of(start: Start) -> None:
    run, _ = prepared(start())
    with pytest.warns(UnisonoWarning, match="the stream has 70 samples, and its __len__ says 80"):
        run.evaluate(Promising(), {"loss": loss_of})


def test_a_stream_cannot_begin_behind_steps_that_nobody_has_read(start: Start) -> None:
    run, _ = prepared(start())
    with pytest.raises(DataError, match=r"run.steps\(begin=2\) of a stream: it would have to be read"):
        next(run.steps(Pairs(), begin=2))


def test_samples_are_alike_if_all_that_can_be_compared_in_them_is() -> None:
    one: dict[str, Any] = {"a": [torch.tensor([1.0, float("nan")]), np.arange(3)], "b": ("x", 2, b"y", object())}
    assert alike(one, {"a": [one["a"][0].clone(), np.arange(3)], "b": ("x", 2, b"y", object())})
    for other in ({"a": one["a"]}, {**one, "b": ("x", 3, b"y", object())}, {**one, "a": [torch.ones(2), np.arange(3)]}):
        assert not alike(one, other)
