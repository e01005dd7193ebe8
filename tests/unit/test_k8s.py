"""What unisono k8s writes: valid for the APIs it is for, readable as what was meant, and without secrets."""

import re
import shlex
import stat
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from pods_played import expanded
from said import options
from unisono.cli import app as cli
from unisono.errors import JobError
from unisono.launch.elastic.elastic_settings import ElasticSettings, Range
from unisono.launch.k8s_job import (
    SPOT,
    ClusterJob,
    Pods,
    label_of,
    read_quantity,
    read_selector,
    read_toleration,
    read_variables,
    require_memory,
)
from unisono.launch.k8s_manifests import escaped, for_kubeflow, job_set, new_secret, text_of, write
from unisono.launch.settings import LaunchSettings, Script
from unisono.membership.token import read_token

pytestmark = pytest.mark.unit

LAUNCH = LaunchSettings(
    Script("train.py", ("--lr", "1e-3")), workers=0, options=options(checkpoint_every=5, grace_s=120)
)
JOB = ClusterJob(ElasticSettings(LAUNCH, Range(2, 8)), "registry.example/train:1", "train", "train-keys")
FULL = replace(
    JOB,
    settings=ElasticSettings(
        LAUNCH.with_options(
            {"communication.devices_per_worker": 2, "communication.insecure_data": True, "arithmetic.threads": 3}
        ),
        Range(1, 3),
    ),
    pods=Pods(4, None, "3500m", "64Gi", "8Gi", {"disk": "fast"}, (read_toleration("a=b:NoExecute"),)).on_spot("gke"),
    namespace="ml",
    claim="runs",
    user=1000,
    variables={"A": "$(B) $$ 1e3"},
)


@cache
def models() -> tuple[Any, Any, Any]:
    """Kubeflow's classes of a JobSet, a runtime and a job."""
    from kubeflow_trainer_api import models  # takes seconds to load

    return models.JobsetV1alpha2JobSet, models.TrainerV1alpha1TrainingRuntime, models.TrainerV1alpha1TrainJob


def unisono(*args: str) -> int:
    """Call the console entry in this process; its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["unisono", "k8s", *args])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    return int(ended.value.code or 0)


def templates(manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The specification of each job in a JobSet, by its name."""
    return {job["name"]: job["template"]["spec"] for job in manifest["spec"]["replicatedJobs"]}


