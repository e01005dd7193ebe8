"""Jobs on a simulated accelerator: the weights of one worker, on any number of workers, over each kind of group."""

import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import simulated_accelerator
from commands import python
from launches import Launches, launches
from training import Training

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240)]

SCRIPT = str(Path(__file__).parent / "scripts" / "accelerated.py")
MOST_WAITS, MOST_WAITS_ALONE = 5, 2
"""For the device, in a step that looks at nothing that only some steps look at; with one worker."""


PLACES = ["first", "between", "second", "after"]
"""In a step, where a worker is struck."""


@pytest.fixture(scope="module")
def built() -> Path:
    """The folder of the compiled accelerator."""
    try:
        return simulated_accelerator.built()
    except simulated_accelerator.NoCompiler as why:
        pytest.skip(str(why))


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which each process writes what its devices have seen."""
    return tmp_path_factory.mktemp("seen")


@pytest.fixture(scope="module")
def over_hosts(built: Path, log: Path) -> Iterator[Launches]:
    """One device, whose workers speak through the memory of the host."""
    with launches(simulated_accelerator.environment(built, log)) as launched:
        yield launched


@pytest.fixture(scope="module")
def over_nccl(built: Path, log: Path) -> Iterator[Launches]:
    """Three devices, which speak with each other."""
    with launches(simulated_accelerator.environment(built, log, devices=3, nccl=True)) as launched:
        yield launched


def digest(said: str) -> str:
    [found] = re.findall("weights sha256 ([0-9a-f]{64})", said)
    return str(found)


def devices(said: str) -> list[str]:
    """The devices on which the workers have computed."""
    return sorted(re.findall(r"computed on (\S+)", said))


def counted(said: str) -> list[dict[str, float]]:
    """What each worker has counted per step."""
    return [json.loads(line) for line in re.findall(r"counted (\{.*\})", said)]


def wrong(log: Path) -> list[str]:
    """What the devices complain of: races, reads of memory that nobody has written, memory that was freed too early."""
    seen: list[dict[str, Any]] = [json.loads(path.read_text()) for path in log.glob("*.json")]
    assert seen, "nothing ran on a device"
    return [each for one in seen for each in one["reports"]]


def test_the_weights_are_those_of_one_worker_and_a_step_waits_little_and_leaves_nothing(
    over_hosts: Launches, over_nccl: Launches, log: Path, tmp_path: Path
) -> None:
    settings = {"MODEL": "mlp", "EPOCHS": "4"}
    alone = over_hosts(1, SCRIPT, folder=tmp_path / "serial", **settings)
    serial, told = digest(alone), counted(alone)
    for workers in (2, 3):
        shared = over_hosts(workers, SCRIPT, folder=tmp_path / f"shared-{workers}", **settings)
        assert (digest(shared), devices(shared)) == (serial, ["fakegpu:0"] * workers)
        own = over_nccl(workers, SCRIPT, folder=tmp_path / f"own-{workers}", **settings)
        assert (digest(own), devices(own)) == (serial, [f"fakegpu:{number}" for number in range(workers)])
        told += [*counted(shared), *counted(own)]
    assert len(told) == 1 + 2 * (2 + 3)
    assert told[0]["host waits"] <= MOST_WAITS_ALONE
    for each in told:
        assert each["host waits"] <= MOST_WAITS
        assert each["live"] == each["live at first"]
    assert wrong(log) == []


def test_the_state_that_an_optimizer_has_already_goes_along_to_the_device(over_hosts: Launches, tmp_path: Path) -> None:
    settings = {"OPTIMIZER": "Adam", "EARLY_STATE": "1", "EPOCHS": "1"}
    serial = over_hosts(1, SCRIPT, folder=tmp_path / "serial", **settings)
    shared = over_hosts(2, SCRIPT, folder=tmp_path / "shared", **settings)
    assert digest(shared) == digest(serial)
    assert re.findall("seen .*", shared) == re.findall("seen .*", serial) != []


def test_narrow_passes_end_in_the_same_weights_and_so_do_batches_that_are_copied_ahead(
    over_hosts: Launches, over_nccl: Launches, log: Path, tmp_path: Path
) -> None:
    settings = {"MODEL": "cnn", "PRECISION": "fp16", "EPOCHS": "4"}
    serial = digest(over_hosts(1, SCRIPT, folder=tmp_path / "serial", **settings))
    assert digest(over_hosts(2, SCRIPT, folder=tmp_path / "shared", LOADERS="2", **settings)) == serial
    assert digest(over_nccl(3, SCRIPT, folder=tmp_path / "own", LOADERS="1", **settings)) == serial
    assert wrong(log) == []
    assert '"skipped"' in (tmp_path / "own" / "journal.jsonl").read_text()


def test_a_copy_of_a_state_is_read_when_it_has_come(built: Path) -> None:
    copy = (
        "import torch; from unisono.checkpoint.snapshot import *; "
        "state = Snapshot(0, {'weight': torch.arange(5.0, device='fakegpu')}, [], {}); "
        "[copy] = FrozenSnapshot.of(state).tensors['model'].values(); print(copy.tolist())"
    )
    done = python("-c", copy, env=simulated_accelerator.environment(built))
    assert done.stdout.strip() == "[0.0, 1.0, 2.0, 3.0, 4.0]"


HANDED_OVER = """
import torch
from unisono.device import Handover, new_stream, in_stream

