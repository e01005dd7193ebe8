"""Which versions of other frameworks are supported: all that say so say the same, and what is missing is named."""

import re
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import unisono
from unisono.errors import JobError
from unisono.integrations.kit import OLDEST, require

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]


def test_what_is_installed_is_new_enough() -> None:
    for name in OLDEST:
        require(name, [name])


def test_guests_are_modules_as_well_as_attributes() -> None:
    guest = import_module("unisono.torchmetrics")
    assert guest is import_module("unisono.integrations.torchmetrics") is unisono.torchmetrics
    assert guest.__spec__ is not None
    assert guest.__spec__.name == "unisono.integrations.torchmetrics"
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'unisono\.nothing'"):
        import_module("unisono.nothing")


def test_what_is_missing_or_too_old_is_named_with_the_cure() -> None:
    with pytest.raises(JobError) as raised:
        require("transformers", ["transformers", "accelerate"], {"accelerate": "1.9.2"}.get)
    assert str(raised.value) == (
        "unisono.transformers needs transformers 5.6 or newer, which is not installed, and accelerate 1.10 or newer, "
        "and 1.9.2 is installed: pip install 'transformers>=5.6' 'accelerate>=1.10' (in a clone of Unisono: pip "
        "install -c constraints.txt '.[transformers]')"
    )


@pytest.mark.parametrize("found", ["1.10.0", "1.10", "1.11.0.dev0", "2.0rc1", "1.10.1+local"])
def test_versions_are_compared_as_numbers(found: str) -> None:
    require("accelerate", ["accelerate"], lambda _: found)


def test_the_oldest_versions_are_those_of_the_extras_and_of_what_is_tested() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    said = [one for extra in ("keras", "lightning", "accelerate", "transformers") for one in extras[extra]]
    asked = dict(one.split(">=") for one in said)
    assert asked == {name: OLDEST[name] for name in asked}
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    tested = dict(line.split("==") for line in lines if "==" in line)
    assert {name: tested[name] for name in OLDEST} == {name: f"{oldest}.0" for name, oldest in OLDEST.items()}


@pytest.mark.parametrize("name", ["Keras", "Lightning", "Transformers", "accelerate"])
def test_the_guide_says_the_same(name: str) -> None:
    text = (ROOT / "docs" / "guide" / f"{name.lower()}.md").read_text()
    assert re.findall(rf"{name} (\d+\.\d+) or newer", text) == [OLDEST[name.lower()]]


def test_the_page_of_all_guests_says_the_same() -> None:
    text = (ROOT / "docs" / "guide" / "frameworks.md").read_text()
    words = [f"{name} {OLDEST[name.lower()]}" for name in ("Keras", "Lightning", "Transformers", "accelerate")]
    assert f"oldest that are supported: {', '.join(words)}." in text
