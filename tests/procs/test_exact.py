"""The promise: one job, one bit pattern, on any number of workers."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from launches import Launches, launches
from serial_runs import SerialRuns
from unisono.checkpoint.checkpoint_store import load_weights

pytestmark = [
    pytest.mark.procs,
    pytest.mark.timeout(600),
]  # the first test waits for all jobs

ROOT = Path(__file__).parents[2]
JOBS = Path(__file__).parent / "scripts" / "exact_jobs.py"
HOSTS = Path(__file__).parent / "scripts" / "hosts.py"
WORKERS = (1, 2, 3, 5)
FULL = 8
"""As many workers as shards."""

WHAT_TRAVELS = frozenset(
    (
        "batch_norm_dropout_tied_unused",
        "a_batch_that_shards_do_not_divide",
        "a_last_batch_smaller_than_the_number_of_shards",
        "thirteen_shards",
        "float64",
        "bf16_parameters",
        "small_buckets",
        "a_parameter_that_only_some_shards_use",
        "token_weighted_loss_with_a_shard_without_tokens",
        "a_gan_with_two_updates_on_one_batch",
        "gradients_compressed_to_bf16",
    )
)
"""Jobs that differ in what goes from worker to worker. The others are tried over fewer ways and numbers of workers."""

FEW = (
    "batch_norm_dropout_tied_unused",
    "a_last_batch_smaller_than_the_number_of_shards",
    "token_weighted_loss_with_a_shard_without_tokens",
)
"""Jobs that are tried with as many workers as shards; the others of those at night."""

ON_ALL_NUMBERS = WHAT_TRAVELS | {
    "exact_strategies_in_turn",
    "state_outside_of_the_model",
    "metrics_and_a_scheduler",
    "random_augmentation_in_this_process",
    "random_augmentation_in_loader_processes",
}
"""Jobs in which the number of workers decides who does what. The others are tried on 2 and 5 at night."""

OF_ALL_JOBS = (1, 3)

SHARDS = {"UNISONO_SHARDS": "8"}
QUIET = {**os.environ, "PYTHONWARNINGS": "ignore::UserWarning", "OMP_WAIT_POLICY": "passive"}
"""There are more threads than cores: none is to wait for another one by keeping a core busy."""


@pytest.fixture(scope="module")
def launch() -> Iterator[Launches]:
    with launches(QUIET, **SHARDS) as found:
        yield found


def python(*command: str, folder: Path, **variables: str) -> str:
    """Run a script to its end as one worker, by itself: no launcher forks it. Returns what it printed."""
    own = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "UNISONO_RUN_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, *command],
        env={**QUIET, **SHARDS, **own, **variables},
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return done.stdout


def reports_in(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in re.findall(r"RESULT (.*)", output)]


def by_job(output: str) -> dict[str, list[Any]]:
    """What every worker reported of each job."""
    reports = reports_in(output)
    return {name: [report for report in reports if report["job"] == name] for name in {each["job"] for each in reports}}


@pytest.fixture(scope="module")
def results(launch: Launches, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, list[Any]]]:
    """For each number of workers and each job, what every worker reported."""
    found: dict[int, dict[str, list[Any]]] = {}
    for workers in WORKERS:
        jobs = job_names() if workers in OF_ALL_JOBS else ON_ALL_NUMBERS
        command = (str(JOBS), *sorted(jobs))
        folder = tmp_path_factory.mktemp("exact") / "run"
        output = python(*command, folder=folder) if workers == 1 else launch(workers, *command, folder=folder)
        found[workers] = by_job(output)
    return found


EXAMPLES = {
    "digits.py": ("--epochs 1", "--epochs 1 --batch-size 100"),
    "char_lm.py": tuple(
        f"--batch-size {size} --steps {steps} --layers 1 --width 32 --context 32" for size, steps in ((128, 6), (99, 4))
    ),
}
"""Each with batches that eight shards divide, and with others."""

STEPS = {"UNISONO_STOP_AFTER": "8"}
"""Of each of them at most: some more than one that is cut off and goes on."""

slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("topology", "workers", "are_all"),
    [
        ("direct", 3, False),
        pytest.param("direct", 3, True, marks=slow),
        pytest.param("ring", 3, False, marks=slow),
        pytest.param("tree", 5, False, marks=slow),
        pytest.param("star", 3, False, marks=slow),
    ],
)
def test_between_hosts_the_bits_are_those_of_shared_memory(
    topology: str,
    workers: int,
    are_all: bool,
    launch: Launches,
    results: dict[int, dict[str, list[Any]]],
    tmp_path: Path,
) -> None:
    jobs = [name for name in job_names() if are_all or name in WHAT_TRAVELS]
    output = launch(workers, str(JOBS), *jobs, folder=tmp_path / "run", UNISONO_TOPOLOGY=topology)
    reports = reports_in(output)
    assert len(reports) == workers * len(jobs)
    assert all(report == results[1][report["job"]][0] for report in reports)


SERVED = (
    "batch_norm_dropout_tied_unused",
    "a_last_batch_smaller_than_the_number_of_shards",
    "adamw_clipped_by_norm",
    "a_gan_with_two_updates_on_one_batch",
    "metrics_and_a_scheduler",
    "gradients_that_are_watched",
    "random_augmentation_in_loader_processes",
    "gradients_compressed_to_bf16",
)
"""Jobs in which a worker that only serves could fail in a way of its own."""


@pytest.mark.parametrize(
    ("servers", "workers", "transport"),
    [(1, 2, "shared_memory"), (2, 3, "sockets"), pytest.param(2, 5, "shared_memory", marks=slow)],
)
def test_whether_workers_or_servers_finish_the_sums_changes_no_bit(
    servers: int,
    workers: int,
    transport: str,
    launch: Launches,
    results: dict[int, dict[str, list[Any]]],
    tmp_path: Path,
) -> None:
    way = {"UNISONO_STRATEGY": f"parameter-server:servers={servers}", "UNISONO_TRANSPORT": transport}
    reports = reports_in(launch(workers, str(JOBS), *SERVED, folder=tmp_path / "run", **way))
    assert len(reports) == workers * len(SERVED)
    assert all(report == results[1][report["job"]][0] for report in reports)


def test_the_topology_that_was_measured_to_be_the_fastest_changes_no_bit_and_is_in_the_journal(
    launch: Launches, results: dict[int, dict[str, list[Any]]], tmp_path: Path
) -> None:
    job, workers = "batch_norm_dropout_tied_unused", 3
    output = launch(workers, str(JOBS), job, folder=tmp_path / "run", UNISONO_TRANSPORT="sockets")
    reports = reports_in(output)
    assert reports == [results[1][job][0]] * workers
    journal = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    measured = [line for line in journal if line["event"] == "topology"]
    assert measured
    for line in measured:
        assert set(line["seconds"]) == {"direct", "ring", "tree"}
        assert line["fastest"] in line["seconds"]


ExampleWeights = Callable[[str, int], list[str]]


@pytest.fixture(scope="module")
def example_weights(launch: Launches, tmp_path_factory: pytest.TempPathFactory) -> ExampleWeights:
    """The weights that an example ends in, on any number of workers."""

    @cache
    def weights(example: str, workers: int) -> list[str]:
        folder = tmp_path_factory.mktemp("examples")
        (folder / "script.py").write_text(
            "import runpy, sys\n"
            + "".join(
                f"sys.argv = {[example, *flags.split()]!r}\n"
                f"runpy.run_path({str(ROOT / 'examples' / example)!r})['main']()\n"
                for flags in EXAMPLES[example]
            )
        )
        return weights_in(launch(workers, str(folder / "script.py"), folder=folder / "run", **STEPS))

    return weights


ON_HOSTS = (
    "batch_norm_dropout_tied_unused",
    "thirteen_shards",
    "small_buckets",
    "gradients_compressed_to_bf16",
    "adamw_clipped_by_norm",
)


@pytest.mark.slow
def test_on_hosts_with_several_workers_the_bits_are_those_of_one_worker(
    results: dict[int, dict[str, list[Any]]], tmp_path: Path
) -> None:
    hosts, local = 2, 2
    variables = {"UNISONO_TRANSPORT": "hierarchical"}
    output = python(str(HOSTS), f"{hosts}", f"{local}", *ON_HOSTS, folder=tmp_path / "run", **variables)
    reports = reports_in(output)
    assert len(reports) == hosts * local * len(ON_HOSTS)
    assert all(report == results[1][report["job"]][0] for report in reports)


def weights_in(output: str) -> list[str]:
    return re.findall(r"weights sha256 (\w+)", output)


# tests/procs/test_examples.py has them on 2 and 3, with even batches; each worker of digits.py loads scikit-learn.
@pytest.mark.parametrize(
    ("example", "workers"),
    [
        *(pytest.param(*each, marks=slow) for each in product(EXAMPLES, (2, 3))),
        *(pytest.param(each, 5, marks=slow) for each in EXAMPLES),
    ],
)
def test_digits_and_char_lm_end_in_the_same_weights_on_any_number_of_workers(
    example: str, workers: int, example_weights: ExampleWeights
) -> None:
    assert len(set(example_weights(example, 1))) == len(EXAMPLES[example])
    assert example_weights(example, workers) == example_weights(example, 1)


@pytest.mark.parametrize("example", [pytest.param("digits.py", marks=slow), "char_lm.py"])
def test_an_example_cut_off_on_two_workers_goes_on_in_the_middle_of_an_epoch_on_three(
    example: str, launch: Launches, example_weights: ExampleWeights, tmp_path: Path
) -> None:
    script, flags = str(ROOT / "examples" / example), EXAMPLES[example][0].split()
    cut = {"UNISONO_STOP_AFTER": "4", "UNISONO_CHECKPOINT_EVERY": "3"}
    before = weights_in(launch(2, script, *flags, folder=tmp_path / "run", **cut))
    after = weights_in(launch(3, script, *flags, folder=tmp_path / "run", **STEPS))
    events = [json.loads(line)["event"] for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    assert before != after == [example_weights(example, 1)[0]]
    assert "resumed" in events


CUT_OFF = """
import sys
sys.path.insert(0, {folder!r})
from exact_jobs import Net, cross_entropy, images
import torch, unisono
run = unisono.init(batch_size=61, shards=8, seed=3)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run.prepare(model, optimizer)
for step in run.steps(images(150), epochs=3):
    step.run(cross_entropy)
    if step.number == 4:
        run.checkpoint()
