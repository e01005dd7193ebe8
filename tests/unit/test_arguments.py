"""An argument of another type than its annotation says is refused by name, before anything is opened."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import unisono
from said import PATHS, grouped
from unisono.arguments import require_parameters
from unisono.errors import JobError
from unisono.integrations.kit import run_for
from unisono.received import short
from unisono.settings.groups import settings_of
from unisono.settings.reading import OF_SCRIPTS, TABLE, require_none_removed
from unisono.settings.table import Settings
from unisono.train.config.run_config import KINDS
from unisono.train.step.step import Clip

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_worker", "torch_settings_restored")]

WRONG = {
    "batch_size": ("many", 1.5, True, np.int64(16)),
    "seed": (1.5, "1"),
    "shards": ("four", 1.5),
    "threads": ("two",),
    "reduction": ("loose", 1),
    "precision": ("bf8",),
    "compression": (True,),
    "bucket_mb": ("x", True),
    "deterministic": ("yes", 1),
    "on_nan": ("go on",),
    "device": (1.5, True, [], b"cpu"),
    "transport": ("pigeon", 5),
    "topology": ("mesh", ["ring"]),
    "overlap": ("yes", 1),
    "devices_per_worker": ("two", 1.5, True),
    "run_dir": (5, b"a", True),
    "checkpoint_every": ("often", 1.5, True),
    "keep": ("all", None),
    "allow_job_change": ("yes", 1, None),
    "insecure_data": ("yes", 1, None),
    "failure_timeout_s": ("long", None, True),
    "verify_every": ("often", 1.5),
    "checks": ("few", 1),
    "audit": ("half", []),
    "balance": ("fair", None),
    "monitor": ("all", None, 1.5),
    "strict": ("yes", 1),
    "policies": (5, "ada-scale", [5], unisono.ScalingPolicy),
    "strategy": (5, unisono.AllReduce),
    "loggers": (5, "csv"),
    "numerics": ("exact", 1),
    "timeline": ("yes", 1, None),
    "profile": (5, ["1:2"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_argument_of_another_type_is_refused_with_its_name_and_value_and_what_is_expected(name: str) -> None:
    for value in WRONG[name]:
        said: dict[str, Any] = {"batch_size": 32, "device": "cpu", name: value}
        with pytest.raises(JobError) as refused:
            unisono.init(**grouped(said))
        assert str(refused.value).startswith(f"{PATHS[name]}={short(value)}: needs ")


def test_a_number_that_is_too_large_is_refused_with_the_largest_also_where_nobody_thinks_of_it() -> None:
    wrong: list[dict[str, Any]] = [{"batch_size": 2**70}, {"seed": 2**70, "batch_size": 32}]
    for said in wrong:
        with pytest.raises(JobError, match=f"needs a whole number of .*at most {2**63 - 1}$"):
            unisono.init(**said)
    with pytest.raises(JobError, match=f"needs a whole number of at least -{2**63}$"):
        unisono.init(seed=-(2**70))
    with pytest.raises(JobError, match="batch_size=0: needs a whole number of at least 1$"):
        unisono.init(batch_size=0)


def test_every_argument_of_init_is_tried() -> None:
    assert {PATHS[name] for name in WRONG} == {
        path for path, setting in TABLE.items() if path.partition(".")[0] in (*OF_SCRIPTS, setting.name)
    }


def test_what_the_table_leaves_open_has_a_type_that_a_run_checks() -> None:
    assert {path for path, setting in TABLE.items() if setting.kind is Any} == set(KINDS)


def test_init_has_at_most_thirteen_arguments_and_they_are_those_of_the_table() -> None:
    parameters = inspect.signature(unisono.init).parameters
    own = [setting.path for setting in settings_of(Settings)]
    assert len(parameters) <= 13
    assert sorted(parameters) == sorted([*own, *OF_SCRIPTS])
    for setting in settings_of(Settings):
        assert parameters[setting.name].default == setting.default


@pytest.mark.parametrize("name", OF_SCRIPTS)
def test_a_group_is_a_value_of_its_class_or_a_dict_and_nothing_else(name: str) -> None:
    for value in (5, "every", ["every"], {5: 5}):
        with pytest.raises(JobError, match=re.escape(f"{name}={short(value)}: needs a unisono.{name.capitalize()} or")):
            unisono.init(batch_size=32, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(JobError, match=f"{name}.evry=5: there is no such argument; "):
        unisono.init(batch_size=32, **{name: {"evry": 5}})  # type: ignore[arg-type]


def test_a_trainer_on_a_run_takes_no_settings_of_another_one(start: Callable[..., unisono.Run]) -> None:
    model, run = nn.Linear(1, 1), start()
    for said in ({"checkpoints": {"every": 1}}, {"batch_size": 48}):
        with pytest.raises(JobError, match="the settings come from the run"):
            unisono.Trainer(model, torch.optim.SGD(model.parameters()), nn.MSELoss(), run=run, **said)


def test_an_old_name_is_refused_with_the_group_that_it_is_in_however_it_is_said() -> None:
    model = nn.Linear(1, 1)
    said: dict[str, Any] = {"batch_size": 32, "checkpoint_every": 5}
    words = re.escape("Write checkpoints={'every': 5}, or checkpoints=unisono.Checkpoints(every=5)")
    for call in (
        lambda: unisono.init(**said),
        lambda: unisono.Trainer(model, torch.optim.SGD(model.parameters()), nn.MSELoss(), **said),
        lambda: run_for("Guest", None, said),
    ):
        with pytest.raises(JobError, match=words):
            call()
    require_none_removed({"timeline": "a variable of somebody else"})
    for name in ("threads", "numerics", "precision", "failure_timeout_s", "loggers", "audit", "devices_per_worker"):
        with pytest.raises(JobError, match=f"{name}=1: the setting is in a group now"):
            unisono.init(batch_size=32, **{name: 1})  # type: ignore[arg-type]


def test_an_unknown_argument_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(JobError, match="checkpoint_evry=5: there is no such argument; did you mean checkpoints"):
        require_parameters(unisono.init, {"checkpoint_evry": 5})
    with pytest.raises(JobError, match="chekpoints=5: there is no such argument; did you mean checkpoints"):
        unisono.init(chekpoints=5)  # type: ignore[call-arg]
    with pytest.raises(JobError, match="zzzz=5: there is no such argument; there are batch_size, seed"):
        require_parameters(unisono.init, {"zzzz": 5})


def test_a_setting_that_is_gone_is_refused_with_what_to_do_however_it_is_said() -> None:
    model = nn.Linear(1, 1)
    said: dict[str, Any] = {"batch_size": 32, "shard_optimizer": "auto"}
    for call in (
        lambda: unisono.init(**said),
        lambda: unisono.Trainer(model, torch.optim.SGD(model.parameters()), nn.MSELoss(), **said),
        lambda: run_for("Guest", None, said),
        lambda: require_none_removed({"UNISONO_SHARD_OPTIMIZER": "1"}),
    ):
        with pytest.raises(JobError, match="(?i)shard_optimizer was removed: every worker makes the whole update"):
            call()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"checkpoint_evry": 5}, "checkpoint_evry=5: .*checkpoints"),
        ({"scheduler_every": "day"}, "scheduler_every='day': needs 'epoch' or 'step'"),
        ({"loader_workers": "two"}, "loader_workers='two': needs a whole number"),
        ({"run": 5}, "run=5: needs a unisono.Run"),
    ],
)
def test_a_trainer_refuses_arguments_before_it_starts_a_run(said: dict[str, Any], words: str) -> None:
    model, said = nn.Linear(1, 1), {"batch_size": 32, **said}
    with pytest.raises(JobError, match=words):
        unisono.Trainer(model, torch.optim.SGD(model.parameters()), nn.MSELoss(), **said)


@pytest.mark.parametrize("limit", ["x", -1, float("nan"), []])
def test_a_limit_of_the_gradient_is_a_number_from_0_on(limit: Any) -> None:
    for name in ("norm", "value"):
        with pytest.raises(JobError, match=f"clip_{name}=.*: needs a number from 0 on"):
            Clip(**{name: limit})


def test_the_verbs_of_a_run_refuse_other_types_by_name(start: Callable[..., unisono.Run]) -> None:
    run, model = start(), nn.Linear(1, 1)
    run.prepare(model, torch.optim.SGD(model.parameters()))
    data = [(torch.ones(1), torch.ones(1))] * 64
    wrong: dict[str, Callable[[], Any]] = {
        r"epochs='two': needs a whole number": lambda: run.steps(data, epochs="two"),  # type: ignore[arg-type]
        r"shuffle=1: needs True or False": lambda: run.steps(data, shuffle=1),  # type: ignore[arg-type]
        r"loader_workers=1.5: needs": lambda: run.steps(data, loader_workers=1.5),  # type: ignore[arg-type]
        r"collate_fn=5: needs a function or None": lambda: run.steps(data, collate_fn=5),  # type: ignore[arg-type]
        r"batch_size='x': needs a whole number": lambda: run.predict(data, batch_size="x"),  # type: ignore[arg-type]
        r"callback=5: needs a function": lambda: run.on("step_ends", 5),  # type: ignore[arg-type]
        r"run.resize\('x'\): needs a whole number": lambda: run.resize("x"),  # type: ignore[arg-type]
        r"run.log\('a', 'x'\): needs a number": lambda: run.log("a", "x"),
        r"run.log\('a', None\): needs a number": lambda: run.log("a", None),
        r"run.log\(5, …\): needs a name": lambda: run.log(5, 1.0),  # type: ignore[arg-type]
        r"run.log\('.udc80', …\): needs a name": lambda: run.log("\udc80", 1.0),
    }
    for words, call in wrong.items():
        with pytest.raises(JobError, match=words):
            call()