def containers(manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The container of each."""
    return {name: job["template"]["spec"]["containers"][0] for name, job in templates(manifest).items()}


IMAGES = (
    *("train", "train:1", "me/train", "registry.example/me/train:1.0_b", "localhost:5000/a__b/c---d", "Registry/a"),
    *("[fd00::1]:5000/a", f"r.example/a:b@sha256:{'0' * 64}", f"a@sha256:{'0' * 64}"),
)


@pytest.mark.parametrize("text", IMAGES)
def test_an_image_is_called_as_registries_call_theirs(text: str) -> None:
    replace(JOB, image=text).check()


@pytest.mark.parametrize(
    "text",
    ["a:", "a/", "/a", "a//b", "a:b:c", "Train", "r.example/Me/train", "a@sha256:12", "a..b", "a-", "a:-b", "a" * 513],
)
def test_an_image_that_no_kubelet_would_fetch_is_refused(text: str) -> None:
    with pytest.raises(JobError, match="no name of an image"):
        replace(JOB, image=text).check()


# --- the APIs


@pytest.mark.parametrize("job", [JOB, FULL])
def test_the_published_models_know_all_that_is_written(job: ClusterJob) -> None:
    for model, manifest in zip(models(), (job_set(job), *for_kubeflow(job)), strict=True):
        text = yaml.safe_load(text_of([manifest], "unisono k8s"))
        assert model.from_dict(text).to_dict() == text, "a field that the API does not know, or of another type"


def test_the_secret_is_one_of_the_core_api_and_its_token_is_a_token(tmp_path: Path) -> None:
    secret = new_secret("train-keys", "ml")
    assert (secret["kind"], secret["apiVersion"], secret["immutable"]) == ("Secret", "v1", True)
    assert secret["metadata"] == {"name": "train-keys", "namespace": "ml"}
    entries = secret["stringData"]
    (tmp_path / "token").write_text(entries["token"])
    (tmp_path / "token").chmod(0o400)
    assert read_token(tmp_path / "token") == entries["token"] != new_secret("train-keys", None)["stringData"]["token"]
    assert "BEGIN CERTIFICATE" in entries["certificate.pem"]
    assert "PRIVATE KEY" in entries["certificate.key"]


def test_the_commands_of_the_page_write_what_the_models_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "guide" / "k8s.md").read_text()
    commands = re.findall(r"^    unisono k8s (.+)$", page, re.MULTILINE)
    assert [unisono(*shlex.split(command)) for command in commands] == [0, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.yaml", "keys.yaml", "train.yaml"]
    written = [
        *yaml.safe_load_all((tmp_path / "job.yaml").read_text() + "---\n" + (tmp_path / "train.yaml").read_text())
    ]
    assert [manifest["kind"] for manifest in written] == ["JobSet", "TrainingRuntime", "TrainJob"]
    for model, manifest in zip(models(), written, strict=True):
        assert model.from_dict(manifest).to_dict() == manifest


# --- what becomes of ends


def test_workers_that_leave_or_are_evicted_are_no_failures_and_a_usage_error_ends_the_job() -> None:
    rules = templates(job_set(JOB))["node"]["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["Ignore", "Ignore", "FailJob"]
    assert rules[0]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert [rule["onExitCodes"]["values"] for rule in rules[1:]] == [[75], [2]]


def test_every_container_that_a_rule_names_is_there_and_restarts_are_left_to_the_job() -> None:
    for name, job in templates(job_set(FULL)).items():
        spec = job["template"]["spec"]
        assert spec["terminationGracePeriodSeconds"] > 120  # a pod has more time to end than its workers
        assert spec["restartPolicy"] == "Never"  # what podFailurePolicy requires
        for rule in job["podFailurePolicy"]["rules"]:
            codes = rule.get("onExitCodes")
            assert codes is None or codes["containerName"] == spec["containers"][0]["name"], name
            assert codes is None or codes["values"] == sorted(set(codes["values"]))


# --- pods


@pytest.mark.parametrize(
    ("workers", "pods", "devices", "count", "room"),
    [
        ("2:8", Pods(), None, 8, 1),
        ("8", Pods(workers=3), None, 3, 3),
        ("2:8", Pods(gpus=4), None, 2, 4),
        ("2:8", Pods(gpus=4), 2, 4, 2),
        ("1", Pods(gpus=8), 8, 1, 1),
    ],
)
def test_pods_have_room_for_the_largest_number_of_workers(
    workers: str, pods: Pods, devices: int | None, count: int, room: int
) -> None:
    launch = LAUNCH.with_options({"communication.devices_per_worker": devices, "communication.insecure_data": True})
    job = replace(JOB, settings=ElasticSettings(launch, Range.read(workers)), pods=pods)
    job.check()
    spec = templates(job_set(job))["node"]
    assert (spec["parallelism"], spec["completions"]) == (count, count)
    words = containers(job_set(job))["node"]["command"]
    assert words[words.index("-n") + 1] == str(room)


def test_only_the_coordinator_sees_the_private_key_and_no_manifest_has_a_secret() -> None:
    found = containers(job_set(FULL))
    assert [mount["subPath"] for mount in found["node"]["volumeMounts"] if mount["name"] == "keys"] == [
        *("token", "certificate.pem"),
    ]
    assert "certificate.key" in str(found["coordinator"])
    assert "certificate.key" not in str(templates(job_set(FULL))["node"])
    assert all(not job["template"]["spec"]["automountServiceAccountToken"] for job in templates(job_set(FULL)).values())


def test_gpus_and_spot_nodes_are_asked_for_by_workers_alone() -> None:
    specs = {name: job["template"]["spec"] for name, job in templates(job_set(FULL)).items()}
    assert specs["node"]["nodeSelector"] == {"disk": "fast", "cloud.google.com/gke-spot": "true"}
    assert [each["key"] for each in specs["node"]["tolerations"]] == ["a", SPOT["gke"][0], "nvidia.com/gpu"]
    assert containers(job_set(FULL))["node"]["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": "4"}
    assert not {"nodeSelector", "tolerations"} & specs["coordinator"].keys()
    assert "nvidia" not in str(specs["coordinator"])


def test_a_runtime_gets_its_name_from_a_label_and_has_what_kubeflow_looks_for() -> None:
    spec = for_kubeflow(FULL)[0]["spec"]["template"]["spec"]
    node = next(job for job in spec["replicatedJobs"] if job["name"] == "node")
    assert node["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    container = node["template"]["spec"]["template"]["spec"]["containers"][0]
    assert container["name"] == "node"
    assert container["env"][0]["name"] == "JOB_SET"
    url = next(word for word in container["command"] if word.startswith("https:"))
    assert expanded(url, {"JOB_SET": "mine"}) == "https://mine-coordinator-0-0.mine:7777"


# --- text


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), min_size=1))
@example(["1e-3", "1E3", "0x1f", "0o17", "017", "1_000", "12:30:00", "2026-01-01", "y", "N", "on", "~", "null", ".inf"])
@example(
    ["$(HOME)", "$$(HOME)", "a: b", "- a", "#", "'", '"', "a\nb\n", " ", "", "\x85", "\ufeff", "<<", "=", "%", "@"]
)
def test_words_are_what_they_were_after_yaml_and_kubernetes_have_read_them(words: list[str]) -> None:
    text = text_of([{"command": escaped(words), "name": words[0]}], "unisono k8s")
    found = yaml.safe_load(text)
    assert found["name"] == words[0]
    assert [expanded(word, {"HOME": "/root"}) for word in found["command"]] == words


@pytest.mark.parametrize(
    "word", ["1e-3", "1e3", "017", "0o17", "1_000", "12:30", "y", "n", "NO", "0b1", "+.inf", "2026-01-01"]
)
def test_what_another_reader_of_yaml_could_take_for_a_number_is_quoted(word: str) -> None:
    quoted = text_of([{"key": word}], "").partition("key: ")[2].strip()
    assert quoted in (f'"{word}"', f"'{word}'")


def test_text_that_is_no_unicode_is_refused_before_anything_is_written() -> None:
    for wrong in ("a\udcffb", "a\0b"):
        with pytest.raises(JobError, match="no text that a manifest can hold"):
            text_of([{"a": [wrong]}], "")


def test_files_of_others_are_left_alone_and_keys_go_into_a_new_file_that_others_cannot_read(tmp_path: Path) -> None:
    path, keys = tmp_path / "job.yaml", tmp_path / "keys.yaml"
    write(text_of([{}], ""), path)
    write(text_of([{"a": 1}], ""), path)
    path.write_text("mine: 1\n")
    with pytest.raises(JobError, match="did not write it"):
        write("", path)
    write("a", keys, secret=True)
    assert stat.S_IMODE(keys.stat().st_mode) == 0o600
    with pytest.raises(JobError, match="into a new file only"):
        write("b", keys, secret=True)
    with pytest.raises(JobError, match="cannot be written"):
        write("a", tmp_path / "nowhere" / "x")


# --- what people type


@pytest.mark.parametrize(
    ("text", "amount"), [("4", 4), ("0.5", 0.5), ("500m", 0.5), ("16Gi", 16 * 2**30), ("16G", 16e9), ("1k", 1000)]
)
def test_quantities_are_read_as_kubernetes_reads_them(text: str, amount: float) -> None:
    assert float(read_quantity("--memory", text)) == amount


@pytest.mark.parametrize("text", ["", "many", "-1", "0", "1.5.2", "16GB", "16 Gi", "1e3", "Gi", "٣Gi", "0Gi", "1" * 30])
def test_what_is_no_quantity_is_quoted(text: str) -> None:
    with pytest.raises(JobError, match=r"--memory .*(write a number|more than nothing)"):
        read_quantity("--memory", text)


@pytest.mark.parametrize("text", ["16", "512m", "1k"])
def test_a_memory_with_a_missing_or_wrong_unit_is_refused(text: str) -> None:
    with pytest.raises(JobError, match="bytes; write a unit, as in 16Gi"):
        require_memory("--memory", text)


@pytest.mark.parametrize(
    ("text", "manifest"),
    [
        ("a", {"key": "a", "operator": "Exists"}),
        ("a.b/c=d:NoExecute", {"key": "a.b/c", "operator": "Equal", "value": "d", "effect": "NoExecute"}),
        ("a:NoSchedule", {"key": "a", "operator": "Exists", "effect": "NoSchedule"}),
        ("a=", {"key": "a", "operator": "Equal", "value": ""}),
    ],
)
def test_a_toleration_is_read_as_taints_are_written(text: str, manifest: dict[str, str]) -> None:
    assert read_toleration(text) == manifest


@pytest.mark.parametrize("text", ["", "=b", "a=b c", "a:Never", "a:", "a/b/c", "-a"])
def test_what_is_no_toleration_is_refused(text: str) -> None:
    with pytest.raises(JobError, match="--toleration .*write KEY"):
        read_toleration(text)


@pytest.mark.parametrize("text", ["", "a", "=b", "a=b c", "a..b/c=d", "a.-b/c=d", f"{'a' * 254}/c=d", "A/c=d"])
def test_what_is_no_label_of_nodes_is_refused(text: str) -> None:
    with pytest.raises(JobError, match="--node-selector .*write KEY=VALUE"):
        read_selector(text)


def test_a_wrong_variable_is_refused_without_its_value() -> None:
    with pytest.raises(JobError, match="write NAME=VALUE") as refused:
        read_variables(["1A=hush"])
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "label"),
    [("train_digits", "train-digits"), ("3D", "d"), ("__main__", "main"), ("x" * 99, "x" * 40), ("字", "train")],
)
def test_a_script_gives_its_job_a_name_that_can_be_one(name: str, label: str) -> None:
    assert label_of(name) == label
    replace(JOB, name=label).check()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ((), "--image"),
        (("--image", "a b"), "--image 'a b': no name of an image"),
        (("--image", "i", "-n", "2-8"), "--workers 2-8: write a number, such as 4, or a range, such as 2:8"),
        (("--image", "i", "--name", "Train_1"), "--name 'Train_1': write a DNS label"),
        (("--image", "i", "--namespace", "a.b"), "--namespace 'a.b': write a DNS label"),
        (("--image", "i", "--secret", "A"), "--secret 'A': no name of an object"),
        (("--image", "i", "--claim", "a_b"), "--claim 'a_b': no name of an object"),
        (("--image", "i", "--gpus", "-1"), "--gpus -1: a number from 0"),
        (("--image", "i", "--workers-per-pod", "0"), "--workers-per-pod 0: a number from 1"),
        (("--image", "i", "--restarts", "-1"), "--restarts -1: at least 0"),
        (("--image", "i", "-n", "1:100001"), "that takes 100001 pods"),
        (("--image", "i", "--memory", "16GB"), "--memory '16GB': write a number, with a unit of Kubernetes"),
        (("--image", "i", "--cpu", "4Gi"), "--cpu 4Gi: cores are written as 4, 0.5 or 500m"),
        (("--image", "i", "--gpus", "4", "--workers-per-pod", "2"), "GPUs and --devices-per-worker say how many"),
        (("--image", "i", "--gpus", "3", "--devices-per-worker", "2"), "no whole number of workers"),
        (("--image", "i", "--gpus", "1", "-n", "2"), "cannot encrypt. Say --insecure-data"),
        (("--image", "i", "--user", "0"), "--user 0: the number of a user that is not root"),
        (("--image", "i", "--restarts", "2147483648"), "at most 2147483647"),
        (("--image", "i", "-n", "1:4", "--max-restarts", "1000000000"), "at most 536870911 for 4 pods"),
        (("--image", "i", "--log-to", "csv,bogus"), "--log-to: there is no logger 'bogus': choose of tensorboard, csv"),
        (("--image", "i", "-o", "x", "--new-secret", "x"), "keys go into a file of their own"),
    ],
)
def test_what_cannot_work_is_named_and_nothing_is_written(
    words: tuple[str, ...],
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert unisono("train.py", *words) == 2
    said = " ".join(word for word in capsys.readouterr().err.split() if word not in "│╭╰─╮╯")
    assert error in said
    assert not list(tmp_path.iterdir())
