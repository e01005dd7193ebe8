"""What docs/extending.md shows works: its package is installed beside ours, and each part of it is used."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from commands import python
from training import Trained, whole_lines

pytestmark = pytest.mark.procs

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text()
TRAIN = """
import torch
from torch.utils.data import TensorDataset

import unisono

run = unisono.init(batch_size=16, shards=2, seed=0)
model = torch.nn.Linear(4, 1)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
x = torch.randn(128, 4, generator=torch.Generator().manual_seed(0))
for step in run.steps(TensorDataset(x, x.sum(1, keepdim=True)), epochs=2):
    step.run(lambda model, batch: (model(batch[0]) - batch[1]).square().mean())
run.finish(model)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of installed packages with the page's one in it."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "mine").mkdir()
    blocks = re.findall(r'^```python title="(.*?)"\n(.*?)^```$', PAGE, re.DOTALL | re.MULTILINE)
    for name, code in blocks:
        assert len([line for line in code.splitlines() if line]) <= 20, name
        (folder / name).write_text(code)
    [project] = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    points = tomllib.loads(project)["project"]["entry-points"]
    write_distribution(folder, "mine", points)
    assert len(blocks) == len(points) + 1 == 6  # a part is added by the script
    return folder


def write_distribution(folder: Path, name: str, points: dict[str, dict[str, str]]) -> None:
    """Note an installed package with its entry points."""
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    groups = (
        f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in named.items())
        for group, named in points.items()
    )
    (about / "entry_points.txt").write_text("\n".join(groups))


