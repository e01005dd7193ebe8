"""Where a script asks for the rank, draws random numbers or reads the clock: found without running it."""

from pathlib import Path
from textwrap import dedent

import pytest

from unisono.launch.hints import Hint, Topic, find_hints, read_hints

pytestmark = pytest.mark.unit


def hints(source: str) -> list[tuple[int, Topic]]:
    return [(hint.line, hint.topic) for hint in find_hints(dedent(source).lstrip(), "train.py")]


def topics(source: str) -> list[Topic]:
    return [topic for _, topic in hints(source)]


def test_a_hint_names_file_line_and_code() -> None:
    assert find_hints("import os\n\nif run.is_main:\n    pass\n", "train.py") == [
        Hint("train.py", 3, Topic.RANK, "if run.is_main:")
    ]


@pytest.mark.parametrize(
    ("source", "topic"),
    [
        ("loss = loss + run.rank", Topic.RANK),
        ("import os\nos.getpid()", Topic.RANK),
        ("import os\nos.environ['LOCAL_RANK']", Topic.RANK),
        ("lr = 0.1 * run.world_size", Topic.WORLD),
        ("import os\nint(os.environ.get('WORLD_SIZE', 1))", Topic.WORLD),
        ("import numpy as np\nnp.random.rand(3)", Topic.RANDOM),
        ("from numpy import random as r\nr.permutation(3)", Topic.RANDOM),
        ("from random import shuffle\nshuffle(files)", Topic.RANDOM),
        ("import torch\ntorch.randn(3)", Topic.RANDOM),
        ("from torch.utils.data import random_split\nrandom_split(whole, [3, 1])", Topic.RANDOM),
        (
            "import unisono\nfrom torch.utils.data import random_split\nrandom_split(whole, [3, 1])\nunisono.init()",
            Topic.EARLY,
        ),
        ("import numpy as np\nnp.random.default_rng()", Topic.GENERATOR),
        ("from torch import Generator\nGenerator()", Topic.GENERATOR),
        ("from os import urandom\nurandom(3)", Topic.UNSEEDED),
        ("import uuid\nuuid.uuid4()", Topic.UNSEEDED),
        ("import time\ntime.time()", Topic.TIME),
        ("from datetime import datetime\ndatetime.now()", Topic.TIME),
        ("import os\nfiles = os.listdir(folder)", Topic.ORDER),
        ("from pathlib import Path\nfiles = list(Path(folder).glob('*.png'))", Topic.ORDER),
        ("for name in {'a', 'b'}:\n    pass", Topic.ORDER),
        ("names = [name for name in set(words)]", Topic.ORDER),
        ("names = list(set(words))", Topic.ORDER),
        ("import unisono\nunisono.init(batch_size=8, arithmetic={'deterministic': False})", Topic.RELAXED),
        ("import unisono\nunisono.init(batch_size=8, arithmetic={'reduction': 'native'})", Topic.NATIVE),
    ],
)
def test_a_place_has_its_topic(source: str, topic: Topic) -> None:
    assert topics(source) == [topic]


@pytest.mark.parametrize(
    "source",
    [
        "import os\nfiles = sorted(os.listdir(folder))",
        "from pathlib import Path\nfiles = sorted(Path(folder).glob('*.png'), key=str)",
        "import time\ntime.sleep(1)",
        "import random\nrandom.seed(0)",
        "import torch\ntorch.manual_seed(0)",
        "rand(3)",
        "self.random.choice(names)",
        "for name in ['a', 'b']:\n    pass",
        "import unisono\nunisono.init(batch_size=8, arithmetic={'deterministic': True, 'reduction': 'exact'})",
    ],
)
def test_what_is_harmless_is_no_hint(source: str) -> None:
    assert topics(source) == []


def test_a_model_built_before_init_is_early_and_one_built_after_it_is_not() -> None:
    assert hints(
        """
        import unisono
        from torch import nn
        class Net(nn.Module):
            def __init__(self):
                self.layer = nn.Linear(3, 3)
        first = Net()
        second = nn.Sequential(nn.ReLU())
        run = unisono.init(batch_size=8)
        third = Net()
        """
    ) == [(6, Topic.EARLY), (7, Topic.EARLY)]


def test_what_a_module_does_when_it_is_loaded_comes_before_the_init_in_a_function() -> None:
    assert hints(
        """
        import torch, unisono
        NOISE = torch.randn(3)
        def helper():
            return torch.nn.Linear(3, 3)
        def main():
            model = torch.nn.Linear(3, 3)
            run = unisono.init(batch_size=8)
            other = torch.nn.Linear(3, 3)
        """
    ) == [(2, Topic.EARLY), (6, Topic.EARLY)]


def test_a_script_that_python_cannot_read_has_no_hints() -> None:
    assert topics("def broken(:") == []
    assert topics("nul = '\0'") == []


def test_the_modules_beside_a_script_that_it_imports_are_read_too(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import data\nfrom models import net\nimport json\n")
    (tmp_path / "data.py").write_text("import os, train\nos.urandom(1)\n")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("")
    (tmp_path / "models" / "net.py").write_text("import time\ntime.time()\n")
    (tmp_path / "unrelated.py").write_text("import time\ntime.time()\n")

    found = [(Path(hint.path).name, hint.topic) for hint in read_hints(tmp_path / "train.py")]

    assert found == [("data.py", Topic.UNSEEDED), ("net.py", Topic.TIME)]


def test_a_script_that_is_not_there_has_no_hints(tmp_path: Path) -> None:
    assert read_hints(tmp_path / "nowhere.py") == []
