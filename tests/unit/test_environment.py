import re
import subprocess
import sys
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import JobError
from unisono.membership.environment import (
    PORTS,
    Environment,
    RendezvousAddress,
    first_host,
    recognise,
    tasks_per_node,
)

pytestmark = pytest.mark.unit

UNISONO = {
    "UNISONO_RANK": "0",
    "UNISONO_WORLD_SIZE": "4",
    "UNISONO_LOCAL_RANK": "0",
    "UNISONO_LOCAL_WORLD_SIZE": "4",
    "UNISONO_STORE": "127.0.0.1:4711",
    "UNISONO_STORE_FD": "9",
}
PLAIN = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
TORCHRUN = {**PLAIN, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
SBATCH = {
    "SLURM_JOB_ID": "200505",
    "SLURM_NTASKS": "5",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_NODELIST": "gpu[03-04,07],x1",
    "SLURMD_NODENAME": "gpu03",
}
SRUN = {
    **SBATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "gpu[03-04,07]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURMD_NODENAME": "gpu04",
}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


SALLOC = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "gpu03"}
ALONE = {name: "0" if name.endswith("RANK") else "1" for name in UNISONO if "STORE" not in name}
ELASTIC = {"UNISONO_COORDINATOR": "http://127.0.0.1:1", "UNISONO_WORKER": "w3", "UNISONO_LOCAL_RANK": "2"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"PATH": "/bin"}, Environment("single", 0, 1, 0, 1, "a")),
        ({"RANK": "", "WORLD_SIZE": ""}, Environment("single", 0, 1, 0, 1, "a")),
        ({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}, Environment("single", 0, 1, 0, 1, "a")),
        (SBATCH, Environment("single", 0, 1, 0, 1, "a")),
        (SALLOC, Environment("single", 0, 1, 0, 1, "a")),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Environment("env", 0, 1, 0, 1, "a")),
        (ELASTIC, Environment("single", 0, 1, 2, 3, "a")),
        (ALONE, Environment("unisono", 0, 1, 0, 1, "a")),
    ],
    ids=[
        *("no variables", "empty ones", "an address alone", "a batch script", "a shell of salloc", "a world of one"),
        *("an elastic worker, which knows its place on the host", "one worker of unisono run"),
    ],
)
def test_a_worker_alone_meets_nobody(environ: dict[str, str], expected: Environment) -> None:
    assert recognise(environ, "a") == expected


def test_unisono_run_hands_its_open_socket_to_rank_0_alone() -> None:
    address = RendezvousAddress("127.0.0.1", 4711, store_fd=9)
    assert recognise(UNISONO, "a") == Environment("unisono", 0, 4, 0, 4, "a", address)
    other = without(UNISONO, "UNISONO_STORE_FD") | {"UNISONO_RANK": "3", "UNISONO_LOCAL_RANK": "3"}
    assert recognise(other, "a").rendezvous == RendezvousAddress("127.0.0.1", 4711)


def test_torchrun_is_recognised_and_described_in_one_line() -> None:
    environment = recognise(TORCHRUN, "a")
    assert environment == Environment("torchrun", 2, 4, 0, 2, "a", RendezvousAddress("10.0.0.1", 29500))
    assert environment.describe() == "torchrun: rank 2 of 4 on host a, rendezvous 10.0.0.1:29500"


def test_unisono_comes_before_torchrun_and_torchrun_before_slurm() -> None:
    assert recognise(UNISONO | TORCHRUN | SRUN).launcher == "unisono"
    assert recognise(TORCHRUN | SRUN).launcher == "torchrun"
    assert recognise(PLAIN | SRUN).launcher == "env"


@pytest.mark.parametrize(
    ("said", "place", "words"),
    [
        ({"MASTER_ADDR": "127.0.0.1"}, (2, 4), ""),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, (0, 2), ""),
        ({}, (0, 1), "LOCAL_RANK is not set"),
        ({"LOCAL_RANK": "1"}, (1, 4), "LOCAL_WORLD_SIZE is not set"),
    ],
)
def test_what_is_assumed_about_a_host_is_said(said: dict[str, str], place: tuple[int, int], words: str) -> None:
    found = recognise(PLAIN | said, "a")
    assert (found.launcher, found.local_rank, found.local_world_size) == ("env", *place)
    assert words in found.describe()
    assert bool(found.note) == bool(words)


