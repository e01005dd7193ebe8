"""/metrics of a job that trains, as Prometheus itself scrapes it."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families

from training import Training

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240)]

BOARD = Path(__file__).parents[2] / "docs" / "grafana" / "unisono.json"
PROMETHEUS = shutil.which("prometheus")
PATIENCE_S = 60.0


def ask(address: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
    with closing(http.client.HTTPConnection(address, timeout=PATIENCE_S)) as connection:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


def address_of(run_dir: Path) -> str:
    return str(urlsplit(json.loads((run_dir / "coordinator.json").read_text())["url"]).netloc)


def training(folder: Path, started: list[Training], *faults: dict[str, Any]) -> Training:
    found = Training(folder, "-n", "2", "--max-restarts", "1", faults=faults, PACE_S="0.05", EPOCHS="100")
    started.append(found)
    found.until_step(3)
    return found


def test_a_job_that_trains_tells_its_step_its_loss_and_its_workers(started: list[Training], tmp_path: Path) -> None:
    job = training(tmp_path / "run", started)
    address, token = address_of(job.run_dir), (job.run_dir / "token").read_text().strip()
    assert ask(address, "/metrics", {})[0] == 401
    status, text = ask(address, "/metrics", {"Authorization": f"Bearer {token}"})
    assert status == 200
    samples = [sample for family in text_string_to_metric_families(text.decode()) for sample in family.samples]
    found = {sample.name: sample.value for sample in samples}
    losses = {json.loads(line).get("loss") for line in (job.run_dir / "metrics.jsonl").read_text().splitlines()}
    assert found["unisono_loss"] in losses
    assert {sample.labels["phase"]: sample.value for sample in samples if sample.name == "unisono_workers"} == {
        "working": 2
    }
    job.kill_everything()


@contextmanager
def prometheus(folder: Path, target: str, token: Path) -> Iterator[str]:
    """A Prometheus that scrapes a target; its address."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    scrape = {
        "job_name": "unisono",
        "scrape_interval": "200ms",
        "authorization": {"credentials_file": str(token)},
        "static_configs": [{"targets": [target]}],
    }
    folder.mkdir()
    (folder / "prometheus.yml").write_text(json.dumps({"scrape_configs": [scrape]}))  # JSON is YAML
    words = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [str(PROMETHEUS), *words, f"--web.listen-address={address}"], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        yield address
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def result(address: str, query: str) -> list[Any]:
    try:
        status, text = ask(address, f"/api/v1/query?query={quote(query)}", {})
    except OSError:  # it does not listen yet
        return []
    assert status in (200, 503), text
    return list(json.loads(text)["data"]["result"]) if status == 200 else []


@pytest.mark.slow
@pytest.mark.skipif(PROMETHEUS is None, reason="Prometheus is not installed: make prometheus")
def test_prometheus_scrapes_a_job_and_every_panel_of_the_dashboard_has_something_to_show(
    started: list[Training], tmp_path: Path
) -> None:
    job = training(tmp_path / "run", started, {"rank": 1, "step": 2, "place": "between"})  # so that they regroup
    queries = [
        target["expr"].replace("$job", "unisono")
        for panel in json.loads(BOARD.read_text())["panels"]
        for target in panel["targets"]
        if "unisono_logged" not in target["expr"]  # this script logs nothing of its own
    ]
    begun = time.monotonic()
    with prometheus(tmp_path / "prometheus", address_of(job.run_dir), job.run_dir / "token") as address:
        while empty := [query for query in queries if not result(address, query)]:
            assert time.monotonic() - begun < PATIENCE_S, (empty, (tmp_path / "prometheus" / "log").read_text())
            time.sleep(0.2)
    job.kill_everything()
