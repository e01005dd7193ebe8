"""What a run is told, by its script and by its launcher, is one value before anything is opened."""

import inspect
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import unisono
from said import grouped
from unisono.adapt.batch_policies import BatchSizeSchedule, EdgeOfStability
from unisono.adapt.norms import Monitoring
from unisono.adapt.view import Policy
from unisono.errors import JobError
from unisono.received import short
from unisono.sync import AllReduce, DiLoCo, LocalSGD
from unisono.train.config.run_config import SHARED_FROM, CoordinatorAccess, RunConfig, configure
from unisono.train.start import HOST_PROCESS, HostProcess

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_worker")]

ELASTIC = {"UNISONO_COORDINATOR": "http://127.0.0.1:1", "UNISONO_TOKEN_FILE": "/t", "UNISONO_WORKER": "w1"}


def configured(environ: dict[str, str] | None = None, number: int = 1, **said: Any) -> RunConfig:
    """As of a script that calls ``unisono.init`` with these arguments."""
    call = inspect.signature(unisono.init).bind(**grouped({"batch_size": 32, "device": "cpu", **said}))
    call.apply_defaults()
    return configure(call.arguments, environ or {}, number)


def at(config: RunConfig, path: str) -> Any:
    found: Any = config
    for name in path.split("."):
        found = getattr(found, name)
    return found


SHARED = [
    # where it goes; the default; the variable, its text and value; the argument, what is given and its value
    ("job.shards", 2, ("UNISONO_SHARDS", "4", 4), ("shards", 1, 1)),
    ("job.numerics", "native", ("UNISONO_NUMERICS", "portable", "portable"), ("numerics", "native", "native")),
    ("job.threads", 1, ("UNISONO_THREADS", "2", 2), ("threads", 3, 3)),
    (
        "connection.how.transport",
        "auto",
        ("UNISONO_TRANSPORT", "hierarchical", "hierarchical"),
        ("transport", "process_group", "process_group"),
    ),
    ("connection.devices", 1, ("UNISONO_DEVICES_PER_WORKER", "3", 3), ("devices_per_worker", 2, 2)),
    ("connection.how.topology", "auto", ("UNISONO_TOPOLOGY", "ring", "ring"), ("topology", "tree", "tree")),
    ("execution.overlap", None, ("UNISONO_OVERLAP", "1", True), ("overlap", False, False)),
    ("execution.checked_bytes", 8 * 2**20, ("UNISONO_CHECKS", "none", 0), ("checks", "all", None)),
    ("recording.timeline", False, ("UNISONO_TIMELINE", "1", True), ("timeline", True, True)),
    ("execution.audit", 0.0, ("UNISONO_AUDIT", "0.5", 0.5), ("audit", 0.0, 0.0)),
    ("execution.monitoring.every", 0, ("UNISONO_MONITOR_EVERY", "5", 5), ("monitor", Monitoring(7), 7)),
    ("verify_every", 100, ("UNISONO_VERIFY_EVERY", "7", 7), ("verify_every", 0, None)),
    ("settings.checkpoints.every", None, ("UNISONO_CHECKPOINT_EVERY", "5", 5), ("checkpoint_every", 9, 9)),
    ("recording.folder", None, ("UNISONO_RUN_DIR", "/launched", Path("/launched")), ("run_dir", "own", Path("own"))),
    (
        "adaptation.strategy",
        AllReduce(),
        ("UNISONO_STRATEGY", "diloco", DiLoCo()),
        ("strategy", LocalSGD(), LocalSGD()),
    ),
]


@pytest.mark.parametrize(("path", "default", "variable", "argument"), SHARED)
def test_an_argument_goes_before_the_environment_and_the_environment_before_the_default(
    path: str, default: Any, variable: tuple[str, str, Any], argument: tuple[str, Any, Any]
) -> None:
    name, text, from_environ = variable
    parameter, given, from_script = argument
    assert at(configured(), path) == default
    assert at(configured({name: ""}), path) == default
    assert at(configured({name: text}), path) == from_environ
    assert at(configured({name: text}, **{parameter: given}), path) == from_script


