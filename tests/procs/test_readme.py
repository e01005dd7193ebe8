"""What the documentation shows is true: its scripts run, its links lead somewhere, and its tables are complete."""

import inspect
import os
import re
from pathlib import Path

import pytest

from commands import python
from unisono import errors

pytestmark = pytest.mark.procs

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
GUIDE = [f"docs/{page}" for page in re.findall(r"(?:guide/[\w-]+|second-order)\.md", (ROOT / "mkdocs.yml").read_text())]
"""Its pages, in the order in which the site shows them."""

PATIENCE_S = 280
"""All of the guide's code in one process: half a minute of a processor, beside other tests."""


def text_of(pages: list[str]) -> str:
    """The text of some pages."""
    return "\n".join((ROOT / page).read_text() for page in pages)


def code_of(*pages: str) -> list[str]:
    """The Python blocks of pages."""
    return re.findall(r"^```python\n(.*?)^```$", text_of([*pages]), re.DOTALL | re.MULTILINE)


def digests(scripts: list[list[str]], workers: int, folder: Path) -> list[str]:
    """Run scripts on so many workers, one after the other in the same processes: torch is loaded once.

    Args:
        scripts: for each of them, the pages whose code it is.
        workers: how many.
        folder: a new one.

    Returns:
        the digests of the weights that they print.
    """
    folder.mkdir()
    calls = []
    for number, pages in enumerate(scripts):
        (folder / f"script_{number}.py").write_text("\n\n".join(code_of(*pages)))
        calls.append(f"runpy.run_path('script_{number}.py', run_name='__main__')")
    (folder / "train.py").write_text("\n".join(["import runpy", *calls]))
    launcher = () if workers == 1 else ("-m", "unisono", "run", "-n", workers)
    told = {name: value for name, value in os.environ.items() if not name.startswith("UNISONO_")}
    done = python(*launcher, "train.py", cwd=folder, env=told, timeout=PATIENCE_S, is_merged=True)
    assert done.returncode == 0, done.stdout
    return re.findall(r"weights sha256 ([0-9a-f]{64})", done.stdout)


def test_the_readme_and_its_script_are_short() -> None:
    (script,) = code_of("README.md")
    assert script.count("\n") <= 30
    assert len((ROOT / "README.md").read_bytes()) <= 6000


@pytest.mark.timeout(2 * PATIENCE_S + 20)
def test_everything_in_the_readme_and_in_the_guide_runs_and_two_workers_end_in_the_readmes_weights(
    warm: None, tmp_path: Path
) -> None:
    alone = digests([["README.md"], GUIDE], 1, tmp_path / "alone")
    assert len(alone) == "".join(code_of("README.md", *GUIDE)).count(".finish(") + 1  # one stands in a loop of two
    assert digests([["README.md"]], 2, tmp_path / "together") == alone[:1]


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE_S + 20)
def test_two_workers_end_in_the_weights_of_one_in_the_whole_guide(warm: None, tmp_path: Path) -> None:
    assert digests([GUIDE], 2, tmp_path / "together") == digests([GUIDE], 1, tmp_path / "alone") != []


def test_the_worked_example_of_exactness_holds(tmp_path: Path) -> None:
    assert len(code_of("docs/exactness.md")) >= 2
    digests([["docs/exactness.md"]], 1, tmp_path / "example")  # it asserts by itself


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_within_the_documentation_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        name, _, heading = target.partition("#")
        other = (page.parent / name).resolve() if name else page
        assert other.exists(), f"{page.name} links to {target}"
        assert not heading or heading in headings(other), f"{page.name} links to {target}"


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_guide_names_every_variable_that_the_source_reads() -> None:
    # What hints.py names is looked for in users' scripts.
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py") if path.name != "hints.py")
    guide = text_of(GUIDE)
    names = set(re.findall(r'"((?:UNISONO|SLURM|SLURMD|MASTER)_[A-Z_]+)"', source))
    assert len(names) > 15
    assert {name for name in names if name not in guide} == set()


def test_the_guide_explains_every_error() -> None:
    guide = text_of(GUIDE)
    kinds = [name for name, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]
    assert len(kinds) > 10
    assert [name for name in kinds if f"`{name}`" not in guide] == []


def test_the_guide_lists_every_setting_of_init() -> None:
    from unisono.train.start import init

    guide = text_of(GUIDE)
    names = inspect.signature(init).parameters
    assert [name for name in names if f"| `{name}` |" not in guide and f"### {name}\n" not in guide] == []


def test_every_decision_is_in_the_list_of_decisions() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = (folder / "README.md").read_text()
    assert [path.name for path in folder.glob("0*.md") if f"({path.name})" not in listed] == []
