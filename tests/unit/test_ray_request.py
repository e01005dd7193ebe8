"""What is asked of a Ray cluster, and what its actors run."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from said import options
from unisono.errors import JobError
from unisono.launch import ray as driver
from unisono.launch.elastic.elastic_settings import ElasticSettings, Range
from unisono.launch.ray_request import RayRequest, read_resources
from unisono.launch.settings import LaunchSettings, Script

pytestmark = pytest.mark.unit

LAUNCH = LaunchSettings(Script(__file__, ("--lr", "0.1")), workers=0, options=options(shards=8, checkpoint_every=5))


def request(launch: LaunchSettings = LAUNCH, **environ: str) -> RayRequest:
    settings = ElasticSettings(launch, Range(2, 8), failure_timeout_s=20)
    return RayRequest.of_this_process(settings, None, environ)


@pytest.mark.parametrize(
    ("text", "resources"),
    [("CPU=4", {"CPU": 4.0}), ("CPU=.5, GPU=1", {"CPU": 0.5, "GPU": 1.0}), ("accelerator_type:T4=0.001", None)],
)
def test_resources_are_read(text: str, resources: dict[str, float] | None) -> None:
    assert read_resources(text) == (resources or {"accelerator_type:T4": 0.001})


@pytest.mark.parametrize("text", ["", "CPU", "CPU=", "CPU=-1", "CPU=1e9", "CPU=1.2.3", "CPU=1,CPU=2", "=1", "CPU=1,,"])
def test_what_is_no_list_of_resources_is_refused_with_its_form(text: str) -> None:
    with pytest.raises(JobError, match="write NAME=NUMBER, such as CPU=4"):
        read_resources(text)


def test_a_worker_takes_a_core_for_each_thread_of_each_device_unless_told_otherwise() -> None:
    assert request().bundle == {"CPU": 1}
    assert request(LAUNCH.with_options({"arithmetic.threads": 3, "communication.devices_per_worker": 2})).bundle == {
        "CPU": 6
    }


@pytest.mark.parametrize("resources", [{}, {"CPU": 0.0}, {"CPU": -1.0}, {"GPU": float("nan")}])
def test_resources_that_nothing_has_are_refused(resources: dict[str, float]) -> None:
    with pytest.raises(JobError, match="resource"):
        replace(request(), resources=resources).check()


def test_variables_of_unisono_hold_on_all_nodes_but_for_those_of_a_single_worker() -> None:
    told = request(
        replace(LAUNCH, extra_environment={"A": "1"}), UNISONO_TRANSPORT="sockets", UNISONO_RANK="3", HOME="/"
    )
    assert told.variables == {"UNISONO_TRANSPORT": "sockets", "A": "1"}


def test_the_coordinator_has_no_worker_and_the_agents_get_what_all_workers_have_in_common() -> None:
    words = request().coordinator("::1", Path("/runs/a"))
    assert words[:9] == ["run", "-n", "2:8", "--here", "0", "--coordinator", "[::1]:0", "--run-dir", "/runs/a"]
    common = ["--shards", "8", "--checkpoint-every", "5", "--failure-timeout-s", "20", __file__, "--lr", "0.1"]
    assert words[-len(common) :] == common
    joins = request().agent(None)
    assert "--run-dir" not in joins
    assert joins[-len(common) :] == common
    assert "--no-tuning" not in joins
    off = LAUNCH.with_options({"launch.tuning": False, "launch.warm_start": False})
    assert {"--no-tuning", "--no-warm-start"} < set(request(off).agent(None))


def test_an_agent_uses_the_jobs_folder_only_if_the_token_of_this_start_lies_there(tmp_path: Path) -> None:
    from unisono.launch.ray_actors import shared_folder  # loads Ray, which takes seconds

    assert shared_folder(str(tmp_path), "a" * 43) is None
    (tmp_path / "token").write_text("b" * 43)
    assert shared_folder(str(tmp_path), "a" * 43) is None
    (tmp_path / "token").write_text("a" * 43)
    assert shared_folder(str(tmp_path), "a" * 43) == tmp_path
    assert request().agent(tmp_path)[:2] == ["--run-dir", str(tmp_path)]


def test_without_ray_the_cure_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(JobError, match=r"pip install '\.\[ray\]'"):
        driver.run(__file__)
