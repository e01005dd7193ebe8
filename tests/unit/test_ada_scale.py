"""AdaScale: rates that follow the gain, and steps that count for what they are worth."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from unisono.adapt.batch_policies import AdaScale
from unisono.adapt.norms import GradientNorms
from unisono.adapt.view import View
from unisono.errors import JobError

pytestmark = pytest.mark.unit

SHARDS, BASE, RATE = 8, 16, 0.1
VIEW = View(0, 0, 0, SHARDS * BASE, SHARDS * BASE, SHARDS, SHARDS, 1, learning_rate=RATE)


def norms(variance: float, signal: float) -> GradientNorms:
    """What gradients give in the mean if that is the variance of a shard's gradient, and the true one's norm."""
    return GradientNorms([signal + variance] * SHARDS, [BASE] * SHARDS, signal + variance / SHARDS)


class Training:
    """Steps with a policy: what it does to the rate that the script sets."""

    def __init__(self, policy: AdaScale, **view: Any) -> None:
        self.policy, self.view, self.rates, self.is_stopped = policy, replace(VIEW, **view), [], False
        policy.before_train(self.view)
        self.carry_out()

    rates: list[float]

    def carry_out(self) -> None:
        for one in self.policy.decided():
            if one.verb == "set_learning_rate":
                assert isinstance(one.value, float)
                self.view = replace(self.view, learning_rate=one.value)
            self.is_stopped = self.is_stopped or one.verb == "stop"

    def steps(self, seen: Sequence[GradientNorms | None]) -> "Training":
        for one in seen:
            self.rates.append(self.view.learning_rate)
            self.policy.after_step(replace(self.view, norms=one))
            self.carry_out()
        return self


ONLY_NOISE, NO_NOISE, BOTH = norms(5.0, 0.0), norms(0.0, 5.0), norms(3.0, 1.0)
WORTH = (3 + 1) / (3 / SHARDS + 1)


@pytest.mark.parametrize(
    ("policy", "seen", "gain", "rise"),
    [
        (AdaScale(), ONLY_NOISE, SHARDS, SHARDS),
        (AdaScale(), NO_NOISE, 1, 1),
        (AdaScale(), BOTH, WORTH, WORTH),
        (AdaScale(rule="sqrt"), ONLY_NOISE, SHARDS, SHARDS**0.5),
        (AdaScale(base=SHARDS * BASE), BOTH, 1, 1),
    ],
    ids=["noise alone", "no noise", "both", "of Adam", "a batch as large as the base"],
)
def test_the_rate_grows_by_the_gain_or_its_root_and_steps_count_by_it(
    policy: AdaScale, seen: GradientNorms, gain: float, rise: float
) -> None:
    training = Training(policy).steps([seen] * 4)
    assert training.policy.gain == pytest.approx(gain)
    assert training.rates == pytest.approx([RATE] + 3 * [RATE * rise])
    assert training.policy.tau == pytest.approx(1 + 3 * gain)


def test_the_base_is_a_shard_of_the_batch_unless_it_is_said_and_stays_when_the_batch_grows() -> None:
    assert Training(AdaScale(base=4)).steps([ONLY_NOISE]).policy.gain == pytest.approx(SHARDS * BASE / 4)
    training = Training(AdaScale(), batch_size=4 * SHARDS * BASE).steps([ONLY_NOISE])
    assert training.policy.gain == pytest.approx(4 * SHARDS)


def test_steps_that_were_not_watched_count_by_the_gain_that_is_known() -> None:
    training = Training(AdaScale()).steps([None, BOTH, None, None])
    assert training.policy.tau == pytest.approx(2 + 2 * WORTH)


def test_variance_and_signal_are_averaged_and_only_then_divided() -> None:
    training = Training(AdaScale()).steps([ONLY_NOISE, norms(5.0, 10.0)])
    keeps = 1 - SHARDS / 1000  # of the past
    signal = 10 / (1 + keeps)
    assert training.policy.gain == pytest.approx((5 + signal) / (5 / SHARDS + signal))


def test_the_schedule_goes_by_scale_invariant_iterations_and_so_does_the_end() -> None:
    halves = AdaScale(schedule=lambda tau: 0.5 if tau >= 10 else 1.0, until=20)
    training = Training(halves).steps([ONLY_NOISE] * 3)  # tau = 0, 1, 9, and then 17
    assert training.rates == pytest.approx([RATE, 8 * RATE, 8 * RATE])
    assert training.view.learning_rate == pytest.approx(4 * RATE)
    assert not training.is_stopped
    training.steps([ONLY_NOISE])
    assert training.is_stopped


def test_a_schedule_holds_from_the_first_step_on() -> None:
    assert Training(AdaScale(schedule=lambda tau: 0.25)).steps([BOTH]).rates == [RATE / 4]


def test_a_rate_that_the_script_has_set_to_nothing_is_left_alone() -> None:
    training = Training(AdaScale(), learning_rate=0.0).steps([BOTH])
    assert training.policy.factor == 1.0
    training.view = replace(training.view, learning_rate=RATE)
    assert training.steps([BOTH]).view.learning_rate == pytest.approx(RATE * WORTH)


def test_it_goes_on_from_its_state_as_if_nothing_had_been() -> None:
    seen = [ONLY_NOISE, BOTH, NO_NOISE, BOTH, ONLY_NOISE]
    whole = Training(AdaScale()).steps(seen)
    cut = Training(AdaScale()).steps(seen[:2])
    again = AdaScale()
    again.load_state_dict(cut.policy.state_dict())
    cut.policy = again
    assert cut.steps(seen[2:]).rates == whole.rates
    assert again.state_dict() == whole.policy.state_dict()
    assert again.tau > len(seen)


@pytest.mark.parametrize("wrong", [{"base": 0}, {"until": 0}, {"rule": "cubic"}])
def test_words_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(JobError, match=f"{name}={value!r}"):
        AdaScale(**wrong)
