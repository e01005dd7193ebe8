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


def write_library(char_lm: ModuleType, folder: Path) -> None:
    for name in char_lm.MODULES:
        (folder / f"{name}.py").write_text(f'"""{name}."""\n')


def test_the_modules_are_a_fixed_sorted_list_that_this_python_has(char_lm: ModuleType) -> None:
    import sysconfig

    assert list(char_lm.MODULES) == sorted(set(char_lm.MODULES))
    texts = char_lm.library_texts(Path(sysconfig.get_path("stdlib")))
    assert len(texts) == len(char_lm.MODULES)
    assert all(0 < len(text) <= char_lm.BYTES_PER_MODULE for text in texts)
    assert not any(char_lm.BOUNDARY in text for text in texts)


def test_a_library_without_source_text_is_a_message_not_another_text(char_lm: ModuleType, tmp_path: Path) -> None:
    write_library(char_lm, tmp_path)
    (tmp_path / "heapq.py").unlink()
    with pytest.raises(SystemExit, match="no source text of heapq"):
        char_lm.library_texts(tmp_path)


def test_documents_are_the_blocks_between_blank_lines(char_lm: ModuleType) -> None:
    text = b"import a\nimport b\n\n\ndef f():\n    pass\n   \n\nx = 1\n"
    assert char_lm.documents([text], longest=100) == [b"import a\nimport b", b"def f():\n    pass", b"x = 1\n"]


def test_a_long_block_is_cut_into_pieces_that_lose_nothing(char_lm: ModuleType) -> None:
    pieces = char_lm.documents([b"abcdefgh\n\nxy"], longest=3)
    assert pieces == [b"abc", b"def", b"gh", b"xy"]


def test_a_short_document_is_framed_by_boundaries_and_padded(char_lm: ModuleType) -> None:
    inputs, targets = char_lm.NextByte([b"ab"], context=5)[0]
    assert inputs.tolist() == [0, 97, 98, 0, 0]
    assert targets.tolist() == [97, 98, 0, -100, -100]
    assert inputs.dtype == targets.dtype == torch.int64


def test_a_full_document_has_no_room_for_its_end(char_lm: ModuleType) -> None:
    inputs, targets = char_lm.NextByte([b"abc"], context=3)[0]
    assert inputs.tolist() == [0, 97, 98]
    assert targets.tolist() == [97, 98, 99]


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


def test_the_head_shares_the_embedding_and_every_parameter_is_in_one_group(char_lm: ModuleType) -> None:
    model = char_lm.Gpt(layers=2, width=32, context=8)
    assert model.head.weight is model.bytes.weight
    decaying, others = char_lm.weight_decay_groups(model)
    assert decaying["weight_decay"] > 0 == others["weight_decay"]
    assert all(parameter.ndim == 1 for parameter in others["params"])
    grouped = [id(parameter) for group in (decaying, others) for parameter in group["params"]]
    assert sorted(grouped) == sorted({id(parameter) for parameter in model.parameters()})


def test_the_learning_rate_rises_to_one_and_falls_to_a_tenth(char_lm: ModuleType) -> None:
    factor = char_lm.warm_up_then_cosine(total=100, warm_up=10)
    factors = [factor(step) for step in range(101)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9] == factors[10] == pytest.approx(1)
    assert factors[100] == pytest.approx(0.1)
    assert factors[10:] == sorted(factors[10:], reverse=True)
