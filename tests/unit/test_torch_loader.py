"""What a ``DataLoader`` gives in one process, and what of it is refused."""

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

import unisono
from unisono.data.feed import Feed, Options
from unisono.data.feeds import LoopFeeds
from unisono.data.generators import generators_kept
from unisono.data.sample_order import LoopKey, SamplerOrder
from unisono.data.shards import ShardsRequest
from unisono.errors import DataError, JobError, PolicyError

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_worker")]

Start = Callable[..., unisono.Run]

KEY = LoopKey(seed=5, loop=0)


class Numbers(Dataset[int]):
    """Each sample is its own number."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> int:
        return index


def feed(loader: DataLoader[Any]) -> Feed:
    return Feed.of(loader, Options(), KEY, 60.0)


def order(sampler: Any, key: LoopKey = KEY) -> SamplerOrder:
    return SamplerOrder(sampler, Numbers(), key, is_batched=False)


def visited(found: SamplerOrder, epoch: int) -> list[int]:
    return list(found.samples_at(epoch, range(1000)).tolist())


# -- the order --------------------------------------------------------------------------------------------------------


class Counting:
    """Gives another number in each epoch."""

    def __init__(self) -> None:
        self.asked = 0

    def __iter__(self) -> Iterator[int]:
        self.asked += 1
        return iter([self.asked])


class Told(Counting):
    """Is told the epoch, as samplers for several processes are."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        super().__iter__()
        return iter([self.epoch, self.asked])


def test_epochs_have_their_order_in_whatever_turn_they_are_asked_for() -> None:
    for sampler in (RandomSampler(Numbers()), WeightedRandomSampler([1.0] * 60, 60), Counting()):
        there, back = order(sampler), order(sampler)
        forwards = [visited(there, epoch) for epoch in range(4)]
        backwards = [visited(back, epoch) for epoch in (3, 2, 1, 0)][::-1]
        assert forwards == backwards
        assert len({tuple(one) for one in forwards}) == 4


def test_another_seed_loop_or_generator_gives_another_order() -> None:
    keys = [KEY, LoopKey(6, 0), LoopKey(5, 1), LoopKey(5, 0, passes=2)]
    found = [visited(order(RandomSampler(Numbers()), key), 0) for key in keys]
    found += [
        visited(order(RandomSampler(Numbers(), generator=torch.Generator().manual_seed(seed))), 0) for seed in (1, 2)
    ]
    assert len({tuple(one) for one in found}) == 6
    assert all(sorted(one) == list(range(60)) for one in found)


def test_a_sampler_that_remembers_goes_on_where_the_loop_before_asked_it_for_epochs_and_is_not_touched() -> None:
    loader = DataLoader(Numbers(), 8, sampler=Counting())
    feeds = LoopFeeds(5, 60.0)
    first, second = (feeds.of(loader, Options(), loop, epochs=3) for loop in range(2))
    assert [first.order.samples_at(epoch, range(1))[0] for epoch in range(3)] == [1, 2, 3]
    assert [second.order.samples_at(epoch, range(1))[0] for epoch in range(3)] == [4, 5, 6]
    assert loader.sampler.asked == 0  # type: ignore[attr-defined]


def test_a_sampler_with_set_epoch_is_told_each_epoch_and_not_asked_for_those_before() -> None:
    assert visited(order(Told()), 4) == [4, 1]
    assert visited(order(Told(), LoopKey(5, 1, passes=3)), 4) == [7, 1]


def test_a_sampler_draws_nothing_that_the_script_would_have_drawn() -> None:
    with generators_kept():
        expected = torch.rand(3)
    visited(order(RandomSampler(Numbers())), 0)
    assert torch.equal(torch.rand(3), expected)


def test_a_sampler_does_not_copy_the_data_set() -> None:
    class Large(Numbers):
        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("copied")

    data = Large()
    feed(DataLoader(data, 8, shuffle=True))
    feed(DataLoader(data, batch_sampler=[[1], [2]]))


def test_a_sample_that_comes_twice_draws_other_numbers() -> None:
    class Noise(Numbers):
        def __getitem__(self, index: int) -> Any:
            return torch.rand(1).item()

    with generators_kept():
        (batch,) = feed(DataLoader(Noise(), 4, sampler=[3, 3])).source.load(ShardsRequest(0, (range(2),)))
    assert batch[0] != batch[1]


def test_a_batch_sampler_may_give_empty_batches_and_epochs() -> None:
    batched = SamplerOrder([[1, 2], [], [3]], Numbers(), KEY, is_batched=True)
    assert [batched.cut(0, 9).batch(number) for number in range(2)] == [range(2), range(2, 3)]
    assert batched.cut(0, 9).steps == 2
    assert SamplerOrder([], Numbers(), KEY, is_batched=True).cut(0, 9).steps == 0


# -- training ---------------------------------------------------------------------------------------------------------


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(70, 6, generator=generator), torch.randint(0, 3, (70,), generator=generator))


