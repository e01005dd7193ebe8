"""``tf.data`` data sets as streams of batches. tensorflow is loaded by the script that gives one, never here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import import_module
from itertools import islice
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import keras
import torch

from unisono.data.batch_stream import StreamBatch
from unisono.errors import DataError
from unisono.integrations.kit import refused

IGNORE = 1
"""tensorflow is to say nothing of functions that could keep something: whether the batches are the same is compared."""


class _Begun(NamedTuple):
    """An iterator that has just begun a pass: its state says how often all shuffles have drawn their seeds."""

    number: int
    state: Any


_FIRST: WeakKeyDictionary[Any, _Begun] = WeakKeyDictionary()
"""The first pass of each data set, as it was when it was seen first."""


def is_tf_data(x: Any) -> bool:
    """Whether it is a ``tf.data.Dataset``."""
    return any(kind.__name__ == "DatasetV2" and kind.__module__.startswith("tensorflow.") for kind in type(x).__mro__)


class TfBatches:
    """The batches of a ``tf.data.Dataset``, each pass of which can be begun again.

    Its shuffles draw new seeds each time that an iterator is made, so the order of a pass follows from how many were
    made before. A pass is begun from the state of an iterator of an earlier one, and so many are made from there: as in
    Keras alone, and the same on a worker that joins, in a run that resumes, and behind an evaluation. ``most``
    batches of a pass are given; None for all.

    Raises:
        DataError: it hides another data set, or its passes cannot be begun again.
    """

    name = "the tf.data.Dataset"
    cure = (
        "give shuffle and list_files a seed, or call keras.utils.set_random_seed before they are made; draw in map "
        "with tf.random.stateless_… operations; and leave deterministic=False out"
    )

    def __init__(self, dataset: Any, most: int | None = None) -> None:
        self.origin, self._most = dataset, most
        if dataset not in _FIRST:
            nodes = _nodes(dataset)
            _require_repeatable(nodes.values())
            for other in [seen for seen in _FIRST if _nodes(seen).keys() & nodes.keys()]:
                self._restored(other, _FIRST[other])  # a shuffle of both is where it was when the other one was seen
            _FIRST[dataset] = _Begun(0, self._state(iter(dataset)))
        self._newest = _FIRST[dataset]

    @property
    def batches(self) -> int | None:
        """The number of batches of a pass; None if it is not known."""
        known = int(self.origin.cardinality())
        return known if self._most is None else min(known, self._most) if known >= 0 else None

    @property
    def is_endless(self) -> bool:
        """Whether a pass never ends."""
        return int(self.origin.cardinality()) == -1 and self._most is None

    def cut(self, most: int) -> TfBatches:
        """Return the data set with no more than so many batches."""
        return TfBatches(self.origin, most)

    def first(self) -> Any:
        """Two samples, by which a model gets its shapes; read only if their shapes are not known."""
        spec = self.origin.element_spec
        known = [getattr(leaf, "shape", None) for leaf in keras.tree.flatten(spec)]
        if all(shape is not None and shape.rank and all(shape[1:].as_list()) for shape in known):
            return keras.tree.map_structure(_zeros, spec)
        batch = next(self.open_batches(0), None)
        if batch is None:
            raise DataError(f"{self.name} has no batches: check the path, the split or the filter it was made with")
        return StreamBatch.of(batch, self.name).part(slice(2))

    def open_batches(self, number: int) -> Iterator[Any]:
        """Open a pass; see :class:`~unisono.data.batch_stream.BatchStream`."""
        batches = (keras.tree.map_structure(_tensor, element) for element in self._at(number))
        return islice(batches, self._most)

    def _at(self, number: int) -> Any:
        start = self._newest if self._newest.number <= number else _FIRST[self.origin]
        iterator = self._restored(self.origin, start)
        for _ in range(number - start.number):
            iterator = iter(self.origin)
        self._newest = _Begun(number, self._state(iterator))
        return iterator

    def _restored(self, dataset: Any, begun: _Begun) -> Any:
        iterator = iter(dataset)
        _operations().DeserializeIterator(resource_handle=iterator._iterator_resource, serialized=begun.state)
        return iterator

    def _state(self, iterator: Any) -> Any:
        try:
            return _operations().SerializeIterator(
                resource_handle=iterator._iterator_resource, external_state_policy=IGNORE
            )
        except Exception as error:
            raise DataError(refused("keras.tf-state", name=self.name, error=error)) from error


def _operations() -> Any:
    return import_module("tensorflow").raw_ops


def _nodes(dataset: Any) -> dict[int, Any]:
    """A data set, and all that it is made from, by identity."""
    nodes, left = dict[int, Any](), [dataset]
    while left:
        node = left.pop()
        nodes[id(node)] = node
        left += [parent for parent in node._inputs() if id(parent) not in nodes]
    return nodes


CHANCE = {
    *("Multinomial", "ParameterizedTruncatedNormal", "RandomGamma", "RandomPoissonV2", "RandomShuffle"),
    *("RandomStandardNormal", "RandomUniform", "RandomUniformInt", "RngReadAndSkip", "TruncatedNormal"),
}
"""Operations of tensorflow that draw from one generator, in the order in which they come to it."""


def _require_repeatable(nodes: Iterable[Any]) -> None:
    """Refuse what gives other batches each time, and would be found only by chance or too late.

    Raises:
        DataError: it does.
    """
    for node in nodes:
        if getattr(node, "_rerandomize", None):
            raise DataError(refused("keras.tf-rerandomize", name=TfBatches.name))
        for function in (wrapped.function for wrapped in node._functions()):
            if any(captured.dtype.name == "variant" for captured in function.captured_inputs):
                raise DataError(refused("keras.tf-inner-data", name=TfBatches.name, function=function.name))
            if "Parallel" in type(node).__name__ and CHANCE & _operations_in(function):
                raise DataError(refused("keras.tf-parallel-draws", name=TfBatches.name, function=function.name))


def _operations_in(function: Any) -> set[str]:
    graph = function.graph.as_graph_def()
    return {node.op for nodes in (graph.node, *(inner.node_def for inner in graph.library.function)) for node in nodes}


def _zeros(spec: Any) -> torch.Tensor:
    return torch.zeros((2, *spec.shape[1:].as_list()), dtype=_dtype(spec.dtype))


def _dtype(dtype: Any) -> torch.dtype:
    known = getattr(torch, dtype.name, None)
    if not isinstance(known, torch.dtype):
        raise DataError(f"{TfBatches.name} gives {dtype.name}, which torch has not: turn it into numbers in a map")
    return known


def _tensor(leaf: Any) -> torch.Tensor | None:
    if leaf is None:
        return None
    if not hasattr(leaf, "numpy") or hasattr(leaf, "to_tensor"):
        raise DataError(refused("keras.tf-no-tensor", name=TfBatches.name, kind=type(leaf).__name__))
    dtype, array = _dtype(leaf.dtype), leaf.numpy()
    return torch.as_tensor(array.astype("float32") if dtype is torch.bfloat16 else array).to(dtype)
