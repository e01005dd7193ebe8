"""The log of samples, and the check that each was used exactly once: it finds what is missing, doubled or foreign."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import unisono
from unisono_lab.faults.samples import Samples, problems

pytestmark = pytest.mark.unit

SHARDS, PER_SHARD, STEPS = 2, 3, 4  # two steps make an epoch of twelve samples


def computed(step: int, generation: int = 1, call: int = 0, shards: Any = None, cut: int = SHARDS) -> dict[str, Any]:
    epoch, first = step // 2, (step % 2) * SHARDS * PER_SHARD
    own = {shard: [first + shard * PER_SHARD + place for place in range(PER_SHARD)] for shard in range(SHARDS)}
    line = {"computed": step, "call": call, "generation": generation, "loop": 0, "samples": 12, "per_epoch": 12}
    return {**line, "epoch": epoch, "cut": cut, "shards": {str(shard): used for shard, used in (shards or own).items()}}


def committed(step: int, generation: int = 1, call: int = 0) -> dict[str, Any]:
    return {"committed": step, "call": call, "generation": generation}


def whole() -> list[dict[str, Any]]:
    return [line for step in range(STEPS) for line in (computed(step), committed(step))]


def found(lines: list[dict[str, Any]], serial: list[dict[str, Any]] | None = None) -> list[str]:
    alone = None if serial is None else of(serial)
    return problems(of(lines), STEPS, SHARDS, alone)


def of(lines: list[dict[str, Any]]) -> Samples:
    return Samples.of(lines)


def test_nothing_is_wrong_with_a_run_that_used_everything_once() -> None:
    assert found(whole()) == []
    assert found(whole(), whole()) == []


def test_two_workers_share_the_shards_of_a_step() -> None:
    lines = whole()
    lines[0:1] = [computed(0, shards={0: [0, 1, 2]}), computed(0, shards={1: [3, 4, 5]})]
    assert found(lines) == []


def test_a_batch_that_is_cut_finer_has_all_of_its_shards() -> None:
    lines, finer = whole(), {0: [0, 1], 1: [2, 3], 2: [4], 3: [5]}
    lines[0] = computed(0, shards=finer, cut=4)
    assert found(lines) == []
    lines[0] = computed(0, shards={**finer, 2: [4, 5], 3: []}, cut=6)
    assert found(lines) == ["step 0 in generation 1: shards 4, 5 computed by nobody"]


@pytest.mark.parametrize("cuts", [(3, 3), (4, 2), (2, 4)])
def test_workers_that_cut_a_batch_differently_or_not_into_a_multiple_are_found(cuts: tuple[int, int]) -> None:
    lines = whole()
    lines[0:1] = [
        computed(0, shards={0: [0, 1, 2]}, cut=cuts[0]),
        computed(0, shards={1: [3, 4, 5]}, cut=cuts[1]),
    ]
    assert f"cut into {' and '.join(map(str, sorted({*cuts})))} shards, and the job has 2" in found(lines)[0]


def test_a_step_that_nobody_committed_is_missing() -> None:
    assert found(whole()[:-1])[0] == "step 3 was never committed"


def test_a_step_too_many_is_found() -> None:
    assert "step 4 was committed, but the job has 4 steps" in found([*whole(), computed(4), committed(4)])


def test_a_shard_that_nobody_computed_is_found() -> None:
    lines = whole()
    lines[2] = computed(1, shards={0: [6, 7, 8]})
    assert found(lines) == [
        "step 1 in generation 1: shards 1 computed by nobody",
        "epoch 0: 3 samples not used, 9, 10, 11 among them",
    ]


def test_a_shard_that_two_workers_computed_is_found() -> None:
    lines = [*whole(), computed(1, shards={0: [6, 7, 8]})]
    assert found(lines)[0] == "step 1 in generation 1: shards 0 computed more than once"
    assert "epoch 0: sample 6 used 2 times, in steps 1, 1" in found(lines)


def test_a_missing_a_doubled_and_a_foreign_sample_are_found() -> None:
    lines = whole()
    lines[0] = computed(0, shards={0: [0, 1, 3], 1: [3, 4, 99]})
    for serial in (None, whole()):
        words = "\n".join(found(lines, serial))
        assert "sample 3 used 2 times, in steps 0, 0" in words
        assert "samples 99 used" in words
        assert "2, 5" in words
    assert "samples 2, 5 not used" in "\n".join(found(lines, whole()))


def test_samples_in_other_shards_are_only_seen_beside_the_serial_run() -> None:
    lines = whole()
    lines[0] = computed(0, shards={1: [0, 1, 2], 0: [3, 4, 5]})
    assert found(lines) == []
    assert found(lines, whole()) == [
        "step 0: the samples are those of the serial run, but in other shards or another order"
    ]


def test_what_is_computed_again_after_a_loss_counts_once() -> None:
    lines = [computed(0), committed(0), computed(1), computed(1, 2), committed(1, 2)]
    lines += [computed(2, 2), committed(2, 2), computed(3, 2), committed(3, 2)]
    assert found(lines) == []
    assert of(lines).repeated == 1


def test_after_a_checkpoint_the_newest_generation_counts() -> None:
    lines = [*whole(), *(line for step in (2, 3) for line in (computed(step, 2), committed(step, 2)))]
    assert found(lines) == []
    lines[4] = computed(2, shards={0: [99], 1: [98]})  # of the lineage that was given up
    assert found(lines) == []


def test_a_step_that_follows_one_of_a_later_generation_is_found() -> None:
    lines = [*whole(), computed(2, 2), committed(2, 2)]
    assert found(lines) == ["step 2 was committed in generation 2, and step 3, which follows, in 1"]


def test_each_call_of_a_step_is_looked_at_and_its_samples_count_once() -> None:
    lines = whole() + [line for step in range(STEPS) for line in (computed(step, call=1), committed(step, call=1))]
    assert found(lines) == []
    assert found([*lines[:-2], computed(3, call=1, shards={0: [6, 7, 8]}), committed(3, call=1)]) == [
        "step 3, call 1 in generation 1: shards 1 computed by nobody"
    ]


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    lines = [*map(json.dumps, whole()), '{"computed":4,"ca']
    (tmp_path / "samples" / "rank-0.jsonl").write_text("\n".join(lines))
    assert problems(Samples.read(tmp_path), STEPS, SHARDS) == []


def test_a_run_writes_down_what_it_used(tmp_path: Path, one_worker: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_SAMPLES", "1")
    with unisono.init(batch_size=8, shards=4, run_dir=tmp_path / "run") as run:
        model = nn.Linear(3, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        data = TensorDataset(torch.randn(30, 3), torch.arange(30))
        read: list[list[int]] = []
        for step in run.steps(data, epochs=2):
            step.run(lambda model, batch: model(batch[0]).square().mean())
            read.append([int(sample) for shard in step.shards for sample in shard[1]])
        for step in run.steps(data, drop_last=True, shuffle=False):
            step.run(lambda model, batch: model(batch[0]).square().mean())
            read.append([int(sample) for shard in step.shards for sample in shard[1]])
    samples = Samples.read(tmp_path / "run")
    assert problems(samples, 11, 4) == []
    wrote = {one.place.step: [sample for shard in one.shards.values() for sample in shard] for one in samples.computed}
    assert [wrote[step] for step in sorted(wrote)] == read


def test_a_run_that_nobody_checks_writes_nothing_down(tmp_path: Path, one_worker: None) -> None:
    with unisono.init(batch_size=8, shards=4, run_dir=tmp_path / "run") as run:
        assert not (run.dir / "samples").exists()
