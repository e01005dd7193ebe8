"""A study over numbers of nodes, on a real Slurm and on a real Ray cluster: figures of each, and one digest."""

import csv
import sys
from pathlib import Path

import pytest

from ray_cluster import NoCluster, ray_nodes
from slurm_cluster import Cluster
from slurm_jobs import SCRIPT
from training import whole_lines

pytestmark = [pytest.mark.procs, pytest.mark.slow, pytest.mark.timeout(400)]

STUDY = ("study", "--workers", "1,2,3", "--repeats", "1", "--steps", "8", "--warmup", "2")


def require_figures(folder: Path) -> None:
    """All numbers of workers were measured, on as many workers, and ended with one digest."""
    with (folder / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["workers"]: row["exit_code"] for row in rows} == {"1": "0", "2": "0", "3": "0"}
    assert all(float(row["seconds"]) > 0 for row in rows)
    sizes = {
        tuple({line["world_size"] for line in whole_lines(path) if "loss" in line})
        for path in folder.rglob("metrics.jsonl")
    }
    assert sizes == {(1,), (2,), (3,)}
    assert len({row["digest"] for row in rows}) == 1


def test_a_study_over_node_counts_through_slurm(cluster: Cluster, tmp_path: Path) -> None:
    options = ("--time", "10", "--nodes", "3", "--workers-per-node", "1", "--submit")
    command = (sys.executable, "-m", "unisono", "slurm", str(SCRIPT), *options, "--", *STUDY)
    job = cluster.run(*command, folder=tmp_path, PACE_S="0", HURRY=str(tmp_path / "x")).split()[-1]
    cluster.until(job, "COMPLETED")
    require_figures(tmp_path / f"runs/slurm-{job}")


def test_a_study_on_the_nodes_of_ray(tmp_path: Path) -> None:
    try:
        with ray_nodes(1) as cluster:
            for _ in range(2):
                cluster.add()
            words = (*STUDY, "--out", "study", "--on", "ray", str(SCRIPT))
            driver = cluster.start("unisono", *words, folder=tmp_path, PACE_S="0", HURRY=str(tmp_path / "x"))
            assert driver.wait(300) == 0, (tmp_path / "output").read_text()
    except NoCluster as error:
        pytest.skip(f"NO RAY CLUSTER: {error}")
    require_figures(tmp_path / "study")
