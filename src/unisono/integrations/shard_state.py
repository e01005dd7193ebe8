"""What calls on shards change in the attributes of an object: the changes of all shards are made behind the step."""

from __future__ import annotations

import json
import struct
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import reduce
from operator import add
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from unisono.checkpoint.codec import can_keep, flatten, unflatten
from unisono.checkpoint.tensor_bytes import tensors_of
from unisono.errors import CheckpointError, Unreadable
from unisono.integrations.plain_places import (
    SHORT,
    Change,
    Path,
    PlainPlace,
    change_of,
    held_at,
    holder_of,
    inside,
    is_meter,
    lists_marked,
    new_change,
    number_of,
    plain,
    references_in,
    restore,
)
from unisono.reachable import ABSENT, is_script_class, stored_by_frameworks
from unisono.received import parse_json, value_of
from unisono.train.run import Run

MOST_PLACES, MOST_BYTES = 512, 2**22
"""The places of an object that are looked at, and the bytes of one change."""


class ShardState:
    """Plain values in the attributes of an object, which calls on shards may change.

    They are numbers, text, lists, dicts, and small objects of these. Each shard of a step finds them as they were when
    the step began. Behind the step every worker has the changes of all shards, and makes them in the order of shards:
    what was added to a number is added, what was appended to a list is appended, and where shards have assigned others
    the last one's stays. So they do not depend on the number of workers.

    Args:
        run: the run.
        thing: the object.
        root: its name in warnings.

    Attributes:
        notes: what the shards of a step have changed and said, as bytes. The run joins those of all workers.
    """

    def __init__(self, run: Run, thing: Any, root: str) -> None:
        self._states, self._device = run.inside.states, run.device
        self._thing, self._root = thing, root
        kind: type = type(thing)
        self._skipped = stored_by_frameworks(kind)
        self.notes: list[Tensor] = []
        self._words: list[Any] = []
        self._first: dict[str, Any] = {}
        self._unkept: set[Path] = set()
        self._before: list[PlainPlace] | None = None
        self._left: list[PlainPlace] = []

    def shared_state(self) -> dict[str, Any]:
        """The state that shards change, as ``run.prepare(state=…)`` takes it."""
        return {f"changes of {self._root}": (self, {"notes": "cat"})}

    def say(self, value: Any) -> None:
        """Say a plain value from within a shard: :meth:`settle` returns it on all workers."""
        self._words.append(value)

    @contextmanager
    def of_shard(self) -> Iterator[None]:
        """Compute a shard within the context."""
        if self._states.is_trying:  # the shard is computed again, with other values
            yield
            return
        if self._before is None:
            self._before = list(self._places())
            for place in self._before:
                place.count()
            for place in self._before:
                place.note_items()  # of which some are counted now
        self.put_back()
        self._words = []
        try:
            with lists_marked(self._before):
                yield
                changes = list(self._changes(self._before))
        except BaseException:  # the script may catch it, and go on
            self._end_counts()
            raise
        paths = {path for path, word, _ in changes if word != "refer"}
        self._states.combined.update(f"{self._root}.{path[0]}" for path in paths)
        new = paths.difference(place.path for place in self._before)
        self._left = [
            *(PlainPlace(path, holder_of(self._thing, path), ABSENT, ABSENT) for path in new),
            *(place for place in self._before if any(place.path[: end + 1] in paths for end in range(len(place.path)))),
        ]
        if changes or self._words:
            self.notes.append(_encoded([[[list(path), *rest] for path, *rest in changes], self._words]))

    def put_back(self) -> None:
        """Have all places as when the step began: the newest shard has changed them, and what comes now is not its."""
        left, self._left = self._left, []
        for place in left:
            place.put_back()

    def said(self) -> list[Any]:
        """What the shards of the step have said, as soon as the run has joined the notes of all workers."""
        return [word for _, said in _decoded(self.notes) for word in said] if self.notes else []

    def settle(self) -> list[Any]:
        """Make the changes of all shards of the step that is over. Return what they have said, in their order.

        Raises:
            Unreadable: another worker has sent something else.
        """
        self.put_back()
        self._end_counts()
        joined, self.notes = self.notes, []
        words = list[Any]()
        for changes, said in _decoded(joined):
            for path, *_ in changes:
                self._remember(path[0])
            _make(self._thing, changes, self._device)
            words += said
        return words

    def _end_counts(self) -> None:
        for place in self._before or ():
            place.end_count()
        self._before = None

    def state(self) -> dict[str, Any]:
        """The attributes that shards have changed."""
        attributes = vars(self._thing)
        named = {name: plain(attributes[name]) for name in sorted(self._first) if name in attributes}
        return {name: value for name, value in named.items() if can_keep(value)}

    def _remember(self, name: str) -> None:
        """Remember an attribute as it was before shards changed it; one that holds itself cannot be kept."""
        if name not in self._first:  # copied once, and not in each step
            with suppress(RecursionError):
                self._first[name] = plain(vars(self._thing).get(name, ABSENT))

    def load(self, state: Mapping[str, Any]) -> None:
        """Set these attributes; others that shards have changed become as they were at first."""
        self._before, self._left, self.notes = None, [], []
        for name in state:
            self._remember(name)
        restore(vars(self._thing), {**self._first, **state})

    def _places(self) -> Iterator[PlainPlace]:
        for kind in filter(is_script_class, type(self._thing).__mro__):
            for name, value in vars(kind).items():
                if type(value) in (int, float) and not name.startswith("__"):
                    vars(self._thing).setdefault(name, value)  # where shards would put it
        waiting, count, seen = deque[tuple[Path, Any]]([((), vars(self._thing))]), 0, set[int]()
        while waiting and count < MOST_PLACES:
            above, holder = waiting.popleft()
            for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
                place = PlainPlace.of((*above, key), holder)
                value, path = place.value, place.path
                if path in self._unkept or (not above and key in self._skipped):
                    continue
                is_nested = (isinstance(value, dict) and len(value) <= MOST_PLACES) or is_meter(value)
                place.is_again = (is_nested or isinstance(value, list | deque)) and id(value) in seen
                place.is_open = is_nested and not place.is_again
                seen.add(id(value))
                count += 1
                yield place
                if place.is_open or (isinstance(value, list) and len(value) <= SHORT and not place.is_again):
                    waiting.append((path, inside(value)))

    # -- the changes of a shard --------------------------------------------------------------------------------

    def _changes(self, before: Sequence[PlainPlace]) -> Iterator[Change]:
        replaced, references = list[Path](), list[Change]()
        known = {place.path for place in before}
        holders: dict[Path, Any] = {(): vars(self._thing)}
        for place in before:
            path, now = place.path, held_at(place.holder, place.path[-1])
            if place.is_open and now is place.value:
                holders[path] = inside(now)
            elif isinstance(now, dict) and now is place.value and len(now) != place.length and not place.is_again:
                self._leave(path, f"it has more than {MOST_PLACES} items")
            if not _lies_in(path, replaced) and (change := self._kept(change_of(place, now))) is not None:
                replaced += [path] if change[1] in ("set", "drop") else []
                yield change
                references += references_in(path, now if change[1] == "set" else None)
        for above, holder in holders.items():
            for key in [key for key in holder if (*above, key) not in known]:
                path = (*above, number_of(key))
                is_theirs = len(path) == 1 and key in self._skipped
                if is_theirs or path in self._unkept or _lies_in(path, replaced):
                    continue
                if (change := self._kept(new_change(holder, path, key))) is not None:
                    yield change
                    references += references_in(path, holder[key] if change[1] == "set" else None)
        yield from references

    def _kept(self, change: Change | None) -> Change | None:
        """The change, if others can be told of it; otherwise that is said, and the place is left alone from now on."""
        if change is None or change[1] in ("add", "drop"):
            return change
        path, reason = change[0], ""
        try:
            size = sum(tensor.nbytes for tensor in flatten(change[2])[1].values())
            reason = f"it grows by {size / 2**20:.1f} MiB" if size > MOST_BYTES else ""
        except CheckpointError as error:
            reason = str(error)
        if reason:
            self._leave(path, reason)
        return None if reason else change

    def _leave(self, path: Path, reason: str) -> None:
        """Leave a place alone from now on, and say so."""
        self._unkept.add(path)
        name = f"{self._root}.{'.'.join(map(str, path))}"
        self._states.tell(name, UNKEPT.format(path=name, reason=reason), DECIDE_NOTHING, breaks=False)