device = torch.device("fakegpu:0")
reducing = new_stream(device)
with in_stream(reducing):
    total = torch.ones(2**16, device=device)
    handover = Handover(device)
handover.accept(total)
mean = total / 2
del total
with in_stream(reducing):
    torch.zeros(2**16, device=device)
print(mean.sum().item())
"""
"""Frees a sum in the stream that reduced it, while the stream that got it reads it."""


def test_memory_of_a_sum_is_free_only_behind_the_stream_that_uses_it(built: Path, tmp_path: Path) -> None:
    done = python("-c", HANDED_OVER, env=simulated_accelerator.environment(built, tmp_path))
    assert done.stdout.strip() == str(2.0**15)
    assert wrong(tmp_path) == []


def test_devices_of_any_kind_are_described(built: Path) -> None:
    values = "described(), names(), builds(), describe_reduction()"
    ask = f"import json; from unisono.device import *; print(json.dumps([{values}]))"
    told = python("-c", ask, env=simulated_accelerator.environment(built, devices=2, nccl=True))
    described, names, builds, way = json.loads(told.stdout)
    assert (described, names) == (["Simulated accelerator"] * 2, ["cpu", "fakegpu:0", "fakegpu:1"])
    assert builds["nccl"] is None
    assert "over NCCL where each worker has one of the 2" in way


def test_a_weight_that_a_loops_body_halves_is_no_fault_of_the_memory(over_hosts: Launches, tmp_path: Path) -> None:
    digests = set()
    for workers in (1, 2):
        folder = tmp_path / f"halved-{workers}"
        digests.add(digest(over_hosts(workers, SCRIPT, folder=folder, HALVES="1")))
        assert "rolled back" not in (folder / "journal.jsonl").read_text()
    assert len(digests) == 1
    assert digests != {digest(over_hosts(1, SCRIPT, folder=tmp_path / "serial"))}


def test_the_network_can_be_said(over_nccl: Launches, tmp_path: Path) -> None:
    folder = tmp_path / "said"
    said = over_nccl(2, SCRIPT, folder=folder, UNISONO_TRANSPORT="sockets")
    assert digest(said) == digest(over_nccl(1, SCRIPT, folder=tmp_path / "serial"))
    assert '"backend": "host"' in (folder / "journal.jsonl").read_text()


def test_workers_that_name_the_same_device_speak_through_the_hosts_memory(over_nccl: Launches, tmp_path: Path) -> None:
    serial = digest(over_nccl(1, SCRIPT, folder=tmp_path / "serial"))
    shared = over_nccl(2, SCRIPT, folder=tmp_path / "shared", DEVICE="fakegpu:1")
    assert (digest(shared), devices(shared)) == (serial, ["fakegpu:1"] * 2)
    [line] = [line for line in (tmp_path / "shared" / "journal.jsonl").read_text().splitlines() if '"backend"' in line]
    assert "host" in line
    assert "ranks 0, 1 share the device" in line


@pytest.fixture(scope="module")
def elastic(built: Path, log: Path) -> dict[str, Any]:
    """The variables of elastic jobs whose workers have devices that speak with each other."""
    told = simulated_accelerator.environment(built, log, devices=5, nccl=True)
    devices = {name: told[name] for name in told if name.startswith("FAKEGPU") or name == "PYTHONPATH"}
    return {"PACE_S": "0", "EPOCHS": "4", **devices}


@pytest.fixture(scope="module")
def undisturbed(elastic: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of one worker that nobody disturbs."""
    with closing(Training(tmp_path_factory.mktemp("serial") / "run", "-n", "1", **elastic)) as training:
        return training.end()


@pytest.mark.slow
def test_whoever_is_killed_in_a_step_or_joins_changes_no_bit(
    elastic: dict[str, Any], undisturbed: str, log: Path, tmp_path: Path
) -> None:
    faults = [{"place": place, "step": 2 + 3 * number, "rank": number % 2} for number, place in enumerate(PLACES)]
    # Of five workers two are there for the last fault, though those lost may not be replaced by then.
    options = ("-n", f"{1 + len(PLACES)}", "--max-restarts", "9")
    with closing(Training(tmp_path / "run", *options, faults=faults, **elastic)) as training:
        assert training.end() == undisturbed
    assert len(training.journal("lost")) == len(faults)
    assert wrong(log) == []


@pytest.mark.slow
def test_whoever_hangs_is_given_up_and_nobody_else(elastic: dict[str, Any], undisturbed: str, tmp_path: Path) -> None:
    faults = [{"place": "second", "step": 5, "rank": 1, "signal": "SIGSTOP"}]
    options = ("-n", "3", "--max-restarts", "9", "--failure-timeout-s", "5")
    with closing(Training(tmp_path / "run", *options, faults=faults, **elastic)) as training:
        assert training.end() == undisturbed
    [lost] = training.journal("lost")
    assert lost["worker"] == "w2"
