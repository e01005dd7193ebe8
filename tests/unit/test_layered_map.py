"""A layered map is what a dict would be, and no map changes with the ones that are made from it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.membership.state.member_table import FEW, LayeredMap

pytestmark = pytest.mark.unit

NAMES = st.sampled_from([f"w{number}" for number in range(FEW + FEW // 2)])
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("put"), NAMES, st.integers()),
        st.tuples(st.just("drop"), NAMES, st.none()),
        st.tuples(
            st.just("update"),
            st.dictionaries(NAMES, st.integers()) | st.just({f"w{number}": -1 for number in range(FEW + 1)}),
            st.none(),
        ),
    )
)


@given(st.booleans(), CHANGES, st.lists(NAMES))
def test_whatever_is_done_to_it_it_has_the_entries_of_a_dict(
    has_many: bool, changes: list[tuple[str, object, object]], asked: list[str]
) -> None:
    begun = {f"w{number}": number for number in range(FEW + FEW // 2)} if has_many else {}
    found, wanted = LayeredMap(begun), dict(begun)
    kept = [(found, dict(wanted))]
    for verb, what, value in changes:
        if verb == "put":
            found, wanted = found.put(what, value), {**wanted, what: value}  # type: ignore[arg-type,dict-item]
        elif verb == "update":
            found, wanted = found.update(what), {**wanted, **what}  # type: ignore[arg-type,dict-item]
        else:
            found, wanted = found.drop(what), {name: one for name, one in wanted.items() if name != what}  # type: ignore[arg-type]
        kept.append((found, dict(wanted)))
    for each, entries in kept:
        assert each == entries == dict(each.items()) == each.plain()
        assert len(each) == len(entries)
        assert {*each} == {*entries}
        assert sorted(each.values()) == sorted(entries.values())
        assert each.get_many(asked) == [entries.get(name) for name in asked]
        assert [name in each for name in asked] == [name in entries for name in asked]
        assert each == LayeredMap(entries)
        assert hash(each) == hash(LayeredMap(entries))


def test_a_name_that_is_not_there_is_no_entry() -> None:
    found = LayeredMap({"w1": 1}).drop("w1")
    assert found.get("w1", 2) == 2
    assert found.drop("w1") is found
    with pytest.raises(KeyError, match="w1"):
        found["w1"]


def test_one_entry_of_many_is_changed_without_a_copy_of_the_others() -> None:
    many = LayeredMap({f"w{number}": 0 for number in range(10 * FEW)})
    one = many.put("w1", 1)
    assert one._below is many._below
    assert one.update(dict.fromkeys(many, 2))._below is not many._below
    for number in range(10 * FEW):
        one = one.put(f"w{number}", 3)
        assert len(one._above) <= FEW
    assert {*one.values()} == {3}
