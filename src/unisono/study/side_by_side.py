"""Several studies as one: two models, two machines, two versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from unisono.study.results import Cell, Results


def side_by_side(studies: Sequence[tuple[str, Results]]) -> Results:
    """All cells of several studies, each under a label that tells which study it is from.

    A study's own label stays if no other study has it; if another has, the study's name stands before it. A study
    without a label is called by its name.

    Args:
        studies: each with its name.
    """
    names = _names([name for name, _ in studies])
    counts = Counter(label for _, results in studies for label in {cell.label for cell in results.cells})
    cells, settings, environment, commands, notes = [], {}, {}, [], []
    for name, (_, results) in zip(names, studies, strict=True):
        labels = {label: _label(name, label, counts) for label in {cell.label for cell in results.cells}}
        cells += [_renamed(cell, labels[cell.label]) for cell in results.cells]
        settings[name], environment[name] = results.settings, results.environment
        commands += results.commands
        notes += [f"{name}: {note}" for note in results.notes]
    return Results(
        cells=tuple(cells),
        environment=_merged(environment),
        commands=tuple(dict.fromkeys(commands)),
        settings=_merged(settings),
        notes=tuple(notes),
    )


def _names(names: Sequence[str]) -> list[str]:
    """Each once: ``study``, ``study (2)``."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
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
