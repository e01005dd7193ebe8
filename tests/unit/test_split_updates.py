"""Workers of one host split their updates where that can be, and make whole ones where not."""

from __future__ import annotations

import copy
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.thread_crew import Trade, train
from struck_run import JOB, momentum, trained
from unisono.errors import JobError
from unisono.train.config.run_config import SPLIT_FROM_MIB, Execution, SplitUpdate
from unisono.train.run import Run
from unisono.train.step.parts import Parts
from unisono.train.step.pieces import Slice
from unisono.train.step.script_memory import Kind
from unisono.train.step.step import Step

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.usefixtures("numerics"),
    pytest.mark.filterwarnings("ignore::unisono.errors.UnisonoWarning"),
]


class Own(torch.optim.SGD):
    """Not one of those of which it is known that they go element by element."""


def own(parameters: Any) -> torch.optim.Optimizer:
    return Own(parameters, lr=0.1, momentum=0.9)


def ends(
    folder: Path,
    workers: int,
    split: SplitUpdate,
    make: Callable[[Any], torch.optim.Optimizer] = momentum,
    *,
    is_elastic: bool = False,
    told: Callable[[Run, Step], None] = lambda run, step: None,
) -> tuple[set[str], dict[str, list[dict[str, Any]]]]:
    """What all workers come to, and the journal by event."""
    execution = Execution(overlap=False, looks=True, shard_optimizer=split)

    def script(run: Run) -> str:
        return trained(run, told, make)

    digests = train(Trade(JOB, workers, folder, execution, is_elastic=is_elastic), script)
    journal: dict[str, list[dict[str, Any]]] = {}
    for line in (folder / "journal.jsonl").read_text().splitlines():
        journal.setdefault(json.loads(line)["event"], []).append(json.loads(line))
    return set(digests), journal


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_that_share_memory_split_updates_to_the_same_bits(workers: int, tmp_path: Path) -> None:
    expected, told = ends(tmp_path / "serial", 1, split=False)
    assert "memory shared" not in told
    found, told = ends(tmp_path / "split", workers, split=True)
    assert found == expected
    assert len(told["memory shared"]) == 1
    assert "update not split" not in told


def test_a_worker_alone_shares_with_nobody_and_nobody_is_told(tmp_path: Path) -> None:
    for number, (split, is_elastic) in enumerate([("auto", False), ("auto", True), (True, True)]):
        _, told = ends(tmp_path / str(number), 1, split, is_elastic=is_elastic)  # type: ignore[arg-type]
        assert "memory shared" not in told
        assert "update not split" not in told


def test_other_optimizers_make_whole_updates_and_the_journal_says_why(tmp_path: Path) -> None:
    expected, _ = ends(tmp_path / "serial", 1, split=False, make=own)
    found, told = ends(tmp_path / "auto", 2, "auto", own)
    assert found == expected
    assert "memory shared" not in told
    (line,) = told["update not split"]
    assert line["why"].startswith("cannot split Own: it splits optimizers that go element by element (SGD, Adam")


def test_who_insists_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="shard_optimizer=True cannot split Own"):
        ends(tmp_path / "own", 2, split=True, make=own)


class Wide(nn.Module):
    """Has parameters of so many MiB; all but the first element are unused."""

    def __init__(self, mib: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(mib * 2**18))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight[:4]


@pytest.mark.parametrize(
    ("mib", "fused", "why"),
    [
        (SPLIT_FROM_MIB, False, ""),
        (
            SPLIT_FROM_MIB - 1,
            False,
            f"the parameters take 31.0 MiB, and below {SPLIT_FROM_MIB} a split update saves no time",
        ),
        (SPLIT_FROM_MIB, True, "a fused optimizer goes over memory once, so that a split update saves no time"),
    ],
)
def test_updates_are_split_by_themselves_where_that_saves_time(mib: int, fused: bool, why: str, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        model = Wide(mib)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=fused))
        for step in run.steps(TensorDataset(torch.ones(4 * JOB.require_batch_size("samples"), 4))):
            step.run(lambda model, batch: model(batch[0]).mean())

    train(Trade(JOB, 2, tmp_path, Execution(overlap=False, shard_optimizer="auto")), script)
    lines = map(json.loads, (tmp_path / "journal.jsonl").read_text().splitlines())
    told = {line["event"]: line.get("why", "") for line in lines}
    assert ("memory shared" in told) == (not why)
    assert told.get("update not split", "") == why


