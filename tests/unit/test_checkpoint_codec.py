import enum
import json
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from same_trees import same
from unisono.checkpoint.codec import DEEPEST, flatten, unflatten
from unisono.checkpoint.tensor_bytes import copies, pieces
from unisono.errors import CheckpointError

pytestmark = pytest.mark.unit


def there_and_back(tree: Any) -> Any:
    """Through the very bytes that are on disk."""
    skeleton, tensors = flatten(tree)
    text = json.dumps(skeleton, allow_nan=False)
    data = b"".join(pieces(copies(tensors)))
    return unflatten(json.loads(text), safetensors.torch.load(data))


WORDS = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 complex64 complex128 int64 int32 int16 int8"
DTYPES = [getattr(torch, word) for word in f"{WORDS} uint64 uint32 uint16 uint8".split()]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    if draw(st.integers(0, 9)) == 0:
        return torch.tensor(draw(st.lists(st.booleans(), max_size=4)), dtype=torch.bool)
    dtype = draw(st.sampled_from(DTYPES))
    size = int(np.prod(shape)) * dtype.itemsize
    data = draw(st.binary(min_size=size, max_size=size))
    if not size:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    dtype = np.dtype(draw(st.sampled_from(["<f8", ">f4", "<f2", "|b1", "<i8", ">u2", "<c16", "<U3", "|S2", "<M8[s]"])))
    count = draw(st.integers(0, 4))
    if dtype.kind in "bUS":  # not every bit pattern is a value of these
        return np.array(draw(st.lists(st.sampled_from(["", "a", "bc"]), min_size=count, max_size=count))).astype(dtype)
    data = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    array = np.frombuffer(data, dtype)
    return array[0] if count and draw(st.booleans()) else array.reshape(draw(st.sampled_from([(-1,), (1, -1)])))


words = st.text(max_size=3) | st.sampled_from(["~", "__metadata__", "a", "a.b", "b", "a[0]", "", "value", "\udc80"])
plain = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | words
    | st.binary(max_size=4)
    | st.complex_numbers()
    | st.sampled_from([torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 0])])
)
keys = st.integers() | st.floats(allow_nan=False) | words | st.booleans() | st.none() | st.tuples(words, st.integers())


def containers(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.lists(parts, max_size=3)
        | st.lists(parts, max_size=3).map(tuple)
        | st.dictionaries(words, parts, max_size=3)
        | st.dictionaries(keys, parts, max_size=3)
        | st.dictionaries(keys, parts, max_size=3).map(OrderedDict)
        | st.lists(parts, max_size=3).map(lambda found: deque(found, maxlen=5))
        | st.dictionaries(keys, st.integers(), max_size=3).map(Counter)
        | st.sets(keys, max_size=3)
        | st.frozensets(keys, max_size=3)
    )


trees = st.recursive(plain | tensors() | arrays(), containers, max_leaves=8)


@given(tree=st.dictionaries(words, trees, max_size=6) | trees)
def test_any_tree_comes_back_with_its_types_its_order_and_every_bit(tree: Any) -> None:
    assert same(there_and_back(tree), tree)


def test_tied_tensors_are_stored_once_and_come_back_tied() -> None:
    weight = torch.randn(4, 4)
    tree = {"encoder": weight, "decoder": nn.Parameter(weight), "view": weight.view(4, 4)}
    skeleton, found = flatten(tree)
    assert list(found) == ["encoder"]
    back = unflatten(skeleton, found)
    assert back["encoder"] is back["decoder"] is back["view"]


def test_tied_tensors_with_a_layout_of_their_own_come_back_tied() -> None:
    weight = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    back = there_and_back([weight, weight])
    assert back[0] is back[1]
    assert back[0].stride() == weight.stride()


@pytest.mark.parametrize(
    "parameter", [torch.randn(3, dtype=torch.complex128), nn.Parameter(torch.randn(2, 3, dtype=torch.complex128))]
)
def test_complex_numbers_of_128_bits_that_are_tied_come_back_tied(parameter: Tensor) -> None:
    skeleton, tensors = flatten({"a": parameter, "b": parameter, "c": parameter.conj()})
    assert [tensor.dtype for tensor in tensors.values()] == [torch.float64] * 2
    back = unflatten(skeleton, copies(tensors))
    assert back["a"] is back["b"]
    assert same(back["a"], parameter.detach())
    assert same(back["c"], parameter.detach().conj().resolve_conj())


