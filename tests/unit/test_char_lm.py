"""The text, the documents and the padding of the language-model example."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.unit

EXAMPLE = Path(__file__).parents[2] / "examples" / "char_lm.py"


@pytest.fixture(scope="module")
def char_lm() -> ModuleType:
    spec = importlib.util.spec_from_file_location("char_lm_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_modules_are_a_fixed_sorted_list_that_this_python_has(char_lm: ModuleType) -> None:
    import sysconfig

    assert list(char_lm.MODULES) == sorted(set(char_lm.MODULES))
    texts = char_lm.library_texts(Path(sysconfig.get_path("stdlib")))
    assert len(texts) == len(char_lm.MODULES)
    assert all(0 < len(text) <= char_lm.BYTES_PER_MODULE for text in texts)
    assert not any(char_lm.BOUNDARY in text for text in texts)


def test_a_library_without_source_text_is_a_message_not_another_text(char_lm: ModuleType, tmp_path: Path) -> None:
    for name in set(char_lm.MODULES) - {"heapq"}:
        (tmp_path / f"{name}.py").write_text("pass\n")
    with pytest.raises(SystemExit, match="no source text of heapq"):
        char_lm.library_texts(tmp_path)


def test_documents_are_the_blocks_between_blank_lines_and_long_ones_are_cut_and_lose_nothing(
    char_lm: ModuleType,
) -> None:
    text = b"import a\nimport b\n\n\ndef f():\n    pass\n   \n\nx = 1\n"
    assert char_lm.documents([text], longest=100) == [b"import a\nimport b", b"def f():\n    pass", b"x = 1\n"]
    assert char_lm.documents([b"abcdefgh\n\nxy"], longest=3) == [b"abc", b"def", b"gh", b"xy"]


@pytest.mark.parametrize(
    ("document", "inputs", "targets"),
    [
        (b"ab", [0, 97, 98, 0], [97, 98, 0, -100]),
        (b"abcd", [0, 97, 98, 99], [97, 98, 99, 100]),
    ],
    ids=["a short one", "a full one, which has no room for its end"],
)
def test_a_document_is_framed_by_boundaries_and_padded(
    document: bytes, inputs: list[int], targets: list[int], char_lm: ModuleType
) -> None:
    found = char_lm.NextByte([document], context=4)[0]
    assert [each.tolist() for each in found] == [inputs, targets]
    assert found[0].dtype == found[1].dtype == torch.int64


def test_the_loss_of_a_batch_is_the_token_weighted_mean_of_its_shards(char_lm: ModuleType) -> None:
    torch.manual_seed(0)
    dataset = char_lm.NextByte([b"a", b"bcdefgh", b"ij", b"klmnop"], context=8)
    inputs, targets = (torch.stack(part) for part in zip(*(dataset[index] for index in range(4)), strict=True))
    model = char_lm.Gpt(layers=1, width=32, context=8).eval()
    whole = char_lm.loss_fn(model, (inputs, targets))
    shards = [char_lm.loss_fn(model, (inputs[part], targets[part])) for part in (slice(0, 1), slice(1, 4))]
    assert [int(shard.weight) for shard in shards] == [2, 8 + 3 + 7]
    assert whole.weight == 20
    torch.testing.assert_close(sum(shard.loss * shard.weight for shard in shards) / whole.weight, whole.loss)


def test_no_byte_sees_itself_or_a_later_one(char_lm: ModuleType) -> None:
    torch.manual_seed(0)
    model = char_lm.Gpt(layers=2, width=64, context=8).eval()
    inputs = torch.randint(1, 256, (1, 8))
    changed = inputs.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    before, after = model(inputs), model(changed)
    torch.testing.assert_close(before[0, :5], after[0, :5])
    assert F.mse_loss(before[0, 5:], after[0, 5:]) > 0
