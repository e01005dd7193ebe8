"""Whether a fork of a process would be the program that somebody asks for."""

import pytest

from unisono.launch.forkserver.request import Wish, circumstances

pytestmark = pytest.mark.unit

FOUND = Wish({"HOME": "/home/a", "OMP_NUM_THREADS": "1"}, {"Umask": "0022", "limits": "none"})


def wish(**variables: str) -> Wish:
    return Wish({**FOUND.environment, **variables}, FOUND.circumstances)


def test_what_is_the_same_in_all_is_no_obstacle() -> None:
    assert wish().obstacle(FOUND) == ""


def test_our_own_variables_and_those_named_may_differ() -> None:
    varied = wish(UNISONO_SHARDS="4", EPOCHS="3", SHLVL="2")
    assert varied.obstacle(FOUND, {"EPOCHS"}) == ""
    assert FOUND.obstacle(varied, {"EPOCHS"}) == ""


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (wish(EPOCHS="3"), "the variable EPOCHS differs"),
        (wish(OMP_NUM_THREADS="2"), "the variable OMP_NUM_THREADS differs"),
        (wish(MY_UNISONO_SHARDS="2"), "the variable MY_UNISONO_SHARDS differs"),
        (Wish({"HOME": "/home/a"}, FOUND.circumstances), "the variable OMP_NUM_THREADS differs"),
        (Wish(FOUND.environment, {**FOUND.circumstances, "Umask": "0077"}), "Umask differs"),
        (Wish(FOUND.environment, {"Umask": "0022"}), "limits differs"),
        (Wish(FOUND.environment, {**FOUND.circumstances, "root": "/"}), "root differs"),
    ],
)
def test_anything_else_that_differs_on_either_side_is_named(other: Wish, why: str) -> None:
    assert other.obstacle(FOUND) == why
    assert FOUND.obstacle(other) == why


def test_variables_that_libraries_have_set_are_added_unless_the_launcher_has_them() -> None:
    added = wish(HOME="/home/b").with_variables({"HOME": "/", "KMP": "1"})
    assert added.environment == {"HOME": "/home/b", "OMP_NUM_THREADS": "1", "KMP": "1"}


def test_a_wish_travels_unchanged() -> None:
    sent = Wish({"A": "1"}, {"b": "2"}, ("unisono", "run"), (0, 1, 2, 7), "/here", (1, 10))
    assert Wish.from_json(sent.to_json()) == sent


def test_where_nothing_is_set_the_working_folder_is_no_part_of_the_module_path() -> None:
    paths = {}
    for name in ("one", "other"):
        for given in ("", "modules", "/modules"):
            environment = {"PYTHONPATH": given} if given else {}
            paths[name, given] = circumstances(environment, f"/{name}")["module path"]
    assert paths["one", ""] == paths["other", ""]
    assert paths["one", "/modules"] == paths["other", "/modules"]
    assert paths["one", "modules"] != paths["other", "modules"]