def loss_of(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def prepared(run: unisono.Run) -> tuple[unisono.Run, nn.Module]:
    model = nn.Linear(6, 3)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return run, model


def trained(run: unisono.Run, loader: Any, **how: Any) -> str:
    prepared(run)
    for step in run.steps(loader, epochs=2, **how):
        step.run(loss_of)
    return run.finish()


def test_a_loader_without_a_sampler_is_the_data_set_in_order(start: Start, tmp_path: Any) -> None:
    by_loader = trained(start(), DataLoader(data(), 32, drop_last=True))
    assert by_loader == trained(start(run_dir=tmp_path / "b"), data(), shuffle=False, drop_last=True)


def test_one_worker_and_one_shard_are_the_plain_loop_over_the_same_batches(start: Start) -> None:
    run, model = prepared(start(shards=1))
    plain = nn.Linear(6, 3)
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    loader = DataLoader(data(), 32, shuffle=True, collate_fn=lambda samples: default_collate(samples[::-1]))
    for step in run.steps(loader, epochs=2):
        (batch,) = step.shards
        assert len(batch[0]) == step.size
        step.run(loss_of)
        optimizer.zero_grad()
        loss_of(plain, batch).backward()
        optimizer.step()
    assert unisono.digest(model) == unisono.digest(plain)


def test_evaluation_and_prediction_go_through_the_loaders_batches(start: Start) -> None:
    run, model = prepared(start())
    inputs, labels = data().tensors
    sizes = []

    def loss_and_size(model: Any, batch: Any) -> dict[str, Any]:
        sizes.append(len(batch[0]))
        return {"loss": loss_of(model, batch)}

    found = run.evaluate(DataLoader(data(), 30), loss_and_size)
    assert sizes == [30, 30, 10]
    with torch.no_grad():
        assert found["loss"] == pytest.approx(loss_of(model, (inputs, labels)).item(), rel=1e-6)
        assert torch.allclose(run.predict(DataLoader(data(), 30, drop_last=True)), model(inputs[:60]))
        picked = run.predict(DataLoader(data(), batch_sampler=[[5, 2, 2], [8]]))
        assert torch.allclose(picked, model(inputs[[5, 2, 2, 8]]))
        shuffled = DataLoader(data(), 30, shuffle=True)
        assert torch.equal(run.predict(shuffled), run.predict(shuffled))


class Doubles(unisono.Policy):
    def after_step(self, view: unisono.View) -> None:
        self.set_batch_size(64)


def test_a_policy_may_change_the_batch_of_a_sampler_and_not_that_of_a_batch_sampler(
    start: Start, tmp_path: Any
) -> None:
    run, _ = prepared(start(policies=[Doubles()]))
    sizes = [step.size for step in run.steps(DataLoader(data(), 32, shuffle=True)) if step.run(loss_of)]
    assert sizes == [32, 38]
    other, _ = prepared(start(policies=[Doubles()], run_dir=tmp_path / "b"))
    with pytest.raises(PolicyError, match="batches of 64 samples, and the loader's batch_sampler decides"):
        for step in other.steps(DataLoader(data(), batch_sampler=[list(range(40)), list(range(64))])):
            step.run(loss_of)


class Placed(Numbers):
    """Each sample is the number of the loader process that it comes from, and how many there are."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return index, -1 if info is None else info.id, int(os.environ["BEGUN"]), info is not None and info.num_workers


def begin(number: int) -> None:
    os.environ["BEGUN"] = f"{10 + number}"


def test_loader_processes_begin_with_the_worker_init_fn_and_know_who_they_are(start: Start) -> None:
    run, _ = prepared(start(shards=1, batch_size=4))
    loader = DataLoader(Placed(), 4, num_workers=2, worker_init_fn=begin, prefetch_factor=1)
    seen = [step.shards[0] for step in run.steps(loader)]
    assert torch.cat([batch[0] for batch in seen]).tolist() == list(range(60))
    assert torch.stack([batch[1] for batch in seen[:2]]).tolist() == [[0] * 4, [1] * 4]
    assert torch.stack([batch[2] for batch in seen[:2]]).tolist() == [[10] * 4, [11] * 4]
    assert seen[0][3].tolist() == [2] * 4


def test_a_worker_init_fn_that_fails_says_so_in_the_first_step(start: Start) -> None:
    def fail(number: int) -> None:
        raise OSError("no such disk")

    run, _ = prepared(start())
    with pytest.raises(DataError, match="OSError: no such disk"):
        next(run.steps(DataLoader(data(), 32, num_workers=1, worker_init_fn=fail)))


# -- what is refused --------------------------------------------------------------------------------------------------


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class OwnLoader(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([])


class Share:
    """A sampler of some library, for one of several processes."""

    num_replicas, rank = 2, 1

    def __iter__(self) -> Iterator[int]:
        return iter(range(1, 60, 2))


class Locked:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __iter__(self) -> Iterator[int]:
        return iter([1])


class Endless:
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


def in_two() -> DistributedSampler[Any]:
    return DistributedSampler(Numbers(), num_replicas=2, rank=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DataLoader(Stream(), 8), "reads Stream, a stream"),
        (lambda: OwnLoader(Numbers(), 8), "OwnLoader iterates in a way of its own"),
        (lambda: DataLoader(Numbers(), None), "batch_size=None: the loader makes no batches"),
        (lambda: DataLoader(Numbers(), 8, sampler=in_two()), "DistributedSampler gives each process a share"),
        (lambda: DataLoader(Numbers(), 8, sampler=Share()), "Share gives each process a share"),
        (
            lambda: DataLoader(Numbers(), batch_sampler=BatchSampler(in_two(), 4, False)),
            "leave the sampler out, and say shuffle=True",
        ),
        (lambda: DataLoader(Numbers(), 8, sampler=Locked()), r"Locked\) cannot be copied"),
        (lambda: DataLoader(Numbers(), 8, sampler=(n for n in [1])), "cannot be copied"),
        (lambda: DataLoader(Numbers(), 8, sampler=["a"]), "no index"),
        (lambda: DataLoader(Numbers(), batch_sampler=[[(1, 2)]]), "no index"),
        (lambda: DataLoader(Numbers(), 8, sampler=Endless()), "has to end where the epoch does"),
        (lambda: DataLoader(TensorDataset(torch.zeros(0)), 8), "is empty"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_the_cure(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        feed(make()).order.cut(0, 8)


def test_processes_that_are_not_forked_are_refused() -> None:
    loader = DataLoader(Numbers(), 8, num_workers=2, multiprocessing_context="spawn")
    with pytest.raises(JobError, match="multiprocessing_context='spawn': loader processes are forked"):
        feed(loader)


def test_what_the_loader_decides_is_not_said_beside_it(start: Start) -> None:
    run, _ = prepared(start())
    loader = DataLoader(data(), 32)
    with pytest.raises(JobError, match="shuffle=False, loader_workers=2 beside a DataLoader"):
        run.steps(loader, shuffle=False, loader_workers=2)
    with pytest.raises(JobError, match="batch_size=8 beside a DataLoader"):
        run.predict(loader, batch_size=8)


def test_a_batch_sampler_of_torch_with_another_batch_size_is_named_and_one_of_a_class_of_ones_own_is_taken(
    start: Start,
) -> None:
    class Uneven(BatchSampler):
        """Of torch's, and yet of a class of one's own."""

    run, _ = prepared(start())
    words = (
        "the loader's batch_sampler has batch_size=35, .* in the loader's batch_sampler. Only .* of a class of your own"
    )
    with pytest.raises(JobError, match=words):
        run.steps(DataLoader(data(), batch_sampler=BatchSampler(SequentialSampler(data()), 35, False)))
    steps = run.steps(DataLoader(data(), batch_sampler=Uneven(SequentialSampler(data()), 35, False)))
    assert [step.size for step in steps] == [35, 35]


def test_a_batch_size_from_outside_holds_for_a_loader_unless_a_batch_sampler_decides(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_BATCH_SIZE", "64")
    run, _ = prepared(start())
    assert [step.size for step in run.steps(DataLoader(data(), 32, sampler=SequentialSampler(data())))] == [64, 6]
    with pytest.raises(JobError, match="batch_size=64 is set from outside"):
        run.steps(DataLoader(data(), batch_sampler=[[1]]))


def test_a_sampler_that_gives_nothing_is_refused(start: Start) -> None:
    run, _ = prepared(start())
    with pytest.raises(DataError, match="sampler gives nothing for the first epoch"):
        run.steps(DataLoader(data(), batch_sampler=[]))
    with pytest.raises(DataError, match="no batch to evaluate"):
        run.evaluate(DataLoader(data(), 100, drop_last=True), {"loss": loss_of})


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("loaded", [False, True])
def test_a_data_set_that_changes_its_length_in_a_loop_is_refused_and_may_between_two(
    start: Start, change: int, loaded: bool
) -> None:
    samples, model, run = [torch.full((1,), float(number)) for number in range(70)], nn.Linear(1, 1), start()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4))
    data: Any = DataLoader(samples, 32) if loaded else samples  # type: ignore[arg-type]  # a list has all that is needed

    def train() -> Iterator[int]:
        for step in run.steps(data, epochs=2):
            step.run(lambda model, batch: model(batch).mean())
            yield step.size

    steps = train()
    assert [next(steps), next(steps)] == [32, 32]
    samples[69:] = samples[69:] * (change + 1)
    said = rf"the data set \(list\) has {70 + change} samples in epoch 0, and had 70 when the loop began"
    with pytest.raises(DataError, match=said):
        next(steps)
    assert sum(train()) == 2 * (70 + change)
