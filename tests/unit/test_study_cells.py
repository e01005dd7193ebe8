"""Which runs a study is made of, in which order, and how long they will take."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from unisono.errors import JobError
from unisono_lab.study.measuring import Measurement, text_digest
from unisono_lab.study.study_folder import Kind, kinds_of, modes_of, planned

pytestmark = pytest.mark.unit

KINDS = [Kind("baseline", 1), Kind("baseline", 2), Kind("strong", 1), Kind("strong", 2), Kind("weak", 2)]


def test_one_worker_is_measured_once_for_both_tables_and_stands_in_both() -> None:
    assert kinds_of([1, 2], ["strong", "weak"], baselines=[1, 2]) == KINDS
    assert modes_of(Kind("strong", 1), ["strong", "weak"]) == ["strong", "weak"]
    assert modes_of(Kind("strong", 2), ["strong", "weak"]) == ["strong"]
    assert kinds_of([1, 2], ["weak"]) == [Kind("weak", 1), Kind("weak", 2)]


def test_every_kind_comes_once_before_any_comes_again() -> None:
    cells = planned(KINDS, repeats=6, seed=3)
    assert len(cells) == len(set(cells)) == 30
    for repeat in range(6):
        part = cells[5 * repeat : 5 * repeat + 5]
        assert {cell.kind for cell in part} == set(KINDS)
        assert {cell.repeat for cell in part} == {repeat}


def test_the_order_is_another_in_each_repeat_and_follows_from_the_seed() -> None:
    def orders(seed: int) -> list[tuple[Kind, ...]]:
        cells = planned(KINDS, 8, seed)
        return [tuple(cell.kind for cell in cells[5 * number : 5 * number + 5]) for number in range(8)]

    assert len(set(orders(0))) > 3
    assert orders(0) == orders(0)
    assert orders(0) != orders(1)


def test_more_repeats_leave_the_order_of_the_first_ones_as_it_was() -> None:
    assert planned(KINDS, 7, seed=0)[:15] == planned(KINDS, 3, seed=0)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"workers": (0,)}, "--workers 0"),
        ({"workers": (2, 2)}, "needs different numbers"),
        ({"repeats": 0}, "--repeats 0"),
        ({"steps": 5}, "--steps 5: the first 5 are left out"),
        ({"steps": 9, "epochs": 1}, "use only one of them"),
        ({"warmup_steps": -1}, "--warmup -1"),
        ({"label": "=1"}, "--label =1: begins with"),
    ],
)
def test_what_cannot_work_is_refused_with_its_option(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=words):
        Measurement(**{"script": ("train.py",), "workers": (1, 2), **wrong}).check()


def test_a_warm_up_of_the_persons_own_is_inherited() -> None:
    own = Measurement(("train.py",), (1, 2)).variables(Kind("weak", 2), {"UNISONO_BATCH_SCALE_WARMUP": "3"})
    assert "UNISONO_BATCH_SCALE_WARMUP" not in own


def test_what_a_shell_has_set_of_a_studys_own_variables_is_kept_from_its_workers() -> None:
    told = Measurement(("train.py",), (1, 2)).variables(
        Kind("strong", 2), {"UNISONO_BATCH_SCALE": "2", "UNISONO_STOP_AFTER": "9"}
    )
    assert (told["UNISONO_BATCH_SCALE"], told["UNISONO_STOP_AFTER"]) == ("", "")


def settings(script: Sequence[str] = ("train.py",), environ: dict[str, str] | None = None, **more: Any) -> Any:
    return Measurement(**{"script": tuple(script), "workers": (1, 2), **more}).settings(environ or {}, cores=2)


def test_figures_belong_together_as_long_as_nothing_changes_that_they_depend_on(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("1")
    before = settings([str(script)])
    assert settings([str(script)], workers=(1, 4), repeats=9, seed=2, warmup_steps=1) == before
    for changed in ({"steps": 20}, {"epochs": 2}, {"baseline": ("plain.py",)}, {"threads": 2}, {"tuned": False}):
        assert settings([str(script)], **changed) != before
    assert settings([str(script), "--lr", "1"]) != before
    assert settings([str(script)], {"UNISONO_TRANSPORT": "sockets"}) != before
    script.write_text("2")
    assert settings([str(script)]) != before


def test_of_a_module_all_files_of_its_package_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "measured_package").mkdir()
    for name in ("__init__", "train", "model"):
        (tmp_path / "measured_package" / f"{name}.py").write_text(name)
    monkeypatch.chdir(tmp_path)
    before = text_digest(["-m", "measured_package.train"])
    (tmp_path / "measured_package" / "model.py").write_text("another")
    assert text_digest(["-m", "measured_package.train"]) != before