def unisono(*words: str, cwd: Path, site: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Call a command beside the packages that are installed in a folder."""
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    return python("-m", "unisono", *words, cwd=cwd, env={**os.environ, **variables}, PYTHONPATH=path)


def test_the_pages_policy_strategy_logger_and_command_are_used_by_name(site: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    chosen = ["--policy", "halve-once", "--strategy", "post-local-sgd:every=4,first=3", "--log-to", "totals"]
    done = unisono("run", "-n", "2", "--run-dir", "run", *chosen, "train.py", cwd=tmp_path, site=site)
    assert done.returncode == 0, done.stderr

    assert [line["policy"] for line in Trained(tmp_path / "run").journal("decided")] == ["halve-once"]
    losses = [line["loss"] for line in whole_lines(tmp_path / "run" / "metrics.jsonl")]
    assert float((tmp_path / "run" / "total.txt").read_text()) == pytest.approx(sum(losses), abs=1e-5)

    shown = unisono("steps", "run", cwd=tmp_path, site=site)
    assert shown.stdout.startswith("16 steps, loss ")
    assert "Print how many steps a run has made" in unisono("--help", cwd=tmp_path, site=site).stdout


PART = """
import os
from mine.part import LayerNorms


def strike(run):
    if os.environ.get("STRUCK") and run.rank == 1 and run.world_size == 3:
        os.kill(os.getpid(), 9)

run.add_part(LayerNorms())
"""
"""Behind the line that starts the run."""


@pytest.mark.parametrize(("workers", "struck"), [("2", ""), pytest.param("3", "yes", marks=pytest.mark.slow)])
def test_the_pages_part_logs_the_same_norms_on_any_number_of_workers(
    workers: str, struck: str, site: Path, tmp_path: Path
) -> None:
    begun, _, rest = TRAIN.partition("model = ")
    rest = rest.replace("    step.run(", "    (step.number == 5) and strike(run)\n    step.run(")
    (tmp_path / "train.py").write_text(f"{begun.replace('shards=2', 'shards=4')}{PART}model = {rest}")
    lines = {}
    elastic = ["--max-restarts", "1"] if struck else []
    for name, crew in (("serial", ["1"]), ("run", [workers, *elastic])):
        words = ("run", "-n", *crew, "--run-dir", name, "train.py")
        done = unisono(*words, cwd=tmp_path, site=site, STRUCK=struck)
        assert done.returncode == 0, done.stderr
        written = whole_lines(tmp_path / name / "metrics.jsonl")
        lines[name] = [{key: value for key, value in line.items() if key.startswith("norm ")} for line in written]
    assert lines["run"] == lines["serial"]
    assert len(lines["serial"]) == 16
    assert all(set(line) == {"norm weight", "norm bias"} for line in lines["serial"])
    assert bool(Trained(tmp_path / "run").journal("lost")) == bool(struck)


DOCKER = """#!/bin/sh
[ "$1" = inspect ] && { echo 127.0.0.1; exit; }
shift 3
exec "$@"
"""
"""A docker whose containers are this host."""


@pytest.mark.slow  # tests/procs/test_ssh.py has an engine
def test_the_pages_engine_trains_in_two_containers(site: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "docker").write_text(DOCKER)
    (tmp_path / "docker").chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    begin = ("run", "--on", "docker", "--hosts", "a:1,b:1", "--coordinator", "127.0.0.1:0")
    done = unisono(*begin, "--env", "PATH", "--run-dir", "run", "train.py", cwd=tmp_path, site=site, PATH=path)
    assert done.returncode == 0, done.stderr
    assert {"[a]", "[b]"} <= set(re.findall(r"^\[[ab]\]", done.stdout + done.stderr, re.MULTILINE))
    alone = unisono("run", "-n", "1", "--run-dir", "alone", "train.py", cwd=tmp_path, site=site)
    assert alone.returncode == 0, alone.stderr
    assert Trained(tmp_path / "run").end() == Trained(tmp_path / "alone").end()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--on", "docker"), "--on docker: name the hosts that it reaches"),
        (("--on", "no"), "--on: there is no engine 'no': choose of ray, docker"),
        (("--on", "json:JSONDecoder", "--hosts", "a:1"), "is no subclass of unisono.Engine"),
    ],
)
def test_an_engine_that_cannot_start_hosts_is_refused(
    words: tuple[str, ...], message: str, site: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    done = unisono("run", *words, "train.py", cwd=tmp_path, site=site)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_name_that_two_packages_bring_is_refused_with_both(tmp_path: Path) -> None:
    for name in ("here", "there"):
        write_distribution(tmp_path, name, {"unisono.strategies": {"twice": f"{name}:Twice"}})
    (tmp_path / "train.py").write_text("")
    refused = unisono("run", "--strategy", "twice", "train.py", cwd=tmp_path, site=tmp_path)
    assert refused.returncode == 2
    assert "the packages here and there both bring a strategy twice: uninstall one of them" in refused.stderr


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("class Other: ...", "mine_too brings is no data class of the kind unisono.Strategy"),
        (
            "from dataclasses import dataclass\nfrom unisono.sync import Rounds\n"
            "@dataclass(frozen=True)\nclass Other(Rounds):\n    name = 'another'",
            "its class calls itself 'another': give the entry point the same name",
        ),
    ],
)
def test_a_strategy_of_another_kind_or_name_is_refused(code: str, words: str, tmp_path: Path) -> None:
    write_distribution(tmp_path, "mine_too", {"unisono.strategies": {"other": "mine_too:Other"}})
    (tmp_path / "mine_too.py").write_text(code)
    (tmp_path / "train.py").write_text("")
    refused = unisono("run", "--strategy", "other", "train.py", cwd=tmp_path, site=tmp_path)
    assert refused.returncode == 2
    assert words in " ".join(refused.stderr.split())


OBJECTS = {
    "number": "f = 3",
    "nothing": "f = None",
    "annotated": "def f(x: 'Nope'): ...",
    "empty": "import typer\nf = typer.Typer()",
    "lines": "raise RuntimeError('one\\ntwo')",
    "missing": "import no.such.module",
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_whatever_a_package_brings_as_a_command_the_help_is_shown_and_its_call_says_what_is_wrong(
    kind: str, tmp_path: Path
) -> None:
    write_distribution(tmp_path, "odd", {"unisono.commands": {"odd": f"odd_{kind}:f"}})
    (tmp_path / f"odd_{kind}.py").write_text(OBJECTS[kind])
    shown = unisono("--help", cwd=tmp_path, site=tmp_path)
    assert (shown.returncode, "Start workers that train together" in shown.stdout) == (0, True)
    assert [line.startswith("unisono: the command odd") for line in shown.stderr.splitlines()] == [True]
    refused = unisono("odd", cwd=tmp_path, site=tmp_path)
    assert refused.returncode == 2
    assert [line.startswith("unisono: error: the command odd") for line in refused.stderr.splitlines()] == [True]


def test_a_typer_with_one_command_has_the_name_of_the_entry_point_and_several_stand_below_it(tmp_path: Path) -> None:
    write_distribution(tmp_path, "both", {"unisono.commands": {"single": "both:single", "several": "both:several"}})
    (tmp_path / "both.py").write_text(
        "import typer\nsingle, several = typer.Typer(), typer.Typer()\n"
        "@single.command()\ndef other(): print('single')\n"
        "@several.command()\ndef left(): print('left')\n"
        "@several.command()\ndef right(): print('right')\n"
    )
    for words in (("single",), ("several", "left"), ("several", "right")):
        assert unisono(*words, cwd=tmp_path, site=tmp_path).stdout == f"{words[-1]}\n"
    assert "several" in unisono("--help", cwd=tmp_path, site=tmp_path).stdout


def test_a_package_takes_no_name_of_ours_and_what_it_prints_is_none_of_our_output(tmp_path: Path) -> None:
    write_distribution(tmp_path, "loud", {"unisono.commands": {"page": "loud:f", "run": "loud:f", "loud": "loud:f"}})
    (tmp_path / "loud.py").write_text("print('I am loaded')\ndef f(): ...")
    assert "Show a job in a browser" in unisono("page", "--help", cwd=tmp_path, site=tmp_path).stdout
    shown = unisono("--help", cwd=tmp_path, site=tmp_path)
    assert "I am loaded" not in shown.stdout
    assert "Show a job in a browser" in shown.stdout


def test_entry_points_that_cannot_be_read_are_named_and_our_commands_work(tmp_path: Path) -> None:
    write_distribution(tmp_path, "torn", {})
    (tmp_path / "torn-1.0.dist-info" / "entry_points.txt").write_text("[unisono.commands]\nno equal sign\n")
    shown = unisono("--help", cwd=tmp_path, site=tmp_path)
    assert (shown.returncode, "Start workers that train together" in shown.stdout) == (0, True)
    assert "the entry points of torn cannot be read" in shown.stderr


@pytest.mark.slow
def test_a_part_that_only_some_workers_have_is_refused_by_all(site: Path, tmp_path: Path) -> None:
    begun, _, rest = TRAIN.partition("model = ")
    part = "from mine.part import LayerNorms\nif run.rank == 1:\n    run.add_part(LayerNorms())\n"
    (tmp_path / "train.py").write_text(f"{begun}{part}model = {rest}")
    done = unisono("run", "-n", "2", "--run-dir", "run", "train.py", cwd=tmp_path, site=site)
    assert done.returncode != 0
    assert re.search(
        r"(?s)rank 1 has another model than rank 0.*parts of run\.add_part: none here, mine\.part\.LayerNorms",
        done.stderr,
    ), done.stderr