UNKEPT = "{path} changes while shards are computed, and is of this worker's shards alone, since {reason}"
DECIDE_NOTHING = "Decide and log nothing by it"


def _lies_in(path: Path, others: Sequence[Path]) -> bool:
    return any(path[: len(other)] == other for other in others)


# Making them.


def _make(thing: Any, changes: Sequence[Change], device: torch.device) -> None:
    """Make the changes of a shard; one whose place has gone is left out."""
    begun = dict[Path, Any]()  # what numbers were before this shard has added to them
    for path, word, value in changes:
        if (holder := holder_of(thing, path)) is None:
            continue
        key, placed = path[-1], tree_map_only(Tensor, lambda tensor: tensor.to(device), value)
        match word:
            case "add":
                base = 0 if (held := held_at(holder, key)) is ABSENT else held
                begun[tuple(path)], holder[key] = base, reduce(add, value, base)
            case "append":
                holder[key] = [] if (held := held_at(holder, key)) is ABSENT else held
                holder[key].extend(placed)
            case "set":
                holder[key] = placed
            case "drop":
                holder.pop(key, None)
            case "put" | "refer":
                origin, added, *rest = placed
                base = begun.get(tuple(origin), held_at(holder_of(thing, origin), origin[-1]))
                number = reduce(add, added, base)
                holder[number if rest else key] = rest[0] if rest else number


_HEAD = struct.Struct("<QQ")


def _encoded(value: Any) -> Tensor:
    skeleton, tensors = flatten(value)
    text = json.dumps(skeleton).encode()
    data = safetensors.torch.save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})
    return torch.frombuffer(bytearray(_HEAD.pack(len(text), len(data)) + text + data), dtype=torch.uint8)


def _decoded(joined: Sequence[Tensor]) -> Iterator[tuple[list[Change], list[Any]]]:
    data, start = b"".join(tensor.cpu().numpy().tobytes() for tensor in joined), 0
    while start < len(data):
        if len(data) < start + _HEAD.size:
            raise Unreadable("a worker has sent changes of a shard that have no end")
        text, tensors = _HEAD.unpack_from(data, start)
        middle = start + _HEAD.size + text
        start = middle + tensors
        if start > len(data):
            raise Unreadable("a worker has sent changes of a shard that have no end")
        value = unflatten(parse_json(data[middle - text : middle]), tensors_of(data[middle:start]))
        changes, said = value_of(list[list[Any]], value, "what a shard has changed")
        yield [value_of(tuple[list[Any], str, Any], change, "a change of a shard") for change in changes], said