def test_a_step_of_slurm_is_recognised() -> None:
    environment = recognise(SRUN, "ignored")
    assert environment.rendezvous is not None
    assert environment.rendezvous.address == "gpu03"
    assert environment.rendezvous.port in PORTS
    assert environment == Environment("slurm", 3, 5, 1, 2, "gpu04", environment.rendezvous)


def test_all_tasks_of_a_step_derive_one_port_and_other_steps_another() -> None:
    here = recognise(SRUN).rendezvous
    assert here == recognise(SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}).rendezvous
    assert here != recognise(SRUN | {"SLURM_STEP_ID": "1"}).rendezvous
    assert here != recognise(SRUN | {"SLURM_JOB_ID": "200506"}).rendezvous


def test_address_and_port_of_a_step_can_be_given() -> None:
    given = recognise(SRUN | {"MASTER_ADDR": "login", "MASTER_PORT": "4000"}).rendezvous
    assert given == RendezvousAddress("login", 4000)


@pytest.mark.parametrize("step", ["4294967290", "4294967291", "4294967292"])
def test_the_shells_that_slurm_calls_a_step_are_one_worker(step: str) -> None:
    assert recognise(SRUN | {"SLURM_STEP_ID": step}, "a").launcher == "single"


def test_a_batch_script_may_export_the_world_size_of_its_step() -> None:
    assert recognise(SRUN | {"WORLD_SIZE": "5"}).launcher == "slurm"
    with pytest.raises(JobError, match=r"WORLD_SIZE=4 and SLURM_STEP_NUM_TASKS=5 .*contradict"):
        recognise(SRUN | {"WORLD_SIZE": "4"})


def test_a_step_without_counts_per_host_says_what_it_assumes() -> None:
    environment = recognise(without(SRUN, "SLURM_STEP_TASKS_PER_NODE"))
    assert environment.local_world_size == 5
    assert "SLURM_STEP_TASKS_PER_NODE is not set" in environment.describe()


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "2"}, "WORLD_SIZE is not set in the environment, but RANK=2 is: set both"),
        ({"WORLD_SIZE": "2"}, "RANK is not set in the environment, but WORLD_SIZE=2 is: set both"),
        (PLAIN | {"RANK": "4"}, "RANK=4 and WORLD_SIZE=4 .*contradict.* 0 to 3"),
        (PLAIN | {"RANK": "two"}, "RANK='two' .*whole number of at least 0"),
        (PLAIN | {"WORLD_SIZE": "0"}, "WORLD_SIZE='0' .*at least 1"),
        (PLAIN | {"MASTER_PORT": "http"}, "MASTER_PORT='http'"),
        (PLAIN | {"MASTER_PORT": "65536"}, "MASTER_PORT='65536' .*at most 65535"),
        (
            without(PLAIN, "MASTER_ADDR"),
            "MASTER_ADDR is not set .*RANK=2 and WORLD_SIZE=4 are.* address of rank 0",
        ),
        (without(PLAIN, "MASTER_PORT"), "MASTER_PORT is not set .* port of rank 0"),
        (PLAIN | {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK=2 and LOCAL_WORLD_SIZE=2"),
        (PLAIN | {"LOCAL_RANK": "4"}, "LOCAL_RANK=4 and WORLD_SIZE=4"),
        (without(TORCHRUN, "RANK"), "RANK is not set .*started by torchrun"),
        (without(UNISONO, "UNISONO_STORE"), "UNISONO_STORE is not set .*unisono run"),
        (UNISONO | {"UNISONO_STORE": "4711"}, "UNISONO_STORE='4711'.*ADDRESS:PORT"),
        (UNISONO | {"UNISONO_STORE_FD": "x"}, "UNISONO_STORE_FD='x'"),
        (UNISONO | {"UNISONO_RANK": "4"}, "UNISONO_RANK=4 and UNISONO_WORLD_SIZE=4"),
        (SRUN | {"SLURM_PROCID": "5"}, "SLURM_PROCID=5 and SLURM_STEP_NUM_TASKS=5"),
        (SRUN | {"SLURM_LOCALID": "2"}, "SLURM_STEP_TASKS_PER_NODE=.*SLURM_LOCALID=2.*contradict"),
        (
            without(SRUN, "SLURM_NODEID") | {"SLURM_LOCALID": "5"},
            "SLURM_STEP_NUM_TASKS=5 and SLURM_LOCALID=5 .*contradict",
        ),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2x"}, "SLURM_STEP_TASKS_PER_NODE='2x'"),
        (SRUN | {"SLURM_STEP_NODELIST": "[gpu"}, r"SLURM_STEP_NODELIST='\[gpu'"),
        (without(SRUN, "SLURM_STEP_NODELIST"), "SLURM_STEP_NODELIST is not set"),
    ],
)
def test_half_set_and_contradictory_variables_are_named_with_their_value(environ: dict[str, str], words: str) -> None:
    with pytest.raises(JobError, match=words):
        recognise(environ)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu03", "gpu03"),
        ("gpu[03-04,07],x1", "gpu03"),
        ("x1,gpu[03-04,07]", "x1"),
        ("rack[1-2]node[07,09]", "rack1node07"),
        ("node-a.example.org,node-b", "node-a.example.org"),
        ("tux[5]", "tux5"),
        ("a[1-2]-ib,b", "a1-ib"),
    ],
)
def test_the_first_host_of_a_list_is_found(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


@pytest.mark.parametrize("nodelist", [",a", "gpu[", "gpu]", "gpu[]", "a b", "gpu[x-y]"])
def test_a_text_that_is_no_list_of_hosts_is_refused(nodelist: str) -> None:
    with pytest.raises(JobError, match="SLURM_STEP_NODELIST="):
        first_host(nodelist)


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 9)), min_size=1, max_size=6))
def test_counts_per_host_are_expanded(groups: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in groups)
    assert tasks_per_node(text) == [count for count, times in groups for _ in range(times)]


