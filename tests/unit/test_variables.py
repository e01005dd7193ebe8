"""Each variable of ours is known, described and used; one that is none of ours is named with the one that is meant."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono
from unisono.settings.reading import KNOWN, unknown_variables

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
NO_SETTING = {"UNISONO_COMPLETE"}
"""How a shell asks."""


def names_in(*files: Path) -> set[str]:
    text = "\n".join(file.read_text() for file in files)
    return set(re.findall(r"\bUNISONO_[A-Z_]*[A-Z]\b", text))


def test_every_variable_of_the_sources_is_known_and_every_known_one_is_there() -> None:
    sources = [
        path for path in (ROOT / "src").rglob("*.py") if path.name != "variables.py" or path.parent.name != "unisono"
    ]
    assert names_in(*sources) - NO_SETTING == KNOWN


def test_the_guide_describes_every_variable() -> None:
    assert names_in(ROOT / "docs" / "guide" / "settings.md") - NO_SETTING >= KNOWN


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "UNISONO_SHARD",
            "UNISONO_SHARD is set in the environment, but Unisono has no such variable: did you mean UNISONO_SHARDS?",
        ),
        ("UNISONO_CHECKPOINTS_EVERY", "did you mean UNISONO_CHECKPOINT_EVERY?"),
        ("UNISONO_XYZZY", "no such variable; docs/guide/settings.md lists all variables"),
    ],
)
def test_a_variable_that_is_none_of_ours_is_named(name: str, words: str) -> None:
    [sentence] = unknown_variables([name, "UNISONO_SHARDS", "PATH", "unisono_x"])
    assert words in sentence


def test_a_run_names_it_as_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[Any]
) -> None:
    monkeypatch.setenv("UNISONO_SHARD", "16")
    monkeypatch.chdir(tmp_path)
    run = unisono.init(batch_size=8, shards=2)
    model = torch.nn.Linear(1, 1)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run.close()
    assert "unisono: UNISONO_SHARD is set in the environment" in capsys.readouterr().err
