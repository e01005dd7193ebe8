"""One table of settings: what script, command line and environment say of each comes from its row, and nowhere else."""

import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest

import unisono
from unisono.cli.options import TRAINING, Offered
from unisono.errors import JobError
from unisono.job import Job
from unisono.settings.reading import (
    GROUPS,
    OF_SCRIPTS,
    TABLE,
    settings_by_path,
    settings_from,
    specified_in,
    text_of,
    variables_of,
    with_defaults,
    words_of,
)
from unisono.settings.table import Arithmetic, Checkpoints, Settings

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]


def another(path: str) -> Any:
    """A value of a setting that is not its default."""
    setting = TABLE[path]
    kind = setting.plain
    if kind is bool:
        return not setting.default
    if kind is tuple:
        return ("one", "other")
    if get_origin(kind) is Literal:
        return next(each for each in get_args(kind) if each != setting.default)
    return {int: 2, float: 0.5}.get(kind, "10:12")


@pytest.mark.parametrize("path", TABLE)
def test_what_is_said_comes_through_options_and_variables_as_it_was(path: str) -> None:
    said, row = {path: another(path)}, TABLE[path].row
    settings = settings_by_path(said)
    assert specified_in(settings) == said
    if row.option:
        words = words_of(settings)
        assert words[0] in row.option.split("/")
        assert words[1:] in ([], [text_of(said[path])])
    if row.variable and not path.startswith("launch."):
        variables = variables_of(settings)
        assert specified_in(settings_from({}, variables, {})) == said
    else:
        assert variables_of(settings) == {}


@pytest.mark.parametrize("path", TABLE)
def test_a_default_that_is_said_goes_before_the_environment(path: str) -> None:
    group, _, name = path.rpartition(".")
    default, variable = TABLE[path].default, TABLE[path].row.variable
    if not variable or group not in OF_SCRIPTS or default in (None, ()):
        return
    environ = variables_of(settings_by_path({path: another(path)}))
    unsaid = settings_from({}, environ, {})
    said = settings_from({group: {name: default}}, environ, {})
    assert (getattr(getattr(unsaid, group), name), getattr(getattr(said, group), name)) == (another(path), default)


def test_names_of_the_environment_come_besides_those_of_the_script() -> None:
    environ = {"UNISONO_LOG_TO": " csv, wandb,", "UNISONO_POLICIES": "goodput"}
    settings = settings_from({"policies": ["scaling"], "records": {"loggers": ["mlflow"]}}, environ, {})
    assert (settings.records.loggers, settings.policies) == (("mlflow", "csv", "wandb"), ("scaling", "goodput"))


def test_a_variable_that_cannot_be_read_is_refused_though_the_script_says_something_else() -> None:
    with pytest.raises(JobError, match="UNISONO_THREADS='two' in the environment: needs a whole number"):
        settings_from({"arithmetic": {"threads": 2}}, {"UNISONO_THREADS": "two"}, {})


@pytest.mark.parametrize("path", [path for path, setting in TABLE.items() if setting.row.least is not None])
def test_a_number_out_of_range_is_refused_by_the_name_that_the_person_has_used(path: str) -> None:
    setting = TABLE[path]
    wrong = (setting.row.least or 0) - 1
    if setting.row.option:
        with pytest.raises(JobError, match=f"^{setting.row.option} {text_of(wrong)}: needs a .*number of at least"):
            settings_by_path({path: wrong})
    if setting.row.variable:
        text = text_of(wrong)
        with pytest.raises(JobError, match=f"^{setting.row.variable}='{text}' in the environment: needs a .*number"):
            settings_from({}, {setting.row.variable: text}, {})


def test_every_setting_with_an_option_is_an_option_of_a_training() -> None:
    assert {path for path, setting in TABLE.items() if setting.row.option} == set(TRAINING)
    assert len(Offered(TRAINING).parameters) == len(TRAINING)


def test_a_setting_has_one_home_and_no_name_twice() -> None:
    for of in ("variable", "option"):
        names = [getattr(setting.row, of) for setting in TABLE.values() if getattr(setting.row, of)]
        assert len(names) == len(set(names))
    assert set(GROUPS) == {*OF_SCRIPTS, "launch", "special"}


def test_groups_are_frozen_values_that_know_what_was_said() -> None:
    said = Checkpoints(every=5)
    assert (said.every, said.keep, set(said.specified)) == (5, 3, {"every"})
    assert said == Checkpoints(every=5, keep=3)
    assert Settings().specified == frozenset()
    with pytest.raises(AttributeError):
        said.every = 6  # type: ignore[misc]
    with pytest.raises(JobError, match="arithmetic.thread=2: there is no such argument; did you mean threads"):
        Arithmetic(thread=2)  # type: ignore[call-arg]


def test_a_number_of_numpy_for_a_decimal_one_is_kept_as_one_that_json_has() -> None:
    for number in (np.float32(2.5), np.int64(3), 3):
        assert type(Arithmetic(bucket_mb=number).bucket_mb) is float  # type: ignore[arg-type]


def test_a_strategy_without_a_name_is_refused() -> None:
    with pytest.raises(JobError, match="strategy=''"):
        unisono.init(batch_size=8, strategy="")


def test_a_job_has_the_fields_of_the_table_and_its_ranges() -> None:
    assert set(inspect.signature(Job).parameters) - {"batch_size", "shards", "seed"} == set(
        inspect.signature(Arithmetic).parameters
    )
    with pytest.raises(JobError, match="threads=0: needs a whole number of at least 1 and at most 65536"):
        Job.create(batch_size=32, threads=0)


def test_a_frameworks_defaults_hold_where_nobody_says_anything() -> None:
    defaults = {"seed": 42, "shards": 4, "arithmetic.precision": "fp16"}
    assert with_defaults({}, defaults, {}) == {"seed": 42, "shards": 4, "arithmetic": {"precision": "fp16"}}
    said = {"seed": 1, "arithmetic": Arithmetic(precision="bf16", threads=2)}
    assert with_defaults(said, defaults, {"UNISONO_SHARDS": "2"}) == {
        "seed": 1,
        "arithmetic": {"precision": "bf16", "threads": 2},
    }


def test_groups_are_at_the_door() -> None:
    for name in OF_SCRIPTS:
        assert getattr(unisono, GROUPS[name].__name__) is GROUPS[name]


def test_the_tables_of_the_guide_are_those_of_the_table() -> None:
    path = ROOT / "docs" / "settings_tables.py"
    spec = importlib.util.spec_from_file_location("settings_tables", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = module.PAGE.read_text()
    assert module.written(page) == page, "python docs/settings_tables.py writes them"


def test_reading_options_loads_neither_torch_nor_numpy() -> None:
    code = "import sys, unisono.cli.run_command; raise SystemExit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