run.finish()
"""


@pytest.mark.usefixtures("serial_launches")
def test_a_model_with_everything_goes_on_in_the_middle_of_an_epoch_on_another_number_of_workers(
    launch: Launches, serial_runs: SerialRuns, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(CUT_OFF.format(folder=str(JOBS.parent)))
    expected = [serial_runs(script).end()]
    launch(2, str(script), folder=tmp_path / "run", UNISONO_STOP_AFTER="5")
    assert weights_in(launch(3, str(script), folder=tmp_path / "run")) == expected


NATIVE = """
import sys
sys.path.insert(0, {folder!r})
from exact_jobs import cross_entropy, images
import torch, unisono
from torch import nn
run = unisono.init(batch_size=61, shards=8, seed=3, arithmetic=unisono.Arithmetic(reduction=sys.argv[1]))
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
for step in run.steps(images(150), epochs=3):
    step.run(cross_entropy)
run.checkpoint()
run.finish()
"""


@pytest.mark.parametrize("workers", [pytest.param(1, marks=slow), 3])
def test_native_reduction_agrees_with_exact_to_a_hundred_thousandth(
    launch: Launches, workers: int, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(NATIVE.format(folder=str(JOBS.parent)))

    def weights(reduction: str) -> torch.Tensor:
        launch(workers, str(script), reduction, folder=tmp_path / reduction)
        return torch.cat([value.flatten() for value in load_weights(tmp_path / reduction).values()])

    exact, native = weights("exact"), weights("native")
    assert (exact - native).norm() <= 1e-5 * exact.norm()


@cache
def job_names() -> list[str]:
    return re.findall(r"@job\ndef (\w+)", JOBS.read_text())


@pytest.mark.parametrize("job", job_names())
def test_every_worker_of_any_number_ends_with_the_same_bits(job: str, results: dict[int, dict[str, list[Any]]]) -> None:
    serial = results[1][job][0]
    for workers in WORKERS if job in ON_ALL_NUMBERS else OF_ALL_JOBS:
        assert len(results[workers][job]) == workers
        assert all(report == serial for report in results[workers][job]), f"{workers} workers"


@slow
@pytest.mark.parametrize("workers", [2, 5])
def test_the_other_jobs_end_with_the_same_bits_on_two_and_on_five_workers(
    workers: int, launch: Launches, results: dict[int, dict[str, list[Any]]], tmp_path: Path
) -> None:
    others = sorted({*job_names()} - ON_ALL_NUMBERS)
    found = by_job(launch(workers, str(JOBS), *others, folder=tmp_path / "run"))
    assert found == {job: results[1][job] * workers for job in others}


@pytest.mark.parametrize(
    "jobs",
    [pytest.param(FEW, marks=slow), pytest.param(sorted(WHAT_TRAVELS - {*FEW}), marks=slow)],
    ids=["few", "others"],
)
def test_as_many_workers_as_shards_end_with_the_same_bits(
    jobs: Sequence[str], launch: Launches, results: dict[int, dict[str, list[Any]]], tmp_path: Path
) -> None:
    found = by_job(launch(FULL, str(JOBS), *jobs, folder=tmp_path / "run"))
    assert found == {job: results[1][job] * FULL for job in jobs}


def test_another_seed_other_shards_or_another_batch_size_give_other_bits(
    results: dict[int, dict[str, list[Any]]],
) -> None:
    names = ("batch_norm_dropout_tied_unused", "another_seed", "other_shards", "another_batch_size")
    assert len({results[1][name][0]["digest"] for name in names}) == len(names)


def test_the_size_of_buckets_changes_no_bit(results: dict[int, dict[str, list[Any]]]) -> None:
    whole, small = results[3]["batch_norm_dropout_tied_unused"][0], results[3]["small_buckets"][0]
    assert small["digest"] == whole["digest"]


def test_reducing_beside_the_backward_pass_changes_no_bit(results: dict[int, dict[str, list[Any]]]) -> None:
    beside, after = results[3]["reduced_beside_the_backward_pass"][0], results[3]["reduced_after_the_backward_pass"][0]
    assert beside["digest"] == after["digest"]


@pytest.mark.parametrize("workers", WORKERS)
def test_servers_that_come_and_go_between_the_steps_change_no_bit(
    workers: int, results: dict[int, dict[str, list[Any]]]
) -> None:
    switched, whole = (
        results[workers][name][0]["digest"] for name in ("exact_strategies_in_turn", "batch_norm_dropout_tied_unused")
    )
    assert switched == whole


def test_compression_gives_other_bits(results: dict[int, dict[str, list[Any]]]) -> None:
    whole, compressed = results[1]["a_batch_that_shards_do_not_divide"], results[1]["gradients_compressed_to_bf16"]
    assert whole[0]["digest"] != compressed[0]["digest"]


def test_loader_processes_change_no_bit_of_random_augmentation(results: dict[int, dict[str, list[Any]]]) -> None:
    inside, outside = (
        results[2][name][0]["digest"]
        for name in ("random_augmentation_in_this_process", "random_augmentation_in_loader_processes")
    )
    assert inside == outside