@pytest.mark.parametrize(
    "pairs",
    [
        torch.zeros(3, 2),
        torch.zeros(3, 2, dtype=torch.complex64),
        torch.zeros(3, dtype=torch.float64),
        torch.zeros((), dtype=torch.float64),
        torch.zeros(2, 3, dtype=torch.float64),
    ],
    ids=["float32", "complex", "a row", "a number", "triples"],
)
def test_complex_numbers_are_made_of_pairs_and_nothing_else(pairs: Tensor) -> None:
    with pytest.raises(CheckpointError):
        unflatten({"~": ["pairs", {"~": ["tensor", "it"]}]}, {"it": pairs})
    with pytest.raises(CheckpointError):
        unflatten({"~": ["pairs", {"~": ["tensor", "it", [1, 2]]}]}, {"it": torch.zeros(2, 2, dtype=torch.float64)})


def test_tensors_that_share_memory_but_not_values_stay_apart() -> None:
    whole, real = torch.randn(6, dtype=torch.complex64), torch.randn(4)
    views = [whole[:3], whole[3:], whole.conj(), whole.view(torch.float32), whole.reshape(2, 3), whole.conj().imag]
    tree = [whole, *views, real, real.view(torch.int32)]
    assert same(there_and_back(tree), tree)


def test_what_is_taken_apart_can_be_looked_at_as_bytes() -> None:
    whole = torch.randn(6, dtype=torch.complex64)
    for tensor in flatten([whole.conj(), whole.conj().imag])[1].values():
        assert same(tensor.view(torch.uint8).view(tensor.dtype), tensor)


def test_empty_tensors_are_never_taken_for_one_another() -> None:
    tree = [torch.empty(0), torch.empty(0, 3), torch.empty(0, dtype=torch.int64), torch.empty(0)]
    assert same(there_and_back(tree), tree)
    assert len(flatten(tree)[1]) == 4


@pytest.mark.parametrize(
    "tree",
    [
        {"a": {"b": torch.tensor(1)}, "a.b": torch.tensor(2)},
        {"a.b": torch.tensor(2), "a": {"b": torch.tensor(1)}},
        {"a": [torch.tensor(1)], "a[0]": torch.tensor(2), "a[0]#2": torch.tensor(3)},
        {"a": {0: torch.tensor(1)}, "a[0]": torch.tensor(2)},
        {"": torch.tensor(1), "value": torch.tensor(2)},
        {"\udc80": torch.tensor(1), "?": torch.tensor(2)},
        {"__metadata__": torch.tensor(1), "~": torch.tensor(2)},
        {"~": torch.tensor(1)},
    ],
    ids=["nested first", "flat first", "list", "int key", "empty key", "no unicode", "taken by safetensors", "mark"],
)
def test_two_places_that_would_have_one_name_keep_a_tensor_each(tree: dict[str, Any]) -> None:
    assert same(there_and_back(tree), tree)


def test_parameters_and_buffers_of_a_model_keep_their_own_names() -> None:
    model = nn.Sequential(OrderedDict(stem=nn.Linear(2, 3), norm=nn.BatchNorm1d(3)))
    state = model.state_dict()
    assert list(flatten(state)[1]) == list(state)
    assert same(there_and_back(state), state)
    assert getattr(there_and_back(state), "_metadata") == getattr(state, "_metadata")  # noqa: B009  mypy


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(2, 3, 4, 4, 4).to(memory_format=torch.channels_last_3d),
        torch.randn(5, 3).t(),
        torch.randn(4, 1, 3, 3).to(memory_format=torch.channels_last),
        torch.randn(5, 3, dtype=torch.complex128).t(),
        torch.randn(4, 1, 3, 3, dtype=torch.complex128).to(memory_format=torch.channels_last),
    ],
    ids=["channels last", "channels last 3d", "transposed", "one channel", "complex transposed", "complex one channel"],
)
def test_a_dense_tensor_comes_back_with_its_strides(tensor: Tensor) -> None:
    back = there_and_back(tensor)
    assert back.stride() == tensor.stride()
    assert same(back, tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(100.0)[::10],
        torch.randn(8, 8)[:, :2],
        torch.zeros(1).expand(1000),
        torch.randn(3, 4)[1],
        torch.randn(8, 8, dtype=torch.complex128)[:, :2],
        torch.zeros(1, dtype=torch.complex128).expand(1000),
        torch.zeros(1, 3, dtype=torch.complex128).expand(4, 3).t(),
    ],
    ids=["every tenth", "two columns", "expanded", "a row", "complex columns", "complex expanded", "complex rows"],
)
def test_a_part_of_a_larger_tensor_comes_back_compact(tensor: Tensor) -> None:
    back = there_and_back(tensor)
    assert same(back, tensor)
    assert back.untyped_storage().nbytes() == tensor.nbytes


