"""The leaves of a batch, whatever holds them."""

from collections.abc import Callable, MutableMapping
from copy import copy
from typing import Any, TypeVar

Leaf = TypeVar("Leaf")


def replaced(tree: Any, kind: type[Leaf], replace: Callable[[Leaf], Any]) -> Any:
    """A copy of lists, tuples and mappings in which every leaf of one kind is replaced.

    Args:
        tree: of leaves; what is no list, tuple or mapping is a leaf.
        kind: of the leaves to replace.
        replace: called once for each, also for one that stands in several places: it stays one.
    """
    known: dict[int, Any] = {}

    def once(leaf: Leaf) -> Any:
        if id(leaf) not in known:
            known[id(leaf)] = replace(leaf)
        return known[id(leaf)]

    return _rebuilt(tree, kind, once)


def _rebuilt(tree: Any, kind: type[Leaf], replace: Callable[[Leaf], Any]) -> Any:
    if isinstance(tree, kind):
        return replace(tree)
    if isinstance(tree, MutableMapping):
        changed = copy(tree)  # a defaultdict, or a class of its own, stays what it is
        changed.update({key: _rebuilt(value, kind, replace) for key, value in tree.items()})
        return changed
    if isinstance(tree, list | tuple):
        parts = [_rebuilt(part, kind, replace) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return tree
