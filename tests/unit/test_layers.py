"""The house keeps its rules; and each rule finds its breach in a small house that breaks it."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

import house_rules
from house_rules import ROWS, RULES, SUB_ROWS, Breach, House
from replaced import REASONS, replaced

pytestmark = pytest.mark.unit

SRC = Path(__file__).parents[2] / "src"
UPWARDS = [(lower, upper) for above, below in pairwise(ROWS) for upper in above for lower in below]
SIDEWAYS = [(one, other) for row in ROWS for one in row for other in row if one != other]

Rule = Callable[[House], Iterator[Breach]]
Build = Callable[..., House]


@pytest.fixture(scope="module", params=["unisono", "unisono_lab"])
def package(request: pytest.FixtureRequest) -> House:
    """Our own."""
    return House.read(SRC / request.param)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps_the_rule(rule: Rule, package: House) -> None:
    breaches = sorted(rule(package))

    if breaches:
        pytest.fail("\n".join(str(breach) for breach in breaches), pytrace=False)


def test_every_module_of_the_packages_is_read() -> None:
    assert {"unisono", "unisono.errors", "unisono.job"} <= House.read(SRC / "unisono").sources.keys()
    assert {"unisono_lab", "unisono_lab.commands.chaos", "unisono_lab.page.hub"} <= House.read(
        SRC / "unisono_lab"
    ).sources.keys()


def test_the_core_may_not_import_the_lab_and_the_lab_may_import_the_core(house: Build) -> None:
    files = {"plan.tree": "def late():\n    from unisono_lab.page import hub", "cli.app": "import unisono.plan.tree"}

    assert found(house_rules.core_alone, house(**files)) == [
        "plan/tree.py:2: core: imports unisono_lab.page.hub: the core does not know the lab"
    ]


@pytest.fixture
def house(tmp_path: Path) -> Build:
    """Builds a package named unisono from file names and texts."""

    def build(**files: str) -> House:
        folder = tmp_path / "unisono"
        for name, text in {"__init__": "", **files}.items():
            path = folder / f"{name.replace('.', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return House.read(folder)

    return build


def found(rule: Rule, house: House) -> list[str]:
    """The breaches as ``file:line: rule: words``, with the file's path inside the package."""
    root = next(iter(house)).path.parent
    return [str(breach).removeprefix(f"{root}/") for breach in sorted(rule(house))]


@pytest.mark.parametrize(("lower", "upper"), UPWARDS)
def test_a_room_may_not_import_a_room_above_it(house: Build, lower: str, upper: str) -> None:
    files = {f"{lower}.low": f"import unisono.{upper}.high", f"{upper}.high": ""}

    assert found(house_rules.layers, house(**files)) == [
        f"{lower}/low.py:1: layers: imports unisono.{upper}.high: {upper} is above {lower}; imports go down"
    ]


@pytest.mark.parametrize(("one", "other"), SIDEWAYS)
def test_rooms_of_one_row_may_not_import_each_other(house: Build, one: str, other: str) -> None:
    files = {f"{one}.a": f"from unisono.{other}.b import name", f"{other}.b": "name = 1"}

    (breach,) = found(house_rules.layers, house(**files))

    assert breach.startswith(f"{one}/a.py:1: layers: imports unisono.{other}.b: ")
    assert "one row" in breach


@pytest.mark.parametrize(
    "text",
    [
        "import unisono.train.run",
        "from unisono.train import run",
        "from ..train import run",
        "def late():\n    from unisono.train import run",
        "if TYPE_CHECKING:\n    from unisono.train.run import Run",
        "importlib.import_module('unisono.train.run')",
    ],
)
def test_an_import_counts_however_it_is_written(house: Build, text: str) -> None:
    files = {"plan.tree": text, "train.__init__": "", "train.run": ""}

    (breach,) = found(house_rules.layers, house(**files))

    line = text.count("\n") + 1
    assert breach.startswith(f"plan/tree.py:{line}: layers: imports unisono.train")