def test_a_batch_from_outside_goes_before_the_scripts_which_is_kept_for_the_journal() -> None:
    config = configured({"UNISONO_BATCH_SIZE": "64"})
    assert (config.job.batch_size, config.job.shards, config.script_batch_size) == (64, 4, 32)
    assert (config.batch_set_by, configured().batch_set_by) == ("UNISONO_BATCH_SIZE", None)


def test_a_job_without_a_batch_size_has_eight_shards_and_the_batch_from_outside() -> None:
    job = configured(batch_size=None).job
    assert (job.batch_size, job.shards) == (None, 8)
    told = configured({"UNISONO_BATCH_SIZE": "64"}, batch_size=None)
    assert (told.job.batch_size, told.job.shards, told.script_batch_size) == (64, 4, None)


@pytest.mark.parametrize(
    ("environ", "settings", "words"),
    [
        ({}, {"policies": [BatchSizeSchedule()]}, "policies=batch-size-schedule"),
        ({"UNISONO_POLICIES": "goodput,topology"}, {}, "policies=goodput,topology"),
        ({"UNISONO_BATCH_SCALE": "2"}, {}, "UNISONO_BATCH_SCALE=2"),
    ],
)
def test_what_goes_by_the_batch_of_the_job_needs_it(
    environ: dict[str, str], settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(JobError, match=re.escape(f"{words}: needs the batch size of the job. Set it in unisono.init(")):
        configured(environ, batch_size=None, **settings)


def test_a_scaled_batch_has_as_many_times_the_shards_and_a_policy_for_the_learning_rate() -> None:
    config = configured({"UNISONO_BATCH_SCALE": "2", "UNISONO_BATCH_SCALE_WARMUP": "10"}, batch_size=64)
    assert (config.job.batch_size, config.job.shards) == (128, 8)  # 64 samples have 4
    assert [policy.name for policy in config.adaptation.policies] == ["linear-scaling"]
    assert configured({"UNISONO_BATCH_SCALE": "1"}).adaptation.policies == ()


def test_steps_to_profile_have_a_timeline() -> None:
    recording = configured({"UNISONO_PROFILE": "10:12"}).recording
    assert (recording.timeline, recording.profile) == (True, range(10, 12))
    assert configured().recording.profile is None


@pytest.mark.parametrize("steps", ["10", "12:10", "10:10", "-1:3", "a:b", "1:2:3", "1.5:3"])
def test_what_names_no_steps_to_profile_is_refused(steps: str) -> None:
    with pytest.raises(JobError, match="records.profile=.*FIRST:LAST"):
        configured({"UNISONO_PROFILE": steps})


@pytest.mark.parametrize("variable", ["UNISONO_TRACE", "UNISONO_STUDY"])
def test_whoever_compares_runs_keeps_them_out_of_the_scripts_folder(variable: str) -> None:
    told = {"UNISONO_RUN_DIR": "/launched", variable: "1"}
    assert configured(told, run_dir="own").recording.folder == Path("/launched")


def test_the_later_runs_of_a_script_go_inside_of_the_launchers_folder() -> None:
    assert configured({"UNISONO_RUN_DIR": "/launched"}, 2).recording.folder == Path("/launched/run-2")
    assert configured(number=2).recording.folder is None


def test_what_is_refused_does_not_count_as_a_run(
    start: Callable[..., unisono.Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_RUN_DIR", str(tmp_path / "launched"))
    before = HOST_PROCESS.set(HostProcess())
    try:
        with pytest.raises(JobError):
            start(run_dir=None, batch_size=0)
        assert [start(run_dir=None).dir for _ in range(2)] == [tmp_path / "launched", tmp_path / "launched/run-2"]
    finally:
        HOST_PROCESS.reset(before)


def test_the_launcher_holds_its_folder_and_what_is_in_it() -> None:
    recording = configured({"UNISONO_RUN_DIR": "/launched", "UNISONO_TERM": "3"}).recording
    terms = [recording.term_in(Path(path)) for path in ("/launched", "/launched/run-2", "/launched-2", "/")]
    assert terms == [3, 3, None, None]
    assert configured({"UNISONO_TERM": "3"}).recording.term_in(Path("/launched")) is None


def test_workers_of_an_elastic_job_leave_it_to_the_coordinator_to_find_who_hangs() -> None:
    fixed, elastic = configured(faults={"timeout_s": 10}), configured(ELASTIC, faults={"timeout_s": 10})
    assert (fixed.connection.timeout_s, fixed.connection.coordinator) == (10, None)
    assert (elastic.connection.timeout_s, elastic.connection.silence_s) == (30, 5)
    assert elastic.connection.coordinator == CoordinatorAccess("http://127.0.0.1:1", Path("/t"), "w1")
    assert elastic.settings.faults.timeout_s == 10
    told = configured({**ELASTIC, "UNISONO_FAILURE_TIMEOUT_S": "4"}, faults={"timeout_s": 10})
    assert told.connection.silence_s == 2


def test_a_policy_that_needs_the_noise_of_gradients_has_it_measured_in_each_step() -> None:
    assert configured({"UNISONO_POLICIES": "ada-scale"}).execution.monitoring.every == 1
    assert configured({"UNISONO_POLICIES": "ada-scale"}, records={"monitor": 5}).execution.monitoring.every == 5


def test_a_policy_that_goes_by_curvature_has_it_measured() -> None:
    def measured(every: int = 10, **said: Any) -> int:
        policies = [EdgeOfStability(every=every), EdgeOfStability(every=30)]
        return configured(policies=policies[: 1 if every == 0 else 2], **said).execution.monitoring.curvature_every

    assert measured() == 10
    assert measured(every=0) == 0
    assert measured(monitor=Monitoring(curvature_every=7)) == 7


def test_bits_in_memory_are_looked_after_unless_the_state_is_never_compared() -> None:
    assert configured().execution.looks
    assert not configured(faults={"verify_every": 0}).execution.looks


@pytest.mark.parametrize("told", [{"UNISONO_TRACE": "/trace"}, {"UNISONO_SAMPLES": "1"}])
def test_whoever_compares_bits_rules_out_strategies_that_do_not_promise_them(told: dict[str, str]) -> None:
    assert configured(told).adaptation.constraints.compares_bits
    assert not configured().adaptation.constraints.compares_bits


def test_under_verify_every_worker_updates_all_that_it_has() -> None:
    assert configured().execution.shared_from == SHARED_FROM
    assert configured({"UNISONO_TRACE": "/trace"}).execution.shared_from == math.inf


def test_workers_beyond_the_number_of_gpus_share_them_and_choosing_one_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: cuda)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", Mock(side_effect=AssertionError))
    monkeypatch.setattr(torch, "Stream", Mock())
    fourth = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    assert configured(fourth, device=None).device == torch.device("cuda", 1)
    assert configured(fourth, device="cuda:0").device == torch.device("cuda", 0)
    assert configured(fourth).device == torch.device("cpu")


def test_a_device_that_torch_cannot_seed_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("mps"))
    with pytest.raises(JobError, match=r"device=mps: torch .* has no is_initialized, Stream for such devices"):
        configured(device="mps")
    with pytest.raises(JobError, match=r"device='xpu': torch .* sees no device of this kind here"):
        configured(device="xpu")


class Often(Policy):
    curvature_every = "often"  # type: ignore[assignment]  # what a user may write


@pytest.mark.parametrize(
    ("environ", "said", "words"),
    [
        ({}, {"bucket_mb": math.inf}, "arithmetic.bucket_mb=inf: needs a number of at least 1e-06 and at most 65536"),
        ({}, {"policies": [Often()]}, "curvature_every='often': needs a whole number"),
        (
            {},
            {"monitor": Monitoring(curvature_every=9, curvature={"vector": 2})},
            "vector=2: there is no such argument",
        ),
        (
            {"UNISONO_STRATEGY": "local-sgd:every=2"},
            {"monitor": Monitoring(curvature_every=9)},
            "Monitoring(curvature_every=9): with the strategy local-sgd",
        ),
        ({}, {"run_dir": ""}, 'run_dir="" names no folder'),
        ({}, {"device": "gpu"}, "device='gpu': "),
        ({}, {"batch_size": 4, "shards": 8}, "shards=8 is more than batch_size=4"),
        ({"UNISONO_SHARDS": "many"}, {"shards": 2}, "UNISONO_SHARDS='many' in the environment: needs a whole number"),
        ({"UNISONO_OVERLAP": "yes"}, {"overlap": True}, "UNISONO_OVERLAP='yes' in the environment: use 0 or 1"),
        ({"UNISONO_SHARD_OPTIMIZER": "0"}, {}, "UNISONO_SHARD_OPTIMIZER was removed: every worker"),
        ({"UNISONO_COORDINATOR": "http://h:1"}, {}, "UNISONO_COORDINATOR is set in the environment, and UNISONO_TOKEN"),
        ({"RANK": "2"}, {}, "WORLD_SIZE is not set in the environment, but RANK=2 is"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_opened(
    environ: dict[str, str], said: dict[str, Any], words: str
) -> None:
    with pytest.raises(JobError) as refused:
        configured(environ, **said)
    assert str(refused.value).startswith(words)


@pytest.mark.parametrize("name", ["UNISONO_FAILURE_TIMEOUT_S", "UNISONO_AUDIT", "UNISONO_STOP_AFTER", "UNISONO_TERM"])
@pytest.mark.parametrize("text", ["\u0663", "0.\u0663", "1_0", " 1", "1e300", "inf", "nan", "9" * 5000, "-1", "0x1"])
def test_a_number_in_a_variable_has_plain_digits_and_a_range(name: str, text: str) -> None:
    with pytest.raises(JobError) as refused:
        configured({name: text})
    assert str(refused.value).startswith(f"{name}={short(text)} in the environment: needs a ")


def test_numbers_in_variables_may_have_points_and_exponents() -> None:
    for text in ("4", "4.0", "4.", "+4e0", "40E-1"):
        told = configured({**ELASTIC, "UNISONO_FAILURE_TIMEOUT_S": text})
        assert told.connection.silence_s == 2


@pytest.mark.parametrize(
    "name", ["ALLOW_JOB_CHANGE", "OVERLAP", "SAMPLES", "STUDY"], ids=lambda name: f"UNISONO_{name}"
)
def test_every_switch_in_a_variable_is_on_or_off(name: str) -> None:
    for text in ("0", "1", ""):
        configured({f"UNISONO_{name}": text})
    for text in ("yes", "true", "2", "\u0661", " 1"):
        with pytest.raises(JobError, match=f"UNISONO_{name}={text!r} in the environment: use 0 or 1"):
            configured({f"UNISONO_{name}": text})


def test_a_script_whose_workers_may_change_has_one_run() -> None:
    with pytest.raises(JobError, match="has one run: this is its second unisono.init"):
        configured(ELASTIC, 2)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"devices_per_worker": 0}, "communication.devices_per_worker=0: needs a whole number of at least 1"),
        ({"devices_per_worker": 2, "monitor": 10}, "do not go together with monitor yet"),
        ({"devices_per_worker": 2, "audit": 0.5, "strategy": "local-sgd"}, "audit, strategy"),
    ],
)
def test_what_a_worker_of_several_devices_cannot_do_is_refused(said: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=re.escape(words)):
        configured(**said)
