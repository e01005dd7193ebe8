"""What make hosts prints, from what its tests have found."""

import pytest

from hosts_table import ENGINES, EVENTS, Tried, table

pytestmark = pytest.mark.unit


def test_a_cell_shows_the_worst_of_its_tests_and_what_was_not_tried() -> None:
    found = table(
        [
            Tried("Slurm", ["kill", "drain"], "passed", 10.2),
            Tried.of(("Slurm", "kill"), "error", 5.0),
            Tried("unisono join", ["join"], "skipped", 0.1),
        ]
    )
    assert found[0].split() == list(EVENTS)
    assert found[1].split("  ")[0] == ENGINES[0]
    assert [cell.strip() for cell in found[ENGINES.index("Slurm") + 1].split("   ") if cell.strip()] == [
        *("Slurm", "FAILED (15 s)", "not tried", "not tried", "passed (10 s)"),
    ]
    assert "skipped" in found[1]