def test_a_package_imports_relative_to_itself(house: Build) -> None:
    rooms = house(**{"plan.__init__": "from .tree import x\nfrom ..train import y", "plan.tree": "", "train": ""})

    assert [breach.partition(": layers")[0] for breach in found(house_rules.layers, rooms)] == ["plan/__init__.py:2"]


def test_a_room_does_not_go_out_and_in_again_through_the_door(house: Build) -> None:
    (breach,) = found(house_rules.layers, house(**{"train.run": "from unisono import init"}))

    assert breach.startswith("train/run.py:1: layers: imports unisono: the door is for users")


def test_a_new_room_has_to_be_given_its_row(house: Build) -> None:
    assert found(house_rules.layers, house(**{"attic.box": ""})) == [
        "attic/box.py:1: layers: 'attic' is in no row of the house"
    ]


@pytest.mark.parametrize("line", ["import unisono.plan.a", "if TYPE_CHECKING:\n    from .a import x"])
def test_modules_that_import_each_other_are_a_cycle(house: Build, line: str) -> None:
    files = {"plan.a": "\nimport unisono.plan.b", "plan.b": "import unisono.plan.c", "plan.c": line}

    (breach,) = found(house_rules.cycles, house(**files))

    way = breach.partition(": cycle: ")[2].replace("unisono.plan.", "").split(" imports ")
    assert set(pairwise(way)) == {("a", "b"), ("b", "c"), ("c", "a")}
    assert breach.startswith(f"plan/{way[0]}.py:{files[f'plan.{way[0]}'].count(chr(10)) + 1}: ")


def test_a_module_that_asks_its_own_package_for_a_name_is_a_cycle(house: Build) -> None:
    files = {"plan.__init__": "from unisono.plan.tree import x", "plan.tree": "from unisono.plan import y"}

    (breach,) = found(house_rules.cycles, house(**files))

    assert "unisono.plan imports unisono.plan.tree" in breach or "unisono.plan.tree imports unisono.plan" in breach


@pytest.mark.parametrize("module", ["torch", "socket", "time", "os", "random"])
@pytest.mark.parametrize("text", ["import {0}", "from {0} import x", "import {0}.path", "def f():\n    import {0}"])
def test_a_plan_touches_nothing_of_the_world(house: Build, module: str, text: str) -> None:
    (breach,) = found(house_rules.purity, house(**{"plan.tree": text.format(module)}))

    assert breach.endswith(f": purity: plan.tree is pure and may not import {module}")


def test_the_coordinators_state_is_pure_and_the_rest_of_membership_is_not(
    house: Build,
) -> None:
    rooms = house(**{"membership.state": "import time", "membership.server": "import time", "planets": "import os"})

    assert found(house_rules.purity, rooms) == [
        "membership/state.py:1: purity: membership.state is pure and may not import time"
    ]


@pytest.mark.parametrize(
    "text",
    ["import torch", "from unisono.train import run", "try:\n    import numpy\nexcept ImportError: pass"],
)
def test_a_door_that_loads_a_room_is_not_lazy(house: Build, text: str) -> None:
    (breach,) = found(house_rules.lazy_door, house(__init__=text, **{"train.run": ""}))

    assert ": door: loads " in breach


@pytest.mark.parametrize(("lines", "breaches"), [(60, 0), (61, 1)])
@pytest.mark.parametrize("start", ["def f():", "async def f():"])
def test_a_function_has_at_most_sixty_lines(house: Build, start: str, lines: int, breaches: int) -> None:
    text = "\n" + "\n".join([start, *["    x = 1"] * (lines - 1)])

    messages = found(house_rules.long_functions, house(job=text))

    assert messages == ["job.py:2: long function: f has 61 lines; the limit is 60"] * breaches


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "torch.load(path)",
        "from torch import load",
        "dist.broadcast_object_list(x)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_pickle_is_found_under_every_name(house: Build, text: str) -> None:
    (breach,) = found(house_rules.no_pickle, house(job=f"\n{text}"))

    assert breach.startswith("job.py:2: pickle: ")