def test_taking_apart_copies_no_tensor() -> None:
    weight, array = torch.randn(3), np.zeros(3)
    addresses = {tensor.data_ptr() for tensor in flatten([weight, array])[1].values()}
    assert addresses == {weight.data_ptr(), array.ctypes.data}


def test_an_array_that_is_read_only_can_be_kept() -> None:
    array = np.arange(6.0).reshape(2, 3)
    array.flags.writeable = False
    assert same(there_and_back([array, array.T]), [array, array.T])


class Mode(enum.Enum):
    FAST = 1


class Level(enum.IntEnum):
    HIGH = 3


class Word(str):
    __slots__ = ()


class Image(Tensor):
    pass


Point = namedtuple("Point", "x y")


REFUSED: dict[str, tuple[Any, str]] = {
    "function": (len, "builtin_function_or_method"),
    "object": (object(), "builtins.object"),
    "int enum": (Level.HIGH, "Level"),
    "str subclass": (Word("a"), "Word"),
    "namedtuple": (Point(1, 2), "Point"),
    "defaultdict": (defaultdict(list), "collections.defaultdict"),
    "module": (nn.Linear(1, 1), "Linear"),
    "sparse": (torch.eye(2).to_sparse(), "torch.sparse_coo tensor"),
    "meta": (torch.empty(2, device="meta"), "meta tensor"),
    "tensor subclass": (torch.zeros(2).as_subclass(Image), "Image"),
    "lazy parameter": (nn.UninitializedParameter(), "UninitializedParameter"),
    "objects": (np.array([object()]), "numpy.ndarray of object"),
    "records": (np.zeros(2, "i4,f4"), "numpy.ndarray of"),
    "masked": (np.ma.MaskedArray([1], [True]), "MaskedArray"),
    "tensor as a key": ({torch.tensor(1): 1}, "dict with a tensor as a key"),
}


@pytest.mark.parametrize(("value", "word"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_kept_is_refused_with_its_place_and_type(value: Any, word: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        flatten({"registered": {"meter": [1, value]}})
    assert str(caught.value).startswith("registered.meter[1] is a ")
    assert word in str(caught.value)


def test_a_key_that_cannot_be_kept_is_refused_with_its_place() -> None:
    with pytest.raises(CheckpointError, match="a key of registered.meter is a .*Mode"):
        flatten({"registered": {"meter": {Mode.FAST: 1}}})


def test_a_state_that_holds_itself_is_refused_and_not_followed_for_ever() -> None:
    tree: list[Any] = []
    tree.append(tree)
    with pytest.raises(CheckpointError, match="the state holds itself"):
        flatten({"loop": tree})


@pytest.mark.parametrize(
    "wrap",
    [lambda it: [it], lambda it: (it,), lambda it: {"a": it}, lambda it: {0: it}, lambda it: OrderedDict({0: it})],
    ids=["list", "tuple", "dict", "dict of numbers", "OrderedDict"],
)
def test_a_state_as_deep_as_allowed_comes_back(wrap: Callable[[Any], Any]) -> None:
    tree: Any = 1.5
    for _ in range(DEEPEST):
        tree = wrap(tree)
    assert same(there_and_back(tree), tree)


@pytest.mark.parametrize(
    "skeleton",
    [{"~": ["pickle", "gASV"]}, {"~": ["tensor", "absent"]}, {"~": []}, {"~": 3}, {"~": ["dtype", "load"]}],
    ids=["unknown kind", "no such tensor", "nothing", "a number", "no dtype"],
)
def test_what_was_not_written_here_is_not_read(skeleton: Any) -> None:
    with pytest.raises(CheckpointError):
        unflatten(skeleton, {})
