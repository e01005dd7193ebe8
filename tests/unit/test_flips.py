"""Bits flip at drawn places and moments of small trainings: none ends in other weights than the serial run."""

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.flip_campaign import ANY_TIME, PLACES, campaign, drawn

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

SEED, COUNT = 0, 40


def test_the_same_seed_draws_the_same_flips_at_all_places() -> None:
    flips = drawn(SEED, COUNT)
    assert flips == drawn(SEED, COUNT) != drawn(SEED + 1, COUNT)
    assert {one.place for one in flips} == set(PLACES)
    assert {(one.model, one.workers) for one in flips} == {(m, w) for m in ("digits", "char_lm") for w in (1, 2, 3)}
    assert {one.is_elastic for one in flips} == {False, True}


def test_flips_at_any_time_strike_one_worker_once(torch_settings_restored: None) -> None:
    pytest.importorskip("sklearn")
    results = campaign(drawn(SEED, 3, any_time=True))
    assert {(one.flip.place, one.flip.workers) for one in results} == {(ANY_TIME, 1)}
    assert not [one for one in results if one.verdict == "missed"]


@pytest.mark.slow
def test_no_flipped_bit_ends_in_other_weights(torch_settings_restored: None, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    results = campaign(drawn(SEED, COUNT))
    assert [(one.flip, one.words) for one in results if one.verdict == "wrong"] == []
    assert Counter(one.verdict for one in results)["right"] > COUNT / 2