@pytest.mark.parametrize("text", ["run('ls', shell=True)", "Popen(x, shell=flag)", "os.system('ls')", "os.popen('ls')"])
def test_a_shell_is_found(house: Build, text: str) -> None:
    (breach,) = found(house_rules.no_shell, house(job=text))

    assert breach.startswith("job.py:1: shell: ")


@pytest.mark.parametrize("name", ["eval", "exec"])
def test_code_from_text_is_found_and_a_models_eval_is_not(house: Build, name: str) -> None:
    assert found(house_rules.no_code_from_text, house(job=f"model.{name}()\n{name}('1')")) == [
        f"job.py:2: code from text: calls {name}"
    ]


@pytest.mark.parametrize("name", ["load", "loads"])
def test_json_that_arrives_is_parsed_in_one_place(house: Build, name: str) -> None:
    text = f"import json\njson.{name}(data)\njson.dumps(data)"

    assert found(house_rules.json_in_one_place, house(job=text, received=text)) == [
        f"job.py:2: json: json.{name}: use parse_json, parse_object or read_object of unisono.received"
    ]


def test_one_module_knows_what_kinds_of_devices_there_are(house: Build) -> None:
    text = "import torch\ntorch.cuda.synchronize()\nx = 'cuda:0'\ny = 'cuda devices'\ntorch.accelerator.synchronize()"

    assert found(house_rules.kinds_of_devices, house(job=text, device=text)) == [
        "job.py:2: devices: torch.cuda: ask unisono.device",
        "job.py:3: devices: 'cuda:0': ask unisono.device",
    ]


@pytest.mark.parametrize("name", ["utils", "plan.utils", "train.helpers", "data.misc.reader"])
def test_a_file_is_called_by_its_noun(house: Build, name: str) -> None:
    rooms = house(**{name: "", **({f"{name.rpartition('.')[0]}.__init__": ""} if "." in name else {})})

    (breach,) = found(house_rules.naming, rooms)

    assert breach.endswith(":1: names: say what is in it: one noun per file")


def test_nothing_is_a_manager(house: Build) -> None:
    (breach,) = found(house_rules.naming, house(job="class RunManager: ...\nclass Managed: ..."))

    assert breach.startswith("job.py:1: names: RunManager")


def test_a_class_name_of_two_files_is_found_wherever_the_class_stands(house: Build) -> None:
    inside = "def f():\n    class Slot: ..."

    assert found(house_rules.one_meaning, house(**{"data.slots": "class Slot: ...", "reduce.bucket": inside})) == [
        "reduce/bucket.py:2: one meaning: Slot is a class of unisono.data.slots, too: a name has one meaning"
    ]


def test_a_description_that_begins_in_the_middle_of_a_sentence_is_found(house: Build) -> None:
    text = """class Run:
    \'\'\'A run.

    Args:
        job: that is trained.
        device: the device that computes,
            by default the CPU.

    Attributes:
        job: The job.
        folder: of the run.
    \'\'\'
"""

    messages = found(house_rules.described_by_nouns, house(job=text.replace("'''", '"""')))

    assert [message.partition(": '")[0] for message in messages] == ["job.py:5: nouns: job", "job.py:11: nouns: folder"]


@pytest.mark.parametrize(("lines", "imports", "breaches"), [(350, 25, 0), (351, 25, 1), (350, 26, 1)])
def test_a_run_is_small(house: Build, lines: int, imports: int, breaches: int) -> None:
    text = "\n".join(["import torch"] * imports + ["x = 1"] * (lines - imports))

    messages = found(house_rules.small_run, house(**{"train.run": text, "train.start": text + "\n" * 99}))

    assert len(messages) == breaches
    assert all(message.startswith("train/run.py:1: run: ") for message in messages)