@given(
    st.dictionaries(st.sampled_from(sorted({*TORCHRUN, *SRUN, *UNISONO})), st.sampled_from([*"0125x", "2(x2)", "a:1"]))
)
def test_whatever_the_variables_say_the_answer_is_an_environment_or_a_clear_error(
    environ: dict[str, str],
) -> None:
    with suppress(JobError):
        environment = recognise(environ, "a")
        assert 0 <= environment.rank < environment.world_size
        assert 0 <= environment.local_rank < environment.local_world_size


def test_recognising_loads_no_torch() -> None:
    program = "import sys, unisono.membership.environment; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# -- the devices of a worker


def process(rank: int, local_rank: int | None = None, size: int = 6, local_size: int = 6) -> Environment:
    return Environment("torchrun", rank, size, rank if local_rank is None else local_rank, local_size, "a")


def test_neighbouring_processes_are_the_devices_of_one_worker() -> None:
    workers = [process(rank).worker(3) for rank in range(6)]
    assert [(one.rank, one.world_size, one.local_rank, one.local_world_size) for one in workers] == [
        *3 * [(0, 2, 0, 2)],
        *3 * [(1, 2, 1, 2)],
    ]
    devices = [process(rank).device(3) for rank in range(6)]
    assert [(one.rank, one.world_size, one.local_rank) for one in devices] == 2 * [(0, 3, 0), (1, 3, 1), (2, 3, 2)]


@pytest.mark.parametrize(
    ("where", "devices", "words"),
    [
        (process(0), 4, "devices_per_worker=4: the job has 6 processes, which are no whole number of workers"),
        (process(0, local_size=3), 2, "host a has 3 processes, which are no whole number of workers"),
        (
            process(1, local_rank=0, size=2, local_size=1),
            2,
            "start a multiple of 2 processes on each host, or take fewer",
        ),
        (process(3, local_rank=0, local_size=2), 2, "rank 3 is number 0 of host a"),
    ],
)
def test_processes_that_are_no_whole_workers_are_refused(where: Environment, devices: int, words: str) -> None:
    with pytest.raises(JobError, match=re.escape(words)):
        where.worker(devices)
