"""Laws of scaling: formulas, fits that find the truth, intervals that cover it, and what follows for a user."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from studies import MadeUp
from unisono_lab.study.analysis import Prices, ReportSettings, Row, StepModel, analyzed, recommended, summarized
from unisono_lab.study.estimate import AMDAHL, GUSTAFSON, USL, Law, fitted
from unisono_lab.study.results import Cell, Results

pytestmark = pytest.mark.unit

TRIALS = 200

TRUTHS = [(AMDAHL, (0.05,)), (GUSTAFSON, (0.15,)), (USL, (0.05, 0.004))]


def measured(
    law: Law, truth: Sequence[float], noise: float = 0.0, seed: int = 0, workers: Sequence[int] = (1, 2, 4, 8, 16)
) -> dict[int, list[float]]:
    """Five runs of each number of workers."""
    chance = np.random.default_rng(seed)
    speedups = law.speedup(np.array(workers, dtype=float), np.array(truth))
    return {
        number: list(1000 * speedup * np.exp(chance.normal(0, noise, 5)))
        for number, speedup in zip(workers, speedups, strict=True)
    }


@pytest.mark.parametrize(
    ("law", "truth", "expected"),
    [
        (AMDAHL, (0.1,), 1 / (0.1 + 0.9 / 8)),
        (GUSTAFSON, (0.1,), 8 - 0.1 * 7),
        (USL, (0.1, 0.01), 8 / (1 + 0.1 * 7 + 0.01 * 8 * 7)),
    ],
)
def test_speedups_are_those_of_the_formula(law: Law, truth: Sequence[float], expected: float) -> None:
    assert law.speedup(np.array([8.0]), np.array(truth)) == pytest.approx(expected)
    assert law.speedup(np.array([1.0]), np.array(truth)) == pytest.approx(1)


@pytest.mark.parametrize(("law", "truth"), TRUTHS, ids=lambda value: getattr(value, "name", ""))
def test_fits_find_the_parameters_and_their_intervals_cover_them(law: Law, truth: Sequence[float]) -> None:
    values, covered = [], np.zeros(len(truth))
    for seed in range(TRIALS):
        fit = fitted(law, measured(law, truth, noise=0.01, seed=seed))
        assert fit is not None
        found = list(fit.parameters.values())
        values.append([one.value for one in found])
        covered += [(one.low or 0) <= true <= (one.high or 0) for one, true in zip(found, truth, strict=True)]

    assert np.median(values, axis=0) == pytest.approx(truth, rel=0.02)
    assert np.mean(np.abs(np.array(values) / truth - 1) < 0.1, axis=0) == pytest.approx(1, abs=0.1)  # within 10 %
    assert (covered / TRIALS >= 0.9).all()
    assert (covered / TRIALS <= 0.99).all()  # an interval that holds everything says nothing


@pytest.mark.slow
def test_predictions_cover_what_comes_true() -> None:
    truth, covered = 1000 / (0.05 + 0.95 / 16), 0
    for seed in range(TRIALS):
        fit = fitted(AMDAHL, measured(AMDAHL, (0.05,), noise=0.02, seed=seed, workers=(1, 2, 4)))
        assert fit is not None
        found = fit.samples_per_s(16)
        covered += (found.low or 0) <= truth <= (found.high or 0)
    assert covered / TRIALS >= 0.9


@pytest.mark.parametrize(("law", "truth"), TRUTHS, ids=lambda value: getattr(value, "name", ""))
def test_figures_without_noise_give_the_parameters_themselves(law: Law, truth: Sequence[float]) -> None:
    fit = fitted(law, measured(law, truth))

    assert fit is not None
    assert [one.value for one in fit.parameters.values()] == pytest.approx(truth, rel=1e-3)
    assert fit.rate == pytest.approx(1000, rel=1e-4)
    assert fit.misfit < 1e-3


def test_no_parameter_is_below_zero_where_scaling_is_better_than_ideal() -> None:
    fit = fitted(USL, {1: [100.0, 101.0], 2: [210.0, 212.0], 4: [450.0, 440.0]})

    assert fit is not None
    assert all(one.value >= 0 and (one.low is None or one.low >= 0) for one in fit.parameters.values())


def test_a_law_with_more_unknowns_than_numbers_of_workers_is_not_fitted() -> None:
    assert fitted(AMDAHL, {1: [1.0]}) is None
    assert fitted(USL, {1: [1.0], 2: [2.0]}) is None


def test_as_many_unknowns_as_figures_leave_no_interval() -> None:
    fit = fitted(AMDAHL, {1: [100.0], 2: [180.0]})

    assert fit is not None
    assert fit.parameters["s"].value == pytest.approx(1 / 9, rel=1e-3)
    assert (fit.parameters["s"].low, fit.samples_per_s(4).low) == (None, None)


def test_the_better_explanation_predicts() -> None:
    slower = [measured(USL, (0.0, 0.02), noise=0.005), measured(AMDAHL, (0.1,), noise=0.005)]
    for rates, law in zip(slower, (USL, AMDAHL), strict=True):
        fits = [fit for each in (AMDAHL, USL) if (fit := fitted(each, rates)) is not None]
        assert min(fits, key=lambda fit: fit.bic).law is law


# --- a step from its parts


def test_a_step_is_as_long_as_its_parts() -> None:
    model = StepModel(compute_s=0.4, rest_s=0.02, gradient_bytes=1e8, latency_s=1e-3, bandwidth=1e9)
    communication = 2 * 2 * 1e-3 + 2 * 3 / 4 * 0.1  # four workers: two turns there and back

    assert model.communication_s(4) == pytest.approx(communication)
    assert model.step_s(4, "strong", overlapped=False) == pytest.approx(0.02 + 0.1 + communication)
    assert model.step_s(4, "strong", overlapped=True) == pytest.approx(0.02 + communication)
    assert model.step_s(4, "weak", overlapped=True) == pytest.approx(0.02 + 0.4)
    assert model.speedup(4, "weak", overlapped=True) == pytest.approx(4)
    assert model.speedup(1, "strong", overlapped=False) == 1


def test_the_models_of_a_study_rest_on_what_was_measured() -> None:
    (curve,) = analyzed(MadeUp(noise=0.0).results(), ReportSettings()).curves

    assert curve.model == StepModel(0.3, 0.006, 94e6, 5e-5, 5e9)
    assert curve.step_time is not None
    bare = MadeUp().results().model_copy(update={"environment": {}, "settings": {}})
    (curve,) = analyzed(bare, ReportSettings()).curves
    assert (curve.model, curve.step_time) == (None, None)


def test_workers_that_shared_cores_are_in_no_fit_and_no_advice() -> None:
    (curve,) = analyzed(MadeUp(crowded=(4,)).results(), ReportSettings()).curves

    assert [fit.figures for fit in curve.fits] == [10]
    assert curve.advice is not None
    assert curve.advice.fastest.workers == 2
    (curve,) = analyzed(MadeUp(crowded=(2, 4)).results(), ReportSettings()).curves
    assert (curve.fits, curve.advice) == ([], None)


# --- how many workers to take


def rows(noise: float = 0.005, workers: Sequence[int] = (1, 2, 4, 8)) -> list[Row]:
    return list(summarized(MadeUp(noise=noise, workers=workers).results())["strong", "small"])


def test_workers_are_recommended_for_time_for_efficiency_and_for_cost() -> None:
    # speedups 1, 1.74, 2.53 and 2.47: a worker more costs 10 ms of communication in each step
    found = recommended(rows(), threshold=0.6, prices=Prices(worker=1.0))

    assert (found.fastest.workers, found.efficient and found.efficient.workers) == (4, 4)
    assert found.cheapest is not None
    assert found.cheapest.workers == 1


def test_waiting_may_be_dearer_than_workers() -> None:
    found = recommended(rows(), prices=Prices(worker=1.0, waiting=20.0))

    assert found.cheapest is not None
    assert found.cheapest.workers == 4


def test_workers_that_bring_less_than_the_noise_are_not_taken() -> None:
    runs = {2: (10.0, 10.4, 9.6), 4: (9.9, 9.5, 10.2), 8: (15.0, 15.1, 15.2)}
    cells = [
        Cell(workers=workers, repeat=repeat, samples=100, seconds=seconds)
        for workers, times in runs.items()
        for repeat, seconds in enumerate(times)
    ]

    assert recommended(summarized(Results(cells=tuple(cells)))["strong", ""]).fastest.workers == 2


def test_an_epoch_costs_the_hours_of_all_workers() -> None:
    costs = Prices(worker=3.0, waiting=1.0).costs(rows(noise=0.0))

    assert costs[2] == pytest.approx((1 + 3 * 2) * 50000 / 256 * 0.176 / 3600)


def test_what_is_cheapest_is_so_for_the_same_work() -> None:
    first, *others = rows(noise=0.0)
    curve = [first, *(replace(row, epoch_s=None) for row in others)]

    found = recommended(curve, prices=Prices(worker=3.0))

    assert not found.of_epochs
    assert found.costs[1] == pytest.approx(3 * 1e6 / 256 * 0.306 / 3600)
    assert found.costs[2] == pytest.approx(6 * 1e6 / 256 * 0.176 / 3600)
    assert found.cheapest is first