@pytest.mark.parametrize("value", ["self.told", "self.other.told", "acts.told", "lambda: None", "partial(print, 1)"])
@pytest.mark.parametrize("target", ["self.acts.begins", "acts.begins", "a, acts.begins"])
def test_nobody_is_given_its_collaborators_later(house: Build, target: str, value: str) -> None:
    values = f"1, {value}" if "," in target else value
    text = f"class Run:\n    def told(self): ...\n    def f(self, acts):\n        {target} = {values}"

    (breach,) = found(house_rules.made_whole, house(job=text))

    assert breach.startswith("job.py:4: made whole: ")


def test_tests_replace_nothing_of_ours_but_what_is_listed_with_its_reason() -> None:
    assert replaced(Path(__file__).parents[1]) == {file: set(names) for file, names in REASONS.items()}


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ('patch.setattr("unisono.job.LARGEST", 1)', ["unisono.job.LARGEST"]),
        ('patch.setattr(job, "LARGEST", 1)', ["job.LARGEST"]),
        ('patch.setattr(Job.kind, "of", 1)', ["Job.kind.of"]),
        ('patch.setattr(mine, "of", 1)', ["mine.of"]),
        ('patch.setattr(helpers, "of", 1)', ["helpers.of"]),
        ('patch.setattr(os, "fsync", 1)', []),
        ('patch.setattr(torch.cuda, "is_available", 1)', []),
        ('patch.setattr("platform.libc_ver", 1)', []),
    ],
)
def test_what_a_test_replaces_is_found(line: str, names: list[str], tmp_path: Path) -> None:
    imports = "import os\nimport torch.cuda\nimport helpers\nfrom unisono import job\nfrom unisono.job import Job\n"
    (tmp_path / "unit").mkdir()
    (tmp_path / "helpers.py").write_text("")
    (tmp_path / "unit" / "test_x.py").write_text(f"{imports}def test(patch, mine):\n    {line}\n")

    assert replaced(tmp_path) == ({"unit/test_x.py": set(names)} if names else {})


INSIDE = [
    (room, lower, upper)
    for room, rows in SUB_ROWS.items()
    for above, below in pairwise(rows)
    for upper in above
    for lower in below
]


@pytest.mark.parametrize(("room", "lower", "upper"), INSIDE)
def test_inside_of_a_room_nothing_is_imported_from_above(house: Build, room: str, lower: str, upper: str) -> None:
    files = {f"{room}.{lower}.low": f"import unisono.{room}.{upper}.high", f"{room}.{upper}.high": ""}

    assert found(house_rules.sub_layers, house(**files)) == [
        f"{room}/{lower}/low.py:1: sub-layers: imports unisono.{room}.{upper}.high: "
        f"{upper} is above {lower}; imports go down"
    ]


def test_inside_of_a_room_those_of_one_row_do_not_know_each_other(house: Build) -> None:
    files = {"train.record.a": "import unisono.train.strategies.b", "train.strategies.b": ""}

    (breach,) = found(house_rules.sub_layers, house(**files))

    assert "stand in one row" in breach


def test_what_lies_beside_the_rooms_of_a_room_stands_above_them(house: Build) -> None:
    down = {"train.run": "import unisono.train.step.step_engine", "train.step.step_engine": ""}
    up = {"train.step.low": "import unisono.train.run"}

    assert found(house_rules.sub_layers, house(**down)) == []
    (breach,) = found(house_rules.sub_layers, house(**down, **up))
    assert breach == "train/step/low.py:1: sub-layers: imports unisono.train.run: run is above step; imports go down"


def test_a_new_room_inside_of_a_room_has_to_be_given_its_row(house: Build) -> None:
    assert found(house_rules.sub_layers, house(**{"train.attic.box": ""})) == [
        "train/attic/box.py:1: sub-layers: 'attic' is in no row of train"
    ]


def test_every_row_inside_of_a_room_names_what_is_there() -> None:
    for room, depths in house_rules.SUB_DEPTHS.items():
        there = {path.stem for path in (SRC / "unisono" / room).iterdir()}
        assert depths.keys() <= there, f"not in {room}: {depths.keys() - there}"
