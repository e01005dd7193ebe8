"""The comparison of the objects that a script has registered, between workers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from unisono.checkpoint.codec import flatten
from unisono.checkpoint.quick_digest import combined
from unisono.checkpoint.snapshot import Snapshot
from unisono.words import sum_of_words


@dataclass(frozen=True, slots=True)
class Differing:
    """The registered objects that differ between workers.

    Attributes:
        new: their digests, by step and name, each with one digest per rank.
        again: names of those that differed in the same way before the run went back: the script wants it so.
    """

    new: dict[str, list[int]]
    again: list[str]


def digests_of_objects(snapshot: Snapshot, ignored: Collection[str]) -> dict[str, int]:
    """Of the tensors that each keeps, by name. Other values may be one worker's own."""
    found = {}
    for name, state in snapshot.state["registered"].items():
        tensors = flatten(state)[1]
        if tensors and name not in ignored:
            found[name] = combined([sum_of_words(tensors[each]) for each in sorted(tensors)])
    return found


def differing(step: int, told: Sequence[tuple[dict[str, int], dict[str, list[int]]]]) -> Differing:
    """Which differ after so many steps.

    Args:
        step: the number of steps after which they were compared.
        told: the digests by name, and the differences when the run went back last, of each rank.
    """
    before = {place: seen for _, theirs in told for place, seen in theirs.items()}
    held = {
        name: [theirs[name] for theirs, _ in told] for name in told[0][0] if all(name in theirs for theirs, _ in told)
    }
    differ = {name: seen for name, seen in held.items() if len(set(seen)) > 1}
    again = [name for name, seen in differ.items() if before.get(f"{step} {name}") == seen]
    return Differing({f"{step} {name}": seen for name, seen in differ.items() if name not in again}, again)
