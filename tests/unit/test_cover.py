"""Who has to go so that all who stay reach each other."""

import random
from itertools import chain, combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.membership.state import cover
from unisono.membership.state.cover import lightest_cover

pytestmark = pytest.mark.unit

NAMES = "abcdefgh"

Pairs = list[tuple[str, str]]


def by_trying_all(pairs: Pairs, weights: dict[str, int]) -> frozenset[str]:
    names = sorted({name for pair in pairs for name in pair})
    sets = chain.from_iterable(combinations(names, size) for size in range(len(names) + 1))
    covers = (frozenset(each) for each in sets if covered(pairs, frozenset(each)))
    return min(covers, key=lambda each: sum(weights[name] for name in each))


def covered(pairs: Pairs, gone: frozenset[str]) -> bool:
    return all(one in gone or other in gone for one, other in pairs)


def distinct(sizes: list[int]) -> dict[str, int]:
    """Weights of which no two sums are the same."""
    return {name: (size << 8) + (1 << place) for place, (name, size) in enumerate(zip(NAMES, sizes, strict=True))}


@given(
    st.sets(st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)).filter(lambda pair: pair[0] != pair[1])),
    st.lists(st.integers(0, 4), min_size=8, max_size=8),
)
def test_the_lightest_set_goes_as_trying_all_sets_finds_it(found: set[tuple[str, str]], sizes: list[int]) -> None:
    pairs, weights = sorted(found), distinct(sizes)
    assert lightest_cover(pairs, weights) == by_trying_all(pairs, weights)
    assert lightest_cover([(other, one) for one, other in reversed(pairs)], weights) == by_trying_all(pairs, weights)


def test_of_a_pair_the_lighter_one_goes_and_where_all_reach_each_other_nobody() -> None:
    assert lightest_cover([("a", "b")], {"a": 3, "b": 2}) == {"b"}
    assert lightest_cover([], {}) == frozenset()


@pytest.mark.parametrize("sizes", [(100, 101), (40, 41, 42), (1, 300), (20, 20, 20, 21)])
def test_a_network_that_falls_apart_keeps_its_largest_part_however_many_hosts_it_has(sizes: tuple[int, ...]) -> None:
    parts = [[f"{number:03}-{part}" for number in range(size)] for part, size in enumerate(sizes)]
    pairs = [pair for here, there in combinations(parts, 2) for pair in product(here, there)]
    weights = dict.fromkeys(chain(*parts), 1)
    assert lightest_cover(pairs, weights) == frozenset(chain(*parts[:-1]))


def test_pairs_that_have_nothing_to_do_with_each_other_are_resolved_one_by_one() -> None:
    pairs = [(f"light{number}", f"heavy{number}") for number in range(500)]
    weights = {name: 1 + name.startswith("heavy") for pair in pairs for name in pair}
    assert lightest_cover(pairs, weights) == {light for light, _ in pairs}


def test_a_search_that_would_take_for_ever_ends_with_a_cover_of_which_nobody_could_stay() -> None:
    names = [f"n{number:03}" for number in range(120)]
    chance = random.Random(0)
    pairs = [pair for pair in combinations(names, 2) if chance.random() < 0.1]
    search = cover._Search(cover._graph(pairs), dict.fromkeys(names, 1), budget=300)
    gone = search.best
    assert gone == lightest_cover(pairs, dict.fromkeys(names, 1), budget=300)
    assert covered(pairs, gone)
    assert not any(covered(pairs, gone - {name}) for name in gone)
    looked = 300 - search._left
    assert looked <= 2 * 300 + 200
