"""Whether a fork of a process would be the program that somebody asks for."""

from importlib.util import find_spec

import pytest

from forks.request import ForkRequest, process_attributes
from forks.shared_server import LOADED

pytestmark = pytest.mark.unit

FOUND = ForkRequest({"HOME": "/home/a", "OMP_NUM_THREADS": "1"}, {"Umask": "0022", "limits": "none"})


def request(**variables: str) -> ForkRequest:
    return ForkRequest({**FOUND.environment, **variables}, FOUND.process_attributes)


def test_what_is_the_same_in_all_is_no_obstacle() -> None:
    assert request().obstacle(FOUND) == ""


def test_our_own_variables_and_those_named_may_differ() -> None:
    varied = request(UNISONO_SHARDS="4", EPOCHS="3", SHLVL="2")
    assert varied.obstacle(FOUND, {"EPOCHS"}) == ""
    assert FOUND.obstacle(varied, {"EPOCHS"}) == ""


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (request(EPOCHS="3"), "the variable EPOCHS differs"),
        (request(OMP_NUM_THREADS="2"), "the variable OMP_NUM_THREADS differs"),
        (request(MY_UNISONO_SHARDS="2"), "the variable MY_UNISONO_SHARDS differs"),
        (ForkRequest({"HOME": "/home/a"}, FOUND.process_attributes), "the variable OMP_NUM_THREADS differs"),
        (ForkRequest(FOUND.environment, {**FOUND.process_attributes, "Umask": "0077"}), "Umask differs"),
        (ForkRequest(FOUND.environment, {"Umask": "0022"}), "limits differs"),
        (ForkRequest(FOUND.environment, {**FOUND.process_attributes, "root": "/"}), "root differs"),
    ],
)
def test_anything_else_that_differs_on_either_side_is_named(other: ForkRequest, why: str) -> None:
    assert other.obstacle(FOUND) == why
    assert FOUND.obstacle(other) == why


def test_variables_that_libraries_have_set_are_added_unless_the_launcher_has_them() -> None:
    added = request(HOME="/home/b").with_variables({"HOME": "/", "KMP": "1"})
    assert added.environment == {"HOME": "/home/b", "OMP_NUM_THREADS": "1", "KMP": "1"}


def test_a_wish_travels_unchanged() -> None:
    sent = ForkRequest({"A": "1"}, {"b": "2"}, ("unisono", "run"), (0, 1, 2, 7), "/here", (1, 10))
    assert ForkRequest.from_json(sent.to_json()) == sent


def test_where_nothing_is_set_the_working_folder_is_no_part_of_the_module_path() -> None:
    paths = {}
    for name in ("one", "other"):
        for given in ("", "modules", "/modules"):
            environment = {"PYTHONPATH": given} if given else {}
            paths[name, given] = process_attributes(environment, f"/{name}")["module path"]
    assert paths["one", ""] == paths["other", ""]
    assert paths["one", "/modules"] == paths["other", "/modules"]
    assert paths["one", "modules"] != paths["other", "modules"]


@pytest.mark.parametrize("module", [module for modules in LOADED.values() for module in modules])
def test_what_a_shared_fork_server_loads_is_there(module: str) -> None:
    assert find_spec(module) is not None  # without it no program is forked: each loads all that it needs itself
