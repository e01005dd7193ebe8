"""Which cores workers get: from small trees of files as Linux has them, and with real processes."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from uuid import uuid4

import pytest

from unisono.host.machine import CORES, unpin_from_too_few_cores, usable_cores
from unisono.launch.pins import Machine, Pinning, Pins, Tenant, Topology, cpus_of, node_for

pytestmark = pytest.mark.unit


def tree(folder: Path, online: str, cores: Mapping[str, Sequence[int]], nodes: Sequence[str], name: str) -> Path:
    """A folder as ``/sys/devices/system``.

    Args:
        folder: where it is made.
        online: the hardware threads.
        cores: the hardware threads of each core, as text and as numbers.
        nodes: the hardware threads of each NUMA node.
        name: of the file that has a core's threads.
    """
    (folder / "cpu").mkdir()
    (folder / "cpu" / "online").write_text(f"{online}\n")
    for text, cpus in cores.items():
        for cpu in cpus:
            (folder / "cpu" / f"cpu{cpu}" / "topology").mkdir(parents=True)
            (folder / "cpu" / f"cpu{cpu}" / "topology" / name).write_text(f"{text}\n")
    for number, text in enumerate(nodes):
        (folder / "node" / f"node{number}").mkdir(parents=True)
        (folder / "node" / f"node{number}" / "cpulist").write_text(f"{text}\n")
    return folder


def sets(*groups: Sequence[int]) -> tuple[frozenset[int], ...]:
    return tuple(map(frozenset, groups))


TWO_NODES = Topology((sets([0, 4], [1, 5]), sets([2, 6], [3, 7])))
"""Four cores of two hardware threads each."""


@pytest.mark.parametrize("name", ["core_cpus_list", "thread_siblings_list"])
def test_the_tree_of_the_kernel_is_read(name: str, tmp_path: Path) -> None:
    cores = {"0,4": (0, 4), "1,5": (1, 5), "2,6": (2, 6), "3,7": (3, 7)}
    assert Topology.read(tree(tmp_path, "0-7", cores, ["0-1,4-5", "2-3,6-7"], name)) == TWO_NODES


def test_cores_that_are_off_and_nodes_that_have_memory_alone_are_left_out(tmp_path: Path) -> None:
    found = Topology.read(tree(tmp_path, "0,2", {"0-1": (0,), "2": (2,)}, ["0-3", ""], "core_cpus_list"))
    assert found == Topology((sets([0], [2]),))


def test_a_kernel_without_numa_has_one_node(tmp_path: Path) -> None:
    assert Topology.read(tree(tmp_path, "0-1", {"0": (0,), "1": (1,)}, [], "core_cpus_list")) == Topology(
        (sets([0], [1]),)
    )


@pytest.mark.parametrize("online", ["", "all", "0-", "0-99999999", "\xff", "3-1"])
def test_what_cannot_be_read_pins_nobody(online: str, tmp_path: Path) -> None:
    folder = tree(tmp_path, "0", {"0": (0,)}, ["0"], "core_cpus_list")
    (folder / "cpu" / "online").write_text(online, encoding="latin-1")
    assert Topology.read(folder) is None


def machine(**changed: object) -> Machine:
    whole = {"topology": TWO_NODES, "allowed": TWO_NODES.cpus, "cores": 8, "variables": {}, **changed}
    return Machine(**whole)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"topology": None}, "does not say"),
        ({"allowed": frozenset({0, 4})}, "may not run on all cores"),
        ({"cores": 3}, "3 of 8 cores"),
        ({"variables": {"OMP_PROC_BIND": "true"}}, "OMP_PROC_BIND"),
        ({"has_gpus": True}, "GPU"),
        ({"topology": Topology((sets([0], [1]),)), "allowed": frozenset({0, 1}), "cores": 2}, "the same memory"),
    ],
)
def test_nobody_is_pinned_where_somebody_has_chosen_or_it_could_hurt(changed: dict[str, object], words: str) -> None:
    assert words in machine(**changed).obstacle(to_cores=False)


def test_workers_are_pinned_where_nobody_has_chosen() -> None:
    assert machine().obstacle(to_cores=False) == ""
    one = Topology((sets([0], [1]),))
    assert machine(topology=one, allowed=one.cpus, cores=2, has_gpus=True).obstacle(to_cores=True) == ""


def tenants(*homes: int, devices: int = 1) -> list[Tenant]:
    return [Tenant(node, tuple(range(at * devices, (at + 1) * devices))) for at, node in enumerate(homes)]


def test_new_workers_go_where_there_is_most_room() -> None:
    there: list[Tenant] = []
    for number in range(4):
        there.append(Tenant(node_for(TWO_NODES, there), (number,)))
    assert [each.node for each in there] == [0, 1, 0, 1]
    del there[0]
    assert node_for(TWO_NODES, there) == 0


def test_workers_share_the_whole_of_their_node_or_have_cores_of_their_own() -> None:
    left, right = sets([0, 1, 4, 5], [2, 3, 6, 7])
    assert cpus_of(TWO_NODES, tenants(0, 1, 0), 1, to_cores=False) == {0: left, 1: right, 2: left}
    assert cpus_of(TWO_NODES, tenants(0, 1, 0), 1, to_cores=True) == {
        0: frozenset({0, 4}),
        1: right,
        2: frozenset({1, 5}),
    }


def test_devices_of_a_worker_stay_on_its_node() -> None:
    assert cpus_of(TWO_NODES, tenants(0, 1, devices=2), 2, to_cores=True) == dict(
        enumerate(sets([0, 4], [1, 5], [2, 6], [3, 7]))
    )


@pytest.mark.parametrize(("homes", "threads"), [((0, 1, 0, 1, 0, 1, 0, 1, 0), 1), ((0, 1), 5), ((0, 1, 0), 3)])
def test_nobody_is_pinned_where_threads_are_more_than_there_are_cores(homes: Sequence[int], threads: int) -> None:
    found = cpus_of(TWO_NODES, tenants(*homes), threads, to_cores=True)
    assert set(found.values()) == {TWO_NODES.cpus}


def test_a_share_that_is_too_small_for_the_threads_is_given_up_for_the_whole_node() -> None:
    three = Topology((sets([0], [1], [2]),))
    assert set(cpus_of(three, tenants(0, 0), 1, to_cores=True).values()) == set(sets([0], [1, 2]))
    four = Topology((sets([0], [1], [2], [3], [4]),))
    assert set(cpus_of(four, tenants(0, 0), 2, to_cores=True).values()) == set(sets([0, 1], [2, 3, 4]))
    assert set(cpus_of(three, tenants(0), 2, to_cores=True).values()) == {three.cpus}


@pytest.mark.parametrize("count", range(1, 9))
def test_shares_are_disjoint_and_leave_no_core_idle(count: int) -> None:
    topology = Topology((tuple(frozenset({cpu}) for cpu in range(8)),))
    found = cpus_of(topology, tenants(*[0] * count), 1, to_cores=True).values()
    assert sorted(cpu for each in found for cpu in each) == list(range(8))
    assert max(map(len, found)) - min(map(len, found)) <= 1


# With real processes, on the cores that this one has.


WAITS = "import sys, threading; threading.Thread(target=sys.stdin.read).start(); print(flush=True)"


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Three, of two threads each, that wait until they are let go."""
    started = [
        subprocess.Popen([sys.executable, "-c", WAITS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(3)
    ]
    for one in started:
        assert one.stdout is not None
        one.stdout.readline()
    yield started
    for one in started:
        one.communicate()


def where(process: subprocess.Popen[bytes]) -> set[frozenset[int]]:
    """Where the threads of a process may run."""
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    return {frozenset(os.sched_getaffinity(int(task.name))) for task in tasks}


def here() -> Topology:
    """The cores of this process, as if each were of its own."""
    return Topology((tuple(frozenset({cpu}) for cpu in sorted(os.sched_getaffinity(0))),))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two cores are needed")
def test_workers_get_other_cores_as_they_come_and_go(processes: list[subprocess.Popen[bytes]]) -> None:
    topology, (one, two, third) = here(), processes
    said: list[str] = []
    pins = Pins(Pinning(topology, 1, to_cores=True), said.append, host=f"\0{uuid4()}")
    with pins.opened():
        pins.began("w1", one.pid)
        assert where(one) == {topology.cpus}
        pins.began("w2", two.pid)
        assert len(where(one)) == len(where(two)) == 1
        assert not next(iter(where(one))) & next(iter(where(two)))
        pins.ended(one.pid)
        assert where(two) == {topology.cpus}
    pins.began("w3", third.pid)
    assert where(third) == {topology.cpus}
    assert said == []


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two cores are needed")
def test_a_worker_that_chose_its_cores_itself_is_left_alone(processes: list[subprocess.Popen[bytes]]) -> None:
    topology, (one, two, _) = here(), processes
    chosen = frozenset({max(topology.cpus)})
    for task in Path(f"/proc/{one.pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), chosen)
    pins = Pins(Pinning(topology, 1, to_cores=True), print, host=f"\0{uuid4()}")
    with pins.opened():
        pins.began("w1", one.pid)
        pins.began("w2", two.pid)
        assert where(one) == {chosen}


def test_of_two_launchers_on_a_host_only_one_pins(processes: list[subprocess.Popen[bytes]]) -> None:
    topology, name, said = here(), f"\0{uuid4()}", list[str]()
    first, second = (Pins(Pinning(topology, 1, to_cores=True), said.append, host=name) for _ in range(2))
    with first.opened():
        with second.opened():
            for number, one in enumerate(processes[:2]):
                second.began(f"w{number}", one.pid)
            assert [where(one) for one in processes[:2]] == [{topology.cpus}] * 2
        assert said == ["workers are not pinned to cores: another job on this host pins its own"]
    with second.opened():
        assert len(said) == 1


def test_a_process_that_has_ended_already_is_no_matter() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    pins = Pins(Pinning(here(), 1, to_cores=True), print, host=f"\0{uuid4()}")
    with pins.opened():
        pins.began("w1", gone.pid)
        pins.began("w2", 2**22)  # more than Linux gives to any process
        pins.ended(gone.pid)


def test_a_pinned_worker_knows_how_many_cores_all_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CORES, "1")
    assert usable_cores() == 1
    before = os.sched_getaffinity(0)
    try:
        unpin_from_too_few_cores(len(before))
        assert os.sched_getaffinity(0) == before
        os.sched_setaffinity(0, {min(before)})
        unpin_from_too_few_cores(2)
        assert os.sched_getaffinity(0) == before
    finally:
        os.sched_setaffinity(0, before)
