"""What the pictures of a study show, as matplotlib holds it."""

from typing import Any

import pytest
from matplotlib.colors import to_hex

from studies import MadeUp
from unisono_lab.report.charts import charts
from unisono_lab.report.drawing import INK, SERIES
from unisono_lab.study.analysis import ReportSettings, analyzed
from unisono_lab.study.results import BatchCurve, Results, Tried

pytestmark = pytest.mark.unit


def chart(name: str, results: Results, **batches: BatchCurve) -> Any:
    """The first axes of one of them."""
    return next(one.figure for one in charts(analyzed(results, ReportSettings(), batches)) if one.name == name).axes


def plain_loops(results: Results) -> dict[str, int]:
    """How many dashes there are of each colour."""
    (axis,) = chart("throughput-strong", results)
    dashes = [line for line in axis.lines if line.get_markersize() == 16 and len(line.get_xdata())]  # no caps
    colours = [to_hex(line.get_color()) for line in dashes]
    return {colour: colours.count(colour) for colour in colours}


def test_plain_loops_have_the_colours_of_what_they_stand_beside() -> None:
    two = MadeUp(labels=("a", "b"), plain=(1, 2)).results()

    assert plain_loops(two) == {SERIES[0]: 2, SERIES[1]: 2}
    assert plain_loops(MadeUp(plain=(1, 2)).results()) == {INK: 2}
    (axis,) = chart("throughput-strong", two)
    assert axis.get_legend_handles_labels()[1].count("plain loop, equal threads") == 1
    shared = Results(
        cells=tuple(one.model_copy(update={"label": ""}) if one.mode == "baseline" else one for one in two.cells)
    )
    assert plain_loops(shared).keys() == {INK}


def test_there_is_room_above_the_topmost_batch() -> None:
    rows = [Tried(batch=2**n, samples_per_s=1000.0 + n, peak_mib=500.0, fits=True) for n in range(4)]

    for axis in chart("batch-size", Results(), a=BatchCurve(rows=tuple(rows), largest=8, best=8)):
        low, high = axis.get_ylim()
        most = max(max(line.get_ydata()) for line in axis.lines if line.get_marker() == "o")
        assert low == 0
        assert 1.04 * most <= high <= 1.2 * most
