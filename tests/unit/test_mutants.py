"""The list of mistakes that `make mutants` makes is true of today's sources."""

from collections import Counter
from pathlib import Path

import pytest

from mutants.everything import MUTANTS
from mutants.mutant import Mutant

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.breaks.replace(" ", "-")[:60])
def test_a_mistake_on_the_list_can_be_made_at_one_place_in_the_sources(mutant: Mutant) -> None:
    assert mutant.found(ROOT) == 1
    assert mutant.old != mutant.new
    assert all((ROOT / test).is_file() for test in mutant.tests)
    changed = mutant.path(ROOT).read_text().replace(mutant.old, mutant.new)
    compile(changed, mutant.file, "exec")


def test_there_are_many_and_each_is_told_in_words_of_its_own() -> None:
    assert len(MUTANTS) >= 30
    assert Counter(mutant.breaks for mutant in MUTANTS).most_common(1)[0][1] == 1
