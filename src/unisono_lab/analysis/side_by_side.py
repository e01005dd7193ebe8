"""Several studies as one: two models, two machines, two versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unisono_lab.analysis.results import FORMULAS, Cell, Results


def side_by_side(studies: Sequence[tuple[str, Results]]) -> Results:
    """All cells of several studies, each under a label that tells which study it is from.

    A study's own label stays if no other study has it; if another has, the study's name stands before it. A study
    without a label is called by its name.

    Args:
        studies: each with its name.
    """
    named = list(zip(_names([name for name, _ in studies]), (results for _, results in studies), strict=True))
    counts = Counter(
        label or name for name, results in named for label in dict.fromkeys(cell.label for cell in results.cells)
    )
    found = []
    for name, results in named:
        labels = {cell.label: _label(name, cell.label, counts) for cell in results.cells}
        found.append(_Study(next(iter(labels.values())) if len(labels) == 1 else name, labels, results))
    return Results(
        cells=tuple(_renamed(cell, one.labels[cell.label]) for one in found for cell in one.results.cells),
        environment=_merged({one.name: one.results.environment for one in found}),
        commands=tuple(dict.fromkeys(command for one in found for command in one.results.commands)),
        settings=_merged({one.name: one.results.settings for one in found}),
        notes=tuple(f"{one.name}: {note}" for one in found for note in one.results.notes),
    )


@dataclass(frozen=True, slots=True)
class _Study:
    """One of the studies that are compared.

    Attributes:
        name: its label if it has but one, so that a setting of it is found by the label.
        labels: the labels in the comparison, by those in the study.
        results: the results, with the study's own labels.
    """

    name: str
    labels: Mapping[str, str]
    results: Results


def _names(names: Sequence[str]) -> list[str]:
    """Each once, and none that begins as a formula: ``study``, ``study (2)``."""
    seen: Counter[str] = Counter()
    found = []
    for each in names:
        name = each.lstrip("".join(FORMULAS)) or "study"
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return found


def _label(name: str, label: str, counts: Counter[str]) -> str:
    if not label:
        return name
    return label if counts[label] == 1 else f"{name}: {label}"


def _renamed(cell: Cell, label: str) -> Cell:
    return cell.model_copy(update={"label": label})


def _merged(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What all have in common once, the rest by study."""
    found: dict[str, Any] = {}
    for key in dict.fromkeys(key for about in parts.values() for key in about):
        values = {name: about.get(key) for name, about in parts.items()}
        alike = all(value == next(iter(values.values())) for value in values.values())
        found[key] = next(iter(values.values())) if alike else values
    return found