def first_of(run: Run) -> torch.Tensor:
    prepared = run.inside.trained.require_prepared()
    return next(iter(prepared.parameters.values()))


def counted(run: Run, step: Step) -> None:
    with torch.no_grad():
        first_of(run).mul_(0.9)


def uncounted(run: Run, step: Step) -> None:
    first_of(run).data.mul_(0.9)


def once(run: Run, step: Step) -> None:
    if step.number == 2:
        uncounted(run, step)


def replaced(run: Run, step: Step) -> None:
    first_of(run).data = first_of(run).data * 0.9


def there_and_back(run: Run, step: Step) -> None:
    weight = first_of(run)
    kept = weight.data.clone()
    weight.data.zero_()
    weight.data.copy_(kept)


def momentum_halved(run: Run, step: Step) -> None:
    (optimizer,) = run.inside.trained.require_prepared().optimizers
    for state in optimizer.state.values():
        state["momentum_buffer"].mul_(0.5)


def momentum_forgotten(run: Run, step: Step) -> None:
    if step.number == 2:
        (optimizer,) = run.inside.trained.require_prepared().optimizers
        optimizer.state.clear()


@pytest.mark.parametrize(
    "write",
    [counted, uncounted, once, replaced, there_and_back, momentum_halved, momentum_forgotten],
)
@pytest.mark.parametrize("workers", [2, 3])
def test_what_the_script_writes_to_the_weights_counts_once_whoever_shares_them(
    write: Callable[[Run, Step], None], workers: int, tmp_path: Path
) -> None:
    expected, _ = ends(tmp_path / "serial", 1, split=False, told=write)
    found, journal = ends(tmp_path / "split", workers, True, told=write)
    assert found == expected
    assert "memory shared" in journal
    assert "rolled back" not in journal
    assert "healed" not in journal


class Reference:
    """A script's own reference to a tensor's memory, taken after a step, and written through after each later one."""

    def __init__(self, step: int, take: Callable[[Run], Any]) -> None:
        self._step, self._take = step, take
        self._taken: dict[int, Any] = {}

    def __call__(self, run: Run, step: Step) -> None:
        if step.number == self._step:
            self._taken[id(run)] = self._take(run)
        elif step.number > self._step:
            self._taken[id(run)] *= 0.9


def as_data(run: Run) -> torch.Tensor:
    return first_of(run).data


def as_array(run: Run) -> Any:
    return first_of(run).detach().numpy()


def of_the_state_dict(run: Run) -> torch.Tensor:
    (module,) = run.inside.trained.require_prepared().modules
    kept: torch.Tensor = next(iter(module.state_dict().values()))
    return kept


def of_the_momentum(run: Run) -> torch.Tensor:
    (optimizer,) = run.inside.trained.require_prepared().optimizers
    kept: torch.Tensor = optimizer.state[first_of(run)]["momentum_buffer"]
    return kept


TAKEN = [as_data, as_array, of_the_state_dict, of_the_momentum]


@pytest.mark.parametrize("take", TAKEN)
@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("workers", [2, 3])
def test_a_scripts_own_reference_to_memory_that_is_shared_stays_true(
    workers: int, step: int, take: Callable[[Run], Any], tmp_path: Path
) -> None:
    expected, _ = ends(tmp_path / "serial", 1, split=False, told=Reference(step, take))
    found, journal = ends(tmp_path / "split", workers, True, told=Reference(step, take))
    assert found == expected
    assert ("memory shared" in journal) == (step > 1 or take is of_the_momentum)


