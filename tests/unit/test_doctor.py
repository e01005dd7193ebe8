import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from unisono.host.machine import CgroupLimits, read_limits
from unisono.launch import doctor
from unisono.launch.doctor import FAILED, Diagnosis

pytestmark = pytest.mark.unit

SHM = "/dev/shm free, GiB"  # noqa: S108

HEALTHY: Mapping[str, Mapping[str, Any]] = {
    "cpu": {"usable by this process": 8, "limit of the control group": None},
    "memory": {"available, GiB": 16.0},
    "limits": {"open files (nofile), soft": 1024, "processes (nproc), soft": "unlimited"},
    "disk": {SHM: 8.0, "temporary folder free, GiB": 9.0, "current folder free, GiB": 9.0},
    "network": {"lo": "127.0.0.1", "eth0": "10.0.0.1"},
    "gpu driver": {"nvidia": None},
    "torch": {"version": "2.13.0", "cuda build": None, "devices": []},
    "workers": {"gloo": "works, with 2 workers"},
    "launcher": {"recognised": "single: one worker on host a"},
    "environment": {},
}


def sick(section: str, **facts: Any) -> Diagnosis:
    names = {"shm": SHM, "nofile": "open files (nofile), soft", "memory": "available, GiB"}
    named = {
        names.get(name, name.replace("_", " ") if name.islower() else name): value for name, value in facts.items()
    }
    return Diagnosis.of({**HEALTHY, section: {**HEALTHY[section], **named}})


def test_a_healthy_machine_has_no_problems() -> None:
    diagnosis = Diagnosis.of(HEALTHY)
    assert diagnosis.problems == ()
    assert not diagnosis.stops
    assert diagnosis.as_text().startswith("No problems found.")


@pytest.mark.parametrize(
    ("diagnosis", "words"),
    [
        (sick("disk", shm=0.06), f"{SHM} is 0.06"),
        (sick("limits", nofile=256), "nofile. is only 256"),
        (sick("memory", memory=0.4), "Only 0.4 GiB"),
        (sick("cpu", limit_of_the_control_group=1.5), "8 CPUs are visible, but .* only 1.5"),
        (sick("environment", GLOO_SOCKET_IFNAME="ib0"), "GLOO_SOCKET_IFNAME=ib0, but .* no network interface ib0"),
        (sick("gpu driver", nvidia="NVRM version"), "built without CUDA"),
        (sick("environment", MALLOC_TRIM_THRESHOLD_="1"), "With MALLOC_TRIM_THRESHOLD_ alone, .*128 KiB"),
        (sick("launcher", could_not_be_found_out="RANK=4"), "cannot be read: RANK=4"),
        (sick("workers", nccl="fails: rank 0 …"), "Workers cannot talk over nccl: it fails: rank 0"),
    ],
)
def test_what_gets_in_the_way_is_named_with_what_to_do(diagnosis: Diagnosis, words: str) -> None:
    (problem,) = diagnosis.problems
    assert problem.todo
    assert not diagnosis.stops
    assert re.search(words, problem.what)


@pytest.mark.parametrize("value", ["eth", "=eth0", "^docker", "eth0,lo"])
def test_what_nccl_understands_as_an_interface_is_no_problem(value: str) -> None:
    assert sick("environment", NCCL_SOCKET_IFNAME=value).problems == ()


def test_a_gpu_that_torch_cannot_see_is_a_problem_and_one_that_it_sees_is_none() -> None:
    blind = {**HEALTHY, "gpu driver": {"nvidia": "NVRM"}, "torch": {"cuda build": "13.0", "devices": []}}
    assert "sees no GPU" in Diagnosis.of(blind).problems[0].what
    assert Diagnosis.of({**blind, "torch": {"cuda build": "13.0", "devices": ["H200"]}}).problems == ()


def test_what_stops_all_training_comes_first() -> None:
    diagnosis = Diagnosis.of({**HEALTHY, "memory": {"available, GiB": 0.1}, "torch": {FAILED: "ImportError: libgomp"}})
    assert [problem.stops for problem in diagnosis.problems] == [True, False]
    assert diagnosis.stops
    assert "libgomp" in diagnosis.as_text().splitlines()[0]
    assert sick("workers", gloo="fails: rank 1 …").stops


