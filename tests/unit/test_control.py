import math
from collections.abc import Sequence

import pytest
import torch

from unisono.errors import LossError
from unisono.plan.split import Split
from unisono.train.step.word import MAX_METRICS, ControlWord, ControlWords, Field, ShardReport, StepReport, signature_of

pytestmark = pytest.mark.unit

FIELDS = [
    Field("leave"),
    Field("digest", "Q", "each"),
    Field("words", "Q", "sum", modulus=2**64),
    Field("seconds", "d", "each"),
]
REPORTS = [ShardReport(1.0 + shard / 3, 16.0 - shard, {"b": shard / 7, "a": -1.0}) for shard in range(8)]


def opened(
    workers: int,
    reports: Sequence[ShardReport] = REPORTS,
    used: Sequence[Sequence[bool]] | None = None,
    leaving: int | None = None,
) -> ControlWords:
    """What the workers read when each has packed the reports of its shards."""
    split = Split.even(len(reports), workers)
    bits = used or [[True, False, True]] * workers
    word = ControlWord(split, len(bits[0]), FIELDS)
    words = torch.stack(
        [
            word.pack(
                [rank == leaving, rank + 2**63, 2**64 - 1 - rank, rank / 3],
                [reports[shard] for shard in split.of(rank)],
                bits[rank],
            )
            for rank in range(workers)
        ]
    )
    assert words.shape == (workers, word.length)
    return word.open(words)


def told(
    workers: int, reports: Sequence[ShardReport] = REPORTS, used: Sequence[Sequence[bool]] | None = None
) -> StepReport:
    """The result of the step."""
    return opened(workers, reports, used).read(["a", "b"])


def test_every_number_of_workers_reads_the_same_to_the_last_bit() -> None:
    alone = told(1)
    assert all(told(workers) == alone for workers in (2, 3, 5, 8))
    assert alone.loss == pytest.approx(sum(r.loss * r.weight for r in REPORTS) / sum(r.weight for r in REPORTS))
    assert alone.metrics["a"] == -1.0


def test_a_tensor_counts_as_used_if_any_worker_used_it() -> None:
    used = [[False, False, True], [False, True, True]]
    assert told(2, used=used).used == (False, True, True)


def test_workers_hear_of_each_field_what_it_says_of_how_values_combine() -> None:
    heard = [field.of_workers(told) for field, told in zip(FIELDS, opened(3, leaving=1).values, strict=True)]
    assert heard == [True, (2**63, 2**63 + 1, 2**63 + 2), 2**64 - 6, (0.0, 1 / 3, 2 / 3)]
    assert not FIELDS[0].of_workers(opened(3).values[0])


def test_an_empty_shard_has_no_part_in_the_means() -> None:
    reports = [ShardReport(2.0, 3.0, {"a": 1.0, "b": 1.0}), ShardReport(math.nan, 0.0)]
    assert told(2, reports).loss == 2.0


def test_a_loss_that_is_nan_is_seen_by_everybody_with_its_shard() -> None:
    reports = [*REPORTS[:5], ShardReport(math.nan, 1.0, {"a": 0.0, "b": 0.0}), *REPORTS[6:]]
    assert [math.isnan(report.loss) for report in told(3, reports).shards] == [False] * 5 + [True] + [False] * 2


def test_shards_that_log_different_metrics_are_refused() -> None:
    with pytest.raises(LossError, match=r"shard 1 logged other metrics than this worker's shards \(a, b\)"):
        told(2, [REPORTS[0], ShardReport(1.0, 1.0, {"a": 1.0})])


def test_more_metrics_than_fit_are_refused() -> None:
    many = {f"metric {number}": 0.0 for number in range(MAX_METRICS + 1)}
    with pytest.raises(LossError, match="at most 16"):
        told(1, [ShardReport(1.0, 1.0, many)])


def test_a_worker_with_nothing_but_empty_shards_is_recognised() -> None:
    split = Split.even(2, 2)
    word = ControlWord(split, 0, [])
    words = torch.stack([word.pack([], [REPORTS[0]], []), word.pack([], [ShardReport()], [])])
    assert word.open(words).has_silent_worker(split)
    assert not word.open(words[[0, 0]]).has_silent_worker(split)


def test_which_metrics_were_logged_is_told_by_the_first_shard_that_is_not_empty() -> None:
    split = Split.even(2, 2)
    word = ControlWord(split, 0, [])
    empty, full, other = (word.pack([], [one], []) for one in (ShardReport(), REPORTS[0], ShardReport(0.0, 1.0)))
    pairs = [[empty, full], [full, other], [other, full], [empty, empty]]
    logged = [word.open(torch.stack(pair)).logged for pair in pairs]
    assert logged == [signature_of(("a", "b")), signature_of(("a", "b")), signature_of(()), None]