class Forked:
    """A process that the script forks, which looks at a weight when the others have gone on; as evaluation may do."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def __call__(self, run: Run, step: Step) -> None:
        if run.rank == 0 and step.number == 2:
            self._before = float(first_of(run).detach().flatten()[0])
            self._go, go = os.pipe()[::-1]
            self._told, told = os.pipe()
            self._pid = os.fork()
            if not self._pid:
                os.read(go, 1)
                os.write(told, struct.pack("d", float(first_of(run).detach().flatten()[0])))
                os._exit(0)
            os.close(go)
            os.close(told)
        elif run.rank == 0 and step.number == 3:
            os.write(self._go, b"!")
            self.seen.append((self._before, struct.unpack("d", os.read(self._told, 8))[0]))
            os.waitpid(self._pid, 0)
            os.close(self._go)
            os.close(self._told)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_process_that_the_script_forks_keeps_the_weights_of_that_moment(tmp_path: Path) -> None:
    expected, _ = ends(tmp_path / "serial", 1, split=False)
    forked = Forked()
    found, journal = ends(tmp_path / "split", 2, True, told=forked)
    assert found == expected
    assert "memory shared" in journal
    ((before, seen),) = forked.seen
    assert before == seen


def test_the_journal_names_the_parameter_that_cannot_move(tmp_path: Path) -> None:
    _, journal = ends(tmp_path / "split", 2, True, told=Reference(1, as_data))
    assert {line["why"] for line in journal["update not split"]} == {
        "something else than the model holds the memory of 0.weight, or what an optimizer keeps of it: a state_dict(), "
        ".data, a NumPy array, another process, or a loss with its graph"
    }


def of(run: Run) -> torch.optim.Optimizer:
    (optimizer,) = run.inside.trained.require_prepared().optimizers
    return optimizer


def hooked(run: Run, step: Step) -> None:
    """Weights decay in a hook that is registered when updates are split already."""
    if step.number == 2:
        weight = first_of(run)

        def decay(*_: Any) -> None:
            weight.data.mul_(0.9)

        of(run).register_step_pre_hook(decay)


def hooked_on_one_worker(run: Run, step: Step) -> None:
    """Only the main worker watches its optimizer, and changes nothing."""
    if step.number == 2 and run.is_main:
        of(run).register_step_post_hook(lambda *_: None)


def stepped_otherwise(run: Run, step: Step) -> None:
    if step.number == 2:
        optimizer, weight = of(run), first_of(run)
        make = optimizer.step

        def halved(*given: Any) -> None:
            make(*given)
            weight.data.mul_(0.9)

        optimizer.step = halved  # type: ignore[method-assign, assignment]


def regrouped(run: Run, step: Step) -> None:
    """A parameter moves to a group with another learning rate."""
    if step.number == 2:
        (group,) = of(run).param_groups
        *first, last = group["params"]
        group["params"] = first
        of(run).add_param_group({**group, "params": [last], "lr": group["lr"] * 0.5})


def cleared_twice(run: Run, step: Step) -> None:
    if step.number in (1, 2):
        of(run).state.clear()


def laid_out_otherwise(run: Run, step: Step) -> None:
    if step.number == 2:
        weight = first_of(run)
        weight.data = torch.empty(weight.shape[::-1]).t().copy_(weight.data)


def with_a_vector(run: Run, step: Step) -> None:
    """The script keeps something of its own beside what the optimizer keeps."""
    if step.number == 2:
        of(run).state[first_of(run)]["mine"] = torch.ones(3)


@pytest.mark.parametrize("is_elastic", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        hooked,
        hooked_on_one_worker,
        stepped_otherwise,
        regrouped,
        cleared_twice,
        laid_out_otherwise,
        with_a_vector,
    ],
)
def test_what_a_script_does_to_its_optimizer_later_counts(
    change: Callable[[Run, Step], None], is_elastic: bool, tmp_path: Path
) -> None:
    expected, _ = ends(tmp_path / "serial", 1, split=False, told=change)
    found, journal = ends(tmp_path / "split", 3, True, told=change, is_elastic=is_elastic)
    assert found == expected
    assert "rolled back" not in journal


def test_a_step_count_that_the_script_sets_back_is_set_back_for_all_slices() -> None:
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 256))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    weight.grad = torch.ones(256)
    optimizer.step()
    reference = optimizer.state[weight]["step"]
    places: dict[Kind | None, list[Tensor]] = {None: [weight.detach()]}
    for name in ("exp_avg", "exp_avg_sq"):
        places[name, torch.float32] = [optimizer.state[weight][name]]
    parts = Parts([optimizer], [weight], [[Slice(0, 0, 128)], [Slice(0, 128, 256)]], places)
    parts.publish()
    assert optimizer.state[weight]["step"] is reference
    alone = copy.deepcopy((weight, optimizer.state_dict()))
    reference.zero_()
    parts.begin([optimizer])
    for piece in range(2):
        parts.update([optimizer], piece)
    assert reference == 1
    other = torch.optim.Adam([alone[0]], lr=0.1)
    other.load_state_dict(alone[1])
    other.state[alone[0]]["step"].zero_()
    alone[0].grad = torch.ones(256)
    other.step()
    assert torch.equal(weight, alone[0])