def test_a_probe_that_fails_says_why() -> None:
    def ill() -> dict[str, Any]:
        raise OSError("no such device")

    assert doctor.attempt(ill) == {FAILED: "OSError: no such device"}


def test_facts_that_nobody_could_find_out_are_no_problem() -> None:
    ignorant = {section: {FAILED: "OSError: x"} for section in HEALTHY if section not in ("torch", "launcher")}
    assert Diagnosis.of(ignorant).problems == ()
    assert Diagnosis.of({}).problems == ()


@pytest.mark.parametrize("probe", [name for name in doctor.PROBES if name != "torch"])
def test_each_probe_finds_something_here(probe: str) -> None:
    facts = doctor.attempt(doctor.PROBES[probe])
    assert FAILED not in facts
    json.dumps(facts)


def test_secrets_are_hidden_and_other_programs_variables_left_out() -> None:
    secrets = {"UNISONO_TOKEN": "abc", "SLURM_JWT": "abc", "NCCL_API_KEY": "abc", "TORCH_HOME": "https://me:abc@a.org"}
    others = {"AWS_SECRET_ACCESS_KEY": "abc", "HOME": "/home/me", "RANKING": "abc"}
    shown = doctor.environment({"OMP_NUM_THREADS": "4", "RANK": "1", **secrets, **others})
    assert "abc" not in str(shown)
    assert shown == {"OMP_NUM_THREADS": "4", "RANK": "1", **dict.fromkeys(secrets, doctor.HIDDEN)}


def groups(tmp_path: Path, table: str, **files: str) -> CgroupLimits:
    for name, text in files.items():
        path = tmp_path / "fs" / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "table").write_text(table)
    return read_limits(tmp_path / "table", tmp_path / "fs")


def test_the_tightest_limit_on_the_way_to_the_root_counts(tmp_path: Path) -> None:
    limits = groups(
        tmp_path,
        "0::/job/step\n",
        job__cpu_DOT_max="200000 100000\n",
        job__memory_DOT_max="1000\n",
        job__step__cpu_DOT_max="max 100000\n",
        job__step__memory_DOT_max="3000\n",
    )
    assert limits == CgroupLimits(cpus=2.0, memory_bytes=1000, free_bytes=1000)


def test_the_first_version_of_control_groups_is_read_too(tmp_path: Path) -> None:
    limits = groups(
        tmp_path,
        "4:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n1:name=systemd:/docker/x\n",
        memory__docker__x__memory_DOT_limit_in_bytes="9223372036854771712\n",
        memory__memory_DOT_limit_in_bytes="5000\n",
        **{"cpu,cpuacct__docker__x__cpu_DOT_cfs_quota_us": "150000\n"},
        **{"cpu,cpuacct__docker__x__cpu_DOT_cfs_period_us": "100000\n"},
    )
    assert limits == CgroupLimits(cpus=1.5, memory_bytes=5000, free_bytes=5000)


def test_what_a_group_uses_is_not_free_but_for_its_caches(tmp_path: Path) -> None:
    limits = groups(
        tmp_path / "two",
        "0::/job/step\n",
        job__memory_DOT_max="1000\n",
        job__memory_DOT_current="900\n",
        job__memory_DOT_stat="anon 700\nfile 200\ninactive_file 150\nactive_file 50\n",
        job__step__memory_DOT_max="800\n",
        job__step__memory_DOT_current="100\n",
    )
    assert (limits.memory_bytes, limits.free_bytes) == (800, 250)  # the whole job has less left than the step
    limits = groups(
        tmp_path / "one",
        "4:memory:/x\n",
        memory__x__memory_DOT_limit_in_bytes="5000\n",
        memory__x__memory_DOT_usage_in_bytes="4000\n",
        memory__x__memory_DOT_stat="inactive_file 1\ntotal_inactive_file 500\n",
    )
    assert limits.free_bytes == 1500


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert read_limits(tmp_path / "none", tmp_path) == CgroupLimits()
    assert groups(tmp_path, "0::/\n") == CgroupLimits()
